"""Training runs held against a first one: are their steps faster, slower, the same, or not to be told?"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from boundby import files
from boundby.compare import Comparison
from boundby.formatting import NOTHING, number
from boundby.training import StageTimes
from utils.errors import InputError
from utils.monitor import text
from utils.monitor.contrast import Contrast, contrast, differences
from utils.render import plain_text
from utils.render.blocks import Block, Paragraph, Table
from utils.training import run_folder

SCHEMA_VERSION = 1
HEADERS = ("stage", "A\nms", "B\nms", "time of B\nagainst A, 95 %", "verdict")


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
    found = [bool(run.is_dir() and any(run.glob("*stage_times.json"))) for run in runs]
    if any(found) and not all(found):
        other = runs[found.index(False)]
        raise InputError(f"{other} is no training run, and the others are; compare runs of one kind")
    return all(found)


def compare(runs: Sequence[Path], minimum_effect: float | None = None) -> list[TrainingComparison]:
    """Return each further run against the first; the effect is a share. Raises InputError where that cannot be."""
    if len(runs) < 2:
        raise InputError("name at least two runs: A to compare with, then those to judge")
    if minimum_effect is not None and not minimum_effect > 0:
        raise InputError(f"--minimum-effect is {100 * minimum_effect:g}; give a percentage above 0, such as 2")
    first, a = runs[0], _first_process(runs[0])
    found = []
    for run in runs[1:]:
        try:
            judged = contrast(a, _first_process(run), minimum_effect)
        except ValueError as error:
            raise InputError(f"{run} against {first}: {error}") from None
        found.append(TrainingComparison(first, run, judged, tuple(differences(_settings(first), _settings(run)))))
    return found


def lines(found: Sequence[TrainingComparison]) -> list[str]:
    """Return what people read."""
    return plain_text.lines([block for each in found for block in _blocks(each)])


def told(found: Sequence[TrainingComparison]) -> dict[str, Any]:
    """Return the comparisons as plain values for JSON."""
    comparisons = [
        {
            "a": str(each.a),
            "b": str(each.b),
            "verdict": each.step.verdict if each.step else None,
            **asdict(each.contrast),
            "settings": [dict(zip(("setting", "a", "b"), one, strict=True)) for one in each.settings],
        }
        for each in found
    ]
    return {"schema_version": SCHEMA_VERSION, "kind": "training_comparison", "comparisons": comparisons}


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


def _blocks(found: TrainingComparison) -> list[Block]:
    rows = [
        (
            row.name,
            *(NOTHING if share is None else number(1e3 * share.step_s) for share in (row.a, row.b)),
            text.ratio(row.comparison),
            row.comparison.verdict if row.comparison else row.reason or NOTHING,
        )
        for row in found.contrast.rows
    ]
    steps = found.contrast.steps
    caption = f"A: {found.a}, B: {found.b}, by {steps[0]:,} and {steps[1]:,} steps that nothing disturbed"
    differing = "; ".join(f"{name}: {a} → {b}" for name, a, b in found.settings)
    return [
        Table(HEADERS, rows, left=(0, 4), caption=caption),
        Paragraph(f"Settings that differ: {differing}." if differing else "No setting is known to differ."),
    ]
