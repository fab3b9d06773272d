"""Have shards predicted by actors of Ray: on this machine, or on the cluster that RAY_ADDRESS names.

Ray finds the machines and brings them this project; which worker has which shard, and what is tried again, is the
business of `Crew`.
"""

import contextlib
import io
import logging
import math
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, TextIO

from utils.artifacts import EvaluationFolder
from utils.errors import EnvironmentLacksError
from utils.evaluation import plan as plans
from utils.evaluation.crew import Answer, Crew, Handle, WorkerLost
from utils.evaluation.executors import Executor
from utils.evaluation.shards import Receipt
from utils.evaluation.worker import AHEAD, Worker

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
LOGGER = logging.getLogger("boundby")


@dataclass(frozen=True)
class Demand:
    """What the settings ask of Ray. `workers` None: as many as there is room for; so is one GPU each for a GPU plan."""

    workers: int | None = None
    gpus_per_worker: float | None = None
    store_url: str | None = None
    trust_remote_code: bool = False


def on_ray(demand: Demand, note: Callable[[str], None]) -> Executor:
    """Return an executor with workers on Ray, which may come and go; `note` is told of troubles.

    Raises EnvironmentLacksError when Ray is not installed, not there, or has no GPU for a plan that needs one.
    """

    def execute(plan_path: Path, pending: Sequence[int], wait_for_others: bool) -> Iterator[Receipt]:
        made = plans.load(EvaluationFolder(plan_path.parent))
        needs = _Needs.of(made, demand)
        with _connected(needs, demand.workers or 1) as ray:
            workers = demand.workers or needs.that_fit(ray.cluster_resources())
            ahead = 1 if wait_for_others else needs.ahead  # who waits for a shard must hold no other
            cluster = _RayCluster(ray, needs, (plan_path.absolute(), demand), note)
            yield from Crew(cluster, workers, ahead, note).receipts(pending, wait_for_others)

    return execute


@dataclass(frozen=True)
class _Needs:
    """What one worker of a plan takes of a machine."""

    cpus: int
    gpus: float
    threads: int
    ahead: int

    @classmethod
    def of(cls, made: plans.Plan, demand: Demand) -> "_Needs":
        threads, ahead = made.choices.threads_per_worker, AHEAD[made.identity.device]
        if made.identity.device == "cpu":
            return cls(threads, 0, threads, ahead)
        return cls(1, demand.gpus_per_worker or 1, threads, ahead)  # a machine may have few cores per GPU

    def that_fit(self, resources: dict[str, float]) -> int:
        """Return how many workers the cluster has room for now, at least 1: it may grow."""
        name, each = ("GPU", self.gpus) if self.gpus else ("CPU", self.cpus)
        return max(1, math.floor(resources.get(name, 0) / each + 1e-9))


class _RayCluster:
    """Workers as actors of Ray, none of which Ray restarts."""

    def __init__(self, ray: ModuleType, needs: _Needs, work: tuple[Path, Demand], note: Callable[[str], None]) -> None:
        self._ray, self._needs, self._work, self._note = ray, needs, work, note
        self._actor = ray.remote(
            num_cpus=needs.cpus,
            num_gpus=needs.gpus,
            max_restarts=0,
            max_concurrency=needs.ahead,
            runtime_env={"env_vars": {"OMP_NUM_THREADS": str(needs.threads)}},
        )(Worker)
        self._started = False

    def hire(self) -> Handle:
        plan_path, demand = self._work
        return self._actor.remote(plan_path, demand.store_url, trust_remote_code=demand.trust_remote_code)

    def open(self, worker: Any) -> Answer:
        return worker.open.remote().future()

    def predict(self, worker: Any, shard: int, wait_for_others: bool) -> Answer:
        return worker.predict.remote(shard, wait_for_others).future()

    def finished(self, answers: Sequence[Any]) -> Sequence[Answer]:
        # `ray.wait` would swallow SIGTERM.
        while not (ready := futures.wait(answers, STARVED_S, futures.FIRST_COMPLETED).done):
            if not self._started:
                self._note(
                    f"Ray has started no worker in {STARVED_S:.0f} s; one takes {self._needs.cpus} CPUs and "
                    f"{self._needs.gpus:g} GPUs. `ray status` shows what there is"
                )
        self._started = True
        return list(ready)

    def result(self, answer: Any) -> Receipt | None:
        try:
            return answer.result()
        except self._ray.exceptions.RayTaskError as error:
            raise error.cause from None
        except self._ray.exceptions.RayError as error:
            raise WorkerLost(str(error).strip().splitlines()[0]) from None

    def dismiss(self, worker: Any) -> None:
        self._ray.kill(worker)


@contextlib.contextmanager
def _connected(needs: _Needs, workers: int) -> Iterator[ModuleType]:
    """Yield `ray`, connected to the cluster of RAY_ADDRESS, else to a Ray of our own that ends with the block."""
    ray = _imported()
    address = os.environ.get("RAY_ADDRESS") or "local"
    with (
        tempfile.TemporaryDirectory(prefix="boundby-ray-", ignore_cleanup_errors=True) as folder,
        contextlib.redirect_stdout(_ToLog(sys.stdout)),
    ):
        own: dict[str, Any] = {"include_dashboard": False, "object_store_memory": OBJECT_STORE_BYTES}
        own |= {"_temp_dir": folder} | ({} if needs.gpus else {"num_cpus": workers * needs.cpus})
        try:
            _begin(ray, address, own if address == "local" else {})
            if address == "local" and ray.cluster_resources().get("GPU", 0) < needs.gpus:
                raise EnvironmentLacksError("the plan is for a GPU, which Ray does not find; set RAY_ADDRESS")
            yield ray
        finally:
            ray.shutdown()


def _begin(ray: ModuleType, address: str, own: dict[str, Any]) -> None:
    quiet = {"logging_level": "ERROR", "log_to_driver": False}
    try:
        with _signals_kept():
            ray.init(address=address, runtime_env=_project(), **quiet, **own)
    except (OSError, RuntimeError, ValueError) as error:
        raise EnvironmentLacksError(
            f"Ray does not start or answer (RAY_ADDRESS is {address}): {error}; unset RAY_ADDRESS for this machine"
        ) from None


def _project() -> dict[str, Any]:
    """Return the runtime environment that brings the packages of this checkout to every worker, and nothing else."""
    others = [f"/{path.name}" for path in ROOT.iterdir() if path.name not in PACKAGES]  # `!/utils` is not understood
    return {"working_dir": str(ROOT), "excludes": [*others, "__pycache__"]}


def _imported() -> ModuleType:
    os.environ.update(ENVIRONMENT)
    try:
        import ray
    except ImportError:
        raise EnvironmentLacksError(
            "evaluation.engine is ray, which is not installed; run `bash setup_environment.sh --ray`"
        ) from None
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
