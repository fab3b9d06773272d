"""What one recording gave, as the record that a manifest holds."""

from collections.abc import Sequence
from pathlib import Path

import torch.profiler

from boundby.capture.content import Content
from boundby.capture.export import Exported
from boundby.capture.manifest import Cycle, Record
from boundby.capture.shortfalls import note_missing_events, note_missing_steps


def booked(  # noqa: PLR0913  (what was asked for and what came of it)
    log: Record,
    exported: Exported | None,
    content: Content,
    activities: Sequence[torch.profiler.ProfilerActivity],
    path: Path,
    *,
    number: int,
    first_step: int,
    steps_expected: int,
    whole_steps: int,
) -> Cycle:
    """Return the record, and note what the trace lacks of the `content`; it is at `path`, if there is one.

    `exported` is None where the profiler gave nothing. `whole_steps` have ended: of a mark beyond them only a part is
    in the trace.
    """
    kept = exported if exported and exported.trace else None
    found = min(kept.steps, whole_steps) if kept else 0
    if kept:
        note_missing_steps(log, found, whole_steps, content.steps)
        note_missing_events(log, kept, activities)
    return Cycle(
        number=number,
        first_step=first_step,
        steps_expected=steps_expected,
        steps_recorded=found,
        stacks=content.stacks,
        trace_path=path if kept else None,
        trace_bytes=path.stat().st_size if kept else None,
        json_bytes=exported.json_bytes if exported else None,
    )
