"""An `Analysis` and the brute force of the same trace in one structure, and where they differ."""

import json
from collections import Counter, defaultdict
from fractions import Fraction
from typing import Any

import msgspec

from boundby.trace import Analysis
from tests.trace_truth.brute_force import BruteForce
from tests.trace_truth.events import Event, is_operator, kind_of_work, load, operator_of

Key = tuple[str, str | None]
SAME = ("busy_ns", "idle_ns", "gaps", "by_kind_ns", "exposed_ns", "communication_overlap")  # as brute force has them


def operators(truth: BruteForce) -> dict[Key, tuple]:
    """Return calls, total and self time, and total and self time of the device, by name and shapes."""
    members = [e for e in truth.events if is_operator(e)]
    root = _calls(members)
    own_ns: Counter[Event] = Counter()
    device_own: Counter[Event] = Counter()
    device_all: Counter[Event] = Counter()
    for thread in truth.threads.values():
        for inner, start, end in zip(thread.innermost, thread.moments, thread.moments[1:], strict=False):
            if owner := operator_of(inner):
                own_ns[root[owner]] += end - start
    for item, owner in owners(truth).items():
        if owner is not None:
            device_own[root[owner]] += item.end - item.start
            for around in filter(is_operator, owner.chain()):
                device_all[around] += item.end - item.start
    result: dict[Key, list] = defaultdict(lambda: [0, 0, 0, 0, 0])
    for member in members:
        if root[member] is member:
            row = result[member.name, canonical(member.args.get("Input Dims"))]
            values = (1, member.end - member.start, own_ns[member], device_all[member], device_own[member])
            row[:] = [before + value for before, value in zip(row, values, strict=True)]
    return {key: tuple(row if truth.work else row[:3] + [None, None]) for key, row in result.items()}


def _calls(members: list[Event]) -> dict[Event, Event]:
    """Return the call that each operator belongs to: that of the one around it if it only dispatched to itself."""
    inside = Counter(operator_of(e.parent) for e in members)
    root: dict[Event, Event] = {}
    for member in sorted(members, key=lambda e: len(e.chain())):
        outer = operator_of(member.parent)
        is_same = outer is not None and outer.name == member.name and inside[outer] == 1 and member.length > 0
        root[member] = root[outer] if is_same else member
    return root


def owners(truth: BruteForce) -> dict[Event, Event | None]:
    """Return, for each piece of work, the operator that launched it."""
    by_id = {e.args["External id"]: e for e in truth.events if is_operator(e) and "External id" in e.args}
    result = {}
    for item in truth.work:
        number = item.args.get("External id")
        if call := truth.call_of[item]:
            result[item] = operator_of(call)
        else:
            result[item] = None if number == item.args.get("correlation") else by_id.get(number)
    return result


def kernels(truth: BruteForce) -> dict[str, tuple]:
    """Return kind, calls, and whole, median and longest time by name."""
    of_name = defaultdict(list)
    for item in truth.work:
        of_name[item.name].append(item)
    result = {}
    for name, members in of_name.items():
        lengths = sorted(e.end - e.start for e in members)
        kinds = {kind_of_work(e) for e in members}
        result[name] = (kinds, len(members), sum(lengths), lengths[len(lengths) // 2], lengths[-1])
    return result


def launched_by(truth: BruteForce) -> dict[str, set[str | None]]:
    """Return the names of the operators that launched most of the time of the work of each name."""
    spent: dict[str, Counter[str]] = defaultdict(Counter)
    for item, owner in owners(truth).items():
        if owner is not None:
            spent[item.name][owner.name] += item.end - item.start
    most = {name: max(counts.values()) for name, counts in spent.items()}
    return {
        item.name: {name for name, ns in spent[item.name].items() if ns == most[item.name]} or {None}
        for item in truth.work
    }


def canonical(shapes: Any) -> str | None:
    return None if shapes is None else json.dumps(json.loads(shapes) if isinstance(shapes, str) else shapes)


def expected(truth: BruteForce) -> dict[str, Any]:
    return {
        "events": len(truth.events),
        "window": (truth.start, truth.end - truth.start),
        "steps": truth.steps,
        "devices": truth.devices(),
        "launches": truth.launches(),
        "operators": operators(truth),
        "kernels": kernels(truth),
    }


def content(analysis: Analysis) -> dict[str, Any]:
    of_operator: dict[tuple[str, str | None], tuple] = {}
    for operator in analysis.operators:
        key = operator.name, canonical(operator.input_shapes)
        assert key not in of_operator, f"{key} occurs twice"
        of_operator[key] = (
            operator.calls,
            operator.cpu_total_ns,
            operator.cpu_self_ns,
            operator.device_total_ns,
            operator.device_self_ns,
        )
    return {
        "events": analysis.events,
        "window": (analysis.start_ns, analysis.window_ns),
        "steps": list(analysis.step_numbers),
        "devices": {device.device: _content_of(device) for device in analysis.devices},
        "launches": msgspec.to_builtins(analysis.launches),
        "operators": of_operator,
        "kernels": {
            kernel.name: ({kernel.kind}, kernel.calls, kernel.total_ns, kernel.median_ns, kernel.max_ns)
            for kernel in analysis.kernels
        },
    }


def _content_of(device: Any) -> dict[str, Any]:
    """Return what the analysis says of a device, of its idle time only how much there is and when."""
    line = device.timeline

    def spans(by_name: dict[str, tuple[int, ...]]) -> list[dict[str, int]]:
        return [dict(zip(by_name, values, strict=True)) for values in zip(*by_name.values(), strict=True)]

    return {
        **{name: getattr(device, name) for name in SAME},
        "longest": [(gap.start_ns, gap.duration_ns, gap.ended_by) for gap in device.longest_gaps],
        "steps": [
            (e.number, e.start_ns, e.duration_ns, e.busy_ns, {"idle": sum(e.idle_ns.values())}) for e in device.steps
        ],
        "quartiles": {
            name: (q.first_ns, q.median_ns, q.third_ns)
            for name, q in device.step_quartiles.items()
            if name not in device.causes_ns
        },
        "timeline": (
            list(line.edges_ns),
            spans(line.busy_ns),
            [{"idle": sum(span.values())} for span in spans(line.idle_ns)],
        ),
    }


def difference(analysis: Analysis, text: bytes | str) -> list[str]:
    """Return what the analysis of the trace in `text` says otherwise than brute force does."""
    truth = BruteForce(load(text))
    by_most = launched_by(truth)
    of_kernels = [
        f"{e.name} was launched by {e.operator}" for e in analysis.kernels if e.operator not in by_most[e.name]
    ]
    different: list[str] = []
    for main in truth.main_threads() or [None]:
        truth.main = main
        different = of_kernels.copy()
        result, wanted = content(analysis), expected(truth)
        _compare("", result, wanted, different)
        if not different:
            break
    return different


def _compare(where: str, result: Any, wanted: Any, different: list[str]) -> None:
    if isinstance(wanted, dict) and isinstance(result, dict):
        for key in {**wanted, **result}:
            _compare(f"{where}/{key}", result.get(key), wanted.get(key), different)
    elif isinstance(wanted, Fraction) and isinstance(result, float):
        if abs(result - wanted) > 1e-12 * max(1, wanted):
            different.append(f"{where}: {result!r} instead of {float(wanted)!r}")
    elif isinstance(wanted, float) and isinstance(result, float):
        if abs(result - wanted) > 1e-12:
            different.append(f"{where}: {result!r} instead of {wanted!r}")
    elif result != wanted:
        different.append(f"{where}: {result!r} instead of {wanted!r}"[:600])
