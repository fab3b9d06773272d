"""Which attention a forward really uses: by the operators that torch's profiler sees in it, not by its settings.

Where a kernel does not take a mask, a dtype or a head size, torch takes another without a word, and transformers may
keep the implementation that a model had.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from boundby.capture import quiet_kineto
from boundby.formatting import Missing
from boundby.timing import Work

# What an operator of torch has in its name, and the name of the backend in `torch.nn.attention.SDPBackend`.
FLASH = "flash"
BACKENDS = {
    "flash_attention": FLASH,
    "efficient_attention": "mem_efficient",
    "cudnn_attention": "cudnn",
    "attention_math": "math",
    "overrideable": "overrideable",
}
OF_OTHERS = ("attention", "attn")  # in the full name of an operator of another library
OF_TORCH = "torch_attn"  # its variable lengths, around one of the kernels above
COMPOSED, SOFTMAX = "aten::scaled_dot_product_attention", "aten::_softmax"  # the one calls the other in no kernel


def attention_backend(work: Work) -> str | Missing:
    """Make one call, and return what computes its attention.

    That is torch's name of a backend (`flash`, `mem_efficient`), several joined by "+", most calls first; `flash (FA3)`
    for another implementation of it; another library's name (`flash_attn`); or `eager`: matmul and softmax.

    Missing where torch sees no attention, as in the replay of a graph. Raises what the call raises.
    """
    with quiet_kineto(), torch.autograd.profiler.profile() as profiled:
        work()
    return backend_of(profiled.function_events)


def backend_of(events: Iterable[Any]) -> str | Missing:
    """Return the same of the profiler's events: of operators within one another the outermost that is known counts."""
    calls: dict[str, int] = {}
    has_softmax = False
    for event in events:
        if (name := _backend(event)) and not any(map(_backend, _around(event))):
            calls[name] = calls.get(name, 0) + 1
        has_softmax = has_softmax or event.name == SOFTMAX
    if calls:
        named = "+".join(sorted(calls, key=lambda backend: -calls[backend]))
        told_to = getattr(torch.nn.attention, "current_flash_attention_impl", lambda: None)()  # torch 2.11
        return named.replace(FLASH, f"{FLASH} ({told_to})") if told_to and FLASH in calls else named
    return "eager" if has_softmax else Missing("torch sees no operator of attention in a forward")


def _backend(event: Any) -> str | None:
    """Return what an operator computes attention by, None of any other."""
    library, _, operator = event.name.rpartition("::")
    if library == "aten":
        is_composed = event.name == SOFTMAX and any(outer.name == COMPOSED for outer in _around(event))
        return "math" if is_composed else next((name for part, name in BACKENDS.items() if part in operator), None)
    return library if library not in ("", OF_TORCH) and any(part in event.name for part in OF_OTHERS) else None


def _around(event: Any) -> Iterator[Any]:
    while event := event.cpu_parent:
        yield event
