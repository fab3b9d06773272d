"""Make every variant, and time them in turns: the same part of the texts by each, then the next part.

A part has groups of texts of similar length, short and long, in the order of arrival. All variants go through it, in a
random order, before the next part: a ratio is of the same texts within the same minute. While intervals are wide and
time is left, the parts begin anew. Labels are those of the first time.
"""

import gc
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import cycle

import numpy as np
import torch

from boundby.bound import attention_backend
from boundby.formatting import Missing, first_line
from boundby.machine import (
    DeviceLostError,
    MemoryMeter,
    MemoryUse,
    is_out_of_memory,
    naming_loss,
    raise_if_lost,
    release_memory,
)
from boundby.timing import Timer, estimate
from boundby.work import Interval
from utils.command import PipelineError
from utils.variants.ways import PACKED, REFERENCE, Refused, Variant, Way, Workshop, called

LEAST_ROUNDS, MOST_ROUNDS = 5, 15
FEWEST_ROUNDS = 2  # also where time is up before: one round gives no interval
LEAST_PART = 16  # texts
MOST_ALIKE = 64  # texts of a group: with more, a part has too few of them, and batches as they come too little to pad
LEAST_GROUPS = 8  # of a part, if it has as many texts
NARROW = 0.02  # half of the interval as a share of the factor, of every variant, with which no more rounds are made
LATENCY_TEXTS = 5  # in each round, one at a time
ATTENTION_TEXTS = 8  # of many lengths, by whose operators attention is named
SETUP_SHARE = 0.5  # of the seconds that may go into making variants
SPARE = 0.8  # of the seconds that are left may the parts take, by what the variants took on the probe


@dataclass(frozen=True)
class Refusal:
    """Why there is nothing to tell of a variant; `lost` where the GPU was lost, and nothing can follow."""

    why: str
    text: str
    lost: DeviceLostError | None = None


@dataclass
class Measured:
    """A variant as it was timed; `seconds` and `single_s` have an entry for each round.

    `one_off_s`: making it, and what the first pass over the probe took longer than the second. `extra_bytes`: the rise
    of the memory of the process, or of the GPU.
    """

    variant: Variant
    way: Way
    one_off_s: float
    probe_s: float
    extra_bytes: int | None
    attention: str | Missing = Missing("it was not looked at")
    seconds: list[float] = field(default_factory=list)
    single_s: list[float] = field(default_factory=list)
    logits: list[np.ndarray] = field(default_factory=list)

    def texts_per_s(self, sizes: Sequence[int]) -> Interval:
        """Return the throughput over parts of these sizes."""
        return Interval.of(estimate([size / spent for size, spent in zip(sizes, self.seconds, strict=False)]))

    def over(self, other: "Measured") -> Interval:
        """Return the factor of the throughput of `other`, from the rounds of both."""
        return Interval.of(estimate([theirs / own for theirs, own in zip(other.seconds, self.seconds, strict=True)]))


def make(
    variants: Sequence[Variant],
    shop: Workshop,
    timer: Timer,
    deadline: float,
    note: Callable[[str], None],
    given_up: Sequence[str] = (),
) -> tuple[list[Measured], dict[str, Refusal]]:
    """Return the variants that could be made, warm on the probe, and why others could not or are `given_up`.

    Raises what the reference raises.
    """
    made: list[Measured] = []
    refused: dict[str, Refusal] = {}
    for variant in variants:
        left = SETUP_SHARE * (deadline - timer.clock())
        try:
            variant.require(shop)
            waits = refused.get(variant.base or "")  # for what that one makes
            if variant.name not in (REFERENCE, PACKED) and (
                left <= variant.setup_s or (waits and waits.why == "over_budget")
            ):
                took = f": making it takes about {variant.setup_s:.0f} s" if variant.setup_s else ""
                raise Refused("over_budget", f"time was up before its turn{took}; variants.max_seconds gives more")
            if variant.words in given_up:
                raise Refused("failed", "it has lost the GPU before, and is not tried again")
            with naming_loss(variant.words):
                made.append(_made(variant, shop, timer))
        except Exception as error:  # torch, a compiler, or files of any kind may raise anything
            raise_if_lost(error)
            if variant.name == REFERENCE:
                raise
            refused[variant.name] = refusal(error)
            gc.collect()
            note(f"{variant.words}: {refused[variant.name].text}")
        else:
            note(f"{called(variant, made[-1].way)}: ready after {made[-1].one_off_s:.1f} s")
    return made, refused


def refusal(error: Exception) -> Refusal:
    """Return the reason that an error gives."""
    if isinstance(error, Refused):
        return Refusal(error.kind, str(error))
    if is_out_of_memory(error):
        return Refusal("out_of_memory", "there is not enough memory for it")
    said = (str(error).strip() or type(error).__name__).splitlines()[0]
    return Refusal(
        "failed", said if isinstance(error, PipelineError | ValueError) else f"{type(error).__name__}: {said}"
    )


def _made(variant: Variant, shop: Workshop, timer: Timer) -> Measured:
    device = shop.loaded.device
    start = timer.clock()
    way = variant.make(shop)
    made_s = timer.clock() - start
    with way.setting():
        cold_s = timer.isolated(lambda: _finite(way, shop.probe))
        release_memory(device)
        meter = MemoryMeter(device)
        meter.start()
        before = meter.stop()
        probe_s = timer.isolated(lambda: way.logits(shop.probe))
        after = meter.stop()
        attention = _attention(way, shop.probe[:ATTENTION_TEXTS])
    one_off_s = way.earlier_s + made_s + max(0.0, cold_s - probe_s)
    rise = way.rise(shop.probe) if way.rise else _rise(before, after)
    return Measured(variant, way, one_off_s, probe_s, rise, attention)


def _attention(way: Way, texts: Sequence[str]) -> str | Missing:
    """Return what computes the attention of the texts; an engine has operators that torch does not see."""
    try:
        with torch.inference_mode():
            return attention_backend(way.work(texts) if way.work else lambda: way.logits(texts))
    except Exception as error:  # a model, and torch's profiler, may raise anything
        raise_if_lost(error)
        return Missing(f"its operators could not be recorded ({first_line(error)})")


def _rise(before: MemoryUse, after: MemoryUse) -> int | None:
    """Return by how much the peak of the device, else of the process, lies above what was held before."""
    held, peak = before.device_allocated_bytes, after.device_peak_allocated_bytes
    if held is None:
        held, peak = before.process_bytes, after.process_peak_bytes
    return None if peak is None or held is None else max(0, peak - held)


def _finite(way: Way, texts: Sequence[str]) -> np.ndarray:
    logits = way.logits(texts)
    if not np.isfinite(logits).all():
        raise Refused("failed", "it gives NaN or infinity")
    return logits


def usual_part(lengths: np.ndarray) -> np.ndarray:
    """Return the positions of the texts of one part, of a fifth of all or of as many as make good groups."""
    most = MOST_ALIKE * LEAST_GROUPS
    return _dealt(np.arange(len(lengths)), lengths, min(len(lengths), max(LEAST_ROUNDS, len(lengths) // most)))[0]


def parts_of(
    lengths: np.ndarray, made: Sequence[Measured], probe_texts: int, seconds: float, most: int
) -> list[np.ndarray]:
    """Return the positions of the texts of each part, `most` in all, for a fifth of the seconds each at most."""
    texts = len(lengths)
    each_s = sum(timed.probe_s for timed in made) / probe_texts
    affordable = SPARE * seconds / LEAST_ROUNDS / max(each_s, 1e-9) - LATENCY_TEXTS
    chosen = np.linspace(0, texts, min(most, texts), endpoint=False).astype(int)
    number = min(len(chosen), max(LEAST_ROUNDS, math.ceil(len(chosen) / max(LEAST_PART, affordable))))
    parts = _dealt(chosen, lengths, number)
    return [parts[index] for index in np.random.default_rng(0).permutation(number).tolist()]


def _dealt(chosen: np.ndarray, lengths: np.ndarray, number: int) -> list[np.ndarray]:
    """Return so many parts of the chosen texts: groups of texts of similar length, dealt forth and back."""
    alike = max(1, min(MOST_ALIKE, len(chosen) // number // LEAST_GROUPS))
    alike = 1 << alike.bit_length() - 1  # a power of two, as batches are
    longest_first = chosen[np.argsort(-lengths[chosen], kind="stable")]
    parts: list[list[np.ndarray]] = [[] for _ in range(number)]
    turns = [*range(number), *reversed(range(number))]
    for turn, start in zip(cycle(turns), range(0, len(chosen), alike)):
        parts[turn].append(longest_first[start : start + alike])
    return [np.sort(np.concatenate(part)) for part in parts]


def take_turns(
    made: Sequence[Measured],
    parts: Sequence[Sequence[str]],
    timer: Timer,
    deadline: float,
    on_round: Callable[[int], None],
) -> tuple[list[Measured], dict[str, Refusal], list[int]]:
    """Return the variants with their rounds, those that failed on the way, and which part each round took.

    The round at the deadline is finished. Where the GPU is lost after the second round, the rounds before count and the
    refusal has the loss; before, it is raised.
    """
    taken = list[int]()
    refused: dict[str, Refusal] = {}
    running = list(made)
    while len(taken) < FEWEST_ROUNDS or timer.clock() < deadline:
        number = len(taken)
        if number >= max(LEAST_ROUNDS, len(parts)) and (number >= MOST_ROUNDS or _are_narrow(running)):
            break
        taken.append(number % len(parts))
        order = list(running)
        random.Random(number).shuffle(order)
        for timed in order:
            try:
                with naming_loss(timed.variant.words):
                    _one_round(timed, parts[taken[-1]], timer, is_first=number < len(parts))
            except DeviceLostError as lost:
                if timed.variant.name == REFERENCE or number < FEWEST_ROUNDS:
                    raise
                running.remove(timed)
                for other in running:  # some have the round that was not finished
                    del other.seconds[number:], other.single_s[number:], other.logits[number:]
                refused[timed.variant.name] = Refusal("failed", lost.reason, lost)
                return running, refused, taken[:-1]
            except (RuntimeError, ValueError, MemoryError, Refused) as error:
                if timed.variant.name == REFERENCE:
                    raise
                running.remove(timed)
                refused[timed.variant.name] = refusal(error)
        on_round(len(taken))
    return running, refused, taken


def _one_round(timed: Measured, texts: Sequence[str], timer: Timer, *, is_first: bool) -> None:
    answers: list[np.ndarray] = []
    singles = texts[:: max(1, len(texts) // LATENCY_TEXTS)][:LATENCY_TEXTS]
    with timed.way.setting():
        timed.way.logits(texts[:1])  # threads and settings were those of another one
        spent = timer.isolated(lambda: answers.append(_finite(timed.way, texts)))
        waits = [timer.isolated(lambda text=text: timed.way.logits([text])) for text in singles]  # type: ignore[misc]
    timed.seconds.append(spent)
    timed.single_s.append(float(np.median(waits)))
    if is_first:
        timed.logits += answers


def _are_narrow(made: Sequence[Measured]) -> bool:
    reference = next(timed for timed in made if timed.variant.name == REFERENCE)
    factors = [
        estimate([base / own for base, own in zip(reference.seconds, timed.seconds, strict=True)]) for timed in made
    ]
    return all(factor.half_width is not None and factor.half_width <= NARROW for factor in factors)


def threads() -> int:
    """Return the threads that every variant has, but the one that is there to show what fewer do."""
    return torch.get_num_threads()
