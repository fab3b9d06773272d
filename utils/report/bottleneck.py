"""Where the time goes: operators, padding, tokenizing, fixed costs."""

from collections.abc import Sequence

from utils.plots import operators
from utils.render.blocks import Block, BulletList, Heading, Paragraph, Table
from utils.render.formatting import NOTHING, clean, number, times, unknown
from utils.report.pictures import Content, show
from utils.report.sources import Missing, ReportData, Row

SHOWN = 12
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


def section(data: ReportData) -> list[Content]:
    """Return what batches and operators tell, and the table of operators."""
    return [
        Heading("Where the Time Goes"),
        BulletList(_findings(data)),
        _operators(data),
        show(data, operators.figure, data.operators),
    ]


def _findings(data: ReportData) -> list[str]:
    row = data.chosen
    found = [_kinds_of_work(data.operators)] if data.operators else []
    if row is None:
        return [*found, f"Nothing about batches: {data.choice['reason']}."]
    return [
        *found,
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


def _kinds_of_work(operators: Sequence[Row]) -> str:
    """Say which share of the traced time is matrix products and fused attention."""
    on_device = any(row["device_total_ms"] for row in operators)
    key, where = ("device_pct", "GPU time") if on_device else ("cpu_self_pct", "operators' own CPU time")
    products = round(sum(row[key] or 0 for row in operators if _plain(row) in MATRIX_PRODUCTS))
    attention = round(sum(row[key] or 0 for row in operators if _plain(row) in FUSED_ATTENTION))
    return (
        f"Of the {where}, {products} % is matrix products and {attention} % fused attention; "
        f"the other {max(0, 100 - products - attention)} % is element-wise work, copies and overhead."
    )


def _plain(row: Row) -> str:
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
    top = sorted(data.operators, key=lambda row: row[key] or 0, reverse=True)[:SHOWN]
    return Table(
        headers=headers,
        rows=[_cells(row, on_device) for row in top],
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


def _cells(row: Row, on_device: bool) -> list[str]:
    cells = [clean(row["name"], LONGEST_OPERATOR), f"{row['calls']:,}"]
    cells += [_cell(row["cpu_self_ms"]), _percent(row["cpu_self_pct"])]
    return [*cells, _cell(row["device_total_ms"]), _percent(row["device_pct"])] if on_device else cells


def _not_recorded(data: ReportData) -> list[str]:
    missing = "; ".join(f"{remark.what}: {unknown(remark.reason)}" for remark in data.manifest.unavailable)
    return [f"Not in the trace: {missing}"] if missing else []


def _cell(value: float | None) -> str:
    return NOTHING if value is None else number(value)


def _percent(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.1f}"
