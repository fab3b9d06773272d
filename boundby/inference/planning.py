"""Which precision to compute in: measured on a sample, held against one text at a time in float32."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch

from boundby.inference.exactness import ExactnessReport, compare_logits
from boundby.inference.precision import Precision, available
from boundby.inference.predictor import Prediction, Predictor, PredictorOptions
from boundby.inference.reference import one_by_one, require_classifier
from boundby.inference.tokens import Tokens, tokenize
from boundby.inference.working_copy import in_dtype
from boundby.timer import Timer

SAMPLE_ROWS = 2000  # all of them the same label: the lower end of the interval is 0.998
CHECK_TEXTS = 256  # of the sample, from which the self-check takes its rows
SAME_GUARD = 4.0  # times the largest difference seen: twice what can flip a label, and that twice
LEAST_SAME_GUARD = 1e-5  # of the largest logit: a sample may show no difference at all
ROUNDS = 2


@dataclass(frozen=True)
class PrecisionRule:
    """`same`: labels as of one text at a time in float32. `fastest`: whatever keeps `min_agreement` of them, surely.

    `guarded` computes near ties again in float32 in `fastest` too; `same` always does.
    """

    kind: Literal["same", "fastest"] = "same"
    min_agreement: float = 0.995
    guarded: bool = False


@dataclass(frozen=True)
class Sample:
    """Texts to decide on, with labels where they are known; `is_all` where there are no other texts.

    `reference` are the logits of `one_by_one`, where they have been computed before.
    """

    texts: Sequence[str]
    labels: Sequence[int] | None = None
    is_all: bool = False
    reference: np.ndarray | None = None


@dataclass(frozen=True)
class PrecisionChoice:
    """The options to predict with, a report per precision tried, its least seconds on the sample, and why not others.

    `report` is that of the chosen precision, without the guard.
    """

    options: PredictorOptions
    reports: tuple[ExactnessReport, ...]
    seconds: dict[str, float]
    reasons: tuple[str, ...]

    @property
    def report(self) -> ExactnessReport:
        """The report of the chosen precision."""
        return next(each for each in self.reports if each.precision == self.options.precision)


@dataclass(frozen=True)
class _Tried:
    report: ExactnessReport
    predictor: Predictor


def same_guard(max_abs_difference: float, largest_logit: float) -> float:
    """Return the margin within which `same` computes a row again, from what was seen on some texts beside one by one.

    It is four times the largest difference or more, so that labels can differ only where a difference is larger than
    twice any of these texts'; 0 where these are not finite, which no prediction may be.
    """
    margin = max(LEAST_SAME_GUARD * largest_logit, SAME_GUARD * max_abs_difference)
    return margin if math.isfinite(margin) else 0.0


def choose_precision(
    model: Any,
    tokenizer: Any,
    sample: Sample,
    rule: PrecisionRule,
    options: PredictorOptions,
    timer: Timer | None = None,
    precisions: Sequence[Precision] | None = None,
) -> PrecisionChoice:
    """Return the fastest precision that `rule` allows on this sample, with its guard; `options` give the rest.

    `precisions` are those to choose from, `float32` among them; None: those in which the model's device is fast.

    The sample should hold 2,000 texts drawn at random, or all there are. In `same` the guard is `same_guard`.
    """
    require_classifier(model, tokenizer)
    tokens = tokenize(tokenizer, sample.texts, options.max_length)
    reference = sample.reference
    if reference is None:
        reference = one_by_one(in_dtype(model, torch.float32), tokens, range(len(tokens.ids)))
    candidates = available(model.device) if precisions is None else precisions
    by_name = {precision.name: precision for precision in candidates}
    tried: list[_Tried] = []
    reasons: list[str] = []
    for name, precision in by_name.items():
        if rule.kind == "same" and precision.dtype != torch.float32:
            continue
        wanted = replace(options, precision=name, guard_margin=0.0)
        predictor = Predictor(model, tokenizer, wanted, _check_texts(sample), timer, by_name)
        outcome = _try(predictor, tokens, replace(sample, reference=reference), rule)
        if isinstance(outcome, str):
            reasons.append(outcome)
        else:
            tried.append(outcome)
    seconds = _least_seconds(tried, lambda predictor: predictor.predict_tokens(tokens))
    best = min(tried, key=lambda each: seconds[each.report.precision])
    return PrecisionChoice(best.predictor.options, tuple(each.report for each in tried), seconds, tuple(reasons))


def _try(predictor: Predictor, tokens: Tokens, sample: Sample, rule: PrecisionRule) -> _Tried | str:
    """Return the predictor with its guard, or why its precision may not be taken; float32 always may."""
    name, reference = predictor.options.precision, sample.reference
    assert reference is not None
    try:
        found = predictor.predict_tokens(tokens)
    except ValueError as error:  # logits that are not finite
        if name == "float32":
            raise
        return f"not {name}: {error}"
    report = compare_logits(name, found.logits, reference, sample.labels, sample.is_all)
    if rule.kind == "fastest":
        if name != "float32" and report.agreement_low < rule.min_agreement:
            return _disagrees(report, rule)
        margin = report.guard_margin if rule.guarded else 0.0
    else:
        margin = same_guard(report.max_abs_logit_difference, float(np.abs(reference).max()))
    return _Tried(report, predictor.with_guard_margin(margin))


def _least_seconds(tried: Sequence[_Tried], predict: Callable[[Predictor], Prediction]) -> dict[str, float]:
    """Return the least seconds of each, computing near ties included; they take turns."""
    seconds: dict[str, float] = {}
    for _ in range(ROUNDS):
        for each in tried:
            spent = predict(each.predictor).seconds
            name = each.report.precision
            seconds[name] = min(spent.compute_s + spent.transfer_s, seconds.get(name, float("inf")))
    return seconds


def _check_texts(sample: Sample) -> Sequence[str]:
    """Return texts spread over the lengths of the sample, its shortest and its longest among them."""
    by_length = sorted(sample.texts, key=len)
    places = np.linspace(0, len(by_length) - 1, min(CHECK_TEXTS, len(by_length))).round().astype(int)
    return [by_length[place] for place in places.tolist()]


def _disagrees(report: ExactnessReport, rule: PrecisionRule) -> str:
    return (
        f"not {report.precision}: {report.same_labels} of {report.rows} labels agree with float32 one by one, the "
        f"lower end of the interval is {report.agreement_low:.2%}; asked for {rule.min_agreement:.2%}"
    )
