"""Read a YAML of settings, with overrides, into a pydantic record; report every mistake with its place."""

import copy
import difflib
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, get_args

import yaml
from pydantic import BaseModel, ValidationError

from utils.errors import InputError

MAX_DEPTH = 20  # of lists and sections in each other
MOST = 2**53  # up to here a number is the same everywhere
MAX_BYTES = 100_000  # a settings file has a few kB; more is not one, and would take ten seconds a MB
MOST_PROBLEMS = 20  # that are listed
SHOWN_CHARACTERS = 80  # of a wrong value
PLAIN_TAGS = "tag:yaml.org,2002:"  # what YAML itself gives a value
PYTHON_TAGS = f"{PLAIN_TAGS}python/"  # what would build Python objects

Record = TypeVar("Record", bound=BaseModel)
KeyPath = tuple[str | int, ...]
Values = dict[str, Any]  # of a YAML, by section
Adapt = Callable[[Values, Values, frozenset[str]], None]


class Problem(NamedTuple):
    """One mistake: where it stands, at which key, and what is wrong."""

    place: str
    key: str
    text: str

    def __str__(self) -> str:
        return f"{self.place}: {self.key}: {self.text}" if self.key else f"{self.place}: {self.text}"


def load(schema: type[Record], path: str | Path, overrides: Sequence[str] = (), adapt: Adapt | None = None) -> Record:
    """Return the settings of the YAML at `path`, each `key.sub=value` of `overrides` laid over it.

    `adapt(stated, values, given)` may change the `values` before they are checked; it is told what the file states and
    which keys are overridden.

    Raises InputError that lists every mistake as `file:line:column: key: problem`.
    """
    root = _compose(Path(path))
    places: dict[KeyPath, str] = {}
    problems: list[Problem] = []
    values = _construct(root, str(path), (), places, problems)
    if not isinstance(values, dict):
        raise InputError(f"{path}: holds no settings; expected keys such as 'model:'")
    stated = copy.deepcopy(values)
    for override in overrides:
        _apply(override, values, places, problems)
    if adapt:
        adapt(stated, values, frozenset(override.partition("=")[0] for override in overrides))
    try:
        settings = schema.model_validate(values)
    except ValidationError as error:
        problems += [_explain(detail, schema, str(path), places) for detail in error.errors(include_url=False)]
    if problems:
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        raise InputError("\n".join([*map(str, problems[:MOST_PROBLEMS]), f"{count}; nothing was run"]))
    return settings


class _Loader(yaml.SafeLoader):
    """Stops at an alias and at the first level that is too deep, before either costs anything.

    Nested aliases make a small file expand to gigabytes, and the time of nested brackets grows with their square.
    """

    _depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Return the node that begins here. Raises ComposerError for what no setting needs."""
        event = self.peek_event()
        if isinstance(event, yaml.AliasEvent):
            refused = f"aliases (*{event.anchor}) are not allowed here"
            raise yaml.composer.ComposerError(None, None, refused, event.start_mark)
        if self._depth > MAX_DEPTH + 1:
            refused = f"nested deeper than {MAX_DEPTH} levels, which no setting is"
            raise yaml.composer.ComposerError(None, None, refused, event.start_mark)
        self._depth += 1
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node


def _compose(path: Path) -> yaml.Node | None:
    try:
        if path.exists() and not path.is_file():
            raise InputError(f"{path}: is not a file; a configuration is one")
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise InputError(f"{path}: no such configuration file; try --config configs/quickstart.yaml") from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from None
    if len(content) > MAX_BYTES:
        raise InputError(f"{path}: has {path.stat().st_size} bytes; a configuration has at most {MAX_BYTES}")
    try:
        return yaml.compose(content.decode("utf-8"), Loader=_Loader)
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: is not UTF-8 (byte {error.start}); save it as UTF-8") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"{path}:{mark.line + 1}:{mark.column + 1}" if mark else str(path)
        said = "" if isinstance(error, yaml.composer.ComposerError) else "is not YAML: "
        raise InputError(f"{place}: {said}{error.problem}") from None
    except yaml.YAMLError as error:
        raise InputError(f"{path}: is not YAML: {' '.join(str(error).split())}") from None


def _construct(
    node: yaml.Node | None, file: str, key: KeyPath, places: dict[KeyPath, str], problems: list[Problem]
) -> Any:
    """Return the plain value of `node`; note where each key stands and which keys are given twice."""
    if node is not None and len(key) > MAX_DEPTH:
        place = f"{file}:{node.start_mark.line + 1}:{node.start_mark.column + 1}"
        problems.append(Problem(place, _dotted(key[:1]), f"is nested deeper than {MAX_DEPTH} levels"))
        return None
    if node is not None and (not node.tag.startswith(PLAIN_TAGS) or node.tag.startswith(PYTHON_TAGS)):
        place = f"{file}:{node.start_mark.line + 1}:{node.start_mark.column + 1}"
        problems.append(Problem(place, _dotted(key), f"tags are not allowed here (got {_shown(node.tag)})"))
        return None
    if isinstance(node, yaml.MappingNode):
        values: dict[str, object] = {}
        for name_node, value_node in node.value:
            name = str(name_node.value) if isinstance(name_node, yaml.ScalarNode) else "?"
            place = f"{file}:{name_node.start_mark.line + 1}:{name_node.start_mark.column + 1}"
            inner = (*key, name)
            if name in values:
                problems.append(Problem(place, _dotted(inner), f"duplicate key; it first stands at {places[inner]}"))
                continue
            places[inner] = place
            values[name] = _construct(value_node, file, inner, places, problems)
        return values
    if isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            places[(*key, index)] = f"{file}:{item.start_mark.line + 1}:{item.start_mark.column + 1}"
        return [_construct(item, file, (*key, i), places, problems) for i, item in enumerate(node.value)]
    if node is None:
        return None
    return _scalar(node, file, key, problems)


def _scalar(node: yaml.Node, file: str, key: KeyPath, problems: list[Problem]) -> Any:
    loader = yaml.SafeLoader("")
    try:
        value = loader.construct_object(node, deep=True)
        if fault := _fault(value):
            place = f"{file}:{node.start_mark.line + 1}:{node.start_mark.column + 1}"
            problems.append(Problem(place, _dotted(key), f"{fault} (got {_shown(node.value)})"))
        return value
    except (yaml.YAMLError, ValueError) as error:  # an unsafe tag, an impossible date
        place = f"{file}:{node.start_mark.line + 1}:{node.start_mark.column + 1}"
        problems.append(Problem(place, _dotted(key), f"{getattr(error, 'problem', None) or error}"))
        return None
    finally:
        loader.dispose()


def _fault(value: Any) -> str | None:
    """Return what makes a value one that no setting can have."""
    if isinstance(value, float) and not math.isfinite(value):
        return "is no finite number"
    if isinstance(value, int) and abs(value) > MOST:
        return f"is larger than {MOST}"
    return "holds a NUL character" if isinstance(value, str) and "\0" in value else None


def _apply(override: str, values: dict[str, object], places: dict[KeyPath, str], problems: list[Problem]) -> None:
    """Lay one `key.sub=value` over the values read from the file."""
    place = "command line"
    name, equals, text = override.partition("=")
    keys = tuple(name.split("."))
    if not equals or not all(keys):
        problems.append(Problem(place, "", f"{override!r} is not of the form key.sub=value"))
        return
    try:
        node = yaml.compose(text, Loader=_Loader)
    except yaml.YAMLError as error:
        problem = getattr(error, "problem", None) or " ".join(str(error).split())
        problems.append(Problem(place, name, f"the value is not YAML: {problem} (got {_shown(text)})"))
        return
    section = values
    for depth, key in enumerate(keys[:-1], start=1):
        if not isinstance(section.get(key), dict):
            section[key] = {}
            places[keys[:depth]] = place
        section = section[key]
    for known in [known for known in places if known[: len(keys)] == keys]:
        del places[known]
    places[keys] = place
    section[keys[-1]] = _construct(node, place, keys, {}, problems)


def _explain(detail: Any, schema: type[BaseModel], file: str, places: dict[KeyPath, str]) -> Problem:
    key: KeyPath = tuple(part for part in detail["loc"] if not _is_union_branch(part))
    place = next((places[key[:n]] for n in range(len(key), 0, -1) if key[:n] in places), file)
    if detail["type"] == "extra_forbidden":
        return Problem(place, _dotted(key), "unknown key" + _suggestion(key, schema))
    if detail["type"] == "missing":
        return Problem(place, _dotted(key), "is missing")
    text = detail["msg"].removeprefix("Value error, ")
    text = text[0].lower() + text[1:] if detail["type"] != "value_error" else text
    shown = "" if isinstance(detail["input"], dict | BaseModel) else f" (got {_shown(detail['input'])})"
    return Problem(place, _dotted(key), text + shown)


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
