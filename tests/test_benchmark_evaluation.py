"""The judgement of `benchmarks/evaluation.py`: a bound that is missed fails, one that nobody could meet does not."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks import evaluation
from benchmarks.evaluation import (
    BEST_ENGINE,
    BEST_FLOAT32,
    BEST_PIPELINE,
    FASTEST,
    SAME,
    SPEC,
    Measured,
    failures,
    lines,
    ratio,
    share,
    unjudged,
    with_best,
)
from boundby.inference.precision import PRECISIONS, available
from tests.fakes import FakeClock

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
    assert len(lines(GOOD)) == 4
    assert lines(GOOD)[0].startswith("ours same / padded to 512: 9.44 x (at least 8, aim 8)")
    rates = {"pipeline 1": [50.0, 40.0, 45.0], "pipeline 8": [20.0, 80.0, 30.0], SAME: [1.0] * 3}
    engines = {"ONNX Runtime": [60.0] * 3, "OpenVINO": [70.0] * 3, "OpenVINO int8": [90.0] * 3}
    best = with_best(rates | engines, {FASTEST: 7, "OpenVINO": 7, "OpenVINO int8": 6})
    assert best[BEST_PIPELINE] == [50.0, 40.0, 45.0]
    assert best[BEST_FLOAT32] == best[BEST_ENGINE] == [70.0] * 3  # eight bits have lost a correct label
    assert ratio([10.0, 30.0, 100.0], [10.0, 10.0, 10.0]) == 3.0


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({SAME: [60.0, 60.0]}, "ours same is 6.67 x padded to 512, 8 is asked for"),
        ({FASTEST: [100.0, 100.0]}, "ours fastest is 2.25 x pipeline, best, 3 is asked for"),
    ],
)
def test_a_ratio_below_its_bound_fails(changed: dict[str, list[float]], said: str) -> None:
    assert any(said in failure for failure in failures(with_rates(**changed)))


def test_another_label_or_a_low_share_fails_where_it_can_be_judged() -> None:
    assert failures(replace(GOOD, same_labels=511)) == ["long-tailed: ours same gives 1 of 512 texts another label"]
    result = failures(replace(GOOD, shares={SAME: 0.7, FASTEST: 0.4}))
    assert result == ["long-tailed: ours fastest reaches 40% of the roofline, 60% are asked for"]
    slow = replace(with_rates(**{FASTEST: [80.0, 80.0]}), shares={SAME: 0.7, FASTEST: 0.1})
    assert len(failures(slow)) == 3  # slower than the pipeline asks, than ours in `same`, than the roofline
    assert failures(replace(slow, unjudged={FASTEST: "no bfloat16 products"})) == []


@pytest.mark.parametrize(
    ("has_bfloat16", "times", "why"),
    [(False, 3.0, "no bfloat16 products"), (True, 0.9, "no faster here: 0.90 times"), (True, 2.0, None)],
)
def test_fastest_is_judged_where_bfloat16_products_are_there_and_are_faster(has_bfloat16, times, why):
    result = unjudged(has_bfloat16, times)
    assert why in result[FASTEST] if why else result == {}


def test_more_than_the_measured_limits_is_no_share():
    assert (share(1.0, 2.0), share(2.0, 1.0)) == (0.5, None)
    assert failures(replace(GOOD, shares={SAME: 0.7, FASTEST: None})) == []


@pytest.mark.parametrize("name", ["float32_prepacked", "int8"])
def test_a_layer_is_held_against_what_layers_of_its_precision_reach(name):
    if name not in {item.name for item in available(torch.device("cpu"))}:
        pytest.skip(f"this processor has no fast {name}")
    clock = FakeClock()

    def ticks() -> float:
        clock.advance(0.5)
        return clock()

    assert evaluation.layer_rate(PRECISIONS[name], ticks) == 2 * evaluation.SIZE**3 / 0.5


def test_the_last_line_is_the_summary_and_a_failure_ends_with_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(evaluation, "case_names", lambda: ["long-tailed"])
    monkeypatch.setattr(evaluation, "_measure", lambda *_: GOOD)
    assert evaluation.main([]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("passed: long-tailed: ours same / padded to 512")
    monkeypatch.setattr(evaluation, "_measure", lambda *_: replace(GOOD, same_labels=500))
    assert evaluation.main([]) == 1
    shown = capsys.readouterr().out.splitlines()
    assert "FAILED: long-tailed: ours same gives 12 of 512 texts another label" in shown
    assert shown[-1].startswith("FAILED: long-tailed")


def test_repeats_that_are_kept_are_not_made_again_and_none_begins_that_would_end_too_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, calls = FakeClock(), []
    monkeypatch.setattr(evaluation.time, "perf_counter", clock)

    def label(texts: list[str]) -> list[int]:
        clock.advance(100.0)
        calls.append(len(texts))
        return [0] * len(texts)

    monkeypatch.setattr(evaluation, "peers", lambda case: {})
    case = SimpleNamespace(texts=["a"] * 50)

    def turns(seconds: float) -> int:
        state = evaluation.State.read(tmp_path / "state.json", "short", None)
        evaluation.take_turns(case, {}, {"OpenVINO": label}, 3, state, clock() + seconds)
        return evaluation.State.read(tmp_path / "state.json", "short", None).repeats

    assert [turns(150.0), turns(1000.0), turns(1000.0)] == [1, 3, 3] and calls == [50] * 3


@pytest.mark.parametrize("arguments", [["--rows", "10"], ["--repeats", "0"], ["--only", "medium"]])
def test_senseless_arguments_are_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        evaluation.main(arguments)
    assert ended.value.code == 2
