"""How `benchmarks/training_verdict.py` judges what the tools say."""

import pytest

from benchmarks import training_verdict
from benchmarks.training_verdict import CAUSES, Answer

RIGHT, WRONG, NOTHING = Answer("input", True, ""), Answer("compute", False, ""), Answer("nothing", None, "it failed")


def own(bound: str, stage: str = "data", rank: int | None = None) -> dict:
    straggler = None if rank is None else {"rank": rank, "stage": stage}
    verdict = {"bound": bound, "straggler": straggler, "stages": [{"name": stage}], "text": ["What", "Why", "Next"]}
    return {"verdict": verdict}


def theirs(kind: str, summary: str = "") -> dict:
    return {"primary_diagnosis": {"kind": kind, "summary": summary, "action": "Inspect it."}}


@pytest.mark.parametrize(
    ("case", "document", "is_right"),
    [
        ("slow loader", own("input"), True),
        ("slow loader", own("mixed"), False),
        ("slow loader", own("input", rank=0), False),  # there is but one process
        ("slow logging", own("under_utilised", "logging"), True),
        ("slow logging", own("under_utilised", "callbacks"), False),
        ("slow rank, data", own("input", "data", rank=1), True),
        ("slow rank, data", own("input", "data", rank=0), False),
        ("slow rank, data", own("input", "forward", rank=1), False),
        ("slow rank, data", own("input"), False),
    ],
)
def test_ours_has_to_name_bound_stage_and_process(case: str, document: dict, is_right: bool) -> None:
    assert training_verdict.ours(CAUSES[case], document).is_right is is_right


@pytest.mark.parametrize(
    ("case", "document", "is_right"),
    [
        ("slow loader", theirs("INPUT_BOUND"), True),
        ("slow loader", theirs("COMPUTE_BOUND"), False),
        ("slow optimizer", theirs("COMPUTE_BOUND", "Compute-bound; optimizer is the largest phase."), True),
        ("slow optimizer", theirs("COMPUTE_BOUND", "Compute-bound; backward is the largest phase."), False),
        ("slow rank, data", theirs("INPUT_STRAGGLER", "r1 waited 80 ms for input"), True),
        ("slow rank, data", theirs("INPUT_STRAGGLER", "r0 waited 80 ms for input"), False),
    ],
)
def test_the_peer_may_name_the_cause_in_its_own_words(case: str, document: dict, is_right: bool) -> None:
    assert training_verdict.traceml(CAUSES[case], document).is_right is is_right


def test_a_wrong_or_missing_answer_of_ours_fails() -> None:
    assert training_verdict.summary([RIGHT, RIGHT], [WRONG, NOTHING]) == (
        True,
        "passed: ours named 2 of 2 causes, TraceML 0 of 2 causes",
    )
    assert not training_verdict.summary([RIGHT, WRONG], [RIGHT, RIGHT])[0]
    assert not training_verdict.summary([RIGHT, NOTHING], [])[0]
    assert not training_verdict.summary([], [])[0]


def test_a_loop_that_leaves_nothing_is_an_answer_of_its_own(monkeypatch, capsys) -> None:
    monkeypatch.setattr(training_verdict, "LOOP", "no such file.py")
    assert training_verdict.main(["--only", "healthy", "--without-peer"]) == 1
    assert "nothing" in capsys.readouterr().out.splitlines()[-3]
