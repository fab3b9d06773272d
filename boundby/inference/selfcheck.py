"""Hold a strategy against the model's own forward before it is used."""

import math
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch

from boundby.inference.batches import Tokens
from boundby.inference.packing import UnsupportedAttention
from boundby.inference.precision import LEAST_TOLERANCE, Precision, calibrate, matmul_effect, tolerance
from boundby.inference.reference import in_dtype, one_by_one
from boundby.inference.strategies import Strategy, candidates
from boundby.machine import is_out_of_memory, raise_if_lost, release_memory

CHECK_ROWS = 64
CHECK_BUDGET = 1024  # small enough that 64 texts make several batches of mixed lengths
# Times as far from the stock forward in the same precision as that is from float32: two ways that round alike are 1.4
# times as far from each other, if their errors have nothing in common. The error of one product is allowed in any case.
OWN_ERRORS = 3.0
# What a model raises that does not have a way, or a precision, in which it is tried.
CANNOT_RUN = (RuntimeError, ValueError, TypeError, KeyError, AttributeError, IndexError)


@dataclass(frozen=True)
class Refusal:
    """Why a faster strategy was not taken.

    `kind`: `unsupported` attention setting; `failed` with another error; `differs` from the stock forward;
    `own_batches`: even the model's own batches differ; `not_compiled`.
    """

    strategy: str
    kind: Literal["unsupported", "failed", "differs", "own_batches", "not_compiled"]
    text: str


@dataclass(frozen=True)
class SelfCheck:
    """A strategy beside one stock forward per text in float32. Differences are of logits; `allowed` is in their unit.

    `largest_logit` is the stock forward's. `matmul_effect` is the error of a matmul in this precision against float64,
    as a share of its largest element; `allowed` follows from it. A reduced precision is also held against the stock
    forward in that precision: `own_difference`, `own_allowed`, None where there is none. `refusals`: faster strategies
    that could not be taken. `compile_s`: seconds of compiling and a first pass, None where nothing is compiled.
    """

    strategy: str
    trim: bool
    rows: int
    same_labels: int
    max_abs_difference: float
    allowed: float
    matmul_effect: float
    largest_logit: float
    refusals: tuple[Refusal, ...] = ()
    compile_s: float | None = None
    own_difference: float | None = None
    own_allowed: float | None = None

    @property
    def doubts(self) -> tuple[str, ...]:
        """The texts of the refusals."""
        return tuple(refusal.text for refusal in self.refusals)


def checked_strategy(
    model: Any,
    tokenizer: Any,
    tokens: Tokens,
    precision: Precision,
    *,
    packs: bool = True,
    trims: bool = True,
    compiles: bool = False,
) -> tuple[Strategy, SelfCheck]:
    """Return the first strategy whose logits match the stock forward's, and the comparison.

    Where a GPU has no memory for a float32 copy, the model itself is the reference. The last resort, the stock forward,
    is taken whatever it differs by. Raises ValueError where a converted model differs by more than allowed.
    """
    rows = check_rows(tokens.lengths)
    exact = _in_float32(model, tokens, rows)
    reference = one_by_one(model, tokens, rows) if exact is None else exact
    effect = matmul_effect(precision, model.device)
    largest = float(np.abs(reference).max())
    allowed = tolerance(effect) * largest
    own = None if exact is None else _stock(model, tokens, rows, precision)
    own_allowed = math.inf if own is None else allowed_of_own(own, reference, effect)
    refusals: list[Refusal] = []
    offered = candidates(model, tokenizer, precision, trims, packs)
    for name, make in offered:
        is_last = name == offered[-1][0] and precision.session is None
        try:
            strategy = _calibrated(make, tokens, precision)
            logits = logits_of(strategy, tokens, rows, CHECK_BUDGET, precision)
        except CANNOT_RUN as error:
            raise_if_lost(error)
            if is_last or precision.session:
                raise
            unsupported = isinstance(error, UnsupportedAttention)
            why = str(error) if unsupported else f"the model cannot be run that way ({type(error).__name__}: {error})"
            refusals.append(Refusal(name, "unsupported" if unsupported else "failed", f"not {name}: {why}"))
            continue
        difference, own_difference = _apart(logits, reference), 0.0 if own is None else _apart(logits, own)
        if (difference <= allowed and own_difference <= own_allowed) or is_last:  # NaN is not: it compares as false
            if not difference <= allowed:
                text = (
                    f"batched logits differ from one-by-one ones by up to {difference:.3g}, allowed are {allowed:.3g}"
                )
                refusals.append(Refusal(strategy.name, "own_batches", f"{text}: the model's own batches do"))
            check = SelfCheck(
                strategy=strategy.name,
                trim=strategy.trims,
                rows=len(rows),
                same_labels=int((reference.argmax(axis=1) == logits.argmax(axis=1)).sum()),
                max_abs_difference=difference,
                allowed=allowed,
                matmul_effect=effect,
                largest_logit=largest,
                refusals=tuple(refusals),
                own_difference=None if own is None else own_difference,
                own_allowed=None if own is None else own_allowed,
            )
            if not compiles:
                return strategy, check
            make = dict(candidates(model, tokenizer, precision.to_compile, trims, packs))[name]
            compiled = _compiled(make, tokens, rows, logits, precision, min(allowed, own_allowed))
            if isinstance(compiled, str):
                refusal = Refusal(strategy.name, "not_compiled", compiled)
                return strategy, replace(check, refusals=(*check.refusals, refusal))
            return compiled[0], replace(check, compile_s=compiled[1])
        apart, most, beside = difference, allowed, ""
        if difference <= allowed:
            apart, most, beside = own_difference, own_allowed, f" in {precision.name}"
        text = (
            f"not {name}: its logits differ from the stock forward's{beside} by up to {apart:.3g} on {len(rows)} "
            f"texts, allowed are {most:.3g}"
        )
        refusals.append(Refusal(name, "differs", text))
    raise ValueError("; ".join(refusal.text for refusal in refusals))


def _in_float32(model: Any, tokens: Tokens, rows: Sequence[int]) -> np.ndarray | None:
    """Return the logits of the stock forward in float32, text by text; None where memory does not hold the copy."""
    try:
        return one_by_one(in_dtype(model, torch.float32), tokens, rows)
    except RuntimeError as error:
        if not is_out_of_memory(error) or next(model.parameters()).dtype == torch.float32:
            raise
    release_memory(model.device)  # outside the except block: its traceback holds the tensors
    return None


def _stock(model: Any, tokens: Tokens, rows: Sequence[int], precision: Precision) -> np.ndarray | None:
    """Return the stock forward's logits in this precision, text by text; None for engines, int8, prepacked weights."""
    is_coarser = precision.dtype != torch.float32 or precision.fast_products
    if precision.session or not is_coarser:
        return None
    with precision.active(model.device):
        return one_by_one(in_dtype(model, precision.dtype), tokens, rows)


def allowed_of_own(own: np.ndarray, exact: np.ndarray, effect: float) -> float:
    """Return how far logits may be from the stock forward's in their precision; `exact` are in float32."""
    return max(max(effect, LEAST_TOLERANCE) * float(np.abs(exact).max()), OWN_ERRORS * _apart(own, exact))


def _apart(logits: np.ndarray, others: np.ndarray) -> float:
    return float(np.abs(logits - others).max())


def _calibrated(make: Callable[[], Strategy], tokens: Tokens, precision: Precision) -> Strategy:
    """Return the strategy; where its layers compute in eight bits, their ranges are those of all these texts."""
    strategy = make()
    every = range(len(tokens.ids))
    calibrate(strategy.model, lambda: logits_of(strategy, tokens, every, CHECK_BUDGET, precision))
    return strategy


def _compiled(
    make: Callable[[], Strategy],
    tokens: Tokens,
    rows: Sequence[int],
    expected: np.ndarray,
    precision: Precision,
    allowed: float,
) -> tuple[Strategy, float] | str:
    """Return the strategy with its layers compiled and the seconds that took; or why it stays as it is.

    The first batch, for which torch compiles, is the same in every process.
    """
    start = time.perf_counter()
    try:
        strategy = _calibrated(make, tokens, precision)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # those of torch's compiler are not ours to cure
            strategy.compile()
            logits = logits_of(strategy, tokens, rows, CHECK_BUDGET, precision)
    except Exception as error:  # any type: it is a compiler
        raise_if_lost(error)
        return f"not compiled: {type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    difference = _apart(logits, expected)
    if not difference <= allowed:
        return f"not compiled: logits then differ by up to {difference:.3g}, allowed are {allowed:.3g}"
    return strategy, time.perf_counter() - start


def check_rows(lengths: np.ndarray) -> list[int]:
    """Return up to 64 rows, spread evenly over the lengths, the shortest and the longest among them."""
    order = np.argsort(lengths, kind="stable")
    indexes = np.unique(np.linspace(0, len(order) - 1, min(CHECK_ROWS, len(order))).round().astype(int))
    return [int(row) for row in order[indexes]]


def logits_of(strategy: Strategy, tokens: Tokens, rows: Sequence[int], budget: int, precision: Precision) -> np.ndarray:
    """Return the logits of the texts at `rows` as the strategy batches and computes them."""
    chosen = Tokens([tokens.ids[row] for row in rows], None)
    logits = np.empty(0)
    with torch.inference_mode(), precision.active(strategy.device):
        for batch in strategy.batches(chosen.lengths, budget):
            part = strategy.logits(chosen, batch).cpu().numpy()
            if not logits.size:
                logits = np.empty((len(rows), part.shape[1]), dtype=np.float32)
            logits[batch] = part
    return logits
