"""How a batch goes through a model: packed, padded without a mask, or padded with one.

Which of them a model can take is read off it (`candidates`); whether the reading is right is decided by the self-check
against the stock forward, never assumed.
"""

import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from torch import nn

from boundby.inference import last_layer, packing
from boundby.inference.batches import Tokens, collate, on_device, packs, token_budget_batches
from boundby.inference.precision import Precision
from boundby.inference.reference import float32_head, padding_id
from boundby.inference.rotary import Rotary, rotary_of
from boundby.machine import COMPILE_OPTIONS, has_bfloat16_matmul, is_gpu, is_host, use_private_cache

HALF = (torch.bfloat16, torch.float16)
BACKEND = "inductor"


class Strategy:
    """One way to compute logits, on a working copy of the model whose last layer, if `trims`, computes what is read."""

    name: str
    is_padded = True
    own_head = True  # computed here in float32, rather than by the model's forward
    is_reentrant = False  # several threads may compute a batch each

    def __init__(self, model: Any, tokenizer: Any, precision: Precision, trims: bool) -> None:
        self.device: torch.device = model.device
        self.trims = trims
        self.model = precision.copy_of(model)
        if self.own_head:
            float32_head(self.model)
        if trims:
            last_layer.trim(self.model)
        self._pad_id = padding_id(model, tokenizer)
        self._reads_last = isinstance(getattr(model, "score", None), nn.Linear)
        self._skipped_id = model.config.get_text_config().pad_token_id  # the head of a decoder steps back over it
        self._is_causal = bool(is_causal(model))
        self._no_cache = {"use_cache": False} if self._reads_last else {}
        self._rotary = Rotary(self.model)

    def batches(self, lengths: np.ndarray, budget: int) -> list[list[int]]:
        """Return which rows go together, the longest first: a pure function of the lengths and the budget."""
        groups = self._rotary.groups(lengths)
        return [rows[batch].tolist() for rows in groups for batch in self._filled(lengths[rows], budget)]

    def _filled(self, lengths: np.ndarray, budget: int) -> list[list[int]]:
        """Return batches of texts any of which may go together."""
        raise NotImplementedError

    def cells(self, lengths: np.ndarray) -> int:
        """Return the tokens, padding included, that the model computes for one batch of texts of these lengths."""
        return int(lengths.max()) * len(lengths)

    def logits(self, tokens: Tokens, rows: Sequence[int]) -> torch.Tensor:
        """Return the logits of one batch, `[rows, labels]`, float32, on the device."""
        raise NotImplementedError

    def compile(self) -> None:
        """Compile the layers, except a trimmed one, at the first batch. Raises ValueError as `compile_layers` does."""
        compile_layers(self.model, but_last=self.trims)

    def head_row(self, ids: np.ndarray) -> int:
        """Return the place of the token that the head reads in a text of these ids, as the stock head chooses it."""
        if not self._reads_last:
            return 0
        if self._skipped_id is None or ids[-1] != self._skipped_id:
            return len(ids) - 1
        others = np.flatnonzero(ids != self._skipped_id)
        return int(others[-1]) if others.size else 0

    def _head_rows(self, tokens: Tokens, rows: Sequence[int]) -> np.ndarray:
        return np.fromiter((self.head_row(tokens.ids[row]) for row in rows), dtype=np.int64, count=len(rows))

    def _reading(self, rows: torch.Tensor) -> contextlib.AbstractContextManager[None]:
        """Within the block, compute only these rows in the last layer if it is trimmed."""
        return last_layer.reading(rows) if self.trims else contextlib.nullcontext()

    def _head(self, states: torch.Tensor) -> torch.Tensor:
        """Return the logits of `[rows, hidden]`, the states of the tokens that the head reads."""
        model, states = self.model, states.float()
        if self._reads_last:
            logits = model.score(states)
        elif hasattr(model, "pre_classifier"):
            logits = model.classifier(torch.relu(model.pre_classifier(states)))
        else:
            pooler = model.base_model.pooler_in_head
            logits = model.classifier(states[:, None] if pooler is None else pooler(states[:, None]))
        return cast(torch.Tensor, logits)


class Packed(Strategy):
    """Texts in one row without padding."""

    is_padded = False

    def __init__(self, model: Any, tokenizer: Any, precision: Precision, trims: bool, *, attention: str) -> None:
        super().__init__(model, tokenizer, precision, trims)
        packing.register()
        if trims and attention == packing.GROUPED:
            last_layer.defer(self.model, model, precision.dtype)
        self.name = f"packed, {packing.NAMES[attention]}"
        self._attention = attention
        self.is_reentrant = not self._rotary  # whose modules hold the frequencies of the forward that goes on
        self.model.set_attn_implementation(attention)
        embeddings = getattr(self.model.base_model, "embeddings", None)
        self._position_skips = getattr(embeddings, "padding_idx", None)  # RoBERTa and its kin alone have it there

    def compile(self) -> None:
        """Compile the layers around the attention at the first batch."""
        super().compile()
        self.model.set_attn_implementation(packing.opaque(self._attention))

    def _filled(self, lengths: np.ndarray, budget: int) -> list[list[int]]:
        """Return packs."""
        return packs(lengths, budget)

    def cells(self, lengths: np.ndarray) -> int:
        """Return the tokens: nothing is padded."""
        return int(lengths.sum())

    def logits(self, tokens: Tokens, rows: Sequence[int]) -> torch.Tensor:
        """Return the logits of one pack.

        With a trimmed last layer a causal text ends at the token that is read, unless that changes its rotary
        positions.
        """
        ids, offsets = [tokens.ids[row] for row in rows], self._head_rows(tokens, rows)
        trims = self.trims
        if trims and self._is_causal:
            cut = [text[: offset + 1] for text, offset in zip(ids, offsets, strict=True)]
            trims = all(self._rotary.are_same(len(text), len(ours)) for text, ours in zip(ids, cut, strict=True))
            ids = cut if trims else ids
        direction = self._is_causal if trims else None
        current = packing.pack(ids, offsets, self._position_skips, self.device, direction)
        self._rotary.forget()
        with current, self._reading(current.head_rows) if trims else contextlib.nullcontext():
            states = self.model.base_model(
                input_ids=current.input_ids,
                attention_mask=torch.ones_like(current.input_ids),  # of padding, of which there is none
                position_ids=current.position_ids,
                **self._no_cache,
            ).last_hidden_state
        return self._head(states[0, current.head_rows])


class Padded(Strategy):
    """Padding on the right, with a mask if the model's own head is used; a causal model needs none."""

    def __init__(self, model: Any, tokenizer: Any, precision: Precision, trims: bool, *, masked: bool) -> None:
        self.name = "padded with a mask" if masked else "padded on the right without a mask"
        self.own_head = not masked
        super().__init__(model, tokenizer, precision, trims)
        self._is_unmasked = not masked and getattr(model.config, "_attn_implementation", None) == "sdpa"
        if self._is_unmasked:
            packing.register()
            self.model.set_attn_implementation(packing.UNMASKED)
        # The stock head of a decoder without a padding id takes one text at a time.
        self._alone = masked and self._skipped_id is None and (self._reads_last or self._is_causal)

    def _filled(self, lengths: np.ndarray, budget: int) -> list[list[int]]:
        """Return padded batches."""
        return token_budget_batches(lengths, 1 if self._alone else budget)

    def logits(self, tokens: Tokens, rows: Sequence[int]) -> torch.Tensor:
        """Return the logits of one batch."""
        batch = collate(tokens, rows, self._pad_id, self.device)
        starts = np.arange(len(rows)) * batch.input_ids.shape[1]
        read = on_device(starts + self._head_rows(tokens, rows), self.device)
        self._rotary.forget()
        with self._reading(read), self._kernels():
            if not self.own_head:
                mask = batch.attention_mask if batch.is_padded else None
                return cast(torch.Tensor, self.model(input_ids=batch.input_ids, attention_mask=mask).logits.float())
            ones = torch.ones_like(batch.input_ids) if self._is_unmasked else None
            states = self.model.base_model(
                input_ids=batch.input_ids, attention_mask=ones, **self._no_cache
            ).last_hidden_state
        return self._head(states.flatten(0, 1)[read])

    def _kernels(self) -> contextlib.AbstractContextManager[Any]:
        """Return the block in which a GPU attends in half precision without cuDNN, which plans each shape for 20 ms."""
        if not is_gpu(self.device) or next(self.model.parameters()).dtype not in HALF:
            return contextlib.nullcontext()
        from torch.nn.attention import SDPBackend, sdpa_kernel

        return sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])


class Converted(Strategy):
    """Texts padded with a mask, through the model as another library has converted it."""

    name = "converted, padded with a mask"
    own_head = False

    def __init__(self, model: Any, tokenizer: Any, precision: Precision) -> None:
        self.device: torch.device = model.device
        self.trims = False
        self.model = model
        self._session = precision.session
        self._rotary = rotary_of(model)
        self._pad_id = padding_id(model, tokenizer)

    def _filled(self, lengths: np.ndarray, budget: int) -> list[list[int]]:
        """Return padded batches."""
        return token_budget_batches(lengths, budget)

    def logits(self, tokens: Tokens, rows: Sequence[int]) -> torch.Tensor:
        """Return the logits of one batch. Raises ValueError with what the library says."""
        batch = collate(tokens, rows, self._pad_id, self.device)
        assert self._session
        try:
            logits = self._session(batch.input_ids.numpy(), batch.attention_mask.numpy())
        except Exception as error:  # libraries raise anything
            raise ValueError(f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}") from error
        return torch.from_numpy(logits).float()


def candidates(
    model: Any, tokenizer: Any, precision: Precision, trims: bool, packs: bool = True
) -> list[tuple[str, Callable[[], Strategy]]]:
    """Return the strategies this model seems to support, packed ones first: a name and a callable that makes each.

    With `trims` each comes first with its last layer trimmed, if the model allows it. The last one, `masked`, fits any
    model. A converted model has one.
    """
    if precision.session:
        return [("converted", partial(Converted, model, tokenizer, precision))]
    ways: list[tuple[str, Callable[..., Strategy]]] = []
    has_known_head = _has_known_head(model)
    if has_known_head:
        # Without this support transformers warns, and keeps its own attention.
        takes_ours = packs and getattr(model, "_supports_attention_backend", True)
        if takes_ours and is_gpu(model.device):
            # The kernel for variable lengths is FlashAttention's: half precision, from Ampere on.
            if precision.dtype in HALF and packing.has_varlen() and has_bfloat16_matmul(model.device):
                ways.append(("varlen", partial(Packed, attention=packing.VARLEN)))
            ways.append(("efficient", partial(Packed, attention=packing.EFFICIENT)))
        if takes_ours and is_host(model.device):
            ways.append(("grouped", partial(Packed, attention=packing.GROUPED)))
        if is_causal(model):
            ways.append(("unmasked", partial(Padded, masked=False)))
    ways.append(("masked", partial(Padded, masked=True)))
    can_trim = trims and has_known_head and is_causal(model) is not None and last_layer.is_known(model)
    return [
        (f"{name}, trimmed" if trimmed else name, partial(make, model, tokenizer, precision, trimmed))
        for name, make in ways
        for trimmed in ((True, False) if can_trim else (False,))
    ]


def compile_layers(model: Any, *, but_last: bool) -> None:
    """Compile the layers of a working copy on their first call, once for all batch sizes.

    `but_last`: not the last one. Raises ValueError where there is no layer to compile.
    """
    layers = last_layer.layers(model)
    if layers is None:
        raise ValueError("the layers are of an unknown structure")
    chosen = layers[:-1] if but_last else layers
    if not len(chosen):
        raise ValueError("the one layer is trimmed")
    use_private_cache()
    for layer in chosen:
        layer.compile(dynamic=True, backend=BACKEND, options=COMPILE_OPTIONS if BACKEND == "inductor" else None)


def is_causal(model: Any) -> bool | None:
    """Tell whether no token sees a later one; None where that differs from layer to layer."""
    said = {module.is_causal for module in model.modules() if isinstance(getattr(module, "is_causal", None), bool)}
    return None if len(said) == 2 else True in said


def _has_known_head(model: Any) -> bool:
    """Tell whether the head is `score` after the last token, or a `classifier` after the first."""
    base = getattr(model, "base_model", model)
    return base is not model and any(hasattr(model, name) for name in ("score", "classifier"))
