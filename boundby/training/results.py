"""What a profiled loop leaves in its folder when it ends, beside the stage times: from the trace, and in sum."""

import os
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from boundby import files
from boundby.trace import OPERATOR_COLUMNS, Analysis, analyze, operator_rows, read_trace
from boundby.training.judgement import judge_training
from boundby.training.records import StageTimes
from boundby.training.remarks import Remark
from boundby.training.verdict import TrainingVerdict
from boundby.training.writer import file_name
from boundby.verdict import Verdict

if TYPE_CHECKING:
    from boundby.capture import CaptureManifest

SCHEMA_VERSION = 1
TRACE, OP_STATS, MANIFEST, SUMMARY = "trace.json", "op_stats.csv", "manifest.json", "profiler_summary.json"

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
    given_up = [{"what": each.what, "reason": each.reason} for each in remarks]
    document["downgrades"] = [*document["downgrades"], *given_up]
    files.write_json(place.path(MANIFEST), document)


def publish_trace(place: RunFiles, manifest: "CaptureManifest") -> None:
    """Give the trace that the manifest names its usual name too, where it is one of several."""
    path, trace = place.path(TRACE), manifest.trace_path
    if trace is not None and trace != path:
        give_name(trace, path)


def give_name(file: Path, path: Path) -> None:
    """Let a file be found at `path` too."""
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
    cycle = next(each for each in manifest.cycles if each.trace_path == manifest.trace_path)
    return analyze(read_trace(manifest.trace_path), expected_steps=cycle.steps_recorded, stacks_expected=cycle.stacks)


def summary_document(times: StageTimes, manifest: "CaptureManifest | None", verdict: Verdict | None) -> dict[str, Any]:
    """Return the run in sum: its stages, the verdict on it and on its trace, and what was given up."""
    given_up = [asdict(each) for each in times.remarks]
    if manifest:
        given_up += [asdict(each) for each in manifest.downgrades]
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
        "stages": [asdict(each) for each in times.stages if each.kind != "step"],
        "metrics": [asdict(each) for each in times.metrics],
        "training_verdict": verdict_document(judge_training([times], verdict)),
        "verdict": verdict.as_dict() if verdict else None,
        "verdict_reason": None if verdict else NO_TRACE,
        "profiler_s": manifest.seconds if manifest else None,
        "given_up": given_up,
        "unavailable": [asdict(each) for each in manifest.unavailable] if manifest else [],
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
