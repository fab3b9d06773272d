"""Say a comparison to a person: the verdict first, then the table it rests on, then what to beware of."""

from collections.abc import Sequence

from boundby.formatting import NOTHING, clean, listed, number
from utils.comparison.facts import Change, Results, Row, RunComparison, Unpaired
from utils.render import Block, BulletList, DefinitionList, Details, Heading, Paragraph, Table, markdown, plain_text

HEADERS = ("dtype", "batch\nsize", "A\nsamples/s", "B\nsamples/s", "time of B\nagainst A", "95 %\ninterval", "verdict")
TO_THE_LEFT = (0, 6)  # of these columns: words
OF_A_RUN = ("{0}: time\nagainst A", "{0}:\nverdict")  # where there are several
MOST_CHANGES = 12
MORE_ROUNDS = "raise profiling.max_seconds_per_batch_size"


def lines(comparisons: Sequence[RunComparison], gate: str | None = None) -> list[str]:
    """Return one comparison, or several with the same first run, as plain text; `gate` is what a gate can find."""
    gated = [Paragraph(f"{gate[0].upper()}{gate[1:]}.")] if gate else []
    return plain_text.lines([*_blocks(comparisons), *gated])


def markdown_text(comparisons: Sequence[RunComparison], gate: str | None = None) -> str:
    """Return the same for a comment on a pull request, with all but verdict and table folded away."""
    blocks = _blocks(comparisons)
    last = next(index for index, block in enumerate(blocks) if isinstance(block, Table))
    top, rest = blocks[: last + 1], blocks[last + 1 :]
    gated = [Paragraph(f"{gate[0].upper()}{gate[1:]}.")] if gate else []
    return markdown.text([Heading("Speed, by Boundby"), *top, *gated, Details("What is open, and what differs", rest)])


def headline(comparison: RunComparison) -> str:
    """Return the verdict in one sentence, what is worse first."""
    accuracy = comparison.accuracy.verdict if comparison.accuracy else None
    lost = [f"{point.dtype} batch size {point.batch_size}" for point in comparison.missing if point.is_loss]
    counted = [f"{len(comparison.of(word))} {word}" for word in ("same", "ambiguous") if comparison.of(word)]
    judged = sum(row.verdict is not None for row in comparison.rows)
    name = comparison.b.name
    parts = [
        _speed(comparison, "slower"),
        f"{name} fails at {listed(lost)}" if lost else "",
        f"{name} is less accurate" if accuracy == "loss" else "",
        _speed(comparison, "faster"),
        f"{name} is more accurate" if accuracy == "gain" else "",
        f"{listed(counted)} of {judged} rows" if counted else "",
    ]
    return f"{comparison.verdict.upper()}: {'; '.join(filter(None, parts)) or 'no row could be judged'}"


def _blocks(comparisons: Sequence[RunComparison]) -> list[Block]:
    return _of_two(*comparisons) if len(comparisons) == 1 else _of_several(comparisons)


def _speed(comparison: RunComparison, word: str) -> str:
    rows = [f"{_where(row)} ({_percent(row.time_ratio)} time)" for row in comparison.of(word)]
    return f"{comparison.b.name} is {word} at {listed(rows)}" if rows else ""


def _of_two(comparison: RunComparison) -> list[Block]:
    return [
        Paragraph(headline(comparison)),
        DefinitionList(
            [
                *((run.name, _subject(run)) for run in (comparison.a, comparison.b)),
                ("Accuracy", _accuracy(comparison)),
            ]
        ),
        Table(HEADERS, [_cells(row) for row in comparison.rows], TO_THE_LEFT, notes=[_legend(comparison)]),
        *_listings(comparison),
    ]


def _of_several(comparisons: Sequence[RunComparison]) -> list[Block]:
    """Say several runs in one table: a row is what the first has, with two columns for each of the others."""
    a = comparisons[0].a
    rows: dict[tuple[str, int | None], list[str]] = {}
    for column, comparison in enumerate(comparisons):
        for row in comparison.rows:
            dtype = f" ({row.dtype_b})" if row.dtype_b != row.dtype_a else ""
            first = [row.dtype_a, *_cells(row)[1:3]] + [NOTHING] * 2 * len(comparisons)
            cells = rows.setdefault((row.dtype_a, row.batch_size), first)
            cells[3 + 2 * column : 5 + 2 * column] = _percent(row.time_ratio, _reach(row)) + dtype, _word(row)
    headers = [*HEADERS[:3], *(header.format(other.b.name) for other in comparisons for header in OF_A_RUN)]
    words = (0, *range(4, len(headers), 2))
    subjects = [(run.name, _subject(run)) for run in (a, *(other.b for other in comparisons))]
    accuracies = [(f"Accuracy of {other.b.name}", _accuracy(other)) for other in comparisons]
    return [
        DefinitionList([(f"{other.b.name} against A", headline(other)) for other in comparisons]),
        DefinitionList([*subjects, *accuracies]),
        Table(headers, list(rows.values()), words, notes=[_legend(comparisons[0])]),
        *_listings(comparisons[0], f"{comparisons[0].b.name}: "),
        *(block for other in comparisons[1:] for block in _listings(other, f"{other.b.name}: ", known=a.name)),
    ]


def _listings(comparison: RunComparison, of: str = "", known: str | None = None) -> list[Block]:
    """Return what there is to beware of, without the doubts on the run that is `known`."""
    rows = comparison.rows
    doubts = [doubt for doubt in comparison.doubts if not known or not doubt.startswith(f"{known}: ")]
    return [
        *_listing(f"{of}Not settled:", [f"{_where(row)}: {_open(row)}" for row in rows if _is_open(row)]),
        *_listing(f"{of}Measured in one run only:", [_missing(comparison, point) for point in comparison.missing]),
        *_listing(f"{of}What differs, and so may be the cause:", _changes(comparison.changes)),
        *_listing(f"{of}Doubts:", [*doubts, *_doubts(rows, known)]),
    ]


def _subject(run: Results) -> str:
    document = run.document
    name, revision = document["model"].get("name"), document["model"].get("revision")
    model = f"{name}{f' @ {revision[:8]}' if revision else ''}"
    return clean(f"{run.path}: {model}, {listed(run.dtypes)}, measured {document.get('written')}", longest=200)


def _accuracy(comparison: RunComparison) -> str:
    accuracy, name = comparison.accuracy, comparison.b.name
    if accuracy is None:
        lacking = [run.name for run in (comparison.a, comparison.b) if run.marks is None]
        if lacking:
            return f"not compared: {' and '.join(lacking)} {'have' if lacking[1:] else 'has'} no labelled predictions"
        return "not compared: predictions.csv of both runs have no row in common"
    shares = accuracy.shares
    ends = f"{100 * shares.low:+.2f} to {100 * shares.high:+.2f}"
    return "; ".join(
        (
            f"A {shares.share_a:.4f}, {name} {shares.share_b:.4f} on the same {shares.n:,} rows",
            f"difference {100 * shares.difference:+.2f} percentage points [{ends}]: {accuracy.verdict}",
            f"{shares.only_a:,} rows right in A alone, {shares.only_b:,} in {name} alone",
            *accuracy.doubts,
        )
    )


def _cells(row: Row) -> list[str]:
    comparison = row.comparison
    ends = NOTHING
    if comparison and comparison.low is not None and comparison.high is not None:
        ends = f"{100 * (comparison.low - 1):+.1f} to {_percent(comparison.high)}"
    return [
        _dtypes(row),
        "all rows" if row.batch_size is None else str(row.batch_size),
        number(row.samples_per_sec_a),
        number(row.samples_per_sec_b),
        _percent(row.time_ratio),
        ends,
        _word(row),
    ]


def _word(row: Row) -> str:
    return row.verdict or "not judged"


def _reach(row: Row) -> float | None:
    """Return half the interval of the ratio, or None."""
    judged = row.comparison
    return None if not judged or judged.low is None or judged.high is None else (judged.high - judged.low) / 2


def _legend(comparison: RunComparison) -> str:
    least = f"{100 * comparison.minimum_effect:g} %"
    return (
        f"slower, faster: by {least} or more, and not by chance (5 % over all rows together, Holm); same: the whole "
        f"interval lies within {least}; ambiguous: neither can be said. 'all rows' is the pass over the whole dataset."
    )


def _is_open(row: Row) -> bool:
    return row.verdict in (None, "ambiguous")


def _open(row: Row) -> str:
    comparison = row.comparison
    if comparison is None or comparison.more_rounds is None:
        return (comparison.reason if comparison else row.reason) or "no reason was recorded"
    return f"about {comparison.more_rounds} more rounds in each run would settle it ({MORE_ROUNDS})"


def _missing(comparison: RunComparison, point: Unpaired) -> str:
    statuses = f"A {point.status_a or 'absent'}, {comparison.b.name} {point.status_b or 'absent'}"
    return f"{point.dtype} batch size {point.batch_size}: {statuses}"


def _changes(changes: Sequence[Change]) -> list[str]:
    if not changes:
        return ["nothing that was recorded"]
    lines = [
        "the program's source" if change.name == "code" else f"{change.name}: {_value(change.a)} -> {_value(change.b)}"
        for change in changes[:MOST_CHANGES]
    ]
    more = len(changes) - MOST_CHANGES
    return [*lines, f"and {more} more (--json lists them)"] if more > 0 else lines


def _doubts(rows: Sequence[Row], known: str | None) -> list[str]:
    """Return the doubts on all rows, equal ones together, without those on the run that is `known`."""
    places: dict[str, list[str]] = {}
    for row in rows:
        for doubt in row.doubts:
            if not known or not doubt.startswith(f"{known}: "):
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


def _percent(ratio: float, reach: float | None = None) -> str:
    return f"{round(100 * (ratio - 1), 1) + 0.0:+.1f}{'' if reach is None else f' ± {100 * reach:.1f}'} %"
