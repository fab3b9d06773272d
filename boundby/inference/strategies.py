"""How a batch goes through a model: packed, padded without a mask, or padded with one.

Which of them a model can take is read off it (`candidates`); whether the reading is right is decided by the self-check
against the stock forward, never assumed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn

from boundby.inference import packing
from boundby.inference.batches import collate, packs, token_budget_batches
from boundby.inference.precision import Precision
from boundby.inference.reference import padding_id
from boundby.inference.tokens import Tokens
from boundby.inference.working_copy import float32_head, in_dtype

HALF = (torch.bfloat16, torch.float16)


class Strategy(Protocol):
    """One way to compute logits."""

    name: str
    device: torch.device

    def batches(self, lengths: np.ndarray, budget: int) -> list[list[int]]:
        """Return which rows go together: a pure function of the lengths and the budget."""
        ...

    def cells(self, lengths: np.ndarray) -> int:
        """Return the tokens, padding included, that the model computes for one batch of texts of these lengths."""
        ...

    def logits(self, tokens: Tokens, rows: Sequence[int]) -> torch.Tensor:
        """Return the logits of one batch, `[rows, labels]`, float32, on the device."""
        ...


@dataclass(frozen=True)
class _Wiring:
    """What the strategies know of a model: its working copy, what fills a batch, and which token the head reads."""

    model: Any
    device: torch.device
    pad_id: int
    reads_last: bool
    skipped_id: int | None  # the head of a decoder steps back over this id

    def head_rows(self, tokens: Tokens, rows: Sequence[int]) -> np.ndarray:
        """Return the place, in each text, of the token that the head reads, as the stock head chooses it."""
        if not self.reads_last:
            return np.zeros(len(rows), dtype=np.int64)
        return np.fromiter((self._last(tokens.ids[row]) for row in rows), dtype=np.int64, count=len(rows))

    def _last(self, ids: np.ndarray) -> int:
        if self.skipped_id is None or ids[-1] != self.skipped_id:
            return ids.size - 1
        others = np.flatnonzero(ids != self.skipped_id)
        return int(others[-1]) if others.size else 0

    def head(self, states: torch.Tensor) -> torch.Tensor:
        """Return the logits of `[rows, hidden]`, the states of the tokens that the head reads."""
        model, states = self.model, states.float()
        if self.reads_last:
            return model.score(states)
        if hasattr(model, "pre_classifier"):
            return model.classifier(torch.relu(model.pre_classifier(states)))
        pooler = model.base_model.pooler_in_head
        return model.classifier(states[:, None] if pooler is None else pooler(states[:, None]))


class Packed:
    """Texts in one row without padding."""

    def __init__(self, wiring: _Wiring, attention: str) -> None:
        packing.register()
        self.name = "packed, variable-length attention" if attention == packing.VARLEN else "packed, by length"
        self._wiring, self.device = wiring, wiring.device
        wiring.model.set_attn_implementation(attention)
        embeddings = getattr(wiring.model.base_model, "embeddings", None)
        self._position_skips = getattr(embeddings, "padding_idx", None)  # RoBERTa and its kin alone have it there

    def batches(self, lengths: np.ndarray, budget: int) -> list[list[int]]:
        """Return packs."""
        return packs(lengths, budget)

    def cells(self, lengths: np.ndarray) -> int:
        """Return the tokens: nothing is padded."""
        return int(lengths.sum())

    def logits(self, tokens: Tokens, rows: Sequence[int]) -> torch.Tensor:
        """Return the logits of one pack."""
        wiring = self._wiring
        head_rows = wiring.head_rows(tokens, rows)
        current = packing.pack(tokens, rows, head_rows, self._position_skips, wiring.device)
        with current:
            states = wiring.model.base_model(
                input_ids=current.input_ids,
                position_ids=current.position_ids,
                **_no_cache(wiring),
            ).last_hidden_state
        return wiring.head(states[0, current.head_rows])


class Unmasked:
    """Padding on the right and no mask: in a causal model no real token sees it."""

    name = "padded on the right without a mask"

    def __init__(self, wiring: _Wiring) -> None:
        self._wiring, self.device = wiring, wiring.device

    def batches(self, lengths: np.ndarray, budget: int) -> list[list[int]]:
        """Return padded batches."""
        return token_budget_batches(lengths, budget)

    def cells(self, lengths: np.ndarray) -> int:
        """Return rows times the longest."""
        return int(lengths.max()) * len(lengths)

    def logits(self, tokens: Tokens, rows: Sequence[int]) -> torch.Tensor:
        """Return the logits of one batch."""
        wiring = self._wiring
        batch = collate(tokens, rows, wiring.pad_id, wiring.device)
        states = wiring.model.base_model(input_ids=batch.input_ids, **_no_cache(wiring)).last_hidden_state
        places = torch.from_numpy(wiring.head_rows(tokens, rows)).to(wiring.device)
        return wiring.head(states[torch.arange(len(rows), device=wiring.device), places])


class Masked(Unmasked):
    """Padding with a mask through the model's own forward; texts of one length need no mask."""

    name = "padded with a mask"

    def logits(self, tokens: Tokens, rows: Sequence[int]) -> torch.Tensor:
        """Return the logits of one batch."""
        wiring = self._wiring
        batch = collate(tokens, rows, wiring.pad_id, wiring.device)
        mask = batch.attention_mask if batch.is_padded else None
        return wiring.model(input_ids=batch.input_ids, attention_mask=mask).logits.float()


def candidates(model: Any, tokenizer: Any, precision: Precision) -> list[tuple[str, Any]]:
    """Return what this model looks able to take, fastest first: name and a callable that makes the strategy.

    The last one, `masked`, asks nothing of the model.
    """
    device = model.device

    def wired(own_head: bool) -> _Wiring:
        return _wire(model, tokenizer, precision.dtype, own_head)

    found: list[tuple[str, Any]] = []
    if _has_known_head(model):
        if device.type == "cuda" and precision.dtype in HALF and packing.has_varlen():
            found.append(("varlen", lambda: Packed(wired(True), packing.VARLEN)))
        if device.type == "cpu":
            found.append(("grouped", lambda: Packed(wired(True), packing.GROUPED)))
        if _is_causal(model):
            found.append(("unmasked", lambda: Unmasked(wired(True))))
    found.append(("masked", lambda: Masked(wired(False))))
    return found


def _wire(model: Any, tokenizer: Any, dtype: torch.dtype, own_head: bool) -> _Wiring:
    copied = in_dtype(model, dtype)
    if own_head:
        float32_head(copied)
    return _Wiring(
        model=copied,
        device=model.device,
        pad_id=padding_id(model, tokenizer),
        reads_last=isinstance(getattr(model, "score", None), nn.Linear),
        skipped_id=model.config.get_text_config().pad_token_id,
    )


def _has_known_head(model: Any) -> bool:
    """Tell whether the head is `score` after the last token, or a `classifier` after the first."""
    base = getattr(model, "base_model", model)
    return base is not model and any(hasattr(model, name) for name in ("score", "classifier"))


def _is_causal(model: Any) -> bool:
    said = [module.is_causal for module in model.modules() if isinstance(getattr(module, "is_causal", None), bool)]
    return bool(said) and all(said)


def _no_cache(wiring: _Wiring) -> dict[str, bool]:
    return {"use_cache": False} if wiring.reads_last else {}
