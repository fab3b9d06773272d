"""From visits to rows: latency, throughput, memory, utilisation per batch size, as tables of CSV and JSON."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch

from boundby.device import synchronizer
from boundby.memory import MemoryMeter
from boundby.sampler import LEAST_WINDOW_S, Sampler
from boundby.stats import Estimate, Summary, drift, estimate, least_samples, summarize
from boundby.verdict import Doubt
from utils import instruments
from utils.visits import Quantity, Visit, isolated_rounds, throughput_rounds, usable

DIAGNOSED = (  # filled by utils.diagnosis after the sweep
    "energy_per_sample_j",
    "energy_per_sample_net_j",
    "flops_per_batch",
    "useful_flops_pct",
    "bytes_per_batch",
    "flops_per_sec",
    "share_of_ceiling_pct",
    "bound",
    "share_of_limit_pct",
    "confidence",
)
COLUMNS = (
    "dtype",
    "batch_size",
    "status",
    "rounds",
    "timed_batches",
    "latency_per_sample_ms_mean",
    "latency_per_sample_ms_ci_low",
    "latency_per_sample_ms_ci_high",
    "latency_per_token_ms_mean",
    "latency_per_batch_ms_mean",
    "latency_per_batch_ms_median",
    "latency_per_batch_ms_std",
    "latency_per_batch_ms_min",
    "latency_per_batch_ms_max",
    "latency_per_batch_ms_q1",
    "latency_per_batch_ms_q3",
    "latency_per_batch_ms_p90",
    "latency_per_batch_ms_p95",
    "latency_per_batch_ms_p99",
    "throughput_samples_per_sec_mean",
    "throughput_samples_per_sec_ci_low",
    "throughput_samples_per_sec_ci_high",
    "throughput_half_width_pct",
    "batches_per_sec",
    "tokens_per_sec_real",
    "tokens_per_sec_padded",
    "padding_pct",
    "tokenize_per_batch_ms",
    "cold_call_ms",
    "warmup_runs",
    "warmup_converged",
    "memory_allocated_mb",
    "memory_reserved_mb",
    "memory_peak_mb",
    "memory_peak_reserved_mb",
    "memory_cpu_mb",
    "memory_cpu_peak_mb",
    "gpu_utilization_pct",
    "gpu_power_w",
    "gpu_sm_clock_mhz",
    "cpu_utilization_pct",
    "device_per_batch_ms",
    "enqueue_per_batch_ms",
    "transfer_per_batch_ms",
    *DIAGNOSED,
    "disturbed_rounds",
    "doubts",
)
DEVICE_TIMES = ("device", "enqueue", "transfer")
SAMPLED = ("gpu_utilization_pct", "gpu_power_w", "gpu_sm_clock_mhz", "cpu_utilization_pct")
NOT_DIAGNOSED = "the sweep was not finished; the verdict is made after it"
MB = 1e6
LEAST_READINGS = 5
LEAST_DRIFT = 0.02


@dataclass(frozen=True)
class Measurement:
    """A measurement that has been started."""

    meter: MemoryMeter
    sampler: Sampler
    own: ExitStack  # ends the sampler where it is of this measurement alone
    start_s: float


class MetricsCollector:
    """Collects what is seen beside the clock, and turns visits into rows.

    Without a `sampler` each measurement starts and ends one of its own, for the device and the host.
    """

    def __init__(self, device: torch.device | str, sampler: Sampler | None = None) -> None:
        self.device = torch.device(device)
        self.sampler = sampler
        self._synchronize = synchronizer(self.device)

    def start_measurement(self) -> Measurement:
        """Start to watch time, memory and utilisation; give the result to `end_measurement`."""
        own = ExitStack()
        sampler = self.sampler or own.enter_context(Sampler(instruments.source(self.device)))
        meter = MemoryMeter(self.device)
        meter.start()
        return Measurement(meter, sampler, own, sampler.clock())

    def end_measurement(self, measurement: Measurement, batch_size: int, num_samples: int) -> dict[str, Any]:
        """Return what happened since `measurement` was started, all work that the device was given included.

        Keys: `batch_size`, `num_samples`, `window_s`, from these `latency_per_sample_ms`, `latency_per_batch_ms`,
        `throughput_samples_per_sec` and `batches_per_sec`; `memory` (the fields of `boundby.memory.MemoryUse`, bytes),
        `readings` (lists by quantity of `boundby.sampler.Reading`) and `reading_reasons` for quantities without any.
        Raises ValueError for less than one sample or a batch size below 1.
        """
        if num_samples < 1 or batch_size < 1:
            raise ValueError(f"num_samples is {num_samples} and batch_size {batch_size}; both must be 1 or more")
        sampler = measurement.sampler
        self._synchronize()
        end = sampler.clock()
        memory = measurement.meter.stop()
        measurement.own.close()
        window_s, batches = end - measurement.start_s, -(-num_samples // batch_size)
        return {
            "batch_size": batch_size,
            "num_samples": num_samples,
            "window_s": window_s,
            "latency_per_sample_ms": 1e3 * window_s / num_samples,
            "latency_per_batch_ms": 1e3 * window_s / batches,
            "throughput_samples_per_sec": num_samples / window_s if window_s else None,
            "batches_per_sec": batches / window_s if window_s else None,
            "memory": asdict(memory),
            "readings": sampler.by_quantity(measurement.start_s, end),
            "reading_reasons": {name: why for name in SAMPLED if (why := sampler.why_not(name))},
        }

    def rows(self, visits: Sequence[Visit], batch_sizes: Sequence[int], half_width: float) -> list[dict[str, Any]]:
        """Return one row per batch size with the keys of `COLUMNS`, `reasons` for what is None, and a list of `doubts`.

        A row whose throughput is less certain than `half_width` (a share) has the status `noisy`.
        """
        rows = []
        out_of_memory_at: int | None = None
        for batch_size in sorted(batch_sizes):
            chosen = [visit for visit in visits if visit.batch_size == batch_size]
            failed = next((visit for visit in chosen if visit.status != "ok"), None)
            if failed:
                rows.append(_empty_row(batch_size, failed.status, failed.message or failed.status, failed.dtype))
                if failed.status == "oom":
                    out_of_memory_at = out_of_memory_at or batch_size
            elif out_of_memory_at and not chosen:
                reason = f"batch size {out_of_memory_at} ran out of memory"
                rows.append(_empty_row(batch_size, "skipped_oom", reason, visits[0].dtype))
            elif chosen:
                rows.append(_row(chosen, half_width))
        return rows


def _empty_row(batch_size: int, status: str, reason: str, dtype: str) -> dict[str, Any]:
    row: dict[str, Any] = dict.fromkeys(COLUMNS)
    row |= {"dtype": dtype, "batch_size": batch_size, "status": status, "doubts": [], "doubt_kinds": []}
    return {**row, "reasons": {"all": reason}}


def _row(visits: Sequence[Visit], half_width: float) -> dict[str, Any]:
    first, counted = visits[0], usable(visits)
    latency = estimate(isolated_rounds(counted))
    interval = estimate(throughput_rounds(counted))
    batches = summarize([timing.seconds for visit in counted for timing in visit.of("isolated")])
    is_noisy = interval.half_width is None or interval.half_width > half_width
    row: dict[str, Any] = dict.fromkeys(COLUMNS)
    row |= {
        "dtype": first.dtype,
        "batch_size": first.batch_size,
        "status": "noisy" if is_noisy else "ok",
        "rounds": len(counted),
        "timed_batches": batches.n,
        **_latency(latency, batches),
        **_throughput(interval, latency, visits),
        **_beside(visits),
        **{f"{name}_per_batch_ms": _milliseconds(per_batch(counted, name)) for name in DEVICE_TIMES},
    }
    doubts = [*_doubts(counted, batches, interval, half_width), *_disturbed(counted)]
    row |= {"doubts": [str(doubt) for doubt in doubts], "doubt_kinds": [doubt.kind for doubt in doubts]}
    return {**row, "reasons": _reasons(row, visits, batches)}


def _latency(latency: Estimate, batches: Summary) -> dict[str, Any]:
    per_batch = {
        "mean": batches.mean,
        "median": batches.median,
        "std": batches.std,
        "min": batches.minimum,
        "max": batches.maximum,
        "q1": batches.q1,
        "q3": batches.q3,
        "p90": batches.p90,
        "p95": batches.p95,
        "p99": batches.p99,
    }
    return {
        "latency_per_sample_ms_mean": latency.value * 1e3,
        "latency_per_sample_ms_ci_low": _milliseconds(latency.low),
        "latency_per_sample_ms_ci_high": _milliseconds(latency.high),
        **{f"latency_per_batch_ms_{name}": _milliseconds(value) for name, value in per_batch.items()},
    }


def _throughput(interval: Estimate, latency: Estimate, visits: Sequence[Visit]) -> dict[str, Any]:
    """Return rates; seconds per sample turn into samples per second, so the interval's ends change places."""
    timed = visits[0].of("isolated")[: visits[0].batches]  # one pass over the batches; every visit has the same
    samples = sum(timing.samples for timing in timed)
    real = sum(timing.tokens_real for timing in timed) / samples
    padded = sum(timing.tokens_padded for timing in timed) / samples
    return {
        "throughput_samples_per_sec_mean": 1 / interval.value,
        "throughput_samples_per_sec_ci_low": 1 / interval.high if interval.high else None,
        "throughput_samples_per_sec_ci_high": 1 / interval.low if interval.low else None,
        "throughput_half_width_pct": interval.half_width * 100 if interval.half_width is not None else None,
        "batches_per_sec": 1 / interval.value / visits[0].batch_size,
        "latency_per_token_ms_mean": latency.value * 1e3 / real,
        "tokens_per_sec_real": real / interval.value,
        "tokens_per_sec_padded": padded / interval.value,
        "padding_pct": 100 * (1 - real / padded),
    }


def _beside(visits: Sequence[Visit]) -> dict[str, Any]:
    """Return what was seen beside the clock: the cold call, warm-up, memory, utilisation."""
    first = visits[0]
    cold = first.of("cold")
    tokenize = summarize([timing.seconds / visit.batches for visit in visits for timing in visit.of("tokenize")])
    return {
        "tokenize_per_batch_ms": tokenize.median * 1e3,
        "cold_call_ms": cold[0].seconds * 1e3 if cold else None,
        "warmup_runs": (first.warm_up or {}).get("runs"),
        "warmup_converged": (first.warm_up or {}).get("converged"),
        "memory_allocated_mb": _most_mb(visits, "device_allocated_bytes"),
        "memory_reserved_mb": _most_mb(visits, "device_reserved_bytes"),
        "memory_peak_mb": _most_mb(visits, "device_peak_allocated_bytes"),
        "memory_peak_reserved_mb": _most_mb(visits, "device_peak_reserved_bytes"),
        "memory_cpu_mb": _most_mb(visits, "process_bytes"),
        "memory_cpu_peak_mb": _most_mb(visits, "process_peak_bytes"),
        **{name: _sampled(visits, name)[0] for name in SAMPLED},
        "disturbed_rounds": sum(visit.is_disturbed for visit in visits),
    }


def per_batch(visits: Sequence[Visit], quantity: Quantity) -> float | None:
    """Return the seconds of the mean batch, the median of all visits, or None where none was timed."""
    seconds = [value for visit in visits if (value := visit.seconds_per_batch(quantity)) is not None]
    return median(seconds) if seconds else None


def _sampled(visits: Sequence[Visit], quantity: str) -> tuple[float | None, str | None]:
    """Return the mean of what was read beside all visits, or the reason why there is none."""
    readings = [value for visit in visits for value in visit.readings.get(quantity, ())]
    window = sum(visit.window_s for visit in visits)
    if not readings and quantity in visits[0].reading_reasons:
        return None, visits[0].reading_reasons[quantity]
    if window < LEAST_WINDOW_S or len(readings) < LEAST_READINGS:
        few = f"{len(readings)} readings in {window:.1f} s"
        return None, f"{few}; a mean takes {LEAST_READINGS} in {LEAST_WINDOW_S:.0f} s"
    return sum(readings) / len(readings), None


def _reasons(row: dict[str, Any], visits: Sequence[Visit], batches: Summary) -> dict[str, str]:
    """Return why each None of the row is None."""
    reasons = dict.fromkeys(DIAGNOSED, NOT_DIAGNOSED)
    device_reason = "; ".join((visits[0].memory or {}).get("reasons", ()))
    for name in (name for name in COLUMNS if row[name] is None and name not in reasons):
        if name.startswith("memory_"):
            reasons[name] = device_reason
        elif name in SAMPLED:
            reasons[name] = _sampled(visits, name)[1] or "unknown"
        elif name.removesuffix("_per_batch_ms") in DEVICE_TIMES:
            reasons[name] = visits[0].device_reason or "unknown"
        elif name[-4:] in ("_p90", "_p95", "_p99"):
            needed = least_samples(int(name[-2:]) / 100)
            reasons[name] = f"{batches.n} timed batches; at least {needed} support it"
        elif name.endswith("_std"):
            reasons[name] = "one timed batch has no spread"
        elif "ci_" in name or "half_width" in name:
            reasons[name] = "one round gives no interval"
        else:
            reasons[name] = "the first visit did not record it"
    return reasons


def _doubts(visits: Sequence[Visit], batches: Summary, interval: Estimate, half_width: float) -> list[Doubt]:
    doubts = []
    if interval.half_width is None:
        text = "one round gives no interval; raise num_measurement_runs or max_seconds_per_batch_size"
        doubts.append(Doubt("noisy", text))
    elif interval.half_width > half_width:
        text = (
            f"the 95 % interval is +-{100 * interval.half_width:.1f} %, wider than the {100 * half_width:.1f} % "
            "asked for; quiet the machine or raise max_seconds_per_batch_size"
        )
        doubts.append(Doubt("noisy", text))
    if (visits[0].warm_up or {}).get("converged") is False:
        doubts.append(Doubt("warm-up", "it did not converge"))
    if batches.outliers:
        text = f"{batches.outliers} of {batches.n} batches lie ten standard deviations or more from the median"
        doubts.append(Doubt("outliers", text))
    moved = drift(throughput_rounds(visits))
    if moved is not None and abs(moved) > max(LEAST_DRIFT, half_width, interval.half_width or 0.0):
        direction = "longer" if moved > 0 else "shorter"
        text = f"the last third of the rounds took {100 * abs(moved):.1f} % {direction} than the first"
        doubts.append(Doubt("drift", text))
    seen = {doubt for visit in visits for doubt in (visit.memory or {}).get("doubts", ())}
    return doubts + [Doubt("memory", text) for text in sorted(seen)]


def _disturbed(visits: Sequence[Visit]) -> list[Doubt]:
    """Return one doubt on the disturbances of the visits that count, or none."""
    found: dict[str, list[str]] = {}
    for visit in visits:
        for each in visit.disturbances:
            found.setdefault(each["kind"], []).append(each["text"])
    rounds = sum(bool(visit.disturbances) for visit in visits)
    examples = "; ".join(f"{texts[0]} (in {len(texts)})" for texts in found.values())
    return [Doubt("disturbed", f"{rounds} of {len(visits)} rounds: {examples}")] if found else []


def _most_mb(visits: Sequence[Visit], field: str) -> float | None:
    values = [value for visit in visits if (value := (visit.memory or {}).get(field)) is not None]
    return max(values) / MB if values else None


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1e3
