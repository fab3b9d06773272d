"""The roofline: points where they were measured, roofs where they were measured, and words that can be read."""

import json
from collections.abc import Callable
from functools import cache
from typing import Any

import msgspec
import pytest
from matplotlib.axes import Axes
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from msgspec.structs import replace

from boundby import files
from boundby.machine import Ceilings
from tests import baseline_document as results
from tests.diagnosed_rows import diagnosed
from utils.baseline.document import with_verdicts
from utils.report.pictures import roofline, style


def cpu(**changes: Any) -> dict[str, Any]:
    return results.document(diagnosed(results.cpu_rows(**changes)))


def gpu(*arguments: Any) -> dict[str, Any]:
    return results.gpu_document(diagnosed(results.gpu_rows(*arguments), gpu=True))


def drawn(document: dict[str, Any]) -> Figure:
    """Return the figure of a document; equal ones share it."""
    return _drawn(files.encode_json(document))


@cache
def _drawn(content: str) -> Figure:
    document = json.loads(content)
    about = style.subject(document, results.CPU_MACHINE["cpu"])
    return roofline.figure(
        with_verdicts(document["batch_sizes"]), about, msgspec.convert(document["ceilings"], Ceilings)
    )


def diagram(document: dict[str, Any]) -> Axes:
    return drawn(document).axes[0]


def texts(axes: Axes) -> list[str]:
    return [text.get_text() for text in axes.texts]


def marks(axes: Axes, colour: str) -> list[tuple[float, float]]:
    """Return where single marks with edges or faces of this colour lie."""
    lines = [line for line in axes.get_lines() if len(line.get_xdata()) == 1 and line.get_linestyle() == "None"]
    shown = [line for line in lines if to_rgba(colour) in map(to_rgba, (line.get_mfc(), line.get_mec()))]
    return [(float(line.get_xdata()[0]), float(line.get_ydata()[0])) for line in shown]


def level_lines(axes: Axes, style_of_line: str) -> list[float]:
    lines = [line for line in axes.get_lines() if line.get_linestyle() == style_of_line and len(line.get_ydata()) == 2]
    return [float(line.get_ydata()[0]) for line in lines if line.get_ydata()[0] == line.get_ydata()[1]]


def table(document: dict[str, Any]) -> list[list[str]]:
    """Return the lines of the table beside the diagram, without its heading."""
    lines: dict[float, list[str]] = {}
    for text in drawn(document).axes[1].texts:
        lines.setdefault(text.get_position()[1], []).append(text.get_text())
    return [[cell for cell in line if cell] for line in list(lines.values())[1:]]


def legend(document: dict[str, Any]) -> list[str]:
    return [text.get_text() for text in drawn(document).axes[1].get_legend().get_texts()]


def notes(document: dict[str, Any]) -> list[str]:
    return drawn(document).get_supxlabel().splitlines()


# Points


def test_point_lies_where_it_was_measured_with_its_number_in_it():
    document = cpu()
    expected = [
        (row["flops_per_batch"] / row["bytes_per_batch"], row["flops_per_sec"] / 1e9) for row in document["batch_sizes"]
    ]
    assert marks(diagram(document), style.COLOURS["float32"]) == expected
    axes = diagram(document)
    assert [text.get_position() for text in axes.texts] == marks(axes, style.COLOURS["float32"])


def test_every_dtype_has_its_colour_and_shape_and_noisy_points_are_hollow():
    document = gpu()
    axes = diagram(document)
    for dtype in ("float32", "bfloat16"):
        own = [row for row in document["batch_sizes"] if row["dtype"] == dtype and row["flops_per_sec"]]
        assert len(marks(axes, style.COLOURS[dtype])) == len(own)
    shapes = {line.get_marker() for line in axes.get_lines()} - {"None"}
    assert shapes == {style.MARKERS["float32"], style.MARKERS["bfloat16"]}
    document = cpu(noisy=[4])
    row = document["batch_sizes"][2]
    hollow = (row["flops_per_batch"] / row["bytes_per_batch"], row["flops_per_sec"] / 1e9)
    lines = [line for line in diagram(document).get_lines() if line.get_linestyle() == "None"]
    assert [tuple(line.get_xydata()[0]) for line in lines if line.get_mfc() == "white"] == [hollow]


def bars(axes: Axes) -> list[tuple[float, float]]:
    """Return the lower and upper ends of the error bars, in the unit of the axis."""
    collections = [collection for collection in axes.collections if hasattr(collection, "get_segments")]
    return [(segment[0][1], segment[1][1]) for collection in collections for segment in collection.get_segments()]


def test_bar_spans_the_interval_of_the_latency():
    document = cpu(batch_sizes=[8], noisy=[8])
    [row] = document["batch_sizes"]
    [(low, high)] = bars(diagram(document))
    flops_per_sample = row["flops_per_batch"] / 8
    assert low == pytest.approx(flops_per_sample / (row["latency_per_sample_ms_ci_high"] * 1e6))
    assert high == pytest.approx(flops_per_sample / (row["latency_per_sample_ms_ci_low"] * 1e6))
    assert low < high / 1.05
    [(low, high)] = bars(diagram(cpu(batch_sizes=[8], rounds=1)))
    assert low == high
    document = cpu(batch_sizes=[1, 2])
    limits = diagram(document).get_ylim()
    document["batch_sizes"][0] |= {"latency_per_sample_ms_ci_low": 1e-14, "latency_per_sample_ms_ci_high": 1e15}
    assert diagram(document).get_ylim() == limits


def test_what_was_not_measured_is_gathered_by_reason_and_not_drawn():
    document = cpu(failed=[32])
    unknown = document["batch_sizes"][1]
    unknown |= {"flops_per_sec": None, "reasons": {"flops_per_sec": "the work cannot be counted: aten::odd"}}
    positions = marks(diagram(document), style.COLOURS["float32"])
    assert len(positions) == 4 and all(rate > 0 for _, rate in positions)
    assert notes(document)[1:] == [
        "Not drawn: batch size 2 (float32): the work cannot be counted: aten::odd",
        "Not drawn: batch size 32 (float32): failed",
    ]
    assert "2" not in [line[1] for line in table(document)]
    assert notes(gpu())[1:] == [
        "Not drawn: batch size 64 (float32), 128 (bfloat16): out of memory",
        "Not drawn: batch size 128 (float32): not tried (memory)",
    ]


# Roofs


def test_roof_in_use_is_solid_and_a_clearly_higher_setting_dashed():
    axes = diagram(cpu())
    assert level_lines(axes, "-") == [240]
    assert level_lines(axes, "--") == [460]
    assert legend(cpu())[1:3] == ["float32 240 GFLOP/s (precision highest)", "float32 460 GFLOP/s (precision medium)"]
    axes = diagram(gpu())
    assert level_lines(axes, "-") == [18.9, 252]
    assert level_lines(axes, "--") == [119]
    assert {"float32 119 TFLOP/s (precision high or medium)", "bfloat16 252 TFLOP/s"} <= set(legend(gpu()))
    assert not any("float16 247" in text for text in legend(gpu()))  # of a dtype that was not swept
    document = cpu(batch_sizes=[4])
    compute = tuple(ceiling for ceiling in document["ceilings"].compute if ceiling.dtype != "float32")
    document["ceilings"] = replace(document["ceilings"], compute=compute)
    document["batch_sizes"][0]["share_of_ceiling_pct"] = None
    assert len(marks(diagram(document), style.COLOURS["float32"])) == 1
    assert "No roof for float32: its ceiling was not measured." in notes(document)
    assert table(document)[0][-1] == "-"


def test_memory_roofs_rise_with_their_bytes_per_second():
    document = cpu()
    axes = diagram(document)
    slanted = [line.get_xydata() for line in axes.get_lines() if len(line.get_xdata()) == 2]
    slopes = [line[0][1] / line[0][0] for line in slanted if line[0][1] < 0.9 * line[1][1]]
    assert slopes == pytest.approx([21.4, 58.3, 158])  # GFLOP/s over FLOP per byte is GB/s
    assert legend(document)[3:] == ["memory 21.4 GB/s", "shared cache 58.3 GB/s", "private cache 158 GB/s"]
    assert legend(gpu())[5:] == ["memory 1.34 TB/s", "cache 3.4 TB/s"]


# Doubts


def ringed(document: dict[str, Any]) -> list[tuple[float, float]]:
    return marks(diagram(document), style.ALARM)


def test_point_above_a_roof_is_doubted():
    document = cpu()
    first, *others = document["ceilings"].compute  # batch sizes 16 and 32 are faster
    document["ceilings"] = replace(document["ceilings"], compute=(replace(first, flops_per_s=185e9), *others))
    above = document["batch_sizes"][4:]
    assert [rate for _, rate in ringed(document)] == [row["flops_per_sec"] / 1e9 for row in above]
    assert notes(document)[1].startswith("Doubt: batch size 16 and 32 (float32) above a roof.")
    assert ringed(cpu()) == [] and len(notes(cpu())) == 1
    document = cpu(batch_sizes=[8])
    [row] = document["batch_sizes"]
    row["bytes_per_batch"] = row["flops_per_batch"] * 100e9 / row["flops_per_sec"]  # beyond main memory, not the caches
    assert ringed(document) == []
    row["bytes_per_batch"] *= 2  # beyond the caches
    assert len(ringed(document)) == 1
    document = cpu(batch_sizes=[8])
    doubts = ("the ceilings were measured while other processes used 1.0 of 2 cores",)
    document["ceilings"] = replace(document["ceilings"], doubts=doubts)
    assert notes(document)[1:] == ["Doubt: the ceilings were measured while other processes used 1.0 of 2 cores"]


# What limits each


def test_table_names_the_bound_and_the_share_of_each_point():
    document = gpu(["bfloat16"], [1, 64], {})
    first, last = document["batch_sizes"]
    first["verdict"]["limited_by"], last["verdict"]["limited_by"] = (
        [],
        [{"kind": "kernels", "share": 0.5}],
    )  # not settled
    assert table(document) == [
        ["1", "1", "dispatch overhead", "1.42", "0.57 %"],
        ["2", "64", "kernels below peak?", "94.3", "37 %"],
    ]
    document = cpu(batch_sizes=[8])
    document["batch_sizes"][0] |= {"bound": None, "verdict": None}
    assert table(document)[0][2] == "not known"
    lines = table(cpu(batch_sizes=range(1, 40), rounds=1))
    assert len(lines) == roofline.LINES_AT_MOST and lines[-1] == ["and 10 more"]


# Legibility


def close_points() -> dict[str, Any]:
    document = cpu(batch_sizes=[1, 2, 4, 8, 12, 16, 24, 32], noisy=[12])
    for number, row in enumerate(document["batch_sizes"]):
        row |= {"flops_per_sec": 200e9 * (1 + 0.004 * number)}
        row["bytes_per_batch"] = row["flops_per_batch"] / (30 + 0.1 * number)
    return document


def three_dtypes() -> dict[str, Any]:
    rows = diagnosed(results.gpu_rows(["float32", "bfloat16"], [1, 2, 4, 8, 16, 32, 64, 128], {}), gpu=True)
    half = [
        {**row, "dtype": "float16", "flops_per_sec": 0.97 * row["flops_per_sec"]}
        for row in rows
        if row["dtype"] == "bfloat16"
    ]
    return results.gpu_document([*rows, *half])


def slow_caches() -> dict[str, Any]:
    document = cpu(batch_sizes=[1, 4, 8])
    ceilings, rates = document["ceilings"], (0.066e9, 2.1e9, 17.6e9, 1.7e9)
    memory = tuple(replace(level, bytes_per_s=rate) for level, rate in zip(ceilings.memory, rates, strict=True))
    compute = tuple(replace(ceiling, flops_per_s=2.1e9) for ceiling in ceilings.compute)
    document["ceilings"] = replace(ceilings, memory=memory, compute=compute)
    return document


CASES: dict[str, Callable[[], dict[str, Any]]] = {
    "CPU": cpu,
    "GPU": gpu,
    "one point": lambda: cpu(batch_sizes=[8]),
    "points on one another": close_points,
    "three dtypes, near roofs": three_dtypes,
    "many": lambda: cpu(batch_sizes=range(1, 40), rounds=1),
    "ceilings of a busy machine": slow_caches,
    "a tiny machine": lambda: cpu(speed=results.Speed(40, 0.2)),
}


@pytest.mark.parametrize("name", CASES)
def test_every_case_is_drawn_without_a_warning_and_inside_the_figure(name):
    figure = drawn(CASES[name]())
    figure.draw_without_rendering()
    inside = figure.bbox
    assert all(inside.contains(*text.get_window_extent().p0) for axes in figure.axes for text in axes.texts)


def test_points_are_numbered_as_in_the_table_and_units_follow_the_machine():
    document = gpu()
    numbers = [str(index + 1) for index in range(len(table(document)))]
    assert texts(diagram(document)) == numbers == [line[0] for line in table(document)]
    names = {name: diagram(CASES[name]()).get_ylabel() for name in ("CPU", "GPU")}
    assert names == {"CPU": "GFLOP/s", "GPU": "TFLOP/s"}


# Whether there is anything to draw


def test_figure_without_rows_ceilings_or_flops_has_a_reason():
    document = cpu(batch_sizes=[1, 2])
    rows, ceilings = document["batch_sizes"], document["ceilings"]
    assert roofline.why_not(rows, ceilings, None) is None
    assert roofline.why_not([], None, "not diagnosed") == "no batch size was measured yet"
    assert roofline.why_not(rows, None, "not diagnosed") == "not diagnosed"
    unknown = [{**row, "flops_per_sec": None, "reasons": {"flops_per_sec": "odd operator"}} for row in rows]
    failed = {**unknown[0], "status": "failed"}
    reason = "no batch size has both FLOPs and bytes: odd operator"
    assert roofline.why_not([failed, *unknown], ceilings, None) == reason
