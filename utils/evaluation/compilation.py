"""Decide whether the layers are compiled: by measuring, where the evaluation is long enough to pay for it."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from boundby.inference import Predictor, compile_obstacle
from utils.errors import EnvironmentLacksError, PipelineError

LEAST_S = 600.0  # that an evaluation must take, so that compiling for the measurement is a tenth of it at most
MARGIN = 2.0  # times as much must compiling save as it costs
GUARD = 4.0  # as in `same`: twice what can flip a label, and that twice
MEASURED_TOKENS = 16384
ROUNDS = 3


@dataclass(frozen=True)
class Compilation:
    """Whether the layers are compiled, and why; None: not measured.

    `compile_s` is what each process needs first. The other seconds are the least that the same texts took.
    """

    on: bool
    reason: str
    compile_s: float | None = None
    compiled_s: float | None = None
    eager_s: float | None = None
    max_abs_logit_difference: float | None = None

    def guard(self, margin: float) -> float:
        """Return the margin below which a row is computed again, wider by what compiling changes; 0 stays 0."""
        difference = self.max_abs_logit_difference if margin and self.on else None
        return margin + GUARD * (difference or 0.0)

    def as_dict(self) -> dict[str, Any]:
        """Return the choice as the plan holds it."""
        return asdict(self)


def choose(
    setting: str, eager: Predictor, compiled: Callable[[], Predictor], texts: Sequence[str], whole_s: float
) -> Compilation:
    """Return whether `setting` (auto, off, on) has the layers compiled in an evaluation of `whole_s` per worker.

    `compiled` makes the predictor that is compiled. Raises PipelineError where `on` cannot be.
    """
    if setting == "off":
        return Compilation(False, "evaluation.compile=off")
    lacking = compile_obstacle(eager.device)
    if lacking and setting == "on":
        raise EnvironmentLacksError(f"evaluation.compile=on: {lacking}; install it, or leave it at auto")
    if lacking:
        return Compilation(False, f"not compiled: {lacking}")
    if setting == "auto" and whole_s < LEAST_S:
        return Compilation(False, f"not measured: a worker needs about {whole_s:.0f} s, it pays from {LEAST_S:.0f} s")
    found = _measured(setting, eager, compiled(), texts, whole_s)
    if setting == "on" and not found.on:
        raise PipelineError(f"evaluation.compile=on: {found.reason}; leave it at auto")
    return found


def _measured(setting: str, eager: Predictor, compiled: Predictor, texts: Sequence[str], whole_s: float) -> Compilation:
    if compiled.check.compile_s is None:
        return Compilation(False, compiled.doubts[-1])
    tokens = eager.tokenize(texts)
    expected, found = eager.predict_tokens(tokens), compiled.predict_tokens(tokens)
    different = int((expected.labels != found.labels).sum())
    if different:
        return Compilation(False, f"not compiled: {different} of {len(texts)} texts get another label")
    rounds = [[each.predict_tokens(tokens).seconds.compute_s for each in (eager, compiled)] for _ in range(ROUNDS)]
    eager_s, compiled_s = (min(each) for each in zip(*rounds, strict=True))
    cost_s, saved_s = compiled.check.compile_s, whole_s * (1 - compiled_s / eager_s)
    pays = saved_s > MARGIN * cost_s
    told = f"compiling takes {cost_s:.0f} s and saves {saved_s:.0f} s of about {whole_s:.0f} s per worker"
    if setting == "on":
        told = f"evaluation.compile=on: {told}"
    elif not pays:
        told = f"{told}, less than {MARGIN:g} times that"
    return Compilation(
        pays or setting == "on",
        told,
        cost_s,
        compiled_s,
        eager_s,
        float(np.abs(expected.logits - found.logits).max()),
    )
