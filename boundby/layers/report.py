"""What `ObservabilityEngine.profile` returns: the profile, and the times of every run behind it. Loads no torch."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from boundby.layers.ranking import blocks, label
from boundby.layers.records import LayerProfile, ModelProfile

MOST_BOTTLENECKS = 5


@dataclass(frozen=True)
class LayerSamples:
    """The seconds of one call path in every run; those of the device are None where it has none."""

    calls: tuple[int, ...]
    host_self_s: tuple[float, ...]
    host_inclusive_s: tuple[float, ...]
    device_self_s: tuple[float, ...] | None
    device_inclusive_s: tuple[float, ...] | None


@dataclass(frozen=True)
class Report:
    """A profile with the samples of each call path. `str(report)` says where the time goes."""

    profile: ModelProfile
    samples: Mapping[str, LayerSamples]

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield one row per run and call path that has times, as `*_metrics.jsonl` holds them."""
        for run in range(self.profile.num_runs):
            for layer in self.profile.layers:
                if layer.path in self.samples:
                    yield _row(layer, self.samples[layer.path], run)

    def __str__(self) -> str:
        """Return end-to-end time, how far the profile can be trusted, and the top bottlenecks, one a line."""
        profile = self.profile
        lines = [
            f"{profile.profile_name}: {profile.reference_s.median * 1e3:.2f} ms end to end (median of "
            f"{profile.num_runs} runs), coverage {100 * profile.coverage.ratio:.1f} % ({profile.coverage.status}), "
            f"overhead {100 * profile.overhead:+.1f} %"
        ]
        for number, row in enumerate(blocks(profile)[:MOST_BOTTLENECKS], 1):
            lines.append(f"{number:3}. {row.label}: {100 * row.share:.1f} % ({row.seconds * 1e3:.2f} ms)")
        return "\n".join([*lines, *(f"doubt: {each}" for each in profile.doubts)])


def _row(layer: LayerProfile, samples: LayerSamples, run: int) -> dict[str, Any]:
    device_ms = _ms(samples.device_inclusive_s, run)
    device_self_ms = _ms(samples.device_self_s, run)
    host_ms, host_self_ms = _ms(samples.host_inclusive_s, run), _ms(samples.host_self_s, run)
    peak = None
    if layer.memory_before_bytes is not None and layer.activation_peak_bytes is not None:
        peak = layer.memory_before_bytes + layer.activation_peak_bytes
    p95 = layer.inclusive_s.p95 if layer.inclusive_s else None
    return {
        "run": run,
        "layer_name": label(layer.path),
        "module_name": layer.name,
        "layer_type": layer.type,
        "depth": layer.depth,
        "calls": samples.calls[run],
        "forward_latency_ms": host_ms if device_ms is None else device_ms,
        "self_latency_ms": host_self_ms if device_self_ms is None else device_self_ms,
        "host_latency_ms": host_ms,
        "host_self_latency_ms": host_self_ms,
        "device_latency_ms": device_ms,
        "device_self_latency_ms": device_self_ms,
        "p95_latency_ms": None if p95 is None else p95 * 1e3,
        "peak_vram_after": peak,
        "peak_vram_after_bytes": peak,
        "num_parameters": layer.parameters,
        "input_shapes": list(layer.input_shapes),
        "output_shapes": list(layer.output_shapes),
    }


def _ms(seconds: tuple[float, ...] | None, run: int) -> float | None:
    return None if seconds is None else seconds[run] * 1e3
