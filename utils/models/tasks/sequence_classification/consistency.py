"""Whether a batch gives each text the label it gets alone: padding, masks and precision must not change answers."""

from dataclasses import asdict, dataclass

import numpy as np

from utils.command import InputError


@dataclass(frozen=True)
class Agreement:
    """Batched against one-by-one predictions. A margin is the lead of the best logit over the second, taken alone."""

    rows: int
    same_labels: int
    max_abs_logit_difference: float
    lowest_margin: float

    @property
    def share(self) -> float:
        """Return the share of rows with the same label both ways."""
        return self.same_labels / self.rows

    def line(self) -> str:
        """Return the comparison as one line of text."""
        return (
            f"Batched and one-by-one labels agree on {self.same_labels} of {self.rows} texts ({self.share:.1%}); "
            f"logits differ by at most {self.max_abs_logit_difference:.2g}, lowest margin {self.lowest_margin:.2g}"
        )

    def as_dict(self) -> dict[str, int | float]:
        """Return the comparison as the documents of the pipeline hold it."""
        return {**asdict(self), "share": self.share}

    def require(self, least_share: float) -> None:
        """Raise InputError, with what to do, when fewer than `least_share` of the labels agree."""
        if self.share >= least_share:
            return
        raise InputError(
            f"{self.line()}; evaluation.min_agreement asks for {least_share:.1%}. Results would depend on the batch "
            "size. Check that the tokenizer's padding token is the model's pad_token_id and that the model takes an "
            "attention mask; with a low precision try model.dtype=float32; or lower evaluation.min_agreement"
        )


def agreement(alone: np.ndarray, batched: np.ndarray) -> Agreement:
    """Return how the labels compare that two arrays of finite logits of the same texts give."""
    second, best = np.sort(alone, axis=1)[:, -2:].T
    return Agreement(
        rows=len(alone),
        same_labels=int((alone.argmax(axis=1) == batched.argmax(axis=1)).sum()),
        max_abs_logit_difference=float(np.abs(alone - batched).max()),
        lowest_margin=float((best - second).min()),
    )
