"""A model with sliding windows, and a dataset whose few long texts stand where no sample of it looks."""

import random
from pathlib import Path

import numpy as np
import pytest
import torch

from boundby.inference import one_by_one, packing, tokenize
from tests import evaluation_workplace as workplace
from tests.tiny_models import LABELS, WORDS, edit_config, save_qwen
from utils.artifacts import EvaluationFolder
from utils.evaluation import parts, rows
from utils.evaluation import plan as plans

WINDOW, SHORT, LONG = 16, 320, 24


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("windows")
    model = save_qwen(folder / "model")
    sliding = {"use_sliding_window": True, "sliding_window": WINDOW, "layer_types": ["sliding_attention"] * 2}
    edit_config(model, **sliding)
    rng = random.Random(0)
    lengths = [rng.randint(2, WINDOW - 2) for _ in range(SHORT)] + [rng.randint(40, 60) for _ in range(LONG)]
    texts = [(" ".join(rng.choices(WORDS, k=length)), LABELS[row % 3]) for row, length in enumerate(lengths)]
    return workplace.prepare(folder, texts, model)


def evaluated(settings: list[str], results: Path) -> tuple[plans.Plan, np.ndarray, np.ndarray]:
    """Return the plan, the labels of an evaluation and those of one text at a time."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    assert workplace.evaluate([*settings, f"output.results_dir={results}"], "plan", "run") == [0, 0]
    folder = EvaluationFolder(results / "evaluation")
    plan = plans.load(folder)
    tables = [parts.decode(path.read_bytes()).table for path in sorted(folder.path.glob("part-*"))]
    model = AutoModelForSequenceClassification.from_pretrained(plan.places.model, dtype=torch.float32).eval()
    texts = [text for shard in plan.shards for text in rows.read(Path(plan.places.dataset), shard, None).texts]
    tokens = tokenize(AutoTokenizer.from_pretrained(plan.places.model), texts, plan.choices.max_length)
    alone = one_by_one(model, tokens, range(len(texts))).argmax(axis=1)
    return plan, np.concatenate([table["prediction"].to_numpy() for table in tables]), alone


def test_the_longest_rows_are_checked_too_so_that_a_way_that_is_wrong_for_them_alone_is_found(
    settings, tmp_path, monkeypatch
):
    """The seeded bug leaves the window out, and the long rows are behind the 256 that a sample of this set has."""
    plan, labels, alone = evaluated(settings, tmp_path / "right")
    assert (plan.choices.strategy, plan.reasons.strategy_doubts) == ("packed, by length", [])
    assert np.array_equal(labels, alone)
    dataset = Path(plan.places.dataset)
    lengths = [len(text) for shard in plan.shards for text in rows.read(dataset, shard, None).texts]
    checked = [len(text) for text in rows.check_texts(dataset, plan.shards, plan.check_offsets, 256)]
    assert max(map(len, rows.first_texts(dataset, plan.shards, 256))) < max(lengths)
    assert min(checked) == min(lengths) and sorted(checked)[-16:] == sorted(lengths)[-16:]
    causal = torch.tensor([packing.UNLIMITED, 0])
    monkeypatch.setattr(packing, "attention_window", lambda **_: causal)
    plan, labels, alone = evaluated(settings, tmp_path / "wrong")
    assert plan.choices.strategy == "padded on the right without a mask"
    assert len(plan.reasons.strategy_doubts) == 2 and np.array_equal(labels, alone)
