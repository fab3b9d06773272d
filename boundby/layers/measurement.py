"""What a profile is measured with, all passes over a model one after another, and the profile that they give."""

import math
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean, median
from typing import Any, cast

import torch
from torch import nn

from boundby.formatting import duration, listed
from boundby.layers.judgement import (
    LEAST_FOR_P95,
    Machine,
    clearly_less,
    coverage,
    is_launch_bound,
    judge_layer,
    kept_waiting,
    summarize_runs,
    trust_doubts,
    undisturbed_mean,
)
from boundby.layers.passes import (
    CallMemory,
    CallShapes,
    LayerWork,
    check_same_program,
    count_work,
    drift,
    measure_memory,
    see_program,
    see_shapes,
)
from boundby.layers.probes import Call, CallTimes, CallTree, Clock, Run, Targets
from boundby.layers.ranking import label
from boundby.layers.records import Coverage, LayerProfile, ModelProfile, Storage
from boundby.layers.report import LayerSamples, Report
from boundby.layers.timing import DeviceMarks, DeviceTimes, HostTimes, corrected, probe_cost_ns, spanning
from boundby.machine import (
    CPU_REASON,
    Allocator,
    CudaQueue,
    HostCounters,
    Watch,
    environment,
    gpu_source,
    is_gpu,
    is_host,
    runtime,
    synchronizer,
)
from boundby.machine import device as devices
from boundby.timing import CHUNK, MOST_HELD, QUEUE_DEPTH
from boundby.work import Limits


class CudaMarks(CudaQueue):
    """The streams of a GPU with pooled events."""

    def __init__(self, device: torch.device) -> None:
        self._pool: list[torch.cuda.Event] = []
        super().__init__(device)

    def mark(self) -> torch.cuda.Event:
        """Queue an event on the stream in use."""
        if not self._pool:
            return super().mark()
        event = self._pool.pop()
        event.record(torch.cuda.current_stream(self._device))
        return event

    def stream(self) -> Hashable:
        """Return the stream in use."""
        return cast(Hashable, runtime(self._device).current_stream(self._device))

    def reuse(self, mark: torch.cuda.Event) -> None:
        """Put the event back into the pool."""
        self._pool.append(mark)


@dataclass(frozen=True)
class Instruments:
    """The clock gives nanoseconds; `marks` and `allocator` are None where there is no device beside the host."""

    now: Clock = time.perf_counter_ns
    synchronize: Callable[[], None] = lambda: None  # a CPU has finished when the call returns
    marks: DeviceMarks | None = None
    allocator: Allocator | None = None
    cpu: Clock | None = None  # nanoseconds for which this thread, or with several of torch this process, has computed
    probe_cost_ns: Callable[[Clock], float] = probe_cost_ns
    watch: Callable[[], Watch] = lambda: Watch(HostCounters())

    def seconds(self) -> float:
        """Return the time in seconds."""
        return self.now() / 1e9


def instruments_for(device: torch.device) -> Instruments:
    """Return the instruments of a CPU or a GPU. Raises ValueError for other devices."""
    if is_host(device):
        # With several threads of torch the caller sleeps while they work: of the process it is known that nothing ran.
        return Instruments(cpu=time.thread_time_ns if torch.get_num_threads() == 1 else time.process_time_ns)
    if is_gpu(device):
        return Instruments(
            synchronize=synchronizer(device),
            marks=CudaMarks(device),
            allocator=Allocator(device),
            watch=lambda: Watch(HostCounters(), source=gpu_source(device)),
        )
    raise ValueError(f"layers on device {str(device)!r} cannot be timed; move the model to a CPU or a CUDA GPU")


MOST_NAMED = 4
CONCURRENT = "it was called from another thread than the model: its time runs in parallel to that of the layers there"
WAITS = "waits: it computed for at most {} of its self time of {}; for the rest it waited, or others had its core"
WAS_DISTURBED = "disturbed: its mean self time is {}, and {} without the {} of {} runs that had to wait"
VARYING = "later calls have other shapes; those of the first call are shown"
UNRUN_WORK = "work of other threads is not counted"
TIMES = ("host_self_s", "host_inclusive_s", "device_self_s", "device_inclusive_s")  # of a layer, and of its samples
NO_SHAPES = CallShapes((), (), None, varies=False)


@dataclass(frozen=True)
class ProfiledModel:
    """What is measured: a model, the names to write it under, its layers, and one run of it."""

    model: nn.Module
    model_name: str
    profile_name: str
    targets: Targets
    device: torch.device
    run: Run


@dataclass(frozen=True)
class Findings:
    """What the passes found, and the layers that they make; None where a pass was not made."""

    profiled: ProfiledModel
    tree: CallTree
    host: HostTimes
    cost_ns: float
    device: DeviceTimes | None
    memory: Mapping[Call, CallMemory] | None
    shapes: Mapping[Call, CallShapes]
    work: LayerWork
    limits: Limits | None
    is_disturbed: bool
    launches: int  # of a run, at most: its operators
    cache_bytes: tuple[int, ...]

    @property
    def is_queue_full(self) -> bool:
        """Whether the host has to wait for the device before it has issued a run, since the queue holds no more."""
        return self.device is not None and self.launches > QUEUE_DEPTH

    @cached_property
    def kept_waiting(self) -> frozenset[int]:
        """The runs with probes that were kept waiting."""
        times = self.host.instrumented_ns, self.host.waited_ns
        return kept_waiting(*([ns / 1e9 for ns in spent] for spent in times))

    @cached_property
    def _calls(self) -> list[Call]:
        return list(self.tree.walk())

    @cached_property
    def _storages(self) -> "Storages":
        return Storages(self.profiled.model)

    def layers(self) -> tuple[LayerProfile, ...]:
        """Return the called layers in the order of their first calls, then those that were never called."""
        called = [self._layer(call, order) for order, call in enumerate(self._calls)]
        return (*called, *self._never_called(called))

    def coverage(self) -> Coverage:
        """Return how much of the reference time the root accounts for: by the slower one of host and device."""
        root, reference_ns = self.samples[""], self.host.reference_ns
        if any(_varies(sample.calls) for sample in self.samples.values()):  # neighbouring runs are not alike
            ratio = sum(root.host_inclusive_s) * 1e9 / sum(reference_ns)
        else:
            pairs = zip(root.host_inclusive_s, reference_ns, strict=True)
            ratio = median(spent * 1e9 / plain for spent, plain in pairs)
        if root.device_inclusive_s:
            ratio = max(ratio, median(root.device_inclusive_s) * 1e9 / median(reference_ns))
        inside = [call for call in self._calls if not self.tree.is_elsewhere(call) and not call.callees]
        leaves = [self.samples[call.path] for call in inside]
        leaves_s = sum(fmean(leaf.device_self_s or leaf.host_self_s) for leaf in leaves)
        root_s = fmean(root.device_inclusive_s or root.host_inclusive_s)
        leaf_ratio = leaves_s / root_s if root_s > 0 else 0.0
        return coverage(ratio, leaf_ratio, is_disturbed=self.is_disturbed)

    @cached_property
    def samples(self) -> dict[str, LayerSamples]:
        """The seconds of every call path in every run."""
        runs = [corrected(run, self.cost_ns) for run in self.host.runs]
        device = self.device
        device_runs = [(device.selves(n), device.inclusive(n)) for n in range(len(device.runs))] if device else []
        nothing = CallTimes(0, 0, 0, 0)
        return {
            call.path: LayerSamples(
                calls=tuple(run.get(call, nothing).calls for run in self.host.runs),
                host_self_s=tuple(selves.get(call, 0.0) / 1e9 for selves, _ in runs),
                host_inclusive_s=tuple(inclusive.get(call, 0.0) / 1e9 for _, inclusive in runs),
                device_self_s=_seconds(call, [selves for selves, _ in device_runs]),
                device_inclusive_s=_seconds(call, [inclusive for _, inclusive in device_runs]),
            )
            for call in self._calls
        }

    def _layer(self, call: Call, order: int) -> LayerProfile:
        samples, module = self.samples[call.path], self.profiled.targets.modules[call.index]
        times: dict[str, Any] = {name: summarize_runs(runs) for name in TIMES if (runs := getattr(samples, name))}
        host, device = times["host_self_s"], times.get("device_self_s")
        is_concurrent = self.tree.is_elsewhere(call)
        operators = None if is_concurrent or _varies(samples.calls) else self.work.of(call)
        issue_s = None if self.is_queue_full else host.median
        machine = Machine(self.limits, self.work.least_bytes, on_host=self.device is None)
        verdict = judge_layer((device or host).median, issue_s, operators, machine)
        shapes, memory = self.shapes.get(call, NO_SHAPES), (self.memory or {}).get(call)
        cpu_s, undisturbed_s = self._computed(call), undisturbed_mean(samples.host_self_s, self.kept_waiting)
        doubts = [_calls_vary(samples.calls)] if _varies(samples.calls) else []
        doubts += [CONCURRENT, UNRUN_WORK] if is_concurrent else []
        doubts += [VARYING] if shapes.varies else []
        if self.device and call in self.device.unknown:
            doubts.append(f"its device time is unknown: {self.device.unknown[call]}")
        if cpu_s is not None:
            doubts.append(WAITS.format(duration(cpu_s), duration(host.median)))
        if undisturbed_s is not None:
            means = duration(host.mean), duration(undisturbed_s)
            doubts.append(WAS_DISTURBED.format(*means, len(self.kept_waiting), len(self.host.runs)))
        return LayerProfile(
            path=call.path,
            parent=_parent(call, self.tree),
            name=call.name,
            type=type(module).__name__,
            depth=_depth(call),
            order=order,
            calls=sum(samples.calls) / len(samples.calls),
            **times,
            is_launch_bound=is_launch_bound(issue_s, device.median) if device and issue_s is not None else None,
            parameters=count_parameters(module),
            storages=self._storages.of(module),
            flops_self=None if operators is None else float(sum(operator.flops for operator in operators)),
            bytes_self=None if operators is None else float(sum(operator.bytes for operator in operators)),
            output_bytes=shapes.output_bytes,
            activation_peak_bytes=memory.peak_above_bytes if memory else None,
            memory_before_bytes=memory.before_bytes if memory else None,
            memory_after_bytes=memory.after_bytes if memory else None,
            input_shapes=shapes.inputs,
            output_shapes=shapes.outputs,
            bound=verdict.bound,
            share_of_limit=verdict.share_of_limit,
            gain_at_limit_s=verdict.gain_at_limit_s,
            doubts=(*doubts, *verdict.doubts),
            cpu_self_s=cpu_s,
            undisturbed_self_s=undisturbed_s,
            is_concurrent=is_concurrent,
        )

    def _computed(self, call: Call) -> float | None:
        """Return the seconds of its own time by the clock of the CPU; None where they are as long by the wall clock."""
        runs = [run[call] for run in self.host.cpu_runs if call in run]
        if not runs:
            return None
        wall_s, cpu_s = (median(ns) / 1e9 for ns in zip(*runs, strict=True))
        return cpu_s if clearly_less(wall_s, cpu_s) else None

    def _never_called(self, called: Sequence[LayerProfile]) -> list[LayerProfile]:
        layers: list[LayerProfile] = []
        indices = {call.index for call in self._calls}
        paths = {layer.path: layer for layer in called}
        for index, module in enumerate(self.profiled.targets.modules):
            storages = self._storages.of(module)
            if index in indices or (_is_container(module) and not storages):
                continue
            name = self.profiled.targets.names[index][0]
            parent = paths[_nearest(name, paths)]
            path = name if name not in paths else f"{name} (never called)"
            reason = self.profiled.targets.opaque.get(index)
            layer = LayerProfile(
                path=path,
                parent=parent.path,
                name=name,
                type=_type_name(module),
                depth=parent.depth + 1,
                order=len(called) + len(layers),
                calls=0.0,
                doubts=(reason,) if reason else (),
                parameters=count_parameters(module),
                storages=storages,
            )
            paths[path] = layer
            layers.append(layer)
        return layers


def _named(paths: Sequence[str]) -> str:
    shown = [label(path) for path in paths[:MOST_NAMED]]
    return listed([*shown, f"{len(paths) - len(shown)} more"] if len(paths) > len(shown) else shown)


def _varies(calls: Sequence[int]) -> bool:
    return min(calls) != max(calls)


def _calls_vary(calls: Sequence[int]) -> str:
    if min(calls):
        return f"it was called {min(calls)} to {max(calls)} times a run; its work is unknown, its time is the mean"
    runs = sum(number > 0 for number in calls)
    return f"it was called in {runs} of {len(calls)} runs; its work is unknown, its time is the mean over all of them"


def _is_container(module: nn.Module) -> bool:
    """Tell whether the module cannot be called, like a ModuleList."""
    return getattr(type(module), "forward", None) is nn.Module.forward


def _type_name(module: nn.Module) -> str:
    """Return the class name; that of a scripted module is the one it was made from."""
    return getattr(module, "original_name", None) or type(module).__name__


def _seconds(call: Call, runs: Sequence[Mapping[Call, float]]) -> tuple[float, ...] | None:
    """Return the device seconds of one call path in every run, or None where one run has none."""
    if not runs or not any(call in run for run in runs):
        return None
    return tuple(run.get(call, 0.0) for run in runs)


def _parent(call: Call, tree: CallTree) -> str | None:
    if call.caller is tree.top:
        return None
    return "" if call.caller in (None, tree.elsewhere) else call.caller.path


def _depth(call: Call) -> int:
    depth = 0
    while call.caller is not None and call.caller.caller is not None:
        call, depth = call.caller, depth + 1
    return depth + 1 if call.caller is call.tree.elsewhere else depth


def _nearest(name: str, paths: Mapping[str, LayerProfile]) -> str:
    """Return the path that holds the module of this name: the longest part of it that is there."""
    while name and (name := name.rpartition(".")[0]) not in paths:
        pass
    return name


class Storages:
    """Names each piece of memory after the first parameter or buffer in it."""

    def __init__(self, model: nn.Module) -> None:
        self._keys: dict[object, str] = {}
        for name, tensor in (
            *model.named_parameters(remove_duplicate=False),
            *model.named_buffers(remove_duplicate=False),
        ):
            self._keys.setdefault(_memory_key(tensor), name)

    def of(self, module: nn.Module) -> tuple[Storage, ...]:
        """Return the storages of the module's own parameters and buffers, each once."""
        own: list[torch.Tensor] = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        storages: dict[object, Storage] = {}
        for tensor in own:
            memory, size = _memory_key(tensor), tensor.numel() * tensor.element_size()
            storages.setdefault(memory, Storage(self._keys[memory], size, isinstance(tensor, nn.Parameter)))
        return tuple(storages.values())


def count_parameters(module: nn.Module) -> int:
    """Return the number of parameters of the module and everything inside, tied ones once."""
    return sum({_memory_key(tensor): tensor.numel() for tensor in module.parameters()}.values())


def dtype_of(model: nn.Module) -> str:
    """Return the dtype that most bytes of parameters have, "float32" style; torch's default without parameters."""
    sizes: dict[torch.dtype, int] = {}
    for tensor in model.parameters():
        sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + tensor.numel() * tensor.element_size()
    dtype = max(sizes, key=lambda kind: sizes[kind]) if sizes else torch.get_default_dtype()
    return str(dtype).removeprefix("torch.")


def devices_of(module: nn.Module) -> set[torch.device]:
    """Return the devices that parameters and buffers of the module lie on."""
    return {tensor.device for tensor in (*module.parameters(), *module.buffers())}


def _memory_key(tensor: torch.Tensor) -> object:
    """Return an identifier of a tensor's memory; views that start elsewhere in one storage have their own."""
    try:
        address = tensor.data_ptr()
    except RuntimeError:  # a subclass that has no memory of its own
        address = 0
    return (tensor.device, address) if address else id(tensor)


LEAST_RUNS = 5  # of each kind, however long they take
TRAINING = (
    "training: the model is in training mode, where dropout is active and running statistics change; call "
    "model.eval() to profile inference"
)
NO_DEVICE = "a CPU has host times only"
FULL_QUEUE = "a run of {} operators may be more than the launch queue of the device holds"
NO_LIMITS = "the limits of this machine were not given (boundby.machine.ceilings measures them)"
DEVICE_FIELDS = ("device_self_s", "device_inclusive_s", "is_launch_bound")
MEMORY_FIELDS = ("activation_peak_bytes", "memory_before_bytes", "memory_after_bytes")
WORK_FIELDS = ("flops_self", "bytes_self")
VERDICT_FIELDS = ("bound", "share_of_limit", "gain_at_limit_s")


def measure(
    profiled: ProfiledModel,
    num_runs: int,
    instruments: Instruments,
    limits: Limits | None,
    max_seconds: float = math.inf,
) -> Report:
    """Return the report on `num_runs` runs of each kind, or on as many as fit into `max_seconds` with all passes.

    Raises ChangedProgramError; an error of the model passes through.
    """
    began_s = instruments.seconds()
    run, targets = profiled.run, profiled.targets
    tree = CallTree(targets.names)
    program = see_program(run)
    until_s = began_s + max_seconds - (instruments.seconds() - began_s)  # it is seen once more, after the timing
    changes = check_same_program(run, tree, targets, program.calls)
    memory = measure_memory(run, tree, targets, instruments.allocator) if instruments.allocator else None
    shapes, cache_bytes = see_shapes(run, tree, targets)
    work = count_work(run, tree, targets, None if instruments.marks else instruments.seconds)
    watch = instruments.watch().start()
    cost_ns = instruments.probe_cost_ns(instruments.now)
    launches = sum(program.calls.values())
    host, device = _time(profiled, tree, num_runs, instruments, until_s, launches)
    cost_ns = min(cost_ns, instruments.probe_cost_ns(instruments.now))  # of both, that which was disturbed less
    disturbances = watch.stop().disturbances(1 if instruments.marks else torch.get_num_threads())
    doubts = [*(changes or drift(program, see_program(run))), *targets.opaque_reasons]
    doubts += [f"disturbed: {'; '.join(disturbance.text for disturbance in disturbances)}"] if disturbances else []
    if len(host.runs) < num_runs:
        doubts.append(f"runs: {len(host.runs)} of {num_runs} fitted into {max_seconds:g} s")
    passes = (host, cost_ns, device, memory, shapes, work, limits, bool(disturbances), launches, cache_bytes)
    return _report(Findings(profiled, tree, *passes), doubts)


def _time(
    profiled: ProfiledModel, tree: CallTree, num_runs: int, instruments: Instruments, until_s: float, launches: int
) -> tuple[HostTimes, DeviceTimes | None]:
    """Return the times of up to `num_runs` rounds: a run without probes, one with them, and one on the device.

    After the least rounds none begins that would end after `until_s` if it took as long as the one before. A run of
    more `launches` and marks than the queue of the device holds goes there in chunks.
    """
    given = profiled.run, tree, profiled.targets, instruments.now, instruments.synchronize
    host = HostTimes(*given, cpu=instruments.cpu)
    device: DeviceTimes | None = None
    if instruments.marks:
        devices_by_module = {index: devices_of(module) for index, module in enumerate(profiled.targets.modules)}
        device = DeviceTimes(*given, instruments.marks, spanning(tree, devices_by_module, profiled.device))
    for number in range(1, num_runs + 1):
        began_s = instruments.seconds()
        host.add_pair()
        if device:
            calls = sum(times.calls for times in host.runs[-1].values())
            if launches + 2 * calls > MOST_HELD:  # two marks around each call
                device.calls_per_chunk = max(1, int(CHUNK * calls / (launches + 2 * calls)))
            device.add_run()
        ended_s = instruments.seconds()
        if number >= LEAST_RUNS and ended_s + (ended_s - began_s) > until_s:
            break
    return host, device


def _report(findings: Findings, doubts: Sequence[str]) -> Report:
    profiled, host = findings.profiled, findings.host
    num_runs = len(host.runs)
    reference_s = summarize_runs([ns / 1e9 for ns in host.reference_ns])
    instrumented_s = summarize_runs([ns / 1e9 for ns in host.instrumented_ns])
    coverage, layers = findings.coverage(), findings.layers()
    vary = any(_varies(samples.calls) for samples in findings.samples.values())
    overhead = instrumented_s.mean / reference_s.mean - 1 if vary else host.overhead
    versions = {name: version for name, version in environment.versions().items() if version is not None}
    profile = ModelProfile(
        profile_name=profiled.profile_name,
        model_name=profiled.model_name,
        device=str(profiled.device),
        device_name=str(devices.describe(profiled.device).get("name") or environment.machine()["cpu"]),
        dtype=dtype_of(profiled.model),
        num_runs=num_runs,
        reference_s=reference_s,
        instrumented_s=instrumented_s,
        probe_cost_s=findings.cost_ns / 1e9,
        module_calls=sum(times.calls for run in host.runs for times in run.values()) / num_runs,
        coverage=coverage,
        layers=layers,
        reasons=_reasons(findings, num_runs),
        doubts=(*doubts, *trust_doubts(coverage, overhead, num_runs), *_profile_doubts(findings, layers)),
        environment={**versions, **environment.settings(), "threads": str(torch.get_num_threads())},
        limits=findings.limits,
        paired_overhead=overhead,
        kv_cache_bytes=findings.cache_bytes,
    )
    return Report(profile, findings.samples)


def _profile_doubts(findings: Findings, layers: Sequence[LayerProfile]) -> list[str]:
    doubts = [TRAINING] if any(module.training for module in findings.profiled.model.modules()) else []
    varying = sum(_varies(sample.calls) for sample in findings.samples.values())
    if varying:
        doubts.append(
            f"calls: {varying} layers are called differently from run to run; times and ranks are means over runs"
        )
    if waiting := [layer.path for layer in layers if layer.cpu_self_s is not None]:
        doubts.append(f"waits: {_named(waiting)} waited for part of the time; the summary says how long")
    if disturbed := [layer.path for layer in layers if layer.undisturbed_self_s is not None]:
        doubts.append(f"disturbed: some runs had to wait, which made the means of {_named(disturbed)} longer")
    concurrent = sum(layer.is_concurrent for layer in layers)
    if concurrent:
        doubts.append(f"threads: {concurrent} layers were called from other threads; their time is in no other layer's")
    if findings.is_queue_full:
        doubts.append(f"host: {FULL_QUEUE.format(findings.launches)}, so the layers' host times include waiting for it")
    if findings.device and findings.device.late_runs:
        doubts.append(
            f"device: in {findings.device.late_runs} of {len(findings.device.runs)} runs it waited for the host, so "
            "device times include waiting"
        )
    return doubts


def _reasons(findings: Findings, num_runs: int) -> dict[str, str]:
    reasons: dict[str, str] = {}
    if findings.device is None:
        reasons |= dict.fromkeys(DEVICE_FIELDS, NO_DEVICE)
    if findings.is_queue_full:
        reasons["is_launch_bound"] = FULL_QUEUE.format(findings.launches)
    if findings.memory is None:
        reasons |= dict.fromkeys(MEMORY_FIELDS, CPU_REASON)
    if findings.work.reason is not None:
        reasons |= dict.fromkeys((*WORK_FIELDS, *VERDICT_FIELDS), findings.work.reason)
    if findings.limits is None:
        reasons |= dict.fromkeys(VERDICT_FIELDS, NO_LIMITS)
    if num_runs < LEAST_FOR_P95:
        reasons["p95"] = f"{num_runs} runs are too few; it takes {LEAST_FOR_P95}"
    return reasons
