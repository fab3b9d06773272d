"""Texts to token ids, and which of them go together: a pure function of the lengths and the token budget."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import torch

from boundby.inference.rotary import Rotary, rotary_of
from boundby.machine import is_gpu
from boundby.timing import Shape

TOKENIZER_CHUNK = 1000  # texts per call: the Rust tokenizer is fed well, and memory stays flat


@dataclass(frozen=True)
class Tokens:
    """Token ids of texts, cut to a length; `truncated` counts the texts that were cut, None where it is not known."""

    ids: list[np.ndarray]
    truncated: int | None

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each text."""
        return np.fromiter((ids.size for ids in self.ids), dtype=np.int64, count=len(self.ids))

    def distinct(self) -> tuple["Tokens", np.ndarray]:
        """Return every sequence of ids once, in the order of first occurrence, and where each text stands in them."""
        indexes: dict[bytes, int] = {}
        where = np.empty(len(self.ids), dtype=np.int64)
        kept: list[np.ndarray] = []
        for row, ids in enumerate(self.ids):
            where[row] = index = indexes.setdefault(ids.tobytes(), len(kept))
            if index == len(kept):
                kept.append(ids)
        return Tokens(kept, self.truncated), where


def tokenize(tokenizer: Any, texts: Sequence[str], max_length: int) -> Tokens:
    """Return the token ids of each text, cut to `max_length` tokens including special ones.

    Raises ValueError for a text without tokens, an input that is not one str, and a tokenizer with token types (XLNet).
    """
    if isinstance(texts, str):
        raise ValueError("one text was given as it is; give a list of texts")
    other = next((row for row, text in enumerate(texts) if not isinstance(text, str)), None)
    if other is not None:
        kind = "a pair" if isinstance(texts[other], list | tuple) else type(texts[other]).__name__
        raise ValueError(f"text {other} is {kind}, not one text: pairs are not supported; give one str each")
    ids: list[np.ndarray] = []
    truncated: int | None = 0
    for start in range(0, len(texts), TOKENIZER_CHUNK):
        chunk_ids, encodings = _encoded(tokenizer, list(texts[start : start + TOKENIZER_CHUNK]), max_length)
        ids += [np.asarray(row, dtype=np.int32) for row in chunk_ids]
        if truncated is not None:  # encodings are None from a tokenizer written in Python
            truncated = None if encodings is None else truncated + sum(bool(row.overflowing) for row in encodings)
    empty = next((row for row, row_ids in enumerate(ids) if row_ids.size == 0), None)
    if empty is not None:
        raise ValueError(f"text {empty} has no tokens: {texts[empty][:60]!r}; leave such rows out")
    return Tokens(ids, truncated)


def _encoded(tokenizer: Any, texts: list[str], max_length: int) -> tuple[list[list[int]], list[Any] | None]:
    """Return the ids of each text and the Rust tokenizer's encodings, without offsets, which would slow it down."""
    fast = _without_offsets(tokenizer)
    # The usual call of one text tells the Rust tokenizer where to cut all of them.
    encoded = tokenizer(
        texts[:1] if fast else texts, truncation=True, max_length=max_length, return_attention_mask=False
    )
    if any(any(types) for types in encoded.get("token_type_ids", ())):
        raise ValueError(
            f"{type(tokenizer).__name__} marks some tokens of a text by type (token_type_ids), which its model needs "
            "and does not get here"
        )
    if fast is None:
        return encoded["input_ids"], encoded.encodings
    encodings = fast(texts)
    return [encoding.ids for encoding in encodings], encodings


def _without_offsets(tokenizer: Any) -> Callable[[list[str]], list[Any]] | None:
    """Return the Rust tokenizer's call without offsets; None where the Python tokenizer does more than that call."""
    from transformers import PreTrainedTokenizerFast

    names = ("__call__", "_encode_plus", "_batch_encode_plus")
    plain = isinstance(tokenizer, PreTrainedTokenizerFast) and all(
        getattr(type(tokenizer), name, None) is getattr(PreTrainedTokenizerFast, name, None) for name in names
    )
    return getattr(tokenizer.backend_tokenizer, "encode_batch_fast", None) if plain else None


@dataclass(frozen=True)
class Batch:
    """Texts padded on the right to the longest of them, on the device. `rows` are their positions in the source."""

    rows: tuple[int, ...]
    input_ids: torch.Tensor
    attention_mask: torch.Tensor
    tokens_real: int

    @property
    def tokens_padded(self) -> int:
        """Tokens that the model computes: rows times the longest."""
        return self.input_ids.numel()

    @property
    def shape(self) -> Shape:
        """The samples, and the tokens to which each is padded."""
        return Shape(*self.input_ids.shape)

    def to(self, device: torch.device) -> "Batch":
        """Return the same batch on another device."""
        return replace(self, input_ids=self.input_ids.to(device), attention_mask=self.attention_mask.to(device))

    @property
    def is_padded(self) -> bool:
        """Tell whether any row is shorter than the longest."""
        return self.tokens_real < self.tokens_padded


def collate(tokens: Tokens, rows: Sequence[int], pad_id: int, device: torch.device) -> Batch:
    """Return the texts at `rows` as one batch on `device`, padded on the right with `pad_id`."""
    chosen = [tokens.ids[row] for row in rows]
    lengths = np.fromiter((ids.size for ids in chosen), dtype=np.int64, count=len(chosen))
    is_real = np.arange(lengths.max()) < lengths[:, None]
    input_ids = np.full(is_real.shape, pad_id, dtype=np.int64)
    input_ids[is_real] = np.concatenate(chosen)
    there, tokens_real = on_device(input_ids, device), int(lengths.sum())
    is_padded = tokens_real < input_ids.size  # without padding nothing reads the mask, and it is not copied
    mask = on_device(is_real.astype(np.int64), device) if is_padded else torch.ones_like(there)
    return Batch(rows=tuple(rows), input_ids=there, attention_mask=mask, tokens_real=tokens_real)


def on_device(values: np.ndarray, device: torch.device) -> torch.Tensor:
    """Return the values there; to a GPU they are copied from pinned memory, and the host does not wait for that."""
    tensor = torch.from_numpy(values)
    return tensor.pin_memory().to(device, non_blocking=True) if is_gpu(device) else tensor.to(device)


def token_budget_batches(lengths: Sequence[int] | np.ndarray, budget: int) -> list[list[int]]:
    """Return rows in batches of similar length, each of at most `budget` padded tokens, or one longer row.

    The longest come first: memory runs out at the start or not at all. Rows of equal length keep their order.
    """
    return _gathered(lengths, budget, lambda length, longest: longest)


def packs(lengths: Sequence[int] | np.ndarray, budget: int) -> list[list[int]]:
    """Return rows as `token_budget_batches` does, but without padding: at most `budget` tokens of their own."""
    return _gathered(lengths, budget, lambda length, longest: length)


def _gathered(
    lengths: Sequence[int] | np.ndarray, budget: int, tokens_of: Callable[[int, int], int]
) -> list[list[int]]:
    """Return groups of rows, longest first; `tokens_of` says what a row adds to a group with this longest row."""
    batches: list[list[int]] = []
    room = longest = 0
    for row in np.argsort(-np.asarray(lengths), kind="stable").tolist():
        length = int(lengths[row])
        if not batches or tokens_of(length, longest) > room:
            batches.append([])
            room, longest = budget, length
        batches[-1].append(row)
        room -= tokens_of(length, longest)
    return batches


def batches_in_order(rotary: Rotary, tokens: Tokens, rows: Sequence[int], size: int) -> list[list[int]]:
    """Return the rows in batches of `size`, unsorted.

    One is split where rotary positions depend on the longest text.
    """
    batches = (np.asarray(rows[start : start + size]) for start in range(0, len(rows), size))
    return [batch[part].tolist() for batch in batches for part in rotary.groups(tokens.lengths[batch])]


def forward(model: Any, batch: Batch) -> torch.Tensor:
    """Return the logits of one batch, `[rows, labels]`, on the device and in the model's dtype.

    Only a padded batch gets a mask. Rotary positions are reset first.
    """
    rotary_of(model).forget()
    mask = batch.attention_mask if batch.is_padded else None
    return cast(torch.Tensor, model(input_ids=batch.input_ids, attention_mask=mask).logits)
