"""What the operators and the kernels of a trace took, in plain Python."""

import json
from collections import Counter, defaultdict
from typing import Any

from tests.trace_truth.brute_force import BruteForce
from tests.trace_truth.events import Event, is_operator, kind_of_work, operator_of

Key = tuple[str, str | None]


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
    for each, owner in owners(truth).items():
        if owner is not None:
            device_own[root[owner]] += each.end - each.start
            for around in filter(is_operator, owner.chain()):
                device_all[around] += each.end - each.start
    found: dict[Key, list] = defaultdict(lambda: [0, 0, 0, 0, 0])
    for each in members:
        if root[each] is each:
            row = found[each.name, canonical(each.args.get("Input Dims"))]
            values = (1, each.end - each.start, own_ns[each], device_all[each], device_own[each])
            row[:] = [before + value for before, value in zip(row, values, strict=True)]
    return {key: tuple(row if truth.work else row[:3] + [None, None]) for key, row in found.items()}


def _calls(members: list[Event]) -> dict[Event, Event]:
    """Return the call that each operator belongs to: that of the one around it if it only dispatched to itself."""
    inside = Counter(operator_of(e.parent) for e in members)
    root: dict[Event, Event] = {}
    for each in sorted(members, key=lambda e: len(e.chain())):
        outer = operator_of(each.parent)
        is_same = outer is not None and outer.name == each.name and inside[outer] == 1 and each.length > 0
        root[each] = root[outer] if is_same else each
    return root


def owners(truth: BruteForce) -> dict[Event, Event | None]:
    """Return, for each piece of work, the operator that launched it."""
    by_id = {e.args["External id"]: e for e in truth.events if is_operator(e) and "External id" in e.args}
    found = {}
    for each in truth.work:
        number = each.args.get("External id")
        if call := truth.call_of[each]:
            found[each] = operator_of(call)
        else:
            found[each] = None if number == each.args.get("correlation") else by_id.get(number)
    return found


def kernels(truth: BruteForce) -> dict[str, tuple]:
    """Return kind, calls, and whole, median and longest time by name."""
    of_name = defaultdict(list)
    for each in truth.work:
        of_name[each.name].append(each)
    found = {}
    for name, members in of_name.items():
        lengths = sorted(e.end - e.start for e in members)
        kinds = {kind_of_work(e) for e in members}
        found[name] = (kinds, len(members), sum(lengths), lengths[len(lengths) // 2], lengths[-1])
    return found


def launched_by(truth: BruteForce) -> dict[str, set[str | None]]:
    """Return the names of the operators that launched most of the time of the work of each name."""
    spent: dict[str, Counter[str]] = defaultdict(Counter)
    for each, owner in owners(truth).items():
        if owner is not None:
            spent[each.name][owner.name] += each.end - each.start
    most = {name: max(counts.values()) for name, counts in spent.items()}
    return {
        each.name: {name for name, ns in spent[each.name].items() if ns == most[each.name]} or {None}
        for each in truth.work
    }


def canonical(shapes: Any) -> str | None:
    return None if shapes is None else json.dumps(json.loads(shapes) if isinstance(shapes, str) else shapes)
