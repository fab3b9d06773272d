"""What the library measures and computes on the card: device times, packed texts, a sweep, a whole set, layers."""

import json
from dataclasses import replace
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2Model

from boundby.bound.bench import Bench
from boundby.bound.device_time import DeviceTimer
from boundby.bound.judgement import IDLE_DEVICE
from boundby.bound.trials import graph_replay, try_out
from boundby.inference import PRECISIONS, Predictor, collate, forward, one_by_one
from boundby.inference.fused import MOST_DIFFERENCE
from boundby.inference.packing import has_varlen
from boundby.inference.reference import in_dtype
from boundby.inference.strategies import HALF
from boundby.layers.engine import ObservabilityEngine
from boundby.machine import ceilings
from boundby.machine.device import describe
from boundby.work import transformer_flops, transformer_shape
from boundby.work.attention_mask import unread
from utils.baseline.inference import InferenceProfiler, SweepSettings

MEASURED = {"ok", "noisy"}  # in so few seconds an interval may be wide
WHOLE_SET = 369_475  # texts of the pod's dataset


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("layers", [24, 28])
@pytest.mark.gpu(
    low=0.5,
    high=1.5,
    unit="as it is taken over in chunks",
    reason="more launches than the queue holds are timed as a graph, with shorter gaps between the same kernels",
)
def test_device_time(card, measured, layers, dtype):
    dtype = getattr(torch, dtype)
    if dtype == torch.bfloat16 != card.dtype:
        card.lacks("this GPU has no products in bfloat16")
    model, inputs = card.classifier(layers, dtype), card.padded()
    given = unread(model, inputs) or inputs

    def work() -> object:
        return model(**given)

    with torch.inference_mode():
        for _ in range(3):
            work()
        enqueue_s = card.timer.enqueue(work)
        [usual] = DeviceTimer(card.timer, card.queue).times(work, enqueue_s)
        [chunked] = DeviceTimer(card.timer, card.queue, _captures=False).times(work, enqueue_s)
    seen = {f"by {result.by}": result.seconds or result.reason for result in (usual, chunked)}
    measured(usual.seconds / chunked.seconds if usual.seconds and chunked.seconds else None, **seen)


@pytest.mark.gpu(
    low=0.8,
    high=None,
    unit="times as fast as the eager call",
    reason="the same kernels with less of the host: never slower but for noise",
)
def test_graph_replay_of_a_padded_batch(card, measured):
    model, inputs = card.classifier(), card.padded()
    ready = unread(model, inputs) or inputs
    with torch.inference_mode():
        made = graph_replay(lambda: model(**ready), IDLE_DEVICE)
        result = try_out(lambda: model(**inputs), [made], Bench(card.timer, trials_s=20.0))
    problems = [item.reason for item in result.untried] + [doubt.text for doubt in result.doubts]
    measured(result.trials[0].measured.value if result.trials else None, problems=problems)


def _rms(values: np.ndarray) -> float:
    return float(np.sqrt(np.square(values).mean()))


@pytest.mark.gpu(
    low=0,
    high=1,
    unit="of what is allowed",
    reason="the bound that the predictor itself puts on packed texts against one text at a time in float32",
)
def test_packed_texts_against_float32_one_by_one(card, measured):
    predictor, texts, model = _packed(card)
    alone = one_by_one(in_dtype(model, torch.float32), card.tokens(texts), range(len(texts)))
    difference = float(np.abs(predictor.predict(texts).logits - alone).max())
    measured(difference / predictor.check.allowed, difference=difference, way=predictor.strategy)


@pytest.mark.gpu(
    low=0,
    high=3,
    unit="times what padding changes",
    reason="other shapes round otherwise, packed or padded alike; a wrong window or neighbour changes far more",
)
def test_packed_texts_against_stock_in_the_same_dtype(card, measured):
    predictor, texts, model = _packed(card)
    tokens = card.tokens(texts)
    alone = one_by_one(model, tokens, range(len(texts)))
    with torch.inference_mode():
        batch = [
            forward(model, collate(tokens, range(first, min(len(texts), first + 32)), 0, card.device))
            for first in range(0, len(texts), 32)
        ]
    padded = torch.cat(batch).float().cpu().numpy()
    order = np.random.default_rng(1).permutation(len(texts))
    together, shuffled = predictor.predict(texts).logits, np.empty_like(alone)
    shuffled[order] = predictor.predict([texts[row] for row in order]).logits
    least = torch.finfo(card.dtype).eps / 2 * _rms(alone)
    noise = max(least, _rms(padded - alone))
    result = {"to one by one": _rms(together - alone) / noise, "to other neighbours": _rms(together - shuffled) / noise}
    measured(max(result.values()), **result, noise=noise, way=predictor.strategy)


@pytest.mark.gpu(
    low=0.4,
    high=0.9,
    unit="of the kernels of the model as it comes",
    reason="a root-mean-square norm is one kernel of torch's, six of the model's: of 24 layers 245 of 1,008",
)
def test_norms_in_one_kernel(card, measured, tmp_path):
    model, inputs = card.classifier(dtype=torch.float32), card.padded()
    given = unread(model, inputs) or inputs
    copy = PRECISIONS["float32"].copy_of(model)
    with torch.inference_mode():
        stock, joined = (_kernels(card, lambda item=item: item(**given), tmp_path) for item in (model, copy))
        difference = (copy(**given).logits - model(**given).logits).abs().max() / model(**given).logits.abs().max()
    assert difference < MOST_DIFFERENCE[torch.float32] * model.config.num_hidden_layers, (
        f"logits differ by {difference}"
    )
    measured(joined / stock, stock=stock, joined=joined, difference=float(difference))


def _kernels(card, work, folder):
    """Return how many kernels a call is, by torch's profiler."""
    work()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        work()
        card.timer.synchronize()
    profile.export_chrome_trace(str(folder / "trace.json"))
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    return sum(event.get("cat") == "kernel" for event in events)


def _packed(card):
    """Return a predictor that packs, texts for it, and the model as it came."""
    if not has_varlen() or card.dtype not in HALF:
        card.lacks("this torch, or this GPU, has no attention for variable lengths")
    texts, model = card.texts(card.sizes.compared), card.classifier()
    predictor = Predictor(model, card.tokenizer(), card.options(), texts[: card.sizes.compared // 4])
    assert "packed" in predictor.strategy, predictor.strategy
    return predictor, texts, model


@pytest.mark.gpu(
    low=0,
    high=0,
    unit="batch sizes that went wrong",
    reason="two texts fit beside the weights, thousands do not, and the GPU computes on after them",
)
def test_out_of_memory_in_a_sweep(card, measured):
    model, many = card.classifier(), card.sizes.too_many
    total = describe(card.device)["memory_bytes"]
    share = (card.runtime.memory_reserved(card.device) + card.sizes.room_bytes) / total
    card.runtime.set_per_process_memory_fraction(min(1.0, share), card.device)
    try:
        profiler = InferenceProfiler(model, card.tokenizer(), card.device)
        rows = profiler.profile_multiple_batch_sizes(
            card.texts(many), [2, many], 3, 512, settings=SweepSettings(max_seconds=2.0)
        )
    finally:
        card.runtime.set_per_process_memory_fraction(1.0, card.device)
    with torch.inference_mode():
        again = model(input_ids=torch.full((2, 8), 5, device=card.device)).logits
    result = {row["batch_size"]: row["status"] for row in rows}
    is_right = [result[2] in MEASURED, result[many] == "oom", bool(again.isfinite().all())]
    measured(is_right.count(False), **{f"batch {size}": status for size, status in result.items()})


@pytest.mark.gpu(
    low=0,
    high=0,
    unit="batch sizes without a device time",
    reason="a forward of 24 layers is more launches than the queue holds, and has a device time all the same",
)
def test_sweep_of_a_classifier(card, measured):
    profiler = InferenceProfiler(card.classifier(), card.tokenizer(), card.device)
    sizes, seconds = card.sizes.batch_sizes, card.sizes.sweep_s
    rows = profiler.profile_multiple_batch_sizes(
        card.texts(card.sizes.swept), sizes, 10, 512, settings=SweepSettings(max_seconds=seconds)
    )
    assert {row["status"] for row in rows} <= MEASURED, [row["reasons"].get("all") for row in rows]
    rates = {f"batch {row['batch_size']}, texts/s": row["throughput_samples_per_sec_mean"] for row in rows}
    reasons = [row["reasons"].get("device_per_batch_ms") for row in rows if row["device_per_batch_ms"] is None]
    measured(len(reasons), reasons=reasons, **rates)


@pytest.mark.gpu(
    low=0.2,
    high=1.05,
    unit="of the limit of products",
    reason="42 to 55 % is reckoned for an H200, whose launches and norms take the rest; a T4 pads in float32",
)
def test_evaluation_of_a_whole_set(card, measured):
    model, texts = card.classifier(), card.texts(card.sizes.texts)
    predictor = Predictor(model, card.tokenizer(), card.options(), texts[:256])
    some = card.tokens(texts[:512])
    predictor.predict_tokens(some)
    few_s = predictor.predict_tokens(some).seconds.compute_s
    texts = texts[: max(512, int(512 * card.sizes.evaluation_s / few_s))]
    tokens = predictor.tokenize(texts)
    result = predictor.predict_tokens(tokens)
    seconds = result.seconds.compute_s + result.seconds.transfer_s
    few = min(1024, len(texts))

    def plain() -> None:
        for first in range(0, few, 32):
            forward(model, collate(tokens, range(first, min(few, first + 32)), 0, card.device)).argmax(-1).tolist()

    with torch.inference_mode():
        plain_s = card.timer.isolated(plain) / few
    shape = transformer_shape(model)
    shape = replace(shape, layers=shape.layers - predictor.trim)  # the last one then computes a token of each text
    limit = ceilings.measure(card.device, dtypes=(card.dtype_name,)).configured(card.dtype_name)
    flops = sum(transformer_flops(shape, 1, int(length)) for length in tokens.lengths)
    facts = {"texts/s": len(texts) / seconds, "times batches of 32": plain_s * len(texts) / seconds}
    facts[f"s for {WHOLE_SET:,} texts"] = WHOLE_SET * seconds / len(texts)
    measured(flops / seconds / limit.flops_per_s, way=predictor.strategy, **facts)


@pytest.mark.gpu(
    low=0.8,
    high=1.2,
    unit="layers over the whole",
    reason="within 3 % the profile calls itself true; probes and gaps between kernels may take more on a fast card",
)
def test_layers_of_gpt_2(card, measured):
    settings = {} if card.sizes.layers > 2 else {"n_layer": 2, "n_embd": 32, "n_head": 2, "vocab_size": 100}
    torch.manual_seed(0)
    model = GPT2Model(GPT2Config(**settings)).to(card.device).eval()
    inputs = {"input_ids": torch.ones(1, 128, dtype=torch.long, device=card.device)}
    with TemporaryDirectory() as folder:
        profile = ObservabilityEngine(model, folder).profile(inputs, 30, max_seconds=20.0).profile
    timed = sum(layer.device_self_s is not None for layer in profile.layers)
    assert timed > 0, "no layer has a device time"
    doubts = [doubt.partition(":")[0] for doubt in profile.doubts]
    measured(profile.coverage.ratio, status=profile.coverage.status, timed=timed, doubts=doubts)
