"""Where the time of a batch goes and what would change it: owners, times, trials, limits, operators."""

from collections.abc import Iterator, Sequence

from boundby import card
from boundby.card import factor
from boundby.formatting import NOTHING, clean, listed, number, times, unknown
from boundby.verdict import Gain, Owner, OwnerKind, Trial, Verdict
from utils.comparison import facts
from utils.document import Ceilings, Operator, Row
from utils.plots import operators, owners, roofline
from utils.plots.style import limited_by
from utils.render.blocks import Block, BulletList, Heading, Paragraph, Table
from utils.report import variants
from utils.report.advice import LEAST_BOUND
from utils.report.pictures import Content, Folded, show
from utils.report.sources import Missing, ReportData

OWNERS: dict[OwnerKind, str] = {
    "compute": "arithmetic, at this machine's full speed",
    "memory": "moving data, at this machine's full speed",
    "kernels": "what the operators need beyond that, alone and hot",
    "around": "what the model around them adds: cold caches, threads that wait",
    "host": "Python and dispatch between the operators",
    "remainder": "left over",
}
SHORT: dict[OwnerKind, str] = {
    "compute": "arith-\nmetic %",
    "memory": "\nmemory %",
    "kernels": "slow\nshapes %",
    "around": "around\nthem %",
    "host": "\nPython %",
}
ENERGY = "energy_per_sample_j"
NAMES = {  # of columns that may be unknown
    ENERGY: "energy per sample",
    "share_of_limit_pct": "the share of the limits",
    "share_of_ceiling_pct": "the share of the peak",
    "useful_flops_pct": "the share of padding in the arithmetic",
    "flops_per_sec": "GFLOP/s",
}
ALONE = ("compute", "memory", "kernels")  # what replays of operators take
SAME_TIME = 1.1  # a time that differs less from another than by this factor needs no explanation
SHOWN_OPERATORS = 12
LONGEST_OPERATOR = 48  # characters
LEAST_RATIO = 1.1  # of token rates, to speak of a difference
# Operators that do the work of a matrix product or of attention and call no other of these, so that shares add up.
MATRIX_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "_addmm_activation", "_scaled_mm", "mv", "dot")
FUSED_ATTENTION = (
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_cudnn_attention",
    "_flash_attention_forward",
    "_efficient_attention_forward",
)


def of(row: Row | None) -> Verdict | None:
    """Return the verdict of a row, or None where there is none."""
    return row.get("verdict") if row else None


def where_time_goes(data: ReportData) -> list[Content]:
    """Return whose the time of the reference batch is, and how long it takes in each way that it was timed."""
    heading, verdict = Heading("Where the time goes"), of(data.chosen)
    picture = show(data, owners.figure, _with_owners(data))
    if verdict is None or data.chosen is None:
        reason = data.choice["reason"] if data.chosen is None else data.document.get("ceilings_reason")
        return [heading, Paragraph(f"Not known: {clean(reason or 'no reason was recorded', 300)}."), picture]
    return [heading, *_owners(data.chosen, verdict), picture, *_times(data, verdict)]


def _with_owners(data: ReportData) -> tuple[Row, ...] | Missing:
    rows = tuple(row for row in data.rows if _parts(row))
    return rows or Missing("the time of no batch was split")


def _parts(row: Row) -> tuple[Owner, ...]:
    verdict = of(row)
    return verdict.owners if verdict else ()


def _owners(row: Row, verdict: Verdict) -> list[Block]:
    """Return the table of owners, which adds up to the measured time."""
    parts = verdict.owners
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


def _owner(part: Owner, whole: float) -> list[str]:
    padding = "" if part.padding_share is None else f"{100 * part.padding_share:.0f}"
    return [OWNERS[part.kind], number(1e3 * part.seconds), f"{100 * part.seconds / whole:.0f}", padding]


def _times(data: ReportData, verdict: Verdict) -> list[Block]:
    """Return the times of the reference batch side by side, and why they differ where they do."""
    if not verdict.reference:
        return []
    shape, first = str(verdict.reference), verdict.reference.seconds.value
    rows = [["the sweep", shape, number(1e3 * first), ""]]
    is_disturbed = bool(data.chosen and data.chosen["disturbed_rounds"])
    calmer = "timed later; other programs disturbed the sweep" if is_disturbed else "timed later, over and over"
    alone = sum(part.seconds for part in verdict.owners if part.kind in ALONE)
    if alone:
        why = "each alone and hot: no Python, no cold caches"
        rows.append(["replay of its operators", shape, number(1e3 * alone), why])
    for name, own_shape, seconds, reason in _other_times(data):
        why = "another batch"
        if own_shape == shape:
            why = reason if seconds > SAME_TIME * first else calmer if seconds * SAME_TIME < first else ""
        rows.append([name, own_shape, number(1e3 * seconds), why])
    if len(rows) == 1:
        return []
    return [Table(["timed by", "shape", "ms", "why it differs"], rows, left=[0, 1, 3], caption="The same batch, timed")]


def _other_times(data: ReportData) -> Iterator[tuple[str, str, float, str]]:
    """Yield who else timed a batch, its shape, the seconds, and why these may be more than those of the sweep."""
    manifest, trace = data.manifest, data.trace
    if trace and trace["steps"]["median_ms"] and manifest.dtype == data.dtypes[0]:
        traced = manifest.shape or f"{manifest.batch_size} texts"
        yield "the trace", traced, trace["steps"]["median_ms"] / 1e3, "the profiler records every operator"
    if data.layers:
        profiled = data.layers.shape or "not noted"
        yield "the profile by layer", profiled, data.layers.reference_s.median, "timed later"


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
    """Return the roofline, and folded what limits each batch size, the evidence and what this machine can do."""
    judged = [row for row in data.rows if of(row)]
    picture = show(data, roofline.figure, data.measured, _ceilings_of(data))
    if not judged:
        return [picture]
    tables = [
        _table(dtype, own, data.is_on_gpu)
        for dtype in data.dtypes
        if (own := [row for row in judged if row["dtype"] == dtype])
    ]
    folded: list[Content] = [_ceilings(data), _memory(data.document["ceilings"])] if data.document["ceilings"] else []
    return [
        *_dtypes(data),
        picture,
        Folded("What limits each batch size", tables),
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


def _table(dtype: str, rows: Sequence[Row], is_on_gpu: bool) -> Table:
    size, unit = roofline.scale(rows)
    several = sum(bool(_parts(row)) for row in rows) > 1
    kinds = [kind for kind in SHORT if several and any(_share(row, kind) for row in rows)]
    has_energy = any(row[ENERGY] is not None for row in rows)
    headers = ["batch\nsize", "limited by", *(SHORT[kind] for kind in kinds)]
    headers += [unit, "of peak\n%", "for\npadding %", *(["joules/\nsample"] if has_energy else [])]
    headers += ["device\nms", "enqueue\nms"] if is_on_gpu else []
    cells = [_cells(row, kinds, size, has_energy, is_on_gpu) for row in rows]
    return Table(
        headers=headers,
        rows=cells,
        left=[1],
        caption=dtype,
        notes=[*(["?: not settled"] if any(cell[1].endswith("?") for cell in cells) else []), *_notes(rows)],
    )


def _share(row: Row, kind: OwnerKind) -> float | None:
    """Return the share of an owner in the time of a row, in percent."""
    parts = _parts(row)
    whole = sum(part.seconds for part in parts)
    return sum(100 * part.seconds / whole for part in parts if part.kind == kind) if whole else None


def _cells(row: Row, kinds: Sequence[OwnerKind], size: float, has_energy: bool, is_on_gpu: bool) -> list[str]:
    useful = row["useful_flops_pct"]
    rate = NOTHING if row["flops_per_sec"] is None else number(row["flops_per_sec"] / size)
    cells = [str(row["batch_size"]), limited_by(row), *(_whole(_share(row, kind)) for kind in kinds)]
    cells += [rate, _whole(row["share_of_ceiling_pct"]), _whole(None if useful is None else max(0.0, 100 - useful))]
    cells += [_number(row[ENERGY])] if has_energy else []
    return cells + ([_number(row[f"{name}_per_batch_ms"]) for name in ("device", "enqueue")] if is_on_gpu else [])


def _notes(rows: Sequence[Row]) -> list[str]:
    """Return why a cell has no value, equal reasons together; of energy it is enough that no column is there."""
    reasons: dict[tuple[str, str], list[int]] = {}
    for row in rows:
        for name in NAMES:
            if row[name] is None and name != ENERGY:
                reason = row["reasons"].get(name, "no reason was recorded")
                reasons.setdefault((NAMES[name], reason), []).append(row["batch_size"])
    return [
        f"{name} is unknown{'' if len(sizes) == len(rows) else f' at batch size {listed(sizes)}'}: {clean(why, 200)}"
        for (name, why), sizes in reasons.items()
    ]


def _ceilings(data: ReportData) -> Table:
    """Return which setting of matrix products reaches what on this machine."""
    rows = [
        [
            ceiling["dtype"],
            ceiling["precision"] or NOTHING,
            "in use" if ceiling["is_configured"] and ceiling["dtype"] in data.dtypes else "",
            number(ceiling["flops_per_s"] / 1e9),
            str(ceiling["size"]),
            f"{ceiling['relative_error']:.1e}",
        ]
        for ceiling in data.document["ceilings"]["compute"]
    ]
    headers = ["dtype", "float32\nprecision", "", "GFLOP/s", "at size", "largest\nerror"]
    return Table(headers, rows, left=[0, 1, 2], caption="Matrix products")


def _memory(ceilings: Ceilings) -> Table:
    rows = [
        [
            level["level"],
            number(level["bytes_per_s"] / 1e9),
            number(level["working_set_bytes"] / 1e6),
            level["operation"],
        ]
        for level in ceilings["memory"]
    ]
    dispatch = f"Issuing one operator takes {1e6 * ceilings['dispatch_s']:.1f} us."
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


def _whole(percent: float | None) -> str:
    return NOTHING if percent is None else f"{percent:.0f}"


def work(data: ReportData) -> list[Content]:
    """Return, folded, what batches and operators tell, and the table of operators."""
    picture = show(data, operators.figure, data.operators)
    return [Folded("Operators and batches", [BulletList(_findings(data)), _operators(data), picture])]


def _findings(data: ReportData) -> list[str]:
    row = data.chosen
    sentences = [_kinds_of_work(data.operators)] if data.operators else []
    if row is None:
        return [*sentences, f"Nothing about batches: {data.choice['reason']}."]
    return [
        *sentences,
        _padding(row),
        _tokenizing(row),
        *_fixed_costs(data.of(row["dtype"])),
        _cold(row),
    ]


def _padding(row: Row) -> str:
    share = row["padding_pct"]
    if not share:
        return f"At batch size {row['batch_size']} there is no padding."
    return (
        f"At batch size {row['batch_size']}, {share:.1f} % of the tokens are padding; "
        "what removing it gives stands under What was tried."
    )


def _tokenizing(row: Row) -> str:
    tokenizing, forward = row["tokenize_per_batch_ms"], row["latency_per_batch_ms_median"]
    return (
        f"Tokenizing a batch of {row['batch_size']} takes {number(tokenizing)} ms, the forward {number(forward)} ms "
        f"(median): {100 * tokenizing / forward:.0f} % on top where nothing overlaps them."
    )


def _cold(row: Row) -> str:
    first = f"The first call at batch size {row['batch_size']}"
    if row["cold_call_ms"] is None:
        return f"{first}: {unknown(row['reasons'].get('cold_call_ms'))}."
    return f"{first} took {number(row['cold_call_ms'])} ms; a service pays it once."


def _kinds_of_work(operators: Sequence[Operator]) -> str:
    """Say which share of the traced time is matrix products and fused attention."""
    on_device = any(row["device_total_ms"] for row in operators)
    key, where = ("device_pct", "GPU time") if on_device else ("cpu_self_pct", "operators' own CPU time")
    products = round(sum(row[key] or 0 for row in operators if _plain(row) in MATRIX_PRODUCTS))
    attention = round(sum(row[key] or 0 for row in operators if _plain(row) in FUSED_ATTENTION))
    return (
        f"Of the {where}, {products} % is matrix products and {attention} % fused attention; "
        f"the other {max(0, 100 - products - attention)} % is element-wise work, copies and overhead."
    )


def _plain(row: Operator) -> str:
    return row["name"].rpartition("::")[2]


def _fixed_costs(rows: Sequence[Row]) -> list[str]:
    """Say how the time of a padded token changes with the batch size, which shows the fixed cost of a call."""
    known = [row for row in rows if row["tokens_per_sec_padded"]]
    if len(known) < 2:
        return []
    first, best = known[0], max(known, key=lambda row: row["tokens_per_sec_padded"])
    ratio = best["tokens_per_sec_padded"] / first["tokens_per_sec_padded"]
    if ratio < LEAST_RATIO:
        return [f"A token, padding included, costs about as much at batch size {first['batch_size']} as at any other."]
    return [
        f"A token, padding included, is {times(ratio)} times cheaper at batch size {best['batch_size']} than at "
        f"{first['batch_size']}: what every call costs anew (launches, reading the weights) spreads over more tokens."
    ]


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
