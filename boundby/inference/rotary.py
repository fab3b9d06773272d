"""Rotary positions whose frequencies follow from the longest text of a forward: which texts may share one.

With `longrope` and `dynamic` scaling the longest text sets the frequencies of all, and `dynamic` keeps those of the
longest so far. Texts share a forward only where each has the same frequencies alone, and what earlier texts left is
reset before it. A copy of the module is asked which frequencies a length has.
"""

import copy
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

FREQUENCIES, ORIGINAL, LONGEST = "inv_freq", "original_inv_freq", "max_seq_len_cached"  # ends of transformers' names
SHORT, FAR = 2, 2**30  # tokens: fewer have no frequencies to show, and no model is made for so many
BY_LENGTH = ("dynamic", "longrope")  # kinds that depend on the length, where a module cannot be asked


class Rotary:
    """The rotary positions of a model whose frequencies depend on the length of its texts; false where none do."""

    def __init__(self, model: Any) -> None:
        modules = model.modules() if isinstance(model, nn.Module) else ()
        turning = (_Turning(module) for module in modules if _has_frequencies(module))
        self._modules = [candidate for candidate in turning if candidate.depends_on_length]
        self._known: dict[int, tuple[bytes, ...]] = {}

    def __bool__(self) -> bool:
        """Tell whether the frequencies of any module depend on the length."""
        return bool(self._modules)

    def forget(self) -> None:
        """Take back what earlier texts have left in the model: the next forward is that of a fresh one."""
        for turning in self._modules:
            _forget(turning.module)

    def are_same(self, length: int, other: int) -> bool:
        """Tell whether texts of these numbers of tokens have the same frequencies alone."""
        return self._frequencies(length) == self._frequencies(other)

    def groups(self, lengths: Sequence[int] | np.ndarray) -> list[np.ndarray]:
        """Return the rows of texts that may share a forward, ascending; the group of the longest texts comes first."""
        array = np.asarray(lengths)
        if not self or not len(array):
            return [np.arange(len(array))]
        distinct, where = np.unique(array, return_inverse=True)
        frequencies = self._of_ascending(distinct.tolist())
        begins = [1 if before != after else 0 for before, after in zip(frequencies, frequencies[1:], strict=False)]
        group = np.cumsum([0, *begins])[where]
        order = np.argsort(-group, kind="stable")
        return np.split(order, np.flatnonzero(np.diff(group[order])) + 1)

    def _of_ascending(self, lengths: Sequence[int]) -> list[tuple[bytes, ...]]:
        """Return the frequencies of each length; what both ends of a range have, all between them have."""
        first, last = self._frequencies(lengths[0]), self._frequencies(lengths[-1])
        if first == last or len(lengths) <= 2:
            return [*[first] * (len(lengths) - 1), last]
        middle = len(lengths) // 2
        return [*self._of_ascending(lengths[:middle]), *self._of_ascending(lengths[middle:])]

    def _frequencies(self, length: int) -> tuple[bytes, ...]:
        if length not in self._known:
            self._known[length] = tuple(turning.frequencies(length) for turning in self._modules)
        return self._known[length]


_rotary: weakref.WeakKeyDictionary[nn.Module, Rotary] = weakref.WeakKeyDictionary()


def rotary_of(model: Any) -> Rotary:
    """Return the rotary positions of a model, looked for once."""
    if not isinstance(model, nn.Module):
        return Rotary(None)
    if model not in _rotary:
        _rotary[model] = Rotary(model)
    return _rotary[model]


class _Turning:
    """A module that gives rotary positions, and a copy of it on the host that is asked."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._copy: Any = copy.copy(module)
        with torch.inference_mode(False):  # else transformers could not write into them
            buffers = {name: buffer.detach().cpu().clone() for name, buffer in module.named_buffers(recurse=False)}
        vars(self._copy)["_buffers"] = buffers
        kinds = getattr(module, "rope_type", None)
        self._layer_types = tuple(kinds) if isinstance(kinds, dict) and kinds else (None,)
        self._is_named = any(kind in str(kinds) for kind in BY_LENGTH)

    @property
    def depends_on_length(self) -> bool:
        return self.frequencies(SHORT) != self.frequencies(FAR)

    def frequencies(self, length: int) -> bytes:
        """Return the rotation of the second token of a text of so many tokens, in a fresh module.

        A module that cannot be asked is judged by its name: each length then differs.
        """
        _forget(self._copy)
        positions, states = torch.tensor([[0, 1, max(SHORT, length) - 1]]), torch.zeros(1)
        turned = []
        try:
            with torch.inference_mode(False), torch.no_grad():
                for layer_type in self._layer_types:
                    more = () if layer_type is None else (layer_type,)
                    answer = type(self._copy).forward(self._copy, states, positions, *more)
                    turned += [answer] if isinstance(answer, torch.Tensor) else list(answer)
            seconds = [part[..., 1, :].contiguous().view(torch.uint8) for part in turned]
            return b"".join(second.numpy().tobytes() for second in seconds)
        except Exception:  # modules of a repository may ask for anything
            return str(length).encode() if self._is_named else b""


def _has_frequencies(module: nn.Module) -> bool:
    return any(name.endswith(FREQUENCIES) for name in (*vars(module), *module._buffers))


def _forget(module: Any) -> None:
    """Give a module its first frequencies again, as transformers does itself after some lengths."""
    first = getattr(module, "original_max_seq_len", None)
    for name, longest in list(vars(module).items()):
        if name.endswith(LONGEST) and first is not None and longest != first:
            prefix = name.removesuffix(LONGEST)
            original = getattr(module, f"{prefix}{ORIGINAL}")
            setattr(module, f"{prefix}{FREQUENCIES}", original.to(getattr(module, f"{prefix}{FREQUENCIES}").device))
            setattr(module, name, first)
