"""One label per text: a model with a classification head, scored by how often its best label is that of the dataset."""

import importlib
from pathlib import Path
from typing import Any, cast

from utils.models.tasks.sequence_classification.labels import LabelMatcher, ModelLabels, require_model

HAS_PREDICTED_LABELS = True
SCORE = "Accuracy"
label_matcher, read_labels = LabelMatcher, ModelLabels.of_config
HEAVY = {  # by module: they load torch or scikit-learn, which takes seconds
    "consistency": ("agreement",),
    "score": ("COLUMNS", "Score", "Scores", "described", "fault", "headline", "hits", "pace", "table"),
}

__all__ = ["HAS_PREDICTED_LABELS", "SCORE", "label_matcher", "load_weights", "read_labels", "require_model", "summary"]


def load_weights(folder: Path, **options: Any) -> tuple[Any, dict[str, set[Any]]]:
    """Return the classifier and what transformers says of its loading."""
    from transformers import AutoModelForSequenceClassification as Auto

    return cast(tuple[Any, dict[str, set[Any]]], Auto.from_pretrained(folder, output_loading_info=True, **options))


def summary(model: Any) -> dict[str, tuple[str, int]]:
    """Return title and number of its labels."""
    return {"num_labels": ("Labels", model.config.num_labels)}


def __getattr__(name: str) -> Any:
    for module, names in HEAVY.items():
        if name in names:
            return getattr(importlib.import_module(f"{__name__}.{module}"), name)
    raise AttributeError(name)
