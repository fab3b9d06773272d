"""Sequence classifiers of five families with random weights, and texts with a tokenizer that suits them all."""

from collections.abc import Callable
from typing import Any

import torch

from utils.quickstart.recipe import Shape

TINY = Shape(vocabulary=400, hidden=16, intermediate=32, layers=2)
WIDTH, LAYERS, HEADS, INNER, POSITIONS, LABELS = 32, 2, 4, 64, 320, 7
SIZES = {"hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "intermediate_size": INNER}


def reviews(count: int) -> list[str]:
    from utils.quickstart import texts

    return [item.text for item in texts.generate(count, seed=3)]


def tokenizer(words: list[str]) -> Any:
    """Return a byte-level tokenizer trained on `words`."""
    from utils.quickstart import classifier

    return classifier._tokenizer(words, TINY)


def qwen2(vocabulary: int, pad: int | None, **changes: Any) -> Any:
    from transformers import Qwen2Config, Qwen2ForSequenceClassification

    sizes = SIZES | {"num_key_value_heads": 2, "max_position_embeddings": POSITIONS, "num_labels": LABELS}
    return Qwen2ForSequenceClassification(Qwen2Config(vocab_size=vocabulary, pad_token_id=pad, **sizes | changes))


def gpt2(vocabulary: int, pad: int | None, **changes: Any) -> Any:
    from transformers import GPT2Config, GPT2ForSequenceClassification

    sizes = {"n_embd": WIDTH, "n_layer": LAYERS, "n_head": HEADS, "n_positions": POSITIONS, "num_labels": LABELS}
    return GPT2ForSequenceClassification(GPT2Config(vocab_size=vocabulary, pad_token_id=pad, **sizes | changes))


def bert(vocabulary: int, pad: int | None, **changes: Any) -> Any:
    from transformers import BertConfig, BertForSequenceClassification

    sizes = SIZES | {"max_position_embeddings": POSITIONS, "num_labels": LABELS}
    return BertForSequenceClassification(BertConfig(vocab_size=vocabulary, pad_token_id=pad, **sizes | changes))


def roberta(vocabulary: int, pad: int | None, **changes: Any) -> Any:
    from transformers import RobertaConfig, RobertaForSequenceClassification

    sizes = SIZES | {"max_position_embeddings": POSITIONS + vocabulary, "num_labels": LABELS}
    return RobertaForSequenceClassification(RobertaConfig(vocab_size=vocabulary, pad_token_id=pad, **sizes | changes))


def distilbert(vocabulary: int, pad: int | None, **changes: Any) -> Any:
    from transformers import DistilBertConfig, DistilBertForSequenceClassification

    sizes = {"dim": WIDTH, "n_layers": LAYERS, "n_heads": HEADS, "hidden_dim": INNER, "num_labels": LABELS}
    config = DistilBertConfig(vocab_size=vocabulary, pad_token_id=pad, max_position_embeddings=POSITIONS)
    config.update(sizes | changes)
    return DistilBertForSequenceClassification(config)


FAMILIES: dict[str, Callable[..., Any]] = {
    "qwen2": qwen2,
    "gpt2": gpt2,
    "bert": bert,
    "roberta": roberta,
    "distilbert": distilbert,
}


def build(family: str, vocabulary: int, pad: int | None, **changes: Any) -> Any:
    """Return a classifier whose random weights tell texts apart."""
    torch.manual_seed(0)
    model = FAMILIES[family](vocabulary, pad, **changes).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(5)  # the initial weights hardly tell two texts apart
    return model


class Spelled:
    padding_side = "right"

    def __call__(self, texts: list[str], max_length: int, **_: Any) -> Any:
        ids = [[int(word) for word in text.split()][:max_length] for text in texts]
        return type("Encoded", (dict,), {"encodings": None})(input_ids=ids)
