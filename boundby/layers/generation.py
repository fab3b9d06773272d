"""`Generation`: a model that generates text with a cache, as a module whose passes are told apart by what they do.

The prompt is read at once (`prefill`), then each pass takes the tokens that are new and finds the others in the cache
(`decode`): the one is limited by compute, the other by memory, so one number for both says nothing of either.
"""

import copy
import functools
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from boundby.layers.records import DECODE, PREFILL


class Generation(nn.Module):
    """`model.generate(**inputs, **settings)` as a forward, to be profiled: `ObservabilityEngine(Generation(model))`.

    A pass of the model is part of `prefill` until the cache holds the whole prompt, and of `decode` from then on; so
    each layer has two call paths, `prefill.transformer.h.0` and `decode.transformer.h.0`. What `generate` does between
    the passes is its own time. Without a cache every pass reads the whole text, and all are prefills. A model that says
    nothing of its cache (a state-space model) is taken to decode from the second pass on, where that takes one token.

    Give as many new tokens in every run (`min_new_tokens` and `max_new_tokens`, `do_sample=False`), else runs differ.
    Raises ValueError for a model that cannot generate.
    """

    def __init__(self, model: nn.Module, **settings: Any) -> None:
        super().__init__()
        if not getattr(model, "can_generate", bool)():
            raise ValueError(f"{type(model).__name__} generates no text; profile a forward of it")
        self.prefill, self.decode = copy.copy(model), copy.copy(model)  # two names for the same layers and weights
        self.training = model.training
        self._settings = settings

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Return what `generate` does of these inputs."""
        prompt = _prompt_tokens(self.prefill, inputs, named)
        passes: dict[str, Callable[..., Any]] = {PREFILL: self.prefill.forward, DECODE: self.decode.forward}
        own = self.prefill.__dict__.get("forward")
        seen = 0

        @functools.wraps(self.prefill.forward)  # its signature tells `generate` what may be given: logits_to_keep
        def told_apart(*args: Any, **given: Any) -> Any:
            nonlocal seen
            seen += 1
            cached = _cached_tokens(given)
            is_prefill = cached < prompt if cached is not None else seen == 1 or _tokens(args, given) != 1
            return passes[PREFILL if is_prefill else DECODE](*args, **given)

        self.prefill.__dict__["forward"] = told_apart
        try:
            return self.prefill.generate(*inputs, **named, **self._settings)  # type: ignore[operator]
        finally:
            del self.prefill.__dict__["forward"]
            if own is not None:
                self.prefill.__dict__["forward"] = own


def _prompt_tokens(model: nn.Module, inputs: tuple[Any, ...], named: Mapping[str, Any]) -> int:
    """Return how many tokens the cache holds when the prompt is read; a decoder beside an encoder begins with one."""
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        inputs, named = (), {"input_ids": named.get("decoder_input_ids")}
    return max(_tokens(inputs, named), 1)


def _tokens(args: tuple[Any, ...], named: Mapping[str, Any]) -> int:
    given = (named.get("decoder_input_ids"), named.get("input_ids"), named.get("inputs_embeds"), *args)
    return next((int(tensor.shape[1]) for tensor in given if isinstance(tensor, Tensor)), 0)


def _cached_tokens(named: Mapping[str, Any]) -> int | None:
    """Return how many tokens the cache holds before a pass; None where there is none that tells."""
    cache = named.get("past_key_values")
    return None if cache is None else int(cache.get_seq_length())
