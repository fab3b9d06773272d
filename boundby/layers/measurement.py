"""Make all passes over a model, one after another, and put what they find into a report."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from boundby import device as devices
from boundby import environment
from boundby.layers.assembly import Assembly, Findings, devices_of, dtype_of
from boundby.layers.instruments import Instruments
from boundby.layers.judgement import LEAST_FOR_P95, summarize_runs, trust_doubts
from boundby.layers.passes import (
    check_same_program,
    count_work,
    drift,
    measure_memory,
    see_program,
    see_shapes,
)
from boundby.layers.probes import CallTree, Run, Targets
from boundby.layers.records import LayerProfile, ModelProfile
from boundby.layers.report import Report
from boundby.layers.timing import DevicePass, DeviceTimes, HostPass, HostTimes, spanning
from boundby.memory import CPU_REASON
from boundby.roofline import Limits

LEAST_RUNS = 5  # of each kind, however long they take
TRAINING = (
    "training: modules are in training mode, so dropout is active and running statistics change, if there are any; "
    "call model.eval() to profile inference"
)
NO_DEVICE = "on a CPU the times of the host are all there are"
NO_LIMITS = "the limits of this machine were not given (boundby.ceilings measures them)"
DEVICE_FIELDS = ("device_self_s", "device_inclusive_s", "is_launch_bound")
MEMORY_FIELDS = ("activation_peak_bytes", "memory_before_bytes", "memory_after_bytes")
WORK_FIELDS = ("flops_self", "bytes_self")
VERDICT_FIELDS = ("bound", "share_of_limit", "gain_at_limit_s")


@dataclass(frozen=True)
class Subject:
    """What is measured: a model, the names to write it under, its layers, and one run of it."""

    model: nn.Module
    model_name: str
    profile_name: str
    targets: Targets
    device: torch.device
    run: Run


def measure(
    subject: Subject, num_runs: int, instruments: Instruments, limits: Limits | None, max_seconds: float = math.inf
) -> Report:
    """Return the report on `num_runs` runs of each kind, or on as many as fit into `max_seconds` with all passes.

    Raises ChangedProgramError; an error of the model passes through.
    """
    began_s = instruments.seconds()
    run, targets = subject.run, subject.targets
    tree = CallTree(targets.names)
    program = see_program(run)
    until_s = began_s + max_seconds - (instruments.seconds() - began_s)  # it is seen once more, after the timing
    changes = check_same_program(run, tree, targets, program.calls)
    memory = measure_memory(run, tree, targets, instruments.allocator) if instruments.allocator else None
    shapes = see_shapes(run, tree, targets)
    work = count_work(run, tree, targets, None if instruments.marks else instruments.seconds)
    watch = instruments.watch().start()
    cost_ns = instruments.probe_cost_ns(instruments.now)
    host, device = _time(subject, tree, num_runs, instruments, until_s)
    cost_ns = min(cost_ns, instruments.probe_cost_ns(instruments.now))  # of both, that which was disturbed less
    disturbances = watch.stop().disturbances(torch.get_num_threads())
    doubts = [*(changes or drift(program, see_program(run))), *targets.opaque_reasons]
    doubts += [f"disturbed: {'; '.join(disturbance.text for disturbance in disturbances)}"] if disturbances else []
    if len(host.runs) < num_runs:
        doubts.append(f"runs: {len(host.runs)} of {num_runs} fitted into {max_seconds:g} s")
    findings = Findings(host, cost_ns, device, memory, shapes, work, limits)
    return _report(subject, Assembly(tree, targets, findings), findings, doubts)


def _time(
    subject: Subject, tree: CallTree, num_runs: int, instruments: Instruments, until_s: float
) -> tuple[HostTimes, DeviceTimes | None]:
    """Return the times of up to `num_runs` rounds: a run without probes, one with them, and one on the device.

    After the least rounds none begins that would end after `until_s` if it took as long as the one before.
    """
    host = HostPass(subject.run, tree, subject.targets, instruments.now, instruments.synchronize)
    device = _device_pass(subject, tree, instruments)
    for number in range(1, num_runs + 1):
        began_s = instruments.seconds()
        host.add_pair()
        if device:
            device.add_run()
        ended_s = instruments.seconds()
        if number >= LEAST_RUNS and ended_s + (ended_s - began_s) > until_s:
            break
    return host.times, device.times if device else None


def _device_pass(subject: Subject, tree: CallTree, instruments: Instruments) -> DevicePass | None:
    if instruments.marks is None:
        return None
    places = {index: devices_of(module) for index, module in enumerate(subject.targets.modules)}
    known = DeviceTimes(unknown=spanning(tree, places, subject.device))
    return DevicePass(
        subject.run, tree, subject.targets, instruments.now, instruments.synchronize, instruments.marks, known
    )


def _report(subject: Subject, assembly: Assembly, findings: Findings, doubts: Sequence[str]) -> Report:
    host = findings.host
    num_runs = len(host.runs)
    reference_s = summarize_runs([ns / 1e9 for ns in host.reference_ns])
    instrumented_s = summarize_runs([ns / 1e9 for ns in host.instrumented_ns])
    coverage, layers = assembly.coverage(), assembly.layers()
    profile = ModelProfile(
        profile_name=subject.profile_name,
        model_name=subject.model_name,
        device=str(subject.device),
        device_name=str(devices.describe(subject.device).get("name") or environment.machine()["cpu"]),
        dtype=dtype_of(subject.model),
        num_runs=num_runs,
        reference_s=reference_s,
        instrumented_s=instrumented_s,
        hook_cost_s=findings.cost_ns / 1e9,
        module_calls=sum(times.calls for run in host.runs for times in run.values()) / num_runs,
        coverage=coverage,
        layers=layers,
        reasons=_reasons(findings, num_runs),
        doubts=(*doubts, *trust_doubts(coverage, host.overhead, num_runs), *_doubts(subject.model, layers, findings)),
        environment=_environment(),
        limits=findings.limits,
        paired_overhead=host.overhead,
    )
    return Report(profile, assembly.samples)


def _doubts(model: nn.Module, layers: Sequence[LayerProfile], findings: Findings) -> list[str]:
    doubts = [TRAINING] if any(module.training for module in model.modules()) else []
    concurrent = sum(layer.is_concurrent for layer in layers)
    if concurrent:
        doubts.append(
            f"threads: {concurrent} layers were called from other threads; no other layer's time holds theirs"
        )
    if findings.device and findings.device.late_runs:
        doubts.append(
            f"device: in {findings.device.late_runs} of {len(findings.device.runs)} runs it waited for the host, so "
            "device times hold waiting"
        )
    return doubts


def _reasons(findings: Findings, num_runs: int) -> dict[str, str]:
    reasons: dict[str, str] = {}
    if findings.device is None:
        reasons |= dict.fromkeys(DEVICE_FIELDS, NO_DEVICE)
    if findings.memory is None:
        reasons |= dict.fromkeys(MEMORY_FIELDS, CPU_REASON)
    if findings.work.reason is not None:
        reasons |= dict.fromkeys((*WORK_FIELDS, *VERDICT_FIELDS), findings.work.reason)
    if findings.limits is None:
        reasons |= dict.fromkeys(VERDICT_FIELDS, NO_LIMITS)
    if num_runs < LEAST_FOR_P95:
        reasons["p95"] = f"{num_runs} runs are too few; it takes {LEAST_FOR_P95}"
    return reasons


def _environment() -> dict[str, str]:
    versions = {name: version for name, version in environment.versions().items() if version is not None}
    return {**versions, **environment.settings(), "threads": str(torch.get_num_threads())}
