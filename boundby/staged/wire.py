"""Messages between processes: a line of JSON and the bytes of tensors. Nothing that is received can run code.

A tensor that stands in a message twice (a unit that returns what it is given) is sent once.
"""

import json
import socket
import struct
from collections.abc import Iterator, Sequence
from typing import Any

import torch

LENGTH = struct.Struct(">Q")
DTYPES = {
    str(each): each
    for each in vars(torch).values()
    if isinstance(each, torch.dtype) and not each.is_complex and "q" not in str(each)
}
Message = tuple[dict[str, Any], list[torch.Tensor]]


def send(target: socket.socket, header: dict[str, Any], tensors: Sequence[torch.Tensor] = ()) -> int:
    """Send a message and return the bytes of its tensors. Raises ValueError for a tensor that has no plain bytes."""
    described: list[Any] = []
    views: list[memoryview] = []
    places: dict[Any, int] = {}
    for tensor in tensors:
        key = (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())
        if key in places:
            described.append(places[key])
            continue
        places[key] = len(described)
        order, plain = _laid_out(tensor)
        described.append({"dtype": str(tensor.dtype), "shape": list(plain.shape), "order": order})
        views.append(_bytes(plain))
    line = json.dumps({**header, "tensors": described}).encode()
    target.sendall(LENGTH.pack(len(line)) + line)
    for view in views:
        target.sendall(view)
    return sum(view.nbytes for view in views)


def receive(source: socket.socket) -> Message:
    """Return the next message. Raises EOFError where the other side is gone."""
    (length,) = LENGTH.unpack(_exactly(source, bytearray(LENGTH.size)))
    header = json.loads(bytes(_exactly(source, bytearray(length))))
    tensors: list[torch.Tensor] = []
    for each in header.pop("tensors"):
        if isinstance(each, int):
            tensors.append(tensors[each])
            continue
        plain = torch.empty(each["shape"], dtype=DTYPES[each["dtype"]])
        _exactly(source, _bytes(plain))
        tensors.append(plain.permute(sorted(range(plain.dim()), key=each["order"].__getitem__)))
    return header, tensors


def _laid_out(tensor: torch.Tensor) -> tuple[list[int], torch.Tensor]:
    """Return an order of the dimensions, and the tensor in that order without gaps: channels last stay last."""
    if str(tensor.dtype) not in DTYPES or tensor.layout != torch.strided:
        raise ValueError(f"a tensor of {tensor.dtype} ({tensor.layout}) cannot be sent")
    order = sorted(range(tensor.dim()), key=lambda place: -tensor.stride(place))
    if not tensor.permute(order).is_contiguous():
        order = list(range(tensor.dim()))
    return order, tensor.detach().permute(order).contiguous().cpu()


def _bytes(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.view(-1).view(torch.uint8).numpy())


def _exactly(source: socket.socket, buffer: bytearray | memoryview) -> bytearray | memoryview:
    """Fill the buffer and return it."""
    for rest in _rests(memoryview(buffer), source):
        if not rest:
            raise EOFError("the other side has closed the connection")
    return buffer


def _rests(view: memoryview, source: socket.socket) -> Iterator[int]:
    filled = 0
    while filled < view.nbytes:
        count = source.recv_into(view[filled:])
        filled += count
        yield count
