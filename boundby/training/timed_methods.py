"""What the callbacks of the Trainer and of Lightning have in common: methods of a trainer that are timed as stages."""

import threading
from collections.abc import Callable
from operator import attrgetter
from typing import Any

from boundby.capture import Patches, Wrapper
from boundby.training import StageTimer
from boundby.training.records import Kind


class TimedMethods(Patches):
    """Methods that are timed as stages while they are replaced; one inside another of its stage is part of that.

    Each thread has stages of its own.
    """

    def __init__(self, timer: StageTimer) -> None:
        super().__init__()
        self._timer = timer
        self._open: set[tuple[int, str]] = set()

    def begin(self, stage: str, kind: Kind = "stage") -> None:
        """Begin a stage that `end` ends."""
        self._open.add((threading.get_ident(), stage))
        self._timer.begin(stage, kind)

    def end(self, stage: str, *, raised: bool = False) -> None:
        """End a stage, if it has begun here; with `raised` an exception has left it."""
        if self._is_open(stage):
            self._open.discard((threading.get_ident(), stage))
            self._timer.end(stage, raised=raised)

    def cut(self) -> None:
        """End all that this thread has begun here: an exception has left it."""
        for _, stage in list(self._open):
            self.end(stage, raised=True)

    def _is_open(self, stage: str) -> bool:
        return (threading.get_ident(), stage) in self._open

    def timed(self, stage: str, kind: Kind = "stage", when: Callable[[], bool] = lambda: True) -> Wrapper:
        """Return a wrapper that times each call as a stage, `when` that is wanted."""

        def wrapper(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            if self._is_open(stage) or not when():
                return original(*args, **kwargs)
            self.begin(stage, kind)
            try:
                result = original(*args, **kwargs)
            except BaseException:
                self.end(stage, raised=True)
                raise
            self.end(stage)
            return result

        return wrapper

    def time(self, owner: Any, path: str, stage: str, wrapper: Wrapper | None = None) -> None:
        """Put a wrapper, by default that of `timed`, at a path below an owner; a remark says what is not there."""
        outer, _, name = path.rpartition(".")
        with self._timer.remarks.guard(f"stage {stage}"):
            owner = attrgetter(outer)(owner) if outer else owner
            if not self.put(owner, name, wrapper or self.timed(stage)):
                self._timer.remarks.add(f"stage {stage}", f"there is no {name!r} here: what it would do is in no stage")
