"""Every sequence classifier that transformers ships and a tiny configuration can build: packed or not, never wrong."""

from typing import Any

import numpy as np
import pytest
import torch

from boundby.inference import Predictor, PredictorOptions, Tokens, one_by_one
from tests.classifiers import Spelled

pytestmark = pytest.mark.truth

WINDOW, MOST_PARAMETERS = 16, 3_000_000
SHORT, LONG = (2, 3, 5, 8, 11, 15, 16, 1), (17, 18, 40, 90, 90, 33)
SMALL = {
    "vocab_size": 50,
    "pad_token_id": 0,
    "num_labels": 5,
    "max_position_embeddings": 128,
    **dict.fromkeys(
        ("hidden_size", "n_embd", "d_model", "dim", "embedding_size", "word_embed_proj_dim", "emb_dim"), 32
    ),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads"), 4),
    **dict.fromkeys(("intermediate_size", "hidden_dim", "ffn_dim", "encoder_ffn_dim", "n_inner", "d_ff"), 64),
    "num_key_value_heads": 2,
    "head_dim": 8,
    "n_positions": 128,
}
WINDOWED = {"sliding_window": WINDOW, "use_sliding_window": True, "max_window_layers": 1, "local_attention": 2 * WINDOW}
EXPERTS = {"num_local_experts": 2, "num_experts": 2, "n_routed_experts": 2, "num_experts_per_tok": 1, "n_group": 1}


def built(architecture: str) -> Any | None:
    """Return a tiny model with a window where its kind has one; None where these sizes do not make one."""
    import transformers

    try:
        config_class = getattr(transformers, architecture).config_class
        known = set(config_class().to_dict())
        wanted = {name: value for name, value in (SMALL | WINDOWED | EXPERTS).items() if name in known}
        config = config_class(**wanted, num_labels=SMALL["num_labels"])
        with torch.device("meta"):
            size = sum(weight.numel() for weight in getattr(transformers, architecture)(config).parameters())
        if size > MOST_PARAMETERS:
            return None
        torch.manual_seed(0)
        model = getattr(transformers, architecture)(config).eval()
    except Exception:  # any: a configuration may want anything
        return None
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.normal_(0, 0.2)
    return model


@pytest.mark.timeout(1800)
@pytest.mark.filterwarnings("ignore")
def test_no_family_gets_a_wrong_logit_for_texts_longer_than_any_that_was_checked() -> None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES as ARCHITECTURES

    rng = np.random.default_rng(0)
    ids = [rng.integers(1, 50, length).astype(np.int32) for length in (*SHORT, *LONG)]
    texts = [" ".join(map(str, text)) for text in ids]
    tokens = Tokens(ids, 0)
    ways: dict[str, int] = {}
    wrong = []
    for architecture in sorted({name for name in ARCHITECTURES.values() if isinstance(name, str)}):
        model = built(architecture)
        if model is None:
            ways["not built"] = ways.get("not built", 0) + 1
            continue
        try:
            alone = one_by_one(model, tokens, range(len(ids)))
            predictor = Predictor(model, Spelled(), PredictorOptions(128, token_budget=256), texts[: len(SHORT)])
            logits = predictor.predict(texts).logits
        except Exception as error:  # any: refused, as an encoder with a decoder is, or it wants other inputs than ids
            print(f"{architecture}: {type(error).__name__}: {str(error)[:100]}")
            ways["refused"] = ways.get("refused", 0) + 1
            continue
        off = float(np.abs(logits - alone).max() / np.abs(alone).max())
        ways[predictor.strategy] = ways.get(predictor.strategy, 0) + 1
        refusals = [f"{refusal.strategy} {refusal.kind}" for refusal in predictor.check.refusals]
        print(f"{architecture}: {predictor.strategy}{', trimmed' if predictor.trim else ''}, off {off:.1e} {refusals}")
        if not off <= 1e-4 and "own_batches" not in {refusal.kind for refusal in predictor.check.refusals}:
            wrong.append((architecture, predictor.strategy, off))
    print(ways)
    assert wrong == []
    assert ways["packed, sorted by length"] >= 30
