"""Two runs beside each other, by numbers that are known."""

import pytest

from tests.monitor_runs import USUAL, times_of
from utils.monitor import contrast
from utils.monitor.contrast import STEP_ROW, StageRow

STEPS = 60


def pace(step: int) -> float:
    return 1 + (step * 7 % 5) / 50


def run(factor: float = 1.0, **stages: float):
    return times_of(
        {name: value * pace(step) * factor for name, value in (USUAL | stages).items()} for step in range(STEPS)
    )


def rows(a, b) -> dict[str, StageRow]:
    return {each.name: each for each in contrast.contrast(a, b).rows}


def test_the_stage_that_grew_is_slower_and_the_mirror_image_faster():
    found = rows(run(), run(forward=6.0))
    assert found["forward"].comparison.verdict == "slower" and found["forward"].comparison.ratio == pytest.approx(2.0)
    assert found[STEP_ROW].comparison.ratio == pytest.approx(1.3)
    assert {found[name].comparison.verdict for name in ("data", "backward", "optimizer")} == {"same"}
    assert found["forward"].a.share == pytest.approx(0.3) and found["forward"].b.share == pytest.approx(6 / 13)
    assert found["forward"].b.low is not None
    slower, faster = run(1.25), run()
    one, other = rows(faster, slower)[STEP_ROW].comparison, rows(slower, faster)[STEP_ROW].comparison
    assert (one.verdict, other.verdict) == ("slower", "faster") and one.ratio * other.ratio == pytest.approx(1.0)


def test_what_cannot_be_compared_has_a_reason():
    found = rows(run(), run(reward=2.0))
    assert (found["reward"].comparison, found["reward"].reason) == (None, "only B has it")
    assert found["reward"].a is None and found["reward"].b.step_s == pytest.approx(2.08e-3)
    found = rows(run(sync=0.0), run(sync=0.0))
    assert (found["sync"].comparison, found["sync"].reason) == (None, "in some windows it took no time")
    with pytest.raises(ValueError, match="B has 5 undisturbed steps"):
        contrast.contrast(run(), times_of([USUAL] * 5))


def test_settings_that_differ_are_listed_by_their_path():
    a = {"training": {"batch_size": 8, "lr": 0.1}, "model": "cnn", "same": [1]}
    b = {"training": {"batch_size": 16, "lr": 0.1}, "extra": {}, "same": [1]}
    assert contrast.differences(a, b) == [
        ("extra", "not there", "{}"),
        ("model", "cnn", "not there"),
        ("training.batch_size", "8", "16"),
    ]


def test_a_long_line_keeps_its_peaks_and_its_ends():
    times = run()
    numbers, values = times.values_of("loss")
    assert len(numbers) == STEPS and contrast.thinned(numbers, values)[0] is numbers
    spiked = values.copy()
    spiked[17] = 99.0
    shorter, kept = contrast.thinned(numbers, spiked, most=10)
    assert shorter.tolist() == [0, 12, 17, 24, 36, 48, 59] and kept.tolist() == [1, 1, 99, 1, 1, 1, 1]
    numbers, means = contrast.grouped(*run().values_of("loss"), most=7)
    assert numbers.tolist() == [0, 8, 17, 25, 34, 42, 51] and means.tolist() == [1.0] * 7
