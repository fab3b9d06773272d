"""Records the stages of a loop as they begin and end: how they nest, their steps, and marks that are out of order.

A stage that has ended waits in a queue until it is added up, many at a time. A device runs behind the host: stages wait
for it there, and nothing here ever waits for the device.
"""

import contextlib
import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar, get_args

from boundby.capture import Remarks
from boundby.training.aggregate import STEP_ID, Aggregator
from boundby.training.records import ABSENT, CUT, DISTURBED, RAISED, STEP, Kind, Occurrence, OpenStage, SharedMark, Step
from boundby.training.stages import GARBAGE_COLLECTION

if TYPE_CHECKING:
    import torch

LARGEST_STEP = 2**62
LAST_THREAD = 2**15 - 1  # threads beyond share this number
LONGEST_QUEUE = 4096  # stages that may wait for the device; the oldest go without its time then
LONGEST_HOLD_S = 1.0  # a child may have been forked while the aggregator was held
# Adding up takes longer than beginning and ending, and is cheaper where many stages are added at a time.
ENOUGH_WAITING = 256  # stages and metrics at the end of a step
MOST_WAITING = 1024  # within a step
MOST_COLLECTIONS = 64  # of garbage that wait for the next mark of their thread

Answer = TypeVar("Answer")
HookEvent = Literal["stage_start", "part_start", "excluded_start", "stage_end", "step_end", "trace_ready"]


class Hooks:
    """Calls what was registered for an event; a hook that raises is taken out, and a remark says so."""

    def __init__(self, remarks: Remarks) -> None:
        self._remarks = remarks
        self.watch_stages = False  # is told of stages or steps
        self._hooks: dict[str, list[Callable[..., object]]] = {event: [] for event in get_args(HookEvent)}

    def register(self, event: HookEvent, hook: Callable[..., object]) -> None:
        """Call `hook` at each `event` from now on. Raises ValueError for an event that there is not."""
        if event not in self._hooks:
            raise ValueError(f"there is no event {event!r}; there are {', '.join(self._hooks)}")
        self._hooks[event].append(hook)
        self._note_listeners()

    def unregister(self, event: HookEvent, hook: Callable[..., object]) -> None:
        """Call `hook` no more; nothing happens where it was not called."""
        if hook in self._hooks[event]:
            self._hooks[event].remove(hook)
        self._note_listeners()

    def tell(self, event: HookEvent, *what: Any) -> None:
        """Call the hooks of an event."""
        for hook in list(self._hooks[event]):
            try:
                hook(*what)
            except Exception as error:
                self.unregister(event, hook)
                self._remarks.add(f"hook of {event}", error)

    def _note_listeners(self) -> None:
        self.watch_stages = any(hooks for event, hooks in self._hooks.items() if event != "trace_ready")


class Marks(Protocol):
    """The queue of a device that runs behind the host. No method may wait for the device."""

    def mark(self) -> Any | None:
        """Queue a mark and return it; None where none can be queued now."""
        ...

    def has_passed(self, mark: Any) -> bool:
        """Tell whether the device has passed the mark."""
        ...

    def seconds_between(self, start: Any, end: Any) -> float | None:
        """Return the seconds of device time between two marks it has passed; None where they have no common queue."""
        ...

    def reuse(self, mark: Any) -> None:
        """Take back a mark that nothing needs any more."""
        ...


class CudaMarks:
    """Pooled events on the stream in use of a GPU, with that stream. Making and reading them waits for nothing.

    In a step that is captured as a CUDA graph there are no marks: an event would become part of the graph, and asking
    for one would end the capture.
    """

    def __init__(self, device: "torch.device") -> None:
        from boundby.machine import runtime

        self._runtime = runtime(device)
        self._device = device
        self._pool: list[Any] = []

    def mark(self) -> tuple[Any, Any] | None:
        """Queue an event on the stream in use; None while that is captured."""
        if self._runtime.is_current_stream_capturing():
            return None
        event = self._pool.pop() if self._pool else self._runtime.Event(enable_timing=True)
        stream = self._runtime.current_stream(self._device)
        event.record(stream)
        return event, stream

    def has_passed(self, mark: tuple[Any, Any]) -> bool:
        """Tell whether the stream has passed the event."""
        return not self._runtime.is_current_stream_capturing() and bool(mark[0].query())

    def seconds_between(self, start: tuple[Any, Any], end: tuple[Any, int]) -> float | None:
        """Return the seconds between two events; None where they stand in different streams."""
        return float(start[0].elapsed_time(end[0])) / 1e3 if start[1] == end[1] else None

    def reuse(self, mark: tuple[Any, Any]) -> None:
        """Put the event back into the pool."""
        self._pool.append(mark[0])


class DeviceClock:
    """Marks that never raise: after the first failure there are no device times any more, and a remark says why."""

    def __init__(self, marks: Marks | None, remarks: Remarks) -> None:
        self._marks = marks
        self._remarks = remarks

    @property
    def is_on(self) -> bool:
        """Tell whether marks are queued."""
        return self._marks is not None

    def take(self) -> SharedMark | None:
        """Queue a mark; None where none can be queued."""
        mark = self._answer(lambda marks: marks.mark(), None)
        return None if mark is None else SharedMark(mark)

    def has_passed(self, shared: SharedMark) -> bool:
        """Tell whether the device has passed the mark, or no time will ever come of it."""
        return self._answer(lambda marks: marks.has_passed(shared.mark), True)

    def ns_between(self, start: SharedMark | None, end: SharedMark | None) -> int:
        """Return the ns of device time between two marks that it has passed, ABSENT where they are not known."""
        if start is None or end is None:
            return ABSENT
        seconds = self._answer(lambda marks: marks.seconds_between(start.mark, end.mark), None)
        return ABSENT if seconds is None else max(0, round(seconds * 1e9))

    def release(self, *marks: SharedMark | None) -> None:
        """Let go of marks; those without a user are taken back."""
        for shared in marks:
            if shared is None:
                continue
            shared.users -= 1
            if not shared.users and self._marks is not None:
                self._marks.reuse(shared.mark)

    def _answer(self, ask: Callable[[Marks], Answer], otherwise: Answer) -> Answer:
        if self._marks is None:
            return otherwise
        try:
            return ask(self._marks)
        except Exception as error:
            self._marks = None
            self._remarks.add("device times", error)
            return otherwise


class ThreadState:
    """What is open in one thread."""

    __slots__ = (
        "collections", "ident", "inside", "is_excluded", "last_end", "last_ns", "number", "paused", "spans", "stack",
    )  # fmt: skip

    def __init__(self, number: int) -> None:
        self.number = number
        self.ident = threading.get_ident()  # of the thread that asks first, which is the one
        self.stack: list[Occurrence] = []
        self.spans: dict[str, Occurrence] = {}
        self.is_excluded = False
        self.inside = 0  # ns of this step in stages that lie in no other
        self.paused = 0  # ns of this step excluded
        self.last_end: SharedMark | None = None
        self.last_ns = 0  # when a stage began or ended last
        self.collections: deque[tuple[int, int]] = deque(maxlen=MOST_COLLECTIONS)  # of garbage since then


class Thread(threading.local):
    """What is open in the thread that asks."""

    def __init__(self, numbers: Iterator[int]) -> None:
        self.state = ThreadState(min(next(numbers), LAST_THREAD))


class StageRecorder:
    """The stages of one loop. The thread that made it, or that ended the last step, is the loop's own."""

    def __init__(
        self, aggregator: Aggregator, device: DeviceClock, clock: Callable[[], int], hooks: Hooks, remarks: Remarks
    ) -> None:
        self.clock = clock
        aggregator.base_ns = self.base = self.began = clock()  # of the run and of the step that runs
        self.must_settle = False  # set from the thread that writes
        self.last_step: int | None = None
        self.unresolved = 0  # stages whose device time was not known in time
        self._last_ns = 0  # that the step before took
        self._waiting: deque[Occurrence] = deque()  # ended, and not added up
        self._metrics: deque[tuple[Step | int, str, float]] = deque()  # with their step or its number
        self._settling = threading.Lock()  # never waited for long: a fork may leave it locked in the child
        self._aggregator = aggregator
        self._ids = aggregator.ids
        self._device = device
        self._has_marks = device.is_on
        self._hooks = hooks
        self._remarks = remarks
        self.current = Step(0)
        self.thread = Thread(itertools.count())
        self._own = self.thread.state

    @property
    def num_waiting(self) -> int:
        """The stages and metrics that are not added up."""
        return len(self._waiting) + len(self._metrics)

    def begin_at(self, step: int) -> int:
        """Let the first step have this number; return it, or 0 where it cannot be."""
        self.current.number = self._usable(step, 0)
        return self.current.number

    def begin(self, name: str, kind: Kind = "stage") -> None:
        """Begin a stage, a span or something excluded. What the hooks do before it is no part of it."""
        here = self.thread.state
        if self._hooks.watch_stages:
            self._hooks.tell("stage_start", name)
            if kind != "span":
                self._hooks.tell("excluded_start" if kind == "excluded" else "part_start", name)
        now = self.clock()
        if here.collections:
            self._take_collections(here, now)
        here.last_ns = now
        if not here.is_excluded:
            self._open(here, now, name, kind)
        elif here.stack[-1].name == name:
            here.stack[-1].repeated += 1

    def end(self, name: str, *, raised: bool = False) -> None:
        """End what is open under this name, and what is open inside it; what the hooks do after it is no part of it."""
        now, here = self.clock(), self.thread.state
        if here.collections:
            self._take_collections(here, now)
        here.last_ns = now
        nanoseconds = self._ended(here, now, name, raised)
        if self.must_settle or self.num_waiting > MOST_WAITING:
            self.settle()
        if self._hooks.watch_stages:
            self._hooks.tell("stage_end", name, nanoseconds / 1e9)

    def forget(self, name: str) -> None:
        """Take back the begin of the innermost stage, if it has this name."""
        here = self.thread.state
        if not here.stack or here.stack[-1].name != name:
            return
        if here.stack[-1].repeated:
            here.stack[-1].repeated -= 1
        else:
            self._let_go(here, here.stack.pop())

    def collected(self, began: int, ended: int) -> None:
        """Note a collection of garbage, which may fall into anything that is done here."""
        self.thread.state.collections.append((began, ended))

    def end_step(self, number: int | None = None) -> None:
        """End a step. The time that adding up takes then is in no step, unless a device is waited for across it."""
        now, here = self.clock(), self.thread.state
        if here.collections:
            self._take_collections(here, now)
        here.last_ns = now
        self._own = here
        if here.stack:
            self._leave_step(here)
        step = self.current
        if number is not None:
            step.number = self._usable(number, step.number)
        ended = Occurrence()
        ended.name, ended.stage = STEP, STEP_ID
        ended.step, ended.thread, ended.began = step, here.number, self.began
        ended.host = now - self.began - here.paused
        ended.inside = here.inside
        if step.flags:
            self._disturb_spans(here, now, ended.host)
        self._waiting.append(ended)
        self.last_step, self._last_ns = step.number, ended.host
        self.current = Step(step.number + 1)
        here.inside = here.paused = 0
        self.began = now
        if self._has_marks:
            self.settle()
        elif self.must_settle or self.num_waiting > ENOUGH_WAITING:
            self.settle()
            self.restart_step()
        if self._hooks.watch_stages:
            self._hooks.tell("step_end", self.last_step, ended.host / 1e9)

    def restart_step(self) -> None:
        """Begin the step that runs now, with all that is open; the device's gap across this moment is nobody's."""
        now, here = self.clock(), self.thread.state
        for opened in _all_open(here):
            opened.paused += self._spent_of_step(here, opened, now)
        for stage in here.stack:
            stage.inside = 0
        here.inside = here.paused = 0
        self._forget_last_end(here)
        self.began = now

    def disturb(self) -> None:
        """Keep the step that runs out of the summaries."""
        self.current.flags |= DISTURBED

    def metrics(self, values: Iterable[tuple[str, float]], step: int | None) -> None:
        """Take in the values of metrics of a step, of the one that runs if it is None."""
        self._metrics.extend((self.current if step is None else step, *value) for value in values)
        if self.num_waiting > MOST_WAITING:
            self.settle()

    def settle(self, *, must: bool = False) -> None:
        """Add up what has ended if no other thread does so; if it `must`, wait for that thread first.

        Only the thread of the loop may ask the device: a question from another one would end the capture of a CUDA
        graph.
        """
        is_own = threading.get_ident() == self._own.ident
        if is_own:
            self.must_settle = False
        self.add_up(may_ask=is_own, must=must)

    def add_up(self, *, may_ask: bool, all_of_them: bool = False, must: bool = False) -> None:
        """Add up what has ended, up to the first stage that the device has not passed.

        With `all_of_them` those that the device has not passed are added without its time. Where another thread adds
        up that is left to it, unless it `must` be done.
        """
        if not self._settling.acquire(timeout=LONGEST_HOLD_S if must else 0):
            return
        try:
            waiting, metrics, add = self._waiting, self._metrics, self._aggregator.add
            while metrics:
                self._add_metric(*metrics.popleft())
            while waiting:
                if waiting[0].closed is None:
                    add(waiting.popleft(), ABSENT, ABSENT)
                elif not self._add_marked(waiting[0], may_ask, all_of_them or len(waiting) > LONGEST_QUEUE):
                    return
        finally:
            self._settling.release()

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Hold the sums as they are, for those who read them; who adds up meanwhile does so later."""
        is_held = self._settling.acquire(timeout=LONGEST_HOLD_S)
        try:
            yield
        finally:
            if is_held:
                self._settling.release()

    def open_stages(self) -> tuple[OpenStage, ...]:
        """Return what is open in the loop's own thread, the outermost first."""
        now = self.clock()
        return tuple(OpenStage(stage.name, (now - stage.began) / 1e9) for stage in _all_open(self._own))

    def finish(self) -> None:
        """Add up everything, and note what has begun and not ended."""
        self.add_up(may_ask=True, all_of_them=True, must=True)
        for stage in self.open_stages():
            self._out_of_order(f"{stage.name!r} has begun and not ended")
        if self.unresolved:
            reason = "the device had not passed the end of some stages when they were booked; it is not waited for"
            self._remarks.add("device times", reason)

    def _open(self, here: ThreadState, now: int, name: str, kind: Kind) -> None:
        is_own = here is self._own
        if kind == "stage":
            for outer in here.stack:
                if outer.name == name:
                    self._drop(here, outer)
                    break
            known = self._ids["stage" if is_own else "background"]
            stage = known[name] if name in known else self._aggregator.id_of(name, "stage" if is_own else "background")
        elif kind in ("span", "excluded"):
            stage = self._aggregator.id_of(name, kind)
        else:
            raise ValueError(f"{kind!r} cannot be begun; there are 'stage', 'span' and 'excluded'")
        opened = Occurrence()
        opened.name, opened.stage, opened.began = name, stage, now
        if kind == "span":
            self._open_span(here, opened)
            return
        if kind == "excluded":
            self._forget_last_end(here)
            opened.is_excluded = here.is_excluded = True
        elif self._has_marks and is_own:
            opened.after, here.last_end = here.last_end, None
            opened.opened = self._device.take()
        here.stack.append(opened)

    def _ended(self, here: ThreadState, now: int, name: str, raised: bool) -> int:
        """Return the ns of what ends, 0 where nothing does."""
        stack = here.stack
        if not stack or stack[-1].name != name:
            if here.is_excluded:
                return 0
            if not self._put_right(here, name, now):
                return self._close_span(here, name, now, raised)
        elif stack[-1].repeated:
            stack[-1].repeated -= 1
            return 0
        return self._close(here, now, RAISED if raised else 0)

    def _take_collections(self, here: ThreadState, now: int) -> None:
        """Make stages of the collections since the last mark; one across a mark is left where it fell."""
        while here.collections:
            began, ended = here.collections.popleft()
            if here.last_ns <= began and ended <= now and not here.is_excluded:
                self._open(here, began, GARBAGE_COLLECTION, "stage")
                self._close(here, ended, 0)

    def _add_metric(self, step: Step | int, name: str, value: float) -> None:
        with self._remarks.guard(f"metric {name}"):
            self._aggregator.add_metric(step.number if isinstance(step, Step) else step, name, value)

    def _add_marked(self, ended: Occurrence, may_ask: bool, is_late: bool) -> bool:
        """Add the first stage that waits, if the device has passed it or it is too late; tell whether it did."""
        device_ns = gap_ns = ABSENT
        if may_ask and ended.closed is not None and self._device.has_passed(ended.closed):
            device_ns = self._device.ns_between(ended.opened, ended.closed)
            gap_ns = self._device.ns_between(ended.after, ended.opened)
        elif is_late:
            self.unresolved += 1
        else:
            return False
        self._waiting.popleft()
        self._device.release(ended.opened, ended.closed, ended.after)
        self._aggregator.add(ended, device_ns, gap_ns)
        return True

    def _close(self, here: ThreadState, now: int, flags: int) -> int:
        """Close the innermost stage; return its ns."""
        stack = here.stack
        ended = stack.pop()
        ended.host = host = now - ended.began - ended.paused
        ended.flags, ended.step, ended.thread = flags, self.current, here.number
        if ended.is_excluded:
            here.is_excluded = False
            here.paused += host
            for outer in _all_open(here):
                outer.paused += host
        elif stack:
            ended.parent = stack[-1].stage
            stack[-1].inside += host
        else:
            here.inside += host
        if ended.opened is not None:
            self._mark_end(here, ended)
        self._waiting.append(ended)
        return host

    def _mark_end(self, here: ThreadState, ended: Occurrence) -> None:
        """Mark the end on the device; what was excluded inside makes the device's time meaningless."""
        ended.closed = None if ended.paused else self._device.take()
        if ended.closed is None:
            self._device.release(ended.opened, ended.after)
            return
        ended.closed.users = 2  # the gap before the next stage begins with it
        self._forget_last_end(here)
        here.last_end = ended.closed

    def _forget_last_end(self, here: ThreadState) -> None:
        self._device.release(here.last_end)
        here.last_end = None

    def _put_right(self, here: ThreadState, name: str, now: int) -> bool:
        """End everything open inside the stage of this name; tell whether there is one."""
        stack = here.stack
        if not any(outer.name == name for outer in stack):
            return False
        while stack[-1].name != name:
            self._out_of_order(f"{stack[-1].name!r} was open when {name!r} ended around it")
            self._close(here, now, CUT)
        return True

    def _leave_step(self, here: ThreadState) -> None:
        """Make spans of the stages that are open when their step ends."""
        for stage in here.stack:
            self._device.release(stage.opened, stage.after)
            stage.opened = stage.after = None
            if stage.is_excluded:
                here.is_excluded = False
                self._out_of_order(f"{stage.name!r}, which is excluded, was open when its step ended")
            else:
                stage.stage = self._aggregator.id_of(stage.name, "span")
                self._open_span(here, stage)
        here.stack.clear()

    def _open_span(self, here: ThreadState, span: Occurrence) -> None:
        if span.name in here.spans:
            self._out_of_order(f"{span.name!r} began again before it had ended; the first is dropped")
        span.is_span = True
        here.spans[span.name] = span

    def _close_span(self, here: ThreadState, name: str, now: int, raised: bool) -> int:
        if name not in here.spans:
            self._out_of_order(f"{name!r} ended without a begin; ignored")
            return 0
        if self.current.flags:
            self._disturb_spans(here, now, self._last_ns)
        ended = here.spans.pop(name)
        ended.host = ended.inside = now - ended.began - ended.paused  # none of it is its own
        ended.flags |= RAISED if raised else 0
        ended.step, ended.thread = self.current, here.number
        self._waiting.append(ended)
        return ended.host

    def _disturb_spans(self, here: ThreadState, now: int, step_ns: int) -> None:
        """Keep out of the summaries every span that holds most of the disturbed step, which takes so many ns."""
        for span in here.spans.values():
            if 2 * self._spent_of_step(here, span, now) >= step_ns:
                span.flags |= DISTURBED

    def _spent_of_step(self, here: ThreadState, opened: Occurrence, now: int) -> int:
        """Return the ns that the step that runs has, without what was excluded, in something that is open."""
        if opened.began <= self.began:
            return now - self.began - here.paused
        return now - opened.began - opened.paused

    def _drop(self, here: ThreadState, opened: Occurrence) -> None:
        """Drop a stage that begins again, and all inside it."""
        self._out_of_order(f"{opened.name!r} began again before it had ended; the first is dropped")
        while opened in here.stack:
            self._let_go(here, here.stack.pop())

    def _let_go(self, here: ThreadState, opened: Occurrence) -> None:
        self._device.release(opened.opened, opened.after)
        if opened.is_excluded:
            here.is_excluded = False

    def _usable(self, number: int, otherwise: int) -> int:
        """Return the step's number, or the fallback where it is not usable."""
        if isinstance(number, int) and abs(number) <= LARGEST_STEP:
            return number
        self._remarks.add("number of a step", f"{number!r} is none; counted on")
        return otherwise

    def _out_of_order(self, reason: str) -> None:
        self._remarks.add("order of marks", reason)


def _all_open(here: ThreadState) -> list[Occurrence]:
    """Return what is open in a thread, the outermost first."""
    return [*list(here.spans.values()), *list(here.stack)]
