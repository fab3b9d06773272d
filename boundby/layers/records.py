"""What a profile by layer holds: plain frozen records, made by the engine, read by dashboard, planner and reports.

Loads no torch. Times are seconds, sizes bytes; what is not known is None, and `reasons` of the profile says why.
"""

from typing import Literal

import msgspec

from boundby.bound import Bound
from boundby.timing import Summary
from boundby.work import Limits

CoverageStatus = Literal["pass", "warn", "not representative"]
PREFILL, DECODE = "prefill", "decode"  # the passes of a text that is generated (`boundby.layers.generation`)


class Storage(msgspec.Struct, frozen=True):
    """One piece of memory that parameters or buffers lie in; tied weights share one."""

    key: str  # equal for tied weights, stable within one profile
    bytes: int
    is_parameter: bool


class LayerProfile(msgspec.Struct, frozen=True):
    """One module as it was called from one place: `path` is the chain of calls, not only the name of the module.

    Of a module that is called several times from one place, times are the sum over the calls of one run. Times are
    corrected for the cost of the probes; `self` leaves the layers inside out, `inclusive` does not. Device times are
    None where there is no device or the module spans several.
    """

    path: str  # "transformer.h.0.attn"; a module called from a second place has a path of its own there
    parent: str | None  # path of the caller; None for the root, whose path is ""
    name: str  # qualified name in the model
    type: str  # class name
    depth: int
    order: int  # of the first call within a run
    calls: float  # per run; 0 for a module that was never called (which is not: unused)
    host_self_s: Summary | None = None  # over runs; None where it was not called
    host_inclusive_s: Summary | None = None
    device_self_s: Summary | None = None
    device_inclusive_s: Summary | None = None
    is_launch_bound: bool | None = None  # the host takes longer than the device; None without device times
    parameters: int = 0  # of the module and everything inside, tied ones once
    storages: tuple[Storage, ...] = ()  # of its own parameters and buffers, not of modules inside
    flops_self: float | None = None  # per run
    bytes_self: float | None = None  # that must move at least, per run
    output_bytes: int | None = None  # of all tensors it returns
    activation_peak_bytes: int | None = None  # above what was there at its begin; None without allocator statistics
    memory_before_bytes: int | None = None
    memory_after_bytes: int | None = None
    input_shapes: tuple[str, ...] = ()  # "float32[1, 128, 768]", arguments flattened
    output_shapes: tuple[str, ...] = ()
    bound: Bound | None = None  # of its own work
    share_of_limit: float | None = None
    gain_at_limit_s: float | None = None  # of the end-to-end time, if its own work ran at the limit
    doubts: tuple[str, ...] = ()
    cpu_self_s: float | None = None  # of `host_self_s` at most, by the clock of the CPU; None where they agree
    undisturbed_self_s: float | None = None  # its mean without runs that were kept waiting; None where it agrees
    is_concurrent: bool = False  # called from another thread than the root: its time is part of no other layer's

    @property
    def self_s(self) -> Summary | None:
        """The time that counts: the device's where it is known, else the host's."""
        return self.device_self_s or self.host_self_s

    @property
    def inclusive_s(self) -> Summary | None:
        """Like `self_s`, with the layers inside."""
        return self.device_inclusive_s or self.host_inclusive_s


class Coverage(msgspec.Struct, frozen=True):
    """How much of the un-instrumented time the layers account for."""

    ratio: float  # corrected inclusive time of the root over the reference
    status: CoverageStatus
    leaf_ratio: float  # self time of leaves over the root's; low means functional work outside of modules


class ModelProfile(msgspec.Struct, frozen=True):
    """A whole model: the reference, how far the profile can be trusted, and every layer in the order of first calls."""

    profile_name: str
    model_name: str
    device: str  # "cpu", "cuda:0"
    device_name: str
    dtype: str
    num_runs: int
    reference_s: Summary  # un-instrumented, end to end
    instrumented_s: Summary  # end to end, with the probes of the time pass
    probe_cost_s: float  # per module call, calibrated on this machine
    module_calls: float  # per run
    coverage: Coverage
    layers: tuple[LayerProfile, ...]  # the root first
    reasons: dict[str, str]  # field of LayerProfile or ModelProfile: why it is None
    doubts: tuple[str, ...]
    environment: dict[str, str]
    limits: Limits | None = None  # of the machine, those that `bound` and `share_of_limit` rest on
    paired_overhead: float | None = None  # of runs with probes over the runs without beside them, minus one: the median
    kv_cache_bytes: tuple[int, ...] = ()  # of keys and values that a run gave back, by layer; none where it gave none
    shape: str | None = None  # of the inputs as a person reads it, where who profiled has said it: `8 × 154 tokens`

    @property
    def passes(self) -> tuple["LayerProfile", ...]:
        """The model as it reads a prompt and as it adds tokens, where a text was generated; else none."""
        kinds = [layer for layer in self.layers if layer.parent == "" and layer.name in (PREFILL, DECODE)]
        return tuple(kinds) if self.layers and self.layers[0].type == "Generation" else ()

    @property
    def overhead(self) -> float:
        """Instrumented over reference time, minus one; within pairs of runs where they are known."""
        if self.paired_overhead is not None:
            return self.paired_overhead
        return self.instrumented_s.median / self.reference_s.median - 1
