"""The stages of a step: exact, from the Trainer's own methods, or as far as the events of a callback tell them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Protocol

import accelerate.data_loader
import torch

from boundby.patches import Patches, Wrapper
from boundby.training import stages
from boundby.training.manager import ProfilerManager
from boundby.training.records import Kind
from boundby.training.timer import StageTimer

FORWARD_BACKWARD = "forward_backward"  # where the calls of the model cannot be told apart from what follows
CALLED_BETWEEN = "the model is called more than once per micro-batch: what lies between counts as backward"
ASIDE = "the model is called in a step in eval mode and without gradients too: that counts to what it lies in"
NO_SPLIT = "not told from backward: the model is {}; attach the callback to the trainer to tell them apart"


class Profile(Protocol):
    """What an `Attachment` tells of a training."""

    def start(self, args: Any, state: Any) -> ProfilerManager:
        """Begin to profile a training; return what times it."""
        ...

    def step(self, state: Any) -> None:
        """Take note that an optimizer step has ended."""
        ...

    def log(self, state: Any, logs: dict[str, Any] | None) -> None:
        """Keep the numbers that the Trainer logs."""
        ...

    def stop(self, error: BaseException | None = None) -> None:
        """End the profile and write it."""
        ...

    def guarded(self, action: Callable[[], object]) -> None:
        """Do it; a failure becomes a remark."""
        ...

    def let_go(self, attachment: "Attachment") -> None:
        """Go on as a plain callback: the attachment to a Trainer has ended."""
        ...


class Attachment:
    """The callback's hold on one Trainer, for one training; also a context manager that lets go at its end.

    Its stand-ins pass on arguments, results and exceptions as they are. When the training ends, or an exception ends
    it, the profile is written and every method of the Trainer is what it was.
    """

    def __init__(self, callback: Profile, trainer: Any) -> None:
        self._callback = callback
        self._trainer = trainer
        self._manager: ProfilerManager | None = None  # while it trains
        self._open: set[str] = set()
        self._is_in_step = False
        self._hold = Patches()  # from now on
        self._stages = Patches()  # while it trains
        self._hold.put(trainer, "train", self._train)
        self._hold.put(trainer.callback_handler, "call_event", self._event)

    def __enter__(self) -> "Attachment":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._callback.stop(error)
        self.detach()

    def detach(self) -> None:
        """Let go of the Trainer."""
        self._manager = None
        self._stages.undo()
        self._hold.undo()
        self._callback.let_go(self)

    def _train(self, original: Wrapper, *args: Any, **kwargs: Any) -> Any:
        try:
            result = original(*args, **kwargs)
        except BaseException as error:
            for name in list(self._open):
                self._end(name, raised=True)
            self._callback.stop(error)
            raise
        else:
            self._callback.stop()
            return result
        finally:
            self.detach()

    def _event(self, original: Wrapper, event: str, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """Time the callbacks of an event, and take note of it before and after them."""
        if event == "on_step_end":
            self._end(stages.SCHEDULER)
        with self._timed(stages.CALLBACKS):
            result = original(event, args, state, control, **kwargs)
        self._callback.guarded(lambda: self._after(event, args, state, kwargs))
        return result

    def _after(self, event: str, args: Any, state: Any, kwargs: dict[str, Any]) -> None:
        if event == "on_train_begin":
            self._begin(args, state)
        elif self._manager is None:
            return
        elif event == "on_epoch_begin":
            self._begin_stage(stages.EPOCH, "span")
        elif event == "on_epoch_end":
            self._end(stages.EPOCH)
        elif event == "on_step_begin":
            self._is_in_step = True
        elif event == "on_optimizer_step":
            self._begin_stage(stages.SCHEDULER)
        elif event == "on_step_end":
            self._is_in_step = False
            self._callback.step(state)
        elif event == "on_log":
            self._callback.log(state, kwargs.get("logs"))
        elif event == "on_train_end":
            self._callback.stop()

    def _begin(self, args: Any, state: Any) -> None:
        self._stages.undo()
        self._stages = Patches()
        self._open.clear()
        self._is_in_step = False
        self._manager = None
        self._manager = manager = self._callback.start(args, state)
        trainer = self._trainer
        missing = [
            name
            for owner, name, wrapper in (
                (trainer, "get_batch_samples", self._get_batch_samples),
                (trainer, "_prepare_inputs", self._inside_step(stages.H2D)),
                (trainer, "compute_loss", self._inside_step(stages.FORWARD)),
                (trainer.accelerator, "backward", self._inside_step(stages.BACKWARD)),
                (trainer, "_clip_grad_norm", self._inside_step(stages.CLIP)),
                (trainer, "_get_grad_norm", self._inside_step(stages.CLIP)),
                (trainer.optimizer, "step", self._inside_step(stages.OPTIMIZER)),
                (trainer, "_maybe_log_save_evaluate", self._maybe_log),
                (trainer, "_save_checkpoint", self._during(stages.CHECKPOINT)),
                (trainer, "evaluate", self._during(stages.EVALUATION, "excluded")),
                (trainer, "predict", self._during(stages.EVALUATION, "excluded")),
            )
            if not self._stages.put(owner, name, wrapper)
        ]
        for name in missing:
            manager.timer.remarks.add(name, "this Trainer has no such method; what it would do is in no stage")

    def _during(self, name: str, kind: Kind = "stage") -> Wrapper:
        def wrapper(original: Wrapper, *args: Any, **kwargs: Any) -> Any:
            with self._timed(name, kind):
                return original(*args, **kwargs)

        return wrapper

    def _inside_step(self, name: str) -> Wrapper:
        def wrapper(original: Wrapper, *args: Any, **kwargs: Any) -> Any:
            if not self._is_in_step:
                return original(*args, **kwargs)
            with self._timed(name):
                return original(*args, **kwargs)

        return wrapper

    def _get_batch_samples(self, original: Wrapper, *args: Any, **kwargs: Any) -> Any:
        """Time the wait for data, and in it the copies to the device, which the loader itself asks for."""
        copies = Patches()
        copies.put(accelerate.data_loader, "send_to_device", self._during(stages.H2D))
        try:
            with self._timed(stages.DATA):
                return original(*args, **kwargs)
        finally:
            copies.undo()

    def _maybe_log(self, original: Wrapper, *args: Any, **kwargs: Any) -> Any:
        if not self._trainer.control.should_log:
            return original(*args, **kwargs)
        with self._timed(stages.LOGGING):
            return original(*args, **kwargs)

    @contextmanager
    def _timed(self, name: str, kind: Kind = "stage") -> Iterator[None]:
        """Time a block as a stage, unless it lies in one of the same name."""
        if self._manager is None or name in self._open:
            yield
            return
        self._begin_stage(name, kind)
        try:
            yield
        except BaseException:
            self._end(name, raised=True)
            raise
        self._end(name)

    def _begin_stage(self, name: str, kind: Kind = "stage") -> None:
        if self._manager:
            self._open.add(name)
            self._manager.timer.begin(name, kind)

    def _end(self, name: str, *, raised: bool = False) -> None:
        if self._manager and name in self._open:
            self._open.discard(name)
            self._manager.timer.end(name, raised=raised)


class HookMarks:
    """Marks one stage after the other; what is open ends when the next event comes.

    Calls of the model outside of a step are not marked. Nor are those in eval mode and without gradients: they are of
    an evaluation, which follows a step that an exception has ended, as nobody tells, or part of what the step does.
    Data is everything from the end of a step, or what is done after it, to the next step; backward is everything from
    the end of the model's call to the next event, which after the last micro-batch includes the clipping of gradients.
    """

    def __init__(self, timer: StageTimer) -> None:
        self._timer = timer
        self._open: str | None = None
        self._after: str | None = None  # what begins when logs, evaluation and checkpoint of the moment are over
        self._is_in_step = self._is_in_epoch = False
        self._splits = False
        self._has_aside = False  # a call in eval mode and without gradients, since the last event of the step
        self._depth = 0  # of calls of the model inside one another
        self._hooks: list[Any] = []

    def train_begin(self, args: Any, model: torch.nn.Module | None) -> None:
        """Watch the model's calls, unless that would change what is compiled."""
        obstacle = _obstacle(args, model)
        self._splits = obstacle is None
        if model is not None and obstacle is None:
            self._hooks.append(model.register_forward_pre_hook(self._forward_begins, prepend=True))
            self._hooks.append(model.register_forward_hook(self._forward_ends, always_call=True))
        elif obstacle:
            self._timer.remarks.add(stages.FORWARD, NO_SPLIT.format(obstacle))
        if args.eval_on_start:
            self._enter(stages.EVALUATION, "excluded")

    def train_end(self) -> None:
        """Let go of the model, and of a stage that will not end."""
        while self._hooks:
            self._hooks.pop().remove()
        self._drop()
        self._is_in_step = False
        if self._is_in_epoch:
            self._timer.end(stages.EPOCH, raised=True)

    def epoch_begin(self) -> None:
        """Begin the epoch, and the wait for its first batch."""
        self._drop()
        self._timer.begin(stages.EPOCH, "span")
        self._is_in_epoch = True
        self._enter(stages.DATA)

    def epoch_end(self, control: Any) -> None:
        """End the epoch; a wait that found no more data does not count."""
        self._drop()
        self._timer.end(stages.EPOCH)
        self._is_in_epoch = False
        self._after = None
        self._enter_next(control)

    def step_begin(self) -> None:
        """All micro-batches of the step are there."""
        if self._open == stages.DATA:
            self._leave()
        self._drop()
        self._is_in_step, self._has_aside = True, False
        self._enter(None if self._splits else FORWARD_BACKWARD)

    def substep_end(self) -> None:
        """One micro-batch is done, another one follows."""
        self._note_aside()
        self._enter(None if self._splits else FORWARD_BACKWARD)

    def pre_optimizer_step(self) -> None:
        """The gradients are there."""
        self._note_aside()
        self._enter(stages.OPTIMIZER)

    def optimizer_step(self) -> None:
        """The weights are updated."""
        self._enter(stages.SCHEDULER)

    def step_end(self) -> None:
        """The step is over."""
        self._leave()
        self._is_in_step = False

    def between_steps(self, control: Any) -> None:
        """Begin what follows the step."""
        self._after = stages.DATA
        self._enter_next(control)

    def logged(self, control: Any) -> None:
        """Logs have been written; those of an evaluation are part of it."""
        if self._open == stages.LOGGING:
            self._enter_next(control)

    def prediction_step(self) -> None:
        """An evaluation is under way, which nothing may have announced."""
        if self._open != stages.EVALUATION and not self._is_in_step:
            self._drop()
            self._enter(stages.EVALUATION, "excluded")

    def evaluated(self, control: Any) -> None:
        """An evaluation is over."""
        if self._open == stages.EVALUATION:
            self._enter_next(control)

    def saved(self, control: Any) -> None:
        """A checkpoint has been written, perhaps one that was decided on by the evaluation."""
        if self._open == stages.DATA:
            self._drop()
        if self._open in (stages.CHECKPOINT, None) and not self._is_in_step:
            self._enter_next(control)

    def _enter_next(self, control: Any) -> None:
        """Begin what the Trainer does next: it logs, evaluates, and writes a checkpoint, in this order."""
        if control.should_log:
            self._enter(stages.LOGGING)
        elif control.should_evaluate:
            self._enter(stages.EVALUATION, "excluded")
        else:
            self._enter(stages.CHECKPOINT if control.should_save else self._after)

    def _note_aside(self) -> None:
        """Report calls that were not marked: the step went on, so it was not in an evaluation."""
        if self._has_aside:
            self._timer.remarks.add(stages.FORWARD, ASIDE)
            self._has_aside = False

    def _forward_begins(self, model: torch.nn.Module, *_: Any) -> None:
        self._depth += 1
        if self._depth > 1 or not self._is_in_step:
            return
        if not model.training and not torch.is_grad_enabled():
            self._has_aside = True
            return
        if self._open == stages.BACKWARD:
            self._timer.remarks.add(stages.BACKWARD, CALLED_BETWEEN)
        self._enter(stages.FORWARD)

    def _forward_ends(self, *_: Any) -> None:
        self._depth -= 1
        if not self._depth and self._open == stages.FORWARD:
            self._enter(stages.BACKWARD)

    def _enter(self, name: str | None, kind: Kind = "stage") -> None:
        self._leave()
        if name:
            self._timer.begin(name, kind)
            self._open = name

    def _leave(self) -> None:
        if self._open:
            self._timer.end(self._open)
            self._open = None

    def _drop(self) -> None:
        """Take back the begin of what is open; an evaluation has taken time all the same."""
        if self._open == stages.EVALUATION:
            self._leave()
        elif self._open:
            self._timer.forget(self._open)
            self._open = None


def _obstacle(args: Any, model: torch.nn.Module | None) -> str | None:
    """Return why the calls of the model are not watched, None where they can be."""
    if model is None:
        return "not known"
    is_compiled = isinstance(model, torch._dynamo.OptimizedModule) or model._compiled_call_impl is not None
    if is_compiled or getattr(args, "torch_compile", False):
        return "compiled, and hooks would become part of the compiled program"
    if args.n_gpu > 1:
        return "copied to several GPUs in every step"
    return None
