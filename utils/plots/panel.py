"""One panel over the batch size: lines of several dtypes, their intervals, and the gaps where nothing was measured."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from utils.plots.style import COLOURS, INK, MARKERS, MUTED, number

STATUS_TEXT = {"oom": "out of memory", "skipped_oom": "not tried (memory)", "failed": "failed"}
UNKNOWN_TEXT = "not known"
HALF_BAND = 2**0.3  # of a gap, as a factor on the batch size
LOG_FROM = 12.0  # largest over smallest value from which a logarithmic axis shows more
OFF_SCALE = 2.0  # what lies further above all values than this is cut off: a target, the interval of two rounds
LEAST_DISTANCE = 0.09  # between the names of two limits, as a share of the height
SMALL: dict[str, Any] = {"fontsize": 10, "fontweight": "normal"}
MARGIN = 2**0.6  # beside the outer batch sizes, as a factor
LEAST_UPRIGHT, LEAST_TURNED = 0.085, 0.028  # share of the width that the name of a batch size needs
LINE_POINTS = 13
NEWLINE = "\n"


class Panel:
    """A diagram over the batch size on a log2 axis; `rows` are those of the sweep, in any order."""

    def __init__(self, axes: Axes, rows: Sequence[Mapping[str, Any]], title: str, unit: str) -> None:
        self.axes = axes
        self.sizes = sorted({row["batch_size"] for row in rows})
        self.rows = {(row["dtype"], row["batch_size"]): row for row in rows}
        self.dtypes = list(dict.fromkeys(row["dtype"] for row in rows))
        self._lines_below: dict[int, int] = {}
        self._above: list[str] = []
        self._limits: list[tuple[float, str, str]] = []
        axes.set_title(title)
        axes.set_ylabel(unit)
        self._batch_size_axis()

    def values(self, dtype: str, key: str, scale: float = 1.0) -> list[float]:
        """Return `key` over all batch sizes, divided by `scale`; NaN where it is not known, which leaves a gap."""
        found = [self.rows.get((dtype, size), {}).get(key) for size in self.sizes]
        return [math.nan if value is None else value / scale for value in found]

    def line(self, key: str, scale: float = 1.0, *, label: str = "", second: bool = False) -> None:
        """Draw `key` for every dtype, a second quantity dotted; a point whose row is noisy is hollow."""
        for dtype in self.dtypes:
            look = {"color": COLOURS[dtype], "marker": "v" if second else MARKERS[dtype], "markersize": 7.0}
            values = self.values(dtype, key, scale)
            name = f"{label} {dtype}".strip() if len(self.dtypes) > 1 else label or dtype
            self.axes.plot(self.sizes, values, linestyle=":" if second else "-", linewidth=2.0, label=name, **look)
            hollow = [self._is_noisy(dtype, size) for size in self.sizes]
            noisy = [value if is_noisy else math.nan for value, is_noisy in zip(values, hollow, strict=True)]
            if any(hollow):
                look |= {"markerfacecolor": "white", "markeredgewidth": 2.0}
                self.axes.plot(self.sizes, noisy, linestyle="none", label=f"_noisy {dtype}", zorder=3, **look)

    def interval(self, low: str, high: str, scale: float = 1.0, *, bars: bool = True) -> None:
        """Shade from `low` to `high`; bars make a single point's interval visible."""
        for dtype in self.dtypes:
            bottom, top = self.values(dtype, low, scale), self.values(dtype, high, scale)
            self.axes.fill_between(self.sizes, bottom, top, color=COLOURS[dtype], alpha=0.18, linewidth=0)
            if bars:
                self.axes.vlines(self.sizes, bottom, top, colors=COLOURS[dtype], linewidth=2.0)

    def limit(self, value: float | None, text: str, colour: str = INK) -> None:
        """Draw a horizontal line at `value`, named at its end; one far above all values is named above the axes."""
        drawn = self._drawn()
        if value is None or not drawn:
            return
        if value > OFF_SCALE * max(drawn):
            self._above.append(f"↑ {text}")
            return
        self.axes.axhline(value, color=colour, linestyle=(0, (5, 3)), linewidth=1.3, zorder=1)
        self._limits.append((value, text, colour))

    def finish(self, key: str, *, may_be_log: bool = False, legend: bool = False) -> None:
        """Mark the gaps of `key` and choose the scale of the values."""
        self._mark_gaps(key)
        drawn = self._drawn()
        if not drawn:
            self.axes.set_yticks([])
            return
        if may_be_log and min(drawn) > 0 and max(drawn) / min(drawn) >= LOG_FROM:
            self._log_axis(min(drawn), max(drawn))
        else:
            self.axes.set_ylim(0, min(1.04 * self.axes.get_ylim()[1], OFF_SCALE * max(drawn)))
        self.axes.yaxis.set_major_formatter(FuncFormatter(number))
        self._name_limits()
        self.axes.grid(axis="y", color="#dddddd", linewidth=0.8)
        self.axes.set_axisbelow(True)
        if legend:
            self.axes.legend(loc="best")

    def below(self, size: int, text: str, colour: str = INK) -> None:
        """Write `text` under the name of a batch size and under what stands there already; not where it is crowded."""
        if self.is_crowded:
            return
        line = self._lines_below.get(size, 0)
        self._lines_below[size] = line + 1 + text.count(NEWLINE)
        place = (0, -24 - LINE_POINTS * line)
        at = {"textcoords": "offset points", "xycoords": self.axes.get_xaxis_transform()}
        self.axes.annotate(text, (size, 0), place, ha="center", va="top", color=colour, **at, **SMALL)
        self.axes.xaxis.labelpad = 6 + LINE_POINTS * max(self._lines_below.values())

    def _batch_size_axis(self) -> None:
        axis = self.axes
        axis.set_xscale("log", base=2)
        axis.set_xlabel("batch size")
        if not self.sizes:
            return
        axis.set_xlim(self.sizes[0] / MARGIN, self.sizes[-1] * MARGIN)
        axis.xaxis.set_major_locator(FixedLocator(self.sizes))
        axis.xaxis.set_minor_locator(NullLocator())
        named = self._apart(LEAST_TURNED if self.is_crowded else 0.0)
        axis.xaxis.set_major_formatter(FuncFormatter(lambda size, _: f"{size:.0f}" if round(size) in named else ""))
        if self.is_crowded:
            axis.tick_params(axis="x", labelrotation=90, labelsize=9)

    @property
    def is_crowded(self) -> bool:
        """Tell whether the names of the batch sizes do not fit side by side."""
        return len(self._apart(LEAST_UPRIGHT)) < len(self.sizes)

    def _apart(self, least: float) -> set[int]:
        """Return batch sizes whose distances are at least this share of the axis."""
        width = math.log2(self.sizes[-1] / self.sizes[0] * MARGIN**2) if self.sizes else 1.0
        kept: list[int] = []
        for size in self.sizes:
            if not kept or math.log2(size / kept[-1]) / width >= least:
                kept.append(size)
        return set(kept)

    def _log_axis(self, smallest: float, largest: float) -> None:
        """Switch to a logarithmic axis with ticks at 1, 2 and 5, or at powers of ten where those are too many."""
        self.axes.set_yscale("log")
        self.axes.set_ylim(smallest / 1.5, largest * 1.5)
        first, last = math.floor(math.log10(smallest / 1.5)), math.ceil(math.log10(largest * 1.5))
        steps = (1, 2, 5) if last - first <= 3 else (1,)
        self.axes.yaxis.set_major_locator(
            FixedLocator([step * 10.0**power for power in range(first, last + 1) for step in steps])
        )
        self.axes.yaxis.set_minor_locator(NullLocator())

    def _mark_gaps(self, key: str) -> None:
        """Hatch each batch size that no dtype has a value for; where only some lack it, say so below the axis."""
        for size in self.sizes:
            reasons = {dtype: reason for dtype in self.dtypes if (reason := self._gap(dtype, size, key))}
            if reasons and len(reasons) == len(self.dtypes):
                self._hatch(size, reasons)
            elif reasons:
                colour = COLOURS[next(iter(reasons))] if len(reasons) == 1 else MUTED
                self.below(size, NEWLINE.join(dict.fromkeys(reasons.values())).replace(" of ", " of\n"), colour)

    def _hatch(self, size: int, reasons: Mapping[str, str]) -> None:
        look = {"facecolor": "#f2f2f2", "edgecolor": "#c8c8c8", "hatch": "//", "linewidth": 0}
        self.axes.axvspan(size / HALF_BAND, size * HALF_BAND, **look)
        is_shared = len(set(reasons.values())) == 1
        lines = [reason if is_shared else f"{dtype}: {reason}" for dtype, reason in reasons.items()]
        self.axes.text(
            size,
            0.5,
            NEWLINE.join(dict.fromkeys(lines)),
            transform=self.axes.get_xaxis_transform(),
            rotation=90,
            ha="center",
            va="center",
            bbox={"facecolor": "#f2f2f2", "edgecolor": "none", "pad": 1},
            **SMALL,
        )

    def _name_limits(self) -> None:
        """Write the names of the limits beside the axes, apart from one another."""
        beside = {"x": 1.01, "transform": self.axes.transAxes, **SMALL}
        self.axes.text(y=1.0, s=NEWLINE.join(self._above), va="bottom", color=MUTED, **beside)
        bottom, top = (self.axes.transData.transform((1, end))[1] for end in self.axes.get_ylim())
        lowest = -math.inf
        for value, text, colour in sorted(self._limits):
            height = (self.axes.transData.transform((1, value))[1] - bottom) / (top - bottom)
            lowest = max(height, lowest + LEAST_DISTANCE)
            self.axes.text(y=lowest, s=text, va="center", color=colour, **beside)

    def _gap(self, dtype: str, size: int, key: str) -> str | None:
        """Return why there is no value, None where there is one or where this dtype was not tried."""
        row = self.rows.get((dtype, size))
        if row is None or row[key] is not None:
            return None
        return STATUS_TEXT.get(row["status"], UNKNOWN_TEXT)

    def _is_noisy(self, dtype: str, size: int) -> bool:
        return self.rows.get((dtype, size), {}).get("status") == "noisy"

    def _drawn(self) -> list[float]:
        lines = [line for line in self.axes.get_lines() if len(line.get_xdata()) == len(self.sizes)]
        return [value for line in lines for value in line.get_ydata() if not math.isnan(value)]
