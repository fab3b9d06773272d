"""Six panels over the batch size: throughput, two latencies, memory, tokens, and GPU utilisation or the first call."""

import math
from typing import Any, Final, cast

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from utils.baseline import GOOD_ENOUGH, Optimal
from utils.report.pictures.style import (
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
from utils.settings import Targets

RATE: Final = "throughput_samples_per_sec"
UNKNOWN_TEXT = "not known"
HALF_BAND = 2**0.3  # of a gap, as a factor on the batch size
LOG_FROM = 12.0  # largest over smallest value from which a logarithmic axis shows more
OFF_SCALE = 2.0  # what lies further above all values than this is cut off: a target, the interval of two rounds
MARGIN = 2**0.6  # beside the outer batch sizes, as a factor
LEAST_DISTANCE = 0.085  # between the names of two batch sizes, as a share of the width


@picture("batch_size_comparison.png", "six panels over the batch size")
def figure(rows: Rows, about: Subject, best: Optimal, targets: Targets) -> Figure:
    """Return the figure for the rows of a sweep; `best` is the choice of `utils.baseline` for the first dtype."""
    drawn = new_figure(about, width=17, height=10.5)
    axes = drawn.subplots(2, 3).flat
    _throughput(axes[0], rows, best, targets)
    _latency_per_sample(axes[1], rows, targets)
    _latency_per_batch(axes[2], rows)
    _memory(axes[3], rows, about, targets)
    _tokens(axes[4], rows)
    if any(row["gpu_utilization_pct"] is not None for row in rows):
        _utilisation(axes[5], rows, targets)
    else:
        _cold_and_warm(axes[5], rows)
    drawn.legend(handles=_key(rows), loc="outside lower center", ncols=7, fontsize=12)
    return drawn


def _throughput(axes: Axes, rows: Rows, best: Optimal, targets: Targets) -> None:
    panel = Panel(axes, rows, "Throughput", "samples / s")
    panel.name_sizes({row["batch_size"]: row["padding_pct"] for row in rows if row["padding_pct"] is not None})
    panel.line(f"{RATE}_mean")
    panel.interval(f"{RATE}_ci_low", f"{RATE}_ci_high")
    target = targets.throughput_samples_per_sec
    panel.limit(target, f"target {number(target or 0)} samples/s", ALARM)
    if best["batch_size"] is not None:
        of_dtype = f" {panel.dtypes[0]}" if len(panel.dtypes) > 1 else ""
        panel.limit(GOOD_ENOUGH * cast("float", best["max_throughput"][RATE]), f"95 % of best{of_dtype}", MUTED)
        ring = {"marker": "o", "markersize": 17, "markerfacecolor": "none", "markeredgecolor": INK}
        name = f"optimal{of_dtype}: {best['batch_size']}"
        panel.key += axes.plot(best["batch_size"], best[RATE], **ring, linestyle="none", markeredgewidth=2, label=name)
    panel.finish(f"{RATE}_mean")


def _latency_per_sample(axes: Axes, rows: Rows, targets: Targets) -> None:
    key = "latency_per_sample_ms"
    scale, name = unit((row[f"{key}_mean"] for row in rows), TIMES)
    panel = Panel(axes, rows, "Time per sample (of its batch)", f"{name} / sample")
    panel.line(f"{key}_mean", scale)
    panel.interval(f"{key}_ci_low", f"{key}_ci_high", scale)
    target = targets.latency_per_sample_ms
    panel.limit(target and target / scale, f"target {number(target or 0)} ms", ALARM)
    panel.finish(f"{key}_mean")


def _latency_per_batch(axes: Axes, rows: Rows) -> None:
    key = "latency_per_batch_ms"
    scale, name = unit((row[f"{key}_median"] for row in rows), TIMES)
    panel = Panel(axes, rows, "Latency per batch", f"{name} / batch")
    panel.line(f"{key}_median", scale, label="median")
    panel.interval(f"{key}_q1", f"{key}_q3", scale, bars=False)
    if any(row[f"{key}_p95"] is not None for row in rows):
        panel.line(f"{key}_p95", scale, label="95th percentile", second=True)
    panel.finish(f"{key}_median", may_be_log=True)


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
    panel.limit(about.device_memory_mb / scale, f"this GPU {about.device_memory_mb / 1e3:.1f} GB", MUTED)
    target = targets.gpu_memory_mb
    panel.limit(target and target / scale, f"target {(target or 0) / 1e3:g} GB", ALARM)
    panel.finish("memory_peak_mb")


def _tokens(axes: Axes, rows: Rows) -> None:
    panel = Panel(axes, rows, "Tokens, real and with padding", "tokens / s")
    panel.line("tokens_per_sec_padded", label="with padding", second=True)
    panel.line("tokens_per_sec_real", label="real")
    panel.interval("tokens_per_sec_real", "tokens_per_sec_padded", bars=False)
    panel.finish("tokens_per_sec_real")


def _utilisation(axes: Axes, rows: Rows, targets: Targets) -> None:
    panel = Panel(axes, rows, "GPU utilisation", "% of the time with a kernel running")
    panel.line("gpu_utilization_pct")
    panel.limit(targets.gpu_utilization_pct, f"target {number(targets.gpu_utilization_pct or 0)} %", ALARM)
    panel.finish("gpu_utilization_pct")
    axes.set_ylim(0, 108)


def _cold_and_warm(axes: Axes, rows: Rows) -> None:
    scale, name = unit((row["cold_call_ms"] for row in rows), TIMES)
    panel = Panel(axes, rows, "First call and later calls", f"{name} / batch")
    panel.line("cold_call_ms", scale, label="first (cold)", second=True)
    panel.line("latency_per_batch_ms_median", scale, label="later (median)")
    panel.finish("latency_per_batch_ms_median", may_be_log=True)


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
    if any(row[f"{RATE}_mean"] is None for row in rows):
        marks.append(Patch(facecolor="#f2f2f2", edgecolor="#c8c8c8", hatch="//", label="not measured"))
    return marks


class Panel:
    """A diagram over the batch size on a log2 axis; `rows` are those of the sweep, in any order.

    `key` gathers what its legend explains.
    """

    def __init__(self, axes: Axes, rows: Rows, title: str, unit: str) -> None:
        self.axes = axes
        self.sizes = sorted({row["batch_size"] for row in rows})
        self.rows = {(row["dtype"], row["batch_size"]): row for row in rows}
        self.dtypes = list(dict.fromkeys(row["dtype"] for row in rows))
        self.key: list[Any] = []
        axes.set_title(title)
        axes.set_ylabel(unit)
        axes.set_xscale("log", base=2)
        self.name_sizes({})

    def name_sizes(self, padding: dict[int, float]) -> None:
        """Name the batch sizes that have room, each with its share of padding where it is given."""
        self.axes.set_xlabel("batch size, with the share of padding" if padding else "batch size")
        if not self.sizes:
            return
        width = math.log2(self.sizes[-1] / self.sizes[0] * MARGIN**2)
        named: list[int] = []
        for size in self.sizes:
            if not named or math.log2(size / named[-1]) / width >= LEAST_DISTANCE:
                named.append(size)
        self.axes.set_xlim(self.sizes[0] / MARGIN, self.sizes[-1] * MARGIN)
        self.axes.xaxis.set_minor_locator(NullLocator())
        texts = [f"{size}\n{padding[size]:.0f} %" if size in padding else str(size) for size in self.sizes]
        shown = [text if size in named else "" for size, text in zip(self.sizes, texts, strict=True)]
        self.axes.set_xticks(self.sizes, shown)

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
            lines = self.axes.plot(
                self.sizes, values, linestyle=":" if second else "-", linewidth=2, label=name, **look
            )
            self.key += lines if label else []
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
        """Draw a horizontal line at `value`; one far above all values is named in the legend alone."""
        drawn = self._drawn()
        if value is None or not drawn:
            return
        look = {"color": colour, "linestyle": (0, (5, 3)), "linewidth": 1.3, "zorder": 1}
        if value > OFF_SCALE * max(drawn):
            self.key.append(Line2D([], [], linestyle="none", label=f"↑ {text}"))
        else:
            self.key.append(self.axes.axhline(value, label=text, **look))

    def finish(self, key: str, *, may_be_log: bool = False) -> None:
        """Mark the gaps of `key`, choose the scale of the values, and explain the lines."""
        for size in self.sizes:
            self._mark_gap(size, key)
        drawn = self._drawn()
        if not drawn:
            self.axes.set_yticks([])
            return
        if may_be_log and min(drawn) > 0 and max(drawn) / min(drawn) >= LOG_FROM:
            self._log_axis(min(drawn), max(drawn))
        else:
            self.axes.set_ylim(0, min(1.04 * self.axes.get_ylim()[1], OFF_SCALE * max(drawn)))
        self.axes.yaxis.set_major_formatter(FuncFormatter(number))
        self.axes.grid(axis="y", color="#dddddd", linewidth=0.8)
        if self.key:
            self.axes.legend(handles=self.key, loc="best", markerscale=0.7)

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

    def _mark_gap(self, size: int, key: str) -> None:
        """Write why a batch size has no value; hatch it where no dtype has one."""
        reasons = {dtype: reason for dtype in self.dtypes if (reason := self._gap(dtype, size, key))}
        if not reasons:
            return
        is_shared = len(set(reasons.values())) == 1
        lines = [reason if is_shared else f"{dtype}: {reason}" for dtype, reason in reasons.items()]
        look: dict[str, Any] = {"rotation": 90, "ha": "center", "fontsize": 10, "zorder": 0.5}
        look["transform"] = self.axes.get_xaxis_transform()
        text = "\n".join(dict.fromkeys(lines))
        if len(reasons) < len(self.dtypes):
            self.axes.text(size, 0.03, text, va="bottom", color=COLOURS[next(iter(reasons))], **look)
            return
        hatched = {"facecolor": "#f2f2f2", "edgecolor": "#c8c8c8", "hatch": "//", "linewidth": 0}
        self.axes.axvspan(size / HALF_BAND, size * HALF_BAND, **hatched)
        box = {"facecolor": "#f2f2f2", "edgecolor": "none", "pad": 1}
        self.axes.text(size, 0.5, text, va="center", bbox=box, **{**look, "zorder": 3})

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
