"""Check the stage times of one process: whole, at one with their own rows, and told alike in its summary."""

import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from boundby.training import StageTimes, read_stage_times
from boundby.training.records import UNUSUAL, StageSummary, times_from
from boundby.training.results import SUMMARY
from boundby.training.store import DOCUMENT
from utils.profile_check.subject import Check, Subject, read_strictly

NS_PER_S = 1e9
SAME = 1e-9  # relative: sums of the same numbers in another order
AGAIN = "train again"


def read(subject: Subject, rank: int | None) -> tuple[StageTimes | None, list[Check]]:
    """Return the stage times of a process, None where there are none to be read, and what is to be said about them."""
    path = subject.folder / f"{subject.prefix}{DOCUMENT}"
    checks = []
    try:
        checks += _rows(subject, path, times_from(path.read_bytes()))
    except (OSError, ValueError) as error:
        checks.append(_unread(subject, path, error))
    try:
        times = read_stage_times(subject.folder, rank)  # with what the log holds beyond it
    except (OSError, ValueError):
        return None, checks
    return times, [*checks, *_ending(subject, path, times), *_remarks(subject, path, times)]


def summary(subject: Subject, times: StageTimes) -> Iterator[Check]:
    """Yield what is to be said about the summary of a process that has ended."""
    path = subject.folder / f"{subject.prefix}{SUMMARY}"
    if times.status == "running" and not path.is_file():
        return
    try:
        document = read_strictly(path, dict[str, Any])
        told = {(each["name"], each["kind"]): each["host_s"] for each in document["stages"]}
        status = document["status"]
    except FileNotFoundError:
        yield subject.fault("existence", path, "it is missing: the run in sum", AGAIN)
        return
    except (OSError, ValueError, LookupError, TypeError) as error:
        yield subject.unreadable("summary", path, error)
        return
    wrong = [] if status == times.status else [f"status is {status} here and {times.status} in {DOCUMENT}"]
    for each in times.stages:
        if each.kind != "step":
            there = told.get((each.name, each.kind), {})
            if (there.get("n"), there.get("total")) != (each.host_s.n, each.host_s.total):
                wrong.append(f"{each.name} is not as in {DOCUMENT}")
    for text in wrong:
        yield subject.fault("summary", path, text, AGAIN)
    if not wrong:
        yield subject.ok("summary", path, f"as in {DOCUMENT}: {len(told)} stages, {status}")


def _unread(subject: Subject, path: Path, error: Exception) -> Check:
    if isinstance(error, FileNotFoundError):
        return subject.fault("existence", path, "it is missing: the times of the stages", AGAIN)
    return subject.fault("stage times", path, f"it cannot be read: {type(error).__name__}: {error}", AGAIN)


def _rows(subject: Subject, path: Path, times: StageTimes) -> Iterator[Check]:
    """Yield whether the summaries are those of the rows, as far as these reach back."""
    rows, step = times.occurrences, times.step
    usual = rows[(rows["flags"] & UNUSUAL) == 0]
    if (usual["self_ns"] < 0).any() or (usual["host_ns"] < 0).any():
        yield subject.fault("nesting", path, "a stage is shorter than what lies inside it", AGAIN)
    if len(rows) < times.num_occurrences:
        kept = f"the last {len(rows):,} of {times.num_occurrences:,} occurrences; sums are over all"
        yield subject.note("rows", path, kept)
        return
    wrong = [each.name for place, each in enumerate(times.names) if not _agree(times, place)]
    for name in wrong:
        yield subject.fault("sums", path, f"the summary of {name} is not that of its occurrences", AGAIN)
    numbers = times.rows_of("step", "step")["step"]
    if len(numbers) and (np.diff(numbers) <= 0).any():
        yield subject.fault("steps", path, "the numbers of the steps do not rise", AGAIN)
    if not wrong:
        judged = step.host_s.n if step else 0
        told = f"{len(numbers):,} steps, {judged:,} of them undisturbed, {len(rows):,} occurrences; sums as in the rows"
        yield subject.ok("stage times", path, told)


def _agree(times: StageTimes, place: int) -> bool:
    """Tell whether the summary of a name is that of its rows."""
    name = times.names[place]
    found: StageSummary | None = times.stage(name.name, name.kind)
    rows = times.occurrences[times.occurrences["stage"] == place]
    usual = rows[(rows["flags"] & UNUSUAL) == 0]
    if found is None:
        return not len(rows)
    sums = (usual["host_ns"].sum() / NS_PER_S, usual["self_ns"].sum() / NS_PER_S)
    counted = (found.host_s.n, found.unusual) == (len(usual), len(rows) - len(usual))
    return counted and all(
        math.isclose(there, here, rel_tol=SAME, abs_tol=SAME)
        for there, here in zip((found.host_s.total, found.self_total_s), sums, strict=True)
    )


def _ending(subject: Subject, path: Path, times: StageTimes) -> Iterator[Check]:
    last = "no step has ended" if times.last_step is None else f"the last step that has ended is {times.last_step}"
    if times.status == "failed":
        yield subject.note("status", path, f"the training failed: {times.error}; {last}")
    elif times.status == "running" and _is_alive(times.pid):
        yield subject.note("status", path, f"it runs still; {last}")
    elif times.status == "running":
        yield subject.fault("status", path, f"the training was killed; {last}; what had been recorded is whole", AGAIN)
    if times.status != "running" and not (times.step and times.step.host_s.n):
        yield subject.fault("steps", path, "no undisturbed step has ended", "train for more steps")


def _remarks(subject: Subject, path: Path, times: StageTimes) -> Iterator[Check]:
    for each in times.remarks:
        often = f" ({each.count} times)" if each.count > 1 else ""
        yield subject.note("given up", path, f"given up: {each.what}: {each.reason}{often}")


def _is_alive(pid: int | None) -> bool:
    try:
        os.kill(pid or 0, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return pid is not None
