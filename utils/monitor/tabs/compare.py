"""Two runs beside each other."""

import streamlit as st

from boundby.training.records import StageTimes
from utils.monitor import contrast, text
from utils.monitor.contrast import StageRow
from utils.monitor.index import RunEntry
from utils.monitor.reading import Reader
from utils.monitor.run import RunFolder
from utils.monitor.shown import Shown
from utils.monitor.tabs import parts

CONFIG = "config.json"
SAID = {
    "faster": "faster than those of A",
    "slower": "slower than those of A",
    "same": "as fast as those of A",
    "ambiguous": "not to be told apart from those of A",
}


def show(shown: Shown) -> None:
    """Show whether B is faster or slower than A, by stage, and in which settings they differ."""
    others = [each for each in shown.runs if each.path != shown.entry.path]
    if not others:
        st.info("There is only one run; a second one can be compared with it.")
        return
    names = dict(zip((each.path for each in others), text.distinct([each.name for each in others]), strict=True))
    first = next((place for place, each in enumerate(others) if each.fault is None), 0)
    how = {"format_func": lambda each: names.get(each, each), "key": "other"}
    path = st.selectbox("A: compare with", list(names), index=first, **how)
    other = next((each for each in others if each.path == path), others[0])
    folder = RunFolder(shown.root, other.path)
    a, b = _process(other, shown.reader, folder), shown.ranks[0] if shown.ranks else None
    st.text(f"B is {shown.entry.name}")
    if b is None:
        parts.nothing(shown.entry, shown.processes)
    if a is not None and b is not None:
        _judged(a, b)
    _settings(folder, shown.folder)


def _process(entry: RunEntry, reader: Reader, folder: RunFolder) -> StageTimes | None:
    """Return the first process of a run; None, and why, where none can be read."""
    processes = reader.processes(folder)
    if not processes.ranks:
        parts.nothing(entry, processes)
        return None
    return processes.ranks[0]


def _judged(a: StageTimes, b: StageTimes) -> None:
    try:
        found = contrast.contrast(a, b)
    except ValueError as error:
        st.warning("The steps cannot be compared.")
        st.text(str(error))
        return
    whole = found.rows[0].comparison
    if whole is not None:
        st.subheader(f"The steps of B are {SAID[whole.verdict]}", anchor=False)
        st.text(f"B takes {text.ratio(whole)} times as long as A")
    parts.table([_row(each) for each in found.rows])
    st.caption(
        "Ratios are B over A with their 95 % intervals, from windows of consecutive undisturbed steps on the host:"
        f" {found.steps[0]:,} of A, {found.steps[1]:,} of B. Faster and slower need at least"
        f" {100 * found.minimum_effect:.0f} %;"
        " p-values are adjusted for the number of rows. Whether both did the same work is for you to say: see below."
    )


def _row(row: StageRow) -> dict[str, str | float | None]:
    return {
        "stage": text.plain(row.name),
        "verdict": row.comparison.verdict if row.comparison else "-",
        "B / A": text.ratio(row.comparison),
        "A (ms)": row.a.step_s * 1e3 if row.a else None,
        "B (ms)": row.b.step_s * 1e3 if row.b else None,
        "A, share (%)": text.share(row.a),
        "B, share (%)": text.share(row.b),
        "why open": row.reason or "",
    }


def _settings(a: RunFolder, b: RunFolder) -> None:
    st.subheader("Settings", anchor=False)
    (first, fault_a), (second, fault_b) = a.document(CONFIG), b.document(CONFIG)
    if fault_a or fault_b:
        st.info("The settings cannot be compared.")
        st.text("\n".join(f"{name}: {fault}" for name, fault in (("A", fault_a), ("B", fault_b)) if fault))
        return
    rows = contrast.differences(first, second)
    if not rows:
        st.text("Both runs have the same settings.")
        return
    columns = ("setting", "A", "B")
    parts.table([dict(zip(columns, map(text.plain, each), strict=True)) for each in rows])
