"""What a step is, whether it must run, and the record that it has: receipts, fingerprints, reasons, run.json.

`steps.toml` is the table of the steps; it stands in a file of its own because the runner, which loads nothing of ours,
reads it too.
"""

import functools
import tomllib
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from boundby import __version__, files
from boundby.cli import PACKAGE, PIPELINE
from boundby.formatting import Missing, known
from boundby.machine import DeviceLostError, environment, gpu_energy
from utils.command import InputError, Layout, contents, removed, started_at, without
from utils.models import model_files
from utils.quickstart import cache
from utils.settings import AUTO, QUICKSTART, Config

SCHEMA_VERSION = 1
NOT_OF_VISITS = ("targets", "evaluation")
BATCH_SIZES, LARGER_SIZES = (1, 4, 8, 16, 32, 64), (128, 256)  # where the settings name none; the others on a GPU
MOST_LOSSES = 2  # of the GPU to the same work: it is run again once, and what comes after it is worth measuring
SHOWN_CHARACTERS = 60  # of a changed value in a reason

Record = TypeVar("Record", bound=msgspec.Struct)


class Step(msgspec.Struct, frozen=True):
    """One numbered script; `steps.toml` says what its fields mean."""

    script: str
    skip: str
    title: str
    settings: tuple[str, ...]
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    early: tuple[str, ...] = ()
    outdates: tuple[str, ...] = ()
    measures: bool = False
    check: str | None = None


STEPS = msgspec.convert(
    tomllib.loads(Path(__file__).with_name("steps.toml").read_text(encoding="utf-8")), dict[str, Step]
)


class Decision(msgspec.Struct, frozen=True):
    """Whether a step runs, and why, in words for the user."""

    run: bool
    reason: str


class Parts(msgspec.Struct, frozen=True, omit_defaults=True):
    """What the result of a step depends on; two runs with equal parts may share results."""

    config: dict[str, object] = {}
    code: str | None = None
    inputs: dict[str, object] = {}
    machine: dict[str, object] | None = None
    versions: dict[str, str | None] | None = None
    environment: dict[str, object] | None = None


class Marker(msgspec.Struct):
    """What a step leaves when it starts, so that a kill leaves something to continue."""

    parts: Parts
    schema_version: int = SCHEMA_VERSION


class Output(msgspec.Struct, frozen=True):
    """One file of a finished step."""

    path: str
    bytes: int
    sha256: str


class Receipt(msgspec.Struct, kw_only=True):
    """What a finished step leaves, written last."""

    schema_version: int = SCHEMA_VERSION
    boundby_version: str | None = None  # of receipts before there was a word for it
    step: str
    status: str
    exit_code: int | None = None
    started: str | None = None
    seconds: float | None = None
    resolved: dict[str, str] = {}
    fingerprint: str
    parts: Parts
    outputs: list[Output]


class OtherReceipt(ValueError):
    """A receipt that another version of the program wrote."""


class _Writer(msgspec.Struct, frozen=True):
    """What a receipt of any version says about itself."""

    schema_version: object = None
    boundby_version: object = None


class Optimal(msgspec.Struct, frozen=True):
    """What the sweep found."""

    batch_size: int | None = None


class _Held(msgspec.Struct, frozen=True):
    """Which model was measured, in which dtype, and by which setting."""

    fingerprint: str | None = None
    dtype: str | None = None
    dtype_setting: str | None = None


class Measured(msgspec.Struct, frozen=True):
    """What other steps read of the metrics of step 02."""

    optimal: Optimal = Optimal()
    model: _Held = _Held()


class _Energy(msgspec.Struct, frozen=True):
    """What the steps of a run have taken from its GPUs, and the counter when the one under way began; None is unknown.

    Each step counts for itself: between two of them nobody may hold the driver, which then begins its counter anew.
    """

    run: str = ""
    joules: float | None = 0.0
    counter: float | None = None
    reason: str | None = None

    def spent(self, now: float | Missing) -> float | Missing:
        """Return the joules so far, with the counter at `now`."""
        if isinstance(now, Missing):
            return now
        if self.joules is None or self.counter is None:
            return Missing(self.reason or "the counter was not read when the step began")
        moved = now - self.counter
        return self.joules + moved if moved > 0 else Missing("the counter stands still or began anew")


class _States(msgspec.Struct, frozen=True):
    """What is kept of `run.json`: how each step ended, and the energy."""

    steps: dict[str, dict[str, object]] = {}
    energy: _Energy = _Energy()


class _Sources(msgspec.Struct, frozen=True):
    """What is read of the receipt of the data."""

    model: dict[str, object]
    source: dict[str, object]


def outputs(number: str, layout: Layout) -> list[Path]:
    """Return the files and folders that the step owns, present or not."""
    return [getattr(layout, name) for name in STEPS[number].outputs]


def stale_with(number: str, layout: Layout, *, resumes: bool = False) -> list[Path]:
    """Return what must be moved away before the step measures again: its outputs, records, and what tells of them.

    On resume the evaluation is kept; its own plan decides what is stale.
    """
    owned = [path for path in outputs(number, layout) if not (resumes and path == layout.evaluation)]
    records = [layout.receipt(number), layout.marker(number)]
    logs = sorted(layout.receipt(number).parent.glob(f"{number}-*.jsonl"))  # of visits
    outdated = [path for other in STEPS[number].outdates for path in (*outputs(other, layout), layout.receipt(other))]
    return [*owned, *records, *logs, *outdated]


def require_ours(number: str, layout: Layout) -> None:
    """Raise InputError where the step would move or replace what no receipt or mark of a step proves to be ours."""
    begun = [other for other in STEPS if layout.receipt(other).exists() or layout.marker(other).exists()]
    early = {getattr(layout, name) for other in begun for name in STEPS[other].early}
    for other in (number, *STEPS[number].outdates):
        if other == "01" or other in begun:
            continue  # the dataset has a receipt of its own
        for path in (path for path in outputs(other, layout) if path not in early):
            is_there = any(path.iterdir()) if path.is_dir() else path.exists()
            if is_there and not (path == layout.evaluation and layout.evaluated.is_ours):
                raise InputError(
                    f"{path}: exists, and no receipt says that a step made it. Nothing was moved or replaced. "
                    "Choose another output.results_dir, or move that away"
                )
    if layout.run.exists() and not layout.receipt(number).parent.exists():
        raise InputError(f"{layout.run}: was not written by a run here; choose another output.results_dir")


def sweep_dtypes(config: Config, own: str | None = None) -> list[str]:
    """Return the dtypes the sweep is made in; the first is the model's own, `own` where model.dtype is auto."""
    first = own or config.model.dtype
    return [first, *(dtype for dtype in config.profiling.dtypes or [] if dtype != first)]


def sweep_sizes(config: Config, *, is_on_gpu: bool) -> list[int]:
    """Return the batch sizes of the sweep; one that memory does not hold ends it."""
    return config.profiling.batch_sizes or [*BATCH_SIZES, *(LARGER_SIZES if is_on_gpu else ())]


def measured_dtype(config: Config, layout: Layout) -> str | None:
    """Return the dtype in which step 02 has held this model where model.dtype is auto; None where it has not."""
    try:
        model = read(layout.metrics, Measured).model
    except (OSError, ValueError):
        return None
    is_auto = config.model.dtype == AUTO == model.dtype_setting
    return model.dtype if is_auto and model.fingerprint == _model_fingerprint(layout) else None


def parts(number: str, config: Config, layout: Layout) -> Parts:
    """Return what the step's result depends on."""
    step = STEPS[number]
    known = {
        "config": settings_of(number, config),
        "code": code_hash(step.script),
        "inputs": {name: _input(name, config, layout) for name in step.inputs},
    }
    if step.measures:
        known |= {"machine": environment.hardware(), "versions": environment.versions()}
        known |= {"environment": environment.settings()}
    return msgspec.convert(known, Parts)


def settings_of(number: str, config: Config) -> dict[str, object]:
    """Return the settings that the step reads, by dotted key, without credentials."""
    settings = removed(config.model_dump(mode="json"))
    return {
        key: functools.reduce(lambda value, part: value[part], key.split("."), settings)
        for key in STEPS[number].settings
    }


def decide(number: str, config: Config, layout: Layout) -> Decision:
    """Return whether `--resume` must run the step, and the reason."""
    if number == "00":
        return Decision(True, "the environment is checked every time")
    try:
        receipt = receipt_in(layout.receipt(number))
    except OSError:
        started = layout.marker(number).exists()
        return Decision(True, "an earlier run did not finish" if started else "it has not run yet")
    except OtherReceipt as error:
        return Decision(True, str(error))
    except ValueError:
        return Decision(True, "its receipt is damaged")
    if receipt.status != "ok":
        return Decision(True, f"it ended with status {receipt.status}")
    reason = (
        difference(receipt.parts, parts(number, config, layout))
        or _damaged_output(receipt, layout)
        or (_missing_model(config, layout) if number == "01" else None)
    )
    return Decision(True, reason) if reason else Decision(False, "up to date")


def difference(old: Parts, new: Parts) -> str | None:
    """Return the first change between two sets of parts as a readable reason, or None when they are equal."""
    if old.code != new.code:
        return "the program changed"
    return _first_change(msgspec.structs.asdict(old), msgspec.structs.asdict(new), "")


def begin(number: str, layout: Layout, recorded: Parts) -> None:
    """Mark the step as started, with what its result will depend on, so that a kill leaves something to continue."""
    files.write_json(layout.marker(number), msgspec.to_builtins(Marker(recorded)))
    layout.receipt(number).unlink(missing_ok=True)  # only now: a kill between the two must leave one of them


def continuation(number: str, recorded: Parts, layout: Layout) -> Decision:
    """Return whether the work of an earlier attempt must be thrown away (`run`), and why."""
    for path in (layout.marker(number), layout.receipt(number)):
        try:
            earlier = read(path, Marker).parts
        except (OSError, ValueError):
            continue
        changed = difference(_of_visits(earlier), _of_visits(recorded))
        return Decision(True, changed) if changed else Decision(False, "same settings, program, data and machine")
    return Decision(True, "there is no earlier attempt")


def finish(number: str, layout: Layout, recorded: Parts, **facts: Any) -> None:
    """Write the receipt of a finished step, with size and SHA-256 of every file it owns."""
    owned = sorted(path for output in outputs(number, layout) for path in _files(output))
    receipt = Receipt(
        boundby_version=__version__,
        step=number,
        **facts,
        fingerprint=files.sha256_of(msgspec.to_builtins(recorded)),
        parts=recorded,
        outputs=[Output(str(path), path.stat().st_size, files.sha256(path)) for path in owned],
    )
    files.write_json(layout.receipt(number), msgspec.to_builtins(receipt))
    layout.marker(number).unlink(missing_ok=True)


def given_up(number: str, layout: Layout) -> list[str]:
    """Return what has ended the GPU for its process so often that `--resume` does not run it again."""
    lost = Counter(line["point"] for line in files.read_json_lines(layout.losses(number)))
    return [point for point, times in lost.items() if times >= MOST_LOSSES]


def read(path: Path, kind: type[Record]) -> Record:
    """Return the JSON of a file as a record. Raises OSError, and ValueError where it is not one."""
    return files.read_as(path, kind)


def receipt_in(path: Path) -> Receipt:
    """Return the receipt of a step. Raises OSError, OtherReceipt, and ValueError where it is damaged."""
    head = read(path, _Writer)
    if head.schema_version != SCHEMA_VERSION:
        writer = f"Boundby {head.boundby_version}" if head.boundby_version else "another version of Boundby"
        raise OtherReceipt(
            f"its receipt was written by {writer} (schema version {head.schema_version}); "
            f"this is Boundby {__version__}, which reads schema version {SCHEMA_VERSION}"
        )
    return read(path, Receipt)


def record(number: str, layout: Layout, config: Config, status: Mapping[str, object]) -> None:
    """Write the state of the step into `run.json`, beside what earlier steps have written.

    It holds what ran on what machine, with which settings and versions, and how each step ended.
    """
    before, now = _states(layout), _joules()
    energy = before.energy if before.energy.run == started_at() else _Energy(started_at())
    if status["status"] == "running":
        energy = msgspec.structs.replace(energy, counter=known(now), reason=getattr(now, "reason", energy.reason))
    else:
        spent = energy.spent(now)
        energy = _Energy(energy.run, known(spent), None, getattr(spent, "reason", None))
    try:
        receipt = read(layout.data_receipt, _Sources)
        sources: dict[str, object] = {"model": receipt.model, "dataset": receipt.source}
    except (OSError, ValueError):
        sources = {"model": None, "dataset": None, "sources_reason": "step 01 has not finished"}
    files.write_json(
        layout.run,
        {
            "schema_version": SCHEMA_VERSION,
            "boundby_version": __version__,
            "machine_fingerprint": environment.machine_fingerprint(),
            "machine": environment.machine(),
            "environment": environment.settings(),
            "versions": environment.versions(),
            "config": removed(config.model_dump(mode="json")),
            **sources,
            "steps": {**before.steps, number: status},
            "energy": msgspec.to_builtins(energy),
        },
    )


def joules_so_far(layout: Layout) -> float | Missing:
    """Return what the GPUs of this process have taken in the steps of this run, by the counter of their driver."""
    energy = _states(layout).energy
    if energy.run != started_at():
        return Missing("no step of this run has begun")
    if energy.counter is not None:
        return energy.spent(_joules())
    return Missing(energy.reason or "unknown") if energy.joules is None else energy.joules


def _joules() -> float | Missing:
    try:
        return gpu_energy().joules()
    except (OSError, DeviceLostError) as error:  # the step that has lost its GPU says so itself
        return Missing(str(error))


def _states(layout: Layout) -> _States:
    try:
        return read(layout.run, _States)
    except (OSError, ValueError):
        return _States()


@functools.cache
def code_hash(script: str, package: Path = PACKAGE, pipeline: Path = PIPELINE) -> str:
    """Return a hash of a script and of both packages whole: every file in them, templates and tables too."""
    sources = [pipeline / "scripts" / script, *_files(package), *_files(pipeline / "utils")]
    code = {path for path in sources if path.parent.name != "__pycache__"}
    return files.sha256_of({str(path.relative_to(package.parent)): files.sha256(path) for path in sorted(code)})


def _of_visits(recorded: Parts) -> Parts:
    """Return the parts without settings that no visit depends on; shards carry the fingerprint of their own plan."""
    kept = {key: value for key, value in recorded.config.items() if key not in NOT_OF_VISITS}
    return msgspec.structs.replace(recorded, config=kept)


def _input(name: str, config: Config, layout: Layout) -> object:
    """Return what identifies an input of a step: one of `READINGS`, or the hash of an artefact."""
    if name in READINGS:
        return READINGS[name](config, layout)
    path: Path = getattr(layout, name)
    return files.sha256(path) if path.is_file() else None


def _model_fingerprint(layout: Layout) -> str | None:
    """Return the hash of the model that step 01 has recorded, so that this is quick."""
    try:
        return read(layout.data_receipt, _Sources).model["fingerprint"]  # type: ignore[return-value]
    except (OSError, ValueError, KeyError):
        return None


def _optimal_batch_size(config: Config, layout: Layout) -> int | None:
    """Return the batch size that the sweep leaves to the trace, None where the settings name one."""
    if config.trace.batch_size is not None:
        return None
    try:
        return read(layout.metrics, Measured).optimal.batch_size
    except (OSError, ValueError):
        return None


def _hashes(paths: list[Path]) -> dict[str, str | None]:
    """Return the hash of each file, None where it is not there."""
    return {without(str(path)): contents.sha256(path) if path.is_file() else None for path in paths}


def _model_files(config: Config) -> list[Path]:
    """Return the files of a model that is a folder, and no others that lie there."""
    folder = Path(config.model.name)
    return model_files(folder) if folder.is_dir() else []


def _located_model_files(config: Config, layout: Layout) -> list[Path]:
    """Return the files of the model; of one from the Hub those that step 01 has found in the cache."""
    if Path(config.model.name).is_dir():
        return _model_files(config)
    try:
        model = read(layout.data_receipt, _Sources).model
        return model_files(Path(str(model["path"]))) if model["origin"] == "hub" else []
    except (OSError, ValueError, KeyError):
        return []


def _sources(config: Config) -> list[Path]:
    """Return the local files that step 01 reads: the dataset, and the model where it is a folder."""
    return ([Path(config.dataset.file)] if config.dataset.file else []) + _model_files(config)


READINGS: dict[str, Callable[[Config, Layout], object]] = {
    "files": lambda config, layout: _hashes(_sources(config)),
    "quickstart": lambda config, layout: cache.content_hash() if config.dataset.quickstart else None,
    # By its content, and not by what its receipt says: texts may be edited at any time.
    "dataset": lambda config, layout: contents.sha256(layout.dataset) if layout.dataset.is_file() else None,
    "model": lambda config, layout: _model_fingerprint(layout),
    "model_files": lambda config, layout: _hashes(_located_model_files(config, layout)),
    "optimal_batch_size": _optimal_batch_size,
    "measured_dtype": measured_dtype,
}


def _missing_model(config: Config, layout: Layout) -> str | None:
    if config.model.name == QUICKSTART and not cache.is_ready(layout.dataset.parent):
        return "the quickstart model is missing or damaged"
    return None


def _first_change(old: object, new: object, key: str) -> str | None:
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for name in [*old, *(name for name in new if name not in old)]:
            inner = name if key in ("", "config") else f"{key}.{name}"
            change = _first_change(old.get(name), new.get(name), inner)
            if change:
                return change
        return None
    return None if old == new else f"{key} changed: {_shown(old)} -> {_shown(new)}"


def _shown(value: object) -> str:
    text = str(value)
    return text if len(text) <= SHOWN_CHARACTERS else text[: SHOWN_CHARACTERS - 3] + "..."


def _damaged_output(receipt: Receipt, layout: Layout) -> str | None:
    recorded = {output.path for output in receipt.outputs}
    named = (layout.metrics, layout.detailed_metrics) if receipt.step == "02" else ()
    for path in (path for path in named if str(path) not in recorded):
        return f"output {path.name} is missing"
    for output in receipt.outputs:
        path = Path(output.path)
        if not path.is_file():
            return f"output {path.name} is missing"
        if path.stat().st_size != output.bytes or contents.sha256(path) != output.sha256:
            return f"output {path.name} has changed"
    return None


def _files(path: Path) -> list[Path]:
    if path.is_dir():
        return [file for file in path.rglob("*") if file.is_file() and not file.name.startswith(files.TEMPORARY_PREFIX)]
    return [path] if path.is_file() else []
