"""What speaks against the figures: of the data, the batch sizes, the pass over all texts, the trace, the settings."""

from utils.render.blocks import Block, BulletList, Heading, Paragraph
from utils.render.formatting import clean, listed
from utils.report.sources import ReportData

LONGEST_DOUBT = 400  # characters


def section(data: ReportData) -> list[Block]:
    """Return every doubt once, with the batch sizes it is about."""
    texts = [clean(doubt, LONGEST_DOUBT) for doubt in every(data)]
    return [Heading("Doubts"), BulletList(texts) if texts else Paragraph("No doubt was raised.")]


def every(data: ReportData) -> list[str]:
    """Return the doubts about data, batch sizes, trace and settings."""
    return [*data.document["doubts"], *_settings(data), *_agreement(data), *_rows(data), *_full(data), *_trace(data)]


def of_the_answer(data: ReportData) -> list[str]:
    """Return those that touch the card: of the data, of the chosen batch size, of the pass over all texts."""
    own = data.chosen["doubts"] if data.chosen else []
    return [*data.document["doubts"], *_settings(data), *_agreement(data), *own, *_full(data)]


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
    return [f"batched and one-by-one predictions differ in {100 * (1 - share):.1f} % of {rows} texts"]


def _rows(data: ReportData) -> list[str]:
    about: dict[tuple[str, str], list[int]] = {}
    for row in data.rows:
        for doubt in row["doubts"]:
            about.setdefault((row["dtype"], doubt), []).append(row["batch_size"])
    return [f"batch size {listed(sizes)} ({dtype}): {doubt}" for (dtype, doubt), sizes in about.items()]


def _full(data: ReportData) -> list[str]:
    full = data.full or {}
    texts = []
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
