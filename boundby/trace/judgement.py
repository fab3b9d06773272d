"""The verdict on a trace: what the window was spent on, how sure that is, and what removing each cause could gain."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping

from boundby.trace.analysis import HOST_KIND, Analysis
from boundby.trace.breakdown import Breakdown
from boundby.verdict import Bound, Confidence, Doubt, Gain, Verdict, fix_of_cause, inconclusive

# What each nanosecond of the window counts for. Every cause in which a device waits for the host's own doings is
# `launch`; the gains tell them apart. Waits between streams and untraced time explain nothing.
BOUND_OF: dict[str, Bound] = {
    "input": "input",
    "synchronisation": "launch",
    "launch": "launch",
    "allocator": "launch",
    "compile": "launch",
    "launch_latency": "launch",
    "python": "launch",
    "tokenizing": "input",
    "garbage_collection": "launch",
    "saving": "launch",
    "loading": "launch",
    "driver": "launch",
    "graph_pause": "under_utilised",
    "communication": "communication",
    "memcpy": "transfer",
    "compute": "compute",
    "memset": "compute",
    HOST_KIND: "compute",
}
UNEXPLAINED: Bound = "inconclusive"
AHEAD = 1.5  # times the second largest share, below which the bound is mixed
LEAST_STEPS = 3
AGREEING = 2 / 3  # of the steps that show the bound of the whole
STEADY = 0.2  # interquartile range of the step times, over their median
CLEAR = 0.6  # of the time of the work, to call it compute
SMALL_GAIN = 1.005
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


def judge_trace(analysis: Analysis) -> Verdict:
    """Return the verdict on the busiest device of a trace, in the same record as that on a measured forward.

    `share_of_limit` is the share of the window that the bound stands for, and `at_most` of each gain the factor by
    which the window would shorten if its cause vanished and nothing else changed. A trace with a fatal finding, or one
    whose time mostly nothing explains, is `inconclusive`.
    """
    fatal = tuple(Doubt(finding.kind, finding.text) for finding in analysis.findings if finding.is_fatal)
    minor = tuple(Doubt(finding.kind, finding.text) for finding in analysis.findings if not finding.is_fatal)
    device = analysis.devices[0]
    if fatal or not device.window_ns:
        return inconclusive(fatal + minor)
    shares = _shares({**device.exposed_ns, **device.causes_ns})
    labels = Counter(_label(_shares({**step.busy_ns, **step.idle_ns}))[0] for step in device.steps if step.duration_ns)
    bound, alternatives = _label(shares)
    doubts = [*minor, *_doubts(device, labels, bound)]
    if labels and labels[bound] < AGREEING * sum(labels.values()) and bound != "mixed":
        bound, alternatives = "mixed", tuple(labels)
    share = None if bound == UNEXPLAINED else shares.get(bound)
    if bound == UNEXPLAINED:
        text = f"{_percent(shares[bound])} of the window is untraced or a wait between streams"
        doubts.insert(0, Doubt("unexplained", text))
    evidence = list(_evidence(device))
    if bound == "compute":
        bound, others, said = _kind_of_work(analysis, device)
        alternatives = (*others, *alternatives)
        evidence.append(said)
    return Verdict(
        bound=bound,
        alternatives=tuple(dict.fromkeys(label for label in alternatives if label != bound)),
        share_of_limit=share,
        confidence=_confidence(bound, doubts),
        confirmation="untested",
        gains=tuple(_gains(device)),
        evidence=tuple(evidence),
        doubts=tuple(doubts),
    )


def _shares(nanoseconds: Mapping[str, int]) -> dict[Bound, float]:
    """Return the share of the time that each bound stands for; what explains nothing is `inconclusive`."""
    whole = sum(nanoseconds.values())
    shares: dict[Bound, float] = {}
    for what, spent in nanoseconds.items():
        bound = BOUND_OF.get(what, UNEXPLAINED)
        shares[bound] = shares.get(bound, 0.0) + spent / whole
    return shares


def _label(shares: Mapping[Bound, float]) -> tuple[Bound, tuple[Bound, ...]]:
    """Return the bound with the largest share, and the next where it may be that one as well."""
    ranked = sorted(shares, key=lambda bound: -shares[bound])
    first, second = ranked[0], ranked[1] if len(ranked) > 1 else ranked[0]
    if first in (UNEXPLAINED, second) or shares[first] >= AHEAD * shares[second]:
        return first, ()
    return "mixed", tuple(label for label in (first, second) if label != UNEXPLAINED)


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
    said = f"by name, {_percent(share)} of the {what} is in matrix products, convolutions and attention"
    if device.device is not None and optimizer > device.window_ns / 2:
        return "optimizer", ("memory",), f"{said}; {_percent(optimizer / device.window_ns)} of it in optimizer steps"
    if share >= CLEAR:
        return "compute", ("memory",), said
    return ("memory", ("compute",), said) if share <= 1 - CLEAR else ("mixed", ("compute", "memory"), said)


def _is_arithmetic(operator: str | None, kernel: str | None) -> bool:
    """Tell whether arithmetic can limit the work: by its operator, and where that has no telling name by the kernel."""
    if operator is not None and (kernel is None or operator.startswith("aten::")):
        return ARITHMETIC_OPERATOR.search(operator) is not None
    name = kernel or ""
    return FUSED_BY_COMPILER.search(name) is None and ARITHMETIC_KERNEL.search(name) is not None


def _doubts(device: Breakdown, labels: Counter[Bound], bound: Bound) -> Iterator[Doubt]:
    if not device.steps:
        text = "the trace has no ProfilerStep marks; the window may hold what is no part of the loop"
        yield Doubt("steps", text)
        return
    if len(device.steps) < LEAST_STEPS:
        text = f"only {len(device.steps)} recorded; {LEAST_STEPS} are needed to see whether they agree"
        yield Doubt("steps", text)
    spread = device.step_quartiles["duration"]
    if len(device.steps) >= LEAST_STEPS and spread.third_ns - spread.first_ns > STEADY * spread.median_ns:
        text = f"half of the steps take {spread.first_ns / 1e6:.1f} to {spread.third_ns / 1e6:.1f} ms"
        yield Doubt("unsteady", text)
    if labels and bound not in ("mixed", max(labels, key=lambda label: labels[label])):
        text = f"they differ in what bounds them ({', '.join(f'{name}: {n}' for name, n in labels.items())})"
        yield Doubt("steps", text)


def _evidence(device: Breakdown) -> Iterator[str]:
    window = device.window_ns
    who = "the host is in operators" if device.device is None else f"device {device.device} is at work"
    yield f"{who} for {_percent(device.busy_ns / window)} of {window / 1e6:,.1f} ms"
    kinds = {name: spent for name, spent in device.exposed_ns.items() if spent and name != HOST_KIND}
    if kinds:
        parts = (f"{name} {_percent(spent / window)}" for name, spent in kinds.items())
        yield f"of the window: {', '.join(parts)} (what overlaps is counted for the first)"
    causes = sorted(((spent, name) for name, spent in device.causes_ns.items() if spent), reverse=True)
    if causes:
        yield f"idle: {', '.join(f'{name} {_percent(spent / window)}' for spent, name in causes)}"


def _gains(device: Breakdown) -> Iterator[Gain]:
    """Yield what removing each cause could gain, first what would gain most with all else as it was."""
    window, on_host = device.window_ns, device.device is None
    for what, left in sorted(device.without_ns.items(), key=lambda item: item[1]):
        fix = fix_of_cause(what, on_host)
        if fix is None or not fix.change.is_bounded or window < SMALL_GAIN * max(left, 1):
            continue
        yield Gain(fix, min(window / max(device.least_ns[what], 1), LARGEST_GAIN), _basis(device, what))


def _basis(device: Breakdown, what: str) -> str:
    """Return what a gain rests on: what would remain, and what takes most of the time that is lost."""
    remains = f"{device.without_ns[what] / 1e6:,.2f} of {device.window_ns / 1e6:,.2f} ms would remain"
    most = device.contributors.get(what)
    if most is None:
        return remains
    spent = {**device.exposed_ns, **device.causes_ns}[what]
    where = f", {most.where}" if most.where else ""
    return f"{remains}; {most.name} takes {most.spent_ns / 1e6:,.2f} of the {spent / 1e6:,.2f} ms lost to it{where}"


def _confidence(bound: Bound, doubts: list[Doubt]) -> Confidence:
    return "low" if doubts or bound in ("mixed", "inconclusive") else "medium"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
