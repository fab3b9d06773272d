"""`same` stays with the dtype of the model; in float32 its labels are those of one text at a time, near ties too."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from boundby.inference import Predictor, PredictorOptions, one_by_one
from tests import evaluation_workplace as workplace
from tests.tiny_models import save_bert
from utils.command.artifacts import EvaluationFolder
from utils.evaluation import plan as plans

ROWS = 200
TEXTS = workplace.texts(ROWS)


@pytest.fixture(scope="module")
def ordinary(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return workplace.prepare(tmp_path_factory.mktemp("ordinary"), TEXTS)


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any, list[str]]:
    """A model whose two best logits are as close as float32 has numbers, its tokenizer, and the command line."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    folder = tmp_path_factory.mktemp("tied")
    model = AutoModelForSequenceClassification.from_pretrained(save_bert(folder / "model")).eval()
    head = model.classifier
    noise = torch.randn(head.in_features, generator=torch.Generator().manual_seed(0))
    head.weight.data[1] = head.weight.data[0] + 1e-7 * noise
    head.bias.data = torch.tensor([0.0, 0.0, -9.0])
    model.save_pretrained(folder / "model")
    settings = workplace.prepare(folder, TEXTS, folder / "model")
    settings.append("evaluation.min_agreement=0.1")  # so much would be refused: batches give half the ties otherwise
    return model, AutoTokenizer.from_pretrained(folder / "model"), settings


def evaluated(settings: list[str], results: Path) -> tuple[plans.Plan, dict[str, Any], np.ndarray]:
    assert workplace.evaluate([*settings, f"output.results_dir={results}"], *workplace.WHOLE) == [0, 0, 0]
    folder = EvaluationFolder(results / "evaluation")
    return plans.load(folder), json.loads(folder.metrics.read_text())["metrics"], np.array(workplace.labels(results))


def test_near_ties_get_the_labels_of_one_text_at_a_time_however_short_the_evaluation(tied, tmp_path):
    model, tokenizer, settings = tied
    texts = [text for text, _ in TEXTS]
    predictor = Predictor(model, tokenizer, PredictorOptions(64, token_budget=128), texts)
    alone = one_by_one(model, predictor.tokenize(texts), range(ROWS)).argmax(axis=1)
    assert (predictor.predict(texts).labels != alone).any()  # without a guard
    plan, metrics, labels = evaluated(settings, tmp_path)
    assert plan.choices.precision == "float32" and plan.choices.guard_margin > 0
    assert metrics["exactness"] is None and metrics["guarded_texts"] > 0
    assert np.array_equal(labels, alone)


def test_ordinary_texts_are_not_computed_again_and_a_cost_names_machine_and_device(ordinary, tmp_path):
    plan, metrics, _ = evaluated(ordinary, tmp_path)
    assert 0 < plan.choices.guard_margin < 1e-4 and metrics["guarded_texts"] == 0
    costs = [json.loads(path.read_text()) for path in (tmp_path / "evaluation").glob("cost-*.json")]
    assert {cost["device_id"] for cost in costs} == {"cpu"} and len({cost["host"] for cost in costs}) == 1
    assert metrics["machine_time_s"] == metrics["device_time_s"] == metrics["inference_time_s"]


def test_a_model_in_bfloat16_is_computed_in_bfloat16_and_the_reason_is_true(ordinary, tmp_path):
    plan, metrics, _ = evaluated([*ordinary, "model.dtype=bfloat16"], tmp_path)
    assert (plan.choices.precision, plan.choices.guard_margin) == ("bfloat16", 0.0)
    assert metrics["exactness"] is None and metrics["guarded_texts"] == 0
    assert metrics["exactness_reason"] == ("not measured: evaluation.precision=same computes in model.dtype=bfloat16")
