"""Texts in one row without padding: where each begins, and attention that stays inside each of them.

On a GPU in half precision the kernel is torch's variable-length attention. Elsewhere texts of equal length stand
together, and each such group is one plain attention without a mask: the products of all other layers see one long row.
"""

import inspect
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from boundby.device import is_gpu
from boundby.inference import last_layer
from boundby.inference.tokens import Tokens

GROUPED, VARLEN = "boundby_grouped", "boundby_varlen"
_local = threading.local()  # the pack that this thread's forward is in: attention functions of transformers get no more


@dataclass(frozen=True)
class Pack:
    """Texts one after another: ids, positions, the first token of each, and groups `(start, texts, tokens of each)`."""

    input_ids: torch.Tensor  # [1, tokens]
    position_ids: torch.Tensor  # [1, tokens]
    starts: torch.Tensor  # [texts + 1], int32, the last entry is the end
    head_rows: torch.Tensor  # [texts], the token that the head reads
    groups: tuple[tuple[int, int, int], ...]
    longest: int

    def __enter__(self) -> "Pack":
        _local.pack = self
        return self

    def __exit__(self, *_: object) -> None:
        _local.pack = None


def pack(
    tokens: Tokens, rows: Sequence[int], head_rows: np.ndarray, skipped_id: int | None, device: torch.device
) -> Pack:
    """Return the texts at `rows`, longest first, as one pack on the device; `head_rows` count from each text's start.

    Positions count from 0, or, as RoBERTa counts, from beyond `skipped_id`, which gets no position of its own.
    """
    lengths = np.fromiter((tokens.ids[row].size for row in rows), dtype=np.int64, count=len(rows))
    starts = np.concatenate([[0], np.cumsum(lengths)])
    ids = np.concatenate([tokens.ids[row] for row in rows]).astype(np.int64)
    positions = np.arange(starts[-1]) - np.repeat(starts[:-1], lengths)
    if skipped_id is not None:
        counted = np.concatenate([[0], np.cumsum(ids != skipped_id)])
        positions = (counted[1:] - np.repeat(counted[starts[:-1]], lengths)) * (ids != skipped_id) + skipped_id
    first = np.flatnonzero(np.diff(lengths, prepend=-1))
    counts = np.diff(np.append(first, len(lengths)))
    groups = zip(starts[first].tolist(), counts.tolist(), lengths[first].tolist(), strict=True)

    def there(values: np.ndarray) -> torch.Tensor:
        tensor = torch.from_numpy(values)
        return tensor.pin_memory().to(device, non_blocking=True) if is_gpu(device) else tensor

    return Pack(
        there(ids)[None],
        there(positions)[None],
        there(starts.astype(np.int32)),
        there(starts[:-1] + head_rows),
        tuple(groups),
        int(lengths.max()),
    )


def grouped_attention(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, _mask: Any, **settings: Any
) -> tuple[torch.Tensor, None]:
    """Return attention inside each text of the current pack, `[1, tokens, heads, width]`: transformers' interface."""
    current: Pack = _local.pack
    heads, is_causal = query.shape[1], _is_causal(module, settings)
    out = query.new_empty(1, query.shape[2], heads, value.shape[-1])
    rows = last_layer.rows_of(module)
    if rows is not None:
        out[0, rows] = _grouped_attention_of_one(current, query[0, :, rows], key, value, settings)
        return out, None
    for start, texts, length in current.groups:
        part = slice(start, start + texts * length)
        q, k, v = (_grouped(each, part, texts, length) for each in (query, key, value))
        found = functional.scaled_dot_product_attention(
            q,
            k,
            v,
            is_causal=is_causal and length > 1,
            scale=settings.get("scaling"),
            enable_gqa=heads != key.shape[1],
        )
        out[0, part].view(texts, length, heads, -1).copy_(found.transpose(1, 2))
    return out, None


def _grouped_attention_of_one(
    current: Pack, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, settings: dict[str, Any]
) -> torch.Tensor:
    """Return `[texts, heads, width]`: what one token of each text, `[heads, texts, width]`, sees in all of its text."""
    first, found = 0, []
    for start, texts, length in current.groups:
        part = slice(start, start + texts * length)
        q = query[:, first : first + texts].transpose(0, 1)[:, :, None]
        k, v = (_grouped(each, part, texts, length) for each in (key, value))
        answers = functional.scaled_dot_product_attention(
            q, k, v, scale=settings.get("scaling"), enable_gqa=query.shape[0] != key.shape[1]
        )
        found.append(answers[:, :, 0])
        first += texts
    return torch.cat(found)


def varlen_attention(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, _mask: Any, **settings: Any
) -> tuple[torch.Tensor, None]:
    """Return attention inside each text of the current pack by torch's kernel for variable lengths (CUDA, half)."""
    from torch.nn.attention.varlen import varlen_attn

    current: Pack = _local.pack
    q, k, v = (each[0].transpose(0, 1) for each in (query, key, value))
    starts, longest = current.starts, current.longest
    window = (-1, 0) if _is_causal(module, settings) else (-1, -1)
    rows = last_layer.rows_of(module)
    if rows is not None:
        q, starts = q[rows], torch.arange(len(rows) + 1, dtype=starts.dtype, device=starts.device)
        longest, window = 1, (-1, -1)
    # One split: the result of a text does not depend on its neighbours.
    found = varlen_attn(
        *(q, k, v, starts, current.starts, longest, current.longest),
        scale=settings.get("scaling"),
        window_size=window,
        enable_gqa=q.shape[1] != k.shape[1],
        num_splits=1,
    )
    if rows is not None:
        answers, found = found, found.new_empty(query.shape[2], *found.shape[1:])
        found[rows] = answers
    return found[None], None


def has_varlen() -> bool:
    """Tell whether this torch has the kernel with all that is asked of it here; it came in steps from 2.10 to 2.12."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return False
    return {"scale", "window_size", "enable_gqa", "num_splits"} <= set(inspect.signature(varlen_attn).parameters)


def register() -> None:
    """Make both ways of attention known to transformers under names of ours."""
    from transformers import AttentionInterface

    AttentionInterface.register(GROUPED, grouped_attention)
    AttentionInterface.register(VARLEN, varlen_attention)


def opaque(attention: str) -> str:
    """Return the name of the same attention for a model that is compiled, which leaves this function as it is."""
    from transformers import AttentionInterface

    name = f"{attention}_opaque"
    function = grouped_attention if attention == GROUPED else varlen_attention
    AttentionInterface.register(name, torch.compiler.disable(function))
    return name


def _is_causal(module: Any, settings: dict[str, Any]) -> bool:
    given = settings.get("is_causal")
    return getattr(module, "is_causal", True) if given is None else given


def _grouped(states: torch.Tensor, part: slice, texts: int, length: int) -> torch.Tensor:
    """Return `[texts, heads, length, width]` of `[1, heads, tokens, width]`, without copying where it can be."""
    return states[0, :, part].transpose(0, 1).unflatten(0, (texts, length)).transpose(1, 2)
