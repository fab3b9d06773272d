"""The mechanics of a stage timer: which stage lies in which, what belongs to which step, and marks out of order."""

import itertools
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from boundby.training.arrivals import Arrivals
from boundby.training.book import STEP_ID, Book
from boundby.training.marks import DeviceClock
from boundby.training.records import STEP, Kind, OpenStage
from boundby.training.remarks import Remarks
from boundby.training.ring import CUT, DISTURBED, RAISED
from boundby.training.stack import Occurrence, State, Step, Thread

LARGEST_STEP = 2**62
# What happens is noted in a few instructions and understood later, many events at a time, by code that is then at hand
# to the processor: after a millisecond of other work each Python function that is called costs about 1 us. Where
# somebody waits for it, a hook or the marks of a device, it is understood at once.
ENOUGH_EVENTS = 512  # at the end of a step; with 128 a third of the time went into beginning to understand
MOST_EVENTS = 2048  # within a step
MOST_WAITING = 256  # stages with marks, within a step


class Loop:
    """The stages of one loop. The thread that made it, or that ended the last step, is the loop's own.

    Every event is the name of a method, the state of the thread in which it happened, the ns of the clock, and two
    things more that the method may ask for. It is put to the `events`, or understood at once by `take`.
    """

    def __init__(
        self,
        book: Book,
        device: DeviceClock,
        clock: Callable[[], int],
        failed: Callable[[Exception], None],
        remarks: Remarks,
        first_step: int,
    ) -> None:
        self.clock = clock
        book.base_ns = self.base = self.began = clock()  # of the run and of the step that runs
        self.events: deque[tuple[str, State, int, Any, Any]] = deque()
        self.arrivals = Arrivals(book, device, self._catch_up)
        self.has_marks = device.is_on
        self.must_settle = False  # set from the thread that writes
        self.last_step: int | None = None
        self._last_ns = 0  # that the step before took
        self._waiting = self.arrivals.waiting
        self._book = book
        self._ids = book.ids
        self._device = device
        self._failed = failed
        self._remarks = remarks
        self.current = Step(self._usable(first_step, 0))
        self.thread = Thread(itertools.count())
        self._own = self.thread.state

    def take(self, method: str, here: State, now: int, first: Any = None, second: Any = None) -> int:
        """Understand an event at once; return the ns of what it ends, 0 where it ends nothing."""
        if self.events:
            self.settle(must=True)
        nanoseconds = 0
        try:
            nanoseconds = getattr(self, method)(here, now, first, second) or 0
        except Exception as error:
            self._failed(error)
        is_step = method == "end_step"
        if self.must_settle or (is_step and self.has_marks) or len(self._waiting) > MOST_WAITING:
            self.settle()
        return nanoseconds

    def begin(self, here: State, now: int, name: str, kind: Kind) -> None:
        """Open a stage, a span or something excluded."""
        if here.is_excluded:
            if here.stack[-1].name == name:
                here.stack[-1].repeated += 1
            return
        is_own = here is self._own
        if kind == "stage":
            for outer in here.stack:
                if outer.name == name:
                    self._drop(here, outer)
                    break
            known = self._ids["stage" if is_own else "background"]
            stage = known[name] if name in known else self._book.id_of(name, "stage" if is_own else "background")
        elif kind in ("span", "excluded"):
            stage = self._book.id_of(name, kind)
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
        elif self.has_marks and here is self._own:
            opened.after, here.last_end = here.last_end, None
            opened.opened = self._device.take()
        here.stack.append(opened)

    def end(self, here: State, now: int, name: str, raised: bool) -> int:
        """Close what is open under this name, and what is open inside it; return its ns."""
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

    def forget(self, here: State, _: int, name: str, __: None) -> None:
        """Take back the begin of the innermost stage, if it has this name."""
        if not here.stack or here.stack[-1].name != name:
            return
        if here.stack[-1].repeated:
            here.stack[-1].repeated -= 1
        else:
            self._let_go(here, here.stack.pop())

    def end_step(self, here: State, now: int, number: int | None, _: None) -> int:
        """Close the books of a step; return its ns."""
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
        return ended.host

    def restart_step(self, here: State, now: int, *_: None) -> None:
        """Begin the step that runs now, with all that is open; the device's gap across this moment is nobody's."""
        for span in here.spans.values():
            span.paused += self._spent_of_step(here, span, now)
        for stage in here.stack:
            stage.paused += self._spent_of_step(here, stage, now)
            stage.inside = 0
        here.inside = here.paused = 0
        self._forget_last_end(here)
        self.began = now

    def disturb(self, *_: object) -> None:
        """Keep the step that runs out of the summaries."""
        self.current.flags |= DISTURBED

    def add_metrics(self, _here: State, _now: int, values: list[tuple[str, float]], step: int | None) -> None:
        """Take in the values of metrics of a step, of the one that runs if it is None."""
        for name, value in values:
            try:
                self._book.add_metric(self.current.number if step is None else step, name, value)
            except Exception as error:
                self._remarks.add(f"metric {name}", error)

    def settle(self, *, must: bool = False) -> None:
        """Book what has ended, as far as this thread may; if it `must`, once another thread is done with the book."""
        is_own = threading.get_ident() == self._own.ident
        if is_own:
            self.must_settle = False
        self.arrivals.settle(may_ask=is_own, must=must)

    def open_stages(self) -> tuple[OpenStage, ...]:
        """Return what is open in the loop's own thread, the outermost first."""
        now = self.clock()
        opened = [*list(self._own.spans.values()), *list(self._own.stack)]
        return tuple(OpenStage(each.name, (now - each.began) / 1e9) for each in opened)

    def note_unended(self) -> None:
        """Note what has begun and not ended."""
        for stage in self.open_stages():
            self._out_of_order(f"{stage.name!r} has begun and not ended")

    def _catch_up(self) -> None:
        """Understand what has been noted; one thread at a time does so."""
        events = self.events
        while events:
            method, here, now, first, second = events.popleft()
            try:
                getattr(self, method)(here, now, first, second)
            except Exception as error:
                self._failed(error)

    def _close(self, here: State, now: int, flags: int) -> int:
        """Close the innermost stage; return its ns."""
        stack = here.stack
        ended = stack.pop()
        ended.host = host = now - ended.began - ended.paused
        ended.flags, ended.step, ended.thread = flags, self.current, here.number
        if ended.is_excluded:
            here.is_excluded = False
            here.paused += host
            for outer in (*stack, *here.spans.values()):
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

    def _mark_end(self, here: State, ended: Occurrence) -> None:
        """Mark the end on the device; what was excluded inside makes the device's time meaningless."""
        ended.closed = None if ended.paused else self._device.take()
        if ended.closed is None:
            self._device.release(ended.opened, ended.after)
            return
        ended.closed.users = 2  # the gap before the next stage begins with it
        self._forget_last_end(here)
        here.last_end = ended.closed

    def _forget_last_end(self, here: State) -> None:
        self._device.release(here.last_end)
        here.last_end = None

    def _put_right(self, here: State, name: str, now: int) -> bool:
        """Cut off what is open inside the stage of this name; tell whether there is one."""
        stack = here.stack
        if not any(outer.name == name for outer in stack):
            return False
        while stack[-1].name != name:
            self._out_of_order(f"{stack[-1].name!r} was open when {name!r} ended around it")
            self._close(here, now, CUT)
        return True

    def _leave_step(self, here: State) -> None:
        """Make spans of the stages that are open when their step ends."""
        for each in here.stack:
            self._device.release(each.opened, each.after)
            each.opened = each.after = None
            if each.is_excluded:
                here.is_excluded = False
                self._out_of_order(f"{each.name!r}, which is excluded, was open when its step ended")
            else:
                each.stage = self._book.id_of(each.name, "span")
                self._open_span(here, each)
        here.stack.clear()

    def _open_span(self, here: State, span: Occurrence) -> None:
        if span.name in here.spans:
            self._out_of_order(f"{span.name!r} began again before it had ended; the first is dropped")
        span.is_span = True
        here.spans[span.name] = span

    def _close_span(self, here: State, name: str, now: int, raised: bool) -> int:
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

    def _disturb_spans(self, here: State, now: int, step_ns: int) -> None:
        """Keep out of the summaries every span that holds most of the disturbed step, which takes so many ns."""
        for span in here.spans.values():
            if 2 * self._spent_of_step(here, span, now) >= step_ns:
                span.flags |= DISTURBED

    def _spent_of_step(self, here: State, opened: Occurrence, now: int) -> int:
        """Return the ns that the step that runs has, without what was excluded, in something that is open."""
        if opened.began <= self.began:
            return now - self.began - here.paused
        return now - opened.began - opened.paused

    def _drop(self, here: State, opened: Occurrence) -> None:
        """Drop a stage that begins again, and all inside it."""
        self._out_of_order(f"{opened.name!r} began again before it had ended; the first is dropped")
        while opened in here.stack:
            self._let_go(here, here.stack.pop())

    def _let_go(self, here: State, opened: Occurrence) -> None:
        self._device.release(opened.opened, opened.after)
        if opened.is_excluded:
            here.is_excluded = False

    def _usable(self, number: int, otherwise: int) -> int:
        """Return the number of a step, or the other one where it cannot be."""
        if isinstance(number, int) and abs(number) <= LARGEST_STEP:
            return number
        self._remarks.add("number of a step", f"{number!r} is none; counted on")
        return otherwise

    def _out_of_order(self, reason: str) -> None:
        self._remarks.add("order of marks", reason)
