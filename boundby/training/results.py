"""What a profiled loop leaves in its folder when it ends, beside the stage times: from the trace, and in sum."""

import os
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from boundby import files
from boundby.environment import host_id
from boundby.files import SILENT_S
from boundby.trace import OPERATOR_COLUMNS, Analysis, analyze, operator_rows, read_trace
from boundby.training.judgement import judge_training
from boundby.training.reader import read_head
from boundby.training.records import SCHEMA_VERSION, Remark, StageTimes
from boundby.training.store import file_name
from boundby.training.verdict import TrainingVerdict
from boundby.verdict import Verdict

if TYPE_CHECKING:
    from boundby.capture import CaptureManifest

TRACE, OP_STATS, MANIFEST, SUMMARY = "trace.json", "op_stats.csv", "manifest.json", "profiler_summary.json"

CYCLES = "trace_cycle*.json"
PATHS = ("trace_path", "stacks_path", "snapshot_path")  # keys of a manifest
CLOCKS_DIFFER_S = 1.0  # that of the system's table of processes, and that of the program
NO_TRACE = "there is no trace of this run that could be read; manifest.json and given_up say why"


@dataclass(frozen=True)
class RunFiles:
    """The files of one process of a run."""

    folder: Path
    rank: int
    world_size: int

    def path(self, name: str) -> Path:
        """Return the path of a file, with the rank in its name where there are several."""
        return self.folder / file_name(name, self.rank, self.world_size)


def manifest_of_nothing(place: RunFiles, reason: str | None) -> "CaptureManifest":
    """Return the manifest of a run that records no trace, for this reason; None where it could not."""
    import torch

    from boundby.capture import CaptureManifest

    return CaptureManifest(
        torch_version=str(torch.__version__),
        activities=(),
        steps_expected=0,
        steps_recorded=0,
        trace_path=None,
        trace_bytes=None,
        stacks_path=None,
        seconds=0.0,
        downgrades=(),
        unavailable=(),
        warnings=(),
        rank=place.rank,
        world_size=place.world_size,
        trace_wanted=reason is None,
        trace_reason=reason,
    )


def write_manifest(place: RunFiles, manifest: "CaptureManifest", remarks: Sequence[Remark]) -> None:
    """Write what was recorded, and all that was given up."""
    document = {"schema_version": SCHEMA_VERSION, **asdict(manifest)}
    given_up = [{"what": remark.what, "reason": remark.reason} for remark in remarks]
    document["downgrades"] = [*document["downgrades"], *given_up]
    files.write_json(place.path(MANIFEST), document)


def publish_trace(place: RunFiles, manifest: "CaptureManifest") -> None:
    """Give the trace that the manifest names its usual name too, where it is one of several."""
    path, trace = place.path(TRACE), manifest.trace_path
    if trace is not None and trace != path:
        give_name(trace, path)


def give_name(file: Path, path: Path) -> None:
    """Link or copy a file to `path`."""
    with files.replacing(path) as temporary:
        try:
            os.link(file, temporary)
        except OSError:  # a file system without links, or another one
            shutil.copyfile(file, temporary)


def write_operators(place: RunFiles, analysis: Analysis) -> None:
    """Write the table of operators."""
    files.write_csv(place.path(OP_STATS), operator_rows(analysis.operators), OPERATOR_COLUMNS)


def analysis_of(manifest: "CaptureManifest") -> Analysis:
    """Return what the trace of the manifest says."""
    assert manifest.trace_path is not None
    cycle = next(cycle for cycle in manifest.cycles if cycle.trace_path == manifest.trace_path)
    return analyze(read_trace(manifest.trace_path), expected_steps=cycle.steps_recorded, stacks_expected=cycle.stacks)


def summary_document(times: StageTimes, manifest: "CaptureManifest | None", verdict: Verdict | None) -> dict[str, Any]:
    """Return the summary of the run: its stages, the verdicts on it and on its trace, and what was given up."""
    given_up = [asdict(remark) for remark in times.remarks]
    if manifest:
        given_up += [asdict(downgrade) for downgrade in manifest.downgrades]
    step = times.step
    return {
        "schema_version": SCHEMA_VERSION,
        "status": times.status,
        "error": times.error,
        "rank": times.rank,
        "world_size": times.world_size,
        "elapsed_s": times.elapsed_s,
        "first_step": times.first_step,
        "last_step": times.last_step,
        "step_s": asdict(step.host_s) if step else None,
        "in_no_stage_share": step.share if step else None,
        "stages": [asdict(stage) for stage in times.stages if stage.kind != "step"],
        "metrics": [asdict(metric) for metric in times.metrics],
        "training_verdict": verdict_document(judge_training([times], verdict)),
        "verdict": verdict.as_dict() if verdict else None,
        "verdict_reason": None if verdict else NO_TRACE,
        "profiler_s": manifest.seconds if manifest else None,
        "given_up": given_up,
        "unavailable": [asdict(missing) for missing in manifest.unavailable] if manifest else [],
    }


def trace_verdict_of(summary: Any) -> Verdict | None:
    """Return the verdict on the trace that stands in a summary, None where there is none that can be read."""
    try:
        return Verdict.from_dict(summary["verdict"]) if summary["verdict"] else None
    except (LookupError, TypeError, ValueError):
        return None


def read_trace_verdict(place: RunFiles) -> Verdict | None:
    """Return the verdict on the trace of a process by its summary, None where there is none that can be read."""
    try:
        return trace_verdict_of(files.read_json(place.path(SUMMARY)))
    except (OSError, ValueError):
        return None


def verdict_document(verdict: TrainingVerdict) -> dict[str, Any]:
    """Return the verdict on a run with its text."""
    return {**verdict.as_dict(), "text": str(verdict).splitlines()}


def remove_earlier(place: RunFiles) -> str | None:
    """Remove the recording and the summary that an earlier run of this process left, all of it.

    Return None; or why everything stays, where that run goes on still.
    """
    times = read_head(place.folder, place.rank if place.world_size > 1 else None)
    if times and goes_on(times):
        which = f"process {times.pid}{'' if times.host == host_id() else ' of another machine'}"
        which = "this process" if (times.pid, times.host) == (os.getpid(), host_id()) else which
        return f"{place.folder}: another profiler of {which} still writes there; give each a folder of its own"
    for path in [*_recorded(place), place.path(MANIFEST), place.path(SUMMARY)]:
        path.unlink(missing_ok=True)
    if place.rank == 0:
        (place.folder / SUMMARY).unlink(missing_ok=True)  # of all processes
    return None


def goes_on(times: StageTimes) -> bool:
    """Tell whether a process that may be alive writes these; a later one may have got its number.

    One elsewhere, or nobody knows where, counts as alive until it has written nothing for a day.
    """
    if times.status != "running":
        return False
    if times.host != host_id() and time.time() - (times.written_unix_s or times.started_unix_s or 0.0) < SILENT_S:
        return True
    if times.pid is None or times.host not in (None, host_id()):
        return False
    import psutil  # takes 10 ms, and is needed after a run alone that was killed or goes on

    try:
        return bool(psutil.Process(times.pid).create_time() <= (times.started_unix_s or 0.0) + CLOCKS_DIFFER_S)
    except psutil.NoSuchProcess:
        return False
    except psutil.Error:
        return True


def _recorded(place: RunFiles) -> Iterator[Path]:
    """Yield what a recording leaves under fixed names, and what its manifest names in this folder."""
    yield from (place.path(name) for name in (TRACE, OP_STATS))
    yield from place.folder.glob(place.path(CYCLES).name)
    try:
        document = files.read_json(place.path(MANIFEST))
        parts = [document, *document.get("cycles", ())]
        named = [Path(part[key]) for part in parts for key in PATHS if part.get(key)]
    except (OSError, ValueError, TypeError, AttributeError):
        return
    here = place.folder.absolute()
    yield from (path for path in named if path.absolute().parent == here)
