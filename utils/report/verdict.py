"""The verdict and where the time goes: what limits each batch size, its evidence, gains, ceilings, operators."""

from collections.abc import Sequence

from utils.comparison import facts
from utils.document import Ceilings, Gain, Operator, Row, Verdict
from utils.plots import operators, roofline
from utils.render.blocks import Block, BulletList, Heading, Paragraph, Table
from utils.render.formatting import NOTHING, clean, listed, number, times, unknown
from utils.report.pictures import Content, show
from utils.report.sources import Missing, ReportData

MEANING = {
    "compute": "compute: the time goes into matrix products and attention",
    "memory": "memory: the time goes into moving data",
    "launch": "launch: issuing many small operators takes longer than what they do",
    "transfer": "transfer: bringing the input to the device takes as long as the work there",
    "input": "input: tokenizing takes at least as long as the forward",
    "under_utilised": "no limit of this machine: its shapes are too small to use it",
    "mixed": "more than one limit",
    "inconclusive": "unknown",
}
ENERGY = "energy_per_sample_j"
SHARES = {  # columns that are left out where no row has a value
    "share_of_limit_pct": "share of\nlimit %",
    "share_of_ceiling_pct": "of peak\n%",
    "useful_flops_pct": "useful\nFLOPs %",
    ENERGY: "joules/\nsample",
}
CONFIRMED = {"confirmed": "yes", "contradicted": "no", "untested": NOTHING}
TRIED = {"confirmed": "confirmed by intervention", "contradicted": "contradicted by an intervention"}
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


def what(data: ReportData) -> str:
    """Return in one sentence what the chosen batch size is bound by."""
    row, verdict = data.chosen, of(data.chosen)
    if row is None or verdict is None:
        return unknown(data.choice["reason"] if row is None else row["reasons"].get("bound"))
    text = MEANING[verdict["bound"]]
    if verdict["alternatives"]:
        text += f" ({listed(verdict['alternatives'])})"
    share = verdict["share_of_limit"]
    reached = "" if share is None else f"; {_limit(verdict['bound'])} for {_percent(share)} of its time"
    return f"batch size {row['batch_size']} in {row['dtype']} is bound by {text}{reached}"


def _limit(bound: str) -> str:
    """Return what the share of the limit is the share of, as the start of a sentence."""
    kinds = {"launch": "issuing accounts", "input": "tokenizing accounts", "transfer": "the transfer accounts"}
    return kinds.get(bound, "the limits of this machine account")


def why(data: ReportData) -> str:
    """Return the evidence in one line, and how sure it is."""
    verdict = of(data.chosen)
    if verdict is None:
        return unknown("there is no verdict")
    if not verdict["evidence"]:
        return clean("; ".join(verdict["doubts"]), longest=300)
    sure = f"confidence {verdict['confidence']}, {TRIED.get(verdict['confirmation'], 'not tested by intervention')}"
    return "; ".join([*(verdict.get("telling") or verdict["evidence"][:1]), sure])


def section(data: ReportData) -> list[Content]:
    """Return the table of verdicts, evidence and gains of the chosen batch size, and what this machine can do."""
    judged = [row for row in data.rows if of(row)]
    picture = show(data, roofline.figure, data.measured, _ceilings_of(data))
    if not judged:
        reason = data.document.get("ceilings_reason") or "no batch size was measured"
        return [Heading("Verdict"), Paragraph(f"There is no verdict: {unknown(reason)}."), picture]
    blocks: list[Content] = [Heading("Verdict")]
    for dtype in data.dtypes:
        own = [row for row in judged if row["dtype"] == dtype]
        blocks += [_table(dtype, own, data.is_on_gpu)] if own else []
    chosen = of(data.chosen)
    if chosen and data.chosen:
        where = f"batch size {data.chosen['batch_size']} in {data.chosen['dtype']}"
        blocks.append(Paragraph(f"Evidence at {where}:"))
        blocks.append(BulletList([*chosen["evidence"], *(f"doubt: {doubt}" for doubt in chosen["doubts"])]))
        blocks += _gains(chosen["gains"], where)
    blocks += [picture, _ceilings(data), _memory(data.document["ceilings"])]
    return [*blocks, *_dtypes(data)]


def _ceilings_of(data: ReportData) -> Ceilings | Missing:
    """Return the ceilings that the roofline is drawn under, or why it cannot be drawn."""
    ceilings, reason = data.document["ceilings"], data.document["ceilings_reason"]
    why_not = roofline.why_not(data.rows, ceilings, reason)
    return Missing(why_not) if why_not else ceilings


def _table(dtype: str, rows: Sequence[Row], is_on_gpu: bool) -> Table:
    columns = [name for name in SHARES if any(row[name] is not None for row in rows)]
    headers = ["batch\nsize", "bound by", "confidence", "con-\nfirmed", "GFLOP/s", *(SHARES[name] for name in columns)]
    headers += ["device\nms", "enqueue\nms"] if is_on_gpu else []
    return Table(
        headers=[*headers, "disturbed\nrounds"],
        rows=[_cells(row, columns, is_on_gpu) for row in rows],
        left=[1, 2, 3],
        caption=dtype,
        notes=_notes(rows),
    )


def _cells(row: Row, columns: Sequence[str], is_on_gpu: bool) -> list[str]:
    verdict = of(row) or {}
    rate = NOTHING if row["flops_per_sec"] is None else number(row["flops_per_sec"] / 1e9)
    cells = [str(row["batch_size"]), verdict["bound"], verdict["confidence"], CONFIRMED[verdict["confirmation"]], rate]
    cells += [_number(row[name]) if name == ENERGY else _whole(row[name]) for name in columns]
    cells += [_number(row[f"{name}_per_batch_ms"]) for name in ("device", "enqueue")] if is_on_gpu else []
    return [*cells, str(row["disturbed_rounds"])]


def _notes(rows: Sequence[Row]) -> list[str]:
    """Return what a word leaves open, and why a cell has no value, equal reasons together."""
    notes = [
        f"batch size {row['batch_size']} {verdict['bound']}: {listed(verdict['alternatives'])}"
        for row in rows
        if (verdict := of(row)) and verdict["alternatives"]
    ]
    reasons: dict[tuple[str, str], list[int]] = {}
    for row in rows:
        for name in (*SHARES, "flops_per_sec"):
            if row[name] is None:
                reason = row["reasons"].get(name, "no reason was recorded")
                reasons.setdefault((name, reason), []).append(row["batch_size"])
    return notes + [
        f"{name} unknown{'' if len(sizes) == len(rows) else f' at batch size {listed(sizes)}'}: {clean(why, 200)}"
        for (name, why), sizes in reasons.items()
    ]


def _gains(gains: Sequence[Gain], where: str) -> list[Block]:
    if not gains:
        return [Paragraph(f"No fix that these figures know of would gain more than 2 % at {where}.")]
    bounds = "bounds, not promises: each is what would be left if the fix were perfect, and they do not multiply"
    return [
        Paragraph(f"What each fix could gain at {where} ({bounds}):"),
        BulletList([f"at most {times(gain['at_most'])} times: {gain['fix']} ({gain['basis']})" for gain in gains]),
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
    return Table(headers, rows, left=[0, 1, 2], caption="What this machine reaches: matrix products")


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
    return Table(headers, rows, left=[0, 3], caption="What this machine reaches: memory", notes=[dispatch])


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


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def where_time_goes(data: ReportData) -> list[Content]:
    """Return what batches and operators tell, and the table of operators."""
    return [
        Heading("Where the Time Goes"),
        BulletList(_findings(data)),
        _operators(data),
        show(data, operators.figure, data.operators),
    ]


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
        *_whole_pass(data, row),
        _cold(row),
    ]


def _padding(row: Row) -> str:
    share = row["padding_pct"]
    if not share:
        return f"At batch size {row['batch_size']} there is no padding."
    return (
        f"At batch size {row['batch_size']}, {share:.1f} % of the tokens are padding; "
        "what removing it could gain stands with the verdict."
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


def _whole_pass(data: ReportData, row: Row) -> list[str]:
    """Compare the pass over the dataset, which sorts texts and tokenizes them on the way, with the sweep."""
    full = data.full
    if full is None or full["dtype"] != row["dtype"]:
        return []
    ratio = full["throughput_samples_per_sec"] / row["throughput_samples_per_sec_mean"]
    tokenizing = 100 * full["tokenize_time_s"] / full["inference_time_s"]
    return [
        f"The pass over the whole dataset, its texts sorted by length, had {times(ratio)} times the throughput of "
        f"batch size {row['batch_size']} in the sweep; {tokenizing:.0f} % of its time was tokenizing."
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
    batches = f"{manifest.steps_recorded} of {manifest.steps_expected} batches of {manifest.batch_size}"
    return f" ({batches}, {clean(manifest.dtype)})"


def _operator_cells(row: Operator, on_device: bool) -> list[str]:
    cells = [clean(row["name"], LONGEST_OPERATOR), f"{row['calls']:,}"]
    cells += [_cell(row["cpu_self_ms"]), _share(row["cpu_self_pct"])]
    return [*cells, _cell(row["device_total_ms"]), _share(row["device_pct"])] if on_device else cells


def _not_recorded(data: ReportData) -> list[str]:
    missing = "; ".join(f"{remark.what}: {unknown(remark.reason)}" for remark in data.manifest.unavailable)
    return [f"Not in the trace: {missing}"] if missing else []


def _cell(value: float | None) -> str:
    return NOTHING if value is None else number(value)


def _share(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.1f}"
