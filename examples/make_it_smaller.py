"""Make two smaller models of a trained classifier, each taught by it on texts that need no labels: minutes on a laptop.

python examples/make_it_smaller.py MODEL TEXTS.csv OUT [--column text] [--layers 2] [--inner 0.5] [--minutes 2]

OUT/distilled has so many of the layers, evenly spread. OUT/pruned has all of them, and of the inner width of each the
share whose weights are largest; for models laid out as BERT or Llama. Both load like MODEL. To compare them with it:

python run_pipeline.py model.name=MODEL dataset.file=TEST.csv 'variants.models=[OUT/pruned, OUT/distilled]'
"""

import argparse
import copy
import csv
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from boundby.inference import Predictor, PredictorOptions, Tokens, collate, forward, last_layer

MAX_LENGTH, BATCH, LEARNING_RATE = 128, 32, 2e-4
INNER = (  # by layout: the products into the inner width of a layer, and the one out of it
    (("intermediate.dense",), "output.dense"),
    (("mlp.gate_proj", "mlp.up_proj"), "mlp.down_proj"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Make both models and say how often each gives the label of MODEL on texts kept back."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model"), parser.add_argument("texts", type=Path), parser.add_argument("out", type=Path)
    parser.add_argument("--column", default="text")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--inner", type=float, default=0.5)
    parser.add_argument("--minutes", type=float, default=2.0, help="of teaching, for each of the two")
    args = parser.parse_args(argv)
    torch.manual_seed(0)
    disable_progress_bar()
    model = AutoModelForSequenceClassification.from_pretrained(args.model, dtype="float32").eval()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    with args.texts.open(encoding="utf-8", newline="") as lines:
        texts = [row[args.column] for row in csv.DictReader(lines) if row[args.column].strip()]
    texts = [texts[position] for position in torch.randperm(len(texts)).tolist()]
    teacher = Predictor(model, tokenizer, PredictorOptions(MAX_LENGTH), texts[:64])
    tokens, logits = teacher.tokenize(texts), torch.from_numpy(teacher.predict(texts).logits)
    kept_back = max(1, len(texts) // 10)
    for name, student in (("pruned", pruned(model, args.inner)), ("distilled", with_layers(model, args.layers))):
        steps = teach(student, tokens, logits, len(texts) - kept_back, args.minutes * 60)
        student.save_pretrained(args.out / name)
        tokenizer.save_pretrained(args.out / name)
        result = Predictor(student, tokenizer, PredictorOptions(MAX_LENGTH), texts[:64]).predict(texts[-kept_back:])
        same = int((result.labels == logits[-kept_back:].argmax(dim=1).numpy()).sum())
        sizes = f"{student.num_parameters() / 1e6:.1f} of {model.num_parameters() / 1e6:.1f} million parameters"
        print(f"{args.out / name}: {sizes}, {steps} steps, {same} of {kept_back} labels as the model's", flush=True)
    return 0


def with_layers(model: Any, count: int) -> Any:
    """Return a copy of the model with `count` of its layers, evenly spread, the last one among them."""
    student = copy.deepcopy(model)
    layers = last_layer.layers(student)
    if layers is None or not 1 <= count <= len(layers):
        raise SystemExit(f"{type(model).__name__}: has no {count} layers to keep")
    kept = {round((position + 1) * len(layers) / count) - 1 for position in range(count)}
    for position in reversed(range(len(layers))):
        if position not in kept:
            del layers[position]
    for position, layer in enumerate(layers):
        for module in layer.modules():
            if hasattr(module, "layer_idx"):
                module.layer_idx = position
    student.config.num_hidden_layers = count
    if getattr(student.config, "layer_types", None):
        student.config.layer_types = [student.config.layer_types[position] for position in sorted(kept)]
    return student


def pruned(model: Any, share: float) -> Any:
    """Return a copy of the model with this share of the inner width of each layer: that of the largest weights."""
    student = copy.deepcopy(model)
    width = max(1, round(share * student.config.intermediate_size))
    for layer in last_layer.layers(student) or ():
        names = {name for name, _ in layer.named_modules()}
        layout = next(((before, after) for before, after in INNER if {*before, after} <= names), None)
        if layout is None:
            raise SystemExit(f"{type(model).__name__}: its layers are laid out neither as BERT's nor as Llama's")
        before, after = [layer.get_submodule(name) for name in layout[0]], layer.get_submodule(layout[1])
        size = after.weight.norm(dim=0) * torch.stack([item.weight.norm(dim=1) for item in before]).prod(dim=0)
        kept = size.topk(width).indices.sort().values
        for item in before:
            item.weight, item.out_features = nn.Parameter(item.weight[kept].detach()), width
            item.bias = None if item.bias is None else nn.Parameter(item.bias[kept].detach())
        after.weight, after.in_features = nn.Parameter(after.weight[:, kept].detach()), width
    student.config.intermediate_size = width
    return student


def teach(student: Any, tokens: Tokens, logits: torch.Tensor, rows: int, seconds: float) -> int:
    """Let the student learn the logits of the first `rows` texts for so long, and return its steps."""
    optimizer = torch.optim.AdamW(student.parameters(), LEARNING_RATE)
    start, steps = time.monotonic(), 0
    student.train()
    while (spent := (time.monotonic() - start) / seconds) < 1 or not steps:
        optimizer.param_groups[0]["lr"] = LEARNING_RATE * max(0.0, 1 - spent)
        chosen = torch.randint(rows, (BATCH,)).tolist()
        loss = nn.functional.mse_loss(forward(student, collate(tokens, chosen, 0, student.device)), logits[chosen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        steps += 1
    student.eval()
    return steps


if __name__ == "__main__":
    sys.exit(main())
