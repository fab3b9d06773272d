"""Verdicts on forwards whose limit is known by construction; every figure by hand."""

import json
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from boundby.bound.judgement import BOUND_OF_PART, Evidence, Forward, Times, confirm, judge
from boundby.bound.split import Split
from boundby.bound.trials import fewer_threads
from boundby.bound.verdict import (
    Cause,
    Doubt,
    Fix,
    Gain,
    Part,
    Reference,
    SameLabels,
    Trial,
    Tried,
    Unsettled,
    Untried,
    Verdict,
)
from boundby.work.roofline import Interval, Limits, OperatorLoad, attribute, fixed_cost
from tests.fakes import FakeThreads

MIB = 2**20
# 100 GFLOP/s; 100 GB/s in 1 MiB, 10 GB/s beyond; 2 us to issue an operator; 1 GB/s into new memory
LIMITS = Limits(
    flops_per_s=Interval.exact(100e9),
    bytes_per_s=((MIB, Interval.exact(100e9)), (256 * MIB, Interval.exact(10e9))),
    dispatch_s=Interval.exact(2e-6),
    new_bytes_per_s=Interval.exact(1e9),
)
PRODUCT = OperatorLoad("aten::mm", calls=10, flops=1e9, weight_bytes=1e6, other_bytes=1e6)  # 10 ms of compute
ADDITION = OperatorLoad("aten::add", calls=1, flops=0, weight_bytes=0, other_bytes=100e6)  # 10 ms of memory
TINY = OperatorLoad("aten::add", calls=1000, flops=0, weight_bytes=0, other_bytes=12e3)  # 2 ms to issue


def times(milliseconds: float, **others: object) -> Times:
    return Times(Interval.exact(milliseconds / 1e3), **others)


def judged(
    times: Times, operators: Sequence[OperatorLoad], limits: Limits = LIMITS, trials: Sequence[Trial] = (), **known: Any
) -> Verdict:
    """Return the verdict on a forward, on the host unless `on_host` is False, by what else is known."""
    forward = Forward(times, tuple(operators), limits, on_host=known.pop("on_host", True))
    return judge(forward, Evidence(tried=Tried(tuple(trials)), **known))


def timed(load: OperatorLoad, milliseconds: float) -> OperatorLoad:
    return replace(load, seconds=milliseconds / 1e3)


@pytest.mark.parametrize(
    ("operators", "milliseconds", "bound", "share"),
    [
        ([PRODUCT], 12.5, "compute", 0.8),
        ([ADDITION], 12.5, "memory", 0.8),
        ([PRODUCT, ADDITION], 25.0, "mixed", 0.8),
        ([PRODUCT], 40.0, "under_utilised", 0.25),
    ],
)
def test_the_bound_is_the_limit_that_needs_most_of_the_time(operators, milliseconds, bound, share):
    verdict = judged(times(milliseconds), operators)
    assert verdict.bound == bound
    assert verdict.share_of_limit == pytest.approx(share)
    assert set(verdict.alternatives) == {"mixed": {"compute", "memory"}, "under_utilised": {"compute"}}.get(
        bound, set()
    )


def test_tiny_operators_and_timed_gaps_between_operators_are_bound_by_launch():
    verdict = judged(times(4.0), [timed(TINY, 2.2)])
    assert (verdict.bound, verdict.share_of_limit) == ("launch", 1.0)  # their own time, and the host's between them
    assert judged(times(40.0), [timed(PRODUCT, 10.0)]).bound == "launch"  # 30 of 40 ms are not in any operator
    assert judged(times(40.0), [PRODUCT]).bound == "under_utilised"


def test_measured_seconds_outweigh_the_limits_in_the_share_of_memory():
    # by the limits alone 10 ms of either kind; the addition really took three times as long as the product
    attribution = attribute([timed(PRODUCT, 10.0), timed(ADDITION, 30.0)], LIMITS, 1e6, 0.04, on_host=True)
    assert attribution.memory_share == 0.75
    assert (attribution.compute_s, attribution.memory_s) == pytest.approx((0.01, 0.01))
    assert judged(times(45.0), [timed(PRODUCT, 10.0), timed(ADDITION, 30.0)]).bound == "memory"


def test_weights_come_from_as_far_as_all_of_them_together_lie():
    load = OperatorLoad("aten::mm", calls=100, flops=0, weight_bytes=100e6, other_bytes=0)  # 1 MB by call
    near = attribute([load], LIMITS, weights_bytes=1e6, seconds=1.0, on_host=True)
    far = attribute([load], LIMITS, weights_bytes=100e6, seconds=1.0, on_host=True)
    assert (near.memory_s, far.memory_s) == pytest.approx((1e-3, 10e-3))


@pytest.mark.parametrize(("new_mib", "seconds"), [(32, 0.1), (33, 0.1 - 33 * MIB / 10e9 + 33 * MIB / 1e9)])
def test_large_results_go_to_new_memory_page_by_page(new_mib, seconds):
    load = OperatorLoad("aten::add", 1, 0, 0, other_bytes=1e9, new_bytes=new_mib * MIB)
    assert attribute([load], LIMITS, 0, 1.0, on_host=True).memory_s == pytest.approx(seconds)


def test_an_input_or_a_copy_that_takes_longer_than_the_forward_is_the_bound():
    verdict = judged(times(10.0, input_s=0.03), [PRODUCT])
    assert (verdict.bound, verdict.share_of_limit) == ("input", 0.75)
    assert verdict.gains[0].fix == Fix("overlap_input")
    assert verdict.gains[0].at_most == pytest.approx(40 / 30)
    assert judged(times(10.1, input_s=0.01), [PRODUCT]).bound == "compute"
    on_gpu = times(12.0, device_s=Interval.exact(0.01), enqueue_s=0.001, transfer_s=0.012)
    assert judged(on_gpu, [PRODUCT], on_host=False).bound == "transfer"


def test_a_copy_longer_than_the_device_computes_is_not_the_bound_where_the_host_takes_longer_still():
    on_gpu = times(40.0, device_s=Interval.exact(0.001), enqueue_s=0.039, transfer_s=0.003)
    assert judged(on_gpu, [PRODUCT], on_host=False).bound == "launch"


@pytest.mark.parametrize(
    ("isolated_ms", "enqueue_ms", "bound"),
    [
        (11.0, 8.0, "launch"),  # the host needs 0.8 of the device's time
        (11.0, 7.9, "compute"),
        (14.0, 1.0, "launch"),  # the device waits for 29 % of the time
        (13.0, 1.0, "compute"),
    ],
)
def test_a_device_that_waits_for_the_host_is_bound_by_launch(isolated_ms, enqueue_ms, bound):
    on_gpu = times(isolated_ms, device_s=Interval.exact(0.0105), enqueue_s=enqueue_ms / 1e3 * 1.05)
    verdict = judged(on_gpu, [PRODUCT], on_host=False)
    assert verdict.bound == bound
    graph = next(gain for gain in verdict.gains if gain.fix.kind == "issue_at_once")
    assert graph.at_most == pytest.approx(isolated_ms / 10.5)
    assert verdict.share_of_limit == pytest.approx(0.01 / 0.0105) or bound == "launch"  # of the device's own time


def test_issuing_at_once_is_offered_without_the_device_s_own_time():
    verdict = judged(times(40.0, enqueue_s=0.035), [PRODUCT], on_host=False)
    graph = next(gain for gain in verdict.gains if gain.fix.kind == "issue_at_once")
    assert (verdict.bound, graph.at_most) == ("launch", pytest.approx(40.0 / 10.0))


def test_a_label_that_changes_at_the_ends_of_the_intervals_is_mixed_and_names_both():
    near_the_edge = Times(Interval(0.0280, 0.0270, 0.0290))  # 10 ms of 28: 36 %, and 34 % at the upper end
    verdict = judged(near_the_edge, [PRODUCT])
    assert verdict.bound == "mixed"
    assert set(verdict.alternatives) == {"compute", "under_utilised"}
    wide = replace(LIMITS, flops_per_s=Interval(100e9, 40e9, 100e9))  # compute may need 10 to 25 ms
    both = judged(times(34.5), [PRODUCT, replace(ADDITION, other_bytes=90e6)], wide)
    assert (both.bound, both.alternatives) == ("mixed", ("compute",))


def test_large_new_results_keep_their_limit_at_the_ends_of_the_intervals():
    to_new_memory = OperatorLoad("aten::add", 1, 0, 0, other_bytes=300e6, new_bytes=100e6)  # 100 ms new, 20 ms not
    verdict = judged(times(125.0), [to_new_memory])
    assert (verdict.bound, verdict.share_of_limit) == ("memory", pytest.approx(0.96))


def test_a_share_above_one_is_a_doubt_not_a_triumph():
    verdict = judged(times(8.0), [PRODUCT])
    assert verdict.share_of_limit == pytest.approx(1.25)
    assert [doubt.kind for doubt in verdict.doubts] == ["share"]
    assert verdict.confidence != "high"


def test_without_limits_or_work_the_verdict_is_inconclusive_with_the_reason():
    unknown = Doubt("ceilings", "float16 was not measured")
    verdict = judge(unknown, Evidence(tried=Tried((HALVED,))))
    assert (verdict.bound, verdict.confidence, verdict.share_of_limit, verdict.trials) == (
        "inconclusive",
        "low",
        None,
        (HALVED,),
    )
    assert verdict.doubts == (unknown,)


HALVED = Trial(
    Fix("threads", {"threads": 1, "instead_of": 2}),
    Interval(0.5, 0.45, 0.55),
    expected={"compute": (0.4, 0.68), "launch": (0.8, 1.6)},
)


def test_a_trial_speaks_for_or_against_where_all_or_none_of_its_interval_is_expected():
    verdict = judged(times(12.5), [PRODUCT], trials=[HALVED])
    assert (verdict.bound, verdict.confirmation, verdict.confidence, verdict.settled) == (
        "compute",
        "confirmed",
        "high",
        True,
    )
    for factor in (Interval(0.6, 0.5, 0.8), Interval(0.4, 0.3, 0.5)):
        assert confirm("compute", [replace(HALVED, measured=factor)]) == "too_uncertain"
    assert confirm("memory", [HALVED]) == "silent"
    assert confirm("launch", [HALVED]) == "refutes"


NO_EFFECT = replace(HALVED, measured=Interval(1.0, 0.95, 1.05))  # as if the host were the limit


def test_a_bound_that_a_trial_refutes_is_not_settled_where_nothing_else_takes_its_place():
    for trials in ([NO_EFFECT], [HALVED, NO_EFFECT]):  # one that speaks against it outweighs one that speaks for it
        verdict = judged(times(12.0), [PRODUCT], trials=trials)
        assert (verdict.bound, verdict.confirmation, verdict.confidence) == ("mixed", "untested", "low")
        assert (verdict.settled, verdict.unsettled.kind, verdict.alternatives) == (
            False,
            "trials_disagree",
            ("compute",),
        )
        assert "1 of 2 threads gave 1.00 times the speed" in verdict.unsettled.text


def test_the_bound_that_a_trial_confirms_takes_the_place_of_the_one_it_refutes():
    half = judged(times(22.0), [timed(PRODUCT, 12.0)], trials=[NO_EFFECT])  # 10 of 22 ms are between operators
    assert judged(times(22.0), [timed(PRODUCT, 12.0)]).bound == "compute"
    assert (half.bound, half.confirmation, half.confidence, half.settled) == ("launch", "confirmed", "medium", True)
    assert [doubt.kind for doubt in half.doubts] == ["changed"]


def parts_of(seconds=0.020, padding=None, **milliseconds):
    """Return the split of a forward by the milliseconds of its parts."""
    kinds = ("compute", "memory", "kernels", "around", "host", "unexplained")
    parts = tuple(Part(kind, milliseconds.get(kind, 0.0) / 1e3, padding) for kind in kinds)
    return Split(seconds, parts, None)


def on_split(split, *trials, padding=None):
    return judged(times(1e3 * split.seconds), [PRODUCT], split=split, trials=trials, padding=padding)


@pytest.mark.parametrize(
    ("parts", "bound", "first"),
    [
        ({"compute": 12, "kernels": 4, "host": 4}, "compute", "compute"),
        ({"memory": 12, "kernels": 4, "host": 4}, "memory", "memory"),
        ({"compute": 4, "kernels": 12, "host": 4}, "under_utilised", "kernels"),
        ({"compute": 6, "kernels": 5, "around": 7, "host": 2}, "under_utilised", "around"),
        ({"compute": 4, "host": 16}, "launch", "host"),
    ],
)
def test_the_owner_with_most_of_the_time_is_what_limits(parts, bound, first):
    verdict = on_split(parts_of(**parts))
    assert (verdict.bound, verdict.limited_by[0].kind, verdict.confidence) == (bound, first, "medium")
    assert sum(part.seconds for part in verdict.breakdown) == pytest.approx(0.020)
    assert [cause.share for cause in verdict.limited_by] == sorted(
        (milliseconds / 20 for milliseconds in parts.values()), reverse=True
    )


def test_owners_that_replays_cannot_tell_apart_are_mixed_and_a_trial_that_can_tell_decides():
    close = parts_of(compute=9, host=8, memory=3)
    verdict = on_split(close)
    assert (verdict.bound, verdict.alternatives, verdict.settled, verdict.confidence) == (
        "mixed",
        ("compute", "launch"),
        True,
        "low",
    )
    assert (on_split(close, HALVED).bound, on_split(close, NO_EFFECT).bound) == ("compute", "launch")
    assert on_split(close, NO_EFFECT).confirmation == "confirmed"


def test_padding_comes_first_where_it_takes_most_of_the_time():
    no_padding = Trial(Fix("remove_padding"), Interval(2.4, 2.3, 2.5))
    verdict = on_split(parts_of(compute=12, kernels=4, host=4, padding=0.6), no_padding, padding=0.61)
    assert verdict.limited_by[0] == Cause("padding", pytest.approx(0.6), 0.61, confirmed_by=Fix("remove_padding"))
    assert verdict.limited_by[1] == Cause("compute", pytest.approx(0.4 * 0.6))
    no_gain = replace(no_padding, measured=Interval(1.1, 1.0, 1.2))
    verdict = on_split(parts_of(compute=12, kernels=4, host=4, padding=0.6), no_gain, padding=0.61)
    assert verdict.limited_by[0].confirmed_by is None


def test_time_that_did_not_show_again_settles_nothing():
    verdict = on_split(parts_of(compute=12, unexplained=8))
    assert (verdict.bound, verdict.settled, verdict.unsettled.kind, verdict.confidence) == (
        "compute",
        False,
        "unexplained",
        "low",
    )
    assert "took 40 % less" in verdict.unsettled.text
    assert on_split(parts_of(compute=15, unexplained=5)).settled
    assert [cause.kind for cause in verdict.limited_by] == ["compute"]


def test_most_of_the_time_that_did_not_show_again_is_named_before_what_did():
    verdict = on_split(parts_of(compute=5, host=4, unexplained=11))
    assert [cause.kind for cause in verdict.limited_by] == ["unexplained", "compute", "host"]
    assert not verdict.settled


def test_no_cause_is_more_than_the_whole_where_the_batch_took_longer_when_it_was_run_again():
    verdict = on_split(parts_of(around=90, compute=10, unexplained=-80))
    assert not verdict.settled and "took 400 % more" in verdict.unsettled.text
    assert [cause.share for cause in verdict.limited_by] == [pytest.approx(0.9), pytest.approx(0.1)]


def test_predictions_that_come_true_bear_the_owners_out():
    dtype = Trial(Fix("dtype", {"dtype": "bfloat16"}), Interval(1.8, 1.7, 1.9), predicted=Interval(1.9, 1.7, 2.1))
    wrong = replace(dtype, measured=Interval(0.9, 0.85, 0.95))
    unclear = replace(wrong, predicted=Interval(1.05, 0.9, 1.2))
    split = parts_of(compute=4, kernels=12, host=4)
    assert on_split(split, dtype, unclear).confirmation == "confirmed"
    for trials in ([wrong], [dtype, wrong], [unclear]):
        assert on_split(split, *trials).confirmation == "untested"
    assert on_split(split, wrong).settled  # a wrong prediction is no evidence of another bound


def test_an_interval_too_wide_to_tell_is_not_settled_and_says_what_would_tell():
    wide = Times(Interval(0.0280, 0.0240, 0.0320))
    verdict = judged(wide, [PRODUCT])
    assert (verdict.bound, verdict.settled, verdict.unsettled.kind) == ("mixed", False, "close")
    assert (
        "compute or work too small for this machine would explain the time, which is known to ±14 %"
        in verdict.unsettled.text
    )
    assert judged(Times(Interval(0.0280, 0.0270, 0.0290)), [PRODUCT]).settled  # on the edge, and known to be


def test_doubts_of_the_measurement_lower_the_confidence():
    assert judged(times(12.5), [PRODUCT], trials=[HALVED], doubts=[Doubt("noisy", "x")]).confidence == "medium"
    assert judged(times(12.5), [PRODUCT]).confidence == "medium"
    assert judged(times(12.5), [PRODUCT], doubts=[Doubt("noisy", "x")]).confidence == "low"


def test_gains_stand_in_order_and_only_those_that_relieve_the_bound():
    padding = Gain(Fix("remove_padding"), 2.4, "58 % of the FLOPs are of padding")
    batch = Gain(Fix("batch_size", {"batch_size": 8}), 1.5, "measured")
    nothing = Gain(Fix("other", {"words": "something"}), 1.01, "too little to name")
    of_compute = judged(times(12.5), [PRODUCT], gains=[batch, padding, nothing])
    assert [gain.fix.kind for gain in of_compute.gains] == ["remove_padding", "batch_size", "better_kernels"]
    assert of_compute.gains[-1].at_most == pytest.approx(1.25)
    of_input = judged(times(10.0, input_s=0.03), [PRODUCT], gains=[batch, padding, nothing])
    assert "remove_padding" not in [gain.fix.kind for gain in of_input.gains]


def test_predicted_gains_come_first_and_none_is_smaller_than_the_time_can_tell():
    def predicted(factor):
        fix = Fix("other", {"words": str(factor)})
        return Gain(fix, 9.0, "a limit", predicted=Interval(factor, factor, factor))

    wide = Times(Interval(0.0125, 0.0120, 0.0130))  # 8 % from end to end
    verdict = judged(wide, [PRODUCT], gains=[predicted(1.07), predicted(1.1), predicted(1.5), predicted(0.8)])
    assert [str(gain.fix) for gain in verdict.gains] == ["1.5", "1.1", "better kernels for these shapes"]


def test_the_fixed_cost_is_the_intercept_of_the_line():
    assert fixed_cost([(1, 3.0), (2, 5.0), (10, 21.0)]) == pytest.approx(1.0)
    assert fixed_cost([(1, 1.0), (2, 2.5), (4, 6.0)]) == 0.0  # the line starts below zero
    assert fixed_cost([(1, 1.0), (2, 2.0), (2, 2.1)]) is None


ON_GPU = times(14.0, device_s=Interval.exact(0.0105), enqueue_s=0.001)


@pytest.mark.parametrize(
    ("verdict", "line"),
    [
        (judged(times(12.5), [PRODUCT]), "80.0 GFLOP/s of 100.0 measured on this machine (80 %)"),
        (
            judged(times(12.5), [PRODUCT]),
            "the roofline of each operator adds up to 80 % of the time: compute 80 %, memory 0 %, launch 0 %",
        ),
        (judged(times(10.0, input_s=0.03), [PRODUCT]), "making the input takes 30.00 ms"),
        (judged(times(40.0), [timed(PRODUCT, 10.0)]), "75 % of the time is dispatch overhead"),
        (judged(ON_GPU, [PRODUCT], on_host=False), "the device computes for 10.50 of 14.00 ms"),
    ],
)
def test_the_evidence_holds_what_tells_most_about_the_bound(verdict, line):
    assert any(text.startswith(line) for text in verdict.evidence)


def test_a_trial_that_cannot_tell_two_bounds_apart_confirms_neither():
    both = replace(HALVED, expected={"compute": (0.4, 0.63), "memory": (0.4, 0.63), "launch": (0.7, 1.15)})
    assert {bound: confirm(bound, [both]) for bound in ("compute", "memory", "launch")} == {
        "compute": "ambiguous",
        "memory": "ambiguous",
        "launch": "refutes",
    }
    assert both.rivals("compute") == ("memory",)


def test_device_and_isolated_time_move_apart_at_the_ends():
    # at the centre 20 % of the time is idle; with the device at its low end and the whole at its high end it is 49 %
    apart = Times(Interval(0.010, 0.008, 0.0125), device_s=Interval(0.008, 0.0064, 0.010), enqueue_s=0.001)
    verdict = judged(apart, [replace(PRODUCT, flops=0.7e9)], on_host=False)
    assert verdict.bound == "mixed" and {"compute", "launch"} <= set(verdict.alternatives)


def test_gains_of_every_bound_that_it_may_be_are_named():
    padding = Gain(Fix("remove_padding"), 2.4, "58 % of the FLOPs are of padding")
    apart = Times(Interval(0.0133, 0.0120, 0.0145), device_s=Interval(0.010, 0.010, 0.010), enqueue_s=0.001)
    verdict = judged(apart, [replace(PRODUCT, flops=0.9e9)], on_host=False, gains=[padding])
    assert verdict.bound == "mixed" and "remove_padding" in [gain.fix.kind for gain in verdict.gains]


def test_what_was_tried_replaces_what_was_thought():
    medium = Fix("matmul_precision", {"precision": "medium"})
    tried = Trial(medium, Interval(0.6, 0.5, 0.7), expected={"compute": (1.4, 2.4)})
    gains = [Gain(medium, 1.9, "the ratio of the ceilings"), Gain(Fix("remove_padding"), 2.4, "padding")]
    verdict = judged(times(12.5), [PRODUCT], trials=[tried], gains=gains)
    assert [gain.fix.kind for gain in verdict.gains] == ["remove_padding", "better_kernels"]
    assert [(trial.fix, trial.outcome) for trial in verdict.trials] == [(medium, "loses")]


@pytest.mark.parametrize(
    ("factor", "outcome"),
    [
        (Interval(1.5, 1.4, 1.6), "gains"),
        (Interval(1.5, 0.9, 2.4), "no_change"),
        (Interval(1.01, 1.005, 1.015), "no_change"),  # told apart, and too little to matter
        (Interval(0.6, 0.5, 0.7), "loses"),
    ],
)
def test_a_trial_gains_or_loses_where_its_interval_leaves_no_other_way(factor, outcome):
    assert replace(HALVED, measured=factor).outcome == outcome


FULL = Verdict(
    bound="compute",
    alternatives=("memory",),
    share_of_limit=0.5,
    confidence="medium",
    confirmation="confirmed",
    gains=(Gain(Fix("batch_size", {"batch_size": 8}), 1.5, "a line", predicted=Interval(1.3, 1.2, 1.4)),),
    evidence=("a", "b"),
    doubts=(Doubt("noisy", "a: b"),),
    trials=(
        Trial(
            Fix("remove_padding"),
            Interval(2.6, 2.5, 2.7),
            predicted=Interval(2.5, 2.2, 2.8),
            at_most=3.0,
            same_labels=SameLabels(63, 64, Interval(63 / 64, 0.92, 1.0)),
            pairs=7,
        ),
    ),
    untried=(Untried(Fix("fuse_operators"), "over_budget", "compiling takes longer"),),
    reference=Reference(8, 154, Interval(0.0146, 0.0144, 0.0148)),
    breakdown=(Part("compute", 0.006, 0.61), Part("unexplained", -0.001)),
    limited_by=(Cause("padding", 0.5, 0.61, Fix("remove_padding")), Cause("kernels", 0.2)),
    unsettled=Unsettled("close", "a quieter machine"),
)


def test_a_verdict_comes_back_from_plain_values_with_kinds_and_settings():
    plain = json.loads(json.dumps(FULL.as_dict()))
    assert Verdict.from_dict(plain) == FULL
    assert (plain["doubts"], plain["doubt_kinds"]) == (["noisy: a: b"], ["noisy"])
    assert (plain["gains"][0]["fix"], plain["gains"][0]["settings"]) == ("use batch size 8", {"batch_size": 8})
    assert (plain["settled"], plain["unsettled"], plain["would_settle"]) == (False, "close", "a quieter machine")
    assert (plain["reference"]["shape"], plain["trials"][0]["outcome"]) == ("8 × 154 tokens", "gains")


def test_a_verdict_prints_as_a_sentence():
    assert (
        str(FULL)
        == repr(FULL)
        == (
            "limited by compute, which alone needs 50 % of the time; no padding: 2.60 times as fast, measured; "
            "not settled: a quieter machine"
        )
    )


def test_a_fix_of_no_known_kind_is_refused():
    with pytest.raises(ValueError, match="no kind of fix"):
        Fix("magic")


SECONDS, CASES = 0.02, 600
ROUND_LIMITS = Limits(Interval.exact(1e12), ((2**28, Interval.exact(1e11)),), Interval.exact(1e-9))
OPERATORS = [OperatorLoad("aten::mm", 1, 1e9, 0, 0)]
REPLAY_NOISE, TRIAL_NOISE, TRIAL_REACH = 0.06, 0.01, 0.025  # standard errors of a part and of a factor; half interval


def spread(value: float, reach: float) -> Interval:
    return Interval(value, value / (1 + reach), value * (1 + reach))


def on_half_the_threads(rng: random.Random, shares: dict[str, float], expected: Trial) -> Trial:
    """Return the trial: kernels take up to twice as long, memory and what is around them something in between."""
    shared = rng.uniform(1.6, 2.0)
    longer = {"compute": shared, "kernels": shared, "memory": rng.uniform(1, 2), "around": rng.uniform(1, 2), "host": 1}
    factor = 1 / sum(share * longer[kind] for kind, share in shares.items())
    return replace(expected, measured=spread(factor * rng.gauss(1, TRIAL_NOISE), TRIAL_REACH))


def in_bfloat16(rng: random.Random, shares: dict[str, float], seen: dict[str, float]) -> Trial:
    """Return the trial, with what the parts that were seen predict: all but the host is twice as fast."""

    def factor(of: dict[str, float]) -> float:
        return sum(of.values()) / (of["host"] + (sum(of.values()) - of["host"]) / 2)

    measured = spread(factor(shares) * rng.gauss(1, TRIAL_NOISE), TRIAL_REACH)
    return Trial(Fix("dtype", {"dtype": "bfloat16"}), measured, predicted=spread(factor(seen), 0.12))


def case(rng: random.Random, expected: Trial) -> tuple[str, Verdict]:
    weights = {kind: rng.gammavariate(0.7, 1) for kind in BOUND_OF_PART}
    shares = {kind: weight / sum(weights.values()) for kind, weight in weights.items()}
    truth: Counter[str] = Counter()
    for kind, share in shares.items():
        truth[BOUND_OF_PART[kind]] += share
    seen = {kind: share * rng.gauss(1, REPLAY_NOISE) for kind, share in shares.items()}
    parts = [Part(kind, SECONDS * share) for kind, share in seen.items()]
    parts.append(Part("unexplained", SECONDS * (1 - sum(seen.values()))))
    trials = [on_half_the_threads(rng, shares, expected), in_bfloat16(rng, shares, seen)]
    split = Split(SECONDS, tuple(parts), None)
    times = Times(Interval.exact(SECONDS))
    return truth.most_common(1)[0][0], judged(
        times, OPERATORS, ROUND_LIMITS, split=split, trials=trials[: rng.randint(0, 2)]
    )


@pytest.mark.parametrize("seed", [1, 2])
def test_high_is_right_in_95_of_100_and_medium_in_80(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    FakeThreads(monkeypatch, 2)
    candidate = fewer_threads(lambda: None)
    assert candidate is not None
    expected = Trial(candidate.fix, Interval.exact(1.0), expected=candidate.expected)
    rng = random.Random(seed)
    said: Counter[str] = Counter()
    right: Counter[str] = Counter()
    for truth, verdict in (case(rng, expected) for _ in range(CASES)):
        said[verdict.confidence] += 1
        right[verdict.confidence] += verdict.bound == truth or (
            verdict.bound == "mixed" and truth in verdict.alternatives
        )
    shares = {word: right[word] / said[word] for word in said}
    assert shares["high"] >= 0.95 and shares["medium"] >= 0.80, (shares, said)
    assert said["high"] >= 0.2 * CASES and said["low"] <= 0.4 * CASES, said
