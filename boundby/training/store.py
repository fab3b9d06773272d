"""Writes the stages of a run while it runs: rows to an append-only log, and everything to a document at intervals."""

import contextlib
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import monotonic

import msgspec
import numpy as np

from boundby import files
from boundby.capture import Remarks
from boundby.training.aggregate import Aggregator, Ring
from boundby.training.records import Kind, Processes, Rank, StageTimes, bytes_of

DOCUMENT, LOG = "stage_times.json", "stage_log.jsonl"
OF_LOG = "log of stage times"  # in remarks
COST = 200  # the time between two documents, at least, in times of what one takes: half a percent
LONGEST_WAIT_S = 10.0  # for a disk that hangs, at the end

Held = Callable[[], contextlib.AbstractContextManager[None]]  # holds the sums, with all that may be in them


@dataclass(frozen=True)
class Pace:
    """How often to write, and how much.

    The log holds the rows of every step until it has `log_share` bytes, then those of every second step until it has
    twice as many, then of every fourth, and so on, and all spans: a run of a million steps takes seven shares. At
    `log_shares` it ends. The document is always complete but for occurrences that have left the ring.
    """

    flush_s: float = 1.0
    document_s: float = 5.0  # at least
    log_share: int = 4 * 2**20
    log_shares: int = 16


class RunLine(msgspec.Struct, tag_field="kind", tag="run", frozen=True):
    """The line of the log that begins a run."""

    schema_version: int
    rank: Rank
    world_size: Processes
    pid: int | None
    started_unix_s: float | None
    first_step: int
    device: str | None
    host: str
    launcher: int | None


class RowsLine(msgspec.Struct, tag_field="kind", tag="rows", frozen=True):
    """A line of the log with what has been added up since the one before; a name comes once."""

    every: int  # of so many steps one is logged
    names: tuple[tuple[str, Kind], ...]
    first_name: int
    metric_names: tuple[str, ...]
    first_metric_name: int
    num_occurrences: int
    num_metric_rows: int
    occurrences: bytes  # packed rows: they cost the program a hundredth of what digits cost
    metrics: bytes


def file_name(name: str, rank: int, world_size: int) -> str:
    """Return the name of a file of one process: with its rank in front where there are several."""
    return f"rank{rank}_{name}" if world_size > 1 else name


class Log:
    """The append-only log of one run of one process."""

    def __init__(self, path: Path, aggregator: Aggregator, header: RunLine, pace: Pace) -> None:
        self.path = path
        self._every = 1
        self._sums = aggregator
        self._header = header
        self._pace = pace
        self._bytes = 0  # of this run
        self._next = self._next_metric = 0  # indices of rows
        self._named = self._metrics_named = 0

    @property
    def is_full(self) -> bool:
        """Tell whether nothing is logged any more."""
        return self._bytes >= self._pace.log_share * self._pace.log_shares

    def begin(self) -> None:
        """Write the line that begins a run."""
        self._append(self._header)

    def flush(self, held: Held) -> None:
        """Append what has been added up since the last time; after a failure that is tried again."""
        if not self.is_full and not self.path.exists():  # somebody removed it
            self._named = self._metrics_named = 0
            self.begin()
        with held():
            line = self._line()
        if self.is_full or (line.num_occurrences, line.num_metric_rows) == (self._next, self._next_metric):
            return
        self._append(line, len(line.occurrences) + len(line.metrics))
        self._next, self._next_metric = line.num_occurrences, line.num_metric_rows
        self._named += len(line.names)
        self._metrics_named += len(line.metric_names)

    def _line(self) -> RowsLine:
        """Return what has been added up since the last line."""
        names, metric_names = list(self._sums.names), list(self._sums.metric_names)
        stages, metrics = self._sums.stages, self._sums.metrics
        return RowsLine(
            every=self._every,
            names=tuple((name.name, name.kind) for name in names[self._named :]),
            first_name=self._named,
            metric_names=tuple(metric_names[self._metrics_named :]),
            first_metric_name=self._metrics_named,
            num_occurrences=stages.count,
            num_metric_rows=metrics.count,
            occurrences=self._packed(stages, self._next),
            metrics=self._packed(metrics, self._next_metric),
        )

    def _packed(self, ring: Ring, first: int) -> bytes:
        rows = ring.since(first)
        if self._every > 1:
            is_kept = rows["step"] % self._every == 0
            if ring is self._sums.stages:
                spans = [index for index, name in enumerate(list(self._sums.names)) if name.kind == "span"]
                is_kept |= np.isin(rows["stage"], spans)
            rows = rows[is_kept]
        return rows.tobytes()

    def _append(self, line: RunLine | RowsLine, packed: int = 0) -> None:
        files.append_json_line(self.path, msgspec.to_builtins(line))
        self._bytes += packed * 4 // 3 + 200  # as text
        while self._bytes >= self._pace.log_share * self._every.bit_length() and not self.is_full:
            self._every *= 2


class Writer:
    """Writes from a thread of its own, or when asked. Nothing here raises."""

    def __init__(
        self, times: Callable[[], StageTimes], held: Held, aggregator: Aggregator, remarks: Remarks, pace: Pace
    ) -> None:
        self._times = times
        self._held = held
        self._sums = aggregator
        self._remarks = remarks
        self._pace = pace
        self._log: Log | None = None
        self._document: Path | None = None
        self._document_due = 0.0
        self._pid = os.getpid()
        self._writing = threading.Lock()
        self._is_over = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, folder: Path, *, in_background: bool) -> None:
        """Write the first document, and go on from a thread of its own if `in_background`."""
        times = self._times()
        naming = (times.rank, times.world_size)
        header = RunLine(*(getattr(times, name) for name in RunLine.__struct_fields__))
        self._document = folder / file_name(DOCUMENT, *naming)
        self._log = Log(folder / file_name(LOG, *naming), self._sums, header, self._pace)
        with self._remarks.guard(OF_LOG):
            self._log.begin()
        with self._remarks.guard(DOCUMENT):
            self._write_document()
        if in_background:
            self._thread = threading.Thread(target=self._run, name="boundby-stage-writer", daemon=True)
            with self._remarks.guard(OF_LOG):
                self._thread.start()

    def flush(self) -> None:
        """Append to the log, and write the document if that is due."""
        with self._writing:
            with self._remarks.guard(OF_LOG):
                self._flush_log()
            if monotonic() >= self._document_due:
                with self._remarks.guard(DOCUMENT):
                    self._write_document()

    def stop(self) -> None:
        """Write what is left, and end the thread."""
        self._is_over.set()
        thread = self._thread
        if thread is not None and thread.is_alive():
            thread.join(LONGEST_WAIT_S)
            if thread.is_alive():
                self._remarks.add(DOCUMENT, f"the disk has not answered for {LONGEST_WAIT_S:.0f} s")
                return
        self._document_due = 0.0
        self.flush()

    def _run(self) -> None:
        while not self._is_over.wait(self._pace.flush_s):
            if os.getpid() != self._pid:
                return
            self.flush()

    def _flush_log(self) -> None:
        if self._log:
            self._log.flush(self._held)
            if self._log.is_full:
                self._remarks.add(OF_LOG, "it has reached its largest size; the document goes on")

    def _write_document(self) -> None:
        began = monotonic()
        if self._document:
            files.write_bytes(self._document, bytes_of(self._times()))
        now = monotonic()
        self._document_due = now + max(self._pace.document_s, COST * (now - began))
