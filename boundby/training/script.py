"""Record the steps of a program that knows nothing of it, from what torch itself tells: nothing of the program changes.

The first optimizer step, which is a cold one, only shows what is trained; from then on a step ends where the next one
waits for data, and stages are: the wait for a `DataLoader`, the forward of the outermost module that holds the
parameters, `backward`, and the optimizer. A forward in `eval` mode begins an evaluation, as does a loader waited for
without gradients, until the training goes on. Without gradients alone it is a forward, as in a rollout; so it is in
`eval` mode with gradients, as soon as one has led to a `backward`.
"""

import atexit
import gc
import os
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import torch
from torch.optim import optimizer as optimizers
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, dataloader, get_worker_info

from boundby.capture import Guard, Patches
from boundby.training import ManagerOptions, ProfilerManager
from boundby.training.stages import BACKWARD, DATA, EVALUATION, FORWARD, OPTIMIZER

NO_TRACE = (
    "a program that is recorded from outside is only timed; boundby.training.ProfilerManager in it records a trace"
)
COPIES = "not told apart from the loop: copies to a device stand under the time in no stage"
COMPILED_IN_PLACE = "not told apart from the loop: the model was compiled in place, and a hook would change its graph"
NOT_CALLED = "not told apart from the loop: the module that holds the parameters is not called as a whole"
NO_LOADER = "not told apart from the loop: no torch DataLoader was waited for"
NO_BACKWARD = "not told apart from the loop: no call of backward was seen"


def record(folder: Path) -> "ScriptRecorder":
    """Watch this process for training steps, and record them into the folder; the program is not disturbed."""
    recorder = ScriptRecorder(folder)
    recorder.install()
    return recorder


# Before the first optimizer step, in a step, after its optimizer, in an evaluation, and after the recording.
Phase = Literal["before", "step", "stepped", "evaluation", "over"]


class ScriptRecorder:
    """Turns what torch tells into stages and steps. Nothing here raises into the program: a failure is a remark."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._manager: ProfilerManager | None = None
        self._patches = Patches()
        self._optimizer = 0  # id of the one whose step ends a step
        self._others: set[int] = set()
        self._phase: Phase = "before"
        self._eval_forward: Literal["none", "last", "learnt from"] = "none"  # with gradients, in eval mode
        self._is_waiting = False  # for a loader
        self._evaluates_batches = False  # of a loader that was waited for without gradients
        self._guard = Guard(self._failed)
        self._seen: set[str] = set()
        self._hooked: list[Any] = []  # removable handles
        self._thread = self._pid = 0
        self._error: BaseException | None = None
        self._excepthook: Callable[..., Any] = sys.excepthook

    def install(self) -> None:
        """Have torch tell of backward, of loaders, and of optimizer steps, and Python of the program's end."""
        self._patches.put(torch.autograd, "backward", self._backward)
        self._patches.put(dataloader._BaseDataLoaderIter, "__next__", self._wait)
        self._patches.put(DataLoader, "__iter__", self._wait)
        optimizers.register_optimizer_step_pre_hook(self._before_step)
        optimizers.register_optimizer_step_post_hook(self._after_step)
        self._excepthook, sys.excepthook = sys.excepthook, self._note_error

    def stop(self) -> None:
        """End the recording, with what was not told apart and why."""
        manager = self._manager
        if manager is None or self._phase == "over" or os.getpid() != self._pid:
            return
        self._go_on()
        remarks = manager.timer.remarks
        reasons = {DATA: NO_LOADER, BACKWARD: NO_BACKWARD, FORWARD: NOT_CALLED}
        for stage in reasons.keys() - self._seen:
            remarks.add(stage, reasons[stage])
        if manager.timer.marks is not None:
            remarks.add("h2d", COPIES)
        self._phase = "over"
        manager.stop(self._error)

    @property
    def _live(self) -> ProfilerManager | None:
        """The recording, where it has begun and this is its process and thread."""
        if self._manager is None or self._phase == "over" or torch.compiler.is_compiling():
            return None
        return self._manager if (self._pid, self._thread) == (os.getpid(), threading.get_ident()) else None

    def _failed(self, error: Exception) -> None:
        self._phase = "over"
        if self._manager is not None:
            self._manager.timer.remarks.add("recording from outside", error)
            self._manager.stop(None)

    def _go_on(self) -> None:
        """Leave an evaluation, or end the step whose optimizer has stepped: the next one begins."""
        self._evaluates_batches = False
        if self._manager is not None and self._phase == "evaluation":
            self._manager.timer.end(EVALUATION)
        elif self._manager is not None and self._phase == "stepped":
            self._manager.step()
        self._phase = "step"

    def _evaluate(self) -> None:
        if self._phase != "evaluation" and self._manager is not None:
            self._go_on()
            self._manager.timer.begin(EVALUATION, "excluded")
            self._phase = "evaluation"

    def _begin(self, stage: str) -> None:
        self._go_on()
        self._seen.add(stage)
        if self._manager is not None:
            self._manager.timer.begin(stage)

    def _backward(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        manager = self._live
        if manager is None:
            return original(*args, **kwargs)
        if self._eval_forward == "last":
            self._eval_forward = "learnt from"
        with self._guard:
            self._begin(BACKWARD)
        is_whole = False
        try:
            result = original(*args, **kwargs)
            is_whole = True
        finally:
            manager.timer.end(BACKWARD, raised=not is_whole)
        return result

    def _wait(self, original: Callable[..., Any], *args: Any) -> Any:
        """Time the next batch of a loader, or the start of its workers; the end of the loader is no wait."""
        manager = self._live
        if manager is None or self._is_waiting or get_worker_info() is not None:
            return original(*args)
        if not torch.is_grad_enabled():
            with self._guard:
                self._evaluate()
            self._evaluates_batches = True
            return original(*args)
        with self._guard:
            self._begin(DATA)
        self._is_waiting = True
        try:
            batch = original(*args)
        except StopIteration:
            # The end is no wait, but where workers end with the epoch.
            (manager.timer.end if getattr(args[0], "_num_workers", 0) else manager.timer.forget)(DATA)
            raise
        except BaseException:
            manager.timer.end(DATA, raised=True)
            raise
        finally:
            self._is_waiting = False
        manager.timer.end(DATA)
        with self._guard:
            self._count(batch)
        return batch

    def _count(self, batch: Any) -> None:
        """Note the samples of a batch: the rows of the first tensor in it."""
        leaves = tree_leaves(dict(batch) if isinstance(batch, Mapping) else batch)
        tensor = next((leaf for leaf in leaves if isinstance(leaf, torch.Tensor)), None)
        if tensor is not None and tensor.ndim and self._manager is not None:
            self._manager.metrics({"samples": len(tensor)})

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if self._live is not None:
            if self._phase == "evaluation" or id(optimizer) in (self._optimizer, *self._others):
                with self._guard:
                    self._go_on()
            self._live.timer.begin(OPTIMIZER)

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if self._phase == "before" and not torch.compiler.is_compiling():
            with self._guard:
                self._start(optimizer)
        elif self._live is not None:
            self._live.timer.end(OPTIMIZER)
            if id(optimizer) in self._others:  # twice, and the one that ends a step not at all
                self._optimizer = id(optimizer)
            if id(optimizer) == self._optimizer:
                self._phase = "stepped"
                self._others.clear()
            else:
                self._others.add(id(optimizer))

    def _start(self, optimizer: torch.optim.Optimizer) -> None:
        """Begin to record, on the device of the parameters; the step that has ended is number 0."""
        parameters = [param for group in optimizer.param_groups for param in group["params"]]
        options = ManagerOptions(trace=False, no_trace_reason=NO_TRACE)
        manager = ProfilerManager(self._folder, device=parameters[0].device, options=options)
        self._optimizer, self._pid, self._thread = id(optimizer), os.getpid(), threading.get_ident()
        self._hook(parameters, manager)
        manager.start(first_step=1)
        self._manager, self._phase = manager, "step"
        atexit.register(self.stop)  # before the manager's own, which would call the end unforeseen

    def _hook(self, parameters: list[torch.nn.Parameter], manager: ProfilerManager) -> None:
        """Time the forward of the outermost modules that hold these parameters."""
        wanted = set(map(id, parameters))
        modules = [candidate for candidate in gc.get_objects() if issubclass(type(candidate), torch.nn.Module)]
        inner = {id(child) for module in modules for child in module._modules.values()}
        for module in modules:
            if id(module) in inner or not any(id(parameter) in wanted for parameter in module.parameters()):
                continue
            if getattr(module, "_compiled_call_impl", None) is not None:
                self._seen.add(FORWARD)
                manager.timer.remarks.add(FORWARD, COMPILED_IN_PLACE)
                continue
            self._hooked.append(module.register_forward_pre_hook(self._before_forward))
            self._hooked.append(module.register_forward_hook(self._after_forward, always_call=True))

    def _before_forward(self, module: torch.nn.Module, *_: Any) -> None:
        if self._live is not None:
            has_gradients = torch.is_grad_enabled()
            if self._eval_forward != "learnt from":
                self._eval_forward = "last" if has_gradients and not module.training else "none"
            if module.training:
                is_training = has_gradients or not self._evaluates_batches
            else:
                is_training = has_gradients and self._eval_forward == "learnt from"
            with self._guard:
                self._begin(FORWARD) if is_training else self._evaluate()

    def _after_forward(self, *_: Any) -> None:
        if self._live is not None and self._phase != "evaluation":
            self._live.timer.end(FORWARD)

    def _note_error(self, kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        self._error = error
        self._excepthook(kind, error, traceback)
