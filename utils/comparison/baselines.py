"""Named baselines in a file fit for git: of a run what a comparison needs, without its timings and its texts."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import msgspec

from boundby import files
from utils.baseline import Document
from utils.command import InputError, removed
from utils.comparison.facts import Compared, Marks, Point, Results, Rounds, Shards, gate_text

SCHEMA_VERSION, KIND = 2, "boundby_baselines"  # 2: rounds and marks are the records of the comparison
DIGITS = 7  # of a figure: the noise is in the third
TOP = ("boundby_version", "written", "complete", "machine_fingerprint", "work_fingerprint")
OF_MODEL = ("name", "revision", "fingerprint", "parameters_total", "num_labels", "dtype")
OF_PASS = ("throughput_samples_per_sec", "dtype")
OF_ROW = (
    "dtype", "batch_size", "status", "doubts", "rounds", "timed_batches", "throughput_half_width_pct",
    "latency_per_batch_ms_mean", "reference_ms",
)  # fmt: skip


class _Baseline(msgspec.Struct, frozen=True):
    document: dict[str, Any]
    points: list[tuple[Point, Rounds]]
    shards: Shards | None = None
    marks: Marks | None = None
    parts: dict[str, Any] | None = None


class _File(msgspec.Struct, frozen=True):
    schema_version: int
    kind: str
    baselines: dict[str, _Baseline]


def save(path: Path, name: str, runs: Sequence[Results]) -> str:
    """Put the only run into the file under this name, beside the others that it has; say what it can gate.

    Raises InputError for several runs, or a file that holds something else.
    """
    if len(runs) != 1:
        raise InputError(f"--save-baseline keeps one run, {len(runs)} given; save each under a --name of its own")
    [run] = runs
    known = _read(path).baselines if path.exists() else {}
    content = _File(SCHEMA_VERSION, KIND, {**known, name: _kept(run)})
    text = files.encode_json(msgspec.to_builtins(content, str_keys=True, order="sorted"), indent=1) + "\n"
    files.write_text(path, text)
    gate = gate_text(run.document)
    return f"{path}: saved {name!r}, {len(text.encode()) / 1e3:.0f} kB" + (f"\n{gate}" if gate else "")


def load(path: Path, name: str) -> Results:
    """Return the run that was saved under this name. Raises InputError where there is none, or it cannot be read."""
    known = _read(path).baselines
    if name not in known:
        raise InputError(f"{path}: has no baseline {name!r}; it has {', '.join(known) or 'none'}; give one with --name")
    kept = known[name]
    try:
        msgspec.convert(kept.document, Compared)
        if kept.marks:
            kept.marks.right()
    except ValueError as error:
        raise InputError(f"{path}: baseline {name!r} is damaged: {error}; save it again") from None
    document = cast(Document, kept.document)
    return Results(path / name, document, dict(kept.points), kept.shards, kept.marks, kept.parts)


def _read(path: Path) -> _File:
    try:
        content = files.read_as(path, _File)
    except FileNotFoundError:
        raise InputError(f"{path} is missing; make it with --save-baseline {path}") from None
    except (OSError, ValueError) as error:
        raise InputError(f"{path} is no file of baselines: {error}") from None
    if (content.schema_version, content.kind) != (SCHEMA_VERSION, KIND):
        raise InputError(f"{path} is no file of baselines of version {SCHEMA_VERSION}; give another, or save it again")
    return content


def _kept(run: Results) -> _Baseline:
    document = cast(Mapping[str, Any], run.document)
    full = document["full_dataset_metrics"]
    return _Baseline(
        document=removed(
            {
                **{key: document.get(key) for key in TOP},
                "model": {key: document["model"][key] for key in OF_MODEL if key in document["model"]},
                "device": document["device"],
                "batch_sizes": [{key: row[key] for key in OF_ROW if key in row} for row in document["batch_sizes"]],
                "full_dataset_metrics": full and {key: full[key] for key in OF_PASS},
            }
        ),
        points=[
            (
                point,
                msgspec.structs.replace(
                    made, seconds={number: _short(value) for number, value in made.seconds.items()}
                ),
            )
            for point, made in run.points.items()
        ],
        shards=run.shards and Shards(run.shards.rows, tuple(map(_short, run.shards.seconds))),
        marks=run.marks and msgspec.structs.replace(run.marks, rows=None),
        parts=removed(run.parts),
    )


def _short(seconds: float) -> float:
    return float(f"{seconds:.{DIGITS}g}")
