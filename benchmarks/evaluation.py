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
import contextlib
import csv
import json
import math
import random
import sys
import tempfile
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # find the packages of this checkout

from boundby import files
from boundby.inference import (
    ENGINES,
    MOST_CALIBRATION,
    PRECISIONS,
    Precision,
    PrecisionChoice,
    PrecisionRule,
    Predictor,
    PredictorOptions,
    Sample,
    calibrate,
    one_by_one,
    search_token_budget,
    tokenize,
    weight_bytes,
)
from boundby.machine import Ceilings, ceilings, environment, has_bfloat16_matmul
from boundby.work import Interval, OperatorLoad, attribute, count
from utils.evaluation import EngineFailed, EngineProcess
from utils.models import ModelSource

ROOT = Path(__file__).resolve().parents[1]
BUILT = ROOT / "build" / "benchmark-evaluation"
SHARED = ROOT.parent / "shared"
MINILM, BANKING77 = SHARED / "models" / "minilm-banking77", SHARED / "data" / "banking77"
MAX_LENGTH = 512
TRAIN_ROWS, VALIDATION_ROWS = 3000, 512
SEED = 0
LONG, SHORT = "long-tailed", "short"


@dataclass(frozen=True)
class Case:
    """A model in float32 on the CPU, its tokenizer, texts in random order and their labels."""

    name: str
    folder: Path
    model: Any
    tokenizer: Any
    texts: list[str]
    labels: list[int]


def case_names() -> list[str]:
    """Return the names of the cases that can be run here."""
    return [LONG, *([SHORT] if MINILM.is_dir() and BANKING77.is_dir() else [])]


def load_case(name: str, rows: int) -> Case:
    """Return a case with at most `rows` texts, always the same ones; the first time, a model is trained for minutes."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    folder = _trained() if name == LONG else MINILM
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype="float32", local_files_only=True).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    texts, label_names = _reviews(folder) if name == LONG else _questions()
    order = random.Random(SEED).sample(range(len(texts)), min(rows, len(texts)))
    labels = [model.config.label2id[label_names[row]] for row in order]
    return Case(name, folder, model, tokenizer, [texts[row] for row in order], labels)


def _trained() -> Path:
    """Return the folder of a Qwen2 classifier of 12.8 million parameters whose texts have 129 tokens on average."""
    from utils.quickstart import Recipe, Schedule, Shape, cache

    shape = Shape(vocabulary=500, hidden=384, intermediate=1024, layers=8, heads=6, initial_std=0.04)
    recipe = Recipe(
        rows_train=TRAIN_ROWS,
        rows_validation=VALIDATION_ROWS,
        shape=shape,
        schedule=Schedule(tokens_per_batch=1536, peak_learning_rate=8e-4),
    )
    return cache.prepare(BUILT, progress=lambda line: print(line, flush=True), recipe=recipe).model_dir


def _reviews(folder: Path) -> tuple[list[str], list[str]]:
    return _columns(folder / "validation.csv", "text", "label_name")


def _questions() -> tuple[list[str], list[str]]:
    return _columns(BANKING77 / "test.csv", "text", "category")


def _columns(path: Path, first: str, second: str) -> tuple[list[str], list[str]]:
    with path.open(encoding="utf-8", newline="") as lines:
        rows = list(csv.DictReader(lines))
    return [row[first] for row in rows], [row[second] for row in rows]


LEAST_SHARE, AIMED_SHARE = 0.6, 0.8  # of the per-operator roofline on useful tokens
LEAST_FASTER = 1.25  # times float32's, for bfloat16 products to be worth a bound


@dataclass(frozen=True)
class Bound:
    """Ours must be at least `times` a peer; `aim` is what is hoped for."""

    ours: str
    peer: str
    times: float
    aim: float


@dataclass(frozen=True)
class Measured:
    """One case: texts per second of each repeat by method, and what the labels and the roofline say.

    `unjudged` tells, by our method, why its bounds cannot be met on this machine by anyone.
    """

    name: str
    rates: dict[str, list[float]]
    same_labels: int
    texts: int
    shares: dict[str, float | None]
    unjudged: dict[str, str]


SAME, FASTEST, SPEC, BEST_PIPELINE = "ours same", "ours fastest", "padded to 512", "pipeline, best"
FLOAT32_ENGINES, BEST_FLOAT32, BEST_ENGINE = ("ONNX Runtime", "OpenVINO"), "float32 engine, best", "engine, best"
OTHER_WAYS = ("pipeline", "padded", "sorted", "ours")  # all but the engines begin with one of these
BOUNDS = {
    "long-tailed": (
        Bound(SAME, SPEC, 8.0, 8.0),
        Bound(SAME, BEST_PIPELINE, 1.6, 2.0),
        Bound(FASTEST, BEST_PIPELINE, 3.0, 4.0),
        Bound(FASTEST, SAME, 1.5, 1.5),
    ),
    "short": (
        Bound(SAME, BEST_PIPELINE, 1.9, 3.2),
        Bound(SAME, BEST_FLOAT32, 1.3, 1.3),
        Bound(FASTEST, BEST_PIPELINE, 8.0, 8.0),
        Bound(FASTEST, BEST_ENGINE, 1.14, 1.14),  # by torch alone: a plan takes the engine where that is faster
    ),
}
SHARES = {"long-tailed": (SAME, FASTEST), "short": ()}


def unjudged(has_bfloat16: bool, times_float32: float) -> dict[str, str]:
    """Return why the bounds of `fastest` cannot be met here, by our method; {} where bfloat16 products are fast.

    `times_float32` is the measured ceiling of bfloat16 products over that of float32's fastest.
    """
    if not has_bfloat16:
        return {FASTEST: "this CPU has no bfloat16 products"}
    if times_float32 < LEAST_FASTER:
        return {FASTEST: f"bfloat16 products are no faster here: {times_float32:.2f} times float32's"}
    return {}


def share(least_s: float, spent_s: float) -> float | None:
    """Return the share of the roofline; None above 1, where what was measured as a limit is none."""
    return least_s / spent_s if least_s <= spent_s else None


def with_best(rates: dict[str, list[float]], correct: Mapping[str, int]) -> dict[str, list[float]]:
    """Return the rates with those of the best pipeline, of the best float32 engine and of the best engine, by medians.

    An engine counts only where it has as many `correct` labels as ours in `fastest`.
    """
    engines = [name for name in rates if not name.startswith(OTHER_WAYS)]
    kinds = {
        BEST_PIPELINE: [name for name in rates if name.startswith("pipeline ")],
        BEST_FLOAT32: [name for name in engines if name in FLOAT32_ENGINES],
        BEST_ENGINE: [name for name in engines if correct.get(name, 0) >= correct.get(FASTEST, 0)],
    }
    best = {kind: max((rates[name] for name in names), key=median) for kind, names in kinds.items() if names}
    return {**rates, **best}


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Return the median over the repeats of ours over theirs; each pair ran within one repeat."""
    return median(mine / other for mine, other in zip(ours, theirs, strict=True))


def lines(case: Measured) -> list[str]:
    """Return each bound with what was found, as a line."""
    return [
        f"{bound.ours} / {bound.peer}: {ratio(case.rates[bound.ours], case.rates[bound.peer]):.2f} x"
        f" (at least {bound.times:g}, aim {bound.aim:g})"
        for bound in BOUNDS[case.name]
        if bound.peer in case.rates
    ]


def failures(case: Measured) -> list[str]:
    """Return what falls short, one sentence each; [] where all holds or cannot be judged here."""
    short = []
    for bound in BOUNDS[case.name]:
        if bound.peer not in case.rates:
            continue
        times = ratio(case.rates[bound.ours], case.rates[bound.peer])
        if times < bound.times and bound.ours not in case.unjudged:
            short.append(f"{case.name}: {bound.ours} is {times:.2f} x {bound.peer}, {bound.times:g} is asked for")
    if case.same_labels != case.texts:
        short.append(f"{case.name}: {SAME} gives {case.texts - case.same_labels} of {case.texts} texts another label")
    for method in SHARES[case.name]:
        reached = case.shares[method]
        if reached is not None and reached < LEAST_SHARE and method not in case.unjudged:
            short.append(
                f"{case.name}: {method} reaches {reached:.0%} of the roofline, {LEAST_SHARE:.0%} are asked for"
            )
    return short


SPEC_BATCH, SORTED_BATCH = 64, 32
PIPELINE_BATCHES = (1, 8, 32, 64)
LONGEST, CHARACTERS, PIPELINE = "padded to longest", "sorted by characters", "pipeline"

ENGINE_BATCHES = (32, 64, 128)

Label = Callable[[Sequence[str]], list[int]]


def peers(case: Case) -> dict[str, Label]:
    """Return the other ways, by name."""
    ways: dict[str, Label] = {
        SPEC: lambda texts: _batches(case, texts, range(len(texts)), SPEC_BATCH, "max_length"),
        LONGEST: lambda texts: _batches(case, texts, range(len(texts)), SPEC_BATCH, "longest"),
        CHARACTERS: lambda texts: _batches(
            case, texts, np.argsort([-len(text) for text in texts]).tolist(), SORTED_BATCH, "longest"
        ),
    }
    return ways | {f"{PIPELINE} {size}": _pipeline(case, size) for size in PIPELINE_BATCHES}


def _batches(case: Case, texts: Sequence[str], order: Sequence[int], size: int, padding: str) -> list[int]:
    """Return labels from batches of fixed size in the order given, tokenized as they come."""
    labels = [0] * len(texts)
    with torch.inference_mode():
        for start in range(0, len(order), size):
            rows = order[start : start + size]
            encoded = case.tokenizer(
                [texts[row] for row in rows],
                padding=padding,
                truncation=True,
                max_length=MAX_LENGTH,
                return_tensors="pt",
            )
            logits = case.model(input_ids=encoded["input_ids"], attention_mask=encoded["attention_mask"]).logits
            for row, label in zip(rows, logits.argmax(dim=1).tolist(), strict=True):
                labels[row] = label
    return labels


def _pipeline(case: Case, size: int) -> Label:
    from transformers import pipeline

    made: Any = pipeline("text-classification", model=case.model, tokenizer=case.tokenizer, device="cpu")
    ids = case.model.config.label2id

    def label(texts: Sequence[str]) -> list[int]:
        answers = made(list(texts), batch_size=size, truncation=True, max_length=MAX_LENGTH)
        return [ids[answer["label"]] for answer in answers]

    return label


@contextlib.contextmanager
def engines(case: Case) -> Iterator[dict[str, Label]]:
    """Yield ONNX Runtime and OpenVINO in each precision, in a process for each, at their best batch size.

    Their texts are sorted by length; those that OpenVINO's eight bits are calibrated with are the last ones.
    """
    labels: dict[str, Label] = {}
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as processes:
        source = ModelSource(str(case.folder), case.folder, "folder", None, "")
        running: dict[str, EngineProcess] = {}
        for name, engine in ENGINES.items():
            try:
                if engine.lacking:
                    raise EngineFailed(f"{' and '.join(engine.lacking)} not installed")
                if engine.precision == "bfloat16" and not has_bfloat16_matmul(torch.device("cpu")):
                    raise EngineFailed("this CPU has no bfloat16 products")
                if engine.library not in running:
                    process = EngineProcess(source, engine.library, MAX_LENGTH, Path(folder) / engine.library)
                    processes.callback(process.close)
                    process.convert()
                    running[engine.library] = process
                process = running[engine.library]
                process.open(name, case.texts[-MOST_CALIBRATION:] if engine.calibrated else ())
                size = _best_size(partial(process.logits, name), case.texts[:SEARCHED_TEXTS])
            except EngineFailed as error:
                print(f"{engine.words}: left out: {error}", flush=True)
                continue
            print(f"{engine.words}: batches of {size} sorted by length", flush=True)
            labels[engine.words] = partial(_labels, partial(process.logits, name), size)
        yield labels


def _labels(logits: Callable[[Sequence[str], int], np.ndarray], size: int, texts: Sequence[str]) -> list[int]:
    labels: list[int] = logits(texts, size).argmax(axis=1).tolist()
    return labels


def _best_size(logits: Callable[[Sequence[str], int], np.ndarray], texts: Sequence[str]) -> int:
    seconds = {}
    for size in ENGINE_BATCHES:
        logits(texts, size)
        start = time.perf_counter()
        logits(texts, size)
        seconds[size] = time.perf_counter() - start
    return min(seconds, key=lambda size: seconds[size])


MATMUL = ("mm", "addmm", "bmm", "linear", "baddbmm", "matmul", "mkldnn::_linear_pointwise",
            "onednn::qlinear_pointwise")  # fmt: skip
PREPACKED = ("mkldnn::_linear_pointwise", "onednn::qlinear_pointwise")  # with kernels, and a limit, of their own
KINDS = ("matmul", "attention", "element-wise")
SIZE, CALLS = 1024, 7  # of the square products of a prepacked layer


@dataclass(frozen=True)
class Roofline:
    """Least seconds for the texts, the sum over operators, and by kind the least and those of a counted pass."""

    least_s: float
    least_by_kind: dict[str, float]
    seconds_by_kind: dict[str, float]

    def lines(self, spent_s: float) -> list[str]:
        """Return what takes the time, as lines; `spent_s` is what the texts took uncounted."""
        kinds = [
            f"  {kind}: {self.seconds_by_kind[kind]:.2f} s counted, least {self.least_by_kind[kind]:.2f} s"
            for kind in KINDS
        ]
        rest = spent_s - sum(self.seconds_by_kind.values())
        return [*kinds, f"  the rest of {spent_s:.2f} s (dispatch, tokenizing, batches): {rest:.2f} s"]


def roofline_of(predictor: Predictor, texts: Sequence[str], weights_bytes: float, ceilings: Ceilings) -> Roofline:
    """Return the roofline of what the predictor computes for the texts, which its packs pad with nothing.

    Layers that are prepacked are held against what such a layer reaches in that precision, all else against the matmul
    of the dtype with the settings in use: one of reduced precision is none that it may use.
    """
    limits = ceilings.limits(predictor.dtype)
    precision = PRECISIONS[predictor.options.precision]
    reached = layer_rate(precision) if precision.convert else 0.0
    stock = 0.0 if precision.name == "int8" else limits.flops_per_s.value  # a prepacked layer may fall short of those
    prepacked = msgspec.structs.replace(limits, flops_per_s=Interval.exact(max(stock, reached)))
    least, spent = defaultdict(float), defaultdict(float)
    for forward in predictor.forwards(predictor.tokenize(texts)):
        for operator in count(forward, clock=time.perf_counter).operators:
            roof = prepacked if operator.name in PREPACKED else limits
            bound = attribute([operator], roof, weights_bytes, operator.seconds or 1e-9, on_host=False)
            least[_kind(operator)] += bound.compute_s + bound.memory_s
            spent[_kind(operator)] += operator.seconds or 0.0
    return Roofline(sum(least.values()), *({kind: times[kind] for kind in KINDS} for times in (least, spent)))


def layer_rate(precision: Precision, clock: Callable[[], float] = time.perf_counter) -> float:
    """Return the FLOP/s of the best of some square products by a linear layer of a working copy in this precision."""
    layer = torch.nn.Sequential(torch.nn.Linear(SIZE, SIZE).requires_grad_(False))
    copy, inputs = precision.copy_of(layer), torch.randn(SIZE, SIZE, dtype=precision.dtype)
    seconds = []
    with torch.inference_mode(), precision.active(inputs.device):
        calibrate(copy, lambda: copy(inputs))
        for _ in range(CALLS):
            start = clock()
            copy(inputs)
            seconds.append(clock() - start)
    return 2 * SIZE**3 / min(seconds)


def _kind(work: OperatorLoad) -> str:
    name = work.name.removeprefix("aten::")
    if "attention" in name:
        return "attention"
    return "matmul" if name in MATMUL else "element-wise"


def limits_text(ceilings: Ceilings) -> str:
    """Return the measured limits as one line."""
    rates = [
        f"{ceiling.dtype} {ceiling.precision or ''} {ceiling.flops_per_s / 1e9:.0f}".replace("  ", " ")
        for ceiling in ceilings.compute
    ]
    memory = [f"{ceiling.level} {ceiling.bytes_per_s / 1e9:.0f}" for ceiling in ceilings.memory]
    return f"GFLOP/s: {', '.join(rates)}; GB/s: {', '.join(memory)}; {torch.get_num_threads()} threads"


CPU = torch.device("cpu")
MIN_AGREEMENT = 0.995
SEARCHED_TEXTS = 512  # for the best batches of the engines and of ours
BUDGETS = (1024, 2048, 4096)
MOST_ROWS = {"long-tailed": 512, "short": 3080}


def main(argv: Sequence[str] | None = None) -> int:
    """Run all cases and print what they amount to."""
    args = _arguments(argv)
    print(f"machine {environment.machine_fingerprint()}: {json.dumps(environment.machine())}")
    print(f"settings: {json.dumps(environment.settings())}")
    here = case_names()
    if "short" not in here:
        print("short: left out, the MiniLM classifier or banking77 is missing")
    deadline = time.perf_counter() + args.seconds
    states = {name: State.read(args.state, name, args.rows) for name in args.only or here}
    cases = [_measure(name, args.rows, args.repeats, state, deadline) for name, state in states.items()]
    measured = [case for case in cases if case]
    print()
    if len(measured) < len(cases):
        print("not all repeats are made; the same command goes on")
        return 3
    short = [failure for case in measured for failure in failures(case)]
    for case in measured:
        for method, reason in case.unjudged.items():
            print(f"not judged: the bounds of {method} ({case.name}): {reason}")
    for failure in short:
        print(f"FAILED: {failure}")
    summary = "; ".join(f"{case.name}: {', '.join(lines(case))}" for case in measured)
    print(f"{'FAILED' if short else 'passed'}: {summary}")
    return int(bool(short))


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=case_names(), help="these cases alone")
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
    case = load_case(name, rows or MOST_ROWS[name])
    limits = ceilings.measure(CPU)
    print(f"\n{name}: {len(case.texts)} texts, {limits_text(limits)}", flush=True)
    reference = one_by_one(case.model, tokenize(case.tokenizer, case.texts, MAX_LENGTH), range(len(case.texts)))
    ours = {SAME: _chosen(case, reference, "same"), FASTEST: _chosen(case, reference, "fastest")}
    with engines(case) as others:
        take_turns(case, ours, others, repeats, state, deadline)
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
        with_best(state.rates, correct),
        same_labels=int((np.asarray(state.labels[SAME]) == own).sum()),
        texts=len(case.texts),
        shares=shares,
        unjudged=unjudged(
            has_bfloat16_matmul(CPU), limits.best("bfloat16").flops_per_s / limits.best("float32").flops_per_s
        ),
    )
    print("\n".join(lines(measured)), flush=True)
    return measured


def _chosen(case: Case, reference: np.ndarray, kind: str) -> Predictor:
    """Return our predictor in the precision that this rule chooses on all texts, with a searched token budget."""
    from boundby.inference import choose_precision

    sample = Sample(case.texts, case.labels, is_all=True, reference=reference)
    rule = PrecisionRule(kind, MIN_AGREEMENT)
    choice = choose_precision(case.model, case.tokenizer, sample, rule, PredictorOptions(MAX_LENGTH))
    predictor = choice.best.predictor
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
    engines: Mapping[str, Label],
    repeats: int,
    state: State,
    deadline: float,
) -> None:
    """Add repeats to the state, each of all methods one after another, as long as there is time for one more."""
    methods: dict[str, Callable[[Sequence[str]], Sequence[int]]] = {**peers(case), **engines}
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
            texts = case.texts[:SPEC_BATCH] if name == SPEC else case.texts
            start = time.perf_counter()
            answers = methods[name](texts)
            rates[name] = len(texts) / (time.perf_counter() - start)
            if len(texts) == len(case.texts):
                labels[name] = [int(label) for label in answers]
            print(f"{repeat + 1:>3}  {name:<21} {rates[name]:8.1f} texts/s", flush=True)
        state.keep(rates, labels)
        longest = max(longest, time.perf_counter() - began)


def _share(case: Case, predictor: Predictor, rates: Sequence[float], limits: ceilings.Ceilings) -> float | None:
    """Print how near the roofline the texts came and what takes the rest; return the share, None above 1."""
    roofline = roofline_of(predictor, case.texts, weight_bytes(predictor.model), limits)
    spent = len(case.texts) / median(rates)
    reached = share(roofline.least_s, spent)
    text = "faster than the measured limits" if reached is None else f"{reached:.0%} of the roofline"
    print(f"{predictor.options.precision}, {predictor.strategy}: {text} of its own precision")
    print("\n".join(roofline.lines(spent)), flush=True)
    return reached


if __name__ == "__main__":
    warnings.filterwarnings("ignore", message=".*pipelines sequentially on GPU.*")
    sys.exit(main())
