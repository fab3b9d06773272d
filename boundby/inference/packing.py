"""Texts packed in one row: where each begins, and attention that stays inside each of them.

Attention is torch's variable-length kernel on a GPU in half precision, the memory-efficient one in float32 and before
Ampere. On a CPU texts of equal length attend as one batch. All other layers see one long row.

`attention_window` reduces the model's own mask rule to a window. Any other setting of an attention call that would
change the result raises `UnsupportedAttention`.
"""

import inspect
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from boundby.inference import last_layer
from boundby.inference.batches import on_device

GROUPED, VARLEN, UNMASKED = "boundby_grouped", "boundby_varlen", "boundby_unmasked"
EFFICIENT = "boundby_efficient"
NAMES = {GROUPED: "sorted by length", VARLEN: "variable-length attention", EFFICIENT: "memory-efficient attention"}
FROM_THE_END = 2  # of its masks: causal, the last query of a text at its last key
SHORT = 48  # tokens: torch's attention on a CPU converts half precision value by value, which takes twice as long
UNLIMITED = -1  # of a window's side, as `varlen_attn` has it
KEPT = 512  # tokens of a text whose mask is kept for the next layer, a quarter of a megabyte
PROBED_ROWS = 256  # of a mask, in which it has to be a window; all of them where the longest text has no more tokens
# What an attention call may carry without changing its result. The window is in the mask: `attention_window`.
WITHOUT_EFFECT = frozenset(
    ("cache_position", "deterministic", "max_length_k", "max_length_q", "position_ids", "sliding_window", "use_cache")
)
_local = threading.local()  # the pack that this thread's forward is in: attention functions of transformers get no more


class UnsupportedAttention(ValueError):
    """A model's attention needs what packed texts cannot give; `setting` is the argument that asks for it."""

    def __init__(self, setting: str, value: object) -> None:
        self.setting = setting
        super().__init__(f"its attention asks for {setting}={value}, which packed texts do not have")


@dataclass(frozen=True)
class Pack:
    """Texts one after another: ids, positions, the first token of each, and groups `(start, texts, tokens of each)`."""

    input_ids: torch.Tensor  # [1, tokens]
    position_ids: torch.Tensor  # [1, tokens]
    starts: torch.Tensor  # [texts + 1], int32, the last entry is the end
    head_rows: torch.Tensor  # [texts], the token that the head reads
    groups: tuple[tuple[int, int, int], ...]
    longest: int
    is_causal: bool | None  # with a trimmed last layer: then each text ends with the token that the head reads

    def __enter__(self) -> "Pack":
        _local.pack = self
        return self

    def __exit__(self, *_: object) -> None:
        _local.pack = None


def pack(
    texts: Sequence[np.ndarray],
    head_rows: np.ndarray,
    skipped_id: int | None,
    device: torch.device,
    is_causal: bool | None = None,
) -> Pack:
    """Return texts of these ids, longest first, as one pack on the device; `head_rows` count from each text's start.

    Positions count from 0, or as RoBERTa's from beyond `skipped_id`.
    """
    lengths = np.fromiter((text.size for text in texts), dtype=np.int64, count=len(texts))
    starts = np.concatenate([[0], np.cumsum(lengths)])
    ids = np.concatenate(texts).astype(np.int64)
    positions = np.arange(starts[-1]) - np.repeat(starts[:-1], lengths)
    if skipped_id is not None:
        counted = np.concatenate([[0], np.cumsum(ids != skipped_id)])
        positions = (counted[1:] - np.repeat(counted[starts[:-1]], lengths)) * (ids != skipped_id) + skipped_id
    first = np.flatnonzero(np.diff(lengths, prepend=-1))
    counts = np.diff(np.append(first, len(lengths)))
    groups = zip(starts[first].tolist(), counts.tolist(), lengths[first].tolist(), strict=True)

    return Pack(
        on_device(ids, device)[None],
        on_device(positions, device)[None],
        on_device(starts.astype(np.int32), device),
        on_device(starts[:-1] + head_rows, device),
        tuple(groups),
        int(lengths.max()),
        is_causal,
    )


def attention_window(
    *, mask_function: Callable[..., Any], batch_size: int, q_offset: Any = 0, kv_offset: Any = 0, **_: Any
) -> torch.Tensor:
    """Return how many tokens before and after itself each token of the current pack sees, `[2]`, on the host.

    This is transformers' interface for masks. Raises UnsupportedAttention where the rule is no window.
    """
    current: Pack = _local.pack
    longest = current.longest
    rows = np.arange(longest)
    if longest > PROBED_ROWS:  # drawn, so that no period of the rule hides; the ends tell the window's sides
        drawn = np.random.default_rng(longest).choice(longest, PROBED_ROWS - 2, replace=False)
        rows = np.unique(np.concatenate([[0, longest - 1], drawn]))
    queries, keys = torch.from_numpy(rows)[None, None, :, None], torch.arange(longest)[None, None, None]
    none = torch.zeros(1, 1, 1, 1, dtype=torch.int64)
    sees = mask_function(none, none, queries, keys)
    sees = torch.as_tensor(sees).cpu().expand(1, 1, len(rows), longest)[0, 0]
    before, after = int(sees[-1].sum()) - 1, int(sees[0].sum()) - 1
    distance = keys[0, 0] - queries[0, 0]
    if batch_size != 1 or q_offset or kv_offset or not torch.equal(sees, (-before <= distance) & (distance <= after)):
        raise UnsupportedAttention("mask", "a rule that is no window")
    if longest > 1 and current.is_causal is not None and (after == 0) != current.is_causal:
        raise UnsupportedAttention("mask", "another direction than its layers have")
    return torch.tensor([UNLIMITED if side == longest - 1 else side for side in (before, after)])


def _window(module: Any, mask: torch.Tensor | None, settings: dict[str, Any], longest: int) -> tuple[int, int]:
    """Return the window of an attention call. Raises UnsupportedAttention for what packed texts cannot give."""
    for name, value in settings.items():
        known = name in ("scaling", "is_causal") or name in WITHOUT_EFFECT or name.startswith("cu_seq_lens")
        if not known and value is not None and not (name in ("dropout", "output_attentions") and not value):
            raise UnsupportedAttention(name, value if isinstance(value, bool | int | float | str) else "(a value)")
    if mask is None:  # the model asks for none, and does without windows then
        window = settings.get("sliding_window")
        if window is not None and window < longest:
            raise UnsupportedAttention("sliding_window", window)
        given = settings.get("is_causal")
        is_causal = getattr(module, "is_causal", True) if given is None else given
        return (UNLIMITED, 0) if is_causal else (UNLIMITED, UNLIMITED)
    if mask.shape != (2,) or mask.dtype != torch.int64:
        raise UnsupportedAttention("mask", f"a mask of its own, {tuple(mask.shape)}")
    before, after = mask.tolist()
    return before, after


def grouped_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **settings: Any,
) -> tuple[torch.Tensor, None]:
    """Return attention inside each text of the current pack, `[1, tokens, heads, width]`: transformers' interface."""
    current: Pack = _local.pack
    before, after = _window(module, attention_mask, settings, current.longest)
    rows = last_layer.rows_of(module)
    if rows is not None:
        return _of_chosen(module, (query, key, value), rows, (before, after), settings.get("scaling")), None
    scale = settings.get("scaling")
    heads = query.shape[1]
    out = query.new_empty(1, query.shape[2], heads, value.shape[-1])
    attend = partial(functional.scaled_dot_product_attention, scale=scale, enable_gqa=heads != key.shape[1])
    for start, texts, length in current.groups:
        part = slice(start, start + texts * length)
        q, k, v = (_grouped(states, part, texts, length) for states in (query, key, value))
        if length < SHORT:
            q, k, v = q.float(), k.float(), v.float()
        reaches_start, reaches_end = not 0 <= before < length - 1, not 0 <= after < length - 1
        is_causal = reaches_start and after == 0 and length > 1
        mask = None if reaches_start and (reaches_end or is_causal) else _visible(length, before, after, query.device)
        out[0, part].view(texts, length, heads, -1).copy_(attend(q, k, v, mask, is_causal=is_causal).transpose(1, 2))
    return out, None


def _of_chosen(
    module: Any, given: Sequence[torch.Tensor], rows: torch.Tensor, window: tuple[int, int], scale: float | None
) -> torch.Tensor:
    """Return attention of one token of each text, `[1, tokens, heads, width]`; what other rows hold is undefined."""
    current: Pack = _local.pack
    query, key, value = given
    (before, after), heads = window, query.shape[1]
    parts, masks, first = [], list[torch.Tensor | None](), 0
    for start, texts, length in current.groups:
        chosen = rows[first : first + texts]
        first += texts
        parts.append((slice(start, start + texts * length), texts, length))
        if not 0 <= before < length - 1 and (not 0 <= after < length - 1 or current.is_causal):
            masks.append(None)
            continue
        offsets = torch.arange(texts, device=rows.device) * length + start
        masks.append(_visible(length, before, after, query.device)[chosen - offsets][:, None])
    queries = query[0, :, rows]
    if last_layer.defers(module):
        states = key[0].transpose(0, 1).flatten(1)
        answers = last_layer.attend_deferred(module, queries, states, parts, masks, scale)
    else:
        attend = partial(functional.scaled_dot_product_attention, scale=scale, enable_gqa=heads != key.shape[1])
        several, first = [], 0
        for (part, texts, length), mask in zip(parts, masks, strict=True):
            k, v = (_grouped(states, part, texts, length) for states in (key, value))
            q = queries[:, first : first + texts].transpose(0, 1)[:, :, None]
            several.append(attend(q, k, v, None if mask is None else mask[:, None])[:, :, 0])
            first += texts
        answers = torch.cat(several)
    out = query.new_empty(1, query.shape[2], heads, value.shape[-1])
    out[0, rows] = answers
    return out


def _visible(length: int, before: int, after: int, device: torch.device) -> torch.Tensor:
    """Return which tokens, `[queries, keys]`, see one another in a text of `length` tokens."""
    make = _sees if length <= KEPT else _sees.__wrapped__  # the next layer asks for the same; of long texts it is large
    return make(length, before, after, device)


@lru_cache(maxsize=64)
def _sees(length: int, before: int, after: int, device: torch.device) -> torch.Tensor:
    positions = torch.arange(length, device=device)
    distance = positions - positions[:, None]
    sees = torch.ones(length, length, dtype=torch.bool, device=device)
    if before != UNLIMITED:
        sees &= distance >= -before
    return sees if after == UNLIMITED else sees & (distance <= after)


def varlen_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **settings: Any,
) -> tuple[torch.Tensor, None]:
    """Return attention inside each text of the current pack by torch's kernel for variable lengths (CUDA, half)."""
    return _of_all(_flash, module, (query, key, value), attention_mask, settings)


def efficient_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **settings: Any,
) -> tuple[torch.Tensor, None]:
    """Return attention inside each text of the current pack by the memory-efficient kernel (CUDA, any dtype)."""
    return _of_all(_memory_efficient, module, (query, key, value), attention_mask, settings)


Lengths = tuple[torch.Tensor, torch.Tensor, int, int]  # starts of queries and of keys, most queries and most keys


def _of_all(
    kernel: Callable[..., torch.Tensor],
    module: Any,
    given: Sequence[torch.Tensor],
    attention_mask: torch.Tensor | None,
    settings: dict[str, Any],
) -> tuple[torch.Tensor, None]:
    """Return attention by a kernel that takes all texts at once: queries, keys, values, lengths, scale, window."""
    current: Pack = _local.pack
    q, k, v = (states[0].transpose(0, 1) for states in given)
    starts, longest = current.starts, current.longest
    window = _window(module, attention_mask, settings, longest)
    rows = last_layer.rows_of(module)
    if rows is not None:
        q, starts = q[rows], torch.arange(len(rows) + 1, dtype=starts.dtype, device=starts.device)
        # The kernel takes the one query of a text for its last token, which it is in a causal model alone.
        if not current.is_causal and window != (UNLIMITED, UNLIMITED):
            raise UnsupportedAttention("mask", f"a window of {window} around a token that is not the last")
        # With a window that ends at itself, which hides nothing from it, the kernel never splits the keys of a text, so
        # that its result does not depend on its neighbours. (`num_splits` is refused on ROCm, and by torch 2.12.)
        longest, window = 1, (window[0], 0)
    answers = kernel(q, k, v, (starts, current.starts, longest, current.longest), settings.get("scaling"), window)
    if rows is None:
        return answers[None], None
    spread = answers.new_empty(given[0].shape[2], *answers.shape[1:])
    spread[rows] = answers
    return spread[None], None


def _flash(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: Lengths, scale: float | None, window: tuple[int, int]
) -> torch.Tensor:
    from torch.nn.attention.varlen import varlen_attn

    has_groups = "enable_gqa" in _options(varlen_attn)  # torch 2.12
    grouped: dict[str, Any] = {"enable_gqa": q.shape[1] != k.shape[1]} if has_groups else {}
    k, v = (k, v) if has_groups else _for_each_head(q, k, v)
    out = varlen_attn(q, k, v, *lengths, scale=scale, window_size=window, **grouped)
    return out[0] if isinstance(out, tuple) else out  # no other result is asked for


def _memory_efficient(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: Lengths, scale: float | None, window: tuple[int, int]
) -> torch.Tensor:
    """Return attention by the kernel of `scaled_dot_product_attention` in float32, with where each text begins.

    It has causal windows, and none that a token is in the middle of.
    """
    before, after = window
    if after not in (0, UNLIMITED) or (after == UNLIMITED != before):
        raise UnsupportedAttention("mask", f"a window of {window}")
    k, v = _for_each_head(q, k, v)
    out = torch.ops.aten._efficient_attention_forward(
        q[None],
        k[None],
        v[None],
        None,
        *lengths,
        0.0,
        0 if after == UNLIMITED else FROM_THE_END,
        scale=scale,
        window_size=None if before == UNLIMITED else before + 1,
    )
    answers: torch.Tensor = out[0][0]
    return answers


def _for_each_head(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys and values of as many heads as the queries have."""
    groups = q.shape[1] // k.shape[1]
    return (k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)) if groups > 1 else (k, v)


def has_varlen() -> bool:
    """Tell whether this torch, 2.11 or later, has the kernel with the options that packed texts need."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return False
    return {"scale", "window_size"} <= _options(varlen_attn)


@lru_cache(maxsize=4)
def _options(function: Callable[..., Any]) -> frozenset[str]:
    return frozenset(inspect.signature(function).parameters)


def unmasked(*, attention_mask: torch.Tensor | None, **asked: Any) -> torch.Tensor | None:
    """Return transformers' own mask of unpadded texts.

    It is given a mask of ones: without any, transformers reads the positions on the host, which waits for the GPU.
    """
    from transformers.masking_utils import sdpa_mask

    return sdpa_mask(attention_mask=None, **asked)


def register() -> None:
    """Register the attention functions with transformers under names of ours."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    AttentionInterface.register(UNMASKED, sdpa_attention_forward)
    AttentionMaskInterface.register(UNMASKED, unmasked)
    for name, function in _functions().items():
        AttentionInterface.register(name, function)
        AttentionMaskInterface.register(name, attention_window)


def _functions() -> dict[str, Callable[..., tuple[torch.Tensor, None]]]:
    return {GROUPED: grouped_attention, VARLEN: varlen_attention, EFFICIENT: efficient_attention}


def opaque(attention: str) -> str:
    """Return the name of the same attention for a compiled model; the compiler leaves that function as it is."""
    from transformers import AttentionInterface, AttentionMaskInterface

    name = f"{attention}_opaque"
    AttentionInterface.register(name, torch.compiler.disable(_functions()[attention]))  # type: ignore[no-untyped-call]
    AttentionMaskInterface.register(name, attention_window)
    return name


def _grouped(states: torch.Tensor, part: slice, texts: int, length: int) -> torch.Tensor:
    """Return `[texts, heads, length, width]` of `[1, heads, tokens, width]`, without copying where it can be."""
    together = states[0, :, part].transpose(0, 1)
    return together.view(texts, length, *together.shape[1:]).transpose(1, 2)
