"""Device times of the pod's model in its real depth, on the stand-in card: its queue holds 1,024 launches."""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForSequenceClassification

from boundby.bound.analysis import Call, bottleneck
from boundby.bound.analysis import Machine as Limited
from boundby.bound.bench import Bench
from boundby.bound.device_time import DeviceTimer
from boundby.bound.judgement import IDLE_DEVICE
from boundby.bound.recording import program, record
from boundby.bound.replay import OnDevice
from boundby.bound.trials import graph_replay, try_out
from boundby.layers.engine import ObservabilityEngine
from boundby.layers.measurement import CudaMarks, Instruments
from boundby.machine.ceilings import Ceilings, ComputeCeiling, MemoryCeiling
from boundby.machine.device import CudaQueue
from boundby.machine.sampler import NoSource, Sampler
from boundby.timing.timer import QUEUE_DEPTH, Timer
from boundby.work.attention_mask import unread
from tests.fakes import FakeTokenizer, FakeWatch
from tests.gpu_double import H100, Machine, plugged_in
from utils.baseline.inference import InferenceProfiler, SweepSettings
from utils.baseline.rounds import Visit

CARD = torch.device("cuda:0")
SLOW_HOST = H100.slower(1.0, host=200.0)  # so that few calls fill a second


@pytest.fixture(params=[H100])
def machine(request: pytest.FixtureRequest) -> Iterator[Machine]:
    with plugged_in(request.param) as machine, torch.inference_mode():
        yield machine


def timer_of(machine: Machine) -> Timer:
    return Timer(machine.read, torch.cuda.synchronize)


def qwen2(layers: int, dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_labels=2,
        pad_token_id=0,
    )
    return Qwen2ForSequenceClassification(config).to(dtype).eval().to(CARD)


def padded(model: Any) -> partial[Any]:
    """Return a forward of two texts of five and eight tokens, whose mask is ready."""
    ids = torch.arange(16).view(2, 8) % 31 + 1
    mask = torch.ones_like(ids)
    mask[0, 5:] = 0
    inputs = unread(model, {"input_ids": (ids * mask).to(CARD), "attention_mask": mask.to(CARD)})
    assert inputs is not None
    return partial(model, **inputs)


def busy_s(machine: Machine, work: Callable[[], Any]) -> float:
    before = machine.busy_s
    work()
    return machine.busy_s - before


DEPTHS = pytest.mark.parametrize("layers", [24, 28])
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


@DEPTHS
@DTYPES
def test_a_forward_is_timed_as_a_graph_and_in_chunks_though_its_launches_fill_the_queue(machine, layers, dtype):
    work, timer = padded(qwen2(layers, dtype)), timer_of(machine)
    queue = CudaQueue(CARD)
    enqueue_s, kernels_s = timer.enqueue(work), busy_s(machine, work)
    launched = machine.launches
    has_room = timer.on_device(work, queue, enqueue_s).seconds is not None
    assert has_room == (machine.launches - launched < QUEUE_DEPTH - 4)
    device = DeviceTimer(timer, queue)
    [graph] = device.times(work, enqueue_s)
    device._captures = False
    [chunks] = device.times(work, enqueue_s)
    assert (graph.by, chunks.by) == ("graph", "chunks")
    assert chunks.seconds == pytest.approx(kernels_s, rel=1e-6)
    assert kernels_s < graph.seconds < 1.4 * kernels_s  # with half a microsecond between two kernels of a graph


@DEPTHS
@DTYPES
def test_its_operators_have_their_times_in_the_model_s_order(machine, layers, dtype):
    recording = record(padded(qwen2(layers, dtype)))
    own, device = program(recording), OnDevice(timer_of(machine), CudaQueue(CARD))
    kernels_s = busy_s(machine, own.run)
    steps = device.marked(own.marked)
    assert steps is not None and len(steps) == len(recording.steps) > QUEUE_DEPTH
    assert (sum(steps), device.busy(own.run)) == pytest.approx((kernels_s, kernels_s), rel=1e-6)


def test_its_layers_have_device_times_that_add_up(machine, tmp_path):
    model = qwen2(28, torch.bfloat16)
    work = padded(model)
    instruments = Instruments(
        now=lambda: round(1e9 * machine.read()),
        synchronize=torch.cuda.synchronize,
        marks=CudaMarks(CARD),
        probe_cost_ns=lambda now: 0.0,
        watch=FakeWatch,
    )
    engine = ObservabilityEngine(model, tmp_path, {"inference_mode": True}, instruments=instruments)
    engine.warmup(work.keywords, 0)
    profile = engine.profile(work.keywords, 2).profile
    timed = [layer.device_self_s.median for layer in profile.layers if layer.device_self_s]
    assert len(timed) > 28 * 10 and "device_self_s" not in profile.reasons
    assert sum(timed) == pytest.approx(busy_s(machine, work), rel=1e-3)
    assert not any(doubt.startswith("device:") for doubt in profile.doubts)


def test_a_capture_that_fails_leaves_the_card_as_it_was_and_the_forward_is_timed_in_chunks(machine):
    model = qwen2(28, torch.float32)
    forward = padded(model)

    def reads_while_it_is_captured() -> Any:
        answer = forward()
        if torch.cuda.is_current_stream_capturing():
            answer.logits.sum().item()
        return answer

    timer = timer_of(machine)
    device = DeviceTimer(timer, CudaQueue(CARD))
    [times] = device.times(reads_while_it_is_captured, timer.enqueue(reads_while_it_is_captured))
    assert times.by == "chunks" and device.leftover is None
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    assert not torch.cuda.is_current_stream_capturing()
    assert torch.equal(forward().logits.cpu(), padded(model)().logits.cpu())


@pytest.mark.parametrize("heals", [True, False])
def test_a_trial_whose_capture_fails_closes_its_pool_and_a_card_that_stays_broken_is_a_doubt(
    machine, monkeypatch, heals
):
    forward, bench = padded(qwen2(2, torch.float32)), Bench(timer_of(machine), watch=FakeWatch())
    closed: list[Any] = []
    waited: list[int | None] = []

    def reads() -> object:
        return forward().logits.sum().item()

    for name in ("_cuda_endAllocateToPool", "_cuda_releasePool"):
        monkeypatch.setattr(torch._C, name, lambda *given, name=name: closed.append((name, *given)), raising=False)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: waited.append(device))
    if not heals:
        growing = count()
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: next(growing))
    outcome = try_out(reads, [graph_replay(reads, IDLE_DEVICE)], bench)
    [untried] = outcome.untried
    assert untried.kind == "failed" and "previous error during capture" in untried.reason
    assert closed == [("_cuda_endAllocateToPool", 0, (0, 1)), ("_cuda_releasePool", 0, (0, 1))]
    assert waited[-1] == 0 and torch.cuda.current_stream() == torch.cuda.default_stream()
    assert [doubt.kind for doubt in outcome.doubts] == ([] if heals else ["disturbed"])


@pytest.mark.parametrize("machine", [SLOW_HOST], indirect=True)
def test_the_sweep_of_the_pods_model_has_device_times_and_counts_all_that_it_takes(machine):
    clock = SimpleNamespace(advance=machine.sleep)
    sampler = Sampler(NoSource("nothing is read"), clock=machine.read)
    model = qwen2(24, torch.bfloat16)
    owner = InferenceProfiler(model, FakeTokenizer(clock), CARD, timer=timer_of(machine), sampler=sampler)
    visits: list[Visit] = []
    began = machine.now
    texts = ["a b c d e f g h", "a b c d e"] * 4
    [row] = owner.profile_multiple_batch_sizes(
        texts, [2], 2, settings=SweepSettings(num_warmup_runs=1, max_seconds=2.0), on_visit=visits.append
    )
    assert row["device_time_by"] == "graph"
    assert 0 < row["device_per_batch_ms"] < 0.5 * row["enqueue_per_batch_ms"] < row["latency_per_batch_ms_mean"]
    window = ("largest", "reference", "isolated", "pipelined")
    for visit in visits:  # a held device is no load, and the memory of a graph not the model's
        assert visit.window_s == pytest.approx(
            sum(timing.seconds for timing in visit.timings if timing.quantity in window), rel=0.01
        )
    assert machine.now - began == pytest.approx(sum(visit.spent_s for visit in visits), rel=0.01)


@pytest.mark.parametrize("machine", [SLOW_HOST], indirect=True)
def test_a_slow_host_is_told_as_launch_bound_with_what_a_graph_gains(machine, monkeypatch):
    monkeypatch.setattr("boundby.bound.analysis.ROUNDS", 2)
    monkeypatch.setattr("boundby.bound.analysis.LEAST_CALLS", 1)
    ceilings = Ceilings(
        device={"type": "cuda"},
        compute=(ComputeCeiling("bfloat16", None, True, 7e14, 7e14, 1024, 0.0),),
        memory=(MemoryCeiling("memory", 2**28, 2.8e12, 2.8e12, "copy"),),
        dispatch_s=2e-5,
        dispatch_high_s=2e-5,
        seconds=1.0,
    )
    bench = Bench(timer_of(machine), CudaQueue(CARD), FakeWatch(), replay_s=0.0, trials_s=60.0)
    answer = bottleneck(Call(padded(qwen2(24, torch.bfloat16))), Limited(ceilings, "bfloat16"), bench)
    [trial] = answer.trials
    assert (answer.bound, answer.confirmation) == ("launch", "confirmed")
    assert trial.fix.kind == "issue_at_once" and trial.measured.value > 2
    assert any(line.startswith("the device computes for ") for line in answer.evidence)
