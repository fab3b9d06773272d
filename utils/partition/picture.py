"""A plan as a picture: where one request is at each moment, and what every node holds."""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from boundby.partition import PartitionPlan, Stage, span
from utils.report import ALARM, INK, MUTED, SIZES, TIMES, Subject, new_figure, number, picture, shortened, unit

LONGEST_SPAN = 40
MIDDLE = 0.55  # of the time: what begins later has its text on its left, where there is room
COMPUTING, CARRYING = "#0072B2", "#E69F00"
HELD = {  # Okabe & Ito's colours
    "weights": {"facecolor": "#0072B2"},
    "kv_cache": {"facecolor": "#CC79A7"},
    "activations": {"facecolor": "#56B4E9"},
    "inputs_in_flight": {"facecolor": "#009E73"},
}
KEPT_FREE = {"facecolor": "#ECECEC", "hatch": "//", "edgecolor": "#9a9a9a", "linewidth": 0}


@picture("plan.png", "where one request is at each moment, and what every node holds")
def figure(plan: PartitionPlan, about: Subject) -> Figure:
    """Return the figure of a plan, a row for each stage from the first one at the top."""
    drawn = new_figure(about, width=18.0, height=3.2 + 1.0 * len(plan.stages))
    time, memory = drawn.subplots(1, 2, width_ratios=[1.5, 1])
    _one_request(time, plan)
    _held(memory, plan.stages)
    return drawn


def _one_request(axes: Axes, plan: PartitionPlan) -> None:
    """Draw what one request does from left to right; the slowest part, which sets the period, in another colour."""
    size, name = unit([1e3 * plan.latency_s], TIMES)
    slowest = max([stage.busy_compute_s for stage in plan.stages] + [transfer.seconds for transfer in plan.transfers])
    now = 0.0
    for row, stage in enumerate(plan.stages):
        length = 1e3 * stage.compute_s / size
        axes.barh(row, length, left=now, height=0.5, color=COMPUTING, hatch="" if stage.basis == "measured" else "//")
        is_late = now > MIDDLE * plan.latency_s * 1e3 / size
        anchor = (now + length, "right") if is_late else (now, "left")
        axes.text(anchor[0], row - 0.29, _stage(stage, length, name), va="bottom", ha=anchor[1], fontsize=11)
        if stage.busy_compute_s == slowest:
            axes.barh(row, length, left=now, height=0.5, fill=False, edgecolor=ALARM, linewidth=2.5)
        now += length
        for transfer in plan.transfers[row : row + 1]:
            carried = 1e3 * transfer.seconds / size
            axes.barh(row + 0.4, carried, left=now, height=0.16, color=CARRYING)
            text = f"{_size(transfer.size_bytes)} "
            axes.text(now, row + 0.4, text, va="center", ha="right", fontsize=10, color=MUTED)
            now += carried
    axes.set_yticks(range(len(plan.stages)), [shortened(f"{stage.node} ({stage.kind})", 30) for stage in plan.stages])
    axes.set_ylim(len(plan.stages) - 0.3, -0.75)
    axes.set_xlim(0, 1.12 * now or 1.0)
    axes.set_xlabel(f"{name} since a request came in")
    axes.xaxis.set_major_formatter(number)
    axes.tick_params(axis="y", length=0)
    axes.set_title(
        f"One request takes {_time(plan.latency_s)}, a new one may come every {_time(plan.period_s)}", pad=14
    )
    legend = [Patch(color=COMPUTING, label="computing"), Patch(color=CARRYING, label="between nodes")]
    legend.append(Patch(fill=False, edgecolor=ALARM, linewidth=2, label="the longest part"))
    if any(stage.basis == "assumed" for stage in plan.stages):
        legend.append(Patch(facecolor=COMPUTING, hatch="//", label="assumed, not measured"))
    axes.legend(handles=legend, loc="upper center", bbox_to_anchor=(0.5, -0.24), ncols=len(legend))


def _held(axes: Axes, stages: Sequence[Stage]) -> None:
    """Draw as a share of each node's memory what its stage holds and what must stay free."""
    for row, stage in enumerate(stages):
        whole = stage.node_memory_bytes
        left = 0.0
        for part, look in HELD.items():
            share = 100 * getattr(stage.memory_bytes, part) / whole
            axes.barh(row, share, left=left, height=0.5, **look)
            left += share
        kept = 100 * (whole - stage.usable_bytes) / whole
        axes.barh(row, kept, left=100 - kept, height=0.5, **KEPT_FREE)
        axes.barh(row, 100, height=0.5, fill=False, edgecolor=INK, linewidth=0.8)
        text = f"{_size(stage.memory_bytes.total)} of {_size(stage.usable_bytes)} that may be used"
        axes.text(0, row - 0.31, text, va="bottom", fontsize=11)
    axes.set_yticks(range(len(stages)), [""] * len(stages))
    axes.set_ylim(len(stages) - 0.3, -0.75)
    axes.set_xlim(0, 100)
    axes.set_xlabel("% of the node's memory")
    axes.tick_params(axis="y", length=0)
    axes.set_title("What every node holds", pad=14)
    legend = [Patch(label=part.replace("_", " ").replace("kv", "KV"), **look) for part, look in HELD.items()]
    legend.append(Patch(label="kept free", **KEPT_FREE))
    axes.legend(handles=legend, loc="upper center", bbox_to_anchor=(0.5, -0.24), ncols=len(legend), fontsize=9.5)


def _stage(stage: Stage, length: float, name: str) -> str:
    count = "1 unit" if len(stage.units) == 1 else f"{len(stage.units)} units"
    return f"{number(length)} {name}: {count}, {shortened(span(stage.units), LONGEST_SPAN)}"


def _size(size_bytes: float) -> str:
    size, name = unit([size_bytes / 1e6], ((1e-3, "kB"), *SIZES))
    return f"{number(size_bytes / 1e6 / size)} {name}"


def _time(seconds: float) -> str:
    size, name = unit([1e3 * seconds], TIMES)
    return f"{number(1e3 * seconds / size)} {name}"
