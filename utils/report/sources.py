"""Read what the steps left in the results folder; what is missing has a reason instead of a value."""

import argparse
import csv
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from boundby import files
from boundby.layers.document import read_profile
from boundby.layers.records import ModelProfile
from boundby.trace import rows_by_name
from utils import tasks
from utils.artifacts import METRICS_VERSION, Layout
from utils.cli import DEFAULT_CONFIG, Run
from utils.comparison import results
from utils.config import Config
from utils.errors import InputError
from utils.optimal import judge, optimal
from utils.render.formatting import listed
from utils.tasks.sequence_classification import quality as qualities
from utils.tasks.sequence_classification.quality import Quality
from utils.trace_analysis.document import SCHEMA_VERSION as TRACE_VERSION

Row = Mapping[str, Any]
OTHER_MODEL = "step 03 was run on another model than the sweep"
TRACE_KEYS = ("verdict", "devices", "steps", "launches")


@dataclass(frozen=True)
class Command:
    """The command line of this run, from which the commands of the report are made."""

    config: str | None
    overrides: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()

    @classmethod
    def of(cls, args: argparse.Namespace) -> "Command":
        """Return the command line that `args` were parsed from, as a person would type it here."""
        path = Path(args.config)
        here = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
        flags = ("--trust-remote-code",) if args.trust_remote_code else ()
        return cls(None if path == DEFAULT_CONFIG else str(here), tuple(args.overrides), flags)

    def run(self, *arguments: str) -> str:
        """Return `python run_pipeline.py` with the settings of this run; overrides in `arguments` replace its own."""
        flags = [argument for argument in arguments if "=" not in argument]
        overrides = [argument for argument in arguments if "=" in argument]
        replaced = {override.partition("=")[0] for override in overrides}
        kept = [override for override in self.overrides if override.partition("=")[0] not in replaced]
        config = ["--config", self.config] if self.config else []
        return shlex.join(["python", "run_pipeline.py", *config, *self.flags, *flags, *kept, *overrides])


@dataclass(frozen=True)
class Picture:
    """A picture of the results; `reason` says why it is not drawn, None where it is."""

    path: Path
    description: str
    reason: str | None = None


@dataclass(frozen=True)
class ReportData:
    """Everything the sections say.

    `rows` are those of the sweep, `best` has the choices in each dtype, `chosen` is the row of the optimal batch size
    in the model's own dtype (None where nothing was measured).
    """

    document: Mapping[str, Any]
    config: Config
    layout: Layout
    command: Command
    rows: tuple[Row, ...]
    best: Mapping[str, Mapping[str, Any]]
    chosen: Row | None
    targets: tuple[Row, ...]
    machine: Mapping[str, Any] | None
    versions: Mapping[str, Any] | None
    machine_reason: str | None
    operators: tuple[Row, ...]
    operators_reason: str | None
    manifest: Mapping[str, Any] | None
    rounds: Mapping[results.Point, Sequence[float]] = field(default_factory=dict)
    pictures: tuple[Picture, ...] = ()
    trace: Row | None = None  # what the analysis of the trace says
    trace_reason: str | None = None  # why there is none
    layers: ModelProfile | None = None
    layers_reason: str | None = None
    quality: Quality | None = None  # of the predictions over the whole dataset
    quality_reason: str | None = None

    @property
    def dtypes(self) -> list[str]:
        """The dtypes of the sweep, the model's own first."""
        return list(dict.fromkeys(row["dtype"] for row in self.rows))

    @property
    def choice(self) -> Mapping[str, Any]:
        """Which batch sizes to use in the model's own dtype."""
        return self.best[self.dtypes[0]] if self.rows else optimal([], self.config.targets)

    @property
    def full(self) -> Mapping[str, Any] | None:
        """The numbers over the whole dataset."""
        return self.document["full_dataset_metrics"]

    @property
    def task(self) -> Any:
        """What the model is used for, which knows what a score is."""
        return tasks.of(self.document["model"].get("task", tasks.DEFAULT))

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
    machine, versions, machine_reason = _machine(layout, document["machine_fingerprint"])
    manifest = _optional(layout.trace_manifest)
    operators, operators_reason = _operators(layout, document, manifest)
    trace, trace_reason = _trace(layout, document, manifest)
    layers, layers_reason = _layers(layout, document, config)
    quality, quality_reason = _quality(layout, document)
    return ReportData(
        document=document,
        config=config,
        layout=layout,
        command=command,
        rows=rows,
        best=best,
        chosen=chosen,
        targets=tuple(judge(config.targets, chosen, document["full_dataset_metrics"])),
        machine=machine,
        versions=versions,
        machine_reason=machine_reason,
        operators=operators,
        operators_reason=operators_reason,
        manifest=manifest,
        rounds=_rounds(layout) if len(best) > 1 else {},
        trace=trace,
        trace_reason=trace_reason,
        layers=layers,
        layers_reason=layers_reason,
        quality=quality,
        quality_reason=quality_reason,
    )


def _document(path: Path, command: Command) -> Mapping[str, Any]:
    measure = f"run `{command.run('--from', '1')}`"
    try:
        document = files.read_json(path)
    except FileNotFoundError:
        raise InputError(f"{path}: there are no metrics to report; {measure}") from None
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: cannot be read ({error}); {measure}") from None
    version = document.get("schema_version") if isinstance(document, dict) else None
    if version != METRICS_VERSION:
        raise InputError(f"{path}: is of version {version}, this program reads {METRICS_VERSION}; {measure}")
    return document


def _rounds(layout: Layout) -> dict[results.Point, list[float]]:
    """Return the seconds per sample of each round, which only the comparison of dtypes needs; {} without timings."""
    try:
        with layout.raw_samples.open(encoding="utf-8", newline="") as file:
            return results.rounds_of(results.visits_of(csv.DictReader(file)))
    except (OSError, ValueError, KeyError):
        return {}


def _optional(path: Path) -> Mapping[str, Any] | None:
    try:
        content = files.read_json(path)
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def _machine(layout: Layout, fingerprint: str) -> tuple[Mapping[str, Any] | None, Mapping[str, Any] | None, str | None]:
    """Return the machine that measured, its versions, and why they are not known.

    `run.json` describes the machine of the last step, which may be another one: a report made at home.
    """
    records = [(_optional(path) or {}).get("parts") for path in (layout.receipt("02"), layout.marker("02"))]
    run = _optional(layout.run)
    if run and run.get("machine_fingerprint") == fingerprint:
        records.append(run)
    found = next((record for record in records if record and record.get("machine")), None)
    if found is None:
        return None, None, f"no file in {layout.results} describes the machine {fingerprint}"
    return found["machine"], found.get("versions"), None


def _operators(
    layout: Layout, document: Mapping[str, Any], manifest: Mapping[str, Any] | None
) -> tuple[tuple[Row, ...], str | None]:
    """Return one row per operator of the trace, or none and the reason."""
    if _is_of_another_model(layout, document):
        return (), OTHER_MODEL
    try:
        with layout.op_stats.open(encoding="utf-8", newline="") as file:
            rows = rows_by_name(list(csv.DictReader(file)))
    except FileNotFoundError:
        return (), _why_no_trace(manifest)
    except (OSError, ValueError, KeyError, csv.Error) as error:
        return (), f"{layout.op_stats.name} cannot be read: {error}"
    return (tuple(rows), None) if rows else ((), "the trace holds no operators")


def _trace(
    layout: Layout, document: Mapping[str, Any], manifest: Mapping[str, Any] | None
) -> tuple[Row | None, str | None]:
    """Return what the analysis says about the trace, of several ranks about the slowest, or None and the reason."""
    name = layout.trace_analysis.name
    if _is_of_another_model(layout, document):
        return None, OTHER_MODEL
    try:
        analysis = files.read_json(layout.trace_analysis)
        if analysis["schema_version"] != TRACE_VERSION:
            return None, f"{name} is of version {analysis['schema_version']}, this program reads {TRACE_VERSION}"
        trace = analysis["traces"][analysis["slowest"] or 0]
    except FileNotFoundError:
        return None, _why_no_trace(manifest)
    except (OSError, ValueError) as error:
        return None, f"{name} cannot be read: {error}"
    except (KeyError, TypeError, IndexError):
        return None, f"{name} holds no analysis of a trace"
    missing = [key for key in TRACE_KEYS if not isinstance(trace, dict) or not trace.get(key)]
    return (None, f"{name} lacks {listed(missing)}") if missing else (trace, None)


def _layers(layout: Layout, document: Mapping[str, Any], config: Config) -> tuple[ModelProfile | None, str | None]:
    """Return the profile by layer, or None and the reason."""
    if _is_of_another_model(layout, document):
        return None, OTHER_MODEL
    try:
        return read_profile(layout.layer_summary), None
    except FileNotFoundError:
        return None, "layers.enabled is false" if not config.layers.enabled else "step 03 has not run"
    except (OSError, ValueError) as error:
        return None, f"{layout.layer_summary.name} cannot be read: {error}"


def _quality(layout: Layout, document: Mapping[str, Any]) -> tuple[Quality | None, str | None]:
    """Return what the predictions are like, or None and the reason."""
    full = document["full_dataset_metrics"]
    if full is None:
        return None, f"the dataset was not evaluated: {document['full_dataset_reason']}"
    return qualities.read(layout.evaluated, full.get("plan"))


def _is_of_another_model(layout: Layout, document: Mapping[str, Any]) -> bool:
    traced = (_optional(layout.receipt("03")) or {}).get("parts", {}).get("inputs", {}).get("model")
    return traced not in (None, document["model"].get("fingerprint"))


def _why_no_trace(manifest: Mapping[str, Any] | None) -> str:
    remarks = [f"{remark['what']}: {remark['reason']}" for remark in (manifest or {}).get("downgrades", [])]
    return "; ".join(remarks) or "step 03 has not run, or was skipped"
