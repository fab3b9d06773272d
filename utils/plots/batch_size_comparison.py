"""Six panels over the batch size: throughput, two latencies, memory, tokens, and GPU utilisation or the first call."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.patheffects import withStroke
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from utils.config import Targets
from utils.document import Optimal, Row
from utils.optimal import GOOD_ENOUGH
from utils.plots.style import (
    ALARM,
    COLOURS,
    INK,
    MARKERS,
    MUTED,
    SIZES,
    STATUS_TEXT,
    TIMES,
    Rows,
    Subject,
    new_figure,
    number,
    picture,
    unit,
)

RATE = "throughput_samples_per_sec"
UNKNOWN_TEXT = "not known"
TELLING = 1.1  # a rate differs from another by more than this factor, or there is nothing to explain
LEAST_RISE = 1.05  # of the throughput
LEAST_PADDING = 5  # percentage points
HALF_BAND = 2**0.3  # of a gap, as a factor on the batch size
LOG_FROM = 12.0  # largest over smallest value from which a logarithmic axis shows more
OFF_SCALE = 2.0  # what lies further above all values than this is cut off: a target, the interval of two rounds
LEAST_DISTANCE = 0.09  # between the names of two limits, as a share of the height
SMALL: dict[str, str | float] = {"fontsize": 10, "fontweight": "normal"}
MARGIN = 2**0.6  # beside the outer batch sizes, as a factor
LEAST_UPRIGHT, LEAST_TURNED = 0.085, 0.028  # share of the width that the name of a batch size needs
LINE_POINTS = 13
NEWLINE = "\n"


@picture("batch_size_comparison.png", "six panels over the batch size")
def figure(rows: Rows, about: Subject, best: Optimal, targets: Targets) -> Figure:
    """Return the figure for the rows of a sweep; `best` is the choice of `utils.optimal` for the first dtype."""
    drawn = new_figure(about, width=17, height=10.5)
    axes = drawn.subplots(2, 3).flat
    _throughput(axes[0], rows, best, targets)
    _latency_per_sample(axes[1], rows, targets)
    _latency_per_batch(axes[2], rows)
    _memory(axes[3], rows, about, targets)
    _tokens(axes[4], rows)
    if _is_known(rows, "gpu_utilization_pct"):
        _utilisation(axes[5], rows, targets)
    else:
        _cold_and_warm(axes[5], rows)
    drawn.legend(handles=_key(rows), loc="outside lower center", ncols=7, fontsize=12)
    return drawn


def _throughput(axes: Axes, rows: Rows, best: Optimal, targets: Targets) -> None:
    panel = Panel(axes, rows, "Throughput", "samples / s")
    panel.line(f"{RATE}_mean")
    panel.interval(f"{RATE}_ci_low", f"{RATE}_ci_high")
    target = targets.throughput_samples_per_sec
    panel.limit(target, f"target\n{number(target or 0)} samples/s", ALARM)
    if best["batch_size"] is not None:
        of_dtype = f" {panel.dtypes[0]}" if len(panel.dtypes) > 1 else ""
        panel.limit(GOOD_ENOUGH * best["max_throughput"][RATE], f"95 % of\nbest{of_dtype}", MUTED)
        place = (best["batch_size"], best[RATE])
        axes.plot(*place, marker="o", markersize=17, markerfacecolor="none", markeredgecolor=INK, markeredgewidth=2)
        name = f"optimal{of_dtype}: {best['batch_size']}"
        look = {"weight": "bold", "path_effects": [withStroke(linewidth=4, foreground="white")], "zorder": 5}
        axes.annotate(name, place, (0, -26), textcoords="offset points", ha="center", **look)
    for size, share in _padding(rows).items():
        panel.below(size, f"{share:.0f} %")
    axes.set_xlabel("batch size" if panel.is_crowded else "batch size, with the share of padding")
    own = f"{panel.dtypes[0]}, " if len(panel.dtypes) > 1 else ""
    panel.note([f"{own}{line}" for line in _bends([row for row in rows if row["dtype"] == panel.dtypes[0]])])
    panel.finish(f"{RATE}_mean")


def _padding(rows: Rows) -> dict[int, float]:
    """Return the share of padding of each batch size; every dtype has the same texts, and so the same padding."""
    return {row["batch_size"]: row["padding_pct"] for row in rows if row["padding_pct"] is not None}


def _bends(rows: Rows) -> list[str]:
    """Return why the throughput of one dtype rises to its best batch size and falls beyond it, where it does."""
    known = [row for row in rows if row[f"{RATE}_mean"] and row["tokens_per_sec_padded"]]
    if len(known) < 2:
        return []
    first, best, last = known[0], max(known, key=lambda row: row[f"{RATE}_mean"]), known[-1]
    size, said = best["batch_size"], []
    if best[f"{RATE}_mean"] > LEAST_RISE * first[f"{RATE}_mean"]:
        said.append(f"up to {size}: the fixed cost of a call is shared by more texts")
    if best[f"{RATE}_mean"] > TELLING * last[f"{RATE}_mean"]:
        dearer = best["tokens_per_sec_padded"] / last["tokens_per_sec_padded"]
        padding = [each["padding_pct"] or 0.0 for each in (best, last)]
        reasons = (
            [f"padding, {padding[0]:.0f} to {padding[1]:.0f} %"] if padding[1] - padding[0] > LEAST_PADDING else []
        )
        reasons += [f"a token costs {dearer:.2g} times as much{_moved(best, last)}"] if dearer > TELLING else []
        said += [f"beyond {size}: {' and '.join(reasons)}"] if reasons else []
    return said


def _moved(best: Row, last: Row) -> str:
    """Return how much more memory a batch then goes through, where that is known."""
    moved = [each.get("bytes_per_batch") for each in (best, last)]
    if moved[0] is None or moved[1] is None:
        return ""
    size, name = unit([moved[1] / 1e6], SIZES)
    return f"\n  (a batch moves {number(moved[1] / 1e6 / size)} {name}, not {number(moved[0] / 1e6 / size)})"


def _latency_per_sample(axes: Axes, rows: Rows, targets: Targets) -> None:
    key = "latency_per_sample_ms"
    scale, name = unit((row[f"{key}_mean"] for row in rows), TIMES)
    panel = Panel(axes, rows, "Time per sample (of its batch)", f"{name} / sample")
    panel.line(f"{key}_mean", scale)
    panel.interval(f"{key}_ci_low", f"{key}_ci_high", scale)
    target = targets.latency_per_sample_ms
    panel.limit(target and target / scale, f"target\n{number(target or 0)} ms", ALARM)
    panel.finish(f"{key}_mean")


def _latency_per_batch(axes: Axes, rows: Rows) -> None:
    key = "latency_per_batch_ms"
    scale, name = unit((row[f"{key}_median"] for row in rows), TIMES)
    panel = Panel(axes, rows, "Latency per batch", f"{name} / batch")
    panel.line(f"{key}_median", scale, label="median")
    panel.interval(f"{key}_q1", f"{key}_q3", scale, bars=False)
    if _is_known(rows, f"{key}_p95"):
        panel.line(f"{key}_p95", scale, label="95th percentile", second=True)
    panel.finish(f"{key}_median", may_be_log=True, legend=True)


def _memory(axes: Axes, rows: Rows, about: Subject, targets: Targets) -> None:
    if about.device_memory_mb is None:
        scale, name = unit((row["memory_cpu_peak_mb"] for row in rows), SIZES)
        panel = Panel(axes, rows, "CPU memory, peak of the process", name)
        panel.line("memory_cpu_peak_mb", scale)
        panel.finish("memory_cpu_peak_mb")
        return
    scale, name = unit((row["memory_peak_reserved_mb"] or row["memory_peak_mb"] for row in rows), SIZES)
    panel = Panel(axes, rows, "GPU memory, peak", name)
    panel.line("memory_peak_reserved_mb", scale, label="reserved", second=True)
    panel.line("memory_peak_mb", scale, label="allocated")
    panel.limit(about.device_memory_mb / scale, f"this GPU\n{about.device_memory_mb / 1e3:.1f} GB", MUTED)
    target = targets.gpu_memory_mb
    panel.limit(target and target / scale, f"target\n{(target or 0) / 1e3:g} GB", ALARM)
    panel.finish("memory_peak_mb", legend=True)


def _tokens(axes: Axes, rows: Rows) -> None:
    panel = Panel(axes, rows, "Tokens, real and with padding", "tokens / s")
    panel.line("tokens_per_sec_padded", label="with padding", second=True)
    panel.line("tokens_per_sec_real", label="real")
    panel.interval("tokens_per_sec_real", "tokens_per_sec_padded", bars=False)
    panel.finish("tokens_per_sec_real", legend=True)


def _utilisation(axes: Axes, rows: Rows, targets: Targets) -> None:
    panel = Panel(axes, rows, "GPU utilisation", "% of the time with a kernel running")
    panel.line("gpu_utilization_pct")
    target = targets.gpu_utilization_pct
    panel.limit(target, f"target\n{number(target or 0)} %", ALARM)
    panel.finish("gpu_utilization_pct")
    axes.set_ylim(0, 108)


def _cold_and_warm(axes: Axes, rows: Rows) -> None:
    scale, name = unit((row["cold_call_ms"] for row in rows), TIMES)
    panel = Panel(axes, rows, "First call and later calls", f"{name} / batch")
    panel.line("cold_call_ms", scale, label="first (cold)", second=True)
    panel.line("latency_per_batch_ms_median", scale, label="later (median)")
    panel.finish("latency_per_batch_ms_median", may_be_log=True, legend=True)


def _is_known(rows: Rows, key: str) -> bool:
    return any(row[key] is not None for row in rows)


def _key(rows: Rows) -> list[Any]:
    """Return what the marks of all panels mean."""
    dtypes = dict.fromkeys(row["dtype"] for row in rows)
    marks: list[Any] = [
        Line2D([], [], color=COLOURS[dtype], marker=MARKERS[dtype], linewidth=2, markersize=7, label=dtype)
        for dtype in dtypes
    ]
    if any(row["status"] == "noisy" for row in rows):
        hollow = {"marker": "o", "markerfacecolor": "white", "markeredgewidth": 2, "markersize": 7}
        marks.append(Line2D([], [], color=MUTED, linestyle="none", label="hollow: noisy", **hollow))
    marks.append(
        Patch(facecolor=MUTED, alpha=0.3, label="band: 95 % interval; per batch: middle half; tokens: padding")
    )
    if any(row["throughput_samples_per_sec_mean"] is None for row in rows):
        marks.append(Patch(facecolor="#f2f2f2", edgecolor="#c8c8c8", hatch="//", label="not measured"))
    return marks


class Panel:
    """A diagram over the batch size on a log2 axis; `rows` are those of the sweep, in any order."""

    def __init__(self, axes: Axes, rows: Rows, title: str, unit: str) -> None:
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
        values = [self.rows.get((dtype, size), {}).get(key) for size in self.sizes]
        return [math.nan if value is None else value / scale for value in values]

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

    def note(self, lines: Sequence[str]) -> None:
        """Write lines between the title and the axes."""
        text = NEWLINE.join(lines)
        if text:
            self.axes.set_title(self.axes.get_title(loc="left"), pad=10 + LINE_POINTS * (1 + text.count(NEWLINE)))
            at = {"textcoords": "offset points", "xycoords": "axes fraction"}
            self.axes.annotate(text, (0, 1), (0, 6), ha="left", va="bottom", color=MUTED, **at, **SMALL)

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
