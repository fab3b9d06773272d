"""Give this process the card that its environment names: its clock at once, its torch as soon as it is imported."""

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from pathlib import Path

ROOT = str(Path(__file__).resolve().parents[3])


class Finder(importlib.abc.MetaPathFinder):
    """Acts once after the import of a module that it waits for."""

    def __init__(self, actions):
        self.actions = actions

    def find_spec(self, name, path=None, target=None):
        action = self.actions.pop(name, None)
        if action is None:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            action(module)

        spec.loader.exec_module = exec_module
        return spec


def begin():
    """Read the card, and wait for torch."""
    sys.path.insert(0, ROOT)
    from tests import gpu_double  # by the name that a test knows it by: two copies would have two machines
    from tests.gpu_double import card, nvml

    sys.path.remove(ROOT)
    given = card.from_environment()
    machine = gpu_double.Machine(given)
    gpu_double.plug_in_time()
    gpu_double._plugged.append(machine)  # before torch, too
    sys.modules["pynvml"] = nvml.module(machine)

    def quiet(module):  # the real host's counters have nothing to do with the machine's clock
        module.HostCounters.__init__.__defaults__ = (Path("/absent"), Path("/absent"), *_rest(module))

    def _rest(module):
        return module.HostCounters.__init__.__defaults__[2:4] + (lambda: (0.0, 0),)

    def sampled(module):  # a thread would read by the real clock: more or fewer values on another day

        class Once:
            def __init__(self):
                self.is_set = False

            def wait(self, interval):
                before, self.is_set = self.is_set, True
                return before

        def enter(self):
            def read():
                self._stop = Once()
                self._run()

            if self.reason is None:
                gpu_double._plugged[-1].every(self._interval_s, id(self), read)
            return self

        def leave(self, *exception):
            gpu_double._plugged[-1].never(id(self))

        module.Sampler.__enter__, module.Sampler.__exit__ = enter, leave

    def plug(module):
        gpu_double.plug_in(machine)

    sys.meta_path.insert(
        0, Finder({"torch": plug, "boundby.machine.disturbance": quiet, "boundby.machine.sampler": sampled})
    )


if os.environ.get("BOUNDBY_TEST_CARD"):
    begin()
