"""What `ObservabilityEngine.profile` returns, the profile and the times of every run behind it, and the files of both.

`*_metrics.jsonl` is for pandas, `*_summary.json` for people and programs. Loads no torch.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from boundby import files
from boundby.layers.ranking import Ranked, blocks, by_self_time, label
from boundby.layers.records import Coverage, LayerProfile, ModelProfile

SCHEMA_VERSION = 2
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
        lines += [text for text in [passes_text(profile)] if text]
        for number, row in enumerate(blocks(profile)[:MOST_BOTTLENECKS], 1):
            lines.append(f"{number:3}. {row.label}: {100 * row.share:.1f} % ({row.seconds * 1e3:.2f} ms)")
        return "\n".join([*lines, *(f"doubt: {doubt}" for doubt in profile.doubts)])


def passes_text(profile: ModelProfile) -> str:
    """Return what reading the prompt and adding tokens take where a text was generated, else nothing."""
    texts = []
    for layer in profile.passes:
        spent = layer.inclusive_s
        if spent and layer.calls:
            per_pass = f" of {1e3 * spent.median / layer.calls:.2f} ms" if layer.calls > 1 else ""
            passes = "1 pass" if layer.calls == 1 else f"{layer.calls:g} passes"
            texts.append(f"{layer.name}: {1e3 * spent.median:.2f} ms, {passes}{per_pass}")
    return "; ".join(texts)


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


def write_metrics(path: str | Path, report: Report) -> int:
    """Replace `path` by one JSON object per run and call path, a line each; return the number of lines."""
    lines = [files.encode_json(row) for row in report.rows()]
    files.write_text(path, "".join(f"{line}\n" for line in lines))
    return len(lines)


class Latency(msgspec.Struct, frozen=True):
    """The end-to-end time of the runs without probes."""

    mean_ms: float
    total_ms: float  # of all runs
    p50_ms: float
    p95_ms: float | None
    min_ms: float
    max_ms: float


class Pass(msgspec.Struct, frozen=True):
    """Reading the prompt or adding tokens, where a text was generated: all passes of the kind in a run."""

    name: str
    calls: float
    latency_ms: float | None
    latency_per_pass_ms: float | None


class Bottleneck(msgspec.Struct, frozen=True):
    """A row of a ranking, as people look for it."""

    layer_name: str
    layer_type: str
    latency_ms: float
    pct: float
    gain_at_limit_ms: float | None


class SummaryFile(msgspec.Struct, frozen=True):
    """A `*_summary.json`: what people look for first, then all of the profile."""

    schema_version: int
    profile_name: str
    model_name: str
    shape: str | None
    num_runs: int
    total_layers: int  # that were called
    end_to_end_latency: Latency
    passes: tuple[Pass, ...]
    bottlenecks: tuple[Bottleneck, ...]
    rankings: dict[str, tuple[Bottleneck, ...]]
    coverage: Coverage
    overhead: float
    doubts: tuple[str, ...]
    reasons: dict[str, str]
    profile: ModelProfile


def write_summary(path: str | Path, profile: ModelProfile) -> None:
    """Replace `path` by the summary of the profile, which `read_profile` reads back."""
    files.write_json(path, msgspec.to_builtins(summary(profile)))


def read_profile(path: str | Path) -> ModelProfile:
    """Return the profile in a `*_summary.json`. Raises OSError, or ValueError that names the file and the place."""
    try:
        document = files.read_as(path, SummaryFile)
    except ValueError as error:
        raise ValueError(f"{error}: this is no summary of a profile by layer; profile the model again") from None
    if document.schema_version != SCHEMA_VERSION:
        raise ValueError(
            f"{path} is of schema version {document.schema_version}, not {SCHEMA_VERSION}; profile the model again"
        )
    return document.profile


def summary(profile: ModelProfile) -> SummaryFile:
    """Return the profile with what people look for first."""
    ranked = [(row, _bottleneck(row)) for row in blocks(profile)]
    end_to_end = profile.reference_s
    return SummaryFile(
        schema_version=SCHEMA_VERSION,
        profile_name=profile.profile_name,
        model_name=profile.model_name,
        shape=profile.shape,
        num_runs=profile.num_runs,
        total_layers=sum(layer.calls > 0 for layer in profile.layers),
        end_to_end_latency=Latency(
            mean_ms=end_to_end.mean * 1e3,
            total_ms=end_to_end.mean * end_to_end.n * 1e3,
            p50_ms=end_to_end.median * 1e3,
            p95_ms=None if end_to_end.p95 is None else end_to_end.p95 * 1e3,
            min_ms=end_to_end.minimum * 1e3,
            max_ms=end_to_end.maximum * 1e3,
        ),
        passes=tuple(map(_pass, profile.passes)),
        bottlenecks=tuple(row_file for row, row_file in ranked if row.part == "layer")[:MOST_BOTTLENECKS],
        rankings={
            "blocks": tuple(row_file for _, row_file in ranked),
            "by_self_time": tuple(map(_bottleneck, by_self_time(profile))),
        },
        coverage=profile.coverage,
        overhead=profile.overhead,
        doubts=profile.doubts,
        reasons=profile.reasons,
        profile=profile,
    )


def _pass(layer: LayerProfile) -> Pass:
    ms = layer.inclusive_s.median * 1e3 if layer.inclusive_s else None
    return Pass(layer.name, layer.calls, ms, ms / layer.calls if ms is not None and layer.calls else None)


def _bottleneck(row: Ranked) -> Bottleneck:
    gain_ms = None if row.gain_at_limit_s is None else row.gain_at_limit_s * 1e3
    return Bottleneck(row.label, row.type, row.seconds * 1e3, 100 * row.share, gain_ms)
