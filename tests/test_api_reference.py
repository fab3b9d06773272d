"""The pages that `docs/generate_api.py` makes for the site: every public name, and links that lead to pages."""

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


def test_every_public_module_has_a_page_and_a_line_in_the_index():
    made = generate_api.made_pages()
    names = [module.name for module in generate_api.public_modules()]
    assert [name for name in names if not made[f"reference/{name}.md"].startswith(f"# {name}\n")] == []
    assert [name for name in names if f"[{name}]({name}.md) | " not in made["reference/index.md"]] == []


@pytest.mark.parametrize(
    ("link", "page", "becomes"),
    [
        ("docs/traces.md", "index.md", "traces.md"),
        ("CHANGELOG.md", "index.md", "changelog.md"),
        ("../configs/config.yaml", "getting-started.md", "reference/settings.md"),
        ("../method.md#limits", "measurements/a.md", "../method.md#limits"),
        ("b.md", "measurements/a.md", "../measurements/b.md"),
        ("https://pypi.org", "index.md", "https://pypi.org"),
        ("#here", "traces.md", "#here"),
    ],
)
def test_links_of_the_checkout_lead_to_pages_of_the_site(link, page, becomes):
    assert generate_api.relinked(f"see [it]({link}).", page) == f"see [it]({becomes})."


def test_a_notebook_becomes_a_page_with_what_it_printed_and_showed():
    outputs = [{"text": ["4 ms\n"]}, {"data": {"text/html": ["<b>card</b>"], "text/plain": ["card"]}}]
    cells = [
        {"cell_type": "markdown", "source": ["# One call"]},
        {"cell_type": "code", "source": ["explain()"], "outputs": outputs},
    ]
    page = generate_api.notebook_page({"cells": cells})
    assert page == "# One call\n\n```python\nexplain()\n```\n\n```text\n4 ms\n```\n\n<div><b>card</b></div>\n"


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
