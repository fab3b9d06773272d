"""Modules whose times are known, a device and an allocator that keep books, and small models of real families."""

import functools
import itertools
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from boundby.layers.engine import ObservabilityEngine
from boundby.layers.measurement import Instruments
from boundby.layers.records import LayerProfile, ModelProfile
from boundby.layers.report import Report
from tests.fakes import FakeClock

NS = 1e-9


class Takes(nn.Module):
    """Takes `ns` nanoseconds of a clock and returns its first argument."""

    def __init__(self, clock: FakeClock, ns: int) -> None:
        super().__init__()
        self.clock, self.ns = clock, ns

    def forward(self, x: Any, **kwargs: Any) -> Any:
        self.clock.advance(self.ns)
        return x


class Calls(nn.Module):
    """Calls the modules given by name, each `times` times, and takes `ns` nanoseconds before each call."""

    def __init__(self, clock: FakeClock, ns: int, times: int = 1, **inner: nn.Module) -> None:
        super().__init__()
        self.clock, self.ns, self.times = clock, ns, times
        for name, module in inner.items():
            self.add_module(name, module)

    def forward(self, x: Any) -> Any:
        for module in self.children():
            for _ in range(self.times):
                self.clock.advance(self.ns)
                x = module(x)
        return x


class Quiet:
    def __init__(self, *texts: str) -> None:
        self.texts = texts

    def start(self) -> "Quiet":
        return self

    def stop(self) -> "Quiet":
        return self

    def disturbances(self, threads: int) -> list[Any]:
        return [_Text(text) for text in self.texts]


@dataclass(frozen=True)
class _Text:
    text: str


class FakeDevice:
    """A queue that takes time only by `work`; a mark is the time at which the device passes it."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.in_use: Hashable = "main"
        self.is_late = False
        self.held: list[float] = []
        self.waits = self.open_marks = 0

    def work(self, seconds: float) -> None:
        self.seconds += seconds

    def hold(self, seconds: float) -> None:
        self.held.append(seconds)
        self.seconds += seconds

    def mark(self) -> list[float]:
        self.open_marks += 1
        return [self.seconds]

    def has_passed(self, mark: list[float]) -> bool:
        return self.is_late

    def seconds_between(self, start: list[float], end: list[float]) -> float:
        return end[0] - start[0]

    def stream(self) -> Hashable:
        return self.in_use

    def reuse(self, mark: list[float]) -> None:
        self.open_marks -= 1

    def synchronize(self) -> None:
        self.waits += 1


class FakeAllocator:
    """Counts bytes that modules take and give back."""

    def __init__(self) -> None:
        self.allocated = self.peak_allocated = 0

    def take(self, size: int) -> None:
        self.allocated += size
        self.peak_allocated = max(self.peak_allocated, self.allocated)

    def reset_peaks(self) -> None:
        self.peak_allocated = self.allocated


def instruments(clock: FakeClock | None = None, **others: Any) -> Instruments:
    """Return instruments that read the fake clock, or one that ticks, with free probes on a quiet machine."""
    given = {
        "now": clock or itertools.count(0, 1000).__next__,
        "probe_cost_ns": lambda now: 0.0,
        "watch": Quiet,
        "cpu": getattr(clock, "cpu", None),
        **others,
    }
    return Instruments(**given)


def profiled(model: nn.Module, inputs: Any, folder: Any, num_runs: int = 2, **others: Any) -> Report:
    """Return the report on a model under fake instruments, without warm-up."""
    settings = {"instruments": instruments(others.pop("clock", None)), **others}
    engine = ObservabilityEngine(model, folder, {"model_name": "m"}, **settings)
    engine.warmup(inputs, 0)
    return engine.profile(inputs, num_runs)


def layer(profile: ModelProfile, path: str) -> LayerProfile:
    (match,) = [layer for layer in profile.layers if layer.path == path]
    return match


def self_ns(profile: ModelProfile) -> dict[str, float | None]:
    """Return the nanoseconds of each layer in itself."""
    return {layer.path: layer.host_self_s and round(layer.host_self_s.median / NS, 3) for layer in profile.layers}


def token_ids(batch: int, length: int, below: int = 60) -> torch.Tensor:
    return torch.arange(batch * length).reshape(batch, length) % below


def families() -> Sequence[str]:
    return ("gpt2", "bert", "qwen2", "resnet", "t5", "encoder")


@functools.cache
def small(family: str) -> tuple[nn.Module, Any]:
    import transformers

    torch.manual_seed(0)
    ids = token_ids(2, 6)
    text = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if family == "gpt2":
        config = transformers.GPT2Config(n_layer=2, n_embd=32, n_head=4, vocab_size=64, n_positions=16, **_TOKENS)
        return transformers.GPT2LMHeadModel(config).eval(), text
    if family == "bert":
        config = transformers.BertConfig(**_sizes(), num_labels=3, pad_token_id=0)
        return transformers.BertForSequenceClassification(config).eval(), text
    if family == "qwen2":
        config = transformers.Qwen2Config(**_sizes(), num_key_value_heads=2)
        return transformers.Qwen2ForCausalLM(config).eval(), text
    if family == "t5":
        config = transformers.T5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, **_TOKENS)
        return transformers.T5ForConditionalGeneration(config).eval(), {**text, "decoder_input_ids": ids[:, :3]}
    if family == "resnet":
        config = transformers.ResNetConfig(
            embedding_size=8, hidden_sizes=[8, 16], depths=[1, 2], num_labels=3, layer_type="bottleneck"
        )
        return transformers.ResNetForImageClassification(config).eval(), torch.ones(1, 3, 32, 32)
    block = nn.TransformerEncoderLayer(32, 4, 48, batch_first=True)
    return nn.TransformerEncoder(block, 2, enable_nested_tensor=False).eval(), torch.randn(2, 6, 32)


_TOKENS = {"bos_token_id": 1, "eos_token_id": 1}


def _sizes() -> dict[str, int]:
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    return {**sizes, "vocab_size": 64, "max_position_embeddings": 16}
