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
from pathlib import Path
from typing import Any

FOLDER_VARIABLE = "BOUNDBY_RECORD_INTO"
HERE = Path(__file__).resolve().parent
LIBRARY = HERE.parents[2]
NOT_RECORDED = "not_recorded.txt"


class AfterTorch:
    """Finds torch as the others would, and has what it loads recorded; finds this library where no other does."""

    is_looking = False

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        """Return the spec of torch, whose loader starts the recording, or of this library; None for all else."""
        if name == "boundby":
            return importlib.machinery.PathFinder.find_spec(name, [str(LIBRARY)])
        if name != "torch" or self.is_looking:
            return None
        self.is_looking = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self.is_looking = False
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
        script = importlib.import_module("boundby.integrations.script")
        script.record(folder)
    except BaseException as error:  # whatever it is: the program goes on
        why = f"{type(error).__name__}: {error}"
        if isinstance(error, ModuleNotFoundError):
            why = f"{sys.executable} lacks {error.name}: install boundby there too (pip install boundby)"
        with contextlib.suppress(OSError), (folder / NOT_RECORDED).open("w", encoding="utf-8") as file:
            file.write(why + "\n")


def give_way() -> None:
    """Run the `sitecustomize` that would have run without this one."""
    others = [entry for entry in sys.path if Path(entry or ".").resolve() != HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


if FOLDER_VARIABLE in os.environ:
    sys.meta_path.insert(0, AfterTorch())
give_way()
