"""The tabs of the page: each shows one side of the chosen run."""

import contextlib
import csv
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import altair
import numpy as np
import pandas
import streamlit as st

from boundby.training import (
    MANIFEST,
    OP_STATS,
    SUMMARY,
    StageTimes,
    StepTable,
    file_name,
    judge_training,
    trace_verdict_of,
)
from utils.training.monitor import alerts, contrast, text
from utils.training.monitor.runs import LARGEST_DOCUMENT, LARGEST_DOWNLOAD, Processes, RunEntry, RunFile, RunFolder

DECIMALS = {"(ms)": "%.2f", "(%)": "%.1f", "(s)": "%.2f", "_ms": "%.3f"}  # by what the name of a column ends with
MARKS = {"finished": "green", "failed": "red", "running": "blue", "silent": "orange", "unreadable": "gray"}
EXPLAINED = {
    "failed": "The run ended with an error.",
    "silent": "The run never said that it ended, and writes nothing any more: it was killed, or its machine is gone.",
}
MOST_OPERATORS = 25
BINS = 40
WHOLE = "whole step"
OPERATORS = ("name", "calls", "cpu_self_ms", "cpu_total_ms", "device_self_ms", "flops", "input_shapes")
HOW = """profiler.metrics({"process_memory_bytes": psutil.Process().memory_info().rss})"""
PREVIEW_BYTES = 20_000
HEIGHT = 320  # of a chart, in pixels
CARD = 230  # holds "59.9 min ago" whole
AT_HAND_BYTES = 4 * 2**20  # of a file that is offered as it is; a larger one is read when it is asked for
READABLE = (".json", ".jsonl", ".csv", ".txt", ".log", ".yaml", ".md")
LONGEST_SENTENCE = 400  # characters: names of stages are the program's


@dataclass(frozen=True)
class Shown:
    """The chosen run."""

    entry: RunEntry
    folder: RunFolder
    processes: Processes
    now: float  # seconds of the Unix clock
    stall_s: float

    @property
    def ranks(self) -> tuple[StageTimes, ...]:
        """Return the stage times of the processes."""
        return self.processes.ranks

    @property
    def writers_now(self) -> float:
        """Return the time by the clock of the machine that writes the run: the files bear that of this one."""
        written = [times.written_unix_s for times in self.ranks if times.written_unix_s is not None]
        return self.now - (self.entry.changed_unix_s - max(written)) if written else self.now


def table(rows: Sequence[Mapping[str, float | str | None]], height: int | Literal["auto"] = "auto") -> None:
    """Show rows as a table, without the columns in which nothing is known."""
    known = [column for column in (rows[0] if rows else ()) if any(row[column] not in (None, "") for row in rows)]
    formats = {
        column: st.column_config.NumberColumn(format=decimals)
        for column in known
        for ending, decimals in DECIMALS.items()
        if column.endswith(ending) and not any(isinstance(row[column], str) for row in rows)
    }
    st.dataframe(rows, hide_index=True, column_order=known, column_config=formats, height=height)


def chart(rows: pandas.DataFrame, *, y: str, alt: str, stacked: Sequence[str] | None = None) -> None:
    """Draw rows of `contrast.points` over the steps: a line for each series, or areas on one another in an order."""
    names = list(rows["series"].unique()) if stacked is None else list(stacked)
    legend = altair.Legend(title=None, orient="bottom", columns=1, labelLimit=300) if len(names) > 1 else None
    drawn = altair.Chart(rows).encode(
        x=altair.X("x:Q", title="step", scale=altair.Scale(zero=False, nice=False)),
        y=altair.Y("y:Q", title=y, scale=altair.Scale(zero=stacked is not None)),
        color=altair.Color("series:N", legend=legend, sort=names, scale=altair.Scale(domain=names)),
        tooltip=["series:N", "x:Q", "y:Q"],
    )
    drawn = drawn.mark_line() if stacked is None else drawn.mark_area(interpolate="step-after", opacity=0.85)
    st.altair_chart(drawn.properties(height=HEIGHT), alt=alt)


def chosen(label: str, names: Mapping[str, str], key: str) -> str:
    """Return which of these a person chooses, told apart by their names; one where the choice has gone meanwhile."""
    shown = dict(zip(names, text.distinct([*names.values()]), strict=True))
    path = st.selectbox(label, list(names), format_func=lambda path: shown.get(path, path), key=key)
    return path if path in names else next(iter(names))


def faults(shown: Shown) -> None:
    """Say which processes of the run could not be read, and why."""
    processes = shown.processes
    if not processes.ranks:
        st.warning("The stage times of this run cannot be read. It may have been cut off, or is of another version.")
        st.text("\n".join(processes.faults) or shown.entry.fault or "no reason is known")
    elif processes.faults:
        st.warning("Some stage times could not be read. What is shown comes from the others.")
        st.text("\n".join(processes.faults))
    if processes.left_out:
        st.info(f"{processes.left_out} more processes are left out.")


def chosen_rank(shown: Shown, tab: str) -> StageTimes | None:
    """Return the process to show, which the person chooses where there are several; None, and why, without any."""
    faults(shown)
    if len(shown.ranks) < 2:
        return shown.ranks[0] if shown.ranks else None
    ranks = {times.rank: times for times in shown.ranks}
    rank = st.selectbox("Process", list(ranks), format_func=lambda rank: f"rank {rank}", key=f"rank-{tab}")
    return ranks.get(rank, shown.ranks[0])


def overview(shown: Shown) -> None:
    """Show state, alerts, verdict, the course of steps and metrics, and what was given up."""
    faults(shown)
    for part in (_verdict, _state, _alerts, _steps, _metrics, _given_up) if shown.ranks else ():
        with st.container():  # so that a part that grows does not move the others
            part(shown)


def _state(shown: Shown) -> None:
    times, state = shown.ranks[0], shown.entry.state(shown.now)
    st.badge(state, color=MARKS.get(state, "gray"))
    if state in EXPLAINED:
        st.warning(EXPLAINED[state])
    for failed in shown.ranks:
        if failed.error:
            st.text(f"rank {failed.rank}: {failed.error}")
    step = times.step.host_s if times.step else None
    facts = {
        "Last step": text.count(times.last_step) if times.last_step is not None else "none yet",
        "Step, median": text.seconds(step.median if step else None),
        **({"Step, 95th percentile": text.seconds(step.p95)} if step and step.p95 is not None else {}),
        "Duration": text.seconds(times.elapsed_s),
        "Written": text.ago(shown.entry.changed_unix_s, shown.now),
        "Processes": f"{len(shown.ranks)} of {times.world_size}",
    }
    with st.container(horizontal=True):
        for name, value in facts.items():
            st.metric(name, value, border=True, width=CARD)


def _alerts(shown: Shown) -> None:
    findings = alerts.watch(shown.ranks, shown.writers_now, shown.stall_s)
    for finding in findings:
        for alert in finding.alerts:
            with st.container(border=True):
                st.error(finding.name, icon=":material/warning:")
                st.text(alert)
    raised = sum(bool(finding.alerts) for finding in findings)
    unwatched = sum(finding.unwatched is not None for finding in findings)
    quiet = len(findings) - raised - unwatched
    with st.expander(f"Alerts: {raised} raised, {quiet} quiet, {unwatched} not watched. The rules"):
        for finding in findings:
            unknown = f"not watched: {finding.unwatched}" if finding.unwatched else "quiet"
            st.text(f"{finding.name} ({'raised' if finding.alerts else unknown})\n{finding.rule}")


def _verdict(shown: Shown) -> None:
    st.subheader("What limits it", anchor=False)
    times = shown.ranks[0]
    summary, _ = shown.folder.document(file_name(SUMMARY, times.rank, times.world_size))
    verdict = judge_training(shown.ranks, trace_verdict_of(summary))
    with st.container(border=True, gap="xsmall"):
        for head, sentences in verdict.parts.items():
            if sentences:
                st.caption(f"{head}:")
                st.text("\n".join(text.plain(sentence, LONGEST_SENTENCE) for sentence in sentences))


def _steps(shown: Shown) -> None:
    st.subheader("Time of the steps", anchor=False)
    lines = {
        f"rank {rank}": contrast.thinned(steps.numbers, steps.host_s.sum(axis=1))
        for rank, steps in shown.processes.tables.items()
        if len(steps.numbers)
    }
    if not lines:
        st.info("No step has ended yet.")
        return
    chart(contrast.points(lines, unit=1e-3), y="ms", alt="time of each step")
    if len(lines) > 1:
        table(
            [
                {
                    "rank": times.rank,
                    "state": times.status,
                    "last step": times.last_step,
                    "median step (ms)": None if times.step is None else _ms(times.step.host_s.median or 0.0),
                }
                for times in shown.ranks
            ]
        )


def _metrics(shown: Shown) -> None:
    names = [name for name in shown.ranks[0].metric_names if not alerts.is_memory(name)]
    if not names:
        return
    st.subheader("Metrics of the program", anchor=False)
    name = st.selectbox("Metric", names, index=names.index("loss") if "loss" in names else 0, key="metric")
    lines = {f"rank {times.rank}": contrast.thinned(*times.values_of(name)) for times in shown.ranks}
    chart(contrast.points(lines), y="value", alt="values of the metric")


def _given_up(shown: Shown) -> None:
    remarks = [
        f"rank {times.rank}: {remark.what}: {remark.reason}{f' ({remark.count} times)' if remark.count > 1 else ''}"
        for times in shown.ranks
        for remark in times.remarks
    ]
    if remarks:
        st.subheader("What the profiler gave up", anchor=False)
        st.text("\n".join(remarks))  # a table would cut it


def timing(shown: Shown) -> None:
    """Show the stages of one process, how its steps spread, and the operators of its trace."""
    times = chosen_rank(shown, "timing")
    if times is None:
        return
    steps = shown.processes.tables[times.rank]
    st.subheader("Stages of the steps", anchor=False)
    _course(steps)
    _stages(times)
    _spread(steps)
    _operators(shown, times)


def _course(steps: StepTable) -> None:
    if not len(steps.numbers):
        st.info("No step has ended yet.")
        return
    seconds = contrast.stage_seconds(steps)
    groups = {name: contrast.grouped(steps.numbers, values) for name, values in seconds.items()}
    order = [name for name in (*steps.names, contrast.REST) if name in groups]
    rows = contrast.points(groups, unit=1e-3)
    chart(rows, y="ms of a step", alt="time of each stage over the steps", stacked=order)
    st.caption("Time of each stage without those inside it, on the host; undisturbed steps, averaged over neighbours.")


def _stages(times: StageTimes) -> None:
    rows = [
        {
            "stage": stage.name if stage.kind != "step" else WHOLE,
            "kind": stage.kind,
            "share (%)": None if stage.share is None else 100 * stage.share,
            "times": stage.host_s.n,
            "median (ms)": _ms(stage.host_s.median),
            "p95 (ms)": _ms(stage.host_s.p95),
            "longest (ms)": _ms(stage.host_s.maximum),
            "total (s)": stage.host_s.total,
            "device, median (ms)": _ms(stage.device_s.median) if stage.device_s else None,
            "disturbed": stage.unusual,
        }
        for stage in sorted(times.stages, key=lambda stage: -(stage.share or 0.0))
    ]
    table(rows)
    st.caption("The share of the whole step is what lies in no stage.")
    if times.device is None:
        st.caption("Times of the device are not known: the run gave none, as on a CPU.")


def _spread(steps: StepTable) -> None:
    seconds = steps.host_s.sum(axis=1)
    if len(seconds) < 2:
        return
    st.subheader("How the steps spread", anchor=False)
    most = float(np.quantile(seconds, 0.99))
    counts, edges = np.histogram(np.minimum(seconds, most) * 1e3, bins=min(BINS, len(seconds)))
    bars = pandas.DataFrame({"x": edges[:-1], "x2": edges[1:], "y": counts})
    axes = {"x": altair.X("x:Q", title="ms", bin="binned"), "x2": "x2:Q", "y": altair.Y("y:Q", title="steps")}
    drawn = altair.Chart(bars).mark_bar().encode(**axes, tooltip=["x:Q", "x2:Q", "y:Q"])
    st.altair_chart(drawn.properties(height=HEIGHT), alt="how many steps took how long")
    st.caption("The longest hundredth of the steps is in the last bar.")


def _operators(shown: Shown, times: StageTimes) -> None:
    st.subheader("Operators of the trace", anchor=False)
    name = file_name(OP_STATS, times.rank, times.world_size)
    try:
        content = shown.folder.read(name, LARGEST_DOCUMENT)
    except FileNotFoundError:
        st.info("There is no table of operators yet: it comes from the trace, a few steps into the run.")
        return
    except (OSError, ValueError) as error:
        _unreadable("The table of operators", error, shown.folder)
        return
    rows = list(csv.DictReader(io.StringIO(content.decode("utf-8", "replace"))))
    rows.sort(key=lambda row: -max(_number(row.get("cpu_self_ms")) or 0.0, _number(row.get("device_self_ms")) or 0.0))
    texts = ("name", "input_shapes")
    table(
        [
            {column: text.plain(row.get(column) or "") if column in texts else _number(row.get(column))
             for column in OPERATORS}
            for row in rows[:MOST_OPERATORS]
        ]
    )  # fmt: skip
    st.caption(f"The {min(MOST_OPERATORS, len(rows))} of {len(rows)} operators with most time of their own.")


def _number(cell: str | None) -> float | None:
    try:
        return float(cell or "")
    except ValueError:
        return None


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1e3


def memory(shown: Shown) -> None:
    """Show the memory metrics of one process over its steps, and the files with details."""
    times = chosen_rank(shown, "memory")
    if times is None:
        return
    lines = {name: times.values_of(name) for name in times.metric_names if alerts.is_memory(name)}
    lines = {name: line for name, line in lines.items() if len(line[1])}
    if lines:
        st.subheader("Memory over the steps", anchor=False)
        drawn = {name: contrast.thinned(*line) for name, line in lines.items()}
        chart(contrast.points(drawn, unit=2**20), y="MiB", alt="memory over the steps")
        rows = [
            {
                "metric": name,
                "now": text.size(values[-1]),
                "largest": text.size(values.max()),
                "growth": text.size(values[-1] - values[0]),
            }
            for name, (_, values) in lines.items()
        ]
        table(rows)
    else:
        st.info("This run records no memory metric. A loop can give them at each step:")
        st.code(HOW, language="python", wrap_lines=True)
    snapshots = [file for file in shown.folder.files() if "memory" in file.path or "snapshot" in file.path]
    if snapshots:
        st.subheader("Files on memory", anchor=False)
        table([{"file": file.path, "size": text.size(file.size_bytes)} for file in snapshots])
        st.caption(
            "They are under Artifacts. Snapshots open at pytorch.org/memory_viz, which keeps them on your machine."
        )


def artifacts(shown: Shown) -> None:
    """Show the files, offer them, and say what the manifest lists as missing."""
    files = shown.folder.files()
    rows = [
        {
            "file": text.plain(file.path),
            "size": text.size(file.size_bytes),
            "written": text.ago(file.changed_unix_s, shown.now),
        }
        for file in files
    ]
    table(rows)
    if files:
        _one(shown, {file.path: file for file in files})
    _missing(shown, [file.path for file in files if file.path.endswith(MANIFEST) and "/" not in file.path])


def _one(shown: Shown, files: Mapping[str, RunFile]) -> None:
    file = files[chosen("File", {path: text.plain(path) for path in files}, "file")]
    if file.size_bytes > LARGEST_DOWNLOAD:
        st.info(f"Files above {text.size(LARGEST_DOWNLOAD)} do not go through the browser; copy this one:")
        st.code(str(shown.folder.folder.resolve() / file.path), language=None, wrap_lines=True)
        return
    st.download_button(
        "Download",
        data=_content(shown, file) if file.size_bytes <= AT_HAND_BYTES else lambda: _content(shown, file),
        file_name=text.plain(file.path.rpartition("/")[2]),
        mime="application/octet-stream",
        on_click="ignore",
        key="download",
    )
    if file.path.lower().endswith(READABLE):
        _preview(shown, file)


def _content(shown: Shown, file: RunFile) -> bytes:
    """Return the content of a file; the reason instead where it cannot be read any more."""
    try:
        return shown.folder.read(file.path)
    except (OSError, ValueError) as error:
        return f"This file could not be read: {text.reason(error, shown.folder.folder)}\n".encode()


def _preview(shown: Shown, file: RunFile) -> None:
    try:
        content = shown.folder.read(file.path, PREVIEW_BYTES, is_cut=True).decode("utf-8", "replace")
    except (OSError, ValueError) as error:
        _unreadable("This file", error, shown.folder)
        return
    is_cut = file.size_bytes > PREVIEW_BYTES
    if not is_cut:
        with contextlib.suppress(ValueError, RecursionError):
            content = json.dumps(json.loads(content), indent=2, ensure_ascii=False)
    with st.expander(f"The first {text.size(PREVIEW_BYTES)} of it" if is_cut else "Look at it"):
        st.code(content, language=None, height=400)


def _unreadable(what: str, error: Exception, folder: RunFolder) -> None:
    st.warning(f"{what} cannot be read.")
    st.text(text.reason(error, folder.folder))


def _missing(shown: Shown, manifests: Sequence[str]) -> None:
    """Say what the manifests list as less than was asked for."""
    lines = []
    for name in manifests:
        manifest, fault = shown.folder.document(name)
        lines += [fault] if fault else []
        reason = manifest.get("trace_reason")
        remarks: list[object] = [{"what": "trace", "reason": reason}] if reason else []
        for key in ("unavailable", "downgrades"):
            listed = manifest.get(key)
            remarks += listed if isinstance(listed, list) else []
        lines += [_remark(name, remark) for remark in remarks]
    if lines:
        st.subheader("What is missing or less than asked for, and why", anchor=False)
        st.text("\n".join(lines))
    elif not manifests:
        st.info("There is no manifest yet; it comes with the first trace, or at the end of the run.")


def _remark(name: str, remark: object) -> str:
    given = remark if isinstance(remark, dict) else {"reason": remark}
    what, why = text.plain(str(given.get("what", ""))), text.plain(str(given.get("reason")), text.REASON_CHARACTERS)
    return f"{name}: {what}: {why}"
