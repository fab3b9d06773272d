"""Read a Chrome trace into columns: one row per event with a duration, and one per change of the allocated memory."""

import itertools
import operator
import re
from array import array
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np

from boundby.trace.decoding import (
    MAX_JSON_BYTES,
    Args,
    Complete,
    Decoding,
    Event,
    Fault,
    Instant,
    MemoryArgs,
    NotATrace,
    exact_nanoseconds,
    whole_nanoseconds,
)

ABSENT = -1  # in a column of ids: the event does not carry this id
MOST_EVENTS = 30_000_000  # about 3 GB of columns
MEMORY = "[memory]"
# Names of the first releases of Kineto, which later ones replaced.
RENAMED = {
    "Kernel": "kernel",
    "Memcpy": "gpu_memcpy",
    "Memset": "gpu_memset",
    "Runtime": "cuda_runtime",
    "Operator": "cpu_op",
}
DEVICE_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")
OPERATOR = "cpu_op"
PYTHON_FRAME = "python_function"
ANNOTATION = "user_annotation"
LAUNCH_CATEGORIES = (
    "cuda_runtime",
    "cuda_driver",
    "hip_runtime",
    "hip_driver",
    "xpu_runtime",
    "xpu_driver",
    "privateuse1_runtime",
    "privateuse1_driver",
)
HOST_CATEGORIES = (OPERATOR, ANNOTATION, PYTHON_FRAME, *LAUNCH_CATEGORIES)
# What else Kineto writes with a duration, and what a trace says without it.
OTHER_CATEGORIES = ("", "Trace", "ac2g", "fwdbwd", "cpu_instant_event", "gpu_user_annotation", "overhead", "cuda_event")
SYNC_RECORD = "cuda_sync"  # what the device waited for, where torch was asked to record that
UNDERSTOOD = frozenset((*DEVICE_CATEGORIES, *HOST_CATEGORIES, *OTHER_CATEGORIES, SYNC_RECORD))
_Groups = dict[str, tuple[np.ndarray, list[Args]]]
TYPE = re.compile(rb'"([\w:]+)"')
DURATION = operator.attrgetter("dur")
MOST_TYPED = 10_000  # operators whose types are looked at: what a program computes in, its first steps tell
LONGEST_NUMBER = 40  # characters
FIRST_ODD_STREAM = 2**30  # a stream whose number is an address, or a text, gets one from here on
_NO_ARGS = Args()
_NO_MEMORY_ARGS = MemoryArgs()


class MemoryTable(msgspec.Struct, frozen=True):
    """The changes of the allocated memory as columns of equal length, in the order of the file.

    `thread` is an index into the `threads` of the trace. `device` is the number of the GPU and `ABSENT` for the host.
    """

    start_ns: np.ndarray  # since the base_ns of the trace
    thread: np.ndarray
    device: np.ndarray
    address: np.ndarray
    bytes: np.ndarray  # negative when memory is given back
    allocated_bytes: np.ndarray  # on that device, afterwards; ABSENT where it is not recorded
    reserved_bytes: np.ndarray


class Columns:
    """Gathers the columns chunk by chunk, so that the decoded events of only one chunk are held at a time."""

    def __init__(self) -> None:
        self.names: Mapping[str, int] = _numbering()
        self.categories: Mapping[str, int] = _numbering()
        self.threads: Mapping[tuple[Any, Any], int] = _numbering()
        self.shapes: Mapping[bytes, int] = _numbering(b"")  # in front, so that it gets, one less, ABSENT
        self._kinds: dict[tuple[str, str, Any, Any], int] = _numbering()
        self._numbers = array("i")  # of the category, the name and the thread of each kind
        self._types: set[bytes] = set()
        self._typed = 0
        self._streams: Mapping[int | str, int] = _numbering()
        self._events: list[dict[str, np.ndarray]] = []
        self._memory: list[dict[str, np.ndarray]] = []
        self._count = self._untimed = 0
        self._example = ""

    def add(self, events: Sequence[Event]) -> None:
        """Take in the events of one chunk; those without a usable time are left out and counted.

        Raises ValueError beyond `MOST_EVENTS`.
        """
        complete = [event for event in events if type(event) is Complete]
        memory = [event for event in events if type(event) is Instant and event.name == MEMORY]
        self._count += len(complete)
        if self._count > MOST_EVENTS:
            raise ValueError(f"it holds more than {MOST_EVENTS:,} events with a duration, the limit here")
        if complete:
            self._events.append(self._rows_of(complete))
        if memory:
            self._memory.append(self._memory_rows(memory))

    def faults(self) -> list[Fault]:
        """Return what was left out."""
        faults = []
        if self._untimed:
            text = f"{self._untimed:,} event(s) have no usable time and were left out; the first: {self._example!r}"
            faults.append(Fault("untimed", self._untimed, text))
        return faults

    def types(self) -> frozenset[str]:
        """Return the element types of the inputs of operators, as the file has them."""
        return frozenset(word.decode() for types in self._types for word in TYPE.findall(types))

    def events(self) -> dict[str, np.ndarray]:
        """Return the columns of the events with a duration and forget them."""
        return _joined(self._events or [self._rows_of([])])

    def memory(self) -> dict[str, np.ndarray]:
        """Return the columns of the changes of memory and forget them."""
        return _joined(self._memory or [self._memory_rows([])])

    def _rows_of(self, events: list[Complete]) -> dict[str, np.ndarray]:
        start_ns, duration_ns, usable = self._times(events)
        if not usable.all():
            events = [event for event, is_usable in zip(events, usable.tolist(), strict=True) if is_usable]
            start_ns, duration_ns = start_ns[usable], duration_ns[usable]
        category, name, thread = self._kinds_of(events)
        args = [event.args for event in events]
        groups = self._groups(category, args)
        rows = {
            "start_ns": start_ns,
            "duration_ns": duration_ns,
            "name": name,
            "category": category,
            "thread": thread,
        }
        for column, (kinds, kind_of_number) in _OPTIONAL.items():
            rows[column] = _scattered(len(events), groups, kinds, column, kind_of_number)
        self._number_odd_streams(rows["stream"], *groups["device"])
        rows["input_shapes"] = self._shapes_of(len(events), *groups["operator"])
        return rows

    def _kinds_of(self, events: list[Complete]) -> np.ndarray:
        """Return the category, the name and the thread of each event as rows of numbers.

        What happens on a thread repeats, so one search does: 27,000 events took 5.0 ms, three searches 8.6.
        """
        kinds = self._kinds
        kind = np.array([kinds[event.cat, event.name, event.pid, event.tid] for event in events], dtype=np.int32)
        new = list(itertools.islice(reversed(kinds), len(kinds) - len(self._numbers) // 3))
        for category, name, pid, tid in reversed(new):
            self._numbers.extend((self.categories[category], self.names[name], self.threads[pid, tid]))
        return np.frombuffer(self._numbers, dtype=np.intc).reshape(-1, 3).T[:, kind]

    def _times(self, events: list[Complete]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        start_ns, is_start = exact_nanoseconds([event.ts for event in events])
        duration_ns, is_duration = whole_nanoseconds(np.fromiter(map(DURATION, events), np.float64, len(events)))
        usable = is_start & is_duration
        unusable = np.flatnonzero(~usable)
        if len(unusable):
            self._untimed += len(unusable)
            self._example = self._example or events[unusable[0]].name[:80]
        return start_ns, duration_ns, usable

    def _groups(self, category: np.ndarray, args: Sequence[Args | None]) -> _Groups:
        """Return rows and arguments of each kind of event, so that a field is read only of those that carry it."""
        kinds = [_kind(name) for name in self.categories]
        groups = {}
        for kind in ("operator", "launch", "device", "python"):
            rows = np.flatnonzero(np.array([name == kind for name in kinds])[category])
            groups[kind] = rows, [args[row] or _NO_ARGS for row in rows.tolist()]
        return groups

    def _number_odd_streams(self, stream: np.ndarray, rows: np.ndarray, args: Sequence[Args]) -> None:
        """Give a number to each stream that the file tells by an address or a name."""
        lacking = np.flatnonzero(stream[rows] == ABSENT)
        for index in lacking.tolist():
            value = args[index].stream
            if value not in (None, ABSENT) and isinstance(value, int | str):
                stream[rows[index]] = FIRST_ODD_STREAM + self._streams[value] % FIRST_ODD_STREAM

    def _shapes_of(self, count: int, rows: np.ndarray, args: Sequence[Args]) -> np.ndarray:
        column = np.full(count, ABSENT, dtype=np.int32)
        shapes = self.shapes
        if self._typed < MOST_TYPED:
            self._types.update(bytes(of_call.input_type) for of_call in args)
            self._typed += len(args)
        column[rows] = np.array([shapes[bytes(of_call.input_dims)] for of_call in args], dtype=np.int32) - 1
        return column

    def _memory_rows(self, events: Sequence[Instant]) -> dict[str, np.ndarray]:
        start_ns, usable = exact_nanoseconds([event.ts for event in events])
        args = [event.args or _NO_MEMORY_ARGS for event in events]
        rows = {
            "start_ns": start_ns,
            "thread": np.array([self.threads[event.pid, event.tid] for event in events], dtype=np.int32),
            **{name: _column(args, field, kind) for name, (field, kind) in _OF_MEMORY.items()},
        }
        rows["device"][_column(args, "device_type", np.int32) == 0] = ABSENT  # the host
        return {name: column[usable] for name, column in rows.items()}


_OF_MEMORY: dict[str, tuple[str, type]] = {
    "device": ("device", np.int32),
    "address": ("address", np.int64),
    "bytes": ("bytes", np.int64),
    "allocated_bytes": ("allocated", np.int64),
    "reserved_bytes": ("reserved", np.int64),
}
_OPTIONAL: dict[str, tuple[tuple[str, ...], type]] = {
    "external_id": (("operator", "device"), np.int64),
    "correlation": (("launch", "device"), np.int64),
    "stream": (("device",), np.int32),
    "device": (("device",), np.int32),
    "bytes": (("device",), np.int64),
    "python_id": (("python",), np.int64),
    "python_parent_id": (("python",), np.int64),
}


def _kind(category: str) -> str:
    category = RENAMED.get(category, category)
    if category in DEVICE_CATEGORIES or category == SYNC_RECORD:
        return "device"
    if category in LAUNCH_CATEGORIES:
        return "launch"
    return {OPERATOR: "operator", PYTHON_FRAME: "python"}.get(category, "other")


def _numbering(*known: Hashable) -> dict[Any, int]:
    """Return the numbers of values, in which every value that is looked up has one: a new one is given the next."""
    numbers: dict[Any, int] = defaultdict(itertools.count().__next__)
    for value in known:
        numbers[value]
    return numbers


def _scattered(count: int, groups: _Groups, kinds: Iterable[str], column: str, kind_of_number: type) -> np.ndarray:
    numbers: np.ndarray = np.full(count, ABSENT, dtype=kind_of_number)
    for kind in kinds:
        rows, of_kind = groups[kind]
        if len(rows):
            numbers[rows] = _column(of_kind, column, kind_of_number)
    return numbers


def _column(args: Sequence[Any], field: str, kind: type) -> np.ndarray:
    """Return a field of some arguments as integers; `ABSENT` where it is none of `kind`."""
    value = operator.attrgetter(field)
    try:
        return np.fromiter(map(value, args), kind, len(args))
    except (TypeError, ValueError, OverflowError):  # some lack it, or it does not fit
        return _numbers(list(map(value, args)), kind)


def _numbers(values: Sequence[object], kind: type) -> np.ndarray:
    """Return the values as integers, those written as text too; `ABSENT` is what is none, or does not fit `kind`."""
    limit = int(np.iinfo(kind).max)
    return np.array(
        [value if type(value) is int and -limit <= value <= limit else _parsed(value, limit) for value in values],
        dtype=kind,
    )


def _parsed(value: object, limit: int) -> int:
    """Return the whole number that an odd value stands for; ROCm writes the addresses of its streams as `"0x0"`."""
    try:
        if isinstance(value, str) and len(value) <= LONGEST_NUMBER:
            number = int(value, 16 if value[:2] in ("0x", "0X") else 10)
        elif isinstance(value, float) and value.is_integer():
            number = int(value)
        else:
            return ABSENT
    except ValueError:
        return ABSENT
    return number if abs(number) <= limit else ABSENT


def _joined(chunks: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Return the columns of all chunks; one after another, so that no moment holds all of them twice."""
    return {name: np.concatenate([chunk.pop(name) for chunk in chunks]) for name in list(chunks[0])}


Table = TypeVar("Table", "Trace", MemoryTable)
PROFILER_STEP = re.compile(r"^ProfilerStep#[0-9]{1,18}\Z")


class Trace(msgspec.Struct, frozen=True, dict=True):
    """The events with a duration of one trace as columns of equal length, in the order of the file.

    `name`, `category`, `thread` and `input_shapes` are indices into `names`, `categories`, `threads` (pid, tid) and
    `shapes` (JSON text). Every other column of ids holds the value in the file. `table.ABSENT` stands for "not
    recorded"; a field is read only of events that are known to carry it.
    """

    path: Path
    base_ns: int  # the time of the earliest event on the trace's own clock
    names: tuple[str, ...]
    categories: tuple[str, ...]
    threads: tuple[tuple[Any, Any], ...]
    shapes: tuple[str, ...]
    name: np.ndarray
    category: np.ndarray
    thread: np.ndarray
    input_shapes: np.ndarray  # of operators
    start_ns: np.ndarray  # since base_ns
    duration_ns: np.ndarray  # as the file has it: a broken trace holds negative ones
    external_id: np.ndarray  # of operators and device events
    correlation: np.ndarray  # of launches and device events
    stream: np.ndarray  # of device events, as are device and bytes
    device: np.ndarray
    bytes: np.ndarray
    python_id: np.ndarray
    python_parent_id: np.ndarray
    memory: MemoryTable
    rank: int | None  # in its distributed job; None where the trace does not say
    world_size: int | None
    device_names: tuple[str, ...]  # of the GPUs that the machine has
    input_types: frozenset[str]  # of the inputs of operators, such as "c10::Half"; empty where shapes were not recorded
    faults: tuple[Fault, ...]  # what of the file could not be read; () where it is whole
    process: Any = None  # the one of several in the file that this is of; None: the file is of one, or not taken apart

    @cached_property
    def is_step_mark(self) -> np.ndarray:
        """A mask of the events that are marks of steps, on the host or on a device."""
        return self.named(PROFILER_STEP)

    @cached_property
    def processes(self) -> tuple[Any, ...]:
        """The processes of the host that ran operators, in the order of the file; several, where ranks share a file."""
        threads = np.flatnonzero(np.bincount(self.thread[self.is_operator], minlength=len(self.threads))).tolist()
        return tuple(dict.fromkeys(self.threads[thread][0] for thread in threads))

    @cached_property
    def not_understood(self) -> dict[str, int]:
        """How many events there are of each category that nothing here reads, most first: of other accelerators."""
        counts = np.bincount(self.category, minlength=len(self.categories)).tolist()
        odd: Counter[str] = Counter()
        for name, count in zip(self.categories, counts, strict=True):
            if count and name not in UNDERSTOOD:
                odd[name] += count
        return dict(odd.most_common())

    @cached_property
    def is_operator(self) -> np.ndarray:
        """A mask of the events that are calls of operators."""
        mask: np.ndarray = self.in_categories([OPERATOR]) & ~self.is_step_mark
        return mask

    def in_categories(self, wanted: Iterable[str]) -> np.ndarray:
        """Return a mask of the events whose category is one of `wanted`; not to be written to."""
        wanted = frozenset(wanted)
        if wanted not in self._masks:
            is_wanted = np.array([name in wanted for name in self.categories], dtype=bool)
            self._masks[wanted] = is_wanted[self.category]
        return self._masks[wanted]

    @cached_property
    def _masks(self) -> dict[frozenset[str], np.ndarray]:
        return {}

    def named(self, pattern: re.Pattern[str], among: np.ndarray | None = None, *, lower: bool = False) -> np.ndarray:
        """Return a mask of the events in whose name `pattern` is found, of those of the mask `among` or of all.

        With `lower` it is looked for in the names in lower case.
        """
        names = range(len(self.names)) if among is None else np.flatnonzero(np.bincount(self.name[among])).tolist()
        is_match = np.zeros(len(self.names), dtype=bool)
        if lower:
            chosen = [number for number in names if pattern.search(self.names[number].lower())]
        else:
            chosen = [number for number in names if pattern.search(self.names[number])]
        is_match[chosen] = True
        mask: np.ndarray = is_match[self.name]
        return mask if among is None else mask & among


def read_trace(path: str | Path, *, max_json_bytes: int = MAX_JSON_BYTES) -> Trace:
    """Return the columns of the trace at `path`, plain JSON or gzip whatever its suffix.

    What a damaged file still holds is read, and `faults` says what is missing. Raises OSError when the file cannot be
    read, and ValueError naming the file and the fault when it is damaged or holds more than `max_json_bytes` of JSON;
    the error is a `NotATrace` where the file is something else.
    """
    path = Path(path)
    columns, decoding = Columns(), Decoding(path, max_json_bytes)
    try:
        for events in decoding:
            columns.add(events)
    except ValueError as error:
        kind = NotATrace if isinstance(error, NotATrace) else ValueError
        raise kind(f"{path} is not a readable Chrome trace: {error}") from None
    rows, memory = columns.events(), columns.memory()
    base_ns = int(rows["start_ns"].min()) if len(rows["start_ns"]) else 0
    rows["start_ns"] -= base_ns
    memory["start_ns"] -= base_ns
    distributed = decoding.header.distributed or {}
    return Trace(
        path=path,
        base_ns=base_ns,
        names=tuple(columns.names),
        categories=tuple(RENAMED.get(name, name) for name in columns.categories),
        threads=tuple(columns.threads),
        shapes=tuple(text.decode(errors="replace") for text in columns.shapes if text),
        **rows,
        memory=MemoryTable(**memory),
        rank=_whole_number(distributed.get("rank")),
        world_size=_whole_number(distributed.get("world_size")),
        device_names=tuple(str(device.get("name", "unknown")) for device in decoding.header.devices or ()),
        input_types=columns.types(),
        faults=(*decoding.faults, *columns.faults()),
    )


def chosen(table: Table, kept: np.ndarray) -> Table:
    """Return the rows of a record of columns that the mask `kept` has."""
    columns = msgspec.structs.asdict(table)
    arrays = {name: column[kept] for name, column in columns.items() if isinstance(column, np.ndarray)}
    return msgspec.structs.replace(table, **arrays)


def step_count(trace: Trace) -> int:
    """Return the number of different `ProfilerStep#k` marks in the trace."""
    return sum(PROFILER_STEP.fullmatch(name) is not None for name in trace.names)


def _whole_number(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
