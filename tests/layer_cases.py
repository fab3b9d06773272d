"""Models whose layers take known times, in microseconds, by construction, on a clock that is told or a real core."""

import random
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import nn

from boundby.layers.generation import Generation
from boundby.layers.records import ModelProfile
from tests.fakes import FakeClock

ONE = torch.ones(1)


class Core(FakeClock):
    """A clock of nanoseconds of a core that computes or waits as it is told; `cpu` counts while it computes."""

    def __init__(self) -> None:
        super().__init__(0)
        self.busy = 0

    def compute(self, us: int) -> None:
        self.now += 1000 * us
        self.busy += 1000 * us

    multiply = compute

    def wait(self, us: int) -> None:
        self.now += 1000 * us

    def cpu(self) -> int:
        return self.busy


class RealCore:
    """The core that this thread runs on."""

    def compute(self, us: int) -> None:
        until = time.perf_counter() + us / 1e6
        while time.perf_counter() < until:
            pass

    def multiply(self, us: int) -> None:
        until = time.perf_counter() + us / 1e6
        while time.perf_counter() < until:
            MATRIX @ MATRIX

    def wait(self, us: int) -> None:
        time.sleep(us / 1e6)


def with_own_time_of_root(made: "Made", runs: int = 30) -> "Made":
    """Return the same with what its root takes outside the layers that this thread calls, by a bare clock alone."""
    inside_s, thread = [0.0], threading.get_ident()

    def timed(forward: Callable[..., Any]) -> Callable[..., Any]:
        def act(*given: Any, **named: Any) -> Any:
            start = time.perf_counter()
            result = forward(*given, **named)
            inside_s[0] += time.perf_counter() - start if threading.get_ident() == thread else 0.0
            return result

        return act

    layers, own_us = list(made.model.children()), []
    for layer in layers:
        layer.forward = timed(layer.forward)
    with torch.inference_mode():
        for _ in range(runs):
            inside_s[0], start = 0.0, time.perf_counter()
            made.model(made.inputs)
            own_us.append(1e6 * (time.perf_counter() - start - inside_s[0]))
    for layer in layers:
        del layer.forward
    return replace(made, expected={**made.expected, "": (1, statistics.median(own_us))})


MATRIX = torch.ones(16, 16)
Act = Callable[[Any], Any]


class Does(nn.Module):
    """Does `act(self, x)`, with modules given by name inside."""

    def __init__(self, act: Callable[..., Any], **inner: nn.Module) -> None:
        super().__init__()
        self.act, self.runs = act, 0
        for name, module in inner.items():
            self.add_module(name, module)

    def forward(self, x: Any = None, **named: Any) -> Any:
        self.runs += 1
        return self.act(self, x, **named)


@dataclass(frozen=True)
class Made:
    """A model, what it is given, and for each call path how often it is called and what a call takes in itself."""

    model: nn.Module
    expected: dict[str, tuple[Any, int]]
    inputs: Any = ONE


def takes(core: Any, us: int, kind: str = "compute") -> nn.Module:
    """Return a layer that keeps the core busy for so long and gives what it is given."""
    act = getattr(core, kind)
    return Does(lambda _, x, **named: (act(us), x)[1])


def in_turn(core: Any, us: int, **inner: nn.Module) -> nn.Module:
    """Return a layer that calls those inside, one after the other, and takes `us` before each."""

    def act(self: nn.Module, x: Any) -> Any:
        for module in self.children():
            core.compute(us)
            x = module(x)
        return x

    return Does(act, **inner)


def row(core: Any) -> Made:
    model = in_turn(core, 60, a=takes(core, 300), b=takes(core, 900))
    return Made(model, {"": (1, 120), "a": (1, 300), "b": (1, 900)})


def nested(core: Any) -> Made:
    inner = in_turn(core, 100, c=takes(core, 400), d=in_turn(core, 50, e=takes(core, 800)))
    model = in_turn(core, 200, a=inner)
    return Made(model, {"": (1, 200), "a": (1, 200), "a.c": (1, 400), "a.d": (1, 50), "a.d.e": (1, 800)})


def products(core: Any) -> Made:
    layers = {name: takes(core, us, "multiply") for name, us in (("small", 400), ("large", 1600))}
    return Made(in_turn(core, 0, **layers), {"": (1, 0), "small": (1, 400), "large": (1, 1600)})


def called_twice(core: Any) -> Made:
    model = Does(lambda self, x: self.a(self.b(self.a(x))), a=takes(core, 300), b=takes(core, 200))
    return Made(model, {"": (1, 0), "a": (2, 300), "b": (1, 200)})


def shared(core: Any) -> Made:
    both = takes(core, 500)
    model = in_turn(core, 0, a=in_turn(core, 100, s=both), b=in_turn(core, 200, s=both))
    return Made(model, {"": (1, 0), "a": (1, 100), "a.s": (1, 500), "b": (1, 200), "b.s": (1, 500)})


def tied(core: Any) -> Made:
    first, second = takes(core, 200), takes(core, 700)
    first.weight = second.weight = nn.Parameter(torch.ones(8))
    return Made(in_turn(core, 0, a=first, b=second), {"": (1, 0), "a": (1, 200), "b": (1, 700)})


def module_list(core: Any) -> Made:
    def act(self: Any, x: Any) -> Any:
        for layer in self.layers:
            x = layer(x)
        return x

    model = Does(act, layers=nn.ModuleList([takes(core, us) for us in (100, 200, 400)]))
    return Made(model, {"": (1, 0), "layers.0": (1, 100), "layers.1": (1, 200), "layers.2": (1, 400)})


def module_dict(core: Any) -> Made:
    layers = nn.ModuleDict({"used": takes(core, 300), "spare": takes(core, 900)})
    model = Does(lambda self, x: self.heads["used"](x), heads=layers)
    return Made(model, {"": (1, 0), "heads.used": (1, 300), "heads.spare": (0, 0)})


def sequentials(core: Any) -> Made:
    model = nn.Sequential(nn.Sequential(takes(core, 200), takes(core, 300)), takes(core, 400))
    return Made(model, {"": (1, 0), "0": (1, 0), "0.0": (1, 200), "0.1": (1, 300), "1": (1, 400)})


def in_a_third(core: Any) -> Made:
    draw = random.Random(2)
    layers = {"always": takes(core, 200), "rare": takes(core, 900)}
    model = Does(lambda self, x: self.always(self.rare(x) if draw.random() < 1 / 3 else x), **layers)
    return Made(model, {"": (1, 0), "always": (1, 200), "rare": (pytest.approx(1 / 3, abs=0.1), 900)})


def lambdas(core: Any) -> Made:
    layer = takes(core, 300)
    inner = nn.Sequential(Does(lambda _, x: (core.compute(100), x + 1)[1]), Does(lambda _, x: layer(x)))
    model = Does(lambda self, x: self.first(x), first=inner, layer=layer)
    expected = {"": (1, 0), "first": (1, 0), "first.0": (1, 100), "first.1": (1, 0), "first.1>layer": (1, 300)}
    return Made(model, expected)


def caught(core: Any) -> Made:
    def fails(_: Any, x: Any) -> Any:
        core.compute(300)
        raise ValueError

    def act(self: Any, x: Any) -> Any:
        try:
            return self.a(x)
        except ValueError:
            return self.b(x)

    model = Does(act, a=in_turn(core, 100, c=Does(fails)), b=takes(core, 500))
    return Made(model, {"": (1, 0), "a": (1, 100), "a.c": (1, 300), "b": (1, 500)})


def in_place(core: Any) -> Made:
    changes = Does(lambda _, x: (core.compute(300), x.mul_(1.0))[1])
    return Made(in_turn(core, 100, a=changes, b=takes(core, 200)), {"": (1, 200), "a": (1, 300), "b": (1, 200)})


def waits(core: Any) -> Made:
    model = in_turn(core, 0, works=takes(core, 1000), sleeps=takes(core, 5000, "wait"))
    return Made(model, {"": (1, 0), "works": (1, 1000), "sleeps": (1, 5000)})


def recursive(core: Any) -> Made:
    def act(self: Any, x: Any, depth: int = 2) -> Any:
        core.compute(300)
        return self(x, depth=depth - 1) if depth else x

    return Made(in_turn(core, 0, a=Does(act)), {"": (1, 0), "a": (1, 300), "a>a": (1, 300), "a>a>a": (1, 300)})


def direct(core: Any) -> Made:
    model = Does(lambda self, x: self.b.forward(self.a(x)), a=takes(core, 200), b=takes(core, 400))
    return Made(model, {"": (1, 0), "a": (1, 200), "b": (1, 400)})


def elsewhere(core: Any) -> Made:
    def act(self: Any, x: Any) -> Any:
        worker = threading.Thread(target=self.a, args=(x,))
        worker.start()
        worker.join()
        return self.b(x)

    model = Does(act, a=takes(core, 5000), b=takes(core, 500))
    return Made(model, {"": (1, 5000), "b": (1, 500), "(other thread)>a": (1, 5000)})


def two_ways(core: Any) -> Made:
    model = Does(lambda self, x: self.a.c(self.a(x)), a=in_turn(core, 100, c=takes(core, 300)))
    return Made(model, {"": (1, 0), "a": (1, 100), "a.c": (1, 300), ">a.c": (1, 300)})


def hooked(core: Any) -> Made:
    layer = takes(core, 300)
    layer.register_forward_hook(lambda *_: core.compute(200))
    return Made(in_turn(core, 100, a=layer), {"": (1, 300), "a": (1, 300)})


def patched(core: Any) -> Made:
    layer = takes(core, 999)
    layer.forward = lambda x: (core.compute(300), x)[1]
    return Made(nn.Sequential(layer), {"": (1, 0), "0": (1, 300)})


def by_name(core: Any) -> Made:
    model = Does(lambda self, _, y: self.a(x=y), a=takes(core, 300))
    return Made(model, {"": (1, 0), "a": (1, 300)}, {"y": ONE})


class Writes(nn.Module):
    """Takes 50 us for every token of a pass in its layer, and 100 beside each pass: 6 tokens at once, then 1 and 1."""

    def __init__(self, core: Any) -> None:
        super().__init__()
        self.core, self.layer = core, Does(lambda _, x: core.compute(50 * x.shape[1]))

    def can_generate(self) -> bool:
        return True

    def generate(self, input_ids: torch.Tensor) -> None:
        for cached, tokens in ((0, 6), (6, 1), (7, 1)):
            self.core.compute(100)
            self(input_ids=torch.ones(1, tokens), past_key_values=Cache(cached))

    def forward(self, input_ids: torch.Tensor, past_key_values: Any) -> None:
        self.layer(input_ids)


class Cache:
    """A cache of keys and values, as far as it tells its length."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens

    def get_seq_length(self) -> int:
        return self.tokens


def generated(core: Any) -> Made:
    expected = {"": (1, 300), "prefill": (1, 0), "prefill.layer": (1, 300), "decode": (2, 0), "decode.layer": (2, 50)}
    return Made(Generation(Writes(core)), expected, torch.ones(1, 6))


# After a sleep the core has forgotten the code, a thread is woken, `generate` computes between its passes: not nothing.
ROOT_TAKES_TIME = ("waits", "called from another thread", "generated text")
CASES: dict[str, Callable[[Any], Made]] = {
    "layers in a row": row,
    "containers in containers": nested,
    "products": products,
    "called twice": called_twice,
    "shared by two callers": shared,
    "tied weights": tied,
    "a list of modules": module_list,
    "a mapping of modules, one unused": module_dict,
    "sequences in a sequence": sequentials,
    "called in a third of the runs": in_a_third,
    "lambdas": lambdas,
    "an exception that is caught": caught,
    "in place": in_place,
    "waits": waits,
    "calls itself": recursive,
    "forward called directly": direct,
    "called from another thread": elsewhere,
    "reached by two ways": two_ways,
    "a hook that takes time": hooked,
    "a forward of its own": patched,
    "given by name": by_name,
    "generated text": generated,
}


def misses(profile: ModelProfile, made: Made, share: float = 0.0, least_us: float = 1e-3) -> list[str]:
    """Return where a profile differs from what the layers took, by more than `share` of that and `least_us`.

    The mean counts where a layer is not called alike in every run, else the median.
    """
    differences = []
    measured = {layer.path: layer for layer in profile.layers}
    if set(measured) != set(made.expected):
        differences.append(f"call paths {sorted(measured)}, wanted {sorted(made.expected)}")
    for path, (calls, us) in made.expected.items():
        layer = measured.get(path)
        if layer is None or layer.calls != calls:
            differences.append(f"{path or '(model)'}: called {layer and layer.calls} times, wanted {calls}")
        elif layer.host_self_s and layer.calls:
            is_steady = layer.calls == round(layer.calls)
            own = layer.host_self_s.median if is_steady else layer.host_self_s.mean
            off = own * 1e6 / layer.calls - us
            if abs(off) > max(share * us, least_us):
                differences.append(f"{path or '(model)'}: {us + off:.3f} us, wanted {us:.6g}")
    return differences
