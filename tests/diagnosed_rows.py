"""Rows of a sweep with what `utils.baseline` adds: work, share of the ceilings, and a verdict that `judge` made."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from boundby.bound.judgement import Evidence, Forward, Times, judge
from boundby.bound.trials import FASTER_MATMUL
from boundby.bound.verdict import Fix, Gain, Trial, Tried, doubts_of
from boundby.formatting import Missing
from boundby.machine import Ceilings, ComputeCeiling, MemoryCeiling
from boundby.work.roofline import Interval, OperatorLoad
from utils.baseline.columns import Finding
from utils.baseline.optimum import MEASURED

GIGA, TERA, MB = 1e9, 1e12, 1e6
UNCHANGED = (0.87, 1.15)


@dataclass(frozen=True)
class Model:
    """What one forward does: `operators` calls, each token `flops_per_token` and `bytes_per_token` beside weights."""

    flops_per_token: float
    bytes_per_token: float
    weight_bytes: float
    operators: int


def _product(dtype: str, precision: str | None, is_configured: bool, rate: float, error: float) -> ComputeCeiling:
    return ComputeCeiling(dtype, precision, is_configured, rate, 0.97 * rate, 2048, error)


CPU_CEILINGS = Ceilings(
    device={"type": "cpu", "threads": 2},
    compute=(
        _product("float32", "highest", True, 240 * GIGA, 4e-7),
        _product("float32", "high", False, 241 * GIGA, 4e-7),
        _product("float32", "medium", False, 460 * GIGA, 8e-7),
        _product("bfloat16", None, True, 960 * GIGA, 4e-3),
    ),
    memory=(
        MemoryCeiling("private cache", 2**20, 158 * GIGA, 149 * GIGA, "copy"),
        MemoryCeiling("shared cache", 2**24, 58.3 * GIGA, 55 * GIGA, "add"),
        MemoryCeiling("memory", 2**28, 21.4 * GIGA, 20.6 * GIGA, "copy"),
        MemoryCeiling("new memory", 2**28, 3.1 * GIGA, 2.9 * GIGA, "add"),
    ),
    dispatch_s=1.1e-6,
    dispatch_high_s=1.3e-6,
    seconds=6.2,
)
GPU_CEILINGS = Ceilings(
    device={"type": "cuda", "name": "NVIDIA A100-SXM4-40GB"},
    compute=(
        _product("float32", "highest", True, 18.9 * TERA, 2e-6),
        _product("float32", "high", False, 118 * TERA, 8e-4),
        _product("float32", "medium", False, 119 * TERA, 8e-4),
        _product("bfloat16", None, True, 252 * TERA, 6e-3),
        _product("float16", None, True, 247 * TERA, 8e-4),
    ),
    memory=(
        MemoryCeiling("cache", 20 * 2**20, 3.4 * TERA, 3.3 * TERA, "copy"),
        MemoryCeiling("memory", 320 * 2**20, 1.34 * TERA, 1.33 * TERA, "add"),
    ),
    dispatch_s=3.4e-6,
    dispatch_high_s=3.9e-6,
    seconds=5.1,
)
CPU_MODEL = Model(flops_per_token=4.2e6, bytes_per_token=120e3, weight_bytes=12.86e6, operators=180)
GPU_MODEL = {
    "float32": Model(flops_per_token=320e6, bytes_per_token=2 * MB, weight_bytes=1976 * MB, operators=640),
    "bfloat16": Model(flops_per_token=320e6, bytes_per_token=1 * MB, weight_bytes=988 * MB, operators=640),
}
CPU_STATE = {
    "threads": 2,
    "interop_threads": 2,
    "affinity": [0, 1],
    "cpu_quota_cores": 2.0,
    "load_1min": 0.4,
    "float32_matmul_precision": "highest",
}
GPU_STATE = {**CPU_STATE, "threads": 16, "interop_threads": 16, "affinity": list(range(16)), "cpu_quota_cores": None}


def diagnosed(rows: Sequence[Mapping[str, Any]], gpu: bool = False) -> list[dict[str, Any]]:
    """Return the rows as step 02 leaves them when it has told what limits each measured batch size."""
    return [_diagnosed(dict(row), gpu) if row["status"] in MEASURED else dict(row) for row in rows]


def _diagnosed(row: dict[str, Any], gpu: bool) -> dict[str, Any]:
    ceilings = GPU_CEILINGS if gpu else CPU_CEILINGS
    model = GPU_MODEL[row["dtype"]] if gpu else CPU_MODEL
    configured, limits = ceilings.configured(row["dtype"]), ceilings.limits(row["dtype"])
    assert configured is not None and limits is not None
    times = _times(row, gpu)
    tokens = row["tokens_per_sec_padded"] / row["throughput_samples_per_sec_mean"] * row["batch_size"]
    flops, moved = tokens * model.flops_per_token, tokens * model.bytes_per_token
    loads = [
        OperatorLoad("aten::addmm", 0.3 * model.operators, flops, model.weight_bytes, 0.4 * moved),
        OperatorLoad("aten::add", 0.7 * model.operators, 0.0, 0.0, 0.6 * moved),
    ]
    evidence = Evidence(
        tried=Tried((_replayed(times) if gpu else _less_precise(),)),
        gains=list(_gains(row, ceilings)),
        doubts=[doubt for doubt in doubts_of(row) if doubt.kind == "noisy"],
    )
    verdict = judge(Forward(times, tuple(loads), limits, model.weight_bytes, on_host=not gpu), evidence)
    per_sample_s = row["latency_per_sample_ms_mean"] / 1e3
    unknown = Missing("no energy counter: /sys/class/powercap cannot be read")
    finding = Finding(
        batch_size=row["batch_size"],
        verdict=verdict,
        isolated_s=times.isolated_s.value,
        flops=flops,
        useful_flops=flops * (100 - row["padding_pct"]) / 100,
        moved_bytes=moved + model.weight_bytes,
        peak_flops_per_s=configured.flops_per_s,
        energy_j=300 * per_sample_s if gpu else unknown,  # watts, 60 of them idle
        energy_net_j=240 * per_sample_s if gpu else unknown,
        attention_backend="mem_efficient" if gpu else "flash",
    )
    return finding.fill(row)


def _times(row: Mapping[str, Any], gpu: bool) -> Times:
    scale, input_s = row["batch_size"] / 1e3, row["tokenize_per_batch_ms"] / 1e3
    mean, low, high = (row[f"latency_per_sample_ms_{end}"] for end in ("mean", "ci_low", "ci_high"))
    isolated = Interval(mean * scale, (low or mean) * scale, (high or mean) * scale)
    if not gpu:
        return Times(isolated, input_s=input_s, fixed_s=1.4e-3)
    device_s = row["device_per_batch_ms"] / row["latency_per_batch_ms_median"] * isolated.value
    device = Interval(device_s, 0.99 * device_s, 1.01 * device_s)
    return Times(isolated, device, row["enqueue_per_batch_ms"] / 1e3, input_s, transfer_s=2e-5, fixed_s=11e-3)


def _replayed(times: Times) -> Trial:
    ratio = times.isolated_s.value / times.working_s.value
    predicted = {"launch": (1.15, math.inf), "compute": UNCHANGED, "memory": UNCHANGED}
    return Trial(Fix("issue_at_once"), Interval(ratio, 0.98 * ratio, 1.02 * ratio), expected=predicted)


def _less_precise() -> Trial:
    medium = Fix("matmul_precision", {"precision": "medium"})
    return Trial(medium, Interval(1.62, 1.57, 1.67), expected=FASTER_MATMUL, pairs=8)


def _gains(row: Mapping[str, Any], ceilings: Ceilings) -> Iterator[Gain]:
    share = row["padding_pct"]
    yield Gain(Fix("remove_padding"), 1 / (1 - share / 100), f"{share:.0f} % of the FLOPs are of padding")
    configured = ceilings.configured(row["dtype"])
    if configured is None or row["dtype"] != "float32":
        return
    for ceiling in (ceilings.best("float32"), ceilings.best("bfloat16")):
        ratio = ceiling.flops_per_s / configured.flops_per_s
        setting = Fix("matmul_precision", {"precision": ceiling.precision}) if ceiling.precision else None
        yield Gain(setting or Fix("dtype", {"dtype": ceiling.dtype}), ratio, f"its limit is {ratio:.2f} times as high")
