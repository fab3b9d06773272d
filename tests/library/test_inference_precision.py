"""A precision is taken for its speed where its labels surely agree, and what it does to the answers is told."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from boundby.inference import (
    PRECISIONS,
    Precision,
    PrecisionChoice,
    PrecisionRule,
    Predictor,
    PredictorOptions,
    Sample,
    choose_precision,
    compare_logits,
    margins,
    matmul_effect,
    one_by_one,
    precision,
    search_token_budget,
    strategies,
    weight_bytes,
)
from boundby.inference.precision import PrepackedLinear, calibrate, can_prepack, to_int8, tolerance
from boundby.inference.reference import same_guard
from boundby.machine.device import has_int8_matmul
from boundby.timing.timer import Timer
from boundby.work import count
from tests import classifiers

pytestmark = pytest.mark.isa

CPU = torch.device("cpu")
OPTIONS = PredictorOptions(64, token_budget=256)


@pytest.fixture(scope="module")
def model(tokenizer):
    return classifiers.build("qwen2", len(tokenizer), tokenizer.pad_token_id)


class Paced(Precision):
    """A precision that takes a second per pass of a clock of its own, or so many, and computes what its dtype says.

    What this machine would make of faster float32 products is thus no part of a test.
    """

    now = [0.0]
    seconds = {"float32": 4.0, "float32_fast": 2.0, "bfloat16": 1.0}

    @contextlib.contextmanager
    def active(self, device: torch.device) -> Iterator[None]:
        yield
        self.now[0] += self.seconds[self.name]


FLOAT32, FAST, HALF = (Paced(name, torch.bfloat16 if name == "bfloat16" else torch.float32) for name in Paced.seconds)
CLOCK = Timer(clock=lambda: Paced.now[0])


def chosen(model: Any, tokenizer: Any, sample: Sample, rule: PrecisionRule) -> PrecisionChoice:
    return choose_precision(model, tokenizer, sample, rule, OPTIONS, CLOCK, (FLOAT32, FAST, HALF))


def test_same_takes_the_faster_kernels_of_float32_and_guards_near_ties(model, tokenizer, texts):
    choice = chosen(model, tokenizer, Sample(texts), PrecisionRule("same"))
    assert choice.options.precision == "float32_fast"
    assert choice.options.guard_margin >= 4 * choice.report.max_abs_logit_difference
    assert choice.options.guard_margin > 0  # though this sample may show no difference
    assert [(trial.report.precision, trial.seconds) for trial in choice.trials] == [
        ("float32", 4.0),
        ("float32_fast", 2.0),
    ]
    assert (choice.options.max_length, choice.options.token_budget) == (64, 256)


class Rounding(Precision):
    """Products of float32 that round to bfloat16, as those of a CPU with AMX do, on any machine."""

    @contextlib.contextmanager
    def active(self, device: torch.device) -> Iterator[None]:
        linear = functional.linear

        def rounded(states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
            return linear(states.bfloat16().float(), weight.bfloat16().float(), bias)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(functional, "linear", rounded)
            yield


def test_float32_products_that_round_to_bfloat16_are_packed_and_their_near_ties_guarded(model, tokenizer, texts):
    rounding = Rounding("rounding", torch.float32)
    assert 1e-3 < matmul_effect(rounding, CPU) < 1e-2
    options = replace(OPTIONS, precision="rounding")
    predictor = Predictor(model, tokenizer, options, texts, precisions={"rounding": rounding})
    assert predictor.strategy == "packed, sorted by length" and predictor.doubts == ()
    both = (FLOAT32, rounding)
    choice = choose_precision(model, tokenizer, Sample(texts), PrecisionRule("same"), OPTIONS, precisions=both)
    rounded = choice.trials[1].report
    assert rounded.max_abs_logit_difference > 1e-3 * predictor.check.largest_logit
    guarded = predictor.with_guard_margin(same_guard(rounded.max_abs_logit_difference, 1.0)).predict(texts)
    alone = one_by_one(model, predictor.tokenize(texts), range(len(texts)))
    assert guarded.labels.tolist() == alone.argmax(axis=1).tolist()


@pytest.mark.parametrize(("effect", "share"), [(3e-7, 1e-4), (3e-4, 0.021), (2.2e-3, 0.15), (3.4e-3, 0.15)])
def test_logits_may_be_off_by_what_a_product_is_off(effect, share):
    assert tolerance(effect) == pytest.approx(share)


def test_the_guard_of_same_is_wider_than_what_was_seen_and_never_wider_than_all(model, tokenizer, texts):
    check = Predictor(model, tokenizer, OPTIONS, texts).check
    assert check.largest_logit == pytest.approx(check.allowed / 1e-4)
    assert same_guard(0.5, 1.0) == 4 * 0.5
    assert same_guard(0.0, 8.0) == pytest.approx(8e-5)  # a sample may show no difference at all
    for broken in ((float("nan"), 1.0), (1.0, float("nan")), (float("inf"), 1.0)):
        assert 0 <= same_guard(*broken) <= 4  # the evaluation ends at such a text with its place


def test_fastest_takes_the_fastest_that_surely_agrees(model, tokenizer, texts):
    """24 of 24 labels of a sample are not sure enough: the lower end of the interval is 86 %."""
    choice = chosen(model, tokenizer, Sample(texts, is_all=True), PrecisionRule("fastest", min_agreement=0.1))
    assert (choice.options.precision, choice.options.guard_margin) == ("bfloat16", 0)
    guarded = chosen(model, tokenizer, Sample(texts, is_all=True), PrecisionRule("fastest", 0.1, guarded=True))
    assert guarded.options.guard_margin == pytest.approx(2 * guarded.report.max_abs_logit_difference)
    choice = chosen(model, tokenizer, Sample(texts), PrecisionRule("fastest", 0.995))
    same = chosen(model, tokenizer, Sample(texts), PrecisionRule("same"))
    assert choice.options == same.options and same.options.precision == "float32_fast"  # never slower than `same`
    assert [reason.split(":")[0] for reason in choice.reasons] == [
        "near ties again with float32", "near ties again with float32_fast", "not bfloat16"
    ]  # fmt: skip
    whole = chosen(model, tokenizer, Sample(texts, is_all=True), PrecisionRule("fastest", 0.995))
    assert whole.options.precision != "float32"


@pytest.mark.parametrize(("packed_s", "sorted_s", "is_packed"), [(1.0, 2.0, True), (2.0, 1.0, False)])
def test_fastest_packs_or_sorts_by_what_is_measured(
    packed_s, sorted_s, is_packed, model, tokenizer, texts, monkeypatch
):
    for strategy, seconds in ((strategies.Packed, packed_s), (strategies.Padded, sorted_s)):
        monkeypatch.setattr(strategy, "logits", taking(strategy.logits, seconds))
    monkeypatch.setattr(Paced, "seconds", dict.fromkeys(Paced.seconds, 0.0))
    rule = PrecisionRule("fastest", min_agreement=0.1)
    choice = choose_precision(model, tokenizer, Sample(texts, is_all=True), rule, OPTIONS, CLOCK, (FLOAT32,))
    assert len(choice.trials) == 2 and choice.options.packs is is_packed
    assert choice.best.predictor.is_padded is not is_packed
    same = choose_precision(model, tokenizer, Sample(texts), PrecisionRule("same"), OPTIONS, CLOCK, (FLOAT32,))
    assert len(same.trials) == 1


def taking(compute: Callable[..., torch.Tensor], seconds: float) -> Callable[..., torch.Tensor]:
    def timed(self: Any, tokens: Any, rows: Any) -> torch.Tensor:
        Paced.now[0] += seconds
        return compute(self, tokens, rows)

    return timed


def test_what_agrees_too_seldom_is_taken_with_its_near_ties_computed_again(model, tokenizer, texts):
    class Coarse(Paced):
        def copy_of(self, model):
            copy = super().copy_of(model)
            for weight in copy.parameters():
                weight.data = (weight * 8).round() / 8
            return copy

    everything = (FLOAT32, FAST, Coarse("bfloat16", torch.bfloat16))
    sample = Sample(texts, is_all=True)
    choice = choose_precision(model, tokenizer, sample, PrecisionRule("fastest", 1.0), OPTIONS, CLOCK, everything)
    assert choice.options.precision == "bfloat16" and choice.report.agreement < 1
    assert choice.options.guard_margin == choice.report.flip_margin > 0
    predictor = Predictor(model, tokenizer, choice.options, texts, precisions={"bfloat16": everything[2]})
    alone = one_by_one(model, predictor.tokenize(texts), range(len(texts)))
    assert predictor.predict(texts).labels.tolist() == alone.argmax(axis=1).tolist()


@pytest.mark.parametrize(
    "error",
    [ValueError("text 3 has logits that are not finite in bfloat16"), RuntimeError("Unsupported dtype BFloat16")],
    ids=["overflow", "no kernel"],
)
def test_a_precision_that_cannot_be_computed_in_is_left_out_with_the_reason(error, model, tokenizer, texts):
    class Failing(Paced):
        @contextlib.contextmanager
        def active(self, device):
            raise error
            yield

    precisions = (FLOAT32, FAST, Failing("bfloat16", torch.bfloat16))
    sample = Sample(texts, is_all=True)
    choice = choose_precision(model, tokenizer, sample, PrecisionRule("fastest"), OPTIONS, CLOCK, precisions)
    assert choice.options.precision == "float32_fast"
    assert choice.reasons == (f"not bfloat16: {error}",)
    error = torch.OutOfMemoryError("CUDA out of memory")  # which is no reason against a precision
    with pytest.raises(torch.OutOfMemoryError):
        choose_precision(model, tokenizer, sample, PrecisionRule("fastest"), OPTIONS, CLOCK, precisions)


def test_the_report_counts_flips_and_differences():
    reference = np.array([[1.0, 2.0, 0.0], [5.0, 4.0, 0.0], [0.0, 0.0, 3.0], [1.0, 1.5, 0.0]], dtype=np.float32)
    logits = reference.copy()
    logits[3] = [1.75, 1.5, 0.0]
    report = compare_logits("bfloat16", logits, reference, labels=[1, 0, 2, 0])
    assert (report.rows, report.same_labels, report.agreement) == (4, 3, 0.75)
    assert report.agreement_low < 0.75 < report.agreement_high
    assert report.max_abs_logit_difference == 0.75
    assert report.mean_abs_logit_difference == pytest.approx(0.75 / 12)
    assert report.smallest_margins == pytest.approx((0.5, 1.0, 1.0, 3.0))
    assert (report.reference_accuracy, report.accuracy, report.accuracy_difference) == (0.75, 1.0, 0.25)
    assert report.accuracy_difference_low is not None and report.accuracy_difference_high is not None
    assert report.accuracy_difference_low < 0.25 < report.accuracy_difference_high
    assert (report.guard_margin, report.widest_flip, report.flip_margin) == (1.5, 0.25, 0.5)
    assert report.as_dict()["guard_margin"] == 1.5
    report = compare_logits("float32", reference, reference, is_all=True)
    assert (report.agreement_low, report.agreement_high) == (1.0, 1.0), "all texts leave no doubt"
    assert report.accuracy is None and report.accuracy_difference is None


def test_only_finite_logits_of_the_same_texts_are_compared():
    for logits, reference, says in (
        (np.zeros((0, 3)), np.zeros((0, 3)), "cannot be compared"),
        (np.zeros((2, 3)), np.zeros((0, 3)), "cannot be compared"),
        (np.array([[np.nan, 1.0]]), np.zeros((1, 2)), "are not finite"),
    ):
        with pytest.raises(ValueError, match=says):
            compare_logits("float32", logits, reference)
    assert margins(np.array([[3.0, 1.0, 2.5], [0.0, 0.0, -1.0]])).tolist() == [0.5, 0.0]


def test_labels_that_differ_in_exact_ties_alone_are_computed_again(model, tokenizer, texts):
    class Flat(Paced):
        def copy_of(self, model):
            copy = super().copy_of(model)
            for weight in copy.parameters():
                weight.data = torch.zeros_like(weight)
            return copy

    everything = (FLOAT32, Flat("bfloat16", torch.bfloat16))
    rule, sample = PrecisionRule("fastest", 1.0), Sample(texts, is_all=True)
    choice = choose_precision(model, tokenizer, sample, rule, OPTIONS, CLOCK, everything)
    report = next(trial.report for trial in choice.trials if trial.report.precision == "bfloat16")
    assert report.agreement < 1 and report.widest_flip == 0
    predictor = Predictor(model, tokenizer, choice.options, texts, precisions={one.name: one for one in everything})
    assert predictor.options.guard_margin > 0
    assert predictor.predict(texts).labels.tolist() == choice.reference.argmax(axis=1).tolist()


def test_no_flip_lies_beyond_the_margins_of_the_report():
    rng = np.random.default_rng(0)
    reference = rng.normal(size=(5000, 4))
    logits = reference + rng.uniform(-0.2, 0.2, reference.shape)
    flipped = logits.argmax(axis=1) != reference.argmax(axis=1)
    report = compare_logits("bfloat16", logits, reference)
    assert flipped.sum() > 100
    assert 2 * margins(logits)[flipped].max() >= report.flip_margin >= margins(logits)[flipped].max()
    assert report.flip_margin <= report.guard_margin


def test_bfloat16_rounds_a_product_more_than_float32_does():
    exact, rounded = (matmul_effect(PRECISIONS[name], CPU) for name in ("float32", "bfloat16"))
    assert 0 < exact < 1e-5 < 1e-3 < rounded < 0.1
    assert matmul_effect(PRECISIONS["float32_fast"], CPU) < 0.1


def test_the_smallest_budget_that_is_as_fast_as_any_is_chosen(model, tokenizer, texts, monkeypatch):
    """A batch takes 1 s and 1 ms per token: four batches fewer are worth it, then there is one batch in any case."""
    from boundby.inference.strategies import Packed

    now = [0.0]
    logits = Packed.logits

    def timed(self, tokens, rows):
        now[0] += 1 + tokens.lengths[rows].sum() / 1000
        return logits(self, tokens, rows)

    predictor = Predictor(model, tokenizer, OPTIONS, texts, Timer(clock=lambda: now[0]))
    monkeypatch.setattr(Packed, "logits", timed)
    budget_choice = search_token_budget(predictor, texts, (64, 512, 100_000, 200_000))
    assert budget_choice.token_budget == 100_000
    assert list(budget_choice.seconds) == [64, 512, 100_000, 200_000]
    assert (
        budget_choice.seconds[64]
        > budget_choice.seconds[512]
        > budget_choice.seconds[100_000]
        == budget_choice.seconds[200_000]
    )


def test_a_budget_that_memory_does_not_hold_is_left_out(model, tokenizer, texts, monkeypatch):
    from boundby.inference.strategies import Packed

    logits = Packed.logits

    def small_memory(self, tokens, rows):
        if tokens.lengths[rows].sum() > 300:
            raise MemoryError
        return logits(self, tokens, rows)

    predictor = Predictor(model, tokenizer, OPTIONS, texts)
    monkeypatch.setattr("boundby.inference.predictor.release_memory", lambda _: None)
    monkeypatch.setattr(Packed, "logits", small_memory)
    assert list(search_token_budget(predictor, texts, (256, 4096)).seconds) == [256]
    with pytest.raises(ValueError, match="no texts"):
        search_token_budget(predictor, [])


@pytest.mark.parametrize("family", classifiers.FAMILIES)
@pytest.mark.parametrize("name", ["float32_prepacked", "bfloat16"])
def test_prepacked_weights_give_the_logits_of_the_others_in_the_same_memory(family, name, tokenizer, texts):
    model = classifiers.build(family, len(tokenizer), tokenizer.pad_token_id)
    plain = Precision("plain", PRECISIONS[name].dtype)
    both = {"plain": plain, name: PRECISIONS[name]}
    predictors = [Predictor(model, tokenizer, replace(OPTIONS, precision=key), texts, precisions=both) for key in both]
    expected, logits = (predictor.predict(texts).logits for predictor in predictors)
    assert predictors[1].strategy == predictors[0].strategy == "packed, sorted by length"
    assert np.abs(logits - expected).max() <= tolerance(matmul_effect(plain, CPU)) * np.abs(expected).max()
    assert weight_bytes(predictors[1].model) == weight_bytes(predictors[0].model)
    prepacked = [module for module in predictors[1].model.modules() if isinstance(module, PrepackedLinear)]
    can = can_prepack(CPU, PRECISIONS[name].dtype)
    assert bool(prepacked) == (can and family != "gpt2")  # whose layers are none of torch's
    flops = [sum(count(forward).flops for forward in one.forwards(one.tokenize(texts))) for one in predictors]
    assert flops[0] == flops[1] > 0
    assert PRECISIONS["float32_prepacked"].keeps_weights and not PRECISIONS["bfloat16"].keeps_weights


@pytest.mark.skipif(not has_int8_matmul(CPU), reason="this CPU has no products of eight bits")
@pytest.mark.parametrize("family", ["bert", "distilbert"])
def test_int8_takes_less_memory_and_depends_on_no_other_text(family, tokenizer, texts):
    classifier = classifiers.build(family, len(tokenizer), tokenizer.pad_token_id)
    batched, plain = (
        Predictor(classifier, tokenizer, replace(OPTIONS, precision=name), texts) for name in ("int8", "float32")
    )
    assert batched.strategy == plain.strategy and batched.trim == plain.trim
    assert weight_bytes(batched.model) < weight_bytes(plain.model)
    alone = np.concatenate([batched.predict([text]).logits for text in texts[:8]])
    assert np.abs(batched.predict(texts[:8]).logits - alone).max() < 1e-3 * np.abs(alone).max()
    exact = plain.predict(texts).logits
    assert np.abs(batched.predict(texts).logits - exact).max() < 0.15 * np.abs(exact).max()
    assert not PRECISIONS["int8"].keeps_weights and matmul_effect(PRECISIONS["int8"], CPU) < 0.03


@pytest.mark.parametrize("given", [None, 5])
def test_precision_is_chosen_with_the_texts_of_the_self_check_to_come(model, tokenizer, texts, given):
    own = None if given is None else texts[:given]
    choice = chosen(model, tokenizer, Sample(texts, check_texts=own), PrecisionRule("same"))
    assert choice.check_texts == own if own else set(choice.check_texts) <= set(texts)


@pytest.mark.skipif(not has_int8_matmul(CPU), reason="this CPU has no products of eight bits")
def test_int8_takes_the_share_of_a_large_input_from_its_weights_and_hands_bytes_on():
    torch.manual_seed(0)
    layer = torch.nn.ModuleDict(
        {"lin1": torch.nn.Linear(64, 128), "activation": torch.nn.GELU(), "lin2": torch.nn.Linear(128, 64)}
    )
    inputs = torch.randn(512, 64) * torch.logspace(-1, 1, 64)
    expected = layer["lin2"](layer["activation"](layer["lin1"](inputs)))
    to_int8(model := torch.nn.ModuleList([layer]))

    def compute():
        inner = layer["activation"](layer["lin1"](inputs))
        return inner, layer["lin2"](inner)

    with torch.inference_mode():
        calibrate(model, compute)
        inner, result = compute()
    assert inner.dtype == torch.uint8
    assert (result - expected).abs().max() < 0.03 * expected.abs().max()


def test_int8_is_refused_with_the_reason_where_there_is_nothing_to_convert_or_no_kernel(model, monkeypatch):
    monkeypatch.setattr(precision, "has_int8_matmul", lambda device: True)
    with pytest.raises(ValueError, match="no linear layers"):
        PRECISIONS["int8"].copy_of(torch.nn.LayerNorm(4))
    monkeypatch.setattr(precision, "has_int8_matmul", lambda device: False)
    with pytest.raises(ValueError, match="this CPU has no products of eight bits"):
        PRECISIONS["int8"].copy_of(model)


def test_a_weight_that_consists_of_tensors_holds_what_these_hold():
    """As those of torchao do, whose own memory is none and whose dtype is that of the model."""
    layer = torch.nn.Linear(8, 4, bias=False)
    layer.weight.qdata, layer.weight.scale = torch.zeros(4, 8, dtype=torch.float8_e4m3fn), torch.ones(4, 1)
    layer.weight.__tensor_flatten__ = lambda: (["qdata", "scale"], {})
    assert weight_bytes(layer) == 4 * 8 + 4 * 4
