"""The page itself, which Streamlit runs from top to bottom for whoever opens it: `app.py RUNS STALL_SECONDS`."""

import sys
import time
from collections.abc import Callable
from pathlib import Path

import streamlit as st

from boundby.cli import typed
from utils.training.monitor import tabs, text
from utils.training.monitor.runs import Index, Reader, RunEntry, RunFolder
from utils.training.monitor.tabs import Shown

TITLE = "Boundby monitor"
EVERY_S = 2
LIST_PIXELS = 400
TABS: dict[str, Callable[[Shown], None]] = {
    "Overview": tabs.overview,
    "Timing": tabs.timing,
    "Memory": tabs.memory,
    "Artifacts": tabs.artifacts,
}


def main(root: Path, stall_s: float) -> None:
    """Draw the page, and again every `EVERY_S` seconds what may have changed."""
    st.set_page_config(page_title=TITLE, layout="wide")
    with st.container(horizontal=True, vertical_alignment="center"):
        st.subheader(TITLE, anchor=False, width="content")
        is_live = st.toggle("Live", value=True, help=f"Read the runs again every {EVERY_S} seconds")
    st.fragment(_page, run_every=EVERY_S if is_live else None)(root, stall_s)


def _page(root: Path, stall_s: float) -> None:
    now = time.time()
    runs = _index(str(root)).runs()
    if not runs:
        _explain_empty(root)
        return
    entries = {entry.path: entry for entry in runs}  # the newest at first
    entry = entries[tabs.chosen("Run", {path: run.name for path, run in entries.items()}, "run")]
    _list(runs, now)
    shown_tabs = st.tabs(list(TABS), key="tab", on_change="rerun")
    for tab, (name, show) in zip(shown_tabs, TABS.items(), strict=True):
        if tab.open:
            with tab:
                _guarded(name, lambda show=show: show(_shown(root, entry, now, stall_s)))


def _shown(root: Path, entry: RunEntry, now: float, stall_s: float) -> Shown:
    folder = RunFolder(root, entry.path)
    return Shown(entry, folder, _reader().processes(folder), now, stall_s)


def _list(runs: list[RunEntry], now: float) -> None:
    states = [run.state(now) for run in runs]
    running = states.count("running")
    with st.expander(f"{len(runs)} run{'s' * (len(runs) != 1)}, {running} running", expanded=False):
        rows = [
            {
                "run": run.name,
                "state": state,
                "last step, at least": run.last_step,
                "median step (ms)": None if run.step_s is None else run.step_s * 1e3,
                "processes": run.ranks or None,
                "written": text.ago(run.changed_unix_s, now),
                "reason": run.fault or "",
            }
            for run, state in zip(runs, states, strict=True)
        ]
        tabs.table(rows, height=min(LIST_PIXELS, 38 + 35 * len(rows)))


def _explain_empty(root: Path) -> None:
    st.info("There is no run in this folder yet. This page shows one as soon as it begins to write.")
    st.text(f"Folder: {root}")
    st.text("A run is a folder with stage_times.json. To make one:")
    flags = ("--profiler", "on", "--epochs", "2", "--steps-per-epoch", "50", "--output")
    st.code(typed("train", *flags, str(root / "first")), language=None, wrap_lines=True)


def _guarded(name: str, show: Callable[[], None]) -> None:
    """Show a part of the page; where that fails, say so in one line: the other parts still serve."""
    try:
        show()
    except Exception as error:
        st.error("This part of the run cannot be shown.")
        st.text(f"{name}: {type(error).__name__}: {text.reason(error, Path())}")


@st.cache_resource(show_spinner=False)
def _index(root: str) -> Index:
    return Index(Path(root))


@st.cache_resource(show_spinner=False)
def _reader() -> Reader:
    return Reader()


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]))
