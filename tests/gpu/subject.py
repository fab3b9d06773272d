"""What the checks look at: the card, and classifiers in the shape of Qwen2.5 with random weights and texts.

All is imported here and at the heads of the checks: the process that they are forked from then has it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForSequenceClassification

from boundby.inference import PredictorOptions, collate, tokenize
from boundby.machine.device import device_queue, has_bfloat16_matmul, runtime, synchronizer
from boundby.timing.timer import Timer

MAX_LENGTH = 512


@dataclass(frozen=True)
class Sizes:
    """How large models and sets are; the usual ones are for a card."""

    hidden: int = 896
    layers: int = 24
    inner: int = 4864
    vocabulary: int = 32768
    texts: int = 50_000
    compared: int = 256  # texts whose logits are held against others
    mean_tokens: int = 100
    batch_sizes: tuple[int, ...] = (1, 8, 32)
    too_many: int = 4096  # texts for a sweep that has `room_bytes` beside the weights
    room_bytes: int = 2**30
    square: int = 4096  # the side of a matrix that keeps the card busy
    energy_s: float = 3.0
    evaluation_s: float = 15.0
    launches: int = 4000
    sweep_s: float = 4.0  # of each batch size
    swept: int = 2048  # texts


SMALL = Sizes(
    hidden=128,
    layers=2,
    inner=64,
    vocabulary=100,
    texts=96,
    compared=32,
    mean_tokens=12,
    batch_sizes=(1, 2),
    too_many=1024,
    room_bytes=16 * 2**20,
    square=512,
    energy_s=0.5,
    evaluation_s=1.0,
    sweep_s=0.2,
    swept=32,
)


@dataclass(frozen=True)
class Card:
    """The GPU that is looked at."""

    device: torch.device
    sizes: Sizes = Sizes()

    @property
    def timer(self) -> Timer:
        """The wall clock, and what waits for the GPU."""
        return Timer(synchronize=synchronizer(self.device))

    @property
    def dtype(self) -> torch.dtype:
        """bfloat16 where the GPU multiplies in it."""
        return torch.bfloat16 if has_bfloat16_matmul(self.device) else torch.float32

    @property
    def dtype_name(self) -> str:
        """The same as the settings call it."""
        return str(self.dtype).removeprefix("torch.")

    @property
    def runtime(self) -> Any:
        """torch's module for the GPU."""
        return runtime(self.device)

    @property
    def queue(self) -> Any:
        """The GPU's queue of launches."""
        return device_queue(self.device)

    def options(self) -> PredictorOptions:
        """How a predictor computes on this card."""
        return PredictorOptions(MAX_LENGTH, self.dtype_name)

    def classifier(self, layers: int | None = None, dtype: torch.dtype | None = None) -> Any:
        """Return a classifier in the shape of Qwen2.5-0.5B, or with as many layers, with random weights on the GPU."""
        sizes = self.sizes
        config = Qwen2Config(
            vocab_size=sizes.vocabulary,
            hidden_size=sizes.hidden,
            intermediate_size=sizes.inner,
            num_hidden_layers=layers or sizes.layers,
            num_attention_heads=max(2, sizes.hidden // 64),
            num_key_value_heads=2,
            max_position_embeddings=1024,
            num_labels=8,
            pad_token_id=0,
        )
        torch.manual_seed(0)
        with self.device:  # else the weights are drawn on the host, for seconds
            return Qwen2ForSequenceClassification(config).to(dtype or self.dtype).eval()

    def tokenizer(self) -> Any:
        """Return a tokenizer of numbered words, a token each; the first id is the padding's."""
        words = {"[PAD]": 0, "[UNK]": 1, **{f"w{number}": number for number in range(2, self.sizes.vocabulary)}}
        made = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
        made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="[PAD]", unk_token="[UNK]")

    def texts(self, count: int) -> list[str]:
        """Return texts of random words, log-normal in their lengths."""
        random, mean = np.random.default_rng(0), self.sizes.mean_tokens
        lengths = random.lognormal(np.log(mean) - 0.18, 0.6, count).clip(4, 5 * mean).astype(int)
        words = self.sizes.vocabulary
        return [" ".join(f"w{word}" for word in random.integers(2, words, length)) for length in lengths]

    def tokens(self, texts: Sequence[str]) -> Any:
        """Return the tokens of texts."""
        return tokenize(self.tokenizer(), texts, MAX_LENGTH)

    def padded(self, texts: int = 8) -> dict[str, torch.Tensor]:
        """Return a batch with padding."""
        batch = collate(self.tokens(self.texts(texts)), range(texts), 0, self.device)
        return {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask}

    def lacks(self, what: str) -> None:
        """End the check as one that this machine cannot make."""
        pytest.skip(what)
