"""Have shards predicted, here or in worker processes. An executor schedules; what is right is decided by the parts.

An executor may run a shard twice or leave one to another runner: the commit of a shard makes both harmless.
"""

import contextlib
import multiprocessing
import os
import signal
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING

from boundby.device import is_gpu, is_sticky, pick_device, runtime
from boundby.formatting import first_line
from boundby.sampler import DeviceLostError
from utils.errors import EnvironmentLacksError, PipelineError
from utils.evaluation.shards import Receipt, ShardPredictor

if TYPE_CHECKING:
    from multiprocessing.context import SpawnProcess

# From the path of a plan and the ids of shards to a receipt for each, in any order. With `wait`, a shard that another
# runner has claimed is waited for instead of skipped.
Executor = Callable[[Path, Sequence[int], bool], Iterator[Receipt]]
AHEAD = 2  # shards that a worker has: one that is computed and one that is tokenized
PATIENCE_S = 1.0  # for a worker to end after SIGTERM, before it is killed
HUNG_S = 7200.0  # without an answer of any worker: several times what a shard, or the wait for another's claim, takes
MOST_LOSSES = 3  # times that a shard may lose its worker: one that needs more memory than there is would go on for ever


def in_process(predictor: ShardPredictor) -> Executor:
    """Return an executor that predicts in this process, with a model that is loaded already."""

    def execute(plan_path: Path, pending: Sequence[int], wait_for_others: bool) -> Iterator[Receipt]:
        return predictor.predict_shards(pending, wait_for_others)

    return execute


def local(workers: int, device: str, note: Callable[[str], object], *, trust_remote_code: bool = False) -> Executor:
    """Return an executor with up to `workers` processes on this machine, each with a model of its own.

    `device` "auto" or "cuda" spreads them over the GPUs of the first one's kind; a single one, such as "cuda:1", is
    shared. Another process takes the place of one that is killed, which `note` is told.
    """

    def execute(plan_path: Path, pending: Sequence[int], wait_for_others: bool) -> Iterator[Receipt]:
        crew: list[_Worker] = []
        places = devices(device)

        def hire(number: int) -> _Worker:
            place = places[number % len(places)]
            worker = _Worker(number, (plan_path, place, trust_remote_code, wait_for_others))
            crew.append(worker)
            return worker

        try:
            yield from _distribute(hire, min(workers, len(pending)), deque(pending), note)
        finally:
            for worker in crew:
                worker.process.terminate()  # all at once, so that they end side by side
            for worker in crew:
                worker.stop()

    return execute


def local_workers(device: str) -> int:
    """Return how many workers this machine is for: one per device that may be used."""
    return len(devices(device))


def devices(device: str) -> list[str]:
    """Return what `device` lets workers use: with "auto" or "cuda" every GPU of the first one's kind, else itself.

    A plan holds for one kind of GPU: another one would be refused, and round otherwise.
    """
    if device not in ("auto", "cuda") or not is_gpu(first := pick_device(device)):
        return [device]
    there = runtime(first)
    names = [there.get_device_name(number) for number in range(there.device_count())]
    return [f"{first.type}:{number}" for number, name in enumerate(names) if name == names[0]]


def _distribute(
    hire: Callable[[int], "_Worker"], count: int, waiting: deque[int], note: Callable[[str], object]
) -> Iterator[Receipt]:
    """Keep each of `count` workers in `AHEAD` shards as long as there are any; yield receipts as they come.

    Raises PipelineError when a shard has lost its worker too often.
    """
    busy = {worker.connection: worker for worker in map(hire, range(count))}
    for _ in range(AHEAD):
        for worker in busy.values():
            worker.assign(waiting)
    losses: Counter[int] = Counter()
    while busy:
        ready = wait(list(busy), HUNG_S)
        if not ready:
            note(f"no worker has answered for {HUNG_S / 60:.0f} min; others take the places of {len(busy)}")
            for worker in busy.values():
                worker.process.kill()
        for connection in ready:
            worker = busy[connection]  # type: ignore[index]
            receipt = worker.receipt()
            if receipt is None:
                del busy[worker.connection]
                shard = worker.assigned[0]
                losses[shard] += 1
                what = f"a worker ended with {worker.process.exitcode} in shard {shard}{worker.lost}"
                if losses[shard] == MOST_LOSSES:
                    raise PipelineError(
                        f"{what}, as {MOST_LOSSES - 1} before it (-9 is often a lack of memory: lower "
                        "evaluation.workers); the finished shards stay, the same command goes on"
                    )
                note(f"{what}; another takes its place")
                waiting.extendleft(reversed(worker.assigned))
                worker = hire(worker.number)
                busy[worker.connection] = worker
                for _ in range(AHEAD):
                    worker.assign(waiting)
                continue
            yield receipt
            worker.assign(waiting)
            if not worker.assigned:
                del busy[worker.connection]


class _Worker:
    """A process that predicts the shards it is told."""

    def __init__(self, number: int, arguments: tuple[Path, str, bool, bool]) -> None:
        self.number = number
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process: SpawnProcess = context.Process(target=work, args=(theirs, *arguments), daemon=True)
        self.process.start()
        theirs.close()  # the end of the worker is then the end of its messages
        self.assigned: list[int] = []
        self.lost = ""  # how its GPU was

    def assign(self, waiting: deque[int]) -> None:
        """Tell the worker the next shard, or, once, that there are no more."""
        shard = waiting.popleft() if waiting else None
        self.assigned += [] if shard is None else [shard]
        with contextlib.suppress(ConnectionError):  # it is dead, which `receipt` tells
            self.connection.send(shard)

    def receipt(self) -> Receipt | None:
        """Return what the worker has to tell, None when it is dead, or its GPU. Raises what it raised."""
        try:
            message = self.connection.recv()
        except (EOFError, ConnectionError):
            self.process.join(PATIENCE_S)
            return None
        if isinstance(message, Exception):
            raise message
        if isinstance(message, str):
            self.lost = f", {message}"
            self.process.join(PATIENCE_S)
            return None
        self.assigned.remove(message.shard)
        return message

    def stop(self) -> None:
        """End the process, if it has not ended."""
        self.connection.close()
        self.process.terminate()
        self.process.join(PATIENCE_S)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        self.process.close()


def work(connection: Connection, plan_path: Path, device: str, trust_remote_code: bool, wait_for_others: bool) -> None:
    """Predict shards until there are no more; what goes wrong is told to the parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent too, which ends this process
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        predictor = ShardPredictor.open(plan_path, device, trust_remote_code=trust_remote_code)
        told = iter(connection.recv, None)
        for receipt in predictor.predict_shards(told, wait_for_others, connection.send):
            connection.send(receipt)
        wait([connection])  # for the parent to let go: a pipe that is closed here first would look like a death
    except (EOFError, ConnectionError):  # the parent wants no more
        return
    except (PipelineError, OSError) as error:
        connection.send(error)
    except (Exception, DeviceLostError) as error:  # any type: it may not survive the way to the parent
        if is_sticky(error):  # another process has the GPU again; this one must not touch it even to end
            connection.send(f"{type(error).__name__}: {first_line(error)}")
            os._exit(EnvironmentLacksError.exit_code)
        connection.send(PipelineError(f"a worker failed: {type(error).__name__}: {error}"))


def _end_with_parent() -> None:
    """Wait for the end of the parent and end at once: a shard that is half done is as good as one not begun."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)
