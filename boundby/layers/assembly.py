"""Put together what the passes found: call path by call path into a `LayerProfile`, tied weights counted once."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import nn

from boundby.layers.judgement import Machine, coverage, is_launch_bound, judge_layer, summarize_runs
from boundby.layers.passes import CallMemory, CallShapes, LayerWork
from boundby.layers.probes import Call, CallTimes, CallTree, Targets
from boundby.layers.records import Coverage, LayerProfile, Storage
from boundby.layers.report import LayerSamples
from boundby.layers.timing import DeviceTimes, HostTimes, corrected
from boundby.roofline import Limits

CONCURRENT = "it was called from another thread than the model: its time runs beside that of the layers there"
VARYING = "it was called with other shapes too; those of the first call are shown"
UNRUN_WORK = "work of other threads is not counted"


@dataclass(frozen=True)
class Findings:
    """What the passes found; None where a pass was not made."""

    host: HostTimes
    cost_ns: float
    device: DeviceTimes | None
    memory: Mapping[Call, CallMemory] | None
    shapes: Mapping[Call, CallShapes]
    work: LayerWork
    limits: Limits | None


class Assembly:
    """The layers of one profile."""

    def __init__(self, tree: CallTree, targets: Targets, findings: Findings) -> None:
        self._tree, self._targets, self._findings = tree, targets, findings
        self._storages = Storages(targets.modules[0])
        self._machine = Machine(findings.limits, findings.work.least_bytes, on_host=findings.device is None)
        self._calls = list(tree.walk())
        self.samples = self._samples()

    def layers(self) -> tuple[LayerProfile, ...]:
        """Return the called layers in the order of their first calls, then those that were never called."""
        called = [self._layer(call, order) for order, call in enumerate(self._calls)]
        return (*called, *self._never_called(called))

    def coverage(self) -> Coverage:
        """Return how much of the reference time the root accounts for: by the slower one of host and device."""
        root, reference_ns = self.samples[""], self._findings.host.reference_ns
        pairs = zip(root.host_inclusive_s, reference_ns, strict=True)
        ratio = median(spent * 1e9 / plain for spent, plain in pairs)
        if root.device_inclusive_s:
            ratio = max(ratio, median(root.device_inclusive_s) * 1e9 / median(reference_ns))
        inside = [call for call in self._calls if not self._tree.is_elsewhere(call) and not call.callees]
        leaves = [self.samples[call.path] for call in inside]
        leaves_s = sum(median(leaf.device_self_s or leaf.host_self_s) for leaf in leaves)
        root_s = median(root.device_inclusive_s or root.host_inclusive_s)
        return coverage(ratio, leaves_s / root_s if root_s > 0 else 0.0)

    def _samples(self) -> dict[str, LayerSamples]:
        runs = [corrected(run, self._findings.cost_ns) for run in self._findings.host.runs]
        device = self._findings.device
        device_runs = [(device.selves(n), device.inclusive(n)) for n in range(len(device.runs))] if device else []
        nothing = CallTimes(0, 0, 0, 0)
        return {
            call.path: LayerSamples(
                calls=tuple(run.get(call, nothing).calls for run in self._findings.host.runs),
                host_self_s=tuple(selves.get(call, 0.0) / 1e9 for selves, _ in runs),
                host_inclusive_s=tuple(inclusive.get(call, 0.0) / 1e9 for _, inclusive in runs),
                device_self_s=_seconds(call, [selves for selves, _ in device_runs]),
                device_inclusive_s=_seconds(call, [inclusive for _, inclusive in device_runs]),
            )
            for call in self._calls
        }

    def _layer(self, call: Call, order: int) -> LayerProfile:
        samples, module = self.samples[call.path], self._targets.modules[call.index]
        host_self, host_inclusive = summarize_runs(samples.host_self_s), summarize_runs(samples.host_inclusive_s)
        device_self = summarize_runs(samples.device_self_s) if samples.device_self_s else None
        is_concurrent = self._tree.is_elsewhere(call)
        operators = None if is_concurrent else self._findings.work.of(call)
        verdict = judge_layer((device_self or host_self).median, host_self.median, operators, self._machine)
        calls = sum(samples.calls) / len(samples.calls)
        return LayerProfile(
            path=call.path,
            parent=_parent(call, self._tree),
            name=call.name,
            type=type(module).__name__,
            depth=_depth(call),
            order=order,
            calls=calls,
            host_self_s=host_self,
            host_inclusive_s=host_inclusive,
            device_self_s=device_self,
            device_inclusive_s=summarize_runs(samples.device_inclusive_s) if samples.device_inclusive_s else None,
            is_launch_bound=is_launch_bound(host_self.median, device_self.median) if device_self else None,
            flops_self=None if operators is None else float(sum(operator.flops for operator in operators)),
            bytes_self=None if operators is None else float(sum(operator.bytes for operator in operators)),
            bound=verdict.bound,
            share_of_limit=verdict.share_of_limit,
            gain_at_limit_s=verdict.gain_at_limit_s,
            doubts=(*self._doubts(call, is_concurrent), *verdict.doubts),
            is_concurrent=is_concurrent,
            **self._held(module),
            **self._seen(call),
        )

    def _held(self, module: nn.Module) -> dict[str, Any]:
        return {"parameters": count_parameters(module), "storages": self._storages.of(module)}

    def _seen(self, call: Call | None) -> dict[str, Any]:
        """Return the fields on shapes and memory."""
        shapes = self._findings.shapes.get(call) if call else None
        memory = self._findings.memory.get(call) if call and self._findings.memory else None
        return {
            "output_bytes": shapes.output_bytes if shapes else None,
            "input_shapes": shapes.inputs if shapes else (),
            "output_shapes": shapes.outputs if shapes else (),
            "activation_peak_bytes": memory.peak_above_bytes if memory else None,
            "memory_before_bytes": memory.before_bytes if memory else None,
            "memory_after_bytes": memory.after_bytes if memory else None,
        }

    def _doubts(self, call: Call, is_concurrent: bool) -> list[str]:
        doubts = [CONCURRENT, UNRUN_WORK] if is_concurrent else []
        shapes, device = self._findings.shapes.get(call), self._findings.device
        if shapes and shapes.varies:
            doubts.append(VARYING)
        if device and call in device.unknown:
            doubts.append(f"its device time is not known: {device.unknown[call]}")
        return doubts

    def _never_called(self, called: Sequence[LayerProfile]) -> list[LayerProfile]:
        layers: list[LayerProfile] = []
        indices = {call.index for call in self._calls}
        paths = {layer.path: layer for layer in called}
        for index, module in enumerate(self._targets.modules):
            storages = self._storages.of(module)
            if index in indices or (_is_container(module) and not storages):
                continue
            name = self._targets.names[index][0]
            parent = paths[_nearest(name, paths)]
            path = name if name not in paths else f"{name} (never called)"
            reason = self._targets.opaque.get(index)
            layer = LayerProfile(
                path=path,
                parent=parent.path,
                name=name,
                type=_type_name(module),
                depth=parent.depth + 1,
                order=len(called) + len(layers),
                calls=0.0,
                doubts=(reason,) if reason else (),
                **self._held(module),
            )
            paths[path] = layer
            layers.append(layer)
        return layers


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
            self._keys.setdefault(_place(tensor), name)

    def of(self, module: nn.Module) -> tuple[Storage, ...]:
        """Return the storages of the module's own parameters and buffers, each once."""
        own: list[torch.Tensor] = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        storages: dict[object, Storage] = {}
        for tensor in own:
            place, size = _place(tensor), tensor.numel() * tensor.element_size()
            storages.setdefault(place, Storage(self._keys[place], size, isinstance(tensor, nn.Parameter)))
        return tuple(storages.values())


def count_parameters(module: nn.Module) -> int:
    """Return the number of parameters of the module and everything inside, tied ones once."""
    return sum({_place(tensor): tensor.numel() for tensor in module.parameters()}.values())


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


def _place(tensor: torch.Tensor) -> object:
    """Return an identifier of a tensor's memory; views that start elsewhere in one storage have their own."""
    try:
        address = tensor.data_ptr()
    except RuntimeError:  # a subclass that has no memory of its own
        address = 0
    return (tensor.device, address) if address else id(tensor)
