"""The sweep of a model whose forward takes a known time: every latency is exact, and no test waits."""

import importlib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

from boundby.bound.device_time import DeviceTimer
from boundby.machine.disturbance import Conditions, Disturbance
from boundby.machine.sampler import NoSource, Sampler
from boundby.timing.timer import Timer
from tests import evaluation_workplace as workplace
from tests.fakes import FakeClock, FakeTokenizer, FakeWatch, QueuedDevice
from utils.baseline.columns import NAMES
from utils.baseline.inference import (
    MOST_REPEATS,
    BatchTimer,
    Guard,
    InferenceProfiler,
    OnDevice,
    SweepSettings,
    take_turns,
)
from utils.baseline.rounds import Timing, Visit
from utils.baseline.selection import Selection

GPU = torch.device("cuda")  # decides only whether there is a queue

SECONDS_PER_TOKEN = 2.0**-8  # powers of two, so that sums are exact
SECONDS_PER_TEXT = 2.0**-10  # in the tokenizer
COLD_S = 4.0


@pytest.fixture(autouse=True)
def _memory_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spare the garbage collection before each visit, which takes far longer than the fake visits."""
    monkeypatch.setattr("utils.baseline.inference.release_memory", lambda device: None)


class FakeModel:
    """Takes a time per padded token, more in the first call at each size; `error` says which batches fail and how."""

    def __init__(self, clock: FakeClock, error: Callable[[int], BaseException | None] = lambda rows: None) -> None:
        self.slowness = 1.0
        self.calls: Counter[int] = Counter()
        self._clock, self._error = clock, error

    def parameters(self) -> Iterator[torch.Tensor]:
        yield torch.zeros(1)

    def __call__(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None) -> Any:
        assert torch.is_inference_mode_enabled()
        rows = len(input_ids)
        if (error := self._error(rows)) is not None:
            raise error
        if not self.calls[rows]:
            self._clock.advance(COLD_S)
        self.calls[rows] += 1
        self._clock.advance(SECONDS_PER_TOKEN * self.slowness * input_ids.numel())
        return SimpleNamespace(logits=input_ids)


class Bench:
    """A profiler of a fake model on a fake clock; `made` are the visits it reported."""

    def __init__(
        self, error: Callable[[int], BaseException | None] = lambda rows: None, guard: Guard | None = None
    ) -> None:
        self.clock = FakeClock()
        self.model = FakeModel(self.clock, error)
        sampler = Sampler(NoSource("the device is not a GPU"), clock=self.clock)
        self.profiler = InferenceProfiler(
            self.model,
            FakeTokenizer(self.clock, SECONDS_PER_TEXT),
            torch.device("cpu"),
            timer=Timer(self.clock),
            sampler=sampler,
            guard=guard,
        )
        self.made: list[Visit] = []
        self.after_visit: Callable[[Visit], None] = lambda visit: None

    def sweep(self, texts: Sequence[str], batch_sizes: Sequence[int], **options: Any) -> list[dict[str, Any]]:
        runs = {name: options.pop(name) for name in ("num_runs", "max_length", "finished") if name in options}
        settings = SweepSettings(**options)
        return self.profiler.profile_multiple_batch_sizes(
            texts, batch_sizes, settings=settings, on_visit=self._note, **runs
        )

    def selection(self, texts: Sequence[str]) -> Selection:
        return Selection.of(texts, self.profiler.tokenizer, 512, torch.device("cpu"))

    def visits(self, batch_size: int) -> list[Visit]:
        return [visit for visit in self.made if visit.batch_size == batch_size]

    def _note(self, visit: Visit) -> None:
        self.made.append(visit)
        self.after_visit(visit)


def out_of_memory_from(limit: int) -> Callable[[int], BaseException | None]:
    return lambda rows: torch.OutOfMemoryError("CUDA out of memory.\nmore lines") if rows >= limit else None


EVEN = ["a b c d e f g h"] * 8  # eight tokens each: a sample takes 8 / 256 s = 31.25 ms
UNEVEN = ["a b c d e f g h", "a b", "a b c", "a b c"]  # as a batch: 16 real and 32 padded tokens


def test_latency_and_throughput_are_those_of_the_model() -> None:
    rows = Bench().sweep(EVEN, [4, 1, 2])
    assert [row["batch_size"] for row in rows] == [1, 2, 4]
    assert all(list(row) == [*NAMES, "doubt_kinds", "reasons", "whole"] for row in rows)
    for row in rows:
        expected = {
            "latency_per_sample_ms_mean": 31.25, "latency_per_sample_ms_ci_low": 31.25,
            "latency_per_sample_ms_ci_high": 31.25, "latency_per_token_ms_mean": 31.25 / 8,
            "throughput_samples_per_sec_mean": 32.0, "tokens_per_sec_real": 256.0, "tokens_per_sec_padded": 256.0,
            "batches_per_sec": 32.0 / row["batch_size"], "latency_per_batch_ms_median": 31.25 * row["batch_size"],
            "latency_per_batch_ms_max": 31.25 * row["batch_size"], "padding_pct": 0.0,
        }  # fmt: skip
        assert {name: row[name] for name in expected} == pytest.approx(expected, rel=1e-12)
        assert (row["status"], row["doubts"], row["dtype"]) == ("ok", [], "float32")


def test_padding_costs_time() -> None:
    [row] = Bench().sweep(UNEVEN, [4])
    assert row["padding_pct"] == 50.0
    assert row["latency_per_sample_ms_mean"] == pytest.approx(31.25, rel=1e-12)  # as long as the longest
    assert row["latency_per_token_ms_mean"] == pytest.approx(31.25 / 4, rel=1e-12)
    assert row["tokens_per_sec_real"] == pytest.approx(row["tokens_per_sec_padded"] / 2, rel=1e-12)
    [row] = Bench().sweep(["a b c d"] * 4 + ["a b"] * 4, [4])
    assert (row["latency_per_batch_ms_min"], row["latency_per_batch_ms_max"]) == (31.25, 62.5)
    assert row["latency_per_sample_ms_mean"] == pytest.approx((7.8125 + 15.625) / 2, rel=1e-12)


def test_the_cold_call_and_the_tokenizer_are_kept_apart() -> None:
    bench = Bench()
    rows = bench.sweep(EVEN, [1, 4])
    assert [row["cold_call_ms"] for row in rows] == [4031.25, 4125.0]
    assert [row["latency_per_batch_ms_max"] for row in rows] == [31.25, 125.0]
    assert [row["tokenize_per_batch_ms"] for row in rows] == [1000 / 1024, 4000 / 1024]
    for batch_size in (1, 4):
        assert [len(visit.of("cold")) for visit in bench.visits(batch_size)] == [1, 0, 0, 0, 0]


def test_five_rounds_are_made_unless_fewer_runs_are_asked_for() -> None:
    bench = Bench()
    bench.sweep(EVEN, [1, 2, 4])
    assert [visit.batch_size for visit in bench.made[:3]] == [1, 2, 4]
    for batch_size in (1, 2, 4):
        assert [visit.round for visit in bench.visits(batch_size)] == [0, 1, 2, 3, 4]
    bench = Bench()
    bench.sweep(EVEN, [4], num_runs=3)
    assert len(bench.made) == 3
    bench = Bench()
    restless(bench)
    bench.sweep(EVEN, [4], max_seconds=0.01)
    assert len(bench.made) == 5


def restless(bench: Bench) -> None:
    bench.after_visit = lambda visit: setattr(bench.model, "slowness", 2.5 - bench.model.slowness)


def test_a_noisy_batch_size_stops_at_the_budget_and_says_so() -> None:
    bench = Bench()
    restless(bench)
    [row] = bench.sweep(EVEN, [4], max_seconds=12.0)
    spent = [visit.spent_s for visit in bench.made]
    assert len(spent) > 5
    assert sum(spent) >= 12.0 > sum(spent[:-1])
    assert bench.clock.now == pytest.approx(sum(spent) + SECONDS_PER_TEXT * len(EVEN))  # tokenized once, before
    assert row["status"] == "noisy"
    assert row["rounds"] == len(spent)
    assert any("wider than 5.0 %" in doubt for doubt in row["doubts"])


def test_a_row_is_not_noisy_because_the_budget_did_not_suffice_for_what_nobody_asked_for() -> None:
    """Rounds that vary by 2 % are no fault of the machine; the interval says how exactly they tell the time."""
    for asked, status in ((None, "ok"), (0.012, "noisy")):
        bench = Bench()
        bench.after_visit = lambda visit, bench=bench: setattr(bench.model, "slowness", 2.04 - bench.model.slowness)
        [row] = bench.sweep(EVEN, [4], max_seconds=4.0, ci_half_width=asked)
        assert 1.2 < row["throughput_half_width_pct"] < 5
        assert row["status"] == status


@pytest.mark.parametrize(("max_seconds", "rounds"), [(6.0, 15), (15.0, 30)])
def test_a_noisy_batch_size_stops_at_fifteen_rounds_or_two_per_second_of_its_budget(max_seconds, rounds) -> None:
    bench = Bench()
    bench.model.calls[1] = 1  # it is not cold
    restless(bench)
    bench.sweep(EVEN[:4], [1], num_runs=2, max_seconds=max_seconds)
    assert len(bench.made) == rounds


LONG_TAILED = ["x " * (1 + (row**4) % 89) for row in range(999)]


@pytest.mark.parametrize("batch_size", [1, 4, 32])
def test_every_figure_is_that_of_a_pass_over_the_whole_dataset_in_order_of_arrival(batch_size: int) -> None:
    bench = Bench()
    bench.model.calls[999 % batch_size] = 1  # the last batch holds fewer texts, and is not cold
    [row] = bench.sweep(LONG_TAILED, [batch_size], num_runs=3, max_seconds=30.0)
    groups = [
        [len(text.split()) for text in LONG_TAILED[at : at + batch_size]]
        for at in range(0, len(LONG_TAILED), batch_size)
    ]
    padded, real = sum(len(group) * max(group) for group in groups), sum(map(sum, groups))
    timed = {timing.index for visit in bench.made for timing in visit.of("isolated")}
    assert len(timed) < len(groups)
    assert row["throughput_samples_per_sec_mean"] == pytest.approx(999 / (padded * SECONDS_PER_TOKEN), rel=1e-6)
    assert row["latency_per_sample_ms_mean"] == pytest.approx(1e3 * padded * SECONDS_PER_TOKEN / 999, rel=1e-6)
    assert row["latency_per_batch_ms_mean"] == pytest.approx(1e3 * padded * SECONDS_PER_TOKEN / len(groups), rel=1e-6)
    assert row["padding_pct"] == pytest.approx(100 * (1 - real / padded))
    assert row["tokens_per_sec_padded"] == pytest.approx(1 / SECONDS_PER_TOKEN, rel=1e-6)
    assert row["whole"]["batches"] == len(groups)


def test_rounds_time_other_batches_and_a_second_sweep_the_same_ones() -> None:
    def timed(bench: Bench) -> list[set[int]]:
        bench.sweep(LONG_TAILED, [8], num_runs=5)
        return [{timing.index for timing in visit.of("isolated")} for visit in bench.made]

    first = timed(Bench())
    assert len(first) == 5 and all(one != other for one, other in zip(first, first[1:], strict=False))
    assert timed(Bench()) == first


def test_the_reference_batch_is_timed_in_every_visit_and_its_shape_told() -> None:
    bench = Bench()
    [row] = bench.sweep(UNEVEN * 2 + ["a b c d"] * 4, [4])
    assert row["reference_tokens"] == 8
    assert row["reference_ms"] == pytest.approx(1e3 * 32 * SECONDS_PER_TOKEN, rel=1e-12)
    assert [len(visit.of("largest")) for visit in bench.made] == [1, 0, 0, 0, 0]
    assert {len(visit.of("reference")) for visit in bench.made} == {1}, "0.125 s each; quick ones are timed three times"
    bench.sweep(UNEVEN, [1])
    assert {len(visit.of("reference")) for visit in bench.visits(1)} == {3}


@pytest.mark.parametrize("num_runs", [1, 3, 10, 12])
@pytest.mark.parametrize("num_warmup_runs", [1, 40])
def test_the_runs_asked_for_are_the_least_work(num_runs: int, num_warmup_runs: int) -> None:
    bench = Bench()
    [row] = bench.sweep(EVEN * 8, [64], num_runs=num_runs, num_warmup_runs=num_warmup_runs, max_seconds=0.01)
    assert row["timed_batches"] >= num_runs
    assert row["warmup_runs"] >= num_warmup_runs
    assert bench.model.calls.total() > row["timed_batches"] + row["warmup_runs"]


def test_a_visit_is_short_so_that_there_are_many() -> None:
    bench = Bench()
    slow, fast = bench.sweep(EVEN * 8, [64], num_runs=10, max_seconds=15.0), bench.sweep(EVEN, [1], num_runs=10)
    assert slow[0]["timed_batches"] == 5 * 2  # 2 s each: no more than ten runs need
    assert fast[0]["timed_batches"] == 5 * 16  # 31.25 ms each: two passes over all eight come nearest to 0.4 s


def test_out_of_memory_and_failures_are_rows_and_an_interruption_ends_the_sweep() -> None:
    bench = Bench(out_of_memory_from(4))
    rows = bench.sweep(EVEN, [1, 2, 4, 8, 16])
    assert [row["status"] for row in rows] == ["ok", "ok", "oom", "skipped_oom", "skipped_oom"]
    assert rows[2]["reasons"]["all"] == "OutOfMemoryError: CUDA out of memory."
    assert [visit.status for visit in bench.visits(4)] == ["oom"]
    assert bench.visits(8) == bench.visits(16) == []
    bench = Bench(lambda rows: RuntimeError("no kernel for this shape") if rows == 2 else None)
    rows = bench.sweep(EVEN, [1, 2, 4])
    assert [row["status"] for row in rows] == ["ok", "failed", "ok"]
    assert rows[1]["reasons"]["all"] == "RuntimeError: no kernel for this shape"
    assert len(bench.visits(2)) == 1
    bench = Bench(lambda rows: KeyboardInterrupt() if rows == 2 else None)
    with pytest.raises(KeyboardInterrupt):
        bench.sweep(EVEN, [1, 2, 4])
    assert [visit.batch_size for visit in bench.made] == [1]


@pytest.mark.parametrize("finished", [0, 1, 3, 4, 9, 16])
def test_a_resumed_sweep_makes_no_visit_twice_and_ends_with_the_same_rows(finished: int) -> None:
    sizes = [1, 2, 4, 8]
    whole, resumed = Bench(out_of_memory_from(8)), Bench(out_of_memory_from(8))
    expected = whole.sweep(EVEN, sizes)
    rows = resumed.sweep(EVEN, sizes, finished=whole.made[:finished])
    assert rounds_of(resumed.made) == rounds_of(whole.made)[finished:]
    assert len(whole.made) == 16
    changing = {"reasons", "memory_cpu_mb", "memory_cpu_peak_mb", "doubts"}
    for row, other in zip(rows, expected, strict=True):
        for name in row.keys() - changing:
            known = other[name]
            assert row[name] == (pytest.approx(known, rel=1e-12) if isinstance(known, float) else known)


def rounds_of(visits: Sequence[Visit]) -> list[tuple[int, int]]:
    return [(visit.batch_size, visit.round) for visit in visits]


def test_a_resumed_batch_size_is_warmed_up_again_and_times_as_many_batches_as_before() -> None:
    first, resumed = Bench(), Bench()
    first.sweep(EVEN, [4], num_runs=10)
    [row] = resumed.sweep(EVEN, [4], num_runs=10, finished=first.made[:2], max_seconds=3.0)
    warm_up, kept_warm = resumed.made[0].warm_up, resumed.made[1].warm_up
    assert warm_up is not None and kept_warm is not None
    assert warm_up.runs > kept_warm.runs == 1
    assert warm_up.seconds == 0.125 * warm_up.runs  # without the cold call of the new process
    assert {visit.batches for visit in resumed.made} == {first.made[0].batches}
    assert [len(visit.of("cold")) for visit in resumed.made] == [1, 0, 0]
    assert row["latency_per_batch_ms_max"] == 125.0


def test_too_few_texts_make_one_batch_and_long_ones_are_cut_and_none_without_tokens_taken() -> None:
    bench = Bench()
    [row] = bench.sweep(["a b", "a b c d"], [8])
    assert row["padding_pct"] == 25.0
    assert {timing.tokens_real for visit in bench.made for timing in visit.of("isolated")} == {6}
    bench = Bench()
    bench.sweep(UNEVEN, [4], max_length=4)
    assert {visit.truncated for visit in bench.made} == {1}
    assert {timing.tokens_padded for visit in bench.made for timing in visit.of("isolated")} == {16}
    with pytest.raises(ValueError, match="no texts"):
        Bench().sweep([], [1])
    bench = Bench()
    with pytest.raises(ValueError, match="text 1 has no tokens"):
        bench.sweep(["a", "  "], [1])
    assert bench.model.calls.total() == 0


def test_a_visit_tells_when_and_on_what_it_was_made() -> None:
    bench = Bench()
    [row] = bench.sweep(EVEN, [4])
    [session] = {visit.session for visit in bench.made}
    assert session == bench.profiler.session
    assert {visit.dtype for visit in bench.made} == {"float32"}
    assert {visit.reading_reasons["gpu_utilization_pct"] for visit in bench.made} == {"the device is not a GPU"}
    # the window is that of the timed calls, without cold call, warm-up and tokenizer
    timed = ("largest", "reference", "isolated")
    for visit in bench.made:
        assert (
            visit.window_s
            == sum(timing.seconds for timing in visit.timings if timing.quantity in timed)
            < visit.spent_s
        )
    assert {visit.conditions for visit in bench.made} == {None}
    names = ["device_per_batch_ms", "enqueue_per_batch_ms", "transfer_per_batch_ms"]
    assert {row[name] for name in names} == {None}
    assert {row["reasons"][name] for name in names} == {bench.made[0].device_reason}
    assert (
        bench.made[0].device_reason
        == "a call on the CPU has computed when it returns: its time is the isolated latency"
    )


def test_a_gpu_is_given_a_queue_of_at_least_a_quarter_second_and_one_wait() -> None:
    bench = Bench()
    waits: list[float] = []
    timer = Timer(bench.clock, lambda: waits.append(bench.clock.now))
    batch = SimpleNamespace(rows=(0,), input_ids=torch.ones(1, 8), is_padded=False, tokens_real=8, tokens_padded=8)
    bench.model.calls[1] = 1  # not cold
    timed = [Timing("isolated", index % 3, 2.0**-5, 1, 8, 8) for index in range(6)]
    with torch.inference_mode():
        [block] = BatchTimer(bench.model, GPU, timer).pipelined([batch] * 3, timed)  # type: ignore[list-item]
    assert (block.quantity, block.samples, block.tokens_real) == ("pipelined", 9, 72)
    assert block.seconds == 9 * 2.0**-5 >= 0.25
    assert len(waits) == 2


def guarded(disturbed: Callable[[int], bool]) -> tuple[Bench, FakeWatch, list[float]]:
    watch, pauses = FakeWatch(disturbed), []
    return Bench(guard=Guard(watch, pauses.append)), watch, pauses


def test_a_disturbed_visit_is_made_again_after_growing_pauses() -> None:
    bench, watch, pauses = guarded(lambda window: window in (1, 2))
    [row] = bench.sweep(EVEN, [4])
    assert [visit.repeats for visit in bench.made] == [0, 2, 0, 0, 0]
    assert pauses == [0.05, pytest.approx(0.075)]
    assert watch.windows == 7
    assert (row["disturbed_rounds"], row["doubts"]) == (0, [])


def test_a_repeated_first_visit_keeps_its_cold_call_and_warm_up() -> None:
    bench, _, _ = guarded(lambda window: window == 0)
    [row] = bench.sweep(EVEN, [4])
    undisturbed, _, _ = guarded(lambda window: False)
    [expected] = undisturbed.sweep(EVEN, [4])
    for column in ("cold_call_ms", "warmup_runs", "warmup_converged"):
        assert row[column] == expected[column] is not None


def test_repeats_are_bounded_and_the_row_then_says_that_it_was_disturbed() -> None:
    bench, watch, _ = guarded(lambda window: True)
    [row] = bench.sweep(EVEN, [4])
    assert sum(visit.repeats for visit in bench.made) == MOST_REPEATS
    assert watch.windows == len(bench.made) + MOST_REPEATS
    assert row["disturbed_rounds"] == len(bench.made) > 5  # it goes on to the end of the budget for an undisturbed one
    assert [doubt.partition(":")[0] for doubt in row["doubts"]] == ["disturbed"]
    assert bench.made[0].disturbances[0].kind == "foreign_load"
    assert bench.made[0].conditions.foreign_cores == 1.0


def test_what_does_not_pass_is_not_repeated() -> None:
    bench, watch, pauses = guarded(lambda window: False)
    throttled = Conditions(seconds=1.0, cores=2, throttled_s=0.5)  # by a quota, which stays
    watch.stop = lambda: throttled  # type: ignore[method-assign]
    [row] = bench.sweep(EVEN, [4])
    assert pauses == [] and [visit.repeats for visit in bench.made] == [0] * 5
    assert row["disturbed_rounds"] == 0
    assert [doubt.partition(" 5 of 5 rounds: the container's CPU quota")[0] for doubt in row["doubts"]] == [
        "disturbed:"
    ]


class BatchOnGpu(SimpleNamespace):
    """Texts without padding on the GPU. To the host they take a second, and to the GPU a part of one per token."""

    def to(self, device: torch.device) -> "BatchOnGpu":
        self.gpu.issue(0.0, 1.0 if device.type == "cpu" else TRANSFER_S * self.tokens_real)
        return self


TRANSFER_S, ENQUEUE_S, DEVICE_S = 2.0**-14, 2.0**-8, 2.0**-12  # by token, by token of a text, by token


def batch_on(gpu: QueuedDevice, texts: int, tokens: int) -> Any:
    ids = torch.ones(texts, tokens)
    return BatchOnGpu(
        gpu=gpu,
        rows=tuple(range(texts)),
        input_ids=ids,
        is_padded=False,
        tokens_real=ids.numel(),
        tokens_padded=ids.numel(),
    )


def timer_on(gpu: QueuedDevice, monkeypatch: pytest.MonkeyPatch) -> tuple[BatchTimer, list[torch.device]]:
    """Return the timer of a model on the GPU, and the devices whose queues were asked for."""

    def model(input_ids: torch.Tensor, attention_mask: torch.Tensor | None) -> Any:
        gpu.issue(ENQUEUE_S * input_ids.shape[1], DEVICE_S * input_ids.numel())
        return SimpleNamespace(logits=input_ids)

    asked: list[torch.device] = []
    monkeypatch.setattr("utils.baseline.inference.device_queue", lambda device: asked.append(device) or gpu)
    return BatchTimer(model, GPU, Timer(gpu.clock, gpu.synchronize)), asked


def test_what_the_copy_the_host_and_the_gpu_need_for_each_batch_is_kept_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = QueuedDevice(FakeClock())
    timer, asked = timer_on(gpu, monkeypatch)
    device_time = timer.on_device({0: batch_on(gpu, 2, 4), 1: batch_on(gpu, 3, 8)})
    assert (device_time.by, device_time.reason) == ("backlog", None)
    assert [(timing.quantity, timing.index, timing.seconds) for timing in device_time.timings] == [
        ("transfer", 0, 8 * TRANSFER_S),
        ("enqueue", 0, 4 * ENQUEUE_S),
        ("device", 0, 8 * DEVICE_S),
        ("transfer", 1, 24 * TRANSFER_S),
        ("enqueue", 1, 8 * ENQUEUE_S),
        ("device", 1, 24 * DEVICE_S),
    ]
    assert {
        (timing.index, timing.samples, timing.tokens_real, timing.tokens_padded) for timing in device_time.timings
    } == {
        (0, 2, 8, 8),
        (1, 3, 24, 24),
    }
    timer.on_device({0: batch_on(gpu, 1, 1)})
    assert asked == [GPU]  # calibrated once, not in every visit


def test_batches_are_timed_on_the_gpu_for_as_long_as_there_is_time_and_one_at_least(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu = QueuedDevice(FakeClock())
    timer, _ = timer_on(gpu, monkeypatch)
    device_time = timer.on_device({index: batch_on(gpu, 1, 1) for index in range(3)}, most_s=0.0)
    assert [timing.index for timing in device_time.timings if timing.quantity == "device"] == [0]
    assert [timing.index for timing in timer.on_device({}, most_s=0.0).timings] == []


def test_what_a_capture_left_in_the_process_is_told_of_every_visit_and_repeats_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    timer, _ = timer_on(QueuedDevice(FakeClock()), monkeypatch)
    assert timer.disturbances == ()
    timer.on_gpu = DeviceTimer(timer.timer, QueuedDevice(FakeClock()), leftover="it still captures")
    assert timer.disturbances == (Disturbance("capture", "it still captures", is_passing=False),)


@pytest.mark.parametrize("takes", [True, False])
def test_a_padded_batch_has_a_device_time_since_no_mask_is_read_while_the_gpu_is_held(
    monkeypatch: pytest.MonkeyPatch, takes: bool
) -> None:
    class Reads(torch.nn.Module):
        """Waits for the GPU to look at a mask of two dimensions, as transformers does, and `takes` a ready one."""

        config = SimpleNamespace(_attn_implementation="sdpa")
        is_causal = True

        def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> Any:
            if attention_mask.dim() == 2:
                gpu.synchronize()
            elif not takes:
                raise ValueError("a mask has two dimensions")
            gpu.issue(ENQUEUE_S, DEVICE_S * input_ids.numel())
            return SimpleNamespace(logits=input_ids)

    gpu = QueuedDevice(FakeClock())
    timer, _ = timer_on(gpu, monkeypatch)
    timer.model = Reads()
    batch = batch_on(gpu, 2, 4)
    batch.is_padded, batch.attention_mask = True, torch.ones(2, 4)
    device_time = timer.on_device({0: batch})
    assert [timing.seconds for timing in device_time.timings if timing.quantity == "device"] == (
        [8 * DEVICE_S] if takes else []
    )
    assert (device_time.reason is None) == takes


def test_a_device_time_that_is_not_known_for_every_batch_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = QueuedDevice(FakeClock(), keeps=0.0)
    timer, _ = timer_on(gpu, monkeypatch)
    device_time = timer.on_device({0: batch_on(gpu, 2, 4)})
    assert [(timing.quantity, timing.seconds) for timing in device_time.timings] == [
        ("transfer", 8 * TRANSFER_S),
        ("enqueue", 4 * ENQUEUE_S),
    ]
    assert device_time == OnDevice(
        device_time.timings, None, "the device reached the call before the host had issued all of it"
    )
    gpu = QueuedDevice(FakeClock())
    timer, _ = timer_on(gpu, monkeypatch)
    device_time = timer.on_device({0: batch_on(gpu, 1, 32), 1: batch_on(gpu, 2, 4)})  # 125 ms and 16 ms to issue
    assert {timing.quantity for timing in device_time.timings} == {
        "transfer",
        "enqueue",
    }  # a mean of some is none of all
    assert [timing.index for timing in device_time.timings if timing.quantity == "enqueue"] == [0, 1]
    assert device_time.reason == "issuing the call takes 125 ms, longer than a backlog may be"


class InDtype(FakeModel):
    """A fake model in a dtype; it knows where it is, and the memory is too small for two at a batch size of 4."""

    def __init__(self, clock: FakeClock, dtype: torch.dtype, placed: dict[torch.dtype, str]) -> None:
        super().__init__(clock, lambda rows: torch.OutOfMemoryError() if rows >= 4 and self.is_crowded else None)
        self.dtype, self.placed = dtype, placed
        placed[dtype] = "device"

    @property
    def is_crowded(self) -> bool:
        return list(self.placed.values()).count("device") > 1

    def parameters(self) -> Iterator[torch.Tensor]:
        yield torch.zeros(1, dtype=self.dtype)

    def to(self, device: Any) -> None:
        self.placed[self.dtype] = "host" if str(device) == "cpu" else "device"


def in_turns(device: torch.device, sizes: Sequence[int], finished: Sequence[Visit] = ()) -> list[Visit]:
    clock, placed = FakeClock(), dict[torch.dtype, str]()
    profilers = [
        InferenceProfiler(InDtype(clock, dtype, placed), FakeTokenizer(clock), device, timer=Timer(clock))
        for dtype in (torch.float32, torch.bfloat16)
    ]
    selection = Selection.of(EVEN, FakeTokenizer(clock), 512, device)
    return take_turns(profilers, selection, SweepSettings(sizes), finished)


def test_dtypes_take_turns_within_the_rounds() -> None:
    made = in_turns(torch.device("cpu"), [1, 2])
    orders = [[(visit.batch_size, visit.dtype) for visit in made if visit.round == number] for number in range(5)]
    assert orders[0] == [(1, "bfloat16"), (1, "float32"), (2, "bfloat16"), (2, "float32")]
    assert all(sorted(order) == orders[0] for order in orders)
    assert len({tuple(order) for order in orders}) > 2
    again = in_turns(torch.device("cpu"), [1, 2], finished=made[:7])
    assert [(visit.round, visit.batch_size, visit.dtype) for visit in again] == [
        (visit.round, visit.batch_size, visit.dtype) for visit in made
    ]


def test_one_dtype_that_runs_out_of_memory_does_not_end_the_other() -> None:
    made = in_turns(torch.device("cpu"), [1, 4, 8])  # where nothing makes room
    assert {(visit.batch_size, visit.status) for visit in made} == {(1, "ok"), (4, "oom")}
    assert len([visit for visit in made if visit.status == "oom"]) == 2


def test_out_of_memory_on_a_gpu_is_that_of_one_model_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BatchTimer, "on_device", lambda *_: OnDevice([], reason="it has no clock"))
    made = in_turns(torch.device("meta"), [1, 4])  # no host, and no GPU whose memory a test could fill
    assert {visit.status for visit in made} == {"ok"}
    assert len(made) == 5 * 4


def test_no_batch_is_timed_on_a_gpu_before_one_of_its_shape_has_run(monkeypatch: pytest.MonkeyPatch) -> None:
    from utils.baseline import inference as profiler

    seen, new = set[object](), list[object]()
    forward, isolated = profiler.forward, BatchTimer.isolated

    def noted(model: Any, batch: Any) -> Any:
        seen.add(batch.shape)
        return forward(model, batch)

    def timed(self: BatchTimer, batches: Any, *least: Any) -> Any:
        new.extend(batch.shape for batch in batches.values() if batch.shape not in seen)
        return isolated(self, batches, *least)

    monkeypatch.setattr(profiler, "forward", noted)
    monkeypatch.setattr(BatchTimer, "isolated", timed)
    monkeypatch.setattr(BatchTimer, "on_device", lambda *_: OnDevice([], reason="it has no clock"))
    clock = FakeClock()
    owner = InferenceProfiler(
        InDtype(clock, torch.float32, {}), FakeTokenizer(clock), torch.device("meta"), timer=Timer(clock)
    )
    texts = ["word " * (1 + number % 37) for number in range(400)]
    take_turns([owner], Selection.of(texts, owner.tokenizer, 512, owner.device), SweepSettings([1], num_runs=3))
    assert seen and not new


def test_what_the_allocator_asks_the_gpu_for_anew_in_every_visit_is_in_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    class Allocates(FakeModel):
        """Takes a second more for a batch that is larger than any since the memory was given back."""

        held = 0

        def __call__(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None) -> Any:
            clock.advance(float(input_ids.numel() > self.held))
            self.held = max(self.held, input_ids.numel())
            return super().__call__(input_ids, attention_mask)

    clock = FakeClock()
    model = Allocates(clock)
    monkeypatch.setattr("utils.baseline.inference.release_memory", lambda device: setattr(model, "held", 0))
    monkeypatch.setattr(BatchTimer, "on_device", lambda *_: OnDevice([], reason="it has no clock"))
    owner = InferenceProfiler(model, FakeTokenizer(clock), torch.device("meta"), timer=Timer(clock))
    selection = Selection.of(LONG_TAILED, owner.tokenizer, 512, owner.device)
    made = take_turns([owner], selection, SweepSettings([1, 4], num_runs=5))
    timed = [timing for visit in made for timing in visit.timings if timing.quantity != "tokenize"]
    cold = [timing for timing in timed if timing.quantity == "cold"]
    assert {timing.seconds for timing in cold} == {
        COLD_S + 1 + SECONDS_PER_TOKEN * timing.tokens_padded for timing in cold
    }
    for timing in timed:
        if timing.quantity != "cold":
            assert timing.seconds == pytest.approx(SECONDS_PER_TOKEN * timing.tokens_padded, rel=1e-9)


CPU = torch.device("cpu")


def texts_of(*lengths: int) -> list[str]:
    """Return texts whose words are all the number of the text."""
    return [" ".join([str(number)] * length) for number, length in enumerate(lengths)]


def of(texts: list[str], max_length: int = 512) -> Selection:
    return Selection.of(texts, FakeTokenizer(), max_length, CPU)


MIXED = texts_of(*(1 + (row * row) % 97 for row in range(320)))


def test_a_batch_holds_its_texts_in_the_order_asked_for_padded_with_the_tokenizers_token() -> None:
    batch = of(texts_of(3, 1, 2)).batch([1, 0])
    assert batch.rows == (1, 0)
    assert batch.input_ids.tolist() == [[19, 7, 7], [18, 18, 18]]  # tokens of "1" and "0", and of padding
    assert batch.attention_mask.tolist() == [[1, 0, 0], [1, 1, 1]]
    assert (batch.tokens_real, batch.tokens_padded) == (4, 6)


def test_batches_are_on_the_device() -> None:
    selection = Selection.of(MIXED, FakeTokenizer(), 512, torch.device("meta"))
    assert {batch.input_ids.device.type for batch in selection.batches(4, 3)} == {"meta"}


@pytest.mark.parametrize(
    ("lengths", "batch_size", "rows"),
    [
        ((1, 9, 4, 5, 2), 1, (2,)),  # 4.2 on average
        ((9, 9, 1, 4, 5, 3, 4), 2, (4, 5)),  # padded to 9, 4 and 5; the last one holds one text and is none
        ((1, 4, 2, 4, 3, 4, 4, 4), 2, (2, 3)),  # all are padded to 4: then the typical share of padding decides
        ((3, 1), 4, (0, 1)),  # the last one is the only one
    ],
)
def test_the_reference_batch_is_the_one_of_typical_cost(lengths, batch_size, rows) -> None:
    reference = of(texts_of(*lengths)).reference(batch_size)
    assert reference.rows == rows
    assert str(reference.shape) == f"{len(rows)} × {max(lengths[row] for row in rows)} tokens"


@pytest.mark.parametrize(("batch_size", "count"), [(1, 10), (4, 10), (8, 3), (64, 5)])
def test_batches_are_spread_over_the_lengths_of_all(batch_size: int, count: int) -> None:
    selection = of(MIXED)
    batches = selection.batches(batch_size, count)
    assert len({batch.rows for batch in batches}) == count
    assert [batch.rows for batch in of(texts_of(3, 1, 2, 5, 4)).batches(2, 9)] == [(0, 1), (4,), (2, 3)]  # all
    mean = sum(batch.shape.tokens for batch in batches) / count
    assert mean == pytest.approx(selection.arrivals(batch_size).longest.mean(), rel=0.1)


def test_texts_are_cut_and_counted() -> None:
    selection = of(texts_of(5, 2, 4), max_length=3)
    assert selection.tokens.lengths.tolist() == [3, 2, 3]
    assert selection.tokens.truncated == 2


def test_a_server_would_tokenize_the_texts_of_one_batch() -> None:
    selection = of(texts_of(1, 2, 3), max_length=2)
    tokenizer = selection.tokenizer
    tokenizer.calls.clear()
    selection.tokenize(selection.batch([2, 0]))
    assert tokenizer.calls == [(["2 2 2", "0"], {"truncation": True, "max_length": 2})]


MOST_TOKENS = 100  # of a batch


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return workplace.prepare(tmp_path_factory.mktemp("memory"), workplace.texts(40))


@pytest.mark.parametrize(("sizes", "statuses"), [
    ([1, 16, 32], ["noisy", "oom", "skipped_oom"]), ([16, 32], ["oom", "skipped_oom"]),
])  # fmt: skip
def test_batch_sizes_that_do_not_fit_are_results_and_said_in_words(settings, sizes, statuses, tmp_path, monkeypatch):
    stock = transformers.BertForSequenceClassification.forward

    def forward(self, input_ids=None, **given):
        if input_ids is not None and input_ids.numel() > MOST_TOKENS:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return stock(self, input_ids=input_ids, **given)

    monkeypatch.setattr(transformers.BertForSequenceClassification, "forward", forward)
    monkeypatch.setattr(
        "utils.baseline.sweep.find_limits", lambda *_: None
    )  # which measures the limits of this machine
    command = [*settings, *workplace.QUICK, f"profiling.batch_sizes={sizes}", f"output.results_dir={tmp_path}"]
    for step in ("02_baseline_inference", "04_visualize_results"):
        assert importlib.import_module(f"scripts.{step}").main(command) == 0
    rows = json.loads((tmp_path / "baseline_metrics.json").read_text())["batch_sizes"]
    assert [row["status"] for row in rows][-2:] == statuses[-2:]
    card, report, page = (
        " ".join((tmp_path / name).read_text().split())
        for name in ("card.txt", "baseline_summary_report.txt", "report.html")
    )
    assert "does not fit" in card or "(16 and more do not fit into memory)" in card
    assert "out of memory" in report and "out of memory" in page
    assert ("Make the model fit" in report) == (sizes[0] == 16)
    assert "OutOfMemoryError" not in card and "oom" not in card


def test_the_watts_of_an_idle_machine_are_read_before_anything_is_measured(settings, tmp_path, monkeypatch):
    order: list[str] = []

    def noted(name, wrapped):
        return lambda *given, **named: order.append(name) or wrapped(*given, **named)

    for name in ("instruments.energy", "take_turns", "find_limits"):
        monkeypatch.setattr(f"utils.baseline.sweep.{name}", noted(name, lambda *_, **__: None))
    command = [*settings, *workplace.QUICK, f"output.results_dir={tmp_path}"]
    importlib.import_module("scripts.02_baseline_inference").main(command)
    assert order == ["instruments.energy", "take_turns"]
