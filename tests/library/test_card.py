"""The card: what limits, what was tried, what to do next, how sure that is, in at most twelve lines."""

import pytest
from msgspec.structs import replace

from boundby.bound.card import MOST_LINES, Facts, Next, Rate, badge, entries, lines
from boundby.bound.verdict import Cause, Fix, Gain, Reference, SameLabels, Trial, Unsettled, Verdict, inconclusive
from boundby.formatting import WIDTH
from boundby.work.roofline import Interval

PADDING = Fix("remove_padding")
SAME = SameLabels(994, 1000, Interval(0.994, 0.987, 0.997))
VERDICT = Verdict(
    "compute",
    (),
    0.4,
    "high",
    "confirmed",
    (Gain(Fix("fuse_operators"), 1.04, "small ones take 4 %"),),
    (),
    trials=(
        Trial(Fix("threads", {"threads": 1, "instead_of": 2}), Interval(0.55, 0.53, 0.57)),
        Trial(PADDING, Interval(2.6, 2.5, 2.7)),
        Trial(Fix("dtype", {"dtype": "bfloat16"}), Interval(1.6, 1.5, 1.7), same_labels=SAME),
        Trial(Fix("double_batch"), Interval(1.01, 0.97, 1.05)),
    ),
    reference=Reference(8, 154, Interval(0.0146, 0.0144, 0.0148)),
    limited_by=(Cause("padding", 0.5, 0.61, PADDING), Cause("kernels", 0.24)),
)
FACTS = Facts(
    "quickstart",
    "Intel Xeon (2 cores)",
    "float32",
    "8 × 154 tokens",
    0.0146,
    VERDICT,
    next=Next("batch by length, in bfloat16", "python run_pipeline.py --from 2 a.b=c", Interval(4.1, 3.6, 4.6)),
    rates=(Rate(491.2, "at batch size 8, texts as they come", 3.04), Rate(1463.0, "in the pass over the whole set")),
    scores={"Accuracy": "0.861 [0.848, 0.873]"},
)


def test_card_says_it_all_in_the_order_in_which_it_is_asked():
    assert lines(FACTS) == [
        "quickstart on Intel Xeon (2 cores) · float32 · batch 8 × 154 tokens · 14.6 ms",
        "Limited by  padding: 61 % of the FLOPs are for padding tokens [confirmed: no padding gave 2.6×]",
        "            then kernels below peak: 24 % of the time, even when run alone",
        "Tried here  no padding 2.6× [2.5, 2.7] · bfloat16 1.6× [1.5, 1.7], 99.4 % same labels · 1 of 2",
        "            threads 0.55× [0.53, 0.57], do not · the batch doubled: no change [0.97, 1.05]",
        "Next        batch by length, in bfloat16: predicted 4.1× [3.6, 4.6]",
        "            python run_pipeline.py --from 2 a.b=c",
        "Throughput  491 samples/s ± 3 % at batch size 8, texts as they come; 1,463 in the pass over the",
        "            whole set",
        "Accuracy    0.861 [0.848, 0.873]",
        "Doubts      none that changes the answer",
    ]
    assert badge(FACTS) == "settled"


@pytest.mark.parametrize("count", [5, 20])
def test_card_never_grows_beyond_its_lines_and_what_gains_most_is_kept(count):
    fixes = [Fix("other", {"words": f"a change with a long name, {at}"}) for at in range(count)]
    many = [Trial(fix, Interval(3 + at, 2 + at, 4 + at)) for at, fix in enumerate(fixes)]
    facts = replace(FACTS, verdict=replace(VERDICT, trials=(*VERDICT.trials, *many)), doubts=["a doubt " * 20] * 5)
    card = lines(facts)
    assert len(card) <= MOST_LINES and max(map(len, card)) <= WIDTH
    assert f"a change with a long name, {count - 1} " in " ".join(" ".join(card).split())
    assert card[-1].endswith("(and 4 more, below)")
    assert [entry.label for entry in entries(facts)][-1] == "Doubts"


def test_what_is_not_settled_says_what_would_settle_it():
    unsure = replace(FACTS, verdict=replace(VERDICT, unsettled=Unsettled("close", "more rounds")))
    assert "[not settled: more rounds]" in lines(unsure)[1] + lines(unsure)[2]
    assert badge(unsure) == "not settled"


def test_a_small_loss_with_fewer_threads_says_which_loss_would_have_spoken_against_the_host():
    threads = VERDICT.trials[0]
    alone = replace(VERDICT, limited_by=(Cause("host", 0.7, confirmed_by=threads.fix),),
                    trials=(replace(threads, measured=Interval(0.78, 0.76, 0.8)),))  # fmt: skip
    said = " ".join(" ".join(lines(replace(FACTS, verdict=alone))).split())
    assert "[confirmed: 1 of 2 threads gave 0.78×, where compute-bound work would give 0.50×]" in said


def test_what_is_not_known_has_no_line():
    card = lines(Facts("a model", "a machine", why_not="not known: no batch size was measured"))
    assert card == [
        "a model on a machine",
        "Limited by  not known: no batch size was measured",
    ]
    assert badge(Facts("a model", "a machine")) == "no answer"
    assert badge(replace(FACTS, verdict=inconclusive(()))) == "no answer"


def test_second_cause_that_hardly_counts_is_not_named():
    small = replace(VERDICT, limited_by=(Cause("host", 0.7), Cause("memory", 0.05)))
    card = lines(replace(FACTS, verdict=small))
    assert card[1] == "Limited by  dispatch overhead: Python and the dispatcher between operators take 70 % of the time"
    assert not any("memory" in line for line in card)
