"""All that can fail, made to fail in the steps and the evaluation; `make truth ARGS="-k faults"` plays it."""

import json

import pytest

from tests.fault_matrix import LIGHT, PLAYED, STORED
from tests.pipeline.test_faults import injected_into

pytestmark = [pytest.mark.truth, pytest.mark.timeout(7200)]
MATRIX = [  # how, at most so many for each scene, and the scenes
    ("fail", 2000, LIGHT),
    ("fail", 500, PLAYED[:-2]),
    ("fail", 40, PLAYED[-2:]),
    ("edit", 6, ("evaluate run", "evaluate finalize", "step 02")),
    ("kill", 80, ("evaluate run", STORED)),
    ("share", 10, ("a step", *PLAYED[:-2])),
]


@pytest.mark.parametrize(("how", "most", "scenes"), MATRIX)
def test_nothing_is_lost_mixed_or_leaked(tmp_path, how, most, scenes):
    notes = injected_into(tmp_path, scenes, most, how)
    print(json.dumps(sorted({note["kind"] for note in notes})), len(notes))
    assert {note["scene"] for note in notes} == set(scenes)
