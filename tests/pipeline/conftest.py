"""Fixtures that several files of this folder share."""

import pytest

from tests.report_reading import Reader


@pytest.fixture
def read(tmp_path):
    """Store results and read them as step 04 does."""
    return Reader(tmp_path / "results")
