"""What a profiler gave up, counted, and said once to whoever started it."""

from collections.abc import Callable
from dataclasses import dataclass

MOST = 64  # different remarks; a run that has more says the same thing in many words
REASON_CHARACTERS = 300
Say = Callable[[str], object]


@dataclass(frozen=True)
class Remark:
    """One thing that was given up or cannot be given, why, and how often that happened."""

    what: str
    reason: str
    count: int = 1


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
            return
        if len(self._counts) >= MOST:
            return
        self._counts[key] = 1
        self.tell(*key)

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


def summary(error: BaseException) -> str:
    """Return the type and the first line of an error."""
    text = (str(error).splitlines() or [""])[0][:REASON_CHARACTERS]
    text = text.encode("utf-8", "replace").decode("utf-8")
    return f"{type(error).__name__}: {text}"
