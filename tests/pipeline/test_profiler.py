"""The sweep of a model whose forward takes a known time: every latency is exact, and no test waits."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from boundby.sampler import NoSource, Sampler
from boundby.timer import Timer
from tests.fakes import FakeClock
from utils.metrics import COLUMNS
from utils.profiler import InferenceProfiler, _Plan
from utils.visits import Timing, Visit, half_width

SECONDS_PER_TOKEN = 2.0**-8  # powers of two, so that sums are exact
SECONDS_PER_TEXT = 2.0**-10  # in the tokenizer
COLD_S = 4.0


class FakeTokenizer:
    """Makes one token of each word."""

    pad_token_id = 0

    def __init__(self, clock: FakeClock) -> None:
        self._clock = clock

    def __call__(self, texts: list[str], truncation: bool, max_length: int, **_: Any) -> Any:
        self._clock.advance(SECONDS_PER_TEXT * len(texts))
        words = [text.split() for text in texts]
        encodings = [SimpleNamespace(overflowing=each[max_length:]) for each in words]
        ids = [[1] * min(len(each), max_length) for each in words]
        return type("Encoded", (dict,), {"encodings": encodings})(input_ids=ids)


class FakeModel:
    """Takes a time per padded token, more in the first call of each shape; `error` says which batches fail and how."""

    def __init__(self, clock: FakeClock, error: Callable[[int], BaseException | None] = lambda rows: None) -> None:
        self.slowness = 1.0
        self.calls: Counter[tuple[int, ...]] = Counter()
        self._clock, self._error = clock, error

    def parameters(self) -> Iterator[torch.Tensor]:
        yield torch.zeros(1)

    def __call__(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None) -> Any:
        assert torch.is_inference_mode_enabled()
        rows = len(input_ids)
        if (error := self._error(rows)) is not None:
            raise error
        if not self.calls[input_ids.shape]:
            self._clock.advance(COLD_S)
        self.calls[input_ids.shape] += 1
        self._clock.advance(SECONDS_PER_TOKEN * self.slowness * input_ids.numel())
        return SimpleNamespace(logits=input_ids)


class Bench:
    """A profiler of a fake model on a fake clock; `made` are the visits it reported."""

    def __init__(self, error: Callable[[int], BaseException | None] = lambda rows: None) -> None:
        self.clock = FakeClock()
        self.model = FakeModel(self.clock, error)
        sampler = Sampler(NoSource("the device is not a GPU"), clock=self.clock)
        self.profiler = InferenceProfiler(
            self.model, FakeTokenizer(self.clock), torch.device("cpu"), timer=Timer(self.clock), sampler=sampler
        )
        self.made: list[Visit] = []
        self.after_visit: Callable[[Visit], None] = lambda visit: None

    def sweep(self, texts: Sequence[str], batch_sizes: Sequence[int], **options: Any) -> list[dict[str, Any]]:
        return self.profiler.profile_multiple_batch_sizes(texts, batch_sizes, on_visit=self._note, **options)

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
    assert all(list(row) == [*COLUMNS, "reasons"] for row in rows)
    for row in rows:
        expected = {
            "latency_per_sample_ms_mean": 31.25,
            "latency_per_sample_ms_ci_low": 31.25,
            "latency_per_sample_ms_ci_high": 31.25,
            "latency_per_token_ms_mean": 31.25 / 8,
            "throughput_samples_per_sec_mean": 32.0,
            "tokens_per_sec_real": 256.0,
            "tokens_per_sec_padded": 256.0,
            "batches_per_sec": 32.0 / row["batch_size"],
            "latency_per_batch_ms_median": 31.25 * row["batch_size"],
            "latency_per_batch_ms_max": 31.25 * row["batch_size"],
            "padding_pct": 0.0,
        }
        assert {name: row[name] for name in expected} == pytest.approx(expected, rel=1e-12)
        assert (row["status"], row["doubts"], row["dtype"]) == ("ok", [], "float32")


def test_batches_hold_the_texts_in_order_and_each_shape_is_warm_before_it_is_timed() -> None:
    [row] = Bench().sweep(["a b c d"] * 4 + ["a b"] * 4, [4])
    assert (row["latency_per_batch_ms_min"], row["latency_per_batch_ms_max"]) == (31.25, 62.5)
    assert row["latency_per_sample_ms_mean"] == pytest.approx((7.8125 + 15.625) / 2, rel=1e-12)


def test_padding_costs_time_and_is_told() -> None:
    [row] = Bench().sweep(UNEVEN, [4])
    assert row["padding_pct"] == 50.0
    assert row["latency_per_sample_ms_mean"] == pytest.approx(31.25, rel=1e-12)  # as long as the longest
    assert row["latency_per_token_ms_mean"] == pytest.approx(31.25 / 4, rel=1e-12)
    assert row["tokens_per_sec_real"] == pytest.approx(row["tokens_per_sec_padded"] / 2, rel=1e-12)


def test_the_cold_call_and_the_tokenizer_are_kept_apart() -> None:
    bench = Bench()
    rows = bench.sweep(EVEN, [1, 4])
    assert [row["cold_call_ms"] for row in rows] == [4031.25, 4125.0]
    assert [row["latency_per_batch_ms_max"] for row in rows] == [31.25, 125.0]
    assert [row["tokenize_per_batch_ms"] for row in rows] == [1000 / 1024, 4000 / 1024]
    for batch_size in (1, 4):
        assert [len(visit.of("cold")) for visit in bench.visits(batch_size)] == [1, 0, 0, 0, 0]


def test_a_steady_model_is_visited_five_times_per_batch_size() -> None:
    bench = Bench()
    bench.sweep(EVEN, [1, 2, 4])
    assert [visit.batch_size for visit in bench.made[:3]] == [1, 2, 4]
    for batch_size in (1, 2, 4):
        assert [visit.round for visit in bench.visits(batch_size)] == [0, 1, 2, 3, 4]


def test_fewer_runs_than_five_are_as_many_rounds() -> None:
    bench = Bench()
    bench.sweep(EVEN, [4], num_runs=3)
    assert len(bench.made) == 3


def test_visits_go_on_until_the_interval_is_narrow() -> None:
    bench = Bench()
    bench.model.slowness = 1.125
    bench.after_visit = lambda visit: setattr(bench.model, "slowness", 1.0 if visit.round >= 1 else 1.125)
    [row] = bench.sweep(EVEN, [4], ci_half_width=0.04, max_seconds=1000.0)
    widths = [half_width(bench.made[:count]) for count in range(5, len(bench.made) + 1)]
    assert len(widths) > 1
    assert widths[-1] <= 0.04 < min(widths[:-1])
    assert row["status"] == "ok"
    assert row["throughput_half_width_pct"] == pytest.approx(100 * widths[-1], rel=1e-12)


def restless(bench: Bench) -> None:
    """Let every second visit take half as long again."""
    bench.after_visit = lambda visit: setattr(bench.model, "slowness", 2.5 - bench.model.slowness)


def test_a_noisy_batch_size_stops_at_the_budget_and_says_so() -> None:
    bench = Bench()
    restless(bench)
    [row] = bench.sweep(EVEN, [4], max_seconds=8.0)
    spent = [visit.measured_s for visit in bench.made]
    assert len(spent) > 5
    assert sum(spent) >= 8.0 > sum(spent[:-1])
    assert row["status"] == "noisy"
    assert row["rounds"] == len(spent)
    assert any("wider than the 3.0 % asked for" in doubt for doubt in row["doubts"])


def test_five_rounds_are_made_even_beyond_the_budget() -> None:
    bench = Bench()
    restless(bench)
    bench.sweep(EVEN, [4], max_seconds=0.01)
    assert len(bench.made) == 5


@pytest.mark.parametrize(("max_seconds", "rounds"), [(15.0, 15), (30.0, 30)])
def test_a_noisy_batch_size_stops_at_fifteen_rounds_or_one_per_second_of_its_budget(max_seconds, rounds) -> None:
    bench = Bench()
    restless(bench)
    bench.sweep(EVEN, [4], num_runs=2, max_seconds=max_seconds)
    assert len(bench.made) == rounds


def test_texts_of_every_batch_size_are_as_long_as_all_texts_on_average() -> None:
    bench = Bench()
    texts = ["x " * (1 + (7 * row) % 97) for row in range(320)]
    bench.sweep(texts, [1, 4, 32])
    for batch_size in (1, 4, 32):
        first = bench.visits(batch_size)[0]
        passed = first.of("isolated")[: first.batches]
        mean = sum(timing.tokens_real for timing in passed) / sum(timing.samples for timing in passed)
        assert mean == pytest.approx(sum(len(text.split()) for text in texts) / len(texts), rel=0.01)


@pytest.mark.parametrize("num_runs", [1, 3, 10, 12])
@pytest.mark.parametrize("num_warmup_runs", [1, 40])
def test_the_runs_asked_for_are_the_least_work(num_runs: int, num_warmup_runs: int) -> None:
    bench = Bench()
    [row] = bench.sweep(EVEN * 8, [64], num_runs=num_runs, num_warmup_runs=num_warmup_runs, max_seconds=0.01)
    assert row["timed_batches"] >= num_runs
    assert row["warmup_runs"] >= num_warmup_runs
    assert bench.model.calls.total() > row["timed_batches"] + row["warmup_runs"]


def test_a_slow_batch_is_timed_less_often_per_visit_and_a_fast_one_in_several_passes() -> None:
    bench = Bench()
    slow, fast = bench.sweep(EVEN * 8, [64], num_runs=10, max_seconds=15.0), bench.sweep(EVEN, [1], num_runs=10)
    assert slow[0]["timed_batches"] == 5 * 2  # 2 s each, and 3 s for a visit: no more than ten runs need
    assert fast[0]["timed_batches"] == 5 * 20  # 31.25 ms each: two passes over ten batches fill 0.4 s
    assert all(visit.measured_s >= 0.4 for visit in bench.visits(1))


@pytest.mark.parametrize(("num_runs", "p90"), [(5, None), (6, 125.0)])
def test_percentiles_stand_where_the_batches_support_them(num_runs: int, p90: float | None) -> None:
    [row] = Bench().sweep(EVEN, [4], num_runs=num_runs)
    assert row["timed_batches"] == 5 * num_runs
    assert (row["latency_per_batch_ms_p90"], row["latency_per_batch_ms_p99"]) == (p90, None)
    assert row["reasons"]["latency_per_batch_ms_p99"] == f"{5 * num_runs} timed batches; at least 299 support it"


def test_out_of_memory_is_a_row_and_the_sweep_goes_on() -> None:
    bench = Bench(out_of_memory_from(4))
    rows = bench.sweep(EVEN, [1, 2, 4, 8, 16])
    assert [row["status"] for row in rows] == ["ok", "ok", "oom", "skipped_oom", "skipped_oom"]
    assert rows[2]["reasons"]["all"] == "OutOfMemoryError: CUDA out of memory."
    assert rows[3]["reasons"]["all"] == "batch size 4 ran out of memory"
    assert rows[2]["latency_per_sample_ms_mean"] is None
    assert [visit.status for visit in bench.visits(4)] == ["oom"]
    assert bench.visits(8) == bench.visits(16) == []
    assert len(bench.visits(2)) == 5


def test_a_batch_size_that_fails_is_a_row_and_larger_ones_are_measured() -> None:
    bench = Bench(lambda rows: RuntimeError("no kernel for this shape") if rows == 2 else None)
    rows = bench.sweep(EVEN, [1, 2, 4])
    assert [row["status"] for row in rows] == ["ok", "failed", "ok"]
    assert rows[1]["reasons"]["all"] == "RuntimeError: no kernel for this shape"
    assert len(bench.visits(2)) == 1


def test_an_interruption_is_not_a_failed_batch_size() -> None:
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
    assert places(resumed.made) == places(whole.made)[finished:]
    assert len(whole.made) == 16
    changing = ("reasons", "memory_cpu_mb", "memory_cpu_peak_mb", "doubts")
    for row, other in zip(rows, expected, strict=True):
        assert {name: row[name] for name in row if name not in changing} == {
            name: other[name] for name in other if name not in changing
        }


def places(visits: Sequence[Visit]) -> list[tuple[int, int]]:
    return [(visit.batch_size, visit.round) for visit in visits]


def test_a_resumed_batch_size_is_warmed_up_again_and_times_as_many_batches_as_before() -> None:
    first, resumed = Bench(), Bench()
    first.sweep(EVEN, [4], num_runs=10)
    [row] = resumed.sweep(EVEN, [4], num_runs=10, finished=first.made[:2], max_seconds=3.0)
    warm_up, kept_warm = resumed.made[0].warm_up, resumed.made[1].warm_up
    assert warm_up is not None and kept_warm is not None
    assert warm_up["runs"] > kept_warm["runs"] == 3
    assert warm_up["seconds"] == 0.125 * warm_up["runs"]  # without the cold call of the new process
    assert {visit.batches for visit in resumed.made} == {first.made[0].batches}
    assert [len(visit.of("cold")) for visit in resumed.made] == [1, 0, 0]
    assert row["latency_per_batch_ms_max"] == 125.0


def test_texts_repeat_where_there_are_too_few() -> None:
    bench = Bench()
    [row] = bench.sweep(["a b", "a b c d"], [8])
    assert row["padding_pct"] == 25.0
    assert {timing.tokens_real for visit in bench.made for timing in visit.of("isolated")} == {24}


def test_long_texts_are_cut_and_counted() -> None:
    bench = Bench()
    bench.sweep(UNEVEN, [4], max_length=4)
    assert {visit.truncated for visit in bench.made} == {1}
    assert {timing.tokens_padded for visit in bench.made for timing in visit.of("isolated")} == {16}


def test_a_visit_tells_when_and_on_what_it_was_made() -> None:
    bench = Bench()
    bench.sweep(EVEN, [4])
    [session] = {visit.session for visit in bench.made}
    assert session == bench.profiler.session
    assert {visit.dtype for visit in bench.made} == {"float32"}
    assert {visit.gpu_utilization_reason for visit in bench.made} == {"the device is not a GPU"}
    # the window is that of the timed calls, without cold call, warm-up and tokenizer
    assert [visit.window_s for visit in bench.made] == [visit.measured_s for visit in bench.made]


def test_no_texts_are_refused() -> None:
    with pytest.raises(ValueError, match="no texts"):
        Bench().sweep([], [1])


def test_a_text_without_tokens_is_refused_before_anything_is_measured() -> None:
    bench = Bench()
    with pytest.raises(ValueError, match="text 1 has no tokens"):
        bench.sweep(["a", "  "], [1])
    assert bench.model.calls.total() == 0


def test_a_gpu_is_given_a_queue_of_at_least_a_quarter_second_and_one_wait() -> None:
    bench = Bench()
    bench.profiler.device = torch.device("cuda")  # decides only whether there is a queue
    waits: list[float] = []
    bench.profiler.timer = Timer(bench.clock, lambda: waits.append(bench.clock.now))
    plan = _Plan(bench.profiler, EVEN, 10, 3, 512, 15.0)
    batch = SimpleNamespace(rows=(0,), input_ids=torch.ones(1, 8), is_padded=False, tokens_real=8, tokens_padded=8)
    bench.model.calls[1, 8] = 1  # not cold
    timed = [Timing("isolated", index % 3, 2.0**-5, 1, 8, 8) for index in range(6)]
    with torch.inference_mode():
        [block] = plan._pipelined([batch] * 3, timed)
    assert (block.quantity, block.samples, block.tokens_real) == ("pipelined", 9, 72)
    assert block.seconds == 9 * 2.0**-5 >= 0.25
    assert len(waits) == 2
