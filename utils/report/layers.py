"""What the profile by layer says: how far it can be trusted, the longest blocks, and the layers by their own work."""

from collections.abc import Sequence

from boundby.layers.ranking import Ranked, blocks, by_self_time
from boundby.layers.records import ModelProfile
from utils.plots import layers
from utils.render.blocks import Block, BulletList, DefinitionList, Heading, Paragraph, Table
from utils.render.formatting import NOTHING, clean, number
from utils.report.pictures import Content, show
from utils.report.sources import Missing, ReportData

TITLE = "Layer by Layer"
SHOWN = 8
LONGEST_LAYER = 44  # characters


def section(data: ReportData) -> list[Content]:
    """Return coverage, overhead, both rankings, and where the dashboard lies."""
    profile = data.layers
    picture = show(data, layers.figure, profile)
    if isinstance(profile, Missing):
        return [Heading(TITLE), Paragraph(f"There is no profile by layer: {clean(profile.reason, 300)}."), picture]
    coverage = profile.coverage
    facts = [
        ("End to end", f"{number(1e3 * profile.reference_s.median)} ms per batch without probes (median)"),
        ("Coverage", f"{100 * coverage.ratio:.1f} % of that is accounted for by layers ({coverage.status})"),
        (
            "Overhead of the probes",
            f"{100 * profile.overhead:+.1f} %, {profile.module_calls:,.0f} module calls per run",
        ),
        ("Dashboard", str(data.layout.layer_dashboard.relative_to(data.layout.results))),
    ]
    return [
        Heading(TITLE),
        DefinitionList(facts),
        *_trust(profile),
        _table(blocks(profile), "Blocks that together are the whole model, the longest first", profile),
        _table(by_self_time(profile), "Layers by their own time, without the layers inside", profile),
        picture,
    ]


def _trust(profile: ModelProfile) -> list[Block]:
    doubts = [f"doubt: {clean(each, 300)}" for each in profile.doubts]
    if profile.coverage.status == "not representative":
        doubts.insert(0, "doubt: the layers do not account for the time of the model; read ranks at most, no times")
    return [BulletList(doubts)] if doubts else []


def _table(rows: Sequence[Ranked], caption: str, profile: ModelProfile) -> Block:
    bounds = {each.path: (each.bound, each.share_of_limit) for each in profile.layers}
    cells = []
    for row in rows[:SHOWN]:
        bound, share = bounds.get(row.path, (None, None))
        cells.append(
            [
                clean(row.label, LONGEST_LAYER),
                clean(row.type, 24),
                number(1e3 * row.seconds),
                f"{100 * row.share:.1f}",
                NOTHING if row.gain_at_limit_s is None else number(1e3 * row.gain_at_limit_s),
                NOTHING if bound is None else bound,
                NOTHING if share is None else f"{100 * share:.0f}",
            ]
        )
    return Table(
        headers=["layer", "type", "ms", "%", "to gain,\nms", "own work\nbound by", "% of\nlimit"],
        rows=cells,
        left=[0, 1, 5],
        caption=caption,
        notes=["To gain: if its own work and that of everything inside ran at the limits of this machine."],
    )
