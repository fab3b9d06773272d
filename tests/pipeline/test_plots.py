"""The figures: what is drawn is what was measured, and what was not measured is said, not drawn as zero."""

import json
import math
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import pandas as pd
import pytest
from matplotlib.axes import Axes
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.patches import StepPatch

from boundby.trace import analyze, read_trace
from boundby.trace.gaps import CAUSES
from boundby.trace.linking import KINDS
from tests import baseline_document as results
from tests import predicted_quality as predicted
from tests import trace_document as traces
from tests.diagnosed_rows import diagnosed
from tests.report_reading import answered
from tests.report_reading import variants as reported_variants
from tests.traces import GPU_TRACES, REAL_NAMES
from utils.baseline.document import with_verdicts
from utils.report.pictures import (
    batch_size_comparison,
    breakdown,
    calibration,
    confusion,
    memory,
    metrics_heatmap,
    operators,
    style,
    timeline,
    variants,
)
from utils.settings.schema import Targets
from utils.tracing import trace_document as document
from utils.tracing.traces import Examination, Examined

NO_TARGETS = Targets(
    latency_per_sample_ms=None,
    throughput_samples_per_sec=None,
    gpu_memory_mb=None,
    gpu_utilization_pct=None,
    accuracy=None,
)
PER_SAMPLE = "Time per sample (of its batch)"
CPU_TITLES = [
    "Throughput",
    PER_SAMPLE,
    "Latency per batch",
    "CPU memory, peak of the process",
    "Tokens, real and with padding",
    "First call and later calls",
]


def comparison(document: dict[str, Any], targets: Targets = NO_TARGETS) -> Figure:
    """Return the figure of a document; equal ones share it."""
    return _comparison(json.dumps(document), targets)


@cache
def _comparison(content: str, targets: Targets) -> Figure:
    document = json.loads(content)
    about = style.subject(document, results.CPU_MACHINE["cpu"])
    return batch_size_comparison.figure(document["batch_sizes"], about, document["optimal"], targets)


def heatmap(document: dict[str, Any]) -> Figure:
    return metrics_heatmap.figure(document["batch_sizes"], style.subject(document), document["optimal"])


def draw(figure: Figure) -> None:
    """Lay the figure out; any warning is an error."""
    figure.draw_without_rendering()


def titles(figure: Figure) -> list[str]:
    return [axes.get_title(loc="left") for axes in figure.axes]


def panel(figure: Figure, title: str) -> Axes:
    return figure.axes[titles(figure).index(title)]


def texts(axes: Axes) -> list[str]:
    return [text.get_text() for text in axes.texts]


def curve(axes: Axes, label: str) -> list[float]:
    [line] = [line for line in axes.get_lines() if line.get_label() == label]
    return [float(value) for value in line.get_ydata()]


def column(rows: Sequence[dict[str, Any]], key: str) -> list[float]:
    return [row[key] for row in rows]


def test_comparison_has_six_panels_with_titles_and_units():
    figure = comparison(results.document(results.cpu_rows()))
    assert titles(figure) == CPU_TITLES
    units = ["samples / s", "ms / sample", "ms / batch", "MB", "tokens / s", "ms / batch"]
    assert [axes.get_ylabel() for axes in figure.axes] == units
    assert all(axes.get_xlabel().startswith("batch size") for axes in figure.axes)
    figure = comparison(results.gpu_document())
    assert titles(figure)[3] == "GPU memory, peak"
    assert titles(figure)[5] == "GPU utilisation"
    assert curve(panel(figure, "GPU memory, peak"), "allocated float32")[:2] == pytest.approx([3.0512, 6.2768])  # GB
    rows = [{**row, "gpu_utilization_pct": None} for row in results.gpu_rows()]
    assert titles(comparison(results.gpu_document(rows)))[5] == "First call and later calls"
    units = [comparison(ODD_DOCUMENTS[name]()).axes[1].get_ylabel() for name in ("microseconds", "one row", "minutes")]
    assert units == ["µs / sample", "ms / sample", "s / sample"]


def test_curves_are_the_measured_values():
    rows = results.cpu_rows()
    figure = comparison(results.document(rows))
    rates = column(rows, "throughput_samples_per_sec_mean")
    assert curve(panel(figure, "Throughput"), "float32") == rates
    assert curve(panel(figure, "Latency per batch"), "median") == column(rows, "latency_per_batch_ms_median")
    [best] = [
        line
        for line in panel(figure, "Throughput").get_lines()
        if len(set(line.get_ydata())) == 1 < len(line.get_ydata())
    ]
    assert best.get_ydata()[0] == 0.95 * max(rates)
    assert "95 % of best" in labels(panel(figure, "Throughput"))


def test_axis_names_the_batch_sizes_that_have_room_and_their_padding():
    rows = results.cpu_rows([1, 3, 24, 100], rounds=2)
    axes = comparison(results.document(rows)).axes
    assert list(axes[0].get_xticks()) == [1, 3, 24, 100]
    padded = [f"{row['batch_size']}\n{row['padding_pct']:.0f} %" for row in rows]
    assert named(axes[0].get_xticklabels()) == padded and named(axes[1].get_xticklabels()) == ["1", "3", "24", "100"]
    sizes = list(range(1, 40))
    axes = comparison(results.document(results.cpu_rows(sizes, rounds=1))).axes[1]
    assert list(axes.get_xticks()) == sizes
    assert 5 < sum(map(bool, named(axes.get_xticklabels()))) < len(sizes)


def test_what_ran_out_of_memory_or_failed_is_a_gap_and_never_a_zero():
    rows = results.gpu_rows(["float32"])
    figure = comparison(results.gpu_document(rows))
    for axes in figure.axes:
        for line in axes.get_lines():
            values = [float(value) for value in line.get_ydata()]
            if len(values) == len(rows):
                assert all(math.isnan(value) for value in values[5:])
                assert all(value > 0 for value in values if not math.isnan(value))
        assert {"out of memory", "not tried (memory)"} <= set(texts(axes))
    figure = comparison(results.gpu_document())
    axes = panel(figure, "Throughput")
    assert math.isnan(curve(axes, "float32")[5]) and curve(axes, "bfloat16")[5] > 1000
    [name] = [text for text in axes.texts if text.get_text() == "out of memory"]
    assert name.get_color() == style.COLOURS["float32"]
    assert "float32: not tried (memory)\nbfloat16: out of memory" in texts(axes)
    axes = comparison(results.document(results.cpu_rows(failed=[8]))).axes[0]
    assert [math.isnan(value) for value in curve(axes, "float32")] == [False, False, False, True, False, False]
    assert "failed" in texts(axes)


def test_noisy_points_are_hollow_and_boundless_intervals_flatten_nothing():
    figure = comparison(results.document(results.cpu_rows(noisy=[4])))
    for axes in figure.axes:
        hollow = [line for line in axes.get_lines() if to_rgba(line.get_markerfacecolor()) == to_rgba("white")]
        assert hollow
        for line in hollow:
            known = [
                size for size, value in zip(line.get_xdata(), line.get_ydata(), strict=True) if not math.isnan(value)
            ]
            assert known == [4]
    quiet = comparison(results.document(results.cpu_rows())).axes[0]
    assert not any(to_rgba(line.get_markerfacecolor()) == to_rgba("white") for line in quiet.get_lines())
    rows = results.cpu_rows([1, 2])
    rows[0]["throughput_samples_per_sec_ci_high"] = 1e15  # as two rounds that differ much give
    axes = comparison(results.document(rows)).axes[0]
    assert axes.get_ylim()[1] == 2 * max(column(rows, "throughput_samples_per_sec_mean"))


def test_optimum_and_target_are_marked():
    document = results.document(results.cpu_rows())
    assert f"optimal: {document['optimal']['batch_size']}" in labels(comparison(document).axes[0])
    assert "optimal float32: 8" in labels(comparison(results.gpu_document()).axes[0])
    near = panel(
        comparison(document, NO_TARGETS.model_copy(update={"latency_per_sample_ms": 4})),
        PER_SAMPLE,
    )
    assert [4, 4] in [list(line.get_ydata()) for line in near.get_lines()]
    assert "target 4 ms" in labels(near)
    far = panel(
        comparison(document, NO_TARGETS.model_copy(update={"latency_per_sample_ms": 50})),
        PER_SAMPLE,
    )
    assert "↑ target 50 ms" in labels(far)
    assert [50, 50] not in [list(line.get_ydata()) for line in far.get_lines()]
    assert not any("target" in text for axes in comparison(document).axes for text in labels(axes))


def test_heading_says_what_was_measured():
    title = comparison(results.gpu_document()).get_suptitle()
    assert title.splitlines() == [
        "codefactory4791/intent-classification-qwen, float32 and bfloat16",
        "on NVIDIA A100-SXM4-40GB, codefactory4791/amazon_test (369,475 texts), measured 2026-08-22",
    ]
    assert (
        comparison(results.document(results.cpu_rows()))
        .get_suptitle()
        .endswith("on AMD EPYC 7B13, quickstart (2,000 texts), measured 2026-08-22")
    )


@pytest.mark.parametrize("make", [comparison, heatmap])
def test_synthetic_data_is_called_so(make):
    rows = results.cpu_rows([1, 2])
    assert "synthetic data" in [text.get_text() for text in make(results.document(rows)).texts]
    assert "synthetic data" not in [text.get_text() for text in make(results.document(rows, synthetic=False)).texts]


ODD_DOCUMENTS = {
    "two dtypes": lambda: results.gpu_document(),
    "one row": lambda: results.document(results.cpu_rows([8])),
    "one round": lambda: results.document(results.cpu_rows(rounds=1)),
    "nothing fits": lambda: results.gpu_document(results.gpu_rows(["float32"], [1, 4], {"float32": 1})),
    "microseconds": lambda: results.document(results.cpu_rows(speed=results.Speed(1e-7, 3e-10))),
    "minutes": lambda: results.document(results.cpu_rows(speed=results.Speed(40, 0.2))),
    "crowded": lambda: results.document(results.cpu_rows(list(range(1, 40)), rounds=1)),
    "hostile names": lambda: results.document(
        results.cpu_rows([1, 2]), model={"name": "$\\frac{模型}$_^\x1b[31m" + "x" * 400}
    ),
}


@pytest.mark.parametrize("name", ODD_DOCUMENTS)
def test_every_figure_can_be_drawn_without_a_warning(name):
    document = ODD_DOCUMENTS[name]()
    draw(comparison(document, Targets()))
    draw(heatmap(document))


def test_name_is_drawn_as_it_is_without_control_characters():
    title = comparison(ODD_DOCUMENTS["hostile names"]()).get_suptitle()
    assert title.startswith("$\\frac{??}$_^[31mxxx") and "\x1b" not in title
    assert len(title.splitlines()[0]) < 80


def test_heatmap_normalises_each_row_and_says_why_cells_are_empty():
    nan = math.nan
    values = [[1.0, 2.0, 3.0], [1.0, 2.0, 3.0], [1.0, nan, 3.0], [7.0, 7.0, 7.0], [nan, nan, nan]]
    shares = metrics_heatmap.normalised(pd.DataFrame(values), [True, False, True, True, False])
    expected = [[0.0, 0.5, 1.0], [1.0, 0.5, 0.0], [0.0, nan, 1.0], [nan, nan, nan], [nan, nan, nan]]
    np.testing.assert_array_equal(shares.to_numpy(), expected)
    rows = results.gpu_rows(["float32"])
    axes = heatmap(results.gpu_document(rows)).axes[0]
    names = [label.get_text() for label in axes.get_yticklabels()]
    assert names[0] == "throughput, samples/s ↑" and "latency per sample, ms ↓" in names
    cells = {tuple(int(position) for position in text.get_position()): text.get_text() for text in axes.texts}
    rate = rows[0]["throughput_samples_per_sec_mean"]
    assert cells[0, 0] == style.number(rate) == "90.7"
    assert cells[5, 0] == "out of\nmemory" and cells[6, 0] == "not tried\n(memory)"
    p95 = next(line for line, name in enumerate(names) if "95th percentile" in name)
    assert cells[4, p95] == "not known"
    assert len(cells) == len(names) * len(rows)
    assert axes.get_xlabel() == "batch size; framed: optimal"
    axes = heatmap(results.document(results.cpu_rows([1, 2]))).axes[0]
    assert not any("GPU" in label.get_text() for label in axes.get_yticklabels())


def operator_figure(rows: Sequence[dict[str, Any]]) -> Figure:
    return operators.figure(rows, style.subject(results.document(results.cpu_rows([1]))))


def test_operators_are_bars_with_share_and_calls():
    rows = results.operators()[::-1]
    [axes] = operator_figure(rows).axes
    widths = [bar.get_width() for bar in axes.patches]
    assert widths == sorted((row["cpu_self_ms"] for row in rows), reverse=True)[: operators.SHOWN]
    assert axes.get_yticklabels()[0].get_text() == "aten::addmm"
    assert texts(axes)[0] == "48.6 ms (30.0 %), 96 calls"
    assert axes.get_title(loc="left") == "Operators by their own CPU time"
    cpu, gpu = operator_figure(results.operators(device=True)).axes
    assert gpu.get_title(loc="left") == "Operators by the GPU time they cause"
    assert texts(gpu)[0] == "286 ms (68.0 %), 288 calls"
    assert "overlap" in gpu.get_xlabel() and "without" in cpu.get_xlabel()
    odd = {"calls": 3, "cpu_total_ms": 0.0, "cpu_self_ms": 0.0, "cpu_self_pct": None, "device_total_ms": None}
    draw(operator_figure([{**odd, "name": "$\\bad{ _x^" + "y" * 300, "device_pct": None}]))
    draw(operator_figure(results.operators(device=True)))


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0, "0"), (1e-9, "1e-09"), (0.00123456, "0.00123"), (1.234, "1.23"), (99.96, "100"), (1234, "1234"),
     (9999.6, "10k"), (12345, "12.3k"), (999_999, "1M"), (4_560_000, "4.56M"), (1.5e9, "1.5G"), (1e13, "1e+13")],
)  # fmt: skip
def test_numbers_are_short(value, shown):
    assert style.number(value) == shown


def test_unit_follows_the_largest_value():
    assert style.unit([0.5, None, 3000.0], style.TIMES) == (1e3, "s")
    assert style.unit([0.0001], style.TIMES) == (1e-3, "µs")
    assert style.unit([None], style.SIZES) == (1.0, "MB")


def test_bars_are_the_shares_of_the_breakdown_with_padding_hatched_at_their_ends():
    document = results.document(answered(diagnosed(results.cpu_rows([1, 8]))))
    rows = with_verdicts(document["batch_sizes"])
    figure = breakdown.figure(rows, style.subject(document))
    figure.draw_without_rendering()
    [axes] = figure.axes
    shapes = [str(row["verdict"].reference) for row in rows]
    assert [label.get_text() for label in axes.get_yticklabels()] == shapes
    own = [bar for bar in axes.patches if bar.get_hatch() is None]
    assert [bar.get_width() for bar in own[:5]] == pytest.approx([50, 5, 15, 20, 12])  # left over is negative: no bar
    hatched = [bar for bar in axes.patches if bar.get_hatch()]
    ends = [bar.get_x() + bar.get_width() for bar in hatched]
    assert ends == pytest.approx([bar.get_x() + bar.get_width() for bar in own[5:10]])
    share = document["batch_sizes"][1]["padding_pct"] / 100
    assert [bar.get_width() for bar in hatched] == pytest.approx([share * width for width in (50, 5, 15, 20, 12)])
    assert axes.get_xlim()[1] == pytest.approx(102)


ABOUT = style.Subject("a model, float32", "on a machine, texts, measured 2026-11-21", is_synthetic=False)


def drawn(figure: Figure) -> Figure:
    """Lay the figure out; any warning is an error."""
    figure.draw_without_rendering()
    return figure


def labels(axes: Axes) -> list[str]:
    legend = axes.get_legend()
    return [text.get_text() for text in legend.get_texts()] if legend else []


def title(axes: Axes) -> str:
    return axes.get_title(loc="left")


def areas(axes: Axes) -> list[np.ndarray]:
    patches = [patch for patch in axes.patches if isinstance(patch, StepPatch)]
    return [patch.get_data().values - patch.get_data().baseline for patch in patches]


def test_every_kind_and_cause_has_a_look_of_its_own():
    assert set(timeline.WORK) == {*KINDS, "operators"} and set(timeline.IDLE) == set(CAUSES)
    together = [
        tuple(look.values()) for name, look in {**timeline.WORK, **timeline.IDLE}.items() if name != "operators"
    ]
    assert len(set(together)) == len(together)


def test_timeline_fills_every_moment_and_names_what_took_time():
    [axes] = drawn(timeline.figure(traces.gpu(), ABOUT)).axes
    assert np.allclose(sum(areas(axes)), 100)
    assert labels(axes) == [
        "idle: python 2.4 ms (6.0 %)",
        "idle: launch latency 0.1 ms (0.2 %)",
        "idle: input 24 ms (60.0 %)",
        "idle: launch 0.4 ms (1.0 %)",
        "communication 3.5 ms (8.8 %)",
        "compute 9.6 ms (24.0 %)",
    ]
    assert title(axes) == "GPU 0 is at work for 33 % of 40 ms"
    assert [text for text in texts(axes) if text] == ["step 0", "1", "2", "3"]


def test_timeline_is_drawn_of_any_device_and_number_of_steps():
    [axes] = drawn(timeline.figure(traces.cpu(), ABOUT)).axes
    assert labels(axes) == ["python 2.5 ms (6.2 %)", "untraced 7.5 ms (18.8 %)", "operators 30 ms (75.0 %)"]
    assert title(axes) == "The CPU is in operators for 75 % of 40 ms"
    [device] = traces.gpu()["devices"]
    devices = [{**device, "device": number, "steps": []} for number in range(timeline.SHOWN + 2)]
    figure = drawn(timeline.figure(traces.gpu(devices=devices), ABOUT))
    assert [title(axes)[:5] for axes in figure.axes] == [f"GPU {number}" for number in range(timeline.SHOWN)]
    assert figure.axes[-1].get_xlabel() == "ms since the trace began"
    [device] = traces.gpu()["devices"]
    steps = [{**device["steps"][0], "number": position, "start_ms": position * 0.05} for position in range(800)]
    [axes] = drawn(timeline.figure(traces.gpu(devices=[{**device, "steps": steps}]), ABOUT)).axes
    assert 5 < len(texts(axes)) <= 1 / timeline.LEAST_DISTANCE + 1


def test_memory_shows_the_steps_the_peak_and_what_the_allocator_holds():
    over_time, _ = drawn(memory.figure(traces.gpu(), ABOUT)).axes
    [use] = traces.gpu()["memory"]
    allocated, reserved, *_ = over_time.get_lines()
    assert list(allocated.get_ydata()) == [size / 1e9 for size in use["timeline"]["allocated_bytes"]]
    assert set(reserved.get_ydata()) == {1.0}
    assert "peak 0.964 GB" in texts(over_time) and "step 0" in texts(over_time)
    assert title(over_time) == "GPU 0: allocated memory"
    assert labels(over_time) == ["allocated", "reserved by the allocator"]


def test_owners_of_the_peak_add_up_to_it_and_small_ones_stand_together():
    [use] = traces.gpu()["memory"]
    _, owners = drawn(memory.figure(traces.gpu(), ABOUT)).axes
    widths = [patch.get_width() for patch in owners.patches]
    assert sum(widths) == pytest.approx(use["peak_bytes"] / 1e9)
    assert [text.get_text() for text in owners.get_yticklabels()] == ["aten::mm", "allocated before the trace"]
    assert texts(owners) == ["64 MB (6.6 %), 5x", "900 MB (93.4 %)"]
    [use] = traces.cpu()["memory"]
    small = [{"operator": f"aten::op{n}", "inside": None, "bytes": 100, "allocations": 1} for n in range(5)]
    use = {**use, "owners": [*use["owners"], *small], "others_bytes": 50, "peak_bytes": use["peak_bytes"] + 550}
    over_time, owners = drawn(memory.figure(traces.cpu(memory=[use]), ABOUT)).axes
    assert [text.get_text() for text in owners.get_yticklabels()] == [
        "aten::addmm",
        "aten::gelu",
        "all other operators",
    ]
    assert texts(owners)[-1].startswith("550 bytes")
    assert title(over_time) == "CPU: memory allocated since the trace began"
    [use] = traces.cpu()["memory"]
    owner = {"operator": None, "inside": "Qwen2Attention_0", "bytes": use["peak_bytes"], "allocations": 3}
    _, owners = drawn(memory.figure(traces.cpu(memory=[{**use, "owners": [owner]}]), ABOUT)).axes
    assert owners.get_yticklabels()[0].get_text() == "outside of all operators\nQwen2Attention_0"


def test_memory_without_owners_or_size_is_drawn():
    [use] = traces.cpu()["memory"]
    empty = {
        **use,
        "owners": [],
        "peak_bytes": 0,
        "timeline": {**use["timeline"], "times_ms": [1.0], "allocated_bytes": [0]},
    }
    assert len(drawn(memory.figure(traces.cpu(memory=[empty, use]), ABOUT)).axes) == 4


@pytest.mark.parametrize("name", REAL_NAMES)
def test_timeline_of_a_real_trace_fills_every_moment(name):
    if not GPU_TRACES.is_dir():
        pytest.skip("needs the traces in ../shared, which are not here")
    analysis = analyze(read_trace(GPU_TRACES / name))
    result = Examination((Examined.of(analysis),), (), "name")
    [trace] = document.of(result)["traces"]
    [axes] = drawn(timeline.figure(trace, ABOUT)).axes
    assert np.allclose(sum(areas(axes)), 100)
    [device] = trace["devices"]
    took = [*device["exposed_ms"].values(), *device["idle_by_cause_ms"].values()]
    assert len(labels(axes)) == sum(spent > 0 for spent in took)


def first(figure: Figure) -> Axes:
    return figure.axes[0]


def laid_out(figure: Figure) -> Axes:
    """Lay the figure out, where any warning is an error; return its first axes."""
    figure.draw_without_rendering()
    return figure.axes[0]


def named(labels) -> list[str]:
    return [label.get_text() for label in labels]


def cells(axes: Axes) -> dict[tuple[int, int], str]:
    positions = {
        (text.get_position()[1], text.get_position()[0]): text.get_text() for text in axes.texts if text.get_text()
    }
    return {(int(line), int(column)): text for (line, column), text in positions.items()}


@pytest.mark.parametrize("classes", [2, 6, confusion.SHOWN])
def test_few_classes_are_all_shown_in_their_order(classes):
    counts = predicted.random_counts(classes, 400)
    names = [f"class {number}" for number in range(classes)]
    axes = laid_out(confusion.figure(counts, ABOUT, names))
    assert named(axes.get_yticklabels()) == named(axes.get_xticklabels()) == names
    assert cells(axes) == {
        (line, column): str(counts[line, column])
        for line in range(classes)
        for column in range(classes)
        if counts[line, column] or line == column
    }
    wrong = counts.sum() - np.trace(counts)
    assert axes.get_title(loc="left") == f"{classes} classes: {wrong} of 400 rows are predicted wrong"


@pytest.mark.parametrize("classes", [77, 1000])
def test_of_many_classes_the_most_confused_are_shown_and_the_title_says_so(classes):
    counts = predicted.random_counts(classes, 20 * classes)
    axes = laid_out(confusion.figure(counts, ABOUT, [f"class {number}" for number in range(classes)]))
    names = named(axes.get_yticklabels())
    shown = [int(name.split()[1]) for name in names]
    assert len(set(shown)) == confusion.SHOWN and named(axes.get_xticklabels()) == [*names, confusion.OTHERS]
    together = counts + counts.T
    np.fill_diagonal(together, 0)
    assert set(np.unravel_index(together.argmax(), together.shape)) <= set(shown)
    inside = counts[np.ix_(shown, shown)]
    mistakes = [inside.sum() - np.trace(inside), counts.sum() - np.trace(counts)]
    assert axes.get_title(loc="left") == (
        f"The {confusion.SHOWN} most confused of {classes:,} classes: {mistakes[0]:,} of all {mistakes[1]:,} mistakes "
        "are among them"
    )


def test_counts_of_shown_classes_add_up_to_all_their_rows():
    counts = predicted.random_counts(77, 2000)
    shown = confusion.chosen(counts)
    part = confusion.with_others(counts, shown)
    assert part.shape == (confusion.SHOWN, confusion.SHOWN + 1)
    assert part.sum(axis=1).tolist() == counts.sum(axis=1)[shown].tolist()


def test_class_without_rows_is_said_and_zero_hits_are_drawn_as_zero():
    axes = first(confusion.figure(np.array([[0, 4, 0], [1, 2, 0], [0, 0, 0]]), ABOUT, "abc"))
    assert confusion.NO_ROWS in [text.get_text() for text in axes.texts]
    assert cells(axes)[0, 0] == "0" and cells(axes)[0, 1] == "4"
    drawn_cells = [mesh.get_array().reshape(3, 3) for mesh in axes.collections]
    assert all(mesh.mask[2].all() for mesh in drawn_cells)  # what is not drawn shows the grey behind it
    assert to_rgba(axes.get_facecolor()) == to_rgba(confusion.GREY)


def test_names_that_somebody_else_chose_are_drawn_as_they_are():
    names = ["$x^2$", "a very long name of a class that nobody can read to its end at all", "\u202eevil\n"]
    axes = laid_out(confusion.figure(np.diag([1, 2, 3]), ABOUT, names))
    [formula, long, control] = named(axes.get_yticklabels())
    assert formula == "$x^2$" and len(long) == confusion.LONGEST_CLASS and control == "evil"


# Calibration


def test_every_bin_is_a_point_with_its_interval():
    result = predicted.reliability(3000, overconfident=0.1)
    axes = first(calibration.figure(result, ABOUT))
    [line] = [line for line in axes.get_lines() if line.get_label() == "bin, with its 95 % interval"]
    assert list(line.get_xdata()) == [group.mean_confidence for group in result.bins]
    assert list(line.get_ydata()) == [group.accuracy for group in result.bins]
    intervals = [collection.get_segments()[0][:, 1].tolist() for collection in axes.collections]
    assert intervals == [[group.accuracy_ci_low, group.accuracy_ci_high] for group in result.bins]
    assert axes.get_title(loc="left") == "Right predictions by confidence, 15 bins of equal mass"
    low, high = axes.get_ylim()
    assert low <= min(end for end, _ in intervals) and high >= 1


@pytest.mark.parametrize("rows", [1, 3000])
def test_bins_of_few_rows_are_hollow_and_no_others(rows):
    axes = laid_out(calibration.figure(predicted.reliability(rows), ABOUT))
    [line] = [line for line in axes.get_lines() if line.get_label().startswith("bin")]
    assert line.get_label() == f"bin{' of few rows' if rows == 1 else ''}, with its 95 % interval"
    assert (line.get_markerfacecolor() == "white") == (rows == 1)


def test_distribution_has_all_predictions_right_ones_below_wrong_ones():
    result = predicted.reliability(500)
    axes = calibration.figure(result, ABOUT).axes[1]
    heights = [sum(bar.get_height() for bar in container) for container in axes.containers]
    assert heights == [sum(result.distribution.correct), 500 - sum(result.distribution.correct)]
    assert axes.get_title(loc="left") == "How sure it is: 500 predictions"
    assert [bar.get_hatch() for bar in axes.containers[1]][:1] == ["//"]  # not by colour alone


def test_every_variant_is_a_line_with_its_speed_and_what_it_does_to_the_answers():
    result: Any = reported_variants()
    rows = result["variants"]
    speed, answers = drawn(variants.figure(rows, ABOUT, result)).axes
    assert named(speed.get_yticklabels()) == [f"{row['words']}, 25 MB" for row in rows]
    marks = [line for line in speed.get_lines() if line.get_marker() == "o"]
    assert [float(mark.get_xdata()[0]) for mark in marks] == [row["texts_per_s"]["value"] for row in rows]
    assert [mark.get_color() for mark in marks] == [variants.ALLOWED] * 2 + [variants.CHOSEN, variants.REFUSED]
    spans = [list(line.get_xdata()) for line in answers.get_lines()[::2]]
    assert spans == [pytest.approx([-0.3, 0.1])] * 4 + [[-1.0, -1.0]]  # the last is what is allowed
    for row in rows:
        row["exactness"]["accuracy_difference"] = None
    _, answers = drawn(variants.figure(rows, ABOUT, result)).axes
    assert answers.get_xlabel() == "labels as in float32, %"
