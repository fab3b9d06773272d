"""What the operators of each variant take on the same texts: replayed with their shapes, dtype and setting.

Of a compiled model torch's profiler sees matmul and attention; the rest is one kind.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from boundby.bound import Instruments, OnDevice, OnHost, Recording, program, record
from boundby.capture import quiet_kineto
from boundby.machine import device_queue, is_host, naming_loss, raise_if_lost
from boundby.timing import Timer, Work
from utils.variants.reasons import ATTENTION, BETWEEN, DISPATCH, MATMUL, OTHER, QUANTIZATION, Operators
from utils.variants.rounds import Measured

# All else is one kind, normalisation too: one variant adds and normalises in one operator, another in seven.
NAMED = {
    MATMUL: ("mm", "addmm", "linear", "_linear_pointwise", "_mkl_linear", "qlinear_pointwise"),
    ATTENTION: (
        "scaled_dot_product",
        "_varlen_attn",
        "_efficient_attention_forward",
        "bmm",
        "baddbmm",
        "_softmax",
        "_safe_softmax",
    ),
    "activation": ("gelu", "silu", "tanh", "relu", "sigmoid"),
    "copies": ("copy_", "clone", "cat", "index", "index_select", "embedding", "gather", "stack"),
}
# What an eight-bit product does to its inputs and results, in programs that have one.
EIGHT_BITS = ("mul", "round_", "clamp_", "_to_copy", "bitwise_xor_")
ROUNDS, MOST_ROUNDS = 3, 15
PASSES = 2 * (ROUNDS + 1) + 2  # of each variant, with the recording and its first run
SHARE = 0.1  # of the time that is left
FEWEST = 4  # texts: fewer are another load


@dataclass
class _Replayed:
    """A variant's forward, its parts and their kinds; the remainder of the forward is of the kind `rest`.

    `seconds` has the forward and its parts of each round.
    """

    measured: Measured
    work: Work
    parts: Callable[[], list[float] | None]
    kinds: Sequence[str]
    rest: str
    seconds: list[tuple[float, list[float]]] = field(default_factory=list)

    def operators(self) -> Operators:
        """Return the seconds by kind: the least of all rounds, since others interrupt most of them."""
        by_kind: Operators = {}
        for kind, seconds in zip(self.kinds, zip(*(parts for _, parts in self.seconds), strict=True), strict=True):
            by_kind[kind] = by_kind.get(kind, 0.0) + min(seconds)
        forward_s = min(forward for forward, _ in self.seconds)
        return by_kind | {self.rest: max(0.0, forward_s - sum(by_kind.values()))}


def replay(
    made: Sequence[Measured],
    texts: Sequence[str],
    probe_texts: int,
    timer: Timer,
    device: torch.device,
    deadline: float,
) -> dict[str, Operators]:
    """Return the operators of each variant that torch sees, in turns, for a tenth of the time that is left."""
    seen = [timed for timed in made if timed.way.work and not timed.way.is_captured]
    each_s = PASSES * sum(timed.probe_s for timed in seen) / probe_texts
    count = min(len(texts), int(SHARE * (deadline - timer.clock()) / max(each_s, 1e-9)))
    if count < FEWEST:
        return {}
    queue = device_queue(device)
    instruments = OnHost(timer, 0.0, 0.0) if queue is None else OnDevice(timer, queue)
    running = [ready for timed in seen if (ready := _ready(timed, texts[:count], instruments, device))]
    start = timer.clock()
    most_s = SHARE * (deadline - start)
    for number in range(MOST_ROUNDS):
        if number >= ROUNDS and timer.clock() - start > most_s:
            break
        for replayed in list(running):
            with naming_loss(replayed.measured.variant.words), replayed.measured.way.setting(), torch.inference_mode():
                forward_s, parts = instruments.whole(replayed.work), replayed.parts()
            if parts is None:
                running.remove(replayed)
            else:
                replayed.seconds.append((forward_s, parts))
    return {replayed.measured.variant.name: replayed.operators() for replayed in running}


def _ready(timed: Measured, texts: Sequence[str], instruments: Instruments, device: torch.device) -> _Replayed | None:
    """Return what is to be timed, warm; None where operators cannot be replayed."""
    assert timed.way.work
    with naming_loss(timed.variant.words), timed.way.setting(), torch.inference_mode():
        work = timed.way.work(texts)
        if timed.way.is_compiled:
            gpu = None if is_host(device) else device.type
            kinds = [kind for kind, _ in _watched(work, gpu)]  # compiles for these shapes
            watched = partial(_seconds, work, gpu, kinds)
            return _Replayed(timed, work, watched, kinds, BETWEEN) if MATMUL in kinds else None
        try:
            recording = record(work)
            own = program(recording)
            own.run()
        except (RuntimeError, ValueError) as error:
            raise_if_lost(error)
            return None
    return _Replayed(timed, work, partial(instruments.marked, own.marked), list(_kinds(recording)), DISPATCH)


def _seconds(work: Work, gpu: str | None, kinds: Sequence[str]) -> list[float] | None:
    """Return what each product and attention takes; None where they are not of these kinds now."""
    watched = _watched(work, gpu)
    return [seconds for _, seconds in watched] if [kind for kind, _ in watched] == kinds else None


def _watched(work: Work, gpu: str | None) -> list[tuple[str, float]]:
    """Return the products and attention that torch's profiler sees, with their seconds."""
    with quiet_kineto(), torch.autograd.profiler.profile(use_device=gpu) as profiled:  # type: ignore[no-untyped-call]
        work()
    seen = [(_kind(event.name.rpartition("::")[2]), event) for event in profiled.function_events]
    return [
        (kind, (event.self_device_time_total if gpu else event.self_cpu_time_total) / 1e6)
        for kind, event in seen
        if kind in (MATMUL, ATTENTION)
    ]


def _kinds(recording: Recording) -> Iterator[str]:
    names = [step.name.rpartition("::")[2] for step in recording.steps]
    has_eight_bits = "qlinear_pointwise" in names
    for name, step in zip(names, recording.steps, strict=True):
        is_quantization = has_eight_bits and name in EIGHT_BITS
        yield DISPATCH if step.load is None else QUANTIZATION if is_quantization else _kind(name)


def _kind(name: str) -> str:
    known = (kind for kind, listed in NAMED.items() if name in listed or (kind == ATTENTION and listed[0] in name))
    return next(known, OTHER)
