"""The sweep as a table, what its gaps mean, which batch size to use, and whether the targets are met."""

from collections.abc import Sequence

from boundby.formatting import NOTHING, clean, listed, number, spread, unknown
from utils.baseline import Choice, Optimal, Row, Target, forecast_in_words
from utils.render import Block, DefinitionList, Heading, Paragraph, Table
from utils.report.figures import Content, Folded, show
from utils.report.pictures import batch_size_comparison, metrics_heatmap
from utils.report.pictures.style import STATUS_TEXT, limited_by
from utils.report.sources import ReportData
from utils.settings import Targets

COLUMNS = (  # key, header
    ("throughput_samples_per_sec_mean", "samples\n/s"),
    ("throughput_half_width_pct", "±\n%"),
    ("latency_per_batch_ms_median", "batch ms\nmedian"),
    ("latency_per_batch_ms_p95", "\np95"),
    ("padding_pct", "padding\n%"),
)
CPU_COLUMNS = (("memory_cpu_peak_mb", "CPU MB\npeak"),)
GPU_COLUMNS = (("memory_peak_mb", "GPU MB\npeak"), ("gpu_utilization_pct", "busy\n%"))
ONE_DIGIT = ("padding_pct", "gpu_utilization_pct")
CHOICES = (
    ("", "Optimal"),
    ("max_throughput", "Highest throughput"),
    ("within_gpu_memory", "Within GPU memory"),
    ("under_latency", "Under the latency target"),
)
UNITS = {
    "latency_per_sample_ms": ("Time/sample", "ms", "at most"),
    "throughput_samples_per_sec": ("Throughput", "samples/s", "at least"),
    "gpu_memory_mb": ("GPU memory", "MB", "at most"),
    "gpu_utilization_pct": ("GPU utilisation", "%", "at least"),
    "accuracy": ("Accuracy", "", "at least"),
}
OF_ALL = ("latency_per_sample_ms", "throughput_samples_per_sec", "accuracy")  # where the whole dataset was evaluated


def section(data: ReportData) -> list[Content]:
    """Return one table per dtype, the reasons for what is missing, the choices and the pictures."""
    content: list[Content] = [Heading("Batch sizes")]
    if not data.rows:
        content.append(Paragraph("No batch size was measured yet."))
    columns = (*COLUMNS, *(GPU_COLUMNS if data.is_on_gpu else CPU_COLUMNS))
    for dtype in data.dtypes:
        content += [
            _table(dtype, data.of(dtype), columns),
            DefinitionList(_choices(data.best[dtype], data.config.targets)),
        ]
    if forecast := data.document.get("memory"):
        content.append(Paragraph(forecast_in_words(forecast)))
    content.append(show(data, batch_size_comparison.figure, data.measured, data.choice, data.config.targets))
    return content


def every_metric(data: ReportData) -> list[Content]:
    """Return, folded, the heat map of all metrics."""
    heat_map = show(data, metrics_heatmap.figure, data.measured, data.choice)
    return [Folded("Every metric of every batch size", [heat_map])]


def _table(dtype: str, rows: Sequence[Row], columns: Sequence[tuple[str, str]]) -> Table:
    cells = [_cells(row, columns) for row in rows]
    unsettled = ["?: not settled"] if any(row[-1].endswith("?") for row in cells) else []
    return Table(
        headers=["batch\nsize", "status", *(header for _, header in columns), "limited by"],
        rows=cells,
        left=[1, len(columns) + 2],
        caption=dtype,
        notes=[*unsettled, *_doubted(rows), *_notes(rows, columns)],
    )


def _cells(row: Row, columns: Sequence[tuple[str, str]]) -> list[str]:
    return [
        str(row["batch_size"]),
        STATUS_TEXT.get(row["status"], row["status"]),
        *(_cell(key, row[key]) for key, _ in columns),
        limited_by(row) if row.get("verdict") else NOTHING,
    ]


def _cell(key: str, value: float | None) -> str:
    if value is None:
        return NOTHING
    if key == "throughput_half_width_pct":
        return spread(value)
    return f"{value:.1f}" if key in ONE_DIGIT else number(value)


def _doubted(rows: Sequence[Row]) -> list[str]:
    """Return which rows are doubtful, and the kinds of their doubts."""
    kinds = {row["batch_size"]: dict.fromkeys(row.get("doubt_kinds", ())) for row in rows if row["doubts"]}
    doubtful = [f"{batch_size} ({', '.join(those)})" for batch_size, those in kinds.items()]
    return [f"doubtful: batch size {listed(doubtful)}"] if doubtful else []


def _notes(rows: Sequence[Row], columns: Sequence[tuple[str, str]]) -> list[str]:
    """Return why each cell without a value has none, equal reasons together."""
    reasons: dict[tuple[str, str], list[int]] = {}
    for row in rows:
        given = row.get("reasons", {})
        if "all" in given:
            reasons.setdefault((STATUS_TEXT[row["status"]], given["all"]), []).append(row["batch_size"])
            continue
        for key, header in columns:
            if row[key] is None:
                name = " ".join(header.split()) if key != "latency_per_batch_ms_p95" else "95th percentile"
                reasons.setdefault((f"{name} unknown", given.get(key, "no reason was recorded")), []).append(
                    row["batch_size"]
                )
    return [
        f"{what} at batch size {listed(sizes)}: {clean(why, longest=200)}" for (what, why), sizes in reasons.items()
    ]


def _choices(best: Optimal, targets: Targets) -> list[tuple[str, str]]:
    """Return the optimal batch size, and the others where they are asked for or differ."""
    asked = {"within_gpu_memory": targets.gpu_memory_mb, "under_latency": targets.latency_per_sample_ms}
    same = best["max_throughput"]["batch_size"] == best["batch_size"]
    shown = [(key, label) for key, label in CHOICES if asked.get(key, True) is not None]
    return [
        (label, _choice(best[key] if key else best)) for key, label in shown if not (same and key == "max_throughput")
    ]


def _choice(choice: Choice) -> str:
    if choice["batch_size"] is None:
        return f"none ({choice['reason']})"
    return f"{choice['batch_size']} ({number(choice['throughput_samples_per_sec'])} samples/s): {choice['reason']}"


def targets(data: ReportData) -> list[Block]:
    """Return each target with the measured value."""
    heading = Heading("Targets")
    if not data.targets:
        return []
    judged = [(UNITS[target["name"]][0], _judgement(target, data)) for target in data.targets]
    blocks: list[Block] = [heading, DefinitionList(judged)]
    if list(data.targets) != list(data.document["targets"]):
        measured = f"{data.layout.metrics.name} has those of the measurement."
        blocks.append(Paragraph(f"These are the targets of the present settings; {measured}"))
    return blocks


def _judgement(target: Target, data: ReportData) -> str:
    _, unit, direction = UNITS[target["name"]]
    wanted = f"target {direction} {target['target']:g} {unit}".rstrip()
    if target["met"] is None:
        return f"{unknown(target['reason'])}; {wanted}"
    is_of_all = data.full is not None and target["name"] in OF_ALL
    where = "over the whole dataset" if is_of_all else f"at batch size {data.choice['batch_size']}"
    value = f"{number(target['value'])} {unit}".rstrip()
    return f"{'met' if target['met'] else 'MISSED'}: {value} {where}; {wanted}"
