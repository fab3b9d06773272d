"""A plan told to a person: what it takes, who does what, what limits it, and what it was chosen from."""

from collections.abc import Iterator, Sequence

from boundby.partition import Infeasible, PartitionPlan
from boundby.partition.plan import Alternative, span
from utils.partition.planning import Profiles
from utils.render import plain_text
from utils.render.blocks import Block, BulletList, DefinitionList, Heading, Paragraph, Table
from utils.render.formatting import NOTHING, clean, listed, number, times

LONGEST_SPAN = 34
LIMITS = 4  # parts of the objective that are named


def lines(outcome: PartitionPlan | Infeasible, profiles: Profiles) -> list[str]:
    """Return the outcome as lines of at most 100 columns."""
    if isinstance(outcome, Infeasible):
        return plain_text.lines([*_missing(outcome)])
    return plain_text.lines([*_plan(outcome, profiles)])


def subject(profiles: Profiles) -> str:
    """Return which model was profiled on what."""
    model = next(iter(profiles.values())).model_name
    places = listed([f"{clean(each.device_name)} ({kind})" for kind, each in profiles.items()])
    return f"{clean(model)}, profiled on {places}"


def headline(plan: PartitionPlan) -> str:
    """Return what the plan reaches, in one sentence."""
    stages = "1 stage" if len(plan.stages) == 1 else f"{len(plan.stages)} stages"
    return f"{stages}, {plan.meaning}: {_ms(plan.value_s)} ms ({plan.value_basis})"


def _plan(plan: PartitionPlan, profiles: Profiles) -> Iterator[Block]:
    rate = plan.requests_per_s
    yield Paragraph(headline(plan))
    yield DefinitionList(
        [
            ("Model", subject(profiles)),
            ("Latency of one request", f"{_ms(plan.latency_s)} ms"),
            ("Between two of many", f"{_ms(plan.period_s)} ms"),
            ("Throughput", f"{number(rate)} requests/s" if rate else f"not claimed: {plan.requests_per_s_reason}"),
        ]
    )
    yield _stages(plan)
    if plan.transfers:
        yield _transfers(plan)
    yield Paragraph("What limits it:")
    yield BulletList(plan.limits[:LIMITS])
    if plan.gains:
        yield Paragraph("What would help, each planned again (bounds; they do not multiply):")
        yield BulletList([f"at most {times(gain.at_most)} times: {gain.change}" for gain in plan.gains])
    yield Heading("What it was chosen from")
    yield _alternatives(plan)
    for title, items in (("Notes:", plan.notes), ("Doubts:", plan.doubts)):
        if items:
            yield Paragraph(title)
            yield BulletList(items)


def _stages(plan: PartitionPlan) -> Table:
    is_slowed = any(stage.busy_compute_s > stage.compute_s for stage in plan.stages)
    rows = [
        [
            clean(stage.node),
            clean(stage.kind),
            str(len(stage.units)),
            clean(span(stage.units), LONGEST_SPAN),
            _ms(stage.compute_s),
            *([_ms(stage.busy_compute_s)] if is_slowed else []),
            stage.basis,
            _mb(stage.memory.total),
            _mb(stage.usable_bytes),
        ]
        for stage in plan.stages
    ]
    busy = ["ms\nbusy"] if is_slowed else []
    headers = ["node", "kind", "units", "from ... to", "ms", *busy, "times", "MB\nused", "MB\nusable"]
    notes = ["usable: the memory of the node without its reserve and its head-room"]
    if is_slowed:
        notes.append("busy: while the other stages on the same machine compute too")
    return Table(headers, rows, left=[0, 1, 3, 5 + is_slowed], caption="Stages", notes=notes)


def _transfers(plan: PartitionPlan) -> Table:
    rows = [
        [clean(each.source), clean(each.target), _mb(each.size_bytes), _ms(each.seconds), each.basis]
        for each in plan.transfers
    ]
    return Table(["from", "to", "MB", "ms", "times"], rows, left=[0, 1, 4], caption="Transfers")


def _alternatives(plan: PartitionPlan) -> Table:
    mine = [(stage.node, len(stage.units)) for stage in plan.stages]
    rows = [["this plan", _numbers(mine), _ms(plan.value_s), "1.00"]]
    for each in plan.alternatives:
        ratio = NOTHING if each.value_s is None else times(each.value_s / plan.value_s) if plan.value_s else NOTHING
        value = NOTHING if each.value_s is None else _ms(each.value_s)
        rows.append([clean(each.name), _numbers(each.units), value, ratio])
    headers = ["split", "units", "ms", "times\nthis plan"]
    return Table(headers, rows, left=[0, 1], caption=f"By {plan.meaning}", notes=list(_unfit(plan.alternatives)))


def _unfit(alternatives: Sequence[Alternative]) -> Iterator[str]:
    for each in alternatives:
        if each.reason:
            yield f"{clean(each.name)}: {clean(each.reason, 200)}"


def _missing(missing: Infeasible) -> Iterator[Block]:
    yield Paragraph(f"INFEASIBLE: {missing}")
    rows = [[clean(name), _mb(extra)] for name, extra in missing.extra_by_node.items()]
    notes = ["each alone would be enough; reserve and head-room of what is added are taken into account"]
    yield Table(["node", "MB more"], rows, left=[0], caption="The least that would help", notes=notes)


def _numbers(units: Sequence[tuple[str, int]]) -> str:
    return " + ".join(f"{count} {clean(name, 16)}" for name, count in units) or NOTHING


def _ms(seconds: float) -> str:
    return number(1e3 * seconds)


def _mb(size_bytes: int) -> str:
    return number(size_bytes / 1e6)
