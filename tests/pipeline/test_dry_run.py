"""What a plan of the steps says before anything is measured: minutes by their budgets, and what a comparison needs."""

from pathlib import Path

import pytest

from boundby import ceilings, replay
from boundby.compare import spread_for_same
from utils import dry_run


def said(capsys: pytest.CaptureFixture[str], folder: Path, *settings: str) -> str:
    arguments = ["02", "--", "--config", "configs/quickstart.yaml", f"output.results_dir={folder}", *settings]
    assert dry_run.main(arguments) == 0
    return capsys.readouterr().out


def test_the_budgets_are_those_of_the_steps() -> None:
    assert (dry_run.CEILINGS_S, dry_run.REPLAY_S) == (ceilings.BUDGET_S, replay.BUDGET_S)


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
    assert many - few == pytest.approx(3 * (dry_run.SWEEP_SHARE * 15 + dry_run.COUNTING_S) / 60, abs=0.11)
    assert minutes("profiling.max_seconds_per_batch_size=60") > minutes()
