"""The card itself: its queue, its kernels, its speed, its counters and its memory."""

import numpy as np
import pytest
import torch

from boundby.machine import ceilings
from boundby.machine.device import Allocator, gpu_source, release_memory
from boundby.machine.energy import LONGEST_TICK_S
from boundby.machine.sampler import DriverSource, Sampler
from boundby.timing.timer import QUEUE_DEPTH

MIB = 2**20


@pytest.mark.gpu(
    low=QUEUE_DEPTH / 2,
    high=None,
    unit="launches",
    reason="about 1,024 before the host waits, where it was seen; not documented, and a deeper queue harms nothing",
)
def test_depth_of_the_launch_queue(card, measured):
    queue, one = card.queue, torch.ones(1, device=card.device)
    for _ in range(2):  # the first launch loads the kernel, which waits for the device
        one.add_(1)
        card.timer.synchronize()
        queue.hold(0.5)
    held, launched = queue.mark(), 0
    while launched < card.sizes.launches and not queue.has_passed(held):
        one.add_(1)
        launched += 1
    card.timer.synchronize()
    measured(launched)


@pytest.mark.gpu(
    low=0,
    high=0,
    unit="cases by the slow kernel",
    reason="every card since Turing has a fused kernel for float32 and bfloat16, with a mask and without one",
)
def test_attention_kernels(card, measured):
    from torch.nn.attention import SDPBackend

    states = torch.randn(4, 8, 128, 64, device=card.device, dtype=card.dtype)
    mask = torch.ones(4, 1, 128, 128, dtype=torch.bool, device=card.device).tril()
    choose = getattr(torch, "_fused_sdp_choice", None)
    if choose is None:
        card.lacks("this torch does not tell which kernel it takes")
    names = {backend.value: backend.name for backend in SDPBackend.__members__.values()}
    chosen = {
        "without a mask": names[choose(states, states, states, is_causal=True)],
        "with a mask": names[choose(states, states, states, attn_mask=mask)],
    }
    slow = sum(name in ("MATH", "ERROR") for name in chosen.values())
    measured(slow, cuDNN=torch.backends.cudnn.version(), **chosen)


@pytest.mark.gpu(
    low=0.35,
    high=1.5,
    unit="sustained over burst",
    reason="a T4 falls from 1,590 to about 900 MHz at its 70 W, and a burst may begin before an idle clock has risen",
)
def test_sustained_products(card, measured):
    [result] = ceilings.measure(card.device, dtypes=(card.dtype_name,)).compute[:1]
    burst = result.burst_flops_per_s or result.flops_per_s
    seen = {
        "TFLOP/s": result.flops_per_s / 1e12,
        "MHz": result.sm_clock_mhz,
        "clock events": result.clock_event_reasons,
    }
    measured(result.flops_per_s / burst, **seen)


@pytest.mark.gpu(
    low=0.7,
    high=1.4,
    unit="counter over power times time",
    reason="power is a sample that sees part of the time (arXiv 2312.02741), the counter all of it",
)
def test_energy_counter(card, measured):
    source = gpu_source(card.device)
    if not isinstance(source, DriverSource):
        card.lacks(source.reason or "no readings")
    square = torch.randn(card.sizes.square, card.sizes.square, device=card.device, dtype=card.dtype)

    def work() -> None:
        for _ in range(20):
            torch.mm(square, square)

    def loaded(seconds: float) -> float:
        spent = 0.0
        while spent < seconds:
            spent += card.timer.isolated(work)
        return spent

    loaded(LONGEST_TICK_S)  # the power that NVML tells is the mean of the last second
    try:
        with Sampler(source) as sampler:
            before = source.joules()
            seconds = loaded(card.sizes.energy_s)
            joules = source.joules() - before
            now = sampler.now()
    except OSError as error:
        card.lacks(str(error))
    watts = sampler.by_quantity(0.0, float("inf")).get("gpu_power_w", []) or [now.get("gpu_power_w")]
    if watts == [None]:
        card.lacks(f"no power was read: {sampler.why_not('gpu_power_w')}")
    measured(joules / (float(np.mean(watts)) * seconds), joules=joules, watts=float(np.mean(watts)), seconds=seconds)


@pytest.mark.gpu(
    low=0, high=0, unit="MiB beside what was asked for", reason="the peak counts bytes of tensors, and 64 MiB are whole"
)
def test_peak_of_memory(card, measured):
    allocator, asked = Allocator(card.device), 64
    release_memory(card.device)
    allocator.reset_peaks()
    before = allocator.allocated
    torch.empty(asked * MIB, dtype=torch.uint8, device=card.device)
    ours = allocator.peak_allocated
    torchs = card.runtime.memory_stats(card.device)["allocated_bytes.all.peak"]
    result = [(peak - before) / MIB for peak in (ours, torchs)]
    measured(max(abs(peak - asked) for peak in result), MiB=result)


@pytest.mark.gpu(
    low=0,
    high=0,
    unit="MiB kept by a capture that failed",
    reason="a call that reads from the device cannot be captured; after it memory and streams are as before",
)
def test_broken_capture(card, measured):
    from boundby.bound.bench import Bench
    from boundby.bound.judgement import IDLE_DEVICE
    from boundby.bound.trials import graph_replay, try_out

    one = torch.ones(1, device=card.device)

    def reads() -> object:
        return one.add_(1).item()

    result = try_out(reads, [graph_replay(reads, IDLE_DEVICE)], Bench(card.timer, trials_s=20.0))
    before = card.runtime.memory_reserved(card.device)
    torch.empty(64 * MIB, dtype=torch.uint8, device=card.device)
    release_memory(card.device)
    kept = max(0, card.runtime.memory_reserved(card.device) - before) / MIB
    assert [item.kind for item in result.untried] == ["failed"], "a capture that reads from the device went through"
    assert [doubt.text for doubt in result.doubts] == []
    assert card.runtime.current_stream() == card.runtime.default_stream(), "the stream of the capture stayed current"
    measured(kept)
