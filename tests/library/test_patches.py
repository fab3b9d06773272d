"""Stand-ins for callables of objects, and what is left when they are taken back."""

from types import SimpleNamespace
from typing import Any

from boundby.patches import Patches


class Owner:
    def method(self, value: int) -> int:
        return value + 1


def doubled(original: Any, value: int) -> int:
    return 2 * original(value)


def test_stand_ins_are_taken_back_in_any_order_of_owners():
    owner, other = Owner(), Owner()
    other.method = lambda value: value + 10
    own = other.method
    patches = Patches()
    assert patches.put(owner, "method", doubled) and patches.put(other, "method", doubled)
    assert (owner.method(1), other.method(1)) == (4, 22)
    patches.undo()
    assert (vars(owner), other.method) == ({}, own)


def test_a_stand_in_that_was_wrapped_meanwhile_stays_and_does_nothing():
    owner = Owner()
    patches = Patches()
    patches.put(owner, "method", doubled)
    ours = owner.method
    owner.method = lambda value: -ours(value)
    patches.undo()
    assert owner.method(1) == -2


def test_there_is_no_stand_in_for_what_is_not_there():
    assert not Patches().put(Owner(), "absent", doubled)
    assert not Patches().put(None, "method", doubled)


def test_a_callable_of_a_module_is_given_back_as_it_was():
    module = SimpleNamespace(work=lambda value: value)
    own = module.work
    patches = Patches()
    patches.put(module, "work", doubled)
    assert module.work(2) == 4
    patches.undo()
    assert module.work is own
