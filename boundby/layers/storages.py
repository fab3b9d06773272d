"""What memory parameters and buffers lie in, with tied weights counted once."""

from collections.abc import Iterable, Sequence

import torch
from torch import nn

from boundby.layers.records import Storage


class Storages:
    """Names each piece of memory after the first parameter or buffer in it."""

    def __init__(self, model: nn.Module) -> None:
        self._keys: dict[object, str] = {}
        for name, tensor in (*model.named_parameters(remove_duplicate=False), *_buffers(model)):
            self._keys.setdefault(_place(tensor), name)

    def of(self, module: nn.Module) -> tuple[Storage, ...]:
        """Return the storages of the module's own parameters and buffers, each once."""
        own = [(tensor, True) for tensor in module._parameters.values() if tensor is not None]
        own += [(tensor, False) for tensor in module._buffers.values() if tensor is not None]
        found = {
            _place(tensor): Storage(self._keys[_place(tensor)], tensor.numel() * tensor.element_size(), is_parameter)
            for tensor, is_parameter in reversed(own)
        }
        return tuple(reversed(found.values()))


def count_parameters(module: nn.Module) -> int:
    """Return the number of parameters of the module and everything inside, tied ones once."""
    return sum(tensor.numel() for tensor in {_place(each): each for each in module.parameters()}.values())


def dtype_of(model: nn.Module) -> str:
    """Return the dtype that most bytes of parameters have, "float32" style; torch's default without parameters."""
    sizes: dict[torch.dtype, int] = {}
    for each in model.parameters():
        sizes[each.dtype] = sizes.get(each.dtype, 0) + each.numel() * each.element_size()
    dtype = max(sizes, key=lambda each: sizes[each]) if sizes else torch.get_default_dtype()
    return str(dtype).removeprefix("torch.")


def devices_of(modules: Iterable[nn.Module]) -> set[torch.device]:
    """Return the devices that parameters and buffers of the modules lie on."""
    return {tensor.device for module in modules for tensor in (*module.parameters(), *module.buffers())}


def _buffers(model: nn.Module) -> Sequence[tuple[str, torch.Tensor]]:
    return list(model.named_buffers(remove_duplicate=False))


def _place(tensor: torch.Tensor) -> object:
    """Return what names the memory of a tensor; views of one storage that start elsewhere have places of their own."""
    try:
        address = tensor.data_ptr()
    except RuntimeError:  # a subclass that has no memory of its own
        address = 0
    return (tensor.device, address) if address else id(tensor)
