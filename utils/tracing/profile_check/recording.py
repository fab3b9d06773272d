"""Check what step 03 or a training run leaves: every file is there, is the one that was written, and can be read."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

from boundby import files
from boundby.capture import CaptureManifest
from boundby.cli import typed
from boundby.trace import Analysis, analyze, read_trace
from boundby.training import DOCUMENT, MANIFEST, OP_STATS, SUMMARY, StageTimes, goes_on, ranks_in, read_stage_times
from utils.command import InputError, Layout, Run
from utils.steps import steps
from utils.training import progress, run_folder

STEP = "03"
TRAIN_AGAIN = "train again"
Record = TypeVar("Record")


@dataclass(frozen=True)
class Check:
    """One thing that was looked at: in which file, what is to be said of it, and for a fault how to get it right."""

    what: str
    file: str
    state: Literal["ok", "note", "fault"]
    text: str
    remedy: str | None = None

    @property
    def is_fatal(self) -> bool:
        """Whether the artefact must not be used as it is."""
        return self.state == "fault"


@dataclass
class Profile:
    """A folder with a profile, and what was found in it.

    `folder` holds the manifest and the traces; of a run of the pipeline it lies in `run`. `analysis` is that of the
    first trace, None where it cannot be read; `ranks` are the processes of a training run.
    """

    run: Path
    folder: Path
    layout: Layout | None  # of a run of the pipeline; None of a recorded loop
    checks: list[Check] = field(default_factory=list)
    analysis: Analysis | None = None
    ranks: tuple[StageTimes, ...] = ()

    @property
    def faults(self) -> list[Check]:
        """What must not be used as it is."""
        return [check for check in self.checks if check.is_fatal]

    @property
    def again(self) -> str:
        """How to make the whole profile anew."""
        if self.layout:
            return f"make it again: {typed('run', '--from', '3')}, with the settings of this run"
        return "record it again"

    def ok(self, what: str, path: Path, text: str) -> None:
        """Note that all is well."""
        self._add(what, path, "ok", text)

    def note(self, what: str, path: Path, text: str) -> None:
        """Note something worth knowing that spoils nothing."""
        self._add(what, path, "note", text)

    def fault(self, what: str, path: Path, text: str, remedy: str | None = None) -> None:
        """Note a fault; that a file is missing or of another size, once. Without a `remedy` it has to be made again."""
        is_known = any((fault.what, fault.file) == (what, self._named(path)) for fault in self.faults)
        if not (what in ("existence", "size") and is_known):
            self._add(what, path, "fault", text, remedy or self.again)

    def read(self, path: Path, kind: type[Record], remedy: str | None = None) -> Record | None:
        """Return the record in a file; None, with a fault, where it is missing or no such record."""
        try:
            return files.read_as(path, kind)
        except FileNotFoundError:
            self.fault("existence", path, "it is missing", remedy)
        except (OSError, ValueError) as error:
            self.fault("content", path, f"{error}", remedy)
        return None

    def _add(
        self, what: str, path: Path, state: Literal["ok", "note", "fault"], text: str, remedy: str | None = None
    ) -> None:
        self.checks.append(Check(what, self._named(path), state, text, remedy))

    def _named(self, path: Path) -> str:
        return str(path.relative_to(self.run)) if path.is_relative_to(self.run) else str(path)


def folder_of(run: Run) -> Path | None:
    """Return the folder to check: RUN, else the results of the settings; None where these ask for no trace."""
    if run.args.run is not None:
        return Path(run.args.run)
    return run.layout.results if run.config.trace.enabled else None


def check(path: Path, layout: Layout) -> Profile:
    """Return what is to be said about the profile in a folder; a broken file is a fault and never an error.

    `layout` gives the names of files. Raises InputError where there is no folder, or no profile in it.
    """
    if not path.is_dir():
        raise InputError(f"{path} is no folder; give the results folder of a run, or one with a profiler's manifest")
    above = replace(layout, results=path.resolve().parent)
    if path.resolve().name == layout.traces.name and above.receipt(STEP).exists():
        path = above.results
    own = replace(layout, results=path)
    if any(file.exists() for file in (own.traces, own.receipt(STEP), own.marker(STEP))):
        profile = Profile(path, own.traces, own)
        if _receipt(profile, own):
            _recording(profile, own.trace_manifest)
        return profile
    profile = Profile(path, path, None)
    if run_folder.is_run(path) or ranks_in(path):
        _training(profile)
    elif (path / MANIFEST).is_file():
        _recording(profile, path / MANIFEST)
    else:
        raise InputError(f"{path} holds no profile: neither {own.traces.name}/ nor {MANIFEST}; run step {STEP}")
    return profile


def _receipt(profile: Profile, layout: Layout) -> bool:
    """Check the receipt of step 03 and every file that it lists; tell whether there is to be a trace."""
    path = layout.receipt(STEP)
    try:
        receipt = steps.receipt_in(path)
    except FileNotFoundError:
        has_begun = layout.marker(STEP).exists()
        text = f"step {STEP} has started and not finished" if has_begun else f"step {STEP} left no receipt"
        remedy = f"wait for it, or {typed('run', '--from', '3', '--resume')}" if has_begun else None
        profile.fault("receipt", path, text, remedy)
        return True
    except steps.OtherReceipt as error:
        profile.fault("receipt", path, f"{error}", f"check it with that version, or {profile.again}")
        return True
    except (OSError, ValueError) as error:
        profile.fault("receipt", path, f"{error}")
        return True
    for output in receipt.outputs:
        _output(profile, _path_now(profile, output.path), output)
    if receipt.status != "ok":
        profile.fault("receipt", path, f"step {STEP} ended with status {receipt.status}")
        return True
    trace = receipt.parts.config.get("trace")
    if isinstance(trace, Mapping) and trace.get("enabled") is False:
        profile.note("receipt", path, "trace.enabled was false: no trace was recorded")
        return False
    profile.ok("receipt", path, f"step {STEP} finished, {len(receipt.outputs)} file(s) listed")
    return True


def _output(profile: Profile, file: Path, output: steps.Output) -> None:
    if not file.is_file():
        profile.fault("existence", file, "it is missing; the receipt lists it")
    elif (size := file.stat().st_size) != output.bytes:
        profile.fault("size", file, f"it has {size:,} bytes, {output.bytes:,} were written")
    elif files.sha256(file) != output.sha256:
        profile.fault("hash", file, "its SHA-256 is not the one in the receipt: it has changed")
    else:
        profile.ok("hash", file, f"{size:,} bytes, as written")


def _path_now(profile: Profile, recorded: str) -> Path:
    """Return where a listed file is now, also when the folder of the run has moved."""
    parts = Path(recorded).parts
    for folder in (profile.folder, profile.run.resolve()):  # layers lie beside the traces, in the results
        if folder.name in parts:
            last = len(parts) - 1 - parts[::-1].index(folder.name)
            return folder.joinpath(*parts[last + 1 :])
    below = [profile.folder.joinpath(*parts[start:]) for start in range(1, len(parts))]
    return next((path for path in below if path.is_file()), profile.folder / Path(recorded).name)


def _recording(profile: Profile, path: Path) -> None:
    """Check the manifest of a recording, the files that it names, and its traces."""
    manifest = profile.read(path, CaptureManifest)
    if manifest is None:
        return
    _steps_of(profile, path, manifest)
    for recorded, what in manifest.files.items():
        file = _path_now(profile, str(recorded))
        if not file.is_file():
            profile.fault("existence", file, f"it is missing; {path.name} names it as {what}")
        elif not file.stat().st_size:
            profile.fault("size", file, f"it is empty; {path.name} names it as {what}")
        elif what != "trace":
            profile.ok("existence", file, f"the {what} of the manifest")
    for cycle in manifest.cycles:
        file = _path_now(profile, str(cycle.trace_path))
        if not (cycle.trace_path and file.is_file() and file.stat().st_size):
            continue
        try:
            trace = read_trace(file)
        except (OSError, ValueError) as error:
            profile.fault("trace", file, f"{error}")
            continue
        analysis = analyze(trace, expected_steps=cycle.steps_recorded, stacks_expected=cycle.stacks)
        for finding in analysis.findings:
            say = profile.fault if finding.is_fatal else profile.note
            say(finding.kind, file, finding.text)
        if analysis.is_conclusive:
            profile.ok("trace", file, f"{analysis.events:,} events, {len(analysis.step_numbers)} steps")
        if cycle.trace_path == manifest.trace_path and profile.analysis is None:
            profile.analysis = analysis


def _steps_of(profile: Profile, path: Path, manifest: CaptureManifest) -> None:
    counted = f"{manifest.steps_recorded} of {manifest.steps_expected} steps recorded"
    reasons = "; ".join(f"{remark.what}: {remark.reason}" for remark in manifest.downgrades)
    if not manifest.trace_wanted:
        profile.note("trace", path, f"no trace was wanted: {manifest.trace_reason or 'no reason is given'}")
    elif manifest.trace_path is None:
        profile.fault("trace", path, f"there is no trace ({reasons or 'and no reason'})")
    elif manifest.steps_recorded < manifest.steps_expected and not reasons:
        profile.fault("steps", path, f"{counted}, and no reason is given")
    else:
        profile.ok("steps", path, counted)
    for kind, remarks in (("downgraded", manifest.downgrades), ("unavailable", manifest.unavailable)):
        for remark in remarks:
            profile.note(kind, path, f"{kind}: {remark.what}: {remark.reason}")
    for text in manifest.warnings:
        profile.note("warning", path, f"torch warned: {text}")


def _training(profile: Profile) -> None:
    """Check a training run: its settings and metrics where it is one of ours, and the files of each process."""
    folder, ranks = profile.folder, ranks_in(profile.folder)
    if (folder / run_folder.CONFIG).is_file():
        _settings_and_metrics(profile, folder / run_folder.CONFIG, ranks)
    for rank in ranks:
        _process(profile, rank)
    if len(ranks) > 1 and not any(times.status == "running" for times in profile.ranks):
        _read_ok(profile, folder / SUMMARY, "all processes in sum")


def _settings_and_metrics(profile: Profile, path: Path, ranks: Sequence[int | None]) -> None:
    config = profile.read(path, run_folder.RunConfig, TRAIN_AGAIN)
    if config is not None and not config.is_recorded:
        profile.note("profiling", path, "profiling.enabled was false: the run was not recorded (--profiler on)")
    elif config is not None and len(ranks) < config.world_size:
        text = f"stage times of {len(ranks)} of {config.world_size} process(es) are here"
        profile.fault("processes", path, text, TRAIN_AGAIN)
    elif config is not None:
        planned = f"{config.steps_planned:,} steps, {config.world_size} process(es)"
        profile.ok("configuration", path, planned)
    path = profile.folder / progress.FILE
    metrics = profile.read(path, progress.Metrics, TRAIN_AGAIN)
    if metrics is None:
        return
    profile.ok("metrics", path, f"{len(metrics.steps.step):,} steps, {len(metrics.epochs)} epochs")
    if metrics.non_finite_losses:
        profile.note("losses", path, f"{metrics.non_finite_losses:,} losses are no finite numbers (null here)")
    if metrics.status in ("failed", "interrupted"):
        profile.note("status", path, f"the training was {metrics.status}: {metrics.error}")


def _process(profile: Profile, rank: int | None) -> None:
    """Check the files of one process; what comes at the end of a run may be missing while it goes on."""
    prefix = "" if rank is None else f"rank{rank}_"
    path = profile.folder / f"{prefix}{DOCUMENT}"
    try:
        times = read_stage_times(profile.folder, rank)
    except (OSError, ValueError) as error:
        profile.fault("stage times", path, f"{error}", TRAIN_AGAIN)
        return
    profile.ranks = (*profile.ranks, times)
    last = "no step has ended" if times.last_step is None else f"the last step that has ended is {times.last_step}"
    if times.status == "failed":
        profile.note("status", path, f"the training failed: {times.error}; {last}")
    elif goes_on(times):
        profile.note("status", path, f"it runs still; {last}")
    elif times.status == "running":
        profile.fault("status", path, f"the training was killed; {last}; what had been recorded is whole", TRAIN_AGAIN)
    elif not (times.step and times.step.host_s.n):
        profile.fault("steps", path, "no undisturbed step has ended", "train for more steps")
    else:
        profile.ok("stage times", path, f"{times.step.host_s.n:,} undisturbed steps")
    for remark in times.remarks:
        often = f" ({remark.count} times)" if remark.count > 1 else ""
        if remark.what == DOCUMENT:  # what is known comes from the log
            profile.fault("stage times", path, remark.reason, TRAIN_AGAIN)
        else:
            profile.note("given up", path, f"given up: {remark.what}: {remark.reason}{often}")
    manifest = profile.folder / f"{prefix}{MANIFEST}"
    if times.status != "running":
        _read_ok(profile, profile.folder / f"{prefix}{SUMMARY}", "the run in sum")
    if times.status != "running" or manifest.is_file():
        _recording(profile, manifest)
    table = profile.folder / f"{prefix}{OP_STATS}"
    if profile.analysis is not None and not table.is_file():
        profile.fault("existence", table, "it is missing: the table of operators")


def _read_ok(profile: Profile, path: Path, what: str) -> None:
    if profile.read(path, dict[str, Any], TRAIN_AGAIN) is not None:
        profile.ok("summary", path, what)
