"""Read a Chrome trace into columns: one row per event with a duration, times in integer nanoseconds."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from boundby.trace.decoding import MAX_JSON_BYTES, Decoding, NotATrace
from boundby.trace.table import OPERATOR, RENAMED, Columns, MemoryTable

PROFILER_STEP = re.compile(r"^ProfilerStep#[0-9]{1,18}\Z")


@dataclass(frozen=True)
class Trace:
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
    faults: tuple[str, ...]  # what of the file could not be read, a sentence each; () where it is whole

    @cached_property
    def is_step_mark(self) -> np.ndarray:
        """A mask of the events that are marks of steps, on the host or on a device."""
        return self.named(PROFILER_STEP)

    @cached_property
    def is_operator(self) -> np.ndarray:
        """A mask of the events that are calls of operators."""
        return self.in_categories([OPERATOR]) & ~self.is_step_mark

    def in_categories(self, wanted: Iterable[str]) -> np.ndarray:
        """Return a mask of the events whose category is one of `wanted`."""
        wanted = set(wanted)
        return np.array([name in wanted for name in self.categories], dtype=bool)[self.category]

    def named(self, pattern: re.Pattern[str], among: np.ndarray | None = None, *, lower: bool = False) -> np.ndarray:
        """Return a mask of the events in whose name `pattern` is found, of those of the mask `among` or of all.

        With `lower` it is looked for in the names in lower case.
        """
        names = range(len(self.names)) if among is None else np.flatnonzero(np.bincount(self.name[among])).tolist()
        found = np.zeros(len(self.names), dtype=bool)
        if lower:
            chosen = [number for number in names if pattern.search(self.names[number].lower())]
        else:
            chosen = [number for number in names if pattern.search(self.names[number])]
        found[chosen] = True
        return found[self.name] if among is None else found[self.name] & among


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
        faults=(*decoding.faults, *columns.faults()),
    )


def step_count(trace: Trace) -> int:
    """Return the number of different `ProfilerStep#k` marks in the trace."""
    return sum(PROFILER_STEP.fullmatch(name) is not None for name in trace.names)


def _whole_number(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
