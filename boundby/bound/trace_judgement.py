"""The verdict on a trace: what the window was spent on, how sure that is, and what removing each cause could gain."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from boundby.bound.verdict import Bound, Confidence, Doubt, Fix, Gain, Verdict, fix_of_cause, inconclusive
from boundby.formatting import percent
from boundby.trace import HOST_CAUSES, HOST_KIND, LEAST_STEPS, Analysis, Breakdown, least_wait_ns

# What each nanosecond of the window counts for. Every cause in which a device waits for the host's own doings is
# `launch`; the gains tell them apart. Waits between streams and untraced time explain nothing.
LATE_HOST: Bound = "launch"
BOUND_OF: dict[str, Bound] = {
    **dict.fromkeys(HOST_CAUSES, LATE_HOST),
    "launch_latency": "launch",
    "input": "input",
    "tokenizing": "input",
    "graph_pause": "under_utilised",
    "communication": "communication",
    "memcpy": "transfer",
    "compute": "compute",
    "memset": "compute",
    HOST_KIND: "compute",
}
UNEXPLAINED: Bound = "inconclusive"
AHEAD = 1.5  # times the second largest share, below which that is named as well
CLOSE = 1.1  # times the second largest share, below which the two are mixed where steps do not tell
MOSTLY = 0.5  # of the communication of a rank that is waiting for others, of a cause in one place
STEADY = 0.2  # interquartile range of the step times, over their median
CLEAR = 0.6  # of the time of the work, to call it compute
SMALL_GAIN = 1.005
TOLD = 0.0005  # of the window, to be said at all
LONGEST_NAME = 60  # characters
SAID = {"memcpy": "copies", "memset": "clearing memory"}
OTHER_RANKS = "other ranks"  # what is waited for, of communication
LARGEST_GAIN = 1000.0  # beyond it a factor tells no more than that nearly nothing would remain
# Kernels and operators that multiply matrices, convolve or attend: the only ones that arithmetic can limit.
# The operator that launched a kernel tells it best; compiled ones have no operator of their own name.
ARITHMETIC_OPERATOR = re.compile(
    r"conv(?!ert)|attention|::(mm|addmm|bmm|baddbmm|_addmm_activation|_scaled_mm|_grouped_mm|mv|dot|linear|matmul)$|^mkldnn::"
)
ARITHMETIC_KERNEL = re.compile(
    r"(?i:gemm|cutlass|conv(?!ert)|wgrad|dgrad|fprop|winograd|scudnn|xmma|(?<!ga)mma_|flash|fmha|attention|cublas|nvjet"
    r"|tensile|Cijk|triton_(tem|mm|bmm))"
)
FUSED_BY_COMPILER = re.compile(r"^triton_(poi|red|per)_")  # pointwise and reductions; the names list what was fused


class Waiting(msgspec.Struct, frozen=True):
    """How much of its communication one rank waits for others, of which `rank` comes last."""

    share: float
    rank: int


def judge_trace(analysis: Analysis, waiting: Waiting | None = None) -> Verdict:
    """Return the verdict on the busiest device of a trace, in the same record as that on a measured forward.

    `share_of_limit` is the share of the window that the bound stands for, and `at_most` of each gain the factor by
    which the window would shorten at most if its cause vanished; the gains come in the order of what each would gain
    with all else as it was. `waiting` is known where the traces of all ranks are. A trace with a fatal finding, or one
    whose time mostly nothing explains, is `inconclusive`.
    """
    fatal = tuple(Doubt(finding.kind, finding.text) for finding in analysis.findings if finding.is_fatal)
    minor = tuple(Doubt(finding.kind, finding.text) for finding in analysis.findings if not finding.is_fatal)
    device = analysis.devices[0]
    if fatal or not device.window_ns:
        return inconclusive(fatal + minor)
    shares = _shares({**device.exposed_ns, **device.causes_ns})
    by_step = [_shares({**step.busy_ns, **step.idle_ns}) for step in device.steps if step.duration_ns]
    if 2 * sum(step.duration_ns for step in device.steps) < device.window_ns:  # most of the work runs on behind them
        by_step = []
    bound, alternatives = _label(shares, by_step)
    doubts = [*minor, *_doubts(device, bound, by_step)]
    share = None if bound == UNEXPLAINED else shares.get(bound)
    if bound == UNEXPLAINED:
        doubts.insert(0, Doubt("unexplained", _unexplained(analysis, device, shares[bound])))
    evidence = list(_evidence(device))
    if bound == "compute":
        bound, others, line = _kind_of_work(analysis, device)
        alternatives = (*others, *alternatives)
        evidence.append(line)
    return Verdict(
        bound=bound,
        alternatives=tuple(dict.fromkeys(label for label in alternatives if label != bound)),
        share_of_limit=share,
        confidence=_confidence(bound, doubts),
        confirmation="untested",
        gains=tuple(_gains(analysis, waiting)),
        evidence=tuple(evidence),
        doubts=tuple(doubts),
        step_s=device.window_ns / len(by_step) / 1e9 if by_step else None,
    )


def _unexplained(analysis: Analysis, device: Breakdown, share: float) -> str:
    """Return what is not known of a share of the window, and how to record it: where work waited, it is not the host's.

    Where the device does nothing for longer than its queue is empty, the rest of that passes with work in the queue.
    """
    empty = analysis.launches.empty_queue_share
    if device.device is None or empty is None or device.idle_ns / device.window_ns - empty < MOSTLY * share:
        where = "outside all recorded events" if device.device is None else "untraced, or waits between streams"
        way_out = "record Python stacks, or mark what the program does there (torch.profiler.record_function)"
        return f"{percent(share, 1)} of the window is {where}; {way_out}"
    return (
        f"{percent(share, 1)} of the window passed with launches queued and no kernel recorded: kernels that the "
        "profiler missed (older ones do, in CUDA graphs), another process on the device, or waits between "
        "streams; record with a newer PyTorch, alone on the device, with enable_cuda_sync_events"
    )


def _shares(nanoseconds: Mapping[str, int]) -> dict[Bound, float]:
    """Return the share of the time that each bound stands for; what explains nothing is `inconclusive`."""
    whole = sum(nanoseconds.values())
    shares: dict[Bound, float] = {}
    for what, spent in nanoseconds.items():
        bound = BOUND_OF.get(what, UNEXPLAINED)
        shares[bound] = shares.get(bound, 0.0) + spent / whole
    return shares


def _label(shares: Mapping[Bound, float], by_step: Sequence[Mapping[Bound, float]]) -> tuple[Bound, tuple[Bound, ...]]:
    """Return the bound with the largest share, and the next where that is not far behind.

    They are mixed where the steps leave open which of the two is larger: where the middle half of what one is ahead of
    the other in each step holds zero, or, without enough steps, where the two are close. A fixed lead would call the
    same program one or the other from recording to recording.
    """
    ranked = sorted(shares, key=lambda bound: -shares[bound])
    first, second = ranked[0], ranked[1] if len(ranked) > 1 else ranked[0]
    if first in (UNEXPLAINED, second):
        return first, ()
    if second == UNEXPLAINED or shares[first] >= AHEAD * shares[second]:
        return first, ()
    lead = sorted(step.get(first, 0.0) - step.get(second, 0.0) for step in by_step)
    quarter = len(lead) // 4
    is_open = lead[quarter] <= 0 if len(lead) >= LEAST_STEPS else shares[first] < CLOSE * shares[second]
    return ("mixed", (first, second)) if is_open else (first, (second,))


def _kind_of_work(analysis: Analysis, device: Breakdown) -> tuple[Bound, tuple[Bound, ...], str]:
    """Return whether arithmetic or memory limits the work itself, as far as names tell, and a line that says so.

    Matrix products may be limited by memory too, when they are small; element-wise work never is by arithmetic.
    """
    optimizer = sum(
        annotation.device_ns for annotation in analysis.annotations if annotation.name.startswith("Optimizer.step")
    )
    if device.device is None:
        spent = [(_is_arithmetic(operator.name, None), operator.cpu_self_ns) for operator in analysis.operators]
        what = "time in operators"
    else:
        work = [kernel for kernel in analysis.kernels if kernel.kind in ("compute", "memset")]
        spent = [(_is_arithmetic(kernel.operator, kernel.name), kernel.total_ns) for kernel in work]
        what = "time of the kernels"
    whole = sum(nanoseconds for _, nanoseconds in spent)
    arithmetic = sum(nanoseconds for is_arithmetic, nanoseconds in spent if is_arithmetic)
    share = arithmetic / whole if whole else 0.0
    line = f"by name, {percent(share, 1)} of the {what} is in matmuls, convolutions and attention"
    if device.device is not None and optimizer > device.window_ns / 2:
        return "optimizer", ("memory",), f"{line}; {percent(optimizer / device.window_ns, 1)} of it in optimizer steps"
    if share >= CLEAR:
        return "compute", ("memory",), line
    return ("memory", ("compute",), line) if share <= 1 - CLEAR else ("mixed", ("compute", "memory"), line)


def _is_arithmetic(operator: str | None, kernel: str | None) -> bool:
    """Tell whether arithmetic can limit the work: by its operator, and where that has no telling name by the kernel."""
    if operator is not None and (kernel is None or operator.startswith("aten::")):
        return ARITHMETIC_OPERATOR.search(operator) is not None
    name = kernel or ""
    return FUSED_BY_COMPILER.search(name) is None and ARITHMETIC_KERNEL.search(name) is not None


def _doubts(device: Breakdown, bound: Bound, by_step: Sequence[Mapping[Bound, float]]) -> Iterator[Doubt]:
    if not device.steps:
        text = "the trace has no ProfilerStep marks; the window may include more than the loop"
        yield Doubt("steps", text)
        return
    if len(device.steps) < LEAST_STEPS:
        text = f"only {len(device.steps)} recorded; {LEAST_STEPS} are needed to see whether they agree"
        yield Doubt("steps", text)
    spread = device.step_quartiles["duration"]
    is_spread = spread.third_ns - spread.first_ns > STEADY * spread.median_ns
    if len(device.steps) >= LEAST_STEPS and is_spread and not _only_fills_the_queue(device):
        text = f"half of the steps take {spread.first_ns / 1e6:.1f} to {spread.third_ns / 1e6:.1f} ms"
        yield Doubt("unsteady", text)
    labels = Counter(max(step, key=lambda name: step[name]) for step in by_step)
    if labels and bound not in ("mixed", max(labels, key=lambda label: labels[label])):
        text = f"they differ in what bounds them ({', '.join(f'{name}: {n}' for name, n in labels.items())})"
        yield Doubt("steps", text)


def _only_fills_the_queue(device: Breakdown) -> bool:
    """Tell whether the host runs ahead at first: its first steps are short, as they wait for nothing yet.

    The device is then at work all the while, and those after the longest step are as long as one another.
    """
    durations = [step.duration_ns for step in device.steps]
    full = next(number for number, length in enumerate(durations) if length > max(durations) / (1 + STEADY))
    later = durations[full:]
    runs_on = sum(sum(step.idle_ns.values()) for step in device.steps) < STEADY * sum(durations)
    return runs_on and 0 < full < len(durations) and max(durations[:full]) < min(later) and len(later) >= 1


def _evidence(device: Breakdown) -> Iterator[str]:
    window = device.window_ns
    who = "the host is in operators" if device.device is None else f"device {device.device} is busy"
    yield f"{who} for {percent(device.busy_ns / window, 1)} of {window / 1e6:,.1f} ms"
    kinds = {name: spent for name, spent in device.exposed_ns.items() if spent >= TOLD * window and name != HOST_KIND}
    if kinds:
        parts = (f"{SAID.get(name, name)} {percent(spent / window, 1)}" for name, spent in kinds.items())
        yield f"of the window: {', '.join(parts)} (overlapping time counts for the first)"
    causes = sorted(((spent, name) for name, spent in device.causes_ns.items() if spent), reverse=True)
    notable = [
        f"{name.replace('_', ' ')} {percent(spent / window, 1)}" for spent, name in causes if spent >= TOLD * window
    ]
    if notable:
        yield f"idle: {', '.join(notable)}"


def _gains(analysis: Analysis, waiting: Waiting | None) -> Iterator[Gain]:
    """Yield what removing each cause could gain, first what would gain most with all else as it was."""
    device = analysis.devices[0]
    window, on_host = device.window_ns, device.device is None
    left_ns, least_ns = dict(device.without_ns), dict(device.least_ns)
    if waiting is not None and "communication" in left_ns:
        for times in (left_ns, least_ns):
            gone = window - times["communication"]
            times["communication"] = window - round(gone * (1 - waiting.share))
            times[OTHER_RANKS] = window - round(gone * waiting.share)
    for what, left in sorted(left_ns.items(), key=lambda item: item[1]):
        fix = fix_of_cause(what, on_host)
        if what == OTHER_RANKS and waiting is not None:
            fix = Fix("wait_less", {"rank": waiting.rank})
        if fix is None or not fix.change.is_bounded or window < SMALL_GAIN * max(left, 1):
            continue
        likely = f"likely {min(window / max(left, 1), LARGEST_GAIN):.2f}"
        remains = f"{left / 1e6:,.2f} of {window / 1e6:,.2f} ms would remain"
        basis = f"{likely}: {remains}{_most(analysis, what, waiting)}"
        yield Gain(fix, min(window / max(least_ns[what], 1), LARGEST_GAIN), basis)


def _most(analysis: Analysis, what: str, waiting: Waiting | None) -> str:
    """Return what takes most of the time that is lost to a cause, in words to go on with; "" where nothing is known."""
    device = analysis.devices[0]
    if what == "communication" and waiting is None:
        known = analysis.collectives
        waits = least_wait_ns(known) if known else None
        if known and waits and waits >= MOSTLY * known.total_ns:
            share = percent(waits / known.total_ns, 1)
            return f"; at least {share} of it is waiting for other ranks: compare their traces"
        if analysis.world_size is not None and analysis.world_size > 1:
            return "; the traces of all ranks together show how much of it is waiting for a slow rank"
    most = device.contributors.get(what)
    if most is None or 2 * device.causes_ns[what] < device.window_ns - device.without_ns[what]:
        return ""  # nothing has a name, or the idle time is not what would be saved
    where = f", {most.where}" if most.where else ""
    name = most.name if len(most.name) <= LONGEST_NAME else f"{most.name[: LONGEST_NAME - 3]}..."
    whole_ns = device.causes_ns[what]
    share = "mostly" if most.spent_ns >= MOSTLY * whole_ns else "the largest part"
    return f"; {share} {name}, {most.spent_ns / 1e6:,.2f} of {whole_ns / 1e6:,.2f} ms{where}"


def _confidence(bound: Bound, doubts: list[Doubt]) -> Confidence:
    return "low" if doubts or bound in ("mixed", "inconclusive") else "medium"
