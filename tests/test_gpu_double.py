"""What the stand-in card must do for a test on it to mean anything: numbers, order, limits and failures."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu_double import A100, H100, T4, Card, Machine, environment, plugged_in
from tests.gpu_double.machine import CONTEXT_BYTES, LATENCY_S

ROOT = Path(__file__).resolve().parents[1]
# Launches of one forward of a Qwen2 classifier, counted from the operators of a real one: see the README of the double.
COUNTED = {(24, torch.float32): 1008, (24, torch.bfloat16): 1109, (28, torch.float32): 1172, (28, torch.bfloat16): 1289}


def qwen2(layers: int, dtype: torch.dtype) -> Any:
    from transformers import Qwen2Config, Qwen2ForSequenceClassification

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = Qwen2Config(vocab_size=64, num_hidden_layers=layers, num_labels=3, pad_token_id=0, **sizes)
    torch.manual_seed(0)
    return Qwen2ForSequenceClassification(config).eval().to(dtype)


def texts(device: str = "cpu") -> dict[str, torch.Tensor]:
    ids = torch.randint(1, 64, (3, 16), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, 5:] = 0
    return {"input_ids": (ids * mask).to(device), "attention_mask": mask.to(device)}


def test_is_gone_when_it_is_unplugged():
    with plugged_in(H100):
        assert torch.cuda.get_device_name() == H100.name
    assert not torch.cuda.is_available()
    with pytest.raises((RuntimeError, AssertionError)):
        torch.zeros(1, device="cuda")


@pytest.mark.parametrize(("layers", "dtype"), COUNTED)
def test_a_forward_has_the_host_s_numbers_and_the_launches_of_a_real_one(layers, dtype):
    model = qwen2(layers, dtype)
    with torch.inference_mode():
        expected = model(**texts()).logits
    with plugged_in(H100) as machine, torch.inference_mode():
        model, batch = model.to("cuda"), texts("cuda")
        before, reads = machine.launches, machine.host_reads
        logits = model(**batch).logits
        assert machine.launches - before == pytest.approx(COUNTED[layers, dtype], rel=0.01)
        assert machine.host_reads - reads == 2  # transformers reads the padding mask on the host
        assert torch.equal(logits.cpu(), expected)
        assert machine.now > 1000.0


def test_the_host_runs_ahead_until_the_queue_is_full():
    card = H100.with_(launch_s=1e-6, kernel_s=1e-3, queue_depth=100)
    with plugged_in(card) as machine:
        one = torch.zeros(1, device="cuda")
        torch.cuda.synchronize()
        start = machine.now
        for _ in range(100):
            one.add_(1)
        assert machine.now - start == pytest.approx(100e-6)
        one.add_(1)
        assert machine.now - start == pytest.approx(1e-6 + LATENCY_S + 1e-3)
        torch.cuda.synchronize()
        assert machine.now - start == pytest.approx(1e-6 + LATENCY_S + 101e-3)


def test_an_event_passes_when_the_device_does_and_not_before():
    card = H100.with_(launch_s=0.0, kernel_s=1e-3)
    with plugged_in(card) as machine:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        one = torch.zeros(1, device="cuda")
        torch.cuda.synchronize()
        start.record()
        one.add_(1)
        one.add_(1)
        end.record()
        assert not end.query()
        with pytest.raises(RuntimeError, match="not ready"):
            start.elapsed_time(end)
        machine.sleep(0.01)
        assert end.query()
        assert start.elapsed_time(end) == pytest.approx(2.0, rel=0.01)


@pytest.mark.parametrize(
    "read", [lambda t: t.item(), lambda t: t.cpu(), bool, lambda t: t.nonzero(), lambda t: t.tolist()]
)
def test_whatever_brings_a_value_to_the_host_waits(read: Callable[[torch.Tensor], object]):
    with plugged_in(H100.with_(kernel_s=1.0)) as machine:
        one = torch.ones(1, device="cuda")
        before = machine.now
        read(one)
        assert machine.now - before >= 1.0


def test_pinned_memory_is_copied_behind_the_host_and_pageable_memory_is_not():
    with plugged_in(H100.with_(pcie_bytes_per_s=1e6)) as machine:
        host = torch.zeros(250_000)
        before = machine.now
        host.pin_memory().to("cuda", non_blocking=True)
        assert machine.now - before < 0.01
        torch.cuda.synchronize()
        assert machine.now - before == pytest.approx(1.0, rel=0.01)
        before = machine.now
        host.to("cuda")
        assert machine.now - before == pytest.approx(2.0, rel=0.01)


def test_tensors_of_two_devices_do_not_mix():
    with plugged_in(H100), pytest.raises(RuntimeError, match="same device"):
        torch.zeros(2, device="cuda") + torch.zeros(2)


def test_memory_has_a_peak_a_cache_and_an_end():
    card = H100.with_(memory_bytes=CONTEXT_BYTES + 8 * 2**20)
    with plugged_in(card):
        kept = torch.zeros(2**20, device="cuda")  # 4 MiB
        with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
            torch.zeros(2 * 2**20, device="cuda")
        passing = kept + 1
        assert torch.cuda.max_memory_allocated() == 8 * 2**20
        del passing
        assert (torch.cuda.memory_allocated(), torch.cuda.memory_reserved()) == (4 * 2**20, 8 * 2**20)
        torch.cuda.empty_cache()
        assert torch.cuda.memory_reserved() == 4 * 2**20
        torch.cuda.reset_peak_memory_stats()
        assert torch.cuda.max_memory_allocated() == 4 * 2**20


def test_a_view_takes_no_memory_and_no_launch():
    with plugged_in(H100) as machine:
        base = torch.arange(12, device="cuda")
        taken, launches = machine.allocated, machine.launches
        turned = base.view(3, 4)[1:].t()
        assert (machine.allocated, machine.launches) == (taken, launches)
        turned.add_(100)
        assert base.tolist() == [*range(4), *range(104, 112)]


def test_a_graph_is_issued_in_one_go_and_computes_anew():
    with plugged_in(H100.with_(launch_s=1e-3)) as machine:
        given = torch.ones(4, device="cuda")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=torch.cuda.Stream()):
            made = (given * 2 + 1).relu()
        given.fill_(3)
        before = machine.now
        graph.replay()
        assert machine.now - before < 1e-3
        assert made.tolist() == [7, 7, 7, 7]


def test_a_read_while_a_graph_is_captured_breaks_the_capture():
    with plugged_in(H100) as machine:
        one = torch.ones(1, device="cuda")
        with (
            pytest.raises(RuntimeError, match="previous error during capture"),
            torch.cuda.graph(torch.cuda.CUDAGraph(), stream=torch.cuda.Stream()),
        ):
            one.item()
        assert machine.capture is None


@pytest.mark.parametrize(
    "after",
    [
        lambda one: one + 1,
        lambda one: one.item(),
        lambda _: torch.cuda.synchronize(),
        lambda _: torch.cuda.empty_cache(),
        lambda _: torch.zeros(1, device="cuda"),
    ],
)
def test_a_sticky_error_comes_late_and_stays(after: Callable[[torch.Tensor], object]):
    with plugged_in(H100.with_(fails_at=3)):
        one = torch.ones(1, device="cuda")
        one.add_(1)
        one.add_(1)  # the third launch fails, and nobody hears of it yet
        for _ in range(2):
            with pytest.raises(torch.AcceleratorError, match="device-side assert"):
                after(one)


def test_a_throttled_card_is_slower_and_says_why():
    card = H100.with_(kernel_s=1.0, launch_s=0.0, throttles_after_s=1.5, throttled_share=0.5)
    with plugged_in(card) as machine:
        import pynvml

        one = torch.zeros(1, device="cuda")
        torch.cuda.synchronize()
        assert pynvml.nvmlDeviceGetCurrentClocksEventReasons("card") == 0
        machine.sleep(1.0)
        before = machine.now
        one.add_(1)
        torch.cuda.synchronize()
        assert machine.now - before == pytest.approx(2.0, rel=0.01)
        assert pynvml.nvmlDeviceGetCurrentClocksEventReasons("card") == 0x40
        assert pynvml.nvmlDeviceGetClockInfo("card", pynvml.NVML_CLOCK_SM) == card.sm_clock_mhz // 2


@pytest.mark.parametrize(
    ("card", "dtype", "has_mask", "kernel"),
    [
        (H100, torch.bfloat16, False, "cudnn"),
        (A100, torch.bfloat16, False, "flash"),
        (A100, torch.float32, False, "efficient"),
        (A100, torch.bfloat16, True, "efficient"),
        (T4, torch.float16, False, "efficient"),
        (T4, torch.bfloat16, False, "math"),
    ],
)
def test_attention_takes_the_kernel_that_the_card_has(card: Card, dtype: torch.dtype, has_mask: bool, kernel: str):
    from tests.gpu_double import tensors

    with plugged_in(card):
        states = torch.zeros(1, 2, 8, 16, dtype=dtype, device="cuda")
        mask = torch.ones(1, 1, 8, 8, dtype=torch.bool, device="cuda") if has_mask else None
        assert tensors.backend_of(states, states, mask) == kernel


def test_variable_length_attention_is_that_of_the_texts_one_by_one():
    from torch.nn.attention.varlen import varlen_attn

    states = torch.randn(3, 9, 2, 16, dtype=torch.bfloat16)
    with plugged_in(A100):
        starts = torch.tensor([0, 4, 9], dtype=torch.int32, device="cuda")
        on_card = [part.to("cuda") for part in states]
        made = varlen_attn(*on_card, starts, starts, 5, 5).cpu()
    for rows in (slice(0, 4), slice(4, 9)):
        q, k, v = (part[rows].transpose(0, 1)[None] for part in states)
        alone = torch.nn.functional.scaled_dot_product_attention(q, k, v)[0].transpose(0, 1)
        assert torch.allclose(made[rows], alone, atol=1e-2)


def test_compute_memory_and_dtype_set_the_time_of_a_product():
    def seconds(dtype: torch.dtype, precision: str = "highest") -> float:
        with plugged_in(A100) as machine:
            left = torch.zeros(4096, 4096, dtype=dtype, device="cuda")
            torch.cuda.synchronize()
            before = machine.busy_s
            torch.set_float32_matmul_precision(precision)
            try:
                torch.mm(left, left)
            finally:
                torch.set_float32_matmul_precision("highest")
            return machine.busy_s - before

    flops = 2 * 4096**3
    assert seconds(torch.float32) == pytest.approx(flops / A100.float32_flops_per_s, rel=0.01)
    assert seconds(torch.float32, "high") == pytest.approx(flops / A100.tf32_flops_per_s, rel=0.01)
    assert seconds(torch.bfloat16) == pytest.approx(flops / A100.half_flops_per_s, rel=0.01)


def test_a_trace_has_each_launch_within_its_operator(tmp_path):
    from boundby.trace import read_trace

    activity = torch.profiler.ProfilerActivity
    with plugged_in(H100):
        one = torch.zeros(8, device="cuda")
        with torch.profiler.profile(activities=[activity.CPU, activity.CUDA]) as profile:
            for _ in range(5):
                one.add_(1)
            torch.cuda.synchronize()
        profile.export_chrome_trace(str(tmp_path / "trace.json"))
    names = [str(name) for name in read_trace(tmp_path / "trace.json").names]
    assert {"add_", "aten::add_", "cudaLaunchKernel"} <= set(names)


def test_nvml_refuses_as_a_container_without_rights_does():
    with plugged_in(H100.with_(nvml="no_rights")):
        import pynvml

        assert pynvml.nvmlDeviceGetName("card") == H100.name
        with pytest.raises(pynvml.NVMLError, match="Permission"):
            pynvml.nvmlDeviceGetTotalEnergyConsumption("card")


def test_a_child_process_has_the_card_its_clock_and_nvidia_smi():
    code = (
        "import subprocess, torch, boundby.timing.timer as timer; t = timer.Timer();"
        "one = torch.zeros(1, device='cuda'); torch.cuda.synchronize();"
        "s = t.isolated(lambda: (one.add_(1), torch.cuda.synchronize()));"
        "print(torch.cuda.get_device_name(), 1.0 < s < 1.1, subprocess.run(['nvidia-smi'], capture_output=True).stdout)"
    )
    made = subprocess.run(
        [sys.executable, "-c", code],
        env=environment(H100.with_(kernel_s=1.0)),
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert made.stdout.startswith(f"{H100.name} True"), made.stderr
    assert "CUDA Version: 13.0" in made.stdout
    assert "BOUNDBY_TEST_CARD" not in os.environ


def test_two_machines_of_one_process_do_not_share_a_clock():
    with plugged_in(H100) as first:
        torch.zeros(1, device="cuda")
    second = Machine(H100)
    assert first.now > second.now
