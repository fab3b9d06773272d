"""A vector per text: mean-pooled, normalised states of an encoder, scored by whose nearest neighbour has its label."""

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from utils.command import InputError

HAS_PREDICTED_LABELS = False
SCORE = "Neighbours"
HEAVY = {  # by module: they load torch or scikit-learn, which takes seconds
    "encoder": ("agreement", "load_weights"),
    "neighbours": ("COLUMNS", "Score", "Scores", "described", "fault", "headline", "hits", "pace", "table"),
}

__all__ = ["HAS_PREDICTED_LABELS", "SCORE", "label_matcher", "read_labels", "require_model", "summary"]


def read_labels(config: Mapping[str, object], path: str) -> None:
    """Return None: an encoder knows no labels."""


def require_model(config: Mapping[str, object], path: str, name: str) -> None:
    """Raise InputError for an encoder with a decoder, whose states are of two kinds."""
    if config.get("is_encoder_decoder"):
        raise InputError(f"{name}: is an encoder with a decoder; {path} has to be that of an encoder alone")


@dataclass
class label_matcher:  # noqa: N801
    """Gives the labels of a dataset ids in the order in which they are met: any is known, whatever they count from."""

    counts_from_one = False

    labels: None
    class_names: Sequence[str] | None = None
    unknown: dict[str, int] = field(default_factory=dict)
    _ids: dict[str, int] = field(default_factory=dict)

    @property
    def names(self) -> Sequence[str]:
        """The names of all labels met so far; the position is the id."""
        return list(self._ids)

    def id_of(self, value: Any, row: int) -> int:
        """Return the id of a label of the dataset."""
        named = self.class_names is not None and isinstance(value, int) and 0 <= value < len(self.class_names)
        return self._ids.setdefault(
            self.class_names[value] if named and self.class_names else str(value), len(self._ids)
        )

    def doubts(self) -> list[str]:
        """Return nothing: nothing was assumed."""
        return []


def summary(model: Any) -> dict[str, tuple[str, int]]:
    """Return the length of a vector."""
    return {"embedding_dimension": ("Embedding", model.config.hidden_size)}


def __getattr__(name: str) -> Any:
    for module, names in HEAVY.items():
        if name in names:
            return getattr(importlib.import_module(f"{__name__}.{module}"), name)
    raise AttributeError(name)
