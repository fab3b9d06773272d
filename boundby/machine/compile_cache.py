"""How torch compiles for us, and where it keeps that: in folders that nobody else can write to, since it runs it.

Left to itself torch takes `/tmp/torchinductor_<user>`, which another user may have made, and unpickles what lies in it.
"""

import contextlib
import functools
import os
import shutil
import stat
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch

from boundby.files import sha256_of, user_cache
from boundby.machine.device import is_gpu, is_host
from boundby.machine.environment import machine

TORCH, TRITON = "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"  # graphs of all kinds and C++; kernels of a GPU
# No processes of torch's own, which a killed program would leave behind; no kernel chosen by what was fastest, so that
# every process has the same ones; and no headers compiled beforehand, which lie in /tmp whatever folder is named.
COMPILE_OPTIONS: dict[str, Any] = {
    "compile_threads": 1,
    "deterministic": True,
    "cpp_cache_precompile_headers": False,
}


def compile_obstacle(device: torch.device) -> str | None:
    """Return why nothing can be compiled for this device here; None where nothing is known to be in the way."""
    if is_gpu(device):
        from torch.utils._triton import has_triton

        return None if has_triton() else "Triton is missing, or the GPU is too old for it"
    if not is_host(device):
        return f"not tried on {device.type}"
    compiler = os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")
    return None if shutil.which(compiler) else f"the C++ compiler {compiler} is missing; CXX names another"


def use_private_cache() -> Path:
    """Have torch and Triton keep what they compile in a private folder, in this process and its children; return it.

    The folder is TORCHINDUCTOR_CACHE_DIR, else one in the user's cache, else a temporary one. A folder that is a link,
    somebody else's, or open to others is passed over with a warning; so is TRITON_CACHE_DIR. The variables are set.
    """
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir  # here, since it loads torch's compiler

    by_default = Path(default_cache_dir())  # which torch itself writes into the variable as soon as it is imported
    named = {name: Path(os.environ[name]).absolute() for name in (TORCH, TRITON) if os.environ.get(name)}
    named = {name: folder for name, folder in named.items() if not folder.is_relative_to(by_default)}
    folder = _usable(named.get(TORCH), TORCH) or _usable(_own(), "boundby's cache") or Path(_temporary().name)
    os.environ[TORCH] = str(folder)
    for_triton = named.get(TRITON)
    if for_triton is None or not (for_triton.is_relative_to(folder) or _usable(for_triton, TRITON)):
        os.environ.pop(TRITON, None)  # it then takes a folder in that of torch
    return folder


def _usable(folder: Path | None, name: str) -> Path | None:
    """Return the folder, made if need be; None, after a warning, where it is not private or cannot be made."""
    if folder is None:
        return None
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        fault = _fault(folder)
    except OSError as error:
        fault = f"cannot be used: {error.strerror}"
    if fault is None:
        return folder
    warnings.warn(f"{name}: {folder} {fault}; compiled code is kept elsewhere", RuntimeWarning, stacklevel=4)
    return None


def _fault(folder: Path) -> str | None:
    """Return in which way a folder is not private; None for one that is. Raises OSError."""
    status, user = folder.lstat(), os.geteuid()
    if not stat.S_ISDIR(status.st_mode):
        return "is a link or a file, and no folder"
    if status.st_uid != user:
        return f"belongs to user {status.st_uid}, not to {user}"
    if status.st_mode & 0o077:
        return (
            f"is open to others (mode {stat.S_IMODE(status.st_mode):o}); if they have left nothing there, chmod 700 it"
        )
    for above in {*folder.parents, *folder.resolve().parents}:  # a group may write: it is often the user's own
        status = above.stat()
        is_open = status.st_mode & stat.S_IWOTH and not status.st_mode & stat.S_ISVTX
        if is_open or status.st_uid not in (0, user):
            return f"can be replaced by others, who may write into {above}"
    return None


def _own() -> Path | None:
    """Return the folder in the user's cache; None for a user without a home.

    Each kind of processor has its own: a home is shared by machines, and C++ is compiled for the one at hand.
    """
    with contextlib.suppress(RuntimeError):
        kind = sha256_of([machine()["architecture"], machine()["cpu"]])[:16]
        return user_cache() / "compiled" / kind
    return None


@functools.cache
def _temporary() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="boundby-compiled-", ignore_cleanup_errors=True)
