"""Where the time of a batch goes and what would change it: owners, trials, limits, operators."""

from boundby.bound import Gain, Part, PartKind, Trial, Verdict, card, factor
from boundby.formatting import NOTHING, clean, listed, number, times, unknown
from boundby.machine import Ceilings
from utils.baseline import Operator, Row
from utils.comparison import facts
from utils.render import Block, BulletList, Heading, Paragraph, Table
from utils.report import variants
from utils.report.advice import LEAST_BOUND
from utils.report.figures import Content, Folded, show
from utils.report.pictures import operators, owners, roofline
from utils.report.sources import Missing, ReportData

OWNERS: dict[PartKind, str] = {
    "compute": "arithmetic, at this machine's full speed",
    "memory": "moving data, at this machine's full speed",
    "kernels": "what the operators need beyond that, alone and hot",
    "around": "what the model around them adds: cold caches, threads that wait",
    "host": "Python and dispatch between the operators",
    "unexplained": "left over",
}
SHOWN_OPERATORS = 12
LONGEST_OPERATOR = 48  # characters


def of(row: Row | None) -> Verdict | None:
    """Return the verdict of a row, or None where there is none."""
    return row.get("verdict") if row else None


def where_time_goes(data: ReportData) -> list[Content]:
    """Return whose the time of the reference batch is."""
    heading, verdict = Heading("Where the time goes"), of(data.chosen)
    picture = show(data, owners.figure, _with_owners(data))
    if verdict is None or data.chosen is None:
        reason = data.choice["reason"] if data.chosen is None else data.document.get("ceilings_reason")
        return [heading, Paragraph(f"Not known: {clean(reason or 'no reason was recorded', 300)}."), picture]
    return [heading, *_owners(data.chosen, verdict), picture]


def _with_owners(data: ReportData) -> tuple[Row, ...] | Missing:
    rows = tuple(row for row in data.rows if _parts(row))
    return rows or Missing("the time of no batch was split")


def _parts(row: Row) -> tuple[Part, ...]:
    verdict = of(row)
    return verdict.breakdown if verdict else ()


def _owners(row: Row, verdict: Verdict) -> list[Block]:
    """Return the table of owners, which adds up to the measured time."""
    parts = verdict.breakdown
    if not parts:
        bound = card.BOUNDS.get(verdict.bound)
        said = f"is limited by {bound}" if bound else "has times that do not tell what limits it"
        return [Paragraph(f"Batch size {row['batch_size']} {said}.")]
    whole = sum(part.seconds for part in parts)
    rows = [_owner(part, whole) for part in parts if part.seconds]
    padding = sum(part.seconds * (part.padding_share or 0.0) for part in parts)
    rows.append(["together, as measured", number(1e3 * whole), "100", f"{100 * padding / whole:.0f}"])
    headers = ["whose", "ms", "%", "of it for\npadding %"]
    caption = f"The time of a batch of {verdict.reference or row['batch_size']} in {row['dtype']}"
    return [Table(headers, rows, left=[0], caption=caption)]


def _owner(part: Part, whole: float) -> list[str]:
    padding = "" if part.padding_share is None else f"{100 * part.padding_share:.0f}"
    return [OWNERS[part.kind], number(1e3 * part.seconds), f"{100 * part.seconds / whole:.0f}", padding]


def tried(data: ReportData) -> list[Content]:
    """Return what was tried at the chosen batch size, what was predicted, and what was not tried."""
    verdict = of(data.chosen)
    if verdict is None or data.chosen is None:
        return []
    elsewhere = [fix for _, fix in variants.tried(data) if fix]  # over all texts, which tells more

    def is_here(each: Trial | Gain) -> bool:
        return each.fix not in elsewhere

    trials = list(filter(is_here, verdict.trials))
    of_sizes = [_trial(trial) for trial in trials if trial.fix.kind == "batch_size"]  # they stand in the sweep
    rows = [_trial(trial) for trial in trials if trial.fix.kind != "batch_size"]
    rows += [
        [str(gain.fix), factor(gain.predicted), NOTHING, "not tried", NOTHING]
        for gain in filter(is_here, verdict.gains)
        if gain.predicted
    ]
    if not rows and not of_sizes:
        return []
    headers = ["", "predicted", "measured", "it is", "same\nlabels %"]
    notes = ["Factors of the throughput with their 95 % intervals, each change by itself."]
    untried: dict[str, list[str]] = {}
    for each in verdict.untried:
        untried.setdefault(clean(each.reason, 120), []).append(str(each.fix))
    notes += [f"Not tried: {listed(those)} ({reason})." for reason, those in untried.items()]
    where = f"At batch size {data.chosen['batch_size']} in {data.chosen['dtype']}"
    left = [0, 1, 2, 3]
    shown = [Heading("What was tried"), Table(headers, rows, left, where, notes)] if rows else []
    return [*shown, Folded("Other batch sizes", [Table(headers, of_sizes, left, where)] if of_sizes else [])]


def _trial(trial: Trial) -> list[str]:
    return [
        trial.name,
        NOTHING if trial.predicted is None else factor(trial.predicted),
        factor(trial.measured),
        {"gains": "faster", "no_change": "no change", "loses": "slower: do not"}[trial.outcome],
        NOTHING if trial.same_labels is None else f"{100 * trial.same_labels.share.value:.1f}",
    ]


def limits(data: ReportData) -> list[Content]:
    """Return the roofline, and folded the evidence and what this machine can do."""
    picture = show(data, roofline.figure, data.measured, _ceilings_of(data))
    if not any(of(row) for row in data.rows):
        return [picture]
    folded: list[Content] = [_ceilings(data), _memory(data.document["ceilings"])] if data.document["ceilings"] else []
    return [
        *_dtypes(data),
        picture,
        Folded("What the verdict rests on", _evidence(data)),
        Folded("What this machine reaches", folded),
    ]


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


def _ceilings_of(data: ReportData) -> Ceilings | Missing:
    """Return the ceilings that the roofline is drawn under, or why it cannot be drawn."""
    ceilings, reason = data.document["ceilings"], data.document["ceilings_reason"]
    why_not = roofline.why_not(data.rows, ceilings, reason)
    return Missing(why_not) if why_not else ceilings


def _ceilings(data: ReportData) -> Table:
    """Return which setting of matrix products reaches what on this machine."""
    rows = [
        [
            ceiling.dtype,
            ceiling.precision or NOTHING,
            "in use" if ceiling.is_configured and ceiling.dtype in data.dtypes else "",
            number(ceiling.flops_per_s / 1e9),
            str(ceiling.size),
            f"{ceiling.relative_error:.1e}",
        ]
        for ceiling in data.document["ceilings"].compute
    ]
    headers = ["dtype", "float32\nprecision", "", "GFLOP/s", "at size", "largest\nerror"]
    return Table(headers, rows, left=[0, 1, 2], caption="Matrix products")


def _memory(ceilings: Ceilings) -> Table:
    rows = [
        [level.level, number(level.bytes_per_s / 1e9), number(level.working_set_bytes / 1e6), level.operation]
        for level in ceilings.memory
    ]
    dispatch = f"Issuing one operator takes {1e6 * ceilings.dispatch_s:.1f} us."
    headers = ["memory", "GB/s", "MB\ntouched", "by"]
    return Table(headers, rows, left=[0, 3], caption="Memory", notes=[dispatch])


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


def _number(value: float | None) -> str:
    return NOTHING if value is None else number(value)


def work(data: ReportData) -> list[Content]:
    """Return, folded, the operators of the trace."""
    return [Folded("Operators of the trace", [_operators(data), show(data, operators.figure, data.operators)])]


def _operators(data: ReportData) -> Block:
    if isinstance(data.operators, Missing):
        return Paragraph(f"Top operators: {unknown(data.operators.reason)}")
    on_device = any(row["device_total_ms"] for row in data.operators)
    headers = ["operator", "calls", "CPU self\nms", "CPU self\n%"]
    headers += ["GPU with\ncallees ms", "GPU\n%"] if on_device else []
    key = "device_total_ms" if on_device else "cpu_self_ms"
    top = sorted(data.operators, key=lambda row: row[key] or 0, reverse=True)[:SHOWN_OPERATORS]
    return Table(
        headers=headers,
        rows=[_operator_cells(row, on_device) for row in top],
        left=[0],
        caption=f"Top operators by {'GPU' if on_device else 'own CPU'} time{_recorded(data)}",
        notes=["The profiler slows what it watches: read shares, not times.", *_not_recorded(data)],
    )


def _recorded(data: ReportData) -> str:
    manifest = data.manifest
    if not manifest.steps_recorded:
        return ""
    shape = manifest.shape or manifest.batch_size
    batches = f"{manifest.steps_recorded} of {manifest.steps_expected} batches of {shape}"
    return f" ({batches}, {clean(manifest.dtype)})"


def _operator_cells(row: Operator, on_device: bool) -> list[str]:
    cells = [clean(row["name"], LONGEST_OPERATOR), f"{row['calls']:,}"]
    cells += [_number(row["cpu_self_ms"]), _one_digit(row["cpu_self_pct"])]
    return [*cells, _number(row["device_total_ms"]), _one_digit(row["device_pct"])] if on_device else cells


def _not_recorded(data: ReportData) -> list[str]:
    missing = "; ".join(f"{remark.what}: {unknown(remark.reason)}" for remark in data.manifest.unavailable)
    return [f"Not in the trace: {missing}"] if missing else []


def _one_digit(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.1f}"
