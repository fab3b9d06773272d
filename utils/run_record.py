"""Keep `run.json`: what ran on what machine, with which settings and versions, and how each step ended."""

from typing import Any

from boundby import __version__, environment, files
from utils.artifacts import Layout
from utils.config import Config

SCHEMA_VERSION = 1


def update(layout: Layout, config: Config, step: str, status: dict[str, Any]) -> None:
    """Write the state of `step` into `run.json`, beside what earlier steps have written."""
    try:
        record = files.read_json(layout.run)
    except (OSError, ValueError):
        record = {}
    steps = record.get("steps", {}) if isinstance(record, dict) else {}
    files.write_json(
        layout.run,
        {
            "schema_version": SCHEMA_VERSION,
            "boundby_version": __version__,
            "machine_fingerprint": environment.machine_fingerprint(),
            "machine": environment.machine(),
            "environment": environment.settings(),
            "versions": environment.versions(),
            "config": config.model_dump(mode="json"),
            **_sources(layout),
            "steps": {**steps, step: status},
        },
    )


def _sources(layout: Layout) -> dict[str, Any]:
    """Return the revisions of model and dataset, once step 01 has fetched them."""
    try:
        receipt = files.read_json(layout.data_receipt)
        return {"model": receipt["model"], "dataset": receipt["source"]}
    except (OSError, ValueError, KeyError):
        return {"model": None, "dataset": None, "sources_reason": "step 01 has not finished"}
