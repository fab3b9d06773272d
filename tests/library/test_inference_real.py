"""A trained classifier and real questions: the labels of `same` are those of one text at a time."""

import csv
from pathlib import Path
from typing import Any

import pytest

from boundby.inference import PrecisionRule, Predictor, PredictorOptions, Sample, choose_precision, one_by_one, tokenize

SHARED = Path(__file__).resolve().parents[3] / "shared"
MINILM, BANKING77 = SHARED / "models" / "minilm-banking77", SHARED / "data" / "banking77" / "test.csv"
ROWS, DECIDED_ON = 48, 24

pytestmark = pytest.mark.skipif(
    not (MINILM.is_dir() and BANKING77.is_file()), reason=f"{MINILM} or {BANKING77} is not here"
)


def minilm() -> tuple[Any, Any]:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    model = AutoModelForSequenceClassification.from_pretrained(MINILM, dtype="float32", local_files_only=True)
    return model.eval(), AutoTokenizer.from_pretrained(MINILM, local_files_only=True)


def questions() -> list[str]:
    with BANKING77.open(encoding="utf-8", newline="") as lines:
        return [row["text"] for row in csv.DictReader(lines)]


def test_same_precision_gives_the_labels_of_one_text_at_a_time() -> None:
    model, tokenizer = minilm()
    texts = questions()[:: len(questions()) // ROWS][:ROWS]
    choice = choose_precision(
        model, tokenizer, Sample(texts[:DECIDED_ON]), PrecisionRule("same"), PredictorOptions(512, token_budget=1024)
    )
    predictor = Predictor(model, tokenizer, choice.options, texts[:DECIDED_ON])
    alone = one_by_one(model, tokenize(tokenizer, texts, 512), range(len(texts)))
    found = predictor.predict(texts)
    assert predictor.strategy == "packed, by length"
    assert predictor.doubts == ()
    assert found.labels.tolist() == alone.argmax(axis=1).tolist()
    assert len(set(found.labels.tolist())) > 20
