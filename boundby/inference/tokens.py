"""Texts to token ids, in chunks, and which texts are the same."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

TOKENIZER_CHUNK = 1000  # texts per call: the Rust tokenizer is fed well, and memory stays flat


@dataclass(frozen=True)
class Tokens:
    """Token ids of texts, cut to a length; `truncated` counts the texts that were cut, None where it is not known."""

    ids: list[np.ndarray]
    truncated: int | None

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each text."""
        return np.fromiter((each.size for each in self.ids), dtype=np.int64, count=len(self.ids))

    def distinct(self) -> tuple["Tokens", np.ndarray]:
        """Return every sequence of ids once, in the order of first occurrence, and where each text stands in them."""
        places: dict[bytes, int] = {}
        where = np.empty(len(self.ids), dtype=np.int64)
        kept: list[np.ndarray] = []
        for row, each in enumerate(self.ids):
            where[row] = place = places.setdefault(each.tobytes(), len(kept))
            if place == len(kept):
                kept.append(each)
        return Tokens(kept, self.truncated), where


def tokenize(tokenizer: Any, texts: Sequence[str], max_length: int) -> Tokens:
    """Return the token ids of each text, cut to `max_length` tokens including special ones."""
    ids: list[np.ndarray] = []
    truncated: int | None = 0
    for chunk in _chunks(texts):
        found, encodings = _encoded(tokenizer, chunk, max_length)
        ids += [np.asarray(each, dtype=np.int32) for each in found]
        if truncated is not None:  # encodings are None from a tokenizer written in Python
            truncated = None if encodings is None else truncated + sum(bool(each.overflowing) for each in encodings)
    empty = next((row for row, each in enumerate(ids) if each.size == 0), None)
    if empty is not None:
        raise ValueError(f"text {empty} has no tokens: {texts[empty][:60]!r}; leave such rows out")
    return Tokens(ids, truncated)


def _encoded(tokenizer: Any, texts: list[str], max_length: int) -> tuple[list[list[int]], list[Any] | None]:
    """Return the ids of each text and what the Rust tokenizer says of them, without offsets: it is faster so."""
    fast = _without_offsets(tokenizer)
    # The usual call of one text tells the Rust tokenizer where to cut all of them.
    encoded = tokenizer(
        texts[:1] if fast else texts, truncation=True, max_length=max_length, return_attention_mask=False
    )
    if fast is None:
        return encoded["input_ids"], encoded.encodings
    encodings = fast(texts)
    return [each.ids for each in encodings], encodings


def _without_offsets(tokenizer: Any) -> Callable[[list[str]], list[Any]] | None:
    """Return the Rust tokenizer's call without offsets; None where the tokenizer does more to a text than that one."""
    from transformers import PreTrainedTokenizerFast

    names = ("__call__", "_encode_plus", "_batch_encode_plus")
    plain = isinstance(tokenizer, PreTrainedTokenizerFast) and all(
        getattr(type(tokenizer), name, None) is getattr(PreTrainedTokenizerFast, name, None) for name in names
    )
    return getattr(tokenizer.backend_tokenizer, "encode_batch_fast", None) if plain else None


def _chunks(texts: Sequence[str]) -> Iterator[list[str]]:
    for start in range(0, len(texts), TOKENIZER_CHUNK):
        yield list(texts[start : start + TOKENIZER_CHUNK])
