"""Training runs held against a first one: are their steps faster, slower, the same, or not to be told?"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from boundby import files
from boundby.formatting import NOTHING, number
from boundby.timing import MINIMUM_EFFECT, Comparison
from boundby.timing import compare as rounds
from boundby.training import Share, StageTimes, StepTable, share_of, step_table, windows
from utils.command import InputError
from utils.render import Block, Paragraph, Table, plain_text
from utils.training import run_folder

SCHEMA_VERSION = 1
LEAST_STEPS = 10  # in two windows
STEP_ROW = "whole step"
MISSING = "not there"
HEADERS = ("stage", "A\nms", "B\nms", "time of B\nagainst A, 95 %", "verdict")


@dataclass(frozen=True)
class StageRow:
    """One stage, or the whole step, in both runs; `reason` says why there is no comparison."""

    name: str
    a: Share | None
    b: Share | None
    comparison: Comparison | None
    reason: str | None = None


@dataclass(frozen=True)
class Contrast:
    """B against A: their steps and stages on the host, and the number of steps that each has for it."""

    rows: tuple[StageRow, ...]
    steps: tuple[int, int]
    minimum_effect: float


@dataclass(frozen=True)
class TrainingComparison:
    """A run against the first one, by the steps of their first processes, and the settings in which they differ."""

    a: Path
    b: Path
    contrast: Contrast
    settings: tuple[tuple[str, str, str], ...]

    @property
    def step(self) -> Comparison | None:
        """The comparison of the whole steps; None where there is none."""
        return self.contrast.rows[0].comparison

    def is_finding(self, is_strict: bool = False) -> bool:
        """Tell whether the steps are slower, or if strict, whether that is open."""
        verdict = self.step.verdict if self.step else "ambiguous"
        return verdict == "slower" or (is_strict and verdict == "ambiguous")


def are_trainings(runs: Sequence[Path]) -> bool:
    """Tell whether all are folders of training runs. Raises InputError where some alone are."""
    are_runs = [bool(run.is_dir() and any(run.glob("*stage_times.json"))) for run in runs]
    if any(are_runs) and not all(are_runs):
        other = runs[are_runs.index(False)]
        raise InputError(f"{other} is no training run, and the others are; compare runs of one kind")
    return all(are_runs)


def compare(runs: Sequence[Path], minimum_effect: float | None = None) -> list[TrainingComparison]:
    """Return each further run against the first; the effect is a share. Raises InputError where that cannot be."""
    if len(runs) < 2:
        raise InputError("name at least two runs: A to compare with, then those to judge")
    if minimum_effect is not None and not minimum_effect > 0:
        raise InputError(f"--minimum-effect is {100 * minimum_effect:g}; give a percentage above 0, such as 2")
    first, a = runs[0], _first_process(runs[0])
    comparisons = []
    for run in runs[1:]:
        try:
            judged = contrast(a, _first_process(run), minimum_effect)
        except ValueError as error:
            raise InputError(f"{run} against {first}: {error}") from None
        comparisons.append(TrainingComparison(first, run, judged, tuple(differences(_settings(first), _settings(run)))))
    return comparisons


def contrast(a: StageTimes, b: StageTimes, minimum_effect: float | None = None) -> Contrast:
    """Return the comparison of two processes by their undisturbed steps, on the clock of the host.

    A difference below `minimum_effect`, by default that of their device, is none.

    The rounds are windows of consecutive steps, since neighbouring steps are alike. Raises ValueError where a run has
    too few steps.
    """
    tables = step_table(a), step_table(b)
    for name, table in zip("AB", tables, strict=True):
        if len(table.numbers) < LEAST_STEPS:
            raise ValueError(f"{name} has {len(table.numbers)} undisturbed steps; at least {LEAST_STEPS} are needed")
    names = [STEP_ROW, *_stages(tables)]
    pairs = {name: (_seconds(tables[0], name), _seconds(tables[1], name)) for name in names}
    judged = {name: _independent(*pair) for name, pair in pairs.items()}
    contrasts = {name: one for name, one in judged.items() if isinstance(one, rounds.Contrast)}
    effect = minimum_effect or MINIMUM_EFFECT["cuda" if a.device or b.device else "cpu"]
    verdicts = dict(zip(contrasts, rounds.judge(list(contrasts.values()), effect), strict=True))
    rows = tuple(_stage_row(name, pairs[name], tables, verdicts.get(name), judged[name]) for name in names)
    return Contrast(rows, (len(tables[0].numbers), len(tables[1].numbers)), effect)


def differences(a: Mapping[str, object], b: Mapping[str, object]) -> list[tuple[str, str, str]]:
    """Return the settings in which two documents differ: key, value in A, value in B, all as text."""
    first, second = _flat(a), _flat(b)
    keys = sorted(key for key in {*first, *second} if first.get(key, MISSING) != second.get(key, MISSING))
    return [(key, first.get(key, MISSING), second.get(key, MISSING)) for key in keys]


def _flat(value: object, path: str = "") -> dict[str, str]:
    if isinstance(value, dict) and value:
        inner = ((f"{path}.{key}" if path else str(key), item) for key, item in value.items())
        return {key: text for name, item in inner for key, text in _flat(item, name).items()}
    return {path: str(value)} if path else {}


def _stages(tables: tuple[StepTable, StepTable]) -> list[str]:
    """Return the names of all stages, those with most time first."""
    total: dict[str, float] = {}
    for table in tables:
        for name, seconds in zip(table.names, table.host_s.sum(axis=0), strict=True):
            total[name] = total.get(name, 0.0) + float(seconds)
    return sorted(total, key=lambda name: -total[name])


def _seconds(table: StepTable, name: str) -> np.ndarray | None:
    """Return what each step spent in a stage; None where the run has no such stage."""
    if name == STEP_ROW:
        return table.host_s.sum(axis=1)
    return table.host_s[:, table.names.index(name)] if name in table.names else None


def _independent(a: np.ndarray | None, b: np.ndarray | None) -> rounds.Contrast | str:
    """Return the contrast of two runs by the means of their windows, or why there is none."""
    if a is None or b is None:
        return f"only {'B' if a is None else 'A'} has it"
    means = [[float(seconds[window].mean()) for window in windows(len(seconds))] for seconds in (a, b)]
    if min(map(min, means)) <= 0:
        return "in some windows it took no time"
    return rounds.independent(*means)


def _stage_row(
    name: str,
    pair: tuple[np.ndarray | None, np.ndarray | None],
    tables: tuple[StepTable, StepTable],
    comparison: Comparison | None,
    judged: rounds.Contrast | str,
) -> StageRow:
    shares = [
        None if spent is None else share_of(name, None, spent, table.host_s.sum(axis=1))
        for spent, table in zip(pair, tables, strict=True)
    ]
    reason = judged if isinstance(judged, str) else comparison.reason if comparison else None
    return StageRow(name, shares[0], shares[1], comparison, reason)


def lines(comparisons: Sequence[TrainingComparison]) -> list[str]:
    """Return what people read."""
    return plain_text.lines([block for comparison in comparisons for block in _blocks(comparison)])


def told(comparisons: Sequence[TrainingComparison]) -> dict[str, Any]:
    """Return the comparisons as plain values for JSON."""
    documents = [
        {
            "a": str(one.a),
            "b": str(one.b),
            "verdict": one.step.verdict if one.step else None,
            **asdict(one.contrast),
            "settings": [dict(zip(("setting", "a", "b"), setting, strict=True)) for setting in one.settings],
        }
        for one in comparisons
    ]
    return {"schema_version": SCHEMA_VERSION, "kind": "training_comparison", "comparisons": documents}


def _first_process(run: Path) -> StageTimes:
    try:
        return run_folder.ranks_of(run)[0]
    except (IndexError, OSError, ValueError) as error:
        raise InputError(f"{run}: its stage times cannot be read: {error}") from None


def _settings(run: Path) -> dict[str, object]:
    try:
        document = files.read_json(run / run_folder.CONFIG)
    except (OSError, ValueError):
        return {}
    settings = document.get("settings", document) if isinstance(document, dict) else {}
    return settings if isinstance(settings, dict) else {}


def _blocks(comparison: TrainingComparison) -> list[Block]:
    rows = [
        (
            row.name,
            *(NOTHING if share is None else number(1e3 * share.step_s) for share in (row.a, row.b)),
            _ratio(row.comparison),
            row.comparison.verdict if row.comparison else row.reason or NOTHING,
        )
        for row in comparison.contrast.rows
    ]
    steps = comparison.contrast.steps
    caption = f"A: {comparison.a}, B: {comparison.b}, by {steps[0]:,} and {steps[1]:,} steps that nothing disturbed"
    differing = "; ".join(f"{name}: {a} → {b}" for name, a, b in comparison.settings)
    return [
        Table(HEADERS, rows, left=(0, 4), caption=caption),
        Paragraph(f"Settings that differ: {differing}." if differing else "No setting is known to differ."),
    ]


def _ratio(comparison: Comparison | None) -> str:
    """Return the ratio of two runs, with its 95 % interval where there is one."""
    if comparison is None:
        return NOTHING
    if comparison.low is None or comparison.high is None:
        return f"{comparison.ratio:.3f}"
    return f"{comparison.ratio:.3f} ({comparison.low:.3f} to {comparison.high:.3f})"
