"""Read what the steps left in the results folder; what is missing has a reason instead of a value."""

import argparse
import contextlib
import csv
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NotRequired, TypedDict, TypeVar, cast

import msgspec

from boundby import files
from boundby.bound import Verdict
from boundby.capture import CaptureManifest
from boundby.cli import typed
from boundby.formatting import Missing
from boundby.layers import ModelProfile, read_profile
from boundby.trace import rows_by_name
from utils.baseline import (
    Document,
    NonNegative,
    Operator,
    Optimal,
    OtherVersion,
    Row,
    Size,
    Target,
    Trace,
    Variants,
    judge,
    optimal,
    read_document,
    shaped,
)
from utils.command import DEFAULT_CONFIG, METRICS_VERSION, InputError, Layout, Run, removed, without
from utils.comparison import Point, Rounds, rounds_of, visits_of
from utils.evaluation import FullDataset
from utils.models import Quality, tasks
from utils.models import quality as qualities
from utils.settings import AUTO, DEFAULT_TASK, Config
from utils.steps import steps
from utils.tracing import SCHEMA_VERSION as TRACE_VERSION

OTHER_MODEL = "step 03 was run on another model than the sweep"
NO_LAYERS = "layers.enabled is false"
T = TypeVar("T")


@dataclass(frozen=True)
class Command:
    """The command line of this run, from which the commands of the report are made."""

    config: str | None
    overrides: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()

    @classmethod
    def of(cls, args: argparse.Namespace) -> "Command":
        """Return the command line that `args` were parsed from, as a person would type it here, without credentials."""
        path = Path(args.config)
        here = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
        flags = ("--trust-remote-code",) if args.trust_remote_code else ()
        return cls(None if path == DEFAULT_CONFIG else without(str(here)), tuple(map(without, args.overrides)), flags)

    def run(self, *arguments: str) -> str:
        """Return the command `run` with the settings of this run; overrides in `arguments` replace its own."""
        flags = [argument for argument in arguments if "=" not in argument]
        overrides = [argument for argument in arguments if "=" in argument]
        replaced = {override.partition("=")[0] for override in overrides}
        kept = [override for override in self.overrides if override.partition("=")[0] not in replaced]
        config = ["--config", self.config] if self.config else []
        return typed("run", *config, *self.flags, *flags, *kept, *overrides)


class Hardware(TypedDict):
    """What the report says of a machine."""

    cpu: str
    logical_cores: Size
    usable_cores: Size
    cpu_quota_cores: NonNegative | None
    memory_bytes: Size
    driver: NotRequired[str | None]


@dataclass(frozen=True)
class Machine:
    """The machine that measured: its hardware as `boundby.machine` describes it, and versions of packages."""

    hardware: Hardware
    versions: Mapping[str, str | None]


@dataclass(frozen=True)
class ReportData:
    """Everything the sections say.

    `rows` are those of the sweep, `best` has the choices in each dtype, `chosen` is the row of the optimal batch size
    in the model's own dtype (None where nothing was measured), `trace` is what the analysis of the trace says, and
    `quality` is that of the predictions over the whole dataset, `variants` what step 05 has compared. While step 02
    `is_under_way`, what it has not measured yet is still to come.
    """

    document: Document
    config: Config
    layout: Layout
    command: Command
    rows: tuple[Row, ...]
    best: Mapping[str, Optimal]
    chosen: Row | None
    targets: tuple[Target, ...]
    machine: Machine | Missing
    manifest: CaptureManifest
    operators: tuple[Operator, ...] | Missing
    trace: Trace | Missing
    layers: ModelProfile | Missing
    quality: Quality | Missing
    variants: Variants | Missing = Missing("step 05 has not run")
    rounds: Mapping[Point, Rounds] = field(default_factory=dict)
    is_under_way: bool = False

    @property
    def measured(self) -> tuple[Row, ...] | Missing:
        """The rows of the sweep, or that there are none."""
        return self.rows or Missing("no batch size was measured yet")

    @property
    def dtypes(self) -> list[str]:
        """The dtypes of the sweep, the model's own first."""
        return list(dict.fromkeys(row["dtype"] for row in self.rows))

    @property
    def is_auto(self) -> bool:
        """Whether the model's own dtype was left to the program."""
        return self.document["model"].get("dtype_setting") == AUTO

    @property
    def choice(self) -> Optimal:
        """Which batch sizes to use in the model's own dtype."""
        return self.best[self.dtypes[0]] if self.rows else optimal([], self.config.targets)

    @property
    def full(self) -> FullDataset | None:
        """The numbers over the whole dataset."""
        return self.document["full_dataset_metrics"]

    @property
    def is_scored(self) -> bool:
        """Whether the predictions over the whole dataset could be compared with labels."""
        full = self.full or {}
        return full.get("accuracy", full.get("neighbour_accuracy")) is not None

    @property
    def task(self) -> Any:
        """What the model is used for, which knows what a score is."""
        return tasks.of(self.document["model"].get("task", DEFAULT_TASK))

    @property
    def is_on_gpu(self) -> bool:
        """Whether the model ran on a GPU."""
        return self.document["device"].get("type") == "cuda"

    def trial(self, name: str, *settings: str) -> str:
        """Return the command that measures with other settings into a folder beside this one."""
        return self.command.run("--from", "2", *settings, f"output.results_dir={self.layout.results}-{name}")

    def of(self, dtype: str) -> list[Row]:
        """Return the rows of one dtype, smallest batch size first."""
        return [row for row in self.rows if row["dtype"] == dtype]


def read(run: Run) -> ReportData:
    """Return what the steps have left. Raises InputError, with the command to run, where there are no metrics."""
    layout, config, command = run.layout, run.config, Command.of(run.args)
    document = _document(layout.metrics, command)
    rows = tuple(document["batch_sizes"])
    best = {
        dtype: optimal([row for row in rows if row["dtype"] == dtype], config.targets)
        for dtype in dict.fromkeys(row["dtype"] for row in rows)
    }
    optima = {(dtype, choice["batch_size"]) for dtype, choice in list(best.items())[:1]}
    chosen = next((row for row in rows if (row["dtype"], row["batch_size"]) in optima), None)
    manifest = _manifest(layout.trace_manifest)
    if _is_of_another_model(layout, document):
        operators = trace = layers = Missing(OTHER_MODEL)
    else:
        no_trace, no_layers = _no_trace(manifest), "step 03 has not run" if config.layers.enabled else NO_LAYERS
        operators = _held(layout.op_stats, no_trace, lambda: _operators(layout))
        trace = _held(layout.trace_analysis, no_trace, lambda: _trace(layout))
        layers = _held(layout.layer_summary, no_layers, lambda: read_profile(layout.layer_summary))
    return ReportData(
        document=document,
        config=config,
        layout=layout,
        command=command,
        rows=rows,
        best=best,
        chosen=chosen,
        targets=tuple(judge(config.targets, chosen, document["full_dataset_metrics"])),
        machine=_machine(layout),
        manifest=manifest,
        operators=operators,
        trace=trace,
        layers=layers,
        quality=_quality(layout, document),
        variants=_held(layout.variants, "step 05 has not run", lambda: _variants(layout, document)),
        rounds=_rounds(layout, document) if len(best) > 1 else {},
    )


def _document(path: Path, command: Command) -> Document:
    measure = f"run `{command.run('--from', '1')}`"
    try:
        document = read_document(path, METRICS_VERSION)
        if document["full_dataset_metrics"]:
            task = tasks.of(document["model"].get("task", DEFAULT_TASK))
            shaped(document["full_dataset_metrics"], task.Scores)
        return cast(Document, removed(document))
    except FileNotFoundError:
        raise InputError(f"{path}: there are no metrics to report; {measure}") from None
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: cannot be read ({error}); {measure}") from None
    except OtherVersion as error:
        raise InputError(f"{path}: is of {error}, this program reads {METRICS_VERSION}; {measure}") from None


def _rounds(layout: Layout, document: Document) -> dict[Point, Rounds]:
    """Return what each round says, which only the comparison of dtypes needs; {} without timings."""
    try:
        with layout.raw_samples.open(encoding="utf-8", newline="") as file:
            return rounds_of(visits_of(csv.DictReader(file), document))
    except (OSError, ValueError, KeyError):
        return {}


def _manifest(path: Path) -> CaptureManifest:
    try:
        return files.read_as(path, CaptureManifest)
    except (OSError, ValueError):
        return CaptureManifest()


def _machine(layout: Layout) -> Machine | Missing:
    """Return the machine that measured: the report may be made on another one."""
    for path in (layout.receipt("02"), layout.marker("02")):
        with contextlib.suppress(OSError, ValueError):
            parts = steps.read(path, steps.Marker).parts
            if parts.machine:
                return Machine(msgspec.convert(parts.machine, Hardware), parts.versions or {})
    return Missing("no receipt of step 02 describes the machine")


def _held(path: Path, absent: str, read: Callable[[], T]) -> T | Missing:
    """Return what a file holds; `absent` says why it may not be there."""
    try:
        return read()
    except FileNotFoundError:
        return Missing(absent)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, csv.Error) as error:
        return Missing(f"{path.name} cannot be read: {error}")


def _operators(layout: Layout) -> tuple[Operator, ...] | Missing:
    """Return one row per operator of the trace."""
    with layout.op_stats.open(encoding="utf-8", newline="") as file:
        return tuple(rows_by_name(list(csv.DictReader(file)))) or Missing("the trace holds no operators")


def _trace(layout: Layout) -> Trace:
    """Return what the analysis says about the trace, of several ranks about the slowest."""
    analysis = files.read_json(layout.trace_analysis)
    if analysis["schema_version"] != TRACE_VERSION:
        raise ValueError(f"it is of version {analysis['schema_version']}, this program reads {TRACE_VERSION}")
    trace = analysis["traces"][analysis["slowest"] or 0]
    return cast(Trace, shaped({**trace, "verdict": Verdict.from_dict(trace["verdict"])}, Trace))


def _quality(layout: Layout, document: Document) -> Quality | Missing:
    """Return what the predictions are like."""
    full = document["full_dataset_metrics"]
    if full is None:
        return Missing(f"the dataset was not evaluated: {document['full_dataset_reason']}")
    return qualities.read(layout.evaluated, full.get("plan"))


def _variants(layout: Layout, document: Document) -> Variants | Missing:
    """Return what step 05 has compared."""
    compared = cast(Variants, shaped(files.read_json(layout.variants), Variants))
    if compared["model_fingerprint"] != document["model"].get("fingerprint"):
        return Missing("step 05 was run on another model than the sweep")
    return compared


def _is_of_another_model(layout: Layout, document: Document) -> bool:
    try:
        traced = steps.read(layout.receipt("03"), steps.Marker).parts.inputs.get("model")
    except (OSError, ValueError):
        return False
    return traced not in (None, document["model"].get("fingerprint"))


def _no_trace(manifest: CaptureManifest) -> str:
    remarks = [f"{remark.what}: {remark.reason}" for remark in manifest.downgrades]
    return "; ".join(remarks) or "step 03 has not run, or was skipped"
