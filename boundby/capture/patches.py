"""Callables of objects and modules that others stand in for, for a while."""

import functools
from collections.abc import Callable
from typing import Any

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
