"""What a model writes as several passes over its states, in the modules of a working copy, done in one.

By `boundby.inference.kernels` on a CPU where numba is installed. A root-mean-square norm is torch's own elsewhere. A
module is replaced only where the new one gives what it gave.
"""

from collections.abc import Callable, Iterator
from functools import cache, partial
from types import FunctionType, MethodType
from typing import Any, cast

import torch
from torch import nn
from torch.nn import functional

from boundby.device import raise_if_lost

LANES = 16  # as the kernels have it, which cannot be imported everywhere
DTYPES = (torch.float32, torch.bfloat16)
SAMPLE_ROWS = 8  # of random states, on which a module and its replacement are compared
# Of the largest value: half precision rounds once where the model rounds at each step.
MOST_DIFFERENCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}


@cache
def has_kernels() -> bool:
    """Tell whether there are kernels here: numba can be imported, and the processor is one that they are for."""
    try:
        import boundby.inference.kernels  # noqa: F401
    except (ImportError, OSError):  # OSError: the library of LLVM cannot be loaded
        return False
    return True


def can_attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    """Tell whether the kernels attend with these, `[1, heads, tokens, width]` each."""
    given = (query, key, value)
    return (
        query.device.type == "cpu"
        and len({each.dtype for each in given}) == len({each.shape[-1] for each in given}) == 1
        and query.dtype in DTYPES
        and query.shape[-1] % LANES == 0
        and all(each.stride(-1) == 1 for each in given)
        and has_kernels()
    )


class Norm(nn.Module):
    """A layer norm or, where it is not centred, a root-mean-square norm of the last dimension."""

    def __init__(self, norm: Any, epsilon: float, is_centred: bool) -> None:
        super().__init__()
        self.weight, self.bias = norm.weight, getattr(norm, "bias", None)
        self.epsilon, self.is_centred = epsilon, is_centred

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Return the norm in the dtype of the states."""
        if takes(states, self.weight):
            found: torch.Tensor = torch.ops.boundby.norm(states, self.weight, self.bias, self.epsilon, self.is_centred)
            return found
        if self.is_centred:
            return functional.layer_norm(states, self.weight.shape, self.weight, self.bias, self.epsilon)
        return functional.rms_norm(states, self.weight.shape, self.weight, self.epsilon)


class ResidualNorm(nn.Module):
    """A product, the residual added to it, and a layer norm: how the two halves of a layer of BERT's kin end."""

    def __init__(self, half: Any) -> None:
        super().__init__()
        self.dense, self.norm = half.dense, Norm(half.LayerNorm, half.LayerNorm.eps, True)

    def forward(self, hidden_states: torch.Tensor, input_tensor: torch.Tensor) -> torch.Tensor:
        """Return the norm of the product and the residual, which is the second argument."""
        product: torch.Tensor = self.dense(hidden_states)
        norm = self.norm
        if takes(product, norm.weight) and product.is_contiguous() and product.shape == input_tensor.shape:
            torch.ops.boundby.add_norm_(product, input_tensor, norm.weight, norm.bias, norm.epsilon)
            return product
        summed: torch.Tensor = norm(product + input_tensor)
        return summed


class Gated(nn.Module):
    """Two products, one through an activation, whose product is what the third takes: Llama's and its kin's."""

    def __init__(self, gated: Any) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.act_fn = gated.gate_proj, gated.up_proj, gated.act_fn
        self.down_proj = gated.down_proj

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Return the third product."""
        gate, up = self.act_fn(self.gate_proj(states)), self.up_proj(states)
        take_both = getattr(self.down_proj, "of_product", None)
        found: torch.Tensor = take_both(gate, up) if take_both else self.down_proj(gate.mul_(up))
        return found


ROTATE = "apply_rotary_pos_emb"  # as transformers calls it in the files of its models


def join(model: nn.Module) -> None:
    """Put modules of one pass into a working copy, in place, before its products are converted."""
    for parent in list(model.modules()):
        _turn_in_place(parent)
        for name, child in list(parent.named_children()):
            if any(map(_is_touched, (child, getattr(child, "LayerNorm", child)))):
                continue
            for replacement, width, inputs in _replacements(child):
                if _agree(child, replacement, width, inputs):
                    setattr(parent, name, replacement)


def join_norms(model: nn.Module) -> None:
    """Put torch's root-mean-square norm, one kernel of a GPU, where a working copy writes one as seven, in place."""
    for parent in list(model.modules()):
        for name, norm in list(parent.named_children()):
            weight = getattr(norm, "weight", None)
            if not hasattr(norm, "variance_epsilon") or not isinstance(weight, nn.Parameter) or _is_touched(norm):
                continue
            replacement = TorchNorm(weight, cast(float, norm.variance_epsilon))
            if _agree(norm, replacement, weight.numel(), inputs=1):
                setattr(parent, name, replacement)


class TorchNorm(nn.Module):
    """A root-mean-square norm of the last dimension, by torch's own function."""

    def __init__(self, weight: nn.Parameter, epsilon: float) -> None:
        super().__init__()
        self.weight, self.epsilon = weight, epsilon

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Return the norm in the dtype of the states."""
        return functional.rms_norm(states, self.weight.shape, self.weight, self.epsilon)


def _is_touched(module: nn.Module) -> bool:
    """Tell whether somebody watches a module, or has given it another forward."""
    return bool(module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module))


def _replacements(module: Any) -> Iterator[tuple[nn.Module, int, int]]:
    """Yield what may replace a module, the width of its inputs and how many it takes."""
    weight = getattr(module, "weight", None)
    children = dict(module.named_children())
    if hasattr(module, "variance_epsilon") and isinstance(weight, nn.Parameter):
        yield Norm(module, module.variance_epsilon, is_centred=False), weight.numel(), 1
    elif type(module) is nn.LayerNorm and has_kernels() and isinstance(weight, nn.Parameter):
        yield Norm(module, module.eps, is_centred=True), weight.numel(), 1
    elif {"dense", "LayerNorm"} <= set(children) <= {"dense", "LayerNorm", "dropout"} and has_kernels():
        dense, norm = children["dense"], children["LayerNorm"]
        if type(dense) is nn.Linear and type(norm) is nn.LayerNorm and norm.elementwise_affine:
            yield ResidualNorm(module), dense.in_features, 2
    elif set(children) == {"gate_proj", "up_proj", "down_proj", "act_fn"} and type(module.gate_proj) is nn.Linear:
        yield Gated(module), module.gate_proj.in_features, 1


def _turn_in_place(module: nn.Module) -> None:
    """Have what attends turn its queries and keys in place, where its forward calls a function for it that agrees."""
    forward = type(module).forward
    original = getattr(forward, "__globals__", {}).get(ROTATE)
    if original is None or ROTATE not in forward.__code__.co_names or "forward" in vars(module) or not has_kernels():
        return
    turn = partial(rotated, original)
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(2, 1, 2, SAMPLE_ROWS, 2 * LANES, generator=generator)
    angles = torch.randn(2, 1, SAMPLE_ROWS, 2 * LANES, generator=generator)
    try:
        both = zip(original(*states, *angles), turn(*states, *angles), strict=True)
        agree = all(torch.allclose(expected, found, atol=1e-5) for expected, found in both)
    except (RuntimeError, TypeError, ValueError):
        return
    if agree:
        own = FunctionType(
            forward.__code__,
            {**forward.__globals__, ROTATE: turn},
            forward.__name__,
            forward.__defaults__,
            forward.__closure__,
        )
        own.__kwdefaults__ = forward.__kwdefaults__
        module.forward = MethodType(own, module)


def turn_as_written(model: nn.Module) -> None:
    """Take back the forwards that turn in place: torch's compiler looks for their function in the model's file."""
    for module in model.modules():
        own = vars(module).get("forward")
        if isinstance(own, MethodType) and isinstance(own.__func__.__globals__.get(ROTATE), partial):
            del module.forward


def rotated(
    original: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    query: torch.Tensor,
    key: torch.Tensor,
    cosine: torch.Tensor,
    sine: torch.Tensor,
    *others: Any,
    **named: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return queries and keys turned in place by a rotary embedding; by the `original` where the kernel cannot."""
    can = (
        not others
        and named in ({}, {"unsqueeze_dim": 1})
        and cosine.dim() == 3
        and len(cosine) == 1
        and takes(cosine, cosine[0, 0])
    )
    for each in (query, key):
        fits = each.dim() == 4 and each.shape[::2] == cosine.shape[:2] and each.shape[-1] == cosine.shape[-1]
        can = (
            can
            and fits
            and each.stride(-1) == 1
            and 0 not in each.stride()
            and each.shape[-1] % (2 * LANES) == 0
            and each.dtype in DTYPES
        )
    if not can:
        return original(query, key, cosine, sine, *others, **named)
    for each in (query, key):
        torch.ops.boundby.rotate_(each, cosine, sine)
    return query, key


def _agree(module: nn.Module, replacement: nn.Module, width: int, inputs: int) -> bool:
    """Tell whether both give the same of random states; a second input has the width of the result."""
    some = next(module.parameters())
    generator = torch.Generator().manual_seed(0)

    def states(width: int) -> torch.Tensor:
        return torch.randn(1, SAMPLE_ROWS, width, generator=generator).to(some.device, some.dtype)

    given = [states(width)]
    if inputs == 2:
        given.append(states(replacement.norm.weight.numel()))  # type: ignore[union-attr, operator]
    try:
        with torch.inference_mode():
            expected, found = module(*given).float(), replacement(*given).float()
    except (RuntimeError, TypeError) as error:
        raise_if_lost(error)
        return False
    most = MOST_DIFFERENCE.get(some.dtype, 0.0) * float(expected.abs().max())
    return bool((found - expected).abs().max() <= most)


def takes(states: torch.Tensor, weight: torch.Tensor) -> bool:
    """Tell whether the kernels norm or round these states, with a weight for each value of a row."""
    return (
        states.device.type == "cpu"
        and states.dtype in DTYPES
        and weight.dtype in DTYPES
        and weight.shape == states.shape[-1:]
        and weight.is_contiguous()
        and weight.numel() % LANES == 0
        and not torch.compiler.is_compiling()  # whose compiler joins what it sees
        and has_kernels()
    )
