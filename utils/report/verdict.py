"""Where the time of a batch goes and what would change it: breakdown, trials, limits, operators."""

from boundby.bound import Part, Trial, Verdict, card, factor
from boundby.formatting import NOTHING, clean, listed, number, times, unknown
from utils.baseline import Row
from utils.comparison import facts
from utils.render import Block, BulletList, Heading, Paragraph, Table
from utils.report import variants
from utils.report.advice import LEAST_BOUND
from utils.report.figures import Content, Folded, show
from utils.report.pictures import breakdown, operators, roofline
from utils.report.sources import Missing, ReportData

OPERATORS = "Operators of the trace"


def of(row: Row | None) -> Verdict | None:
    """Return the verdict of a row, or None where there is none."""
    return row.get("verdict") if row else None


def where_time_goes(data: ReportData) -> list[Content]:
    """Return the breakdown of the time of the reference batch."""
    heading, row, verdict = Heading("Where the time goes"), data.chosen, of(data.chosen)
    split = tuple(row for row in data.rows if _parts(row)) or Missing("the time of no batch was split")
    picture = show(data, breakdown.figure, split)
    if verdict is None or row is None:
        reason = data.choice["reason"] if row is None else data.document.get("ceilings_reason")
        return [heading, Paragraph(f"Not known: {clean(reason or 'no reason was recorded', 300)}."), picture]
    return [heading, _breakdown(row, verdict), picture]


def _parts(row: Row) -> tuple[Part, ...]:
    verdict = of(row)
    return verdict.breakdown if verdict else ()


def _breakdown(row: Row, verdict: Verdict) -> Block:
    """Return the parts of the time, which add up to what was measured."""
    parts = verdict.breakdown
    if not parts:
        bound = card.BOUNDS.get(verdict.bound)
        text = f"is limited by {bound}" if bound else "has times that do not tell what limits it"
        return Paragraph(f"Batch size {row['batch_size']} {text}.")
    total_s = sum(part.seconds for part in parts)
    padding_s = sum(part.seconds * (part.padding_share or 0.0) for part in parts)
    rows = [
        [
            breakdown.LOOKS[part.kind][1],
            number(1e3 * part.seconds),
            f"{100 * part.seconds / total_s:.0f}",
            "" if part.padding_share is None else f"{100 * part.padding_share:.0f}",
        ]
        for part in parts
        if part.seconds
    ]
    rows.append(["together, as measured", number(1e3 * total_s), "100", f"{100 * padding_s / total_s:.0f}"])
    caption = f"The time of a batch of {verdict.reference or row['batch_size']} in {row['dtype']}"
    return Table(["part", "ms", "%", "of which\npadding %"], rows, left=[0], caption=caption)


def tried(data: ReportData) -> list[Content]:
    """Return what was tried at the chosen batch size, what was predicted, and what was not tried."""
    row, verdict = data.chosen, of(data.chosen)
    if verdict is None or row is None:
        return []
    compared = [fix for _, fix in variants.tried(data) if fix]  # over all texts, which tells more
    trials = [trial for trial in verdict.trials if trial.fix not in compared]
    of_sizes = [_trial(trial) for trial in trials if trial.fix.kind == "batch_size"]  # they stand in the sweep
    rows = [_trial(trial) for trial in trials if trial.fix.kind != "batch_size"]
    rows += [
        [str(gain.fix), factor(gain.predicted), NOTHING, "not tried", NOTHING]
        for gain in verdict.gains
        if gain.predicted and gain.fix not in compared
    ]
    headers = ["", "predicted", "measured", "it is", "same\nlabels %"]
    notes = ["Factors of the throughput with their 95 % intervals, each change by itself."]
    untried: dict[str, list[str]] = {}
    for skipped in verdict.untried:
        untried.setdefault(clean(skipped.reason, 120), []).append(str(skipped.fix))
    notes += [f"Not tried: {listed(fixes)} ({reason})." for reason, fixes in untried.items()]
    where = f"At batch size {row['batch_size']} in {row['dtype']}"
    left = [0, 1, 2, 3]
    table: list[Content] = [Heading("What was tried"), Table(headers, rows, left, where, notes)] if rows else []
    return [*table, Folded("Other batch sizes", [Table(headers, of_sizes, left, where)] if of_sizes else [])]


def _trial(trial: Trial) -> list[str]:
    return [
        trial.name,
        NOTHING if trial.predicted is None else factor(trial.predicted),
        factor(trial.measured),
        {"gains": "faster", "no_change": "no change", "loses": "slower: do not"}[trial.outcome],
        NOTHING if trial.same_labels is None else f"{100 * trial.same_labels.share.value:.1f}",
    ]


def limits(data: ReportData) -> list[Content]:
    """Return the roofline, and folded what the verdict rests on."""
    ceilings, reason = data.document["ceilings"], data.document["ceilings_reason"]
    why_not = roofline.why_not(data.rows, ceilings, reason)
    picture = show(data, roofline.figure, data.measured, Missing(why_not) if why_not else ceilings)
    if not any(of(row) for row in data.rows):
        return [picture]
    return [*_dtypes(data), picture, Folded("What the verdict rests on", _evidence(data))]


def _evidence(data: ReportData) -> list[Content]:
    verdict = of(data.chosen)
    if verdict is None or data.chosen is None:
        return []
    where = f"batch size {data.chosen['batch_size']} in {data.chosen['dtype']}"
    items = [*verdict.evidence, *(f"doubt: {doubt}" for doubt in verdict.doubts)]
    bounds = [
        f"{gain.fix}: at most {times(gain.at_most)}×, since {gain.basis}"
        for gain in verdict.gains
        if not gain.predicted and gain.at_most >= LEAST_BOUND
    ]
    return [
        *([Paragraph(f"At {where}:"), BulletList(items)] if items else []),
        *([Paragraph("Bounds, which are no predictions:"), BulletList(bounds)] if bounds else []),
    ]


def _dtypes(data: ReportData) -> list[Block]:
    """Return how the other dtypes of the sweep compare with the first, where it was repeated."""
    if len(data.dtypes) < 2 or not data.rounds:
        return []
    rows = [
        [
            row.dtype_b,
            str(row.batch_size),
            row.verdict or NOTHING,
            number(row.samples_per_sec_a),
            number(row.samples_per_sec_b),
            _speed_ratio(row),
        ]
        for row in facts.between_dtypes(data.document, data.rounds)
    ]
    headers = ["dtype", "batch\nsize", "is", f"{data.dtypes[0]}\nsamples/s", "its\nsamples/s", "times the speed"]
    notes = ["Judged by rounds, with Holm's correction over all rows; see docs/method.md."]
    return [Table(headers, rows, left=[0, 2, 5], caption=f"Against {data.dtypes[0]}", notes=notes)]


def _speed_ratio(row: facts.Row) -> str:
    judged = row.comparison
    ends = f" [{times(1 / judged.high)}, {times(1 / judged.low)}]" if judged and judged.low and judged.high else ""
    return f"{times(1 / row.time_ratio)}{ends}"


def work(data: ReportData) -> list[Content]:
    """Return, folded, the operators of the trace."""
    manifest, picture = data.manifest, show(data, operators.figure, data.operators)
    if isinstance(data.operators, Missing):
        return [Folded(OPERATORS, [Paragraph(f"They are {unknown(data.operators.reason)}."), picture])]
    recorded = (
        f"{manifest.steps_recorded} of {manifest.steps_expected} batches of {manifest.shape or manifest.batch_size}"
    )
    of_what = f"Of {recorded} in {clean(manifest.dtype)}. " if manifest.steps_recorded else ""
    missing = [f"Not in the trace: {remark.what}: {unknown(remark.reason)}." for remark in manifest.unavailable]
    notes = [f"{of_what}The profiler slows what it watches: read shares, not times.", *missing]
    return [Folded(OPERATORS, [BulletList(notes), picture])]
