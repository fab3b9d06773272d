"""The figures of a trace: work and waiting over time, and memory with the owners of its peak."""

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import StepPatch

from boundby.trace import analyze, read_trace
from boundby.trace.gaps import CAUSES
from boundby.trace.links import KINDS
from tests import trace_document as traces
from tests.traces import GPU_TRACES, REAL_NAMES
from utils.plots import memory, style, timeline
from utils.trace_analysis import document
from utils.trace_analysis.traces import Examination, Examined

ABOUT = style.Subject("a model, float32", "on a machine, texts, measured 2026-11-21", is_synthetic=False)


def drawn(figure: Figure) -> Figure:
    """Lay the figure out; any warning is an error."""
    figure.draw_without_rendering()
    return figure


def labels(axes: Axes) -> list[str]:
    legend = axes.get_legend()
    return [text.get_text() for text in legend.get_texts()] if legend else []


def texts(axes: Axes) -> list[str]:
    return [text.get_text() for text in axes.texts]


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
    steps = [{**device["steps"][0], "number": place, "start_ms": place * 0.05} for place in range(800)]
    [axes] = drawn(timeline.figure(traces.gpu(devices=[{**device, "steps": steps}]), ABOUT)).axes
    assert 5 < len(texts(axes)) <= 1 / timeline.LEAST_DISTANCE + 1


def test_memory_shows_the_steps_the_peak_and_what_the_allocator_holds():
    over_time, _ = drawn(memory.figure(traces.gpu(), ABOUT)).axes
    [use] = traces.gpu()["memory"]
    allocated, reserved, *_ = over_time.get_lines()
    assert list(allocated.get_ydata()) == [each / 1e9 for each in use["timeline"]["allocated_bytes"]]
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
    found = Examination((Examined.of(analysis),), (), "name")
    [trace] = document.of(found)["traces"]
    [axes] = drawn(timeline.figure(trace, ABOUT)).axes
    assert np.allclose(sum(areas(axes)), 100)
    [device] = trace["devices"]
    took = [*device["exposed_ms"].values(), *device["idle_by_cause_ms"].values()]
    assert len(labels(axes)) == sum(spent > 0 for spent in took)
