"""The layers compiled by torch, so that what stands between two products is one pass over memory."""

import os
import shutil
import sys
from typing import Any

import torch

from boundby.device import is_gpu, is_host
from boundby.inference import last_layer

BACKEND = "inductor"
# No processes of torch's own, which a killed program would leave behind; and no kernel chosen by what was fastest, so
# that every process has the same ones.
OPTIONS: dict[str, Any] = {"compile_threads": 1, "deterministic": True}


def compile_obstacle(device: torch.device) -> str | None:
    """Return why nothing can be compiled for this device here; None where nothing is known to be in the way."""
    if is_gpu(device):
        from torch.utils._triton import has_triton

        return None if has_triton() else "Triton is missing, or the GPU is too old for it"
    if not is_host(device):
        return f"not tried on {device.type}"
    compiler = os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")
    return None if shutil.which(compiler) else f"the C++ compiler {compiler} is missing; CXX names another"


def compile_layers(model: Any, *, but_last: bool) -> None:
    """Have the layers of a working copy compiled when they are first called, for all sizes of batches at once.

    `but_last`: not the last one. Raises ValueError where there is no layer to compile.
    """
    layers = last_layer.layers(model)
    if layers is None:
        raise ValueError("the layers are of an unknown structure")
    chosen = layers[:-1] if but_last else layers
    if not len(chosen):
        raise ValueError("the one layer is trimmed")
    for each in chosen:
        each.compile(dynamic=True, backend=BACKEND, options=OPTIONS if BACKEND == "inductor" else None)
