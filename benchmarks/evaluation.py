"""How fast do all texts get their labels? The ways in use beside ours: same model, same texts, one run, taking turns.

Long-tailed: a Qwen2 classifier of 12.8 million parameters, trained here the first time, on synthetic reviews of 129
tokens on average. Short: the MiniLM classifier on banking77, where ../shared holds both. Every way is timed from texts
to labels, tokenizing included: padded to 512 in batches of 64 (on the first 64 texts: its time does not depend on
them), padded to the longest in batches of 64, sorted by characters in batches of 32 as sentence-transformers does, the
pipeline of transformers at four batch sizes, and ours in `same` and `fastest` precision, which were chosen on these
texts before the clock runs. A ratio is the median over the repeats of neighbours in time. The roofline is the sum over
operators of FLOPs over FLOP/s or bytes over bytes/s, whichever is longer, with limits measured before and after.
Exit 1: a bound is missed. Bounds of `fastest` ask for bfloat16 products and are not judged on a CPU without them.

    python benchmarks/evaluation.py [--only long-tailed | short] [--rows 512] [--repeats 3]
"""

import argparse
import json
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # find the packages of this checkout

import numpy as np
import torch

from benchmarks import _evaluation_cases, _evaluation_judgement, _evaluation_methods, _evaluation_roofline
from benchmarks._evaluation_cases import MAX_LENGTH, Case
from benchmarks._evaluation_judgement import FASTEST, SAME, Measured
from boundby import ceilings, environment
from boundby.inference import (
    PrecisionChoice,
    PrecisionRule,
    Predictor,
    PredictorOptions,
    Sample,
    one_by_one,
    precision,
    search_token_budget,
    tokenize,
)

CPU = torch.device("cpu")
MIN_AGREEMENT = 0.995
SEARCHED_TEXTS = 64
BUDGETS = (1024, 2048, 4096)
MOST_ROWS = {"long-tailed": 512, "short": 3080}


def main(argv: Sequence[str] | None = None) -> int:
    """Run all cases and print what they amount to."""
    args = _arguments(argv)
    print(f"machine {environment.machine_fingerprint()}: {json.dumps(environment.machine())}")
    print(f"settings: {json.dumps(environment.settings())}")
    here = _evaluation_cases.names()
    if "short" not in here:
        print("short: left out, the MiniLM classifier or banking77 is missing")
    measured = [_measure(name, args.rows, args.repeats) for name in args.only or here]
    print()
    failures = [failure for each in measured for failure in _evaluation_judgement.failures(each)]
    for each in measured:
        for method, reason in each.unjudged.items():
            print(f"not judged: the bounds of {method} ({each.name}): {reason}")
    for failure in failures:
        print(f"FAILED: {failure}")
    summary = "; ".join(f"{each.name}: {', '.join(_evaluation_judgement.lines(each))}" for each in measured)
    print(f"{'FAILED' if failures else 'passed'}: {summary}")
    return int(bool(failures))


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=_evaluation_cases.names(), help="these cases alone")
    parser.add_argument("--rows", type=int, help="most texts per case; default 512 long-tailed and 3,080 short")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args(argv)
    if args.repeats < 1 or (args.rows is not None and args.rows < 64):
        parser.error("--repeats must be 1 or more and --rows 64 or more")
    return args


def _measure(name: str, rows: int | None, repeats: int) -> Measured:
    case = _evaluation_cases.load(name, rows or MOST_ROWS[name])
    limits = ceilings.measure(CPU)
    print(f"\n{name}: {len(case.texts)} texts, {_evaluation_roofline.limits_text(limits)}", flush=True)
    reference = one_by_one(case.model, tokenize(case.tokenizer, case.texts, MAX_LENGTH), range(len(case.texts)))
    ours = {SAME: _chosen(case, reference, "same"), FASTEST: _chosen(case, reference, "fastest")}
    rates, labels = _take_turns(case, ours, repeats)
    limits = limits.joined(ceilings.measure(CPU))
    shares = {method: _share(case, predictor, rates[method], limits) for method, predictor in ours.items()}
    right = reference.argmax(axis=1)
    measured = Measured(
        name,
        _evaluation_judgement.with_best_pipeline(rates),
        same_labels=int((np.asarray(labels) == right).sum()),
        texts=len(case.texts),
        shares=shares,
        unjudged={} if "bfloat16" in precision.available(CPU) else {FASTEST: "this CPU has no bfloat16 products"},
    )
    print("\n".join(_evaluation_judgement.lines(measured)), flush=True)
    return measured


def _chosen(case: Case, reference: np.ndarray, kind: str) -> Predictor:
    """Return our predictor in the precision that this rule chooses on all texts, with a searched token budget."""
    from boundby.inference import choose_precision

    sample = Sample(case.texts, case.labels, is_all=True, reference=reference)
    rule = PrecisionRule(kind, MIN_AGREEMENT)
    choice = choose_precision(case.model, case.tokenizer, sample, rule, PredictorOptions(MAX_LENGTH))
    predictor = Predictor(case.model, case.tokenizer, choice.options, case.texts[:256])
    budget = search_token_budget(predictor, case.texts[:SEARCHED_TEXTS], BUDGETS)
    _tell(kind, choice, predictor, budget.token_budget)
    return predictor.with_token_budget(budget.token_budget)


def _tell(kind: str, choice: PrecisionChoice, predictor: Predictor, budget: int) -> None:
    report = choice.report
    print(
        f"ours {kind}: {report.precision}, {predictor.strategy}, {budget} tokens a batch; without the guard "
        f"{report.same_labels} of {report.rows} labels agree ({report.agreement:.2%}), logits differ by at most "
        f"{report.max_abs_logit_difference:.2g}, mean {report.mean_abs_logit_difference:.2g}; accuracy "
        f"{report.accuracy:.4f}, one by one {report.reference_accuracy:.4f}; guard {choice.options.guard_margin:.2g}; "
        f"a product is off by {predictor.matmul_effect:.2g} of its largest element",
        flush=True,
    )
    for reason in (*choice.reasons, *predictor.doubts):
        print(f"  {reason}")


def _take_turns(case: Case, ours: dict[str, Predictor], repeats: int) -> tuple[dict[str, list[float]], list[int]]:
    """Return texts per second by method and repeat, and the labels that ours gave in `same`."""
    methods: dict[str, Callable[[Sequence[str]], Sequence[int]]] = dict(_evaluation_methods.peers(case))
    methods |= {
        name: lambda texts, predictor=predictor: predictor.predict(texts).labels for name, predictor in ours.items()
    }
    rates: dict[str, list[float]] = {name: [] for name in methods}
    labels: Sequence[int] = ()
    for repeat in range(repeats):
        for name in reversed(methods) if repeat % 2 else methods:
            texts = case.texts[: _evaluation_methods.SPEC_BATCH] if name == _evaluation_methods.SPEC else case.texts
            start = time.perf_counter()
            found = methods[name](texts)
            rates[name].append(len(texts) / (time.perf_counter() - start))
            labels = found if name == SAME else labels
            print(f"{repeat + 1:>3}  {name:<21} {rates[name][-1]:8.1f} texts/s", flush=True)
    return rates, list(labels)


def _share(case: Case, predictor: Predictor, rates: Sequence[float], limits: ceilings.Ceilings) -> float:
    """Print how near the roofline the texts came and what takes the rest, and return the share."""
    weights = case.model.num_parameters() * (2 if predictor.dtype == "bfloat16" else 4)
    roofline = _evaluation_roofline.of(predictor, case.texts, weights, limits)
    spent = len(case.texts) / median(rates)
    print(f"{predictor.dtype}, {predictor.strategy}: {roofline.least_s / spent:.0%} of the roofline")
    print("\n".join(roofline.lines(spent)), flush=True)
    return roofline.least_s / spent


if __name__ == "__main__":
    warnings.filterwarnings("ignore", message=".*pipelines sequentially on GPU.*")
    sys.exit(main())
