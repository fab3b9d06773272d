"""Report and dry run tell the largest batch that fits, by the batches of the longest texts in the sweep."""

import pytest

from utils import memory
from utils.visits import Memory, Timing, Visit

FIXED, PER_TEXT, TOKENS = 1_000_000_001, 5e6, 200


def visits(sizes: list[int], field: str) -> list[Visit]:
    def largest(size: int) -> Visit:
        timing = Timing("largest", 0, 1.0, size, size * TOKENS // 2, size * TOKENS)
        held: Memory = {field: int(FIXED + size * PER_TEXT)}  # type: ignore[misc]
        return Visit("float32", size, 0, "ok", "test", (timing,), memory=held)

    return [largest(size) for size in sizes]


@pytest.mark.parametrize("field", ["process_peak_bytes", "device_peak_reserved_bytes"])
def test_the_largest_batch_that_fits_is_told_for_usual_sizes(field):
    found = memory.forecast(visits([1, 8, 32, 128], field))
    assert [batch["samples"] for batch in found["fits"]] == [1239, 2048, 2048]
    assert [batch["or_more"] for batch in found["fits"]] == [False, True, True]
    assert memory.told(found) == (
        "Batches of the longest texts (200 tokens) take 1 GB and 5 MB for each text (off by up to 0%). "
        "The largest that fit: 1,239 in 8 GB, more than 2,048 in 16 GB, more than 2,048 in 24 GB."
    )


def test_what_the_sweep_does_not_tell_has_a_reason():
    found = memory.forecast(visits([1, 8], "process_peak_bytes"))
    assert found["model"] is None and "not known: the peaks of 2 batch sizes" in memory.told(found)
