"""Processes that run a plan, one for each stage: started, asked, and always ended.

Weights are copied into the worker of their stage and nowhere else; what is in no unit is in every worker. Requests
have the shapes of the inputs the pipeline was made with.
"""

import multiprocessing
import socket
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from types import TracebackType
from typing import Any, Self

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from boundby.partition.plan import PartitionPlan
from boundby.staged import wire
from boundby.staged.absent import CutError
from boundby.staged.cutting import are_equal, skeleton, stages_of, weights
from boundby.staged.places import Workers, places_of
from boundby.staged.worker import Ends, serve

TOLERANCE = 1e-3  # of the largest number of an output, where stages are on different kinds of devices
PATIENCE_S = 300.0  # without a word from the workers
FAREWELL_S = 2.0  # for a worker to end by itself, and again when it was told to
LAST_WORDS_S = 0.5  # when one worker is gone, for another one to say why


class StageError(RuntimeError):
    """A worker has failed, or said nothing for too long."""


@dataclass(frozen=True)
class Spans:
    """Begin and end of every computation of a stage, in nanoseconds of a clock that all workers share."""

    begin: tuple[int, ...]
    end: tuple[int, ...]
    sent_bytes: int  # of one request, to the next stage


class Pipeline:
    """The stages of `plan` at work, as a context manager. `inputs` are as in `stages_of`.

    `workers` says how they compute. Raises CutError for a model that cannot be cut so, ValueError for a device that is
    not there.
    """

    def __init__(
        self, model: torch.nn.Module, plan: PartitionPlan, inputs: Any, workers: Workers | None = None
    ) -> None:
        workers = workers or Workers()
        self.plan = plan
        self.places = places_of(plan, workers)
        self._stages = stages_of(model, plan, inputs, threads=workers.threads)
        self._inputs = inputs
        self._tensors = self._stages.check_inputs(inputs)
        self.weight_bytes = tuple(sum(each.nbytes for _, each in weights(model, p)) for p in self._stages.programs)
        self._controls: list[socket.socket] = []
        self._heard: list[deque[wire.Message]] = [deque() for _ in self.places]
        self._processes: list[BaseProcess] = []

    def __enter__(self) -> Self:
        try:
            self._start()
            self._check()
        except BaseException:
            self.close(at_once=True)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(at_once=kind is not None)

    @property
    def pids(self) -> tuple[int, ...]:
        """The processes of the stages."""
        return tuple(each.pid or 0 for each in self._processes)

    def infer(self, inputs: Any) -> Any:
        """Return the model's output for these inputs, on the CPU."""
        tensors = self._stages.check_inputs(inputs)
        self._say(0, {"kind": "request", "answers": True, "outputs": True}, tensors)
        header, found = self._next(len(self._controls) - 1)
        spec = tree_flatten(self._stages.outputs)[1]
        if header["structure"] != str(spec):
            raise CutError("the output is put together in another way than when the model was cut")
        arrived = iter(found)
        return tree_unflatten([next(arrived) if "tensor" in x else x["plain"] for x in header["leaves"]], spec)

    def one_at_a_time(self, requests: int) -> tuple[Spans, ...]:
        """Run requests, each when the one before is finished; return the times of each stage."""
        for _ in range(requests):
            self._feed(1)
        return self._report()

    def at_once(self, requests: int) -> tuple[Spans, ...]:
        """Run requests that are all there at the beginning; return the times of each stage."""
        self._feed(requests)
        return self._report()

    def occupy(self, stages: Sequence[int], seconds: float) -> tuple[Spans, ...]:
        """Let these stages alone compute the last request again and again, at the same time; return their times.

        Each does so at least once. A stage that is not among them has no times.
        """
        self._say(0, {"kind": "occupy", "stages": list(stages), "nanoseconds": round(seconds * 1e9)})
        for index in range(len(self._controls)):
            self._next(index)
        return self._report()

    def close(self, *, at_once: bool = False) -> None:
        """End all workers: first by closing the connections, then by signals. A second call does nothing."""
        for each in self._controls:
            each.close()
        self._controls.clear()
        try:
            if not at_once:
                _wait(self._processes)
        finally:
            for end in (BaseProcess.terminate, BaseProcess.kill):
                for process in self._processes:
                    if process.is_alive():
                        end(process)
                _wait(self._processes)
            self._processes.clear()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        ours, theirs = zip(*(socket.socketpair() for _ in self.places), strict=True)
        self._controls.extend(ours)
        pairs = [socket.socketpair() for _ in self.places[1:]]
        behind = [*(pair[0] for pair in pairs), None]
        before = [None, *(pair[1] for pair in pairs)]
        try:
            for index, (program, place) in enumerate(zip(self._stages.programs, self.places, strict=True)):
                body = skeleton(self._stages.model, self._stages.programs, place.device)
                ends = Ends(theirs[index], before[index], behind[index])
                process = context.Process(
                    target=serve, args=(body, program, place, ends), daemon=True, name=f"boundby-{program.node}"
                )
                self._processes.append(process)
                _begin(process, program.node)
        finally:  # a connection closes when its last holder has gone: only the workers may hold these
            for each in (*theirs, *(end for pair in pairs for end in pair)):
                each.close()

    def _check(self) -> None:
        """Fill the workers, and hold what they give against the whole model."""
        for index, program in enumerate(self._stages.programs):
            for names, tensor in weights(self._stages.model, program):
                self._say(index, {"kind": "weight", "names": names}, [tensor])
            self._say(index, {"kind": "begin"})
        for index in range(len(self._controls)):
            self._next(index)
        expected = self._stages.outputs
        kinds = {torch.device(each.device).type for each in self.places}
        kinds |= {each.device.type for each in tree_flatten(expected)[0] if isinstance(each, torch.Tensor)}
        if not are_equal(self.infer(self._inputs), expected, TOLERANCE if len(kinds) > 1 else 0.0):
            raise CutError("the stages give other outputs than the whole model: it cannot be cut in this way")
        self._report()

    def _feed(self, requests: int) -> None:
        """Run the inputs so many times, and wait until the last one is finished."""
        header = {"kind": "request", "answers": True, "outputs": False, "repeats": requests}
        self._say(0, header, self._tensors)
        self._next(len(self._controls) - 1)

    def _report(self) -> tuple[Spans, ...]:
        """Return the times since the last report."""
        self._say(0, {"kind": "report"})
        found = (self._next(index)[0] for index in range(len(self._controls)))
        return tuple(
            Spans(tuple(a for a, _ in each["spans"]), tuple(b for _, b in each["spans"]), each["sent_bytes"])
            for each in found
        )

    def _say(self, index: int, header: dict[str, Any], tensors: Sequence[torch.Tensor] = ()) -> None:
        try:
            wire.send(self._controls[index], header, tensors)
        except OSError:
            raise self._failure(index) from None

    def _next(self, index: int) -> wire.Message:
        """Return what a worker says next. Raises StageError when any of them fails, or nobody says anything."""
        while not self._heard[index]:
            if not self._listen(PATIENCE_S):
                node = self.plan.stages[index].node
                raise StageError(f"stage {index} ({node}) has not answered for {PATIENCE_S:.0f} s")
        return self._heard[index].popleft()

    def _listen(self, seconds: float) -> bool:
        """Take what workers say; return whether one did. Raises StageError when one fails."""
        ready = connection.wait(self._controls, seconds)
        for index, control in enumerate(self._controls):
            if control not in ready:
                continue
            try:
                message = wire.receive(control)
            except (EOFError, OSError):
                raise self._failure(index) from None
            if message[0]["kind"] == "error":
                raise self._error(index, message[0]["text"])
            self._heard[index].append(message)
        return bool(ready)

    def _failure(self, gone: int) -> StageError:
        """Return why a worker is gone: what it, or the one whose end ended it, said last."""
        others = dict(enumerate(self._controls))
        until = time.monotonic() + LAST_WORDS_S
        while others and (ready := connection.wait(list(others.values()), max(0.0, until - time.monotonic()))):
            for index in [each for each, control in others.items() if control in ready]:
                try:
                    header, _ = wire.receive(others[index])
                except (EOFError, OSError):
                    del others[index]
                    continue
                if header["kind"] == "error":
                    return self._error(index, header["text"])
        process = self._processes[gone]
        process.join(LAST_WORDS_S)
        return self._error(
            gone,
            f"its process has ended (exit code {process.exitcode}) and said nothing but on stderr; a script that "
            "starts workers needs `if __name__ == '__main__':` around it",
        )

    def _error(self, index: int, text: str) -> StageError:
        return StageError(f"stage {index} ({self.plan.stages[index].node}): {text}")


def _begin(process: BaseProcess, node: str) -> None:
    """Start a worker. Raises CutError where the model cannot be sent to it."""
    try:
        process.start()
    except (AttributeError, TypeError, ValueError) as error:
        raise CutError(f"the model cannot be sent to the worker of {node}: {error}") from error
    except Exception as error:
        if "pickle" not in f"{type(error).__name__} {error}".lower():
            raise
        raise CutError(f"the model cannot be sent to the worker of {node}: {error}") from error


def _wait(processes: Sequence[BaseProcess]) -> None:
    until = time.monotonic() + FAREWELL_S
    for process in processes:
        if process.pid is not None:
            process.join(max(0.0, until - time.monotonic()))
