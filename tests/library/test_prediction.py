"""What fixes would gain: forwards whose parts are known, so that every prediction is a division."""

import pytest
from msgspec.structs import replace

from boundby.bound.prediction import GROUP_DISPATCHES, ONE_ROUND_ERROR, Batches, predictions
from boundby.bound.split import Cut, Replay, ReplayedOperator, ShapeTime, Variant, split
from boundby.bound.verdict import Fix, Gain
from boundby.formatting import Missing
from boundby.work.roofline import Interval, Limits, OperatorLoad

LIMITS = Limits(Interval.exact(2.0**10), ((2**40, Interval.exact(2.0**8)),), Interval.exact(2.0**-6))
PRODUCT = ReplayedOperator(
    OperatorLoad("aten::mm", 2, flops=2.0**11, weight_bytes=0.0, other_bytes=2.0**4),  # 2 s of arithmetic
    hot_s=4.5,
    in_order_s=8.5,
    padding_share=0.5,
)
ADDITION = ReplayedOperator(
    OperatorLoad("aten::add", 2, flops=0.0, weight_bytes=0.0, other_bytes=2.0**8),  # 1 s of memory
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
    return {part.kind: part.seconds for part in split(replay, LIMITS, measured_s).breakdown}


def test_the_owners_add_up_to_the_measured_time():
    expected = {"compute": 2.0, "memory": 1.0, "kernels": 2.5, "around": 4.0, "host": 6.5, "unexplained": 0.0}
    assert seconds(REPLAY) == expected
    assert seconds(REPLAY, measured_s=15.0) == expected | {"unexplained": -1.0}
    assert sum(seconds(REPLAY, measured_s=15.0).values()) == 15.0


def test_a_part_that_comes_out_negative_keeps_its_sign():
    faster_in_order = replace(REPLAY, in_order_s=Interval.exact(6.0))
    assert seconds(faster_in_order)["around"] == -1.0
    beats_its_limit = replace(REPLAY, operators=(replace(PRODUCT, hot_s=1.5), ADDITION))
    assert seconds(beats_its_limit)["kernels"] == -0.5
    assert sum(seconds(beats_its_limit).values()) == 16.0


def test_what_was_not_replayed_alone_counts_as_in_the_model():
    cut = Cut("budget", ("aten::mm",), 8.5, "the seconds were used up")
    parts = split(replace(REPLAY, operators=(replace(PRODUCT, hot_s=None), ADDITION), cut=(cut,)), LIMITS)
    assert (parts["kernels"].seconds, parts["around"].seconds, parts.cut) == (6.5, 0.0, (cut,))


def test_padding_is_a_share_of_each_owner():
    parts = split(REPLAY, LIMITS)
    shares = {part.kind: part.padding_share for part in parts.breakdown}
    assert shares["compute"] == 0.5 and shares["memory"] == 0.25 and shares["host"] == 0.0
    assert shares["kernels"] == pytest.approx((2.0 * 0.5 + 0.5 * 0.25) / 2.5)
    assert shares["unexplained"] is None
    padded = [part.seconds * (part.padding_share or 0.0) for part in parts.breakdown]
    assert parts.padding_share == pytest.approx(sum(padded) / 16.0)
    unknown = replace(REPLAY, operators=(replace(PRODUCT, padding_share=None), ADDITION), padding=Missing("no lengths"))
    assert split(unknown, LIMITS)["host"].padding_share is split(unknown, LIMITS)["compute"].padding_share is None


def test_the_speed_of_products_and_the_largest_owner_are_named():
    parts = split(REPLAY, LIMITS)
    assert parts.matmul is not None and (parts.matmul.alone, parts.matmul.in_model) == (0.5, 0.25)
    assert parts.largest.kind == "host" and parts.share("host") == 6.5 / 16


BF16 = Fix("dtype", {"dtype": "bfloat16"})
COARSE = Fix("matmul_precision", {"precision": "medium"})
FASTER = replace(LIMITS, flops_per_s=Interval.exact(2.0**12))


def limits_under(fix: Fix) -> Limits | None:
    return FASTER if fix == BF16 else LIMITS


def gains(replay=REPLAY, **known) -> dict[str, Gain]:
    rounds = replace(replay, rounds=known.pop("rounds", 5))
    predicted = predictions(rounds, split(replay, LIMITS), limits_under, Batches(**known))
    return {gain.fix.kind: gain for gain in predicted}


def under(fix: Fix, ratio: Interval | Missing):
    return replace(REPLAY, variants=(Variant(fix, ratio),))


def test_operators_take_their_time_under_the_fix_and_python_stays():
    gain = gains(under(BF16, Interval(0.25, 0.2, 0.3)))["dtype"]
    assert gain.predicted is not None
    assert gain.predicted.value == pytest.approx(16 / (11 * 0.25 + 5))
    assert gain.predicted.low < 16 / (11 * 0.3 + 5) and gain.predicted.high > 16 / (11 * 0.2 + 5)
    # the limits in bfloat16: a quarter of the arithmetic, half of the bytes; and four calls that must be issued
    assert gain.at_most == pytest.approx(16 / (2 / 4 + 1 / 2 + 4 * 2**-6))


def test_few_rounds_make_a_wide_prediction():
    narrow, wide = (gains(under(COARSE, Interval.exact(1.0)), rounds=n)["matmul_precision"].predicted for n in (5, 1))
    assert narrow is not None and wide is not None
    assert wide.high / wide.value > 1 + ONE_ROUND_ERROR > narrow.high / narrow.value


def test_a_fix_without_limits_or_without_a_replay_is_not_predicted():
    assert "dtype" not in gains(under(BF16, Missing("no such kernel")))
    replay = under(BF16, Interval.exact(0.5))
    assert predictions(replay, split(replay, LIMITS), lambda fix: None, Batches()) == ()


def test_a_prediction_never_passes_its_bound():
    bounded = gains(under(BF16, Interval.exact(1e-9)), lengths=[1, 1], input_s=4.0)
    for gain in (gain for gain in bounded.values() if gain.predicted):
        assert gain.predicted.low <= gain.predicted.value <= gain.predicted.high
        assert gain.predicted.high <= gain.at_most


def test_an_operator_that_beats_the_limits_sets_the_bound():
    operators = (replace(REPLAY.operators[0], hot_s=1.5), REPLAY.operators[1])  # 1 s of kernels, where limits ask 2
    gain = gains(replace(under(COARSE, Interval.exact(1.0)), operators=operators))["matmul_precision"]
    assert gain.at_most == pytest.approx(16 / (1 + 1 + 4 * 2**-6))


ATTENTION = replace(REPLAY.operators[0], load=replace(REPLAY.operators[0].load, name="aten::attention"))


@pytest.mark.parametrize(("on_host", "calls"), [(True, 2), (False, 0)])
def test_without_padding_is_left_the_shorter_forward_and_the_attention_of_each_length(on_host, calls):
    shapes = (ShapeTime(2, 4, 8.0), ShapeTime(2, 8, 16.0))
    replay = replace(REPLAY, operators=(ATTENTION, REPLAY.operators[1]), shapes=shapes, on_host=on_host)
    gain = gains(replay, lengths=[8, 4])["remove_padding"]
    squares = (0.5 * (1 + 0.5**2) - 0.75**2) * (8.5 - 2 * 0.25)  # the mean square is more than the square of the mean
    assert gain.predicted is not None
    assert gain.predicted.value == pytest.approx(16 / (12 + squares + calls * GROUP_DISPATCHES * 0.25))
    assert gain.at_most == pytest.approx(16 / (2 * 0.5 + 1 * 0.75 + on_host * 4 * 2**-6))


def test_without_times_of_shorter_forwards_its_padding_is_left_out_of_the_time():
    gain, share = gains(lengths=[8, 4])["remove_padding"], split(REPLAY, LIMITS).padding_share
    assert share is not None and gain.predicted is not None and gain.predicted.value == pytest.approx(1 / (1 - share))


def test_compiled_on_a_host_has_a_bound_and_no_prediction_that_nobody_calibrated():
    gain = gains()["fuse_operators"]
    assert gain.predicted is None and gain.at_most == pytest.approx(16 / 2)


def test_a_larger_batch_shares_what_no_token_adds_and_a_longer_one_pays_for_its_tokens():
    replay = replace(REPLAY, shapes=(ShapeTime(2, 4, 11.0), ShapeTime(2, 8, 16.0)))
    [larger] = [gain for gain in gains(replay, sizes={2: 8, 4: 8}).values() if gain.fix.kind == "batch_size"]
    assert larger.predicted is not None
    assert larger.predicted.value == pytest.approx(16 / (26 / 2)), "6 s for no token, and 1.25 s for each of 16"
    longer = gains(replay, sizes={4: 12})["batch_size"]
    assert longer.predicted is not None and longer.predicted.value == pytest.approx(16 / (36 / 2))


def test_noise_of_the_forward_widens_what_is_predicted_from_its_times():
    shapes = (ShapeTime(2, 4, 11.0), ShapeTime(2, 8, 16.0))
    widths = []
    for high in (16.0, 20.0):
        noisy = replace(REPLAY, shapes=shapes, forward_s=Interval(16.0, 16.0, high))
        span = gains(noisy, sizes={4: 8})["batch_size"].predicted
        widths.append(span.high / span.low)
    assert widths[1] > 1.1 * widths[0]


def test_input_made_ahead_takes_a_core_from_the_forward_on_a_host():
    on_host = gains(replace(REPLAY, threads=2), input_s=8.0)["overlap_input"]
    assert on_host.predicted is not None
    assert (on_host.predicted.value, on_host.at_most) == (24 / 20, 24 / 16)
    on_device = gains(replace(REPLAY, on_host=False), input_s=8.0)["overlap_input"]
    assert on_device.predicted is not None and on_device.predicted.value == on_device.at_most == 24 / 16


def test_a_graph_takes_the_device_s_own_time():
    gain = gains(replace(REPLAY, on_host=False))["issue_at_once"]
    assert gain.predicted is not None and gain.predicted.value == 16 / 11
