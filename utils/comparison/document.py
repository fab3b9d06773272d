"""Join what was found about two runs: whether they may be compared, what differs, and what is a regression."""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from boundby import files
from utils.comparison import rows
from utils.comparison.results import Point, Results
from utils.comparison.rows import Accuracy, Row
from utils.errors import InputError
from utils.optimal import MEASURED

SCHEMA_VERSION = 1
JUDGED_PARTS = ("config", "code", "versions", "environment")  # of the receipt of step 02
MODEL_KEYS = ("name", "revision", "fingerprint", "parameters_total", "num_labels")
FINGERPRINTS = {
    "machine_fingerprint": "machine (hardware, driver, quota)",
    "work_fingerprint": "work (rows, labels, max_length, method)",
}


@dataclass(frozen=True)
class Change:
    """Something that is not the same in both runs, and so may be what is judged."""

    name: str
    a: Any
    b: Any


@dataclass(frozen=True)
class Missing:
    """A dtype and batch size that only one run has measured; a status is None where it was not asked for."""

    dtype: str
    batch_size: int
    status_a: str | None
    status_b: str | None

    @property
    def is_loss(self) -> bool:
        """Whether B tried and failed where A has a result."""
        return self.status_a in MEASURED and self.status_b is not None


@dataclass(frozen=True)
class RunComparison:
    """Everything that is said about A and B."""

    a: Results
    b: Results
    minimum_effect: float
    rows: tuple[Row, ...]
    accuracy: Accuracy | None
    missing: tuple[Missing, ...]
    changes: tuple[Change, ...]
    doubts: tuple[str, ...]

    def of(self, verdict: str) -> list[Row]:
        """Return the rows with this verdict."""
        return [row for row in self.rows if row.verdict == verdict]

    @property
    def verdict(self) -> str:
        """The headline: regression, improved, ambiguous, same, or not judged; the first of these that holds."""
        accuracy = self.accuracy.verdict if self.accuracy else None
        if self.of("slower") or accuracy == "loss" or any(each.is_loss for each in self.missing):
            return "regression"
        if self.of("faster") or accuracy == "gain":
            return "improved"
        return next((verdict for verdict in ("ambiguous", "same") if self.of(verdict)), "not judged")

    def is_finding(self, strict: bool = False) -> bool:
        """Tell whether B is a regression; with `strict`, or whether that is open in any row."""
        return self.verdict == "regression" or (strict and bool(self.of("ambiguous")))

    def as_json(self) -> str:
        """Return the comparison as one strict JSON document, in ASCII: a console must not change a character of it."""
        return json.dumps(self.as_dict(), indent=2, allow_nan=False)

    def as_dict(self) -> dict[str, Any]:
        """Return the comparison as plain values."""
        return {
            "schema_version": SCHEMA_VERSION,
            "verdict": self.verdict,
            "minimum_effect_pct": 100 * self.minimum_effect,
            "a": _subject(self.a),
            "b": _subject(self.b),
            "rows": [row.as_dict() for row in self.rows],
            "accuracy": self.accuracy.as_dict() if self.accuracy else None,
            "missing": [vars(each) | {"is_loss": each.is_loss} for each in self.missing],
            "changes": [vars(change) for change in self.changes],
            "doubts": list(self.doubts),
        }


def compare(a: Results, b: Results, minimum_effect_pct: float | None = None, *, force: bool = False) -> RunComparison:
    """Return what there is to say about B against A; without a minimum effect that of the device is used.

    Raises InputError where machine or work differ, unless `force` turns that into a doubt, and where the runs have
    no batch size in common.
    """
    if minimum_effect_pct is not None and not 0 < minimum_effect_pct < math.inf:
        raise InputError(f"--minimum-effect is {minimum_effect_pct:g}; give a percentage above 0, such as 2")
    doubts = [*_differing_ground(a, b, force), *_unfinished(a, b)]
    least = minimum_effect_pct / 100 if minimum_effect_pct else rows.minimum_effect(a.document, b.document)
    found = rows.between_runs(a, b, least)
    if not found:
        raise InputError(
            f"{a.path} and {b.path} have no dtype and batch size in common that both have measured; "
            f"A has {_listed(a.rounds)}, B has {_listed(b.rounds)}"
        )
    accuracy = rows.accuracy(a, b)
    return RunComparison(a, b, least, tuple(found), accuracy, _missing(a, b), _changes(a, b), tuple(doubts))


def _differing_ground(a: Results, b: Results, force: bool) -> list[str]:
    """Return a doubt for each fingerprint that is not equal. Raises InputError instead unless `force`."""
    differing = [
        name for key, name in FINGERPRINTS.items() if a.document[key] is None or a.document[key] != b.document[key]
    ]
    if differing and not force:
        raise InputError(
            f"{a.path} and {b.path} differ in their {' and their '.join(differing)}, so a difference in time would "
            "not tell about model or program; measure both alike, or add --force to compare them all the same"
        )
    return [
        f"the {name} is not the same in both runs: the differences below are not those of the program alone"
        for name in differing
    ]


def _unfinished(a: Results, b: Results) -> list[str]:
    return [
        f"{side}: step 02 had not finished when this was written"
        for side, run in (("A", a), ("B", b))
        if run.document.get("complete") is False
    ]


def _missing(a: Results, b: Results) -> tuple[Missing, ...]:
    """Return the points that only one run has measured, in the order of the sweeps; A's dtype names a mapped pair."""
    to_b = dict(rows.pair_dtypes(a.dtypes, b.dtypes))
    to_a = {second: first for first, second in to_b.items()}
    known_a = {point: row["status"] for point, row in a.rows.items()}
    known_b = {(to_a.get(dtype, dtype), size): row["status"] for (dtype, size), row in b.rows.items()}
    return tuple(
        Missing(*point, known_a.get(point), known_b.get(point))
        for point in dict.fromkeys([*known_a, *known_b])
        if (known_a.get(point) in MEASURED) != (known_b.get(point) in MEASURED)
    )


def _changes(a: Results, b: Results) -> tuple[Change, ...]:
    """Return by dotted name what is not the same and is what a comparison is made to judge."""
    parts_a, parts_b = _parts(a), _parts(b)
    if not parts_a or not parts_b:  # a step that has not finished has no receipt
        parts_a = parts_b = {}
    first, second = _flat({**_facts(a), **parts_a}), _flat({**_facts(b), **parts_b})
    return tuple(
        Change(name, first.get(name), second.get(name))
        for name in dict.fromkeys([*first, *second])
        if first.get(name) != second.get(name)
    )


def _facts(run: Results) -> dict[str, Any]:
    document = run.document
    return {
        "model": {key: document["model"].get(key) for key in MODEL_KEYS},
        "dtypes": ", ".join(run.dtypes),
        "boundby_version": document.get("boundby_version"),
    }


def _parts(run: Results) -> dict[str, Any]:
    """Return what the receipt of step 02 says it depended on; {} where there is none."""
    try:
        parts = files.read_json(run.layout.receipt("02"))["parts"]
        return {name: parts[name] for name in JUDGED_PARTS}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def _flat(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, item in value.items():
        if isinstance(item, Mapping):
            flat |= _flat(item, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = item
    return flat


def _subject(run: Results) -> dict[str, Any]:
    model = run.document["model"]
    return {
        "path": str(run.path),
        "model": model.get("name"),
        "revision": model.get("revision"),
        "dtypes": run.dtypes,
        "written": run.document.get("written"),
        "boundby_version": run.document.get("boundby_version"),
        "machine_fingerprint": run.document["machine_fingerprint"],
        "work_fingerprint": run.document["work_fingerprint"],
    }


def _listed(points: Iterable[Point]) -> str:
    return ", ".join(f"{dtype} {size}" for dtype, size in points) or "none"
