"""A precision is taken for its speed where its labels surely agree, and what it does to the answers is told."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from boundby.inference import (
    PRECISIONS,
    PrecisionChoice,
    PrecisionRule,
    Predictor,
    PredictorOptions,
    Sample,
    choose_precision,
    compare_logits,
    margins,
    matmul_effect,
    planning,
    search_token_budget,
)
from boundby.timer import Timer
from tests import classifiers

CPU = torch.device("cpu")
OPTIONS = PredictorOptions(64, token_budget=256)


@pytest.fixture(scope="module")
def model(tokenizer: Any) -> Any:
    return classifiers.build("qwen2", len(tokenizer), tokenizer.pad_token_id)


@pytest.fixture
def paced(monkeypatch: pytest.MonkeyPatch) -> Iterator[Timer]:
    """A clock that only batches move, and a CPU with bfloat16: float32 takes 4 s a batch, its other kernels 2, it 1."""
    from boundby.inference.strategies import Packed

    now = [0.0]
    costs = {"float32": 4.0, "float32_fast": 2.0, "bfloat16": 1.0}
    logits = Packed.logits

    def timed(self: Packed, *given: Any) -> torch.Tensor:
        half = self._wiring.model.dtype == torch.bfloat16
        fast = torch.get_float32_matmul_precision() == "medium"
        now[0] += costs["bfloat16" if half else "float32_fast" if fast else "float32"]
        return logits(self, *given)

    monkeypatch.setattr(Packed, "logits", timed)
    monkeypatch.setattr(planning, "available", lambda _: tuple(costs))
    yield Timer(clock=lambda: now[0])


def chosen(model: Any, tokenizer: Any, sample: Sample, rule: PrecisionRule, timer: Timer) -> PrecisionChoice:
    return choose_precision(model, tokenizer, sample, rule, OPTIONS, timer)


def test_same_takes_the_faster_kernels_of_float32_and_guards_near_ties(
    model: Any, tokenizer: Any, texts: list[str], paced: Timer
) -> None:
    choice = chosen(model, tokenizer, Sample(texts), PrecisionRule("same"), paced)
    assert choice.options.precision == "float32_fast"
    assert choice.options.guard_margin >= 4 * choice.report.max_abs_logit_difference
    assert choice.options.guard_margin > 0  # though this sample may show no difference
    assert set(choice.seconds) == {"float32", "float32_fast"}
    assert choice.seconds["float32"] == 2 * choice.seconds["float32_fast"]
    assert (choice.options.max_length, choice.options.token_budget) == (64, 256)


def test_the_guard_of_same_is_wider_than_what_was_seen_and_never_wider_than_all() -> None:
    assert planning.same_guard(0.5, 1.0) == 4 * 0.5
    assert planning.same_guard(0.0, 8.0) == pytest.approx(8e-5)  # a sample may show no difference at all
    for broken in ((float("nan"), 1.0), (1.0, float("nan")), (float("inf"), 1.0)):
        assert 0 <= planning.same_guard(*broken) <= 4  # the evaluation ends at such a text with its place


def test_the_self_check_tells_what_a_guard_is_made_of(model: Any, tokenizer: Any, texts: list[str]) -> None:
    check = Predictor(model, tokenizer, OPTIONS, texts).check
    assert check.largest_logit == pytest.approx(check.allowed / PRECISIONS["float32"].tolerance)


def test_fastest_takes_the_fastest_that_agrees(model: Any, tokenizer: Any, texts: list[str], paced: Timer) -> None:
    rule = PrecisionRule("fastest", min_agreement=0.1)
    choice = chosen(model, tokenizer, Sample(texts, is_all=True), rule, paced)
    assert choice.options.precision == "bfloat16"
    assert choice.options.guard_margin == 0
    guarded = chosen(model, tokenizer, Sample(texts, is_all=True), PrecisionRule("fastest", 0.1, guarded=True), paced)
    assert guarded.options.guard_margin == pytest.approx(2 * guarded.report.max_abs_logit_difference)


def test_a_small_sample_that_agrees_wholly_is_not_sure_enough(
    model: Any, tokenizer: Any, texts: list[str], paced: Timer
) -> None:
    """24 of 24 labels: the lower end of the interval is 86 %."""
    choice = chosen(model, tokenizer, Sample(texts), PrecisionRule("fastest", 0.995), paced)
    assert choice.options.precision == "float32"
    assert [each.split(":")[0] for each in choice.reasons] == ["not float32_fast", "not bfloat16"]
    whole = chosen(model, tokenizer, Sample(texts, is_all=True), PrecisionRule("fastest", 0.995), paced)
    assert whole.options.precision != "float32"


def test_a_precision_whose_logits_overflow_is_left_out_with_the_reason(
    model: Any, tokenizer: Any, texts: list[str], paced: Timer, monkeypatch: pytest.MonkeyPatch
) -> None:
    from boundby.inference import Prediction

    predict = Predictor.predict_tokens

    def overflows(self: Predictor, *given: Any, **named: Any) -> Prediction:
        if self.options.precision == "bfloat16":
            raise ValueError("text 3 has logits that are not finite in bfloat16")
        return predict(self, *given, **named)

    monkeypatch.setattr(Predictor, "predict_tokens", overflows)
    choice = chosen(model, tokenizer, Sample(texts, is_all=True), PrecisionRule("fastest"), paced)
    assert choice.options.precision == "float32_fast"
    assert choice.reasons == ("not bfloat16: text 3 has logits that are not finite in bfloat16",)


def test_the_report_counts_flips_and_differences() -> None:
    reference = np.array([[1.0, 2.0, 0.0], [5.0, 4.0, 0.0], [0.0, 0.0, 3.0], [1.0, 1.5, 0.0]], dtype=np.float32)
    found = reference.copy()
    found[3] = [1.75, 1.5, 0.0]
    report = compare_logits("bfloat16", found, reference, labels=[1, 0, 2, 0])
    assert (report.rows, report.same_labels, report.agreement) == (4, 3, 0.75)
    assert report.agreement_low < 0.75 < report.agreement_high
    assert report.max_abs_logit_difference == 0.75
    assert report.mean_abs_logit_difference == pytest.approx(0.75 / 12)
    assert report.smallest_margins == pytest.approx((0.5, 1.0, 1.0, 3.0))
    assert (report.reference_accuracy, report.accuracy, report.accuracy_difference) == (0.75, 1.0, 0.25)
    assert report.accuracy_difference_low is not None and report.accuracy_difference_high is not None
    assert report.accuracy_difference_low < 0.25 < report.accuracy_difference_high
    assert report.guard_margin == 1.5
    assert report.as_dict()["guard_margin"] == 1.5


def test_all_texts_leave_no_doubt_about_the_agreement() -> None:
    logits = np.eye(3, dtype=np.float32)
    report = compare_logits("float32", logits, logits, is_all=True)
    assert (report.agreement_low, report.agreement_high) == (1.0, 1.0)
    assert report.accuracy is None and report.accuracy_difference is None


@pytest.mark.parametrize("shape", [(0, 3), (2, 3)])
def test_logits_that_do_not_match_are_not_compared(shape: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="cannot be compared"):
        compare_logits("float32", np.zeros(shape), np.zeros((0, 3)))


def test_logits_that_are_not_finite_are_not_compared() -> None:
    with pytest.raises(ValueError, match="are not finite"):
        compare_logits("float32", np.array([[np.nan, 1.0]]), np.zeros((1, 2)))


def test_a_margin_is_the_lead_over_the_second() -> None:
    assert margins(np.array([[3.0, 1.0, 2.5], [0.0, 0.0, -1.0]])).tolist() == [0.5, 0.0]


def test_no_flip_lies_beyond_twice_the_largest_difference() -> None:
    rng = np.random.default_rng(0)
    reference = rng.normal(size=(5000, 4))
    found = reference + rng.uniform(-0.2, 0.2, reference.shape)
    flipped = found.argmax(axis=1) != reference.argmax(axis=1)
    report = compare_logits("bfloat16", found, reference)
    assert flipped.sum() > 100
    assert margins(found)[flipped].max() <= report.guard_margin


def test_bfloat16_rounds_a_product_more_than_float32_does() -> None:
    exact, rounded = (matmul_effect(PRECISIONS[name], CPU) for name in ("float32", "bfloat16"))
    assert 0 < exact < 1e-5 < 1e-3 < rounded < 0.1
    assert matmul_effect(PRECISIONS["float32_fast"], CPU) < 0.1


def test_the_smallest_budget_that_is_as_fast_as_any_is_chosen(
    model: Any, tokenizer: Any, texts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch takes 1 s and 1 ms per token: four batches fewer are worth it, then there is one batch in any case."""
    from boundby.inference.strategies import Packed

    now = [0.0]
    logits = Packed.logits

    def timed(self: Packed, tokens: Any, rows: Any) -> torch.Tensor:
        now[0] += 1 + tokens.lengths[rows].sum() / 1000
        return logits(self, tokens, rows)

    predictor = Predictor(model, tokenizer, OPTIONS, texts, Timer(clock=lambda: now[0]))
    monkeypatch.setattr(Packed, "logits", timed)
    found = search_token_budget(predictor, texts, (64, 512, 100_000, 200_000))
    assert found.token_budget == 100_000
    assert list(found.seconds) == [64, 512, 100_000, 200_000]
    assert found.seconds[64] > found.seconds[512] > found.seconds[100_000] == found.seconds[200_000]


def test_a_budget_that_memory_does_not_hold_is_left_out(
    model: Any, tokenizer: Any, texts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from boundby.inference.strategies import Packed

    logits = Packed.logits

    def small_memory(self: Packed, tokens: Any, rows: Any) -> torch.Tensor:
        if tokens.lengths[rows].sum() > 300:
            raise MemoryError
        return logits(self, tokens, rows)

    predictor = Predictor(model, tokenizer, OPTIONS, texts)
    monkeypatch.setattr("boundby.inference.predictor.release_memory", lambda _: None)
    monkeypatch.setattr(Packed, "logits", small_memory)
    assert list(search_token_budget(predictor, texts, (256, 4096)).seconds) == [256]
    with pytest.raises(ValueError, match="no texts"):
        search_token_budget(predictor, [])
