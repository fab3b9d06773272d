"""The stages of a step, told from the Trainer's own methods: exact, and undone whatever happens."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any

import accelerate.data_loader

from boundby.patches import Patches, Wrapper
from boundby.training import stages
from boundby.training.manager import ProfilerManager
from boundby.training.records import Kind

if TYPE_CHECKING:
    from boundby.integrations.transformers.callback import ProfCallback


class Attachment:
    """The callback's hold on one Trainer, for one training; also a context manager that lets go at its end.

    Its stand-ins pass on arguments, results and exceptions as they are. When the training ends, or an exception ends
    it, the profile is written and every method of the Trainer is what it was.
    """

    def __init__(self, callback: "ProfCallback", trainer: Any) -> None:
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
