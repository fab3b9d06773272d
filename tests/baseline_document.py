"""Realistic results of steps 02 and 03 for the tests of plots and report; the rows come from `MetricsCollector`."""

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from boundby import files
from boundby.machine import MemoryUse
from boundby.timing.timer import WarmUp
from boundby.trace.operator_table import OPERATOR_COLUMNS
from tests.diagnosed_rows import CPU_CEILINGS, CPU_STATE, GPU_CEILINGS, GPU_STATE
from utils.baseline import columns
from utils.baseline.columns import NOT_DIAGNOSED
from utils.baseline.optimum import judge, optimal
from utils.baseline.rounds import Timing, Visit
from utils.command.artifacts import METRICS_VERSION, Layout
from utils.settings.schema import Config, Targets

BATCHES = 10  # per visit, as profiling.num_measurement_runs
LEAST_VISIT_S = 0.4
MOST_PASSES = 20
FINGERPRINT = "0123abcd"  # of the model
CPU_FINGERPRINT, GPU_FINGERPRINT = "c0" * 8, "9b" * 8  # of the machines
DATA_SHA256 = "ab" * 32
PLAN = "51" * 32  # of the evaluation


@dataclass(frozen=True)
class Speed:
    """A machine that needs `fixed_s` per batch and `token_s` per padded token; queued calls hide `hidden_s` of it."""

    fixed_s: float
    token_s: float
    hidden_s: float = 0.0
    tokenize_s: float = 4e-6  # per token
    noise: float = 0.003  # standard deviation of one timing, as a share
    drift: float = 0.002  # of one round


CPU = Speed(fixed_s=1.4e-3, token_s=22e-6)
GPU = {
    "float32": Speed(fixed_s=11e-3, token_s=19e-6, hidden_s=1e-3),
    "bfloat16": Speed(fixed_s=12e-3, token_s=2.6e-6, hidden_s=1e-3),
}
CPU_MEMORY = {"process_bytes": 610e6, "process_peak_bytes": 702e6, "reasons": ["the CPU allocator keeps no statistics"]}


def lengths(count: int, seed: int = 0) -> list[int]:
    """Return long-tailed token lengths of at most 512."""
    source = random.Random(seed)
    return [max(4, min(512, round(source.lognormvariate(3.9, 0.7)))) for _ in range(count)]


def visit(dtype: str, batch_size: int, number: int, speed: Speed, memory: Mapping[str, Any], gpu: bool) -> Visit:
    """Return one finished visit of round `number`."""
    source = random.Random(f"{dtype}-{batch_size}-{number}")
    texts = lengths(BATCHES * batch_size)
    groups = [texts[start * batch_size : (start + 1) * batch_size] for start in range(BATCHES)]
    drift = source.gauss(1, speed.drift)

    def timing(quantity: Any, index: int, seconds: float, chosen: Sequence[Sequence[int]]) -> Timing:
        real = sum(map(sum, chosen))
        padded = sum(max(group) * len(group) for group in chosen)
        noisy = max(0.2, source.gauss(drift, speed.noise))
        return Timing(quantity, index, seconds * noisy, sum(map(len, chosen)), real, padded)

    def seconds(group: Sequence[int]) -> float:
        return speed.fixed_s + speed.token_s * max(group) * len(group)

    one_pass = sum(map(seconds, groups))
    passes = min(math.ceil(LEAST_VISIT_S / one_pass), MOST_PASSES)
    timings = [timing("cold", 0, seconds(groups[0]) * 3 + 0.2, groups[:1])] if number == 0 else []
    timings.append(timing("tokenize", 0, speed.tokenize_s * sum(texts), groups))
    timings += [timing("isolated", i, seconds(group), [group]) for _ in range(passes) for i, group in enumerate(groups)]
    if gpu:
        timings.append(timing("pipelined", 0, passes * (one_pass - BATCHES * speed.hidden_s), groups * passes))
        for index, group in enumerate(groups):
            timings.append(timing("device", index, seconds(group) - 0.95 * speed.fixed_s, [group]))
            timings.append(timing("enqueue", index, 0.8 * speed.fixed_s, [group]))
            timings.append(timing("transfer", index, 2e-5, [group]))
    return Visit(
        dtype=dtype,
        batch_size=batch_size,
        round=number,
        status="ok",
        session="test",
        timings=tuple(timings),
        spent_s=sum(timing.seconds for timing in timings[2:]),
        batches=BATCHES,
        warm_up=WarmUp(12, 0.4, converged=True),
        memory=MemoryUse(**memory),
        readings={"gpu_utilization_pct": [min(100.0, 35 + 14 * math.log2(batch_size))] * 12} if gpu else {},
        device_reason=None if gpu else "the device is not a GPU",
        reading_reasons={} if gpu else {"gpu_utilization_pct": "the device is not a GPU"},
        window_s=5.0,
        truncated=0,
    )


def gpu_memory(dtype: str, batch_size: int) -> dict[str, Any]:
    held = 1976e6 if dtype == "float32" else 988e6
    peak = held + batch_size * 512 * (2.1e6 if dtype == "float32" else 1.1e6)
    return {
        **CPU_MEMORY,
        "reasons": [],
        "device_allocated_bytes": held,
        "device_reserved_bytes": peak * 1.12,
        "device_peak_allocated_bytes": peak,
        "device_peak_reserved_bytes": peak * 1.12,
    }


def cpu_rows(
    batch_sizes: Sequence[int] = (1, 2, 4, 8, 16, 32),
    rounds: int = 5,
    speed: Speed = CPU,
    noisy: Sequence[int] = (),
    failed: Sequence[int] = (),
) -> list[dict[str, Any]]:
    """Return the rows of a sweep on a CPU; `noisy` batch sizes spread too much and `failed` ones raised an error."""
    restless = Speed(speed.fixed_s, speed.token_s, speed.hidden_s, speed.tokenize_s, noise=0.1, drift=0.12)
    visits = []
    for size in batch_sizes:
        if size in failed:
            visits.append(Visit("float32", size, 0, "failed", "test", message="RuntimeError: kernel missing"))
            continue
        chosen = restless if size in noisy else speed
        visits += [visit("float32", size, number, chosen, CPU_MEMORY, gpu=False) for number in range(rounds)]
    return columns.rows(visits, batch_sizes, 0.03)


def gpu_rows(
    dtypes: Sequence[str] = ("float32", "bfloat16"),
    batch_sizes: Sequence[int] = (1, 4, 8, 16, 32, 64, 128),
    oom_at: Mapping[str, int] | None = None,
) -> list[dict[str, Any]]:
    """Return the rows of a sweep on a GPU that runs out of memory at the batch sizes `oom_at`."""
    oom_at = {"float32": 64, "bfloat16": 128} if oom_at is None else oom_at
    rows = []
    for dtype in dtypes:
        limit = oom_at.get(dtype, math.inf)
        visits = [
            visit(dtype, size, number, GPU[dtype], gpu_memory(dtype, size), gpu=True)
            for number in range(5)
            for size in batch_sizes
            if size < limit
        ]
        if limit in batch_sizes:
            message = "OutOfMemoryError: CUDA out of memory. Tried to allocate 15.06 GiB"
            visits.append(Visit(dtype, int(limit), 0, "oom", "test", message=message))
        rows += columns.rows(visits, batch_sizes, 0.01)
    return rows


def full_metrics(rows: int = 2000, seconds: float = 9.5, **changes: Any) -> dict[str, Any]:
    tokenizing, computing = 0.08 * seconds, 0.91 * seconds
    return {
        "samples": rows, "correct": round(0.9125 * rows), "accuracy": round(0.9125 * rows) / rows,
        "f1_macro": 0.8934, "f1_weighted": 0.9118, "accuracy_ci_low": 0.8993, "accuracy_ci_high": 0.9241,
        "mean_confidence": 0.941, "ece": 0.0312, "ece_by_chance": 0.0127, "brier_score": 0.0671,
        "inference_time_s": seconds, "worker_time_s": seconds, "machine_time_s": seconds, "device_time_s": seconds,
        "machine_time_reason": None, "accuracy_reason": None, "tokenize_time_s": tokenizing,
        "phases_s": {"tokenize": tokenizing, "transfer": 0.001 * seconds, "compute": computing, "wait": 0.0},
        "latency_per_sample_ms": 1e3 * seconds / rows, "throughput_samples_per_sec": rows / seconds,
        "tokens_per_sec_real": 62 * rows / seconds, "useful_tokens": 62 * rows,
        "computed_tokens": round(62 * rows / 0.969), "padding_pct": 3.1, "computed_texts": rows, "guarded_texts": 0,
        "truncated": 0, "out_of_memory": 0, "token_budget": 2048, "dtype": "float32", "precision": "float32",
        "strategy": "padded", "trim": False, "compile": False, "exactness": None,
        "exactness_reason": "not measured: that would take about 60 s, all texts about 10 s", "labels_doubt": None,
        "plan": PLAN,
        "useful_flops_per_sec": None, "share_of_ceiling_pct": None, "ceiling_flops_per_sec": None,
        "share_of_ceiling_reason": "the FLOPs of a forward were not counted", "gpu_mem_used": None,
        "gpu_mem_used_mb": None, "gpu_mem_used_reason": "the CPU allocator keeps no statistics",
        "cpu_mem_peak_mb": 734.2, **changes,
    }  # fmt: skip


QUICK_TARGETS = {"latency_per_sample_ms": 50, "throughput_samples_per_sec": 100, "accuracy": 0.85}
POD_TARGETS = {**QUICK_TARGETS, "gpu_memory_mb": 20000, "gpu_utilization_pct": 80, "accuracy": 0.92}


def document(rows: Sequence[dict[str, Any]], targets: Targets | None = None, **changes: Any) -> dict[str, Any]:
    """Return the content of baseline_metrics.json for these rows, that of the offline default but for `changes`."""
    targets = targets or Targets(**QUICK_TARGETS)
    first = [row for row in rows if row["dtype"] == rows[0]["dtype"]] if rows else []
    best = optimal(first, targets)
    chosen = next((row for row in first if row["batch_size"] == best["batch_size"]), None)
    full = changes.pop("full_dataset_metrics", full_metrics())
    is_diagnosed = any(row["bound"] for row in rows)
    return {
        "schema_version": METRICS_VERSION,
        "boundby_version": "0.1.0",
        "written": "2026-08-22T10:15:30+00:00",
        "complete": True,
        "machine_fingerprint": CPU_FINGERPRINT,
        "work_fingerprint": "feedfacecafebeef",
        "synthetic": True,
        "model": {
            "name": "quickstart",
            "origin": "quickstart",
            "revision": None,
            "fingerprint": FINGERPRINT,
            "type": "qwen2",
            "parameters_total": 3_214_592,
            "parameters_trainable": 3_214_592,
            "size_mb": 12.86,
            "dtype": "float32",
            "num_labels": 23,
            "max_positions": 1024,
            "load_time_s": 0.412,
        },
        "dataset": {
            "source": {"kind": "quickstart", "name": "quickstart", "split": "validation", "revision": None},
            "path": "data/quickstart/val_df.csv",
            "bytes": 812_345,
            "sha256": DATA_SHA256,
            "rows": 2000,
            "columns": ["text", "label_name"],
            "has_labels": True,
        },
        "device": {"type": "cpu", "threads": 2},
        "agreement": {"rows": 64, "same_labels": 64, "share": 1.0},
        "ceilings": CPU_CEILINGS if is_diagnosed else None,
        "ceilings_reason": None if is_diagnosed else NOT_DIAGNOSED,
        "machine_state": CPU_STATE,
        "max_length": 512,
        "batch_sizes": list(rows),
        "optimal": best,
        "full_dataset_metrics": full,
        "full_dataset_reason": None if full else "evaluation.enabled is false",
        "memory": {"model": None, "tokens": None, "fits": [], "reason": "the largest batches were not timed"},
        "targets": judge(targets, chosen, full),
        "doubts": [],
        **changes,
    }


def gpu_document(rows: Sequence[dict[str, Any]] | None = None, **changes: Any) -> dict[str, Any]:
    """Return the document of the pod run, which runs out of memory in float32 at batch size 64."""
    full = full_metrics(
        rows=369_475,
        seconds=742.6,
        accuracy_ci_low=0.9116,
        accuracy_ci_high=0.9134,
        truncated=1204,
        gpu_mem_used=17_412.0,
        gpu_mem_used_mb=17_412.0,
        gpu_mem_used_reason=None,
        token_budget=16384,
    )
    model = {
        "name": "codefactory4791/intent-classification-qwen", "origin": "hub",
        "revision": "5f0c6f7a4d2b3e1908a7b6c5d4e3f2a1908b7c6d", "fingerprint": FINGERPRINT, "type": "qwen2",
        "parameters_total": 494_033_920, "parameters_trainable": 494_033_920, "size_mb": 1976.14, "dtype": "float32",
        "num_labels": 23, "max_positions": 32768, "load_time_s": 4.81,
    }  # fmt: skip
    source = {"kind": "hub", "name": "codefactory4791/amazon_test", "split": "test", "revision": "c0ffee" * 6 + "abcd"}
    rows = gpu_rows() if rows is None else rows
    ceilings = {"ceilings": GPU_CEILINGS} if any(row["bound"] for row in rows) else {}
    return document(
        rows,
        Targets(**POD_TARGETS),
        **{
            **ceilings,
            "machine_state": GPU_STATE,
            "synthetic": False,
            "machine_fingerprint": GPU_FINGERPRINT,
            "model": model,
            "dataset": {"source": source, "path": "data/val_df.csv", "sha256": DATA_SHA256, "rows": 369_475},
            "device": {
                "type": "cuda",
                "name": "NVIDIA A100-SXM4-40GB",
                "memory_bytes": 42_410_770_432,
                "capability": "8.0",
                "multiprocessors": 108,
                "cuda": "12.8",
            },
            "full_dataset_metrics": full,
            **changes,
        },
    )


CPU_MACHINE = {
    "cpu": "AMD EPYC 7B13", "architecture": "x86_64", "logical_cores": 8, "usable_cores": 2, "cpu_quota_cores": 2.0,
    "memory_bytes": 8_589_934_592, "gpus": [], "driver": None, "gpus_reason": "NVML Shared Library Not Found",
}  # fmt: skip
GPU_MACHINE = {
    **CPU_MACHINE, "logical_cores": 64, "usable_cores": 16, "cpu_quota_cores": None, "memory_bytes": 125_000_000_000,
    "gpus": [{"name": "NVIDIA A100-SXM4-40GB", "memory_bytes": 42_949_672_960}], "driver": "570.86.15",
}  # fmt: skip
VERSIONS = {"python": "3.11.9", "torch": "2.13.0", "transformers": "5.23.0", "tokenizers": "0.22.1"}


def operators(device: bool = False) -> list[dict[str, Any]]:
    """Return rows of op_stats.csv: the same operator may stand several times, with other shapes."""
    shares = [
        ("aten::addmm", "[[2304], [64, 768], [768, 2304]]", 96, 30.0, 38.0),
        ("aten::addmm", "[[768], [64, 3072], [3072, 768]]", 96, 22.0, 24.0),
        ("aten::bmm", "[[48, 32, 64], [48, 64, 32]]", 96, 9.5, 6.0),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", None, 48, 11.0, 9.0),
        ("aten::gelu", None, 48, 7.5, 5.5), ("aten::native_layer_norm", None, 100, 6.0, 4.5),
        ("aten::copy_", None, 250, 4.0, 3.0), ("aten::linear", None, 288, 3.0, 68.0),
        ("aten::add", None, 192, 2.5, 4.0), ("aten::_softmax", None, 48, 1.5, 2.0),
        ("aten::transpose", None, 400, 1.2, 0.0), ("aten::view", None, 900, 0.9, 0.0),
        ("aten::embedding", None, 3, 0.5, 0.4), ("aten::empty", None, 120, 0.4, 0.0),
    ]  # fmt: skip
    return [
        {
            "name": name,
            "input_shapes": shapes,
            "calls": calls,
            "cpu_total_ms": 3.4 * cpu,
            "cpu_self_ms": 1.62 * cpu,
            "cpu_self_pct": cpu,
            "device_total_ms": 4.2 * gpu if device else None,
            "device_pct": gpu if device else None,
        }
        for name, shapes, calls, cpu, gpu in shares
    ]


def manifest(**changes: Any) -> dict[str, Any]:
    """Return what step 03 says about its trace."""
    return {
        "schema_version": 1, "batch_size": 8, "batch_size_reason": "the optimal batch size in baseline_metrics.json",
        "dtype": "float32", "operators": 13, "activities": ["CPU"], "steps_expected": 3,
        "steps_recorded": 3, "trace_path": "results/profiler_traces/trace.json.gz", "trace_bytes": 81_234,
        "stacks_path": "results/profiler_traces/stacks.txt", "seconds": 2.4, "downgrades": [],
        "unavailable": [{"what": "device events", "reason": "the profiler of this torch records none for cpu"}],
        "warnings": [], **changes,
    }  # fmt: skip


def config(results: Path, **sections: Any) -> Config:
    """Return the settings of the offline default with their results in `results`."""
    return Config.model_validate(
        {
            "model": {"name": "quickstart"},
            "dataset": {"quickstart": True},
            "targets": QUICK_TARGETS,
            "output": {"results_dir": str(results)},
            **sections,
        }
    )


def store(
    layout: Layout,
    content: Mapping[str, Any],
    *,
    op_rows: Sequence[Mapping[str, Any]] | None = None,
    trace: Mapping[str, Any] | None = None,
    machine: Mapping[str, Any] = CPU_MACHINE,
) -> None:
    """Write what steps 02 and 03 leave in the results folder."""
    inputs = {"dataset": DATA_SHA256, "model": content["model"].get("fingerprint")}
    parts = {"machine": machine, "versions": VERSIONS, "environment": {"OMP_NUM_THREADS": "2"}, "inputs": inputs}
    files.write_json(layout.metrics, content)
    files.write_json(layout.receipt("02"), {"schema_version": 1, "status": "ok", "parts": parts})
    if op_rows is not None:
        files.write_csv(layout.op_stats, op_rows, OPERATOR_COLUMNS)
        files.write_json(layout.receipt("03"), {"schema_version": 1, "status": "ok", "parts": parts})
    if trace is not None:
        files.write_json(layout.trace_manifest, trace)
