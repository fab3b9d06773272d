"""Stand-ins for callables of objects, and what is left when they are taken back."""

from types import SimpleNamespace
from typing import Any

from boundby.capture.patches import Patches


class Owner:
    def method(self, value: int) -> int:
        return value + 1


def doubled(original: Any, value: int) -> int:
    return 2 * original(value)


def test_stand_ins_are_taken_back_in_any_order_of_owners_and_there_is_none_for_what_is_not_there():
    owner, module = Owner(), SimpleNamespace(method=lambda value: value + 10)
    own = module.method
    patches = Patches()
    assert patches.put(owner, "method", doubled) and patches.put(module, "method", doubled)
    assert (owner.method(1), module.method(1)) == (4, 22)
    assert not patches.put(owner, "absent", doubled) and not patches.put(None, "method", doubled)
    patches.undo()
    assert (vars(owner), module.method) == ({}, own)


def test_a_stand_in_that_was_wrapped_meanwhile_stays_and_does_nothing():
    owner = Owner()
    patches = Patches()
    patches.put(owner, "method", doubled)
    ours = owner.method
    owner.method = lambda value: -ours(value)
    patches.undo()
    assert owner.method(1) == -2
