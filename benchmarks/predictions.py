"""How well gains are predicted: for each model, shape and fix what was predicted, its bound, and what it then gave.

Models have random weights and need no network; MiniLM is taken from ../shared where it is there. Each case is replayed,
its gains are predicted, and then every fix that applies is tried in interleaved pairs. Cases that are done are kept in
the folder of `--parts`, so that a run can be cut short and continued. Exits 1 where a bound was broken.

    python benchmarks/predictions.py [--only MODEL ...] [--compile] [--parts FOLDER] [--write docs/measurements/FILE.md]
"""

import argparse
import copy
import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import transformers
from scipy.stats import spearmanr

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # find the packages of this checkout

from boundby.bound import Bench, Call, Candidate, Fix, Lengths, Machine, Made, Trial, Verdict, bottleneck
from boundby.inference import Tokens, collate, fixes, forward
from boundby.machine import ceilings, environment
from boundby.timing import Work

ROOT = Path(__file__).resolve().parents[1]
MINILM = ROOT.parent / "shared" / "models" / "minilm-banking77"
CPU = torch.device("cpu")
SHAPES = ((1, 64), (8, 64), (16, 128))  # samples, and about the tokens of the longest
IMAGES = ((1, 128), (4, 128), (8, 96))  # samples, and the pixels of each side
WORDS, PADDING = 4000, 1
REPLAY_S, TRIALS_S = 4.0, 8.0
COMPILE_S = 60.0


def main() -> int:
    """Run what is missing, print the scorecard, write it."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", nargs="+", choices=list(MODELS), default=list(MODELS), help="these models alone")
    parser.add_argument("--compile", action="store_true", help="try torch.compile too, half a minute for each case")
    parser.add_argument("--parts", type=Path, default=ROOT / "results" / "predictions", help="where cases are kept")
    parser.add_argument("--write", type=Path, help="the Markdown file to write from all cases that are there")
    args = parser.parse_args()
    args.parts.mkdir(parents=True, exist_ok=True)
    limits, _, _ = ceilings.cached(args.parts, CPU, ("float32", "bfloat16"))
    for name in args.only:
        for shape in IMAGES if name == "ResNet-18" else SHAPES:
            path = args.parts / f"{name}-{shape[0]}x{shape[1]}.json"
            if not path.exists():
                path.write_text(json.dumps(measured(name, shape, limits, args.compile), indent=1))
            show(json.loads(path.read_text()))
    cases = [json.loads(path.read_text()) for name in MODELS for path in sorted(args.parts.glob(f"{name}-*.json"))]
    print("\n".join(summary(cases)))
    if args.write:
        args.write.write_text("\n".join(document(cases, limits)) + "\n")
    return int(any(row["broken"] for case in cases for row in case["rows"]))


# The models


def _bert() -> Any:
    sizes = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 1024}
    return transformers.BertForSequenceClassification(transformers.BertConfig(vocab_size=WORDS, **sizes))


def _distilbert() -> Any:
    config = transformers.DistilBertConfig(vocab_size=WORDS, dim=384, n_layers=3, n_heads=6, hidden_dim=1536)
    return transformers.DistilBertForSequenceClassification(config)


def _gpt2() -> Any:
    config = transformers.GPT2Config(vocab_size=WORDS, n_embd=384, n_layer=4, n_head=6, pad_token_id=PADDING)
    return transformers.GPT2ForSequenceClassification(config)


def _qwen2() -> Any:
    sizes = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.Qwen2Config(vocab_size=WORDS, intermediate_size=704, pad_token_id=PADDING, **sizes)
    return transformers.Qwen2ForSequenceClassification(config)


def _roberta() -> Any:
    sizes = {"hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8, "intermediate_size": 2048}
    config = transformers.RobertaConfig(vocab_size=WORDS, max_position_embeddings=514, **sizes)
    return transformers.RobertaForSequenceClassification(config)


def _resnet() -> Any:
    sizes = {"depths": [2, 2, 2, 2], "hidden_sizes": [64, 128, 256, 512], "layer_type": "basic"}
    return transformers.ResNetForImageClassification(transformers.ResNetConfig(embedding_size=64, **sizes))


def _minilm() -> Any:
    return transformers.AutoModelForSequenceClassification.from_pretrained(MINILM, dtype="float32")


MODELS: dict[str, Callable[[], Any]] = {
    "BERT": _bert,
    "DistilBERT": _distilbert,
    "GPT-2": _gpt2,
    "Qwen2": _qwen2,
    "RoBERTa": _roberta,
    "ResNet-18": _resnet,
    **({"MiniLM": _minilm} if MINILM.is_dir() else {}),
}


# One case


def measured(name: str, shape: tuple[int, int], limits: ceilings.Ceilings, compiles: bool) -> dict[str, Any]:
    """Return what was predicted of each fix of one case, and what it gave."""
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    with torch.inference_mode():
        verdict = (of_images if name == "ResNet-18" else of_texts)(model, shape, limits, compiles)
    return {
        "model": name,
        "shape": str(verdict.reference).replace(" tokens", "" if name != "ResNet-18" else " px"),
        "ms": 1e3 * verdict.reference.seconds.value if verdict.reference else None,
        "bound": verdict.bound,
        "settled": verdict.settled,
        "doubts": [str(doubt) for doubt in verdict.doubts],
        "rows": [_row(trial) for trial in verdict.trials if trial.predicted is not None],
        "untried": [f"{item.fix}: {item.reason}" for item in verdict.untried],
    }


def of_texts(model: Any, shape: tuple[int, int], limits: ceilings.Ceilings, compiles: bool) -> Verdict:
    """Return the verdict on a batch of texts whose lengths have a long tail, with every fix that applies."""
    samples, longest = shape
    rng = np.random.default_rng(samples)
    lengths = np.clip((longest / 3 * rng.lognormal(0, 0.6, 4 * samples)).astype(int), 8, longest)
    lengths[:: samples or 1] = longest  # as long in every batch
    tokens = Tokens([rng.integers(5, WORDS, length).astype(np.int32) for length in lengths], truncated=0)
    tokenizer = SimpleNamespace(pad_token_id=PADDING, padding_side="right")

    def batch_of(rows: Sequence[int]) -> Any:
        return collate(tokens, rows, PADDING, CPU)

    batch = batch_of(range(samples))
    subject = fixes.Subject(model, tokenizer, tokens, batch, range(len(lengths)))
    offered = [fixes.without_padding(subject), fixes.in_another_dtype(subject, torch.bfloat16)]
    offered += [fixes.with_reduced_precision_matmul(subject, "medium", math.inf)]
    offered += [_batch_size(model, batch_of(range(other)), samples) for other in _others(samples)]
    offered += [fixes.compiled(subject)] if compiles else []
    real = [int(length) for length in lengths[:samples]]
    call = Call(
        lambda: forward(model, batch),
        shape=(samples, longest),
        lengths=Lengths(real, longest, lambda wanted: _cut(model, batch, wanted)),
        batch_sizes=dict.fromkeys(_others(samples), longest),
        candidates=[item for item in offered if isinstance(item, Candidate)],
    )
    return _judged(call, limits, TRIALS_S + COMPILE_S * compiles)


def of_images(model: Any, shape: tuple[int, int], limits: ceilings.Ceilings, compiles: bool) -> Verdict:
    """Return the verdict on a batch of images: nothing is padded, and nothing is a text."""
    samples, side = shape
    images = torch.randn(2 * samples, 3, side, side)

    def work(of: Any, batch: torch.Tensor) -> Work:
        return lambda: of(pixel_values=batch).logits

    def in_bfloat16() -> Made:
        return Made(work(copy.deepcopy(model).bfloat16(), images[:samples].bfloat16()))

    own = work(model, images[:samples])
    candidates = [Candidate(Fix("dtype", {"dtype": "bfloat16"}), in_bfloat16)]
    return _judged(Call(own, shape=shape, candidates=candidates), limits, TRIALS_S)


def _judged(call: Call, limits: ceilings.Ceilings, trials_s: float) -> Verdict:
    return bottleneck(call, Machine(limits, "float32"), Bench(replay_s=REPLAY_S, trials_s=trials_s))


def _others(samples: int) -> list[int]:
    return [samples // 2, 2 * samples] if samples > 1 else [2]


def _batch_size(model: Any, batch: Any, samples: int) -> Candidate:
    size = batch.shape.samples
    return Candidate(
        Fix("batch_size", {"batch_size": size}), lambda: Made(lambda: forward(model, batch)), samples=size / samples
    )


def _cut(model: Any, batch: Any, tokens: int) -> Work:
    """Return the forward of the batch with its first tokens alone, with a mask if it has one."""
    ids, mask = batch.input_ids[:, :tokens].contiguous(), None
    if batch.is_padded:
        mask = batch.attention_mask[:, :tokens].clone()
        mask[0, -1] = 0
    return lambda: model(input_ids=ids, attention_mask=mask)


def _row(trial: Trial) -> dict[str, Any]:
    predicted, given = trial.predicted, trial.measured
    assert predicted is not None
    return {
        "fix": trial.name,
        "kind": trial.fix.kind,
        "predicted": [predicted.value, predicted.low, predicted.high],
        "at_most": trial.at_most if trial.at_most is None or math.isfinite(trial.at_most) else None,
        "measured": [given.value, given.low, given.high],
        "inside": predicted.low <= given.value <= predicted.high,
        "broken": not trial.is_within_bound,
    }


# The scorecard


def show(case: dict[str, Any]) -> None:
    """Print one case."""
    state = "" if case["settled"] else " (not settled)"
    print(f"{case['model']} {case['shape']}: {case['ms']:.1f} ms, {case['bound']}{state}", *case["doubts"], sep="\n  ")
    for row in case["rows"]:
        print("  " + " ".join(cells(row)))
    sys.stdout.flush()


def cells(row: dict[str, Any]) -> list[str]:
    """Return the fix, what was predicted, the bound, what was measured, and whether that is as predicted."""

    def span(values: Sequence[float]) -> str:
        return f"{values[0]:.2f} [{values[1]:.2f}, {values[2]:.2f}]"

    most = f"{row['at_most']:.2f}" if row["at_most"] else "-"
    said = "bound broken" if row["broken"] else "yes" if row["inside"] else "no"
    return [f"{row['fix']:<40}", span(row["predicted"]), most, span(row["measured"]), said]


def summary(cases: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield coverage, rank correlation and broken bounds, of all fixes and by kind."""
    rows = [row for case in cases for row in case["rows"]]
    kinds = ["all", *dict.fromkeys(row["kind"] for row in rows)]
    for kind in kinds:
        of = [row for row in rows if kind in ("all", row["kind"])]
        if not of:
            continue
        inside, broken = sum(row["inside"] for row in of), sum(row["broken"] for row in of)
        off = np.median([abs(math.log(row["measured"][0] / row["predicted"][0])) for row in of])
        ranks = spearmanr([row["predicted"][0] for row in of], [row["measured"][0] for row in of]).statistic
        yield (
            f"{kind}: {inside} of {len(of)} in the 90 % interval ({100 * inside / len(of):.0f} %), rank correlation "
            f"{ranks:.2f}, {broken} bounds broken, half of the predictions within {100 * math.expm1(off):.0f} %"
        )


def document(cases: Sequence[dict[str, Any]], limits: ceilings.Ceilings) -> Iterator[str]:
    """Yield the lines of the Markdown file."""
    machine = environment.machine()
    yield "# Predicted gains beside measured ones, on a CPU"
    yield ""
    yield (
        f"{machine['cpu']}, {torch.get_num_threads()} threads, torch "
        f"{torch.__version__}, transformers {transformers.__version__}; made by `benchmarks/predictions.py`. Peaks: "
        + ", ".join(f"{item.dtype} {item.precision or ''} {item.flops_per_s / 1e9:,.0f}" for item in limits.compute)
        + " GFLOP/s."
    )
    yield ""
    yield "Factors of the throughput. An interval of a prediction is meant to hold 90 of 100 measured gains."
    yield ""
    yield from (f"- {line}" for line in summary(cases))
    yield ""
    yield "| model | shape | ms | limited by | fix | predicted | at most | measured | inside |"
    yield "| --- | --- | --- | --- | --- | --- | --- | --- | --- |"
    for case in cases:
        bound = case["bound"].replace("_", "-") + ("" if case["settled"] else ", not settled")
        for row in case["rows"]:
            result = [case["model"], case["shape"], f"{case['ms']:.1f}", bound, *map(str.strip, cells(row))]
            yield f"| {' | '.join(result)} |"


if __name__ == "__main__":
    sys.exit(main())
