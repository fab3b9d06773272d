"""The rules of the monitor's alerts, each at its limit and just beyond it."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from tests.monitor_runs import USUAL, Loop, times_of
from utils.training.monitor import alerts, contrast
from utils.training.monitor.alerts import Unwatched

ROOT = Path(__file__).resolve().parents[2]
MIB = 2**20


def slow(forward_ms: float) -> dict[str, float]:
    return USUAL | {"forward": forward_ms}


def test_a_slow_step_takes_over_three_medians_and_ten_milliseconds_more():
    assert alerts.slow_step(times_of([USUAL] * 40 + [slow(23)])) is None
    said = alerts.slow_step(times_of([USUAL] * 40 + [slow(24)] + [USUAL] * 4))
    assert said == (
        "1 of the last 25 steps; the worst is step 40: 31.0 ms, where 10.0 ms is usual; 24.0 ms of it in forward"
    )
    short = {"forward": 1.0}
    assert alerts.slow_step(times_of([short] * 40 + [{"forward": 11.0}])) is None
    assert "the worst is step 40: 11.0 ms" in (alerts.slow_step(times_of([short] * 40 + [{"forward": 11.01}])) or "")
    assert alerts.slow_step(times_of([USUAL] * 40 + [slow(90)] + [USUAL] * 99)) is not None
    assert alerts.slow_step(times_of([USUAL] * 40 + [slow(90)] + [USUAL] * 100)) is None
    loop = Loop(None).steps(40)
    loop.timer.disturb()
    loop.step(slow(90))
    assert alerts.slow_step(loop.steps(4).timer.snapshot()) is None
    for rule in (alerts.slow_step, alerts.input_starvation):
        with pytest.raises(Unwatched, match="20 undisturbed steps up to now"):
            rule(times_of([USUAL] * 20))
    assert alerts.slow_step(times_of([USUAL] * 21)) is None


def test_starvation_is_more_than_a_fifth_of_the_last_hundred_steps_in_data():
    fifth = {"data": 2.0, "forward": 8.0}
    assert alerts.input_starvation(times_of([fifth] * 40)) is None
    said = alerts.input_starvation(times_of([{"data": 3.0, "forward": 7.0}] * 40))
    assert said == "30 % of the time of the last 40 steps went to the wait for the next batch"
    hungry = {"data": 9.0, "forward": 1.0}
    assert alerts.input_starvation(times_of([hungry] * 200 + [USUAL] * 100)) is None
    assert "90 %" in (alerts.input_starvation(times_of([USUAL] * 200 + [hungry] * 100)) or "")
    with pytest.raises(Unwatched, match="times no stage data"):
        alerts.input_starvation(times_of([{"forward": 1.0}] * 40))


def recorded(values: list[float], name: str = "process_memory_bytes"):
    loop = Loop(None)
    for value in values:
        loop.step({"forward": 1.0}, {name: value})
    return loop.timer.snapshot()


@pytest.mark.parametrize(
    ("look", "name", "quiet", "raised", "said"),
    [
        (alerts.not_finite, "loss", [1.0, float("nan"), *[1.0] * 100], [1.0, float("nan"), *[1.0] * 99], "at step 1"),
        (alerts.not_finite, "grad_norm", [1.0], [1.0, float("inf")], "grad_norm: 1 of the last 2"),
        (alerts.diverging, "loss", [1.0] * 30 + [2.0] * 20, [1.0] * 30 + [2.1] * 20, "2.1 over the last 20"),
        (alerts.diverging, "eval_loss", [1.0] * 20 + [0.1] * 20 + [0.4] * 20, [1.0] * 20 + [9.0] * 20, "1 before"),
        (alerts.exploding, "grad_norm", [1.0] * 20 + [10.0], [1.0] * 20 + [10.1], "10.1 at step 20"),
    ],
)
def test_a_loss_that_breaks_down_and_gradients_that_explode_are_said(look, name, quiet, raised, said):
    assert look(recorded(quiet, name)) is None
    assert said in look(recorded(raised, name))
    if look is alerts.exploding:
        with pytest.raises(Unwatched, match="records no metric grad_norm"):
            look(recorded(quiet, "accuracy"))


def test_memory_that_rises_in_every_quarter_is_growth():
    said = alerts.memory_growth(recorded([90 * MIB] * 10 + [(100 + step) * MIB for step in range(40)]))
    assert said == "process_memory_bytes grew by 30 MiB over the last 40 values, to 134 MiB"
    rising = [90.0 * MIB * step for step in range(1, 60)]
    with pytest.raises(Unwatched, match="no memory metric"):
        alerts.memory_growth(recorded(rising, "downloaded_bytes"))
    assert alerts.is_memory("gpu_memory_used_bytes") and not alerts.is_memory("gpu_memory_share")


@pytest.mark.parametrize(
    "values",
    [
        [90 * MIB] * 10 + [(100 + step) * MIB for step in range(39)],  # too few
        [90 * MIB] * 10 + [(100 + step / 2) * MIB for step in range(40)],  # 15 MiB
        [90 * MIB] * 10 + [(1000 + step) * MIB for step in range(40)],  # 3 %
        [(100 + step) * MIB for step in range(50)] + [149 * MIB] * 160,  # it has levelled off
        [90 * MIB] * 10 + [150 * MIB] * 20 + [100 * MIB] * 10 + [200 * MIB] * 10,  # up and down
    ],
    ids=["few", "little", "share", "plateau", "waves"],
)
def test_memory_that_fills_up_once_or_waves_is_no_growth(values):
    assert alerts.memory_growth(recorded(values)) is None


def test_thermal_bits_are_throttling_and_the_power_cap_is_not():
    def told(masks: list[float]) -> str | None:
        return alerts.throttling(recorded(masks, "gpu_clock_event_reasons"))

    assert told([0x1, 0x4]) is None and told([0x40] + [0x0] * 20) is None
    said = told([0x0] * 5 + [0x20 | 0x4, 0x28])
    assert said == "2 of the last 7 values: hardware slowdown, software thermal slowdown"
    with pytest.raises(Unwatched, match="gpu_clock_event_reasons"):
        alerts.throttling(times_of([USUAL]))


def running(**changes):
    """Return a run that began at 1000 s, whose 50 steps of 10 ms ended at 1000.5 s, and that wrote last at 1003 s."""
    return replace(times_of([USUAL] * 50), started_unix_s=1000.0, written_unix_s=1003.0, **changes)


def test_a_run_stalls_when_no_stage_ends_for_longer_than_allowed():
    assert alerts.stalled(running(), 1030.5) is None
    assert alerts.stalled(running(), 1031.5) == (
        "no stage has ended for 31 s, where 30 s are allowed; it last wrote 28 s ago"
    )
    assert alerts.stalled(running(), 1003.0, stall_s=2.0) is not None
    loop = Loop(None).steps(3)
    loop.timer.begin("data")
    stuck = replace(loop.timer.snapshot(), started_unix_s=1000.0)
    assert "it is in data" in (alerts.stalled(stuck, 1100.0) or "")
    for status in ("finished", "failed"):
        assert alerts.stalled(running(status=status), 9e9) is None
    long = replace(times_of([{"forward": 20_000.0}] * 2), started_unix_s=1000.0)
    assert alerts.stalled(long, 1240.0) is None
    assert "200 s are allowed" in (alerts.stalled(long, 1240.5) or "")
    first = replace(times_of([]), started_unix_s=1000.0)
    assert alerts.stalled(first, 1300.0) is None
    assert "300 s are allowed" in (alerts.stalled(first, 1300.5) or "")
    loop = Loop(None).steps(3)
    with loop.timer.excluded("evaluation"):
        loop.clock.advance(0.030)
    loop.timer.begin("evaluation", "excluded")
    evaluating = replace(loop.timer.snapshot(), started_unix_s=1000.0, written_unix_s=5000.0)
    assert [stage.name for stage in evaluating.open][-1] == "evaluation"
    assert alerts.stalled(evaluating, 5120.0) is None
    assert "it is in evaluation" in (alerts.stalled(evaluating, 5121.0) or "")


def test_every_rule_is_stated_and_each_process_speaks_for_itself():
    fine, hungry = (replace(running(), rank=rank, world_size=2) for rank in (0, 1))
    hungry = replace(times_of([{"data": 9.0, "forward": 1.0}] * 40), rank=1, started_unix_s=1000.0)
    result = {alert.name: alert for alert in alerts.watch([fine, hungry], 1001.0)}
    assert " · ".join(result) == (
        "Slow step · Input starvation · Loss not a number · Diverging loss · Exploding gradients · Memory growth · "
        "Throttling · Stalled run"
    )
    assert result["Input starvation"].alerts == (
        "rank 1: 90 % of the time of the last 40 steps went to the wait for the next batch",
    )
    assert result["Slow step"].alerts == () and result["Slow step"].unwatched is None
    assert result["Throttling"].unwatched == "rank 0: the run records no metric gpu_clock_event_reasons"
    assert "more than 7 s" in alerts.watch([fine], 1001.0, 7.0)[-1].rule


def test_the_rules_need_neither_torch_nor_streamlit():
    modules = "utils.training.monitor.alerts, utils.training.monitor.runs, utils.training.monitor.contrast"
    code = f"import sys, {modules}; print([name for name in ('torch', 'streamlit', 'pandas') if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True).stdout == "[]\n"


def test_a_long_line_keeps_its_peaks_and_its_ends():
    numbers, values = np.arange(60), np.ones(60)
    values[17] = 99.0
    assert contrast.thinned(numbers, values)[0] is numbers
    shorter, kept = contrast.thinned(numbers, values, most=10)
    assert shorter.tolist() == [0, 12, 17, 24, 36, 48, 59] and kept.tolist() == [1, 1, 99, 1, 1, 1, 1]
    firsts, means = contrast.grouped(numbers, np.ones(60), most=7)
    assert firsts.tolist() == [0, 8, 17, 25, 34, 42, 51] and means.tolist() == [1.0] * 7
