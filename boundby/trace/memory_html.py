"""The page on the allocated memory of a trace: its curve, and what it is at the peak. It loads nothing."""

import html
from collections.abc import Iterable, Iterator, Sequence

from boundby.formatting import NOTHING, clean, number
from boundby.trace.memory import MemoryUse, memory_size

# What outlives the stage that allocates it is mostly of one kind.
KINDS = {
    "forward": "activations",
    "backward": "gradients",
    "optimizer": "optimizer state, and temporaries of the update",
    "h2d": "the batch",
    "data": "the batch",
}
WIDTH, HEIGHT = 1000, 260  # of a curve, in its own units
LONGEST_NAME = 90
PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 72em; margin: 2em auto; padding: 0 1em; color: #222; }}
svg {{ width: 100%; height: auto; background: #fafafa; border: 1px solid #ddd; }}
.allocated {{ fill: #0072b2; fill-opacity: .18; stroke: #0072b2; stroke-width: 1.5; }}
.reserved {{ fill: none; stroke: #e69f00; stroke-width: 1.5; stroke-dasharray: 6 4; }}
.peak {{ stroke: #b00020; stroke-width: 1; }}
table {{ border-collapse: collapse; }} td {{ padding: .1em .8em; border-bottom: 1px solid #eee; }}
td:first-child {{ text-align: right; font-variant-numeric: tabular-nums; }}
</style></head><body>
<h1>{title}</h1>
{body}
</body></html>
"""


def memory_page(uses: Sequence[MemoryUse], title: str) -> str:
    """Return the page. Raises ValueError where no memory was recorded: there is nothing to show."""
    if not uses:
        raise ValueError("the trace holds no allocation: its steps made none, or memory was not recorded")
    body = "\n".join(part for use in uses for part in _device(use))
    return PAGE.format(title=_text(title), body=body)


def _device(use: MemoryUse) -> Iterator[str]:
    name = "Host" if use.device is None else f"Device {use.device}"
    first, last = use.timeline.times_ns[0], use.timeline.times_ns[-1]
    counted = "Allocations from before the trace are unknown and not counted."
    if use.earlier_bytes is not None:
        counted = f"{memory_size(use.earlier_bytes)} at the peak are older than the trace: parameters, optimizer state."
    reserved = "" if use.timeline.reserved_bytes is None else "; dashed: reserved by the allocator"
    after = number((use.peak_ns - first) / 1e6)
    yield f"<h2>{name}: peak {memory_size(use.peak_bytes)}, {after} ms after the start</h2>"
    yield f"<p>{use.allocations:,} allocations of {memory_size(use.allocated_bytes)}, {use.frees:,} frees of "
    yield f"{memory_size(use.freed_bytes)}. {counted}</p>"
    yield _curve(use)
    yield f"<p>{number((last - first) / 1e6)} ms. Filled: allocated{reserved}; red: the peak.</p>"
    if use.by_stage:
        yield "<h3>At the peak, by the stage that allocated it</h3>"
        yield _table(
            (size, f"{stage}: {KINDS[stage]}" if stage in KINDS else stage or "in no stage")
            for stage, size in use.by_stage
        )
    yield "<h3>At the peak, by operator</h3>"
    owners = [
        (
            owner.bytes,
            f"{owner.allocations:,} allocation(s)",
            owner.operator or "outside operators",
            owner.inside or NOTHING,
        )
        for owner in use.owners
    ]
    yield _table([*owners, *([(use.others_bytes, "others of the trace")] if use.others_bytes else [])])


def _table(rows: Iterable[tuple[int, *tuple[str, ...]]]) -> str:
    cells = ("".join(f"<td>{_text(cell)}</td>" for cell in (memory_size(size), *texts)) for size, *texts in rows)
    return f"<table>{''.join(f'<tr>{row}</tr>' for row in cells)}</table>"


def _text(value: str) -> str:
    return html.escape(clean(value, LONGEST_NAME))


def _curve(use: MemoryUse) -> str:
    """Return the picture: steps, since memory keeps its size between two changes."""
    timeline = use.timeline
    first, last = timeline.times_ns[0], timeline.times_ns[-1]
    top = 1.05 * max(use.peak_bytes, use.peak_reserved_bytes or 0) or 1.0
    across = WIDTH / max(last - first, 1)
    x = [round((time - first) * across, 1) for time in timeline.times_ns]

    def line(sizes: Sequence[int]) -> str:
        y = [round(HEIGHT * (1 - size / top), 1) for size in sizes]
        return f"M{x[0]},{y[0]}" + "".join(f"H{at}V{high}" for at, high in zip(x[1:], y[1:], strict=True)) + f"H{WIDTH}"

    paths = f'<path class="allocated" d="{line(timeline.allocated_bytes)}V{HEIGHT}H0Z"/>'
    if timeline.reserved_bytes is not None:
        paths += f'<path class="reserved" d="{line(timeline.reserved_bytes)}"/>'
    paths += f'<path class="peak" d="M{round((use.peak_ns - first) * across, 1)},0V{HEIGHT}"/>'
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="memory over time">{paths}</svg>'
