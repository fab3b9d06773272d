"""Findings on classifiers of known work, whose operators take a known time on a machine of known limits."""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import mean
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from msgspec import structs
from torch.utils._python_dispatch import TorchDispatchMode

from boundby.bound.bench import Bench as Instruments
from boundby.bound.verdict import Doubt, Verdict
from boundby.formatting import Missing
from boundby.machine.ceilings import Ceilings, ComputeCeiling, MemoryCeiling
from boundby.machine.disturbance import Conditions, Disturbance
from boundby.machine.energy import EnergyMeter, EnergyUse
from boundby.machine.sampler import DeviceLostError
from boundby.timing.timer import Timer
from boundby.work import transformer_flops, transformer_shape
from tests.fakes import FakeClock, FakeThreads, FakeTokenizer, FakeWatch
from utils.baseline import columns, diagnosis
from utils.baseline import inference as profiler
from utils.baseline.columns import COLUMNS, NAMES, NOT_DIAGNOSED, Finding
from utils.baseline.diagnosis import DOUBTS_OF_A_VERDICT, Subject, _Case, diagnose
from utils.baseline.inference import InferenceProfiler, SweepSettings
from utils.baseline.rounds import Visit
from utils.baseline.selection import Selection

CPU = torch.device("cpu")
HIDDEN, LABELS, WORDS = 16, 2, 32
SECONDS_PER_OUTPUT = 2.0**-18  # of a linear layer: 2^-14 s for a token
TIMED = ("aten::linear", "aten::addmm", "aten::mm")  # the first in inference mode, its parts while they are counted
FLOPS_PER_TOKEN, SECONDS_PER_TOKEN = 2 * 2 * HIDDEN**2, 2 * HIDDEN * SECONDS_PER_OUTPUT  # of two square layers
FLOPS_PER_S = 1.25 * FLOPS_PER_TOKEN / SECONDS_PER_TOKEN  # they reach 80 % of the limit
EVEN = ["a b c d e f g h"] * 8
UNEVEN = ["a b c d e f g h", "a b", "a b c", "a b c"]  # as a batch of four: 16 real and 32 padded tokens
ENERGY = ("energy_per_sample_j", "energy_per_sample_net_j")
DIAGNOSED = {column.name for column in COLUMNS if column.diagnosed}
WORK = ("flops_per_batch", "useful_flops_pct", "bytes_per_batch", "flops_per_sec", "share_of_ceiling_pct")


class Classifier(torch.nn.Module):
    """Two square layers on every token, and their mean; `before` is called with every batch's rows and tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(WORDS, HIDDEN)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(HIDDEN, HIDDEN, bias=False) for _ in range(2))
        self.before: Callable[[int, int], object] = lambda rows, tokens: None

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> Any:
        assert torch.is_inference_mode_enabled()
        self.before(*input_ids.shape)
        hidden = self.embedding(input_ids)
        for layer in self.layers:
            hidden = layer(hidden)
        if attention_mask is not None:
            hidden = hidden * attention_mask.unsqueeze(-1)
        return SimpleNamespace(logits=self.head(hidden, attention_mask is not None))

    def head(self, hidden: torch.Tensor, is_padded: bool) -> torch.Tensor:
        return hidden.mean(dim=1)[:, :LABELS]


class WithoutFormula(Classifier):
    """Ends with an operator whose FLOPs nobody knows, in batches with padding or without."""

    def __init__(self, *where: bool) -> None:
        super().__init__()
        self._where = where

    def head(self, hidden: torch.Tensor, is_padded: bool) -> torch.Tensor:
        if is_padded in self._where:
            return torch.fft.rfft(hidden, dim=1).abs().mean(dim=1)[:, :LABELS]
        return super().head(hidden, is_padded)


class Lookup(Classifier):
    """Averages embeddings, without any product."""

    def __init__(self, clock: FakeClock) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList()
        self.before = lambda rows, tokens: clock.advance(rows * tokens * SECONDS_PER_TOKEN)


class LinearLayersTakeTime(TorchDispatchMode):
    """Lets linear layers, and nothing else, take a time for each of their outputs; `speed` is asked every time."""

    def __init__(self, clock: FakeClock) -> None:
        super().__init__()
        self.speed: Callable[[], float] = lambda: torch.get_num_threads()
        self._clock = clock

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if func._schema.name in TIMED:
            self._clock.advance(out.numel() * SECONDS_PER_OUTPUT / self.speed())
        return out


def compute(dtype: str, precision: str | None, ratio: float = 1.0, configured: bool = True) -> ComputeCeiling:
    return ComputeCeiling(dtype, precision, configured, ratio * FLOPS_PER_S, ratio * FLOPS_PER_S, 1024, 0.0)


MACHINE = Ceilings(
    device={"type": "cpu"},
    compute=(compute("float32", "highest"),),
    memory=(MemoryCeiling("memory", 2**28, 1e15, 1e15, "copy"),),
    dispatch_s=1e-12,
    dispatch_high_s=1e-12,
    seconds=1.0,
)


class Bench:
    """A classifier that was swept over texts: `rows`, `visits`, and the findings on them."""

    def __init__(self, texts: Sequence[str], model: Any = None, seconds_per_text: float = 0.0) -> None:
        self.clock = FakeClock()
        self.timer = Timer(self.clock)
        self.model = Classifier() if model is None else model
        self.tokenizer = FakeTokenizer(self.clock, seconds_per_text)
        self.texts, self.visits = texts, list[Visit]()
        self.rows: list[dict[str, Any]] = []
        self.takes_time = LinearLayersTakeTime(self.clock)

    def sweep(self, *batch_sizes: int, **options: Any) -> "Bench":
        owner = InferenceProfiler(self.model, self.tokenizer, CPU, timer=self.timer)
        with self.takes_time:
            self.rows = owner.profile_multiple_batch_sizes(
                self.texts, batch_sizes, num_runs=2, settings=SweepSettings(**options), on_visit=self.visits.append
            )
        return self

    def subject(self, device: torch.device = CPU, **changes: Any) -> Subject:
        selection = Selection.of(self.texts, self.tokenizer, 512, device)
        bench = Instruments(self.timer, watch=FakeWatch(), replay_s=0.0, trials_s=20.0)  # type: ignore[arg-type]
        subject = Subject(self.model, selection, MACHINE, bench)
        return replace(subject, **changes)

    def findings(self, subject: Subject | None = None, chosen: int | None = None) -> list[Finding]:
        findings: list[Finding] = []
        with self.takes_time:
            diagnose(subject or self.subject(), self.rows, self.visits, findings.append, chosen)
        return findings

    def finding(self, chosen: int | None = None, **changes: Any) -> Finding:
        [findings] = self.findings(self.subject(**changes), chosen)
        return findings

    def row(self, **changes: Any) -> dict[str, Any]:
        return self.finding(**changes).fill(self.rows[0])


@pytest.fixture(autouse=True)
def threads(monkeypatch: pytest.MonkeyPatch) -> FakeThreads:
    """One thread, so that fewer are not possible; no garbage is collected, which takes longer than the test."""
    for module in (diagnosis, profiler):
        monkeypatch.setattr(module, "release_memory", lambda device: None)
    return FakeThreads(monkeypatch)


def fixes(verdict: Verdict) -> dict[str, float]:
    return {str(gain.fix): gain.at_most for gain in verdict.gains}


def tried(verdict: Verdict) -> list[str]:
    """Return the names of the interventions, which the evidence ends with."""
    return [trial.name for trial in verdict.trials]


def values(finding: Finding) -> dict[str, Any]:
    return {column.name: column.diagnosed(finding) for column in COLUMNS if column.diagnosed}


def raising(error: BaseException, from_rows: int = 5) -> Callable[[int, int], None]:
    def before(rows: int, tokens: int) -> None:
        if rows >= from_rows:
            raise error

    return before


def missing(row: Mapping[str, Any]) -> set[str]:
    return {name for name in NAMES if row[name] is None}


# The work of a batch


def test_flops_are_those_of_the_formula_with_padding_and_without() -> None:
    transformers = pytest.importorskip("transformers")
    size = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    model = transformers.BertForSequenceClassification(transformers.BertConfig(vocab_size=WORDS, **size)).eval()
    lengths = [8, 2, 3, 3, 12, 5, 1, 9]  # two batches of four, as long as 8 and 12
    texts = [" ".join("abcdefghijkl"[:length]) for length in lengths]
    finding = Bench(texts, model).sweep(4).finding()
    shape = transformer_shape(model)
    assert shape is not None
    executed = mean(transformer_flops(shape, 4, longest) for longest in (8, 12))
    useful = sum(transformer_flops(shape, 1, length) for length in lengths) / 2
    assert values(finding)["flops_per_batch"] == executed
    assert values(finding)["useful_flops_pct"] == pytest.approx(100 * useful / executed, rel=1e-12)
    assert not [doubt for doubt in finding.verdict.doubts if doubt.kind == "work"]


def test_the_forward_that_a_gpu_replays_as_a_graph_has_a_mask_that_the_host_does_not_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    transformers = pytest.importorskip("transformers")
    size = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    model = transformers.BertForSequenceClassification(transformers.BertConfig(vocab_size=WORDS, **size)).eval()
    bench = Bench(["abcd", "a b c d e"], model).sweep(2)
    seen: list[torch.Tensor] = []

    def bare(call: Any, *_: Any) -> None:
        model.register_forward_pre_hook(lambda *given: seen.append(given[2]["attention_mask"]), with_kwargs=True)
        call.bare()
        raise KeyboardInterrupt

    monkeypatch.setattr(diagnosis, "is_gpu", lambda device: True)
    monkeypatch.setattr(diagnosis, "bottleneck", bare)
    with pytest.raises(KeyboardInterrupt):
        bench.finding(chosen=2)
    assert [mask.dim() for mask in seen] == [4]


def test_flops_far_from_the_formula_are_a_doubt(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(EVEN).sweep(4)
    counted = values(bench.finding())["flops_per_batch"]
    monkeypatch.setattr("utils.baseline.diagnosis.transformer_shape", lambda model: "a shape that is known")
    for factor, doubts in ((1.04, []), (2.0, ["the counted FLOPs are 0.50 times those of the formula"])):
        monkeypatch.setattr("utils.baseline.diagnosis.transformer_flops", lambda *_, factor=factor: factor * counted)
        texts = [doubt.text[:53] for doubt in bench.finding().verdict.doubts if doubt.kind == "work"]
        assert texts == doubts


def test_columns_follow_from_work_time_and_ceiling() -> None:
    row = Bench(UNEVEN).sweep(4).row()
    weights = 4 * 2 * HIDDEN**2
    linear = weights + 2 * 2 * 4 * 32 * HIDDEN  # each layer reads and writes 32 tokens
    assert row["flops_per_batch"] == 32 * FLOPS_PER_TOKEN
    assert row["useful_flops_pct"] == 50.0
    assert row["bytes_per_batch"] > linear
    assert row["flops_per_sec"] == pytest.approx(FLOPS_PER_TOKEN / SECONDS_PER_TOKEN, rel=1e-12)
    assert row["share_of_ceiling_pct"] == pytest.approx(80.0, rel=1e-12)
    assert row["share_of_limit_pct"] == pytest.approx(80.0, rel=1e-6)  # the other operators need next to nothing
    assert (row["bound"], row["confidence"], row["doubts"]) == ("compute", "medium", [])
    assert row["verdict"]["bound"] == "compute"
    finding = Bench(EVEN).sweep(4).finding()
    assert values(finding)["useful_flops_pct"] == 100.0
    assert "remove padding" not in fixes(finding.verdict)


def test_every_measured_batch_size_has_a_finding_and_no_other() -> None:
    bench = Bench(EVEN)
    bench.model.before = raising(torch.OutOfMemoryError("CUDA out of memory."), from_rows=4)
    bench.sweep(1, 2, 4, 8)
    bench.model.before = lambda rows, tokens: None
    assert [row["status"] for row in bench.rows] == ["ok", "ok", "oom", "skipped_oom"]
    findings = bench.findings()
    assert [finding.batch_size for finding in findings] == [1, 2]
    assert [values(finding)["flops_per_batch"] for finding in findings] == [8 * FLOPS_PER_TOKEN, 16 * FLOPS_PER_TOKEN]


def test_a_noisy_row_is_diagnosed_and_its_verdict_in_doubt() -> None:
    bench = Bench(EVEN).sweep(4)
    doubts = [Doubt(kind, "so it was") for kind in (*DOUBTS_OF_A_VERDICT, "outliers", "memory")]
    said = {"doubts": [str(doubt) for doubt in doubts], "doubt_kinds": [doubt.kind for doubt in doubts]}
    bench.rows[0] |= {"status": "noisy", **said}
    finding = bench.finding()
    assert finding.verdict.doubts == tuple(doubts[:-2])  # outliers and memory say nothing about the time
    assert (finding.verdict.confirmation, finding.verdict.confidence) == ("untested", "low")
    assert finding.fill(bench.rows[0])["doubts"] == said["doubts"]


# What cannot be known


def test_a_model_that_cannot_be_counted_is_inconclusive_and_its_row_stays() -> None:
    bench = Bench(UNEVEN, WithoutFormula(True, False)).sweep(4)
    row = bench.row()
    assert (row["bound"], row["confidence"], row["verdict"]["evidence"]) == ("inconclusive", "low", ())
    assert {row[name] for name in (*WORK, "share_of_limit_pct")} == {None}
    for name in (*WORK, "share_of_limit_pct"):
        assert "work: it cannot be counted (the FLOPs of aten::_fft_r2c are not known" in row["reasons"][name]
    measured = set(NAMES) - DIAGNOSED - {"doubts"}
    assert {name: row[name] for name in measured} == {name: bench.rows[0][name] for name in measured}
    assert tried(bench.finding(chosen=4).verdict) == []


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (NotImplementedError("no rule for this subclass\nand a long trace"), "no rule for this subclass"),
        (NotImplementedError(), "NotImplementedError"),
    ],
)
def test_a_model_that_fails_under_the_counter_is_inconclusive_too(error: Exception, reason: str) -> None:
    bench = Bench(EVEN).sweep(4)
    bench.model.before = raising(error, from_rows=4)
    row = bench.row()
    assert row["bound"] == "inconclusive"
    assert row["reasons"]["flops_per_batch"] == f"work: it cannot be counted ({reason})"


def test_without_ceilings_in_its_dtype_the_work_is_known_and_the_bound_is_not() -> None:
    bench = Bench(UNEVEN).sweep(4)
    row = bench.row(ceilings=structs.replace(MACHINE, compute=(compute("bfloat16", None),)))
    assert (row["bound"], row["flops_per_batch"]) == ("inconclusive", 32 * FLOPS_PER_TOKEN)
    assert row["useful_flops_pct"] == 50.0
    assert row["flops_per_sec"] == pytest.approx(FLOPS_PER_TOKEN / SECONDS_PER_TOKEN, rel=1e-12)
    assert row["reasons"]["share_of_ceiling_pct"] == "the ceiling in float32 was not measured"
    assert row["reasons"]["share_of_limit_pct"] == "ceilings: the limits of this machine in float32 were not measured"
    assert row["verdict"]["confirmation"] == "untested"


def test_useful_flops_that_no_parabola_gives_are_unknown() -> None:
    bench = Bench([" ".join("abcdefghijkl"[:length]) for length in (8, 2, 3, 3, 12, 5, 1, 9)])
    layer = bench.model.layers[0]
    bench.model.head = lambda hidden, is_padded: layer(hidden[:, :5]).mean(dim=1)[:, :LABELS]  # a window of five
    bench.sweep(4)
    row = bench.row()
    assert row["useful_flops_pct"] is None
    assert "no parabola" in row["reasons"]["useful_flops_pct"]
    [gain] = [gain for gain in row["verdict"]["gains"] if gain["kind"] == "remove_padding"]
    assert gain["at_most"] == pytest.approx(80 / 43 / 0.8, rel=1e-3)  # what is left, at the limits
    assert "46 % of the FLOPs are for padding" in gain["basis"]


def test_a_model_that_can_be_counted_with_padding_alone_keeps_its_row() -> None:
    row = Bench(UNEVEN, WithoutFormula(False)).sweep(4).row()
    assert row["flops_per_batch"] == 32 * FLOPS_PER_TOKEN
    assert row["useful_flops_pct"] is None
    assert "aten::_fft_r2c" in row["reasons"]["useful_flops_pct"]


def test_a_model_without_products_has_no_useful_share_of_them() -> None:
    bench = Bench(UNEVEN)
    bench.model = Lookup(bench.clock)
    row = bench.sweep(4).row()
    assert row["flops_per_batch"] == 0
    assert row["useful_flops_pct"] is None
    assert row["reasons"]["useful_flops_pct"] != NOT_DIAGNOSED


# What surrounds the forward


def test_the_part_that_does_not_grow_with_the_batch_is_found_from_all_rows() -> None:
    bench = Bench(EVEN)
    bench.model.before = lambda rows, tokens: bench.clock.advance(8 * SECONDS_PER_TOKEN)  # as long as one text takes
    findings = bench.sweep(1, 2, 4).findings()
    for finding, percent in zip(findings, (50, 33, 20), strict=True):
        assert f"{percent} % of the time does not grow with the batch" in finding.verdict.evidence
    measured = [{trial.name: trial.measured.value for trial in finding.verdict.trials} for finding in findings]
    assert [factors.get("batch size 4") for factors in measured] == [
        pytest.approx(2 / 1.25),
        pytest.approx(1.5 / 1.25),
        None,
    ]
    assert {trial.source for finding in findings for trial in finding.verdict.trials} == {"sweep"}


def on_a_device(bench: Bench, **seconds: float) -> None:
    def note(visit: Visit) -> Visit:
        first = visit.of("isolated")[0]
        added = [replace(first, quantity=name, seconds=value) for name, value in seconds.items()]  # type: ignore[arg-type]
        return replace(visit, timings=(*visit.timings, *added))

    bench.visits = [note(visit) for visit in bench.visits]
    bench.rows = columns.rows(bench.visits, sorted({visit.batch_size for visit in bench.visits}), 0.03)


@pytest.fixture
def meta() -> torch.device:
    return torch.device("meta")


@pytest.mark.parametrize(
    ("device", "enqueue", "transfer", "bound"),
    [(0.9, 0.1, 0.1, "compute"), (0.9, 0.8, 0.1, "launch"), (0.5, 0.1, 0.1, "launch"), (0.9, 0.1, 1.05, "transfer")],
)
def test_times_of_the_device_decide_where_there_is_one(
    meta: torch.device, device: float, enqueue: float, transfer: float, bound: str
) -> None:
    bench = Bench(EVEN).sweep(4)
    seconds = 32 * SECONDS_PER_TOKEN  # isolated
    on_a_device(bench, device=device * seconds, enqueue=enqueue * seconds, transfer=transfer * seconds)
    bench.model.to(meta)
    limit = structs.replace(compute("float32", "highest"), flops_per_s=FLOPS_PER_S / 0.8, low=FLOPS_PER_S / 0.8)
    finding = bench.finding(device=meta, ceilings=structs.replace(MACHINE, compute=(limit,)))
    assert finding.verdict.bound == bound
    if bound == "compute":  # 0.64 of the isolated time by the limit
        assert finding.verdict.share_of_limit == pytest.approx(0.64 / device, rel=1e-6)
        assert values(finding)["share_of_ceiling_pct"] == pytest.approx(64.0)


def test_the_time_of_the_device_is_that_of_the_row(meta: torch.device) -> None:
    bench = Bench(EVEN).sweep(4, ci_half_width=0.03)
    bench.visits = [replace(bench.visits[0], round=number) for number in range(6)]
    on_a_device(bench, device=32 * SECONDS_PER_TOKEN, enqueue=2.0**-20, transfer=2.0**-20)
    disturbed = (Disturbance("gpu_shared", "1 other process(es) held the GPU"),)
    slow = tuple(replace(timing, seconds=64 * timing.seconds) for timing in bench.visits[5].timings)
    bench.visits[5] = replace(bench.visits[5], timings=slow, disturbances=disturbed)
    bench.rows = columns.rows(bench.visits, [4], 0.03)
    bench.model.to(meta)
    assert bench.rows[0]["device_per_batch_ms"] == 32e3 * SECONDS_PER_TOKEN
    finding = bench.finding(device=meta)
    assert finding.verdict.bound == "compute"
    assert finding.verdict.share_of_limit == pytest.approx(0.8, rel=1e-6)


# Trials, of the chosen batch size


@pytest.fixture
def two_threads(threads: FakeThreads) -> Iterator[None]:
    threads.number = 2
    yield
    assert threads.number == 2


def untried(verdict: Verdict) -> dict[str, str]:
    return {untried.fix.kind: untried.kind for untried in verdict.untried}


def test_settings_are_changed_on_purpose_and_set_back(two_threads: None) -> None:
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    bench = Bench(EVEN)
    bench.takes_time.speed = lambda: (
        torch.get_num_threads() * (4 if torch.get_float32_matmul_precision() == "medium" else 1) / 2
    )
    medium = compute("float32", "medium", ratio=4.0, configured=False)
    ceilings = structs.replace(MACHINE, compute=(*MACHINE.compute, medium))
    verdict = bench.sweep(4).finding(4, ceilings=ceilings).verdict
    left = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    assert tried(verdict) == ["precision medium", "the batch doubled", "1 of 2 threads"]
    by_kind = {trial.fix.kind: trial for trial in verdict.trials}
    assert by_kind["matmul_precision"].measured.value == pytest.approx(4.0)
    kept = by_kind["matmul_precision"].same_labels
    assert kept is not None and (kept.same, kept.of) == (8, 8)
    assert by_kind["matmul_precision"].at_most == pytest.approx(5.0, rel=1e-3)
    assert (verdict.bound, verdict.confirmation, verdict.settled, left) == ("compute", "confirmed", True, "highest")
    assert "matmul_precision" not in [gain.fix.kind for gain in verdict.gains]  # tried, no longer predicted


def test_only_the_chosen_size_is_tried_and_its_reference_batch_has_shape_and_time(two_threads: None) -> None:
    bench = Bench(EVEN).sweep(2, 4)
    two, four = bench.findings(chosen=4)
    assert tried(two.verdict) == ["batch size 4"] and two.verdict.reference is None
    assert tried(four.verdict) == ["batch size 2", "the batch doubled", "1 of 2 threads"]
    assert four.verdict.reference is not None
    assert str(four.verdict.reference) == "4 × 8 tokens"
    assert four.verdict.reference.seconds.value == pytest.approx(32 * SECONDS_PER_TOKEN / 2)


def test_a_model_that_cannot_be_packed_says_so() -> None:
    assert untried(Bench(UNEVEN).sweep(4).finding(4).verdict)["remove_padding"] == "not_possible"
    assert "remove_padding" not in untried(Bench(EVEN).sweep(4).finding(4).verdict)  # there is none


def test_a_slow_tokenizer_is_tried_beside_the_forward() -> None:
    bench = Bench(EVEN, seconds_per_text=8 * SECONDS_PER_TOKEN).sweep(4)
    assert "tokenize in a background worker" in tried(bench.finding(4).verdict)


def test_other_precisions_gain_at_most_what_their_limits_allow() -> None:
    others = (compute("float32", "medium", ratio=4.0, configured=False), compute("bfloat16", None, ratio=8.0))
    bench = Bench(EVEN).sweep(4)
    at_most = fixes(bench.finding(ceilings=structs.replace(MACHINE, compute=(*MACHINE.compute, *others))).verdict)
    assert at_most["float32 matmul at precision 'medium'"] == pytest.approx(4.0 / 0.8)  # from 80 % of the limit
    assert at_most["run in bfloat16"] == pytest.approx(8.0 / 0.8)


# Energy


class FakeMeter:
    """Returns windows that it was given; each runs the work as often as it says."""

    def __init__(self, *windows: EnergyUse | OSError) -> None:
        self._windows = list(windows)

    def of(self, work: Callable[[], object]) -> EnergyUse:
        window = self._windows.pop(0)
        if isinstance(window, OSError):
            raise window
        for _ in range(window.calls):
            work()
        return window


def meter(*windows: EnergyUse | OSError) -> EnergyMeter:
    return FakeMeter(*windows)  # type: ignore[return-value]


THREE_WINDOWS = (EnergyUse(80.0, 2.0, 2), EnergyUse(48.0, 2.0, 2), EnergyUse(64.0, 2.0, 2))  # 40, 24, 32 J by pass


def test_energy_is_the_median_over_windows_gross_and_net_of_the_idle_machine() -> None:
    bench = Bench(EVEN).sweep(4)  # two batches of four: a pass has eight texts
    seen: list[tuple[int, int]] = []
    counted = bench.finding()
    bench.model.before = lambda rows, tokens: seen.append((rows, tokens))
    bench.finding()
    without = len(seen)
    row = bench.row(energy=meter(*THREE_WINDOWS), idle_w=8.0)
    assert (row["energy_per_sample_j"], row["energy_per_sample_net_j"]) == (32 / 8, (32 - 8) / 8)
    assert not set(ENERGY) & set(row["reasons"])
    assert len(seen) == 2 * without + 3 * 2 * 2  # windows, passes in each, batches in each
    assert counted.energy_j == counted.energy_net_j == Missing("no energy counter was given")
    row = Bench(EVEN).sweep(4).row(energy=meter(*THREE_WINDOWS))
    assert (row["energy_per_sample_j"], row["energy_per_sample_net_j"]) == (4.0, None)
    assert row["reasons"]["energy_per_sample_net_j"] == "the idle power was not measured"
    assert "energy_per_sample_j" not in row["reasons"]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, "no energy counter was given"),
        ({"energy": Missing("the device is not a GPU")}, "the device is not a GPU"),
        ({"energy": meter(THREE_WINDOWS[0], OSError("the counter stands still"))}, "the counter stands still"),
    ],
)
def test_energy_that_cannot_be_read_is_null_with_the_reason(changes: dict[str, Any], reason: str) -> None:
    row = Bench(EVEN).sweep(4).row(idle_w=8.0, **changes)
    assert {row[name] for name in ENERGY} == {None}
    assert {row["reasons"][name] for name in ENERGY} == {reason}


# The row


SUBJECTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "no ceilings": {"ceilings": structs.replace(MACHINE, compute=())},
    "gross energy": {"energy": meter(*THREE_WINDOWS)},
    "energy": {"energy": meter(*THREE_WINDOWS), "idle_w": 8.0},
    "no budget": {"bench": Instruments(trials_s=0.0)},
}


@pytest.mark.parametrize("case", [*SUBJECTS, "not countable"])
def test_reasons_stand_for_exactly_what_is_missing(case: str) -> None:
    bench = Bench(UNEVEN, None if case in SUBJECTS else WithoutFormula(True, False)).sweep(4)
    before = bench.rows[0]
    assert missing(before) == set(before["reasons"])
    row = bench.row(**SUBJECTS.get(case, {}))
    assert missing(row) == set(row["reasons"])
    assert all(row["reasons"].values()) and NOT_DIAGNOSED not in row["reasons"].values()
    kept = set(before["reasons"]) - DIAGNOSED
    assert {name: row["reasons"][name] for name in kept} == {name: before["reasons"][name] for name in kept}
    assert list(row) == [*NAMES, "doubt_kinds", "reasons", "whole", "verdict"]


def test_doubts_are_joined_without_repeats_and_the_row_given_is_left_alone() -> None:
    bench = Bench(EVEN).sweep(4)
    before = {**bench.rows[0], "doubts": ["outliers: z", "noisy: x"], "doubt_kinds": ["outliers", "noisy"]}
    given = copy.deepcopy(before)
    verdict = Verdict("memory", (), 0.5, "low", "untested", (), (), doubts=(Doubt("noisy", "x"), Doubt("share", "y")))
    finding = replace(bench.finding(), verdict=verdict, flops=Missing("not countable"))
    filled = finding.fill(given)
    assert (filled["doubts"], filled["doubt_kinds"]) == (
        ["outliers: z", "noisy: x", "share: y"],
        ["outliers", "noisy", "share"],
    )
    assert (filled["bound"], filled["flops_per_batch"], filled["verdict"]["share_of_limit"]) == ("memory", None, 0.5)
    assert filled["reasons"]["flops_per_batch"] == filled["reasons"]["flops_per_sec"] == "not countable"
    assert "bound" not in filled["reasons"] and given == before
    assert finding.fill(filled) == filled


# A GPU that is slowed, and one that is lost


def seen_at(bench: Bench, mhz: float) -> None:
    conditions = Conditions(seconds=1.0, cores=1, gpu_sm_clock_mhz=(mhz,))
    bench.visits = [replace(visit, conditions=conditions) for visit in bench.visits]


@pytest.mark.parametrize(
    ("limit_mhz", "events", "own_mhz", "is_doubted"),
    [
        (1980.0, 0, 1410.0, True),  # the model was slowed, the limits were not
        (1410.0, 0x4, 1980.0, False),  # products reach the power limit, as they do on every card
        (1410.0, None, 1980.0, False),
        (1410.0, 0, 1980.0, True),  # something else slowed the limits
        (1980.0, 0, 1900.0, False),
    ],
)
def test_limits_under_another_clock_are_doubted_unless_it_is_that_of_the_power_limit(
    limit_mhz: float, events: int | None, own_mhz: float, is_doubted: bool
) -> None:
    bench = Bench(EVEN).sweep(4)
    seen_at(bench, own_mhz)
    limit = structs.replace(MACHINE.compute[0], sm_clock_mhz=limit_mhz, clock_event_reasons=events)
    doubts = bench.finding(ceilings=structs.replace(MACHINE, compute=(limit,))).verdict.doubts
    assert ("throttled" in [doubt.kind for doubt in doubts]) == is_doubted


def test_a_forward_that_loses_the_gpu_ends_the_diagnosis_and_says_of_what(monkeypatch: pytest.MonkeyPatch) -> None:
    def loses(*_: Any) -> None:
        raise torch.AcceleratorError("CUDA error: device-side assert triggered")

    bench = Bench(EVEN).sweep(4)
    bench.model.before = loses
    for chosen in (None, 4):
        with pytest.raises(DeviceLostError) as lost:
            bench.finding(chosen, energy=meter(*THREE_WINDOWS))
        assert str(lost.value).startswith("what limits batch size 4 in float32: AcceleratorError: CUDA error: device")
    bench.model.before = lambda *_: None
    monkeypatch.setattr(_Case, "_in_full", loses)
    with pytest.raises(DeviceLostError, match="^replays and trials of batch size 4 in float32: AcceleratorError"):
        bench.finding(4)


def test_what_has_lost_the_gpu_before_is_not_run_again_and_the_bound_is_told() -> None:
    bench = Bench(EVEN).sweep(4)
    assert bench.findings(bench.subject(given_up=["what limits batch size 4 in float32"]), 4) == []
    verdict = bench.finding(4, given_up=["replays and trials of batch size 4 in float32"]).verdict
    assert [doubt.kind for doubt in verdict.doubts] == ["replay"] and not verdict.trials
    assert verdict.bound == bench.finding().verdict.bound
