"""Read a Chrome trace into columns: one row per complete event (`"ph": "X"`), times in integer nanoseconds."""

import gzip
import itertools
import math
import re
import zlib
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

ABSENT = -1  # in a column of ids: the event does not carry this id
GZIP_MAGIC = b"\x1f\x8b"
# Up to here neighbouring doubles are less than one nanosecond apart, so a timestamp in µs that went through a double
# still rounds to its own nanosecond. torch 2.9+ writes about 4.4e12; older versions wrote µs since 1970, about 1.7e15.
EXACT_IN_DOUBLE_US = 2.0**43
LONGEST_US = 2.0**61 / 1000  # 73 years: int64 nanoseconds also hold the difference of two such times plus a third
PROFILER_STEP = re.compile(r"ProfilerStep#\d+")
DEVICE_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")


@dataclass(frozen=True)
class Trace:
    """The complete events of one trace as columns of equal length, in the order of the file.

    `name`, `category`, `thread` and `input_shapes` are indices into `names`, `categories`, `threads` (pid, tid) and
    `shapes` (JSON text). Every other column of ids holds the value in the file. `ABSENT` stands for "not recorded".
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
    input_shapes: np.ndarray
    start_ns: np.ndarray  # since base_ns
    duration_ns: np.ndarray  # as the file has it: a broken trace holds negative ones
    external_id: np.ndarray
    correlation: np.ndarray
    python_id: np.ndarray
    python_parent_id: np.ndarray

    def in_categories(self, wanted: Iterable[str]) -> np.ndarray:
        """Return a mask of the events whose category is one of `wanted`."""
        wanted = set(wanted)
        return np.array([name in wanted for name in self.categories], dtype=bool)[self.category]


class _Args(msgspec.Struct, gc=False):
    external_id: int | None = msgspec.field(default=None, name="External id")
    correlation: int | None = None
    input_dims: msgspec.Raw = msgspec.field(default=msgspec.Raw(), name="Input Dims")
    python_id: int | None = msgspec.field(default=None, name="Python id")
    python_parent_id: int | None = msgspec.field(default=None, name="Python parent id")


class _Event(msgspec.Struct, gc=False):
    ph: str = ""
    cat: str = ""
    name: str = ""
    pid: int | str | None = None
    tid: int | str | None = None
    ts: float = math.nan
    dur: float = math.nan
    args: _Args | None = None


class _File(msgspec.Struct):
    events: list[_Event] = msgspec.field(name="traceEvents")


class _ExactEvent(msgspec.Struct, gc=False):
    ph: str = ""
    ts: Decimal | None = None


class _ExactFile(msgspec.Struct):
    events: list[_ExactEvent] = msgspec.field(name="traceEvents")


def read_trace(path: str | Path) -> Trace:
    """Return the columns of the trace at `path`, plain JSON or gzip whatever its suffix.

    Raises OSError when the file cannot be read and ValueError naming the file and the fault when it is no trace.
    """
    path = Path(path)
    content = path.read_bytes()
    try:
        if content.startswith(GZIP_MAGIC):
            content = gzip.decompress(content)
        events = [event for event in _decode(content, _File).events if event.ph == "X"]
        return _columns(path, events, content)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(f"{path} is a damaged gzip file, perhaps cut short: {error}") from None
    except (ValueError, OverflowError, RecursionError) as error:
        raise ValueError(f"{path} is not a Chrome trace: {error}") from None


def step_count(trace: Trace) -> int:
    """Return the number of different `ProfilerStep#k` marks in the trace."""
    return sum(PROFILER_STEP.fullmatch(name) is not None for name in trace.names)


def _decode(content: bytes, shape: type) -> Any:
    return msgspec.json.Decoder(shape, strict=False).decode(content)  # old traces write some numbers as text


def _columns(path: Path, events: Sequence[_Event], content: bytes) -> Trace:
    start_ns, base_ns = _start_times(events, content)
    none = _Args()
    args = [event.args or none for event in events]
    names, name = _indexed(event.name for event in events)
    categories, category = _indexed(event.cat for event in events)
    threads, thread = _indexed((event.pid, event.tid) for event in events)
    # The empty text is put in front, so that it gets number 0 and, one less, ABSENT.
    shapes, shape_numbers = _indexed(itertools.chain([b""], (bytes(a.input_dims) for a in args)))
    return Trace(
        path=path,
        base_ns=base_ns,
        names=names,
        categories=categories,
        threads=threads,
        shapes=tuple(text.decode() for text in shapes[1:]),
        name=name,
        category=category,
        thread=thread,
        input_shapes=shape_numbers[1:] - 1,
        start_ns=start_ns,
        duration_ns=_nanoseconds(events, "dur"),
        external_id=_ids(a.external_id for a in args),
        correlation=_ids(a.correlation for a in args),
        python_id=_ids(a.python_id for a in args),
        python_parent_id=_ids(a.python_parent_id for a in args),
    )


def _indexed(values: Iterable[Hashable]) -> tuple[tuple[Any, ...], np.ndarray]:
    """Return the different values in order of appearance, and for each value its number among them."""
    numbers: dict[Hashable, int] = {}
    column = np.array([numbers.setdefault(value, len(numbers)) for value in values], dtype=np.int32)
    return tuple(numbers), column


def _ids(values: Iterable[int | None]) -> np.ndarray:
    return np.array([ABSENT if value is None else value for value in values], dtype=np.int64)


def _start_times(events: Sequence[_Event], content: bytes) -> tuple[np.ndarray, int]:
    """Return the start times since the earliest event, and that event's own time, exact to the nanosecond."""
    start_ns = _nanoseconds(events, "ts")
    if not len(start_ns):
        return start_ns, 0
    if max(abs(event.ts) for event in events) >= EXACT_IN_DOUBLE_US:
        exact = _decode(content, _ExactFile).events
        start_ns = np.array([int((event.ts * 1000).to_integral_value()) for event in exact if event.ph == "X"])
    base_ns = int(start_ns.min())
    return start_ns - base_ns, base_ns


def _nanoseconds(events: Sequence[_Event], field: str) -> np.ndarray:
    microseconds = np.array([getattr(event, field) for event in events], dtype=np.float64)
    unusable = np.flatnonzero(~(np.abs(microseconds) < LONGEST_US))
    if len(unusable):
        event = events[unusable[0]]
        raise ValueError(f"the event {event.name[:80]!r} has no usable {field}: {getattr(event, field)} µs")
    whole = np.floor(microseconds)  # the product of the whole number and 1000 would lose nanoseconds above 4.5e12
    return whole.astype(np.int64) * 1000 + np.rint((microseconds - whole) * 1000).astype(np.int64)
