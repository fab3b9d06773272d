"""Sequence classifiers of a few thousand random weights, saved as the Hub's are."""

import json
from collections.abc import Sequence
from pathlib import Path

WORDS = ("good", "bad", "late", "broken", "refund", "parcel", "please", "where", "is", "my", "the", "a")
LABELS = ("praise", "complaint", "question")
SIZE = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}


def save_bert(folder: Path, labels: Sequence[str] = LABELS) -> Path:
    """Save an encoder with a padding token and 64 positions; return its folder."""
    from transformers import BertConfig, BertForSequenceClassification

    save_tokenizer(folder, pad_token="[PAD]", model_max_length=64)
    config = BertConfig(vocab_size=len(WORDS) + 3, max_position_embeddings=64, **SIZE, **_named(labels))
    return _save(BertForSequenceClassification(config), folder)


def save_qwen(folder: Path, labels: Sequence[str] = LABELS) -> Path:
    """Save a decoder whose tokenizer has an end token but none for padding; return its folder."""
    from transformers import Qwen3Config, Qwen3ForSequenceClassification

    save_tokenizer(folder)
    config = Qwen3Config(vocab_size=len(WORDS) + 3, num_key_value_heads=1, head_dim=8, **SIZE, **_named(labels))
    return _save(Qwen3ForSequenceClassification(config), folder)


def save_tokenizer(folder: Path, **settings: object) -> None:
    """Save a tokenizer that knows `WORDS`."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: index for index, token in enumerate(["[UNK]", "[END]", "[PAD]", *WORDS])}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="[UNK]", eos_token="[END]", **settings
    ).save_pretrained(folder)


def edit_config(folder: Path, **changes: object) -> None:
    """Change keys of the `config.json` in `folder`; None removes a key."""
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


def _named(labels: Sequence[str]) -> dict[str, dict]:
    return {"id2label": dict(enumerate(labels)), "label2id": {name: index for index, name in enumerate(labels)}}


def _save(model, folder: Path) -> Path:
    import torch

    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.2, generator=generator)
    model.save_pretrained(folder)
    return folder
