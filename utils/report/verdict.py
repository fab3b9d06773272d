"""The verdict: what limits each batch size, the evidence for it, what each fix could gain, and the machine's limits."""

from collections.abc import Mapping, Sequence
from typing import Any

from utils.comparison.facts import between_dtypes
from utils.plots import roofline
from utils.render.blocks import Block, BulletList, Heading, Paragraph, Table
from utils.render.formatting import NOTHING, clean, listed, number, times, unknown
from utils.report.pictures import Content, show
from utils.report.sources import Missing, ReportData, Row

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


def of(row: Row | None) -> Mapping[str, Any] | None:
    """Return the verdict of a row, or None where there is none."""
    return (row or {}).get("verdict")


def what(data: ReportData) -> str:
    """Return in one sentence what the chosen batch size is bound by."""
    row, found = data.chosen, of(data.chosen)
    if row is None or found is None:
        return unknown(data.choice["reason"] if row is None else row["reasons"].get("bound"))
    text = MEANING[found["bound"]]
    if found["alternatives"]:
        text += f" ({listed(found['alternatives'])})"
    share = found["share_of_limit"]
    reached = "" if share is None else f"; {_limit(found['bound'])} for {_percent(share)} of its time"
    return f"batch size {row['batch_size']} in {row['dtype']} is bound by {text}{reached}"


def _limit(bound: str) -> str:
    """Return what the share of the limit is the share of, as the start of a sentence."""
    kinds = {"launch": "issuing accounts", "input": "tokenizing accounts", "transfer": "the transfer accounts"}
    return kinds.get(bound, "the limits of this machine account")


def why(data: ReportData) -> str:
    """Return the evidence in one line, and how sure it is."""
    found = of(data.chosen)
    if found is None:
        return unknown("there is no verdict")
    if not found["evidence"]:
        return clean("; ".join(found["doubts"]), longest=300)
    sure = f"confidence {found['confidence']}, {TRIED.get(found['confirmation'], 'not tested by intervention')}"
    return "; ".join([*found["telling"], sure])


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
        blocks.append(BulletList([*chosen["evidence"], *(f"doubt: {each}" for each in chosen["doubts"])]))
        blocks += _gains(chosen["gains"], where)
    blocks += [picture, _ceilings(data), _memory(data.document["ceilings"])]
    return [*blocks, *_dtypes(data)]


def _ceilings_of(data: ReportData) -> Mapping[str, Any] | Missing:
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
    found = of(row) or {}
    rate = NOTHING if row["flops_per_sec"] is None else number(row["flops_per_sec"] / 1e9)
    cells = [str(row["batch_size"]), found["bound"], found["confidence"], CONFIRMED[found["confirmation"]], rate]
    cells += [_number(row[name]) if name == ENERGY else _whole(row[name]) for name in columns]
    cells += [_number(row[f"{name}_per_batch_ms"]) for name in ("device", "enqueue")] if is_on_gpu else []
    return [*cells, str(row["disturbed_rounds"])]


def _notes(rows: Sequence[Row]) -> list[str]:
    """Return what a word leaves open, and why a cell has no value, equal reasons together."""
    found = [
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
    return found + [
        f"{name} unknown{'' if len(sizes) == len(rows) else f' at batch size {listed(sizes)}'}: {clean(why, 200)}"
        for (name, why), sizes in reasons.items()
    ]


def _gains(gains: Sequence[Mapping[str, Any]], where: str) -> list[Block]:
    if not gains:
        return [Paragraph(f"No fix that these figures know of would gain more than 2 % at {where}.")]
    bounds = "bounds, not promises: each is what would be left if the fix were perfect, and they do not multiply"
    return [
        Paragraph(f"What each fix could gain at {where} ({bounds}):"),
        BulletList([f"at most {times(each['at_most'])} times: {each['fix']} ({each['basis']})" for each in gains]),
    ]


def _ceilings(data: ReportData) -> Table:
    """Return which setting of matrix products reaches what on this machine."""
    rows = [
        [
            each["dtype"],
            each["precision"] or NOTHING,
            "in use" if each["is_configured"] and each["dtype"] in data.dtypes else "",
            number(each["flops_per_s"] / 1e9),
            str(each["size"]),
            f"{each['relative_error']:.1e}",
        ]
        for each in data.document["ceilings"]["compute"]
    ]
    headers = ["dtype", "float32\nprecision", "", "GFLOP/s", "at size", "largest\nerror"]
    return Table(headers, rows, left=[0, 1, 2], caption="What this machine reaches: matrix products")


def _memory(ceilings: Mapping[str, Any]) -> Table:
    rows = [
        [each["level"], number(each["bytes_per_s"] / 1e9), number(each["working_set_bytes"] / 1e6), each["operation"]]
        for each in ceilings["memory"]
    ]
    dispatch = f"Issuing one operator takes {1e6 * ceilings['dispatch_s']:.1f} us."
    headers = ["memory", "GB/s", "MB\ntouched", "by"]
    return Table(headers, rows, left=[0, 3], caption="What this machine reaches: memory", notes=[dispatch])


def _dtypes(data: ReportData) -> list[Block]:
    """Return how the other dtypes of the sweep compare with the first, where it was repeated."""
    if len(data.dtypes) < 2 or not data.rounds:
        return []
    found = between_dtypes(data.document, data.rounds)
    rows = [
        [
            each["dtype_b"],
            str(each["batch_size"]),
            each["verdict"],
            _number(each["throughput_a_samples_per_sec"]),
            _number(each["throughput_b_samples_per_sec"]),
            _speed_ratio(each),
        ]
        for each in found
    ]
    headers = ["dtype", "batch\nsize", "is", f"{data.dtypes[0]}\nsamples/s", "its\nsamples/s", "times the speed"]
    notes = ["Judged by rounds, with Holm's correction over all rows; see docs/method.md."]
    return [Table(headers, rows, left=[0, 2, 5], caption=f"Against {data.dtypes[0]}", notes=notes)]


def _speed_ratio(row: Mapping[str, Any]) -> str:
    if row["time_ratio"] is None:
        return NOTHING
    low, high = row["time_ratio_ci_high"], row["time_ratio_ci_low"]
    ends = f" [{times(1 / low)}, {times(1 / high)}]" if low and high else ""
    return f"{times(1 / row['time_ratio'])}{ends}"


def _number(value: float | None) -> str:
    return NOTHING if value is None else number(value)


def _whole(percent: float | None) -> str:
    return NOTHING if percent is None else f"{percent:.0f}"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
