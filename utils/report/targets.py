"""The targets of the settings: met, missed, or unknown with the reason."""

from utils.render.blocks import Block, DefinitionList, Heading, Paragraph
from utils.render.formatting import number, unknown
from utils.report.sources import ReportData, Row

UNITS = {
    "latency_per_sample_ms": ("Latency/sample", "ms", "at most"),
    "throughput_samples_per_sec": ("Throughput", "samples/s", "at least"),
    "gpu_memory_mb": ("GPU memory", "MB", "at most"),
    "gpu_utilization_pct": ("GPU utilisation", "%", "at least"),
    "accuracy": ("Accuracy", "", "at least"),
}
OF_ALL = ("latency_per_sample_ms", "throughput_samples_per_sec", "accuracy")  # where the whole dataset was evaluated


def section(data: ReportData) -> list[Block]:
    """Return each target with the measured value."""
    heading = Heading("Targets")
    if not data.targets:
        return [heading, Paragraph("No target is set (targets.* in the settings).")]
    judged = [(UNITS[target["name"]][0], _judgement(target, data)) for target in data.targets]
    found: list[Block] = [heading, DefinitionList(judged)]
    if list(data.targets) != list(data.document["targets"]):
        measured = f"{data.layout.metrics.name} has those of the measurement."
        found.append(Paragraph(f"These are the targets of the present settings; {measured}"))
    return found


def _judgement(target: Row, data: ReportData) -> str:
    _, unit, direction = UNITS[target["name"]]
    wanted = f"target {direction} {target['target']:g} {unit}".rstrip()
    if target["met"] is None:
        return f"{unknown(target['reason'])}; {wanted}"
    is_of_all = data.full is not None and target["name"] in OF_ALL
    where = "over the whole dataset" if is_of_all else f"at batch size {data.choice['batch_size']}"
    value = f"{number(target['value'])} {unit}".rstrip()
    return f"{'met' if target['met'] else 'MISSED'}: {value} {where}; {wanted}"
