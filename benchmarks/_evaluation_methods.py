"""The ways to get the labels of many texts that `evaluation.py` compares; each returns one label index per text."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from benchmarks._evaluation_cases import MAX_LENGTH, Case

SPEC_BATCH, SORTED_BATCH = 64, 32
PIPELINE_BATCHES = (1, 8, 32, 64)
SPEC, LONGEST, CHARACTERS, PIPELINE = "padded to 512", "padded to longest", "sorted by characters", "pipeline"

Label = Callable[[Sequence[str]], list[int]]


def peers(case: Case) -> dict[str, Label]:
    """Return the other ways, by name."""
    found: dict[str, Label] = {
        SPEC: lambda texts: _batches(case, texts, range(len(texts)), SPEC_BATCH, "max_length"),
        LONGEST: lambda texts: _batches(case, texts, range(len(texts)), SPEC_BATCH, "longest"),
        CHARACTERS: lambda texts: _batches(
            case, texts, np.argsort([-len(each) for each in texts]).tolist(), SORTED_BATCH, "longest"
        ),
    }
    return found | {f"{PIPELINE} {size}": _pipeline(case, size) for size in PIPELINE_BATCHES}


def _batches(case: Case, texts: Sequence[str], order: Sequence[int], size: int, padding: str) -> list[int]:
    """Return labels from batches of fixed size in the order given, tokenized as they come."""
    labels = [0] * len(texts)
    with torch.inference_mode():
        for start in range(0, len(order), size):
            rows = order[start : start + size]
            encoded = case.tokenizer(
                [texts[row] for row in rows],
                padding=padding,
                truncation=True,
                max_length=MAX_LENGTH,
                return_tensors="pt",
            )
            found = case.model(input_ids=encoded["input_ids"], attention_mask=encoded["attention_mask"]).logits
            for row, label in zip(rows, found.argmax(dim=1).tolist(), strict=True):
                labels[row] = label
    return labels


def _pipeline(case: Case, size: int) -> Label:
    from transformers import pipeline

    made: Any = pipeline("text-classification", model=case.model, tokenizer=case.tokenizer, device="cpu")
    ids = case.model.config.label2id

    def label(texts: Sequence[str]) -> list[int]:
        found = made(list(texts), batch_size=size, truncation=True, max_length=MAX_LENGTH)
        return [ids[each["label"]] for each in found]

    return label
