"""Pieces that several tabs show."""

from typing import Any, Literal

import streamlit as st

from boundby.training.records import StageTimes
from utils.monitor.index import RunEntry
from utils.monitor.run import Processes
from utils.monitor.shown import Shown

DECIMALS = {"(ms)": "%.2f", "(%)": "%.1f", "(s)": "%.2f", "_ms": "%.3f"}  # by what the name of a column ends with


def table(rows: list[dict[str, Any]], height: int | Literal["auto"] = "auto") -> None:
    """Show rows as a table, without the columns in which nothing is known."""
    known = [column for column in (rows[0] if rows else ()) if any(row[column] not in (None, "") for row in rows)]
    formats = {
        column: st.column_config.NumberColumn(format=decimals)
        for column in known
        for ending, decimals in DECIMALS.items()
        if column.endswith(ending) and not any(isinstance(row[column], str) for row in rows)
    }
    st.dataframe(rows, hide_index=True, column_order=known, column_config=formats, height=height)


def faults(processes: Processes) -> None:
    """Say which processes of a run could not be read, and why."""
    if processes.faults:
        st.warning("Some stage times could not be read. What is shown comes from the others.")
        st.text("\n".join(processes.faults))
    if processes.left_out:
        st.info(f"{processes.left_out} more processes are left out.")


def nothing(entry: RunEntry, processes: Processes) -> None:
    """Say why nothing of the run can be shown."""
    st.warning("The stage times of this run cannot be read. It may have been cut off, or is of another version.")
    st.text("\n".join(processes.faults) or entry.fault or "no reason is known")


def chosen_rank(shown: Shown, tab: str) -> StageTimes | None:
    """Return the process to show, which the person chooses where there are several; None, and why, without any."""
    ranks = {each.rank: each for each in shown.ranks}
    if not ranks:
        nothing(shown.entry, shown.processes)
        return None
    faults(shown.processes)
    if len(ranks) == 1:
        return shown.ranks[0]
    rank = st.selectbox("Process", list(ranks), format_func=lambda each: f"rank {each}", key=f"rank-{tab}")
    return ranks.get(rank, shown.ranks[0])
