"""The verdict of the report: one line each for what, why and next, the table, the gains, the machine's limits."""

from dataclasses import replace

import pytest

from tests import baseline_document as results
from tests.diagnosed_rows import diagnosed
from utils.comparison.facts import Rounds
from utils.report import summary, verdict


@pytest.fixture
def data(read):
    return read(results.document(diagnosed(results.cpu_rows())))


def changed(data, **changes):
    """Return the data with another verdict of the chosen row."""
    row = {**data.chosen, "verdict": {**data.chosen["verdict"], **changes}}
    return replace(data, chosen=row)


def test_why_and_gains_are_those_of_the_verdict(data):
    labels = [label for label, _ in summary.summary(data).pairs]
    assert labels[:3] == ["What", "Why", "Next"]
    said = verdict.why(changed(data, telling=("a", "b"), confidence="high", confirmation="confirmed"))
    assert said == "a; b; confidence high, confirmed by intervention"
    gains = ({"fix": "remove padding", "at_most": 2.4, "basis": "58 % of the FLOPs are of padding", "relieves": ()},)
    said = str(verdict.section(changed(data, gains=gains)))
    assert "at most 2.40 times: remove padding (58 % of the FLOPs are of padding)" in said
    assert "bounds, not promises" in said


@pytest.mark.parametrize("bound", list(verdict.MEANING))
def test_every_bound_has_a_sentence(data, bound):
    said = verdict.what(changed(data, bound=bound, alternatives=("compute", "memory"), share_of_limit=0.5))
    assert said.startswith(f"batch size {data.chosen['batch_size']} in float32 is bound by {verdict.MEANING[bound]}")
    assert "(compute and memory)" in said and "50 % of its time" in said


def test_a_run_without_a_verdict_or_rows_says_so(read):
    data = read(results.document(results.cpu_rows()))
    assert verdict.what(data).startswith("unknown (")
    assert "There is no verdict" in "".join(str(block) for block in verdict.section(data))
    assert verdict.section(read(results.document([])))
    assert verdict.what(read(results.document([]))).startswith("unknown (")


def test_other_dtypes_are_compared_with_the_first(read):
    rows = diagnosed(results.gpu_rows(), gpu=True)
    data = read(results.gpu_document(rows))
    seconds = {"float32": [0.01, 0.0101, 0.0099, 0.01, 0.01], "bfloat16": [0.004, 0.00401, 0.00399, 0.004, 0.004]}
    rounds = {(dtype, size): Rounds(dict(enumerate(seconds[dtype]))) for dtype in seconds for size in (1, 4)}
    said = str(verdict.section(replace(data, rounds=rounds)))
    assert "Against float32" in said and said.count("'faster'") == 2 and "2.50 [" in said
