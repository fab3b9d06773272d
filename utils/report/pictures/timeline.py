"""What the device did in each moment of a trace, and for which cause it was idle, as stacked shares."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from utils.baseline import StepMark, Trace, TracedDevice
from utils.report.pictures.style import INK, MUTED, Subject, new_figure, number, picture
from utils.tracing import trace_words as words

SHOWN = 4  # devices, the busiest ones
LEAST_DISTANCE = 0.07  # between the numbers of two steps, as a share of the width
# Work in blue and purple without hatching, idle time in everything else: Okabe & Ito's colours and greys.
WORK: dict[str, dict[str, str]] = {
    "operators": {"facecolor": "#0072B2"},
    "compute": {"facecolor": "#0072B2"},
    "communication": {"facecolor": "#CC79A7"},
    "memcpy": {"facecolor": "#56B4E9"},
    "memset": {"facecolor": "#B9DFF5"},
}
IDLE: dict[str, dict[str, str]] = {
    "launch": {"facecolor": "#D55E00"},
    "synchronisation": {"facecolor": "#E69F00"},
    "input": {"facecolor": "#009E73"},
    "allocator": {"facecolor": "#F0E442"},
    "compile": {"facecolor": "#5B3A00"},
    "launch_latency": {"facecolor": "#F3C9B0"},
    "stream_wait": {"facecolor": "#8A8A8A", "hatch": "\\\\"},
    "untraced": {"facecolor": "#ECECEC", "hatch": "//"},
    "python": {"facecolor": "#A6761D"},
    "tokenizing": {"facecolor": "#66C2A5"},
    "garbage_collection": {"facecolor": "#B30000"},
    "saving": {"facecolor": "#8C6BB1", "hatch": ".."},
    "loading": {"facecolor": "#8C510A", "hatch": "\\\\"},
    "driver": {"facecolor": "#FDB863", "hatch": "xx"},
    "graph_pause": {"facecolor": "#BDBDBD", "hatch": ".."},
}


@picture("trace_timeline.png", "work and waiting over the time of the trace")
def figure(trace: Trace, about: Subject) -> Figure:
    """Return the figure for one trace of the document; it has at least one device with a window."""
    devices = trace["devices"][:SHOWN]
    drawn = new_figure(about, width=14.0, height=1.6 + 3.9 * len(devices))
    for axes, device in zip(drawn.subplots(len(devices), 1, squeeze=False)[:, 0], devices, strict=True):
        _shares(axes, device)
        _marks(axes, device)
    axes.set_xlabel("ms since the first step began" if devices[-1]["steps"] else "ms since the trace began")
    return drawn


def mark_steps(axes: Axes, steps: Sequence[StepMark], edges_ms: Sequence[float]) -> None:
    """Draw a line where each step begins, and its number where there is room."""
    room = LEAST_DISTANCE * (edges_ms[-1] - edges_ms[0])
    last = -math.inf
    for step in steps:
        moment = step["start_ms"] - edges_ms[0]
        axes.axvline(moment, color=INK, linewidth=0.8, alpha=0.6)
        if moment - last >= room:
            text = f"{'step ' if last < 0 else ''}{step['number']}"
            axes.text(moment, 1.01, text, transform=axes.get_xaxis_transform(), fontsize=10, color=MUTED)
            last = moment


def _shares(axes: Axes, device: TracedDevice) -> None:
    timeline = device["timeline"]
    edges = np.array(timeline["edges_ms"])
    lengths = np.diff(edges)
    below = np.zeros(len(lengths))
    legend = []
    for spent_ms, look, text in _layers(device):
        share = np.divide(100 * np.array(spent_ms), lengths, out=np.zeros(len(lengths)), where=lengths > 0)
        look = {"edgecolor": "#9a9a9a" if "hatch" in look else "none", "linewidth": 0, **look}
        axes.stairs(below + share, edges - edges[0], baseline=below, fill=True, **look)
        below = below + share
        legend.append(Patch(label=text, **look))
    axes.legend(handles=legend[::-1], loc="upper left", bbox_to_anchor=(1.005, 1.02), handlelength=1.4)
    axes.set_xlim(0, edges[-1] - edges[0])
    axes.set_ylim(0, 100)
    axes.set_ylabel("% of the time")
    axes.xaxis.set_major_formatter(number)


def _layers(device: TracedDevice) -> Iterator[tuple[Sequence[float], dict[str, Any], str]]:
    """Yield time per span, look and name of all that took any time, from the bottom up."""
    timeline, whole = device["timeline"], device["window_ms"]
    idle = "" if device["device"] is None else "idle: "
    for looks, spans, totals, opening in (
        (WORK, timeline["busy_ms"], device["exposed_ms"], ""),
        (IDLE, timeline["idle_ms"], device["idle_by_cause_ms"], idle),
    ):
        for name, look in looks.items():
            if totals.get(name):
                is_between = device["device"] is None and name == "launch"
                text = "between operators" if is_between else opening + words.plain(name)
                yield spans[name], look, f"{text} {number(totals[name])} ms ({100 * totals[name] / whole:.1f} %)"


def _marks(axes: Axes, device: TracedDevice) -> None:
    who = "The CPU" if device["device"] is None else f"GPU {device['device']}"
    at_work = "in operators" if device["device"] is None else "at work"
    share = 100 * device["busy_ms"] / device["window_ms"]
    axes.set_title(f"{who} is {at_work} for {share:.0f} % of {number(device['window_ms'])} ms", pad=18)
    mark_steps(axes, device["steps"], device["timeline"]["edges_ms"])
