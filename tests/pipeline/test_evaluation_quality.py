"""What is said of the predictions: by class, by pair, by confidence; and the surest mistakes, in little memory."""

import csv
import tracemalloc
from itertools import pairwise

import numpy as np
import pytest
from sklearn.metrics import brier_score_loss, precision_recall_fscore_support

from boundby import files
from boundby.formatting import Missing
from tests import evaluation_workplace as workplace
from tests import predicted_quality as predicted
from tests.baseline_document import PLAN
from utils.command.artifacts import EvaluationFolder
from utils.models.tasks.sequence_classification import calibration, quality, score
from utils.models.tasks.sequence_classification.calibration import Reliability
from utils.models.tasks.sequence_classification.score import ConfidentMistakes

# Classes


def test_every_class_has_the_scores_of_sklearn():
    source = np.random.default_rng(1)
    labels = source.integers(0, 6, 300)
    predictions = np.where(source.random(300) < 0.7, labels, source.integers(0, 6, 300))
    counts = score.counted(labels, predictions, 6)
    classes = score.per_class(counts, list("abcdef"))
    expected = precision_recall_fscore_support(labels, predictions)
    for name, values in zip(("precision", "recall", "f1", "support"), expected, strict=True):
        assert [getattr(row, name) for row in classes] == pytest.approx(values.tolist(), abs=1e-12), name
    assert np.mean([row.f1 for row in classes]) == pytest.approx(score.scores(counts)["f1_macro"], abs=1e-12)
    assert all(row.recall_ci_low < row.recall < row.recall_ci_high for row in classes)


def test_share_of_nothing_is_none_with_its_reason_and_never_zero():
    counts = np.array([[3, 0, 1, 0], [2, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]])
    both, unpredicted, unlabelled, absent = score.per_class(counts, list("abcd"))
    assert both.reason is None and (both.precision, both.recall) == (0.6, 0.75)
    assert (unpredicted.precision, unpredicted.recall, unpredicted.f1) == (None, 0, 0)
    assert unpredicted.reason == "precision: it was never predicted"
    assert (unlabelled.precision, unlabelled.recall, unlabelled.recall_ci_low) == (0, None, None)
    assert unlabelled.reason == "recall: no row has this label"
    assert [getattr(absent, name) for name in ("precision", "recall", "f1")] == [None] * 3
    assert absent.reason.endswith("f1: neither")


def test_most_confused_pairs_come_first_and_hits_are_no_confusion():
    counts = np.array([[50, 4, 2], [2, 10, 0], [4, 0, 6]])
    pairs = score.most_confused(counts, "abc", 3)
    assert [(pair.label_name, pair.prediction_name, pair.rows, pair.support) for pair in pairs] == [
        ("c", "a", 4, 10),  # the same four rows are more of c than of a
        ("a", "b", 4, 56),
        ("b", "a", 2, 12),
    ]
    assert pairs[0].share == 0.4
    assert score.most_confused(np.diag([3, 4]), "ab", 3) == ()


# Calibration


def counted(confidences, is_right, pieces: int = 1) -> Reliability:
    reliability = Reliability()
    for part, right in zip(np.array_split(confidences, pieces), np.array_split(is_right, pieces), strict=True):
        reliability.add(part, right)
    return reliability


@pytest.fixture
def rows() -> tuple[np.ndarray, np.ndarray]:
    """Confidences of an overconfident model, most of them near 1, and which predictions are right."""
    source = np.random.default_rng(2)
    confidences = (1 - source.beta(0.6, 4, 5000) * 0.9).astype(np.float32)
    return confidences, source.random(5000) < confidences - 0.05


def test_bins_hold_equally_many_rows_and_give_the_error_of_its_definition(rows):
    confidences, is_right = rows
    curve = counted(confidences, is_right).calibration()
    sizes = [bin.rows for bin in curve.bins]
    assert len(sizes) == calibration.BINS and sum(sizes) == 5000 and max(sizes) - min(sizes) <= 5
    order = np.argsort(confidences, kind="stable")
    edges = np.cumsum([0, *sizes])
    groups = [order[start:stop] for start, stop in pairwise(edges)]
    error = (
        sum(len(group) * abs(is_right[group].mean() - confidences[group].mean(dtype=float)) for group in groups) / 5000
    )
    assert curve.ece == pytest.approx(error, abs=1e-4)  # a cell may hold rows of two groups
    assert curve.mean_confidence == pytest.approx(confidences.mean(dtype=float), abs=1e-9)
    assert curve.brier_score == pytest.approx(brier_score_loss(is_right, confidences.astype(float)), abs=1e-9)
    assert curve.accuracy == is_right.mean()
    assert all(bin.accuracy_ci_low <= bin.accuracy <= bin.accuracy_ci_high for bin in curve.bins)
    assert sum(curve.distribution.rows) == 5000 and sum(curve.distribution.correct) == is_right.sum()
    shuffled = np.random.default_rng(0).permutation(5000)
    assert counted(confidences, is_right, 7).calibration() == curve, "in parts, to the last bit, in any order"
    assert counted(confidences[shuffled], is_right[shuffled], 3).calibration() == curve


def test_a_model_that_is_right_as_often_as_it_says_shows_the_error_by_chance():
    reliability = [predicted.reliability(2000, seed=seed) for seed in range(30)]
    errors, by_chance = ([getattr(curve, name) for curve in reliability] for name in ("ece", "ece_by_chance"))
    assert np.mean(errors) == pytest.approx(np.mean(by_chance), rel=0.1)
    overconfident = predicted.reliability(2000, overconfident=0.1)
    assert overconfident.ece == pytest.approx(0.1, abs=0.03) and overconfident.ece > 3 * by_chance[0]


def test_equal_confidences_share_a_bin_and_few_rows_are_called_few():
    sure = counted(np.ones(1000, dtype=np.float32), np.arange(1000) % 10 > 0).calibration()
    [only] = sure.bins
    assert (only.rows, only.confidence_to, only.has_few_rows) == (1000, 1.0, False)
    assert (sure.mean_confidence, sure.ece) == (1.0, pytest.approx(0.1))
    assert sure.brier_score == pytest.approx(0.1) and sure.ece_by_chance == 0
    mixed = counted(np.array([0.3] * 5 + [1.0] * 295, dtype=np.float32), np.ones(300, dtype=bool)).calibration()
    assert [(bin.rows, bin.has_few_rows) for bin in mixed.bins] == [(300, False)]
    assert [bin.has_few_rows for bin in predicted.reliability(20).bins] == [True]


def test_threshold_is_the_lowest_that_surely_keeps_the_promise():
    confidences = np.repeat(np.array([0.5, 0.7, 0.9], dtype=np.float32), 400)
    is_right = np.concatenate([np.arange(400) % 2 == 0, np.arange(400) % 25 > 0, np.arange(400) >= 0])
    ninety, ninety_five, ninety_nine = counted(confidences, is_right).calibration().thresholds
    assert (ninety.rows, ninety.share, ninety.accuracy) == (800, pytest.approx(2 / 3), 0.98)
    assert ninety.confidence == pytest.approx(0.7, abs=1e-4) and ninety.accuracy_ci_low > 0.9
    assert ninety_five.rows == 800
    assert (ninety_nine.rows, ninety_nine.accuracy) == (400, 1.0)
    [_, _, none] = counted(confidences[:400], is_right[:400]).calibration().thresholds
    assert none.confidence is None and none.reason


# Mistakes


def tables(rows: int, pieces: int, seed: int = 3):
    """Return shards with their parts, of which several rows are equally sure."""
    source = np.random.default_rng(seed)
    labels, logits = source.integers(0, 3, rows), source.integers(0, 6, (rows, 3)).astype(np.float32)
    lengths = source.integers(1, 9, rows)
    for positions in np.array_split(np.arange(rows), pieces):
        table = score.table(positions, labels[positions], lengths[positions], logits[positions])
        yield table, [f"text {row}" for row in positions]


def kept(shards) -> tuple[quality.ConfidentMistake, ...]:
    mistakes = ConfidentMistakes()
    for table, texts in shards:
        mistakes.add(table, texts)
    return mistakes.surest("abc")


def test_surest_mistakes_are_those_of_a_full_sort_with_their_rows_and_long_texts_cut():
    [(table, _)] = tables(2000, 1)
    rows = [row for row in table.to_pylist() if row["label"] != row["prediction"]]
    rows.sort(key=lambda row: (-row["confidence"], -row["margin"], row["row_id"]))
    expected = [row["row_id"] for row in rows[: score.MISTAKES]]
    assert rows[score.MISTAKES]["confidence"] == rows[score.MISTAKES - 1]["confidence"]  # the last place is a tie
    for pieces in (1, 3, 40):
        assert [mistake.row_id for mistake in kept(tables(2000, pieces))] == expected
    assert [mistake.row_id for mistake in kept(reversed(list(tables(2000, 7))))] == expected
    right = score.table(np.arange(3), np.zeros(3, int), np.ones(3, int), np.eye(1, 3).repeat(3, 0))
    assert kept([(right, ["a"] * 3)]) == ()
    long = "ü" * (score.LONGEST_TEXT + 1)
    table = score.table(np.array([12, 13]), np.zeros(2, int), np.ones(2, int), np.eye(1, 3, 1).repeat(2, 0))
    cut, whole = kept([(table, [long, long[:-1]])])
    assert (cut.row_id, cut.label_name, cut.prediction_name) == (12, "a", "b")
    assert len(cut.text) == score.LONGEST_TEXT and cut.text.endswith("…") and whole.text == long[:-1]


def test_memory_does_not_grow_with_the_rows():
    [(table, texts)] = tables(1000, 1)
    confidences, is_right = table["confidence"].to_numpy(), np.arange(1000) % 2 == 0
    reliability, surest = Reliability(), ConfidentMistakes()

    def see(parts_seen: int) -> int:
        for _ in range(parts_seen):
            reliability.add(confidences, is_right)
            surest.add(table, texts)
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        few, many = see(3), see(150)
    finally:
        tracemalloc.stop()
    assert many - few < 100_000


# Files


def read_csv(path) -> list[list[str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.reader(file))


def test_tables_for_people_and_the_record_for_programs_say_the_same(tmp_path):
    folder = EvaluationFolder(tmp_path)
    names = ("-1", "=1+1", 'comma, "quote"\nand line')
    predicted.store(folder, names, mistakes=predicted.mistakes(2, '=HYPERLINK("x")\nsecond line', name=names[1]))
    [head, *lines] = read_csv(folder.confusion_matrix)
    assert head == [quality.CORNER, "'-1", "'=1+1", names[2]]  # a spreadsheet runs none of them
    assert [[int(cell) for cell in line[1:]] for line in lines] == predicted.COUNTS.tolist()
    [head, *lines] = read_csv(folder.per_class)
    assert [line[1] for line in lines] == ["'-1", "'=1+1", names[2]]
    last = dict(zip(head, lines[2], strict=True))
    assert (last["recall"], last["f1"], last["reason"]) == ("", "0.0", "recall: no row has this label")
    [_, first, _] = read_csv(folder.confident_mistakes)
    assert first[-1] == '\'=HYPERLINK("x")\nsecond line 0'
    quality_read = quality.read(folder, PLAN)
    assert quality_read.names == list(names)
    assert np.array_equal(quality_read.confusion, predicted.COUNTS)
    assert quality_read.record.confident_mistakes[0].text == '=HYPERLINK("x")\nsecond line 0'
    assert quality_read.record.calibration == predicted.reliability()


def test_what_cannot_be_read_has_a_reason(tmp_path):
    folder = EvaluationFolder(tmp_path / "evaluation")
    assert quality.read(folder, PLAN) == Missing("there is no evaluation/quality.json")
    predicted.store(folder)
    assert quality.read(folder, "other") == Missing("quality.json is of another evaluation than the metrics")
    assert not quality.read(folder, None)
    whole = folder.confusion_matrix.read_text()
    folder.confusion_matrix.write_text(whole.partition("\n")[2])
    assert quality.read(folder, PLAN).reason == "confusion_matrix.csv and quality.json are not of the same classes"
    folder.confusion_matrix.write_text(whole.replace("90", "ninety"))
    assert "cannot be read" in quality.read(folder, PLAN).reason
    folder.confusion_matrix.unlink()
    assert quality.read(folder, PLAN).reason == "there is no evaluation/confusion_matrix.csv"
    folder.quality.write_text(folder.quality.read_text().replace('"schema_version": 1', '"schema_version": 9'))
    assert quality.read(folder, PLAN).reason == "quality.json is of version 9, this program reads 1"
    folder.quality.write_text("[]")
    assert "cannot be read" in quality.read(folder, PLAN).reason


def test_texts_without_labels_are_predicted_and_their_accuracy_is_absent(tmp_path, capsys):
    settings = workplace.prepare(tmp_path, workplace.texts(), None, "dataset.label_column=null")
    assert workplace.evaluate(settings, "plan", "run", "finalize") == [0, 0, 0]
    folder = EvaluationFolder(tmp_path / "results" / "evaluation")
    metrics = files.read_json(folder.metrics)["metrics"]
    assert (metrics["samples"], metrics["accuracy"], metrics["accuracy_reason"]) == (
        40,
        None,
        "the dataset has no labels",
    )
    with folder.predictions.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert all(row["label"] == row["correct"] == row["label_name"] == "" and row["prediction_name"] for row in rows)
    assert not folder.quality.exists() and not folder.per_class.exists()
    said = "".join(capsys.readouterr())
    assert "Throughput" in said and "ccuracy" not in said.partition("Samples:")[2]
