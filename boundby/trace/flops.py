"""FLOPs of the operators that do nearly all arithmetic of a network, from the input shapes that a trace records."""

import json
import math
from collections.abc import Callable, Sequence
from typing import Any

LARGEST_SIZE = 2**48  # of one dimension
Shape = tuple[int, ...]
Shapes = Sequence[Shape]


def operator_flops(name: str, input_shapes: str | None) -> int | None:
    """Return the FLOPs of one call, a multiplication and an addition counted as two.

    `input_shapes` is the JSON text of the trace. None where there is no formula for the operator, or where the shapes
    do not fit it. Of a convolution the trace lacks the output shape, so it has none.
    Source of the formulas: torch.utils.flop_counter.
    """
    formula = FORMULAS.get(name)
    if formula is None or input_shapes is None:
        return None
    try:
        found = formula([_shape(each) for each in json.loads(input_shapes)])
    except (ValueError, TypeError, IndexError):
        return None
    return found if 0 < found < 2**63 else None  # more is no operator of this world, and no float


def _shape(value: Any) -> Shape:
    """Return the sizes of a tensor, () for what is none; raises ValueError where they are not sizes."""
    sizes = value if isinstance(value, list) else []
    if not all(type(size) is int and 0 <= size < LARGEST_SIZE for size in sizes):
        raise ValueError("a size is no whole number, or an absurd one")
    return tuple(sizes)


def _product(a: Shape, b: Shape) -> int:
    """Return the FLOPs of [..., m, k] @ [..., k, n]."""
    (*batch, rows, inner), (*_, inner_b, columns) = a, b
    if inner != inner_b:
        raise ValueError("the shapes do not fit")
    return 2 * math.prod(batch) * rows * inner * columns


def _linear(shapes: Shapes) -> int:
    (*batch, inner), (outputs, inner_b) = shapes[0], shapes[1]
    if inner != inner_b:
        raise ValueError("the shapes do not fit")
    return 2 * math.prod(batch) * inner * outputs


def _attention(shapes: Shapes) -> int:
    """Return the FLOPs of query @ key and scores @ value, of [batch, heads, length, size] each."""
    query, key, value = shapes[:3]
    batch, heads, length, size = query
    return 2 * batch * heads * length * key[2] * (size + value[3])


FORMULAS: dict[str, Callable[[Shapes], int]] = {
    "aten::mm": lambda shapes: _product(shapes[0], shapes[1]),
    "aten::bmm": lambda shapes: _product(shapes[0], shapes[1]),
    "aten::addmm": lambda shapes: _product(shapes[1], shapes[2]),
    "aten::baddbmm": lambda shapes: _product(shapes[1], shapes[2]),
    "aten::_addmm_activation": lambda shapes: _product(shapes[1], shapes[2]),
    "aten::_scaled_mm": lambda shapes: _product(shapes[0], shapes[1]),
    "mkldnn::_linear_pointwise": _linear,
    "aten::linear": _linear,
    "aten::_scaled_dot_product_flash_attention": _attention,
    "aten::_scaled_dot_product_efficient_attention": _attention,
    "aten::_scaled_dot_product_cudnn_attention": _attention,
    "aten::_scaled_dot_product_flash_attention_for_cpu": _attention,
}
