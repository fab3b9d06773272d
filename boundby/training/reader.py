"""Read the stage times of a run that has ended, runs still, or was killed."""

import base64
import binascii
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from boundby import files
from boundby.training.book import NS_PER_S, share_of
from boundby.training.document import SCHEMA_VERSION, name_of, times_from
from boundby.training.records import MetricSummary, Name, StageSummary, StageTimes
from boundby.training.remarks import Remark
from boundby.training.ring import METRIC, OCCURRENCE, UNUSUAL
from boundby.training.tally import Statistics, joined, statistics_of
from boundby.training.writer import DOCUMENT, LOG, file_name

LARGEST_BYTES = 512 * 2**20  # of a file: eight times the largest log
HEAD_BYTES = 2**18  # the head of a document holds some KB
ROWS = b',"occurrences":'
NO_ROWS = b',"occurrences":null,"metrics":null}'
NOTHING = Statistics(0, 0.0)


def read_stage_times(folder: str | Path, rank: int | None = None, *, with_rows: bool = True) -> StageTimes:
    """Return the stage times of one process: its last document, with what its log holds beyond that.

    `rank` is one of `boundby.training.ranks_in`. Of several runs in one folder it is the last. Without `with_rows` the
    document alone is read, if it can be, and no rows: its summary is some seconds old while the run goes on. Raises
    FileNotFoundError where there is neither file, and ValueError where neither can be read.
    """
    folder = Path(folder)
    place = (0, 1) if rank is None else (rank, rank + 2)
    document, log = (folder / file_name(name, *place) for name in (DOCUMENT, LOG))
    if not document.is_file() and not log.is_file():
        raise FileNotFoundError(f"{folder} holds neither {document.name} nor {log.name}")
    times, fault = _document(document, with_rows)
    if times is not None and not with_rows:
        return times
    run = _last_run(_lines(log))
    if times is None and run is None:
        raise ValueError(f"{document}: {fault}; {log.name} holds no run either")
    if times is None and run is not None:
        times = run.empty_times()
        remark = Remark("stage_times.json", f"{fault}; read from {log.name} alone")
        times = replace(times, remarks=(remark,))
    assert times is not None
    return run.added_to(times) if run and run.is_of(times) else times


def _lines(path: Path) -> list[Any]:
    try:
        return files.read_json_lines(path) if path.stat().st_size <= LARGEST_BYTES else []
    except OSError:
        return []


def _document(path: Path, with_rows: bool) -> tuple[StageTimes | None, str]:
    try:
        if path.stat().st_size > LARGEST_BYTES:
            return None, f"it has more than {LARGEST_BYTES >> 20} MiB"
        return times_from(path.read_bytes() if with_rows else _head(path), with_rows=with_rows), ""
    except FileNotFoundError:
        return None, "it is missing"
    except (OSError, ValueError) as error:
        return None, str(error)


def _head(path: Path) -> bytes:
    """Return the document without rows; they are not even read where they come after `HEAD_BYTES` at most."""
    with path.open("rb") as file:
        content = file.read(HEAD_BYTES)
        head, rows, _ = content.partition(ROWS)  # no string in JSON holds that: its quotes would be escaped
        return head + NO_ROWS if rows else content + file.read()


class _Run:
    """The lines of one run in the log."""

    def __init__(self, header: dict[str, Any]) -> None:
        self._header = header
        self._names: list[Name] = []
        self._metric_names: list[str] = []
        self._occurrences: list[np.ndarray] = []
        self._metrics: list[np.ndarray] = []
        self._counts = (0, 0)
        self._every = 1

    def take(self, line: dict[str, Any]) -> None:
        """Take in a line of rows; a damaged one is left out."""
        try:
            names = [name_of(*each) for each in line["names"]]
            metric_names = [str(each) for each in line["metric_names"]]
            occurrences, metrics = _decoded(line["occurrences"], OCCURRENCE), _decoded(line["metrics"], METRIC)
            counts = (int(line["num_occurrences"]), int(line["num_metric_rows"]))
            every = int(line["every"])
            self._names[int(line["first_name"]) :] = names
            self._metric_names[int(line["first_metric_name"]) :] = metric_names
        except (KeyError, TypeError, ValueError, binascii.Error):
            return
        self._occurrences.append(occurrences)
        self._metrics.append(metrics)
        self._counts = counts
        self._every = max(self._every, every)

    def is_of(self, times: StageTimes) -> bool:
        """Tell whether the document is of the same run."""
        return self._header.get("started_unix_s") == times.started_unix_s

    def empty_times(self) -> StageTimes:
        """Return the run without anything in it."""
        get = self._header.get
        return StageTimes(
            status="running",
            error=None,
            rank=get("rank", 0),
            world_size=get("world_size", 1),
            pid=get("pid"),
            started_unix_s=get("started_unix_s"),
            written_unix_s=None,
            elapsed_s=0.0,
            first_step=get("first_step", 0),
            last_step=None,
            device=get("device"),
            stages=(),
            metrics=(),
            open=(),
            remarks=(),
            names=(),
            metric_names=(),
            occurrences=np.zeros(0, OCCURRENCE),
            metric_rows=np.zeros(0, METRIC),
            num_occurrences=0,
            num_metric_rows=0,
        )

    def added_to(self, times: StageTimes) -> StageTimes:
        """Return the document's times with the rows that only the log has."""
        names = max(times.names, tuple(self._names), key=len)
        metric_names = max(times.metric_names, tuple(self._metric_names), key=len)
        rows = _united(times.occurrences, self._occurrences, len(names), "stage")
        metric_rows = _united(times.metric_rows, self._metrics, len(metric_names), "metric")
        later = rows[rows["index"] >= times.num_occurrences]
        later_metrics = metric_rows[metric_rows["index"] >= times.num_metric_rows]
        if not len(later) and not len(later_metrics):
            return replace(times, occurrences=rows, metric_rows=metric_rows)
        remarks = times.remarks
        if self._every > 1:
            reason = f"since the last document only every {self._every}th step is in the log, and in the summary"
            remarks += (Remark("summary", reason),)
        steps = later[later["stage"] == 0]["step"]
        end_ns = (later["start_ns"] + later["host_ns"]).max() if len(later) else 0
        return replace(
            times,
            elapsed_s=max(times.elapsed_s, float(end_ns) / 1e9),
            last_step=int(steps[-1]) if len(steps) else times.last_step,
            stages=_stages(times, names, rows, later),
            metrics=_metrics(times, metric_names, metric_rows, later_metrics),
            open=(),
            remarks=remarks,
            names=names,
            metric_names=metric_names,
            occurrences=rows,
            metric_rows=metric_rows,
            num_occurrences=max(times.num_occurrences, self._counts[0]),
            num_metric_rows=max(times.num_metric_rows, self._counts[1]),
        )


def _last_run(lines: Iterable[Any]) -> _Run | None:
    run: _Run | None = None
    began: float | None = None
    for line in lines:
        if not isinstance(line, dict):
            continue
        if line.get("kind") == "run" and line.get("schema_version") == SCHEMA_VERSION:
            if run is None or line.get("started_unix_s") != began:
                run, began = _Run(line), line.get("started_unix_s")
        elif line.get("kind") == "rows" and run is not None:
            run.take(line)
    return run


def _decoded(text: str, dtype: np.dtype) -> np.ndarray:
    return np.frombuffer(base64.b64decode(text, validate=True), dtype=dtype)


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
    known = {(each.name, each.kind): each for each in times.stages}
    found = []
    for place, name in enumerate(names):
        mine, new = rows[rows["stage"] == place], later[later["stage"] == place]
        earlier = known.get((name.name, name.kind))
        if len(new) or earlier:
            found.append(_joined_stage(name, earlier, mine, new))
    whole = next((each.host_s.total for each in found if each.kind == "step"), 0.0)
    return tuple(replace(each, share=share_of(each.kind, each.self_total_s, whole)) for each in found)


def _joined_stage(name: Name, earlier: StageSummary | None, rows: np.ndarray, new: np.ndarray) -> StageSummary:
    usual, usual_new = rows[(rows["flags"] & UNUSUAL) == 0], new[(new["flags"] & UNUSUAL) == 0]

    def joined_column(column: str, before: Statistics | None) -> Statistics:
        values, later = (each[column][each[column] >= 0] / NS_PER_S for each in (usual, usual_new))
        return joined(before or NOTHING, statistics_of(later), values)

    device = joined_column("device_ns", earlier.device_s if earlier else None)
    gap = joined_column("gap_ns", earlier.starvation_s if earlier else None)
    own = usual_new["self_ns"][usual_new["self_ns"] > 0].sum() / NS_PER_S
    return StageSummary(
        name=name.name,
        kind=name.kind,
        host_s=joined_column("host_ns", earlier.host_s if earlier else None),
        self_total_s=(earlier.self_total_s if earlier else 0.0) + float(own),
        share=None,
        device_s=device if device.n else None,
        starvation_s=gap if gap.n else None,
        unusual=(earlier.unusual if earlier else 0) + len(new) - len(usual_new),
    )


def _metrics(
    times: StageTimes, names: tuple[str, ...], rows: np.ndarray, later: np.ndarray
) -> tuple[MetricSummary, ...]:
    known = {each.name: each for each in times.metrics}
    found = []
    for place, name in enumerate(names):
        values, new = (each[each["metric"] == place]["value"] for each in (rows, later))
        earlier = known.get(name, MetricSummary(name, NOTHING, 0))
        statistics = joined(earlier.values, statistics_of(new[np.isfinite(new)]), values[np.isfinite(values)])
        found.append(MetricSummary(name, statistics, earlier.non_finite + int((~np.isfinite(new)).sum())))
    return tuple(found)
