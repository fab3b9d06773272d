"""Judge two runs batch size by batch size, and over the whole dataset; all rows of a comparison are judged together."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from boundby.compare import (
    MINIMUM_EFFECT,
    Comparison,
    Contrast,
    PairedShares,
    independent,
    judge,
    paired,
    paired_shares,
)
from boundby.stats import estimate
from utils.comparison import results
from utils.comparison.results import Point, Results

LEAST_SHARDS = 5  # as rounds: an interval from fewer says next to nothing


@dataclass(frozen=True)
class Row:
    """One line of a comparison. `batch_size` is None for the pass over the whole dataset.

    `comparison` is None where the pass cannot be judged, and `reason` says why; `time_ratio` is there all the same.
    """

    dtype_a: str
    dtype_b: str
    batch_size: int | None
    samples_per_sec_a: float
    samples_per_sec_b: float
    time_ratio: float
    comparison: Comparison | None = None
    reason: str | None = None
    doubts: tuple[str, ...] = ()

    @property
    def verdict(self) -> str | None:
        """The verdict, None where the row is not judged."""
        return self.comparison.verdict if self.comparison else None

    def as_dict(self) -> dict[str, Any]:
        """Return the row as plain values."""
        judged = asdict(self.comparison) if self.comparison else dict.fromkeys(Comparison.__dataclass_fields__)
        return {
            "dtype_a": self.dtype_a,
            "dtype_b": self.dtype_b,
            "batch_size": self.batch_size,
            "throughput_a_samples_per_sec": self.samples_per_sec_a,
            "throughput_b_samples_per_sec": self.samples_per_sec_b,
            "time_ratio": self.time_ratio,
            "time_ratio_ci_low": judged["low"],
            "time_ratio_ci_high": judged["high"],
            "p_adjusted": judged["p_adjusted"],
            "verdict": judged["verdict"],
            "rounds_a": judged["rounds_a"],
            "rounds_b": judged["rounds_b"],
            "more_rounds": judged["more_rounds"],
            "reason": judged["reason"] if self.comparison else self.reason,
            "doubts": list(self.doubts),
        }


@dataclass(frozen=True)
class Accuracy:
    """The accuracy of both runs on the rows they have in common, and what may spoil the comparison."""

    shares: PairedShares
    doubts: tuple[str, ...] = ()

    @property
    def verdict(self) -> str:
        """Whether B is less or more accurate beyond doubt: loss, gain, or no clear difference."""
        return "loss" if self.shares.high < 0 else "gain" if self.shares.low > 0 else "no clear difference"

    def as_dict(self) -> dict[str, Any]:
        """Return the comparison as plain values; shares, not percent."""
        return {**asdict(self.shares), "verdict": self.verdict, "doubts": list(self.doubts)}


def pair_dtypes(a: Sequence[str], b: Sequence[str]) -> list[tuple[str, str]]:
    """Return which dtype of A is compared with which of B: equal ones, or the only one of each."""
    if len(a) == len(b) == 1:
        return [(a[0], b[0])]
    return [(dtype, dtype) for dtype in a if dtype in b]


def minimum_effect(*documents: Mapping[str, Any]) -> float:
    """Return the least difference worth a verdict on the devices of these documents, as a share; the largest counts."""
    kinds = [document["device"].get("type") for document in documents]
    return max(MINIMUM_EFFECT.get(kind, max(MINIMUM_EFFECT.values())) for kind in kinds)


def between_runs(a: Results, b: Results, least_effect: float) -> list[Row]:
    """Return a row for each batch size both have measured, and one for the pass over the dataset if both made one."""
    points = [
        ((dtype_a, size), (dtype_b, size))
        for dtype_a, dtype_b in pair_dtypes(a.dtypes, b.dtypes)
        for dtype, size in a.rounds
        if dtype == dtype_a and (dtype_b, size) in b.rounds
    ]
    contrasts = [independent(a.rounds[first], b.rounds[second]) for first, second in points]
    whole = _whole_dataset(a, b)
    shards = _shard_contrast(a, b) if whole else None
    judged = judge([*contrasts, shards] if shards else contrasts, least_effect)
    rows = [
        _row((first, second), (a.rounds[first], b.rounds[second]), comparison, _doubts(a, first, b, second))
        for (first, second), comparison in zip(points, judged[: len(points)], strict=True)
    ]
    if whole:
        rows.append(replace(whole, time_ratio=judged[-1].ratio, comparison=judged[-1]) if shards else whole)
    return rows


def between_dtypes(document: Mapping[str, Any], rounds: Mapping[Point, Sequence[float]]) -> list[dict[str, Any]]:
    """Return each further dtype of one run against its first, batch size by batch size, as plain rows.

    `rounds` holds the seconds per sample of each round (`results.rounds_of`). A is the first dtype of every row.
    """
    dtypes = list(dict.fromkeys(row["dtype"] for row in document["batch_sizes"]))
    sizes = list(dict.fromkeys(row["batch_size"] for row in document["batch_sizes"]))
    pairs = [((dtypes[0], size), (dtype, size)) for dtype in dtypes[1:] for size in sizes]
    pairs = [pair for pair in pairs if pair[0] in rounds and pair[1] in rounds]
    contrasts = [independent(rounds[first], rounds[second]) for first, second in pairs]
    judged = judge(contrasts, minimum_effect(document))
    return [
        _row(pair, (rounds[pair[0]], rounds[pair[1]]), comparison).as_dict()
        for pair, comparison in zip(pairs, judged, strict=True)
    ]


def accuracy(a: Results, b: Results) -> Accuracy | None:
    """Return how the accuracy differs on the rows both have predicted; None where there are none.

    A row with another label in B is another row: it is left out, like one that only one run has predicted.
    """
    first, second = results.predictions(a) or {}, results.predictions(b) or {}
    common = [row for row in first if row in second and first[row][0] == second[row][0]]
    if not common:
        return None
    alone = len(first) + len(second) - 2 * len(common)
    doubts = (f"{alone} row(s) of one run have no row of equal id and label in the other and are left out",)
    shares = paired_shares([first[row][1] for row in common], [second[row][1] for row in common])
    return Accuracy(shares, doubts if alone else ())


def _row(
    pair: tuple[Point, Point],
    rounds: tuple[Sequence[float], Sequence[float]],
    comparison: Comparison,
    doubts: tuple[str, ...] = (),
) -> Row:
    (dtype_a, size), (dtype_b, _) = pair
    rates = [1 / estimate(values).value for values in rounds]
    return Row(dtype_a, dtype_b, size, rates[0], rates[1], comparison.ratio, comparison, doubts=doubts)


def _doubts(a: Results, first: Point, b: Results, second: Point) -> tuple[str, ...]:
    sides = (("A", a.rows[first]), ("B", b.rows[second]))
    return tuple(f"{side}: {doubt}" for side, row in sides for doubt in row.get("doubts", ()))


def _whole_dataset(a: Results, b: Results) -> Row | None:
    """Return the pass over the dataset as it stands in both documents, not judged yet; None if one has not made it."""
    first, second = a.document["full_dataset_metrics"], b.document["full_dataset_metrics"]
    if not first or not second:
        return None
    rates = first["throughput_samples_per_sec"], second["throughput_samples_per_sec"]
    reason = f"no interval without {LEAST_SHARDS} or more shards that are the same in both runs"
    return Row(first["dtype"], second["dtype"], None, *rates, time_ratio=rates[0] / rates[1], reason=reason)


def _shard_contrast(a: Results, b: Results) -> Contrast | None:
    first, second = results.shards(a), results.shards(b)
    if not first or not second or first.identity != second.identity or len(first.seconds) < LEAST_SHARDS:
        return None
    return paired(first.seconds, second.seconds)
