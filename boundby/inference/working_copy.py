"""A second model on the same weights that may be rewired, so that the caller's model stays as it is."""

import copy
from typing import Any

import torch
from torch import nn


def in_dtype(model: nn.Module, dtype: torch.dtype) -> Any:
    """Return a copy of the model with parameters in `dtype`, in evaluation mode; those that have it are shared.

    Buffers are shared as they are: the frequencies of rotary positions must not be rounded.
    """
    memo: dict[int, Any] = {id(each): each for each in model.buffers()}
    for each in model.parameters():
        is_right = each.dtype == dtype or not each.is_floating_point()
        memo[id(each)] = each if is_right else nn.Parameter(each.detach().to(dtype), requires_grad=False)
    return copy.deepcopy(model, memo).eval()


def float32_head(model: Any) -> None:
    """Put everything of a working copy that follows its layers into float32: it costs next to nothing.

    A pooler of the base model becomes part of the head, as `pooler_in_head`, and the base no longer runs it.
    """
    base = model.base_model
    for name, module in model.named_children():
        if module is not base:
            setattr(model, name, in_dtype(module, torch.float32))
    pooler = getattr(base, "pooler", None)
    if pooler is not None:
        base.pooler = None
        pooler = in_dtype(pooler, torch.float32)
    base.pooler_in_head = pooler
