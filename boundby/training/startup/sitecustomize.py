"""Runs as a Python starts whose PYTHONPATH has this folder: once the program imports torch, its steps are recorded.

It needs nothing but the standard library, changes nothing in a program without torch, and runs the `sitecustomize` that
it stands in front of. What goes wrong here is left as a text in the run folder.
"""

import contextlib
import importlib
import importlib.machinery
import importlib.util
import os
import sys
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

FOLDER_VARIABLE = "BOUNDBY_RECORD_INTO"
HERE = Path(__file__).resolve().parent
LIBRARY = HERE.parents[2]
NOT_RECORDED = "not_recorded.txt"


class AfterTorch:
    """Finds torch on the path, and has what it loads recorded; finds this library where no other does."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        """Return the spec of torch, whose loader starts the recording, or of this library; None for all else."""
        if name == "boundby":
            return PathFinder.find_spec(name, [str(LIBRARY)])
        spec = PathFinder.find_spec(name, path) if name == "torch" else None
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_watch(module: Any) -> None:
                execute(module)
                watch()

            spec.loader.exec_module = execute_and_watch  # type: ignore[method-assign]
        return spec


def watch() -> None:
    """Record the steps of this program from now on; where that cannot be, leave why."""
    folder = Path(os.environ[FOLDER_VARIABLE])
    try:
        importlib.import_module("boundby.training.script").record(folder)
    except BaseException as error:  # whatever it is: the program goes on
        why = f"{sys.executable} cannot load boundby (pip install boundby): {type(error).__name__}: {error}\n"
        with contextlib.suppress(OSError), (folder / NOT_RECORDED).open("w", encoding="utf-8") as file:
            file.write(why)


def give_way() -> None:
    """Run the `sitecustomize` that would have run without this one."""
    others = [entry for entry in sys.path if Path(entry or ".").resolve() != HERE]
    spec = PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


if FOLDER_VARIABLE in os.environ:
    sys.meta_path.insert(0, AfterTorch())
give_way()
