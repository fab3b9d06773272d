"""How large a model is, in numbers and as the block that the console shows."""

from dataclasses import dataclass
from typing import Any

from utils.models.loading import LoadedModel, longest_input

RULE = "=" * 70


@dataclass(frozen=True)
class ModelSummary:
    """A classifier in numbers.

    `size_bytes` is what parameters and buffers hold, each tensor once, without activations. `max_positions` is None
    where neither model nor tokenizer states a limit.
    """

    model_type: str
    parameters_total: int
    parameters_trainable: int
    size_bytes: int
    dtype: str
    num_labels: int
    max_positions: int | None
    load_time_s: float

    def as_dict(self) -> dict[str, Any]:
        """Return the summary as the documents of the pipeline hold it; `size_mb` is in 10^6 bytes."""
        return {
            "type": self.model_type,
            "parameters_total": self.parameters_total,
            "parameters_trainable": self.parameters_trainable,
            "size_mb": self.size_bytes / 1e6,
            "dtype": self.dtype,
            "num_labels": self.num_labels,
            "max_positions": self.max_positions,
            "load_time_s": self.load_time_s,
        }

    def lines(self) -> list[str]:
        """Return the block for the console, sizes in MB of 10^6 bytes."""
        return [
            "MODEL SUMMARY",
            RULE,
            f"Model Type: {self.model_type}",
            f"Total Parameters: {_counted(self.parameters_total)}",
            f"Trainable Parameters: {_counted(self.parameters_trainable)}",
            f"Model Size: {self.size_bytes / 1e6:,.2f} MB ({self.dtype})",
            f"Labels: {self.num_labels}",
            f"Longest Input: {f'{self.max_positions:,} tokens' if self.max_positions else 'no limit stated'}",
            f"Load Time: {self.load_time_s:.2f} s",
            RULE,
        ]


def summarize(loaded: LoadedModel) -> ModelSummary:
    """Return the size of a loaded model; parameters that layers share are counted once."""
    parameters = list(loaded.model.parameters())
    tensors = [*parameters, *loaded.model.buffers()]
    return ModelSummary(
        model_type=loaded.model.config.model_type,
        parameters_total=sum(each.numel() for each in parameters),
        parameters_trainable=sum(each.numel() for each in parameters if each.requires_grad),
        size_bytes=sum(each.numel() * each.element_size() for each in tensors),
        dtype=loaded.dtype,
        num_labels=loaded.model.config.num_labels,
        max_positions=longest_input(loaded),
        load_time_s=loaded.load_time_s,
    )


def _counted(number: int) -> str:
    return f"{number:,} ({number / 1e6:.2f}M)"
