"""Every path and file name of the pipeline, and what happens to the outputs of an earlier run."""

import os
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from utils.config import Config
from utils.errors import InputError

METRICS_VERSION = 2  # of baseline_metrics.json: its keys, and how its numbers are made
LAYER_PROFILE = "model"  # name of the files in layers/
RUN_STARTED_VARIABLE = "BOUNDBY_RUN_STARTED"  # set by the runner, so that its steps share one folder in previous/


@dataclass(frozen=True)
class EvaluationFolder:
    """The files of one pass over the whole dataset."""

    path: Path

    @property
    def plan(self) -> Path:
        """What is done, fixed before it starts."""
        return self.path / "plan.json"

    def part(self, shard: int) -> Path:
        """Return the path of the predictions of one shard; its presence is the commit."""
        return self.path / f"part-{shard:05d}.parquet"

    def cost(self, shard: int) -> Path:
        """Return the path of the time and memory that one shard took: measured, hence not in the part."""
        return self.path / f"cost-{shard:05d}.json"

    @property
    def claims(self) -> Path:
        """The folder of the locks of shards that are being predicted."""
        return self.path / ".claims"

    @property
    def predictions(self) -> Path:
        """One line per evaluated row."""
        return self.path / "predictions.csv"

    @property
    def metrics(self) -> Path:
        """The numbers over all rows."""
        return self.path / "metrics.json"

    @property
    def per_class(self) -> Path:
        """One line per class: counts, precision, recall, F1."""
        return self.path / "per_class.csv"

    @property
    def confusion_matrix(self) -> Path:
        """How many rows of each label got each prediction."""
        return self.path / "confusion_matrix.csv"

    @property
    def confident_mistakes(self) -> Path:
        """The wrong predictions that the model is surest of, with their texts."""
        return self.path / "confident_mistakes.csv"

    @property
    def quality(self) -> Path:
        """Classes, confused pairs, confident mistakes and calibration, for programs."""
        return self.path / "quality.json"


@dataclass(frozen=True)
class Layout:
    """Where each file of one configuration lies."""

    results: Path
    metrics: Path
    detailed_metrics: Path
    dataset: Path

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
    def run(self) -> Path:
        """What was run on what: fingerprint, effective configuration, versions, status of steps."""
        return self.results / "run.json"

    @property
    def ceilings(self) -> Path:
        """The folder of the measured limits of this machine, beside the data since they outlive a run."""
        return self.dataset.parent / "ceilings"

    @property
    def lock(self) -> Path:
        """Held by the step that is running."""
        return self.results / ".lock"

    @property
    def raw_samples(self) -> Path:
        """Every timing of the sweep."""
        return self.results / "raw_samples.csv"

    @property
    def evaluation(self) -> Path:
        """The folder of the pass over the whole dataset."""
        return self.results / "evaluation"

    @property
    def evaluated(self) -> EvaluationFolder:
        """The files of the pass over the whole dataset."""
        return EvaluationFolder(self.evaluation)

    @property
    def predictions(self) -> Path:
        """One line per evaluated row."""
        return self.evaluated.predictions

    @property
    def traces(self) -> Path:
        """The folder of the operator trace."""
        return self.results / "profiler_traces"

    @property
    def trace(self) -> Path:
        """The Chrome trace."""
        return self.traces / "trace.json.gz"

    @property
    def stacks(self) -> Path:
        """Folded call stacks with their self time."""
        return self.traces / "stacks.txt"

    @property
    def op_stats(self) -> Path:
        """One row per operator."""
        return self.traces / "op_stats.csv"

    @property
    def trace_analysis(self) -> Path:
        """Where the time of the trace went, and why its device was idle."""
        return self.traces / "trace_analysis.json"

    @property
    def key_averages(self) -> Path:
        """The operators as a table of text, by their shapes."""
        return self.traces / "key_averages.txt"

    @property
    def memory_snapshot(self) -> Path:
        """The history of the allocator, for pytorch.org/memory_viz."""
        return self.traces / "memory_snapshot.pickle"

    @property
    def flame_graph(self) -> Path:
        """The call stacks as a page for a browser."""
        return self.traces / "flame_graph.html"

    @property
    def memory_timeline(self) -> Path:
        """The allocated memory over the time of the trace."""
        return self.traces / "memory_timeline.csv"

    @property
    def trace_manifest(self) -> Path:
        """What the trace holds, what it lacks and why."""
        return self.traces / "manifest.json"

    @property
    def layers(self) -> Path:
        """The folder of the profile by layer."""
        return self.results / "layers"

    @property
    def layer_summary(self) -> Path:
        """What each layer costs, and how far that can be trusted."""
        return self.layers / f"{LAYER_PROFILE}_summary.json"

    @property
    def layer_dashboard(self) -> Path:
        """The profile by layer as a page for a browser."""
        return self.layers / f"{LAYER_PROFILE}_dashboard.html"

    @property
    def layers_plot(self) -> Path:
        """The layers that take most of the time."""
        return self.plots / "layers.png"

    @property
    def plots(self) -> Path:
        """The folder of the pictures."""
        return self.results / "plots"

    @property
    def confusion_plot(self) -> Path:
        """Which classes are taken for which."""
        return self.plots / "confusion_matrix.png"

    @property
    def calibration_plot(self) -> Path:
        """How often predictions are right, by their confidence."""
        return self.plots / "calibration.png"

    @property
    def batch_size_plot(self) -> Path:
        """Six panels over the batch size."""
        return self.plots / "batch_size_comparison.png"

    @property
    def heatmap_plot(self) -> Path:
        """Each metric of each batch size, normalised."""
        return self.plots / "metrics_heatmap.png"

    @property
    def roofline_plot(self) -> Path:
        """Each batch size under the limits of the machine."""
        return self.plots / "roofline.png"

    @property
    def operators_plot(self) -> Path:
        """Where the traced time goes."""
        return self.plots / "operators.png"

    @property
    def timeline_plot(self) -> Path:
        """What the device did at each moment of the trace, and why it was idle."""
        return self.plots / "trace_timeline.png"

    @property
    def memory_plot(self) -> Path:
        """The allocated memory over the trace, and whose it was at its peak."""
        return self.plots / "trace_memory.png"

    @property
    def report(self) -> Path:
        """The text that people read."""
        return self.results / "baseline_summary_report.txt"

    @property
    def html_report(self) -> Path:
        """The same report with its pictures, one file for a browser."""
        return self.results / "report.html"

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

    def log(self, step: str) -> Path:
        """Return the path of the log of step `step`."""
        return self.results / "logs" / f"{step}.log"


def started_at() -> str:
    """Return when this run started, in UTC, as a name that sorts and is safe in a path."""
    return os.environ.get(RUN_STARTED_VARIABLE) or datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")


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
    taken = [folder / path.relative_to(layout.results) for path in present]
    number = 1
    while any(path.exists() for path in taken):
        number += 1
        folder = layout.results / "previous" / f"{started_at()}-{number}"
        taken = [folder / path.relative_to(layout.results) for path in present]
    for path, target in zip(present, taken, strict=True):
        target.parent.mkdir(parents=True, exist_ok=True)
        path.rename(target)
    return folder


def _is_elsewhere(path: Path) -> bool:
    return path.is_symlink() or path.is_mount()


def _is_empty_place(path: Path) -> bool:
    return _is_elsewhere(path) and path.is_dir() and not any(path.iterdir())
