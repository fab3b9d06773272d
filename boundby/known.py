"""A value that is not known, and why: written `float | Missing`, so that nobody reads a number that is not there."""

from dataclasses import dataclass
from typing import Literal, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Missing:
    """Takes the place of a value, with the reason why there is none; false, like None."""

    reason: str

    def __bool__(self) -> Literal[False]:
        """Return False, so that `if value` tells whether there is one."""
        return False


def known(value: T | Missing) -> T | None:
    """Return the value, or None where there is none."""
    return None if isinstance(value, Missing) else value
