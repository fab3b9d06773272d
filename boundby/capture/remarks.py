"""What was given up or cannot be given, and why: the profilers of a program go on, and say it. Loads no torch."""

from collections.abc import Callable
from functools import partial
from types import TracebackType

import msgspec

Say = Callable[[str], object]
MOST_REMARKS = 64  # different ones; a run that has more says the same thing in many words
REASON_CHARACTERS = 300  # a failed assertion of torch brings a page of C++ frames along


class Remark(msgspec.Struct, frozen=True):
    """One thing that was given up or cannot be given, why, and how often that happened.

    `is_foreseen` where it follows from the settings, the length of the loop or the device: nothing has failed.
    """

    what: str
    reason: str
    count: int = 1
    is_foreseen: bool = False


def summary(error: BaseException) -> str:
    """Return the type and the first line of an error."""
    text = (str(error).splitlines() or [""])[0][:REASON_CHARACTERS]
    return f"{type(error).__name__}: {text.encode('utf-8', 'replace').decode('utf-8')}"


class Guard:
    """A context that lets no error out but those that end a program; `failed` is given it. It may be entered again."""

    __slots__ = ("_failed",)

    def __init__(self, failed: Callable[[Exception], object]) -> None:
        self._failed = failed

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        if not isinstance(error, Exception):
            return False
        self._failed(error)
        return True


class Remarks:
    """Gathers remarks; the first one about each thing goes to `say`, whose failures are ignored. Never raises."""

    def __init__(self, say: Say | None = None) -> None:
        self._say = say
        self._counts: dict[tuple[str, str], int] = {}
        self._said: set[str] = set()

    def add(self, what: str, reason: str | BaseException) -> None:
        """Note that `what` is less than was asked for."""
        key = (what, summary(reason) if isinstance(reason, BaseException) else reason)
        if key in self._counts:
            self._counts[key] += 1
        elif len(self._counts) < MOST_REMARKS:
            self._counts[key] = 1
            self.tell(*key)

    def guard(self, what: str) -> Guard:
        """Return a context whose errors become remarks on `what`."""
        return Guard(partial(self.add, what))

    def tell(self, what: str, reason: str) -> None:
        """Say it, unless something about `what` has been said; it is kept elsewhere."""
        if self._say and what not in self._said:
            self._said.add(what)
            try:
                self._say(f"{what}: {reason}")
            except Exception:
                self._say = None

    def all(self) -> tuple[Remark, ...]:
        """Return them in the order of their first appearance."""
        return tuple(Remark(what, reason, count) for (what, reason), count in list(self._counts.items()))
