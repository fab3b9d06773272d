"""What speaks against the figures: of the data, the batch sizes, the pass over all texts, the trace, the settings."""

from collections.abc import Sequence

from boundby.formatting import clean, listed
from utils.render import BulletList, Heading
from utils.report.figures import Content, Folded
from utils.report.sources import ReportData

LONGEST_DOUBT = 400  # characters
SHOWN_KINDS = 2  # in brief
BRIEF = {  # kinds of doubts about a batch size, the most telling first
    "disturbed": "were disturbed by other programs",
    "noisy": "are noisy",
    "drift": "drifted",
    "unsteady": "are unsteady",
    "warm-up": "had not settled",
    "throttled": "were slowed by the device",
    "outliers": "have outliers",
}


def section(data: ReportData) -> list[Content]:
    """Return the doubts about the answer, and folded those about anything else, with the batch sizes they are about."""
    first = of_the_answer(data)
    others = [doubt for doubt in every(data) if doubt not in first]
    items = [clean(doubt, LONGEST_DOUBT) for doubt in first]
    more = [clean(doubt, LONGEST_DOUBT) for doubt in others]
    page = data.layout.html_report.name
    counted = f"{page} has {len(more)} more, about other batch sizes and the trace." if more else ""
    folded: list[Content] = [Folded("More doubts", [BulletList(more)])] if more else []
    if not items:  # which the card says
        return folded
    return [Heading("Doubts"), BulletList([*items, *([counted] if counted else [])]), *folded]


def every(data: ReportData) -> list[str]:
    """Return the doubts about data, batch sizes, trace and settings."""
    return [*of_the_answer(data), *_rows(data), *_trace(data)]


def of_the_answer(data: ReportData) -> list[str]:
    """Return those that touch the card: of the data, of the chosen batch size, of the pass over all texts."""
    return [*data.document["doubts"], *_settings(data), *_agreement(data), *_of_chosen(data), *_full(data)]


def in_brief(data: ReportData) -> list[str]:
    """Return those that touch the card in few words, without what to do about them."""
    row = data.chosen
    other = ["the settings of this report are those of another model"] if _settings(data) else []
    doubts = [*other, *data.document["doubts"], *_agreement(data), *_full(data)]
    brief = [doubt.partition(";")[0] for doubt in doubts]
    kinds = row.get("doubt_kinds", []) if row else []
    words = [text for kind, text in BRIEF.items() if kind in kinds][:SHOWN_KINDS]
    return [*([f"the times of batch size {row['batch_size']} {listed(words)}"] if row and words else []), *brief]


def _of_chosen(data: ReportData) -> list[str]:
    """Return the doubts of the chosen batch size, disturbed times once: replays and trials say the same again."""
    if not data.chosen:
        return []
    known, own = list(data.document["doubts"]), list[str]()
    for doubt in data.chosen["doubts"]:
        kind = doubt.partition(":")[0]
        if doubt in known or (kind == "disturbed" and any(other.startswith("disturbed:") for other in own)):
            continue
        own.append(doubt)
    return [f"batch size {data.chosen['batch_size']}: {doubt}" for doubt in own]


def _settings(data: ReportData) -> list[str]:
    asked, measured = data.config.model.name, data.document["model"].get("name")
    if measured in (None, asked):
        return []
    return [
        f"this report was made with settings for model {asked!r}, but the results are of {measured!r}; targets, price "
        "and commands are those of the settings, so give step 04 the --config and overrides of the measurement"
    ]


def _agreement(data: ReportData) -> list[str]:
    agreement = data.document["agreement"]
    if not agreement or agreement["share"] == 1:
        return []
    share, rows = agreement["share"], agreement["rows"]
    own, against = data.document["model"].get("dtype"), agreement.get("against")
    held = f", batched in {own} and one by one in {against}," if against not in (None, own) else ""
    text = f"predictions{held} differ" if held else "batched and one-by-one predictions differ"
    return [f"{text} in {100 * (1 - share):.1f} % of {rows} texts"]


def _rows(data: ReportData) -> list[str]:
    """Return a doubt of each kind, and the batch sizes that share it; those of another kind have other figures."""
    about: dict[tuple[str, str], list[tuple[int, str]]] = {}
    for row in (row for row in data.rows if row is not data.chosen):
        kinds = row.get("doubt_kinds") or row["doubts"]
        for kind, doubt in zip(kinds, row["doubts"], strict=True):
            about.setdefault((row["dtype"], kind), []).append((row["batch_size"], doubt))
    return [_about(dtype, those) for (dtype, _), those in about.items()]


def _about(dtype: str, doubts: Sequence[tuple[int, str]]) -> str:
    (size, text), *others = doubts
    also = f" (likewise {listed([other for other, _ in others])})" if others else ""
    return f"batch size {size} in {dtype}{also}: {text}"


def _full(data: ReportData) -> list[str]:
    full = data.full or {}
    texts = [full["labels_doubt"]] if full.get("labels_doubt") else []
    if full.get("truncated"):
        share = 100 * full["truncated"] / full["samples"]
        texts.append(f"{full['truncated']:,} texts ({share:.2f} %) were cut to {data.document['max_length']} tokens")
    if full.get("out_of_memory"):
        texts.append(
            f"memory ran out {full['out_of_memory']:,} times over the whole dataset; the batches were repeated"
        )
    return texts


def _trace(data: ReportData) -> list[str]:
    remarks = [f"trace: {remark.what}: {remark.reason}" for remark in data.manifest.downgrades]
    return remarks + [f"trace: torch warns: {text}" for text in data.manifest.warnings]
