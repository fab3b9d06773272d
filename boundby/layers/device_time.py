"""The device pass: how long the device works for every call, from marks in its queue.

The device is held back while the host issues a whole run, so that it never waits for the host and its time is its own;
whether the host is the slower of the two is told by the host's times, from runs of their own. Marks are reused, and the
host waits for the device once per run.
"""

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from boundby.device import CudaQueue
from boundby.layers.attachment import Clock, Targets, attached, visiting_probe
from boundby.layers.calls import Call, CallTree
from boundby.layers.timing import Run
from boundby.timer import BACKLOG_SHARE, LEAST_BACKLOG_S, MOST_BACKLOG_S, DeviceQueue

SIDE_STREAM = "it issues work to another stream than the model, whose time no pair of marks sees"


class DeviceMarks(DeviceQueue, Protocol):
    """The queue of a device whose marks can be used again, with a name for the stream that is in use."""

    def stream(self) -> Hashable:
        """Return what names the stream that work goes to now."""
        ...

    def reuse(self, mark: Any) -> None:
        """Take back a mark that nothing needs any more."""
        ...


class CudaMarks:
    """The streams of a GPU with pooled events."""

    def __init__(self, device: torch.device) -> None:
        self._queue = CudaQueue(device)
        self._device = device
        self._pool: list[torch.cuda.Event] = []
        self.hold = self._queue.hold
        self.has_passed = self._queue.has_passed
        self.seconds_between = self._queue.seconds_between

    def mark(self) -> torch.cuda.Event:
        """Queue an event on the stream in use."""
        event = self._pool.pop() if self._pool else torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def stream(self) -> Hashable:
        """Return the number of the stream in use."""
        return torch.cuda.current_stream(self._device).cuda_stream

    def reuse(self, mark: torch.cuda.Event) -> None:
        """Put the event back into the pool."""
        self._pool.append(mark)


@dataclass
class DeviceTimes:
    """Seconds of the device by call path for each run, calls inside included."""

    runs: list[dict[Call, float]] = field(default_factory=list)
    unknown: dict[Call, str] = field(default_factory=dict)  # call paths whose time no marks give: why
    late_runs: int = 0  # in which the device reached the run before the host had issued all of it

    def selves(self, number: int) -> dict[Call, float]:
        """Return the seconds of each call path in no call inside, for one run; without those that cannot be known."""
        seconds = self.runs[number]
        return {
            call: max(0.0, spent - sum(seconds.get(each, 0.0) for each in call.callees.values()))
            for call, spent in seconds.items()
            if call not in self.unknown and not any(each in self.unknown for each in call.callees.values())
        }

    def inclusive(self, number: int) -> dict[Call, float]:
        """Return the seconds of each call path, for one run; without those that cannot be known."""
        return {call: spent for call, spent in self.runs[number].items() if call not in self.unknown}


@dataclass
class DevicePass:
    """Times runs on the device by its marks; `now` is the clock of the host, `synchronize` waits for the device.

    `found` begins with the call paths that marks cannot time.
    """

    run: Run
    tree: CallTree
    targets: Targets
    now: Clock
    synchronize: Callable[[], None]
    marks: DeviceMarks
    found: DeviceTimes
    _backlog_s: float | None = None

    def add_run(self) -> None:
        """Time one run; before the first, another one tells how long the host issues."""
        if self._backlog_s is None:
            issue_s, _, _ = self._issue(LEAST_BACKLOG_S)
            self._backlog_s = min(MOST_BACKLOG_S, max(LEAST_BACKLOG_S, BACKLOG_SHARE * issue_s))
        _, was_late, seconds = self._issue(self._backlog_s)
        self.found.runs.append(seconds)
        self.found.late_runs += was_late

    def _issue(self, backlog_s: float) -> tuple[float, bool, dict[Call, float]]:
        """Issue one run behind a backlog.

        Return the seconds of the host, whether the device had to wait, and its seconds by call path.
        """
        visitor = _Marking(self.marks, self.found.unknown)
        with attached(self.targets, visiting_probe(self.tree, visitor)):
            self.tree.enter_root()
            self.synchronize()
            self.marks.hold(backlog_s)
            start = self.marks.mark()
            began = self.now()
            self.run()
            issue_s = (self.now() - began) / 1e9
        was_late = self.marks.has_passed(start)
        self.synchronize()
        self.marks.reuse(start)
        return issue_s, was_late, visitor.settle()


def spanning(tree: CallTree, devices: Mapping[int, set[torch.device]], home: torch.device) -> dict[Call, str]:
    """Return the call paths whose modules lie on other devices than the model's first: why marks cannot time them."""
    reasons = {}
    for call in tree.walk():
        others = sorted(str(each) for each in devices.get(call.index, set()) if each.type == home.type and each != home)
        if others:
            reasons[call] = f"it lies on {', '.join(others)} too, and marks of two devices have no common clock"
    return reasons


class _Marking:
    """Marks the begin and the end of every call; calls whose stream changes are unknown."""

    def __init__(self, marks: DeviceMarks, unknown: dict[Call, str]) -> None:
        self._marks, self._unknown = marks, unknown
        self._home: Hashable = None
        self._open: list[tuple[Call, Any, Any]] = []

    def enter(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Mark the begin."""
        stream = self._marks.stream()
        if call.caller is call.tree.top:
            self._home = stream
        return stream, self._marks.mark()

    def leave(self, call: Call, token: Any, result: Any) -> None:
        """Mark the end."""
        stream, start = token
        if stream != self._home or self._marks.stream() != stream:
            self._unknown[call] = SIDE_STREAM
        self._open.append((call, start, self._marks.mark()))

    def settle(self) -> dict[Call, float]:
        """Return the seconds between the marks of each call path, after the device has passed them all."""
        seconds: dict[Call, float] = {}
        for call, start, end in self._open:
            if call not in self._unknown:
                seconds[call] = seconds.get(call, 0.0) + self._marks.seconds_between(start, end)
            self._marks.reuse(start)
            self._marks.reuse(end)
        return seconds
