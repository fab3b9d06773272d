"""The two trained classifiers of `evaluation.py`, with texts and labels: long-tailed reviews, and short questions."""

import csv
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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


def names() -> list[str]:
    """Return the names of the cases that can be run here."""
    return [LONG, *([SHORT] if MINILM.is_dir() and BANKING77.is_dir() else [])]


def load(name: str, rows: int) -> Case:
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
    from utils.quickstart import cache
    from utils.quickstart.recipe import Recipe, Schedule, Shape

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
