"""Report and dry run tell the largest batch that fits, by the batches of the longest texts in the sweep."""

import pytest
import torch

from boundby.known import Missing
from boundby.memory import Demand
from tests import classifiers
from utils import memory
from utils.selection import Selection
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
    found = memory.forecast(visits([1, 8, 32, 128], field), {TOKENS: Demand(TOKENS, ((0, PER_TEXT), (0, -PER_TEXT)))})
    assert [batch["samples"] for batch in found["fits"]] == [1239, 2679, 4119]
    assert memory.told(found).startswith(
        "Batches of the longest texts (200 tokens) take 1 GB and 5 MB for each text. The largest that fit: 1,239"
    )


def test_what_the_sweep_does_not_tell_has_a_reason():
    counted = Demand(TOKENS, ((0, PER_TEXT),))
    for demands, why in ({TOKENS: counted}, "the peaks of 2"), ({TOKENS: Missing("no")}, "no"), ({}, "not counted"):
        found = memory.forecast(visits([1, 8], "process_peak_bytes"), demands)
        assert found["model"] is None and why in memory.told(found)


def test_what_the_largest_batches_hold_is_counted_once_for_each_length():
    words = classifiers.reviews(40)
    model, tokenizer = classifiers.build("bert", 500, 0), classifiers.tokenizer(words)
    selection = Selection.of(words, tokenizer, 64, torch.device("cpu"))
    found = memory.demands(model, selection, [1, 4, 8])
    assert set(found) == {64} and all(found.values())
    broken = memory.demands(lambda **_: 1 / 0, selection, [1])
    assert "ZeroDivisionError" in broken[64].reason
