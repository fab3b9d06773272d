"""The parts of an evaluation that need no model: rows by ranges, counts, spans of time, the search for a budget."""

import csv
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from sklearn.metrics import accuracy_score, f1_score

from boundby.inference import Tokens
from boundby.inference.planning import token_budgets
from boundby.inference.precision import can_prepack
from boundby.inference.predictor import usual_budget
from boundby.machine.ceilings import PRECISIONS, Ceilings, ComputeCeiling
from boundby.work.roofline import Interval
from tests.gpu_double import H100, T4, plugged_in
from utils.command.artifacts import Layout
from utils.command.errors import InputError, PipelineError
from utils.data import load_texts
from utils.evaluation import rows, tuning
from utils.evaluation.finalize import busy_seconds, elapsed_seconds, occupancy
from utils.evaluation.plan import Budget, Identity
from utils.evaluation.tuning import Load
from utils.models.tasks.sequence_classification import score

TEXTS = ("plain", 'with "quotes", and a comma', "two\nlines", "a\r\nbreak\rmore", "é\u2028ü 😀", " ", "=1+1", "last")


def identity(row_count: int, wanted: int | None = None, seed: int | None = None) -> Identity:
    data = ("sequence_classification", wanted or row_count, row_count, "", seed)
    model = ("", "", "", ("a", "b"), "float32", "highest", 64)
    return Identity(*data, *model, "same", 0.995, None, "auto", "cpu", "", {}, {})


@pytest.fixture
def dataset(tmp_path) -> Path:
    """A normalised dataset with gaps in its row ids, and texts that a careless reader would tear."""
    path = tmp_path / "val_df.csv"
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["row_id", "text", "labels", "label_name"])
        writer.writerows([3 * row, f"{TEXTS[row % len(TEXTS)]}", row % 2, "ab"[row % 2]] for row in range(50))
    return path


@pytest.mark.parametrize("size", [1, 7, 50, 64])
def test_shards_hold_each_row_once_and_as_the_other_reader_sees_it(dataset, size):
    expected = load_texts(Layout(dataset.parent, dataset, dataset, dataset))
    shards = list(rows.split(dataset, identity(50), size))
    read_rows = [rows.read(dataset, shard, None) for shard in shards]
    assert [shard.id for shard in shards] == list(range(-(-50 // size)))
    assert [text for part in read_rows for text in part.texts] == expected.texts
    assert np.array_equal(np.concatenate([part.row_ids for part in read_rows]), expected.row_ids)
    assert np.array_equal(np.concatenate([part.labels for part in read_rows]), expected.labels)


def test_a_seeded_sample_is_read_in_the_order_of_the_dataset(dataset):
    expected = load_texts(Layout(dataset.parent, dataset, dataset, dataset))
    positions = rows.evaluated_positions(50, 20, 0)
    assert sorted(np.random.default_rng(0).permutation(50)[:20]) == positions.tolist()
    shards = list(rows.split(dataset, identity(50, 20, 0), 8))
    read_rows = [rows.read(dataset, shard, positions) for shard in shards]
    assert [shard.rows for shard in shards] == [8, 8, 4]
    assert np.concatenate([part.row_ids for part in read_rows]).tolist() == expected.row_ids[positions].tolist()
    assert [text for part in read_rows for text in part.texts] == [expected.texts[position] for position in positions]


def test_a_dataset_of_another_size_or_order_is_refused(dataset):
    with pytest.raises(InputError, match="ends after 50 of 51 rows"):
        list(rows.split(dataset, identity(51), 8))
    with pytest.raises(InputError, match="has more than the 49 rows"):
        list(rows.split(dataset, identity(49), 8))
    for wrong in ("12", "9"):  # out of order, and twice
        other = dataset.with_name("other.csv")
        other.write_text(dataset.read_text().replace("\n15,", f"\n{wrong},"), newline="")
        with pytest.raises(InputError, match="row_id does not ascend"):
            list(rows.split(other, identity(50), 8))


def test_texts_for_a_trial_come_from_all_over_the_dataset(dataset):
    shards = list(rows.split(dataset, identity(50), 5))
    assert len(rows.first_texts(dataset, shards, 20)) == 20
    assert rows.first_texts(dataset, shards[:1], 100) == [TEXTS[row] for row in range(5)]


def test_the_shortest_and_longest_rows_are_those_by_tokens_whatever_their_characters(dataset):
    by_text = {text: index for index, text in enumerate(reversed(TEXTS))}  # so that no order of characters fits
    extremes = rows.Extremes(7, lambda texts: np.array([by_text[text] for text in texts]))
    shards = list(rows.split(dataset, identity(50), 8, extremes))
    assert extremes.tokens == sum(by_text[TEXTS[row % len(TEXTS)]] for row in range(50))
    texts = rows.check_texts(dataset, shards, extremes.offsets, 0)
    assert sorted(texts) == sorted([TEXTS[-1]] * 6 + [TEXTS[-2]] + [TEXTS[0]] * 7)
    assert len(shards) == 7

    def none(texts):
        raise ValueError("text 3 has no tokens")

    with pytest.raises(PipelineError, match="rows 0 to 21 of the dataset: text 3 has no tokens"):
        list(rows.split(dataset, identity(50), 8, rows.Extremes(7, none)))


@pytest.mark.parametrize("classes", [2, 5])
def test_counts_merge_to_what_sklearn_scores(classes):
    rng = np.random.default_rng(classes)
    labels = rng.integers(0, classes, 200)
    predictions = np.where(rng.random(200) < 0.6, labels, rng.integers(0, classes - 1, 200))  # the last is rare
    counted = sum(
        score.counted(part, other, classes + 1)  # one class that never occurs
        for part, other in zip(np.split(labels, [3, 90]), np.split(predictions, [3, 90]), strict=True)
    )
    scores = score.scores(counted)
    assert scores["accuracy"] == pytest.approx(accuracy_score(labels, predictions), abs=1e-12)
    assert scores["f1_macro"] == pytest.approx(f1_score(labels, predictions, average="macro"), abs=1e-12)
    assert scores["f1_weighted"] == pytest.approx(f1_score(labels, predictions, average="weighted"), abs=1e-12)


def test_each_machine_and_each_device_counts_once():
    assert busy_seconds([(0, 2), (2, 3)]) == 5
    assert busy_seconds([(10, 2), (0, 2)]) == 4  # a pause between two attempts
    assert busy_seconds([(0, 10), (1, 2), (8, 4)]) == 12  # workers beside each other
    spans = ((0, 10, "gpu-1"), (5, 10, "gpu-1"), (0, 8, "gpu-2"), (100, 1, "gpu-2"))
    shared = [cost(started, seconds, "a", device) for started, seconds, device in spans]
    occupied = occupancy(shared)
    assert (occupied["machine_time_s"], occupied["device_time_s"], occupied["machine_time_reason"]) == (16, 24, None)
    for clock in (0, 5, -3600):  # that of the other machine is ahead, or behind
        both = occupancy([*shared, cost(clock, 10, "b", "gpu-3")])
        assert (both["machine_time_s"], both["device_time_s"]) == (26, 34)
    cores = occupancy([cost(0, 10, host, "cpu") for host in ("a", "a", "b")])  # two workers split the cores of a
    assert (cores["machine_time_s"], cores["device_time_s"]) == (20, 20)


@pytest.mark.parametrize("skew_s", [0, 1000, -1000])
def test_clocks_that_differ_change_no_duration(skew_s):
    two_hosts = [cost(0, 100, "a", "cpu"), cost(skew_s, 100, "b", "cpu")]
    assert elapsed_seconds(two_hosts) == 200  # of machines
    one_host = [cost(50.0, 10, "a", "cpu"), cost(60.0, 10, "a", "cpu"), cost(65.0, 10, "a", "cpu")]
    assert elapsed_seconds(one_host) == 25


def cost(started: float, seconds: float, host: str, device: str) -> SimpleNamespace:
    return SimpleNamespace(span=(started, seconds), host=host, device_id=device)


class Machine:
    """A predictor whose tokens take a microsecond at 2,048 per batch, and less or more elsewhere."""

    device = torch.device("cpu")

    def __init__(self, factor: dict[int, float], token_budget: int = 2048, calls: list | None = None) -> None:
        self.factor, self.token_budget = factor, token_budget
        self.calls = [] if calls is None else calls

    def with_token_budget(self, token_budget: int) -> "Machine":
        return Machine(self.factor, token_budget, self.calls)

    def tokenize(self, texts):
        return Tokens([np.zeros(100, dtype=np.int32) for _ in texts], 0)

    def predict(self, texts):
        return self.predict_tokens(self.tokenize(texts))

    def predict_tokens(self, tokens):
        self.calls.append((len(tokens.ids), self.token_budget))
        seconds = 1e-5 * self.factor.get(self.token_budget, 1.0) * tokens.lengths.sum()
        useful = int(tokens.lengths.sum())
        return SimpleNamespace(useful_tokens=useful, halvings=0, seconds=SimpleNamespace(compute_s=seconds))


TEXTS_2000 = ["text"] * 2000


def test_a_long_evaluation_takes_the_smallest_budget_as_fast_as_the_fastest():
    machine = Machine({512: 2.0, 1024: 1.5, 2048: 1.01, 4096: 1.0, 8192: 1.2})
    budget_choice = tuning.choose_budget(machine, TEXTS_2000, Load(1e9, 1e-5))
    assert budget_choice.token_budget == 2048
    assert list(budget_choice.seconds) == ["512", "1024", "2048", "4096", "8192"]
    assert {count for count, _ in machine.calls[2:]} == {164}  # two full batches of the largest: 16,384 tokens
    machine = Machine({})
    few = tuning.choose_budget(machine, TEXTS_2000[:20], Load(1e9, 1e-5))
    assert (few.token_budget, few.reason) == (2048, "not measured: all texts together are too few")
    assert tuning.seconds_per_token(machine, TEXTS_2000) == pytest.approx(1e-5)
    assert machine.calls == [(21, 2048)] * 2  # a full batch: fewer texts would not fill a GPU


@pytest.mark.parametrize(
    ("a_quarter", "whole_s", "saved_s"),
    [
        (1.0, 2.0, None),  # shorter than the search: nothing is timed for it
        (1.0, 10_000.0, 0.0),  # a batch costs nothing beside its tokens
        (1.2, 40.0, 2.0),  # 0.067 of a token's time: three quarters of it go with four times as many tokens
        (1.2, 60.0, "searched"),
        (0.9, 20.0, 2.0),  # a token takes less in it
        (0.7, 10_000.0, "searched"),
    ],
)
def test_a_search_is_made_where_it_is_predicted_to_save_what_it_takes(a_quarter, whole_s, saved_s):
    machine = Machine({512: a_quarter})
    budget_choice = tuning.choose_budget(machine, TEXTS_2000, Load(whole_s / 1e-5, 1e-5))
    search_s = 1e-5 * 164 * 100 * len(token_budgets(machine.device)) * (tuning.SEARCH_ROUNDS + 1)
    if saved_s == "searched":
        assert budget_choice.seconds and budget_choice.token_budget == (512 if a_quarter < 1 else 1024)
        return
    reason = f"not measured: a search would take {search_s:.1f} s of about {whole_s:.1f} s"
    prediction = "" if saved_s is None else f", and is predicted to save {saved_s:.1f} s"
    assert budget_choice == Budget(2048, reason + prediction)
    assert machine.calls == ([] if saved_s is None else [(6, 512)] * 2)


def _kind(name: str) -> tuple[str, str | None]:
    return ("float32", name) if name in PRECISIONS else (name, None)


def limits(**flops_per_s: float) -> Ceilings:
    """Limits of products: of float32 by their precision, of others by their dtype; each is known to 2 %."""
    compute = tuple(
        ComputeCeiling(*_kind(name), name not in ("high", "medium"), rate, 0.98 * rate, 4096, 0.0)
        for name, rate in flops_per_s.items()
    )
    return Ceilings({}, compute, (), 5e-6, 5e-6, 1.0)


GPU, CPU = torch.device("cuda:0"), torch.device("cpu")


def of_layers(products: float) -> torch.nn.Module:
    """A model whose products have so many FLOPs for each token, and an embedding that has none."""
    layers = torch.nn.Sequential(torch.nn.Embedding(100, 10), torch.nn.Linear(10, int(products / 20)))
    return layers.to("meta")


LOAD = Load(24e6, 554 / 24e6)  # the set on which it was not tried


def test_what_faster_products_save_follows_from_the_limits_of_products():
    h100 = limits(highest=50e12, high=400e12)
    saved = tuning.saved_by_kernels(of_layers(1e9), GPU, LOAD, h100)
    assert saved.value == pytest.approx(24e6 * 1e9 / 50e12 * (1 - 50 / 400))
    assert saved.low < saved.value < saved.high < 554.0
    most = tuning.saved_by_kernels(of_layers(1e9), GPU, Load(1e12, 554e-12), h100)
    assert most.value == pytest.approx(554.0 * (1 - 50 / 400))  # products take no more than all of it
    assert not tuning.saved_by_kernels(of_layers(1e9), GPU, LOAD, limits(highest=50e12))
    unknown = tuning.saved_by_kernels(of_layers(1e9), GPU, LOAD, None)
    assert unknown.reason == "the limits of this machine are not known"
    assert not tuning.saved_by_kernels(of_layers(1e9), GPU, LOAD, limits(highest=7e12, high=7e12))  # of a T4


@pytest.mark.skipif(not can_prepack(CPU), reason="this CPU cannot lay out weights anew")
def test_prepacked_weights_are_predicted_to_save_what_they_saved_elsewhere():
    assert tuning.saved_by_kernels(of_layers(1e9), CPU, Load(1e6, 1e-3), None) == tuning.PREPACKED.times(1000.0)
    faster = tuning.saved_by_kernels(of_layers(1e9), CPU, Load(1e6, 1e-3), limits(highest=2e12, medium=8e12))
    assert faster.value == pytest.approx(500.0 * 0.75)


def test_what_compiling_saves_follows_from_a_trial_or_from_what_products_leave():
    a_gpu = SimpleNamespace(device=GPU, dtype="bfloat16", options=SimpleNamespace(precision="bfloat16"))
    a_cpu = SimpleNamespace(device=CPU)
    known = tuning.Known(lambda: limits(highest=50e12, bfloat16=800e12))
    saved = tuning.saved_by_compiling(a_gpu, of_layers(1e9), Load(24e6, 100 / 24e6), known)
    assert (saved.value, saved.low, saved.high) == (pytest.approx(35.0), 0.0, pytest.approx(70.0))
    assert not tuning.saved_by_compiling(a_gpu, of_layers(1e9), Load(24e6, 100 / 24e6), tuning.Known())
    assert tuning.saved_by_compiling(a_cpu, None, Load(1.0, 100.0), tuning.Known()) == tuning.COMPILED_ON_HOST.times(
        100.0
    )
    tried = tuning.saved_by_compiling(a_cpu, None, Load(1.0, 100.0), tuning.Known(compiled=Interval(1.25, 1.0, 2.0)))
    assert (tried.value, tried.low, tried.high) == (pytest.approx(20.0), 0.0, 50.0)


def test_a_large_card_has_large_batches_by_default(monkeypatch):
    for card, budget in ((H100, 65536), (T4, 16384)):
        with plugged_in(card):
            assert usual_budget(GPU) == budget and 65536 in token_budgets(GPU)
    assert usual_budget(CPU) == 2048


def test_the_margin_of_near_ties_is_that_of_full_batches(monkeypatch):
    class Rounds(Machine):
        """Other kernels, with another result, from 1,024 tokens on."""

        def with_guard_margin(self, margin):
            return self

        def predict_tokens(self, tokens):
            return SimpleNamespace(logits=np.full((len(tokens.ids), 2), 0.5 * (tokens.lengths.sum() > 1024)))

    monkeypatch.setattr(tuning, "in_dtype", lambda model, dtype: model)
    monkeypatch.setattr(tuning, "one_by_one", lambda model, tokens, rows: np.zeros((len(rows), 2)))
    margins = [
        tuning.guard_in_full_batches(Rounds({}, budget), None, TEXTS_2000, lambda difference, _: 2 * difference)
        for budget in (512, 2048)
    ]
    assert margins == [0.0, 1.0]
