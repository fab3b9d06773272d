"""Zip bombs beyond the limit of what is read, and ten thousand launching threads; prints what memory it took.

python -m pytest -m truth -s tests/truth/test_trace_bounds.py
"""

from pathlib import Path

import pytest

from tests.trace_truth.large import BOMBS, bomb, launching_threads, measured

pytestmark = [pytest.mark.truth, pytest.mark.timeout(900)]


@pytest.mark.parametrize("name", BOMBS)
def test_a_large_zip_bomb_is_refused_in_bounded_memory(tmp_path: Path, name: str) -> None:
    [(grown, said)] = measured(bomb(tmp_path, name, 700), max_json_bytes=2**29, timeout_s=600)
    print(f"{name}: {grown:.0f} MiB; {said}")
    assert f"{name}.json.gz is not a readable Chrome trace" in said
    assert grown < 600


def test_ten_thousand_launching_threads_need_bounded_memory(tmp_path: Path) -> None:
    [(grown, said)] = measured(launching_threads(tmp_path, 10_000, 100_000), timeout_s=600)
    print(f"ten thousand threads: {grown:.0f} MiB")
    assert said == "120000"
    assert grown < 400
