"""The second task, end to end on a tiny encoder: sweep, whole set, trace, layers and report; its score by hand."""

import importlib
import json

import numpy as np
import pytest

from tests import evaluation_workplace as workplace
from tests.tiny_models import save_tokenizer
from utils.baseline import sweep as baseline
from utils.command.errors import InputError
from utils.models import tasks

TASK = tasks.of("sentence_embeddings")
STEPS = ("02_baseline_inference", "03_detailed_profiling", "04_visualize_results")
QUICK = (
    "profiling.batch_sizes=[1,2]", "profiling.num_measurement_runs=2", "profiling.num_warmup_runs=1",
    "profiling.max_seconds_per_batch_size=0.001", "trace.warmup_steps=0", "trace.active_steps=1",
    "layers.num_runs=2", "layers.warmup_runs=0",
)  # fmt: skip


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """The results of steps 01 to 04 with an encoder, and their exit codes."""
    import torch
    from transformers import BertConfig, BertModel

    from tests.tiny_models import SIZE, WORDS

    folder = tmp_path_factory.mktemp("embeddings")
    save_tokenizer(folder / "model", pad_token="[PAD]", model_max_length=64)
    torch.manual_seed(0)
    BertModel(BertConfig(vocab_size=len(WORDS) + 3, max_position_embeddings=64, **SIZE)).save_pretrained(
        folder / "model"
    )
    settings = workplace.prepare(folder, workplace.texts(), folder / "model", "model.task=sentence_embeddings")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(baseline, "find_limits", lambda *_: None)  # which measures the limits of this machine
        codes = [importlib.import_module(f"scripts.{step}").main([*settings, *QUICK]) for step in STEPS]
    return folder, codes


def test_every_step_works_and_the_report_tells_the_score(measured):
    folder, codes = measured
    assert codes == [0, 0, 0]
    document = json.loads((folder / "results" / "baseline_metrics.json").read_text())
    assert document["model"]["embedding_dimension"] == 16 and document["agreement"]["share"] == 1
    full = document["full_dataset_metrics"]
    assert full["samples"] == full["neighbour_rows"] == workplace.ROWS and full["throughput_samples_per_sec"] > 0
    assert f"{full['neighbour_accuracy']:.4f}" in (folder / "results" / "baseline_summary_report.txt").read_text()
    assert (folder / "results" / "layers" / "model_summary.json").exists()
    assert (folder / "results" / "profiler_traces" / "trace.json.gz").exists()


def test_vectors_are_those_of_the_encoder_alone(measured):
    import torch
    from transformers import AutoModel, AutoTokenizer

    from utils.evaluation import parts

    folder = measured[0]
    table = parts.read((folder / "results" / "evaluation" / "part-00000.parquet").read_bytes())
    encoder = AutoModel.from_pretrained(folder / "model").eval()
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    for row in (0, 7, 29):
        tokens = tokenizer(workplace.texts()[row][0], return_tensors="pt", truncation=True, max_length=64)
        with torch.inference_mode():
            mean = encoder(input_ids=tokens.input_ids).last_hidden_state[0].mean(dim=0).numpy()
        np.testing.assert_allclose(table["logits"][row].as_py(), mean / np.linalg.norm(mean), atol=1e-5)


def test_neighbours_are_counted_whatever_the_order_of_the_parts():
    vectors = np.array([[1, 0], [0.8, 0.6], [0, 1], [-0.6, 0.8]], dtype=np.float32)
    labels = np.array([0, 0, 1, 0])
    halves = [TASK.table(np.arange(4)[half], labels[half], np.ones(2, int), vectors[half]) for half in ([0, 1], [2, 3])]
    metrics = []
    for order in (halves, halves[::-1]):
        score = TASK.Score(("a", "b"), [])
        for table in order:
            score.add(table, [], None)
        metrics.append(score.metrics())
    # cosines: 0-1 0.8, 1-2 0.6, 2-3 0.8: rows 0 and 1 have each other, 2 and 3 each other, which have different labels
    assert metrics[0] == metrics[1] and (metrics[0].neighbour_rows, metrics[0].neighbour_accuracy) == (4, 0.5)
    assert TASK.fault(halves[0], 2) is None
    assert "row 0" in TASK.fault(TASK.table(np.arange(1), labels[:1], np.ones(1, int), 2 * vectors[:1]), 2)


def test_a_single_text_has_no_neighbour_and_the_reason_is_told():
    score = TASK.Score(("a",), [])
    score.add(TASK.table(np.arange(1), np.zeros(1, int), np.ones(1, int), np.eye(1, 2, dtype=np.float32)), [], None)
    metrics = score.metrics()
    assert metrics.neighbour_accuracy is None and metrics.neighbour_accuracy_reason


def test_any_label_is_known_and_an_encoder_with_a_decoder_is_not():
    matcher = TASK.label_matcher(None, ["x", "y"])
    assert [matcher.id_of(value, 0) for value in ("new", 1, "new", 7)] == [0, 1, 0, 2]
    assert list(matcher.names) == ["new", "y", "7"]
    with pytest.raises(InputError, match="decoder"):
        TASK.require_model({"is_encoder_decoder": True}, "config.json", "t5")
