"""The encoder with its pooling as one model, and whether a batch gives a text the vector that it gets alone."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional
from transformers import AutoModel
from transformers.modeling_outputs import SequenceClassifierOutput

from utils.command import InputError

SAME_COSINE = 0.9999  # below it, neighbours of texts that are much alike can change


class SentenceEncoder(torch.nn.Module):
    """Returns as logits the mean of the states of all tokens of a text, of length one."""

    def __init__(self, encoder: Any) -> None:
        super().__init__()
        self.encoder = encoder
        self.config = encoder.config
        self.config.num_labels = self.config.hidden_size  # the width of what it returns

    @property
    def device(self) -> torch.device:
        """Where its weights are."""
        return torch.device(self.encoder.device)

    @property
    def base_model(self) -> Any:
        """The encoder without the pooling."""
        return self.encoder

    def get_input_embeddings(self) -> Any:
        """Return the table of the tokens."""
        return self.encoder.get_input_embeddings()

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None, **options: Any
    ) -> SequenceClassifierOutput:
        """Return the vectors of a batch."""
        states = self.encoder(input_ids=input_ids, attention_mask=attention_mask, **options).last_hidden_state.float()
        if attention_mask is None:  # nothing is padded
            mean = states.mean(dim=1)
        else:
            weights = attention_mask[:, :, None].to(states.dtype)
            mean = (states * weights).sum(dim=1) / weights.sum(dim=1)
        return SequenceClassifierOutput(logits=functional.normalize(mean, dim=1))


def load_weights(folder: Path, **options: Any) -> tuple[Any, dict[str, set[Any]]]:
    """Return the encoder with its pooling, and what transformers says of its loading; a pooler of its own is unused."""
    encoder, loading_info = AutoModel.from_pretrained(folder, output_loading_info=True, **options)
    loading_info["missing_keys"] = {name for name in loading_info["missing_keys"] if not name.startswith("pooler.")}
    return SentenceEncoder(encoder), loading_info


@dataclass(frozen=True)
class Agreement:
    """Vectors of batches against those of single texts."""

    rows: int
    same_vectors: int
    lowest_cosine: float

    @property
    def share(self) -> float:
        """Return the share of rows with the same vector both ways."""
        return self.same_vectors / self.rows

    def line(self) -> str:
        """Return the comparison as one line of text."""
        return (
            f"Batched and one-by-one vectors agree on {self.same_vectors} of {self.rows} texts ({self.share:.1%}); "
            f"lowest cosine {self.lowest_cosine:.6f}"
        )

    def as_dict(self) -> dict[str, int | float]:
        """Return the comparison as the documents of the pipeline hold it."""
        return {**asdict(self), "share": self.share}

    def require(self, least_share: float) -> None:
        """Raise InputError, with what to do, when fewer than `least_share` of the vectors agree."""
        if self.share < least_share:
            raise InputError(
                f"{self.line()}; evaluation.min_agreement asks for {least_share:.1%}. Results would depend on the "
                "batch size. Check that the model takes an attention mask; with a low precision try "
                "model.dtype=float32; or lower evaluation.min_agreement"
            )


def agreement(alone: np.ndarray, batched: np.ndarray) -> Agreement:
    """Return how two arrays of finite vectors of the same texts compare."""
    cosines = (alone * batched).sum(axis=1)
    return Agreement(len(alone), int((cosines >= SAME_COSINE).sum()), float(min(1.0, cosines.min())))
