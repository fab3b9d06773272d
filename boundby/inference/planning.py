"""What is measured before predicting: which precision to compute in, and how many tokens to compute at once."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Literal

import numpy as np
import torch

from boundby.inference.batches import Tokens, tokenize
from boundby.inference.precision import Precision, available
from boundby.inference.predictor import Predictor, PredictorOptions
from boundby.inference.reference import (
    ExactnessReport,
    compare_logits,
    in_dtype,
    one_by_one,
    require_classifier,
    same_guard,
)
from boundby.inference.selfcheck import CANNOT_RUN
from boundby.machine import is_gpu, is_out_of_memory, raise_if_lost
from boundby.timing import Timer, wilson_interval

SAMPLE_ROWS = 2000  # all of them the same label: the lower end of the interval is 0.998
CHECK_TEXTS = 256  # of the sample, from which the self-check takes its rows
ROUNDS = 2
HOST_BUDGETS, GPU_BUDGETS = (512, 1024, 2048, 4096, 8192), (8192, 16384, 32768, 65536)  # tokens, to search among
BUDGET_ROUNDS = 2
AS_GOOD = 1.02  # of the least seconds: the smaller budget needs less memory


@dataclass(frozen=True)
class PrecisionRule:
    """`same`: labels as of one text at a time in float32. `fastest`: whatever surely keeps `min_agreement` of them.

    `fastest` measures every precision, packed and sorted, with near ties computed again where it agrees too seldom, and
    all that `same` may take: it is never slower. `guarded`: near ties are always computed again, as in `same`.
    """

    kind: Literal["same", "fastest"] = "same"
    min_agreement: float = 0.995
    guarded: bool = False


@dataclass(frozen=True)
class Sample:
    """Texts to decide on, with labels where they are known; `is_all` where there are no other texts.

    `reference`: logits of `one_by_one`, if computed before. `check_texts`: what the predictor will check and calibrate
    itself with; None: some of each length of these texts.
    """

    texts: Sequence[str]
    labels: Sequence[int] | None = None
    is_all: bool = False
    reference: np.ndarray | None = None
    check_texts: Sequence[str] | None = None


@dataclass(frozen=True)
class Trial:
    """A precision, packed or sorted: its predictor, its report without the guard, its least seconds for the sample."""

    predictor: Predictor
    report: ExactnessReport
    seconds: float


@dataclass(frozen=True)
class PrecisionChoice:
    """The fastest trial, all of them, and why other precisions were refused.

    `check_texts` calibrated the predictors; `reference` are the logits that the reports compare with.
    """

    best: Trial
    trials: tuple[Trial, ...]
    reasons: tuple[str, ...]
    check_texts: Sequence[str]
    reference: np.ndarray

    @property
    def options(self) -> PredictorOptions:
        """The options to predict with."""
        return self.best.predictor.options

    @property
    def report(self) -> ExactnessReport:
        """The report of the fastest trial."""
        return self.best.report


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

    The sample should hold 2,000 random texts, or all. `precisions` None: those that are fast on the model's device.
    Raises ValueError, with the reasons, where none is allowed.
    """
    require_classifier(model, tokenizer)
    tokens = tokenize(tokenizer, sample.texts, options.max_length)
    reference = sample.reference
    if reference is None:
        reference = one_by_one(in_dtype(model, torch.float32), tokens, range(len(tokens.ids)))
    check_texts = _check_texts(sample, tokens) if sample.check_texts is None else sample.check_texts
    candidates = available(model.device) if precisions is None else precisions
    by_name = {precision.name: precision for precision in candidates}
    tried: list[tuple[ExactnessReport, Predictor]] = []
    reasons: list[str] = []
    for (name, precision), packs in product(by_name.items(), (True, False)):
        if rule.kind == "same" and not precision.keeps_weights:
            continue
        if not packs and (rule.kind == "same" or not (tried and _is_packed(tried[-1][1], name))):
            continue
        wanted = replace(options, precision=name, guard_margin=0.0, packs=packs and options.packs)
        try:
            predictor = Predictor(model, tokenizer, wanted, check_texts, timer, by_name)
            prediction = predictor.predict_tokens(tokens)
        except CANNOT_RUN as error:  # no kernel in this dtype, or logits that are not finite
            raise_if_lost(error)
            if name == "float32" or is_out_of_memory(error):
                raise
            reasons.append(f"not {name}: {error}")
            continue
        report = compare_logits(name, prediction.logits, reference, sample.labels, sample.is_all)
        margin = _guard(rule, precision, report, float(np.abs(reference).max()), sample.is_all)
        if rule.kind == "fastest" and report.agreement_low < rule.min_agreement:
            reasons.append(
                f"{'not' if margin is None else 'near ties again with'} {name}: {report.same_labels} of {report.rows} "
                f"labels agree with float32 one by one, the lower end of the interval is {report.agreement_low:.2%}; "
                f"asked for {rule.min_agreement:.2%}"
            )
        if margin is not None:
            tried.append((report, predictor.with_guard_margin(margin)))
    if not tried:
        raise ValueError("; ".join(reasons))
    seconds = [math.inf] * len(tried)
    for _ in range(ROUNDS):  # they take turns, computing near ties included
        for number, (_, predictor) in enumerate(tried):
            spent = predictor.predict_tokens(tokens).seconds
            seconds[number] = min(spent.compute_s + spent.transfer_s, seconds[number])
    trials = tuple(Trial(predictor, report, spent) for (report, predictor), spent in zip(tried, seconds, strict=True))
    best = min(trials, key=lambda trial: trial.seconds)
    return PrecisionChoice(best, trials, tuple(dict.fromkeys(reasons)), check_texts, reference)


def _is_packed(predictor: Predictor, precision: str) -> bool:
    """Tell whether the predictor packs its texts, in this precision."""
    return predictor.options.precision == precision and not predictor.is_padded


def _guard(
    rule: PrecisionRule, precision: Precision, report: ExactnessReport, largest_logit: float, is_all: bool
) -> float | None:
    """Return the margin within which rows are computed again; None where the rule does not allow this precision.

    What agrees too seldom is allowed with its near ties computed again, if agreement is then sure enough.
    """
    of_same = same_guard(report.max_abs_logit_difference, largest_logit)
    if rule.kind == "same":
        return of_same
    if report.agreement_low >= rule.min_agreement:
        return report.guard_margin if rule.guarded else 0.0
    if precision.keeps_weights:
        return of_same
    low = 1.0 if is_all else wilson_interval(report.rows, report.rows)[0]
    ties = float(np.finfo(np.float32).tiny)  # which may be all that differs, and a margin of 0 is none
    return max(report.flip_margin, ties) if low >= rule.min_agreement else None


def _check_texts(sample: Sample, tokens: Tokens) -> Sequence[str]:
    """Return texts spread over the lengths of the sample in tokens, its shortest and its longest among them."""
    by_length = np.argsort(tokens.lengths, kind="stable")
    indexes = np.linspace(0, len(by_length) - 1, min(CHECK_TEXTS, len(by_length))).round().astype(int)
    return [sample.texts[row] for row in by_length[indexes].tolist()]


@dataclass(frozen=True)
class BudgetChoice:
    """The token budget, and the least seconds that the texts took with each budget that was tried."""

    token_budget: int
    seconds: dict[int, float]


def token_budgets(device: torch.device) -> tuple[int, ...]:
    """Return the token budgets that a search on this device tries."""
    return GPU_BUDGETS if is_gpu(device) else HOST_BUDGETS


def search_token_budget(
    predictor: Predictor, texts: Sequence[str], budgets: Sequence[int] | None = None
) -> BudgetChoice:
    """Return the smallest budget that is within 2 % of the fastest on these texts, a few hundred of them at least.

    The budgets take turns in two rounds after a warm-up. One that does not fit in memory is left out. Raises ValueError
    where there are no texts.
    """
    if not texts:
        raise ValueError("there are no texts to search a token budget with")
    tokens = predictor.tokenize(texts)
    tried = budgets or token_budgets(predictor.device)
    seconds: dict[int, float] = {}
    for number in range(BUDGET_ROUNDS + 1):
        for budget in tried if number % 2 else tuple(reversed(tried)):
            prediction = predictor.with_token_budget(budget).predict_tokens(tokens)
            if prediction.halvings:
                seconds[budget] = float("inf")
            elif number:
                seconds[budget] = min(prediction.seconds.compute_s, seconds.get(budget, float("inf")))
    kept = {budget: spent for budget, spent in sorted(seconds.items()) if spent != float("inf")}
    if not kept:
        return BudgetChoice(min(tried), {})
    least = min(kept.values())
    return BudgetChoice(next(budget for budget, spent in kept.items() if spent <= AS_GOOD * least), kept)
