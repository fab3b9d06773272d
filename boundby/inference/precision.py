"""The precisions a model may compute in, and what each does to a matmul on this machine.

- `float32`: the model's weights by the kernels that the process has set up; the reference.
- `float32_fast`: torch may use reduced-precision matmul: TF32 on a GPU, oneDNN on a CPU, which rounds to bfloat16 with
  AMX. The setting holds during a forward (`torch.set_float32_matmul_precision`).
- `float32_prepacked`: weights laid out once for oneDNN, activations fused; `bfloat16` on a CPU too. It rounds as
  float32.
- `int8`: weights scaled by output channel, inputs by the range that the check texts have. Embeddings, norms, attention
  and head stay in float32. Ours, since torch is about to remove the tensor types of its dynamic quantization.

On a GPU, and where weights are prepacked, a root-mean-square norm is one kernel (`boundby.inference.fused`), not seven.
"""

import contextlib
import functools
import math
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import nn

from boundby.inference import fused
from boundby.inference.reference import in_dtype
from boundby.machine import (
    fast_float32_precision,
    has_bfloat16_matmul,
    has_int8_matmul,
    is_gpu,
    is_host,
    matmul_precision,
)

INT8_LARGEST = 127
LEAST_INPUT = 1e-6  # of a calibrated range
EFFECT_SIZE = 256  # of the measured product: above the sizes that kernels treat apart
# How far logits may be from the model's own, as a share of the largest, before the wiring is doubted: so many times the
# effect on one product, within these ends. float32 has an effect of 4e-7, TF32 3e-4, float32 products that are rounded
# to bfloat16 2e-3, and bfloat16 3e-3.
TOLERATED_EFFECTS, LEAST_TOLERANCE, MOST_TOLERANCE = 70, 1e-4, 0.15


class Int8Linear(nn.Module):
    """A linear layer in int8 on a CPU, with the activation after it fused.

    It first computes in float32 and notes the range of its inputs. `settle` then rounds the weights by output and fixes
    the input scales, so that no label depends on other texts. Large inputs pass the square root of their size on to the
    weights. A layer whose result `feeds` only another such layer hands it bytes.
    """

    def __init__(self, layer: nn.Linear, activation: Any = None) -> None:
        super().__init__()
        self.bias = None if layer.bias is None else nn.Parameter(layer.bias.detach().float(), requires_grad=False)
        self.feeds: tuple[Int8Linear, ...] = ()  # a tuple, so that it is no module of this one
        self._float: tuple[nn.Linear, Any] | None = (layer, activation)
        self._joined = ACTIVATIONS.get(type(activation).__name__, ("none", ""))
        self._range: torch.Tensor | None = None  # least and largest of each input

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the result in float32, or as the bytes of the layer that it feeds."""
        if self._float is not None:
            layer, activation = self._float
            ends = torch.stack(inputs.flatten(0, -2).aminmax(dim=0))
            kept = self._range
            self._range = ends if kept is None else torch.stack([kept[0].minimum(ends[0]), kept[1].maximum(ends[1])])
            result: torch.Tensor = layer(inputs) if activation is None else activation(layer(inputs))
            return result
        rounded = inputs if inputs.dtype == torch.uint8 else _rounded(inputs, self.steps)
        product: torch.Tensor = torch.ops.onednn.qlinear_pointwise(
            rounded, *self._scale, self.packed, self.scales, self._zeros, self.bias, *self._result, *self._activation
        )
        return product

    @property
    def range(self) -> torch.Tensor:
        """The least and the largest value of each input so far, [2, inputs]."""
        if self._range is None:
            raise ValueError("a layer saw no text whose range it could take")
        return self._range

    def settle(self, steps: dict[bytes, torch.Tensor], fed_by: "Int8Linear | None") -> None:
        """Round the weights; equal `steps` of layers with the same input are one tensor. `fed_by` hands it bytes."""
        assert self._float is not None
        weight = self._float[0].weight.detach().float()
        low, high = self.range.clamp(min=torch.tensor([[-math.inf], [0.0]]), max=torch.tensor([[0.0], [math.inf]]))
        if fed_by is None:
            largest = torch.maximum(-low, high).clamp_min(LEAST_INPUT)
            share = largest.sqrt()
            scale = float((largest / share).max()) / INT8_LARGEST
            own = (scale * share).reciprocal()
            self.steps = steps.setdefault(own.numpy().tobytes(), own)
            weight, self._scale = weight * share, (scale, INT8_LARGEST + 1)
        else:
            scale = max(float(high.max() - low.min()), LEAST_INPUT) / (2 * INT8_LARGEST + 1)
            self._scale = scale, round(-float(low.min()) / scale)
        scales = (weight.abs().amax(dim=1) / INT8_LARGEST).clamp_min(torch.finfo(torch.float32).tiny)
        self.scales, self._zeros = scales, torch.zeros(len(scales), dtype=torch.int64)
        rounded = (weight / scales[:, None]).round_().to(torch.int8)
        self.packed = torch.ops.onednn.qlinear_prepack(rounded, None)
        self._float = None

    def join(self) -> None:
        """Fix what the result is, once the layers that it feeds are settled."""
        name, algorithm = self._joined
        self._activation: tuple[str, list[Any], str] = (name, [], algorithm)
        self._result = (*self.feeds[0]._scale, torch.uint8) if self.feeds else (1.0, 0, torch.float32)


_local = threading.local()  # what this thread rounded last: queries, keys and values have one input


def _rounded(inputs: torch.Tensor, steps: torch.Tensor) -> torch.Tensor:
    """Return the inputs in bytes, 128 for 0."""
    last: tuple[torch.Tensor, ...] | None = getattr(_local, "last", None)
    if last is not None and last[0] is inputs and last[1] is steps:
        return last[2]
    rounded = (inputs * steps).round_().clamp_(-INT8_LARGEST - 1, INT8_LARGEST).to(torch.int8)
    rounded = rounded.view(torch.uint8).bitwise_xor_(INT8_LARGEST + 1)
    _local.last = inputs, steps, rounded
    return rounded


def calibrate(model: nn.Module, compute: Callable[[], object]) -> None:
    """Settle the layers of a working copy that compute in eight bits, by what they meet in `compute`."""
    layers = [module for module in model.modules() if isinstance(module, Int8Linear)]
    if not layers:
        return
    compute()
    fed_by, steps = {id(fed): layer for layer in layers for fed in layer.feeds}, dict[bytes, torch.Tensor]()
    for layer in layers:
        layer.settle(steps, fed_by.get(id(layer)))
    for layer in layers:
        layer.join()


def to_int8(model: nn.Module) -> None:
    """Put the linear layers of a working copy into int8, in place, but for the head.

    Raises ValueError where there is none, or the device has no int8 matmul.
    """
    device = next(model.parameters()).device
    if not has_int8_matmul(device):
        raise ValueError(f"this {device.type.upper()} has no products of eight bits (VNNI, AMX) that torch can use")
    if not _linear_layers(model):
        raise ValueError("it has no linear layers to put into int8")
    _replace_linears(model, Int8Linear)
    for module in model.modules():
        names = dict(module.named_modules())
        for feeding, fed in FEEDING:
            if isinstance(names.get(feeding), Int8Linear) and isinstance(names.get(fed), Int8Linear):
                names[feeding].feeds = (names[fed],)


def _linear_layers(model: nn.Module) -> list[tuple[nn.Module, str, nn.Linear]]:
    """Return the linear layers before the head, each with the module it is in and its name there."""
    base = getattr(model, "base_model", model)
    return [
        (parent, name, child)
        for path, parent in base.named_modules()
        for name, child in parent.named_children()
        if type(child) is nn.Linear and "pooler" not in f"{path}.{name}".split(".")
    ]


class PrepackedLinear(nn.Module):
    """A linear layer on a CPU whose weights lie as oneDNN wants them, and the activation after it in the same pass."""

    def __init__(self, layer: nn.Linear, activation: Any = None) -> None:
        super().__init__()
        self.packed = torch.ops.mkldnn._reorder_linear_weight(layer.weight.detach())
        self.bias = layer.bias
        self._activation, self._algorithm = ACTIVATIONS.get(type(activation).__name__, ("none", ""))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the product in the dtype of the inputs, which is that of the weights."""
        product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
            inputs, self.packed, self.bias, self._activation, [], self._algorithm
        )
        return product


# Names, within a module, of a product and of the activation that takes its result and nothing else.
FOLLOWED = (("dense", "intermediate_act_fn"), ("lin1", "activation"), ("gate_proj", "act_fn"))
FEEDING = (("intermediate.dense", "output.dense"), ("lin1", "lin2"))  # one product, and the only one that takes it
ACTIVATIONS = {  # as oneDNN calls them, by their class in torch or transformers
    "GELU": ("gelu", "none"), "GELUActivation": ("gelu", "none"), "GELUTanh": ("gelu", "tanh"),
    "NewGELUActivation": ("gelu", "tanh"), "SiLU": ("swish", ""), "SiLUActivation": ("swish", ""), "ReLU": ("relu", ""),
}  # fmt: skip


@functools.cache
def can_prepack(device: torch.device, dtype: torch.dtype = torch.float32) -> bool:
    """Tell whether weights of this dtype can be prepacked for this device, by trying torch's private operators."""
    if not is_host(device):
        return False
    some = torch.ones(8, 8, dtype=dtype)
    try:
        PrepackedLinear(nn.Linear(8, 8, dtype=dtype).requires_grad_(False))(some)
    except (AttributeError, NotImplementedError, RuntimeError):
        return False
    return True


def prepack(model: nn.Module) -> None:
    """Prepack the weights of a working copy on a CPU, in place; the head stays as it is."""
    layers = _linear_layers(model)
    if layers and can_prepack(layers[0][2].weight.device, layers[0][2].weight.dtype):
        _replace_linears(model, PrepackedLinear)


def _replace_linears(model: nn.Module, make: Callable[[nn.Linear, Any], nn.Module]) -> None:
    """Replace the linear layers before the head, each with the activation after it if oneDNN can fuse that."""
    fused.join_norms(model)
    followed = dict(FOLLOWED)
    for parent, name, child in _linear_layers(model):
        follower = getattr(parent, followed.get(name, ""), None)
        is_joined = type(follower).__name__ in ACTIVATIONS
        setattr(parent, name, make(child, follower if is_joined else None))
        if is_joined:
            setattr(parent, followed[name], nn.Identity())


def weight_bytes(model: nn.Module) -> int:
    """Return the bytes that parameters and buffers hold, each tensor once, and those of prepacked weights."""
    held = (part for tensor in (*model.parameters(), *model.buffers()) for part in _parts(tensor))
    tensors = {part.data_ptr(): part for part in held}.values()
    packed = [module.packed for module in model.modules() if isinstance(module, PrepackedLinear | Int8Linear)]
    return sum(tensor.numel() * tensor.element_size() for tensor in (*tensors, *packed))


def _parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return what a tensor holds: those of torchao have values and scales in tensors of their own, and no memory."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    return [getattr(tensor, name) for name in flatten()[0]] if flatten else [tensor]


@dataclass(frozen=True)
class Precision:
    """A dtype of weights and activations, and whether float32 may use reduced-precision matmul.

    `convert` changes a working copy in place; `joins_norms`: on a GPU a norm is one kernel. With `session` another
    library computes, from token ids and mask.
    """

    name: str
    dtype: torch.dtype
    fast_products: bool = False
    convert: Callable[[nn.Module], None] | None = None
    session: Callable[[np.ndarray, np.ndarray], np.ndarray] | None = None
    joins_norms: bool = False

    @property
    def keeps_weights(self) -> bool:
        """Whether the weights are those of the model in float32, to the last bit."""
        return self.dtype == torch.float32 and self.convert in (None, prepack)

    @property
    def to_compile(self) -> "Precision":
        """The same for a model that is compiled, whose compiler lays the weights out itself."""
        return replace(self, convert=None) if self.convert is prepack else self

    def copy_of(self, model: nn.Module) -> Any:
        """Return a working copy of the model in this precision, in evaluation mode; equal weights are shared.

        Raises ValueError where the model, or this device, cannot have it.
        """
        working_copy = in_dtype(model, self.dtype)
        if self.joins_norms and is_gpu(next(model.parameters()).device):
            fused.join_norms(working_copy)
        if self.convert is not None:
            self.convert(working_copy)
        return working_copy

    @contextlib.contextmanager
    def active(self, device: torch.device) -> Iterator[None]:
        """Set the float32 products of the process as this precision wants them, and set them back."""
        wanted = fast_float32_precision(device) if self.fast_products else None
        with matmul_precision(wanted) if wanted else contextlib.nullcontext():
            yield


PRECISIONS = {
    precision.name: precision
    for precision in (
        Precision("float32", torch.float32, joins_norms=True),
        Precision("float32_fast", torch.float32, fast_products=True, joins_norms=True),
        Precision("float32_prepacked", torch.float32, convert=prepack),
        Precision("bfloat16", torch.bfloat16, convert=prepack, joins_norms=True),
        Precision("float16", torch.float16, joins_norms=True),
        Precision("int8", torch.float32, convert=to_int8),
    )
}
EXACT = ("float32_prepacked", "float32")  # those that round as the model's own float32 does, fastest first


def available(device: torch.device) -> tuple[Precision, ...]:
    """Return the precisions in which this device is fast, `float32` first.

    bfloat16 and int8 need matmul of their own. float16 is left out: models trained in bfloat16 overflow in it.
    """
    has = {"bfloat16": has_bfloat16_matmul(device), "int8": has_int8_matmul(device)}
    has |= {"float32_prepacked": can_prepack(device), "float16": False}
    return tuple(precision for name, precision in PRECISIONS.items() if has.get(name, True))


def matmul_effect(precision: Precision, device: torch.device) -> float:
    """Return the largest error of a product in this precision against float64, as a share of its largest element."""
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(EFFECT_SIZE, EFFECT_SIZE, generator=generator) for _ in range(2))
    exact = left.double() @ right.double().t()
    layer = nn.Linear(EFFECT_SIZE, EFFECT_SIZE, bias=False, device=device)
    layer.weight.data.copy_(right)
    working_copy = precision.copy_of(nn.Sequential(layer))  # some conversions swap the modules inside one
    with torch.inference_mode(), precision.active(device):
        calibrate(working_copy, lambda: working_copy(left))
        product = working_copy(left.to(device, precision.dtype))
    return float((product.cpu().double() - exact).abs().max() / exact.abs().max())


def tolerance(effect: float) -> float:
    """Return the share of the largest logit by which logits may differ where a product has this `matmul_effect`."""
    return min(MOST_TOLERANCE, max(LEAST_TOLERANCE, TOLERATED_EFFECTS * effect))
