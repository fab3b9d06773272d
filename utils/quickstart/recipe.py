"""What the quickstart is made by: the size of its classifier, how it is trained, how many texts there are."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The size of a Qwen2 classifier and of its tokenizer."""

    vocabulary: int = 4000
    hidden: int = 128
    intermediate: int = 192
    layers: int = 4
    heads: int = 4
    key_value_heads: int = 2
    positions: int = 512
    initial_std: float = 0.06  # Qwen2's own 0.02 suits wide models: accuracy 0.81 after this training, 0.86 with 0.06


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """How the classifier is trained: AdamW, one cycle of the learning rate, batches of texts of similar length."""

    epochs: int = 1  # for the same time, new texts teach more than a second look: 12k x 1: 0.872, 7.5k x 2: 0.861
    tokens_per_batch: int = 768
    peak_learning_rate: float = 3e-3
    warmup_share: float = 0.15
    weight_decay: float = 0.05
    largest_gradient_norm: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """All that decides what the quickstart makes, apart from code and versions."""

    rows_train: int = 11_000
    rows_validation: int = 3_000
    seed: int = 7
    shape: Shape = Shape()
    schedule: Schedule = Schedule()
