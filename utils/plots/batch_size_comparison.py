"""Six panels over the batch size: throughput, two latencies, memory, tokens, and GPU utilisation or the first call."""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.patheffects import withStroke

from utils.config import Targets
from utils.optimal import GOOD_ENOUGH
from utils.plots.panel import Panel
from utils.plots.style import (
    ALARM,
    COLOURS,
    INK,
    MARKERS,
    MUTED,
    SIZES,
    TIMES,
    Subject,
    new_figure,
    number,
    styled,
    unit,
)

Rows = Sequence[Mapping[str, Any]]
RATE = "throughput_samples_per_sec"


@styled
def figure(rows: Rows, about: Subject, best: Mapping[str, Any], targets: Targets) -> Figure:
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


def _throughput(axes: Axes, rows: Rows, best: Mapping[str, Any], targets: Targets) -> None:
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
    panel.finish(f"{RATE}_mean")


def _latency_per_sample(axes: Axes, rows: Rows, targets: Targets) -> None:
    key = "latency_per_sample_ms"
    scale, name = unit((row[f"{key}_mean"] for row in rows), TIMES)
    panel = Panel(axes, rows, "Latency per sample", f"{name} / sample")
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
    shares = {row["batch_size"]: row["padding_pct"] for row in rows if row["padding_pct"] is not None}
    for size, share in shares.items():  # every dtype has the same texts, and so the same padding
        panel.below(size, f"{share:.0f} %")
    axes.set_xlabel("batch size" if panel.is_crowded else "batch size, with the share of padding")
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
        Line2D([], [], color=COLOURS[each], marker=MARKERS[each], linewidth=2, markersize=7, label=each)
        for each in dtypes
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
