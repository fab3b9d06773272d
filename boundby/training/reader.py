"""Read the stage times of a run that has ended, runs still, or was killed; and tell the runs of a folder apart."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from boundby import files
from boundby.capture import Remark
from boundby.training.aggregate import joined, share_of
from boundby.training.records import (
    METRIC,
    NS_PER_S,
    OCCURRENCE,
    SCHEMA_VERSION,
    UNUSUAL,
    MetricSummary,
    Name,
    StageSummary,
    StageTimes,
    Statistics,
    Summaries,
    columns_of,
    times_from,
)
from boundby.training.store import DOCUMENT, LOG, RowsLine, RunLine, file_name

LARGEST_BYTES = 512 * 2**20  # of a file: eight times the largest log
HEAD_BYTES = 2**18  # the head of a document holds some KB
ROWS = b',"occurrences":'
NO_ROWS = msgspec.json.encode(
    {"occurrences": columns_of(np.zeros(0, OCCURRENCE)), "metrics": columns_of(np.zeros(0, METRIC))}
)
NOTHING = Statistics(0, 0.0)
DIGITS = 5  # of the rank in a name
TOGETHER_S = 60.0  # within which the processes of one run begin, or else they overlap


def read_stage_times(folder: str | Path, rank: int | None = None, *, with_rows: bool = True) -> StageTimes:
    """Return the stage times of one process: its last document, with what its log holds beyond that.

    `rank` is one of `boundby.training.ranks_in`. Of several runs in one folder it is the last. Without `with_rows` the
    document alone is read, if it can be, and no rows: its summary is some seconds old while the run goes on. Raises
    FileNotFoundError where there is neither file, and ValueError where neither can be read.
    """
    folder = Path(folder)
    naming = (0, 1) if rank is None else (rank, rank + 2)
    document, log = (folder / file_name(name, *naming) for name in (DOCUMENT, LOG))
    if not document.is_file() and not log.is_file():
        raise FileNotFoundError(f"{folder} holds neither {document.name} nor {log.name}")
    times, fault = _document(document, with_rows)
    if times is not None and not with_rows:
        return times
    run = _last_run(_lines(log))
    if times is None:
        if run is None:
            raise ValueError(f"{document}: {fault}; {log.name} holds no run either")
        times = run.empty_times(Remark(DOCUMENT, f"{fault}; read from {log.name} alone"))
    return run.added_to(times) if run and run.header.started_unix_s == times.started_unix_s else times


def ranks_in(folder: str | Path) -> tuple[int | None, ...]:
    """Return the processes that left stage times of the newest run: None for one without a rank in its names.

    What cannot be read may be of that run, unless its rank is beyond the number of its processes.
    """
    folder = Path(folder)
    ranks = _named_in(folder)
    heads = {rank: times for rank in ranks if (times := read_head(folder, rank))} if len(ranks) > 1 else {}
    if not heads:
        return ranks
    newest = max(heads, key=lambda rank: heads[rank].started_unix_s or 0.0)
    if newest is None:
        return (None,)
    run = heads[newest]
    return tuple(
        rank
        for rank in ranks
        if rank is not None and (is_of_one_run(heads[rank], run) if rank in heads else rank < run.world_size)
    )


def is_of_one_run(times: StageTimes, newest: StageTimes) -> bool:
    """Tell whether a process belongs to the same run as the one that began last."""
    newest_began = newest.started_unix_s or 0.0
    overlaps = (times.written_unix_s or 0.0) >= newest_began
    is_rerun = times.host == newest.host and times.launcher != newest.launcher
    is_together = overlaps or (not is_rerun and (times.started_unix_s or 0.0) > newest_began - TOGETHER_S)
    return times.world_size == newest.world_size and is_together


def read_head(folder: Path, rank: int | None) -> StageTimes | None:
    """Return the stage times of a process without rows, None where they cannot be read."""
    try:
        return read_stage_times(folder, rank, with_rows=False)
    except (OSError, ValueError):
        return None


def _named_in(folder: Path) -> tuple[int | None, ...]:
    """Return the processes of all runs, by the names of their files."""
    ranks: set[int | None] = set()
    for name in (DOCUMENT, LOG):
        if (folder / name).is_file():
            ranks.add(None)
        for path in folder.glob(f"rank*_{name}"):
            number = path.name.removesuffix(f"_{name}").removeprefix("rank")
            if number.isdecimal() and len(number) <= DIGITS:
                ranks.add(int(number))
    return tuple(sorted(ranks, key=lambda rank: -1 if rank is None else rank))


def _lines(path: Path) -> list[Any]:
    try:
        return files.read_json_lines(path) if path.stat().st_size <= LARGEST_BYTES else []
    except OSError:
        return []


def _document(path: Path, with_rows: bool) -> tuple[StageTimes | None, str]:
    try:
        return times_from(files.read_bytes(path, LARGEST_BYTES) if with_rows else _head(path)), ""
    except FileNotFoundError:
        return None, "it is missing"
    except (OSError, ValueError) as error:
        return None, str(error)


def _head(path: Path) -> bytes:
    """Return the document without rows, which are not even read where they start within `HEAD_BYTES`."""
    with path.open("rb") as file:
        content = file.read(HEAD_BYTES)
        if ROWS not in content:  # no string in JSON holds that: its quotes would be escaped
            content += file.read()
    head, rows, _ = content.partition(ROWS)
    return head + b"," + NO_ROWS[1:] if rows else content


@dataclass(frozen=True)
class _LoggedRun:
    """The lines of one run in the log, those of rows with the rows that are packed in them."""

    header: RunLine
    lines: list[tuple[RowsLine, np.ndarray, np.ndarray]] = field(default_factory=list)

    def take(self, line: RowsLine) -> None:
        """Take in a line of rows. Raises ValueError for packed rows that are none."""
        packed = np.frombuffer(line.occurrences, dtype=OCCURRENCE), np.frombuffer(line.metrics, dtype=METRIC)
        self.lines.append((line, *packed))

    def empty_times(self, remark: Remark) -> StageTimes:
        """Return the times of the run without any rows."""
        return StageTimes(
            **msgspec.structs.asdict(self.header),
            status="running",
            error=None,
            written_unix_s=None,
            elapsed_s=0.0,
            last_step=None,
            num_occurrences=0,
            num_metric_rows=0,
            summary=Summaries(),
            open=(),
            remarks=(remark,),
            names=(),
            metric_names=(),
            occurrences=np.zeros(0, OCCURRENCE),
            metric_rows=np.zeros(0, METRIC),
        )

    def added_to(self, times: StageTimes) -> StageTimes:
        """Return the document's times with the rows that only the log has."""
        if not self.lines:
            return times
        logged: list[Name] = []
        logged_metrics: list[str] = []
        for line, _, _ in self.lines:
            logged[line.first_name :] = [Name(*name) for name in line.names]
            logged_metrics[line.first_metric_name :] = line.metric_names
        names = max(times.names, tuple(logged), key=len)
        metric_names = max(times.metric_names, tuple(logged_metrics), key=len)
        rows = _united(times.occurrences, [packed for _, packed, _ in self.lines], len(names), "stage")
        metric_rows = _united(times.metric_rows, [packed for *_, packed in self.lines], len(metric_names), "metric")
        later = rows[rows["index"] >= times.num_occurrences]
        later_metrics = metric_rows[metric_rows["index"] >= times.num_metric_rows]
        if not len(later) and not len(later_metrics):
            return msgspec.structs.replace(times, occurrences=rows, metric_rows=metric_rows)
        remarks, every = times.remarks, max(line.every for line, _, _ in self.lines)
        if every > 1:
            reason = f"since the last document only every {every}th step is in the log, and in the summary"
            remarks += (Remark("summary", reason),)
        steps = later[later["stage"] == 0]["step"]
        end_ns = (later["start_ns"] + later["host_ns"]).max() if len(later) else 0
        return msgspec.structs.replace(
            times,
            elapsed_s=max(times.elapsed_s, float(end_ns) / 1e9),
            last_step=int(steps[-1]) if len(steps) else times.last_step,
            summary=Summaries(
                _stages(times, names, rows, later), _metrics(times, metric_names, metric_rows, later_metrics)
            ),
            open=(),
            remarks=remarks,
            names=names,
            metric_names=metric_names,
            occurrences=rows,
            metric_rows=metric_rows,
            num_occurrences=max(times.num_occurrences, self.lines[-1][0].num_occurrences),
            num_metric_rows=max(times.num_metric_rows, self.lines[-1][0].num_metric_rows),
        )


def _last_run(lines: Iterable[Any]) -> _LoggedRun | None:
    """Return the last run of a log; a damaged line costs only itself."""
    run: _LoggedRun | None = None
    for document in lines:
        try:
            line = msgspec.convert(document, RunLine | RowsLine)
            if isinstance(line, RowsLine):
                if run:
                    run.take(line)
            elif line.schema_version == SCHEMA_VERSION and (
                not run or line.started_unix_s != run.header.started_unix_s
            ):
                run = _LoggedRun(line)
        except ValueError:
            continue
    return run


def _united(rows: np.ndarray, more: list[np.ndarray], num_names: int, name: str) -> np.ndarray:
    """Return all rows once, in the order of their index, without those of a name that is not known."""
    together = np.concatenate([rows, *more])
    _, first = np.unique(together["index"], return_index=True)
    together = together[first]
    return together[(together[name] >= 0) & (together[name] < num_names)]


def _stages(
    times: StageTimes, names: tuple[Name, ...], rows: np.ndarray, later: np.ndarray
) -> tuple[StageSummary, ...]:
    """Return the summaries with the later rows in them."""
    known = {(stage.name, stage.kind): stage for stage in times.stages}
    stages = []
    for index, name in enumerate(names):
        new = later[later["stage"] == index]
        earlier = known.get((name.name, name.kind))
        if len(new) or earlier:
            earlier = earlier or StageSummary(name.name, name.kind, NOTHING, 0.0, None, None, None, 0)
            stages.append(_with_rows(earlier, rows[rows["stage"] == index], new))
    whole = next((stage.host_s.total for stage in stages if stage.kind == "step"), 0.0)
    shares = [share_of(stage.kind, stage.self_total_s, whole) for stage in stages]
    return tuple(msgspec.structs.replace(stage, share=share) for stage, share in zip(stages, shares, strict=True))


def _with_rows(earlier: StageSummary, rows: np.ndarray, new: np.ndarray) -> StageSummary:
    usual, usual_new = rows[(rows["flags"] & UNUSUAL) == 0], new[(new["flags"] & UNUSUAL) == 0]

    def joined_column(column: str, before: Statistics | None) -> Statistics:
        values, later = (part[column][part[column] >= 0] / NS_PER_S for part in (usual, usual_new))
        return joined(before or NOTHING, later, values)

    device = joined_column("device_ns", earlier.device_s)
    gap = joined_column("gap_ns", earlier.starvation_s)
    own = usual_new["self_ns"][usual_new["self_ns"] > 0].sum() / NS_PER_S
    return msgspec.structs.replace(
        earlier,
        host_s=joined_column("host_ns", earlier.host_s),
        self_total_s=earlier.self_total_s + float(own),
        device_s=device if device.n else None,
        starvation_s=gap if gap.n else None,
        unusual=earlier.unusual + len(new) - len(usual_new),
    )


def _metrics(
    times: StageTimes, names: tuple[str, ...], rows: np.ndarray, later: np.ndarray
) -> tuple[MetricSummary, ...]:
    known = {metric.name: metric for metric in times.metrics}
    metrics = []
    for index, name in enumerate(names):
        values, new = (part[part["metric"] == index]["value"] for part in (rows, later))
        earlier = known.get(name, MetricSummary(name, NOTHING, 0))
        statistics = joined(earlier.values, new[np.isfinite(new)], values[np.isfinite(values)])
        metrics.append(MetricSummary(name, statistics, earlier.non_finite + int((~np.isfinite(new)).sum())))
    return tuple(metrics)


def others_of(folder: Path, times: StageTimes) -> Iterator[StageTimes]:
    """Yield the times of the other processes of a run as far as they are written; those elsewhere may not be here."""
    for rank in range(times.world_size):
        if rank == times.rank:
            continue
        try:
            other = read_stage_times(folder, rank)
        except (OSError, ValueError):
            continue
        if is_of_one_run(other, times):
            yield other
