"""Choose tokens per batch, and whether layers are compiled, by measuring where a long evaluation pays for it."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from boundby.device import is_host
from boundby.inference import Predictor, compile_obstacle, one_by_one, search_token_budget
from boundby.inference.planning import BUDGET_ROUNDS as SEARCH_ROUNDS
from boundby.inference.planning import token_budgets
from boundby.inference.reference import in_dtype
from boundby.inference.selfcheck import check_rows
from utils.errors import EnvironmentLacksError, PipelineError
from utils.evaluation.plan import Budget, Compilation

SAMPLE_ROWS = 2048
ALONE = 16  # texts that are timed one by one
BATCHES = 2  # full ones of the largest budget that the texts of a search must make
SHARE, MOST_S = 0.02, 30.0  # of the evaluation, and at most, that the search may take
LEAST_BUDGET = 256


def seconds_per_token(predictor: Predictor, texts: Sequence[str]) -> float:
    """Return about how long a token takes in a full batch of these texts, drawn at random; the first pass is cold.

    A few texts alone would not fill a large GPU, on which a token would seem to take several times as long.
    """
    some = full_batch(predictor, texts)
    predictor.predict(some)
    prediction = predictor.predict(some)
    return prediction.seconds.compute_s / prediction.useful_tokens


def seconds_alone(model: Any, predictor: Predictor, texts: Sequence[str]) -> float:
    """Return about how long a text takes by itself in float32, from a few of them, the first of which is cold."""
    tokens, exact = predictor.tokenize(texts[: ALONE + 1]), in_dtype(model, torch.float32)
    one_by_one(exact, tokens, [0])
    start = time.perf_counter()
    one_by_one(exact, tokens, range(len(tokens.ids)))
    return (time.perf_counter() - start) / len(tokens.ids)


def full_batch(predictor: Predictor, texts: Sequence[str]) -> list[str]:
    """Return texts with as many tokens as one batch may have, or one text more; all where they have fewer together."""
    order = np.random.default_rng(0).permutation(len(texts))
    tokens = np.cumsum(predictor.tokenize(texts).lengths[order])
    return [texts[row] for row in order[: int(np.searchsorted(tokens, predictor.token_budget)) + 1]]


def guard_in_full_batches(predictor: Predictor, model: Any, texts: Sequence[str], guard: Callable[..., float]) -> float:
    """Return the margin below which a row is computed again: what `guard` makes of the largest difference and logit.

    Some texts of a batch as full as those of the evaluation are computed one by one, too: its products may be of other
    kernels than those of the few texts on which a precision was chosen.
    """
    batch = full_batch(predictor, texts)
    tokens = predictor.tokenize(batch)
    rows = check_rows(tokens.lengths)
    found = predictor.with_guard_margin(0.0).predict_tokens(tokens).logits[rows]
    reference = one_by_one(in_dtype(model, torch.float32), tokens, rows)
    return guard(float(np.abs(found - reference).max()), float(np.abs(reference).max()))


def choose_budget(predictor: Predictor, texts: Sequence[str], whole_s: float, token_s: float) -> Budget:
    """Return the fastest budget for texts such as these, or the usual one where a search would not pay.

    `whole_s` is about what an evaluation of all texts takes.
    """
    order = np.random.default_rng(0).permutation(len(texts))  # else the first texts would stand for all
    texts = [texts[row] for row in order]
    lengths = predictor.tokenize(texts).lengths
    budgets = token_budgets(predictor.device)
    cumulative = np.cumsum(lengths)
    if cumulative[-1] < BATCHES * max(budgets):
        return _usual(predictor, texts, cumulative, "not measured: all texts together are too few")
    enough = int(np.searchsorted(cumulative, BATCHES * max(budgets))) + 1
    search_s = token_s * int(cumulative[enough - 1]) * len(budgets) * (SEARCH_ROUNDS + 1)
    if search_s > min(SHARE * whole_s, MOST_S):
        reason = f"not measured: a search would take {search_s:.1f} s of about {whole_s:.1f} s"
        return _usual(predictor, texts, cumulative, reason)
    best = search_token_budget(predictor, texts[:enough])
    reason = f"the smallest that is as good as the fastest on {enough} texts"
    return Budget(best.token_budget, reason, {str(budget): seconds for budget, seconds in best.seconds.items()})


def _usual(predictor: Predictor, texts: Sequence[str], cumulative: np.ndarray, reason: str) -> Budget:
    """Return the usual budget, or the largest half, quarter, … of it whose batches fit into the memory of a GPU."""
    budget = predictor.token_budget
    while not is_host(predictor.device) and budget > LEAST_BUDGET:
        full = texts[: int(np.searchsorted(cumulative, budget)) + 1]
        if not predictor.with_token_budget(budget).predict(full).halvings:
            break
        budget //= 2
    return Budget(budget, reason if budget == predictor.token_budget else f"{2 * budget} tokens ran out of memory")


LEAST_S = 600.0  # that an evaluation must take, so that compiling for the measurement is a tenth of it at most
MARGIN = 2.0  # times as much must compiling save as it costs
MEASURED_TOKENS = 16384
ROUNDS = 3


def choose_compilation(
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
    measured = _measured(setting, eager, compiled(), texts, whole_s)
    if setting == "on" and not measured.on:
        raise PipelineError(f"evaluation.compile=on: {measured.reason}; leave it at auto")
    return measured


def _measured(setting: str, eager: Predictor, compiled: Predictor, texts: Sequence[str], whole_s: float) -> Compilation:
    if compiled.check.compile_s is None:
        return Compilation(False, compiled.doubts[-1])
    tokens = eager.tokenize(texts)
    expected, found = eager.predict_tokens(tokens), compiled.predict_tokens(tokens)
    different = int((expected.labels != found.labels).sum())
    if different:
        return Compilation(False, f"not compiled: {different} of {len(texts)} texts get another label")
    ways = (eager, compiled)
    rounds = [[predictor.predict_tokens(tokens).seconds.compute_s for predictor in ways] for _ in range(ROUNDS)]
    eager_s, compiled_s = map(min, zip(*rounds, strict=True))
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
