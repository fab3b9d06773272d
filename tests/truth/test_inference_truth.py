"""All of banking77 by MiniLM: `same` gives every label of one text at a time, whatever the order of the texts."""

import csv
import random
from pathlib import Path

import pytest

SHARED = Path(__file__).resolve().parents[3] / "shared"
MINILM, BANKING77 = SHARED / "models" / "minilm-banking77", SHARED / "data" / "banking77" / "test.csv"

pytestmark = [
    pytest.mark.truth,
    pytest.mark.skipif(not (MINILM.is_dir() and BANKING77.is_file()), reason=f"{MINILM} or {BANKING77} is not here"),
]


@pytest.mark.timeout(1800)
def test_every_label_of_banking77_is_that_of_one_text_at_a_time() -> None:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    from boundby import inference

    model = AutoModelForSequenceClassification.from_pretrained(MINILM, dtype="float32", local_files_only=True).eval()
    tokenizer = AutoTokenizer.from_pretrained(MINILM, local_files_only=True)
    with BANKING77.open(encoding="utf-8", newline="") as lines:
        texts = [row["text"] for row in csv.DictReader(lines)]
    rng = random.Random(0)
    sample = inference.Sample(rng.sample(texts, inference.SAMPLE_ROWS))
    options = inference.PredictorOptions(512)
    choice = inference.choose_precision(model, tokenizer, sample, inference.PrecisionRule("same"), options)
    predictor = inference.Predictor(model, tokenizer, choice.options, texts[:256])
    alone = inference.one_by_one(model, inference.tokenize(tokenizer, texts, 512), range(len(texts)))
    order = rng.sample(range(len(texts)), len(texts))
    straight = predictor.predict(texts)
    shuffled = predictor.predict([texts[row] for row in order])
    same = int((straight.labels == alone.argmax(axis=1)).sum())
    print(f"{same} of {len(texts)} labels, {straight.guarded_texts} near ties computed again, {choice.report}")
    assert same == len(texts)
    assert (shuffled.labels == straight.labels[order]).all()
