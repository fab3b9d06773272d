"""How much memory the run used, as far as it says."""

import streamlit as st

from boundby.training.records import StageTimes
from utils.monitor import alerts, charts, series, text
from utils.monitor.shown import Shown
from utils.monitor.tabs import parts

HOW = """profiler.metrics({
    "process_memory_bytes": psutil.Process().memory_info().rss,
    "gpu_memory_allocated_bytes": torch.cuda.memory_allocated(),
})"""


def show(shown: Shown) -> None:
    """Show the memory metrics of one process over its steps, and the files with details."""
    times = parts.chosen_rank(shown, "memory")
    if times is None:
        return
    names = [name for name in times.metric_names if alerts.is_memory(name)]
    if names:
        _course(times, names)
    else:
        st.info("This run records no memory metric. A loop can give them at each step:")
        st.code(HOW, language="python")
    _files(shown)


def _course(times: StageTimes, names: list[str]) -> None:
    lines = {name: series.metric(times, name) for name in names}
    lines = {name: line for name, line in lines.items() if len(line[1])}
    st.subheader("Memory over the steps", anchor=False)
    drawn = {name: series.thinned(*line) for name, line in lines.items()}
    charts.lines(series.points(drawn, unit=2**20), y="MiB", alt="memory over the steps")
    rows = [
        {
            "metric": name,
            "now": text.size(values[-1]),
            "largest": text.size(values.max()),
            "since the first step": text.size(values[-1] - values[0]),
            "values": len(values),
        }
        for name, (_, values) in lines.items()
    ]
    parts.table(rows)


def _files(shown: Shown) -> None:
    found = [each for each in shown.folder.files() if "memory" in each.path or "snapshot" in each.path]
    if found:
        st.subheader("Files on memory", anchor=False)
        parts.table([{"file": each.path, "size": text.size(each.size_bytes)} for each in found])
        st.caption(
            "They are under Artifacts. Snapshots open at pytorch.org/memory_viz, which keeps them on your machine."
        )
