"""What the run is, what limits it, and what asks for attention."""

import streamlit as st

from boundby.training.judgement import judge_training
from boundby.training.records import StageTimes
from boundby.training.results import SUMMARY, trace_verdict_of
from boundby.training.store import file_name
from utils.monitor import alerts, charts, series, text
from utils.monitor.shown import Shown
from utils.monitor.tabs import parts

MARKS = {"finished": "green", "failed": "red", "running": "blue", "silent": "orange", "unreadable": "gray"}
EXPLAINED = {
    "failed": "The run ended with an error.",
    "silent": "The run never said that it ended, and writes nothing any more: it was killed, or its machine is gone.",
}


def show(shown: Shown) -> None:
    """Show state, alerts, verdict, the course of steps and metrics, and what was given up."""
    if not shown.ranks:
        parts.nothing(shown.entry, shown.processes)
        return
    parts.faults(shown.processes)
    for part in (_state, _alerts, _verdict, _steps, _metrics, _given_up):
        with st.container():  # so that one which grows does not push the others out of their places
            part(shown)


def _state(shown: Shown) -> None:
    times = shown.ranks[0]
    state = shown.entry.state(shown.now)
    st.badge(state, color=MARKS.get(state, "gray"))
    if state in EXPLAINED:
        st.warning(EXPLAINED[state])
    for each in shown.ranks:
        if each.error:
            st.text(f"rank {each.rank}: {each.error}")
    step = times.step.host_s if times.step else None
    p95 = text.seconds(step.p95) if step and step.p95 is not None else "too few steps"
    facts = {
        "Last step": text.count(times.last_step) if times.last_step is not None else "none yet",
        "Step, median": text.seconds(step.median if step else None),
        "Step, 95th percentile": p95,
        "Duration": text.seconds(times.elapsed_s),
        "Written": text.ago(shown.entry.changed_unix_s, shown.now),
        "Processes": f"{len(shown.ranks)} of {times.world_size}",
    }
    with st.container(horizontal=True):
        for name, value in facts.items():
            st.metric(name, value, border=True, width=170)


def _alerts(shown: Shown) -> None:
    findings = alerts.watch(shown.ranks, shown.now, shown.stall_s)
    for finding in findings:
        for alert in finding.alerts:
            with st.container(border=True):
                st.error(finding.name, icon=":material/warning:")
                st.text(alert)
    raised = sum(bool(each.alerts) for each in findings)
    unwatched = sum(each.unwatched is not None for each in findings)
    quiet = len(findings) - raised - unwatched
    with st.expander(f"Alerts: {raised} raised, {quiet} quiet, {unwatched} not watched. The rules"):
        for each in findings:
            said = "raised" if each.alerts else f"not watched: {each.unwatched}" if each.unwatched else "quiet"
            st.text(f"{each.name} ({said})\n{each.rule}")


def _verdict(shown: Shown) -> None:
    st.subheader("What limits it", anchor=False)
    times = shown.ranks[0]
    summary, _ = shown.folder.document(file_name(SUMMARY, times.rank, times.world_size))
    found = judge_training(shown.ranks, trace_verdict_of(summary))
    st.code(str(found), language=None, wrap_lines=True)


def _steps(shown: Shown) -> None:
    st.subheader("Time of the steps", anchor=False)
    lines = {
        f"rank {rank}": series.thinned(table.numbers, table.host_s.sum(axis=1))
        for rank, table in shown.processes.tables.items()
        if len(table.numbers)
    }
    if not lines:
        st.info("No step has ended yet.")
        return
    charts.lines(series.points(lines, unit=1e-3), y="ms", alt="time of each step")
    if len(lines) > 1:
        _ranks(shown.ranks)


def _ranks(ranks: tuple[StageTimes, ...]) -> None:
    rows = [
        {
            "rank": each.rank,
            "state": each.status,
            "last step": each.last_step,
            "median step (ms)": None if each.step is None else (each.step.host_s.median or 0.0) * 1e3,
        }
        for each in ranks
    ]
    parts.table(rows)


def _metrics(shown: Shown) -> None:
    names = [name for name in shown.ranks[0].metric_names if not alerts.is_memory(name)]
    if not names:
        return
    st.subheader("Metrics of the program", anchor=False)
    name = st.selectbox("Metric", names, index=names.index("loss") if "loss" in names else 0, key="metric")
    lines = {f"rank {each.rank}": series.thinned(*series.metric(each, name)) for each in shown.ranks}
    charts.lines(series.points(lines), y="value", alt="values of the metric")


def _given_up(shown: Shown) -> None:
    rows = [
        {"rank": times.rank, "what": each.what, "why": each.reason, "times": each.count}
        for times in shown.ranks
        for each in times.remarks
    ]
    if rows:
        st.subheader("What the profiler gave up", anchor=False)
        parts.table(rows)
