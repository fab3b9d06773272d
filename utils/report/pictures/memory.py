"""The allocated memory over the time of a trace, and what held it at the peak."""

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from utils.baseline import Owner, Trace, TracedMemory
from utils.report.pictures.style import ALARM, Subject, bars, new_figure, number, picture, shortened, unit
from utils.report.pictures.timeline import mark_steps

SHOWN = 4  # devices, those with the highest peaks
OWNERS = 8
LEAST_SHARE = 0.01  # of the peak, to be named
LONGEST_OWNER = 44  # characters
BYTES = ((1.0, "bytes"), (1e3, "kB"), (1e6, "MB"), (1e9, "GB"))
ALLOCATED, RESERVED, OWNER, REST = "#0072B2", "#E69F00", "#56B4E9", "#BDBDBD"


@picture("trace_memory.png", "memory over the time of the trace, and what held it")
def figure(trace: Trace, about: Subject) -> Figure:
    """Return the figure for one trace of the document in which memory was recorded."""
    uses = trace["memory"][:SHOWN]
    device = trace["devices"][0]
    drawn = new_figure(about, width=18.0, height=1.4 + 4.2 * len(uses))
    panels = drawn.subplots(len(uses), 2, squeeze=False, width_ratios=[1.45, 1])
    for (over_time, owners), use in zip(panels, uses, strict=True):
        _over_time(over_time, use, device["timeline"]["edges_ms"][0])
        mark_steps(over_time, device["steps"], device["timeline"]["edges_ms"])
        _owners(owners, use)
    return drawn


def _over_time(axes: Axes, use: TracedMemory, start_ms: float) -> None:
    timeline = use["timeline"]
    size, name = _unit(use)
    times = [moment - start_ms for moment in timeline["times_ms"]]
    allocated = [held / size for held in timeline["allocated_bytes"]]
    axes.step(times, allocated, where="post", color=ALLOCATED, linewidth=1.2, label="allocated")
    axes.fill_between(times, allocated, step="post", color=ALLOCATED, alpha=0.2, linewidth=0)
    if timeline["reserved_bytes"]:
        reserved = [held / size for held in timeline["reserved_bytes"]]
        axes.step(times, reserved, where="post", color=RESERVED, linestyle="--", label="reserved by the allocator")
        axes.legend(loc="lower right")
    peak = use["peak_bytes"] / size
    at = use["peak_ms"] - start_ms
    axes.plot([at], [peak], marker="v", color=ALARM, markersize=9, linestyle="none")
    is_late = at - times[0] > 0.6 * (times[-1] - times[0])
    axes.annotate(
        f"peak {number(peak)} {name}",
        (at, peak),
        textcoords="offset points",
        xytext=(-9 if is_late else 9, 5),
        ha="right" if is_late else "left",
        color=ALARM,
        bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1},
    )
    axes.set_ylim(0, 1.15 * max([peak, (use["peak_reserved_bytes"] or 0) / size]) or 1.0)
    axes.set_title(f"{_who(use)}: {_counted(use)}", pad=18)
    axes.set_xlabel("ms since the window of the trace began")
    axes.set_ylabel(name)
    axes.xaxis.set_major_formatter(number)
    axes.yaxis.set_major_formatter(number)


def _owners(axes: Axes, use: TracedMemory) -> None:
    """Draw the largest owners of the peak, and in grey what belongs to none of them."""
    size, name = _unit(use)
    large = [owner for owner in use["owners"][:OWNERS] if owner["bytes"] >= LEAST_SHARE * use["peak_bytes"]]
    parts = [(_owner(owner), owner["bytes"], OWNER, owner["allocations"]) for owner in large]
    others = use["others_bytes"] + sum(owner["bytes"] for owner in use["owners"][len(large) :])
    parts += [("all other operators", others, REST, None)] if others else []
    parts += [("allocated before the trace", use["earlier_bytes"], REST, None)] if use["earlier_bytes"] else []
    names, taken, colours, counts = zip(*parts, strict=True) if parts else ((), (), (), ())
    texts = [_text(part, use["peak_bytes"], count) for part, count in zip(taken, counts, strict=True)]
    bars(axes, names, [part / size for part in taken], texts, 2.1, color=colours)
    axes.set_ylim(max(len(parts), 5) - 0.5, -0.5)
    axes.set_title("What holds it at the peak")
    axes.set_xlabel(name)


def _owner(owner: Owner) -> str:
    name = owner["operator"] or "outside of all operators"
    caller = f"\n{shortened(owner['inside'], LONGEST_OWNER)}" if owner["inside"] else ""
    return shortened(name, LONGEST_OWNER) + caller


def _text(taken: float, peak: float, count: int | None) -> str:
    size, name = unit([taken], BYTES)
    share = f" ({100 * taken / peak:.1f} %)" if peak else ""
    return f"{number(taken / size)} {name}{share}" + (f", {count:,}x" if count else "")


def _unit(use: TracedMemory) -> tuple[float, str]:
    """Return the unit of both panels as (its size in bytes, its name)."""
    return unit([use["peak_bytes"], use["peak_reserved_bytes"]], BYTES)


def _who(use: TracedMemory) -> str:
    return "CPU" if use["device"] is None else f"GPU {use['device']}"


def _counted(use: TracedMemory) -> str:
    return "allocated memory" if use["earlier_bytes"] is not None else "memory allocated since the trace began"
