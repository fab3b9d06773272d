"""What differs between two traces: the step, where the time went, operators and kernels. It claims no significance.

One trace is one sample: another run of the same program differs as well. The only spread that is known is that between
the steps inside each trace, and the change of the step time is held against it.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal, TypeVar

import msgspec

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
Name = TypeVar("Name")


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
    location: str | None = None  # of an operator: its module or stack, where grouped by that

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
    traces grouped by what `group_by` says, where that is not the shapes; `called_by` is what `callers` gives for each.
    """
    is_per_step = bool(a.step_numbers and b.step_numbers)
    sides = _Side(a, is_per_step), _Side(b, is_per_step)
    grouped = operators or (a.operators, b.operators)
    if not all(any(_detail(stat, group_by) for stat in stats) for stats in grouped):
        group_by = "name"
    matched = _paired(*(side.operators(stats, group_by) for side, stats in zip(sides, grouped, strict=True)))
    by_operator = {
        name: pair for (name, _), pair in _paired(*(side.operators(side.analysis.operators) for side in sides))
    }
    kernels = _paired(*(side.kernels() for side in sides))
    busy, idle = (
        _times(*(side.scaled(getattr(side.device, field)) for side in sides)) for field in ("exposed_ns", "causes_ns")
    )
    comparable = (sides[0].device.device is None) == (
        sides[1].device.device is None
    )  # else no kind of work is the same
    parts = []
    for change in _notable([*busy, *idle]) if comparable else ():
        most = _most_changed(change, [side.spent(change.name) for side in sides])
        if most is not None:
            name, nanoseconds = most
            operator = Change(name, None, None, *by_operator[name]) if name in by_operator else None
            calls = operator.difference("calls") if operator else None
            caller = called_by and _caller(
                [side.scaled(known.get(name, {})) for side, known in zip(sides, called_by, strict=True)]
            )
            parts.append(Part(change.name, change.change_ns, MostChanged(name, nanoseconds, calls, caller)))
        else:
            parts.append(Part(change.name, change.change_ns, None))
    return Diff(
        is_per_step=is_per_step,
        group_by=group_by,
        window_a_ns=a.window_ns,
        window_b_ns=b.window_ns,
        step_a=sides[0].step_spread(),
        step_b=sides[1].step_spread(),
        busy=busy,
        idle=idle,
        unlike=tuple(_unlike(a, b)),
        parts=tuple(parts),
        operators=_heaviest_first(
            Change(name, detail, None, *pair)
            if group_by == "shapes"
            else Change(name, None, None, *pair, location=detail)
            for (name, detail), pair in matched
        ),
        kernels=_heaviest_first(Change(name, None, kind, *pair) for (name, kind), pair in kernels),
    )


class _Side:
    """One of the two traces; its amounts are per step where both have steps."""

    def __init__(self, analysis: Analysis, is_per_step: bool) -> None:
        self.analysis = analysis
        self.device = analysis.devices[0]
        self._factor = 1 / len(analysis.step_numbers) if is_per_step else 1.0

    def scaled(self, amounts: Mapping[Name, int]) -> dict[Name, float]:
        """Return amounts per step."""
        return {name: amount * self._factor for name, amount in amounts.items()}

    def operators(self, stats: Sequence[OpStat], group_by: str = "name") -> dict[Key, Amount]:
        """Return the amounts by name and what else the operators are grouped by, or by name alone."""
        return {
            (stat.name, _detail(stat, group_by)): self._amount(
                stat.calls, stat.device_self_ns, stat.device_total_ns, stat.cpu_self_ns
            )
            for stat in (by_name(stats) if group_by == "name" else stats)
        }

    def kernels(self) -> dict[Key, Amount]:
        """Return the amounts by name and kind, without what was launched before the recording began."""
        early = {(stat.name, stat.kind): stat for stat in self.analysis.backlog}
        amounts: dict[Key, Amount] = {}
        for kernel in self.analysis.kernels:
            before = early.get((kernel.name, kernel.kind))
            calls = kernel.calls - (before.calls if before else 0)
            spent = kernel.total_ns - (before.total_ns if before else 0)
            if calls:
                amounts[kernel.name, kernel.kind] = self._amount(calls, spent, spent, None)
        return amounts

    def spent(self, what: str) -> dict[str, float]:
        """Return who spent the time of a kind of work, or what the host was in during a cause of idling."""
        if what == HOST_KIND:
            pairs: Iterable[tuple[str, int]] = ((stat.name, stat.cpu_self_ns) for stat in self.analysis.operators)
        elif what in self.device.exposed_ns:
            early = {(stat.name, stat.kind): stat.total_ns for stat in self.analysis.backlog}
            pairs = (
                (stat.operator or stat.name, stat.total_ns - early.get((stat.name, stat.kind), 0))
                for stat in self.analysis.kernels
                if stat.kind == what
            )
        else:
            pairs = self.device.cause_details.get(what, ())
        spent: Counter[str] = Counter()
        for name, nanoseconds in pairs:
            spent[name] += nanoseconds
        return self.scaled(spent)

    def step_spread(self) -> StepSpread | None:
        """Return how long its steps are; None without any."""
        length = self.device.step_quartiles.get("duration")
        if length is None:
            return None
        return StepSpread(len(self.device.steps), length.median_ns, length.first_ns, length.third_ns)

    def _amount(self, calls: int, *nanoseconds: int | None) -> Amount:
        return Amount(calls * self._factor, *(None if spent is None else spent * self._factor for spent in nanoseconds))


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
        described = [f"{count} step(s)" if count else "no marks of steps" for count in steps]
        yield Unlike("steps", f"A holds {described[0]}, B {described[1]}")
    yield from _other_shapes(a, b)
    types = [sorted(type_name.removeprefix("c10::") for type_name in side.input_types & FLOATING) for side in (a, b)]
    if all(types) and types[0] != types[1]:
        yield Unlike("types", f"operators of A take {', '.join(types[0])}, those of B {', '.join(types[1])}")
    for name, side in (("A", a), ("B", b)):
        if side.backlog:
            calls, spent = sum(kernel.calls for kernel in side.backlog), sum(kernel.total_ns for kernel in side.backlog)
            text = f"{calls:,} device operations of {name} ({spent / 1e6:,.1f} ms) were launched before its recording"
            yield Unlike("backlog", f"{text} began; they are left out of the amounts of kernels")


def _other_shapes(a: Analysis, b: Analysis) -> Iterator[Unlike]:
    """Yield that operators of both traces mostly take inputs of other shapes, as with another size of batch."""
    known = [[stat for stat in side.operators if stat.input_shapes not in (None, "", "[]")] for side in (a, b)]
    names = {stat.name for stat in known[0]} & {stat.name for stat in known[1]}
    shapes = [{(stat.name, stat.input_shapes) for stat in side} for side in known]
    common = shapes[0] & shapes[1]
    spent, other = 0, 0
    examples: list[tuple[int, OpStat]] = []
    for stat in (stat for side in known for stat in side if stat.name in names):
        spent += stat.cpu_self_ns
        if (stat.name, stat.input_shapes) not in common:
            other += stat.cpu_self_ns
            examples.append((stat.device_self_ns or stat.cpu_self_ns, stat))
    if not examples or other <= OTHER_SHAPES * spent:
        return
    name = max(examples, key=lambda example: example[0])[1].name
    most = [max((s for s in side if s.name == name), key=lambda s: s.calls).input_shapes or "" for side in known]
    text = f"inputs have other sizes: {name} takes {most[0][:60]} in A, {most[1][:60]} in B"
    yield Unlike("shapes", text)


# What the change is made of


def _notable(changes: Sequence[TimeChange]) -> list[TimeChange]:
    """Return the changes that are worth a line, the largest first."""
    ordered = sorted(changes, key=lambda change: -abs(change.change_ns))
    least = SMALL_PART * abs(ordered[0].change_ns) if ordered else 0.0
    return [change for change in ordered if abs(change.change_ns) > least]


def _most_changed(part: TimeChange, spent: Sequence[Mapping[str, float]]) -> tuple[str, float] | None:
    """Return who changed most in the direction of the part, and by how much; None where nothing is known by name."""
    changes = {name: spent[1].get(name, 0.0) - spent[0].get(name, 0.0) for name in {**spent[0], **spent[1]}}
    sign = 1 if part.change_ns > 0 else -1
    name = max(changes, key=lambda name: sign * changes[name], default=None)
    return None if name is None or sign * changes[name] <= 0 else (name, changes[name])


def _caller(calls: Sequence[Mapping[Caller, float]]) -> Caller | None:
    """Return the caller whose calls changed most; where none did, the one with most of them."""
    a, b = calls
    known = {caller: (abs(b.get(caller, 0.0) - a.get(caller, 0.0)), b.get(caller, 0.0)) for caller in {**a, **b}}
    most = max(known, key=lambda caller: known[caller], default=None)
    return most if most is not None and (most.operator or most.location) else None


def _paired(
    a: Mapping[Key, Amount], b: Mapping[Key, Amount]
) -> Iterable[tuple[Key, tuple[Amount | None, Amount | None]]]:
    return [(key, (a.get(key), b.get(key))) for key in dict.fromkeys([*a, *b])]


def _heaviest_first(changes: Iterable[Change]) -> tuple[Change, ...]:
    return tuple(sorted(changes, key=lambda change: -change.weight))


def _times(a: Mapping[str, float], b: Mapping[str, float]) -> tuple[TimeChange, ...]:
    changes = [TimeChange(name, a.get(name), b.get(name)) for name in {**a, **b}]
    return tuple(sorted(changes, key=lambda change: -abs(change.change_ns)))
