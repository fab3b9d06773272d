"""Ended stages on their way into the book: they wait there for the device, and the device is never waited for."""

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterator

from boundby.training.book import Book
from boundby.training.marks import DeviceClock
from boundby.training.ring import ABSENT
from boundby.training.stack import Occurrence

LONGEST = 4096  # stages that may wait for the device; the oldest go without its time then
LONGEST_HOLD_S = 1.0  # a child may have been forked while the book was held


class Arrivals:
    """Takes ended stages from any thread into `waiting`; `settle` books them in order."""

    def __init__(self, book: Book, device: DeviceClock, catch_up: Callable[[], None]) -> None:
        self.waiting: deque[Occurrence] = deque()
        self.unresolved = 0  # stages whose device time was not known in time
        self._book = book
        self._device = device
        self._catch_up = catch_up  # with the events of which the stages end
        self._settling = threading.Lock()  # never waited for long: a fork may leave it locked in the child

    def settle(self, *, may_ask: bool, all_of_them: bool = False, must: bool = False) -> None:
        """Book what has ended, up to the first stage that the device has not passed.

        Only the thread of the loop may ask the device: a question from another one would end the capture of a CUDA
        graph. With `all_of_them` those that the device has not passed are booked without its time. Where another
        thread has the book that is left to it, unless it `must` be done.
        """
        if not self._settling.acquire(timeout=LONGEST_HOLD_S if must else 0):
            return
        try:
            self._catch_up()
            waiting, add = self.waiting, self._book.add
            while waiting:
                if waiting[0].closed is None:
                    add(waiting.popleft(), ABSENT, ABSENT)
                elif not self._settle_marked(waiting[0], may_ask, all_of_them or len(waiting) > LONGEST):
                    return
        finally:
            self._settling.release()

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Hold the book as it is, for those who read it; who settles meanwhile does so later."""
        is_held = self._settling.acquire(timeout=LONGEST_HOLD_S)
        try:
            yield
        finally:
            if is_held:
                self._settling.release()

    def _settle_marked(self, ended: Occurrence, may_ask: bool, is_late: bool) -> bool:
        """Book the first stage that waits, if the device has passed it or it is too late; tell whether it did."""
        device_ns = gap_ns = ABSENT
        if may_ask and ended.closed is not None and self._device.has_passed(ended.closed):
            device_ns = self._device.ns_between(ended.opened, ended.closed)
            gap_ns = self._device.ns_between(ended.after, ended.opened)
        elif is_late:
            self.unresolved += 1
        else:
            return False
        self.waiting.popleft()
        self._device.release(ended.opened, ended.closed, ended.after)
        self._book.add(ended, device_ns, gap_ns)
        return True
