"""What one operator of torch does: whether it works at all, its FLOPs, and the bytes it reads and writes.

FLOPs are those of matrix products, convolutions and attention, after torch's own formulas: element-wise operators
count 0 (memory limits them), and causal attention counts the whole square, though some kernels skip half of it.
Bytes are those of the tensors an operator takes and gives, as if no cache kept them between two operators.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch._ops import HigherOrderOperator, OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from boundby.work.roofline import OperatorLoad, Shapes

Access = tuple[torch.Tensor, int]  # a tensor, and how many of its bytes are read or written

NOT_ARITHMETIC = ("prim", "profiler")  # namespaces of metadata queries and of `record_function`
ALLOCATIONS = ("empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided")
VIEWS_BY_NAME = ("_unsafe_view", "unsafe_split", "unsafe_split_with_sizes")  # their schemas do not say that they alias
OVERWRITES = ("copy_", "fill_", "zero_", "normal_", "uniform_", "random_", "bernoulli_", "exponential_")
GATHERS = ("embedding", "gather", "index", "index_select", "take")
BAGS = ("_embedding_bag", "_embedding_bag_forward_only")
ACCUMULATES = ("addmm", "addmv", "baddbmm")  # beta * self + product: with beta = 0 torch does not read self
# Words in the names of operators that hide products: without a formula their FLOPs would silently be 0.
PRODUCTS = re.compile(r"\w*mm|mv|addmv|v?dot|matmul|linear|conv(\dd|olution)?|attention|rnn|lstm|gru|encoder|fft|cdist")


class Watching(TorchDispatchMode):
    """Sees every operator that torch dispatches while it is entered, composite ones by their parts; `run` runs it."""

    supports_higher_order_operators = True  # so that they come here and are refused by name

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if isinstance(func, HigherOrderOperator):
            name = func.name()  # type: ignore[no-untyped-call]
            text = f"the work of {name} is not known; use a model whose attention is sdpa or eager"
            raise UnknownWorkError(text)
        if any(kind is not torch.Tensor for kind in types):  # a plain one is named where gradients are recorded
            return NotImplemented  # a subclass of Tensor takes the operator apart, and the parts come here
        if is_composite(func):  # in inference mode they come whole
            with self:
                return run_parts(func, args, kwargs)
        return self.run(func, args, kwargs)

    def run(self, func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return what the operator returns."""
        raise NotImplementedError


@dataclass(frozen=True)
class Accesses:
    """What one call reads and writes; `taken` are the storages of its tensors, `made` those made since the start."""

    read: Sequence[Access]
    written: Sequence[Access]
    taken: Set[int]
    made: Set[int]

    @classmethod
    def of(
        cls, func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any, taken: Set[int], made: Set[int]
    ) -> "Accesses":
        """Return those of a call that returned `out`."""
        return cls(reads(func, args, kwargs, out), writes(func, args, kwargs, out), taken, made)

    def load(self, name: str, shapes: Shapes, flops: int) -> OperatorLoad:
        """Return what the call did."""
        moved = sum(moved for _, moved in (*self.read, *self.written))
        given = sum(moved for tensor, moved in self.read if storage(tensor) not in self.made)
        new = sum(moved for tensor, moved in self.written if storage(tensor) not in self.taken)
        return OperatorLoad(name, 1, flops, given, moved - given, new, shapes=shapes)


def storage(tensor: torch.Tensor) -> int:
    """Return an identifier of a tensor's memory, valid while that memory lives."""
    return id(tensor) if is_prepacked(tensor) else int(tensor.untyped_storage()._cdata)


def is_prepacked(tensor: torch.Tensor) -> bool:
    """Tell whether these are weights laid out for oneDNN, which have no storage of torch's."""
    return bool(tensor.layout == torch._mkldnn)  # type: ignore[attr-defined]


def does_work(func: OpOverload) -> bool:
    """Tell whether the operator computes or moves anything: views, queries and bare allocations do not."""
    name = func._schema.name.removeprefix("aten::")
    is_view = func.is_view or torch.Tag.inplace_view in func.tags or name in VIEWS_BY_NAME
    return not (is_view or name in ALLOCATIONS or func.namespace in NOT_ARITHMETIC)


def is_composite(func: OpOverload) -> bool:
    """Tell whether the operator is made of others, and has no formula of its own."""
    if func.namespace in NOT_ARITHMETIC:  # `prim.device`, of a tensor subclass, has no kernels at all
        return False
    name: str = func.name()  # type: ignore[no-untyped-call]
    has_parts = torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd")
    return has_parts and flop_formula(func) is None


def run_parts(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run a composite operator as eager torch does: `func.decompose` clones where dropout passes its input through."""
    return func._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, *args, **kwargs)


def flop_formula(func: OpOverload) -> Callable[..., int] | None:
    """Return the formula of an operator's FLOPs: ours where torch's fails on some torch, else torch's own, or None."""
    packet = func._overloadpacket
    if packet not in flop_registry and func.namespace == "aten":
        packet = getattr(torch.ops.aten, packet.__name__.rstrip("_"), packet)  # addmm_ computes what addmm does
    return FORMULAS.get(str(packet)) or flop_registry.get(packet)


class UnknownWorkError(ValueError):
    """The work of a call cannot be counted; an error of the call itself is never of this type."""


@contextmanager
def higher_order_refused() -> Iterator[None]:
    """Raise UnknownWorkError for an operator of higher order, which torch 2.8 shows to no dispatch mode but refuses."""
    try:
        yield
    except NotImplementedError as error:
        name = re.search(r"no rule registered for HOP (\w+)", str(error))
        if not name:
            raise
        raise UnknownWorkError(
            f"the work of {name[1]} is not known; use a model whose attention is sdpa or eager"
        ) from error


def flops(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> int:
    """Return the FLOPs of one call of the operator. Raises UnknownWorkError where they cannot be known."""
    formula = flop_formula(func)
    if formula is not None:
        return int(formula(*args, **kwargs, out_val=out))
    name = func._schema.name
    if func.namespace != "aten" or any(PRODUCTS.fullmatch(word) for word in name.removeprefix("aten::").split("_")):
        raise UnknownWorkError(
            f"the FLOPs of {name} are not known; give its formula with torch.utils.flop_counter.register_flop_formula"
            + (", or split it with torch.backends.mha.set_fastpath_enabled(False)" if name in FAST_PATHS else "")
        )
    return 0


def reads(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> list[Access]:
    """Return the tensors one call reads, each once, with the bytes read of each.

    A gather reads the rows that it gathers and no more; an argument that is only written is not read.
    """
    name = func._schema.name.removeprefix("aten::")
    bound = _bound(func, args, kwargs)
    skipped = 1 if _ignores_first(name, kwargs) else 0
    values = [value for argument, value in bound[skipped:] if not argument.is_out]
    accesses = {id(tensor): (tensor, nbytes(tensor)) for tensor in tensors_in(values)}
    if name in GATHERS or name in BAGS:
        table, indices = bound[0][1], bound[1][1]
        rows = nbytes(out) if name in GATHERS else indices.numel() * table.shape[1] * table.element_size()
        accesses[id(table)] = (table, min(rows, nbytes(table)))
    return list(accesses.values())


def writes(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> list[Access]:
    """Return the tensors one call writes, new ones and changed ones, each once, with the bytes written of each.

    An operator that changes scattered parts of a tensor (index_put_, scatter_) counts as changing all of it.
    """
    changed = [*tensors_in(written(func, args, kwargs)), *tensors_in(out)]
    accesses = {id(tensor): (tensor, nbytes(tensor)) for tensor in changed}
    return list(accesses.values())


def written(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Return the arguments that the operator writes to in place."""
    bound = _bound(func, args, kwargs)
    return [value for argument, value in bound if argument.alias_info is not None and argument.alias_info.is_write]


def nbytes(tensor: torch.Tensor) -> int:
    """Return the bytes of memory that the elements of a tensor occupy: an expanded tensor repeats, and stays small."""
    if is_prepacked(tensor):
        return tensor.numel() * tensor.element_size()
    if tensor.layout is not torch.strided:
        raise UnknownWorkError(f"the bytes of a tensor with layout {tensor.layout} are not known; count a dense model")
    if tensor.numel() == 0:
        return 0
    steps = list(zip(tensor.shape, tensor.stride(), strict=True))
    distinct = prod(size for size, stride in steps if stride != 0)
    span = 1 + sum((size - 1) * stride for size, stride in steps)  # less than `distinct` where windows overlap
    return min(distinct, span) * tensor.element_size()


def shapes_of(tensors: Sequence[torch.Tensor]) -> Shapes:
    """Return the shapes of tensors."""
    return tuple(tuple(tensor.shape) for tensor in tensors)


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of an argument or a result, in order, out of lists too."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for element in value:
            yield from tensors_in(element)


def _bound(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[tuple[torch.Argument, Any]]:
    """Return the arguments in the operator's schema, each with the value it got in this call."""
    arguments = func._schema.arguments
    named = {argument.name: argument for argument in arguments}
    return [*zip(arguments, args, strict=False), *((named[name], value) for name, value in kwargs.items())]


def _ignores_first(name: str, kwargs: Mapping[str, Any]) -> bool:
    takes_shape_only = name.endswith("_like") or name.startswith("new_")
    return takes_shape_only or name in OVERWRITES or (name.rstrip("_") in ACCUMULATES and kwargs.get("beta") == 0)


def _sdpa_flops(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> int:
    """Return the FLOPs of query times key and of weights times value, for every head of the query."""
    batch, heads, rows, width = query.shape
    return 2 * batch * heads * rows * key.shape[-2] * (width + value.shape[-1])


def _vector_flops(matrix: torch.Tensor, *_: Any, **__: Any) -> int:
    """Return the FLOPs of a product with a vector: a multiplication and an addition per element."""
    return 2 * matrix.numel()


def _prepacked_flops(inputs: torch.Tensor, weight: torch.Tensor, *_: Any, **__: Any) -> int:
    """Return the FLOPs of a product with prepacked weights, `[outputs, inputs]`."""
    return 2 * inputs.numel() * weight.shape[0]


def _eight_bits_flops(inputs: torch.Tensor, *others: Any, **_: Any) -> int:
    """Return the FLOPs of a product of eight bits with prepacked weights, which have a scale for each output."""
    scales: torch.Tensor = others[3]
    return 2 * inputs.numel() * scales.numel()


def _of_texts_flops(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    starts: torch.Tensor,
    key_starts: Any,
    *_: Any,
    **__: Any,
) -> int:
    """Return the FLOPs of attention inside each of several texts, `[tokens, heads, width]`, by where they begin.

    A mask or a window counts nothing off, as elsewhere.
    """
    queries = starts.diff()
    keys = queries if key_starts is None else key_starts.diff()
    pairs = int((queries.long() * keys.long()).sum())
    return 2 * pairs * query.shape[-2] * (query.shape[-1] + value.shape[-1])


def _efficient_flops(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    _: Any,
    starts: Any,
    key_starts: Any,
    *__: Any,
    **___: Any,
) -> int:
    """Return the FLOPs of the memory-efficient kernel, `[texts, tokens, heads, width]`, or of texts in one row."""
    if starts is not None:
        return _of_texts_flops(query, key, value, starts, key_starts)
    pairs = query.shape[0] * query.shape[1] * key.shape[1]
    return 2 * pairs * query.shape[2] * (query.shape[3] + value.shape[3])


def _addmv_flops(_: torch.Tensor, matrix: torch.Tensor, *__: Any, **___: Any) -> int:
    return 2 * matrix.numel()


# What torch lacks: 2.13.0 counts attention on a CPU as 0 (pytorch#195460).
FORMULAS: dict[str, Callable[..., int]] = {
    "aten._scaled_dot_product_flash_attention_for_cpu": _sdpa_flops,  # torch 2.13 has none
    **dict.fromkeys(  # torch up to 2.11 asserts as many heads of keys as of queries
        (
            "aten._scaled_dot_product_flash_attention",
            "aten._scaled_dot_product_efficient_attention",
            "aten._scaled_dot_product_cudnn_attention",
        ),
        _sdpa_flops,
    ),
    "torch_attn._varlen_attn": _of_texts_flops,  # torch 2.11 has none
    "aten._efficient_attention_forward": _efficient_flops,
    "mkldnn._linear_pointwise": _prepacked_flops,
    "onednn.qlinear_pointwise": _eight_bits_flops,
    "aten.mv": _vector_flops,
    "aten.dot": _vector_flops,
    "aten.addmv": _addmv_flops,
}
FAST_PATHS = ("aten::_native_multi_head_attention", "aten::_transformer_encoder_layer_fwd")
