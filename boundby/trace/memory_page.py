"""The memory over the time of a trace as one HTML page that loads nothing: a curve and a table for each device."""

from collections.abc import Iterator, Sequence
from html import escape

from boundby.formatting import NOTHING, clean, number
from boundby.trace.memory import MemoryUse

WIDTH, HEIGHT = 1000, 260  # of a curve, in its own units
LONGEST_NAME = 90
BYTES = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 72em; margin: 2em auto; padding: 0 1em; color: #222; }}
svg {{ width: 100%; height: auto; background: #fafafa; border: 1px solid #ddd; }}
.allocated {{ fill: #0072b2; fill-opacity: .18; stroke: #0072b2; stroke-width: 1.5; }}
.reserved {{ fill: none; stroke: #e69f00; stroke-width: 1.5; stroke-dasharray: 6 4; }}
.peak {{ stroke: #b00020; stroke-width: 1; }}
table {{ border-collapse: collapse; }} td, th {{ padding: .1em .8em; text-align: left; border-bottom: 1px solid #eee; }}
td.number {{ text-align: right; font-variant-numeric: tabular-nums; }}
</style></head><body>
<h1>{title}</h1>
{body}
</body></html>
"""


def memory_page(uses: Sequence[MemoryUse], title: str) -> str:
    """Return the page. Raises ValueError where no memory was recorded: there is nothing to show."""
    if not uses:
        raise ValueError("the trace holds no allocation: its steps made none, or memory was not recorded")
    body = "\n".join(line for use in uses for line in _device(use))
    return PAGE.format(title=escape(clean(title)), body=body)


def _device(use: MemoryUse) -> Iterator[str]:
    name = "Host" if use.device is None else f"Device {use.device}"
    first, last = use.timeline.times_ns[0], use.timeline.times_ns[-1]
    yield f"<h2>{name}: at most {_size(use.peak_bytes)}, {number((use.peak_ns - first) / 1e6)} ms after the start</h2>"
    yield f"<p>{use.allocations:,} allocations of {_size(use.allocated_bytes)}, {use.frees:,} frees of "
    yield f"{_size(use.freed_bytes)}. {_counted(use)}</p>"
    yield _curve(use)
    yield f"<p>From the first change to the last one: {number((last - first) / 1e6)} ms. {_legend(use)}</p>"
    yield "<h3>Whose it is at the peak</h3>"
    yield "<table><tr><th>bytes</th><th>allocations</th><th>operator</th><th>in</th></tr>"
    for owner in use.owners:
        cells = (owner.operator or "outside of operators", owner.inside or NOTHING)
        numbers = f'<td class="number">{_size(owner.bytes)}</td><td class="number">{owner.allocations:,}</td>'
        yield f"<tr>{numbers}{''.join(f'<td>{escape(clean(each, LONGEST_NAME))}</td>' for each in cells)}</tr>"
    for size, what in ((use.others_bytes, "others of the trace"), (use.earlier_bytes or 0, "from before the trace")):
        if size:
            yield f'<tr><td class="number">{_size(size)}</td><td></td><td colspan="2">{what}</td></tr>'
    yield "</table>"


def _counted(use: MemoryUse) -> str:
    if use.earlier_bytes is None:
        return "What was allocated before the trace began is not known here, and not counted."
    return "All that the allocator had handed out is counted."


def _legend(use: MemoryUse) -> str:
    reserved = "" if use.timeline.reserved_bytes is None else "; dashed: reserved by the allocator"
    return f"Filled: allocated{reserved}; red: the peak."


def _curve(use: MemoryUse) -> str:
    """Return the picture: steps, since memory keeps its size between two changes."""
    timeline = use.timeline
    first, last = timeline.times_ns[0], timeline.times_ns[-1]
    top = 1.05 * max(use.peak_bytes, use.peak_reserved_bytes or 0) or 1.0
    across = WIDTH / max(last - first, 1)

    def line(sizes: Sequence[int]) -> str:
        x = [round((time - first) * across, 1) for time in timeline.times_ns]
        y = [round(HEIGHT * (1 - size / top), 1) for size in sizes]
        return f"M{x[0]},{y[0]}" + "".join(f"H{at}V{high}" for at, high in zip(x[1:], y[1:], strict=True)) + f"H{WIDTH}"

    peak = round((use.peak_ns - first) * across, 1)
    paths = f'<path class="allocated" d="{line(timeline.allocated_bytes)}V{HEIGHT}H0Z"/>'
    if timeline.reserved_bytes is not None:
        paths += f'<path class="reserved" d="{line(timeline.reserved_bytes)}"/>'
    paths += f'<path class="peak" d="M{peak},0V{HEIGHT}"/>'
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="memory over time">{paths}</svg>'


def _size(size: int) -> str:
    for unit, name in BYTES:
        if abs(size) >= unit:
            return f"{number(size / unit)} {name}"
    return f"{size:,} bytes"
