"""A worker on any machine: it has a copy of the project and is asked for shards by calls."""

import platform
import queue
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path

from utils.artifacts import EvaluationFolder
from utils.errors import InputError
from utils.evaluation import plan as plans
from utils.evaluation.shards import Receipt, ShardPredictor
from utils.evaluation.storage import Storage

AHEAD = {"cpu": 1, "cuda": 2}  # shards to ask a worker for at once: a GPU computes one while the next is tokenized
PATIENCE_S = 0.1  # for the question that follows an answer; it takes milliseconds on its way


class Worker:
    """Predicts the shards of a plan, where the plan is in a folder that all machines share or in a store."""

    def __init__(self, plan_path: Path, store_url: str | None = None, *, trust_remote_code: bool = False) -> None:
        self._plan_path, self._trusted = plan_path, trust_remote_code
        self._store = None if store_url is None else Storage(store_url)
        self._queue: _Queue | None = None

    def open(self) -> None:
        """Load the model, fetching what is missing here. Raises InputError where this machine cannot do the plan."""
        if self._store is not None:
            self._plan_path = self._store.fetch_inputs(Path.cwd())  # which is the engine's copy of the project
        elif not self._plan_path.exists():
            raise InputError(
                f"{self._plan_path}: cannot be seen on {platform.node()}; put results, data and model into folders "
                "that all machines share, or name a store that they all reach as evaluation.storage"
            )
        made = plans.load(EvaluationFolder(self._plan_path.parent))
        self._predictor = ShardPredictor.open(self._plan_path, trust_remote_code=self._trusted)
        if AHEAD[made.identity.device] > 1:
            self._queue = _Queue(self._predictor)

    def predict(self, shard: int, wait_for_others: bool) -> Receipt:
        """Return the receipt of a shard, as `ShardPredictor` does. Several threads may call this at a time."""
        if self._store is None:
            return self._predict(shard, wait_for_others)
        folder = EvaluationFolder(self._plan_path.parent)
        pulled = self._store.pull(folder, [shard])
        receipt = self._predict(shard, wait_for_others)
        self._store.push(folder, receipt, pulled)
        return receipt

    def _predict(self, shard: int, wait_for_others: bool) -> Receipt:
        if self._queue is None or wait_for_others:
            return self._predictor.predict_shard(shard, wait=wait_for_others)
        return self._queue.predict(shard)


class _Queue:
    """Feeds a predictor from the calls of several threads, so that it knows the next shard while it computes one."""

    def __init__(self, predictor: ShardPredictor) -> None:
        self._predictor = predictor
        self._asked: queue.SimpleQueue[tuple[int, Future[Receipt]]] = queue.SimpleQueue()
        self._open: dict[int, Future[Receipt]] = {}  # of the shards that were begun; only the thread touches it
        threading.Thread(target=self._work, name="shards", daemon=True).start()

    def predict(self, shard: int) -> Receipt:
        answer: Future[Receipt] = Future()
        self._asked.put((shard, answer))
        return answer.result()

    def _work(self) -> None:
        while True:
            try:
                for receipt in self._predictor.predict_shards(self._shards(*self._asked.get()), self._tell):
                    self._tell(receipt)
            except BaseException as error:  # also SystemExit of a model's code: who waits is told, who asks later anew
                while self._open:
                    self._open.popitem()[1].set_exception(error)

    def _shards(self, shard: int, answer: Future[Receipt]) -> Iterator[int]:
        """Yield the shard and those that are asked for soon after the one before."""
        with suppress(queue.Empty):
            while True:
                self._open[shard] = answer
                yield shard
                shard, answer = self._asked.get(timeout=PATIENCE_S)

    def _tell(self, receipt: Receipt) -> None:
        self._open.pop(receipt.shard).set_result(receipt)
