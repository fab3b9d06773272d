"""Texts in one row keep to themselves, whichever kernel attends to them."""

from typing import Any

import numpy as np
import pytest
import torch

from boundby.inference import Predictor, PredictorOptions, one_by_one, strategies, tokenize
from boundby.inference.batches import Tokens
from boundby.inference.packing import VARLEN, has_varlen, pack
from boundby.inference.precision import MOST_TOLERANCE
from tests import classifiers

CPU = torch.device("cpu")


def tokens_of(*lengths: int) -> Tokens:
    return Tokens([np.arange(1, length + 1, dtype=np.int32) for length in lengths], 0)


def test_a_pack_tells_where_each_text_begins() -> None:
    found = pack(tokens_of(4, 2, 2, 1).ids, np.array([3, 1, 1, 0]), None, CPU)
    assert found.input_ids.tolist() == [[1, 2, 3, 4, 1, 2, 1, 2, 1]]
    assert found.position_ids.tolist() == [[0, 1, 2, 3, 0, 1, 0, 1, 0]]
    assert found.starts.tolist() == [0, 4, 6, 8, 9]
    assert found.head_rows.tolist() == [3, 5, 7, 8]
    assert found.groups == ((0, 1, 4), (4, 2, 2), (8, 1, 1))
    assert found.longest == 4


def test_positions_can_skip_the_padding_id() -> None:
    """As RoBERTa counts them: from beyond the id, which itself stays at its own."""
    found = pack(tokens_of(4, 2).ids, np.array([0, 0]), 2, CPU)
    assert found.position_ids.tolist() == [[3, 2, 4, 5, 3, 2]]


@pytest.mark.parametrize("trims", [True, False])
@pytest.mark.parametrize("family", classifiers.FAMILIES)
def test_the_kernel_for_variable_lengths_is_asked_for_what_the_model_does(
    family: str, trims: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is none for a CPU: a plain one stands in for it and takes the same arguments."""
    from torch.nn.attention import varlen

    queries = []

    def plain(q: Any, k: Any, v: Any, starts: Any, key_starts: Any, *longest: int, **asked: Any) -> Any:
        assert asked["num_splits"] == 1 and starts.dtype == key_starts.dtype == torch.int32
        assert longest == (int(starts.diff().max()), int(key_starts.diff().max()))
        assert len(q) == starts[-1] and len(k) == len(v) == key_starts[-1]
        queries.append(len(q))
        causal = asked["window_size"] == (-1, 0)
        ranges = (zip(each.tolist(), each[1:].tolist(), strict=False) for each in (starts, key_starts))
        parts = []
        for (begin, end), (key_begin, key_end) in zip(*ranges, strict=True):
            one = (q[begin:end], k[key_begin:key_end], v[key_begin:key_end])
            found = torch.nn.functional.scaled_dot_product_attention(
                *(each.transpose(0, 1)[None] for each in one),
                is_causal=causal,
                scale=asked["scale"],
                enable_gqa=asked["enable_gqa"],
            )
            parts.append(found[0].transpose(0, 1))
        return torch.cat(parts)

    monkeypatch.setattr(varlen, "varlen_attn", plain)
    model = classifiers.build(family, 50, 0)
    tokens = tokens_of(30, 9, 9, 4, 1)
    strategy = strategies.Packed(model, None, torch.float32, trims, attention=VARLEN)
    with torch.inference_mode():
        found = strategy.logits(tokens, range(5)).numpy()
    alone = one_by_one(model, tokens, range(5))
    np.testing.assert_allclose(found, alone, atol=1e-4 * np.abs(alone).max(), rtol=0)
    assert queries == [53, 5 if trims else 53]


def test_a_kernel_without_all_arguments_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.nn.attention import varlen

    monkeypatch.setattr(varlen, "varlen_attn", lambda q, k, v, is_causal=False: q)
    assert not has_varlen()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")
@pytest.mark.parametrize("family", ["qwen2", "bert"])
def test_a_gpu_packs_half_precision_without_a_doubt(family: str) -> None:
    changes = {"hidden_size": 128}  # heads of 32: the kernel takes no narrower ones than 8
    texts = classifiers.reviews(64)
    tokenizer = classifiers.tokenizer(texts)
    model = classifiers.build(family, len(tokenizer), tokenizer.pad_token_id, **changes).cuda()
    predictor = Predictor(model, tokenizer, PredictorOptions(128, "bfloat16"), texts)
    assert predictor.strategy == "packed, variable-length attention"
    assert predictor.doubts == ()
    alone = one_by_one(model, tokenize(tokenizer, texts, 128), range(len(texts)))
    allowed = MOST_TOLERANCE * np.abs(alone).max()
    assert np.abs(predictor.predict(texts).logits - alone).max() < allowed
