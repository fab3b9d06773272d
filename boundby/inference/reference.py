"""The model's own forward, one text at a time: what every faster way is held against."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from boundby.inference.batches import collate, forward
from boundby.inference.tokens import Tokens


def require_classifier(model: Any, tokenizer: Any) -> None:
    """Raise ValueError where the model gives no label per text, or the tokenizer pads on the left."""
    config = model.config
    labels = getattr(config, "num_labels", 0)
    if labels < 2 or getattr(config, "problem_type", None) == "regression":
        raise ValueError(
            f"{type(model).__name__} has {labels} output(s) and problem_type {config.problem_type!r}: a regression "
            "gives no labels; use a classifier with two labels or more"
        )
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(f"{type(model).__name__} is an encoder with a decoder; use an encoder or a decoder alone")
    if getattr(tokenizer, "padding_side", "right") != "right":
        raise ValueError("the tokenizer pads on the left; set tokenizer.padding_side = 'right'")


def padding_id(model: Any, tokenizer: Any) -> int:
    """Return the id that fills a batch: the model's, else the tokenizer's, else 0, which the masks hide."""
    known = (model.config.get_text_config().pad_token_id, getattr(tokenizer, "pad_token_id", None))
    return next((each for each in known if each is not None), 0)


def one_by_one(model: Any, tokens: Tokens, rows: Sequence[int]) -> np.ndarray:
    """Return the logits of the texts at `rows`, float32, each from a stock forward of its own on the model's device."""
    found = np.empty((len(rows), model.config.num_labels), dtype=np.float32)
    with torch.inference_mode():
        for line, row in enumerate(rows):
            batch = collate(tokens, [row], 0, model.device)
            found[line] = forward(model, batch).float().cpu().numpy()[0]
    return found
