"""Root-mean-square norms in one kernel of torch's, in the modules of a working copy, where a model writes seven."""

from typing import cast

import torch
from torch import nn
from torch.nn import functional

from boundby.machine import raise_if_lost

SAMPLE_ROWS = 8  # of random states, on which a norm and its replacement are compared
# Of the largest value: half precision rounds once where the model rounds at each step.
MOST_DIFFERENCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}


class TorchNorm(nn.Module):
    """A root-mean-square norm of the last dimension, by torch's own function."""

    def __init__(self, weight: nn.Parameter, epsilon: float) -> None:
        super().__init__()
        self.weight, self.epsilon = weight, epsilon

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Return the norm in the dtype of the states."""
        return functional.rms_norm(states, self.weight.shape, self.weight, self.epsilon)


def join_norms(model: nn.Module) -> None:
    """Replace the root-mean-square norms of a working copy, in place, where torch's gives the same values."""
    for parent in list(model.modules()):
        for name, norm in list(parent.named_children()):
            weight = getattr(norm, "weight", None)
            if not hasattr(norm, "variance_epsilon") or not isinstance(weight, nn.Parameter) or _is_touched(norm):
                continue
            replacement = TorchNorm(weight, cast(float, norm.variance_epsilon))
            if _agree(norm, replacement):
                setattr(parent, name, replacement)


def _is_touched(module: nn.Module) -> bool:
    """Tell whether a module has hooks, or a forward that is not its class's."""
    return bool(module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module))


def _agree(norm: nn.Module, replacement: TorchNorm) -> bool:
    """Tell whether both give the same for random states."""
    weight = replacement.weight
    states = torch.randn(1, SAMPLE_ROWS, weight.numel(), generator=torch.Generator().manual_seed(0))
    states = states.to(weight.device, weight.dtype)
    try:
        with torch.inference_mode():
            expected, values = norm(states).float(), replacement(states).float()
    except (RuntimeError, TypeError) as error:
        raise_if_lost(error)
        return False
    most = MOST_DIFFERENCE.get(weight.dtype, 0.0) * float(expected.abs().max())
    return bool((values - expected).abs().max() <= most)
