"""The stages of a Lightning fit: marks before and behind the parts that its loops call."""

from collections.abc import Callable
from operator import attrgetter
from typing import Any

from boundby.patches import Patches, Wrapper
from boundby.training import ProfilerManager
from boundby.training.records import Kind
from boundby.training.stages import (
    BACKWARD,
    CALLBACKS,
    CHECKPOINT,
    CLIP,
    DATA,
    EPOCH,
    EVALUATION,
    FORWARD,
    H2D,
    OPTIMIZER,
    SCHEDULER,
    ZERO_GRAD,
)

COMMUNICATION = "communication"  # of the processes before each batch: has one of them been told to end?
Method = Callable[..., Any]


class FitStages:
    """Marks the stages of one `trainer.fit` on a manager, from `attach` until `detach`.

    A step lasts from the fetch of its first batch to the next fetch, so that what callbacks do after a batch belongs to
    the step of that batch. It ends where the trainer has stepped its optimizer, with manual optimization after every
    batch. The marks are attributes of the objects of this trainer; nothing of a class is touched.
    """

    def __init__(self, manager: ProfilerManager, trainer: Any) -> None:
        self._manager = manager
        self._begin, self._end = manager.timer.begin, manager.timer.end
        self._trainer = trainer
        self._counts_steps = bool(trainer.lightning_module.automatic_optimization)
        self._patches = Patches()
        self._hooks: list[Any] = []  # of the optimizers
        self._steps = self.steps_done
        self._is_due = False  # the step has ended but for its callbacks
        self._in_batch = self._in_callbacks = self._in_optimizer = False
        self._fetches = 0  # that are under way: an iterable is fetched from inside the start of an epoch

    @property
    def steps_done(self) -> int:
        """Return the steps that have ended since the training began, in this run or those that it resumes."""
        if self._counts_steps:
            return int(self._trainer.global_step)
        return int(self._trainer.fit_loop.total_batch_idx) + 1

    def attach(self) -> None:
        """Begin to mark; what this version of Lightning lacks becomes a remark and goes unmarked."""
        trainer = self._trainer
        epochs, precision = "fit_loop.epoch_loop", "strategy.precision_plugin"
        self._mark(EPOCH, f"{epochs}.run", self._staged(EPOCH, "span"))
        self._mark(DATA, f"{epochs}.on_run_start", self._fetching)  # starts the workers
        self._mark(DATA, f"{epochs}._on_before_fetch", self._before_fetch)
        self._mark(DATA, f"{epochs}._on_after_fetch", self._after_fetch)
        self._mark(H2D, "strategy.batch_to_device", self._transfer)
        self._mark(CALLBACKS, f"{epochs}.automatic_optimization.run", self._batch)
        self._mark(CALLBACKS, f"{epochs}.manual_optimization.run", self._batch)
        self._mark(FORWARD, "strategy.training_step", self._staged(FORWARD))
        self._mark(BACKWARD, f"{precision}.backward", self._staged(BACKWARD))
        self._mark(EVALUATION, f"{epochs}.val_loop.run", self._staged(EVALUATION, "excluded"))
        self._mark(CHECKPOINT, "save_checkpoint", self._staged(CHECKPOINT))
        if trainer.gradient_clip_val:
            self._mark(CLIP, f"{precision}.clip_gradients", self._staged(CLIP))
        if trainer.lr_scheduler_configs:
            self._mark(SCHEDULER, f"{epochs}.update_lr_schedulers", self._staged(SCHEDULER))
        if trainer.world_size > 1:
            self._mark(COMMUNICATION, f"{epochs}._broadcast_sigterm_tensor", self._between_batches)
        for optimizer in trainer.optimizers:
            self._mark(ZERO_GRAD, "zero_grad", self._staged(ZERO_GRAD), optimizer)
            if hasattr(optimizer, "register_step_post_hook"):
                self._hooks.append(optimizer.register_step_post_hook(lambda *_: self.end_optimizer()))
        self._begin_callbacks()

    def detach(self, error: BaseException | None = None) -> None:
        """Take every mark away; `error` is what ended the fit. A step that lacks its callbacks alone has ended."""
        self._patches.undo()
        while self._hooks:
            self._hooks.pop().remove()
        self._end_step(raised=error is not None)

    def begin_optimizer(self) -> None:
        """Note that the gradients are ready, and that clipping and the optimizer's step follow."""
        if not self._in_optimizer:  # an optimizer such as L-BFGS computes them several times in one step
            self._in_optimizer = True
            self._begin(OPTIMIZER)

    def end_optimizer(self, *, raised: bool = False) -> None:
        """Take note that the optimizer has stepped."""
        if self._in_optimizer:
            self._in_optimizer = False
            self._end(OPTIMIZER, raised=raised)

    def _mark(self, stage: str, path: str, wrapper: Wrapper, owner: Any = None) -> None:
        """Wrap the method at a path, below the trainer if there is no `owner`."""
        place, _, name = path.rpartition(".")
        try:
            owner = owner or (attrgetter(place)(self._trainer) if place else self._trainer)
            if not self._patches.put(owner, name, wrapper):
                self._manager.timer.remarks.add(f"stage {stage}", f"this Lightning has no {name!r} there")
        except Exception as error:
            self._manager.timer.remarks.add(f"stage {stage}", error)

    def _staged(self, name: str, kind: Kind = "stage") -> Wrapper:
        """Return a wrapper that times a method as a stage."""
        begin, end = self._begin, self._end

        def staged(method: Method, *args: Any, **kwargs: Any) -> Any:
            begin(name, kind)
            try:
                result = method(*args, **kwargs)
            except BaseException:
                end(name, raised=True)
                raise
            end(name)
            return result

        return staged

    def _fetching(self, start: Method, *args: Any, **kwargs: Any) -> Any:
        self._begin_fetch()
        try:
            return start(*args, **kwargs)
        finally:
            self._end_fetch()

    def _before_fetch(self, method: Method) -> None:
        self._begin_fetch()
        method()

    def _after_fetch(self, method: Method) -> None:
        method()
        self._end_fetch()

    def _transfer(self, method: Method, *args: Any, **kwargs: Any) -> Any:
        batch = self._staged(H2D)(method, *args, **kwargs)
        self._begin_callbacks()
        return batch

    def _between_batches(self, method: Method, *args: Any, **kwargs: Any) -> Any:
        self._end_step()
        return self._staged(COMMUNICATION)(method, *args, **kwargs)

    def _batch(self, run: Method, *args: Any, **kwargs: Any) -> Any:
        self._end_step()
        self._in_batch = True
        try:
            result = run(*args, **kwargs)
        except BaseException:
            self.end_optimizer(raised=True)
            self._in_batch = False
            raise
        self.end_optimizer()  # which did not step, as when a gradient of half precision is not finite
        self._in_batch = False
        self._begin_callbacks()
        done = self.steps_done
        self._is_due = not self._counts_steps or done > self._steps
        self._steps = done
        return result

    def _begin_fetch(self) -> None:
        self._fetches += 1
        if self._fetches == 1:
            self._end_step()
            self._begin(DATA)

    def _end_fetch(self) -> None:
        self._fetches -= 1
        if not self._fetches:
            self._end(DATA)

    def _begin_callbacks(self) -> None:
        if not self._in_callbacks and not self._in_batch:
            self._in_callbacks = True
            self._begin(CALLBACKS)

    def _end_step(self, *, raised: bool = False) -> None:
        """End the callbacks, and the step if it is due; inside a batch there is neither."""
        if self._in_callbacks:
            self._in_callbacks = False
            self._end(CALLBACKS, raised=raised)
        if self._is_due:
            self._is_due = False
            self._manager.step(self._steps - 1)
