"""Where the files are, and how to take them home."""

import shlex

from utils.report.sources import ReportData
from utils.report.typesetting import clean, command_lines, heading, paragraph

NAME_WIDTH = 38
PICTURES = {
    "batch_size_comparison.png": "six panels over the batch size",
    "metrics_heatmap.png": "every metric of every batch size",
    "operators.png": "where the traced time goes",
}


def section(data: ReportData) -> list[str]:
    """Return each file below the results folder with what it holds, or why it is not there."""
    layout = data.layout
    written = [
        (layout.metrics, "02", "all results, for programs"),
        (layout.detailed_metrics, "02", "one row per batch size, for spreadsheets"),
        (layout.raw_samples, "02", "every timing"),
        (layout.predictions, "02", "one row per evaluated text"),
        (layout.op_stats, "03", "one row per operator and shape"),
        (layout.trace, "03", "timeline for https://ui.perfetto.dev"),
        (layout.stacks, "03", "call stacks for a flame graph"),
        (layout.run, "02", "machine, versions, settings, status of the steps"),
    ]
    entries = [(layout.report, "this text")]
    entries += [(path, reason or PICTURES[path.name]) for path, reason in data.pictures.items()]
    entries += [
        (path, content if path.is_file() else f"not there (step {step} has not written it)")
        for path, step, content in written
    ]
    lines = paragraph(f"In {clean(layout.results, longest=300)}:")
    for path, content in entries:
        name = str(path.relative_to(layout.results))
        lines += paragraph(content, " " * (NAME_WIDTH + 4), f"  {name:<{NAME_WIDTH}}  ")
    pack = shlex.join(["make", "bundle", f"RESULTS={layout.results}"])
    return [*heading("Files"), *lines, "To take them home from a pod:", *command_lines(pack, "    ")]
