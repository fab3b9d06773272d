"""What a model may compute in, and what that does to a matrix product on this machine.

`float32` is the model's weights in float32 by the kernels that the process has set up, the reference. `float32_fast`
has the same weights and lets torch choose other kernels for float32 products: TF32 on a GPU, oneDNN on a CPU
(`torch.set_float32_matmul_precision`). On one CPU that rounds as float32 does and is twice as fast, on one with AMX it
rounds to bfloat16: so it counts as reduced precision, and `matmul_effect` measures what it is here. The setting belongs
to the whole process; it holds during a forward and is set back afterwards.

`float32_prepared` has the same weights too, laid out once as oneDNN's kernels of a CPU want them, which round as
float32 does whatever the process has set up. An activation takes no pass of its own. `bfloat16` on a CPU is prepared
likewise. With both, and on a GPU in every precision, root-mean-square norms are one kernel (`boundby.inference.fused`),
where models write seven: of 24 layers some 340 launches fewer.

`int8` holds the weights of the layers in eight bits, scaled by output channel, and rounds what enters a layer to eight
bits by the range that the texts of the self-check have there, so that oneDNN takes products, bias and activation in one
pass. Embeddings, norms, attention and the head stay in float32. Torch's own dynamic quantization rests on tensor types
that it is about to remove.
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
    """A linear layer in eight bits on a CPU, and the activation after it in the same pass.

    At first it computes in float32 and notes the range of each input; `settle` then rounds the weights, one scale for
    each output, and fixes the scales of the inputs, so that no label depends on the texts beside it. An input whose
    largest value is four times another's takes half of that from the weights. One whose result `feeds` another such
    layer, and nothing else, hands it bytes.
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
            found = torch.stack(inputs.flatten(0, -2).aminmax(dim=0))
            kept = self._range
            self._range = found if kept is None else torch.stack([kept[0].minimum(found[0]), kept[1].maximum(found[1])])
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
    layers = [each for each in model.modules() if isinstance(each, Int8Linear)]
    if not layers:
        return
    compute()
    fed_by, steps = {id(fed): each for each in layers for fed in each.feeds}, dict[bytes, torch.Tensor]()
    for each in layers:
        each.settle(steps, fed_by.get(id(each)))
    for each in layers:
        each.join()


def to_int8(model: nn.Module) -> None:
    """Put the linear layers of a working copy into int8, in place; those of the head stay as they are.

    Raises ValueError where there is none, and on a device without products of eight bits.
    """
    device = next(model.parameters()).device
    if not has_int8_matmul(device):
        raise ValueError(f"this {device.type.upper()} has no products of eight bits (VNNI, AMX) that torch can use")
    if not _linear_layers(model):
        raise ValueError("it has no linear layers to put into int8")
    fused.join_norms(model)
    followed = dict(FOLLOWED)
    for parent, name, child in _linear_layers(model):
        follower = getattr(parent, followed.get(name, ""), None)
        is_joined = type(follower).__name__ in ACTIVATIONS
        setattr(parent, name, Int8Linear(child, follower if is_joined else None))
        if is_joined:
            setattr(parent, followed[name], nn.Identity())
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
        for place, parent in base.named_modules()
        for name, child in parent.named_children()
        if type(child) is nn.Linear and "pooler" not in f"{place}.{name}".split(".")
    ]


class PreparedLinear(nn.Module):
    """A linear layer on a CPU whose weights lie as oneDNN wants them, and the activation after it in the same pass."""

    def __init__(self, layer: nn.Linear, activation: tuple[str, str] = ("none", "")) -> None:
        super().__init__()
        self.packed = torch.ops.mkldnn._reorder_linear_weight(layer.weight.detach())
        self.bias = layer.bias
        self._activation, self._algorithm = activation

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
def can_prepare(device: torch.device, dtype: torch.dtype = torch.float32) -> bool:
    """Tell whether weights of this dtype can be laid out anew for this device, by doing so: not every CPU can.

    The operators are torch's own and private; where they are gone, it cannot be done either.
    """
    if not is_host(device):
        return False
    some = torch.ones(8, 8, dtype=dtype)
    try:
        PreparedLinear(nn.Linear(8, 8, dtype=dtype).requires_grad_(False))(some)
    except (AttributeError, NotImplementedError, RuntimeError):
        return False
    return True


def prepare(model: nn.Module) -> None:
    """Lay the weights of a working copy on a CPU out for its kernels, in place; the head stays as it is."""
    layers = _linear_layers(model)
    if not layers or not can_prepare(layers[0][2].weight.device, layers[0][2].weight.dtype):
        return
    fused.join_norms(model)
    followed = dict(FOLLOWED)
    for parent, name, child in _linear_layers(model):
        follower = getattr(parent, followed.get(name, ""), None)
        activation = ACTIVATIONS.get(type(follower).__name__)
        setattr(parent, name, PreparedLinear(child, activation or ("none", "")))
        if activation:
            setattr(parent, followed[name], nn.Identity())


def weight_bytes(model: nn.Module) -> int:
    """Return the bytes that parameters and buffers hold, each tensor once, and those of prepared weights."""
    held = (part for each in (*model.parameters(), *model.buffers()) for part in _parts(each))
    tensors = {each.data_ptr(): each for each in held}.values()
    packed = [each.packed for each in model.modules() if isinstance(each, PreparedLinear | Int8Linear)]
    return sum(each.numel() * each.element_size() for each in (*tensors, *packed))


def _parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return what a tensor holds: those of torchao have values and scales in tensors of their own, and no memory."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    return [getattr(tensor, name) for name in flatten()[0]] if flatten else [tensor]


@dataclass(frozen=True)
class Precision:
    """A dtype of weights and activations, and whether float32 products may be rounded as torch's fastest kernels do.

    `convert` changes a working copy further, in place; `joins_norms`: on a GPU a norm is one kernel. With `session`
    another library computes: token ids and mask in, logits out; dtype and `convert` then say how it rounds.
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
        return self.dtype == torch.float32 and self.convert in (None, prepare)

    @property
    def to_compile(self) -> "Precision":
        """The same for a model that is compiled, whose compiler lays the weights out itself."""
        return replace(self, convert=None) if self.convert is prepare else self

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
        Precision("float32_prepared", torch.float32, convert=prepare),
        Precision("bfloat16", torch.bfloat16, convert=prepare, joins_norms=True),
        Precision("float16", torch.float16, joins_norms=True),
        Precision("int8", torch.float32, convert=to_int8),
    )
}
EXACT = ("float32_prepared", "float32")  # those that round as the model's own float32 does, fastest first


def available(device: torch.device) -> tuple[Precision, ...]:
    """Return the precisions in which this device is fast, `float32` first.

    A CPU without bfloat16 products emulates them, slower than float32; one without products of eight bits, as well.
    float16 is left out: models trained in bfloat16 overflow in it.
    """
    has = {"bfloat16": has_bfloat16_matmul(device), "int8": has_int8_matmul(device)}
    has |= {"float32_prepared": can_prepare(device), "float16": False}
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
