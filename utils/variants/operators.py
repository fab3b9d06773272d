"""What the operators of each variant take on the same texts: replayed with their shapes, dtype and setting.

What a compiled model runs in place of its operators is not seen by torch: its products and attention are taken to last
as long as in the variant it differs from, and all the rest is one kind.
"""

from collections.abc import Iterator, Sequence
from statistics import median

import torch

from boundby.device import device_queue
from boundby.recording import Recording, program, record
from boundby.replay import Instruments, OnDevice, OnHost
from boundby.timer import Timer, Work
from utils.variants.reasons import ATTENTION, CALLS, PRODUCTS, ROUNDING, Operators, fused
from utils.variants.rounds import Measured

NAMED = {
    PRODUCTS: ("mm", "addmm", "linear", "_linear_pointwise", "qlinear_pointwise"),
    ATTENTION: ("scaled_dot_product", "bmm", "baddbmm", "_softmax", "_safe_softmax"),
    "norm": ("native_layer_norm", "layer_norm", "rms_norm", "_fused_rms_norm"),
    "activation": ("gelu", "silu", "tanh", "relu", "sigmoid"),
    "copies": ("copy_", "clone", "cat", "index", "index_select", "embedding", "gather", "stack"),
}
# What an eight-bit product does to its inputs and results, in programs that have one.
EIGHT_BITS = ("mul", "round_", "clamp_", "_to_copy", "bitwise_xor_")
ROUNDS = 3
PASSES = 2 * (ROUNDS + 1) + 2  # of each variant, with the recording and its first run
SHARE = 0.1  # of the time that is left
FEWEST = 4  # texts: fewer are another load


def replay(
    made: Sequence[Measured],
    texts: Sequence[str],
    probe_texts: int,
    timer: Timer,
    device: torch.device,
    deadline: float,
) -> dict[str, Operators]:
    """Return the operators of each variant that torch sees, over as many of the texts as a tenth of the time allows."""
    seen = [each for each in made if each.way.work]
    each_s = PASSES * sum(each.probe_s for each in seen) / probe_texts
    count = min(len(texts), int(SHARE * (deadline - timer.clock()) / max(each_s, 1e-9)))
    if count < FEWEST:
        return {}
    queue = device_queue(device)
    instruments = OnHost(timer, 0.0, 0.0) if queue is None else OnDevice(timer, queue)
    found: dict[str, Operators] = {}
    for each in seen:
        assert each.way.work
        with each.way.setting(), torch.inference_mode():
            work = each.way.work(texts[:count])
            if each.way.is_compiled:
                base = found.get(each.variant.base or "")
                found |= {each.variant.name: fused(base, _forward(work, instruments))} if base else {}
            else:
                operators = _operators(work, instruments)
                found |= {each.variant.name: operators} if operators else {}
    return found


def _forward(work: Work, instruments: Instruments) -> float:
    instruments.whole(work)
    return median(instruments.whole(work) for _ in range(ROUNDS))


def _operators(work: Work, instruments: Instruments) -> Operators:
    """Return the seconds by kind; {} where operators cannot be replayed."""
    try:
        recording = record(work)
        own = program(recording)
        own.run()
    except (RuntimeError, ValueError):
        return {}
    kinds = list(_kinds(recording))
    rounds = []
    forwards = []
    for _ in range(ROUNDS):
        forwards.append(instruments.whole(work))
        steps = instruments.marked(own.marked)
        if steps is None:
            return {}
        rounds.append(steps)
    found: Operators = {}
    for kind, seconds in zip(kinds, zip(*rounds, strict=True), strict=True):
        found[kind] = found.get(kind, 0.0) + median(seconds)
    return found | {CALLS: max(0.0, median(forwards) - sum(found.values()))}


def _kinds(recording: Recording) -> Iterator[str]:
    names = [step.name.rpartition("::")[2] for step in recording.steps]
    has_eight_bits = "qlinear_pointwise" in names
    for name, step in zip(names, recording.steps, strict=True):
        known = (kind for kind, listed in NAMED.items() if name in listed or (kind == ATTENTION and listed[0] in name))
        is_rounding = has_eight_bits and name in EIGHT_BITS
        yield CALLS if step.cost is None else ROUNDING if is_rounding else next(known, "other")
