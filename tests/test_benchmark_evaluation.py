"""The judgement of `benchmarks/evaluation.py`: a bound that is missed fails, one that nobody could meet does not."""

from dataclasses import replace

import pytest

from benchmarks import _evaluation_cases, evaluation
from benchmarks._evaluation_judgement import (
    BEST_PIPELINE,
    FASTEST,
    SAME,
    SPEC,
    Measured,
    failures,
    lines,
    ratio,
    with_best_pipeline,
)

RATES = {
    SPEC: [9.0, 9.0],
    "pipeline 1": [50.0, 40.0],
    "pipeline 8": [20.0, 80.0],
    SAME: [80.0, 90.0],
    FASTEST: [160.0] * 2,
}
GOOD = Measured(
    "long-tailed",
    {**RATES, BEST_PIPELINE: [50.0, 40.0]},
    same_labels=512,
    texts=512,
    shares={SAME: 0.7, FASTEST: 0.61},
    unjudged={},
)


def with_rates(**changed: list[float]) -> Measured:
    return replace(GOOD, rates={**GOOD.rates, **changed})


def test_ratios_are_medians_over_neighbours_against_the_best_batch_size() -> None:
    assert failures(GOOD) == []
    assert len(lines(GOOD)) == 3
    assert lines(GOOD)[0].startswith("ours same / padded to 512: 9.44 x (at least 8, aim 8)")
    rates = {"pipeline 1": [50.0, 40.0, 45.0], "pipeline 8": [20.0, 80.0, 30.0], SAME: [1.0] * 3}
    assert with_best_pipeline(rates)[BEST_PIPELINE] == [50.0, 40.0, 45.0]
    assert ratio([10.0, 30.0, 100.0], [10.0, 10.0, 10.0]) == 3.0


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({SAME: [60.0, 60.0]}, "ours same is 6.67 x padded to 512, 8 is asked for"),
        ({FASTEST: [100.0, 100.0]}, "ours fastest is 2.25 x pipeline, best, 3 is asked for"),
    ],
)
def test_a_ratio_below_its_bound_fails(changed: dict[str, list[float]], said: str) -> None:
    assert any(said in each for each in failures(with_rates(**changed)))


def test_another_label_or_a_low_share_fails_where_it_can_be_judged() -> None:
    assert failures(replace(GOOD, same_labels=511)) == ["long-tailed: ours same gives 1 of 512 texts another label"]
    found = failures(replace(GOOD, shares={SAME: 0.7, FASTEST: 0.4}))
    assert found == ["long-tailed: ours fastest reaches 40% of the roofline, 60% are asked for"]
    slow = replace(with_rates(**{FASTEST: [80.0, 80.0]}), shares={SAME: 0.7, FASTEST: 0.1})
    assert len(failures(slow)) == 2
    assert failures(replace(slow, unjudged={FASTEST: "no bfloat16 products"})) == []


def test_the_last_line_is_the_summary_and_a_failure_ends_with_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(_evaluation_cases, "names", lambda: ["long-tailed"])
    monkeypatch.setattr(evaluation, "_measure", lambda *_: GOOD)
    assert evaluation.main([]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("passed: long-tailed: ours same / padded to 512")
    monkeypatch.setattr(evaluation, "_measure", lambda *_: replace(GOOD, same_labels=500))
    assert evaluation.main([]) == 1
    shown = capsys.readouterr().out.splitlines()
    assert "FAILED: long-tailed: ours same gives 12 of 512 texts another label" in shown
    assert shown[-1].startswith("FAILED: long-tailed")


@pytest.mark.parametrize("arguments", [["--rows", "10"], ["--repeats", "0"], ["--only", "medium"]])
def test_senseless_arguments_are_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        evaluation.main(arguments)
    assert ended.value.code == 2
