"""The instruments of one span of steps, started, stepped and stopped together."""

from collections.abc import Callable, Sequence
from typing import Protocol

from boundby.capture.manifest import Record, summary
from boundby.capture.schedule import Span


class Instrument(Protocol):
    """Something that watches a span of steps and never raises."""

    def start(self) -> None:
        """Begin, before the first step of the span."""

    def step(self) -> None:
        """Take note that a step has ended."""

    def stop(self, *, export: bool = True) -> None:
        """End at once, if not over; without `export` nothing is written."""


class DuringRecording:
    """An instrument that works in the recorded steps of a span alone: a subclass says how to open and to close it.

    Whatever `open` and `close` raise is a downgrade of `what`.
    """

    def __init__(self, what: str, record: Record, span: Span) -> None:
        self._what = what
        self._record = record
        self._span = span
        self._at = 0
        self.is_open = False

    def open(self) -> None:
        """Begin to watch."""
        raise NotImplementedError

    def close(self, *, export: bool) -> None:
        """End, in any case, what `open` began."""
        raise NotImplementedError

    def start(self) -> None:
        """Open where there is no warm-up."""
        if self._span.warmup == 0:
            self._try_open()

    def step(self) -> None:
        """Open after the last step of the warm-up; close after the last one of the span."""
        self._at += 1
        if self._at == self._span.warmup:
            self._try_open()
        elif self._at == self._span.length:
            self.stop()

    def stop(self, *, export: bool = True) -> None:
        """Close it."""
        if not self.is_open:
            return
        self.is_open = False
        try:
            self.close(export=export)
        except Exception as error:
            self._record.downgrade(self._what, summary(error))

    def _try_open(self) -> None:
        self.is_open = True
        try:
            self.open()
        except Exception as error:
            self._record.downgrade(self._what, summary(error))
            self.is_open = False


class Window:
    """One span under its instruments. The device has no queued work left when the span and its recording begin."""

    def __init__(self, span: Span, instruments: Sequence[Instrument], synchronize: Callable[[], None]) -> None:
        self.span = span
        self._instruments = instruments
        self._synchronize = synchronize
        self._at = 0

    @property
    def is_over(self) -> bool:
        """Tell whether every step of the span has ended."""
        return self._at >= self.span.length

    @property
    def recorded(self) -> int:
        """Return how many whole steps of the recording have ended."""
        return max(0, self._at - self.span.warmup)

    def start(self) -> None:
        """Start every instrument."""
        self._synchronize()
        for instrument in self._instruments:
            instrument.start()

    def step(self) -> None:
        """Tell every instrument that a step has ended."""
        self._at += 1
        if self._at == self.span.warmup:
            self._synchronize()
        for instrument in self._instruments:
            instrument.step()

    def stop(self, *, export: bool = True) -> None:
        """Stop every instrument; a recording without a whole step is thrown away."""
        for instrument in self._instruments:
            instrument.stop(export=export and self.recorded > 0)
