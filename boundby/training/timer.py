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

from boundby.capture import Guard, Remarks, Say, summary
from boundby.machine import host_id
from boundby.training.aggregate import CAPACITY, Aggregator
from boundby.training.recorder import DeviceClock, Hooks, Marks, StageRecorder
from boundby.training.records import Kind, StageTimes, Status
from boundby.training.store import Pace, Writer

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
        self.marks = marks
        self.recorder: StageRecorder | None = None  # while there is one, the timer is on
        self._folder = None if folder is None else Path(folder)
        self._enabled = enabled
        self.clock = clock
        self._aggregator = Aggregator(self.options.capacity if enabled else 1, self.remarks)
        self._ended: StageRecorder | None = None
        self._writer: Writer | None = None
        self._failures = 0
        self.guard = Guard(self._failed)
        self._first_step = 0
        self._started_unix_s: float | None = None
        self._status: Status = "running"
        self._error: str | None = None
        self._is_stopped = False
        self._pid, self._launcher = os.getpid(), os.getppid()

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
            self._pid, self._launcher = os.getpid(), os.getppid()
            atexit.register(self._stop_at_exit)
            with self.guard:
                self._begin_run()
        elif self._is_stopped:
            self.remarks.add("stage timer", ENDED)

    def stop(self, error: BaseException | None = None) -> None:
        """End; `error` is what ended the loop, None where it ended well. Further calls do nothing."""
        recorder = self.recorder or self._ended
        if recorder is None or self._is_stopped or os.getpid() != self._pid:
            return
        self.recorder, self._ended, self._is_stopped = None, recorder, True
        atexit.unregister(self._stop_at_exit)
        with self.remarks.guard("stage times"):
            recorder.finish()
            self._status = "finished" if error is None else "failed"
            self._error = None if error is None else summary(error)
        if self._writer:
            self._writer.stop()

    def step(self, number: int | None = None) -> None:
        """Take note that a step has ended, which had this number."""
        if self.recorder is not None:
            with self.guard:
                self.recorder.end_step(number)

    def restart_step(self) -> None:
        """Let the current step begin now: the time since the last one ended counts for no step and no span."""
        if self.recorder is not None:
            with self.guard:
                self.recorder.restart_step()

    def disturb(self) -> None:
        """Keep the step that runs out of the summaries: something else slows it down, such as a profiler."""
        if self.recorder is not None:
            with self.guard:
                self.recorder.disturb()

    def stage(self, name: str) -> "Block":
        """Return a context that times its block as a stage."""
        return Block(self, name, "stage")

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
        Block(self, name, kind).__enter__()

    def end(self, name: str, *, raised: bool = False) -> None:
        """End what `begin` began; with `raised` it ended by an exception and stays out of the summaries."""
        Block(self, name, "stage").__exit__(Exception if raised else None)

    def forget(self, name: str) -> None:
        """Take back the begin of the innermost stage, if it has this name: it turned out not to be one."""
        if self.recorder is not None:
            with self.guard:
                self.recorder.forget(name)

    def metrics(self, values: Mapping[str, Any], step: int | None = None) -> None:
        """Add numbers of a step, such as loss, samples and tokens; of the one that runs, if `step` is None.

        A tensor on another device than the CPU is left out: to read it, the program would have to wait.
        """
        recorder = self.recorder
        if recorder is None:
            return
        plain: list[tuple[str, float]] = []
        with self.remarks.guard("metrics"):
            for name, value in values.items():
                with self.remarks.guard(f"metric {name}"):
                    plain.append((name, plain_number(value)))
        with self.guard:
            recorder.metrics(plain, step)

    def flush(self) -> None:
        """Write what has gathered, as happens by itself every second."""
        if self.recorder and self._writer and os.getpid() == self._pid:
            with self.guard:
                self.recorder.settle()
            self._writer.flush()

    def snapshot(self) -> StageTimes:
        """Return everything known up to now."""
        recorder = self.recorder
        if recorder:
            with self.guard:
                recorder.settle(must=True)
        recorder = recorder or self._ended
        with recorder.held() if recorder else contextlib.nullcontext():
            return self._snapshot(recorder)

    def _snapshot(self, recorder: StageRecorder | None) -> StageTimes:
        sums, options = self._aggregator, self.options
        return StageTimes(
            status=self._status,
            error=self._error,
            rank=options.rank,
            world_size=options.world_size,
            pid=self._pid,
            launcher=self._launcher,
            host=host_id(),
            started_unix_s=self._started_unix_s,
            written_unix_s=time.time(),
            elapsed_s=(self.clock() - recorder.base) / 1e9 if recorder else 0.0,
            first_step=self._first_step,
            last_step=recorder.last_step if recorder else None,
            device=options.device if self.marks else None,
            num_occurrences=sums.stages.count,
            num_metric_rows=sums.metrics.count,
            summary=sums.summaries(),
            open=recorder.open_stages() if recorder else (),
            remarks=self.remarks.all(),
            names=tuple(sums.names),
            metric_names=tuple(sums.metric_names),
            occurrences=sums.stages.since(0),
            metric_rows=sums.metrics.since(0),
        )

    @property
    def is_excluded(self) -> bool:
        """Tell whether something excluded is open in this thread."""
        return self.recorder is not None and self.recorder.thread.state.is_excluded

    def _begin_run(self) -> None:
        device = DeviceClock(self.marks, self.remarks)
        recorder = StageRecorder(self._aggregator, device, self.clock, self.hooks, self.remarks)
        self._first_step = recorder.begin_at(self._first_step)
        self.recorder = recorder
        if self._folder is not None:
            self._writer = Writer(self.snapshot, self._held, self._aggregator, self.remarks, self.options.pace)
            self._writer.start(self._folder, in_background=self.options.in_background)

    def _stop_at_exit(self) -> None:
        self.stop(RuntimeError(UNSTOPPED))

    def _held(self) -> contextlib.AbstractContextManager[None]:
        """Hold the sums, with what needs no answer of the device; the loop's own thread will see to the rest."""
        recorder = self.recorder
        if recorder is not None:
            recorder.add_up(may_ask=False)
            recorder.must_settle = True
        recorder = recorder or self._ended
        return recorder.held() if recorder else contextlib.nullcontext()

    def _failed(self, error: Exception) -> None:
        """Note a failure of the timer's own."""
        self._failures += 1
        self.remarks.add("stage times", error)
        if self._failures >= MOST_FAILURES:
            self.remarks.add("stage times", f"given up after {MOST_FAILURES} failures")
            self.recorder, self._ended = None, self.recorder or self._ended


class Block:
    """A block of code that is timed; exceptions pass through it."""

    __slots__ = ("_kind", "_name", "_timer")

    def __init__(self, timer: StageTimer, name: str, kind: Kind) -> None:
        self._timer = timer
        self._name = name
        self._kind = kind

    def __enter__(self) -> None:
        recorder = self._timer.recorder
        if recorder is not None:
            with self._timer.guard:
                recorder.begin(self._name, self._kind)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None = None,
        traceback: TracebackType | None = None,
    ) -> None:
        recorder = self._timer.recorder
        if recorder is not None:
            with self._timer.guard:
                recorder.end(self._name, raised=kind is not None)


def plain_number(value: Any) -> float:
    """Return a number, a NumPy scalar or a tensor with one element on the CPU as a float.

    Raises TypeError for a tensor on another device, which could only be read by waiting for it.
    """
    if isinstance(value, int | float):
        return float(value)
    device = getattr(value, "device", None)
    kind = getattr(device, "type", device)  # NumPy's scalars say "cpu" without more
    if kind not in (None, "cpu"):
        raise TypeError(f"it is a tensor on {device}, and reading it would wait for the device; give a float of it")
    return float(value.detach() if hasattr(value, "detach") else value)
