"""A machine whose limit is known by construction is judged by steps 01 and 02 as what it is, on the stand-in card."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.gpu_double import H100, environment
from tests.planted_machines import MACHINES

pytestmark = pytest.mark.timeout(600)  # a child runs all of them
ROOT = Path(__file__).resolve().parents[1]
# The bound that the verdict must name, and the first cause on the card; None: whatever it is.
RIGHT: dict[str, tuple[str | None, tuple[str, ...] | None]] = {
    "host": ("launch", ("host",)),
    "compute": ("compute", ("compute",)),
    "memory": ("memory", ("memory",)),
    "padding": (None, ("padding",)),
    "transfer": ("transfer", ("transfer",)),
    "throttled": (None, None),
}


@pytest.fixture(scope="module")
def judged(tmp_path_factory) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("planted")
    child = subprocess.run(
        [sys.executable, "-m", "tests.planted_machines", str(folder)],
        env=environment(H100, {**os.environ, "OMP_NUM_THREADS": "1"}), cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert child.returncode == 0, child.stderr[-2000:]
    return {run["name"]: run for run in map(json.loads, child.stdout.splitlines())}


@pytest.mark.parametrize("name", MACHINES)
def test_what_is_planted_is_what_is_named(judged, name):
    bound, causes = RIGHT[name]
    verdict = judged[name]["verdict"]
    assert judged[name]["codes"] == [0, 0], judged[name]["said"][-1000:]
    assert bound in (None, verdict["bound"])
    assert causes is None or verdict["limited_by"][0]["kind"] in causes


@pytest.mark.parametrize("name", MACHINES)
def test_every_row_of_a_card_has_the_device_s_time(judged, name):
    for row in judged[name]["rows"]:
        assert row["device_per_batch_ms"] > 0
        assert row["device_per_batch_ms"] <= row["latency_per_batch_ms_mean"] * 1.01


def test_a_throttled_card_is_said_and_lowers_the_confidence(judged):
    said = json.dumps(judged["throttled"]["rows"])
    assert "slowed its clock down" in said
    assert judged["throttled"]["verdict"]["confidence"] != "high"
    assert all(
        "slowed its clock down" not in json.dumps(run["rows"]) for name, run in judged.items() if name != "throttled"
    )
