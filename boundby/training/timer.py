"""Times the stages of a training loop, in any loop and from any hooks, without changing or delaying what it watches."""

import atexit
import contextlib
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from boundby.training.book import MOST_NAMES, Book
from boundby.training.hooks import Hooks
from boundby.training.loop import ENOUGH_EVENTS, MOST_EVENTS, Loop
from boundby.training.marks import DeviceClock, Marks
from boundby.training.records import Kind, StageTimes, Status
from boundby.training.remarks import Remarks, Say, summary
from boundby.training.ring import CAPACITY
from boundby.training.values import plain_number
from boundby.training.writer import Pace, Writer

ENDED = "it has ended; make a new one for another loop: nothing of this one is recorded"
UNSTOPPED = "the program ended without stopping its profiler"
MOST_FAILURES = 100  # of the timer itself, before it stays off
Item = TypeVar("Item")


@dataclass(frozen=True)
class TimerOptions:
    """Size and pace of a timer, and which process of its job it watches."""

    capacity: int = CAPACITY  # rows of the ring of occurrences, and of that of metrics
    pace: Pace = field(default_factory=Pace)
    rank: int = 0
    world_size: int = 1
    device: str | None = None  # the name of what the marks stand on
    in_background: bool = True  # write from a thread; otherwise at `flush` and `stop` alone


class StageTimer:
    """Times named stages, which may lie inside one another, steps, and spans of steps such as epochs.

    A loop uses `with timer.stage("forward")` and calls `step()` after each step; hooks call `begin` and `end`. With a
    `folder` everything is written there while it runs: `read_stage_times` reads it, half-written or whole. `marks`
    add the times of a device; both may be set until `start`. Nothing here raises, waits for the device, draws random
    numbers or prints: what goes wrong is a remark, said once to `say`. Marks that come out of order are put right:

    - an end without a begin is ignored; the end of an outer stage cuts off those inside it;
    - the begin of an open stage means that its end never came: the first one is dropped;
    - a stage that is open when its step ends is a span: it holds steps and is part of none.
    """

    def __init__(
        self,
        folder: str | Path | None = None,
        *,
        marks: Marks | None = None,
        options: TimerOptions | None = None,
        say: Say | None = None,
        enabled: bool = True,
        clock: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        self.options = options or TimerOptions()
        self.remarks = Remarks(say)
        self.hooks = Hooks(self.remarks)
        self._folder = None if folder is None else Path(folder)
        self.marks = marks
        self._enabled = enabled
        self._clock = clock
        self._book = Book(self.options.capacity if enabled else 1, self.remarks)
        self._loop: Loop | None = None  # while there is one, the timer is on
        self._ended: Loop | None = None
        self._writer: Writer | None = None
        self._blocks: dict[str, Block] = {}  # they hold nothing of their own, so each can be entered again
        self._failures = 0
        self._first_step = 0
        self._started_unix_s: float | None = None
        self._status: Status = "running"
        self._error: str | None = None
        self._is_stopped = False
        self._pid = os.getpid()

    def __enter__(self) -> "StageTimer":
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop(error)

    def start(self, first_step: int = 0) -> None:
        """Begin before the first step, which has this number: that of the checkpoint, where a run is resumed."""
        if self._enabled and self._started_unix_s is None:
            self._started_unix_s = time.time()
            self._first_step = first_step
            self._pid = os.getpid()
            atexit.register(self._stop_at_exit)
            self._attempt(self._begin_run)
        elif self._is_stopped:
            self.remarks.add("stage timer", ENDED)

    def stop(self, error: BaseException | None = None) -> None:
        """End; `error` is what ended the loop, None where it ended well. Further calls do nothing."""
        loop = self._loop or self._ended
        if loop is None or self._is_stopped or os.getpid() != self._pid:
            return
        self._loop, self._ended, self._is_stopped = None, loop, True
        atexit.unregister(self._stop_at_exit)
        try:
            loop.arrivals.settle(may_ask=True, all_of_them=True, must=True)
            loop.note_unended()
            if loop.arrivals.unresolved:
                reason = "the device had not passed the end of some stages when they were booked; it is not waited for"
                self.remarks.add("device times", reason)
            self._status = "finished" if error is None else "failed"
            self._error = None if error is None else summary(error)
        except Exception as failure:
            self.remarks.add("stage times", failure)
        if self._writer:
            self._writer.stop()

    def step(self, number: int | None = None) -> None:
        """Take note that a step has ended, which had this number."""
        loop = self._loop
        if loop is None:
            return
        try:
            now = loop.clock()
            if loop.has_marks or self.hooks.watch_stages:
                nanoseconds = loop.take("end_step", loop.thread.state, now, number)
                self.hooks.tell("step_end", loop.last_step, nanoseconds / 1e9)
                return
            events = loop.events
            here = loop.thread.state
            events.append(("end_step", here, now, number, None))
            if len(events) > ENOUGH_EVENTS:
                loop.settle()
                events.append(("restart_step", here, loop.clock(), None, None))
        except Exception as error:
            self._failed(error)

    def restart_step(self) -> None:
        """Let the step that runs begin now: what was done since the last one ended is no part of it or of any span."""
        self._note("restart_step")

    def disturb(self) -> None:
        """Keep the step that runs out of the summaries: something else slows it down, such as a profiler."""
        self._note("disturb")

    def stage(self, name: str) -> "Block":
        """Return a context that times its block as a stage."""
        try:
            return self._blocks[name]
        except (KeyError, TypeError):  # new, or no name at all, which `begin` will say
            block = Block(self, name, "stage")
        if isinstance(name, str) and len(self._blocks) < MOST_NAMES:
            self._blocks[name] = block
        return block

    def span(self, name: str) -> "Block":
        """Return a context that times its block, which holds steps, such as an epoch."""
        return Block(self, name, "span")

    def excluded(self, name: str = "evaluation") -> "Block":
        """Return a context whose block is no part of a step: its time is taken out of all that is around it.

        What begins inside it is not recorded, be it of the same name.
        """
        return Block(self, name, "excluded")

    def timed(self, items: Iterable[Item], name: str = "data") -> Iterator[Item]:
        """Yield the items; the wait for each of them is a stage, the one that finds the end is not."""
        iterator = iter(items)
        while True:
            self.begin(name)
            try:
                item = next(iterator)
            except StopIteration:
                self.forget(name)
                return
            except BaseException:
                self.end(name, raised=True)
                raise
            self.end(name)
            yield item

    def begin(self, name: str, kind: Kind = "stage") -> None:
        """Begin a "stage", a "span" or something "excluded"."""
        (self.stage(name) if kind == "stage" else Block(self, name, kind)).__enter__()

    def end(self, name: str, *, raised: bool = False) -> None:
        """End what `begin` began; with `raised` it ended by an exception and stays out of the summaries."""
        self.stage(name).__exit__(Exception if raised else None)

    def metrics(self, values: Mapping[str, Any], step: int | None = None) -> None:
        """Add numbers of a step, such as loss, samples and tokens; of the one that runs, if `step` is None.

        A tensor on another device than the CPU is left out: to read it, the program would have to wait.
        """
        if self._loop is None:
            return
        try:
            items = list(values.items())
        except Exception as error:
            self.remarks.add("metrics", error)
            return
        plain = []
        for name, value in items:
            try:
                plain.append((name, plain_number(value)))
            except Exception as error:
                self.remarks.add(f"metric {name}", error)
        self._note("add_metrics", plain, step)

    def flush(self) -> None:
        """Write what has gathered, as happens by itself every second."""
        if self._loop and self._writer and os.getpid() == self._pid:
            self._attempt(self._loop.settle)
            self._writer.flush()

    def snapshot(self) -> StageTimes:
        """Return everything known up to now."""
        loop = self._loop
        if loop:
            self._attempt(lambda: loop.settle(must=True))
        loop = loop or self._ended
        with loop.arrivals.held() if loop else contextlib.nullcontext():
            return self._snapshot(loop)

    def _snapshot(self, loop: Loop | None) -> StageTimes:
        book, options = self._book, self.options
        return StageTimes(
            status=self._status,
            error=self._error,
            rank=options.rank,
            world_size=options.world_size,
            pid=self._pid,
            started_unix_s=self._started_unix_s,
            written_unix_s=time.time(),
            elapsed_s=(self._clock() - loop.base) / 1e9 if loop else 0.0,
            first_step=self._first_step,
            last_step=loop.last_step if loop else None,
            device=options.device if self.marks else None,
            stages=book.stage_summaries(),
            metrics=book.metric_summaries(),
            open=loop.open_stages() if loop else (),
            remarks=self.remarks.all(),
            names=tuple(book.names),
            metric_names=tuple(book.metric_names),
            occurrences=book.stages.since(0),
            metric_rows=book.metrics.since(0),
            num_occurrences=book.stages.count,
            num_metric_rows=book.metrics.count,
        )

    @property
    def is_excluded(self) -> bool:
        """Tell whether something excluded is open in this thread, as far as events have been understood."""
        loop = self._loop
        return loop is not None and loop.thread.state.is_excluded

    def forget(self, name: str) -> None:
        """Take back the begin of the innermost stage, if it has this name: it turned out not to be one."""
        self._note("forget", name)

    def _note(self, method: str, first: Any = None, second: Any = None) -> None:
        loop = self._loop
        if loop is None:
            return
        try:
            event = (method, loop.thread.state, loop.clock(), first, second)
            if loop.has_marks or self.hooks.watch_stages:
                loop.take(*event)
                return
            loop.events.append(event)
            if len(loop.events) > MOST_EVENTS:
                loop.settle()
        except Exception as error:
            self._failed(error)

    def _begin_run(self) -> None:
        device = DeviceClock(self.marks, self.remarks)
        self._loop = Loop(self._book, device, self._clock, self._failed, self.remarks, self._first_step)
        self._first_step = self._loop.current.number
        if self._folder is not None:
            self._writer = Writer(self.snapshot, self._held, self._book, self.remarks, self.options.pace)
            self._writer.start(self._folder, in_background=self.options.in_background)

    def _stop_at_exit(self) -> None:
        self.stop(RuntimeError(UNSTOPPED))

    def _held(self) -> contextlib.AbstractContextManager[None]:
        """Hold the book, with what needs no answer of the device; the loop's own thread will see to the rest."""
        loop = self._loop
        if loop is not None:
            loop.arrivals.settle(may_ask=False)
            loop.must_settle = True
        loop = loop or self._ended
        return loop.arrivals.held() if loop else contextlib.nullcontext()

    def _attempt(self, action: Callable[[], object]) -> None:
        try:
            action()
        except Exception as error:
            self._failed(error)

    def _failed(self, error: Exception) -> None:
        """Note a failure of the timer's own."""
        self._failures += 1
        self.remarks.add("stage times", error)
        if self._failures >= MOST_FAILURES:
            self.remarks.add("stage times", f"given up after {MOST_FAILURES} failures")
            self._loop, self._ended = None, self._loop or self._ended


class Block:
    """A block of code that is timed; exceptions pass through it."""

    __slots__ = ("_kind", "_name", "_timer")

    def __init__(self, timer: StageTimer, name: str, kind: Kind) -> None:
        self._timer = timer
        self._name = name
        self._kind = kind

    def __enter__(self) -> None:
        timer = self._timer
        loop = timer._loop
        if loop is None:
            return
        try:
            if loop.has_marks or timer.hooks.watch_stages:
                timer.hooks.tell("stage_start", self._name)
                if self._kind == "excluded":
                    timer.hooks.tell("excluded_start", self._name)
                loop.take("begin", loop.thread.state, loop.clock(), self._name, self._kind)
                return
            events = loop.events
            events.append(("begin", loop.thread.state, loop.clock(), self._name, self._kind))
            if len(events) > MOST_EVENTS:
                loop.settle()
        except Exception as error:
            timer._failed(error)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None = None,
        traceback: TracebackType | None = None,
    ) -> None:
        timer = self._timer
        loop = timer._loop
        if loop is None:
            return
        try:
            now = loop.clock()
            if loop.has_marks or timer.hooks.watch_stages:
                nanoseconds = loop.take("end", loop.thread.state, now, self._name, kind is not None)
                timer.hooks.tell("stage_end", self._name, nanoseconds / 1e9)
                return
            events = loop.events
            events.append(("end", loop.thread.state, now, self._name, kind is not None))
            if len(events) > MOST_EVENTS:
                loop.settle()
        except Exception as failure:
            timer._failed(failure)
