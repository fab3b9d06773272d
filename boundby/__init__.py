"""Boundby: what is your model bound by? `boundby.explain(model, batch)`; other names come from the rooms below.

`timing`, `work` and `machine` measure, `capture` records and `trace` reads, `bound` has the answer; `inference`,
`layers`, `partition` and `training` serve whole sets, modules, devices and loops. A name is loaded when it is used.
"""

import ast
import importlib
import importlib.machinery
import sys
import types
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

__version__ = "0.2.0"

MOVED = {  # public modules of 0.2 and earlier, which keep their names as well
    **{
        f"boundby.{name}": f"boundby.{room}.{name}"
        for room, names in {
            "timing": "compare stats timer whole_set",
            "work": "attention_mask roofline",
            "machine": "ceilings compile_cache device disturbance energy environment memory sampler",
            "bound": "attention card device_time explanation judgement prediction recording replay split trials "
            "verdict",
        }.items()
        for name in names.split()
    },
    "boundby.bottleneck": "boundby.bound.analysis",
    "boundby.sweep": "boundby.timing.rounds",
    "boundby.known": "boundby.formatting",
    "boundby.integrations": "boundby.training",
    **{f"boundby.integrations.{name}": f"boundby.training.{name}" for name in ("lightning", "script", "transformers")},
}


def __getattr__(name: str) -> Any:
    """Return `explain`, which loads torch; nothing else here does."""
    if name == "explain":
        return importlib.import_module("boundby.bound").explain
    raise AttributeError(f"module 'boundby' has no attribute {name!r}")


def hand_on(room: str, path: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return `__getattr__`, `__dir__` and `__all__` of a package whose `__init__.pyi` lists its public names.

    Each line there is `from .module import name`, or `from . import module`; a module is loaded when its name is used.
    Ours and not a library's, because a script must be able to say which library is missing.
    """
    lines = [
        line
        for line in ast.parse(Path(path).with_suffix(".pyi").read_text(encoding="utf-8")).body
        if isinstance(line, ast.ImportFrom)
    ]
    homes = {name.asname or name.name: (line.module, name.name) for line in lines for name in line.names}

    def load(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {room!r} has no attribute {name!r}")
        module, attribute = homes[name]
        home = importlib.import_module(f"{room}.{module}" if module else room)
        if attribute in vars(home):
            return vars(home)[attribute]
        return importlib.import_module(f"{home.__name__}.{attribute}")

    return load, lambda: sorted(homes), sorted(homes)


class _EarlierNames:
    """Imports a module by its earlier name, as the one module that it is."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in MOVED:
            return None
        warnings.warn(f"{fullname} is {MOVED[fullname]} now", DeprecationWarning, stacklevel=2)
        return importlib.machinery.ModuleSpec(fullname, self)  # type: ignore[arg-type]

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = importlib.import_module(MOVED[spec.name])
        self._spec = module.__spec__
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        module.__spec__ = self._spec  # and not that of the earlier name, which the import has put there


sys.meta_path.insert(0, _EarlierNames())
