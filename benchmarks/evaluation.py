"""How fast do all texts get their labels? The ways in use beside ours: same model, same texts, one run, taking turns.

Long-tailed: a Qwen2 classifier of 12.8 million parameters, trained here the first time, on synthetic reviews of 129
tokens on average. Short: the MiniLM classifier on banking77, where ../shared holds both. Every way is timed from texts
to labels, tokenizing included: padded to 512 in batches of 64 (on the first 64 texts: its time does not depend on
them), padded to the longest in batches of 64, sorted by characters in batches of 32 as sentence-transformers does, the
pipeline of transformers at four batch sizes, ONNX Runtime and OpenVINO in each precision with their best batches of
texts sorted by length (where setup/requirements-engines.txt is installed; each library in a process of its own with as
many threads), and ours in `same` and `fastest` precision, which were chosen on these texts before the clock runs. An
engine is a peer of `fastest` where it has as many correct labels. With --state repeats are kept in a file as they end,
and a later call goes on; --seconds lets none begin that would end later, so that a run can be made in pieces.
A ratio is the median over the repeats of neighbours in time. The roofline is the sum over operators of FLOPs over
FLOP/s or bytes over bytes/s, whichever is longer, with limits measured before and after.
Exit 1: a bound is missed; 3: repeats are still to be made. Bounds of `fastest` ask for bfloat16 products and are not
judged on a CPU without them, or where they are no faster than float32's. Products are held against what the layers of
the precision in use reach here: those of eight bits against eight bits.

    python benchmarks/evaluation.py [--only long-tailed | short] [--rows 512] [--repeats 3]
                                    [--state FILE] [--seconds 200]
"""

import argparse
import json
import math
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # find the packages of this checkout

import numpy as np
import torch

from benchmarks import _evaluation_cases, _evaluation_judgement, _evaluation_methods, _evaluation_roofline
from benchmarks._evaluation_cases import MAX_LENGTH, Case
from benchmarks._evaluation_judgement import FASTEST, SAME, Measured
from boundby import ceilings, environment, files
from boundby.device import has_bfloat16_products
from boundby.inference import (
    PrecisionChoice,
    PrecisionRule,
    Predictor,
    PredictorOptions,
    Sample,
    one_by_one,
    search_token_budget,
    tokenize,
    weight_bytes,
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
    deadline = time.perf_counter() + args.seconds
    states = {name: State.read(args.state, name, args.rows) for name in args.only or here}
    found = [_measure(name, args.rows, args.repeats, state, deadline) for name, state in states.items()]
    measured = [each for each in found if each]
    print()
    if len(measured) < len(found):
        print("not all repeats are made; the same command goes on")
        return 3
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
    parser.add_argument("--state", type=Path, help="keep repeats in this file, and go on with those in it")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no repeat that would end later")
    args = parser.parse_args(argv)
    if args.repeats < 1 or (args.rows is not None and args.rows < 64):
        parser.error("--repeats must be 1 or more and --rows 64 or more")
    return args


@dataclass
class State:
    """The repeats of a case so far: texts per second by method, and the labels of each of the last one."""

    path: Path | None
    key: str
    rates: dict[str, list[float]] = field(default_factory=dict)
    labels: dict[str, list[int]] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path | None, name: str, rows: int | None) -> "State":
        """Return what the file has of this case on this machine; nothing where there is none."""
        key = f"{name} {rows or MOST_ROWS[name]} {torch.get_num_threads()} {environment.machine_fingerprint()}"
        content = files.read_json(path) if path and path.is_file() else {}
        known = content.get(key, {})
        return cls(path, key, known.get("rates", {}), known.get("labels", {}))

    @property
    def repeats(self) -> int:
        """Tell how many are made."""
        return min(map(len, self.rates.values()), default=0)

    def keep(self, rates: dict[str, float], labels: dict[str, list[int]]) -> None:
        """Add a repeat, and write the file."""
        for name, rate in rates.items():
            self.rates.setdefault(name, []).append(rate)
        self.labels = labels
        if self.path:
            content = files.read_json(self.path) if self.path.is_file() else {}
            files.write_json(self.path, content | {self.key: {"rates": self.rates, "labels": self.labels}})


def _measure(name: str, rows: int | None, repeats: int, state: State, deadline: float) -> Measured | None:
    """Return what the case amounts to; None where repeats are missing and time is up."""
    case = _evaluation_cases.load(name, rows or MOST_ROWS[name])
    limits = ceilings.measure(CPU)
    print(f"\n{name}: {len(case.texts)} texts, {_evaluation_roofline.limits_text(limits)}", flush=True)
    reference = one_by_one(case.model, tokenize(case.tokenizer, case.texts, MAX_LENGTH), range(len(case.texts)))
    ours = {SAME: _chosen(case, reference, "same"), FASTEST: _chosen(case, reference, "fastest")}
    with _evaluation_methods.engines(case) as engines:
        take_turns(case, ours, engines, repeats, state, deadline)
    if state.repeats < repeats:
        return None
    limits = limits.joined(ceilings.measure(CPU))
    shares = {method: _share(case, predictor, state.rates[method], limits) for method, predictor in ours.items()}
    right, own = np.asarray(case.labels), reference.argmax(axis=1)
    correct = {method: int((np.asarray(labels) == right).sum()) for method, labels in state.labels.items()}
    for method, labels in state.labels.items():
        same = int((np.asarray(labels) == own).sum())
        rate = median(state.rates[method])
        print(
            f"{method:<21} {rate:8.1f} texts/s; {same} labels as one by one, {correct[method]} correct of {len(right)}"
        )
    measured = Measured(
        name,
        _evaluation_judgement.with_best(state.rates, correct),
        same_labels=int((np.asarray(state.labels[SAME]) == own).sum()),
        texts=len(case.texts),
        shares=shares,
        unjudged=_evaluation_judgement.unjudged(
            has_bfloat16_products(CPU), limits.best("bfloat16").flops_per_s / limits.best("float32").flops_per_s
        ),
    )
    print("\n".join(_evaluation_judgement.lines(measured)), flush=True)
    return measured


def _chosen(case: Case, reference: np.ndarray, kind: str) -> Predictor:
    """Return our predictor in the precision that this rule chooses on all texts, with a searched token budget."""
    from boundby.inference import choose_precision

    sample = Sample(case.texts, case.labels, is_all=True, reference=reference)
    rule = PrecisionRule(kind, MIN_AGREEMENT)
    choice = choose_precision(case.model, case.tokenizer, sample, rule, PredictorOptions(MAX_LENGTH))
    predictor = Predictor(case.model, case.tokenizer, choice.options, choice.check_texts)
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


def take_turns(
    case: Case,
    ours: dict[str, Predictor],
    engines: Mapping[str, _evaluation_methods.Label],
    repeats: int,
    state: State,
    deadline: float,
) -> None:
    """Add repeats to the state, each of all methods one after another, as long as there is time for one more."""
    methods: dict[str, Callable[[Sequence[str]], Sequence[int]]] = {**_evaluation_methods.peers(case), **engines}
    methods |= {
        name: lambda texts, predictor=predictor: predictor.predict(texts).labels for name, predictor in ours.items()
    }
    longest = 0.0
    for repeat in range(state.repeats, repeats):
        began = time.perf_counter()
        if began + longest > deadline:
            return
        rates, labels = dict[str, float](), dict[str, list[int]]()
        for name in reversed(methods) if repeat % 2 else methods:
            texts = case.texts[: _evaluation_methods.SPEC_BATCH] if name == _evaluation_methods.SPEC else case.texts
            start = time.perf_counter()
            found = methods[name](texts)
            rates[name] = len(texts) / (time.perf_counter() - start)
            if len(texts) == len(case.texts):
                labels[name] = [int(label) for label in found]
            print(f"{repeat + 1:>3}  {name:<21} {rates[name]:8.1f} texts/s", flush=True)
        state.keep(rates, labels)
        longest = max(longest, time.perf_counter() - began)


def _share(case: Case, predictor: Predictor, rates: Sequence[float], limits: ceilings.Ceilings) -> float | None:
    """Print how near the roofline the texts came and what takes the rest; return the share, None above 1."""
    roofline = _evaluation_roofline.of(predictor, case.texts, weight_bytes(predictor.model), limits)
    spent = len(case.texts) / median(rates)
    share = _evaluation_judgement.share(roofline.least_s, spent)
    told = "no share: faster than the limits that were measured" if share is None else f"{share:.0%} of the roofline"
    print(f"{predictor.options.precision}, {predictor.strategy}: {told} of its own precision")
    print("\n".join(roofline.lines(spent)), flush=True)
    return share


if __name__ == "__main__":
    warnings.filterwarnings("ignore", message=".*pipelines sequentially on GPU.*")
    sys.exit(main())
