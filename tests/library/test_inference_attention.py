"""Texts in one row keep to themselves, and what a model's attention asks for is honoured or refused by name."""

from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional
from transformers import masking_utils

from boundby.inference import (
    PRECISIONS,
    Precision,
    Predictor,
    PredictorOptions,
    UnsupportedAttention,
    fused,
    one_by_one,
    strategies,
)
from boundby.inference.batches import Tokens
from boundby.inference.packing import (
    EFFICIENT,
    VARLEN,
    attention_window,
    efficient_attention,
    grouped_attention,
    has_varlen,
    pack,
    varlen_attention,
)
from boundby.inference.precision import MOST_TOLERANCE
from tests import classifiers
from tests.gpu_double import H100, T4, plugged_in

pytestmark = pytest.mark.isa

WINDOW = 8
LENGTHS = (40, 21, 21, WINDOW + 1, WINDOW, WINDOW - 1, 3, 1)
CPU = torch.device("cpu")
# Arguments of tiny configurations whose layers, some or all, have a window; Gemma 2 caps its scores, GPT-OSS has sinks.
WINDOWED: dict[str, dict[str, Any]] = {
    "Mistral": {},
    "Ministral": {},
    "Ministral3": {},
    "Mixtral": {"num_local_experts": 2},
    "Qwen2": {"use_sliding_window": True, "max_window_layers": 1},
    "Qwen3": {"use_sliding_window": True, "max_window_layers": 1},
    "SmolLM3": {"use_sliding_window": True, "no_rope_layers": [1, 0]},
    "Phi3": {},
    "Starcoder2": {},
    "Gemma3Text": {"layer_types": ["sliding_attention", "full_attention"]},
    "Olmo3": {"layer_types": ["sliding_attention", "full_attention"]},
    "Exaone4": {"sliding_window_pattern": 2},
    "Gemma2": {},
    "GptOss": {"num_local_experts": 2, "num_experts_per_tok": 1},
    "ModernBert": {"local_attention": 2 * WINDOW, "layer_types": ["sliding_attention", "full_attention"]},
}
REFUSED = {"Gemma2": "softcap", "GptOss": "s_aux"}


@pytest.fixture(scope="module")
def tokens():
    rng = np.random.default_rng(0)
    return Tokens([rng.integers(1, 50, length).astype(np.int32) for length in LENGTHS], 0)


def windowed(family: str) -> Any:
    import transformers

    sizes = classifiers.SIZES | {"num_key_value_heads": 2, "head_dim": 8, "num_labels": classifiers.LABELS}
    changes = {"vocab_size": 50, "pad_token_id": 0, "max_position_embeddings": 64, "sliding_window": WINDOW}
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**sizes | changes | WINDOWED[family])
    model = getattr(transformers, f"{family}ForSequenceClassification")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.2)
    return model


@pytest.mark.parametrize("family", WINDOWED)
def test_every_way_that_is_taken_has_the_windows_of_the_model(family, tokens):
    model = windowed(family)
    rows = range(len(LENGTHS))
    alone = one_by_one(model, tokens, rows)
    packed = []
    for name, make in strategies.candidates(model, None, PRECISIONS["float32"], True):
        try:
            with torch.inference_mode():
                logits = make().logits(tokens, rows).numpy()
        except UnsupportedAttention as refusal:
            assert refusal.setting == REFUSED[family]
            continue
        if family == "ModernBert" and name == "grouped":
            continue  # whose head is one of its own
        np.testing.assert_allclose(logits, alone, atol=1e-5 * np.abs(alone).max(), rtol=0, err_msg=name)
        packed += [name] if name.startswith("grouped") else []
    assert bool(packed) == (family not in {"ModernBert", *REFUSED})


def plain_varlen(q: Any, k: Any, v: Any, starts: Any, key_starts: Any, **asked: Any) -> torch.Tensor:
    """Torch's kernel for variable lengths in plain operations: the last query of a text stands at its last key."""
    left, right = asked["window_size"]
    parts = []
    for number in range(len(starts) - 1):
        spans = [slice(starts[number], starts[number + 1]), *[slice(key_starts[number], key_starts[number + 1])] * 2]
        heads = [x[span].transpose(0, 1)[None] for x, span in zip((q, k, v), spans, strict=True)]
        queries, keys = heads[0].shape[2], heads[1].shape[2]
        distance = torch.arange(keys) - torch.arange(keys - queries, keys)[:, None]
        mask = torch.ones_like(distance, dtype=torch.bool)
        mask &= distance >= -left if left >= 0 else mask
        mask &= distance <= right if right >= 0 else mask
        same = {"scale": asked["scale"], "enable_gqa": asked.get("enable_gqa", False)}
        answer = functional.scaled_dot_product_attention(*heads, attn_mask=mask, **same)
        parts.append(answer[0].transpose(0, 1))
    return torch.cat(parts)


def require_packed(family: str, trims: bool, attention: str, tokens: Tokens) -> None:
    """Hold the packed logits of the texts against those of one text at a time."""
    model = windowed(family) if family in WINDOWED else classifiers.build(family, 50, 0)
    with torch.inference_mode():
        packed = strategies.Packed(model, None, PRECISIONS["float32"], trims, attention=attention)
        logits = packed.logits(tokens, range(len(LENGTHS))).numpy()
    alone = one_by_one(model, tokens, range(len(LENGTHS)))
    np.testing.assert_allclose(logits, alone, atol=1e-4 * np.abs(alone).max(), rtol=0)


@pytest.mark.parametrize("torch_2_11", [True, False], ids=["torch 2.11", "later"])
@pytest.mark.parametrize("trims", [True, False])
@pytest.mark.parametrize("family", ["Mistral", "Gemma3Text", *classifiers.FAMILIES])
def test_the_kernel_for_variable_lengths_is_asked_for_what_the_model_does(
    family, trims, torch_2_11, tokens, monkeypatch
):
    """There is none for a CPU: a plain one stands in for it and takes the same arguments."""
    from torch.nn.attention import varlen

    queries = []

    def earlier(q, k, v, starts, key_starts, max_q, max_k, *, return_aux=None, scale=None, window_size=(-1, -1)):
        return later(q, k, v, starts, key_starts, max_q, max_k, scale=scale, window_size=window_size)

    def later(q, k, v, starts, key_starts, *longest, scale, window_size, enable_gqa=False):
        asked = {"scale": scale, "window_size": window_size, "enable_gqa": enable_gqa}
        assert starts.dtype == key_starts.dtype == torch.int32
        assert enable_gqa == (q.shape[1] != k.shape[1])
        assert longest[0] > 1 or window_size[1] == 0  # else it may split the keys of a text by how many texts there are
        assert longest == (int(starts.diff().max()), int(key_starts.diff().max()))
        assert len(q) == starts[-1] and len(k) == len(v) == key_starts[-1]
        queries.append(len(q))
        return plain_varlen(q, k, v, starts, key_starts, **asked)

    monkeypatch.setattr(varlen, "varlen_attn", earlier if torch_2_11 else later)
    assert has_varlen()
    require_packed(family, trims, VARLEN, tokens)
    assert queries == [sum(LENGTHS), len(LENGTHS) if trims else sum(LENGTHS)]


@pytest.mark.parametrize("trims", [True, False])
@pytest.mark.parametrize("family", ["Mistral", "ModernBert", *classifiers.FAMILIES])
def test_the_memory_efficient_kernel_is_asked_for_what_the_model_does(family, trims, tokens, monkeypatch):
    """There is none for a CPU: a plain one takes its arguments, whose masks are causal from the last key alone."""
    queries = []

    def plain(q, k, v, bias, starts, key_starts, max_q, max_k, dropout, mask, *, scale, window_size):
        assert q.dim() == 4 and len(q) == 1 and q.shape[2] == k.shape[2] == v.shape[2]  # it knows no groups of heads
        assert (bias, dropout) == (None, 0.0) and mask in (0, 2) and (window_size is None or mask == 2)
        assert (max_q, max_k) == (int(starts.diff().max()), int(key_starts.diff().max()))
        window = (-1 if window_size is None else window_size - 1, 0 if mask else -1)
        queries.append(q.shape[1])
        return plain_varlen(q[0], k[0], v[0], starts, key_starts, scale=scale, window_size=window)[None], None

    monkeypatch.setattr(torch.ops.aten, "_efficient_attention_forward", plain)
    if family == "ModernBert":  # whose windows reach to both sides
        with pytest.raises(UnsupportedAttention, match="a window of"):
            require_packed(family, False, EFFICIENT, tokens)
        return
    require_packed(family, trims, EFFICIENT, tokens)
    assert queries == [sum(LENGTHS), len(LENGTHS) if trims else sum(LENGTHS)]


@pytest.mark.parametrize(
    ("precision", "has_bfloat16", "ways"),
    [
        ("float32", True, ["efficient", "unmasked", "masked"]),
        ("bfloat16", True, ["varlen", "efficient", "unmasked", "masked"]),
        ("float16", False, ["efficient", "unmasked", "masked"]),  # before Ampere there is no FlashAttention
    ],
)
def test_a_gpu_packs_in_every_precision(precision, has_bfloat16, ways, monkeypatch):
    monkeypatch.setattr(strategies, "is_gpu", lambda device: True)
    monkeypatch.setattr(strategies, "is_host", lambda device: False)
    monkeypatch.setattr(strategies, "has_bfloat16_matmul", lambda device: has_bfloat16)
    model = classifiers.build("qwen2", 50, 0)
    assert [name for name, _ in strategies.candidates(model, None, PRECISIONS[precision], trims=False)] == ways


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_packed_texts_are_held_against_the_stock_forward_in_their_own_precision(precision, tokens, monkeypatch):
    """Off by half of what is allowed from float32: that much is a fault, and not of the rounding."""
    model = classifiers.build("bert", 50, 0)
    texts = [" ".join(map(str, ids)) for ids in tokens.ids]
    check = Predictor(model, classifiers.Spelled(), PredictorOptions(64, precision), texts).check
    assert (
        check.strategy == "packed, sorted by length" and check.own_difference <= check.own_allowed < check.allowed / 2
    )
    packed = strategies.Packed.logits

    def shifted(self, tokens, rows):
        return packed(self, tokens, rows) + check.allowed / 2

    monkeypatch.setattr(strategies.Packed, "logits", shifted)
    refused = Predictor(model, classifiers.Spelled(), PredictorOptions(64, precision), texts)
    assert refused.strategy == "padded with a mask"
    assert {(refusal.strategy, refusal.kind) for refusal in refused.check.refusals} == {
        ("grouped, trimmed", "differs"),
        ("grouped", "differs"),
    }
    assert f"differ from the stock forward's in {precision} by up to" in refused.doubts[0]


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_gpu_has_norms_of_one_kernel_where_a_model_writes_seven(precision, tokens, monkeypatch):
    monkeypatch.setattr("boundby.inference.precision.is_gpu", lambda device: True)
    model = classifiers.build("qwen2", 50, 0)
    norms = [name for name, module in model.named_modules() if hasattr(module, "variance_epsilon")]
    copied = PRECISIONS[precision].copy_of(model)
    assert fused.TorchNorm not in map(type, Precision("trial", torch.float32).copy_of(model).modules())  # of one fix
    kinds = {type(copied.get_submodule(name)) for name in norms}
    assert len(norms) == 2 * len(model.model.layers) + 1 and kinds == {fused.TorchNorm}
    assert not any(isinstance(module, fused.TorchNorm) for module in model.modules())
    batch = torch.tensor([[5, 6, 7, 8]])
    with torch.inference_mode():
        expected, logits = (compute(input_ids=batch).logits.float() for compute in (model, copied))
    allowed = 1e-5 if precision == "float32" else MOST_TOLERANCE
    assert (logits - expected).abs().max() <= allowed * expected.abs().max()


def test_a_norm_that_is_watched_or_computes_something_else_stays(monkeypatch):
    model = classifiers.build("qwen2", 50, 0)
    first, second, *others = [module for module in model.modules() if hasattr(module, "variance_epsilon")]
    first.register_forward_hook(lambda *_: None)
    second.variance_epsilon = 0.5  # of which its forward knows
    second.forward = type(second).forward.__get__(second)
    fused.join_norms(model)
    left = [module for module in model.modules() if hasattr(module, "variance_epsilon")]
    assert left == [first, second] and others


def a_pack(length: int, is_causal: bool | None = None) -> Any:
    return pack([np.ones(length, dtype=np.int32)] * 2, np.array([0, 0]), None, CPU, is_causal)


def rule(kind: str) -> Any:
    return {
        "causal": masking_utils.causal_mask_function,
        "all": masking_utils.bidirectional_mask_function,
        "causal window": masking_utils.sliding_window_causal_mask_function(4),
        "window": masking_utils.sliding_window_bidirectional_mask_function(4),
        "chunks": masking_utils.chunked_causal_mask_function(4, torch.zeros(1, dtype=torch.int64)),
        "prefix": lambda _batch, _head, query, key: (key <= query) | (key < 3),
        "holes": lambda _batch, _head, query, key: (key <= query) & (key % 7 != 5),
    }[kind]


def texts_of(*lengths: int) -> list[np.ndarray]:
    return [np.arange(1, length + 1, dtype=np.int32) for length in lengths]


def test_a_pack_tells_where_each_text_begins():
    packed = pack(texts_of(4, 2, 2, 1), np.array([3, 1, 1, 0]), None, CPU)
    assert packed.input_ids.tolist() == [[1, 2, 3, 4, 1, 2, 1, 2, 1]]
    assert packed.position_ids.tolist() == [[0, 1, 2, 3, 0, 1, 0, 1, 0]]
    assert packed.starts.tolist() == [0, 4, 6, 8, 9]
    assert packed.head_rows.tolist() == [3, 5, 7, 8]
    assert packed.groups == ((0, 1, 4), (4, 2, 2), (8, 1, 1))
    assert packed.longest == 4
    packed = pack(texts_of(4, 2), np.array([0, 0]), 2, CPU)  # as RoBERTa counts: from beyond the id of the padding
    assert packed.position_ids.tolist() == [[3, 2, 4, 5, 3, 2]]


WINDOWS = {"causal": [-1, 0], "all": [-1, -1], "causal window": [3, 0], "window": [4, 4]}


@pytest.mark.parametrize(
    ("kind", "window", "length"),
    [
        *((kind, window, length) for kind, window in WINDOWS.items() for length in (10, 700)),
        ("causal window", [-1, 0], 4),  # wider than the longest text
    ],
)
def test_a_rule_that_is_a_window_is_told_as_one(kind, window, length):
    with a_pack(length):
        assert attention_window(mask_function=rule(kind), batch_size=1).tolist() == window


@pytest.mark.parametrize(
    ("kind", "length", "is_causal"),
    [*((kind, length, None) for kind in ("chunks", "prefix", "holes") for length in (40, 700)), ("all", 10, True)],
)
def test_a_rule_that_is_no_window_or_of_another_direction_than_the_trimmed_layer_is_refused(kind, length, is_causal):
    with a_pack(length, is_causal), pytest.raises(UnsupportedAttention) as refusal:
        attention_window(mask_function=rule(kind), batch_size=1)
    assert is_causal or refusal.value.setting == "mask"


@pytest.mark.parametrize("attention", [grouped_attention, varlen_attention, efficient_attention])
@pytest.mark.parametrize(
    "settings",
    [
        {"softcap": 50.0},
        {"s_aux": torch.ones(2)},
        {"position_bias": torch.ones(1, 2, 8, 8)},
        {"head_mask": torch.ones(2)},
        {"dropout": 0.1},
        {"output_attentions": True},
        {"sliding_window": 3},  # and no mask that would tell in which direction
        {"never_heard_of": False},
        {"mask": torch.zeros(1, 1, 8, 8)},  # that the model made itself
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_a_setting_that_packed_texts_do_not_have_is_refused_by_name(attention, settings):
    states = torch.ones(1, 2, 8, 4)
    others = {name: value for name, value in settings.items() if name != "mask"}
    with a_pack(4), pytest.raises(UnsupportedAttention) as refusal:
        attention(torch.nn.Identity(), states, states, states, settings.get("mask"), **others)
    assert refusal.value.setting == next(iter(settings))


def test_settings_without_effect_change_nothing():
    states = torch.randn(1, 2, 8, 4, generator=torch.Generator().manual_seed(0))
    settings = {"dropout": 0.0, "softcap": None, "sliding_window": 4, "use_cache": False}
    settings |= {"position_ids": torch.arange(8)}
    with a_pack(4):
        plain, _ = grouped_attention(torch.nn.Identity(), states, states, states, None)
        given, _ = grouped_attention(torch.nn.Identity(), states, states, states, None, **settings)
    assert torch.equal(plain, given)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [(-1, 0), (70, 0), (9, 9), (100, -1), (-1, 3)])
@pytest.mark.parametrize("length", [1, 40, 64, 65, 150])
def test_long_texts_attend_as_under_a_mask(length, window, dtype):
    before, after = (length if side == -1 else side for side in window)
    positions = torch.arange(length)
    distance = positions - positions[:, None]
    mask = (distance >= -before) & (distance <= after)
    query, key, value = torch.randn(3, 1, 4, 2 * length, 8, generator=torch.Generator().manual_seed(0)).to(dtype)
    key, value = key[:, ::2], value[:, ::2]  # two heads of queries share one of keys
    with a_pack(length):
        answer, _ = grouped_attention(torch.nn.Identity(), query, key, value, torch.tensor(window))
    for first in (0, length):
        q, k, v = (states[:, :, first : first + length] for states in (query, key, value))
        expected = functional.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True).transpose(1, 2)
        torch.testing.assert_close(
            answer[:, first : first + length], expected, atol=2e-2 if dtype != torch.float32 else 1e-5, rtol=0
        )


def test_a_refusal_is_typed_and_the_next_way_taken(tokens):
    texts = [" ".join(map(str, ids)) for ids in tokens.ids]
    predictor = Predictor(windowed("Gemma2"), classifiers.Spelled(), PredictorOptions(64), texts)
    refusals = [(refusal.strategy, refusal.kind) for refusal in predictor.check.refusals]
    assert refusals == [("grouped, trimmed", "unsupported"), ("grouped", "unsupported")]
    assert predictor.strategy == "padded on the right without a mask" and predictor.trim


def test_a_kernel_without_all_arguments_is_not_used(monkeypatch):
    from torch.nn.attention import varlen

    monkeypatch.setattr(varlen, "varlen_attn", lambda q, k, v, is_causal=False: q)
    assert not has_varlen()


@pytest.mark.parametrize(
    ("card", "precision", "strategy"),
    [
        (H100, "float32", "packed, memory-efficient attention"),
        (H100, "bfloat16", "packed, variable-length attention"),
        (T4, "float16", "packed, memory-efficient attention"),
    ],
    ids=["H100 float32", "H100 bfloat16", "T4 float16"],
)
def test_a_card_packs_its_texts_with_norms_of_one_launch(card, precision, strategy, monkeypatch):
    texts = classifiers.reviews(64)
    tokenizer = classifiers.tokenizer(texts)
    launches = []
    with plugged_in(card) as machine:
        model = classifiers.build("qwen2", len(tokenizer), tokenizer.pad_token_id).to("cuda")
        norms = sum(hasattr(module, "variance_epsilon") for module in model.modules())
        for joins in (False, True):
            if not joins:
                monkeypatch.setattr(fused, "join_norms", lambda model: None)
            predictor = Predictor(model, tokenizer, PredictorOptions(128, precision, token_budget=10**6), texts)
            assert (predictor.strategy, predictor.trim, predictor.doubts) == (strategy, True, ())
            before = machine.launches
            prediction = predictor.predict(texts)
            launches.append(machine.launches - before)
            monkeypatch.undo()
        assert predictor.check.same_labels >= 0.95 * predictor.check.rows
        assert prediction.computed_tokens == prediction.useful_tokens  # nothing is padded
    assert launches[0] - launches[1] >= 5 * norms


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_padded_texts_in_half_precision_on_a_gpu_leave_out_the_kernels_that_plan_each_shape(precision, monkeypatch):
    allowed: list[bool] = []
    model = classifiers.bert(30, 0).eval()
    monkeypatch.setattr(strategies, "is_gpu", lambda device: True)
    way = strategies.Padded(model, None, PRECISIONS[precision], False, masked=True)
    way.model.register_forward_pre_hook(lambda *_: allowed.append(torch.backends.cuda.cudnn_sdp_enabled()))
    with torch.inference_mode():
        way.logits(Tokens([np.array([5, 6, 7]), np.array([5, 6])], 0), [0, 1])
    assert allowed == [precision == "float32"]
    assert torch.backends.cuda.cudnn_sdp_enabled()
