"""Say a comparison to a person: the verdict first, then the table it rests on, then what to beware of."""

from collections.abc import Sequence

from utils.comparison.facts import Accuracy, Change, Results, Row, RunComparison, Unpaired
from utils.render import plain_text
from utils.render.blocks import Block, BulletList, DefinitionList, Paragraph, Table
from utils.render.formatting import NOTHING, clean, listed, number

HEADERS = ("dtype", "batch\nsize", "A\nsamples/s", "B\nsamples/s", "time of B\nagainst A", "95 %\ninterval", "verdict")
TO_THE_LEFT = (0, 6)  # of these columns: words
MOST_CHANGES = 12
MORE_ROUNDS = "raise profiling.max_seconds_per_batch_size and lower profiling.ci_half_width"


def lines(found: RunComparison) -> list[str]:
    """Return the comparison as lines of plain text."""
    return plain_text.lines(_blocks(found))


def headline(found: RunComparison) -> str:
    """Return the verdict in one sentence, what is worse first."""
    accuracy = found.accuracy.verdict if found.accuracy else None
    lost = [f"{point.dtype} batch size {point.batch_size}" for point in found.missing if point.is_loss]
    counted = [f"{len(found.of(word))} {word}" for word in ("same", "ambiguous") if found.of(word)]
    judged = sum(row.verdict is not None for row in found.rows)
    said = [
        _speed(found, "slower"),
        f"B fails at {listed(lost)}" if lost else "",
        "B is less accurate" if accuracy == "loss" else "",
        _speed(found, "faster"),
        "B is more accurate" if accuracy == "gain" else "",
        f"{listed(counted)} of {judged} rows" if counted else "",
    ]
    return f"{found.verdict.upper()}: {'; '.join(filter(None, said)) or 'no row could be judged'}"


def _speed(found: RunComparison, word: str) -> str:
    rows = [f"{_where(row)} ({_percent(row.time_ratio)} time)" for row in found.of(word)]
    return f"B is {word} at {listed(rows)}" if rows else ""


def _blocks(found: RunComparison) -> list[Block]:
    return [
        Paragraph(headline(found)),
        DefinitionList([("A", _subject(found.a)), ("B", _subject(found.b)), ("Accuracy", _accuracy(found.accuracy))]),
        Table(HEADERS, [_cells(row) for row in found.rows], TO_THE_LEFT, notes=[_legend(found)]),
        *_listing("Not settled:", [f"{_where(row)}: {_open(row)}" for row in found.rows if _is_open(row)]),
        *_listing("Measured in one run only:", [_missing(point) for point in found.missing]),
        *_listing("What differs, and so may be the cause:", _changes(found.changes)),
        *_listing("Doubts:", [*found.doubts, *_doubts(found.rows)]),
    ]


def _subject(run: Results) -> str:
    document = run.document
    name, revision = document["model"].get("name"), document["model"].get("revision")
    model = f"{name}{f' @ {revision[:8]}' if revision else ''}"
    return clean(f"{run.path}: {model}, {listed(run.dtypes)}, measured {document.get('written')}", longest=200)


def _accuracy(accuracy: Accuracy | None) -> str:
    if accuracy is None:
        return "not compared: predictions.csv of both runs have no row in common"
    shares = accuracy.shares
    ends = f"{100 * shares.low:+.2f} to {100 * shares.high:+.2f}"
    return "; ".join(
        (
            f"A {shares.share_a:.4f}, B {shares.share_b:.4f} on the same {shares.n:,} rows",
            f"difference {100 * shares.difference:+.2f} percentage points [{ends}]: {accuracy.verdict}",
            f"{shares.only_a:,} rows right in A alone, {shares.only_b:,} in B alone",
            *accuracy.doubts,
        )
    )


def _cells(row: Row) -> list[str]:
    found = row.comparison
    ends = NOTHING
    if found and found.low is not None and found.high is not None:
        ends = f"{100 * (found.low - 1):+.1f} to {_percent(found.high)}"
    return [
        _dtypes(row),
        "all rows" if row.batch_size is None else str(row.batch_size),
        number(row.samples_per_sec_a),
        number(row.samples_per_sec_b),
        _percent(row.time_ratio),
        ends,
        row.verdict or "not judged",
    ]


def _legend(found: RunComparison) -> str:
    least = f"{100 * found.minimum_effect:g} %"
    return (
        f"slower, faster: by {least} or more, and not by chance (5 % over all rows together, Holm); same: the whole "
        f"interval lies within {least}; ambiguous: neither can be said. 'all rows' is the pass over the whole dataset."
    )


def _is_open(row: Row) -> bool:
    return row.verdict in (None, "ambiguous")


def _open(row: Row) -> str:
    found = row.comparison
    if found is None or found.more_rounds is None:
        return (found.reason if found else row.reason) or "no reason was recorded"
    return f"about {found.more_rounds} more rounds in each run would settle it ({MORE_ROUNDS})"


def _missing(point: Unpaired) -> str:
    statuses = f"A {point.status_a or 'absent'}, B {point.status_b or 'absent'}"
    return f"{point.dtype} batch size {point.batch_size}: {statuses}"


def _changes(changes: Sequence[Change]) -> list[str]:
    if not changes:
        return ["nothing that was recorded"]
    said = [
        "the program's source" if change.name == "code" else f"{change.name}: {_value(change.a)} -> {_value(change.b)}"
        for change in changes[:MOST_CHANGES]
    ]
    more = len(changes) - MOST_CHANGES
    return [*said, f"and {more} more (--json lists them)"] if more > 0 else said


def _doubts(rows: Sequence[Row]) -> list[str]:
    """Return the doubts on all rows, equal ones together."""
    places: dict[str, list[str]] = {}
    for row in rows:
        for doubt in row.doubts:
            places.setdefault(doubt, []).append(_where(row))
    return [f"{listed(where)}: {doubt}" for doubt, where in places.items()]


def _value(value: object) -> str:
    return "none" if value is None else clean(value, longest=40)


def _listing(title: str, items: Sequence[str]) -> list[Block]:
    return [Paragraph(title), BulletList(items)] if items else []


def _where(row: Row) -> str:
    return "the whole dataset" if row.batch_size is None else f"{_dtypes(row)} batch size {row.batch_size}"


def _dtypes(row: Row) -> str:
    return row.dtype_a if row.dtype_a == row.dtype_b else f"{row.dtype_a} -> {row.dtype_b}"


def _percent(ratio: float) -> str:
    return f"{100 * (ratio - 1):+.1f} %"
