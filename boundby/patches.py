"""Callables of objects and modules that others stand in for, for a while."""

import functools
from collections.abc import Callable
from operator import attrgetter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from boundby.training import StageTimer
    from boundby.training.records import Kind

Wrapper = Callable[..., Any]  # takes the original, then its arguments


class Patches:
    """Attributes that are replaced for a while; `undo` gives back what was there."""

    def __init__(self) -> None:
        self._put: list[tuple[Any, str, Any, bool, Any]] = []
        self._is_on = True

    def put(self, owner: Any, name: str, wrapper: Wrapper) -> bool:
        """Replace a callable of this `owner` by `wrapper(original, ...)`; tell whether there is such a callable."""
        original = getattr(owner, name, None)
        if not callable(original):
            return False

        @functools.wraps(original)
        def stand_in(*args: Any, **kwargs: Any) -> Any:
            return wrapper(original, *args, **kwargs) if self._is_on else original(*args, **kwargs)

        self._put.append((owner, name, stand_in, name in vars(owner), original))
        setattr(owner, name, stand_in)
        return True

    def undo(self) -> None:
        """Restore the originals; a replacement that others have wrapped meanwhile stays and only passes calls on."""
        self._is_on = False
        while self._put:
            owner, name, stand_in, was_own, original = self._put.pop()
            if vars(owner).get(name) is not stand_in:
                continue
            if was_own:
                setattr(owner, name, original)
            else:
                delattr(owner, name)


class TimedMethods(Patches):
    """Methods that are timed as stages while they are replaced; one inside another of its stage is part of that."""

    def __init__(self, timer: "StageTimer") -> None:
        super().__init__()
        self._timer = timer
        self._open: set[str] = set()

    def begin(self, stage: str, kind: "Kind" = "stage") -> None:
        """Begin a stage that `end` ends."""
        self._open.add(stage)
        self._timer.begin(stage, kind)

    def end(self, stage: str, *, raised: bool = False) -> None:
        """End a stage, if it has begun here; with `raised` an exception has left it."""
        if stage in self._open:
            self._open.discard(stage)
            self._timer.end(stage, raised=raised)

    def cut(self) -> None:
        """End all that has begun here: an exception has left it."""
        for stage in list(self._open):
            self.end(stage, raised=True)

    def timed(self, stage: str, kind: "Kind" = "stage", when: Callable[[], bool] = lambda: True) -> Wrapper:
        """Return a wrapper that times each call as a stage, `when` that is wanted."""

        def wrapper(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            if stage in self._open or not when():
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
        place, _, name = path.rpartition(".")
        try:
            owner = attrgetter(place)(owner) if place else owner
            if not self.put(owner, name, wrapper or self.timed(stage)):
                self._timer.remarks.add(f"stage {stage}", f"there is no {name!r} here: what it would do is in no stage")
        except Exception as error:
            self._timer.remarks.add(f"stage {stage}", error)
