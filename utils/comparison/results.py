"""Read what a run left for a comparison: the document, the rounds of its sweep, the shards and predictions."""

import csv
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from boundby import files
from utils.artifacts import METRICS_VERSION, EvaluationFolder, Layout
from utils.errors import InputError
from utils.optimal import MEASURED
from utils.visits import Timing, Visit, throughput_rounds, usable

DOCUMENT_KEYS = ("machine_fingerprint", "work_fingerprint", "model", "device", "batch_sizes", "full_dataset_metrics")

Point = tuple[str, int]  # dtype and batch size
RECORDED = ({"kind": "recorded", "text": "recorded in raw_samples.csv", "is_passing": True},)


@dataclass(frozen=True)
class Results:
    """One run: where it lies, its document, and the seconds per sample of each round by dtype and batch size."""

    path: Path
    layout: Layout
    document: Mapping[str, Any]
    rounds: Mapping[Point, list[float]]

    @property
    def rows(self) -> dict[Point, Mapping[str, Any]]:
        """The rows of the document by dtype and batch size."""
        return {(row["dtype"], row["batch_size"]): row for row in self.document["batch_sizes"]}

    @property
    def dtypes(self) -> list[str]:
        """The dtypes of the sweep in their order."""
        return list(dict.fromkeys(row["dtype"] for row in self.document["batch_sizes"]))


@dataclass(frozen=True)
class Shards:
    """The shards of a pass over the dataset: what makes them the same in another run, and the seconds of each."""

    identity: Mapping[str, Any]
    seconds: tuple[float, ...]


def read(path: Path, layout: Layout) -> Results:
    """Return the run in the folder `path`, or of the metrics file `path`; `layout` gives the names of its files.

    Raises InputError where there is none, or where it cannot be read.
    """
    folder, metrics = (path, path / layout.metrics.name) if path.is_dir() else (path.parent, path)
    layout = replace(layout, results=folder, metrics=metrics)
    document = _document(metrics)
    try:
        measured = {(row["dtype"], row["batch_size"]) for row in document["batch_sizes"] if row["status"] in MEASURED}
        with layout.raw_samples.open(encoding="utf-8", newline="") as file:
            visits = visits_of(csv.DictReader(file))
    except FileNotFoundError:
        raise InputError(f"{layout.raw_samples} is missing; a comparison needs every timing of the sweep") from None
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"{folder}: its metrics and {layout.raw_samples.name} cannot be read: {error!r}") from None
    return Results(path, layout, document, rounds_of(visit for visit in visits if _point(visit) in measured))


def visits_of(rows: Iterable[Mapping[str, str]]) -> list[Visit]:
    """Return the visits whose timings are these rows of `raw_samples.csv`."""
    timings: dict[tuple[str, int, int], list[Timing]] = {}
    sessions: dict[tuple[str, int, int], str] = {}
    disturbed: set[tuple[str, int, int]] = set()
    for row in rows:
        key = row["dtype"], int(row["batch_size"]), int(row["round"])
        sessions[key] = row["session"]
        if row["disturbed"] == "1":
            disturbed.add(key)
        timings.setdefault(key, []).append(
            Timing(
                quantity=row["quantity"],  # type: ignore[arg-type]
                index=int(row["index"]),
                seconds=float(row["seconds"]),
                samples=int(row["samples"]),
                tokens_real=int(row["tokens_real"]),
                tokens_padded=int(row["tokens_padded"]),
            )
        )
    return [
        Visit(*key, "ok", sessions[key], tuple(found), disturbances=RECORDED if key in disturbed else ())
        for key, found in timings.items()
    ]


def rounds_of(visits: Iterable[Visit]) -> dict[Point, list[float]]:
    """Return the seconds per sample of each round that counts, by dtype and batch size."""
    by_point: dict[Point, list[Visit]] = {}
    for visit in visits:
        by_point.setdefault(_point(visit), []).append(visit)
    rounds = {point: throughput_rounds(usable(found)) for point, found in by_point.items()}
    return {point: values for point, values in rounds.items() if values}


def shards(results: Results) -> Shards | None:
    """Return the shards of the pass over the dataset; None where the folder has no complete set of them."""
    folder = EvaluationFolder(results.layout.evaluation)
    try:
        plan = files.read_json(folder.plan)
        costs = [files.read_json(folder.cost(shard["id"])) for shard in plan["shards"]]
        if any(cost["plan"] != plan["fingerprint"] for cost in costs):
            return None
        identity = {name: plan["identity"][name] for name in ("dataset_sha256", "sample_seed")}
        return Shards({**identity, "shards": plan["shards"]}, tuple(float(cost["seconds"]) for cost in costs))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def predictions(results: Results) -> dict[int, tuple[str, bool]] | None:
    """Return label name and whether the prediction was right by row id; None where the folder has no predictions."""
    path = results.layout.predictions
    try:
        with path.open(encoding="utf-8", newline="") as file:
            return {int(row["row_id"]): (row["label_name"], row["correct"] == "1") for row in csv.DictReader(file)}
    except FileNotFoundError:
        return None
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"{path} cannot be read: {error!r}") from None


def _document(path: Path) -> Mapping[str, Any]:
    try:
        document = files.read_json(path)
    except FileNotFoundError:
        raise InputError(f"{path} is missing; give a results folder in which step 02 has run") from None
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read: {error}") from None
    if not isinstance(document, dict) or document.get("schema_version") != METRICS_VERSION:
        raise InputError(f"{path} is not a metrics file of schema version {METRICS_VERSION}; measure again (step 02)")
    absent = [key for key in DOCUMENT_KEYS if key not in document]
    if absent:
        raise InputError(f"{path} lacks {', '.join(absent)}; measure again (step 02)")
    return document


def _point(visit: Visit) -> Point:
    return visit.dtype, visit.batch_size
