"""The roofline: how fast each batch size runs over how much it computes per byte, under the limits of this machine."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.patheffects import withStroke
from matplotlib.text import Text
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator
from matplotlib.transforms import Bbox

from boundby.formatting import listed
from utils.document import Ceilings, ComputeCeiling, Row
from utils.optimal import MEASURED
from utils.plots.style import (
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
MARK = 9.0  # points
TOGETHER = 0.9 * MARK  # points between neighbours whose names are written as one
NAMED_AT_MOST = 8  # of such neighbours
LINES, LINES_AT_MOST = 16, 30  # of the table: its height, and where it is cut
COLUMNS = ((0.0, "left"), (0.17, "right"), (0.23, "left"), (0.76, "right"), (1.0, "right"))
LETTERS_OF_A_NOTE = 150
LETTERS_OF_A_REASON = 105
NEW_MEMORY = "new memory"  # the level of boundby.ceilings that is a cost of allocating, no roof of what is there
CLEARLY = 1.05  # times the rate in use from which another setting is drawn
TICK = 1.05  # half the width of a tick, as a factor
STEP = 4.0  # points between the boxes that stand for a line
RADII = (11, 15, 20, 26, 33, 41, 50, 60, 72, 85, 100)  # points from a point to the middle of its text
ANGLES = (45, 90, 135, 0, 180, 315, 270, 225, 22, 67, 112, 157, 338, 292, 248, 202)
LED_FROM = 18  # points from which a thin line leads from a text to its point
SPOTS = 25  # along a line where its name may stand
CLEAR = 3.0  # points around the name of a point
OUTSIDE = 3.0  # times worse than to cover something

Place = tuple[float, float]
Box = tuple[float, float, float, float]
Line = tuple[Place, Place]
HALO = {"path_effects": [withStroke(linewidth=3, foreground="white")]}


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
        owners = verdict.owners if (verdict := self.row.get("verdict")) else ()
        whole = sum(owner.seconds for owner in owners)
        least = sum(owner.seconds for owner in owners if owner.kind in ("compute", "memory"))
        return self.rate * whole / least if least > 0 else None

    @property
    def dtype(self) -> str:
        """The dtype it ran in."""
        return self.row["dtype"]

    @property
    def name(self) -> str:
        """The batch size, as it is written beside the point."""
        return str(self.row["batch_size"])


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
        self.compute = [roof for dtype in dtypes for roof in _roofs(ceilings["compute"], dtype)]
        known = sorted(ceilings["memory"], key=lambda level: level["working_set_bytes"])
        self.levels = [(level["level"], level["bytes_per_s"]) for level in known if level["level"] != NEW_MEMORY]
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
    """Return the figure for the rows of a sweep under the ceilings of `boundby.ceilings.Ceilings.as_dict`."""
    measured = points(rows)
    roofs = Roofs(ceilings, dict.fromkeys(point.dtype for point in measured))
    notes = _notes(rows, measured, roofs, ceilings)
    drawn = new_figure(about, width=14.5, height=7.6 + 0.22 * len(notes))
    axes, beside = drawn.subplots(1, 2, width_ratios=[2.3, 1])
    size = scale(rows)
    diagram = _Diagram(axes, measured, roofs, size)
    diagram.draw()
    _table(beside, measured, roofs, size)
    drawn.supxlabel("\n".join(notes), x=0.01, ha="left", fontsize=10.5, color=INK, linespacing=1.5)
    drawn.draw_without_rendering()  # the layout is final; texts can look for free places
    drawn.set_layout_engine("none")
    diagram.name()
    return drawn


def scale(rows: Rows) -> tuple[float, str]:
    """Return the unit of FLOP/s in which the rows of a sweep are written: its size and its name."""
    return unit([row["flops_per_sec"] for row in rows], FLOP_UNITS)


class _Diagram:
    """The roofs and the points, on two logarithmic axes; all rates in units of `scale`."""

    def __init__(self, axes: Axes, measured: Sequence[Point], roofs: Roofs, scale: tuple[float, str]) -> None:
        self.axes, self.points, self.roofs = axes, measured, roofs
        self.scale, unit_name = scale
        rates = [roof.rate for roof in roofs.compute] or [point.rate for point in measured]
        self.highest = max(rates)
        configured = [roof.rate for roof in roofs.compute if roof.is_configured] or rates
        ridges = [min(configured) / roofs.fastest, max(configured) / roofs.main_memory]
        intensities = [point.intensity for point in measured] + ridges
        top = max(self.highest, *(point.rate for point in measured))
        slowest = [point.rate for point in measured] + [rate / MARGIN for rate in configured]
        bottom = min(min(slowest) / MARGIN, top / LEAST_SPAN)
        self.left, self.right = min(intensities) / MARGIN, max(intensities) * MARGIN
        axes.set(xscale="log", yscale="log", xlim=(self.left, self.right))
        axes.set_ylim(bottom / self.scale, 1.5 * top / self.scale)
        axes.set_title("Roofline of this machine, and each batch size under it")
        axes.set_xlabel("FLOP per byte that the operators read and write")
        axes.set_ylabel(unit_name)
        self._roof_names: list[tuple[Roof, Text]] = []

    def draw(self) -> None:
        """Draw all that needs no free place to stand in."""
        for axis in (self.axes.xaxis, self.axes.yaxis):
            first, last = axis.get_view_interval()
            axis.set_major_locator(LogLocator(subs=(1, 2, 5) if last / first < 2e3 else (1,), numticks=99))
            axis.set_minor_locator(NullLocator())
            axis.set_major_formatter(FuncFormatter(number))
        self.axes.grid(linewidth=0.7)
        self._shade()
        for _, rate in self.roofs.levels:
            is_main = rate == self.roofs.main_memory
            line = self._slanted(rate)
            self.axes.plot(*zip(*line, strict=True), color=INK if is_main else MUTED, linewidth=2 if is_main else 1.3)
        for roof in self.roofs.compute:
            self._roof(roof)
        for dtype in dict.fromkeys(point.dtype for point in self.points):
            self._points(dtype, [point for point in self.points if point.dtype == dtype])

    def name(self) -> None:
        """Write the names of roofs and points where there is room."""
        self._name_roofs()
        places = Places(self.axes)
        for point in self.points:
            x, *ends = (point.intensity, point.low / self.scale, point.high / self.scale)
            places.take_point(x, point.rate / self.scale, MARK * (2 if self.roofs.is_above(point) else 1.1))
            places.take_line(*((x, self._within(end)) for end in ends))
        for roof in self.roofs.compute:
            y = roof.rate / self.scale
            places.take_line((self._start(roof), y), (self.right, y))
        seen = [(level, rate, line) for level, rate in self.roofs.levels if (line := self._seen(rate))]
        for _, _, line in seen:
            places.take_line(*line)
        for level, rate, line in seen:
            size, name = unit([rate], BYTE_UNITS)
            places.name_line(*line, f"{level} {number(rate / size)} {name}", color=INK, fontsize=11, **HALO)
        for group in self._together(places):
            middle = group[len(group) // 2]
            look = {"color": COLOURS[middle.dtype], "fontsize": 12, "weight": "bold", "zorder": 5, **HALO}
            names = [point.name for point in group]
            text = ", ".join(names) if len(names) <= NAMED_AT_MOST else f"{names[0]} to {names[-1]}"
            places.name_point(middle.intensity, middle.rate / self.scale, text, **look)

    def _together(self, places: "Places") -> list[list[Point]]:
        """Return the points in groups: neighbours in the sweep that lie on one another have one name."""
        groups: list[list[Point]] = []
        for point in self.points:
            last = groups[-1][-1] if groups else point
            ends = ((end.intensity, end.rate / self.scale) for end in (last, point))
            if groups and last.dtype == point.dtype and places.distance(*ends) < TOGETHER:
                groups[-1].append(point)
            else:
                groups.append([point])
        return groups

    def _within(self, y: float) -> float:
        low, high = self.axes.get_ylim()
        return min(max(y, low), high)

    def _slanted(self, rate: float) -> Line:
        """Return the ends of the roof of a memory: from the left edge to the highest roof."""
        end = max(self.highest / rate, self.left)
        return (self.left, self.left * rate / self.scale), (end, end * rate / self.scale)

    def _seen(self, rate: float) -> Line | None:
        """Return the ends of that part of it that lies inside the axes, or None where there is none."""
        first = max(self.left, self.axes.get_ylim()[0] * self.scale / rate)
        last = min(self._slanted(rate)[1][0], self.right)
        return ((first, first * rate / self.scale), (last, last * rate / self.scale)) if first < last else None

    def _start(self, roof: Roof) -> float:
        return max(self.left, roof.rate / self.roofs.fastest)

    def _roof(self, roof: Roof) -> None:
        y, colour = roof.rate / self.scale, COLOURS[roof.dtype]
        style = "-" if roof.is_configured else (0, (6, 3))
        self.axes.plot([self._start(roof), self.right], [y, y], color=colour, linewidth=2, linestyle=style)
        size, name = unit([roof.rate], FLOP_UNITS)
        text = f"{roof.dtype} {number(roof.rate / size)} {name}" + (f"\n{roof.setting}" if roof.setting else "")
        beside = {"textcoords": "offset points", "xycoords": self.axes.get_yaxis_transform(), "va": "center"}
        arrow = {"arrowstyle": "-", "color": colour, "linewidth": 0.8, "shrinkA": 0, "shrinkB": 0, "relpos": (0, 0.5)}
        look = {"fontsize": 10.5, "color": colour, "arrowprops": arrow, "annotation_clip": False}
        self._roof_names.append((roof, self.axes.annotate(text, (1, y), (12, 0), **beside, **look)))

    def _name_roofs(self) -> None:
        """Move the names of the roofs, which stand beside the axes, apart from one another."""
        named = sorted(self._roof_names, key=lambda named: named[0].rate)
        if not named:
            return
        pixels = self.axes.figure.dpi / 72
        wanted = [float(self.axes.transData.transform((1, roof.rate / self.scale))[1]) for roof, _ in named]
        gap = 1.1 * max(Text.get_window_extent(text).height for _, text in named)
        places = apart(wanted, gap, self.axes.get_window_extent().y1)
        for (_, text), want, place in zip(named, wanted, places, strict=True):
            text.set_position((12, (place - want) / pixels))

    def _shade(self) -> None:
        """Shade what only caches can feed, and what only another setting could compute."""
        configured = max((roof.rate for roof in self.roofs.compute if roof.is_configured), default=self.highest)
        fast, slow = self.roofs.fastest, self.roofs.main_memory
        corners = [self.left, *sorted(min(max(configured / rate, self.left), self.right) for rate in (fast, slow))]
        low, high = ([min(x * rate, configured) / self.scale for x in corners] for rate in (slow, fast))
        self.axes.fill_between(corners, low, high, color=MUTED, alpha=0.13, linewidth=0)
        for roof in (roof for roof in self.roofs.compute if not roof.is_configured):
            own = self.roofs.configured(roof.dtype)
            if own:
                ends = ([self._start(own), self._start(roof), self.right], own.rate / self.scale)
                top = [own.rate / self.scale, *[roof.rate / self.scale] * 2]
                self.axes.fill_between(*ends, top, color=COLOURS[roof.dtype], alpha=0.07, linewidth=0)

    def _allowed(self, point: Point, colour: str) -> None:
        """Draw the roof that a point is really under: how fast its own operators would be at their limits."""
        rate = point.allowed
        if rate and self.axes.get_ylim()[0] < rate / self.scale:
            x, low, high = point.intensity, point.rate / self.scale, rate / self.scale
            path = [x, x, x / TICK, x * TICK], [low, high, high, high]
            self.axes.plot(*path, color=colour, linewidth=1.2, alpha=0.7, zorder=2.2)

    def _points(self, dtype: str, measured: Sequence[Point]) -> None:
        x, y = [point.intensity for point in measured], [point.rate / self.scale for point in measured]
        colour = COLOURS[dtype]
        self.axes.plot(x, y, color=colour, linewidth=1, alpha=0.45, zorder=2)
        ends = ([rate / self.scale for rate in side] for side in zip(*((p.low, p.high) for p in measured), strict=True))
        self.axes.vlines(x, *ends, colors=colour, linewidth=2, zorder=2.5)
        for point, *place in zip(measured, x, y, strict=True):
            self._allowed(point, colour)
            self.axes.plot(*place, **_mark(point), zorder=3)
            if self.roofs.is_above(point):
                ring = {"marker": "o", "markersize": 1.9 * MARK, "markerfacecolor": "none", "markeredgecolor": ALARM}
                self.axes.plot(*place, **ring, markeredgewidth=1.5, linestyle="none", zorder=2.8)


def _table(axes: Axes, measured: Sequence[Point], roofs: Roofs, scale: tuple[float, str]) -> None:
    """Write a line for every point, and under them what the marks mean."""
    lines: list[tuple[Point | None, Sequence[str]]] = [(None, ("", "batch", "limited by", scale[1], "of peak"))]
    shown = measured[: LINES_AT_MOST - 1] if len(measured) > LINES_AT_MOST else measured
    for point in shown:
        share = point.row["share_of_ceiling_pct"]
        percent = "-" if share is None else f"{share:.0f} %" if share >= 9.95 else f"{share:.2g} %"
        lines.append((point, ("", point.name, limited_by(point.row), number(point.rate / scale[0]), percent)))
    if len(shown) < len(measured):
        lines.append((None, ("", "", f"and {len(measured) - len(shown)} more", "", "")))
    key = _key(measured, roofs)
    height = max(LINES, len(lines) + 1.3 * len(key) + 1)
    axes.set_axis_off()
    axes.set(xlim=(0, 1), ylim=(height, -1))
    axes.set_title("What limits each batch size")
    size = min(11.0, 340 / height)
    for index, (point, cells) in enumerate(lines):
        colours = [COLOURS[point.dtype]] * 2 + [INK] * 3 if point else [MUTED] * 5
        if point:
            axes.plot(0.03, index, **_mark(point))
        for (x, side), cell, colour in zip(COLUMNS, cells, colours, strict=True):
            axes.text(x, index, cell, ha=side, va="center_baseline", fontsize=size, color=colour)
    axes.legend(handles=key, loc="lower left", frameon=False, fontsize=size, borderaxespad=0, borderpad=0)


def _key(measured: Sequence[Point], roofs: Roofs) -> list[Any]:
    """Return what the marks mean."""
    marks: list[Any] = [
        Line2D([], [], color=COLOURS[dtype], marker=MARKERS[dtype], markersize=MARK - 1, linewidth=1, label=dtype)
        for dtype in dict.fromkeys(point.dtype for point in measured)
    ]
    if any(point.row["status"] == "noisy" for point in measured):
        look = {"marker": "o", "markersize": MARK - 1, "markerfacecolor": "white", "markeredgewidth": 2}
        marks.append(Line2D([], [], color=MUTED, linestyle="none", label="hollow: noisy", **look))
    if any(roofs.is_above(point) for point in measured):
        look = {"marker": "o", "markersize": 1.5 * MARK, "markerfacecolor": "none", "markeredgecolor": ALARM}
        marks.append(Line2D([], [], linestyle="none", label="above a roof: a doubt", **look))
    marks.append(Line2D([], [], color=MUTED, linewidth=2, label="roof with the settings in use"))
    if any(point.allowed for point in measured):
        look = {"marker": "_", "markersize": MARK + 3, "markeredgewidth": 1.2}
        marks.append(Line2D([], [], color=MUTED, linestyle="none", label="tick: its operators at their limits", **look))
    if not all(roof.is_configured for roof in roofs.compute):
        marks.append(Line2D([], [], color=MUTED, linewidth=2, linestyle=(0, (6, 3)), label="roof with another setting"))
    if roofs.fastest > roofs.main_memory:
        marks.append(Patch(facecolor=MUTED, alpha=0.2, label="only for what lies in a cache"))
    return marks


def _mark(point: Point) -> dict[str, str | float]:
    """Return how a point looks: the shape and colour of its dtype, hollow where its row is noisy."""
    colour = COLOURS[point.dtype]
    face = "white" if point.row["status"] == "noisy" else colour
    return {
        "marker": MARKERS[point.dtype],
        "markersize": MARK,
        "markerfacecolor": face,
        "markeredgecolor": colour if face == "white" else "white",
        "markeredgewidth": 2.0 if face == "white" else 0.8,
        "linestyle": "none",
    }


def _why_no_point(row: Row) -> str:
    known = (row["reasons"].get(key) for key in ("all", "flops_per_sec", "flops_per_batch", "bytes_per_batch"))
    why = STATUS_TEXT.get(row["status"]) or next(filter(None, known), "no FLOP was counted")
    return shortened(why, LETTERS_OF_A_REASON)


def _notes(rows: Rows, measured: Sequence[Point], roofs: Roofs, ceilings: Ceilings) -> list[str]:
    """Return the lines under the diagram: how to read it, what is doubtful, what is not drawn."""
    notes = [
        "FLOP/s of one forward from idle to idle; FLOPs and bytes of all its operators, padding included. "
        "Bars: 95 % interval; numbers: batch sizes."
    ]
    drawn = {id(point.row) for point in measured}
    above = [point.row for point in measured if roofs.is_above(point)]
    if above:
        notes.append(
            f"Doubt: {_named(above)} above a roof. The ceilings were measured on a busier machine, "
            "or the work is counted too high."
        )
    notes += [f"Doubt: {doubt}" for doubt in ceilings["doubts"]]
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
    own = [ceiling for ceiling in compute if ceiling["dtype"] == dtype]
    in_use = next((ceiling for ceiling in own if ceiling["is_configured"]), None)
    if in_use is None:
        return []
    setting = f"precision {in_use['precision']}" if in_use["precision"] else ""
    roofs = [Roof(dtype, in_use["flops_per_s"], setting, True)]
    others = sorted((other for other in own if not other["is_configured"]), key=lambda other: other["flops_per_s"])
    for other in others:
        rate, last = other["flops_per_s"], roofs[-1]
        if rate > CLEARLY * last.rate:
            roofs.append(Roof(dtype, rate, f"precision {other['precision']}", False))
        elif not last.is_configured:
            roofs[-1] = Roof(dtype, rate, f"{last.setting} or {other['precision']}", False)
    return roofs


class Places:
    """What is taken in `axes`, in pixels; a text goes where it covers least of it."""

    def __init__(self, axes: Axes) -> None:
        self.axes = axes
        self.pixels = axes.figure.dpi / 72
        self.area: Bbox = axes.get_window_extent()
        self._taken: list[Box] = []

    def take_point(self, x: float, y: float, points: float) -> None:
        """Keep texts off a mark of this size at a place in data coordinates."""
        self._taken.append(_around(self._at(x, y), points * self.pixels, points * self.pixels))

    def take_line(self, start: Place, end: Place) -> None:
        """Keep texts off a line between two places in data coordinates."""
        first, last = self._at(*start), self._at(*end)
        for spot in _between(first, last, STEP * self.pixels):
            self._taken.append(_around(spot, self.pixels, self.pixels))

    def distance(self, start: Place, end: Place) -> float:
        """Return the points between two places in data coordinates."""
        return math.dist(self._at(*start), self._at(*end)) / self.pixels

    def name_point(self, x: float, y: float, text: str, **look: Any) -> Text:
        """Write `text` beside a place in data coordinates, with a leading line where it had to go far."""
        name = self.axes.annotate(
            text, (x, y), (0, 0), textcoords="offset points", ha="center", va="center", annotation_clip=True, **look
        )
        width, height = (size + CLEAR * self.pixels for size in _size(name))
        middle = self._at(x, y)
        ways = [(math.cos(turn), math.sin(turn)) for turn in map(math.radians, ANGLES)]
        offsets = [(radius * x, radius * y) for radius in RADII for x, y in ways]
        boxes = [
            _around((middle[0] + dx * self.pixels, middle[1] + dy * self.pixels), width, height) for dx, dy in offsets
        ]
        best = self._freest([[box] for box in boxes])
        name.set_position(offsets[best])
        self._taken.append(boxes[best])
        if math.hypot(*offsets[best]) > LED_FROM:
            end = self._place(np.mean(np.reshape(boxes[best], (2, 2)), axis=0))
            self.axes.plot(*zip((x, y), end, strict=True), color=look.get("color"), linewidth=0.7, zorder=1.5)
            self.take_line((x, y), end)
        return name

    def name_line(self, start: Place, end: Place, text: str, **look: Any) -> Text:
        """Write `text` along the line between two places in data coordinates, over or under it."""
        first, last = np.array(self._at(*start)), np.array(self._at(*end))
        along = (last - first) / np.linalg.norm(last - first)
        turn = math.degrees(math.atan2(along[1], along[0]))
        name = self.axes.text(*start, text, ha="center", va="center", rotation=turn, rotation_mode="anchor", **look)
        name.set_rotation(0)
        width, height = _size(name)
        name.set_rotation(turn)
        across = np.array([-along[1], along[0]]) * 0.75 * height
        shares = [(spot + 0.5) / SPOTS for spot in range(SPOTS)]
        middles = [first + share * (last - first) + side * across for side in (1, -1) for share in shares]
        boxes = [
            [
                _around(spot, 0.8 * height, 0.8 * height)
                for spot in _between(middle - along * width / 2, middle + along * width / 2, height / 2)
            ]
            for middle in middles
        ]
        best = self._freest(boxes)
        name.set_position(self._place(middles[best]))
        self._taken += boxes[best]
        return name

    def _freest(self, candidates: Sequence[Sequence[Box]]) -> int:
        """Return the first candidate that covers nothing and stays inside, else the one that covers least."""
        taken = np.array(self._taken).reshape(-1, 4)
        least, best = math.inf, 0
        for index, boxes in enumerate(candidates):
            cost = sum(_covered(box, taken) + OUTSIDE * self._outside(box) for box in boxes)
            if cost < least:
                least, best = cost, index
            if cost < 1:
                break
        return best

    def _outside(self, box: Box) -> float:
        """Return how many square pixels of `box` lie outside the axes."""
        left, bottom, right, top = box
        return (right - left) * (top - bottom) - _covered(box, np.array([self.area.extents]))

    def _at(self, x: float, y: float) -> Place:
        place = self.axes.transData.transform((x, y))
        return float(place[0]), float(place[1])

    def _place(self, pixels: Any) -> Place:
        """Return the data coordinates of a pixel."""
        x, y = self.axes.transData.inverted().transform(pixels)
        return float(x), float(y)


def apart(wanted: Sequence[float], gap: float, top: float) -> list[float]:
    """Return ascending positions, each as near to the one wanted as a least `gap` and `top` allow."""
    places: list[float] = []
    for place in wanted:
        places.append(max(place, places[-1] + gap) if places else place)
    ceiling = top
    for index in range(len(places) - 1, -1, -1):
        places[index] = min(places[index], ceiling)
        ceiling = places[index] - gap
    return places


def _between(first: Any, last: Any, step: float) -> Iterator[Place]:
    first, last = np.array(first), np.array(last)
    pieces = max(1, math.ceil(float(np.linalg.norm(last - first)) / step))
    for index in range(pieces + 1):
        x, y = first + (last - first) * index / pieces
        yield float(x), float(y)


def _covered(box: Box, taken: Any) -> float:
    """Return how many square pixels of `box` the boxes `taken` cover; where two do, twice."""
    left, bottom, right, top = box
    wide = np.minimum(right, taken[:, 2]) - np.maximum(left, taken[:, 0])
    high = np.minimum(top, taken[:, 3]) - np.maximum(bottom, taken[:, 1])
    return float(np.sum(np.clip(wide, 0, None) * np.clip(high, 0, None)))


def _size(name: Text) -> Place:
    box = Text.get_window_extent(name)  # that of an annotation would include its arrow
    return box.width, box.height


def _around(middle: Iterable[float], width: float, height: float) -> Box:
    x, y = middle
    return x - width / 2, y - height / 2, x + width / 2, y + height / 2
