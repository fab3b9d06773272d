"""docs/api.md is what `docs/generate_api.py` makes of the docstrings, and holds every public name."""

import ast

import pytest

from docs import generate_api
from docs.generate_api import Module

SPECIFIED = {  # names that users were promised, and where they are imported from
    "ObservabilityEngine": "boundby.layers.engine",
    "ExecutionPlanner": "boundby.partition",
    "VirtualNode": "boundby.partition",
    "PartitionPlan": "boundby.partition",
}
SOURCE = '''
"""What it does."""

from typing import Literal

Kind = Literal["a", "b"]
MOST = 3
_HIDDEN = 4


class Record:
    """Holds values of <type>, not `<code>`."""

    count: int  # of things
    name: str | None = None
    _hidden: int = 0

    @property
    def twice(self) -> int:
        """The count twice."""

    @staticmethod
    def made(count: int) -> "Record":
        """Return one."""

    def _inner(self) -> None: ...


class Engine:
    """Runs."""

    def __init__(self, first: int, /, second: str = "x", *, third: float = 1.0, **rest: int) -> None: ...

    def run(self, *values: int) -> None:
        """Run."""


def work(value: "Record") -> Kind:
    """Return the kind."""


def _hidden() -> None: ...
'''


@pytest.fixture
def shown() -> str:
    return "\n".join(generate_api._module(Module("boundby.example", SOURCE)))


def test_the_page_is_what_the_docstrings_give():
    stored = generate_api.PAGE.read_text(encoding="utf-8")
    assert stored == generate_api.page(), f"docs/api.md is not up to date: {generate_api.COMMAND}"


def test_two_makings_are_equal():
    assert generate_api.page() == generate_api.page()


def test_promised_names_stand_under_the_module_they_are_imported_from():
    public = {module.name: generate_api.public_names(module) for module in generate_api.public_modules()}
    assert [name for name, module in SPECIFIED.items() if name not in public[module]] == []


def test_every_public_name_has_a_docstring():
    for module in generate_api.public_modules():
        for name, (_, node) in generate_api.public_names(module).items():
            if isinstance(node, ast.ClassDef | ast.FunctionDef):
                assert ast.get_docstring(node), f"{module.name}.{name}"


def test_functions_and_methods_have_their_signatures(shown):
    assert "work(value: 'Record') -> Kind" in shown
    assert "Engine(first: int, /, second: str = 'x', *, third: float = 1.0, **rest: int)" in shown
    assert "Engine.run(*values: int) -> None" in shown
    assert "Record.made(count: int) -> 'Record'" in shown


def test_long_signatures_have_an_argument_a_line():
    arguments = ", ".join(f"argument_{number}: int = {number}" for number in range(9))
    node = ast.parse(f"def work({arguments}, *, last: str) -> int: ...").body[0]
    lines = generate_api._signature(node).splitlines()
    assert (
        lines[0] == "work("
        and lines[1] == "    argument_0: int = 0,"
        and lines[-3:] == ["    *,", "    last: str,", ") -> int"]
    )


def test_fields_keep_the_comments_that_explain_them(shown):
    assert "class Record:\n    count: int  # of things\n    name: str | None = None\n```" in shown
    assert "Record.twice -> int" in shown


def test_what_begins_with_an_underscore_and_constants_are_left_out(shown):
    assert "hidden" not in shown and "_inner" not in shown and "MOST" not in shown
    assert "Kind = Literal['a', 'b']" in shown


def test_a_docstring_makes_no_tags(shown):
    assert "Holds values of &lt;type>, not `<code>`." in shown
