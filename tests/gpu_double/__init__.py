"""A stand-in card: device type "cuda" on a machine without one, with a queue, a clock, a memory and failures.

    from gpu_double import H100, plugged_in
    with plugged_in(H100) as machine:            # in this process, with `machine.read` as its clock
        model.to("cuda")
    run([...], env=environment(H100))            # child processes: their time functions are the machine's, too

README.md says how it works and what it cannot show.
"""

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from .card import A100, H100, H200, T4, VARIABLE, Card
from .machine import Machine

__all__ = ["A100", "Card", "H100", "H200", "Machine", "T4", "environment", "plugged_in"]

PROGRAM = ("boundby", "utils", "scripts", "__main__")
_plugged: list[Machine] = []
FOLDER = Path(__file__).resolve().parent


def environment(card: Card, base: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the variables under which a child's Python has this card, and `nvidia-smi` answers for it."""
    variables = dict(os.environ if base is None else base)
    path = os.pathsep.join(filter(None, [str(FOLDER / "startup"), variables.get("PYTHONPATH")]))
    tools = os.pathsep.join([str(FOLDER / "startup"), variables.get("PATH", os.defpath)])
    return {**variables, VARIABLE: card.to_json(), "PYTHONPATH": path, "PATH": tools}


@contextlib.contextmanager
def plugged_in(card: Card) -> Iterator[Machine]:
    """Plug a card into this process for the block; its clock is `machine.read`, the process's own stays as it is."""
    machine = Machine(card)
    undo = plug_in(machine)
    try:
        yield machine
    finally:
        for put_back in reversed(undo):
            put_back()


def plug_in(machine: Machine) -> list[Any]:
    """Put the machine behind torch and pynvml; return the calls that take it out again."""
    import torch

    from . import cuda, nvml, profiler, tensors

    tensors.register()
    undo: list[Any] = []

    def put(owner: Any, name: str, value: Any) -> None:
        missing = object()
        before = getattr(owner, name, missing)
        setattr(owner, name, value)
        undo.append(lambda: delattr(owner, name) if before is missing else setattr(owner, name, before))

    before_module = sys.modules.get("pynvml")
    sys.modules["pynvml"] = nvml.module(machine)
    undo.append(lambda: sys.modules.pop("pynvml") if before_module is None else _restore(before_module))
    put(tensors, "machine", machine)
    _plugged.append(machine)
    undo.append(_plugged.pop)
    for name, value in cuda.names(machine).items():
        put(torch.cuda, name, value)
        if hasattr(torch.cuda.memory, name):
            put(torch.cuda.memory, name, value)
    put(torch.cuda.graph, "default_capture_stream", None)
    put(torch.version, "cuda", "13.0")
    put(torch.Tensor, "pin_memory", lambda self, device=None: tensors.pin(self))
    put(torch.Tensor, "is_pinned", lambda self, device=None: tensors.is_pinned(self))
    put(torch.cuda, "nvtx", _Silent())
    put(torch._C, "_cuda_getCurrentRawStream", lambda device: 0)  # the compiler imports it where there is a card
    put(torch._C, "_host_emptyCache", lambda: None)
    put(torch, "Generator", _Generator)
    put(torch.accelerator, "is_available", lambda: True)
    put(torch.accelerator, "current_accelerator", lambda check_available=False: torch.device("cuda"))
    profiler.put_in(put, machine)
    overwrites = torch.__future__.get_overwrite_module_params_on_conversion()
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    undo.append(lambda: torch.__future__.set_overwrite_module_params_on_conversion(overwrites))
    return undo


def plug_in_time() -> None:
    """Let the time functions be those of the machine that is plugged in, for the program's own code.

    Libraries keep the real ones, and so does the program while no machine is plugged in.
    """
    for name, ours in {
        "perf_counter": lambda machine: machine.read(),
        "monotonic": lambda machine: machine.read(),
        "perf_counter_ns": lambda machine: round(machine.read() * 1e9),
        "monotonic_ns": lambda machine: round(machine.read() * 1e9),
        "sleep": lambda machine, seconds: machine.sleep(seconds),
    }.items():
        setattr(time, name, _by_caller(ours, getattr(time, name)))


def _by_caller(ours: Callable[..., Any], real: Callable[..., Any]) -> Callable[..., Any]:
    def function(*args: float) -> Any:
        if _plugged and sys._getframe(1).f_globals.get("__name__", "").partition(".")[0] in PROGRAM:
            return ours(_plugged[-1], *args)
        return real(*args)

    return function


class _Generator:
    """Random numbers of the card, which are the host's."""

    def __new__(cls, device: Any = "cpu") -> Any:
        import torch

        return torch._C.Generator("cpu" if "cuda" in str(device) else device)


class _Silent:
    """NVTX: whatever is called does nothing."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None


def _restore(module: Any) -> None:
    sys.modules["pynvml"] = module
