"""The card of a run and the evidence below it: owners that add up, times side by side, what was tried, limits."""

from dataclasses import replace

import pytest
from msgspec import structs

from boundby import files
from boundby.bound.card import BOUNDS
from boundby.bound.verdict import Fix, Gain, Unsettled, inconclusive
from boundby.work.roofline import Interval
from tests import baseline_document as results
from tests.diagnosed_rows import diagnosed
from tests.report_reading import answered, section, text, traced, variants
from utils.comparison.facts import Rounds
from utils.report import advice, card, verdict


@pytest.fixture
def document():
    return results.document(answered(diagnosed(results.cpu_rows())))


@pytest.fixture
def data(read, document):
    return read(document, **traced())


def changed(data, **changes):
    row = {**data.chosen, "verdict": structs.replace(data.chosen["verdict"], **changes)}
    rows = tuple(row if other is data.chosen else other for other in data.rows)
    return replace(data, rows=rows, chosen=row)


def test_card_of_a_run_says_what_limits_what_was_tried_and_what_to_do(data):
    assert card.card(data) == [
        "quickstart on AMD EPYC 7B13 (2 cores) · float32 · batch 2 × 77 tokens · 4.41 ms",
        "Limited by  padding: 27 % of the FLOPs are for padding tokens [confirmed: no padding gave 1.26×]",
        "            then compute: at this machine's peak it alone takes 37 % of the time",
        "Tried here  bfloat16 1.8× [1.7, 1.9], 99.4 % same labels · no padding 1.26× [1.21, 1.3] · precision",
        "            medium 0.60× [0.58, 0.62], do not",
        "Next        run in bfloat16: measured 1.8× [1.7, 1.9]",
        "            python run_pipeline.py --from 2 model.dtype=bfloat16 profiling.dtypes=null \\",
        f"               output.results_dir={data.layout.results}-bfloat16",
        "Throughput  419 samples/s ± 0.15 % at batch size 2, unsorted texts; 211 in the pass over the whole",
        "            set (3 % padding)",
        "Accuracy    0.9125 [0.8993, 0.9241], F1 macro 0.8934, on 2,000 texts",
        "Doubts      none that changes the answer",
    ]


def test_what_was_compared_over_all_texts_replaces_what_was_tried_on_one_batch(read, data, document):
    files.write_json(data.layout.variants, variants())
    compared = read(document, **traced())
    said = card.card(compared)
    text = " ".join(" ".join(said).split())
    assert "[confirmed: no padding gave 1.26× on this batch]" in text
    assert "Tried here over all texts: bfloat16, packed 3.3× [3.2, 3.4], 99.7 % same labels · int8, " in text
    assert "Next use bfloat16, packed: measured 3.3× [3.2, 3.4] python run_pipeline.py --from 2 model" in text
    titles = [step.title for step in advice.advice(compared)]
    assert "precision medium" in (message := section(compared, "What was tried")) and "1.26×" not in message
    assert not {"Bfloat16", "Run in bfloat16", "Batch texts of similar length together"} & set(titles)
    files.write_json(data.layout.variants, {**variants(), "texts": 40})
    assert "Tried here over 40 texts: " in " ".join(card.card(read(document, **traced()))).replace("  ", " ")
    files.write_json(data.layout.variants, variants("packed"))
    first = advice.advice(read(document, **traced()))[0]
    assert (
        first.command is None and "runs that way already" in first.why and first.title == "Pack the texts (no padding)"
    )
    files.write_json(data.layout.variants, {**variants("packed"), "batch_size": 1})  # which has none
    first = advice.advice(read(document, **traced()))[0]
    assert first.title == "Compute several texts at once" and "one text at a time" in first.why
    files.write_json(data.layout.variants, variants("unsorted"))
    assert not any(step.title.startswith("Use padded") for step in advice.advice(read(document, **traced())))


def test_a_variant_that_a_program_of_one_s_own_alone_can_run_is_advised_as_such(read, data, document):
    result, line = variants("bfloat16"), 'model.set_attn_implementation("flash_attention_2")'
    chosen = next(row for row in result["variants"] if row["name"] == "bfloat16")
    chosen |= {"words": "bfloat16, FlashAttention 2", "runs_here": False, "program": [line]}
    result["recommended"] |= {"settings": [], "program": [line]}
    files.write_json(data.layout.variants, result)
    compared = read(document, **traced())
    first = advice.advice(compared)[0]
    assert first.title == "Use bfloat16, FlashAttention 2 in a program of your own" and first.command is None
    assert "runs that way already" not in first.why
    assert f"In a program of your own: - {line}" in section(compared, "Which variant to use")


def test_what_was_tried_stands_beside_what_was_predicted_and_a_refuted_fix_is_not_advised(data):
    said = section(data, "What was tried")
    assert "bfloat16 1.7× [1.6, 1.8] 1.8× [1.7, 1.9] faster 99.4" in said
    assert "precision medium - 0.60× [0.58, 0.62] slower: do not -" in said
    assert "fuse operators (torch.compile) 1.10× [1.06, 1.14] - not tried" in said
    assert not any("precision" in step.title for step in advice.advice(data))


def test_not_settled_says_what_would_settle_it(data):
    unsure = changed(data, unsettled=Unsettled("disturbed", "a quieter machine"))
    assert "[not settled: a quieter machine]" in " ".join(card.card(unsure))
    assert "padding?" in text(unsure)


@pytest.mark.parametrize("bound", list(BOUNDS))
def test_a_verdict_without_owners_names_its_bound(data, bound):
    known = dict(breakdown=(), reference=None, limited_by=(), trials=(), gains=())
    earlier = changed(data, bound=bound, **known)
    assert BOUNDS[bound] in " ".join(" ".join(card.card(earlier)).split())
    assert verdict.limits(earlier) and verdict.where_time_goes(earlier)


def test_a_run_without_a_verdict_or_rows_says_so(read):
    data = read(results.document(results.cpu_rows()))
    assert "not known: the sweep was not finished" in " ".join(card.card(data))
    assert "Not known" in section(data, "Where the time goes")
    empty = read(results.document([]))
    assert "not known: no batch size was measured" in " ".join(card.card(empty))
    assert verdict.limits(empty)


def test_the_next_step_multiplies_what_was_measured_of_the_whole_pass_and_of_the_precision(read, document):
    document["full_dataset_metrics"] |= {"throughput_samples_per_sec": 1255.5}  # three times the sweep
    [result] = [step for step in advice.advice(read(document)) if "fastest precision" in step.title]
    assert result.factor.value == pytest.approx(3 * 1.8, rel=1e-3)
    assert not result.is_measured and "evaluation.precision=fastest" in result.command


def test_gains_that_cannot_be_told_from_none_are_no_advice():
    def options(predicted):
        gain = Gain(Fix("fuse_operators"), 1.15, "x", predicted)
        return list(advice.worthwhile({"verdict": inconclusive([], [gain])}))

    assert not any(map(options, (None, Interval(1.1, 0.95, 1.2), Interval(1.03, 1.02, 1.04))))
    [option] = options(Interval(1.1, 1.05, 1.2))
    assert option.factor == Interval(1.1, 1.05, 1.2)


def test_other_dtypes_are_compared_with_the_first(read):
    rows = diagnosed(results.gpu_rows(), gpu=True)
    data = read(results.gpu_document(rows))
    seconds = {"float32": [0.01, 0.0101, 0.0099, 0.01, 0.01], "bfloat16": [0.004, 0.00401, 0.00399, 0.004, 0.004]}
    rounds = {(dtype, size): Rounds(dict(enumerate(seconds[dtype]))) for dtype in seconds for size in (1, 4)}
    said = str(verdict.limits(replace(data, rounds=rounds)))
    assert "Against float32" in said and said.count("'faster'") == 2 and "2.50 [" in said
