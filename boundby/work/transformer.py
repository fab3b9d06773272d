"""The FLOPs of a transformer by formula, and those that would remain if nothing were padded.

The formula is the check on the count: two ways to the same number. Per layer and forward, for b texts of s tokens:
2 b s for each weight of the projections and of the feed-forward, and 4 b s^2 per head and its width for the scores and
for the weighted sum (2 b s^2 each). It holds for full attention, causal or not: the square is counted whole.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import prod
from typing import Any

ONE = Fraction(1)


@dataclass(frozen=True)
class TransformerShape:
    """The sizes that decide the FLOPs of a sequence classifier.

    An encoder is `pooled`: one more square layer and the head see one token per text. A decoder's head sees every
    token, and the forward picks a token afterwards.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    gated: bool  # three matrices in the feed-forward, not two
    labels: int
    pooled: bool


@dataclass(frozen=True)
class _Family:
    intermediate: str  # the name of the width of the feed-forward in the config
    gated: bool
    pooled: bool


_ENCODER = _Family("intermediate_size", gated=False, pooled=True)
_GATED_DECODER = _Family("intermediate_size", gated=True, pooled=False)
_FAMILIES = {
    "bert": _ENCODER,
    "camembert": _ENCODER,
    "roberta": _ENCODER,
    "xlm-roberta": _ENCODER,
    "distilbert": _Family("hidden_dim", gated=False, pooled=True),
    "gpt2": _Family("n_inner", gated=False, pooled=False),
    "llama": _GATED_DECODER,
    "mistral": _GATED_DECODER,
    "qwen2": _GATED_DECODER,
    "qwen3": _GATED_DECODER,
}


def transformer_shape(model: Any) -> TransformerShape | None:
    """Return the shape of a sequence classifier of transformers, or None for a model whose formula is not known."""
    model = getattr(model, "_orig_mod", model)  # inside a module of torch.compile
    config: Any = getattr(model, "config", None)
    family = _FAMILIES.get(getattr(config, "model_type", ""))
    if family is None or not type(model).__name__.endswith("ForSequenceClassification"):
        return None
    hidden, heads = config.hidden_size, config.num_attention_heads
    return TransformerShape(
        layers=config.num_hidden_layers,
        hidden=hidden,
        heads=heads,
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or hidden // heads,
        intermediate=getattr(config, family.intermediate) or 4 * hidden,  # GPT-2 leaves the usual width out
        gated=family.gated,
        labels=config.num_labels,
        pooled=family.pooled,
    )


def transformer_flops(shape: TransformerShape, batch: int, tokens: int) -> int:
    """Return the FLOPs of one forward of `batch` texts of `tokens` tokens each, padding included."""
    attention = 2 * shape.hidden * shape.head_dim * (shape.heads + shape.kv_heads)  # weights of q and o, and of k and v
    feed_forward = (3 if shape.gated else 2) * shape.hidden * shape.intermediate
    square = 4 * batch * tokens**2 * shape.heads * shape.head_dim
    layer = 2 * batch * tokens * (attention + feed_forward) + square
    if shape.pooled:
        head = 2 * batch * (shape.hidden**2 + shape.hidden * shape.labels)
    else:
        head = 2 * batch * tokens * shape.hidden * shape.labels
    return shape.layers * layer + head


@dataclass(frozen=True)
class LengthCost:
    """FLOPs of one text by its tokens: the parabola through `points` (tokens, FLOPs), for the lengths it was fitted to.

    Where the FLOPs are no parabola `reason` says so.
    """

    points: tuple[tuple[int, int], ...]
    reason: str | None = None

    def flops(self, lengths: Sequence[int]) -> int | None:
        """Return the FLOPs of texts of these lengths without any padding, or None for `reason`."""
        if self.reason is not None:
            return None
        total = sum(texts * self._at(tokens) for tokens, texts in Counter(lengths).items())
        return int(total)

    def _at(self, tokens: int) -> Fraction:
        known = [length for length, _ in self.points]
        terms = (
            flops * prod((Fraction(tokens - other, length - other) for other in known if other != length), start=ONE)
            for length, flops in self.points
        )
        return sum(terms, start=Fraction(0))


def fit_length_cost(count_at: Callable[[int, int], int], lengths: Sequence[int]) -> LengthCost:
    """Return the cost of one text of any of `lengths`, from forwards counted at three lengths and checked at a fourth.

    `count_at(batch, tokens)` returns the FLOPs of one forward; it is called for batches of one, and not more than four
    times. Attention over a sliding window fails the check.
    """
    distinct = sorted(set(lengths))
    if not distinct:
        raise ValueError("there are no lengths to fit a cost to")
    if len(distinct) <= 3:
        return LengthCost(tuple((tokens, count_at(1, tokens)) for tokens in distinct))
    nodes = (distinct[0], distinct[len(distinct) // 2], distinct[-1])
    cost = LengthCost(tuple((tokens, count_at(1, tokens)) for tokens in nodes))
    check = distinct[len(distinct) // 4 or 1]
    expected, counted = cost.flops([check]), count_at(1, check)
    if expected == counted:
        return cost
    return LengthCost(
        cost.points,
        f"FLOPs are no parabola of the tokens: {counted} at {check} tokens where {expected} follow from {nodes}",
    )
