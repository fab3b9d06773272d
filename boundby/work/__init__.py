"""The work of a forward: FLOPs and bytes by operator as eager torch does them, and what a formula says they should be.

`counter` watches a call, `operators` knows what one operator does, `transformer` has the formulas and the work that
would remain without padding.
"""

from boundby.work.counter import Work, count, count_by
from boundby.work.operators import UnknownWorkError
from boundby.work.transformer import (
    LengthCost,
    TransformerShape,
    fit_length_cost,
    transformer_flops,
    transformer_shape,
)

__all__ = [
    "LengthCost",
    "TransformerShape",
    "UnknownWorkError",
    "Work",
    "count",
    "count_by",
    "fit_length_cost",
    "transformer_flops",
    "transformer_shape",
]
