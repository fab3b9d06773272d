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

REFERENCE = "unsorted"
UNITS = ((3600.0, "h"), (60.0, "min"), (1.0, "s"))
LEAST = 2  # of a unit, to be told in it
MARK = " *"
PROGRAM = "In a program of your own:"
WIDE = 10  # times the value: an interval whose end is beyond it says only that the factor is unsure
HEADERS = (
    "variant", "texts/s", "factor", "one text\nms", "weights\nMB", "same\nlabels %", "accuracy\npoints",
    "cost",
)  # fmt: skip


def section(data: ReportData) -> list[Content]:
    """Return the section; without step 05 there is none."""
    compared = data.variants
    if isinstance(compared, Missing):
        return []
    rows = measured(compared)
    refused = _refused(compared, 200)
    return [
        Heading("Which variant to use"),
        *_answer(compared, data),
        Table(*_table(compared), left=[0], notes=_notes(compared)),
        *([Paragraph("Not available here:"), BulletList(refused)] if refused else []),
        show(data, plot.figure, tuple(rows), compared),
        *_reasons(_whys(compared, rows, compared["recommended"]["name"])),
        Folded("Why each variant is as fast as it is", _reasons(_whys(compared, rows))),
    ]


def tried(data: ReportData) -> list[tuple[VariantRow, Fix | None]]:
    """Return the variants that were compared, each with the fix of step 02 that it is, if it is one."""
    rows = [] if isinstance(data.variants, Missing) else measured(data.variants)
    return [
        (row, Fix(fix["kind"], fix["settings"]) if (fix := row.get("fix")) else None)
        for row in rows
        if row["name"] != REFERENCE
    ]


def texts_of_sample(data: ReportData) -> int | None:
    """Return how many texts were compared where these are not all."""
    compared = data.variants
    is_all = isinstance(compared, Missing) or compared["texts"] == compared["dataset_rows"]
    return None if is_all else compared["texts"]  # type: ignore[index]


def console_lines(compared: Variants) -> list[str]:
    """Return what the terminal says of the comparison."""
    notes = [
        _how(compared),
        *_whys(compared, measured(compared)),
        *(f"not allowed: {text}" for text in _not_allowed(compared)),
        *(f"not {text}" for text in _refused(compared, 160)),
        *compared["doubts"],
    ]
    lines = [line for note in notes for line in paragraph(note)]
    program = _program(compared)
    own = [PROGRAM, *(f"  {line}" for line in program)] if program else []
    return [*table(*_table(compared), left=[0]), "", *lines, "", *paragraph(_recommendation(compared)), *own]


def measured(compared: Variants) -> list[VariantRow]:
    """Return the variants with figures."""
    return [row for row in compared["variants"] if row["status"] == "measured"]


def recommended(data: ReportData) -> VariantRow | None:
    """Return the variant to use; None without step 05, and where none that keeps enough labels is surely faster."""
    compared = data.variants
    if isinstance(compared, Missing) or not compared["recommended"]["name"]:
        return None
    row = _row(compared, compared["recommended"]["name"])
    return row if row["gain"]["low"] > 1 else None


def command(compared: Variants, data: ReportData) -> str | None:
    """Return the command that runs the pipeline with the recommended variant; None where it does so anyway."""
    chosen = compared["recommended"]
    name = chosen["name"]
    if name is None or not (chosen["settings"] or chosen["environment"]):
        return None
    short = name.removeprefix("model:").rpartition("/")[2]
    folder = "".join(letter if letter.isalnum() else "-" for letter in short)
    run = data.command.run("--from", "1" if name.startswith("model:") else "2", *chosen["settings"],
                           f"output.results_dir={data.layout.results}-{folder}")  # fmt: skip
    return "".join(f"{name}={shlex.quote(value)} " for name, value in chosen["environment"].items()) + run


def compared_with(compared: Variants) -> str:
    """Return what the reference is."""
    size = compared["batch_size"]
    return "one text at a time" if size == 1 else f"padded batches of {size}, unsorted"


def _answer(compared: Variants, data: ReportData) -> list[Block]:
    text, row = _recommendation(compared), recommended(data)
    if row is None:
        return [Paragraph(text)]
    cost, program = row["million_cost"], _program(compared)
    price = "" if cost is None else f", which costs {_money(cost)}"
    answer = Paragraph(f"{text} A million texts then take {_duration(row['million_s'])}{price}.")
    return [answer, *([Paragraph(PROGRAM), BulletList(program)] if program else [])]


def _program(compared: Variants) -> list[str]:
    """Return the lines of a program that computes as the recommended variant does, where that is surely faster."""
    chosen = compared["recommended"]
    is_faster = chosen["name"] and _row(compared, chosen["name"])["gain"]["low"] > 1
    return chosen.get("program", []) if is_faster else []


def _recommendation(compared: Variants) -> str:
    name = compared["recommended"]["name"]
    if name is None:
        return f"None is recommended: {compared['recommended']['reason']}."
    row = _row(compared, name)
    others = _faster_engine(compared, row) + _faster_but_unsure(compared, row)
    if row["gain"]["low"] <= 1:
        own = f", {row['words']}" if row.get("runs_here", True) else ""
        none = "no other way it can run keeps enough labels and is surely faster"
        return f"Keep the pipeline as it is{own}: {none}.{others}"
    exactness = row["exactness"]
    change = exactness.get("accuracy_difference")
    kept = f"{exactness['same_labels']:,} of {exactness['rows']:,} labels as in float32"
    kept += "" if change is None else f", accuracy {100 * change:+.2f} points"
    gain = factor(Interval(**row["gain"]))
    return f"Use {row['words']}: {gain} the texts per second of {compared_with(compared)}; {kept}.{others}"


def _faster_engine(compared: Variants, chosen: VariantRow) -> str:
    """Return which engine is allowed and surely faster: the pipeline takes it by itself."""
    engines = [
        row
        for row in measured(compared)
        if row["name"] != REFERENCE and not (row["against"] or row.get("runs_here", True) or row.get("program"))
    ]
    fastest = max(engines, key=lambda row: row["gain"]["value"], default=chosen)
    if fastest["gain"]["low"] <= chosen["gain"]["high"]:
        return ""
    ratio = f"{fastest['gain']['value'] / chosen['gain']['value']:.2g}"
    takes = "evaluation.precision=fastest takes it for a set that is large enough to pay for converting"
    return f" {fastest['words']} was {ratio}× as fast: {takes}."


def _faster_but_unsure(compared: Variants, chosen: VariantRow) -> str:
    """Return what was faster and kept enough labels, but of too few texts to be sure of all."""
    if compared["texts"] == compared["dataset_rows"]:
        return ""
    kept = [row for row in measured(compared) if row["against"] and _keeps(row["exactness"], compared)]
    fastest = max(kept, key=lambda row: row["texts_per_s"]["value"], default=chosen)
    if fastest["texts_per_s"]["value"] <= chosen["texts_per_s"]["value"]:
        return ""
    few = f"{compared['texts']:,} texts are too few to allow it; variants.max_seconds gives time for more"
    return f" {fastest['words']} was faster, but {few}."


def _keeps(exactness: Exactness, compared: Variants) -> bool:
    lost = -(exactness.get("accuracy_difference") or 0.0)
    return exactness["agreement"] >= compared["min_agreement"] and lost <= compared["max_accuracy_drop"]


def _row(compared: Variants, name: str) -> VariantRow:
    return next(row for row in compared["variants"] if row["name"] == name)


def _table(compared: Variants) -> tuple[Sequence[str], list[list[str]]]:
    """Return headers and rows; accuracy is left out where there are no labels, cost where no price is known."""
    lines = [HEADERS, *(_cells(row, compared) for row in measured(compared))]
    optional = {HEADERS.index(name) for name in ("accuracy\npoints", "cost")}
    empty = {column for column in optional if all(line[column] == NOTHING for line in lines[1:])}
    headers, *cells = ([cell for column, cell in enumerate(line) if column not in empty] for line in lines)
    return headers, cells


def _cells(row: VariantRow, compared: Variants) -> list[str]:
    exactness, is_reference = row["exactness"], row["name"] == REFERENCE
    change, cost = exactness.get("accuracy_difference"), row["million_cost"]
    return [
        row["words"] + (MARK if row["name"] == compared["recommended"]["name"] else ""),
        number(row["texts_per_s"]["value"]),
        NOTHING if is_reference else _span(row["gain"]),
        number(row["latency_ms"]["value"]),
        NOTHING if row["weight_bytes"] is None else number(row["weight_bytes"] / 1e6),
        NOTHING if is_reference else f"{100 * exactness['agreement']:.2f}",
        NOTHING if change is None or is_reference else f"{100 * change:+.2f}",
        NOTHING if cost is None else _money(cost),
    ]


def _notes(compared: Variants) -> list[str]:
    return [
        _how(compared) + (" * is the recommended one." if compared["recommended"]["name"] else ""),
        *(f"Not allowed: {text}." for text in _not_allowed(compared)),
        *(f"Doubtful: {clean(doubt, 160)}." for doubt in compared["doubts"]),
        "variants.csv has what each costs (memory, files, seconds until ready) and what was predicted of it.",
    ]


def _how(compared: Variants) -> str:
    texts, rows, threads = compared["texts"], compared["dataset_rows"], compared["threads"]
    which = f"all {texts:,} texts" if texts == rows else f"{texts:,} of {rows:,} texts (a seeded sample)"
    return (
        f"Each variant ran {which}, tokenizing included, in turns of {compared['rounds']} rounds, on {threads} "
        f"thread{'s'[: threads != 1]}; the reference is {compared_with(compared)}, in float32."
    )


def _not_allowed(compared: Variants) -> list[str]:
    return _by_reason((against, row) for row in measured(compared) if (against := row["against"]))


def _refused(compared: Variants, width: int) -> list[str]:
    """Return what could not be taken and why, one line for each reason."""
    return _by_reason((clean(row["reason"], width), row) for row in compared["variants"] if row["status"] == "refused")


def _by_reason(reasons: Iterable[tuple[str, VariantRow]]) -> list[str]:
    variants: dict[str, list[str]] = {}
    for reason, row in reasons:
        variants.setdefault(reason, []).append(row["words"])
    return [f"{'; '.join(words)}: {reason}" for reason, words in variants.items()]


def _reasons(whys: Sequence[str]) -> list[Block]:
    return [Paragraph("Why, by the operators of some texts:"), BulletList(whys)] if whys else []


def _whys(compared: Variants, rows: Sequence[VariantRow], only: str | None = "") -> list[str]:
    """Return which operators made each variant, or `only` the one of that name, faster, and which did not."""
    names = {row["name"]: row["words"] for row in rows}
    return [
        f"{row['words']}, {gain + ' ' if (gain := _span(row['gain_over_base'])) != NOTHING else ''}"
        f"against {names[row['base'] or '']}: {why}"
        for row in rows
        if only in ("", row["name"]) and (why := sentence(row, compared["batch_size"] == 1))
    ]


def _span(span: Span | None) -> str:
    if span is None:
        return NOTHING
    return factor(Interval(**span)) if span["high"] <= WIDE * span["value"] else f"{times(span['value'])}× (unsure)"


def _money(cost: float) -> str:
    return f"{cost:,.2f}" if cost >= 1 else number(cost)


def _duration(seconds: float) -> str:
    """Return a time as people say it, in two or three digits."""
    size, unit = next((size, name) for size, name in UNITS if seconds >= LEAST * size or size == 1)
    value = seconds / size
    return f"{value:,.0f} {unit}" if value >= 10 else f"{value:.1f} {unit}"
