"""The memory of a trace: what was allocated when, whose it was at the peak, and what every step leaves behind."""

import random
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from boundby.capture import capture
from boundby.trace import analyze, read_trace
from boundby.trace.memory import (
    MEMORY_COLUMNS,
    MOST_OWNERS,
    MOST_POINTS,
    MemoryOwner,
    MemoryTimeline,
    MemoryUse,
    memory_rows,
)
from boundby.trace.memory_html import memory_page
from tests.traces import REPOSITORY, analysis_of, event, memory_change, step
from tests.web_page import WebPage

HOST, GPU, OTHER_GPU = None, 0, 1


def change(ts, address, size, allocated=None, device=HOST, tid=1):
    reserved = None if device is HOST or allocated is None else 2 * allocated
    return memory_change(ts, address, size, allocated, device, reserved, tid)


def uses_of(folder: Path, *events: dict) -> tuple[MemoryUse, ...]:
    return analysis_of(folder, *events).memory


def use_of(folder: Path, *events: dict) -> MemoryUse:
    [use] = uses_of(folder, event("aten::first", 0, 0.5), *events)
    return use


def test_trace_without_changes_of_memory_says_nothing(tmp_path):
    assert uses_of(tmp_path, event("aten::add", 0, 5)) == ()
    assert uses_of(tmp_path, change(1, 7, 100, 100)) == (), "without a single event there is no time to speak of"


def test_peak_is_the_first_highest_moment_and_counts_add_up(tmp_path):
    use = use_of(
        tmp_path,
        change(1, 7, 100, 100),
        change(2, 8, 50, 150),
        change(3, 7, -100, 50),
        change(4, 7, 100, 150),
        change(5, 8, -50, 100),
    )
    assert (use.peak_bytes, use.peak_ns, use.change_bytes) == (150, 2000, 100)
    assert (use.allocations, use.allocated_bytes, use.frees, use.freed_bytes) == (3, 250, 2, 150)
    assert use.timeline.times_ns == (1000, 2000, 3000, 4000, 5000)
    assert use.timeline.allocated_bytes == (100, 150, 50, 150, 100)
    assert (use.device, use.earlier_bytes, use.peak_reserved_bytes, use.timeline.reserved_bytes) == (None,) * 4


def test_reused_address_belongs_to_its_owner_at_the_peak_alone(tmp_path):
    use = use_of(
        tmp_path,
        event("aten::mm", 1, 2),
        change(2, 7, 100),
        change(4, 7, -100),
        event("aten::gelu", 5, 2),
        change(6, 7, 300),
        change(9, 7, -300),
    )
    assert use.owners == (MemoryOwner("aten::gelu", None, 300, 1),)


def test_owner_is_the_innermost_operator_that_does_more_than_allocate(tmp_path):
    use = use_of(
        tmp_path,
        event("nn.Module: Block_0", 1, 50, "python_function"),
        event("nn.Module: Linear_0", 2, 20, "python_function"),
        event("aten::linear", 3, 10),
        event("aten::addmm", 4, 5),
        event("aten::empty", 5, 2),
        change(6, 1, 400),
        event("Optimizer.step#SGD.step", 60, 20, "user_annotation"),
        event("aten::empty", 61, 2),
        change(62, 2, 30),
        change(90, 3, 20),
        change(91, 4, 5, tid=2),
    )
    assert use.owners == (
        MemoryOwner("aten::addmm", "Linear_0", 400, 1),
        MemoryOwner("aten::empty", "Optimizer.step#SGD.step", 30, 1),
        MemoryOwner(None, None, 25, 2),
    )


def test_only_the_largest_owners_are_named_and_the_rest_is_summed(tmp_path):
    events = []
    for number in range(MOST_OWNERS + 3):
        events += [event(f"aten::op{number}", 10 * number + 1, 5), change(10 * number + 2, number, 1000 + number)]
    use = use_of(tmp_path, *events)
    assert [owner.bytes for owner in use.owners] == [1012 - index for index in range(MOST_OWNERS)]
    assert use.others_bytes == 1000 + 1001 + 1002


def test_what_a_gpu_held_before_the_trace_is_told_apart(tmp_path):
    use = use_of(
        tmp_path,
        change(1, 7, 100, 1100, GPU),
        change(2, 99, -600, 500, GPU),
        change(3, 8, 700, 1200, GPU),
        change(4, 7, -100, 1100, GPU),
    )
    assert (use.device, use.peak_bytes, use.peak_reserved_bytes, use.change_bytes) == (0, 1200, 2400, 100)
    assert use.earlier_bytes == 1200 - 800 == use.peak_bytes - sum(owner.bytes for owner in use.owners)
    assert use.timeline.reserved_bytes == (2200, 1000, 2400, 2200)


def test_host_counts_only_what_was_allocated_in_the_trace(tmp_path):
    """torch's total on the host starts with the recording and keeps what was freed between two recordings."""
    use = use_of(tmp_path, change(1, 7, 200, 1400), change(2, 99, -800, 600), change(3, 8, 50, 650))
    assert use.timeline.allocated_bytes == (200, 200, 250)
    assert (use.peak_bytes, use.change_bytes, use.earlier_bytes, use.frees) == (250, 250, None, 1)


def test_gpu_without_recorded_totals_counts_what_was_allocated_in_the_trace(tmp_path):
    use = use_of(tmp_path, change(1, 7, 200, None, GPU), change(2, 99, -800, None, GPU), change(3, 8, 50, None, GPU))
    assert (use.peak_bytes, use.earlier_bytes, use.peak_reserved_bytes) == (250, None, None)


def test_address_that_is_handed_out_twice_was_given_back_unseen(tmp_path):
    use = use_of(tmp_path, change(1, 7, 200), change(2, 7, 300), change(3, 7, -300))
    assert use.timeline.allocated_bytes == (200, 300, 0)
    assert use.owners == (MemoryOwner(None, None, 300, 1),)


def test_devices_are_apart_and_the_highest_peak_comes_first(tmp_path):
    uses = uses_of(
        tmp_path,
        event("aten::add", 0, 9),
        change(1, 7, 100, 100, HOST),
        change(2, 7, 300, 300, GPU),
        change(3, 7, 200, 200, OTHER_GPU),
    )
    result = [(use.device, use.peak_bytes, use.change_bytes) for use in uses]
    assert result == [(0, 300, 300), (1, 200, 200), (None, 100, 100)]


@pytest.mark.parametrize(("sizes", "kept"), [((10, 30, 20), 20), ((10, 30, 0), 0), ((10, -30, 20), 0), ((9, 9), None)])
def test_what_every_step_but_the_first_leaves_behind_is_the_least_growth(tmp_path, sizes, kept):
    events = [change(1, 1000, 50)]
    for number, size in enumerate(sizes):
        at = 10 * number
        events += [step(number, at, 9), change(at + 2, number, 5), change(at + 3, number, -5)]
        if size > 0:
            events.append(change(10 * number + 4, 100 + number, size))
        elif size < 0:
            events.append(change(10 * number + 4, 1000, -50))
    assert use_of(tmp_path, *events).kept_per_step_bytes == kept


def test_order_in_the_file_does_not_matter_and_changes_without_an_address_or_a_size_are_left_out(tmp_path):
    use = use_of(tmp_path, change(1, None, 100), change(2, 7, 0), change(3, 8, 40))
    assert (use.allocations, use.peak_bytes) == (1, 40)
    events = [change(1, 7, 100), change(2, 7, -100), change(3, 7, 50), change(4, 8, 70)]
    assert use_of(tmp_path, *events) == use_of(tmp_path, *reversed(events))


def brute_force(events: list[dict]) -> tuple[list[int], dict[int, int]]:
    """Return the bytes of this trace's own allocations after each change, and what lives at the first highest one."""
    alive: dict[int, int] = {}
    totals, best = [], (-1, {})
    for record in events:
        address, size = record["args"]["Addr"], record["args"]["Bytes"]
        alive.pop(address, None)
        if size > 0:
            alive[address] = size
        totals.append(sum(alive.values()))
        best = max(best, (totals[-1], dict(alive)), key=lambda pair: pair[0])
    return totals, best[1]


@pytest.mark.parametrize("seed", range(5))
def test_equals_a_walk_over_a_table_of_live_addresses(tmp_path, seed):
    source = random.Random(seed)
    sizes = [(source.randrange(12), source.choice([-1, 1]) * source.randrange(1, 99)) for _ in range(400)]
    events = [change(at, *size) for at, size in enumerate(sizes, 1)]
    totals, alive = brute_force(events)
    use = use_of(tmp_path, *events)
    assert list(use.timeline.allocated_bytes) == totals
    assert use.peak_bytes == max(totals) == sum(alive.values())
    assert [(owner.bytes, owner.allocations) for owner in use.owners] == [(sum(alive.values()), len(alive))]


def test_long_timeline_keeps_the_peak_and_the_ends_in_few_points(tmp_path):
    source = random.Random(1)
    events = [change(at + 1, at // 2, 1 if at % 2 == 0 else -1) for at in range(3 * MOST_POINTS)]
    spike = source.randrange(len(events) // 2) * 2 + 0.5
    events += [change(spike, -5, 10_000), change(spike + 0.01, -5, -10_000), change(9e6, -6, 7)]
    use = use_of(tmp_path, *events)
    line = use.timeline
    assert len(line.times_ns) == len(line.allocated_bytes) <= MOST_POINTS
    assert list(line.times_ns) == sorted(set(line.times_ns))
    assert max(line.allocated_bytes) == use.peak_bytes >= 10_000
    assert line.times_ns[line.allocated_bytes.index(use.peak_bytes)] == use.peak_ns
    ends = line.times_ns[0], line.times_ns[-1], line.allocated_bytes[-1]
    assert ends == (round(min(1, spike) * 1000), 9 * 10**9, 7)


def test_rows_name_the_device_and_leave_unknown_cells_empty(tmp_path):
    uses = uses_of(tmp_path, event("aten::add", 0, 9), change(1, 7, 100), change(2.5, 8, 300, 300, GPU))
    rows = memory_rows(uses)
    assert [list(row) for row in rows] == [list(MEMORY_COLUMNS)] * 2
    assert [tuple(row.values()) for row in rows] == [(0, 0.0025, 300, 600), ("host", 0.001, 100, None)]


def test_recorded_leak_of_a_thousand_floats_per_step_is_found(tmp_path):
    layer, kept, path = torch.nn.Linear(64, 256), [], tmp_path / "trace.json"

    def work(_number):
        with torch.no_grad():
            kept.append(layer(torch.ones(512, 64))[:1].mul(2).new_empty(1000))

    capture(work, device=torch.device("cpu"), steps=4, warmup=1, trace_path=path)
    trace = read_trace(path)
    [use] = analyze(trace).memory
    assert (use.device, use.kept_per_step_bytes) == (None, 4000)
    recorded = trace.memory.allocated_bytes[np.argsort(trace.memory.start_ns, kind="stable")]
    before = set((recorded - use.timeline.allocated_bytes).tolist())
    assert len(before) == 1, "torch's own total differs by what it recorded before this trace"
    assert use.owners[0] == MemoryOwner("aten::addmm", None, 512 * 256 * 4, 1)
    assert sum(owner.bytes for owner in use.owners) + use.others_bytes == use.peak_bytes


def test_what_is_alive_at_the_peak_counts_to_the_outermost_stage_that_ran_in_any_thread(tmp_path):
    use = use_of(
        tmp_path,
        event("stage: forward", 10, 20, "user_annotation"),
        event("stage: clip", 12, 5, "user_annotation"),
        event("stage: backward", 40, 20, "user_annotation"),
        change(5, 1, 1),
        change(13, 2, 10),  # in a stage inside another
        change(45, 3, 100, tid=2),  # by the thread of autograd
        change(46, 4, 1000),
        change(47, 4, -1000),  # gone at the peak
        change(70, 5, 2000),
    )
    assert use.by_stage == ((None, 2001), ("backward", 100), ("forward", 10))
    assert use_of(tmp_path, change(1, 7, 100)).by_stage == (), "no stage is marked"


def test_a_recorded_step_of_training_tells_parameters_activations_gradients_and_state_apart(tmp_path):
    batch, side, path = 256, 512, tmp_path / "trace.json"
    weights, outputs = side * side * 4, batch * side * 4
    inputs = torch.ones(batch, side)

    def work(_number):
        layer = torch.nn.Linear(side, side, bias=False)
        optimizer = torch.optim.Adam(layer.parameters(), foreach=False)
        with torch.profiler.record_function("stage: forward"):
            activations = torch.relu(layer(inputs))
            loss = activations.sum()
        with torch.profiler.record_function("stage: backward"):
            loss.backward()
        with torch.profiler.record_function("stage: optimizer"):
            optimizer.step()

    capture(work, device=torch.device("cpu"), steps=1, warmup=1, trace_path=path)
    [use] = analyze(read_trace(path)).memory
    by_stage = dict(use.by_stage)
    small = 10_000  # counters and sums
    assert by_stage[None] == pytest.approx(weights, abs=small)
    assert by_stage["forward"] == pytest.approx(outputs, abs=small)
    assert by_stage["backward"] == pytest.approx(weights, abs=small)
    assert 2 * weights <= by_stage["optimizer"] <= 4 * weights + small, (
        "two averages, and what one update needs meanwhile"
    )


HOST_USE = MemoryUse(
    device=None,
    allocations=2,
    allocated_bytes=3_000_000,
    frees=1,
    freed_bytes=1_000_000,
    change_bytes=2_000_000,
    kept_per_step_bytes=None,
    peak_bytes=3_000_000,
    peak_ns=5_000_000,
    peak_reserved_bytes=None,
    earlier_bytes=None,
    owners=(MemoryOwner("aten::mm", "Linear_0", 2_000_000, 1), MemoryOwner(None, None, 500, 1)),
    others_bytes=999_500,
    timeline=MemoryTimeline((1_000_000, 5_000_000, 9_000_000), (1_000_000, 3_000_000, 2_000_000), None),
)
GPU_USE = replace(
    HOST_USE,
    device=1,
    earlier_bytes=64,
    peak_reserved_bytes=4_000_000,
    timeline=replace(HOST_USE.timeline, reserved_bytes=(4_000_000,) * 3),
)


def test_the_page_is_as_it_was_read_and_agreed_on():
    stages = (("forward", 7_000), ("backward", 500), ("optimizer", 400), (None, 300), ("mine", 200))
    page = memory_page([replace(GPU_USE, by_stage=stages), HOST_USE], "Memory of rank 0")
    assert page == (REPOSITORY / "tests" / "golden" / "memory_page.html").read_text(encoding="utf-8")


def test_a_single_change_is_a_level():
    single = replace(HOST_USE, peak_ns=7, timeline=MemoryTimeline((7,), (3_000_000,), None))
    [path] = re.findall(r'class="allocated" d="([^"]+)"', memory_page([single], "level"))
    assert path.startswith("M0.0,") and "nan" not in path


def test_names_from_a_trace_stay_text_and_one_without_memory_has_no_page():
    with pytest.raises(ValueError, match="no allocation"):
        memory_page([], "empty")
    hostile = '<script>alert(1)</script><img src=x onerror="x">\x1b{title}'
    page = memory_page([replace(HOST_USE, owners=(MemoryOwner(hostile, hostile, 1, 1),))], hostile)
    web_page = WebPage(page)
    assert not {"script", "img", "link", "iframe"} & {tag for tag, _ in web_page.tags} and web_page.open == []
    names = {name for _, attributes in web_page.tags for name in attributes}
    assert not names & {"src", "href", "onload", "onerror", "onclick"}
    assert web_page.text.count("alert(1)") == 4 and "\x1b" not in page
    assert "default-src 'none'" in page
