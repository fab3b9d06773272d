"""The engine as its users meet it: inputs, files, what it refuses, and what it doubts."""

import json
from collections import UserDict
from typing import Any

import pandas as pd
import pytest
import torch
from msgspec.structs import replace
from torch import nn
from transformers import DynamicCache

from boundby.layers.engine import ObservabilityEngine
from boundby.layers.judgement import coverage, trust_doubts
from boundby.layers.measurement import LEAST_RUNS
from boundby.layers.ranking import blocks
from boundby.layers.report import read_profile, write_summary
from boundby.work import count
from boundby.work.roofline import Interval, Limits
from tests.fakes import FakeClock
from tests.layer_models import Calls, Quiet, Takes, families, instruments, layer, profiled, small

ONE = torch.ones(1)
ONE_TOKEN = {"input_ids": torch.ones(1, 1, dtype=torch.long)}


@pytest.fixture
def clock():
    return FakeClock(0)


def engine_on(model: nn.Module, folder: Any, clock: FakeClock | None = None, **config: Any) -> ObservabilityEngine:
    return ObservabilityEngine(model, folder, config, instruments=instruments(clock))


CACHES = {"gpt2": (2 * 2 * 6 * 32 * 4,) * 2, "qwen2": (2 * 2 * 6 * 16 * 4,) * 2}  # keys and values of two texts
BLOCKS = {
    "gpt2": {"transformer.h.0", "transformer.h.1", "lm_head", "transformer.wte"},
    "bert": {"bert.encoder.layer.0", "bert.encoder.layer.1", "bert.embeddings", "classifier"},
    "qwen2": {"model.layers.0", "model.layers.1", "lm_head", "model.embed_tokens"},
    "resnet": {f"resnet.encoder.stages.{stage}" for stage in ("0.layers.0", "1.layers.0", "1.layers.1")},
    "t5": {"encoder.block.0", "encoder.block.1", "decoder.block.0", "decoder.block.1", "lm_head"},
    "encoder": {"layers.0", "layers.1"},
}


def test_a_layer_called_in_a_third_of_the_runs_is_ranked_by_its_mean_and_doubted(clock, tmp_path):
    class Sometimes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.always, self.rare, self.runs = Takes(clock, 2_000_000), Takes(clock, 9_000_000), 0

        def forward(self, x: Any) -> Any:
            self.runs += 1
            return self.always(self.rare(x) if self.runs % 6 in (0, 1) else x)

    profile = profiled(Sometimes(), ONE, tmp_path, 30, clock=clock).profile
    first, second = blocks(profile)[:2]
    assert (first.path, second.path) == ("rare", "always")
    assert first.seconds == pytest.approx(3e-3) and first.share == pytest.approx(0.6)
    assert "called in 10 of 30 runs" in layer(profile, "rare").doubts[0]
    assert any(doubt.startswith("calls: 1 layers") for doubt in profile.doubts)


def test_a_disturbed_run_passes_no_coverage(clock, tmp_path):
    engine = ObservabilityEngine(
        Takes(clock, 1000), tmp_path, instruments=instruments(clock, watch=lambda: Quiet("busy"))
    )
    covered = engine.profile(ONE, 5).profile.coverage
    assert (covered.ratio, covered.status) == (1.0, "warn")


@pytest.mark.parametrize("family", families())
def test_small_models_of_every_family_close_account_for_all_flops_and_have_the_known_blocks(family, tmp_path):
    model, inputs = small(family)
    profile = profiled(model, inputs, tmp_path).profile
    layers = profile.layers
    root, own = layers[0], [layer for layer in layers if layer.calls]
    assert sum(layer.host_self_s.mean for layer in own) == pytest.approx(root.host_inclusive_s.mean)
    if family == "encoder":  # its fused operator has no formula
        assert root.flops_self is None and "_transformer_encoder_layer_fwd" in profile.reasons["flops_self"]
        assert layer(profile, "layers.0").input_shapes == ("float32[2, 6, 32]",)
    else:
        assert sum(layer.flops_self for layer in own) == count(lambda: model(**_keywords(model, inputs))).flops
    assert profile.kv_cache_bytes == CACHES.get(family, ())
    if family == "gpt2":  # its tied weights lie in one storage and count once
        (tied,) = layer(profile, "lm_head").storages
        assert tied in layer(profile, "transformer.wte").storages and tied.bytes == 64 * 32 * 4
        assert root.parameters == sum(parameter.numel() for parameter in model.parameters())
    rows = blocks(profile)
    assert {row.label for row in rows} >= BLOCKS[family]
    assert sum(row.seconds for row in rows) == pytest.approx(root.inclusive_s.median)
    assert sum(row.share for row in rows) == pytest.approx(1)


def _keywords(model: nn.Module, inputs: Any) -> dict[str, Any]:
    return inputs if isinstance(inputs, dict) else {"pixel_values": inputs}


def test_inputs_are_given_as_the_model_takes_them(clock, tmp_path):
    class Takes2(nn.Module):
        def forward(self, *args, **kwargs):
            self.seen = (args, kwargs)
            return ONE + 1

    model = Takes2()
    a, b = torch.ones(1), torch.ones(2)
    for inputs, args, kwargs in (
        (a, (a,), {}),
        ((a, b), (a, b), {}),
        ([a, b], ([a, b],), {}),
        ({"x": a, "y": {"z": b}}, (), {"x": a, "y": {"z": b}}),
        (UserDict(x=a), (), {"x": a}),  # as a BatchEncoding
    ):
        profiled(model, inputs, tmp_path)
        assert model.seen == (args, kwargs)


def test_profile_does_what_was_left_out_and_warms_up_once(clock, tmp_path):
    runs = []
    model = Takes(clock, 5)
    model.register_forward_hook(lambda *_: runs.append(1))
    engine = engine_on(model, tmp_path, clock)
    engine.profile(ONE, 3)
    first = len(runs)
    engine.profile(ONE, 3)
    assert first == (len(runs) - first) + 10


def test_gradients_are_kept_where_asked_for_and_a_model_that_keeps_a_tensor_can_be_trained_afterwards(tmp_path):
    class Keeps(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.kept = nn.Linear(4, 4), None

        def forward(self, x):
            if self.kept is None:
                self.kept = x.cos()
            return self.inner(x) * self.kept

    seen, model = [], Keeps()
    handle = model.register_forward_hook(
        lambda *_: seen.append((torch.is_grad_enabled(), torch.is_inference_mode_enabled()))
    )
    for config in ({}, {"inference_mode": True}, {"inference_mode": False}):
        model.kept = None
        engine_on(model, tmp_path, **config).warmup(torch.ones(2, 4), 1)
    assert list(dict.fromkeys(seen)) == [(False, False), (False, True), (True, False)]
    handle.remove()
    model.kept = None
    with engine_on(model, tmp_path) as engine:
        engine.profile(torch.ones(2, 4), 1)
    model(torch.ones(2, 4)).sum().backward()
    assert model.inner.weight.grad.abs().sum() > 0


def test_inputs_that_grow_from_run_to_run_are_a_doubt_though_no_layer_shows_them(tmp_path):
    model, _ = small("gpt2")
    cache = DynamicCache(config=model.config)
    inputs = {"input_ids": torch.ones(1, 1, dtype=torch.long), "past_key_values": cache, "use_cache": True}
    engine = engine_on(model, tmp_path)
    engine.warmup(inputs, 1)
    [doubt] = [doubt for doubt in engine.profile(inputs, 2).profile.doubts if doubt.startswith("inputs change")]
    last = cache.get_seq_length() - 1
    assert doubt.startswith("inputs change from run to run: aten::cat was given float32[1, 4, 1, 8], ")
    assert f"before the timing and float32[1, 4, {last}, 8], " in doubt and "differ so: 2)" in doubt  # and attention
    assert [doubt for doubt in engine.profile(ONE_TOKEN, 2).profile.doubts if doubt.startswith("inputs")] == []


@pytest.mark.parametrize("steady_runs", [0, 8], ids=["at once", "after a while"])
def test_a_model_that_runs_other_operators_from_run_to_run_is_a_doubt(steady_runs, tmp_path):
    class Turns(nn.Module):
        runs = 0

        def forward(self, x):
            self.runs += 1
            for _ in range(max(1, self.runs - steady_runs)):
                x = x.cos()
            return x

    doubts = profiled(Turns().eval(), ONE, tmp_path, num_runs=4).profile.doubts
    assert any("other operators from run to run (aten::" in doubt for doubt in doubts)


def test_files_hold_what_pandas_and_the_planner_read(clock, tmp_path):
    model = Calls(clock, 1_000, a=Takes(clock, 3_000_000), b=Takes(clock, 1_000_000))
    with engine_on(model, tmp_path, clock, model_name="org/Model") as engine:
        engine.instrument()
        engine.warmup(ONE, num_warmup_runs=2)
        report = engine.profile(ONE, num_runs=4)
        metrics, summary = engine.save("first")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["first_metrics.jsonl", "first_summary.json", "logs"]
    frame = pd.read_json(metrics, lines=True)
    means = frame.groupby("layer_name")["forward_latency_ms"].mean()
    assert means.to_dict() == pytest.approx({"(model)": 4.002, "a": 3, "b": 1})
    assert len(frame) == 4 * 3 and frame["peak_vram_after"].isna().all()
    assert read_profile(summary) == replace(report.profile, profile_name="first")
    document = json.loads(summary.read_text())
    assert (document["profile_name"], document["num_runs"], document["total_layers"]) == ("first", 4, 3)
    assert document["end_to_end_latency"]["mean_ms"] == pytest.approx(4.002)
    assert document["end_to_end_latency"]["total_ms"] == pytest.approx(16.008)
    assert [row["layer_name"] for row in document["bottlenecks"]] == ["a", "b"]
    assert document["bottlenecks"][0]["pct"] == pytest.approx(100 * 3 / 4.002)
    assert (document["coverage"]["status"], document["overhead"]) == ("pass", 0)
    assert "warm-up runs" in (tmp_path / "logs" / "org-Model_profile.log").read_text()


def test_finalize_saves_what_was_not_saved_and_a_dashboard_is_a_page_beside_the_files(clock, tmp_path, monkeypatch):
    monkeypatch.setattr("boundby.layers.dashboard.page", lambda profile, title: f"{title}: {profile.profile_name}")
    engine = engine_on(Takes(clock, 5), tmp_path, clock, profile_name="mine")
    engine.profile(ONE, 1)
    engine.finalize()
    assert (tmp_path / "mine_summary.json").exists() and (tmp_path / "mine_metrics.jsonl").exists()
    (tmp_path / "mine_summary.json").unlink()
    engine.finalize()
    assert not (tmp_path / "mine_summary.json").exists()
    for call in (engine.instrument, lambda: engine.warmup(ONE), lambda: engine.profile(ONE)):
        with pytest.raises(RuntimeError, match="finalized"):
            call()
    with engine_on(Takes(clock, 5), tmp_path, clock) as engine:
        engine.profile(ONE, 1)
        path = engine.save_dashboard("shown")
    assert path == tmp_path / "shown_dashboard.html" and path.read_text() == "shown: shown"
    assert (tmp_path / "shown_summary.json").exists() and not (tmp_path / "Takes_profile_summary.json").exists()


def test_misuse_is_refused_with_the_way_out(clock, tmp_path):
    engine = engine_on(Takes(clock, 5), tmp_path, clock)
    with pytest.raises(RuntimeError, match=r"call profile\(inputs\)"):
        engine.save()
    with pytest.raises(ValueError, match="num_runs is 0"):
        engine.profile(ONE, 0)
    for seconds in (0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="max_seconds is"):
            engine.profile(ONE, 1, seconds)
    engine.profile(ONE, 1)
    for name in ("../up", "a/b", "", ".."):
        with pytest.raises(ValueError, match="without slashes"):
            engine.save(name)


@pytest.mark.parametrize("content", ["[]", "{}", '{"schema_version": 2, "profile": {}}', '{"schema_version": 9}', "{"])
def test_a_file_that_is_no_profile_is_named(content, tmp_path):
    path = tmp_path / "x_summary.json"
    path.write_text(content)
    with pytest.raises(ValueError, match="x_summary.json"):
        read_profile(path)


def test_fifty_runs_yield_p95_and_say_how_far_it_goes(clock, tmp_path):
    for num_runs, has_p95, doubts in ((10, False, 1), (50, True, 1), (59, True, 0)):
        profile = engine_on(Takes(clock, 5), tmp_path, clock).profile(ONE, num_runs).profile
        assert (profile.reference_s.p95 is not None) == (layer(profile, "").host_self_s.p95 is not None) == has_p95
        assert sum(doubt.startswith("p95: ") for doubt in profile.doubts) == doubts
        assert ("p95" in profile.reasons) != has_p95
    fifty = engine_on(Takes(clock, 5), tmp_path, clock).profile(ONE).profile
    assert fifty.num_runs == 50 and "is 8 %" in fifty.doubts[0]


@pytest.mark.parametrize(
    ("max_seconds", "num_runs"),
    [(31.0, 13), (30.9, 12), (105.0, 50), (104.9, 49), (1e-9, LEAST_RUNS)],  # 5 s of other passes, 2 s for each run
)
def test_runs_are_as_many_as_fit_into_the_time_with_all_passes(max_seconds, num_runs, clock, tmp_path):
    engine = engine_on(Takes(clock, 1_000_000_000), tmp_path, clock)
    engine.warmup(ONE, 0)
    profile = engine.profile(ONE, 50, max_seconds).profile
    assert profile.num_runs == profile.reference_s.n == num_runs
    said = [doubt for doubt in profile.doubts if doubt.startswith("runs: ")]
    assert said == ([] if num_runs == 50 else [f"runs: {num_runs} of 50 fitted into {max_seconds:g} s"])
    assert f"measured {num_runs} runs with probes" in (tmp_path / "logs" / "Takes_profile.log").read_text()
    assert engine.profile(ONE, 2, 1e-9).profile.num_runs == 2  # fewer than the least are made where they are asked for


def test_a_profile_that_is_not_representative_of_training_mode_or_of_a_busy_machine_says_so(clock, tmp_path):
    class Heavier(Takes):
        def forward(self, x):
            self.clock.advance(2 * self.ns if "forward" in self.__dict__ else self.ns)
            return x

    def kinds(profile):
        return [doubt.partition(":")[0] for doubt in profile.doubts]

    profile = engine_on(Heavier(clock, 5).eval(), tmp_path, clock).profile(ONE, 60).profile
    assert (profile.coverage.ratio, profile.coverage.status, profile.overhead) == (2, "not representative", 1)
    assert kinds(profile) == ["coverage", "overhead"]
    model = Takes(clock, 5).train()
    busy = instruments(clock, watch=lambda: Quiet("other processes used 1.0 of 2 cores"))
    profile = ObservabilityEngine(model, tmp_path, instruments=busy).profile(ONE, 60).profile
    assert kinds(profile) == ["disturbed", "training"] and model.training, "modes stay as they are"


@pytest.mark.parametrize(
    ("ratios", "status"),
    [((0.97, 1.0, 1.03), "pass"), ((0.90, 0.969, 1.031, 1.10), "warn"), ((0.899, 1.101), "not representative")],
)
def test_coverage_says_how_far_a_profile_can_be_trusted(ratios, status):
    for ratio in ratios:
        covered = coverage(ratio, 0.8)
        doubts = trust_doubts(covered, overhead=0.03, num_runs=59)
        assert covered.status == status and len(doubts) == (status != "pass"), ratio
        assert all(doubt.endswith("not representative") == (status == "not representative") for doubt in doubts)
    assert trust_doubts(coverage(1.0, 0.8), overhead=0.031, num_runs=59)[0].startswith("overhead: ")


def test_layers_are_held_against_the_limits_of_the_machine(tmp_path):
    limits = Limits(Interval.exact(1e15), ((2**40, Interval.exact(1e15)),), Interval.exact(0.0))
    model = nn.Sequential(nn.Linear(256, 256), nn.Identity(), nn.LayerNorm(256))
    profile = profiled(model, torch.ones(64, 256), tmp_path, limits=limits).profile
    left = {layer.path: layer.host_self_s.median - layer.gain_at_limit_s for layer in profile.layers}
    assert layer(profile, "0").flops_self == 2 * 64 * 256 * 256
    assert left["0"] == pytest.approx(layer(profile, "0").flops_self / 1e15)
    assert left["2"] == pytest.approx(layer(profile, "2").bytes_self / 1e15)
    assert layer(profile, "1").bound == "launch" and left["1"] == 0  # it runs no operator
    write_summary(path := tmp_path / "x.json", profile)
    assert read_profile(path) == profile
    path.write_text(path.read_text().replace('"schema_version": 2', '"schema_version": 9', 1))
    with pytest.raises(ValueError, match="schema version 9, not 2"):
        read_profile(path)


def test_the_report_reads_as_text_and_says_nothing_of_limits_that_are_not_given(clock, tmp_path):
    report = profiled(Calls(clock, 0, a=Takes(clock, 3_000_000), b=Takes(clock, 1_000_000)), ONE, tmp_path, clock=clock)
    root = layer(report.profile, "")
    assert (root.bound, root.gain_at_limit_s) == (None, None)
    assert "limits of this machine" in report.profile.reasons["bound"]
    assert "m_profile: 4.00 ms end to end (median of 2 runs), coverage 100.0 % (pass)" in str(report)
    assert "  1. a: 75.0 % (3.00 ms)" in str(report)
