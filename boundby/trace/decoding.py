"""The events of a trace, decoded in chunks that end between two events; damaged ones are left out and counted.

A chunk that is sound JSON is decoded by msgspec into typed records, which skips every key that nothing reads. One that
is not (an invalid name, a `NaN`, a wrong type, the end of a file that was cut short) is gone through event by event.
A chunk is cut where an event seems to end; brackets and quotes balance only where one really does.
"""

import contextlib
import itertools
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from boundby.trace.source import Source

MAX_JSON_BYTES = 4 * 2**30  # decompressed; columns take a third of that, of the densest possible events six times
LARGEST_EVENT_BYTES = 64 * 2**20  # of text without the end of an event in it
MOST_OPENINGS = 64  # places that look like the start of the list; each costs decoding what stands before it
SPACE_BYTES = 4096  # of blanks that may stand before a bracket, or inside of an opening
LARGEST_HEADER_BYTES = 64 * 2**20
START = re.compile(rb'"traceEvents"\s*:\s*\[')
BETWEEN = re.compile(rb"\}\s*,\s*(?=\{)")
BETWEEN_TEXT = re.compile(r"\}\s*,\s*(?=\{)")
LARGEST_CARRIED = 4 * 2**20  # characters of an unsound event that may go on in the next piece; then it is given up
LONGEST_LITERAL = 16  # characters: "-Infinity", an escape; an error so near to the end may be the end
NEAR_THE_END_BYTES = 4096  # of a chunk, searched first for the end of its last event
GAP = re.compile(r"[\s,]*")
# The phases of the Chrome trace format without a duration: instants, counters, flows, metadata, objects, ...
OTHER_PHASES = "IMPCsftbneSTpFNODRcVv()a"
NAMED = 80  # characters of a text that a message quotes


class NotATrace(ValueError):
    """A file that is whole as far as it goes, and something else than a trace."""


class Args(msgspec.Struct, gc=False):
    """What is read of the arguments of an event with a duration."""

    external_id: int | None = msgspec.field(default=None, name="External id")
    correlation: int | None = None
    stream: int | None = None
    device: int | None = None
    bytes: int | None = None
    input_dims: msgspec.Raw = msgspec.field(default=msgspec.Raw(), name="Input Dims")
    python_id: int | None = msgspec.field(default=None, name="Python id")
    python_parent_id: int | None = msgspec.field(default=None, name="Python parent id")


class MemoryArgs(msgspec.Struct, gc=False):
    """What is read of the arguments of an instant event: those of `[memory]`."""

    address: int | None = msgspec.field(default=None, name="Addr")
    bytes: int | None = msgspec.field(default=None, name="Bytes")
    allocated: int | None = msgspec.field(default=None, name="Total Allocated")
    reserved: int | None = msgspec.field(default=None, name="Total Reserved")
    device_type: int | None = msgspec.field(default=None, name="Device Type")
    device: int | None = msgspec.field(default=None, name="Device Id")


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


class Begin(Timed, gc=False, tag_field="ph", tag="B"):
    """The start of a span whose end is an event of its own."""

    args: Args | None = None


class End(Timed, gc=False, tag_field="ph", tag="E"):
    """The end of the innermost span that its thread has begun."""


class Instant(Timed, gc=False, tag_field="ph", tag="i"):
    """A point in time."""

    args: MemoryArgs | None = None


class Header(msgspec.Struct):
    """What a trace says about itself, as far as it is read."""

    distributed: dict[str, Any] | None = msgspec.field(default=None, name="distributedInfo")
    devices: list[dict[str, Any]] | None = msgspec.field(default=None, name="deviceProperties")
    record_shapes: int | None = None
    profile_memory: int | None = None
    with_stack: int | None = None


Event = Complete | Begin | End | Instant
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
        self.faults: list[str] = []
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
            self.faults.append(self._source.fault)
        if self._damaged:
            self.faults.append(f"{self._damaged} event(s) could not be read; the first one: {self._example}")

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
            self.faults.append("the file ends before its list of events, or what follows it, does: it was cut short")
        return events

    def _one_by_one(self, text: str, *, more_follows: bool) -> tuple[list[Event], str]:
        """Return the sound events of `text`, and the text after them: a part of an event, or from the end of the list.

        After damage the next object may lie inside of another, so a bracket ends the list only behind a sound event.
        """
        events: list[Event] = []
        at, in_step = 0, True
        while (at := GAP.match(text, at).end()) < len(text):
            if text[at] == "]" and in_step:
                return events, text[at:]
            try:
                found, after = _LENIENT.raw_decode(text, at)
            except (ValueError, RecursionError) as error:
                if more_follows and _may_go_on(error, text, at):
                    return events, text[at:]
                boundary = BETWEEN_TEXT.search(text, at)
                if boundary is None:
                    return events, text[at:]
                self._note_damaged(str(error))
                at, in_step = boundary.end(), False
                continue
            try:
                events.append(_event(text[at:after], found))
                in_step = True
            except _UNSOUND as error:
                self._note_damaged(f"{error}: {str(found)[:NAMED]}")
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


def _event(text: str, found: Any) -> Event:
    """Return the event of `text`; where that is not JSON to the letter, of what was `found` in it."""
    try:
        return _EVENT.decode(text.encode())
    except _UNSOUND:
        return _EVENT.decode(json.dumps(found).encode())


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
        found = _LENIENT.decode(text.decode("utf-8", "replace"))
        if not isinstance(found, dict):
            raise ValueError("it is no JSON object") from None
        with contextlib.suppress(*_UNSOUND):
            return msgspec.convert(found, Header, strict=False)
        return Header()


def _last_boundary(text: bytes) -> int | None:
    """Return where, in `text`, the last event seems to end that another one follows; None where none does."""
    for start in (max(0, len(text) - NEAR_THE_END_BYTES), 0):
        ends = [match.start() + 1 for match in BETWEEN.finditer(text, start)]
        if ends:
            return ends[-1]
    return None
