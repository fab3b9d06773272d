"""Whose the time of a forward is: every part known by construction, so the sums are exact."""

import pytest
from msgspec.structs import replace

from boundby.known import Missing
from boundby.roofline import Interval, Limits, OperatorLoad
from boundby.split import Cut, Replay, ReplayedOperator, split

LIMITS = Limits(Interval.exact(2.0**10), ((2**40, Interval.exact(2.0**8)),), Interval.exact(2.0**-6))
PRODUCT = ReplayedOperator(
    OperatorLoad("aten::mm", 2, flops=2.0**11, weight_bytes=0.0, other_bytes=2.0**4),  # 2 s of arithmetic
    ((8, 8), (8, 8)),
    "float32",
    hot_s=4.5,
    in_order_s=8.5,
    padding_share=0.5,
)
ADDITION = ReplayedOperator(
    OperatorLoad("aten::add", 2, flops=0.0, weight_bytes=0.0, other_bytes=2.0**8),  # 1 s of memory
    ((8,), (8,)),
    "float32",
    hot_s=2.0,
    in_order_s=2.0,
    padding_share=0.25,
)
REPLAY = Replay(
    operators=(PRODUCT, ADDITION),
    forward_s=Interval.exact(16.0),
    in_order_s=Interval.exact(11.0),
    dispatch_s=0.25,
    views_s=0.5,
    calls=6,
    weights_bytes=0.0,
    on_host=True,
)


def seconds(replay: Replay, measured_s: float | None = None) -> dict[str, float]:
    return {owner.kind: owner.seconds for owner in split(replay, LIMITS, measured_s).owners}


def test_the_owners_add_up_to_the_measured_time():
    expected = {"compute": 2.0, "memory": 1.0, "kernels": 2.5, "around": 4.0, "host": 6.5, "remainder": 0.0}
    assert seconds(REPLAY) == expected
    assert seconds(REPLAY, measured_s=15.0) == expected | {"remainder": -1.0}
    assert sum(seconds(REPLAY, measured_s=15.0).values()) == 15.0


def test_a_part_that_comes_out_negative_keeps_its_sign():
    faster_in_order = replace(REPLAY, in_order_s=Interval.exact(6.0))
    assert seconds(faster_in_order)["around"] == -1.0
    beats_its_limit = replace(REPLAY, operators=(replace(PRODUCT, hot_s=1.5), ADDITION))
    assert seconds(beats_its_limit)["kernels"] == -0.5
    assert sum(seconds(beats_its_limit).values()) == 16.0


def test_what_was_not_replayed_alone_counts_as_in_the_model():
    cut = Cut("budget", ("aten::mm",), 8.5, "the seconds were used up")
    found = split(replace(REPLAY, operators=(replace(PRODUCT, hot_s=None), ADDITION), cut=(cut,)), LIMITS)
    assert (found["kernels"].seconds, found["around"].seconds, found.cut) == (6.5, 0.0, (cut,))


def test_padding_is_a_share_of_each_owner():
    found = split(REPLAY, LIMITS)
    shares = {owner.kind: owner.padding_share for owner in found.owners}
    assert shares["compute"] == 0.5 and shares["memory"] == 0.25 and shares["host"] == 0.0
    assert shares["kernels"] == pytest.approx((2.0 * 0.5 + 0.5 * 0.25) / 2.5)
    assert shares["remainder"] is None
    parts = [owner.seconds * (owner.padding_share or 0.0) for owner in found.owners]
    assert found.padding_share == pytest.approx(sum(parts) / 16.0)
    unknown = replace(REPLAY, operators=(replace(PRODUCT, padding_share=None), ADDITION), padding=Missing("no lengths"))
    assert split(unknown, LIMITS)["host"].padding_share is split(unknown, LIMITS)["compute"].padding_share is None


def test_the_speed_of_products_and_the_largest_owner_are_named():
    found = split(REPLAY, LIMITS)
    assert found.products is not None and (found.products.alone, found.products.in_model) == (0.5, 0.25)
    assert found.largest.kind == "host" and found.share("host") == 6.5 / 16
