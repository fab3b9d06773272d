"""Labels of the data become ids of the model by name or by id, never by guessing."""

import pytest

from utils.command.errors import InputError
from utils.models.tasks.sequence_classification.labels import LabelMatcher, ModelLabels, whole_number

NAMES = ("card_arrival", "card_linking", "age_limit")


def reconciler(*names: str, class_names: list[str] | None = None) -> LabelMatcher:
    return LabelMatcher(ModelLabels(names or NAMES), class_names)


def test_names_match_exactly_and_without_doubt():
    matching = reconciler()
    assert [matching.id_of(name, row) for row, name in enumerate(reversed(NAMES))] == [2, 1, 0]
    assert matching.doubts() == [] and matching.unknown == {}


@pytest.mark.parametrize("value", [1, "1", " 1 ", 1.0, "1.0", True])
def test_ids_are_taken_in_any_form_a_file_gives_them(value):
    assert reconciler().id_of(value, 0) == 1


@pytest.mark.parametrize("value", [3, -1, "3", 1.5, "1.5", "", [1], 10**30, "9" * 5000, float("inf")])
def test_what_is_no_id_of_the_model_is_unknown(value):
    matching = reconciler()
    assert matching.id_of(value, 7) is None
    assert [(seen.rows, seen.first_row) for seen in matching.unknown.values()] == [(1, 7)]


@pytest.mark.parametrize("name", ["Card Arrival", "card-arrival", " CARD_ARRIVAL ", "card  arrival"])
def test_names_match_up_to_case_and_separators_with_a_doubt(name):
    matching = reconciler()
    assert matching.id_of(name, 0) == 0
    assert len(matching.doubts()) == 1 and "1 label name(s) differ" in matching.doubts()[0]


def test_loose_match_is_refused_where_two_names_would_do():
    matching = reconciler("Card", "card", "age")
    assert matching.id_of("CARD", 0) is None
    assert [matching.id_of("Card", 0), matching.id_of("card", 0)] == [0, 1]


def test_mixed_names_and_ids_give_a_doubt():
    matching = reconciler()
    assert [matching.id_of("card_arrival", 0), matching.id_of(2, 1)] == [0, 2]
    assert "mixes label names and ids" in matching.doubts()[0]


def test_classes_of_a_hub_dataset_match_by_name():
    matching = reconciler(class_names=["age_limit", "card_arrival", "card_linking"])
    assert [matching.id_of(value, value) for value in (0, 1, 2)] == [2, 0, 1]
    assert matching.doubts() == []
    matching = reconciler(class_names=["age_limit", "chargeback"])
    assert matching.id_of(1, 4) is None
    assert "'chargeback' in 1 row(s), first in row 4" in matching.explanation("labels")


def test_model_without_names_takes_classes_by_position_with_a_doubt():
    matching = reconciler("LABEL_0", "LABEL_1", class_names=["neg", "pos"])
    assert [matching.id_of(value, 0) for value in (0, 1)] == [0, 1]
    assert "matched by position" in matching.doubts()[0] and "neg, pos" in matching.doubts()[0]


def test_ids_are_taken_in_any_form_of_a_file():
    matching = reconciler("1", "2", "3", "4", "5")
    assert [matching.id_of(value, 0) for value in (1, "5", 3.0)] == [0, 4, 2]
    assert "read as names, not as ids" in matching.doubts()[0]
    assert matching.id_of(0, 0) is None
    assert reconciler("007", "008").id_of("007", 0) == 0
    assert "or the ids" not in matching.explanation("stars")
    matching = reconciler("0", "1")
    assert [matching.id_of(value, 0) for value in (0, "1")] == [0, 1]
    assert matching.doubts() == []
    matching = reconciler("LABEL_0", "LABEL_1")
    assert [matching.id_of(value, 0) for value in (0, "1", "LABEL_1")] == [0, 1, 1]
    assert matching.id_of("pos", 3) is None
    assert "takes ids 0 to 1 only" in matching.explanation("labels")


def test_explanation_names_label_rows_and_what_the_model_takes():
    matching = reconciler()
    for row in (5, 8, 9):
        matching.id_of("card_arival", row)
    explanation = matching.explanation("category")
    assert "1 label(s) of column 'category'" in explanation
    assert "'card_arival' in 3 row(s), first in row 5, did you mean 'card_arrival'?" in explanation
    assert "its 3 names or the ids 0 to 2: 0: 'card_arrival', 1: 'card_linking', 2: 'age_limit'" in explanation
    matching = reconciler(*(f"class {index}" for index in range(100)))
    for row in range(500):
        matching.id_of(f"word {row}", row)
    explanation = matching.explanation("text")
    assert "500 label(s)" in explanation and "… 495 more" in explanation and "… 95 more" in explanation
    assert len(explanation) < 600


def test_table_of_the_config_is_read_in_order_of_ids():
    config = {"id2label": {"1": "b", "0": "a", "10": "k", **{str(index): f"n{index}" for index in range(2, 10)}}}
    assert ModelLabels.of_config(config, "config.json").names[:2] == ("a", "b")
    assert ModelLabels.of_config(config, "config.json").names[10] == "k"
    assert ModelLabels.of_config({}, "config.json").names == ("LABEL_0", "LABEL_1")
    assert ModelLabels.of_config({"num_labels": 3}, "config.json").are_generic


@pytest.mark.parametrize(
    ("config", "fault"),
    [
        ({"id2label": {"0": "LABEL_0"}}, "has 1 label"),
        ({"num_labels": 1}, "has 1 label"),
        ({"id2label": {}}, "has 0 label"),
        ({"id2label": {"0": "a", "2": "b"}}, "expected 0, 1, 2"),
        ({"id2label": {"0": "a", "1": "a"}}, "the name 'a' twice"),
        ({"id2label": {"zero": "a", "one": "b"}}, "is not a table"),
        ({"id2label": ["a", "b"]}, "is not a table"),
        ({"num_labels": "many"}, "is not a table"),
    ],
)
def test_unusable_table_is_refused(config, fault):
    with pytest.raises(InputError, match=fault) as caught:
        ModelLabels.of_config(config, "model/config.json")
    assert str(caught.value).startswith("model/config.json: ")


@pytest.mark.parametrize(("value", "number"), [("007", 7), ("1e3", None), ("٣", 3), (None, None), (float("nan"), None)])
def test_whole_numbers_are_recognised(value, number):
    assert whole_number(value) == number


def test_ids_that_count_from_one_are_told_by_the_one_too_many():
    matching = reconciler()
    assert [matching.id_of(value, row) for row, value in enumerate((1, "2", 3))] == [1, 2, None]
    assert matching.counts_from_one
    shifted = LabelMatcher(ModelLabels(NAMES), first_id=1)
    assert [shifted.id_of(value, row) for row, value in enumerate((1, "2", 3))] == [0, 1, 2]
    assert not shifted.counts_from_one and "go from 1 to 3" in shifted.doubts()[0]


@pytest.mark.parametrize("values", [(0, 1, 3), (1, 4), ("age_limit", 1, 3), (1, 2)])
def test_other_labels_do_not_count_from_one(values):
    matching = reconciler()
    for row, value in enumerate(values):
        matching.id_of(value, row)
    assert not matching.counts_from_one


def test_labels_that_the_model_does_not_know_name_the_way_without_them():
    matching = reconciler()
    matching.id_of("good", 0)
    assert "dataset.label_column=null" in matching.explanation("label")
