"""The roofline: how fast each batch size runs over how much it computes per byte, under the limits of this machine."""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.patheffects import withStroke
from matplotlib.text import Text
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from utils.optimal import MEASURED
from utils.plots.panel import STATUS_TEXT
from utils.plots.placement import Places, apart
from utils.plots.roofs import Point, Roof, Roofs, Rows, points
from utils.plots.style import ALARM, COLOURS, INK, MARKERS, MUTED, Subject, new_figure, number, shortened, styled, unit
from utils.render.formatting import listed

FLOP_UNITS = ((1e3, "kFLOP/s"), (1e6, "MFLOP/s"), (1e9, "GFLOP/s"), (1e12, "TFLOP/s"))
BYTE_UNITS = ((1e6, "MB/s"), (1e9, "GB/s"), (1e12, "TB/s"))
MARGIN = 2.5  # around what is drawn, as a factor
LEAST_SPAN = 40.0  # of the FLOP/s shown, as a factor
MARK = 9.0  # points
TOGETHER = 0.9 * MARK  # points between neighbours whose names are written as one
NAMED_AT_MOST = 8  # of such neighbours
LINES, LINES_AT_MOST = 22, 30  # of the table: its height, and where it is cut
COLUMNS = ((0.0, "left"), (0.17, "right"), (0.23, "left"), (0.76, "right"), (1.0, "right"))
LETTERS_OF_A_NOTE = 150
LETTERS_OF_A_REASON = 105
Line = tuple[tuple[float, float], tuple[float, float]]
HALO = {"path_effects": [withStroke(linewidth=3, foreground="white")]}


def why_not(rows: Rows, ceilings: Mapping[str, Any] | None, reason: str | None) -> str | None:
    """Return why the figure cannot be drawn, None where it can; `reason` says why there are no ceilings."""
    if not rows:
        return "no batch size was measured yet"
    if not ceilings:
        return reason or "the ceilings of this machine are not known"
    example = next((row for row in rows if row["status"] in MEASURED), rows[0])
    return None if points(rows) else f"no batch size has both FLOPs and bytes: {_why_no_point(example)}"


@styled
def figure(rows: Rows, about: Subject, ceilings: Mapping[str, Any]) -> Figure:
    """Return the figure for the rows of a sweep under the ceilings of `boundby.ceilings.Ceilings.as_dict`."""
    found = points(rows)
    roofs = Roofs(ceilings, dict.fromkeys(point.dtype for point in found))
    notes = _notes(rows, found, roofs, ceilings)
    drawn = new_figure(about, width=14.5, height=8.4 + 0.22 * len(notes))
    axes, beside = drawn.subplots(1, 2, width_ratios=[2.3, 1])
    scale = unit([roof.rate for roof in roofs.compute] + [point.rate for point in found], FLOP_UNITS)
    diagram = _Diagram(axes, found, roofs, scale)
    diagram.draw()
    _table(beside, found, roofs, scale)
    drawn.supxlabel("\n".join(notes), x=0.01, ha="left", fontsize=10.5, color=INK, linespacing=1.5)
    drawn.draw_without_rendering()  # the layout is final; texts can look for free places
    drawn.set_layout_engine("none")
    diagram.name()
    return drawn


class _Diagram:
    """The roofs and the points, on two logarithmic axes; all rates in units of `scale`."""

    def __init__(self, axes: Axes, found: Sequence[Point], roofs: Roofs, scale: tuple[float, str]) -> None:
        self.axes, self.points, self.roofs = axes, found, roofs
        self.scale, unit_name = scale
        rates = [roof.rate for roof in roofs.compute] or [point.rate for point in found]
        self.highest = max(rates)
        configured = [roof.rate for roof in roofs.compute if roof.is_configured] or rates
        ridges = [min(configured) / roofs.fastest, max(configured) / roofs.main_memory]
        intensities = [point.intensity for point in found] + ridges
        top = max(self.highest, *(point.rate for point in found))
        slowest = [point.rate for point in found] + [rate / MARGIN for rate in configured]
        bottom = min(min(slowest) / MARGIN, top / LEAST_SPAN)
        self.left, self.right = min(intensities) / MARGIN, max(intensities) * MARGIN
        axes.set(xscale="log", yscale="log", xlim=(self.left, self.right))
        axes.set_ylim(bottom / self.scale, 2 * top / self.scale)
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
        self.axes.grid(color="#e4e4e4", linewidth=0.7)
        self.axes.set_axisbelow(True)
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

    def _together(self, places: Places) -> list[list[Point]]:
        """Return the points in groups: neighbours in the sweep that lie on one another have one name."""
        groups: list[list[Point]] = []
        for point in self.points:
            last = groups[-1][-1] if groups else point
            ends = ((each.intensity, each.rate / self.scale) for each in (last, point))
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
        named = sorted(self._roof_names, key=lambda each: each[0].rate)
        if not named:
            return
        pixels = self.axes.figure.dpi / 72
        wanted = [float(self.axes.transData.transform((1, roof.rate / self.scale))[1]) for roof, _ in named]
        gap = 1.1 * max(Text.get_window_extent(text).height for _, text in named)
        found = apart(wanted, gap, self.axes.get_window_extent().y1)
        for (_, text), want, place in zip(named, wanted, found, strict=True):
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

    def _points(self, dtype: str, found: Sequence[Point]) -> None:
        x, y = [point.intensity for point in found], [point.rate / self.scale for point in found]
        colour = COLOURS[dtype]
        self.axes.plot(x, y, color=colour, linewidth=1, alpha=0.45, zorder=2)
        ends = ([each / self.scale for each in side] for side in zip(*((p.low, p.high) for p in found), strict=True))
        self.axes.vlines(x, *ends, colors=colour, linewidth=2, zorder=2.5)
        for point, *place in zip(found, x, y, strict=True):
            self.axes.plot(*place, **_mark(point), zorder=3)
            if self.roofs.is_above(point):
                ring = {"marker": "o", "markersize": 1.9 * MARK, "markerfacecolor": "none", "markeredgecolor": ALARM}
                self.axes.plot(*place, **ring, markeredgewidth=1.5, linestyle="none", zorder=2.8)


def _table(axes: Axes, found: Sequence[Point], roofs: Roofs, scale: tuple[float, str]) -> None:
    """Write a line for every point, and under them what the marks mean."""
    lines: list[tuple[Point | None, Sequence[str]]] = [(None, ("", "batch", "bound by", scale[1], "of its roof"))]
    shown = found[: LINES_AT_MOST - 1] if len(found) > LINES_AT_MOST else found
    for point in shown:
        share = point.row["share_of_ceiling_pct"]
        percent = "-" if share is None else f"{share:.0f} %" if share >= 9.95 else f"{share:.2g} %"
        bound = point.row["bound"] or "unknown"
        lines.append((point, ("", point.name, bound, number(point.rate / scale[0]), percent)))
    if len(shown) < len(found):
        lines.append((None, ("", "", f"and {len(found) - len(shown)} more", "", "")))
    key = _key(found, roofs)
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


def _key(found: Sequence[Point], roofs: Roofs) -> list[Any]:
    """Return what the marks mean."""
    marks: list[Any] = [
        Line2D([], [], color=COLOURS[each], marker=MARKERS[each], markersize=MARK - 1, linewidth=1, label=each)
        for each in dict.fromkeys(point.dtype for point in found)
    ]
    if any(point.row["status"] == "noisy" for point in found):
        look = {"marker": "o", "markersize": MARK - 1, "markerfacecolor": "white", "markeredgewidth": 2}
        marks.append(Line2D([], [], color=MUTED, linestyle="none", label="hollow: noisy", **look))
    if any(roofs.is_above(point) for point in found):
        look = {"marker": "o", "markersize": 1.5 * MARK, "markerfacecolor": "none", "markeredgecolor": ALARM}
        marks.append(Line2D([], [], linestyle="none", label="above a roof: a doubt", **look))
    marks.append(Line2D([], [], color=MUTED, linewidth=2, label="roof with the settings in use"))
    if not all(roof.is_configured for roof in roofs.compute):
        marks.append(Line2D([], [], color=MUTED, linewidth=2, linestyle=(0, (6, 3)), label="roof with another setting"))
    if roofs.fastest > roofs.main_memory:
        marks.append(Patch(facecolor=MUTED, alpha=0.2, label="only for what lies in a cache"))
    return marks


def _mark(point: Point) -> dict[str, Any]:
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


def _why_no_point(row: Mapping[str, Any]) -> str:
    reasons = row["reasons"]
    known = (reasons.get(key) for key in ("all", "flops_per_sec", "flops_per_batch", "bytes_per_batch"))
    why = STATUS_TEXT.get(row["status"]) or next((each for each in known if each), "no FLOP was counted")
    return shortened(why, LETTERS_OF_A_REASON)


def _notes(rows: Rows, found: Sequence[Point], roofs: Roofs, ceilings: Mapping[str, Any]) -> list[str]:
    """Return the lines under the diagram: how to read it, what is doubtful, what is not drawn."""
    notes = [
        "FLOP/s of one forward from idle to idle; FLOPs and bytes of all its operators, padding included. "
        "Bars: 95 % interval; numbers: batch sizes."
    ]
    drawn = {id(point.row) for point in found}
    above = [point.row for point in found if roofs.is_above(point)]
    if above:
        notes.append(
            f"Doubt: {_named(above)} above a roof. The ceilings were measured on a busier machine, "
            "or the work is counted too high."
        )
    notes += [f"Doubt: {each}" for each in ceilings["doubts"]]
    for dtype in dict.fromkeys(point.dtype for point in found):
        if roofs.configured(dtype) is None:
            notes.append(f"No roof for {dtype}: its ceiling was not measured.")
    missing: dict[str, list[Mapping[str, Any]]] = {}
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
