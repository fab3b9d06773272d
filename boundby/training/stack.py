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
    """One occurrence of a stage, from its begin until it is booked. Times are ns of the host's clock.

    It has no `__init__` and no slots: each stage begins one, and what most of them leave as it is stands in the class.
    """

    is_excluded = False
    is_span = False  # it holds steps, so that its flags are its own
    repeated = 0  # begins of its name inside it, while it is excluded
    inside = 0  # in stages inside
    paused = 0  # excluded
    flags = 0
    parent = ABSENT
    opened: SharedMark | None = None  # mark at its begin
    closed: SharedMark | None = None  # mark at its end
    after: SharedMark | None = None  # mark at the end of the stage before
    name: str
    stage: int
    began: int
    host: int
    step: Step
    thread: int


class Thread(threading.local):
    """What is open in the thread that asks."""

    def __init__(self, numbers: Iterator[int]) -> None:
        self.state = State(min(next(numbers), LAST_THREAD))


class State:
    """What is open in one thread."""

    __slots__ = ("ident", "inside", "is_excluded", "last_end", "number", "paused", "spans", "stack")

    def __init__(self, number: int) -> None:
        self.number = number
        self.ident = threading.get_ident()  # of the thread that asks first, which is the one
        self.stack: list[Occurrence] = []
        self.spans: dict[str, Occurrence] = {}
        self.is_excluded = False
        self.inside = 0  # ns of this step in stages that lie in no other
        self.paused = 0  # ns of this step excluded
        self.last_end: SharedMark | None = None
