"""How a batch goes through a model: packed, padded without a mask, or padded with one.

Which of them a model can take is read off it (`candidates`); whether the reading is right is decided by the self-check
against the stock forward, never assumed.
"""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn

from boundby.inference import compilation, last_layer, packing
from boundby.inference.batches import Batch, collate, packs, token_budget_batches
from boundby.inference.precision import Precision
from boundby.inference.reference import padding_id
from boundby.inference.tokens import Tokens
from boundby.inference.working_copy import float32_head, in_dtype

HALF = (torch.bfloat16, torch.float16)


class Strategy(Protocol):
    """One way to compute logits."""

    name: str
    device: torch.device
    trims: bool  # the last layer

    def compile(self) -> None:
        """Have the layers compiled at the first batch. Raises ValueError where the model has none that are known."""
        ...

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
    is_causal: bool
    trims: bool  # the last layer: it computes only the tokens that the head reads

    def seen(self, tokens: Tokens, rows: Sequence[int]) -> tuple[Tokens, np.ndarray]:
        """Return the texts at `rows`, and the place in each of the token that the head reads.

        A trimmed last layer has one query per text, which sees all of it: in a causal model the text ends there.
        """
        ids, places = [tokens.ids[row] for row in rows], self.head_rows(tokens, rows)
        if self.trims and self.is_causal:
            ids = [each[: place + 1] for each, place in zip(ids, places, strict=True)]
        return Tokens(ids, None), places

    def reading(self, rows: torch.Tensor) -> contextlib.AbstractContextManager[None]:
        """Have the block's forward compute no other rows in its last layer, if that is trimmed."""
        return last_layer.reading(rows) if self.trims else contextlib.nullcontext()

    def head_rows(self, tokens: Tokens, rows: Sequence[int]) -> np.ndarray:
        """Return the place, in each text, of the token that the head reads, as the stock head chooses it."""
        if not self.reads_last:
            return np.zeros(len(rows), dtype=np.int64)
        return np.fromiter((self._last(tokens.ids[row]) for row in rows), dtype=np.int64, count=len(rows))

    def rows_in(self, batch: Batch, tokens: Tokens) -> torch.Tensor:
        """Return where, in a padded batch whose texts stand one after another, the tokens are that the head reads."""
        first = np.arange(len(batch.rows)) * batch.input_ids.shape[1]
        return torch.from_numpy(first + self.head_rows(tokens, batch.rows)).to(self.device)

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


class _Wired:
    """What all strategies have of their wiring."""

    def __init__(self, wiring: _Wiring) -> None:
        self._wiring, self.device, self.trims = wiring, wiring.device, wiring.trims

    def compile(self) -> None:
        """Have the layers compiled at the first batch. Raises ValueError where the model has none that are known."""
        compilation.compile_layers(self._wiring.model, but_last=self.trims)


class Packed(_Wired):
    """Texts in one row without padding."""

    def __init__(self, wiring: _Wiring, attention: str) -> None:
        super().__init__(wiring)
        packing.register()
        self.name = "packed, variable-length attention" if attention == packing.VARLEN else "packed, by length"
        self._attention = attention
        wiring.model.set_attn_implementation(attention)
        embeddings = getattr(wiring.model.base_model, "embeddings", None)
        self._position_skips = getattr(embeddings, "padding_idx", None)  # RoBERTa and its kin alone have it there

    def compile(self) -> None:
        """Have the layers compiled around the attention at the first batch."""
        super().compile()
        self._wiring.model.set_attn_implementation(packing.opaque(self._attention))

    def batches(self, lengths: np.ndarray, budget: int) -> list[list[int]]:
        """Return packs."""
        return packs(lengths, budget)

    def cells(self, lengths: np.ndarray) -> int:
        """Return the tokens: nothing is padded."""
        return int(lengths.sum())

    def logits(self, tokens: Tokens, rows: Sequence[int]) -> torch.Tensor:
        """Return the logits of one pack."""
        wiring = self._wiring
        seen, places = wiring.seen(tokens, rows)
        direction = wiring.is_causal if wiring.trims else None
        current = packing.pack(seen, range(len(rows)), places, self._position_skips, wiring.device, direction)
        with current, wiring.reading(current.head_rows):
            states = wiring.model.base_model(
                input_ids=current.input_ids,
                attention_mask=torch.ones_like(current.input_ids),  # of padding, of which there is none
                position_ids=current.position_ids,
                **_no_cache(wiring),
            ).last_hidden_state
        return wiring.head(states[0, current.head_rows])


class Unmasked(_Wired):
    """Padding on the right and no mask: in a causal model no real token sees it."""

    name = "padded on the right without a mask"

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
        chosen = wiring.rows_in(batch, tokens)
        with wiring.reading(chosen):
            states = wiring.model.base_model(input_ids=batch.input_ids, **_no_cache(wiring)).last_hidden_state
        return wiring.head(states.flatten(0, 1)[chosen])


class Masked(Unmasked):
    """Padding with a mask through the model's own forward; texts of one length need no mask."""

    name = "padded with a mask"

    def logits(self, tokens: Tokens, rows: Sequence[int]) -> torch.Tensor:
        """Return the logits of one batch."""
        wiring = self._wiring
        batch = collate(tokens, rows, wiring.pad_id, wiring.device)
        mask = batch.attention_mask if batch.is_padded else None
        with wiring.reading(wiring.rows_in(batch, tokens)):
            return wiring.model(input_ids=batch.input_ids, attention_mask=mask).logits.float()


def candidates(model: Any, tokenizer: Any, precision: Precision, trims: bool) -> list[tuple[str, Any]]:
    """Return what this model looks able to take, fastest first: name and a callable that makes the strategy.

    Each comes first with its last layer trimmed, if `trims` and the model is of a kind that can be. The last one,
    `masked`, asks nothing of the model.
    """
    can_trim = trims and _has_known_head(model) and _is_causal(model) is not None and last_layer.is_known(model)
    found: list[tuple[str, Any]] = []
    for name, make, own_head in _ways(model, precision):
        for trimmed in (True, False) if can_trim else (False,):
            wired = partial(_wire, model, tokenizer, precision.dtype, own_head, trimmed)
            found.append((f"{name}, trimmed" if trimmed else name, lambda make=make, wired=wired: make(wired())))
    return found


def _ways(model: Any, precision: Precision) -> list[tuple[str, Callable[[_Wiring], Strategy], bool]]:
    """Return name, strategy, and whether it needs a head of ours."""
    found: list[tuple[str, Callable[[_Wiring], Strategy], bool]] = []
    if _has_known_head(model):
        device = model.device.type
        if device == "cuda" and precision.dtype in HALF and packing.has_varlen():
            found.append(("varlen", partial(Packed, attention=packing.VARLEN), True))
        if device == "cpu":
            found.append(("grouped", partial(Packed, attention=packing.GROUPED), True))
        if _is_causal(model):
            found.append(("unmasked", Unmasked, True))
    return [*found, ("masked", Masked, False)]


def _wire(model: Any, tokenizer: Any, dtype: torch.dtype, own_head: bool, trims: bool) -> _Wiring:
    copied = in_dtype(model, dtype)
    if own_head:
        float32_head(copied)
    if trims:
        last_layer.trim(copied)
    return _Wiring(
        model=copied,
        device=model.device,
        pad_id=padding_id(model, tokenizer),
        reads_last=isinstance(getattr(model, "score", None), nn.Linear),
        skipped_id=model.config.get_text_config().pad_token_id,
        is_causal=bool(_is_causal(model)),
        trims=trims,
    )


def _has_known_head(model: Any) -> bool:
    """Tell whether the head is `score` after the last token, or a `classifier` after the first."""
    base = getattr(model, "base_model", model)
    return base is not model and any(hasattr(model, name) for name in ("score", "classifier"))


def _is_causal(model: Any) -> bool | None:
    """Tell whether no token sees a later one; None where that differs from layer to layer."""
    said = {module.is_causal for module in model.modules() if isinstance(getattr(module, "is_causal", None), bool)}
    return None if len(said) == 2 else True in said


def _no_cache(wiring: _Wiring) -> dict[str, bool]:
    return {"use_cache": False} if wiring.reads_last else {}
