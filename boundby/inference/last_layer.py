"""The last layer for the one token of each text that the head reads.

The layer needs the keys and values of all tokens, and everything else for the chosen rows alone. Hooks on a working
copy do that. Where keys and values are plain linear layers, they are not computed either: queries are multiplied with
the key weights, and attended states with the value weights. States leave the layer in their usual shape, with zeros
where nothing was computed. Outside of `reading` the copy computes as usual.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import nn

CHOSEN = "boundby_attends_for_chosen_rows"  # an attribute of what attends in a trimmed layer
DEFERRED = "boundby_deferred"  # another: names of its keys and values that are not computed
_local = threading.local()  # the rows that this thread's forward is to compute, and what entered the last layer


@dataclass(frozen=True)
class _Layout:
    """Names within a layer: attention and the norm before it; within that, the queries and the output projection.

    None: there is none, or the queries come together with keys and values.
    """

    attention: str
    norm: str | None
    queries: str | None
    output: str | None
    sources: tuple[str, str] | None = None  # keys and values, where attention takes them as they are


LAYOUTS = (
    _Layout("self_attn", "input_layernorm", "q_proj", "o_proj"),  # Llama, Mistral, Qwen and their kin
    _Layout("attn", "ln_1", None, "c_proj"),  # GPT-2
    _Layout("attention.self", None, "query", None, ("key", "value")),  # BERT, RoBERTa, ELECTRA
    _Layout("attention", None, "q_lin", "out_lin", ("k_lin", "v_lin")),  # DistilBERT
)


def is_known(model: Any) -> bool:
    """Tell whether the last layer of this model is one of those that can be trimmed."""
    return _find(model) is not None


def trim(model: Any) -> None:
    """Have the last layer of a working copy compute only the rows given by `reading`. Raises ValueError: not known."""
    last = _find(model)
    if last is None:
        raise ValueError("the last layer is of an unknown structure")
    layer, layout = last
    attention = layer.get_submodule(layout.attention)
    setattr(attention, CHOSEN, True)
    norm = nn.Identity() if layout.norm is None else layer.get_submodule(layout.norm)
    _before(layer, _enter)
    _after(layer, _spread)
    _before(attention, partial(_give_all, norm))
    if layout.queries:
        _before(attention.get_submodule(layout.queries), _choose)
        _after(attention.get_submodule(layout.queries), _spread)
    if layout.output:
        _before(attention.get_submodule(layout.output), _choose)
    else:
        _after(attention, _choose)


class Deferred(nn.Module):
    """Keys or values that are not computed: the weights, `[heads, width, hidden]`, for those who attend to bring in."""

    def __init__(self, layer: nn.Linear, heads: int, dtype: torch.dtype) -> None:
        super().__init__()
        weight = layer.weight.detach().to(dtype).view(heads, -1, layer.in_features)
        self.weight = nn.Parameter(weight, requires_grad=False)
        bias = None if layer.bias is None else layer.bias.detach().to(dtype).view(heads, 1, -1)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Return the states as they are."""
        return states


def defer(model: Any, original: Any, dtype: torch.dtype) -> None:
    """Leave keys and values of a trimmed layer to `attend_deferred` where its layout allows it.

    The weights come from `original`: a working copy may hold them in another form.
    """
    last, source = _find(model), _find(original)
    if last is None or source is None or last[1].sources is None:
        return
    attention, given = (layer.get_submodule(layout.attention) for layer, layout in (last, source))
    heads = getattr(original.config, "num_attention_heads", 0)
    names = last[1].sources
    linears = [getattr(given, name, None) for name in names]
    if not all(type(linear) is nn.Linear and linear.in_features == linear.out_features for linear in linears):
        return
    for name, linear in zip(names, linears, strict=True):
        setattr(attention, name, Deferred(cast(nn.Linear, linear), heads, dtype))
    setattr(attention, DEFERRED, names)


def defers(module: Any) -> bool:
    """Tell whether this module attends without its keys and values."""
    return hasattr(module, DEFERRED)


def attend_deferred(
    module: Any,
    query: torch.Tensor,
    states: torch.Tensor,
    parts: Sequence[tuple[slice, int, int]],
    masks: Sequence[torch.Tensor | None],
    scale: float | None,
) -> torch.Tensor:
    """Return the attention of one query for each text, `[texts, heads, width]`, in a module that `defers`.

    `query` is `[heads, texts, width]`, `states` `[tokens, hidden]`. `parts` has tokens, texts and length of each group
    of equal lengths, `masks` what it sees, `[texts, 1, length]`. The key bias changes no softmax.
    """
    keys, values = (getattr(module, name) for name in getattr(module, DEFERRED))
    query = query * (query.shape[-1] ** -0.5 if scale is None else scale)
    asked = torch.bmm(query, keys.weight).transpose(0, 1).contiguous()
    seen, first = [], 0
    for (part, texts, length), mask in zip(parts, masks, strict=True):
        group = states[part].view(texts, length, -1)
        scores = torch.bmm(asked[first : first + texts], group.transpose(1, 2)).float()
        if mask is not None:
            scores = scores.masked_fill(~mask, -torch.inf)
        seen.append(torch.bmm(scores.softmax(dim=-1).to(group.dtype), group))
        first += texts
    answer: torch.Tensor = torch.bmm(torch.cat(seen).transpose(0, 1), values.weight.transpose(1, 2))
    return (answer if values.bias is None else answer + values.bias).transpose(0, 1)


@contextlib.contextmanager
def reading(rows: torch.Tensor) -> Iterator[None]:
    """Compute the last layer in the block for these rows alone: places in the batch, its texts one after another."""
    _local.rows = rows
    try:
        yield
    finally:
        _local.rows = _local.entered = None


def rows_of(module: Any) -> torch.Tensor | None:
    """Return the rows for which attention must be computed in this module; None for all of them."""
    return _rows() if getattr(module, CHOSEN, False) else None


def layers(model: Any) -> nn.ModuleList | None:
    """Return the layers of the model, None where it is not clear which they are."""
    depth = getattr(model.config.get_text_config(), "num_hidden_layers", None)
    lists = (module for module in model.modules() if isinstance(module, nn.ModuleList))
    return next((modules for modules in lists if len(modules) == len(set(modules)) == depth), None)


def _find(model: Any) -> tuple[nn.Module, _Layout] | None:
    """Return the last layer and how it is laid out."""
    stack = layers(model)
    if stack is None:
        return None
    return next(((stack[-1], layout) for layout in LAYOUTS if _fits(stack[-1], layout)), None)


def _fits(layer: nn.Module, layout: _Layout) -> bool:
    inside = [f"{layout.attention}.{name}" for name in (layout.queries, layout.output) if name]
    wanted = {layout.attention, *inside, *([layout.norm] if layout.norm else [])}
    return wanted <= {name for name, _ in layer.named_modules()}


def _rows() -> torch.Tensor | None:
    return getattr(_local, "rows", None)


Change = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # of the states that enter or leave a module, by the rows


def _before(module: nn.Module, change: Change) -> None:
    """Change the states that enter the module: its first argument or its `hidden_states`."""

    def hook(_: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> Any:
        rows = _rows()
        if rows is None:
            return None
        if given:
            return (change(given[0], rows), *given[1:]), named
        return (), {**named, "hidden_states": change(named["hidden_states"], rows)}

    module.register_forward_pre_hook(hook, with_kwargs=True)


def _after(module: nn.Module, change: Change) -> None:
    """Change the states that leave the module: its result or the first of its results."""

    def hook(_module: nn.Module, _given: Any, returned: Any) -> Any:
        rows = _rows()
        if rows is None:
            return None
        return (change(returned[0], rows), *returned[1:]) if isinstance(returned, tuple) else change(returned, rows)

    module.register_forward_hook(hook)


def _enter(states: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    _local.entered = states
    return _choose(states, rows)


def _give_all(norm: nn.Module, _states: torch.Tensor, _rows: torch.Tensor) -> torch.Tensor:
    return cast(torch.Tensor, norm(_local.entered))


def _choose(states: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Return `[1, rows, width]` of `[texts, tokens, width]`."""
    return states.flatten(0, 1)[rows][None]


def _spread(states: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Return `[texts, tokens, width]` with `[1, rows, width]` in its rows and zeros elsewhere."""
    texts, tokens = _local.entered.shape[:2]
    spread = states.new_zeros(texts * tokens, states.shape[-1])
    spread[rows] = states[0]
    return spread.view(texts, tokens, -1)
