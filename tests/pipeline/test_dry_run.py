"""What a plan of the steps says before anything is measured: minutes by their budgets, and what a comparison needs."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from boundby.bound import bench
from boundby.machine import ceilings, environment
from boundby.timing.compare import spread_for_same
from utils.report import dry_run
from utils.steps import estimate


def said(capsys: pytest.CaptureFixture[str], folder: Path, *settings: str) -> str:
    arguments = ["02", "--", "--config", "configs/quickstart.yaml", f"output.results_dir={folder}", *settings]
    assert dry_run.main(arguments) == 0
    return capsys.readouterr().out


def test_the_budgets_are_those_of_the_steps() -> None:
    assert (estimate.CEILINGS_S, estimate.REPLAY_S) == (ceilings.BUDGET_S, bench.REPLAY_S)


@pytest.mark.parametrize("seconds", [10, 15, 60])
def test_what_rounds_may_vary_by_is_that_of_the_comparison(seconds: int) -> None:
    allowed = spread_for_same(int(dry_run.ROUNDS_PER_S * seconds), minimum_effect=0.03)
    assert dry_run.SPREAD_BY_ROOT_S * seconds**0.5 == pytest.approx(allowed, rel=0.02)


def test_a_first_dry_run_says_what_two_runs_need_to_be_found_the_same(capsys, tmp_path) -> None:
    enough = said(capsys, tmp_path, "profiling.max_seconds_per_batch_size=20")
    assert "vary by at most 2.9 %, and a slowdown of 5 % is found if by at most 4.4 %\n" in enough
    short = said(capsys, tmp_path, "profiling.max_seconds_per_batch_size=5")
    assert "if by at most 2.2 %; 2.9 % takes profiling.max_seconds_per_batch_size=20" in short


def test_more_batch_sizes_and_seconds_take_more_minutes(capsys, tmp_path) -> None:
    def minutes(*settings: str) -> float:
        text = said(capsys, tmp_path, *settings, "evaluation.enabled=false", "model.device=cpu")
        return float(text.partition("estimated minutes: ")[2].split()[0].rstrip(";"))

    few, many = minutes("profiling.batch_sizes=[1]"), minutes("profiling.batch_sizes=[1,2,4,8]")
    assert many - few == pytest.approx(3 * (estimate.SWEEP_SHARE * 15 + estimate.COUNTING_S) / 60, abs=0.11)
    assert minutes("profiling.max_seconds_per_batch_size=60") > minutes()


def document(capsys: pytest.CaptureFixture[str], folder: Path, *settings: str) -> dict:
    quick = ["--config", "configs/quickstart.yaml", f"output.results_dir={folder}", "evaluation.enabled=false"]
    assert dry_run.main(["00", "02", "03", "04", "05", "--", *quick, *settings, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def a_card_that_may_take(watts: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    card = {"name": "H200", "memory_bytes": 1, "uuid": "GPU-0a1b", **({"power_limit_w": watts} if watts else {})}
    known = {**environment.machine(), "gpus": [card], "gpus_reason": "power_limit_w: NVML: Not Supported"}
    monkeypatch.setattr(environment, "machine", lambda: known)
    monkeypatch.setattr(estimate, "gpu_energy", lambda: SimpleNamespace(joules=lambda: 1.0))


def test_all_steps_but_the_download_and_the_whole_set_have_a_time_before_anything_has_run(capsys, tmp_path) -> None:
    alone = document(capsys, tmp_path, "model.device=cpu")
    assert alone["not_counted"] == [] and alone["estimated_minutes"] > 0
    shorter = document(capsys, tmp_path, "model.device=cpu", "layers.enabled=false")
    assert alone["estimated_minutes"] - shorter["estimated_minutes"] == pytest.approx(120 / 60, abs=0.11)


def test_the_energy_is_what_the_power_limit_allows_in_that_time_and_null_where_no_limit_is_known(
    capsys, tmp_path, monkeypatch
) -> None:
    without = document(capsys, tmp_path)
    assert without["estimated_energy_wh_at_most"] is None and without["energy_reason"]
    a_card_that_may_take(700.0, monkeypatch)
    energy = document(capsys, tmp_path)
    assert energy["estimated_energy_wh_at_most"] == pytest.approx(700 / 60 * energy["estimated_minutes"], rel=0.01)
    assert energy["estimated_minutes"] > without["estimated_minutes"], "the counter of energy takes its windows"
    a_card_that_may_take(None, monkeypatch)
    refused = document(capsys, tmp_path)
    assert (refused["estimated_energy_wh_at_most"], refused["energy_reason"]) == (
        None,
        "power_limit_w: NVML: Not Supported",
    )


def test_what_runs_at_the_end_is_shown_and_not_run(capsys, tmp_path) -> None:
    text = said(capsys, tmp_path, "--then", f"touch {tmp_path}/ended")
    assert f"then, after the last step or a failure: touch {tmp_path}/ended\n" in text
    assert not (tmp_path / "ended").exists()
