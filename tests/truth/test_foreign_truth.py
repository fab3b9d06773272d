"""Thousands of damaged documents, settings and datasets, each taken whole or refused in one message."""

import pytest

from tests import foreign

pytestmark = [pytest.mark.truth, pytest.mark.timeout(1200)]


@pytest.mark.parametrize(
    ("make", "count"), [(foreign.documents, 2500), (foreign.configs, 2500), (foreign.corpora, 200)]
)
def test_whatever_is_read_is_taken_whole_or_refused_in_one_message(tmp_path, make, count):
    fates = make(count, tmp_path)
    print(
        f"\n{make.__name__}: {sum(fates.values()):,} cases;",
        "; ".join(f"{n} {item}" for item, n in sorted(fates.items())),
    )
    assert sum(fates.values()) == count
