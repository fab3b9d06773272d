"""Choose tokens per batch, and whether layers are compiled, by measuring where it is predicted to save what it takes.

Savings are predicted from the measured limits of the machine, a smaller batch, a trial of step 02, or a published
measurement.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from boundby.formatting import Missing
from boundby.inference import BUDGET_ROUNDS as SEARCH_ROUNDS
from boundby.inference import (
    Predictor,
    can_prepack,
    check_rows,
    compile_seconds,
    in_dtype,
    one_by_one,
    search_token_budget,
    token_budgets,
)
from boundby.machine import Ceilings, compile_obstacle, fast_float32_precision, is_host
from boundby.timing import estimate
from boundby.work import Interval
from utils.command import EnvironmentLacksError, PipelineError
from utils.evaluation.plan import Budget, Compilation

SAMPLE_ROWS = 2048
ALONE = 16  # texts that are timed one by one
BATCHES = 2  # full ones of the largest budget that the texts of a search must make
LEAST_BUDGET = 256
SMALLER = 4  # times fewer tokens in the batch that tells what a batch costs beside its tokens
# Shares of the time that prepacked weights save on a CPU: 0.11 to 0.16 were measured (docs/decisions/inference.md, and
# docs/measurements/2026-11-23-cpu-variants.md).
PREPACKED = Interval(0.12, 0.10, 0.16)
# What compiled layers save on a CPU: gains of 0.68, 1.01, 1.03 and 1.30 were measured
# (docs/decisions/evaluation.md). The value is what that is worth where they are taken only if they save.
COMPILED_ON_HOST = Interval(0.07, -0.47, 0.23)


@dataclass(frozen=True)
class Known:
    """What was measured before the plan: the limits of the machine, and what compiled layers gained on one batch."""

    limits: Callable[[], Ceilings | None] = lambda: None
    compiled: Interval | None = None


@dataclass(frozen=True)
class Load:
    """The work of an evaluation, or a worker's share of it: its tokens, and the seconds that one takes in a batch."""

    tokens: float
    token_s: float

    @property
    def seconds(self) -> float:
        """About what it takes."""
        return self.tokens * self.token_s

    def shared(self, workers: int) -> "Load":
        """Return the share of each of so many workers."""
        return Load(self.tokens / workers, self.token_s)


def product_seconds(model: Any, tokens: float, flops_per_s: float) -> float:
    """Return the least time of the products of all layers over so many tokens, at this rate; attention is not in it."""
    modules = getattr(model, "base_model", model).modules()
    tensors = [getattr(module, "weight", None) for module in modules if type(module) is not torch.nn.Embedding]
    matrices = [tensor for tensor in tensors if isinstance(tensor, torch.Tensor) and tensor.dim() > 1]
    return 2.0 * sum(matrix.numel() for matrix in matrices) * tokens / flops_per_s


def saved_by_kernels(model: Any, device: torch.device, load: Load, limits: Ceilings | None) -> Interval | Missing:
    """Return the seconds that other kernels of float32 are predicted to save of the load.

    Reduced-precision matmul saves by the ratio of the measured limits, prepacked weights what they saved elsewhere.
    """
    whole_s = load.seconds
    known = [PREPACKED.times(whole_s)] if can_prepack(device) else []
    in_use = limits.configured("float32") if limits else None
    wanted = fast_float32_precision(device)
    coarser = (
        [ceiling for ceiling in limits.compute if (ceiling.dtype, ceiling.precision) == ("float32", wanted)]
        if limits
        else []
    )
    if in_use and coarser and coarser[0].flops_per_s > in_use.flops_per_s:
        fast = coarser[0]
        products_s = min(whole_s, product_seconds(model, load.tokens, in_use.flops_per_s))
        known.append(
            Interval(
                products_s * (1 - in_use.flops_per_s / fast.flops_per_s),
                max(0.0, products_s * (1 - in_use.flops_per_s / fast.low)),
                whole_s * (1 - in_use.low / fast.flops_per_s),
            )
        )
    if known:
        return max(known, key=lambda saved: saved.value)
    return Missing(
        "no faster products of float32 were measured here" if limits else "the limits of this machine are not known"
    )


def saved_by_compiling(predictor: Predictor, model: Any, load: Load, known: Known) -> Interval | Missing:
    """Return the seconds that compiled layers are predicted to save of the load.

    By their gain in step 02; else on a CPU by what they saved elsewhere, on a GPU by half of all but the matmul.
    """
    if known.compiled:
        ends = (known.compiled.value, known.compiled.low, known.compiled.high)
        return Interval(*(load.seconds * (1 - 1 / gain) for gain in ends))
    if is_host(predictor.device):
        return COMPILED_ON_HOST.times(load.seconds)
    limits = known.limits()
    ceiling = limits and (
        limits.best("float32") if predictor.options.precision == "float32_fast" else limits.configured(predictor.dtype)
    )
    if not ceiling:
        return Missing(f"the limit of products in {predictor.dtype} is not known")
    rest_s = max(0.0, load.seconds - product_seconds(model, load.tokens, ceiling.flops_per_s))
    return Interval(rest_s / 2, 0.0, rest_s)


def seconds_per_token(predictor: Predictor, texts: Sequence[str]) -> float:
    """Return about how long a token takes in a full, warm batch of these texts, drawn at random."""
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

    Full batches may use other kernels than the sample, so some of their texts are computed one by one, too.
    """
    batch = full_batch(predictor, texts)
    tokens = predictor.tokenize(batch)
    rows = check_rows(tokens.lengths)
    logits = predictor.with_guard_margin(0.0).predict_tokens(tokens).logits[rows]
    reference = one_by_one(in_dtype(model, torch.float32), tokens, rows)
    return guard(float(np.abs(logits - reference).max()), float(np.abs(reference).max()))


def choose_budget(predictor: Predictor, texts: Sequence[str], load: Load) -> Budget:
    """Return the fastest budget for texts such as these, or the usual one where a search would not pay."""
    whole_s, token_s = load.seconds, load.token_s
    order = np.random.default_rng(0).permutation(len(texts))  # else the first texts would stand for all
    texts = [texts[row] for row in order]
    lengths = predictor.tokenize(texts).lengths
    cumulative = np.cumsum(lengths)
    budgets = [budget for budget in token_budgets(predictor.device) if BATCHES * budget <= cumulative[-1]]
    if predictor.token_budget not in budgets:
        return _usual(predictor, texts, cumulative, "not measured: all texts together are too few")
    enough = int(np.searchsorted(cumulative, BATCHES * max(budgets))) + 1
    search_s = token_s * int(cumulative[enough - 1]) * len(budgets) * (SEARCH_ROUNDS + 1)
    reason = f"not measured: a search would take {search_s:.1f} s of about {whole_s:.1f} s"
    if search_s >= whole_s:
        return _usual(predictor, texts, cumulative, reason)
    saved_s = whole_s * _saved_by_budget(predictor, texts, budgets, token_s)
    if search_s >= saved_s:
        return _usual(predictor, texts, cumulative, f"{reason}, and is predicted to save {saved_s:.1f} s")
    best = search_token_budget(predictor, texts[:enough], budgets)
    reason = f"the smallest that is as good as the fastest on {enough} texts"
    return Budget(best.token_budget, reason, {str(budget): seconds for budget, seconds in best.seconds.items()})


def _saved_by_budget(predictor: Predictor, texts: Sequence[str], budgets: Sequence[int], token_s: float) -> float:
    """Return the share of the time that the best budget is predicted to save.

    What a token takes more in a smaller batch is the cost of a batch, which larger ones pay less often.
    """
    usual = predictor.token_budget
    smaller_s = seconds_per_token(predictor.with_token_budget(usual // SMALLER), texts)
    of_batch_s = max(0.0, smaller_s - token_s) * usual / (SMALLER - 1)
    of_token_s = max(0.0, token_s - of_batch_s / usual)
    least_s = min(smaller_s, of_token_s + of_batch_s / max(budgets))
    return max(0.0, 1 - least_s / token_s)


def _usual(predictor: Predictor, texts: Sequence[str], cumulative: np.ndarray, reason: str) -> Budget:
    """Return the usual budget, or the largest half, quarter, … of it whose batches fit into the memory of a GPU."""
    budget = predictor.token_budget
    while not is_host(predictor.device) and budget > LEAST_BUDGET:
        full = texts[: int(np.searchsorted(cumulative, budget)) + 1]
        if not predictor.with_token_budget(budget).predict(full).halvings:
            break
        budget //= 2
    return Budget(budget, reason if budget == predictor.token_budget else f"{2 * budget} tokens ran out of memory")


MEASURED_TOKENS = 16384
ROUNDS = 5
PASSES = 2 * (ROUNDS + 1)  # over the measured tokens: both ways, and once for their labels


def choose_compilation(
    setting: str,
    eager: Predictor,
    compiled: Callable[[], Predictor],
    texts: Sequence[str],
    load: Load,
    foreseen: Callable[[], Interval | Missing],
) -> Compilation:
    """Return whether `setting` (auto, off, on) has the layers compiled for the load of a worker.

    `compiled` makes the compiled predictor, `foreseen` the seconds it is predicted to save. Raises PipelineError where
    `on` cannot be.
    """
    if setting == "off":
        return Compilation(False, "evaluation.compile=off")
    lacking = compile_obstacle(eager.device)
    if lacking and setting == "on":
        raise EnvironmentLacksError(f"evaluation.compile=on: {lacking}; install it, or leave it at auto")
    if lacking:
        return Compilation(False, f"not compiled: {lacking}")
    whole_s = load.seconds
    cost_s = compile_seconds(eager.device) + PASSES * MEASURED_TOKENS * load.token_s
    if setting == "auto" and whole_s <= cost_s:
        return Compilation(False, f"not measured: a worker needs about {whole_s:.0f} s, trying it about {cost_s:.0f} s")
    saved = foreseen() if setting == "auto" else None
    if isinstance(saved, Missing):
        return Compilation(False, f"not measured: {saved.reason}")
    if saved and saved.value <= cost_s:
        cost = f"trying it takes about {cost_s:.0f} s, and it is predicted to save {_seconds(saved)} of {whole_s:.0f} s"
        return Compilation(False, f"not measured: {cost} per worker")
    measured = _measured(setting, eager, compiled(), texts, whole_s)
    if setting == "on" and not measured.on:
        raise PipelineError(f"evaluation.compile=on: {measured.reason}; leave it at auto")
    return measured


def _measured(setting: str, eager: Predictor, compiled: Predictor, texts: Sequence[str], whole_s: float) -> Compilation:
    if compiled.check.compile_s is None:
        return Compilation(False, compiled.doubts[-1])
    tokens = eager.tokenize(texts)
    expected, given = eager.predict_tokens(tokens), compiled.predict_tokens(tokens)
    different = int((expected.labels != given.labels).sum())
    if different:
        return Compilation(False, f"not compiled: {different} of {len(texts)} texts get another label")
    ways = (eager, compiled)
    rounds = [[predictor.predict_tokens(tokens).seconds.compute_s for predictor in ways] for _ in range(ROUNDS)]
    eager_s, compiled_s = map(min, zip(*rounds, strict=True))
    gain = Interval.of(estimate([before / after for before, after in rounds]))
    saved = Interval(*(whole_s * (1 - 1 / factor) for factor in (gain.value, gain.low, gain.high)))
    cost_s = compiled.check.compile_s
    pays = saved.low > cost_s
    reason = f"compiling takes {cost_s:.0f} s and saves {_seconds(saved)} of about {whole_s:.0f} s per worker"
    if setting == "on":
        reason = f"evaluation.compile=on: {reason}"
    elif not pays:
        reason = f"{reason}, not surely more than that"
    return Compilation(
        pays or setting == "on",
        reason,
        cost_s,
        compiled_s,
        eager_s,
        float(np.abs(expected.logits - given.logits).max()),
    )


def _seconds(saved: Interval) -> str:
    return f"{saved.value:.0f} s [{saved.low:.0f}, {saved.high:.0f}]"
