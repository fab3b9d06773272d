"""What a model may compute in, and what that does to a matrix product on this machine.

`float32` is the model's weights in float32 by the kernels that the process has set up, the reference. `float32_fast`
has the same weights and lets torch choose other kernels for float32 products: TF32 on a GPU, oneDNN on a CPU
(`torch.set_float32_matmul_precision`). On one CPU that rounds as float32 does and is twice as fast, on one with AMX it
rounds to bfloat16: so it counts as reduced precision, and `matmul_effect` measures what it is here. The setting belongs
to the whole process; it holds during a forward and is set back afterwards.

`int8` holds the weights of the layers in eight bits, scaled by output channel, and rounds what enters a layer to eight
bits as it comes, scaled token by token. Embeddings, norms, attention and the head stay in float32, and there is nothing
to calibrate. Torch's own dynamic quantization rests on tensor types that it is about to remove.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from boundby.ceilings import matmul_precision
from boundby.device import fast_float32_products, has_bfloat16_products, has_int8_products
from boundby.inference.reference import in_dtype

INT8_LARGEST = 127
EFFECT_SIZE = 256  # of the measured product: above the sizes that kernels treat apart
# How far logits may be from the model's own, as a share of the largest, before the wiring is doubted: so many times the
# effect on one product, within these ends. float32 has an effect of 4e-7, TF32 3e-4, float32 products that are rounded
# to bfloat16 2e-3, and bfloat16 3e-3.
TOLERATED_EFFECTS, LEAST_TOLERANCE, MOST_TOLERANCE = 70, 1e-4, 0.15


class Int8Linear(nn.Module):
    """A linear layer with weights of eight bits, one scale for each output, whose inputs are rounded as they come.

    Each token has a scale of its own, so that no label depends on the texts beside it.
    """

    weight: torch.Tensor
    scales: torch.Tensor

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        weight = layer.weight.detach().float()
        scales = _scales(weight)
        self.register_buffer("weight", (weight / scales).round_().to(torch.int8).t())
        self.register_buffer("scales", scales[:, 0])
        self.bias = None if layer.bias is None else nn.Parameter(layer.bias.detach().float(), requires_grad=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the product in float32."""
        rows = inputs.flatten(0, -2)
        scales = _scales(rows)
        product = torch._int_mm((rows / scales).round_().to(torch.int8), self.weight).float()
        product.mul_(scales).mul_(self.scales)
        if self.bias is not None:
            product.add_(self.bias)
        return product.view(*inputs.shape[:-1], product.shape[1])


def _scales(rows: torch.Tensor) -> torch.Tensor:
    """Return what one step of eight bits is worth in each row, [rows, 1]."""
    return (rows.abs().amax(dim=-1, keepdim=True) / INT8_LARGEST).clamp_min_(torch.finfo(torch.float32).tiny)


def to_int8(model: nn.Module) -> None:
    """Put the linear layers of a working copy into int8, in place; those of the head stay as they are.

    Raises ValueError where there is none, and on a device without products of eight bits.
    """
    device = next(model.parameters()).device
    if not has_int8_products(device):
        raise ValueError(f"this {device.type.upper()} has no products of eight bits (VNNI, AMX) that torch can use")
    base = getattr(model, "base_model", model)
    found = [
        (parent, name, child)
        for place, parent in base.named_modules()
        for name, child in parent.named_children()
        if isinstance(child, nn.Linear) and "pooler" not in f"{place}.{name}".split(".")
    ]
    if not found:
        raise ValueError("it has no linear layers to put into int8")
    for parent, name, child in found:
        setattr(parent, name, Int8Linear(child))


def weight_bytes(model: nn.Module) -> int:
    """Return the bytes that parameters and buffers hold, each tensor once."""
    tensors = {each.data_ptr(): each for each in (*model.parameters(), *model.buffers())}.values()
    return sum(each.numel() * each.element_size() for each in tensors)


@dataclass(frozen=True)
class Precision:
    """A dtype of weights and activations, and whether float32 products may be rounded as torch's fastest kernels do.

    `convert` changes a working copy further, in place.
    """

    name: str
    dtype: torch.dtype
    fast_products: bool = False
    convert: Callable[[nn.Module], None] | None = None

    @property
    def keeps_weights(self) -> bool:
        """Whether the weights are those of the model in float32, to the last bit."""
        return self.dtype == torch.float32 and self.convert is None

    def copy_of(self, model: nn.Module) -> Any:
        """Return a working copy of the model in this precision, in evaluation mode; equal weights are shared.

        Raises ValueError where the model, or this device, cannot have it.
        """
        working_copy = in_dtype(model, self.dtype)
        if self.convert is not None:
            self.convert(working_copy)
        return working_copy

    @contextlib.contextmanager
    def active(self, device: torch.device) -> Iterator[None]:
        """Set the float32 products of the process as this precision wants them, and set them back."""
        wanted = fast_float32_products(device) if self.fast_products else None
        with matmul_precision(wanted) if wanted else contextlib.nullcontext():
            yield


PRECISIONS = {
    precision.name: precision
    for precision in (
        Precision("float32", torch.float32),
        Precision("float32_fast", torch.float32, fast_products=True),
        Precision("bfloat16", torch.bfloat16),
        Precision("int8", torch.float32, convert=to_int8),
    )
}


def available(device: torch.device) -> tuple[Precision, ...]:
    """Return the precisions in which this device is fast, `float32` first.

    A CPU without bfloat16 products emulates them, slower than float32; one without products of eight bits, as well.
    float16 is left out: models trained in bfloat16 overflow in it.
    """
    has = {"bfloat16": has_bfloat16_products(device), "int8": has_int8_products(device)}
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
        product = working_copy(left.to(device, precision.dtype))
    return float((product.cpu().double() - exact).abs().max() / exact.abs().max())


def tolerance(effect: float) -> float:
    """Return the share of the largest logit by which logits may differ where a product has this `matmul_effect`."""
    return min(MOST_TOLERANCE, max(LEAST_TOLERANCE, TOLERATED_EFFECTS * effect))
