"""The house: rooms import downwards, others touch a room by its face alone, and no room grows without a reason."""

import ast
import importlib
import subprocess
import sys
import tomllib
from pathlib import Path

import grimp
import pytest

import boundby

ROOT = Path(__file__).resolve().parents[1]
ROOMS = sorted(path.parent for top in ("boundby", "utils") for path in (ROOT / top).glob("*/__init__.py"))
BESIDE_ROOMS = {"boundby": ["__init__", "__main__", "cli", "files", "formatting"], "utils": ["__init__"]}
TABLE = ROOT / "tests" / "lines_per_room.toml"
LONGEST_FACE = 14  # lines of a docstring: what a room is for, what goes in and what comes out


def dotted(room: Path) -> str:
    return ".".join(room.relative_to(ROOT).parts)


def handed_on(room: Path) -> set[str]:
    lines = ast.parse((room / "__init__.pyi").read_text(encoding="utf-8")).body
    return {name.asname or name.name for line in lines for name in line.names}


def modules_handed_on(room: Path) -> set[str]:
    lines = ast.parse((room / "__init__.pyi").read_text(encoding="utf-8")).body
    return {f"{dotted(room)}.{name.name}" for line in lines if line.module is None for name in line.names}


def lines_in(folder: str) -> int:
    files = (path for pattern in ("*.py", "*.pyi") for path in (ROOT / folder).rglob(pattern))
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files)


def test_imports_obey_the_contracts_in_pyproject():
    done = subprocess.run(
        [sys.executable, "-c", "from importlinter.cli import lint_imports_command as lint; lint(['--no-cache'])"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_other_rooms_touch_only_the_face_of_a_room():
    graph = grimp.build_graph("boundby", "utils", cache_dir=None)
    open_to_all = {module for room in ROOMS for module in modules_handed_on(room)}
    crossings = [
        f"{importer} -> {target}"
        for importer in graph.modules
        for target in graph.find_modules_directly_imported_by(importer)
        if target.count(".") >= 2 and importer.split(".")[:2] != target.split(".")[:2] and target not in open_to_all
    ]
    assert crossings == []


@pytest.mark.parametrize("room", ROOMS, ids=dotted)
def test_face_says_what_the_room_is_for_and_hands_on_names_that_are_there(room):
    docstring = ast.get_docstring(ast.parse((room / "__init__.py").read_text(encoding="utf-8"))) or ""
    assert 1 <= len(docstring.splitlines()) <= LONGEST_FACE
    module = importlib.import_module(dotted(room))
    assert [name for name in handed_on(room) if not hasattr(module, name)] == []
    with pytest.raises(AttributeError, match="no attribute 'not_here'"):
        module.not_here  # noqa: B018


@pytest.mark.parametrize("name", boundby.MOVED)
def test_a_module_is_imported_by_its_earlier_name_as_the_one_that_it_is(name, monkeypatch):
    module = importlib.import_module(boundby.MOVED[name])
    spec = module.__spec__
    monkeypatch.delitem(sys.modules, name, raising=False)
    with pytest.warns(DeprecationWarning, match=f"{name} is {module.__name__} now"):
        assert importlib.import_module(name) is module
    assert module.__spec__ is spec


@pytest.mark.parametrize("top", BESIDE_ROOMS)
def test_only_few_modules_stand_beside_the_rooms(top):
    assert sorted(path.stem for path in (ROOT / top).glob("*.py")) == BESIDE_ROOMS[top]
    assert all((path / "__init__.py").is_file() for path in (ROOT / top).iterdir() if list(path.glob("*.py")))


def test_no_room_is_longer_than_the_table_allows():
    """A room that must grow gets a line in `grew`: how many lines, and why; one that shrank gets its new number."""
    table = tomllib.loads(TABLE.read_text(encoding="utf-8"))
    assert set(table) == {*(room.relative_to(ROOT).as_posix() for room in ROOMS), "scripts", "tests"}
    assert all(reason.strip() for entry in table.values() for _, reason in entry.get("grew", []))
    allowed = {name: entry["lines"] + sum(more for more, _ in entry.get("grew", [])) for name, entry in table.items()}
    assert {name: (lines_in(name), most) for name, most in allowed.items() if lines_in(name) > most} == {}
