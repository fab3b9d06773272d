"""The roofline: how fast each batch size runs over how much it computes per byte, under the limits of this machine."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from boundby.formatting import listed
from boundby.machine import Ceilings, ComputeCeiling
from utils.baseline import MEASURED, Row
from utils.report.pictures.style import (
    ALARM,
    COLOURS,
    INK,
    MARKERS,
    MUTED,
    STATUS_TEXT,
    Rows,
    Subject,
    limited_by,
    new_figure,
    number,
    picture,
    shortened,
    unit,
)

FLOP_UNITS = ((1e3, "kFLOP/s"), (1e6, "MFLOP/s"), (1e9, "GFLOP/s"), (1e12, "TFLOP/s"))
BYTE_UNITS = ((1e6, "MB/s"), (1e9, "GB/s"), (1e12, "TB/s"))
MARGIN = 1.8  # around what is drawn, as a factor
LEAST_SPAN = 8.0  # of the FLOP/s shown, as a factor
MARK = 17.0  # points: holds a number of two digits
LEVELS = ("-", "-.", ":", (0, (1, 3)))  # of the lines of main memory and of the caches, the largest first
LINES, LINES_AT_MOST = 16, 30  # of the table: its height, and where it is cut
COLUMNS = ((0.0, "left"), (0.17, "right"), (0.23, "left"), (0.76, "right"), (1.0, "right"))
LETTERS_OF_A_NOTE = 150
LETTERS_OF_A_REASON = 105
NEW_MEMORY = (
    "new memory"  # the level of boundby.machine.ceilings that is a cost of allocating, no roof of what is there
)
CLEARLY = 1.05  # times the rate in use from which another setting is drawn
TICK = 1.05  # half the width of a tick, as a factor


@dataclass(frozen=True)
class Point:
    """One measured batch size: FLOP per byte, FLOP/s with the ends of its interval, and what it is bound by."""

    row: Row
    intensity: float
    rate: float
    low: float
    high: float

    @property
    def allowed(self) -> float | None:
        """The FLOP/s at which its operators would run at the limits of this machine; None where that is not known."""
        parts = verdict.breakdown if (verdict := self.row.get("verdict")) else ()
        whole = sum(part.seconds for part in parts)
        least = sum(part.seconds for part in parts if part.kind in ("compute", "memory"))
        return self.rate * whole / least if least > 0 else None

    @property
    def dtype(self) -> str:
        """The dtype it ran in."""
        return self.row["dtype"]


@dataclass(frozen=True)
class Roof:
    """FLOP/s that one dtype reaches under a setting, which dtypes other than float32 have none of."""

    dtype: str
    rate: float
    setting: str
    is_configured: bool


class Roofs:
    """The ceilings that matter to these dtypes; `levels` are pairs of name and bytes/s, nearest memory first."""

    def __init__(self, ceilings: Ceilings, dtypes: Iterable[str]) -> None:
        self.compute = [roof for dtype in dtypes for roof in _roofs(ceilings.compute, dtype)]
        known = sorted(ceilings.memory, key=lambda level: level.working_set_bytes)
        self.levels = [(level.level, level.bytes_per_s) for level in known if level.level != NEW_MEMORY]
        self.fastest = max(rate for _, rate in self.levels)
        self.main_memory = self.levels[-1][1]

    def configured(self, dtype: str) -> Roof | None:
        """Return the roof of this dtype with the settings in use, None where it was not measured."""
        return next((roof for roof in self.compute if roof.dtype == dtype and roof.is_configured), None)

    def is_above(self, point: Point) -> bool:
        """Tell whether a point is faster than its own roof, or than the nearest memory could feed it."""
        own = self.configured(point.dtype)
        return point.rate > point.intensity * self.fastest or (own is not None and point.rate > own.rate)


def why_not(rows: Rows, ceilings: Ceilings | None, reason: str | None) -> str | None:
    """Return why the figure cannot be drawn, None where it can; `reason` says why there are no ceilings."""
    if not rows:
        return "no batch size was measured yet"
    if not ceilings:
        return reason or "the ceilings of this machine are not known"
    example = next((row for row in rows if row["status"] in MEASURED), rows[0])
    return None if points(rows) else f"no batch size has both FLOPs and bytes: {_why_no_point(example)}"


@picture("roofline.png", "each batch size under the limits of this machine")
def figure(rows: Rows, about: Subject, ceilings: Ceilings) -> Figure:
    """Return the figure for the rows of a sweep under the ceilings of `boundby.machine.ceilings.Ceilings.as_dict`."""
    measured = points(rows)
    roofs = Roofs(ceilings, dict.fromkeys(point.dtype for point in measured))
    notes = _notes(rows, measured, roofs, ceilings)
    drawn = new_figure(about, width=14.5, height=7.6 + 0.22 * len(notes))
    axes, beside = drawn.subplots(1, 2, width_ratios=[2, 1])
    size = scale(rows)
    _diagram(axes, measured, roofs, size)
    _table(beside, measured, size, _key(measured, roofs))
    drawn.supxlabel("\n".join(notes), x=0.01, ha="left", fontsize=10.5, color=INK, linespacing=1.5)
    return drawn


def scale(rows: Rows) -> tuple[float, str]:
    """Return the unit of FLOP/s in which the rows of a sweep are written: its size and its name."""
    return unit([row["flops_per_sec"] for row in rows], FLOP_UNITS)


def _diagram(axes: Axes, measured: Sequence[Point], roofs: Roofs, scale: tuple[float, str]) -> None:
    """Draw roofs and points on two logarithmic axes, all rates in units of `scale`."""
    size, unit_name = scale
    rates = [roof.rate for roof in roofs.compute] or [point.rate for point in measured]
    highest = max(rates)
    left, right = _span(axes, measured, roofs, size)
    axes.set_title("Roofline of this machine, and each batch size under it")
    axes.set_xlabel("FLOP per byte that the operators read and write")
    axes.set_ylabel(unit_name)
    axes.grid(linewidth=0.7)
    for (_, rate), style in zip(reversed(roofs.levels), LEVELS, strict=False):
        end = max(highest / rate, left)
        look = {"color": INK if rate == roofs.main_memory else MUTED, "linestyle": style, "linewidth": 1.6}
        axes.plot([left, end], [left * rate / size, end * rate / size], **look)
    for roof in roofs.compute:
        start = max(left, roof.rate / roofs.fastest)
        axes.plot([start, right], [roof.rate / size] * 2, **_line(roof))
    for index, point in enumerate(measured, start=1):
        x, y, colour = point.intensity, point.rate / size, COLOURS[point.dtype]
        axes.vlines(x, point.low / size, point.high / size, colors=colour, linewidth=2, zorder=2.5)
        if point.allowed and axes.get_ylim()[0] < (allowed := point.allowed / size):
            path = [x, x, x / TICK, x * TICK], [y, allowed, allowed, allowed]
            axes.plot(*path, color=colour, linewidth=1.2, alpha=0.7, zorder=2.2)
        if roofs.is_above(point):
            ring = {"marker": "o", "markersize": 1.5 * MARK, "markerfacecolor": "none", "markeredgecolor": ALARM}
            axes.plot(x, y, **ring, markeredgewidth=1.5, linestyle="none", zorder=2.8)
        _mark(axes, x, y, point, index)


def _span(axes: Axes, measured: Sequence[Point], roofs: Roofs, size: float) -> tuple[float, float]:
    """Set limits and ticks so that points and ridges are seen; return the ends of the axis of intensities."""
    rates = [roof.rate for roof in roofs.compute] or [point.rate for point in measured]
    configured = [roof.rate for roof in roofs.compute if roof.is_configured] or rates
    ridges = [min(configured) / roofs.fastest, max(configured) / roofs.main_memory]
    intensities = [point.intensity for point in measured] + ridges
    top = max(*rates, *(point.rate for point in measured))
    slowest = [point.rate for point in measured] + [rate / MARGIN for rate in configured]
    bottom = min(min(slowest) / MARGIN, top / LEAST_SPAN)
    left, right = min(intensities) / MARGIN, max(intensities) * MARGIN
    axes.set(xscale="log", yscale="log", xlim=(left, right))
    axes.set_ylim(bottom / size, 1.5 * top / size)
    for axis in (axes.xaxis, axes.yaxis):
        first, last = axis.get_view_interval()
        axis.set_major_locator(LogLocator(subs=(1, 2, 5) if last / first < 2e3 else (1,), numticks=99))
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter(FuncFormatter(number))
    return left, right


def _mark(axes: Axes, x: float, y: float, point: Point, index: int) -> None:
    """Draw a point with its number, in the shape and colour of its dtype; hollow where its row is noisy."""
    colour, is_hollow = COLOURS[point.dtype], point.row["status"] == "noisy"
    look = {"marker": MARKERS[point.dtype], "markersize": MARK, "linestyle": "none", "zorder": 3}
    look |= {"markerfacecolor": "white", "markeredgecolor": colour} if is_hollow else {"markeredgecolor": "white"}
    axes.plot(x, y, color=colour, markeredgewidth=2.0 if is_hollow else 0.8, **look)
    text = {"ha": "center", "va": "center_baseline", "fontsize": 9, "weight": "bold", "zorder": 3, "clip_on": True}
    axes.text(x, y, str(index), color=colour if is_hollow else "white", **text)


def _line(roof: Roof) -> dict[str, Any]:
    return {"color": COLOURS[roof.dtype], "linewidth": 2, "linestyle": "-" if roof.is_configured else (0, (6, 3))}


def _table(axes: Axes, measured: Sequence[Point], scale: tuple[float, str], key: Sequence[Line2D]) -> None:
    """Write a line for every numbered point, and under them what the lines and marks mean."""
    lines: list[tuple[Point | None, Sequence[str]]] = [(None, ("no.", "batch", "limited by", scale[1], "of peak"))]
    shown = measured[: LINES_AT_MOST - 1] if len(measured) > LINES_AT_MOST else measured
    for index, point in enumerate(shown, start=1):
        share = point.row["share_of_ceiling_pct"]
        percent = "-" if share is None else f"{share:.0f} %" if share >= 9.95 else f"{share:.2g} %"
        batch = str(point.row["batch_size"])
        lines.append((point, (str(index), batch, limited_by(point.row), number(point.rate / scale[0]), percent)))
    if len(shown) < len(measured):
        lines.append((None, ("", "", f"and {len(measured) - len(shown)} more", "", "")))
    height = max(LINES, len(lines) + 1.3 * len(key) + 1)
    axes.set_axis_off()
    axes.set(xlim=(0, 1), ylim=(height, -1))
    axes.set_title("What limits each batch size")
    size = min(11.0, 340 / height)
    for index, (point, cells) in enumerate(lines):
        colours = [COLOURS[point.dtype]] + [INK] * 4 if point else [MUTED] * 5
        for (x, side), cell, colour in zip(COLUMNS, cells, colours, strict=True):
            weight = "bold" if x == 0 else "normal"
            axes.text(x, index, cell, ha=side, va="center_baseline", fontsize=size, color=colour, weight=weight)
    axes.legend(handles=key, loc="lower left", frameon=False, fontsize=size, borderaxespad=0, borderpad=0)


def _key(measured: Sequence[Point], roofs: Roofs) -> list[Line2D]:
    """Return what the lines and the marks mean."""
    key = [
        Line2D([], [], color=COLOURS[dtype], marker=MARKERS[dtype], markersize=8, linestyle="none", label=dtype)
        for dtype in dict.fromkeys(point.dtype for point in measured)
    ]
    for roof in roofs.compute:
        size, name = unit([roof.rate], FLOP_UNITS)
        setting = f" ({roof.setting})" if roof.setting else ""
        key.append(Line2D([], [], **_line(roof), label=f"{roof.dtype} {number(roof.rate / size)} {name}{setting}"))
    for (level, rate), style in zip(reversed(roofs.levels), LEVELS, strict=False):
        size, name = unit([rate], BYTE_UNITS)
        look = {"color": INK if rate == roofs.main_memory else MUTED, "linestyle": style, "linewidth": 1.6}
        key.append(Line2D([], [], **look, label=f"{level} {number(rate / size)} {name}"))
    if any(point.row["status"] == "noisy" for point in measured):
        look = {"marker": "o", "markersize": 8, "markerfacecolor": "white", "markeredgewidth": 2}
        key.append(Line2D([], [], color=MUTED, linestyle="none", label="hollow: noisy", **look))
    if any(roofs.is_above(point) for point in measured):
        look = {"marker": "o", "markersize": 12, "markerfacecolor": "none", "markeredgecolor": ALARM}
        key.append(Line2D([], [], linestyle="none", label="above a roof: a doubt", **look))
    if any(point.allowed for point in measured):
        look = {"marker": "_", "markersize": 12, "markeredgewidth": 1.2}
        key.append(Line2D([], [], color=MUTED, linestyle="none", label="tick: its operators at their limits", **look))
    return key


def _why_no_point(row: Row) -> str:
    known = (row["reasons"].get(key) for key in ("all", "flops_per_sec", "flops_per_batch", "bytes_per_batch"))
    why = STATUS_TEXT.get(row["status"]) or next(filter(None, known), "no FLOP was counted")
    return shortened(why, LETTERS_OF_A_REASON)


def _notes(rows: Rows, measured: Sequence[Point], roofs: Roofs, ceilings: Ceilings) -> list[str]:
    """Return the lines under the diagram: how to read it, what is doubtful, what is not drawn."""
    notes = [
        "FLOP/s of one forward from idle to idle; FLOPs and bytes of all its operators, padding included. "
        "Bars: 95 % interval."
    ]
    drawn = {id(point.row) for point in measured}
    above = [point.row for point in measured if roofs.is_above(point)]
    if above:
        notes.append(
            f"Doubt: {_named(above)} above a roof. The ceilings were measured on a busier machine, "
            "or the work is counted too high."
        )
    notes += [f"Doubt: {doubt}" for doubt in ceilings.doubts]
    for dtype in dict.fromkeys(point.dtype for point in measured):
        if roofs.configured(dtype) is None:
            notes.append(f"No roof for {dtype}: its ceiling was not measured.")
    missing: dict[str, list[Row]] = {}
    for row in rows:
        if id(row) not in drawn:
            missing.setdefault(_why_no_point(row), []).append(row)
    notes += [f"Not drawn: {_named(some)}: {why}" for why, some in missing.items()]
    return [shortened(note, LETTERS_OF_A_NOTE) for note in notes]


def _named(rows: Rows) -> str:
    """Return batch sizes by their dtype: `batch size 64 and 128 (float32), 128 (bfloat16)`."""
    sizes: dict[str, list[int]] = {}
    for row in rows:
        sizes.setdefault(row["dtype"], []).append(row["batch_size"])
    return "batch size " + ", ".join(f"{listed(some)} ({dtype})" for dtype, some in sizes.items())


def points(rows: Rows) -> list[Point]:
    """Return a point for every row whose FLOPs, bytes and FLOP/s are known."""
    made = []
    for row in rows:
        if row["flops_per_sec"] and row["flops_per_batch"] and row["bytes_per_batch"]:
            rate, mean = row["flops_per_sec"], row["latency_per_sample_ms_mean"]
            low, high = row["latency_per_sample_ms_ci_low"], row["latency_per_sample_ms_ci_high"]
            ends = (rate * mean / (high or mean), rate * mean / (low or mean))
            made.append(Point(row, row["flops_per_batch"] / row["bytes_per_batch"], rate, *ends))
    return made


def _roofs(compute: Sequence[ComputeCeiling], dtype: str) -> list[Roof]:
    """Return the roof in use and those of settings that reach clearly more, settings that reach the same as one."""
    own = [ceiling for ceiling in compute if ceiling.dtype == dtype]
    in_use = next((ceiling for ceiling in own if ceiling.is_configured), None)
    if in_use is None:
        return []
    setting = f"precision {in_use.precision}" if in_use.precision else ""
    roofs = [Roof(dtype, in_use.flops_per_s, setting, True)]
    others = sorted((other for other in own if not other.is_configured), key=lambda other: other.flops_per_s)
    for other in others:
        rate, last = other.flops_per_s, roofs[-1]
        if rate > CLEARLY * last.rate:
            roofs.append(Roof(dtype, rate, f"precision {other.precision}", False))
        elif not last.is_configured:
            roofs[-1] = Roof(dtype, rate, f"{last.setting} or {other.precision}", False)
    return roofs
