"""The labels of a model, and how the labels of a dataset are matched with them."""

import difflib
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from utils.command import InputError
from utils.models.tasks import NO_LABELS

SHOWN_LABELS = 5  # of the model's, in a message
WHOLE_NUMBER = re.compile(r"\s*(\d{1,18})(?:\.0+)?\s*")  # "3", and "3.0" as pandas writes ids beside an empty cell


@dataclass(frozen=True)
class ModelLabels:
    """The names of a model's classes; the position is the id."""

    names: tuple[str, ...]

    @classmethod
    def of_config(cls, config: Mapping[str, Any], path: str) -> "ModelLabels":
        """Return the labels that a `config.json` states. Raises InputError that names `place`."""
        table = config.get("id2label")
        try:
            if table is None:  # transformers leaves the table out of the file when it is the default
                table = {index: f"LABEL_{index}" for index in range(config.get("num_labels", 2))}
            names = {int(index): str(name) for index, name in table.items()}
        except (AttributeError, TypeError, ValueError):
            raise InputError(f"{path}: id2label is not a table of ids and names") from None
        if len(names) < 2:
            raise InputError(f"{path}: has {len(names)} label(s); a classifier has at least 2 (a regression has 1)")
        if sorted(names) != list(range(len(names))):
            raise InputError(f"{path}: id2label has the ids {sorted(names)[:SHOWN_LABELS]}…; expected 0, 1, 2, …")
        twice = [name for name, count in Counter(names.values()).items() if count > 1]
        if twice:
            raise InputError(f"{path}: id2label has the name {twice[0]!r} twice; every class needs a name of its own")
        return cls(tuple(names[index] for index in range(len(names))))

    @cached_property
    def are_generic(self) -> bool:
        """Tell whether the model was saved without names, that is with LABEL_0, LABEL_1 and so on."""
        return all(name == f"LABEL_{index}" for index, name in enumerate(self.names))

    @cached_property
    def are_numbers(self) -> bool:
        """Tell whether a number could mean a name as well as another id, as with {0: "1", 1: "2"}."""
        return any(name.strip().isdecimal() and int(name) != index for index, name in enumerate(self.names))

    def shown(self) -> str:
        """Return the first labels as a message shows them."""
        first = ", ".join(f"{index}: {name!r}" for index, name in enumerate(self.names[:SHOWN_LABELS]))
        rest = len(self.names) - SHOWN_LABELS
        return f"{first}, … {rest} more" if rest > 0 else first


def require_model(config: Mapping[str, Any], path: str, name: str) -> None:
    """Raise InputError unless the `config.json` at `place` is that of a classifier with one label per text."""
    architectures = config.get("architectures") or []
    if not any(str(architecture).endswith("ForSequenceClassification") for architecture in architectures):
        stated = ", ".join(map(str, architectures)) or "nothing"
        raise InputError(
            f"{name}: is not a sequence classifier (config.json names {stated} as architecture, "
            "…ForSequenceClassification is needed); an encoder of texts has model.task=sentence_embeddings"
        )
    if config.get("problem_type") == "multi_label_classification":
        raise InputError(f"{name}: gives several labels per text (problem_type), one per text is measured here")
    ModelLabels.of_config(config, path)


@dataclass
class Unknown:
    """A label of the dataset that the model does not have: how often, and where first."""

    rows: int
    first_row: int


@dataclass
class LabelMatcher:
    """Matches the labels of one dataset with those of the model, by name or by id, and keeps what it could not match.

    `class_names` are the names a Hub dataset gives its integer labels; the names count then, never the positions.
    `first_id` is the number that stands for the model's id 0.
    """

    labels: ModelLabels
    class_names: Sequence[str] | None = None
    first_id: int = 0
    unknown: dict[str, Unknown] = field(default_factory=dict)
    _known: dict[Any, int | None] = field(default_factory=dict)
    _ways: Counter[str] = field(default_factory=Counter)

    @property
    def names(self) -> Sequence[str]:
        """The names of all labels; the position is the id."""
        return self.labels.names

    def id_of(self, value: Any, row: int) -> int | None:
        """Return the model's id for a label of the dataset; None, and a note in `unknown`, where there is none."""
        key = (type(value), value) if isinstance(value, str | int | float) else str(value)
        if key not in self._known:
            self._known[key] = self._match(value)
        index = self._known[key]
        if index is None:
            seen = self.unknown.setdefault(self._name(value), Unknown(0, row))
            seen.rows += 1
        return index

    @property
    def counts_from_one(self) -> bool:
        """Whether all labels were ids but one, the number of classes, and none was 0: then 1 is the model's id 0."""
        return (
            self.first_id == 0
            and list(self.unknown) == [str(len(self.names))]
            and set(self._ways) == {"by id"}
            and 0 not in self._known.values()
        )

    def doubts(self) -> list[str]:
        """Return what was assumed while matching, each with advice."""
        doubts = []
        if self._ways["loosely"]:
            doubts.append(
                f"{self._ways['loosely']} label name(s) differ from the model's in case, spaces, '_' or '-' only "
                "and were matched; check label_mappings.json"
            )
        if self._ways["by position"]:
            classes = ", ".join(self.class_names or ())[:80]
            doubts.append(
                f"the model's labels have no names (LABEL_0, …), so the dataset's classes ({classes}) "
                "were matched by position; check that the order is the same"
            )
        if self.first_id:
            last = len(self.names)
            doubts.append(f"the labels go from 1 to {last} and were read as the model's ids 0 to {last - 1}")
        if self.labels.are_numbers and self._ways["as a number"]:
            doubts.append("the model's label names are numbers, so numbers in the data were read as names, not as ids")
        if self._ways["by id"] and (self._ways["by name"] or self._ways["loosely"]):
            doubts.append("the data mixes label names and ids; check that no name is a number by accident")
        return doubts

    def explanation(self, column: str) -> str:
        """Return what is wrong with the `unknown` labels, and the way out."""
        lines = []
        for name, seen in list(self.unknown.items())[:SHOWN_LABELS]:
            close = difflib.get_close_matches(name, self.labels.names, n=1)
            hint = f", did you mean {close[0]!r}?" if close else ""
            lines.append(f"{name!r} in {seen.rows} row(s), first in row {seen.first_row}{hint}")
        rest = len(self.unknown) - len(lines)
        more = f"; … {rest} more" if rest > 0 else ""
        return (
            f"the model does not know {len(self.unknown)} label(s) of column {column!r}: {'; '.join(lines)}{more}. "
            f"{self._expectation()}"
        )

    def _expectation(self) -> str:
        count, way_out = len(self.labels.names), NO_LABELS
        if self.labels.are_generic:
            return (
                f"The model has no label names (LABEL_0, …), so it takes ids 0 to {count - 1} only; "
                f"replace the names by ids, or set id2label in the model's config.json; {way_out}"
            )
        ids = "" if self.labels.are_numbers else f" or the ids 0 to {count - 1}"
        return f"It takes its {count} names{ids}: {self.labels.shown()}; {way_out}"

    def _name(self, value: Any) -> str:
        if self.class_names is not None and isinstance(value, int) and 0 <= value < len(self.class_names):
            return self.class_names[value]
        return str(value)

    def _match(self, value: Any) -> int | None:
        number = whole_number(value)
        if self.class_names is not None and number is not None:
            if self.labels.are_generic and number < len(self.labels.names):
                return self._by("by position", number)
            return self._match_name(self._name(number))
        if number is None:
            return self._match_name(value) if isinstance(value, str) else None
        if self.labels.are_numbers:
            name = value if value in self._exact else str(number)
            return self._by("as a number", self._exact.get(name))
        index = number - self.first_id
        return self._by("by id", index) if 0 <= index < len(self.labels.names) else None

    def _match_name(self, name: str) -> int | None:
        if name in self._exact:
            return self._by("by name", self._exact[name])
        return self._by("loosely", self._loose.get(_loosened(name)))

    def _by(self, way: str, index: int | None) -> int | None:
        if index is not None:
            self._ways[way] += 1
        return index

    @cached_property
    def _exact(self) -> dict[str, int]:
        return {name: index for index, name in enumerate(self.labels.names)}

    @cached_property
    def _loose(self) -> dict[str, int]:
        names = [_loosened(name) for name in self.labels.names]
        counts = Counter(names)
        return {name: index for index, name in enumerate(names) if counts[name] == 1}


def whole_number(value: Any) -> int | None:
    """Return `value` as an id: an integer, a float without fraction, or text of one; None for anything else."""
    if isinstance(value, int) or (isinstance(value, float) and value.is_integer()):
        return int(value) if value >= 0 else None
    match = WHOLE_NUMBER.fullmatch(value) if isinstance(value, str) else None
    return int(match[1]) if match else None


def _loosened(name: str) -> str:
    return re.sub(r"[\s_-]+", " ", name).strip().casefold()
