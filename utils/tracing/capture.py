"""The trace of the reference batch: which one, which files are made of it, and what is said on the terminal."""

import contextlib
from dataclasses import dataclass

import msgspec
import torch

from boundby import files
from boundby.capture import CaptureManifest, CaptureOptions, capture
from boundby.inference import Batch, forward
from boundby.machine import is_gpu, naming_loss
from boundby.timing import Shape
from boundby.trace import (
    MEMORY_COLUMNS,
    OPERATOR_COLUMNS,
    analyze,
    memory_rows,
    operator_rows,
    read_trace,
    table_lines,
    table_rows,
)
from utils.baseline import Selection
from utils.command import Layout, Run
from utils.data import Rows
from utils.models import LoadedModel
from utils.render import flame_graph
from utils.steps import steps
from utils.tracing import trace_document as document
from utils.tracing import trace_text as text
from utils.tracing.traces import Examination, Examined

WARM_UP_RUNS = 3  # of the batch before the profiler starts; the cold call belongs to the sweep
STACKS_DETAIL = "Python frames of one batch, recorded in a step of their own; width is time."


@dataclass(frozen=True)
class Recording:
    """What was recorded of which batch, why of that size, and what the trace says (None without a trace)."""

    shape: Shape
    batch_size_reason: str
    taken: CaptureManifest
    analysis: Examination | None
    is_on_gpu: bool = False

    def lines(self) -> list[str]:
        """Return what was recorded, and what was not and why, as lines for the terminal."""
        lines = [
            f"traced {self.taken.steps_recorded} of {self.taken.steps_expected} steps of the batch of {self.shape} "
            f"({self.batch_size_reason})"
        ]
        if self.analysis:
            lines += [text.headline(self.analysis.traces[0])]
        missing = self.taken.unavailable if self.is_on_gpu else ()  # what no CPU can give, nobody misses there
        return lines + [f"{remark.what}: {remark.reason}" for remark in (*self.taken.downgrades, *missing)]


def choose_batch_size(run: Run) -> tuple[int, str]:
    """Return the batch size to trace, and why: the one asked for, the optimal one, or the middle of the sweep."""
    if run.config.trace.batch_size:
        return run.config.trace.batch_size, "trace.batch_size"
    try:
        best = steps.read(run.layout.metrics, steps.Measured).optimal.batch_size
    except (OSError, ValueError):
        best = None
    if best:
        return best, f"the optimal batch size in {run.layout.metrics.name}"
    sizes = sorted(steps.sweep_sizes(run.config, is_on_gpu=False))
    return sizes[len(sizes) // 2], "the middle of profiling.batch_sizes; step 02 has not found an optimal one"


def reference(run: Run, loaded: LoadedModel, rows: Rows, max_length: int) -> Batch:
    """Return the batch that the trace and the profile by layer show: that of typical cost at the chosen batch size."""
    batch_size, _ = choose_batch_size(run)
    return Selection.of(rows.texts, loaded.tokenizer, max_length, loaded.device).reference(batch_size)


@naming_loss("the trace of the reference batch")
def record(run: Run, loaded: LoadedModel, batch: Batch) -> Recording:
    """Trace a few forwards of `batch`, warm, and write what the trace tells."""
    settings, layout = run.config.trace, run.layout
    _, why = choose_batch_size(run)

    def step(number: int) -> None:
        with torch.inference_mode():
            forward(loaded.model, batch)

    for number in range(WARM_UP_RUNS):
        step(number)
    options = CaptureOptions(
        shapes=settings.shapes,
        memory=settings.memory,
        stacks_path=layout.stacks if settings.stacks else None,
        snapshot_path=layout.memory_snapshot if settings.memory else None,
        max_trace_bytes=settings.max_mb * 1_000_000,
        nvtx=settings.nvtx,
    )
    taken = capture(
        step,
        steps=settings.active_steps,
        warmup=settings.warmup_steps,
        trace_path=layout.trace,
        device=loaded.device,
        options=options,
    )
    taken = msgspec.structs.replace(
        taken,
        batch_size=batch.shape.samples,
        batch_size_reason=why,
        shape=str(batch.shape),
        dtype=loaded.dtype,
    )
    files.write_json(layout.trace_manifest, taken)
    peak = _peak_flops_per_s(layout, loaded.dtype)
    analysis = _derive(layout, taken, batch.shape, peak) if taken.trace_path else None
    return Recording(batch.shape, why, taken, analysis, is_gpu(loaded.device))


def _derive(layout: Layout, taken: CaptureManifest, shape: Shape, peak_flops_per_s: float | None) -> Examination:
    """Write everything that the trace and the stacks tell; return what the trace says."""
    analysis = analyze(read_trace(layout.trace), expected_steps=taken.cycles[0].steps_expected)
    examination = Examination((Examined.of(analysis),), (), "shapes")
    files.write_json(layout.trace_analysis, {**document.of(examination, peak_flops_per_s), "shape": str(shape)})
    files.write_csv(layout.op_stats, operator_rows(analysis.operators, peak_flops_per_s), OPERATOR_COLUMNS)
    files.write_text(layout.key_averages, "\n".join([*table_lines(table_rows(analysis.operators)), ""]))
    if analysis.memory:
        files.write_csv(layout.memory_timeline, memory_rows(analysis.memory), MEMORY_COLUMNS)
    if taken.stacks_path:
        with files.naming(taken.stacks_path), taken.stacks_path.open(encoding="utf-8") as stacks:
            files.write_text(layout.flame_graph, flame_graph.page(stacks, "Call stacks", STACKS_DETAIL))
    return examination


def _peak_flops_per_s(layout: Layout, dtype: str) -> float | None:
    """Return the measured limit that step 02 left for this dtype, or None without one."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        for ceiling in files.read_json(layout.metrics)["ceilings"]["compute"]:
            if ceiling["dtype"] == dtype and ceiling["is_configured"]:
                return float(ceiling["flops_per_s"])
    return None
