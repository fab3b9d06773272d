"""Decide whether a step must run, and record that it has: receipts, fingerprints and the reasons that are printed."""

import functools
import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from boundby import environment, files
from utils import contents
from utils.artifacts import Layout
from utils.config import QUICKSTART, Config
from utils.quickstart import cache

SCHEMA_VERSION = 1
ROOT = Path(__file__).resolve().parents[1]
OURS = r"(?:utils|boundby)[\w.]*"
IMPORT = re.compile(rf"^\s*(?:from\s+({OURS})\s+import\s+(\([^)]*\)|[^#\n]+)|import\s+({OURS}))", re.MULTILINE)
TEMPLATES = ("*.j2", "*.css")  # beside the modules that fill them
NOT_OF_VISITS = ("targets", "evaluation")
SHOWN_CHARACTERS = 60  # of a changed value in a reason


@dataclass(frozen=True)
class Step:
    """One numbered script: what it is for, which settings it reads, and whether its numbers depend on the machine."""

    number: str
    script: str
    title: str
    skip_flag: str
    reads: tuple[str, ...]
    measures: bool = False


STEPS = {
    step.number: step
    for step in (
        Step("00", "00_check_setup.py", "check the environment", "--skip-check", ("model.device",)),
        Step(
            "01",
            "01_download_data.py",
            "fetch model and data",
            "--skip-download",
            ("model.name", "model.revision", "model.task", "dataset"),
        ),
        Step(
            "02",
            "02_baseline_inference.py",
            "measure the baseline",
            "--skip-baseline",
            ("model", "dataset", "profiling", "evaluation", "targets"),
            measures=True,
        ),
        Step(
            "03",
            "03_detailed_profiling.py",
            "trace the operators",
            "--skip-profiling",
            ("model", "dataset", "profiling.batch_sizes", "profiling.max_length", "trace", "layers"),
            measures=True,
        ),
        Step("04", "04_visualize_results.py", "draw and report", "--skip-visualize", ("targets", "pod", "profiling")),
    )
}


@dataclass(frozen=True)
class Decision:
    """Whether a step runs, and why, in words for the user."""

    run: bool
    reason: str


def outputs(step: str, layout: Layout) -> list[Path]:
    """Return the files and folders that the step owns, present or not."""
    owned = {
        "00": [],
        "01": [layout.dataset, layout.label_mappings, layout.rejected_rows, layout.data_receipt],
        "02": [layout.metrics, layout.detailed_metrics, layout.raw_samples, layout.evaluation],
        "03": [layout.traces, layout.layers],
        "04": [layout.plots, layout.report, layout.html_report],
    }
    return owned[step]


def stale_with(step: str, layout: Layout, config: Config, *, resumes: bool = False) -> list[Path]:
    """Return what must be moved away before the step measures again: its outputs and the report that tells of them.

    Who `resumes` keeps the evaluation: its plan tells, when it is its turn, whether it is one for the same work.
    """
    hidden = [layout.receipt(step), layout.marker(step)]
    if step == "02":
        hidden += [layout.visits(dtype) for dtype in sweep_dtypes(config)]
        owned = [path for path in outputs(step, layout) if not (resumes and path == layout.evaluation)]
        return [*owned, *hidden, *outputs("04", layout), layout.receipt("04")]
    if step == "03":
        return [*outputs(step, layout), *hidden]
    return hidden


def sweep_dtypes(config: Config) -> list[str]:
    """Return the dtypes the sweep is made in; the first is the model's own."""
    others = [dtype for dtype in config.profiling.dtypes or [] if dtype != config.model.dtype]
    return [config.model.dtype, *others]


def parts(step: str, config: Config, layout: Layout) -> dict[str, Any]:
    """Return what the step's result depends on; two runs with equal parts may share results."""
    spec = STEPS[step]
    found: dict[str, Any] = {
        "config": settings_of(step, config),
        "code": _code_hash(spec),
        "inputs": _inputs(step, config, layout),
    }
    if spec.measures:
        found["machine"] = environment.hardware()
        found["versions"] = environment.versions()
        found["environment"] = environment.settings()
    return found


def settings_of(step: str, config: Config) -> dict[str, Any]:
    """Return the settings that the step reads, by dotted key."""
    settings = config.model_dump(mode="json")
    return {key: _setting(settings, key) for key in STEPS[step].reads}


def decide(step: str, config: Config, layout: Layout) -> Decision:
    """Return whether `--resume` must run the step, and the reason."""
    if step == "00":
        return Decision(True, "the environment is checked every time")
    try:
        receipt = files.read_json(layout.receipt(step))
    except OSError:
        return Decision(True, "an earlier run did not finish" if layout.marker(step).exists() else "it has not run yet")
    except ValueError:
        return Decision(True, "its receipt is damaged")
    if receipt.get("schema_version") != SCHEMA_VERSION:
        return Decision(True, "its receipt is of another version")
    if receipt.get("status") != "ok":
        return Decision(True, f"it ended with status {receipt.get('status')}")
    changed = difference(receipt.get("parts", {}), parts(step, config, layout))
    if changed:
        return Decision(True, changed)
    damaged = _damaged_output(receipt, layout) or (_missing_model(config, layout) if step == "01" else None)
    return Decision(True, damaged) if damaged else Decision(False, "up to date")


def difference(old: Mapping[str, Any], new: Mapping[str, Any]) -> str | None:
    """Return the first change between two sets of parts as a readable reason, or None when they are equal."""
    if old.get("code") != new.get("code"):
        return "the program changed"
    return _first_change(old, new, "")


def begin(step: str, layout: Layout, recorded_parts: Mapping[str, Any]) -> None:
    """Mark the step as started, with what its result will depend on, so that a kill leaves something to continue."""
    files.write_json(layout.marker(step), {"schema_version": SCHEMA_VERSION, "parts": recorded_parts})
    layout.receipt(step).unlink(missing_ok=True)  # only now: a kill between the two must leave one of them


def continuation(step: str, recorded_parts: Mapping[str, Any], layout: Layout) -> Decision:
    """Return whether the work of an earlier attempt must be thrown away (`run`), and why."""
    for path in (layout.marker(step), layout.receipt(step)):
        try:
            earlier = files.read_json(path)
        except (OSError, ValueError):
            continue
        changed = difference(_of_visits(earlier.get("parts", {})), _of_visits(recorded_parts))
        return Decision(True, changed) if changed else Decision(False, "same settings, program, data and machine")
    return Decision(True, "there is no earlier attempt")


def _of_visits(recorded_parts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parts without settings that no visit depends on; shards carry the fingerprint of their own plan."""
    settings = {key: value for key, value in recorded_parts.get("config", {}).items() if key not in NOT_OF_VISITS}
    return {**recorded_parts, "config": settings}


def write(step: str, layout: Layout, recorded_parts: Mapping[str, Any], **facts: Any) -> None:
    """Write the receipt of a finished step, with size and SHA-256 of every file it owns."""
    owned = sorted(path for output in outputs(step, layout) for path in _files(output))
    receipt = {
        "schema_version": SCHEMA_VERSION,
        "step": step,
        **facts,
        "fingerprint": files.sha256_of(recorded_parts),
        "parts": recorded_parts,
        "outputs": [{"path": str(path), "bytes": path.stat().st_size, "sha256": files.sha256(path)} for path in owned],
    }
    files.write_json(layout.receipt(step), receipt)
    layout.marker(step).unlink(missing_ok=True)


def _setting(settings: Mapping[str, Any], key: str) -> Any:
    value: Any = settings
    for part in key.split("."):
        value = value[part]
    return value


def _inputs(step: str, config: Config, layout: Layout) -> dict[str, Any]:
    """Return what identifies the files the step reads; the dataset by its content, not by what its receipt says."""
    if step == "01":
        return {"files": {str(path): _state(path) for path in _sources(config)}, "quickstart": _quickstart_hash(config)}
    if step in ("02", "03"):
        try:
            model = files.read_json(layout.data_receipt)["model"]["fingerprint"]
        except (OSError, ValueError, KeyError):
            model = None
        dataset = layout.dataset
        found: dict[str, Any] = {"dataset": contents.sha256(dataset) if dataset.is_file() else None, "model": model}
        found["model_files"] = {str(path): _state(path) for path in _model_files(config)}
        if step == "03" and config.trace.batch_size is None:
            found["optimal_batch_size"] = _optimal_batch_size(layout)
        return found
    if step == "04":
        read = [
            layout.metrics,
            layout.detailed_metrics,
            layout.raw_samples,
            layout.op_stats,
            layout.trace_manifest,
            layout.trace_analysis,
            layout.layer_summary,
            layout.data_receipt,
        ]
        return {path.name: files.sha256(path) if path.is_file() else None for path in read}
    return {}


def _sources(config: Config) -> list[Path]:
    """Return the local files that step 01 reads: the dataset, and the model where it is a folder."""
    return ([Path(config.dataset.file)] if config.dataset.file else []) + _model_files(config)


def _model_files(config: Config) -> list[Path]:
    """Return the files of a model that is a folder."""
    folder = Path(config.model.name)
    return sorted(path for path in folder.iterdir() if path.is_file()) if folder.is_dir() else []


def _optimal_batch_size(layout: Layout) -> int | None:
    try:
        return files.read_json(layout.metrics)["optimal"]["batch_size"]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _state(path: Path) -> list[int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return [status.st_size, status.st_mtime_ns]


def _quickstart_hash(config: Config) -> str | None:
    return cache.content_hash() if config.dataset.quickstart else None


def _missing_model(config: Config, layout: Layout) -> str | None:
    if config.model.name == QUICKSTART and not cache.is_ready(layout.dataset.parent):
        return "the quickstart model is missing or damaged"
    return None


def _code_hash(spec: Step) -> str:
    """Return a hash of the step's script, of every module of ours it reaches by imports, and of their templates."""
    waiting, seen = [f"scripts/{spec.script}"], {}
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        found = _source(ROOT, name)
        if found is not None:
            seen[name], reached = found
            waiting += reached
    return files.sha256_of(seen)


@functools.cache
def _source(root: Path, name: str) -> tuple[str, tuple[str, ...]] | None:
    """Return the hash of a source file, and the files its imports of ours may stand for, with templates beside it.

    None if it is not there.
    """
    try:
        source = (root / name).read_text(encoding="utf-8")
    except OSError:
        return None
    modules = set()
    for module, names, plain in IMPORT.findall(source):
        path = (module or plain).split(".")
        modules |= {"/".join(path[:depth]) for depth in range(1, len(path) + 1)}
        modules |= {"/".join([*path, each.split()[0]]) for each in names.strip("()").split(",") if each.split()}
    reached = [f"{module}{ending}" for module in sorted(modules) for ending in (".py", "/__init__.py")]
    folder = (root / name).parent
    reached += [str(path.relative_to(root)) for ending in TEMPLATES for path in sorted(folder.glob(ending))]
    return hashlib.sha256(source.encode()).hexdigest(), tuple(reached)


def _first_change(old: Any, new: Any, key: str) -> str | None:
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for name in [*old, *(name for name in new if name not in old)]:
            inner = name if key in ("", "config") else f"{key}.{name}"
            change = _first_change(old.get(name), new.get(name), inner)
            if change:
                return change
        return None
    return None if old == new else f"{key} changed: {_shown(old)} -> {_shown(new)}"


def _shown(value: Any) -> str:
    text = str(value)
    return text if len(text) <= SHOWN_CHARACTERS else text[: SHOWN_CHARACTERS - 3] + "..."


def _damaged_output(receipt: Mapping[str, Any], layout: Layout) -> str | None:
    recorded = {output["path"] for output in receipt["outputs"]}
    named = (layout.metrics, layout.detailed_metrics) if receipt["step"] == "02" else ()
    for path in (path for path in named if str(path) not in recorded):
        return f"output {path.name} is missing"
    for output in receipt["outputs"]:
        path = Path(output["path"])
        if not path.is_file():
            return f"output {path.name} is missing"
        if path.stat().st_size != output["bytes"] or files.sha256(path) != output["sha256"]:
            return f"output {path.name} has changed"
    return None


def _files(path: Path) -> list[Path]:
    if path.is_dir():
        return [each for each in path.rglob("*") if each.is_file() and not each.name.startswith(files.TEMPORARY_PREFIX)]
    return [path] if path.is_file() else []
