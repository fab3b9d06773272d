"""What a model may compute in, and what that does to a matrix product on this machine.

`float32` is the model's weights in float32 by the kernels that the process has set up, the reference. `float32_fast`
has the same weights and lets torch choose other kernels for float32 products: TF32 on a GPU, oneDNN on a CPU
(`torch.set_float32_matmul_precision`). On one CPU that rounds as float32 does and is twice as fast, on one with AMX it
rounds to bfloat16: so it counts as reduced precision, and `matmul_effect` measures what it is here. The setting belongs
to the whole process; it holds during a forward and is set back afterwards.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from boundby.ceilings import matmul_precision
from boundby.device import fast_float32_products, has_bfloat16_products
from boundby.inference.reference import in_dtype

EFFECT_SIZE = 256  # of the measured product: above the sizes that kernels treat apart
# How far logits may be from the model's own, as a share of the largest, before the wiring is doubted: so many times the
# effect on one product, within these ends. float32 has an effect of 4e-7, TF32 3e-4, float32 products that are rounded
# to bfloat16 2e-3, and bfloat16 3e-3.
TOLERATED_EFFECTS, LEAST_TOLERANCE, MOST_TOLERANCE = 70, 1e-4, 0.15


@dataclass(frozen=True)
class Precision:
    """A dtype of weights and activations, and whether float32 products may be rounded as torch's fastest kernels do."""

    name: str
    dtype: torch.dtype
    fast_products: bool = False

    @property
    def keeps_weights(self) -> bool:
        """Whether the weights are those of the model in float32, to the last bit."""
        return self.dtype == torch.float32

    def copy_of(self, model: nn.Module) -> Any:
        """Return a working copy of the model in this precision, in evaluation mode; equal weights are shared."""
        return in_dtype(model, self.dtype)

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
    )
}


def available(device: torch.device) -> tuple[Precision, ...]:
    """Return the precisions in which this device is fast, `float32` first.

    A CPU without bfloat16 products emulates them, slower than float32. float16 is left out: models trained in bfloat16
    overflow in it.
    """
    names = ("float32", "float32_fast", *(["bfloat16"] if has_bfloat16_products(device) else []))
    return tuple(PRECISIONS[name] for name in names)


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
