"""The operator trace of a few batches: which batches, which files, and what the manifest says about them."""

from dataclasses import asdict
from typing import Any

import torch

from boundby import files
from boundby.capture import CaptureOptions, capture
from boundby.inference import collate, forward, tokenize
from boundby.trace import OPERATOR_COLUMNS, op_stats, operator_rows, read_trace, rows_by_name
from utils.cli import Run
from utils.data import Rows, sample
from utils.models import LoadedModel

SCHEMA_VERSION = 1
TEXT_SEED = 0
TOP_OPERATORS = 10


def choose_batch_size(run: Run) -> tuple[int, str]:
    """Return the batch size to trace, and why: the one asked for, the optimal one, or the middle of the sweep."""
    if run.config.trace.batch_size:
        return run.config.trace.batch_size, "trace.batch_size"
    try:
        best = files.read_json(run.layout.metrics)["optimal"]["batch_size"]
    except (OSError, ValueError, KeyError, TypeError):
        best = None
    if best:
        return best, f"the optimal batch size in {run.layout.metrics.name}"
    sizes = sorted(run.config.profiling.batch_sizes)
    return sizes[len(sizes) // 2], "the middle of profiling.batch_sizes; step 02 has not found an optimal one"


def record(run: Run, loaded: LoadedModel, rows: Rows, max_length: int) -> dict[str, Any]:
    """Trace a few batches, derive stacks and operator statistics, and return the manifest that was written."""
    settings, layout = run.config.trace, run.layout
    batch_size, why = choose_batch_size(run)
    steps = settings.warmup_steps + settings.active_steps
    texts = sample(rows, min(len(rows.texts), batch_size * steps), TEXT_SEED).texts
    tokens = tokenize(loaded.tokenizer, texts, max_length)

    def step(number: int) -> None:
        chosen = [(number * batch_size + line) % len(texts) for line in range(batch_size)]
        with torch.inference_mode():
            forward(loaded.model, collate(tokens, chosen, loaded.tokenizer.pad_token_id, loaded.device))

    step(0)  # the cold call belongs to the sweep
    options = CaptureOptions(
        shapes=settings.shapes,
        memory=settings.memory,
        stacks_path=layout.stacks if settings.stacks else None,
        max_trace_bytes=settings.max_mb * 1_000_000,
    )
    taken = capture(
        step,
        steps=settings.active_steps,
        warmup=settings.warmup_steps,
        trace_path=layout.trace,
        device=loaded.device,
        options=options,
    )
    operators = []
    if taken.trace_path:
        operators = operator_rows(op_stats(read_trace(taken.trace_path)))
        files.write_csv(layout.op_stats, operators, OPERATOR_COLUMNS)
    manifest = {
        "schema_version": SCHEMA_VERSION,
        "batch_size": batch_size,
        "batch_size_reason": why,
        "dtype": loaded.dtype,
        "operators": len(operators),
        **asdict(taken),
    }
    files.write_json(layout.trace_manifest, manifest)
    return {**manifest, "top": rows_by_name(operators)[:TOP_OPERATORS]}


def console_lines(manifest: dict[str, Any]) -> list[str]:
    """Return what was recorded, and what was not and why, as lines for the terminal."""
    lines = [
        f"traced {manifest['steps_recorded']} of {manifest['steps_expected']} steps "
        f"at batch size {manifest['batch_size']} ({manifest['batch_size_reason']})"
    ]
    for row in manifest["top"]:
        lines.append(
            f"  {row['cpu_self_pct'] or 0:5.1f} % {row['cpu_self_ms']:10.2f} ms {row['calls']:6d} calls  {row['name']}"
        )
    for kind in ("downgrades", "unavailable"):
        lines += [f"{kind}: {remark['what']}: {remark['reason']}" for remark in manifest[kind]]
    return lines
