"""A small share of what others may have written; `tests/truth/test_foreign_truth.py` makes thousands."""

import pytest

from tests import foreign


@pytest.mark.parametrize(("make", "count"), [(foreign.documents, 60), (foreign.configs, 150), (foreign.corpora, 25)])
def test_whatever_is_read_is_taken_whole_or_refused_in_one_message(tmp_path, make, count):
    assert sum(make(count, tmp_path).values()) == count
