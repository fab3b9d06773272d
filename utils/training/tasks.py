"""What the loop trains: small models with random weights, on handwritten digits that need no network."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.utils.data import Dataset

from utils.training.settings import ModelName

EVALUATION_SHARE = 0.2
DIGITS = 10

Row = Mapping[str, torch.Tensor]

SMALL, LARGE = 8, 32  # pixels of a side


class Repeated(Dataset[Row]):
    """`length` rows: the given ones in their order, and again from the first."""

    def __init__(self, rows: Sequence[Row], length: int) -> None:
        self._rows = rows
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Row:
        if not 0 <= index < self._length:
            raise IndexError(index)
        return self._rows[index % len(self._rows)]


@dataclass(frozen=True)
class Split:
    """Rows to learn from and rows to be judged by."""

    training: Sequence[Row]
    evaluation: Sequence[Row]


def digits(size: int, share: float, seed: int) -> Split:
    """Return 1797 grey digits of 8 x 8 pixels, or a share of them, enlarged to `size` x `size`.

    At least one is for each use; the seed decides their order.
    """
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    pixels = torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
    if size != pixels.shape[-1]:
        pixels = torch.nn.functional.interpolate(pixels, size=size, mode="bilinear")
    rows = [
        {"pixel_values": image, "labels": label}
        for image, label in zip(pixels, torch.tensor(labels, dtype=torch.long), strict=True)
    ]
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed)).tolist()
    count = max(2, round(share * len(rows)))
    chosen = [rows[index] for index in order[:count]]
    held_out = max(1, round(EVALUATION_SHARE * count))
    return Split(chosen[held_out:], chosen[:held_out])


@dataclass(frozen=True)
class Task:
    """A model and what it learns from."""

    model: torch.nn.Module
    split: Split


class BaselineCNN(torch.nn.Module):
    """Two convolutions, dropout and a linear layer, for digits of 8 x 8 pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.features = torch.nn.Sequential(
            torch.nn.Conv2d(1, 16, 3, padding=1),
            torch.nn.ReLU(),
            torch.nn.Conv2d(16, 32, 3, padding=1),
            torch.nn.ReLU(),
            torch.nn.MaxPool2d(2),
            torch.nn.Flatten(),
            torch.nn.Dropout(0.1),
        )
        self.classifier = torch.nn.Linear(32 * (SMALL // 2) ** 2, DIGITS)

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        """Return the logits, and the loss where there are labels."""
        logits = self.classifier(self.features(pixel_values))
        if labels is None:
            return {"logits": logits}
        return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}


def prepare(name: ModelName, share: float, seed: int) -> Task:
    """Return the model called `name` with random weights, and the share of its data; the seed decides both."""
    torch.manual_seed(seed)
    makers = {"baseline_cnn": BaselineCNN, "resnet": _resnet, "efficientnet": _efficientnet}
    return Task(makers[name](), digits(SMALL if name == "baseline_cnn" else LARGE, share, seed))


def _resnet() -> torch.nn.Module:
    from transformers import ResNetConfig, ResNetForImageClassification

    shape = {"embedding_size": 16, "hidden_sizes": [16, 32], "depths": [1, 1], "layer_type": "basic"}
    return ResNetForImageClassification(ResNetConfig(num_channels=1, num_labels=DIGITS, **shape))


def _efficientnet() -> torch.nn.Module:
    from transformers import EfficientNetConfig, EfficientNetForImageClassification

    shape = {"width_coefficient": 0.25, "depth_coefficient": 0.3, "kernel_sizes": [3, 3, 5], "strides": [1, 2, 2]}
    shape |= {"in_channels": [32, 16, 24], "out_channels": [16, 24, 40], "depthwise_padding": []}
    shape |= {"num_block_repeats": [1, 1, 1], "expand_ratios": [1, 6, 6]}
    shape["hidden_dim"] = 320  # 1280 times the width: the last layer counts on it
    return EfficientNetForImageClassification(
        EfficientNetConfig(image_size=LARGE, num_channels=1, num_labels=DIGITS, **shape)
    )
