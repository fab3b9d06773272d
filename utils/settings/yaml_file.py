"""Read a YAML of settings, with overrides, into a pydantic record; report every mistake with its place."""

import copy
import difflib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args

import yaml
from pydantic import BaseModel, ValidationError

from utils.settings.errors import SettingsError

MAX_BYTES = 100_000  # a settings file has a few kB; more is not one, and would take ten seconds a MB
MOST_PROBLEMS = 20  # that are listed
SHOWN_CHARACTERS = 80  # of a wrong value
COMMAND_LINE = "command line"

Record = TypeVar("Record", bound=BaseModel)
KeyPath = tuple[str | int, ...]
Marks = dict[KeyPath, str]  # where each key stands, as `file:line:column`
Values = dict[str, Any]  # of a YAML, by section
Adapt = Callable[[Values, Values, frozenset[str]], None]


def load(schema: type[Record], path: str | Path, overrides: Sequence[str] = (), adapt: Adapt | None = None) -> Record:
    """Return the settings of the YAML at `path`, each `key.sub=value` of `overrides` laid over it.

    `adapt(stated, values, given)` may change the `values` before they are checked; it gets what the file states and
    which keys are overridden.

    Raises SettingsError that lists every mistake as `file:line:column: key: problem`.
    """
    file, marks = str(path), Marks()
    root, stated = _parsed(_text(Path(path)), file)
    if not isinstance(stated, dict):
        raise SettingsError(f"{path}: holds no settings; expected keys such as 'model:'")
    problems = _noted(root, file, (), marks)
    values = copy.deepcopy(stated)
    for override in overrides:
        try:
            _lay_over(override, values, marks)
        except SettingsError as error:
            problems.append(str(error))
    if adapt:
        adapt(stated, values, frozenset(override.partition("=")[0] for override in overrides))
    try:
        settings = schema.model_validate(values)
    except ValidationError as error:
        problems += [_explained(detail, schema, file, marks) for detail in error.errors(include_url=False)]
    if problems:
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        raise SettingsError("\n".join([*problems[:MOST_PROBLEMS], f"{count}; nothing was run"]))
    return settings


def _text(path: Path) -> str:
    try:
        if path.exists() and not path.is_file():
            raise SettingsError(f"{path}: is not a file; a configuration is one")
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise SettingsError(f"{path}: no such configuration file; try --config configs/quickstart.yaml") from None
    except OSError as error:
        raise SettingsError(f"{path}: cannot be read: {error.strerror}") from None
    if len(content) > MAX_BYTES:
        raise SettingsError(f"{path}: has {path.stat().st_size} bytes; a configuration has at most {MAX_BYTES}")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise SettingsError(f"{path}: is not UTF-8 (byte {error.start}); save it as UTF-8") from None


class _Loader(yaml.SafeLoader):  # type: ignore[misc]  # yaml carries no types
    """Stops at an alias: a few nested ones make a small file expand to gigabytes."""

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event = self.peek_event()
        if isinstance(event, yaml.AliasEvent):
            raise yaml.composer.ComposerError(None, None, f"aliases (*{event.anchor}) are refused", event.start_mark)
        return super().compose_node(parent, index)


def _parsed(text: str, file: str) -> tuple[yaml.Node | None, Any]:
    """Return the node and the value of a YAML. Raises SettingsError that names the line."""
    loader = None
    try:
        loader = _Loader(text)  # refuses characters that no YAML holds
        root = loader.get_single_node()
        return root, None if root is None else loader.construct_document(root)
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: a date that does not exist
        mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
        line = f":{mark.line + 1}:{mark.column + 1}" if mark and file != COMMAND_LINE else ""
        problem = getattr(error, "problem", None) or " ".join(str(error).split())
        raise SettingsError(f"{file}{line}: is not YAML: {problem}") from None
    finally:
        if loader:
            loader.dispose()


def _noted(node: yaml.Node | None, file: str, key: KeyPath, marks: Marks) -> list[str]:
    """Note in `marks` where each key below `node` stands; return the problems, such as a key that stands twice."""
    problems = []
    children: list[tuple[str | int, yaml.Node, yaml.Node]] = []
    if isinstance(node, yaml.MappingNode):
        children = [(str(name.value), name, value) for name, value in node.value]
    elif isinstance(node, yaml.SequenceNode):
        children = [(index, item, item) for index, item in enumerate(node.value)]
    for name, start, value in children:
        inner, mark = (*key, name), f"{file}:{start.start_mark.line + 1}:{start.start_mark.column + 1}"
        if inner in marks:
            problems.append(f"{mark}: {_dotted(inner)}: duplicate key; it first stands at {marks[inner]}")
        marks.setdefault(inner, mark)
        problems += _noted(value, file, inner, marks)
    return problems


def _lay_over(override: str, values: Values, marks: Marks) -> None:
    """Lay one `key.sub=value` over the values of the file. Raises SettingsError."""
    name, equals, text = override.partition("=")
    keys = tuple(name.split("."))
    if not equals or not all(keys):
        raise SettingsError(f"{COMMAND_LINE}: {override!r} is not of the form key.sub=value")
    try:
        _, value = _parsed(text, COMMAND_LINE)
    except SettingsError as error:
        problem = str(error).removeprefix(f"{COMMAND_LINE}: ")
        raise SettingsError(f"{COMMAND_LINE}: {name}: the value {problem} (got {_shown(text)})") from None
    section = values
    for depth, key in enumerate(keys[:-1], start=1):
        if not isinstance(section.get(key), dict):
            section[key] = {}
            marks[keys[:depth]] = COMMAND_LINE
        section = section[key]
    for known in [known for known in marks if known[: len(keys)] == keys]:
        del marks[known]
    marks[keys] = COMMAND_LINE
    section[keys[-1]] = value


def _explained(detail: Any, schema: type[BaseModel], file: str, marks: Marks) -> str:
    key: KeyPath = tuple(part for part in detail["loc"] if not _is_union_branch(part))
    mark = next((marks[key[:n]] for n in range(len(key), 0, -1) if key[:n] in marks), file)
    where = f"{mark}: {_dotted(key)}: " if key else f"{mark}: "
    if detail["type"] == "extra_forbidden":
        return f"{where}unknown key{_suggestion(key, schema)}"
    if detail["type"] == "missing":
        return f"{where}is missing"
    text = detail["msg"].removeprefix("Value error, ")
    text = text[0].lower() + text[1:] if detail["type"] != "value_error" else text
    shown = "" if isinstance(detail["input"], dict | BaseModel) else f" (got {_shown(detail['input'])})"
    return f"{where}{text}{shown}"


def _is_union_branch(part: str | int) -> bool:
    """Tell whether pydantic added this part of a location for a branch of a union, such as `constrained-str`."""
    return isinstance(part, str) and any(sign in part for sign in "[-(")


def _suggestion(key: KeyPath, schema: type[BaseModel]) -> str:
    section: Any = schema
    for part in key[:-1]:
        if isinstance(part, int):  # of a list: the type of what is in it
            section = next(iter(get_args(section)), None)
        else:
            field = section.model_fields.get(part) if hasattr(section, "model_fields") else None
            section = field.annotation if field else None
    known = list(section.model_fields) if isinstance(section, type) and issubclass(section, BaseModel) else []
    close = difflib.get_close_matches(str(key[-1]), known, n=1)
    return f", did you mean '{close[0]}'?" if close else f"; known here: {', '.join(known)}" if known else ""


def _dotted(key: KeyPath) -> str:
    text = ""
    for part in key:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= SHOWN_CHARACTERS else text[: SHOWN_CHARACTERS - 3] + "..."
