"""The model's own forward, one text at a time in float32, and how the answers of any other way compare with it."""

import copy
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from boundby.inference.batches import Tokens, collate, forward
from boundby.timing import paired_shares, wilson_interval

SMALLEST_MARGINS = 10  # that a report tells
SAME_GUARD = 4.0  # times the largest difference seen: twice what can flip a label, and that twice
LEAST_SAME_GUARD = 1e-5  # of the largest logit: a sample may show no difference at all


def require_classifier(model: Any, tokenizer: Any) -> None:
    """Raise ValueError where the model gives not one label per text, or the tokenizer pads on the left."""
    config = model.config
    if getattr(config, "problem_type", None) == "multi_label_classification":
        raise ValueError(
            f"{type(model).__name__} has problem_type {config.problem_type!r}: it gives any number of labels per text, "
            "and the best one of them is no answer; use a classifier that gives one"
        )
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
    return next((token for token in known if token is not None), 0)


def one_by_one(model: Any, tokens: Tokens, rows: Sequence[int]) -> np.ndarray:
    """Return the logits of the texts at `rows`, float32, each from a stock forward of its own on the model's device."""
    logits = np.empty((len(rows), model.config.num_labels), dtype=np.float32)
    with torch.inference_mode():
        for line, row in enumerate(rows):
            batch = collate(tokens, [row], 0, model.device)
            logits[line] = forward(model, batch).float().cpu().numpy()[0]
    return logits


def in_dtype(model: nn.Module, dtype: torch.dtype) -> Any:
    """Return a copy of the model with parameters in `dtype`, in evaluation mode; equal ones and buffers are shared."""
    memo: dict[int, Any] = {id(buffer): buffer for buffer in model.buffers()}
    for parameter in model.parameters():
        is_right = parameter.dtype == dtype or not parameter.is_floating_point()
        memo[id(parameter)] = parameter if is_right else nn.Parameter(parameter.detach().to(dtype), requires_grad=False)
    return copy.deepcopy(model, memo).eval()


def float32_head(model: Any) -> None:
    """Put everything of a working copy that follows its layers into float32.

    A pooler of the base model becomes part of the head, as `pooler_in_head`.
    """
    base = model.base_model
    for name, module in model.named_children():
        if module is not base:
            setattr(model, name, in_dtype(module, torch.float32))
    pooler = getattr(base, "pooler", None)
    if pooler is not None:
        base.pooler = None
        pooler = in_dtype(pooler, torch.float32)
    base.pooler_in_head = pooler


@dataclass(frozen=True)
class ExactnessReport:
    """Logits of one precision beside the reference: one text at a time, float32, the stock forward.

    `agreement_low` and `agreement_high` end the 95 % interval (Wilson) for all texts; where the sample is all texts
    they are the share itself. A margin is the lead of the reference's best logit; `widest_flip` is the widest lead of a
    label that differs. Accuracies are None without labels; their difference is paired (Agresti & Min 2005).
    """

    precision: str
    rows: int
    same_labels: int
    agreement: float
    agreement_low: float
    agreement_high: float
    max_abs_logit_difference: float
    mean_abs_logit_difference: float
    smallest_margins: tuple[float, ...]
    widest_flip: float = 0.0
    reference_accuracy: float | None = None
    accuracy: float | None = None
    accuracy_difference_low: float | None = None
    accuracy_difference_high: float | None = None

    @property
    def accuracy_difference(self) -> float | None:
        """Accuracy less that of the reference."""
        if self.accuracy is None or self.reference_accuracy is None:
            return None
        return self.accuracy - self.reference_accuracy

    @property
    def guard_margin(self) -> float:
        """The margin below which a label can flip: twice the largest difference of a logit that was seen."""
        return 2 * self.max_abs_logit_difference

    @property
    def flip_margin(self) -> float:
        """Twice the margin that every label of the sample needs to agree; at most `guard_margin`."""
        return min(2 * self.widest_flip, self.guard_margin)

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {**asdict(self), "accuracy_difference": self.accuracy_difference, "guard_margin": self.guard_margin}


def same_guard(max_abs_difference: float, largest_logit: float) -> float:
    """Return the margin within which `same` computes a row again: four times the largest difference seen, or more.

    Then labels differ only where a difference is twice any that was seen. 0 where these are not finite.
    """
    margin = max(LEAST_SAME_GUARD * largest_logit, SAME_GUARD * max_abs_difference)
    return margin if math.isfinite(margin) else 0.0


def margins(logits: np.ndarray) -> np.ndarray:
    """Return how far the best logit of each row leads the second."""
    two_best = np.partition(logits, -2, axis=1)[:, -2:]
    return two_best[:, 1] - two_best[:, 0]


def compare_logits(
    precision: str,
    logits: np.ndarray,
    reference: np.ndarray,
    labels: Sequence[int] | None = None,
    is_all: bool = False,
) -> ExactnessReport:
    """Return how `logits` compare with `reference`, both `[rows, labels]`; `is_all`: there are no other texts.

    Raises ValueError where there is nothing to compare or a value is not finite.
    """
    if logits.shape != reference.shape or not len(logits):
        raise ValueError(f"logits of shape {logits.shape} cannot be compared with {reference.shape}")
    if not (np.isfinite(logits).all() and np.isfinite(reference).all()):
        raise ValueError(f"logits in {precision} or in the reference are not finite")
    mine, theirs = logits.argmax(axis=1), reference.argmax(axis=1)
    rows, same = len(logits), int((mine == theirs).sum())
    low, high = (same / rows, same / rows) if is_all else wilson_interval(same, rows)
    difference = np.abs(logits.astype(np.float64) - reference)
    return ExactnessReport(
        precision,
        rows,
        same,
        same / rows,
        low,
        high,
        float(difference.max()),
        float(difference.mean()),
        tuple(np.sort(margins(reference))[:SMALLEST_MARGINS].tolist()),
        float(margins(logits)[mine != theirs].max(initial=0.0)),
        **({} if labels is None else _accuracies(mine == np.asarray(labels), theirs == np.asarray(labels))),
    )


def _accuracies(mine: np.ndarray, theirs: np.ndarray) -> dict[str, float]:
    shares = paired_shares(theirs, mine)
    return {
        "reference_accuracy": shares.share_a,
        "accuracy": shares.share_b,
        "accuracy_difference_low": shares.low,
        "accuracy_difference_high": shares.high,
    }
