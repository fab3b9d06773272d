"""What a model may compute in, and what that does to a matrix product on this machine.

`float32` is the model's weights in float32 by the kernels that the process has set up, the reference. `float32_fast`
has the same weights and lets torch choose other kernels for float32 products: TF32 on a GPU, oneDNN on a CPU
(`torch.set_float32_matmul_precision`). On one CPU that rounds as float32 does and is twice as fast, on another it may
round to bfloat16: so it counts as reduced precision, and `matmul_effect` measures what it is here. The setting belongs
to the whole process; it holds during a forward and is set back afterwards.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from boundby.ceilings import matmul_precision
from boundby.device import is_gpu

EFFECT_SIZE = 256  # of the measured product: above the sizes that kernels treat apart


@dataclass(frozen=True)
class Precision:
    """A dtype of weights and activations, and how float32 products may be rounded (None: as the process has it).

    `tolerance` is how far logits may be from the model's own, as a share of the largest, before the wiring is doubted.
    """

    name: str
    dtype: torch.dtype
    products: dict[str, str] | None
    tolerance: float

    @contextlib.contextmanager
    def active(self, device: torch.device) -> Iterator[None]:
        """Set the float32 products of the process as this precision wants them, and set them back."""
        wanted = (self.products or {}).get(device.type)
        with matmul_precision(wanted) if wanted else contextlib.nullcontext():
            yield


PRECISIONS = {
    each.name: each
    for each in (
        Precision("float32", torch.float32, None, 1e-4),
        Precision("float32_fast", torch.float32, {"cpu": "medium", "cuda": "high"}, 2e-2),
        Precision("bfloat16", torch.bfloat16, None, 0.15),
    )
}


def available(device: torch.device) -> tuple[str, ...]:
    """Return the names of the precisions in which this device is fast, `float32` first.

    A CPU without bfloat16 products emulates them, slower than float32. float16 is left out: models trained in bfloat16
    overflow in it.
    """
    names = ["float32", "float32_fast"]
    if is_gpu(device):
        return (*names, "bfloat16") if torch.cuda.is_bf16_supported() else tuple(names)
    has_products = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return (*names, "bfloat16") if has_products else tuple(names)


def matmul_effect(precision: Precision, device: torch.device) -> float:
    """Return the largest error of a product in this precision against float64, as a share of its largest element."""
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(EFFECT_SIZE, EFFECT_SIZE, generator=generator) for _ in range(2))
    exact = left.double() @ right.double().t()
    with precision.active(device):
        found = left.to(device, precision.dtype) @ right.to(device, precision.dtype).t()
    return float((found.cpu().double() - exact).abs().max() / exact.abs().max())
