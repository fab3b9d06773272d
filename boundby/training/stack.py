"""The stages that are open in each thread."""

import threading
from collections.abc import Iterator

from boundby.training.marks import SharedMark
from boundby.training.ring import ABSENT, LAST_THREAD


class Step:
    """The step that runs; its stages refer to it, since its number may become known at its end only."""

    __slots__ = ("flags", "number")

    def __init__(self, number: int) -> None:
        self.number = number
        self.flags = 0


class Occurrence:
    """One occurrence of a stage, from its begin until it is booked. Times are ns of the host's clock."""

    __slots__ = (
        "after",  # mark at the end of the stage before
        "began",
        "closed",  # mark at its end
        "flags",
        "host",
        "inside",  # in stages inside
        "is_excluded",
        "name",
        "opened",  # mark at its begin
        "parent",
        "paused",  # excluded
        "stage",
        "step",
        "thread",
    )

    def __init__(self, name: str, stage: int, is_excluded: bool = False) -> None:
        self.name = name
        self.stage = stage
        self.is_excluded = is_excluded
        self.inside = self.paused = self.flags = 0
        self.parent = ABSENT
        self.opened: SharedMark | None = None
        self.closed: SharedMark | None = None
        self.after: SharedMark | None = None
        self.began: int
        self.host: int
        self.step: Step
        self.thread: int


class Thread(threading.local):
    """What is open in the thread that asks."""

    def __init__(self, numbers: Iterator[int]) -> None:
        self.state = State(min(next(numbers), LAST_THREAD))


class State:
    """What is open in one thread."""

    __slots__ = ("inside", "is_excluded", "last_end", "number", "paused", "spans", "stack")

    def __init__(self, number: int) -> None:
        self.number = number
        self.stack: list[Occurrence] = []
        self.spans: dict[str, Occurrence] = {}
        self.is_excluded = False
        self.inside = 0  # ns of this step in stages that lie in no other
        self.paused = 0  # ns of this step excluded
        self.last_end: SharedMark | None = None
