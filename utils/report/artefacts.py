"""Where the files are, and how to take them home."""

import shlex
from pathlib import Path

from utils.render.blocks import Block, CodeBlock, DefinitionList, Heading, Paragraph
from utils.render.formatting import clean
from utils.report.sources import ReportData

SNAPSHOT = "memory snapshot"  # as a manifest calls it


def section(data: ReportData) -> list[Block]:
    """Return each file below the results folder with what it holds, or why it is not there."""
    layout = data.layout
    written = [
        (layout.metrics, "02", "all results, for programs"),
        (layout.detailed_metrics, "02", "one row per batch size, for spreadsheets"),
        (layout.raw_samples, "02", "every timing"),
        (layout.predictions, "02", "one row per evaluated text"),
        (layout.evaluated.per_class, "02", "precision, recall and F1 of every class"),
        (layout.evaluated.confusion_matrix, "02", "how many rows of each label got each prediction"),
        (layout.evaluated.confident_mistakes, "02", "the surest mistakes with their texts"),
        (layout.evaluated.quality, "02", "the same and the calibration, for programs"),
        (layout.op_stats, "03", "one row per operator and shape"),
        (layout.trace, "03", "timeline for https://ui.perfetto.dev"),
        (layout.trace_analysis, "03", "where the traced time went and why, for programs"),
        (layout.key_averages, "03", "the operators as a table of text"),
        (layout.stacks, "03", "call stacks with their own time"),
        (layout.flame_graph, "03", "the call stacks as a flame graph, for a browser"),
        (layout.memory_timeline, "03", "allocated memory over the time of the trace"),
        (layout.memory_snapshot, "03", "history of the GPU's allocator, for https://pytorch.org/memory_viz"),
        (layout.layer_dashboard, "03", "the profile by layer, for a browser"),
        (layout.layer_summary, "03", "the same for programs; model_metrics.jsonl has every run"),
        (layout.run, "02", "machine, versions, settings, status of the steps"),
    ]
    entries = [
        (layout.report, "this report as text"),
        (layout.html_report, "this report with its pictures, for a browser or a colleague"),
        *((picture.path, picture.reason or picture.description) for picture in data.pictures),
        *(
            (path, content if path.is_file() else f"not there ({_why_absent(data, path, step)})")
            for path, step, content in written
        ),
    ]
    return [
        Heading("Files"),
        Paragraph(f"In {clean(layout.results, longest=300)}:"),
        DefinitionList([(clean(path.relative_to(layout.results)), content) for path, content in entries]),
        Paragraph("To take them home from a pod:"),
        CodeBlock(shlex.join(["make", "bundle", f"RESULTS={layout.results}"])),
    ]


def _why_absent(data: ReportData, path: Path, step: str) -> str:
    """Return why a file is not there; of the memory snapshot, which a CPU cannot give, the recording says so."""
    if path == data.layout.memory_snapshot and data.manifest:
        for remark in (*data.manifest.get("unavailable", []), *data.manifest.get("downgrades", [])):
            if remark["what"] == SNAPSHOT:
                return clean(remark["reason"], longest=300)
    return f"step {step} has not written it"
