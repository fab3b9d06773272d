"""Marks in the queue of a device, whose times are read when the device has passed them and never waited for."""

from typing import Any, Protocol

from boundby.training.remarks import Remarks
from boundby.training.ring import ABSENT


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


class SharedMark:
    """A mark that may end one stage and begin the gap before the next."""

    __slots__ = ("mark", "users")

    def __init__(self, mark: Any) -> None:
        self.mark = mark
        self.users = 1


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
        if self._marks is None:
            return None
        try:
            mark = self._marks.mark()
        except Exception as error:
            return self._off(error)
        return None if mark is None else SharedMark(mark)

    def has_passed(self, shared: SharedMark) -> bool:
        """Tell whether the device has passed the mark, or no time will ever come of it."""
        if self._marks is None:
            return True
        try:
            return self._marks.has_passed(shared.mark)
        except Exception as error:
            self._off(error)
            return True

    def ns_between(self, start: SharedMark | None, end: SharedMark | None) -> int:
        """Return the ns of device time between two marks that it has passed, ABSENT where they are not known."""
        if self._marks is None or start is None or end is None:
            return ABSENT
        try:
            seconds = self._marks.seconds_between(start.mark, end.mark)
        except Exception as error:
            self._off(error)
            return ABSENT
        return ABSENT if seconds is None else max(0, round(seconds * 1e9))

    def release(self, *marks: SharedMark | None) -> None:
        """Let go of marks; those without a user are taken back."""
        for shared in marks:
            if shared is None:
                continue
            shared.users -= 1
            if not shared.users and self._marks is not None:
                self._marks.reuse(shared.mark)

    def _off(self, error: Exception) -> None:
        self._marks = None
        self._remarks.add("device times", error)
