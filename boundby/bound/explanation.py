"""One call that says what a model, or any callable, is bound by: `boundby.explain(model, batch)`."""

import html
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from boundby.bound import card
from boundby.bound.analysis import Call, Machine, bottleneck
from boundby.bound.bench import Bench
from boundby.bound.recording import dtype_name
from boundby.bound.trials import FASTER_MATMUL, Candidate, Made
from boundby.bound.verdict import Fix, Trial, Verdict
from boundby.machine import (
    Ceilings,
    describe,
    environment,
    float32_precision,
    is_host,
    made_current,
    measure,
    pick_device,
)
from boundby.timing import Work
from boundby.work import unread

LEAST_GAIN = 1.05  # of a fix, for it to be what to do next
CEILINGS_S = 5.0
COLOURS = {"settled": "#1a7f37", "not settled": "#9a6700", "no answer": "#57606a"}
_ceilings: dict[tuple[object, ...], Ceilings] = {}  # of this process, by device, dtype and threads


@dataclass(frozen=True)
class Explanation:
    """What limits a callable here, and what was tried. Printing it shows the card; a notebook shows it as HTML."""

    verdict: Verdict
    facts: card.Facts
    ceilings: Ceilings

    def __str__(self) -> str:
        """Return the card, in at most twelve lines."""
        return "\n".join(card.lines(self.facts))

    __repr__ = __str__

    def _repr_html_(self) -> str:
        """Return the card for a notebook, with a badge that says whether it is settled."""
        badge = card.badge(self.facts)
        style = f"background:{COLOURS[badge]};color:#fff;border-radius:1em;padding:.1em .7em;font-size:85%"
        rows = "".join(
            f"<tr><th style='text-align:left;vertical-align:top;white-space:nowrap'>{html.escape(entry.label)}</th>"
            f"<td style='text-align:left'>{'<br>'.join(map(html.escape, entry.texts))}</td></tr>"
            for entry in card.entries(self.facts)
        )
        title = html.escape(card.title(self.facts))
        return f"<b>{title}</b> <span style='{style}'>{badge}</span><table>{rows}</table>"

    def to_dict(self) -> dict[str, Any]:
        """Return the card, the verdict with its evidence, and the limits of this machine, as plain values."""
        return {
            "card": card.lines(self.facts),
            "verdict": self.verdict.as_dict(),
            "ceilings": self.ceilings.as_dict(),
        }


def explain(
    model: torch.nn.Module | Callable[[], object],
    batch: Any = None,
    *,
    name: str | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    seconds: float = 20.0,
) -> Explanation:
    """Return what limits one call here, within about `seconds`, of which measuring this machine takes up to five.

    The first call of a process for a GPU takes about four seconds more: its limits need as long, whatever `seconds` is.

    Of a module the call is its forward in evaluation mode without gradients, on `batch`: a tensor, a tuple of
    arguments, or a mapping of keyword arguments, moved to where the module is. Anything else is called without
    arguments, such as a training step; what it changes, such as weights, stays changed. `dtype` and `device` are those
    of the module, else of `batch`, else float32 and the best device here. The module is left as it was.

    Raises TypeError for a module without a batch or a batch without a module, ValueError where the FLOPs of an operator
    are not known, and whatever the call itself raises.
    """
    if isinstance(model, torch.nn.Module) is (batch is None):
        raise TypeError(
            "explain(module, batch) takes a module with its inputs, explain(callable) a callable without: "
            f"got {type(model).__name__} and {'no batch' if batch is None else type(batch).__name__}"
        )
    tensors = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor)]
    if isinstance(model, torch.nn.Module):
        tensors = [*model.parameters(), *model.buffers(), *tensors]
    dtypes = [tensor.dtype for tensor in tensors if tensor.is_floating_point()]
    used_device = torch.device(device) if device else tensors[0].device if tensors else pick_device("auto")
    used = _Used(used_device, dtype or (dtypes[0] if dtypes else torch.float32))
    if not isinstance(model, torch.nn.Module):
        return _explained(Call(_with_gradients(model)), used, name or _name(model), None, seconds)
    was_training = model.training
    inputs = tree_map_only(torch.Tensor, lambda tensor: tensor.to(used.device), _plain(batch))
    try:
        model.eval()
        with torch.inference_mode():
            ready = unread(model, inputs)
            call = Call(
                _forward(model, inputs),
                bare=None if ready is None or is_host(used.device) else _forward(model, ready),
                candidates=list(_in_other_dtypes(model, inputs, used.dtype)),
            )
            return _explained(call, used, name or type(model).__name__, _shape(inputs), seconds)
    finally:
        model.train(was_training)


@dataclass(frozen=True)
class _Used:
    device: torch.device
    dtype: torch.dtype

    @property
    def machine(self) -> str:
        """The processor in words."""
        return environment.cpu_in_words() if is_host(self.device) else str(describe(self.device)["name"])


def _explained(call: Call, used: _Used, name: str, shape: str | None, seconds: float) -> Explanation:
    bench = Bench.of(used.device)
    call.work()  # what it raises is the caller's, before anything is measured
    began = bench.timer.clock()
    limits = _limits(used, min(CEILINGS_S, seconds / 4))
    bench = bench.within(max(0.0, seconds - (bench.timer.clock() - began)))
    dtype = dtype_name(used.dtype)
    with made_current(used.device):
        verdict = bottleneck(call, Machine(limits, dtype), bench)
    facts = card.Facts(
        model=name,
        machine=used.machine,
        dtype=dtype,
        shape=shape,
        seconds=sum(part.seconds for part in verdict.breakdown) or bench.timer.isolated(call.work),
        verdict=verdict,
        next=_next(verdict),
        doubts=[doubt.text for doubt in verdict.doubts],
    )
    return Explanation(verdict, facts, limits)


def _limits(used: _Used, seconds: float) -> Ceilings:
    """Return the limits of this machine, measured once in a process."""
    key = (str(used.device), used.dtype, torch.get_num_threads(), float32_precision())
    if key not in _ceilings:
        dtypes = dict.fromkeys(map(dtype_name, (used.dtype, torch.float32, torch.bfloat16)))
        _ceilings[key] = measure(used.device, dtypes=list(dtypes), budget_s=seconds)
    return _ceilings[key]


def _plain(batch: Any) -> Any:
    """Return the inputs as torch's trees know them: a mapping as a dict, a single one as a tuple."""
    if isinstance(batch, Mapping):
        return dict(batch)
    return tuple(batch) if isinstance(batch, tuple | list) else (batch,)


def _with_gradients(call: Callable[[], object]) -> Work:
    """Return the call as its owner runs it: it is counted and replayed where gradients are switched off."""

    def run() -> object:
        with torch.inference_mode(False), torch.enable_grad():
            return call()

    return run


def _forward(model: torch.nn.Module, inputs: Any) -> Work:
    if isinstance(inputs, dict):
        return lambda: model(**inputs)
    return lambda: model(*inputs)


def _in_other_dtypes(model: torch.nn.Module, inputs: Any, dtype: torch.dtype) -> Iterator[Candidate]:
    """Yield the trial of a copy of a float32 model in bfloat16."""
    if dtype != torch.float32:
        return

    def make() -> Made:
        def cast(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.bfloat16() if tensor.is_floating_point() else tensor

        return Made(_forward(deepcopy(model).bfloat16(), tree_map_only(torch.Tensor, cast, inputs)))

    yield Candidate(Fix("dtype", {"dtype": "bfloat16"}), make, expected=FASTER_MATMUL)


def _shape(inputs: Any) -> str | None:
    """Return the shape of the largest input: `8 × 154`."""
    tensors = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, torch.Tensor) and leaf.dim()]
    return " × ".join(map(str, max(tensors, key=torch.Tensor.numel).shape)) if tensors else None


def _name(call: Callable[[], object]) -> str:
    return getattr(call, "__name__", type(call).__name__).replace("<lambda>", "a callable")


def _next(verdict: Verdict) -> card.Next | None:
    """Return what gained most here, or else what is predicted to."""
    gained = [trial for trial in verdict.trials if trial.is_fix and trial.measured.low >= LEAST_GAIN]
    if gained:
        best: Trial = max(gained, key=lambda trial: trial.measured.low)
        return card.Next(str(best.fix), factor=best.measured, is_measured=True)
    hoped = [(gain, gain.predicted) for gain in verdict.gains if gain.predicted and gain.predicted.low >= LEAST_GAIN]
    if not hoped:
        return None
    gain, predicted = max(hoped, key=lambda pair: pair[1].low)
    return card.Next(str(gain.fix), factor=predicted)
