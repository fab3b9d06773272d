"""Tensors on "cuda:0" whose numbers lie in main memory: every operator on them is a launch of the machine.

A wrapper subclass, as torch's own FakeTensor is one, over a CPU tensor. Two things make it a device: a guard for the
device type, eight lines of C++ that `guard()` compiles, and a fallback for factories at the CUDA dispatch key.
Arithmetic beyond `MOST_FLOPS` is done in part: the first rows are right, the rest are zeros.
"""

import ctypes
import functools
import math
import os
import subprocess
import sysconfig
import tempfile
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch._C import DispatchKey
from torch._library.custom_ops import OPDEFS
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from .machine import Machine

aten = torch.ops.aten
MOST_FLOPS = 4e8
MOST_BYTES = 64 * 2**20  # of operators without a product: larger ones are not computed at all
GUARD = """
#include <c10/core/impl/DeviceGuardImplInterface.h>
C10_REGISTER_GUARD_IMPL(CUDA, c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA>)
"""
# Operators that stay whole though torch composes them of others: one launch on a card, or none.
WHOLE = {
    aten.linear.default, aten.reshape.default, aten.contiguous.default, aten.to.dtype, aten.matmul.default,
    aten.flatten.using_ints, aten.dropout.default, aten.type_as.default, aten.unflatten.int, aten.expand_as.default,
    aten.narrow.default, aten.chunk.default, aten.split.Tensor, aten.unsafe_chunk.default, aten.swapaxes.default,
    aten.movedim.int, aten.select.int, aten.view_as.default, aten.squeeze.dim, aten.tile.default,
}  # fmt: skip
READS = {aten._local_scalar_dense.default, aten.item.default, aten.is_nonzero.default, aten.equal.default}
READS_AND_RUNS = {
    aten.nonzero.default,
    aten.masked_select.default,
    aten._unique2.default,
    aten.repeat_interleave.Tensor,
}
FREE = {
    aten.empty.memory_format, aten.empty_strided.default, aten.empty_like.default, aten.new_empty.default,
    aten.new_empty_strided.default, aten.lift_fresh.default, aten.detach.default, aten.detach_.default,
    aten.resize_.default, aten.set_.source_Storage, aten.alias.default, aten.is_pinned.default,
    aten.requires_grad_.default, aten.record_stream.default,
}  # fmt: skip
HALF = (torch.bfloat16, torch.float16)
ON_HOST = [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]  # whatever is switched off for the card

machine: Machine | None = None  # the one that is plugged in
_kept: list[torch.library.Library] = []


class CardTensor(torch.Tensor):
    """A tensor on the card: `raw` is the CPU tensor behind it, `block` what it took of the card's memory."""

    raw: torch.Tensor
    block: "Block"

    @staticmethod
    def __new__(cls, raw: torch.Tensor, block: "Block | None" = None) -> "CardTensor":
        made = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, raw.shape, strides=raw.stride(), storage_offset=raw.storage_offset(), dtype=raw.dtype,
            device="cuda:0", requires_grad=raw.requires_grad,
        )  # fmt: skip
        made.raw = raw.detach() if raw.requires_grad else raw  # what it computes is not recorded twice
        made.block = block or Block(raw.untyped_storage().nbytes())
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"{self.raw!r}, on the stand-in card"

    def __reduce_ex__(self, protocol: Any) -> Any:
        return (_from_host, (self.raw,))

    def __deepcopy__(self, memo: dict[int, Any]) -> "CardTensor":
        copied = CardTensor(self.raw.detach().clone().requires_grad_(self.requires_grad))
        if isinstance(self, torch.nn.Parameter):
            copied = torch.nn.Parameter(copied, self.requires_grad)  # type: ignore[assignment]
        memo[id(self)] = copied
        return copied

    def untyped_storage(self) -> Any:
        return self.raw.untyped_storage()

    def data_ptr(self) -> int:
        return self.raw.data_ptr()

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        if not force:
            raise TypeError(
                "can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() to copy the tensor first."
            )
        return self.cpu().numpy()

    def pin_memory(self, device: Any = None) -> torch.Tensor:
        raise RuntimeError("cannot pin 'torch.cuda.FloatTensor' only dense CPU tensors can be pinned")

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(func, args, kwargs or {})


class Block:
    """Bytes of the card's memory, given back when the last tensor over them is gone."""

    __slots__ = ("__weakref__",)

    def __init__(self, size: int) -> None:
        assert machine is not None
        weakref.finalize(self, _give_back, machine, machine.allocate(size))


def _give_back(of: Machine, size: int) -> None:
    of.free(size)


def _from_host(raw: torch.Tensor) -> CardTensor:
    return CardTensor(raw)


def guard() -> None:
    """Tell torch that the device type "cuda" can be current, which a CPU build refuses."""
    folder = Path(tempfile.gettempdir()) / f"boundby-card-{os.getuid()}-{torch.__version__}"
    library = folder / "guard.so"
    if not library.exists():
        folder.mkdir(mode=0o700, exist_ok=True)
        if folder.stat().st_uid != os.getuid():
            raise RuntimeError(f"{folder} belongs to another user")
        root = Path(torch.__file__).parent
        made = folder / f"guard-{os.getpid()}.so"
        compiler = os.environ.get("CXX") or sysconfig.get_config_var("CXX") or "g++"
        command = [*compiler.split(), "-std=c++20", "-shared", "-fPIC", "-O0", "-x", "c++", "-", "-o", str(made)]
        command += [f"-I{root / 'include'}", f"-L{root / 'lib'}", "-lc10"]
        subprocess.run(command, input=GUARD, text=True, check=True, capture_output=True)
        made.replace(library)
    ctypes.CDLL(str(library))


@functools.cache
def register() -> torch.library.Library:
    """Send factories of the device to `run`, for as long as the process lives."""
    guard()
    library = torch.library.Library("_", "IMPL")
    library.fallback(_factory, "CUDA")
    explicit = torch.library.Library("aten", "IMPL")  # a fallback comes after what is composed for all backends
    for name in ("copy_", "_to_copy"):
        explicit.impl(name, functools.partial(_factory, getattr(aten, name).default), "CUDA")
    _kept.append(explicit)
    _show_as_plain()
    _compose_attention(aten.scaled_dot_product_attention.default)
    return library


def _compose_attention(overload: Any) -> None:
    """Compose attention as torch does on a card, however it is asked to: a CPU build knows no kernels for one."""
    in_parts = overload._op_dk

    def composed(key: DispatchKey, query: Any, *args: Any, **kwargs: Any) -> Any:
        if key == DispatchKey.CompositeImplicitAutograd and isinstance(query, CardTensor):
            return attend(query, *args, **kwargs)
        return in_parts(key, query, *args, **kwargs)

    overload._op_dk = composed


def _show_as_plain() -> None:
    """Let the program's own modes take tensors of the card for plain ones, as those of a real card are."""

    def wrap(mode: type) -> None:
        dispatch = mode.__dict__.get("__torch_dispatch__")
        if dispatch is None or not mode.__module__.startswith("boundby."):
            return

        def seen(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return dispatch(self, func, [torch.Tensor if kind is CardTensor else kind for kind in types], args, kwargs)

        mode.__torch_dispatch__ = seen  # type: ignore[attr-defined]

    def of_new(mode: type, **_: Any) -> None:
        wrap(mode)

    for mode in TorchDispatchMode.__subclasses__():
        wrap(mode)
    TorchDispatchMode.__init_subclass__ = classmethod(of_new)  # type: ignore[assignment]


def _factory(func: Any, *args: Any, **kwargs: Any) -> Any:
    if machine is None:
        raise AssertionError("Torch not compiled with CUDA enabled")
    return run(func, args, kwargs)


def run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator: on the host for its numbers, on the machine for its time."""
    # All tensors are normal ones: a view of a normal tensor cannot be one of inference mode.
    with torch._C._InferenceMode(False):
        return _ran(func, args, kwargs)


def _ran(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    assert machine is not None
    if _only_views(func):
        base = args[0]
        out = func(*[value.raw if type(value) is CardTensor else _raw(value) for value in args], **kwargs)
        if isinstance(out, torch.Tensor):
            return CardTensor(out, base.block)
        return type(out)(CardTensor(part, base.block) for part in out)
    if func is aten._to_copy.default:
        return _copied(args[0], kwargs)
    if func is aten.copy_.default and isinstance(args[1], CardTensor) != isinstance(args[0], CardTensor):
        return _copied_into(args[0], args[1], bool(args[2] if len(args) > 2 else kwargs.get("non_blocking")))
    special = SPECIAL.get(func)
    if special is not None:
        return special(*args, **kwargs)
    if func.namespace not in ("aten", "prims"):  # written in Python with torch.library: what it calls is launched
        defined = OPDEFS.get(func._schema.name)
        if defined is not None:
            return defined._backend_fns.get("cuda", defined._init_fn)(*args, **kwargs)
    if func not in WHOLE and _is_composed(func):
        return func.decompose(*args, **kwargs)
    _refuse_mixed(func, args, kwargs)
    if func in READS or func in READS_AND_RUNS:
        machine.host_read()
    raw_args = _raw(args)
    raw_kwargs = {name: _raw(value) for name, value in kwargs.items()} if kwargs else {}
    if "device" in raw_kwargs:
        raw_kwargs["device"] = "cpu"
    raw_kwargs.pop("pin_memory", None)
    flops, size = _work(func, args)
    out = _computed(func, raw_args, raw_kwargs, flops, size)
    if func in READS:
        return out
    if _writes(func):
        machine.launch(_name(func), seconds_of(func, flops, size, args), _again(func, raw_args, raw_kwargs, None))
        target = kwargs.get("out", args[0] if args else None)
        if "out" in kwargs and isinstance(target, CardTensor) and target.shape != target.raw.shape:
            target.resize_(target.raw.shape)
        return target if not isinstance(target, (list, tuple)) else None
    if isinstance(out, torch.Tensor):
        return _single(func, args, raw_args, raw_kwargs, out, flops, size)
    made = tree_map_only(torch.Tensor, lambda tensor: _wrapped(tensor, args), out)
    if not _is_view(func):
        outputs = [tensor for tensor in tree_leaves(out) if isinstance(tensor, torch.Tensor)]
        size += sum(tensor.nbytes for tensor in outputs)
        machine.launch(_name(func), seconds_of(func, flops, size, args), _again(func, raw_args, raw_kwargs, outputs))
    return made


def _single(
    func: Any, args: Any, raw_args: Any, raw_kwargs: Any, out: torch.Tensor, flops: float, size: float
) -> CardTensor:
    assert machine is not None
    for given in args:
        if isinstance(given, CardTensor):
            if out is given.raw:
                return given
            if _is_view(func) and _same_storage(given.raw, out):
                return _view(given, out)
    made = CardTensor(out)
    if func not in FREE:
        size += out.nbytes
        again = _again(func, raw_args, raw_kwargs, [out])
        machine.launch(_name(func), seconds_of(func, flops, size, args), again)
    return made


def _view(base: CardTensor, out: torch.Tensor) -> CardTensor:
    return CardTensor(out, base.block)


def _wrapped(tensor: torch.Tensor, args: Any) -> CardTensor:
    for given in args:
        if isinstance(given, CardTensor) and _same_storage(given.raw, tensor):
            return CardTensor(tensor, given.block)
    return CardTensor(tensor)


def _same_storage(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.untyped_storage()._cdata == other.untyped_storage()._cdata


def _raw(value: Any) -> Any:
    if isinstance(value, CardTensor):
        return value.raw
    if isinstance(value, (list, tuple)):
        return type(value)(map(_raw, value))
    if isinstance(value, torch.device):
        return torch.device("cpu")
    return value


@functools.cache
def _only_views(func: Any) -> bool:
    """Tell whether an operator never computes: its result shares memory with its first argument, whatever it is."""
    returns = func._schema.returns
    shares = len(returns) == 1 and returns[0].alias_info is not None and not returns[0].alias_info.is_write
    return shares and func.namespace == "aten" and not _is_composed(func) and func not in FREE | {aten._to_copy.default}


@functools.cache
def _is_composed(func: Any) -> bool:
    return bool(func._can_decompose())


@functools.cache
def _writes(func: Any) -> bool:
    arguments = func._schema.arguments
    return any(argument.alias_info is not None and argument.alias_info.is_write for argument in arguments)


@functools.cache
def _is_view(func: Any) -> bool:
    return any(result.alias_info is not None for result in func._schema.returns) or func in WHOLE


@functools.cache
def _name(func: Any) -> str:
    return str(func._schema.name).removeprefix("aten::")


def _refuse_mixed(func: Any, args: Any, kwargs: Any) -> None:
    """Raise as torch does where a tensor of the host, but for a single number, meets one of the card."""
    for given in args:
        if type(given) is torch.Tensor and given.dim() > 0 and func is not aten.index.Tensor:
            raise RuntimeError(
                "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu! "
                f"(when checking arguments of {func._schema.name})"
            )


def _work(func: Any, args: Any) -> tuple[float, float]:
    """Return the arithmetic of an operator, and the bytes it reads."""
    size = 0.0
    for given in args:
        if isinstance(given, CardTensor):
            size += given.numel() * given.element_size()
        elif isinstance(given, (list, tuple)):
            size += sum(part.numel() * part.element_size() for part in given if isinstance(part, CardTensor))
    if func is aten.linear.default:
        return 2.0 * args[0].numel() * args[1].shape[0], size
    if func in (aten.mm.default, aten.bmm.default, aten.matmul.default, aten.mm.out, aten.bmm.out):
        return 2.0 * args[0].numel() * args[1].shape[-1], size
    if func in (aten.addmm.default, aten.baddbmm.default):
        return 2.0 * args[1].numel() * args[2].shape[-1], size
    if func in (aten.embedding.default, aten.index.Tensor, aten.gather.default):
        size = float(args[1].nbytes) if isinstance(args[1], CardTensor) else 0.0
    return 0.0, size


def seconds_of(func: Any, flops: float, size: float, args: Any) -> float:
    """Return how long the card takes: the longer of arithmetic and traffic, by the dtype and TF32 as they are set."""
    assert machine is not None
    card = machine.card
    rate = card.float32_flops_per_s
    if flops:
        dtype = next((given.dtype for given in args if isinstance(given, CardTensor)), torch.float32)
        if dtype == torch.bfloat16:
            rate = card.half_flops_per_s if card.has_bfloat16 else card.float32_flops_per_s / 2
        elif dtype == torch.float16:
            rate = card.half_flops_per_s
        elif dtype == torch.float64:
            rate = card.float32_flops_per_s / 2
        elif has_tf32():
            rate = card.tf32_flops_per_s
    return card.kernel_s + max(flops / rate, size / card.bytes_per_s)


def has_tf32() -> bool:
    """Tell whether products of float32 are rounded to TF32."""
    try:
        return torch.get_float32_matmul_precision() != "highest"
    except RuntimeError:
        return bool(torch.backends.cuda.matmul.fp32_precision == "tf32")


def _computed(func: Any, args: Any, kwargs: Any, flops: float, size: float) -> Any:
    if flops > MOST_FLOPS:
        return _first_rows(func, args, kwargs, flops)
    if size > MOST_BYTES and not flops:
        if _writes(func):
            return kwargs.get("out", args[0])
        if not _is_view(func):
            on_meta = [tree_map_only(torch.Tensor, lambda tensor: tensor.to("meta"), given) for given in (args, kwargs)]
            out = func(*on_meta[0], **on_meta[1])
            return tree_map_only(torch.Tensor, lambda tensor: torch.zeros(tensor.shape, dtype=tensor.dtype), out)
    return func(*args, **kwargs)


def _first_rows(func: Any, args: Any, kwargs: Any, flops: float) -> torch.Tensor:
    """Return a product of which only so many rows are computed as the host has time for."""
    left, right = (args[1], args[2]) if func in (aten.addmm.default, aten.baddbmm.default) else args[:2]
    is_linear = func is aten.linear.default
    columns = right.shape[0] if is_linear else right.shape[-1]
    target = kwargs.get("out")
    out = target if target is not None else torch.zeros((*left.shape[:-1], columns), dtype=left.dtype)
    if left.dim() == 2 or is_linear:
        flat, flat_out = left.reshape(-1, left.shape[-1]), out.view(-1, columns)
        rows = max(1, int(len(flat) * MOST_FLOPS / flops) // 8)
        factor = right.t() if is_linear else right
        flat_out[:rows] = flat[:rows] @ factor
    return out


def _again(func: Any, args: Any, kwargs: Any, out: list[torch.Tensor] | None) -> Callable[[], None] | None:
    """Return the same arithmetic into the same memory, for the replay of a graph; None where none is captured."""
    assert machine is not None
    if machine.capture is None:
        return None

    def again() -> None:
        with torch._C._InferenceMode(False), torch.no_grad():
            made = func(*args, **kwargs)
            if out is None:
                return
            for old, new in zip(out, [x for x in tree_leaves(made) if isinstance(x, torch.Tensor)], strict=True):
                if old.shape == new.shape:
                    old.copy_(new)

    return again


def _copied(source: torch.Tensor, kwargs: dict[str, Any]) -> torch.Tensor:
    """Return a copy of a tensor: between host and card, or on the card."""
    assert machine is not None
    device = torch.device(kwargs["device"]) if kwargs.get("device") is not None else source.device
    rest = {
        name: value for name, value in kwargs.items() if name not in ("device", "non_blocking", "pin_memory", "layout")
    }
    raw = source.raw if isinstance(source, CardTensor) else source
    out = aten._to_copy.default(raw, **rest)
    is_async = bool(kwargs.get("non_blocking"))
    if isinstance(source, CardTensor) and device.type == "cpu":
        machine.copy("Memcpy DtoH", out.nbytes, is_pinned=False, is_async=False, to_host=True)
        return out
    if not out.nbytes:
        return CardTensor(out)
    if isinstance(source, CardTensor):
        size = float(raw.nbytes + out.nbytes)
        again = _again(aten._to_copy.default, (raw,), rest, [out])
        machine.launch("copy", seconds_of(None, 0.0, size, ()), again)
    else:
        machine.copy("Memcpy HtoD", out.nbytes, is_pinned=is_pinned(source), is_async=is_async)
    return CardTensor(out)


def _copied_into(target: torch.Tensor, source: torch.Tensor, is_async: bool) -> torch.Tensor:
    assert machine is not None
    to_host = isinstance(source, CardTensor)
    _raw(target).copy_(_raw(source))
    name = "Memcpy DtoH" if to_host else "Memcpy HtoD"
    pinned = is_pinned(target if to_host else source)
    if target.nbytes:
        machine.copy(name, target.nbytes, is_pinned=pinned, is_async=is_async, to_host=to_host)
    return target


def pin(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of a host tensor in memory that the card reads by itself."""
    copied = tensor.clone()
    copied._is_pinned_for_card = True  # type: ignore[attr-defined]
    return copied


def is_pinned(tensor: torch.Tensor) -> bool:
    """Tell whether `pin` made this tensor."""
    return getattr(tensor, "_is_pinned_for_card", False)


# Attention


def backend_of(query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None) -> str:
    """Return which kernel torch takes, by what is switched on and what each can: flash, efficient, cudnn or math."""
    assert machine is not None
    backends = torch.backends.cuda
    is_half, head = query.dtype in HALF, query.shape[-1]
    can = {
        "cudnn": backends.cudnn_sdp_enabled() and is_half and machine.card.capability[0] == 9 and head <= 128,
        "flash": backends.flash_sdp_enabled() and is_half and machine.card.has_flash and mask is None and head <= 256,
        "efficient": backends.mem_efficient_sdp_enabled() and query.dtype in (*HALF, torch.float32),
        "math": backends.math_sdp_enabled(),
    }
    if query.dtype == torch.bfloat16 and not machine.card.has_bfloat16:
        can["efficient"] = False
    chosen = next((name for name, is_able in can.items() if is_able), None)
    if chosen is None:
        raise RuntimeError("No available kernel. Aborting execution.")
    return chosen


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0, is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False,
) -> torch.Tensor:  # fmt: skip
    """Return attention by the operator that torch would choose on the card; elsewhere as torch composes it."""
    backend = backend_of(query, key, attn_mask)
    if backend == "flash":
        chosen = aten._scaled_dot_product_flash_attention
        return chosen(query, key, value, dropout_p, is_causal, scale=scale)[0]  # type: ignore[no-any-return]
    if backend == "math":
        weights = (query @ _grouped(key, query).transpose(-2, -1)) * (scale or 1 / math.sqrt(query.shape[-1]))
        if is_causal:
            length, width = weights.shape[-2:]
            attn_mask = torch.ones(length, width, dtype=torch.bool, device=query.device).tril()
        if attn_mask is not None:
            is_bool = attn_mask.dtype == torch.bool
            weights = weights.masked_fill(attn_mask.logical_not(), -torch.inf) if is_bool else weights + attn_mask
        return weights.softmax(-1) @ _grouped(value, query)
    if backend == "cudnn":
        cudnn = aten._scaled_dot_product_cudnn_attention
        out = cudnn(query, key, value, attn_mask, False, dropout_p, is_causal, scale=scale)
    else:
        key, value = _grouped(key, query), _grouped(value, query)
        efficient = aten._scaled_dot_product_efficient_attention
        if attn_mask is not None and attn_mask.shape[-1] % 8:
            attn_mask = torch.nn.functional.pad(attn_mask, (0, 8 - attn_mask.shape[-1] % 8))[..., : attn_mask.shape[-1]]
        out = efficient(query, key, value, attn_mask, False, dropout_p, is_causal, scale=scale)
    return out[0]  # type: ignore[no-any-return]


def _grouped(keys: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    groups = query.shape[-3] // keys.shape[-3]
    return keys.repeat_interleave(groups, -3) if groups > 1 else keys


def _fused(name: str, outputs: int) -> Callable[..., Any]:
    def attention(query: Any, key: Any, value: Any, *rest: Any, scale: float | None = None) -> Any:
        assert machine is not None
        has_mask = name != "flash"
        mask = rest[0] if has_mask and rest else None
        is_causal = bool(rest[3 if has_mask else 1]) if len(rest) > (3 if has_mask else 1) else False
        raw = [_raw(tensor) for tensor in (query, key, value)]

        def compute() -> torch.Tensor:
            with torch._C._InferenceMode(False), torch.no_grad(), sdpa_kernel(ON_HOST):
                return torch.nn.functional.scaled_dot_product_attention(
                    *raw, attn_mask=_raw(mask), is_causal=is_causal, scale=scale,
                    enable_gqa=raw[0].shape[-3] != raw[1].shape[-3],
                )  # fmt: skip

        out = compute()
        _launch_attention(name, out, compute, 4.0 * raw[0].numel() * raw[1].shape[-2], raw)
        empty = CardTensor(torch.zeros(0))
        lengths = (query.shape[-2], key.shape[-2])
        return (CardTensor(out), empty, *((empty, empty, *lengths) if outputs == 9 else ()), empty, empty, empty)[
            :outputs
        ]

    return attention


def _launch_attention(name: str, out: torch.Tensor, compute: Any, flops: float, raw: list[torch.Tensor]) -> None:
    assert machine is not None
    card = machine.card
    rate = card.half_flops_per_s if out.dtype in HALF else card.float32_flops_per_s
    size = sum(tensor.nbytes for tensor in raw) + out.nbytes
    seconds = card.kernel_s + max(flops / (0.5 * rate), size / card.bytes_per_s)
    machine.launch(f"{name}_attention", seconds, (lambda: out.copy_(compute())) if machine.capture else None)


def _varlen(
    query: Any, key: Any, value: Any, starts: Any, key_starts: Any, max_q: int, max_k: int, dropout_p: float,
    is_causal: bool, return_debug_mask: bool, *, scale: float | None = None, window_size_left: int | None = None,
    window_size_right: int | None = None, **_: Any,
) -> Any:  # fmt: skip
    """Compute attention of texts in one row, `[tokens, heads, width]`, each by itself."""
    assert machine is not None
    if not machine.card.has_flash or query.dtype not in HALF:
        raise RuntimeError("FlashAttention only supports Ampere GPUs or newer, in fp16 and bf16.")
    left = -1 if window_size_left is None else window_size_left
    right = 0 if is_causal else -1 if window_size_right is None else window_size_right
    out = _each_text("flash_varlen", (query, key, value), (starts, key_starts), (left, right), scale)
    none = torch.zeros(0)
    return CardTensor(out), CardTensor(none), CardTensor(none), CardTensor(none), CardTensor(none)


def _efficient_of_texts(
    query: Any, key: Any, value: Any, bias: Any, starts: Any, key_starts: Any, max_q: int, max_k: int,
    dropout_p: float, mask: int, *_: Any, scale: float | None = None, window_size: int | None = None, **__: Any,
) -> Any:  # fmt: skip
    """Compute attention of texts in one row, `[1, tokens, heads, width]`; mask 2 is causal from the last key."""
    assert machine is not None
    if query.dtype == torch.bfloat16 and not machine.card.has_bfloat16:
        raise RuntimeError("expected bfloat16 on a GPU of compute capability 8.0 or newer")
    if query.shape[2] != key.shape[2]:
        raise RuntimeError("expected as many heads of keys as of queries")
    window = (-1 if window_size is None else window_size - 1, 0 if mask else -1)
    given = [tensor[0] for tensor in (query, key, value)]
    out = _each_text("efficient_of_texts", given, (starts, key_starts), window, scale)
    none = CardTensor(torch.zeros(0))
    return CardTensor(out[None]), none, none, none, max_q, max_k


def _each_text(name: str, given: Any, starts: Any, window: tuple[int, int], scale: float | None) -> torch.Tensor:
    raw = [_raw(tensor) for tensor in given]
    ends, key_ends = (_raw(tensor).tolist() for tensor in starts)
    left, right = window

    def compute() -> torch.Tensor:
        out = torch.zeros_like(raw[0])
        with torch._C._InferenceMode(False), torch.no_grad(), sdpa_kernel(ON_HOST):
            for text in range(len(ends) - 1):
                rows, columns = slice(ends[text], ends[text + 1]), slice(key_ends[text], key_ends[text + 1])
                q, k, v = (t[s].transpose(0, 1)[None] for t, s in zip(raw, (rows, columns, columns), strict=True))
                length, width = q.shape[-2], k.shape[-2]
                at = torch.arange(length)[:, None] + (width - length) - torch.arange(width)[None]
                seen = torch.ones(length, width, dtype=torch.bool)
                if right >= 0:
                    seen &= at >= -right
                if left >= 0:
                    seen &= at <= left
                made = torch.nn.functional.scaled_dot_product_attention(
                    q, k, v, attn_mask=seen, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
                )
                out[rows] = made[0].transpose(0, 1)
        return out

    out = compute()
    lengths = [end - start for start, end in zip(ends, ends[1:], strict=False)]
    flops = 4.0 * sum(length * length for length in lengths) * raw[0].shape[1] * raw[0].shape[2]
    _launch_attention(name, out, compute, flops, raw)
    return out


def _composed_rms_norm(x: Any, shape: Any, weight: Any = None, eps: Any = None) -> Any:
    return _fused_rms_norm(x, shape, weight, eps)[0]  # a CPU build composes aten._fused_rms_norm of seven


def _fused_rms_norm(x: Any, shape: Any, weight: Any = None, eps: Any = None) -> Any:
    assert machine is not None
    raw, factor = _raw(x), _raw(weight)

    def compute() -> torch.Tensor:
        with torch._C._InferenceMode(False), torch.no_grad():
            return torch.nn.functional.rms_norm(raw, shape, factor, eps)

    out = compute()
    seconds = machine.card.kernel_s + 2 * raw.nbytes / machine.card.bytes_per_s
    machine.launch("fused_rms_norm", seconds, (lambda: out.copy_(compute())) if machine.capture else None)
    return CardTensor(out), None


def _composed_layer_norm(x: Any, shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5, *_: Any) -> Any:
    return aten.native_layer_norm.default(x, shape, weight, bias, eps)[0]


SPECIAL: dict[Any, Callable[..., Any]] = {
    aten.scaled_dot_product_attention.default: attend,
    aten._scaled_dot_product_flash_attention.default: _fused("flash", 9),
    aten._scaled_dot_product_efficient_attention.default: _fused("efficient", 4),
    aten._scaled_dot_product_cudnn_attention.default: _fused("cudnn", 9),
    aten._flash_attention_forward.default: _varlen,
    aten._efficient_attention_forward.default: _efficient_of_texts,
    aten.rms_norm.default: _composed_rms_norm,
    aten._fused_rms_norm.default: _fused_rms_norm,
    aten.layer_norm.default: _composed_layer_norm,
}
