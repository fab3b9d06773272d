"""What differs between two traces: the step, where the time went, operators and kernels. It claims no significance.

One trace is one sample: another run of the same program differs as well. The only spread that is known is that between
the steps inside each trace, and the change of the step time is held against it.
"""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal

import msgspec
import numpy as np

from boundby.trace.analysis import HOST_KIND, LEAST_STEPS, Analysis
from boundby.trace.operator_table import by_name
from boundby.trace.operators import Caller, Grouping, OpStat

OTHER_SHAPES = 0.2  # of the time of operators that both traces hold, in calls whose shapes only one of them holds
SMALL_PART = 0.02  # of the largest part of the change, below which a part is not worth its line
FLOATING = frozenset(
    ("float", "double", "c10::Half", "c10::BFloat16")
    + tuple(f"c10::Float8_{kind}" for kind in ("e4m3fn", "e5m2", "e4m3fnuz", "e5m2fnuz"))
)
Unlikeness = Literal["device", "host_only", "ranks", "steps", "shapes", "types", "backlog"]
Callers = Mapping[str, Mapping[Caller, int]]
Key = tuple[str, str | None]


class Unlike(msgspec.Struct, frozen=True):
    """What two traces differ in beside the program, so that they are not to be compared without a thought."""

    kind: Unlikeness
    text: str


class MostChanged(msgspec.Struct, frozen=True):
    """The operator, kernel or event of the host that most of a part of the change is of."""

    name: str
    change_ns: float
    calls_change: float | None  # None: how often it was called is not known
    caller: Caller | None  # of most of the calls that came or went; None where it was not asked for, or is not known


class Part(msgspec.Struct, frozen=True):
    """A kind of work or a cause of idling whose time differs. The parts add up to the change of the window."""

    name: str
    change_ns: float
    contributor: MostChanged | None


class StepSpread(msgspec.Struct, frozen=True):
    """How long the steps of one trace are, in ns."""

    steps: int
    median_ns: float
    q1_ns: float
    q3_ns: float


class Amount(msgspec.Struct, frozen=True):
    """What one trace spent on an operator or kernel; of a kernel only calls and device time are known.

    `device_self_ns` leaves out what called operators launched, `device_total_ns` holds it. None is not recorded.
    """

    calls: float
    device_self_ns: float | None
    device_total_ns: float | None
    cpu_self_ns: float | None

    @property
    def per_call_ns(self) -> float | None:
        """The device time of one call."""
        return None if self.device_total_ns is None else self.device_total_ns / self.calls


class Change(msgspec.Struct, frozen=True):
    """One operator or kernel in both traces; a side is None where its trace has no call of it."""

    name: str
    input_shapes: str | None  # of an operator, where both are asked for and recorded
    kind: str | None  # of a kernel: one of `links.KINDS`
    a: Amount | None
    b: Amount | None
    place: str | None = None  # of an operator: its module or stack, where grouped by that

    def difference(self, quantity: str) -> float | None:
        """Return B minus A of a field of `Amount`, a missing side being 0; None where it is not recorded."""
        values = [getattr(side, quantity) for side in (self.a, self.b) if side is not None]
        if None in values:
            return None
        return (getattr(self.b, quantity) if self.b else 0) - (getattr(self.a, quantity) if self.a else 0)

    @property
    def only_in(self) -> Literal["a", "b"] | None:
        """The only trace with a call of it; None: both have some."""
        return "a" if self.b is None else "b" if self.a is None else None

    @property
    def weight(self) -> float:
        """The larger of the absolute changes of device and CPU self time: what the changes are sorted by.

        Self times, since the total of an operator repeats in every operator around it.
        """
        return max(abs(self.difference(field) or 0) for field in ("device_self_ns", "cpu_self_ns"))


class TimeChange(msgspec.Struct, frozen=True):
    """Time of the window that the busiest device spent on a kind of work or a cause of idling; None: no such thing."""

    name: str
    a_ns: float | None
    b_ns: float | None

    @property
    def change_ns(self) -> float:
        """B minus A, a missing side being 0."""
        return (self.b_ns or 0) - (self.a_ns or 0)


class Diff(msgspec.Struct, frozen=True):
    """B against A; the largest changes first.

    All amounts are per step where `is_per_step`: what the whole trace holds, over the number of its steps. Otherwise a
    trace has no steps, and they are totals: traces of different length then differ in everything.
    """

    is_per_step: bool
    group_by: Literal["name"] | Grouping  # what operators are matched by; `name` where a trace lacks what was asked for
    window_a_ns: int
    window_b_ns: int
    step_a: StepSpread | None
    step_b: StepSpread | None
    busy: tuple[TimeChange, ...]  # by kind of work; overlapping time is booked once
    idle: tuple[TimeChange, ...]  # by cause
    unlike: tuple[Unlike, ...]  # why the two may not be compared
    parts: tuple[Part, ...]  # of the change of the window: all worth a line; () where one side is a host alone
    operators: tuple[Change, ...]
    kernels: tuple[Change, ...]

    @property
    def matched_by(self) -> str:
        """What operators of both traces are told apart by."""
        return "name" if self.group_by == "name" else f"name and {self.group_by}"

    @property
    def is_beyond_spread(self) -> bool | None:
        """Whether the middle halves of the steps lie apart; None where a trace has fewer than `LEAST_STEPS` steps."""
        a, b = self.step_a, self.step_b
        if a is None or b is None or min(a.steps, b.steps) < LEAST_STEPS:
            return None
        return a.q3_ns < b.q1_ns or b.q3_ns < a.q1_ns


def diff(
    a: Analysis,
    b: Analysis,
    *,
    group_by: Literal["name"] | Grouping = "shapes",
    operators: tuple[Sequence[OpStat], Sequence[OpStat]] | None = None,
    called_by: tuple[Callers, Callers] | None = None,
) -> Diff:
    """Return what differs in `b` from `a`. Names must be equal to match, template arguments of kernels included.

    Work that was launched before a recording began is left out of the amounts of kernels. `operators` are those of both
    traces grouped by what `group_by` says, where that is not the shapes; `called_by` is what `stacks.callers` tells.
    """
    steps = len(a.step_numbers), len(b.step_numbers)
    scale = (1 / steps[0], 1 / steps[1]) if all(steps) else (1.0, 1.0)
    grouped = operators or (a.operators, b.operators)
    if not all(any(_detail(stat, group_by) for stat in side) for side in grouped):
        group_by = "name"
    matched = [_operators(side, group_by, factor) for side, factor in zip(grouped, scale, strict=True)]
    by_name = [_operators(side.operators, "name", factor) for side, factor in zip((a, b), scale, strict=True)]
    kernels = [_kernels(side, factor) for side, factor in zip((a, b), scale, strict=True)]
    first, second = a.devices[0], b.devices[0]
    busy, idle = _times(first.exposed_ns, second.exposed_ns, scale), _times(first.causes_ns, second.causes_ns, scale)
    comparable = (first.device is None) == (second.device is None)  # else not one kind of work is the same
    changed = [Change(name, None, None, *sides) for (name, _), sides in _paired(*by_name)]
    return Diff(
        is_per_step=all(steps),
        group_by=group_by,
        window_a_ns=a.window_ns,
        window_b_ns=b.window_ns,
        step_a=_step_spread(a),
        step_b=_step_spread(b),
        busy=busy,
        idle=idle,
        unlike=tuple(_unlike(a, b)),
        parts=_parts([*busy, *idle], _Contributions(a, b, scale, changed, called_by)) if comparable else (),
        operators=_heaviest_first(
            Change(
                name,
                detail if group_by == "shapes" else None,
                None,
                *sides,
                place=None if group_by == "shapes" else detail,
            )
            for (name, detail), sides in _paired(*matched)
        ),
        kernels=_heaviest_first(Change(name, None, kind, *sides) for (name, kind), sides in _paired(*kernels)),
    )


def _detail(stat: OpStat, group_by: str) -> str | None:
    return {"shapes": stat.input_shapes, "module": stat.module, "stack": stat.stack}.get(group_by)


# Whether like is compared with like


def _unlike(a: Analysis, b: Analysis) -> Iterator[Unlike]:
    """Yield what differs beside the program, the gravest first."""
    hosts = [side.devices[0].device is None for side in (a, b)]
    if hosts[0] != hosts[1]:
        alone = "A" if hosts[0] else "B"
        yield Unlike("host_only", f"{alone} holds no work of a device, the other one does")
    names = [side.device_names[:1] for side in (a, b)]
    if all(names) and names[0] != names[1]:
        yield Unlike("device", f"A ran on {names[0][0]}, B on {names[1][0]}")
    counts = [len(side.devices) for side in (a, b)]
    if counts[0] != counts[1]:
        yield Unlike("device", f"A used {counts[0]} device(s), B {counts[1]}")
    if (a.world_size or 1) != (b.world_size or 1):
        yield Unlike("ranks", f"A is of a job of {a.world_size or 1} rank(s), B of {b.world_size or 1}")
    elif a.rank != b.rank and None not in (a.rank, b.rank):
        yield Unlike("ranks", f"A is rank {a.rank}, B rank {b.rank}")
    steps = [len(side.step_numbers) for side in (a, b)]
    if steps[0] != steps[1]:
        told = [f"{count} step(s)" if count else "no marks of steps" for count in steps]
        yield Unlike("steps", f"A holds {told[0]}, B {told[1]}")
    yield from _other_shapes(a, b)
    types = [sorted(each.removeprefix("c10::") for each in side.input_types & FLOATING) for side in (a, b)]
    if all(types) and types[0] != types[1]:
        yield Unlike("types", f"operators of A take {', '.join(types[0])}, those of B {', '.join(types[1])}")
    for name, side in (("A", a), ("B", b)):
        if side.backlog:
            calls, spent = sum(each.calls for each in side.backlog), sum(each.total_ns for each in side.backlog)
            text = (
                f"{calls:,} pieces of work of {name} ({spent / 1e6:,.1f} ms) were launched before its recording began"
            )
            yield Unlike("backlog", f"{text}; they are left out of the amounts of kernels")


def _other_shapes(a: Analysis, b: Analysis) -> Iterator[Unlike]:
    """Yield that operators of both traces mostly take inputs of other shapes, as with another size of batch."""
    known = [[stat for stat in side.operators if stat.input_shapes not in (None, "", "[]")] for side in (a, b)]
    names = {stat.name for stat in known[0]} & {stat.name for stat in known[1]}
    shapes = [{(stat.name, stat.input_shapes) for stat in side} for side in known]
    common = shapes[0] & shapes[1]
    spent, other = 0, 0
    examples: list[tuple[int, OpStat]] = []
    for stat in (each for side in known for each in side if each.name in names):
        spent += stat.cpu_self_ns
        if (stat.name, stat.input_shapes) not in common:
            other += stat.cpu_self_ns
            examples.append((stat.device_self_ns or stat.cpu_self_ns, stat))
    if not examples or other <= OTHER_SHAPES * spent:
        return
    name = max(examples, key=lambda example: example[0])[1].name
    most = [max((s for s in side if s.name == name), key=lambda s: s.calls).input_shapes or "" for side in known]
    batch = _batch_sizes(known[0], known[1], names)
    said = f", mostly {batch[0]} in A where it is {batch[1]} in B" if batch else ""
    text = f"inputs have other sizes{said}: {name} takes {most[0][:60]} in A, {most[1][:60]} in B"
    yield Unlike("shapes", text)


def _batch_sizes(a: Sequence[OpStat], b: Sequence[OpStat], names: set[str]) -> tuple[int, int] | None:
    """Return the pair of sizes that most often stand in the same place of the shapes, where there are two; else None.

    Operators of one name are paired in the order of their time; those with several shapes may be paired wrongly, which
    the majority outvotes.
    """
    votes: Counter[tuple[int, int]] = Counter()
    for name in names:
        for one, other in zip(*([s.input_shapes for s in side if s.name == name] for side in (a, b)), strict=False):
            try:
                sizes = [_flat(json.loads(shapes or "[]")) for shapes in (one, other)]
            except (ValueError, RecursionError):
                continue
            if len(sizes[0]) == len(sizes[1]):
                votes.update({pair for pair in zip(*sizes, strict=True) if pair[0] != pair[1]})
    if not votes:
        return None
    pair, count = votes.most_common(1)[0]
    return pair if count > 1 and 2 * count > max(votes.values()) else None


def _flat(value: object) -> list[int]:
    if isinstance(value, list):
        return [size for each in value for size in _flat(each)]
    return [value] if type(value) is int else []


# What the change is made of


class _Contributions:
    """Who made a kind of work or a cause of idling longer or shorter, by name."""

    def __init__(
        self,
        a: Analysis,
        b: Analysis,
        scale: tuple[float, float],
        operators: Sequence[Change],
        called_by: tuple[Callers, Callers] | None,
    ) -> None:
        self._sides = a, b
        self._scale = scale
        self._operators = {change.name: change for change in operators}
        self._called_by = called_by

    def largest(self, part: TimeChange) -> MostChanged | None:
        """Return the one that changed most in the direction of the part; None where nothing is known by name."""
        spent = [self._spent(side, part.name, factor) for side, factor in zip(self._sides, self._scale, strict=True)]
        changes = {name: spent[1].get(name, 0.0) - spent[0].get(name, 0.0) for name in {**spent[0], **spent[1]}}
        sign = 1 if part.change_ns > 0 else -1
        name = max(changes, key=lambda each: sign * changes[each], default=None)
        if name is None or sign * changes[name] <= 0:
            return None
        operator = self._operators.get(name)
        calls = None if operator is None else operator.difference("calls")
        return MostChanged(name, changes[name], calls, self._caller(name))

    def _spent(self, side: Analysis, what: str, factor: float) -> dict[str, float]:
        if what == HOST_KIND:
            pairs: Iterable[tuple[str, int]] = ((stat.name, stat.cpu_self_ns) for stat in side.operators)
        elif what in side.devices[0].exposed_ns:
            early = {(stat.name, stat.kind): stat.total_ns for stat in side.backlog}
            pairs = (
                (stat.operator or stat.name, stat.total_ns - early.get((stat.name, stat.kind), 0))
                for stat in side.kernels
                if stat.kind == what
            )
        else:
            pairs = side.devices[0].cause_details.get(what, ())
        spent: Counter[str] = Counter()
        for name, nanoseconds in pairs:
            spent[name] += nanoseconds
        return {name: nanoseconds * factor for name, nanoseconds in spent.items()}

    def _caller(self, name: str) -> Caller | None:
        """Return the caller whose calls changed most; where none did, the one with most of them."""
        if self._called_by is None:
            return None
        a, b = (
            {caller: count * factor for caller, count in side.get(name, {}).items()}
            for side, factor in zip(self._called_by, self._scale, strict=True)
        )
        known = {caller: (abs(b.get(caller, 0.0) - a.get(caller, 0.0)), b.get(caller, 0.0)) for caller in {**a, **b}}
        most = max(known, key=lambda caller: known[caller], default=None)
        return most if most is not None and any(most) else None


def _parts(changes: Sequence[TimeChange], contributions: _Contributions) -> tuple[Part, ...]:
    """Return the parts that are worth a line, the largest first."""
    ordered = sorted(changes, key=lambda change: -abs(change.change_ns))
    least = SMALL_PART * abs(ordered[0].change_ns) if ordered else 0.0
    told = (change for change in ordered if abs(change.change_ns) > least)
    return tuple(Part(change.name, change.change_ns, contributions.largest(change)) for change in told)


def _step_spread(side: Analysis) -> StepSpread | None:
    durations = [step.duration_ns for step in side.devices[0].steps]
    if not durations:
        return None
    q1, middle, q3 = (float(quartile) for quartile in np.percentile(durations, [25, 50, 75]))
    return StepSpread(len(durations), middle, q1, q3)


def _operators(stats: Sequence[OpStat], group_by: str, factor: float) -> dict[Key, Amount]:
    """Return the amounts by name and what else the operators are grouped by, or by name alone."""
    return {
        (operator.name, _detail(operator, group_by)): Amount(
            calls=operator.calls * factor,
            device_self_ns=_scaled(operator.device_self_ns, factor),
            device_total_ns=_scaled(operator.device_total_ns, factor),
            cpu_self_ns=operator.cpu_self_ns * factor,
        )
        for operator in (by_name(stats) if group_by == "name" else stats)
    }


def _kernels(side: Analysis, factor: float) -> dict[Key, Amount]:
    """Return the amounts by name and kind, without what was launched before the recording began."""
    early = {(stat.name, stat.kind): stat for stat in side.backlog}
    amounts: dict[Key, Amount] = {}
    for kernel in side.kernels:
        before = early.get((kernel.name, kernel.kind))
        calls, spent = kernel.calls, kernel.total_ns
        if before is not None:
            calls, spent = calls - before.calls, spent - before.total_ns
        if calls:
            amounts[kernel.name, kernel.kind] = Amount(calls * factor, spent * factor, spent * factor, None)
    return amounts


def _paired(
    a: Mapping[Key, Amount], b: Mapping[Key, Amount]
) -> Iterable[tuple[Key, tuple[Amount | None, Amount | None]]]:
    return [(key, (a.get(key), b.get(key))) for key in dict.fromkeys([*a, *b])]


def _heaviest_first(changes: Iterable[Change]) -> tuple[Change, ...]:
    return tuple(sorted(changes, key=lambda change: -change.weight))


def _times(a: Mapping[str, int], b: Mapping[str, int], scale: tuple[float, float]) -> tuple[TimeChange, ...]:
    changes = [TimeChange(name, _scaled(a.get(name), scale[0]), _scaled(b.get(name), scale[1])) for name in {**a, **b}]
    return tuple(sorted(changes, key=lambda change: -abs(change.change_ns)))


def _scaled(nanoseconds: int | None, factor: float) -> float | None:
    return None if nanoseconds is None else nanoseconds * factor
