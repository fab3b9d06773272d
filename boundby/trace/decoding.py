"""The events of a trace, decoded in chunks that end between two events; damaged ones are left out and counted.

A chunk that is sound JSON is decoded by msgspec into typed records, which skips every key that nothing reads. One that
is not (an invalid name, a `NaN`, a wrong type, the end of a file that was cut short) is gone through event by event.
A chunk is cut where an event seems to end; brackets and quotes balance only where one really does.

Times become integer nanoseconds without a detour over floats: older traces count µs since 1970, about 1.7e15, where
neighbouring doubles are 250 ns apart.
"""

import contextlib
import itertools
import json
import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, cast

import msgspec
import numpy as np

from boundby.trace.source import Source

MAX_JSON_BYTES = 4 * 2**30  # decompressed; columns take a third of that, of the densest possible events six times
DEEPEST = 900  # levels that are surely opened before reading one in the other gives up
LARGEST_EVENT_BYTES = 64 * 2**20  # of text without the end of an event in it
MOST_OPENINGS = 64  # places that look like the start of the list; each costs decoding what stands before it
SPACE_BYTES = 4096  # of blanks that may stand before a bracket, or inside of an opening
LARGEST_HEADER_BYTES = 64 * 2**20
START = re.compile(rb'"traceEvents"\s*:\s*\[')
BETWEEN = re.compile(rb"\}\s*,\s*(?=\{)")
BETWEEN_TEXT = re.compile(r"\}\s*,\s*(?=\{)")
LARGEST_CARRIED = 4 * 2**20  # characters of an unsound event that may go on in the next piece; then it is given up
# Of an event, which types each field may have that it may lack as well.
OPTIONAL: dict[str, tuple[type, ...]] = {"cat": (str,), "pid": (int, str), "tid": (int, str), "args": (dict,)}
LONGEST_LITERAL = 16  # characters: "-Infinity", an escape; an error so near to the end may be the end
NEAR_THE_END_BYTES = 4096  # of a chunk, searched first for the end of its last event
FILLING = re.compile(r"[^\s,]")
# The phases of the Chrome trace format without a duration: instants, counters, flows, metadata, objects, ...
OTHER_PHASES = "BEIMPCsftbneSTpFNODRcVv()a"
NAMED = 80  # characters of a text that a message quotes
LONGEST_DURATION_US = 2.0**46 / 1000  # 19 hours: the sum of 100,000 such durations is an int64 as well
LONGEST_US = 2.0**61 / 1000  # 73 years: int64 nanoseconds also hold the difference of two such times plus a third
MOST_DIGITS = 16  # of the whole µs below LONGEST_US
FRACTION_DIGITS = 3


class NotATrace(ValueError):
    """A file that is whole as far as it goes, and something else than a trace."""


class Fault(msgspec.Struct, frozen=True):
    """What of a file could not be read. `events` are left out; None: all that the file lacks."""

    kind: Literal["cut_short", "damaged", "untimed"]
    events: int | None
    text: str


class Args(msgspec.Struct, gc=False):
    """What is read of the arguments of an event with a duration; of any type, since none of them is worth the event."""

    external_id: Any = msgspec.field(default=None, name="External id")
    correlation: Any = None
    stream: Any = None
    device: Any = None
    bytes: Any = None
    input_dims: msgspec.Raw = msgspec.field(default=msgspec.Raw(), name="Input Dims")
    input_type: msgspec.Raw = msgspec.field(default=msgspec.Raw(), name="Input type")
    python_id: Any = msgspec.field(default=None, name="Python id")
    python_parent_id: Any = msgspec.field(default=None, name="Python parent id")


class MemoryArgs(msgspec.Struct, gc=False):
    """What is read of the arguments of an instant event: those of `[memory]`."""

    address: Any = msgspec.field(default=None, name="Addr")
    bytes: Any = msgspec.field(default=0, name="Bytes")
    allocated: Any = msgspec.field(default=None, name="Total Allocated")
    reserved: Any = msgspec.field(default=None, name="Total Reserved")
    device_type: Any = msgspec.field(default=None, name="Device Type")
    device: Any = msgspec.field(default=None, name="Device Id")


class Timed(msgspec.Struct, gc=False):
    """What all events at a time have in common. `ts` is the number in µs as the file writes it."""

    cat: str = ""
    name: str = ""
    pid: int | str | None = None
    tid: int | str | None = None
    ts: msgspec.Raw = msgspec.Raw()


class Complete(Timed, gc=False, tag_field="ph", tag="X"):
    """An event with a start and a duration in µs."""

    dur: float = math.nan
    args: Args | None = None


class Instant(Timed, gc=False, tag_field="ph", tag="i"):
    """A point in time."""

    args: MemoryArgs | None = None


class Header(msgspec.Struct):
    """What a trace says about itself, as far as it is read."""

    distributed: dict[str, Any] | None = msgspec.field(default=None, name="distributedInfo")
    devices: list[dict[str, Any]] | None = msgspec.field(default=None, name="deviceProperties")


Event = Complete | Instant
_PHASES: Any = Event
for _phase in OTHER_PHASES:
    _PHASES |= msgspec.defstruct(f"Phase{ord(_phase)}", [], gc=False, tag_field="ph", tag=_phase)


class _Rest(Header):
    events: list[_PHASES] = msgspec.field(default_factory=list, name="traceEvents")


_EVENTS = msgspec.json.Decoder(list[_PHASES], strict=False)  # old traces write some numbers as text
_EVENT = msgspec.json.Decoder(_PHASES, strict=False)
_REST = msgspec.json.Decoder(_Rest, strict=False)
_HEADER = msgspec.json.Decoder(Header, strict=False)
_LENIENT = json.JSONDecoder(strict=False, parse_float=str, parse_constant=lambda _: None)
_UNSOUND = (msgspec.MsgspecError, ValueError, RecursionError, OverflowError)


class Decoding:
    """Iterates over the events of a trace, a list per chunk; `header` and `faults` are complete after the last one."""

    def __init__(self, path: Path, max_json_bytes: int = MAX_JSON_BYTES) -> None:
        self.header = Header()
        self.faults: list[Fault] = []
        self._source = Source(path)
        self._max_json_bytes = max_json_bytes
        self._damaged = 0
        self._example = ""

    def __iter__(self) -> Iterator[list[Event]]:
        """Raise OSError when the file cannot be read, ValueError when it is no trace or larger than allowed."""
        pieces = self._bounded(self._source)
        text, opening = self._skip_header(pieces)
        for piece in itertools.chain([b""], pieces):  # first what followed the header
            end = _last_boundary(piece)
            if end is None:  # one event may end where the pieces meet
                text, piece = b"", text + piece
                end = _last_boundary(piece)
            if end is None:
                text = piece
            else:
                events, text = self._chunk(text, piece, end)
                yield events
            if len(text) > LARGEST_EVENT_BYTES:
                raise ValueError(f"no event ends within {len(text) / 1e6:.0f} MB")
        yield self._last(text, opening)
        if self._source.fault:
            self.faults.append(Fault("cut_short", None, self._source.fault))
        if self._damaged:
            reason = f"{self._damaged:,} event(s) could not be read; the first one: {self._example}"
            self.faults.append(Fault("damaged", self._damaged, reason))

    def _bounded(self, source: Source) -> Iterator[bytes]:
        total = 0
        for piece in source:
            total += len(piece)
            if total > self._max_json_bytes:
                raise ValueError(f"it holds more than {self._max_json_bytes / 2**30:.2f} GiB of JSON, the limit here")
            yield piece

    def _skip_header(self, pieces: Iterator[bytes]) -> tuple[bytes, bytes]:
        """Return the text after the opening of the list of events, and the opening that makes it JSON again."""
        text, searched, tries = b"", 0, 0
        for piece in pieces:
            text += piece
            if text[:SPACE_BYTES].lstrip()[:1] == b"[":
                return text.lstrip()[1:], b"["
            for match in START.finditer(text, searched):
                tries += 1
                if tries > MOST_OPENINGS:
                    break
                with contextlib.suppress(*_UNSOUND):  # the words stand in a text, or deeper
                    self.header = _header(text[: match.end()] + b"]}")
                    return text[match.end() :], b'{"traceEvents":['
            if tries > MOST_OPENINGS or len(text) > LARGEST_HEADER_BYTES:
                break
            searched = max(0, len(text) - SPACE_BYTES)
        if self._source.fault:
            raise ValueError(self._source.fault)
        raise NotATrace("it holds no list of traceEvents")

    def _chunk(self, start: bytes, text: bytes, end: int) -> tuple[list[Event], bytes]:
        """Return the events of `start` and of `text` up to the `end` of the last one there, and what follows them."""
        try:
            events = _EVENTS.decode(b"".join((b"[", start, memoryview(text)[:end], b"]")))
            return events, text[end:].lstrip(b", \t\r\n")
        except _UNSOUND:
            events, rest = self._one_by_one((start + text).decode("utf-8", "replace"), more_follows=True)
            return events, rest.encode()

    def _last(self, text: bytes, opening: bytes) -> list[Event]:
        """Return the events of the last chunk and read what stands behind the list."""
        try:
            if opening == b"[":
                return _EVENTS.decode(opening + text)
            rest = _REST.decode(opening + text)
            self._add_to_header(rest)
            return rest.events
        except _UNSOUND:
            events, left = self._one_by_one(text.decode("utf-8", "replace"), more_follows=False)
        if opening == b"[":
            is_whole = left.strip() in ("", "]")  # the format lets the last bracket of a bare list be missing
        else:
            is_whole = False
            with contextlib.suppress(*_UNSOUND):
                self._add_to_header(_header(opening + left.encode()))
                is_whole = True
        if not is_whole:
            reason = "the file ends before its list of events, or what follows it, does: it was cut short"
            self.faults.append(Fault("cut_short", None, reason))
        return events

    def _one_by_one(self, text: str, *, more_follows: bool) -> tuple[list[Event], str]:
        """Return the sound events of `text`, and the text after them: a part of an event, or from the end of the list.

        After damage the next object may lie inside of another, so a bracket ends the list only behind a sound event.
        """
        events: list[Event] = []
        at, in_step = 0, True
        while (event := FILLING.search(text, at)) is not None:
            at = event.start()
            if text[at] == "]" and in_step:
                return events, text[at:]
            try:
                value, after = _LENIENT.raw_decode(text, at)
            except (ValueError, RecursionError) as error:
                if more_follows and _may_go_on(error, text, at):
                    return events, text[at:]
                inside = DEEPEST if isinstance(error, RecursionError) else 0  # a level takes a character or more
                boundary = BETWEEN_TEXT.search(text, at + inside)
                if boundary is None:
                    return events, text[at:]
                self._note_damaged(str(error))
                at, in_step = boundary.end(), False
                continue
            try:
                events.append(_event(text[at:after], value))
                in_step = True
            except _UNSOUND as error:
                self._note_damaged(f"{error}: {str(value)[:NAMED]}")
            at = after
        return events, ""

    def _note_damaged(self, example: str) -> None:
        self._example = self._example or example
        self._damaged += 1

    def _add_to_header(self, rest: Header) -> None:
        """Take over what stands behind the list of events; newer torch writes it in front."""
        for name in Header.__struct_fields__:
            if getattr(self.header, name) is None:
                setattr(self.header, name, getattr(rest, name))


def _event(text: str, value: object) -> Event:
    """Return the event of `text`; where that is not JSON to the letter, of the `value` that was found in it.

    What an event may lack is dropped where it is of another type, rather than the event.
    """
    with contextlib.suppress(*_UNSOUND):
        return cast(Event, _EVENT.decode(text.encode()))
    if isinstance(value, dict):
        odd = {name for name, kinds in OPTIONAL.items() if not isinstance(value.get(name), kinds)}
        value = {name: item for name, item in value.items() if name not in odd}
    return cast(Event, _EVENT.decode(json.dumps(value).encode()))


def _may_go_on(error: Exception, text: str, start: int) -> bool:
    """Tell whether the object that begins at `start` may be sound, and only its end is missing."""
    if not isinstance(error, json.JSONDecodeError) or len(text) - start > LARGEST_CARRIED:
        return False
    return error.msg.startswith("Unterminated string") or error.pos >= len(text) - LONGEST_LITERAL


def _header(text: bytes) -> Header:
    """Return the header, empty where its values have other types; raises ValueError when `text` is no JSON object."""
    try:
        return _HEADER.decode(text)
    except msgspec.MsgspecError:
        values = _LENIENT.decode(text.decode("utf-8", "replace"))
        if not isinstance(values, dict):
            raise ValueError("it is no JSON object") from None
        with contextlib.suppress(*_UNSOUND):
            return msgspec.convert(values, Header, strict=False)
        return Header()


def _last_boundary(text: bytes) -> int | None:
    """Return where, in `text`, the last event seems to end that another one follows; None where none does."""
    for start in (max(0, len(text) - NEAR_THE_END_BYTES), 0):
        ends = [match.start() + 1 for match in BETWEEN.finditer(text, start)]
        if ends:
            return ends[-1]
    return None


def whole_nanoseconds(microseconds: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return durations of float µs as int64 ns, and a mask of the usable ones; others (NaN, over 19 hours) are 0."""
    usable = np.abs(microseconds) < LONGEST_DURATION_US
    microseconds = np.where(usable, microseconds, 0.0)
    whole = np.floor(microseconds)  # the product of the whole number and 1000 would lose nanoseconds above 4.5e12
    return whole.astype(np.int64) * 1000 + np.rint((microseconds - whole) * 1000).astype(np.int64), usable


def exact_nanoseconds(texts: Sequence[bytes]) -> tuple[np.ndarray, np.ndarray]:
    """Return decimal texts of µs as int64 ns without a detour over doubles that are too coarse, and the usable ones."""
    aligned = _aligned(np.frombuffer(b",".join(texts) + b",", dtype=np.uint8), len(texts))
    if aligned is not None:
        return aligned, np.ones(len(texts), dtype=bool)
    numbers = [_nanoseconds(bytes(text)) for text in texts]
    usable = np.array([number is not None for number in numbers], dtype=bool)
    return np.array([number or 0 for number in numbers], dtype=np.int64), usable


def _aligned(characters: np.ndarray, count: int) -> np.ndarray | None:
    """Return the numbers where all have as many digits before and behind the point; None where they do not.

    They do in traces that count from 1970, and in nearly all pieces of others: far faster than one by one.
    """
    width, rest = divmod(len(characters), max(count, 1))
    if rest or width < 2:
        return None
    table = characters.reshape(count, width)
    points = np.flatnonzero(table[0] == ord("."))
    point = int(points[0]) if len(points) == 1 else width - 1
    columns = [column for column in range(width - 1) if column != point]
    digits = table[:, columns] - np.uint8(ord("0"))  # what is no digit wraps around, above 9
    is_aligned = (table[:, -1] == ord(",")).all() and (table[:, point] == table[0, point]).all()
    if len(points) > 1 or not 0 < point <= MOST_DIGITS or not is_aligned or digits.max() > 9:
        return None
    numbers = np.zeros(count, dtype=np.int64)
    for column in range(point + FRACTION_DIGITS):
        numbers *= 10
        if column < len(columns):
            numbers += digits[:, column]
    if len(columns) > point + FRACTION_DIGITS:
        numbers += digits[:, point + FRACTION_DIGITS] >= 5
    return numbers


def _nanoseconds(text: bytes) -> int | None:
    """Return one text of µs as ns, rounded; None for what is no number of at most 73 years."""
    whole, _, fraction = text.partition(b".")
    if whole.isdigit() and len(whole) <= MOST_DIGITS and (fraction + b"0").isdigit():
        return int(whole + (fraction + b"000")[:FRACTION_DIGITS]) + (
            fraction[FRACTION_DIGITS : FRACTION_DIGITS + 1] >= b"5"
        )
    from decimal import Decimal  # rare, and worth 3 ms of every start

    try:
        microseconds = Decimal(text.decode().strip('"'))
        if microseconds.is_finite() and abs(microseconds) < LONGEST_US:
            return int((microseconds * 1000).to_integral_value())
    except (ArithmeticError, UnicodeDecodeError):  # no number, or one with an absurd exponent
        pass
    return None
