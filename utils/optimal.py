"""Which batch size to use, and which targets are met."""

import math
from collections.abc import Sequence
from dataclasses import asdict

from utils.config import Targets
from utils.document import MEASURED, Choice, FittingBatch, FullDataset, MemoryForecast, Optimal, Row, Target
from utils.visits import Visit

GOOD_ENOUGH = 0.95  # of the best throughput


def optimal(rows: Sequence[Row], targets: Targets) -> Optimal:
    """Return the optimal batch size and three others.

    `batch_size`: the smallest whose throughput is surely 95 % of the best or more: the lower end of the interval of
    their ratio. In simulated sweeps it is within 5 % of the true best in 99.7 of 100 where throughputs are known to
    2 % (one standard error), in 97 at 3 %; the smallest whose interval merely reaches 95 % in 72 and 63. Beside it
    stand `max_throughput`, `within_gpu_memory` and `under_latency`. What cannot be told has the batch size None and a
    reason.
    """
    measured = [row for row in rows if row["status"] in MEASURED]
    if not measured:
        nothing = _choice(None, "no batch size was measured")
        return {**nothing, "max_throughput": nothing, "within_gpu_memory": nothing, "under_latency": nothing}
    best = _fastest(measured)
    enough = min((row for row in measured if _is_as_good(row, best)), key=lambda row: row["batch_size"])
    return {
        **_choice(enough, "the smallest batch size that is surely within 5 % of the fastest"),
        "max_throughput": _choice(best, "the highest throughput measured"),
        "within_gpu_memory": _within_memory(measured, targets.gpu_memory_mb),
        "under_latency": _under_latency(measured, targets.latency_per_sample_ms),
    }


def judge(targets: Targets, chosen: Row | None, full: FullDataset | None) -> list[Target]:
    """Return each target with the measured value and whether it is met; None and a reason where it cannot be told.

    Latency, throughput and accuracy are those of the full dataset where it was evaluated, else of the `chosen` row of
    the sweep; memory and utilisation are those of the chosen row.
    """
    chosen, full = chosen or {}, full or {}
    pass_over_data = {
        "latency_per_sample_ms": full.get("latency_per_sample_ms", chosen.get("latency_per_sample_ms_mean")),
        "throughput_samples_per_sec": full.get(
            "throughput_samples_per_sec", chosen.get("throughput_samples_per_sec_mean")
        ),
        "accuracy": full.get("accuracy"),
    }
    values = {
        **pass_over_data,
        "gpu_memory_mb": chosen.get("memory_peak_mb"),
        "gpu_utilization_pct": chosen.get("gpu_utilization_pct"),
    }
    reasons = chosen.get("reasons", {})
    missing = {
        "gpu_memory_mb": reasons.get("memory_peak_mb"),
        "gpu_utilization_pct": reasons.get("gpu_utilization_pct"),
        "accuracy": full.get("accuracy_reason") or "the full dataset was not evaluated",
    }
    return [
        _judged(name, target, values[name], missing.get(name))
        for name, target in targets.model_dump().items()
        if target is not None
    ]


def _judged(name: str, target: float, value: float | None, reason: str | None) -> Target:
    if value is None:
        return {"name": name, "target": target, "value": None, "met": None, "reason": reason or "not measured"}
    at_most = name in ("latency_per_sample_ms", "gpu_memory_mb")
    met = value <= target if at_most else value >= target
    return {"name": name, "target": target, "value": value, "met": met, "reason": None}


def _within_memory(measured: Sequence[Row], limit_mb: float | None) -> Choice:
    if limit_mb is None:
        return _choice(None, "targets.gpu_memory_mb is not set")
    known = [row for row in measured if row["memory_peak_mb"] is not None]
    if not known:
        return _choice(None, measured[0]["reasons"].get("memory_peak_mb", "no peak of GPU memory was measured"))
    within = [row for row in known if row["memory_peak_mb"] <= limit_mb]
    if not within:
        return _choice(None, f"every batch size needs more than {limit_mb:g} MB")
    return _choice(_fastest(within), f"the fastest whose peak is at most {limit_mb:g} MB")


def _under_latency(measured: Sequence[Row], limit_ms: float | None) -> Choice:
    if limit_ms is None:
        return _choice(None, "targets.latency_per_sample_ms is not set")
    name = "latency_per_sample_ms"
    under = [row for row in measured if (row[f"{name}_ci_high"] or row[f"{name}_mean"]) <= limit_ms]
    if not under:
        return _choice(None, f"every batch size takes more than {limit_ms:g} ms per sample")
    return _choice(_fastest(under), f"the fastest whose latency per sample is surely at most {limit_ms:g} ms")


def _fastest(rows: Sequence[Row]) -> Row:
    return max(rows, key=lambda row: row["throughput_samples_per_sec_mean"])


def _is_as_good(row: Row, best: Row) -> bool:
    """Tell whether the throughput of a row is 95 % of the best or more, at the lower end of the ratio's interval."""
    if row is best:
        return True
    ratio = row["throughput_samples_per_sec_mean"] / best["throughput_samples_per_sec_mean"]
    unsure = math.hypot(*((each["throughput_half_width_pct"] or 0.0) / 100 for each in (row, best)))
    return ratio * (1 - unsure) >= GOOD_ENOUGH


def _choice(row: Row | None, reason: str) -> Choice:
    if row is None:
        return {"batch_size": None, "throughput_samples_per_sec": None, "reason": reason}
    rate = row["throughput_samples_per_sec_mean"]
    return {"batch_size": row["batch_size"], "throughput_samples_per_sec": rate, "reason": reason}


GB = 1e9
USUAL_GB = (8, 16, 24)


def forecast(visits: Sequence[Visit]) -> MemoryForecast:
    """Return the largest batch of the longest texts that fits, by the first visits, which hold a batch of these.

    On a GPU the peak is what its allocator took from the device, on a CPU that of the whole process.
    """
    from boundby.memory import Peak, fit_peaks  # torch, which `told` does without

    peaks, known = [], [(each, each.memory) for each in visits if each.memory and each.of("largest")]
    for visit, memory in known:
        largest = visit.of("largest")[0]
        held = memory.get("device_peak_reserved_bytes") or memory.get("process_peak_bytes")
        if held:
            peaks.append(Peak(largest.samples, largest.tokens_padded // largest.samples, held))
    model = fit_peaks(peaks)
    if not model:
        return {"model": None, "tokens": None, "fits": [], "reason": model.reason}
    tokens = max(peak.tokens for peak in peaks)
    fits: list[FittingBatch] = []
    for size in USUAL_GB:
        samples, or_more = model.most_samples(tokens, size * GB)
        fits.append({"gb": size, "samples": samples, "or_more": or_more})
    return {"model": asdict(model), "tokens": tokens, "fits": fits, "reason": None}


def told(found: MemoryForecast) -> str:
    """Return the forecast as a sentence or two."""
    if found["model"] is None:
        return f"The largest batch that fits is not known: {found['reason']}."
    model, tokens = found["model"], found["tokens"] or 0
    each = tokens * (model["bytes_per_token"] + tokens * model["bytes_per_pair"])
    fitting = ", ".join(f"{_batch(batch)} in {batch['gb']} GB" for batch in found["fits"])
    return (
        f"Batches of the longest texts ({tokens:,} tokens) take {model['fixed_bytes'] / GB:.2g} GB and "
        f"{each / 1e6:.2g} MB for each text (off by up to {model['error']:.0%}). The largest that fit: {fitting}."
    )


def _batch(batch: FittingBatch) -> str:
    if not batch["samples"]:
        return "none"
    return f"{'more than ' if batch['or_more'] else ''}{batch['samples']:,}"
