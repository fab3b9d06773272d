"""The one table of artefacts: every path and file name of the pipeline, what it holds, and which step writes it."""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from utils.command.errors import InputError
from utils.settings import Config

METRICS_VERSION = 5  # of baseline_metrics.json: its keys, and how its numbers are made
LAYER_PROFILE = "model"  # name of the files in layers/
RUN_STARTED_VARIABLE = "BOUNDBY_RUN_STARTED"  # set by the runner, so that its steps share one folder in previous/
TIME_IN_NAMES = "%Y%m%dT%H%M%SZ"


OF_PLAN = re.compile(r"\.claims|part-\d{5}\.parquet|cost-\d{5}\.json")  # metrics.json may be anybody's


class Artefact:
    """A file or folder below the folder that has it; `content` and `step` put it on the list of the report."""

    def __init__(self, name: str, step: str = "", content: str = "") -> None:
        self.name, self.step, self.content = name, step, content

    def __get__(self, folder: Any, kind: type) -> Any:
        return self if folder is None else folder.path / self.name


class Listed(NamedTuple):
    """A file as the report lists it: where it lies, which step writes it, and what it holds."""

    path: Path
    step: str
    content: str


@dataclass(frozen=True)
class EvaluationFolder:
    """The files of one pass over the whole dataset."""

    path: Path

    plan = Artefact("plan.json")  # what is done, fixed before it starts
    claims = Artefact(".claims")  # the folder of the locks of shards that are being predicted
    metrics = Artefact("metrics.json")  # the numbers over all rows
    predictions = Artefact("predictions.csv", "02", "one row per evaluated text")
    per_class = Artefact("per_class.csv", "02", "precision, recall and F1 of every class")
    confusion_matrix = Artefact("confusion_matrix.csv", "02", "how many rows of each label got each prediction")
    confident_mistakes = Artefact("confident_mistakes.csv", "02", "the surest mistakes with their texts")
    quality = Artefact("quality.json", "02", "the same and the calibration, for programs")

    @property
    def is_ours(self) -> bool:
        """Whether an evaluation of ours lies here, by its plan, which may be damaged, or by its parts."""
        try:
            if b'"fingerprint"' in self.plan.read_bytes():
                return True
        except OSError:
            pass
        return self.path.is_dir() and any(OF_PLAN.fullmatch(path.name) for path in self.path.iterdir())

    def part(self, shard: int) -> Path:
        """Return the path of the predictions of one shard; its presence is the commit."""
        return self.path / f"part-{shard:05d}.parquet"

    def cost(self, shard: int) -> Path:
        """Return the path of the time and memory that one shard took: measured, hence not in the part."""
        return self.path / f"cost-{shard:05d}.json"


@dataclass(frozen=True)
class Layout:
    """Where each file of one configuration lies. Pictures lie in `plots`, named by the figures themselves."""

    results: Path
    metrics: Path
    detailed_metrics: Path
    dataset: Path

    raw_samples = Artefact("raw_samples.csv", "02", "every timing")
    evaluation = Artefact("evaluation")
    op_stats = Artefact("profiler_traces/op_stats.csv", "03", "one row per operator and shape")
    trace = Artefact("profiler_traces/trace.json.gz", "03", "timeline for https://ui.perfetto.dev")
    trace_analysis = Artefact(
        "profiler_traces/trace_analysis.json", "03", "where the traced time went and why, for programs"
    )
    key_averages = Artefact("profiler_traces/key_averages.txt", "03", "the operators as a table of text")
    stacks = Artefact("profiler_traces/stacks.txt", "03", "call stacks with their own time")
    flame_graph = Artefact("profiler_traces/flame_graph.html", "03", "the call stacks as a flame graph, for a browser")
    memory_timeline = Artefact(
        "profiler_traces/memory_timeline.csv", "03", "allocated memory over the time of the trace"
    )
    memory_snapshot = Artefact(
        "profiler_traces/memory_snapshot.pickle",
        "03",
        "history of the GPU's allocator, for https://pytorch.org/memory_viz",
    )
    trace_manifest = Artefact("profiler_traces/manifest.json")  # what the trace holds, what it lacks and why
    traces = Artefact("profiler_traces")
    layer_dashboard = Artefact(f"layers/{LAYER_PROFILE}_dashboard.html", "03", "the profile by layer, for a browser")
    layer_summary = Artefact(
        f"layers/{LAYER_PROFILE}_summary.json",
        "03",
        "the same for programs; model_metrics.jsonl has every run",
    )
    layers = Artefact("layers")
    variants = Artefact(
        "variants.json", "05", "other ways to run the same texts, and the recommended one, for programs"
    )
    variants_table = Artefact("variants.csv", "05", "the same as one row per variant, for spreadsheets")
    changed_labels = Artefact("changed_labels.csv", "05", "every text to which a variant gives another label")
    engines = Artefact("engines")  # converted models, while step 05 runs
    converted = Artefact("converted")  # the one that the evaluation computes with, if any does
    run = Artefact("run.json", "04", "machine, versions, settings, status of the steps")  # which every step updates
    plots = Artefact("plots")
    report = Artefact("baseline_summary_report.txt")
    html_report = Artefact("report.html")
    card = Artefact("card.txt")  # the first lines of the report
    lock = Artefact(".lock")  # held by the step that is running

    @classmethod
    def of(cls, config: Config) -> "Layout":
        """Return the layout that `config.output` and `config.dataset` ask for."""
        results = Path(config.output.results_dir)
        return cls(
            results=results,
            metrics=results / config.output.metrics_file,
            detailed_metrics=results / config.output.detailed_metrics_file,
            dataset=Path(config.dataset.local_path),
        )

    @property
    def path(self) -> Path:
        """The folder of the results."""
        return self.results

    @property
    def evaluated(self) -> EvaluationFolder:
        """The files of the pass over the whole dataset."""
        return EvaluationFolder(self.evaluation)

    @property
    def predictions(self) -> Path:
        """One line per evaluated row."""
        return Path(self.evaluated.predictions)

    @property
    def ceilings(self) -> Path:
        """The folder of the measured limits of this machine, beside the data since they outlive a run."""
        return self.dataset.parent / "ceilings"

    @property
    def label_mappings(self) -> Path:
        """Label name to id and back, beside the dataset."""
        return self.dataset.with_name("label_mappings.json")

    @property
    def rejected_rows(self) -> Path:
        """Rows that were left out, with the reason, beside the dataset."""
        return self.dataset.with_name("rejected_rows.csv")

    @property
    def data_receipt(self) -> Path:
        """What the normalised dataset was made from, beside it."""
        return self.dataset.with_suffix(".receipt.json")

    def receipt(self, step: str) -> Path:
        """Return the path of the receipt of step `step`, such as "02"."""
        return self.results / ".receipts" / f"{step}.json"

    def marker(self, step: str) -> Path:
        """Return the path of the mark that step `step` has started and not finished."""
        return self.results / ".receipts" / f"{step}.started.json"

    def visits(self, dtype: str) -> Path:
        """Return the path of the log of finished visits of the sweep in `dtype`."""
        return self.results / ".receipts" / f"02-visits-{dtype}.jsonl"

    def losses(self, step: str) -> Path:
        """Return the path of the log of what ended the GPU for a process of step `step`."""
        return self.results / ".receipts" / f"{step}-losses.jsonl"

    def log(self, step: str) -> Path:
        """Return the path of the log of step `step`."""
        return self.results / "logs" / f"{step}.log"

    def listed(self) -> list[Listed]:
        """Return the files that a person is told of, in the order of the steps; the report adds itself and pictures."""
        named = [
            Listed(self.metrics, "02", "all results, for programs"),
            Listed(self.detailed_metrics, "02", "one row per batch size, for spreadsheets"),
        ]
        return sorted([*named, *_listed(self), *_listed(self.evaluated)], key=lambda file: file.step)


def _listed(folder: "Layout | EvaluationFolder") -> Iterator[Listed]:
    for artefact in vars(type(folder)).values():
        if isinstance(artefact, Artefact) and artefact.content:
            yield Listed(folder.path / artefact.name, artefact.step, artefact.content)


def started_at() -> str:
    """Return when this run started, in UTC, as a name that sorts and is safe in a path."""
    return os.environ.get(RUN_STARTED_VARIABLE) or datetime.now(UTC).strftime(TIME_IN_NAMES)


def set_aside(paths: list[Path], layout: Layout) -> Path | None:
    """Move what exists of `paths` to `results/previous/<UTC>/`; return that folder, or None when nothing was there.

    Each step lands in a folder of its own even when two runs start in the same second. Raises InputError, before
    anything is moved, for a link or a mounted disk: moved, it would leave the new results on the disk of the folder.
    """
    present = [path for path in paths if path.exists() and not _is_empty_place(path)]
    for path in present:
        if _is_elsewhere(path):
            raise InputError(
                f"{path}: is a link or a mounted disk ({path.resolve()}): moved to previous/, it would leave the new "
                "results on another disk. Nothing was moved. Move its content away yourself, keep it by --resume, or "
                "choose an output.results_dir on that disk"
            )
    if not present:
        return None
    folder = layout.results / "previous" / started_at()
    number = 1
    while any((folder / path.relative_to(layout.results)).exists() for path in present):
        number += 1
        folder = folder.with_name(f"{started_at()}-{number}")
    for path in present:
        target = folder / path.relative_to(layout.results)
        target.parent.mkdir(parents=True, exist_ok=True)
        path.rename(target)
    return folder


def _is_elsewhere(path: Path) -> bool:
    return path.is_symlink() or path.is_mount()


def _is_empty_place(path: Path) -> bool:
    return _is_elsewhere(path) and path.is_dir() and not any(path.iterdir())
