"""Have shards predicted by actors of Ray: on this machine, or on the cluster that RAY_ADDRESS names.

Ray brings this project to the machines, restarts a worker that is gone, and asks it again. A shard may be done twice.
"""

import contextlib
import io
import logging
import math
import os
import platform
import signal
import sys
import tempfile
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, TextIO

from boundby.machine import DeviceLostError
from utils.command import EnvironmentLacksError, EvaluationFolder, InputError, PipelineError, lacking
from utils.evaluation import plan as plans
from utils.evaluation.shards import Executor, Receipt, ShardPredictor
from utils.evaluation.storage import Storage

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("boundby", "utils")  # of the project, for the workers
ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # else a warning on every machine without a GPU
    "RAY_OVERRIDE_JOB_RUNTIME_ENV": "1",  # inside `ray job submit`, which brings a copy of its own
    "RAY_enable_worker_prestart": "0",  # workers without this project, that nobody would use
}
OBJECT_STORE_BYTES = 100 * 2**20  # receipts are all that passes through it
STARVED_S = 60.0  # without a worker until that is said
# Times that a shard may lose its worker. A machine that is taken away says nothing about the shard, so it is many; but
# a shard that needs more memory than there is would go on for ever.
MOST_LOSSES = 10
MOST_FAILURES = 3  # times that the program may fail in a shard, each time in a new process
AT_ONCE = {"cpu": 1, "cuda": 4}  # shards to ask a worker for: a GPU computes one while the next is tokenized
LOGGER = logging.getLogger("boundby")


@dataclass(frozen=True)
class Demand:
    """What the settings ask of Ray. `workers` None: as many as there is room for; so is one GPU each for a GPU plan."""

    workers: int | None = None
    gpus_per_worker: float | None = None
    store_url: str | None = None
    trust_remote_code: bool = False


class Worker:
    """Predicts shards of a plan that is in a folder which all machines share, or in a store."""

    def __init__(self, plan_path: Path, demand: Demand) -> None:
        self._plan_path, self._demand = plan_path, demand
        self._predictor: ShardPredictor | None = None
        self._store = Storage(demand.store_url) if demand.store_url else None

    def open(self) -> ShardPredictor:
        """Load the model, fetching what is missing here. Raises InputError where this machine cannot do the plan."""
        if self._predictor is None:
            if self._store is not None:
                self._plan_path = self._store.fetch_inputs(Path.cwd())  # which is Ray's copy of the project
            elif not self._plan_path.exists():
                raise InputError(
                    f"{self._plan_path}: cannot be seen on {platform.node()}; put results, data and model into folders "
                    "that all machines share, or name a store that they all reach as evaluation.storage"
                )
            self._predictor = ShardPredictor.open(self._plan_path, trust_remote_code=self._demand.trust_remote_code)
        return self._predictor

    def start(self) -> list[Receipt]:
        """Be ready to predict."""
        self.open()
        return []

    def predict(self, shards: Sequence[int], wait_for_others: bool) -> list[Receipt]:
        """Return a receipt for each shard, as `ShardPredictor` does."""
        predictor = self.open()
        pulled = self._store.pull(predictor.folder, shards) if self._store else set()
        done = []
        try:
            for receipt in predictor.predict_shards(shards, wait_for_others):
                if self._store:
                    self._store.push(predictor.folder, receipt, pulled)
                done.append(receipt)
        except DeviceLostError as lost:  # Ray takes what is no Exception for the end of the worker
            raise RuntimeError(str(lost)) from lost
        return done


def on_ray(plan_path: Path, demand: Demand, note: Callable[[str], None]) -> Executor:
    """Return an executor with workers on Ray, which may come and go; `note` is told of troubles.

    Raises EnvironmentLacksError when Ray is not installed, not there, or has no GPU for a plan that needs one.
    """

    def execute(pending: Sequence[int], wait_for_others: bool) -> Iterator[Receipt]:
        made = plans.load(EvaluationFolder(plan_path.parent))
        needs = Needs.of(made, demand)
        with _connected(needs, demand.workers or 1) as ray:
            actor = ray.remote(
                num_cpus=needs.cpus,
                num_gpus=needs.gpus,
                max_restarts=-1,
                max_task_retries=MOST_LOSSES - 1,
                runtime_env={"env_vars": {"OMP_NUM_THREADS": str(needs.threads)}},
            )(Worker)
            count = min(demand.workers or needs.that_fit(ray.cluster_resources()), len(pending))
            workers = [actor.remote(plan_path.absolute(), demand) for _ in range(count)]
            at_once = 1 if wait_for_others else AT_ONCE[made.identity.device]  # who waits must hold no other
            yield from distribute(ray, workers, pending, at_once, wait_for_others, note)

    return execute


def distribute(
    ray: Any,
    workers: Sequence[Any],
    pending: Sequence[int],
    at_once: int,
    wait_for_others: bool,
    note: Callable[[str], None],
) -> Iterator[Receipt]:
    """Yield a receipt for each shard, which goes to a worker that has its model; a failure is tried again.

    Raises a worker's PipelineError at once, and one of its own when a shard has failed or lost its worker too often.
    """
    waiting, failures = deque(pending), Counter[int]()
    asked: dict[futures.Future[list[Receipt]], tuple[Any, list[int]]] = {
        worker.start.remote().future(): (worker, []) for worker in workers
    }
    while waiting or any(shards for _, shards in asked.values()):
        answers = futures.wait(asked, STARVED_S, futures.FIRST_COMPLETED).done  # `ray.wait` would swallow SIGTERM
        if not answers and not any(shards for _, shards in asked.values()):
            note(f"Ray has started no worker in {STARVED_S:.0f} s; `ray status` shows what there is")
        for answer in answers:
            worker, shards = asked.pop(answer)
            try:
                yield from answer.result()
            except ray.exceptions.RayTaskError as error:
                _require_another_try(shards, error.cause, failures, note)
                waiting.extend(shards)
                ray.kill(worker, no_restart=False)  # an error of CUDA stays with its process
                asked[worker.start.remote().future()] = worker, []
                continue
            except ray.exceptions.RayError as error:
                raise PipelineError(
                    f"a worker was lost {_where(shards)}, {MOST_LOSSES} times, at last: "
                    f"{str(error).strip().splitlines()[0]}. The finished shards stay, the same command goes on"
                ) from None
            if waiting:
                share = min(at_once, -(-len(waiting) // len(workers)))
                chosen = [waiting.popleft() for _ in range(share)]
                asked[worker.predict.remote(chosen, wait_for_others).future()] = worker, chosen


def _require_another_try(
    shards: Sequence[int], error: Exception, failures: Counter[int], note: Callable[[str], None]
) -> None:
    """Say what went wrong. Raises where trying again is of no use, and where it was tried often enough."""
    if isinstance(error, PipelineError):
        raise error
    failures.update(shards or [-1])
    times = max(failures[shard] for shard in shards or [-1])
    what = f"a worker failed {_where(shards)}"
    reason = f"{type(error).__name__}: {error}"
    if times >= MOST_FAILURES:
        raise PipelineError(
            f"{what}, {times} times, at last: {reason}. The finished shards stay, the same command goes on"
        )
    note(f"{what} ({reason}); another takes its place, attempt {times + 1} of {MOST_FAILURES}")


def _where(shards: Sequence[int]) -> str:
    return f"in shard {', '.join(map(str, shards))}" if shards else "while loading the model"


@dataclass(frozen=True)
class Needs:
    """What one worker of a plan takes of a machine."""

    cpus: int
    gpus: float
    threads: int

    @classmethod
    def of(cls, made: plans.Plan, demand: Demand) -> "Needs":
        """Return the threads of the plan on a CPU, and on a GPU the share of one that is demanded."""
        threads = made.choices.threads_per_worker
        if made.identity.device == "cpu":
            return cls(threads, 0, threads)
        return cls(1, demand.gpus_per_worker or 1, threads)  # a machine may have few cores per GPU

    def that_fit(self, resources: dict[str, float]) -> int:
        """Return how many workers the cluster has room for now, at least 1: it may grow."""
        name, share = ("GPU", self.gpus) if self.gpus else ("CPU", self.cpus)
        return max(1, math.floor(resources.get(name, 0) / share + 1e-9))


@contextlib.contextmanager
def _connected(needs: Needs, workers: int) -> Iterator[ModuleType]:
    """Yield `ray`, connected to the cluster of RAY_ADDRESS, else to a Ray of our own that ends with the block."""
    ray = _imported()
    address = os.environ.get("RAY_ADDRESS") or "local"
    with (
        tempfile.TemporaryDirectory(prefix="boundby-ray-", ignore_cleanup_errors=True) as folder,
        contextlib.redirect_stdout(_ToLog(sys.stdout)),
    ):
        try:
            _begin(ray, address, folder, None if needs.gpus else workers * needs.cpus)
            if address == "local" and ray.cluster_resources().get("GPU", 0) < needs.gpus:
                raise EnvironmentLacksError("the plan is for a GPU, which Ray does not find; set RAY_ADDRESS")
            yield ray
        finally:
            ray.shutdown()


def _begin(ray: ModuleType, address: str, folder: str, cpus: int | None) -> None:
    """Connect; a Ray of our own keeps its files in `folder`, and takes `cpus` of this machine, None: what there is."""
    options = {"logging_level": "ERROR", "log_to_driver": False}
    if address == "local":
        options |= {"include_dashboard": False, "object_store_memory": OBJECT_STORE_BYTES, "_temp_dir": folder}
        options |= {} if cpus is None else {"num_cpus": cpus}
    others = [f"/{path.name}" for path in ROOT.iterdir() if path.name not in PACKAGES]  # `!/utils` is not understood
    project = {"working_dir": str(ROOT), "excludes": [*others, "__pycache__"]}  # for every worker, and nothing else
    try:
        with _signals_kept():
            ray.init(address=address, runtime_env=project, **options)
    except Exception as error:  # Ray raises a bare one where its own processes do not start in time
        way_out = "end other programs" if address == "local" else "unset RAY_ADDRESS for this machine"
        raise EnvironmentLacksError(
            f"Ray does not start or answer (RAY_ADDRESS is {address}): {error}; {way_out}, or evaluation.engine=local"
        ) from None


def _imported() -> ModuleType:
    os.environ.update(ENVIRONMENT)
    try:
        import ray
    except ImportError:
        raise lacking("ray") from None
    return ray


@contextlib.contextmanager
def _signals_kept() -> Iterator[None]:
    """Take back what the block makes of SIGTERM and SIGINT, which end this program in their own way."""
    kept = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    ended = False
    try:
        yield
    except SystemExit:  # what Ray makes of SIGTERM
        ended = True
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)
    if ended:
        signal.raise_signal(signal.SIGTERM)


class _ToLog(io.TextIOBase):
    """A stream that takes to the log what Ray's threads write, one of which tells of every worker that died."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        if not threading.current_thread().name.startswith("ray_"):
            return self._stream.write(text)
        if text.strip():
            LOGGER.info("ray: %s", text.rstrip())
        return len(text)
