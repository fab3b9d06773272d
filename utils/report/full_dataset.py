"""The numbers over the whole dataset."""

from collections.abc import Mapping
from typing import Any

from utils.report.blocks import Block, DefinitionList, Heading, Paragraph, Table
from utils.report.sources import ReportData
from utils.report.typesetting import number, quantity, unknown


def section(data: ReportData) -> list[Block]:
    """Return accuracy, F1, time, speed and memory of the pass over the dataset."""
    heading = Heading("Full Dataset Performance")
    full = data.full
    if full is None:
        return [heading, Paragraph(f"Not evaluated: {data.document['full_dataset_reason']}.")]
    return [heading, DefinitionList(_pairs(full, data.document["dataset"].get("rows"))), *_subsets(full)]


def _pairs(full: Mapping[str, Any], rows: int | None) -> list[tuple[str, str]]:
    seconds = full["inference_time_s"]
    part = f" of {rows:,} (a seeded sample)" if rows and rows != full["samples"] else ""
    return [
        ("Samples", f"{full['samples']:,}{part}"),
        ("Accuracy", f"{full['accuracy']:.4f} [{full['accuracy_ci_low']:.4f}, {full['accuracy_ci_high']:.4f}] "
         f"({full['correct']:,} correct; 95 % interval)"),
        ("F1-Score (Macro)", f"{full['f1_macro']:.4f}"),
        ("F1-Score (Weighted)", f"{full['f1_weighted']:.4f}"),
        ("Inference time", f"{number(seconds)} s, of which tokenizing {number(full['tokenize_time_s'])} s"),
        ("Latency/sample", f"{number(full['latency_per_sample_ms'])} ms (time divided by samples)"),
        ("Throughput", f"{number(full['throughput_samples_per_sec'])} samples/s, "
         f"{number(full['tokens_per_sec_real'])} real tokens/s"),
        ("Batches", f"{full['strategy']}, at most {full['token_budget']:,} tokens each, "
         f"{full['padding_pct']:.1f} % padding; {full['precision']}"),
        ("GPU memory, peak", quantity(full["gpu_mem_used_mb"], "MB", full["gpu_mem_used_reason"])),
        ("CPU memory, peak", quantity(full["cpu_mem_peak_mb"], "MB", "the kernel does not tell")),
        ("Texts cut", _cut(full)),
    ]  # fmt: skip


def _cut(full: Mapping[str, Any]) -> str:
    if full["truncated"] is None:
        return unknown("a tokenizer written in Python does not tell")
    return f"{full['truncated']:,} ({100 * full['truncated'] / full['samples']:.2f} %)"


def _subsets(full: Mapping[str, Any]) -> list[Block]:
    subsets = full.get("samples_of") or []
    if not subsets:
        return []
    rows = [
        [f"{each['samples']:,}", *(f"{each[key]:.4f}" for key in ("accuracy", "f1_macro", "f1_weighted"))]
        for each in subsets
    ]
    return [Table(["first samples", "accuracy", "F1 macro", "F1 weighted"], rows)]
