"""Run a kept plan: start a process for every stage, be one of them, and keep what was measured."""

import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from boundby import files
from boundby.machine import usable_cpus
from boundby.partition import Measured, Simulated, compare
from utils.command import FAILED, EnvironmentLacksError, InputError, PipelineError
from utils.partition.planning import Planned

SCHEMA_VERSION = 1
FAILURES = "BOUNDBY_STAGE_FAILURES"  # the folder in which a stage tells the process that started it why it ended
THREADS = "OMP_NUM_THREADS"
END_WITH_PARENT = 1  # PR_SET_PDEATHSIG of prctl(2): a stage that waits for a message sees no other signal
SEED = 0  # of random weights, which every process makes for itself
REQUESTS = 40
POLL_S = 0.05


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
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    stages = len(file.plan.stages)
    cores = max(1, len(usable_cpus()) // stages)
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)  # on a free port; the stages meet here
    with tempfile.TemporaryDirectory(prefix="boundby-stages-") as folder:
        shared = {
            THREADS: str(min(cores, file.model.threads or cores)),
            **os.environ,
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": str(store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store is here: none of them makes one
            "WORLD_SIZE": str(stages),
            "LOCAL_WORLD_SIZE": str(stages),
            FAILURES: folder,
        }
        processes = [
            subprocess.Popen(
                [sys.executable, *map(str, command)],
                env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                start_new_session=True,  # Ctrl-C reaches this process alone, which ends the others
            )
            for rank in range(stages)
        ]
        try:
            while None in (exit_codes := [process.poll() for process in processes]) and not any(exit_codes):
                time.sleep(POLL_S)
            if any(exit_codes):
                raise _failure(file, Path(folder), exit_codes)
        finally:
            for process in processes:
                process.kill()
                process.wait()


@dataclass(frozen=True)
class _Failure:
    """Why a stage ended, as it tells the process that started it."""

    at_ns: int
    text: str
    type: str


def be_a_stage(file: Planned, requests: int) -> Measured:
    """Compute the stage of this process; return what all of them measured."""
    if FAILURES in os.environ and sys.platform == "linux":
        ctypes.CDLL(None).prctl(END_WITH_PARENT, signal.SIGKILL)
    try:
        return _run(file, requests)
    except Exception as error:
        if FAILURES not in os.environ:
            raise
        failure = _Failure(time.time_ns(), str(error), type(error).__name__)
        files.write_json(Path(os.environ[FAILURES]) / f"stage-{os.environ['RANK']}.json", msgspec.to_builtins(failure))
        raise SystemExit(FAILED) from None  # the process that started this one says why


def keep(path: Path, plan: Path, file: Planned, outcome: Measured | Simulated) -> None:
    """Replace `path` by what was measured or simulated, beside what was predicted."""
    is_run = isinstance(outcome, Measured)
    files.write_json(
        path,
        {
            "schema_version": SCHEMA_VERSION,
            "label": "measured" if is_run else "simulated",
            "plan": str(plan),
            "model": msgspec.to_builtins(file.model),
            **msgspec.to_builtins(outcome),
            "comparison": msgspec.to_builtins(compare(file.plan, outcome)) if isinstance(outcome, Measured) else None,
        },
    )


def _run(file: Planned, requests: int) -> Measured:
    processes, stages = int(os.environ["WORLD_SIZE"]), len(file.plan.stages)
    if processes != stages:
        raise InputError(
            f"the plan has {stages} stages, and torchrun started {processes} processes: start one for each stage, "
            f"--nproc-per-node {stages} on one machine"
        )
    import torch

    from boundby.partition import CutError, run
    from utils.tracing import Model, models

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


def _failure(file: Planned, folder: Path, exit_codes: Sequence[int | None]) -> PipelineError:
    """Return why the first stage ended that said so; else the first one that has ended."""
    failures = {int(path.stem.split("-")[1]): files.read_as(path, _Failure) for path in folder.glob("stage-*.json")}
    if not failures:
        rank, code = next((rank, code) for rank, code in enumerate(exit_codes) if code)
        node = file.plan.stages[rank].node
        return PipelineError(f"stage {rank} ({node}) has ended with exit code {code}; run it with torchrun to see why")
    rank, first = min(failures.items(), key=lambda failure: failure[1].at_ns)
    kinds = {kind.__name__: kind for kind in (PipelineError, InputError, EnvironmentLacksError)}
    if first.type in kinds:
        return kinds[first.type](first.text)
    return PipelineError(f"stage {rank} ({file.plan.stages[rank].node}): {first.type}: {first.text}")
