"""The instruments for one device: who reads, who watches, who counts joules, and in what state the machine is."""

import os
from dataclasses import replace

import torch

from boundby.bound import Bench
from boundby.machine import (
    DriverSource,
    EnergyMeter,
    HostCounters,
    PsutilSource,
    RaplCounter,
    Reference,
    Sources,
    Watch,
    float32_precision,
    gpu_source,
    is_gpu,
    is_host,
    machine,
    usable_cpus,
)
from boundby.timing import Timer
from utils.baseline.document import MachineState

REFERENCE_SIZE = 384  # of a matrix product: 1 ms on two cores, and it uses all of them


def source(device: torch.device) -> Sources:
    """Return what the sampler reads: the host, and the GPU where the model runs on one."""
    return Sources(gpu_source(device), PsutilSource())


def watch(device: torch.device) -> Watch:
    """Return who notices disturbances; on a CPU with a reference work that shows a slower machine."""
    if not is_host(device):
        return Watch(HostCounters(), source=gpu_source(device))
    square = torch.ones(REFERENCE_SIZE, REFERENCE_SIZE)
    out = torch.empty_like(square)
    return Watch(HostCounters(), Reference(lambda: torch.mm(square, square, out=out)))


def bench(device: torch.device, timer: Timer, replay_s: float, trials_s: float) -> Bench:
    """Return the instruments for replays and trials, which may take so many seconds each."""
    return replace(Bench.of(device), timer=timer, watch=watch(device), replay_s=replay_s, trials_s=trials_s)


Energy = tuple[EnergyMeter | None, float | None, str | None]


def energy(device: torch.device, timer: Timer) -> Energy:
    """Return the meter of this device and the watts it takes when idle, or why there is none."""
    try:
        counter = gpu_source(device) if is_gpu(device) else RaplCounter()
        if not isinstance(counter, DriverSource | RaplCounter):
            return None, None, counter.reason
        meter = EnergyMeter(counter, timer)
        return meter, meter.idle_w(), None
    except OSError as error:
        return None, None, f"no energy counter: {error}"


def machine_state() -> MachineState:
    """Return what this process may use and how busy the machine is at the start."""
    return {
        "threads": torch.get_num_threads(),
        "interop_threads": torch.get_num_interop_threads(),
        "affinity": sorted(usable_cpus()),
        "cpu_quota_cores": machine()["cpu_quota_cores"],
        "load_1min": os.getloadavg()[0],
        "float32_matmul_precision": float32_precision(),
    }
