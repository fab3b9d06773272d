"""Run a kept plan: start a process for every stage, be one of them, and keep what was measured."""

import contextlib
import ctypes
import logging
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from boundby import files
from boundby.disturbance import usable_cpus
from boundby.partition.plan import Measured, compare
from boundby.partition.simulation import Simulated, simulate
from utils.cli import FAILED, Terminated
from utils.errors import EnvironmentLacksError, InputError, PipelineError
from utils.partition.planning import Planned

SCHEMA_VERSION = 1
FAILURES = "BOUNDBY_STAGE_FAILURES"  # the folder in which a stage tells the process that started it why it ended
THREADS = "OMP_NUM_THREADS"
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
END_WITH_PARENT = 1  # PR_SET_PDEATHSIG of prctl(2): a stage that waits for a message sees no other signal
SEED = 0  # of random weights, which every process makes for itself
REQUESTS = 40


def is_stage() -> bool:
    """Tell whether this process was started by torchrun to be one of the stages."""
    return "RANK" in os.environ


def is_first() -> bool:
    """Tell whether this process is the one that tells what was measured."""
    return int(os.environ.get("RANK", 0)) == 0


def output_of(path: Path, given: Path | None, what: str = "run") -> Path:
    """Return where the run or the simulation of the plan at `path` is kept."""
    return given or path.with_name(f"{path.stem}.{what}.json")


def requests_of(file: Planned, given: int | None) -> int:
    """Return how many requests are run at once. Raises InputError for less than one."""
    if given is not None and given < 1:
        raise InputError(f"--requests {given}: give 1 or more")
    return given or (file.plan.requests if file.plan.objective == "requests" else REQUESTS)


def start(file: Planned, command: Sequence[object]) -> None:
    """Run `command` once for every stage, here. Raises a PipelineError with the error of the first one to fail."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    stages = file.plan.stages
    cores = max(1, len(usable_cpus()) // len(stages))
    threads = os.environ.get(THREADS) or str(min(cores, file.model.threads or cores))
    with tempfile.TemporaryDirectory(prefix="boundby-stages-") as folder:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=len(stages),
            run_id=Path(folder).name,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            max_restarts=0,
            logs_specs=DefaultLogsSpecs(log_dir=folder),
        )
        try:
            with _launching(**{FAILURES: folder, THREADS: threads}):
                elastic_launch(config, sys.executable)(*map(str, command))
        except ChildFailedError as error:
            raise _failure(file, Path(folder), {rank: each.exitcode for rank, each in error.failures.items()}) from None
        except SignalException as error:
            raise KeyboardInterrupt if error.sigval == signal.SIGINT else Terminated() from None


@dataclass(frozen=True)
class _Failure:
    """Why a stage ended, as it tells the process that started it."""

    at_ns: int
    text: str
    type: str
    exit_code: int


def be_a_stage(file: Planned, requests: int) -> Measured:
    """Compute the stage of this process; return what all of them measured."""
    if FAILURES in os.environ and sys.platform == "linux":
        ctypes.CDLL(None).prctl(END_WITH_PARENT, signal.SIGKILL)
    try:
        return _run(file, requests)
    except Exception as error:
        if FAILURES not in os.environ:
            raise
        code = error.exit_code if isinstance(error, PipelineError) else FAILED
        failure = _Failure(time.time_ns(), str(error), type(error).__name__, code)
        files.write_json(Path(os.environ[FAILURES]) / f"stage-{os.environ['RANK']}.json", msgspec.to_builtins(failure))
        raise SystemExit(code) from None  # the process that started this one says why


def keep(path: Path, plan: Path, file: Planned, found: Measured | Simulated) -> None:
    """Replace `path` by what was measured or simulated, beside what was predicted."""
    is_run = isinstance(found, Measured)
    files.write_json(
        path,
        {
            "schema_version": SCHEMA_VERSION,
            "label": "measured" if is_run else "simulated",
            "plan": str(plan),
            "model": msgspec.to_builtins(file.model),
            **msgspec.to_builtins(found),
            "comparison": msgspec.to_builtins(compare(file.plan, found)) if isinstance(found, Measured) else None,
        },
    )


def simulated(file: Planned, requests: int) -> Simulated:
    """Return what the plan takes event by event, without any process."""
    return simulate(file.plan, requests)


def _run(file: Planned, requests: int) -> Measured:
    processes, stages = int(os.environ["WORLD_SIZE"]), len(file.plan.stages)
    if processes != stages:
        raise InputError(
            f"the plan has {stages} stages, and torchrun started {processes} processes: start one for each stage, "
            f"--nproc-per-node {stages} on one machine"
        )
    import torch

    from boundby.partition.running import run
    from boundby.partition.stages import CutError
    from utils.layers import Model, models

    torch.manual_seed(SEED)
    planned = file.model
    which = {"architecture": planned.name} if planned.name in models.PRESETS else {"name": planned.name}
    is_on_hub = "/" in planned.name and not Path(planned.name).is_absolute()
    if "name" in which and not Path(planned.name).is_dir() and not is_on_hub:
        raise InputError(
            f"the plan is of {planned.name!r}, which is no preset and no folder here; say where the model is: --model"
        )
    model = models.prepare(Model.model_validate({**which, "dtype": planned.dtype, "device": "cpu"})).model
    parameters = sum(parameter.numel() for parameter in model.parameters())
    if parameters != planned.parameters:
        raise InputError(
            f"the plan is of another model: it has {planned.parameters:,} parameters, {planned.name} has "
            f"{parameters:,}; profile and plan this one, or name the right one with --model"
        )
    inputs = models.inputs_for(model, planned.batch_size, planned.sequence_length)
    try:
        return run(model, file.plan, inputs, requests=requests).measured
    except CutError as error:
        raise PipelineError(f"the plan cannot be run: {error}") from None
    except ValueError as error:
        raise EnvironmentLacksError(str(error)) from None


def _failure(file: Planned, folder: Path, exit_codes: dict[int, int]) -> PipelineError:
    failures = {int(path.stem.split("-")[1]): files.read_as(path, _Failure) for path in folder.glob("stage-*.json")}
    if not failures:
        rank, code = next(iter(exit_codes.items()))
        node = file.plan.stages[rank].node
        return PipelineError(f"stage {rank} ({node}) has ended with exit code {code}; run it with torchrun to see why")
    rank, first = min(failures.items(), key=lambda told: told[1].at_ns)
    kinds: dict[int, Callable[[str], PipelineError]] = {2: InputError, 3: EnvironmentLacksError}
    if first.type in ("PipelineError", "InputError", "EnvironmentLacksError"):
        return kinds.get(first.exit_code, PipelineError)(first.text)
    node = file.plan.stages[rank].node
    return PipelineError(f"stage {rank} ({node}): {first.type}: {first.text}")


@contextlib.contextmanager
def _launching(**variables: str) -> Iterator[None]:
    """Give these variables to the processes started meanwhile, and take back signals, messages and variables after."""
    logger = logging.getLogger("torch.distributed.elastic")  # it tells what is raised, and how it is raised
    level, handlers = logger.level, {number: signal.getsignal(number) for number in SIGNALS}
    before = {name: os.environ.get(name) for name in variables}
    logger.setLevel(logging.CRITICAL)
    os.environ.update(variables)
    try:
        yield
    finally:
        logger.setLevel(level)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
