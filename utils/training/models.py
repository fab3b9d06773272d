"""The models of the demo loops: small, with random weights, called with a batch and returning "loss" and "logits"."""

import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch

from utils.quickstart.cache import Shape
from utils.training import data
from utils.training.data import Split
from utils.training.settings import ModelName

SMALL, LARGE = 8, 32  # pixels of a side
TEXT_SHAPE = Shape(vocabulary=2000, hidden=64, intermediate=96, layers=2)


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
        self.classifier = torch.nn.Linear(32 * (SMALL // 2) ** 2, data.DIGITS)

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        """Return the logits, and the loss where there are labels."""
        logits = self.classifier(self.features(pixel_values))
        if labels is None:
            return {"logits": logits}
        return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}


def prepare(name: ModelName, share: float, seed: int) -> Task:
    """Return the model called `name` with random weights, and the share of its data; the seed decides both."""
    torch.manual_seed(seed)
    if name == "text":
        return _text(share, seed)
    makers = {"baseline_cnn": BaselineCNN, "resnet": _resnet, "efficientnet": _efficientnet}
    return Task(makers[name](), data.digits(SMALL if name == "baseline_cnn" else LARGE, share, seed))


def _resnet() -> torch.nn.Module:
    from transformers import ResNetConfig, ResNetForImageClassification

    return ResNetForImageClassification(
        ResNetConfig(
            num_channels=1,
            embedding_size=16,
            hidden_sizes=[16, 32],
            depths=[1, 1],
            layer_type="basic",
            num_labels=data.DIGITS,
        )
    )


def _efficientnet() -> torch.nn.Module:
    from transformers import EfficientNetConfig, EfficientNetForImageClassification

    return EfficientNetForImageClassification(
        EfficientNetConfig(
            image_size=LARGE,
            num_channels=1,
            width_coefficient=0.25,
            depth_coefficient=0.3,
            hidden_dim=320,  # 1280 times the width: the last layer counts on it
            kernel_sizes=[3, 3, 5],
            in_channels=[32, 16, 24],
            out_channels=[16, 24, 40],
            depthwise_padding=[],
            strides=[1, 2, 2],
            num_block_repeats=[1, 1, 1],
            expand_ratios=[1, 6, 6],
            num_labels=data.DIGITS,
        )
    )


def _text(share: float, seed: int) -> Task:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer, logging

    from utils.quickstart import classifier

    texts = data.quickstart_texts()
    with tempfile.TemporaryDirectory() as folder:
        classifier.build_untrained(Path(folder), [each.text for each in texts], data.TEXT_LABELS, shape=TEXT_SHAPE)
        logging.disable_progress_bar()
        tokenizer = AutoTokenizer.from_pretrained(folder)
        model = AutoModelForSequenceClassification.from_pretrained(folder)
    return Task(model, data.tokenised(texts, tokenizer, share, seed))
