"""Share shards among workers that may come late, die and be replaced; who starts and asks them is a `Cluster`.

A shard is given to a worker only when that worker has its model, and goes back to the queue when the worker is lost.
Doing one twice is harmless, which the commit of a shard sees to.
"""

from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from utils.errors import PipelineError
from utils.evaluation.shards import Receipt

# Times that a shard may lose its worker. A machine that is taken away says nothing about the shard, so it is many; but
# a shard that needs more memory than there is would go on for ever.
MOST_LOSSES = 10
MOST_FAILURES = 3  # times that the program may fail in a shard, each time on a new worker

Handle = Hashable  # of a worker
Answer = Hashable  # that a worker will give


class WorkerLost(Exception):
    """A worker died, or its machine is gone; the message says what is known of it."""


class Cluster(Protocol):
    """Starts workers and carries questions to them."""

    def hire(self) -> Handle:
        """Return a worker that will start as soon as there is room for it."""

    def open(self, worker: Handle) -> Answer:
        """Have the worker load its model; the result is None."""

    def predict(self, worker: Handle, shard: int, wait_for_others: bool) -> Answer:
        """Have the worker predict a shard; the result is a receipt."""

    def finished(self, answers: Sequence[Answer]) -> Sequence[Answer]:
        """Return those that have a result; waits until there is one."""

    def result(self, answer: Answer) -> Receipt | None:
        """Return a result. Raises what the worker raised, and WorkerLost when it is no more."""

    def dismiss(self, worker: Handle) -> None:
        """End the worker at once, if it has not ended."""


@dataclass
class Crew:
    """Up to `size` workers of a cluster, each asked for `ahead` shards at a time."""

    cluster: Cluster
    size: int
    ahead: int
    note: Callable[[str], None]
    _waiting: deque[int] = field(default_factory=deque)
    _asked: dict[Answer, tuple[Handle, int | None]] = field(default_factory=dict)  # None: to load the model
    _load: dict[Handle, int] = field(default_factory=dict)  # shards that each worker has that has its model
    _troubles: Counter[tuple[int | None, bool]] = field(default_factory=Counter)

    def receipts(self, pending: Sequence[int], wait_for_others: bool) -> Iterator[Receipt]:
        """Yield a receipt for each shard; all workers have ended when this ends.

        Raises the PipelineError of a worker at once, and one of its own when a shard has failed too often.
        """
        self._waiting.extend(pending)
        try:
            while self._waiting or any(self._load.values()):
                self._assign(wait_for_others)
                for answer in self.cluster.finished(list(self._asked)):
                    if answer in self._asked:  # else its worker was lost with the answer before it
                        yield from self._receipt(answer)
        finally:
            for worker in {**self._load, **{worker: 0 for worker, _ in self._asked.values()}}:
                self.cluster.dismiss(worker)

    def _assign(self, wait_for_others: bool) -> None:
        """Give shards to the workers that have fewest, then start as many more as there is work for."""
        while self._waiting and self._load:
            worker = min(self._load, key=self._load.__getitem__)
            if self._load[worker] >= self.ahead:
                break
            shard = self._waiting.popleft()
            self._load[worker] += 1
            self._asked[self.cluster.predict(worker, shard, wait_for_others)] = worker, shard
        opening = len(self._asked) - sum(self._load.values())
        wanted = min(self.size, len(self._waiting) + sum(self._load.values()))
        for _ in range(wanted - opening - len(self._load)):
            worker = self.cluster.hire()
            self._asked[self.cluster.open(worker)] = worker, None

    def _receipt(self, answer: Answer) -> Iterator[Receipt]:
        worker, shard = self._asked[answer]
        try:
            receipt = self.cluster.result(answer)
        except Exception as error:  # any type: the program may fail there in any way
            self._replace(worker)  # also after a failure: an error of CUDA stays with its process
            self._count(shard, error)
            return
        del self._asked[answer]
        if receipt is None:
            self._load[worker] = 0
            self._troubles[None, True] = self._troubles[None, False] = 0
        else:
            self._load[worker] -= 1
            yield receipt

    def _replace(self, worker: Handle) -> None:
        """End the worker and put what it was asked for back into the queue."""
        self.cluster.dismiss(worker)
        self._load.pop(worker, None)
        for answer, (asked, shard) in list(self._asked.items()):
            if asked == worker:
                del self._asked[answer]
                self._waiting.extend([] if shard is None else [shard])

    def _count(self, shard: int | None, error: Exception) -> None:
        """Say what went wrong. Raises where trying again is of no use, and where it was tried often enough."""
        if isinstance(error, PipelineError):
            raise error
        lost = isinstance(error, WorkerLost)
        self._troubles[shard, lost] += 1
        times, most = self._troubles[shard, lost], MOST_LOSSES if lost else MOST_FAILURES
        where = "while loading the model" if shard is None else f"in shard {shard}"
        what = f"a worker {'was lost' if lost else 'failed'} {where}"
        reason = str(error) if lost else f"{type(error).__name__}: {error}"
        if times >= most:
            raise PipelineError(
                f"{what}, {times} times, at last: {reason}. The finished shards stay, the same command goes on"
            )
        self.note(f"{what} ({reason}); another takes its place, attempt {times + 1} of {most}")
