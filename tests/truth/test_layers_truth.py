"""Layers on a real clock: known times are found, probes are cheap, and the layers account for the whole model."""

import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from torch import nn

from boundby.layers.engine import ObservabilityEngine
from boundby.layers.judgement import PASS
from boundby.layers.probes import CallLog, CallTree, attached, find_targets, timing_probe
from boundby.layers.report import Report
from boundby.layers.timing import probe_cost_ns, time_runs
from boundby.timing.stats import estimate
from tests import layer_cases
from tests.layer_models import token_ids

pytestmark = [pytest.mark.truth, pytest.mark.timeout(1800)]

ATTEMPTS = 3  # of what a profile itself calls disturbed
MOST_COST_US = 2.5
MOST_RATIO = 1.03
MINILM = Path(__file__).resolve().parents[3] / "shared" / "models" / "minilm-banking77"
Made = tuple[nn.Module, Any, int]


@pytest.mark.parametrize("case", layer_cases.CASES)
def test_every_layer_is_found_to_take_what_it_took_within_5_percent_or_10_microseconds(case, tmp_path):
    torch.manual_seed(0)
    for attempt in range(ATTEMPTS):
        made = layer_cases.CASES[case](layer_cases.RealCore())
        if case in layer_cases.ROOT_TAKES_TIME:
            made = layer_cases.with_own_time_of_root(made)
        report = ObservabilityEngine(made.model.eval(), tmp_path).profile(made.inputs, 30)
        misses = layer_cases.misses(report.profile, made, share=0.05, least_us=10)
        waiting = {layer.path for layer in report.profile.layers if layer.cpu_self_s is not None}
        print(f"attempt {attempt + 1}, {case}: {misses or 'all as made'}; waiting {waiting or 'none'}")
        print("  " + "; ".join(report.profile.doubts))
        is_right = not misses and ("sleeps" in waiting) == (case == "waits")
        if is_right or not is_disturbed(report):
            break
    assert is_right


def test_self_times_add_up_to_the_root_to_the_nanosecond_on_a_real_clock():
    model, inputs, _ = gpt2()
    targets = find_targets(model)
    tree, log = CallTree(targets.names), CallLog()
    with torch.inference_mode(), attached(targets, timing_probe(log, time.perf_counter_ns)):
        for _ in range(3):
            log.clear()
            model(**inputs)
            times = list(tree.times(log).values())
            assert sum(spent.self_ns for spent in times) == times[0].ns > 0


def test_a_probe_costs_less_than_two_and_a_half_microseconds_a_call():
    costs_us = [probe_cost_ns(time.perf_counter_ns) / 1e3 for _ in range(20)]
    print(f"calibrated: {', '.join(f'{costs_u:.2f}' for costs_u in costs_us)} us a call")
    assert min(costs_us) <= MOST_COST_US  # what it costs where nothing else uses the core


def test_probes_on_layers_of_a_tenth_of_a_millisecond_and_more_slow_a_model_by_no_more_than_3_percent():
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(512, 512) for _ in range(20)]).eval()
    targets, inputs = find_targets(model), torch.ones(256, 512)
    for attempt in range(ATTEMPTS):
        with torch.inference_mode():
            model(inputs)
            times = time_runs(
                lambda: model(inputs), CallTree(targets.names), targets, 60, time.perf_counter_ns, lambda: None
            )
        leaf_us = median(median(spent.self_ns for spent in run.values()) for run in times.runs) / 1e3
        pairs = zip(times.instrumented_ns, times.reference_ns, strict=True)
        ratio = estimate([probed / plain for probed, plain in pairs])
        print(f"attempt {attempt + 1}: a layer takes {leaf_us:.0f} us, ratio {ratio.value:.4f} from {ratio.low:.4f} on")
        assert leaf_us >= 100  # else the model is too small to say anything
        if ratio.low <= MOST_RATIO:
            break
    assert ratio.low <= MOST_RATIO  # fails where the interval lies wholly above


def many_small_layers() -> Made:  # whose coverage is right where the calibrated cost of a probe is
    layers = [nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.LayerNorm(4)) for _ in range(50)]
    return nn.Sequential(*layers).eval(), torch.ones(1, 4), 100


def gpt2() -> Made:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config()).eval(), {"input_ids": token_ids(1, 128, 50000)}, 20


def bert() -> Made:
    from transformers import BertConfig, BertForSequenceClassification

    return BertForSequenceClassification(BertConfig()).eval(), {"input_ids": token_ids(1, 128, 30000)}, 20


def qwen2() -> Made:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        hidden_size=896,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
        intermediate_size=4864,
        tie_word_embeddings=True,
    )
    return Qwen2ForCausalLM(config).eval(), {"input_ids": token_ids(1, 32, 50000)}, 10


def resnet50() -> Made:
    from transformers import ResNetConfig, ResNetForImageClassification

    return ResNetForImageClassification(ResNetConfig()).eval(), torch.ones(1, 3, 224, 224), 30


def minilm() -> Made:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    if not MINILM.exists():
        pytest.skip(f"{MINILM} is not there")
    model = AutoModelForSequenceClassification.from_pretrained(MINILM).eval()
    return model, AutoTokenizer.from_pretrained(MINILM)(["where is my card?"] * 8, return_tensors="pt"), 60


@pytest.mark.parametrize("make", [many_small_layers, gpt2, bert, qwen2, resnet50, minilm])
def test_layers_account_for_the_time_of_the_whole_model(make: Callable[[], Made], tmp_path):
    torch.manual_seed(0)
    model, inputs, num_runs = make()
    engine = ObservabilityEngine(model, tmp_path, {"model_name": make.__name__})
    engine.instrument()
    engine.warmup(inputs, 3)
    for attempt in range(ATTEMPTS):
        report = engine.profile(inputs, num_runs)
        profile = report.profile
        accounts_for_all = PASS[0] <= profile.coverage.ratio <= PASS[1]
        print(f"attempt {attempt + 1}, {profile.module_calls:.0f} calls, probe {profile.probe_cost_s * 1e6:.2f} us")
        print(report)
        if accounts_for_all or not is_disturbed(report):
            break
    assert accounts_for_all


def is_disturbed(report: Report) -> bool:
    return any(doubt.startswith("disturbed:") for doubt in report.profile.doubts)
