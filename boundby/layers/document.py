"""The files of a profile: `*_metrics.jsonl` for pandas, `*_summary.json` for people and programs. Loads no torch."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec

from boundby import files
from boundby.layers.ranking import Ranked, blocks, by_self_time
from boundby.layers.records import ModelProfile
from boundby.layers.report import MOST_BOTTLENECKS, Report
from boundby.stats import Summary

SCHEMA_VERSION = 1


def write_metrics(path: str | Path, report: Report) -> int:
    """Replace `path` by one JSON object per run and call path, a line each; return the number of lines."""
    lines = [files.encode_json(each) for each in report.rows()]
    files.write_text(path, "".join(f"{line}\n" for line in lines))
    return len(lines)


def write_summary(path: str | Path, profile: ModelProfile) -> None:
    """Replace `path` by the summary of the profile, which `read_profile` reads back."""
    files.write_json(path, summary(profile))


def read_profile(path: str | Path) -> ModelProfile:
    """Return the profile in a `*_summary.json`. Raises OSError, or ValueError that names the file and the place."""
    found = files.read_json(path)
    version = found.get("schema_version") if isinstance(found, dict) else None
    if version != SCHEMA_VERSION or "profile" not in found:
        raise ValueError(
            f"{path} is no summary of a profile by layer that this version reads (schema_version {version!r} instead "
            f"of {SCHEMA_VERSION}); profile the model again"
        )
    try:
        return msgspec.convert(found["profile"], ModelProfile)
    except msgspec.ValidationError as error:
        raise ValueError(f"{path} holds a profile that cannot be read: {error}; profile the model again") from None


def summary(profile: ModelProfile) -> dict[str, Any]:
    """Return the profile as plain values: what people look for first, then all of it under `profile`."""
    ranked = blocks(profile)
    return {
        "schema_version": SCHEMA_VERSION,
        "profile_name": profile.profile_name,
        "model_name": profile.model_name,
        "num_runs": profile.num_runs,
        "total_layers": sum(each.calls > 0 for each in profile.layers),
        "end_to_end_latency": _latency(profile.reference_s),
        "bottlenecks": [_bottleneck(each) for each in ranked if each.part == "layer"][:MOST_BOTTLENECKS],
        "rankings": {
            "blocks": [_bottleneck(each) for each in ranked],
            "by_self_time": [_bottleneck(each) for each in by_self_time(profile)],
        },
        "coverage": asdict(profile.coverage),
        "overhead": profile.overhead,
        "doubts": list(profile.doubts),
        "reasons": profile.reasons,
        "profile": asdict(profile),
    }


def _latency(found: Summary) -> dict[str, float | int | None]:
    return {
        "mean_ms": found.mean * 1e3,
        "total_ms": found.mean * found.n * 1e3,
        "p50_ms": found.median * 1e3,
        "p95_ms": None if found.p95 is None else found.p95 * 1e3,
        "min_ms": found.minimum * 1e3,
        "max_ms": found.maximum * 1e3,
    }


def _bottleneck(row: Ranked) -> dict[str, Any]:
    return {
        "layer_name": row.label,
        "layer_type": row.type,
        "latency_ms": row.seconds * 1e3,
        "pct": 100 * row.share,
        "gain_at_limit_ms": None if row.gain_at_limit_s is None else row.gain_at_limit_s * 1e3,
    }
