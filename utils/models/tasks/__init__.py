"""What a model is used for. Each task is a package here, and everything else knows it by these names alone.

| name | what it is |
| --- | --- |
| `read_labels(config, place)` | the classes that a model's config.json states, None for a task without |
| `require_model(config, place, name)` | raises InputError for a model that is not for this task |
| `label_matcher(labels, names)` | gives labels their ids: `id_of`, `names`, `unknown`, `counts_from_one`, `doubts` |
| `load_weights(folder, **options)` | the model as transformers loads it, and what it says of missing keys |
| `summary(model)` | sizes beyond parameters: title and value by name |
| `agreement(alone, batched)` | whether a batch gives a text what it gets alone: `share`, `require`, `line`, `as_dict` |
| `table(…)`, `hits(table)`, `fault(table, labels)` | the rows of a part, how many are right, what is wrong |
| `Score(labels, sizes)` | counts parts, labelled or not: `add`, `rows`, `metrics`, `write`; `COLUMNS` of its rows |
| `Scores` | the scores as a record |
| `pace(hits, rows)`, `described(metrics)`, `headline(metrics)` | the score while it grows, and at the end |
| `SCORE`, `HAS_PREDICTED_LABELS` | its title; whether a precision can be chosen by the labels that it keeps |
"""

import importlib
from typing import Any

NO_LABELS = "to measure without labels, set dataset.label_column=null"


def of(name: str) -> Any:
    """Return the package of a task."""
    return importlib.import_module(f"{__name__}.{name}")
