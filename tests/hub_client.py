"""Run calls of the pipeline against the Hub that HF_ENDPOINT names, and show what came of each as JSON.

The real client reads its settings when it is imported, so every setting of the environment takes a process.

    python tests/hub_client.py '[{"call": "fetch", "model": {"name": "org/model"}}]'
"""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from utils import data  # noqa: E402
from utils.command.artifacts import Layout  # noqa: E402
from utils.command.errors import PipelineError  # noqa: E402
from utils.models.source import ModelSource, fetch, locate  # noqa: E402
from utils.settings.schema import Config, Model  # noqa: E402


def perform(call: str, model: dict[str, Any], dataset: dict[str, Any] | None = None) -> dict[str, Any]:
    wanted = Model(**model)
    if call == "locate":
        return described(locate(wanted, Path("unused")))
    result = fetch(wanted, Path("unused"), trust_remote_code=False, progress=note)
    if call == "fetch":
        return described(result)
    config = Config.model_validate({"model": model, "dataset": dataset})
    receipt = data.normalise(config, Layout.of(config), result, progress=note)
    rows = data.load_texts(Layout.of(config))
    return {"source": asdict(receipt.source), "texts": rows.texts, "labels": rows.labels.tolist()}


def described(found: ModelSource) -> dict[str, Any]:
    return {
        "revision": found.revision,
        "origin": found.origin,
        "files": sorted(path.name for path in found.path.iterdir()),
    }


def note(text: str) -> None:
    """Show progress where the scripts show it."""
    sys.stderr.write(text + "\n")


def outcome(scenario: dict[str, Any]) -> dict[str, Any]:
    try:
        return perform(**scenario)
    except PipelineError as error:
        return {"error": type(error).__name__, "exit_code": error.exit_code, "message": str(error)}


if __name__ == "__main__":
    sys.stdout.write(json.dumps([outcome(scenario) for scenario in json.loads(sys.argv[1])]))
