"""The alerts of the monitor: rules over the newest numbers of a run, each of which says what it looks at.

A rule whose numbers a run does not record is unwatched, with the reason; it never counts as quiet.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from msgspec.structs import replace

from boundby.machine import NVML_THROTTLED
from boundby.training import IN_NO_STAGE, NS_PER_S, STEP, StageTimes, StepTable, stages, step_table
from utils.training.monitor import text

WINDOW = 100  # steps, the newest
LEAST = 20  # steps before a rule speaks
NEWEST = 4 * WINDOW  # with those that were disturbed
SLOW_FACTOR = 3.0
SLOW_EXTRA_S = 0.010  # so that the jitter of steps of a millisecond raises no alert
STARVED_SHARE = 0.20
GROWTH_VALUES = 200
GROWTH_LEAST = 40
GROWTH_SKIPPED = 10  # steps at the start of a run, in which allocators fill up
GROWTH_SHARE = 0.05
GROWTH_BYTES = 16 * 2**20
THROTTLE_VALUES = 20
GRADIENTS = "grad_norm"  # the metric
EXPLODED = 10.0
DIVERGED = 2.0
REASONS_METRIC = "gpu_clock_event_reasons"
REASONS = {  # bits of NVML
    0x8: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
}
STALL_S = 30.0
STALL_FACTOR = 10.0
FIRST_STEP_S = 300.0  # compiling and filling caches come before it
SILENT_S = 120.0
MEMORY_WORDS = ("memory", "process", "rss", "allocated", "reserved")


@dataclass(frozen=True)
class Finding:
    """What one rule says of a run: its alerts, or the reason why it cannot be watched."""

    name: str
    rule: str
    alerts: tuple[str, ...]
    unwatched: str | None = None


class Unwatched(Exception):
    """The run does not record what a rule needs, or not yet."""


def watch(ranks: Sequence[StageTimes], now_unix_s: float, stall_s: float = STALL_S) -> tuple[Finding, ...]:
    """Return what every rule says of the processes of a run."""
    rules = (*RULES, ("Stalled run", stall_rule(stall_s), lambda times: stalled(times, now_unix_s, stall_s)))
    return tuple(_finding(name, rule, look, ranks) for name, rule, look in rules)


def _finding(name: str, rule: str, look: Callable[[StageTimes], str | None], ranks: Sequence[StageTimes]) -> Finding:
    alerts, reasons = [], []
    for times in ranks:
        where = f"rank {times.rank}: " if len(ranks) > 1 else ""
        try:
            alert = look(times)
        except Unwatched as reason:
            reasons.append(f"{where}{reason}")
            continue
        if alert:
            alerts.append(where + alert)
    unwatched = reasons[0] if reasons and len(reasons) == len(ranks) else None
    return Finding(name, rule, tuple(alerts), unwatched)


def slow_step(times: StageTimes) -> str | None:
    """Return the slow ones among the newest steps, with the stage in which the worst one spent most."""
    table = _newest(times)
    seconds = table.host_s.sum(axis=1)
    usual = _usual(seconds)
    slow = [step for step in usual if seconds[step] > max(SLOW_FACTOR * usual[step], usual[step] + SLOW_EXTRA_S)]
    if not slow:
        return None
    worst = max(slow, key=lambda step: float(seconds[step]))
    column = int(table.host_s[worst].argmax())
    stage = "no stage" if table.names[column] == IN_NO_STAGE else table.names[column]
    return (
        f"{len(slow)} of the last {len(usual)} steps; the worst is step {table.numbers[worst]}:"
        f" {text.seconds(seconds[worst])}, where {text.seconds(usual[worst])} is usual;"
        f" {text.seconds(table.host_s[worst, column])} of it in {stage}"
    )


def input_starvation(times: StageTimes) -> str | None:
    """Return the share of the newest steps that waited for data, where it is too much."""
    table = _newest(times)
    table = table.at(np.arange(len(table.numbers))[-WINDOW:])
    if stages.DATA not in table.names:
        raise Unwatched(f"the run times no stage {stages.DATA}")
    column = table.names.index(stages.DATA)
    waited_s = np.minimum(table.host_s[:, column], table.seconds[:, column])
    share = float(waited_s.sum() / table.host_s.sum())
    if share <= STARVED_SHARE:
        return None
    return f"{100 * share:.0f} % of the time of the last {table.num_steps} steps went to the wait for the next batch"


def not_finite(times: StageTimes) -> str | None:
    """Return the losses and norms that are NaN or infinite."""
    alerts = []
    for name in _of_learning(times, (*_losses(times), GRADIENTS)):
        steps, values = _values(times, name)
        bad = ~np.isfinite(values[-WINDOW:])
        if bad.any():
            alerts.append(f"{name}: {int(bad.sum())} of the last {len(bad)}, first at step {steps[-WINDOW:][bad][0]}")
    return "; ".join(alerts) or None


def diverging(times: StageTimes) -> str | None:
    """Return the losses that rise again."""
    alerts = []
    for name in _of_learning(times, _losses(times)):
        _, values = _values(times, name)
        values = values[np.isfinite(values)]
        medians = [float(np.median(values[start : start + LEAST])) for start in range(0, len(values) - LEAST, LEAST)]
        newest, lowest = float(np.median(values[-LEAST:])) if len(values) else 0.0, min(medians, default=0.0)
        if len(values) >= 2 * LEAST and 0 < DIVERGED * lowest < newest and newest > medians[0] / 2:
            alerts.append(f"{name}: {newest:.4g} over the last {LEAST} values, after {lowest:.4g} before")
    return "; ".join(alerts) or None


def exploding(times: StageTimes) -> str | None:
    """Return the steps with far larger gradients than before."""
    [name] = _of_learning(times, [GRADIENTS])
    steps, values = _values(times, name)
    known = np.isfinite(values)
    steps, values = steps[known], values[known]
    usual = _usual(values)
    wild = [index for index in usual if values[index] > EXPLODED * usual[index] > 0]
    if not wild:
        return None
    worst = max(wild, key=lambda index: float(values[index]))
    return (
        f"{len(wild)} of the last {len(usual)} values; the largest is {values[worst]:.4g} at step {steps[worst]},"
        f" where {usual[worst]:.4g} is usual"
    )


def is_memory(name: str) -> bool:
    """Tell whether a metric is an amount of memory."""
    return name.endswith("_bytes") and any(word in name for word in MEMORY_WORDS)


def memory_growth(times: StageTimes) -> str | None:
    """Return the memory metrics that do not stop growing."""
    names = [name for name in times.metric_names if is_memory(name)]
    if not names:
        raise Unwatched("the run records no memory metric")
    return "; ".join(alert for name in names if (alert := _growth(times, name))) or None


def throttling(times: StageTimes) -> str | None:
    """Return the reasons why the GPU's clock was lowered."""
    if REASONS_METRIC not in times.metric_names:
        raise Unwatched(f"the run records no metric {REASONS_METRIC}")
    _, values = times.values_of(REASONS_METRIC)
    masks = values[-THROTTLE_VALUES:].astype(np.int64)
    low = masks & NVML_THROTTLED
    if not low.any():
        return None
    reasons = [reason for bit, reason in REASONS.items() if (low & bit).any()]
    return f"{int((low != 0).sum())} of the last {len(masks)} values: {', '.join(reasons)}"


RULES: tuple[tuple[str, str, Callable[[StageTimes], str | None]], ...] = (
    (
        "Slow step",
        f"One of the last {WINDOW} steps took more than {SLOW_FACTOR:g} times the median of the up to {WINDOW} steps"
        f" before it (at least {LEAST}), and {SLOW_EXTRA_S * 1e3:g} ms more. Steps that a profiler slowed down do not"
        " count.",
        slow_step,
    ),
    (
        "Input starvation",
        f"Of the last {WINDOW} steps (at least {LEAST}) more than {100 * STARVED_SHARE:.0f} % of the time went to the"
        f" wait for the next batch (stage {stages.DATA}). Where the device's times are known, only the wait that the"
        " device sat through counts.",
        input_starvation,
    ),
    (
        "Loss not a number",
        f"One of the last {WINDOW} values of a loss or of the norm of the gradients is no finite number. A loss is a"
        " metric named loss, or with a name that ends so; the norm is grad_norm.",
        not_finite,
    ),
    (
        "Diverging loss",
        f"The median of the last {LEAST} values of a loss is more than {DIVERGED:g} times the lowest median of {LEAST}"
        f" in a row before (at least {2 * LEAST} values), and more than half of that of the first {LEAST}.",
        diverging,
    ),
    (
        "Exploding gradients",
        f"One of the last {WINDOW} values of {GRADIENTS} is more than {EXPLODED:g} times the median of the up to"
        f" {WINDOW} before it (at least {LEAST}).",
        exploding,
    ),
    (
        "Memory growth",
        f"Of the last {GROWTH_VALUES} values of a memory metric (at least {GROWTH_LEAST}, without the first"
        f" {GROWTH_SKIPPED} steps of the run) every quarter has a higher median than the one before, and the last is"
        f" {100 * GROWTH_SHARE:.0f} % and {GROWTH_BYTES >> 20} MiB above the first. Memory metrics end with _bytes and"
        f" name one of: {', '.join(MEMORY_WORDS)}.",
        memory_growth,
    ),
    (
        "Throttling",
        f"One of the last {THROTTLE_VALUES} values of the metric {REASONS_METRIC} holds one of NVML's bits for"
        f" {', '.join(REASONS.values())}.",
        throttling,
    ),
)


def stall_rule(stall_s: float) -> str:
    """Return what the rule for stalled runs says."""
    return (
        f"The run has neither finished nor failed, and no stage has ended for more than {stall_s:g} s and"
        f" {STALL_FACTOR:g} times the longest of the last {WINDOW} steps (before the first step:"
        f" {max(FIRST_STEP_S, stall_s):g} s). Evaluation and other excluded work may take as long as it likes while"
        f" the run writes, which it does at least every {SILENT_S:g} s."
    )


def stalled(times: StageTimes, now_unix_s: float, stall_s: float = STALL_S) -> str | None:
    """Return for how long a run that goes on has shown no progress, and in what it is."""
    if times.status != "running":
        return None
    if times.started_unix_s is None:
        raise Unwatched("the run does not say when it began")
    rows = times.occurrences
    last_s = float((rows["start_ns"] + rows["host_ns"]).max()) / NS_PER_S if len(rows) else 0.0
    quiet_s = now_unix_s - times.started_unix_s - last_s
    # The longest of the newest steps counts even if a profiler slowed it down; there is none before the first.
    longest_s = float(times.rows_of(STEP, "step")["host_ns"][-WINDOW:].max(initial=0)) / NS_PER_S
    allowed_s = max(stall_s, STALL_FACTOR * longest_s or FIRST_STEP_S)
    silent_s = None if times.written_unix_s is None else max(0.0, now_unix_s - times.written_unix_s)
    excluded = {name.name for name in times.names if name.kind == "excluded"}
    is_excluded = any(stage.name in excluded for stage in times.open) and silent_s is not None and silent_s <= SILENT_S
    if quiet_s <= allowed_s or is_excluded:
        return None
    inside = f"; it is in {times.open[-1].name}" if times.open else ""
    written = "" if silent_s is None else f"; it last wrote {silent_s:,.0f} s ago"
    return f"no stage has ended for {quiet_s:,.0f} s, where {allowed_s:,.0f} s are allowed{inside}{written}"


def _newest(times: StageTimes) -> StepTable:
    """Return as many of the newest steps as the rules look at, and some more; a table of all would take long."""
    ends = times.rows_of(STEP, "step")[-NEWEST:]
    rows = times.occurrences
    table = step_table(replace(times, occurrences=rows[rows["start_ns"] >= (ends["start_ns"][0] if len(ends) else 0)]))
    if len(table.numbers) <= LEAST:
        raise Unwatched(f"{len(table.numbers)} undisturbed steps up to now; the rule needs more than {LEAST}")
    return table


def _usual(values: np.ndarray) -> dict[int, float]:
    """Return the median of the values before each of the newest, by its index."""
    newest = range(max(LEAST, len(values) - WINDOW), len(values))
    return {index: float(np.median(values[max(0, index - WINDOW) : index])) for index in newest}


def _losses(times: StageTimes) -> list[str]:
    return [name for name in times.metric_names if name == "loss" or name.endswith("_loss")]


def _of_learning(times: StageTimes, names: Sequence[str]) -> list[str]:
    """Return those of the metrics that the run records. Raises `Unwatched` where it records none of them."""
    known = [name for name in names if name in times.metric_names]
    if not known:
        raise Unwatched(f"the run records no metric {' or '.join(names) or 'loss'}")
    return known


def _values(times: StageTimes, metric: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the steps and all values of a metric, those that are no finite numbers among them."""
    rows = times.metric_rows[times.metric_rows["metric"] == times.metric_names.index(metric)]
    return rows["step"], rows["value"]


def _growth(times: StageTimes, name: str) -> str | None:
    numbers, values = times.values_of(name)
    values = values[numbers >= times.first_step + GROWTH_SKIPPED][-GROWTH_VALUES:]
    if len(values) < GROWTH_LEAST:
        return None
    medians = [float(np.median(quarter)) for quarter in np.array_split(values, 4)]
    rise = medians[3] - medians[0]
    if not all(np.diff(medians) > 0) or rise < max(GROWTH_SHARE * medians[0], GROWTH_BYTES):
        return None
    return (
        f"{name} grew by {rise / 2**20:,.0f} MiB over the last {len(values)} values, to {medians[3] / 2**20:,.0f} MiB"
    )
