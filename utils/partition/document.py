"""A plan, or what is missing for one, as plain values for programs."""

import json
from dataclasses import asdict
from typing import Any

from boundby.partition import Infeasible, PartitionPlan
from utils.partition.planning import Profiles

SCHEMA_VERSION = 1


def of(outcome: PartitionPlan | Infeasible, profiles: Profiles) -> dict[str, Any]:
    """Return the outcome as plain values; times in seconds, sizes in bytes."""
    sources = [
        {"kind": kind, "model": each.model_name, "profile": each.profile_name, "device": each.device_name}
        for kind, each in profiles.items()
    ]
    found: dict[str, Any] = {"schema_version": SCHEMA_VERSION, "profiles": sources}
    if isinstance(outcome, Infeasible):
        missing = {
            "node": outcome.node,
            "unit": outcome.unit,
            "short_bytes": outcome.short_bytes,
            "extra_bytes": outcome.extra_bytes,
            "extra_bytes_by_node": outcome.extra_by_node,
        }
        return {**found, "feasible": False, "plan": None, "missing": missing, "reason": str(outcome)}
    plan = asdict(outcome)
    plan["requests_per_s"] = outcome.requests_per_s
    plan["requests_per_s_reason"] = outcome.requests_per_s_reason
    for stage, made in zip(plan["stages"], outcome.stages, strict=True):
        memory = stage.pop("memory")
        stage["memory_bytes"] = {**memory, "total": made.memory.total, "free": made.free_bytes}
    return {**found, "feasible": True, "plan": plan, "missing": None, "reason": None}


def as_json(outcome: PartitionPlan | Infeasible, profiles: Profiles) -> str:
    """Return it as one strict JSON document, in ASCII: a console must not change a character of it."""
    return json.dumps(of(outcome, profiles), indent=2, allow_nan=False)
