"""A tensor whose values are elsewhere: it has shape, dtype and device, and whatever is computed from it is absent too.

With it a model's own forward can run where most of its weights are not. Nothing is ever made up: code that needs the
values themselves gets an error that says whose they are.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map


class CutError(ValueError):
    """The model cannot be run in these stages with equal outputs."""


class Absent(torch.Tensor):
    """Stands for a tensor that another stage has; `origin` says which one."""

    origin: str

    @staticmethod
    def __new__(
        cls, size: Sequence[int], dtype: torch.dtype, device: str, origin: str, strides: Sequence[int] | None = None
    ) -> "Absent":
        """Return a tensor without memory."""
        made = torch.Tensor._make_wrapper_subclass(cls, size, strides=strides, dtype=dtype, device=torch.device(device))
        made.origin = origin
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = dict(kwargs or {})
        first = next(each for each in tree_leaves((args, named)) if isinstance(each, Absent))
        _refuse_to_spoil(func, args, named, first)
        device = str(named.get("device") or first.device)
        if "device" in named:
            named["device"] = torch.device("meta")
        try:
            result = func(*tree_map(_meta, args), **tree_map(_meta, named))
        except Exception as error:
            raise CutError(f"{func} needs values of {first.origin}, which are in another stage") from error

        def absent(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            return Absent(value.shape, value.dtype, device, first.origin, value.stride())

        return tree_map(absent, result)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return Absent, (tuple(self.shape), self.dtype, str(self.device), self.origin, self.stride())

    def __repr__(self, **kwargs: Any) -> str:
        return f"Absent({tuple(self.shape)}, {self.dtype}, {self.origin})"


def absent_like(tensor: torch.Tensor, device: str, origin: str) -> Absent:
    """Return an absent tensor of the same shape, dtype and strides on a device."""
    return Absent(tuple(tensor.shape), tensor.dtype, device, origin, tensor.stride())


def _meta(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")


def _refuse_to_spoil(func: Any, args: Sequence[Any], named: Mapping[str, Any], first: Absent) -> None:
    """Raise where an operator would write absent values into a tensor that is here."""
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        written = args[place] if place < len(args) else named.get(argument.name)
        if any(isinstance(each, torch.Tensor) and not isinstance(each, Absent) for each in tree_leaves(written)):
            raise CutError(f"{func} writes values of {first.origin}, which are in another stage, into a tensor")
