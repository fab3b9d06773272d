"""The figures: what is drawn is what was measured, and what was not measured is said, not drawn as zero."""

import json
import math
import re
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import pandas as pd
import pytest
from matplotlib.axes import Axes
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure

from tests import baseline_document as results
from tests.diagnosed_rows import diagnosed
from tests.report_reading import answered
from utils.config import Targets
from utils.plots import batch_size_comparison, metrics_heatmap, operators, owners, style

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
    assert "95 % of\nbest" in texts(panel(figure, "Throughput"))


def test_axis_names_the_batch_sizes_that_have_room_and_their_padding():
    for sizes in ([1, 3, 24, 100], [1, 2, 4, 8, 16, 32]):
        axes = comparison(results.document(results.cpu_rows(sizes, rounds=2))).axes[0]
        assert list(axes.get_xticks()) == sizes
        assert [label.get_text() for label in axes.get_xticklabels()] == [str(size) for size in sizes]
    sizes = list(range(1, 40))
    axes = comparison(results.document(results.cpu_rows(sizes, rounds=1))).axes[0]
    assert list(axes.get_xticks()) == sizes
    assert 5 < sum(bool(label.get_text()) for label in axes.get_xticklabels()) < len(sizes)
    rows = results.cpu_rows()
    written = texts(panel(comparison(results.document(rows)), "Throughput"))
    assert [f"{row['padding_pct']:.0f} %" for row in rows] == [
        text for text in written if re.fullmatch("[0-9]+ %", text)
    ]
    assert "up to 2: the fixed cost of a call is shared by more texts\nbeyond 2: padding, 27 to 67 %" in written


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
    [name] = [text for text in axes.texts if text.get_text() == "out of\nmemory"]
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
    assert f"optimal: {document['optimal']['batch_size']}" in texts(comparison(document).axes[0])
    assert "optimal float32: 8" in texts(comparison(results.gpu_document()).axes[0])
    near = panel(
        comparison(document, NO_TARGETS.model_copy(update={"latency_per_sample_ms": 4})),
        PER_SAMPLE,
    )
    assert [4, 4] in [list(line.get_ydata()) for line in near.get_lines()]
    assert "target\n4 ms" in texts(near)
    far = panel(
        comparison(document, NO_TARGETS.model_copy(update={"latency_per_sample_ms": 50})),
        PER_SAMPLE,
    )
    assert "↑ target\n50 ms" in texts(far)
    assert [50, 50] not in [list(line.get_ydata()) for line in far.get_lines()]
    assert not any("target" in text for axes in comparison(document).axes for text in texts(axes))


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
    cells = {tuple(int(place) for place in text.get_position()): text.get_text() for text in axes.texts}
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


def test_bars_are_the_shares_of_the_owners_with_padding_hatched_at_their_ends():
    document = results.document(answered(diagnosed(results.cpu_rows([1, 8]))))
    figure = owners.figure(document["batch_sizes"], style.subject(document))
    figure.draw_without_rendering()
    [axes] = figure.axes
    shapes = [row["verdict"]["reference"]["shape"] for row in document["batch_sizes"]]
    assert [label.get_text() for label in axes.get_yticklabels()] == shapes
    own = [bar for bar in axes.patches if bar.get_hatch() is None]
    assert [bar.get_width() for bar in own[:5]] == pytest.approx([50, 5, 15, 20, 12])  # left over is negative: no bar
    hatched = [bar for bar in axes.patches if bar.get_hatch()]
    share = document["batch_sizes"][1]["padding_pct"] / 100
    assert [bar.get_width() for bar in hatched] == pytest.approx([share * each for each in (50, 5, 15, 20, 12)])
    assert axes.get_xlim()[1] == pytest.approx(102)
