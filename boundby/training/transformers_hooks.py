"""The stages of a step as far as the events of a callback of the Hugging Face Trainer tell them."""

from typing import Any

import torch

from boundby.training import stages
from boundby.training.records import Kind
from boundby.training.timer import StageTimer

FORWARD_BACKWARD = "forward_backward"  # where the calls of the model cannot be told apart from what follows
CALLED_BETWEEN = "the model is called more than once per micro-batch: what lies between counts as backward"
NO_SPLIT = "not told from backward: the model is {}; attach the callback to the trainer to tell them apart"


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
        self._is_in_step = True
        self._enter(None if self._splits else FORWARD_BACKWARD)

    def substep_end(self) -> None:
        """One micro-batch is done, another one follows."""
        self._enter(None if self._splits else FORWARD_BACKWARD)

    def pre_optimizer_step(self) -> None:
        """The gradients are there."""
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

    def _forward_begins(self, model: torch.nn.Module, *_: Any) -> None:
        self._depth += 1
        is_aside = not model.training and not torch.is_grad_enabled()
        if self._depth > 1 or is_aside or not self._is_in_step:
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
