"""What step 05 has compared: the recommended variant with its command, the table, what was refused, the picture."""

import shlex
from collections.abc import Iterable, Sequence

from boundby.bound import Fix, factor
from boundby.formatting import NOTHING, clean, number, paragraph, table, times
from boundby.work import Interval
from utils.baseline import Span, VariantRow, Variants
from utils.evaluation import Exactness
from utils.render import Block, BulletList, Heading, Paragraph, Table
from utils.report.figures import Content, Folded, show
from utils.report.pictures import variants as plot
from utils.report.sources import Missing, ReportData
from utils.variants import sentence

REFERENCE = "as_it_comes"
UNITS = ((3600.0, "h"), (60.0, "min"), (1.0, "s"))
LEAST = 2  # of a unit, to be told in it
MARK = " *"
PROGRAM = "In a program of your own:"
WIDE = 10  # times the value, an interval says no more than that it is unsure


def section(data: ReportData) -> list[Content]:
    """Return the section; without step 05 there is none."""
    found = data.variants
    if isinstance(found, Missing):
        return []
    rows = measured(found)
    return [
        Heading("Which variant to use"),
        *_answer(found, data),
        Table(*_table(found), left=[0], notes=_notes(found)),
        *_refusals(found),
        show(data, plot.figure, tuple(rows), found),
        *_reasons(found, rows, found["recommended"]["name"]),
        Folded("Predicted, tried, and what came", _foretold(rows)),
        Folded("Why each variant is as fast as it is", _reasons(found, rows)),
        Folded("What each variant costs", [_more(rows)]),
    ]


def tried(data: ReportData) -> list[tuple[VariantRow, Fix | None]]:
    """Return the variants that were compared, each with the fix of step 02 that it is, if it is one."""
    found = data.variants
    rows = [] if isinstance(found, Missing) else [row for row in measured(found) if row["name"] != REFERENCE]
    return [(row, Fix(fix["kind"], fix["settings"]) if (fix := row.get("fix")) else None) for row in rows]


def texts_of_sample(data: ReportData) -> int | None:
    """Return how many texts were compared where these are not all."""
    found = data.variants
    return None if isinstance(found, Missing) or found["texts"] == found["dataset_rows"] else found["texts"]


def console_lines(found: Variants) -> list[str]:
    """Return what the terminal says of it."""
    cells = table(*_table(found), left=[0])
    refused = [f"not {each}" for each in _refused(found, 160)]
    against = [f"not allowed: {each}" for each in _not_allowed(found)]
    told = [_how(found), *_whys(found, measured(found)), *against, *refused, *found["doubts"]]
    lines = [line for each in told for line in paragraph(each)]
    program = _program(found)
    own = [PROGRAM, *(f"  {line}" for line in program)] if program else []
    return [*cells, "", *lines, "", *paragraph(_recommended(found)), *own]


def measured(found: Variants) -> list[VariantRow]:
    """Return the variants with figures."""
    return [row for row in found["variants"] if row["status"] == "measured"]


def recommended(data: ReportData) -> VariantRow | None:
    """Return the variant to use; None without step 05, and where nothing that keeps enough is surely faster."""
    found = data.variants
    if isinstance(found, Missing) or not found["recommended"]["name"]:
        return None
    row = _row(found, found["recommended"]["name"])
    return row if row["gain"]["low"] > 1 else None


def command(found: Variants, data: ReportData) -> str | None:
    """Return the command that runs the whole pipeline with the recommended variant; None where it does so anyway."""
    chosen = found["recommended"]
    name = chosen["name"]
    if name is None or not (chosen["settings"] or chosen["environment"]):
        return None
    run = data.command.run("--from", "1" if name.startswith("model:") else "2", *chosen["settings"],
                           f"output.results_dir={data.layout.results}-{_folder(name)}")  # fmt: skip
    return "".join(f"{name}={shlex.quote(value)} " for name, value in chosen["environment"].items()) + run


def _answer(found: Variants, data: ReportData) -> list[Block]:
    said = _recommended(found)
    row = recommended(data)
    if row is None:
        return [Paragraph(said)]
    cost = row["million_cost"]
    price = "" if cost is None else f", which costs {cost:,.2f}" if cost >= 1 else f", which costs {number(cost)}"
    answer = Paragraph(f"{said} A million texts then take {_duration(row['million_s'])}{price}.")
    program = _program(found)
    return [answer, *([Paragraph(PROGRAM), BulletList(program)] if program else [])]


def _program(found: Variants) -> list[str]:
    """Return the lines of a program that computes as the recommended variant does, where that is surely faster."""
    chosen = found["recommended"]
    is_faster = chosen["name"] and _row(found, chosen["name"])["gain"]["low"] > 1
    return chosen.get("program", []) if is_faster else []


def _recommended(found: Variants) -> str:
    name = found["recommended"]["name"]
    if name is None:
        return f"None is recommended: {found['recommended']['reason']}."
    row = _row(found, name)
    exactness = row["exactness"]
    kept = f"{exactness['same_labels']:,} of {exactness['rows']:,} labels as in float32"
    change = exactness.get("accuracy_difference")
    kept += "" if change is None else f", accuracy {100 * change:+.2f} points"
    gained = factor(Interval(**row["gain"]))
    if row["gain"]["low"] <= 1:
        none = "no other way it can run keeps enough labels and is surely faster"
        own = f", {row['words']}" if row.get("runs_here", True) else ""
        kept = f"Keep the pipeline as it is{own}: {none}."
        return kept + _beyond(found, row) + _unsure(found, row)
    used = f"Use {row['words']}: {gained} the texts per second of {compared_with(found)}; {kept}."
    return used + _beyond(found, row) + _unsure(found, row)


def _beyond(found: Variants, chosen: VariantRow) -> str:
    """Return what is allowed and surely faster, but an engine: the pipeline chooses it itself."""
    others = [row for row in measured(found) if row["name"] != REFERENCE and not row["against"]]
    elsewhere = [row for row in others if not row.get("runs_here", True) and not row.get("program")]
    fastest = max(elsewhere, key=lambda row: row["gain"]["value"], default=chosen)
    if fastest["gain"]["low"] <= chosen["gain"]["high"]:
        return ""
    times = f"{fastest['gain']['value'] / chosen['gain']['value']:.2g}"
    takes = "evaluation.precision=fastest takes it for a set that is large enough to pay for converting"
    return f" {fastest['words']} was {times}× as fast: {takes}."


def _unsure(found: Variants, chosen: VariantRow) -> str:
    """Return what was faster and kept enough labels, but of too few texts to be sure of all."""
    others = [row for row in measured(found) if row["against"] and found["texts"] < found["dataset_rows"]]
    kept = [row for row in others if _keeps(row["exactness"], found)]
    fastest = max(kept, key=lambda row: row["texts_per_s"]["value"], default=chosen)
    if fastest["texts_per_s"]["value"] <= chosen["texts_per_s"]["value"]:
        return ""
    few = f"{found['texts']:,} texts are too few to allow it; variants.max_seconds gives time for more"
    return f" {fastest['words']} was faster, but {few}."


def _keeps(exactness: Exactness, found: Variants) -> bool:
    lost = -(exactness.get("accuracy_difference") or 0.0)
    return exactness["agreement"] >= found["min_agreement"] and lost <= found["max_accuracy_drop"]


def _row(found: Variants, name: str) -> VariantRow:
    return next(row for row in found["variants"] if row["name"] == name)


def _folder(name: str) -> str:
    return "".join(letter if letter.isalnum() else "-" for letter in name.removeprefix("model:").rpartition("/")[2])


HEADERS = (
    "variant", "texts/s", "factor", "one text\nms", "weights\nMB", "same\nlabels %", "accuracy\npoints",
    "cost",
)  # fmt: skip


def _table(found: Variants) -> tuple[Sequence[str], list[list[str]]]:
    """Return headers and rows; accuracy is left out where there are no labels, cost where no price is known."""
    lines = [HEADERS, *(_cells(row, found) for row in measured(found))]
    optional = {HEADERS.index(name) for name in ("accuracy\npoints", "cost")}
    empty = {place for place in optional if all(line[place] == NOTHING for line in lines[1:])}
    headers, *cells = ([cell for place, cell in enumerate(line) if place not in empty] for line in lines)
    return headers, cells


def _cells(row: VariantRow, found: Variants) -> list[str]:
    exactness, is_reference = row["exactness"], row["name"] == REFERENCE
    change = exactness.get("accuracy_difference")
    return [
        row["words"] + (MARK if row["name"] == found["recommended"]["name"] else ""),
        number(row["texts_per_s"]["value"]),
        NOTHING if is_reference else _span(row["gain"]),
        number(row["latency_ms"]["value"]),
        NOTHING if row["weight_bytes"] is None else number(row["weight_bytes"] / 1e6),
        NOTHING if is_reference else f"{100 * exactness['agreement']:.2f}",
        NOTHING if change is None or is_reference else f"{100 * change:+.2f}",
        NOTHING if (cost := row["million_cost"]) is None else f"{cost:,.2f}" if cost >= 1 else number(cost),
    ]


def _notes(found: Variants) -> list[str]:
    notes = [_how(found) + (" * is the recommended one." if found["recommended"]["name"] else "")]
    notes += [f"Not allowed: {each}." for each in _not_allowed(found)]
    notes += [f"Doubtful: {clean(doubt, 160)}." for doubt in found["doubts"]]
    return notes


def compared_with(found: Variants) -> str:
    """Return what the reference is."""
    size = found["batch_size"]
    return "one text at a time" if size == 1 else f"padded batches of {size} as they come"


def _how(found: Variants) -> str:
    texts, rows = found["texts"], found["dataset_rows"]
    which = f"all {texts:,} texts" if texts == rows else f"{texts:,} of {rows:,} texts (a seeded sample)"
    turns = f"in turns of {found['rounds']} rounds, on {_threads(found)}"
    reference = f"the reference is {compared_with(found)}, in float32"
    return f"Each variant ran {which}, tokenizing included, {turns}; {reference}."


def _not_allowed(found: Variants) -> list[str]:
    return _by_reason((against, row) for row in measured(found) if (against := row["against"]))


def _threads(found: Variants) -> str:
    return "1 thread" if found["threads"] == 1 else f"{found['threads']} threads"


def _refusals(found: Variants) -> list[Block]:
    refused = _refused(found, 200)
    return [Paragraph("Not to be had here:"), BulletList(refused)] if refused else []


def _refused(found: Variants, width: int) -> list[str]:
    """Return what could not be taken and why, one line for each reason."""
    return _by_reason((clean(row["reason"], width), row) for row in found["variants"] if row["status"] == "refused")


def _by_reason(reasons: Iterable[tuple[str, VariantRow]]) -> list[str]:
    words: dict[str, list[str]] = {}
    for reason, row in reasons:
        words.setdefault(reason, []).append(row["words"])
    return [f"{'; '.join(each)}: {reason}" for reason, each in words.items()]


def _reasons(found: Variants, rows: Sequence[VariantRow], only: str | None = "") -> list[Block]:
    """Return which operators made each variant, or `only` the one of that name, faster, and which did not."""
    told = _whys(found, rows, only)
    return [Paragraph("Why, by the operators of some texts:"), BulletList(told)] if told else []


def _whys(found: Variants, rows: Sequence[VariantRow], only: str | None = "") -> list[str]:
    names = {row["name"]: row["words"] for row in rows}
    return [
        f"{row['words']}, {gain + ' ' if (gain := _span(row['gain_over_base'])) != NOTHING else ''}"
        f"against {names[row['base'] or '']}: {said}"
        for row in rows
        if only in ("", row["name"]) and (said := sentence(row, found["batch_size"] == 1))
    ]


def _more(rows: Sequence[VariantRow]) -> Table:
    cells = [
        [
            row["words"],
            _duration(row["million_s"]),
            number(row["one_off_s"]),
            _won_back(row),
            NOTHING if row["extra_bytes"] is None else number(row["extra_bytes"] / 1e6),
            number(row["disk_bytes"] / 1e6),
            f"{100 * row['exactness']['agreement_low']:.2f} to {100 * row['exactness']['agreement_high']:.2f}",
            _accuracy_range(row),
            row.get("attention_backend") or NOTHING,
        ]
        for row in rows
    ]
    headers = ["variant", "a million\ntexts", "ready\nafter s", "won back\nafter texts", "memory rose\nby MB",
               "files\nMB", "same labels\n% (95 %)", "accuracy points\n(95 %)", "attention"]  # fmt: skip
    return Table(headers, cells, left=[0, len(headers) - 1])


def _won_back(row: VariantRow) -> str:
    texts = row["won_back_after_texts"]
    return NOTHING if row["name"] == REFERENCE else "never" if texts is None else f"{texts:,}"


def _accuracy_range(row: VariantRow) -> str:
    low, high = (row["exactness"].get(f"accuracy_difference_{end}") for end in ("low", "high"))
    known = low is not None and high is not None and row["name"] != REFERENCE
    return f"{100 * low:+.2f} to {100 * high:+.2f}" if known else NOTHING  # type: ignore[operator]


def _foretold(rows: Sequence[VariantRow]) -> list[Block]:
    """Return what step 02 said of the fixes beside what came over all texts; nothing where it said nothing."""
    words = {row["name"]: row["words"] for row in rows}
    cells = [
        [row["words"], words.get(row["base"] or "", NOTHING), _span(row["predicted"]), _span(row["tried"]),
         _span(row["gain_over_base"])]
        for row in rows
        if row["predicted"] or row["tried"]
    ]  # fmt: skip
    headers = ["variant", "against", "predicted for\none batch", "tried on\none batch", "over the\ntexts"]
    return [Table(headers, cells, left=[0, 1])] if cells else []


def _span(span: Span | None) -> str:
    if span is None:
        return NOTHING
    return factor(Interval(**span)) if span["high"] <= WIDE * span["value"] else f"{times(span['value'])}× (unsure)"


def _duration(seconds: float) -> str:
    """Return a time as people say it, in two or three digits."""
    size, unit = next((size, name) for size, name in UNITS if seconds >= LEAST * size or size == 1)
    value = seconds / size
    return f"{value:,.0f} {unit}" if value >= 10 else f"{value:.1f} {unit}"
