"""The mask of padded texts, made before the forward, which then reads nothing back from the device.

With SDPA transformers reads on the host whether a mask hides anything (`masking_utils`: `padding_mask.all()`), and
waits there for the device: no backlog can be filled, and the device's own time is unknown. A mask of four dimensions is
taken as it is.
"""

from collections.abc import Mapping
from typing import Any

import torch


def ready_mask(model: Any, mask: torch.Tensor) -> torch.Tensor | None:
    """Return a mask `[texts, tokens]`, 1 for real tokens, as `[texts, 1, tokens, tokens]`, True where a token is seen.

    For timing: it has no window. None where the model has no SDPA attention of transformers, or both directions.
    """
    modules = model.modules() if isinstance(model, torch.nn.Module) else ()
    directions = {module.is_causal for module in modules if isinstance(getattr(module, "is_causal", None), bool)}
    is_known = getattr(getattr(model, "config", None), "_attn_implementation", None) == "sdpa"
    if not is_known or len(directions) != 1 or mask.dim() != 2:
        return None
    tokens = mask.shape[1]
    sees = mask.bool()[:, None, None].expand(-1, 1, tokens, tokens)
    return sees.tril() if True in directions else sees.contiguous()


def unread(model: Any, inputs: Any) -> dict[str, Any] | None:
    """Return the keyword arguments of a forward with such a mask in place of theirs; None without one to replace."""
    mask = inputs.get("attention_mask") if isinstance(inputs, Mapping) else None
    ready = ready_mask(model, mask) if isinstance(mask, torch.Tensor) else None
    return None if ready is None else {**inputs, "attention_mask": ready}
