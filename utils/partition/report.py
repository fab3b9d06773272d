"""A plan as text: what it takes, who does what, what limits it, and the alternatives; and a run of it."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from boundby import files
from boundby.formatting import NOTHING, clean, listed, number, times
from boundby.partition import Comparison, Error, Infeasible, Measured, PartitionPlan, Simulated, compare
from utils.command import InputError
from utils.partition.planning import Planned, Profiles
from utils.render import Block, BulletList, DefinitionList, Heading, Paragraph, Table, plain_text

PICTURE = ".png"
LONGEST_SPAN = 34
LIMITS = 4  # parts of the objective that are named


def of_plan(outcome: PartitionPlan | Infeasible, profiles: Profiles) -> str:
    """Return a plan, or what is missing for one, in lines of at most 100 columns."""
    blocks = _missing(outcome) if isinstance(outcome, Infeasible) else _plan(outcome, profiles)
    return "\n".join(plain_text.lines([*blocks]))


def of_run(file: Planned, measured: Measured) -> str:
    """Return what a plan took beside what it was predicted to take."""
    return "\n".join(plain_text.lines([*_run(file, measured, compare(file.plan, measured))]))


def of_simulation(file: Planned, simulated: Simulated) -> str:
    """Return what a plan takes event by event beside the formulas that it was chosen by."""
    plan = file.plan
    last = plan.latency_s + (simulated.requests - 1) * plan.period_s
    rows = [
        ("first request finished", plan.latency_s, simulated.first_finish_s),
        ("between two of many", plan.period_s, simulated.period_s),
        (f"finish of {simulated.requests} requests", last, simulated.last_finish_s),
    ]
    cells = [[name, _ms(formula), NOTHING if at is None else _ms(at)] for name, formula, at in rows]
    blocks: list[Block] = [
        Paragraph(f"{_stage_count(plan)} of {clean(file.model.name)}, simulated: no process was started"),
        Table(["", "ms\nplanned", "ms\nsimulated"], cells, left=[0], caption=f"{simulated.requests} requests"),
        _stages(plan),
        BulletList([f"times are {simulated.basis}", *([simulated.reason] if simulated.reason else [])]),
    ]
    return "\n".join(plain_text.lines(blocks))


def draw(path: Path, plan: PartitionPlan, profiles: Profiles) -> None:
    """Replace `path` by the picture of the plan."""
    from utils.partition import picture as partition
    from utils.report import Subject, shortened

    about = Subject(shortened(headline(plan), 120), shortened(subject(profiles), 120), is_synthetic=False)
    figure = partition.figure(plan, about)
    with files.replacing(path) as temporary:
        figure.savefig(temporary)


def check_picture(path: Path | None) -> None:
    """Raise InputError for a file that would be no PNG, before anything is planned."""
    if path is not None and path.suffix.lower() != PICTURE:
        raise InputError(f"--picture {path}: give a name that ends with {PICTURE}")


def subject(profiles: Profiles) -> str:
    """Return which model was profiled on what."""
    model = next(iter(profiles.values())).model_name
    devices = listed([f"{clean(profile.device_name)} ({kind})" for kind, profile in profiles.items()])
    return f"{clean(model)}, profiled on {devices}"


def headline(plan: PartitionPlan) -> str:
    """Return what the plan reaches, in one sentence."""
    return f"{_stage_count(plan)}, {plan.meaning}: {_ms(plan.value_s)} ms ({plan.value_basis})"


def _plan(plan: PartitionPlan, profiles: Profiles) -> Iterator[Block]:
    rate = plan.requests_per_s
    yield Paragraph(headline(plan))
    yield DefinitionList(
        [
            ("Model", subject(profiles)),
            ("Latency of one request", f"{_ms(plan.latency_s)} ms"),
            ("Between two of many", f"{_ms(plan.period_s)} ms"),
            ("Throughput", f"{number(rate)} requests/s" if rate else f"not claimed: {plan.requests_per_s_reason}"),
            *_memory(plan),
        ]
    )
    yield _stages(plan)
    if plan.transfers:
        yield _transfers(plan)
    yield Paragraph("What limits it:")
    yield BulletList(plan.limits[:LIMITS])
    if plan.gains:
        yield Paragraph("What would help, each change planned by itself (upper bounds; they do not multiply):")
        yield BulletList([f"at most {times(gain.at_most)} times: {gain.change}" for gain in plan.gains])
    yield Heading("Alternatives")
    yield _alternatives(plan)
    for title, items in (("Notes:", plan.notes), ("Doubts:", plan.doubts)):
        if items:
            yield Paragraph(title)
            yield BulletList(items)


def _from_to(units: Sequence[str]) -> str:
    """Return the first and last unit, the longer name without its first parts where both are too long for a table."""
    names = list(dict.fromkeys((units[0], units[-1])))
    while len(text := " ... ".join(names)) > LONGEST_SPAN and "." in (longer := max(names, key=len)):
        names[names.index(longer)] = longer.partition(".")[2]
    return clean(text, LONGEST_SPAN)


def _memory(plan: PartitionPlan) -> Iterator[tuple[str, str]]:
    if plan.batch_size and plan.largest_batch is not None:
        caches = sum(stage.memory_bytes.kv_cache for stage in plan.stages)
        held = f", {_mb(caches)} MB of it KV caches" if caches else ""
        yield "Memory", f"of a batch of {plan.batch_size}{held}; up to {plan.largest_batch:,} fit beside the weights"


def _stages(plan: PartitionPlan) -> Table:
    is_slowed = any(stage.busy_compute_s > stage.compute_s for stage in plan.stages)
    rows = [
        [
            clean(stage.node),
            clean(stage.kind),
            str(len(stage.units)),
            _from_to(stage.units),
            _ms(stage.compute_s),
            *([_ms(stage.busy_compute_s)] if is_slowed else []),
            stage.basis,
            _mb(stage.memory_bytes.total),
            _mb(stage.usable_bytes),
        ]
        for stage in plan.stages
    ]
    busy = ["ms\nbusy"] if is_slowed else []
    headers = ["node", "kind", "units", "from ... to", "ms", *busy, "times", "MB\nused", "MB\nusable"]
    notes = ["usable: the memory of the node minus reserve and head-room"]
    if is_slowed:
        notes.append("busy: while the other stages on the same machine compute too")
    return Table(headers, rows, left=[0, 1, 3, 5 + is_slowed], caption="Stages", notes=notes)


def _transfers(plan: PartitionPlan) -> Table:
    rows = [
        [clean(sent.source), clean(sent.target), _mb(sent.size_bytes), _ms(sent.seconds), sent.basis]
        for sent in plan.transfers
    ]
    return Table(["from", "to", "MB", "ms", "times"], rows, left=[0, 1, 4], caption="Transfers")


def _alternatives(plan: PartitionPlan) -> Table:
    mine = [(stage.node, len(stage.units)) for stage in plan.stages]
    rows = [["this plan", _numbers(mine), _ms(plan.value_s), "1.00"]]
    for split in plan.alternatives:
        is_comparable = split.value_s is not None and plan.value_s > 0
        ratio = times(split.value_s / plan.value_s) if is_comparable else NOTHING
        value = NOTHING if split.value_s is None else _ms(split.value_s)
        rows.append([clean(split.name), _numbers(split.units), value, ratio])
    headers = ["split", "units", "ms", "times\nthis plan"]
    unfit = [f"{clean(split.name)}: {clean(split.reason, 200)}" for split in plan.alternatives if split.reason]
    return Table(headers, rows, left=[0, 1], caption=f"By {plan.meaning}", notes=unfit)


def _missing(missing: Infeasible) -> Iterator[Block]:
    yield Paragraph(f"INFEASIBLE: {missing}")
    rows = [[clean(name), _mb(extra)] for name, extra in missing.extra_by_node.items()]
    notes = ["each alone is enough; reserve and head-room are included"]
    yield Table(["node", "MB more"], rows, left=[0], caption="The least that would help", notes=notes)


def _numbers(units: Sequence[tuple[str, int]]) -> str:
    return " + ".join(f"{count} {clean(name, 16)}" for name, count in units) or NOTHING


def _ms(seconds: float) -> str:
    return number(1e3 * seconds)


def _mb(size_bytes: float) -> str:
    return number(size_bytes / 1e6)


def _run(file: Planned, measured: Measured, errors: Comparison) -> Iterator[Block]:
    plan, machines = file.plan, {stage.machine for stage in measured.stages}
    where = "1 machine" if len(machines) == 1 else f"{len(machines)} machines"
    yield Paragraph(f"{_stage_count(plan)} of {clean(file.model.name)}, measured in as many processes on {where}")
    yield DefinitionList(
        [
            (
                "Outputs",
                f"equal to those of the whole model: largest difference {measured.difference:.1e}, "
                f"{measured.tolerance:.1e} allowed",
            ),
            ("Threads", listed([f"{stage.threads} ({stage.node})" for stage in measured.stages])),
            ("Requests", f"{measured.latency.n} one at a time, then {measured.requests} at once"),
        ]
    )
    rows = [
        [
            clean(stage.node),
            clean(stage.device),
            _from_to(stage.units),
            _mb(stage.weight_bytes),
            *_beside(alone),
            *_beside(busy),
        ]
        for stage, alone, busy in zip(measured.stages, errors.stages, errors.busy_stages, strict=True)
    ]
    headers = ["node", "on", "from ... to", "MB\nweights", "ms\nplanned", "ms\nmeasured", "%\nerror"]
    headers += ["busy ms\nplanned", "busy ms\nmeasured", "%\nerror"]
    notes = ["busy: with many requests in the pipeline. error: planned over measured, minus one"]
    yield Table(headers, rows, left=[0, 1, 2], caption="Stages", notes=notes)
    if errors.transfers:
        sent = [
            [clean(error.name), _mb(size.predicted), _mb(size.measured), *_beside(error)]
            for error, size in zip(errors.transfers, errors.transfer_sizes, strict=True)
        ]
        headers = ["transfer", "MB\nplanned", "MB\nsent", "ms\nplanned", "ms\nmeasured", "%\nerror"]
        yield Table(
            headers, sent, left=[0], caption="Transfers, from the end of one computation to the start of the next"
        )
    whole = [error for error in (errors.latency, errors.period, errors.last_finish) if error]
    rows = [[error.name, *_beside(error)] for error in whole]
    yield Table(["", "ms\nplanned", "ms\nmeasured", "%\nerror"], rows, left=[0], caption="Pipeline")
    if measured.transfers:
        yield Paragraph("To plan again with these measurements, write into the file of nodes:")
        yield BulletList(list(_known(plan, measured)))
    doubts = [*measured.doubts, *_threads(file, measured)]
    if doubts:
        yield Paragraph("Doubts:")
        yield BulletList(doubts)


def _known(plan: PartitionPlan, measured: Measured) -> Iterator[str]:
    shared = [stage.machine for stage in measured.stages]
    for planned, stage in zip(plan.stages, measured.stages, strict=True):
        if shared.count(stage.machine) > 1:
            machine = planned.machine or "NAME, the same for all of one machine"
            yield f"{clean(stage.node)}: machine: {clean(machine)}, contention: {stage.slowdown:.2f}"
    for transfer in measured.transfers:
        rate, latency = transfer.link.bytes_per_s / 1e9, 1e6 * transfer.link.latency_s
        between = f"[{clean(transfer.source)}, {clean(transfer.target)}]"
        yield f"between: {between}, gb_per_s: {rate:.3g}, latency_us: {latency:.0f}, measured: true"


def _threads(file: Planned, measured: Measured) -> Iterator[str]:
    of_profile = file.model.threads
    on_cpus = zip(file.plan.stages, measured.stages, strict=True)
    used = sorted({stage.threads for planned, stage in on_cpus if not planned.on_gpu})
    if of_profile is not None and used not in ([], [of_profile]):
        yield (
            f"the profile was made with {of_profile} threads, and stages computed with {listed(used)}: profile with "
            "as many"
        )


def _beside(error: Error) -> list[str]:
    off = NOTHING if error.signed is None else f"{100 * error.signed:+.0f}"
    return [_ms(error.predicted), _ms(error.measured), off]


def _stage_count(plan: PartitionPlan) -> str:
    return "1 stage" if len(plan.stages) == 1 else f"{len(plan.stages)} stages"
