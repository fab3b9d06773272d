"""Attention, norms and rounding of packed texts on a CPU, each in one pass over its tensors, as operators of torch.

Torch's own take a pass for each step, and its attention works on tiles that short texts do not fill: 1,024 questions of
15 tokens on average take two to three times as long with it (docs/decisions.md). The loops are compiled by
numba when they are first called, for the processor at hand, and kept on disk where numba keeps them. They calculate in
float32 and take bfloat16 too; what is not finite stays so, but in bytes. An operator whose name ends with `_` writes
into what it is given, and whoever keeps that sees it.

`ImportError` on import: numba is not installed or told not to compile, or the processor multiplies and adds in two
steps; then nothing of this can be used.
"""

import math
import os
import platform
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from llvmlite import binding, ir
from numba import config, njit, types
from numba.core import cgutils
from numba.core.errors import NumbaError
from numba.extending import intrinsic, models, register_model

from boundby.formatting import first_line

if config.DISABLE_JIT:
    raise ImportError("numba is told not to compile (NUMBA_DISABLE_JIT)")

if platform.machine() in ("x86_64", "AMD64") and not binding.get_host_cpu_features().get("fma"):
    raise ImportError("this processor has no fused multiplication and addition; without it torch's kernels are faster")

LANES = 16  # floats of a vector: LLVM splits it where the processor's are shorter
# Of a share at least: values of norm and rotation, of rounding, products of attention. Another thread costs 0.1 ms.
NORMED, ROUNDED, MULTIPLIED = 2**18, 2**20, 2**21
LARGEST_BYTE, LEAST_EXPONENT = 127.0, -126.0
# Added to a float32 of small magnitude, it leaves the nearest whole number in the lowest bits: ties go to the even one.
ROUNDER = 1.5 * 2.0**23
BIAS = 127  # of a float32's exponent
# 2^x for |x| <= 1/2, from x^6 down: relative error below 2e-7. Cephes, exp2f.
POWER = (1.535336188319500e-4, 1.339887440266574e-3, 9.618437357674640e-3, 5.550332471162809e-2,
         2.402264791363012e-1, 6.931472028550421e-1)  # fmt: skip

# Vectors: a type of numba's that is one of LLVM's, and what can be done with it.

_FLOAT, _WORD, _SIZE = ir.FloatType(), ir.IntType(32), ir.IntType(64)
_FLOATS, _WORDS = ir.VectorType(_FLOAT, LANES), ir.VectorType(_WORD, LANES)
_HALVES, _BYTES = ir.VectorType(ir.IntType(16), LANES), ir.VectorType(ir.IntType(8), LANES)
_F32 = np.float32


class _Vector(types.Type):  # type: ignore[misc]
    """Sixteen values of float32."""


vector = _Vector("Vector")


@register_model(_Vector)
class _VectorModel(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, _FLOATS)


def _words(*values: int) -> Any:
    return ir.Constant(_WORDS, list(values) * (LANES // len(values)))


def _floats(value: float) -> Any:
    return ir.Constant(_FLOATS, [value] * LANES)


def _spread(builder: Any, value: Any, kind: Any) -> Any:
    first = builder.insert_element(ir.Constant(kind, ir.Undefined), value, ir.Constant(_WORD, 0))
    return builder.shuffle_vector(first, ir.Constant(kind, ir.Undefined), _words(0))


def _call(builder: Any, name: str, *values: Any) -> Any:
    function = ir.FunctionType(_FLOATS, [_FLOATS] * len(values))
    return builder.call(cgutils.get_or_insert_function(builder.module, function, f"llvm.{name}.v{LANES}f32"), values)


def _address(context: Any, builder: Any, kind: Any, array: Any, place: Any) -> Any:
    return builder.gep(context.make_array(kind)(context, builder, array).data, [place])


def _require_halves(kind: Any) -> None:
    if kind.dtype != types.uint16:
        raise TypeError(f"the kernels take float32 and bfloat16, not {kind.dtype}")


def _loaded(builder: Any, kind: Any, address: Any) -> Any:
    """Return sixteen values of an array of float32, or of bfloat16 in two bytes each."""
    if kind.dtype == types.float32:
        return builder.load(builder.bitcast(address, _FLOATS.as_pointer()), align=4)
    _require_halves(kind)
    halves = builder.load(builder.bitcast(address, _HALVES.as_pointer()), align=2)
    return builder.bitcast(builder.shl(builder.zext(halves, _WORDS), _words(16)), _FLOATS)


def _stored(builder: Any, kind: Any, address: Any, values: Any) -> None:
    """Store sixteen values; as bfloat16 the nearest, ties to the even one, and what is not a number as it is."""
    if kind.dtype == types.float32:
        builder.store(values, builder.bitcast(address, _FLOATS.as_pointer()), align=4)
        return
    _require_halves(kind)
    bits = builder.bitcast(values, _WORDS)
    is_odd = builder.and_(builder.lshr(bits, _words(16)), _words(1))
    nearest = builder.add(bits, builder.add(is_odd, _words(0x7FFF)))
    kept = builder.select(builder.fcmp_unordered("uno", values, values), _words(0x7FC00000), nearest)
    halves = builder.trunc(builder.lshr(kept, _words(16)), _HALVES)
    builder.store(halves, builder.bitcast(address, _HALVES.as_pointer()), align=2)


@intrinsic  # type: ignore[untyped-decorator]
def load(_: Any, array: Any, place: Any) -> Any:
    """Return the sixteen values from this place on."""

    def emit(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        return _loaded(builder, signature.args[0], _address(context, builder, signature.args[0], *given))

    return vector(array, types.intp), emit


@intrinsic  # type: ignore[untyped-decorator]
def spread(_: Any, array: Any, place: Any) -> Any:
    """Return one value of an array of float32 in all lanes."""

    def emit(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        return _spread(builder, builder.load(_address(context, builder, signature.args[0], *given)), _FLOATS)

    return vector(array, types.intp), emit


@intrinsic  # type: ignore[untyped-decorator]
def full(_: Any, value: Any) -> Any:
    """Return a value in all lanes."""
    return vector(types.float32), lambda context, builder, signature, given: _spread(builder, given[0], _FLOATS)


@intrinsic  # type: ignore[untyped-decorator]
def store(_: Any, array: Any, place: Any, values: Any) -> Any:
    """Store sixteen values from this place on."""

    def emit(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        kind, (target, where, what) = signature.args[0], given
        _stored(builder, kind, _address(context, builder, kind, target, where), what)
        return context.get_dummy_value()

    return types.void(array, types.intp, vector), emit


@intrinsic  # type: ignore[untyped-decorator]
def store_bytes(_: Any, array: Any, place: Any, values: Any) -> Any:
    """Store sixteen values as the nearest whole numbers from -128 to 127, plus 128."""

    def emit(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        target, where, what = given
        for sign, end in (("<", _floats(-LARGEST_BYTE - 1)), (">", _floats(LARGEST_BYTE))):
            what = builder.select(builder.fcmp_ordered(sign, what, end), end, what)
        bits = builder.bitcast(builder.fadd(what, _floats(ROUNDER)), _WORDS)
        found = builder.trunc(builder.xor(bits, _words(0x80)), _BYTES)
        address = _address(context, builder, signature.args[0], target, where)
        builder.store(found, builder.bitcast(address, _BYTES.as_pointer()), align=1)
        return context.get_dummy_value()

    return types.void(array, types.intp, vector), emit


@intrinsic  # type: ignore[untyped-decorator]
def multiplied(_: Any, a: Any, b: Any) -> Any:
    """Return a * b."""
    return vector(vector, vector), lambda context, builder, signature, given: builder.fmul(*given)


@intrinsic  # type: ignore[untyped-decorator]
def added(_: Any, a: Any, b: Any) -> Any:
    """Return a + b."""
    return vector(vector, vector), lambda context, builder, signature, given: builder.fadd(*given)


@intrinsic  # type: ignore[untyped-decorator]
def subtracted(_: Any, a: Any, b: Any) -> Any:
    """Return a - b."""
    return vector(vector, vector), lambda context, builder, signature, given: builder.fsub(*given)


@intrinsic  # type: ignore[untyped-decorator]
def inverse(_: Any, a: Any) -> Any:
    """Return 1 / a."""
    return vector(vector), lambda context, builder, signature, given: builder.fdiv(_floats(1.0), given[0])


@intrinsic  # type: ignore[untyped-decorator]
def fused(_: Any, a: Any, b: Any, c: Any) -> Any:
    """Return a * b + c, rounded once."""
    return vector(vector, vector, vector), lambda context, builder, signature, given: _call(builder, "fma", *given)


@intrinsic  # type: ignore[untyped-decorator]
def larger(_: Any, a: Any, b: Any) -> Any:
    """Return the larger of each two; the second where the first is not a number."""

    def emit(_context: Any, builder: Any, _signature: Any, given: Any) -> Any:
        return builder.select(builder.fcmp_ordered(">", *given), *given)

    return vector(vector, vector), emit


@intrinsic  # type: ignore[untyped-decorator]
def power_of_two(_: Any, exponent: Any) -> Any:
    """Return two to these powers, none of them above 0; below -126 two to that, and what is not a number as such."""

    def emit(_context: Any, builder: Any, _signature: Any, given: Any) -> Any:
        x, least = given[0], _floats(LEAST_EXPONENT)
        x = builder.select(builder.fcmp_ordered("<", x, least), least, x)
        moved = builder.fadd(x, _floats(ROUNDER))
        rest = builder.fsub(x, builder.fsub(moved, _floats(ROUNDER)))
        found = _floats(POWER[0])
        for factor in (*POWER[1:], 1.0):
            found = _call(builder, "fma", found, rest, _floats(factor))
        whole = builder.shl(builder.add(builder.bitcast(moved, _WORDS), _words(BIAS)), _words(23))
        return builder.fmul(found, builder.bitcast(whole, _FLOATS))

    return vector(vector), emit


@intrinsic  # type: ignore[untyped-decorator]
def hidden(_: Any, scores: Any, ahead: Any, before: Any, after: Any) -> Any:
    """Return scores of one key; minus infinity where the key lies more than `before` tokens before the query of a lane.

    Or more than `after` behind it. `ahead`: how many tokens the query of the first lane lies behind the key.
    """

    def emit(_context: Any, builder: Any, _signature: Any, given: Any) -> Any:
        scores, ahead, before, after = given
        distance = builder.add(_words(*range(LANES)), _spread(builder, ahead, _WORDS))
        sees = builder.and_(
            builder.icmp_signed("<=", distance, _spread(builder, before, _WORDS)),
            builder.icmp_signed(">=", distance, _spread(builder, builder.neg(after), _WORDS)),
        )
        return builder.select(sees, scores, _floats(-math.inf))

    return vector(vector, types.int32, types.int32, types.int32), emit


@intrinsic  # type: ignore[untyped-decorator]
def total(_: Any, values: Any) -> Any:
    """Return the sum of the lanes."""

    def emit(_context: Any, builder: Any, _signature: Any, given: Any) -> Any:
        found, count = given[0], LANES
        while count > 1:
            count //= 2
            halves = (ir.Constant(ir.VectorType(_WORD, count), list(range(at, at + count))) for at in (0, count))
            found = builder.fadd(*(builder.shuffle_vector(found, found, half) for half in halves))
        return builder.extract_element(found, ir.Constant(_WORD, 0))

    return types.float32(vector), emit


@intrinsic  # type: ignore[untyped-decorator]
def transpose(
    _: Any, source: Any, start: Any, step: Any, rows: Any, target: Any, first: Any, wide: Any, lines: Any
) -> Any:
    """Write a square of sixteen rows, `step` apart, as its columns, `wide` apart: the first `lines` of them.

    Where there are fewer `rows`, the last one stands for those that are not.
    """

    def emit(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        source, start, step, rows, target, first, wide, lines = given
        taken, given_to = signature.args[0], signature.args[4]

        def at(kind: Any, array: Any, origin: Any, number: int, apart: Any, count: Any) -> Any:
            last = builder.sub(count, ir.Constant(_SIZE, 1))
            line = ir.Constant(_SIZE, number)
            line = builder.select(builder.icmp_signed("<", line, last), line, last)
            return _address(context, builder, kind, array, builder.add(origin, builder.mul(line, apart)))

        square = [_loaded(builder, taken, at(taken, source, start, row, step, rows)) for row in range(LANES)]
        for half in (8, 4, 2, 1):
            for row in (each for each in range(LANES) if not each & half):
                pair = square[row], square[row + half]
                low = [lane if not lane & half else lane - half + LANES for lane in range(LANES)]
                high = [lane + half if not lane & half else lane + LANES for lane in range(LANES)]
                square[row], square[row + half] = (
                    builder.shuffle_vector(*pair, ir.Constant(_WORDS, lanes)) for lanes in (low, high)
                )
        for line in reversed(range(LANES)):  # those beyond the last go where it goes after them
            _stored(builder, given_to, at(given_to, target, first, line, wide, lines), square[line])
        return context.get_dummy_value()

    size = types.intp
    return types.void(source, size, size, size, target, size, size, size), emit


# The loops. Arrays are flat, steps are in elements.


_OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy"}


def _compiled(function: Callable[..., None]) -> Any:
    try:
        return njit(function, cache=True, **_OPTIONS)
    except (OSError, RuntimeError):  # there is no folder in which it could be kept
        return njit(function, **_OPTIONS)


@njit(inline="always")  # type: ignore[untyped-decorator]
def _aligned(count: int) -> Any:
    """Return new memory for so many values whose vectors lie in one line of the cache each."""
    found = np.empty(count + LANES, _F32)
    ahead = -(found.ctypes.data // 4) % LANES
    return found[ahead : ahead + count]


@_compiled
def _attend(
    query: Any, key: Any, value: Any, out: Any, steps: Any, starts: Any, longest: int, heads: Any, shared: int,
    width: int, scale: Any, before: int, after: int,
) -> None:  # fmt: skip
    """Attend in each text with `heads`, first and last; `shared` heads have one key. `steps`: of tokens and of heads.

    Sixteen queries are the lanes of a vector, so that the sums over keys need no lanes but those that are full, and
    the softmax none beside each other.
    """
    (query_token, query_head), (key_token, key_head), (value_token, value_head), (out_token, out_head) = steps
    span = (longest + 4) * width
    keys, values = _aligned(span), _aligned(span)
    queries, answers, scores = _aligned(LANES * width), _aligned(LANES * width), _aligned(LANES * (longest + 4))
    factor, nothing, never = full(scale), full(_F32(0)), full(_F32(-np.inf))
    for text in range(len(starts) - 1):
        start = int(starts[text])
        length = int(starts[text + 1]) - start
        for head in range(heads[0], heads[1]):
            if head % shared == 0 or head == heads[0]:
                of_key = start * key_token + head // shared * key_head
                of_value = start * value_token + head // shared * value_head
                for place in range(length):
                    for column in range(0, width, LANES):
                        store(keys, place * width + column, load(key, of_key + place * key_token + column))
                        store(values, place * width + column, load(value, of_value + place * value_token + column))
                for place in range(length * width, (length + 3) * width, LANES):
                    store(keys, place, nothing)
            for first in range(0, length, LANES):
                rows = min(LANES, length - first)
                own = (start + first) * query_token + head * query_head
                for column in range(0, width, LANES):
                    transpose(query, own + column, query_token, rows, queries, column * LANES, LANES, LANES)
                low, high = max(0, first - before), min(length, first + rows + after)
                for place in range(low, high, 4):
                    at, to = place * width, (place - low) * LANES
                    a = b = c = d = nothing
                    for column in range(width):
                        x = load(queries, column * LANES)
                        a = fused(spread(keys, at + column), x, a)
                        b = fused(spread(keys, at + width + column), x, b)
                        c = fused(spread(keys, at + 2 * width + column), x, c)
                        d = fused(spread(keys, at + 3 * width + column), x, d)
                    store(scores, to, a)
                    store(scores, to + LANES, b)
                    store(scores, to + 2 * LANES, c)
                    store(scores, to + 3 * LANES, d)
                seen = high - low
                if first + rows - 1 - before > low or first + after < high - 1:
                    for place in range(low, high):
                        to, ahead = (place - low) * LANES, np.int32(first - place)
                        store(scores, to, hidden(load(scores, to), ahead, np.int32(before), np.int32(after)))
                top = never
                for place in range(seen):
                    top = larger(load(scores, place * LANES), top)
                top, sum_ = multiplied(top, factor), nothing
                for place in range(seen):
                    x = power_of_two(subtracted(multiplied(load(scores, place * LANES), factor), top))
                    sum_ = added(sum_, x)
                    store(scores, place * LANES, x)
                share = inverse(sum_)
                for column in range(0, width, 4):
                    a = b = c = d = nothing
                    for place in range(seen):
                        x, at = load(scores, place * LANES), (low + place) * width + column
                        a = fused(spread(values, at), x, a)
                        b = fused(spread(values, at + 1), x, b)
                        c = fused(spread(values, at + 2), x, c)
                        d = fused(spread(values, at + 3), x, d)
                    to = column * LANES
                    store(answers, to, multiplied(a, share))
                    store(answers, to + LANES, multiplied(b, share))
                    store(answers, to + 2 * LANES, multiplied(c, share))
                    store(answers, to + 3 * LANES, multiplied(d, share))
                own = (start + first) * out_token + head * out_head
                for column in range(0, width, LANES):
                    transpose(answers, column * LANES, LANES, LANES, out, own + column, out_token, rows)


@_compiled
def _normalise(
    states: Any, residual: Any, weight: Any, bias: Any, out: Any, first: int, last: int, width: int, epsilon: Any,
    is_centred: bool,
) -> None:  # fmt: skip
    """Add the residual, if there is one, and norm rows `first` to `last`; `out` may be the states."""
    row, nothing = np.empty(width, _F32), full(_F32(0))
    for start in range(first * width, last * width, width):
        sum_ = nothing
        for column in range(0, width, LANES):
            x = load(states, start + column)
            if residual is not None:
                x = added(x, load(residual, start + column))
            store(row, column, x)
            sum_ = added(sum_, x)
        mean = full(total(sum_) / _F32(width) if is_centred else _F32(0))
        sum_ = nothing
        for column in range(0, width, LANES):
            x = subtracted(load(row, column), mean)
            sum_ = fused(x, x, sum_)
        scale = full(_F32(1) / np.sqrt(total(sum_) / _F32(width) + epsilon))
        for column in range(0, width, LANES):
            x = multiplied(multiplied(subtracted(load(row, column), mean), scale), load(weight, column))
            store(out, start + column, added(x, load(bias, column)) if bias is not None else x)


@_compiled
def _round(inputs: Any, factor: Any, steps: Any, out: Any, first: int, last: int, width: int) -> None:
    """Multiply rows `first` to `last` by the factor, if there is one, and by the steps, and round to bytes."""
    for start in range(first * width, last * width, width):
        for column in range(0, width, LANES):
            x = load(inputs, start + column)
            if factor is not None:
                x = multiplied(x, load(factor, start + column))
            store_bytes(out, start + column, multiplied(x, load(steps, column)))


@_compiled
def _turn(states: Any, cosine: Any, sine: Any, steps: Any, first: int, last: int, heads: int, width: int) -> None:
    """Turn, in place, the pairs of columns half a head apart of tokens `first` to `last`. `steps`: token and head."""
    half = width // 2
    for token in range(first, last):
        for head in range(heads):
            start = token * steps[0] + head * steps[1]
            for column in range(0, half, LANES):
                near, far, angle = start + column, start + half + column, token * width + column
                x, y = load(states, near), load(states, far)
                turned = multiplied(y, load(sine, angle))
                store(states, near, subtracted(multiplied(x, load(cosine, angle)), turned))
                turned = multiplied(x, load(sine, angle + half))
                store(states, far, fused(y, load(cosine, angle + half), turned))


# The operators.


def attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, starts: torch.Tensor, pairs: int, scale: float,
    before: int, after: int,
) -> torch.Tensor:  # fmt: skip
    """Return attention inside each text, `[1, tokens, heads, width]`, of `[1, heads, tokens, width]`.

    `starts` is the first token of each text, and the end; a token sees `before` and `after` tokens beside itself.
    `pairs`, of queries and keys in all texts, tells how much work there is.
    """
    _, heads, tokens, width = query.shape
    out = query.new_empty(1, tokens, heads, width)
    shared, given = heads // key.shape[1], (query, key, value, out.transpose(1, 2))
    flat = [_flat(each) for each in given]
    steps = tuple((each.stride(2), each.stride(1)) for each in given)
    places = starts.numpy()
    longest = int(np.diff(places).max())
    factor = _F32(scale * math.log2(math.e))

    sides = min(before, tokens), min(after, tokens)

    def attend(first: int, last: int) -> None:
        _run(_attend, *flat, steps, places, longest, (first, last), shared, width, factor, *sides)

    _in_shares(heads, attend, MULTIPLIED // max(1, pairs * width))
    return out


def norm(
    states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, epsilon: float, is_centred: bool
) -> torch.Tensor:
    """Return layer norms of the last dimension, or where it is not centred root-mean-square norms."""
    states = states.contiguous()
    out = torch.empty_like(states)
    _norm_rows(states, None, weight, bias, out, epsilon, is_centred)
    return out


def add_norm_(
    states: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, epsilon: float
) -> torch.Tensor:
    """Put the layer norms of states + residual into the states, which are contiguous, and return them."""
    _norm_rows(states, residual.contiguous(), weight, bias, states, epsilon, True)
    return states


def rounded(inputs: torch.Tensor, factor: torch.Tensor | None, steps: torch.Tensor) -> torch.Tensor:
    """Return inputs * factor * steps rounded to bytes, 128 for 0; `steps` are those of the last dimension."""
    inputs = inputs.contiguous()
    out = torch.empty_like(inputs, dtype=torch.uint8)
    width = inputs.shape[-1]
    given = (_flat(inputs), None if factor is None else _flat(factor.contiguous()), _flat(steps), out.view(-1).numpy())
    _in_shares(inputs.numel() // width, lambda first, last: _run(_round, *given, first, last, width), ROUNDED // width)
    return out


def rotate_(states: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    """Turn states, `[1, heads, tokens, width]`, in place by the angles of a rotary embedding, `[1, tokens, width]`."""
    _, heads, tokens, width = states.shape
    given = _flat(states), _flat(cosine.contiguous()), _flat(sine.contiguous())
    steps = states.stride(2), states.stride(1)
    least = NORMED // (heads * width)
    _in_shares(tokens, lambda first, last: _run(_turn, *given, steps, first, last, heads, width), least)
    return states


def _norm_rows(
    states: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    epsilon: float,
    is_centred: bool,
) -> None:
    width = states.shape[-1]
    given = [None if each is None else _flat(each) for each in (states, residual, weight, bias, out)]
    _in_shares(
        states.numel() // width,
        lambda first, last: _run(_normalise, *given, first, last, width, _F32(epsilon), is_centred),
        NORMED // width,
    )


def _flat(tensor: torch.Tensor) -> np.ndarray:
    """Return the memory from the tensor's first element to its last: bfloat16 as numbers of two bytes."""
    span = 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    flat = tensor.detach().as_strided((span,), (1,))
    return (flat.view(torch.uint16) if flat.dtype == torch.bfloat16 else flat).numpy()


_uncached: dict[Any, Any] = {}  # by what numba's cache has failed for


def _run(kernel: Any, *given: Any) -> None:
    """Run a kernel; without numba's cache where that fails: a full disk, or a damaged file, which raises anything.

    Raises RuntimeError where it cannot be compiled.
    """
    if kernel not in _uncached:
        try:
            return kernel(*given)  # type: ignore[no-any-return]
        except Exception:
            _uncached[kernel] = njit(kernel.py_func, **_OPTIONS)
    try:
        _uncached[kernel](*given)
    except NumbaError as error:
        raise RuntimeError(f"numba cannot compile {kernel.__name__}: {first_line(error)}") from error


def _in_shares(units: int, work: Callable[[int, int], None], least: int) -> None:
    """Do the work from unit 0 to the last with as many threads as torch has in this one, at least so many in each."""
    shares = max(1, min(torch.get_num_threads(), units // max(1, least)))
    if shares == 1:
        return work(0, units)
    ends = list(pairwise(units * number // shares for number in range(shares + 1)))
    waiting = list[Future[None]]()
    try:
        for each in ends[1:]:
            waiting.append(Future())
            try:
                _threads().submit(_fulfil, waiting[-1], work, *each)
            except RuntimeError:  # Python is ending, or there may be no more threads: then it may have been queued
                _fulfil(waiting[-1], work, *each)
        work(*ends[0])
    except BaseException:
        for each_waiting in waiting:
            if each_waiting.cancel():
                each_waiting.set_running_or_notify_cancel()
        raise
    finally:
        wait(waiting)  # else they go on writing after an error here
    for each_done in waiting:
        each_done.result()


def _fulfil(promise: "Future[None]", work: Callable[[int, int], None], first: int, last: int) -> None:
    """Do the work, unless another thread has begun it."""
    try:
        promise.set_running_or_notify_cancel()
    except RuntimeError:
        return
    try:
        work(first, last)
    except BaseException as error:
        promise.set_exception(error)
    else:
        promise.set_result(None)


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(os.cpu_count(), "kernels")


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_threads.cache_clear)  # a child has none of the threads

_library: Any = torch.library.Library("boundby", "DEF")  # type: ignore[no-untyped-call]
for _function, _schema in (
    (attention, "(Tensor query, Tensor key, Tensor value, Tensor starts, int pairs, float scale, int before, int after)"
     " -> Tensor"),
    (norm, "(Tensor states, Tensor weight, Tensor? bias, float epsilon, bool is_centred) -> Tensor"),
    (add_norm_, "(Tensor(a!) states, Tensor residual, Tensor weight, Tensor? bias, float epsilon) -> Tensor(a!)"),
    (rounded, "(Tensor inputs, Tensor? factor, Tensor steps) -> Tensor"),
    (rotate_, "(Tensor(a!) states, Tensor cosine, Tensor sine) -> Tensor(a!)"),
):  # fmt: skip
    _library.define(_function.__name__ + _schema)
    _library.impl(_function.__name__, _function, "CPU")
