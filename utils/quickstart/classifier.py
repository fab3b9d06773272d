"""A small Qwen2 classifier and its byte-level BPE tokenizer, made from texts and saved as any Hugging Face model is."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from transformers import Qwen2Config, Qwen2ForSequenceClassification, Qwen2Tokenizer
from transformers.utils import logging

from utils.quickstart import training
from utils.quickstart.recipe import TINY, Recipe, Shape
from utils.quickstart.texts import LabelledText


def build_untrained(folder: Path, texts: Sequence[str], label_names: Sequence[str], *, shape: Shape = TINY) -> None:
    """Write a classifier with random weights and a tokenizer trained on `texts` into `folder`; takes a moment."""
    tokenizer = _tokenizer(texts, shape)
    _save(folder, _model(tokenizer, label_names, shape, seed=0), tokenizer)


def build(
    folder: Path,
    train: Sequence[LabelledText],
    label_names: Sequence[str],
    *,
    recipe: Recipe,
    progress: Callable[[str], None],
) -> None:
    """Write a classifier trained on `train`, and its tokenizer, into `folder`; labels are indices in `label_names`.

    Trains in float32 on the CPU; leaves the random state and the number of threads of the process as they were.
    """
    tokenizer = _tokenizer([example.text for example in train], recipe.shape)
    model = _model(tokenizer, label_names, recipe.shape, recipe.seed)
    training.fit(model, _tokenised(tokenizer, train), recipe.schedule, seed=recipe.seed, progress=progress)
    _save(folder, model, tokenizer)


def accuracy(folder: Path, examples: Sequence[LabelledText]) -> float:
    """Return the share of `examples` to which the classifier saved in `folder` gives their label."""
    tokenizer = Qwen2Tokenizer.from_pretrained(folder)
    with _no_progress_bars():
        model = Qwen2ForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    return training.accuracy(model, _tokenised(tokenizer, examples))


def _tokenizer(texts: Sequence[str], shape: Shape) -> Qwen2Tokenizer:
    empty = Qwen2Tokenizer(model_max_length=shape.positions, padding_side="right")
    return empty.train_new_from_iterator(texts, shape.vocabulary, show_progress=False)


def _model(
    tokenizer: Qwen2Tokenizer, label_names: Sequence[str], shape: Shape, seed: int
) -> Qwen2ForSequenceClassification:
    names = dict(enumerate(label_names))
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.key_value_heads,
        max_position_embeddings=shape.positions,
        initializer_range=shape.initial_std,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        id2label=names,
        label2id={name: index for index, name in names.items()},
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen2ForSequenceClassification(config)


def _tokenised(tokenizer: Qwen2Tokenizer, examples: Sequence[LabelledText]) -> training.Examples:
    token_ids = tokenizer([example.text for example in examples], truncation=True)["input_ids"]
    return training.Examples(token_ids, [example.label for example in examples])


def _save(folder: Path, model: Qwen2ForSequenceClassification, tokenizer: Qwen2Tokenizer) -> None:
    with _no_progress_bars():
        model.save_pretrained(folder)  # safetensors
    tokenizer.save_pretrained(folder)


@contextlib.contextmanager
def _no_progress_bars() -> Iterator[None]:
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
