"""What there is to say about runs against a first one: which may be compared, what is faster, and what differs."""

import csv
import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from string import ascii_uppercase
from typing import Any, NotRequired, TypedDict

import msgspec
import numpy as np

from boundby import files
from boundby.machine import Disturbance
from boundby.timing import (
    MINIMUM_EFFECT,
    Comparison,
    Contrast,
    PairedShares,
    Totals,
    estimate,
    independent,
    judge,
    paired,
    paired_shares,
    reach,
    rounds_for_same,
    rounds_to_find,
)
from utils.baseline import (
    LEAST_ROUNDS,
    MEASURED,
    ROUNDS_PER_S,
    Device,
    Document,
    Model,
    NonNegative,
    OtherVersion,
    Positive,
    Size,
    Status,
    Timing,
    Visit,
    read_document,
    throughput_rounds,
)
from utils.baseline import Row as SweepRow
from utils.command import METRICS_VERSION, EvaluationFolder, InputError, Layout
from utils.steps import steps

SCHEMA_VERSION = 1
JUDGED_PARTS = ("config", "code", "versions", "environment")  # of the receipt of step 02
MODEL_KEYS = ("name", "revision", "fingerprint", "parameters_total", "num_labels")
FINGERPRINTS = {
    "machine_fingerprint": "machine (hardware, driver, quota)",
    "work_fingerprint": "work (rows, labels, max_length, method)",
}
GATES = (0.05, 0.10)  # slowdowns for which a gate says what it takes
LEAST_QUIET = 3  # rounds; fewer give no interval worth having
SAME_SHARE = 0.9  # of the rows of two runs of the same work that should be the same
LEAST_SHARDS = 5  # as rounds: an interval from fewer says next to nothing

Point = tuple[str, int]  # dtype and batch size
RECORDED = (Disturbance("recorded", "recorded in raw_samples.csv"),)  # type: ignore[arg-type]  # no kind is recorded


class Rounds(msgspec.Struct, frozen=True):
    """What the rounds at one dtype and batch size say: `seconds` per sample of those that count, by their number.

    Rounds that nothing disturbed count, where there are `LEAST_QUIET`; else all do, `disturbed` of them, and no verdict
    rests on them. `batches` has a digest of the places of those that each round timed, with their padded tokens.
    """

    seconds: dict[int, Positive]
    disturbed: int = 0
    batches: dict[int, str] = {}

    @classmethod
    def of(cls, visits: Sequence[Visit]) -> "Rounds":
        """Return what these visits of one dtype and batch size say."""
        quiet = [visit for visit in visits if not visit.is_disturbed]
        counted = quiet if len(quiet) >= LEAST_QUIET else list(visits)
        values = throughput_rounds(counted)
        return cls(
            dict(zip((visit.round for visit in counted), values, strict=True)) if values else {},
            sum(visit.is_disturbed for visit in counted),
            {
                visit.round: _digest(sorted({(timing.index, timing.tokens_padded) for timing in visit.of("isolated")}))
                for visit in visits
            },
        )

    def timed_as(self, other: "Rounds") -> bool:
        """Tell whether both timed the same batches, as far as both have rounds."""
        common = self.batches.keys() & other.batches.keys()
        return all(self.batches[number] == other.batches[number] for number in common)


class Shards(msgspec.Struct, frozen=True):
    """The seconds of each shard of a pass over the dataset, and a digest of which rows each holds."""

    rows: str
    seconds: tuple[float, ...]


class Marks(msgspec.Struct, frozen=True):
    """Which of `n` predictions were right, a bit each, packed; `digest` is that of their rows with their labels.

    A saved baseline keeps no `rows`: its marks can be held against those of equal rows alone.
    """

    digest: str
    n: Size
    packed: bytes
    rows: tuple[tuple[int, str], ...] | None = None

    @classmethod
    def of(cls, rows: Sequence[tuple[int, str]], right: Sequence[bool]) -> "Marks":
        """Return the marks of these rows."""
        bits = np.packbits(np.asarray(right, dtype=bool)).tobytes()
        return cls(_digest(tuple(rows)), len(right), zlib.compress(bits, 9), tuple(rows))

    def right(self) -> list[bool]:
        """Return which were right, in the order of the rows. Raises ValueError where the bits are damaged."""
        try:
            bits = zlib.decompressobj().decompress(self.packed, self.n // 8 + 1)
        except zlib.error as error:
            raise ValueError(f"the marks cannot be unpacked: {error}") from None
        return np.unpackbits(np.frombuffer(bits, dtype=np.uint8), count=self.n).astype(bool).tolist()


@dataclass(frozen=True)
class Results:
    """One run: where it lies, its document, by dtype and batch size what each round says, and the letter it goes by.

    `shards` and `marks` are those of the pass over the dataset, None where there are none; `parts` is what step 02 says
    it depended on, None where it has not finished.
    """

    path: Path
    document: Document
    points: Mapping[Point, Rounds]
    shards: Shards | None = None
    marks: Marks | None = None
    parts: Mapping[str, object] | None = None
    name: str = "A"

    @property
    def rows(self) -> dict[Point, SweepRow]:
        """The rows of the document by dtype and batch size."""
        return {(row["dtype"], row["batch_size"]): row for row in self.document["batch_sizes"]}

    @property
    def dtypes(self) -> list[str]:
        """The dtypes of the sweep in their order."""
        return list(dict.fromkeys(row["dtype"] for row in self.document["batch_sizes"]))


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

    def as_dict(self) -> dict[str, object]:
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

    def as_dict(self) -> dict[str, object]:
        """Return the comparison as plain values; shares, not percent."""
        return {**asdict(self.shares), "verdict": self.verdict, "doubts": list(self.doubts)}


@dataclass(frozen=True)
class Change:
    """Something that is not the same in both runs, and so may be what is judged."""

    name: str
    a: object
    b: object


@dataclass(frozen=True)
class Unpaired:
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
    """Everything that is said about a run `b` against the first, `a`."""

    a: Results
    b: Results
    minimum_effect: float
    rows: tuple[Row, ...]
    accuracy: Accuracy | None
    missing: tuple[Unpaired, ...]
    changes: tuple[Change, ...]
    doubts: tuple[str, ...]

    def of(self, verdict: str) -> list[Row]:
        """Return the rows with this verdict."""
        return [row for row in self.rows if row.verdict == verdict]

    @property
    def verdict(self) -> str:
        """The headline: regression, improved, ambiguous, same, or not judged; the first of these that holds."""
        accuracy = self.accuracy.verdict if self.accuracy else None
        if self.of("slower") or accuracy == "loss" or any(point.is_loss for point in self.missing):
            return "regression"
        if self.of("faster") or accuracy == "gain":
            return "improved"
        return next((verdict for verdict in ("ambiguous", "same") if self.of(verdict)), "not judged")

    def is_finding(self, strict: bool = False) -> bool:
        """Tell whether B is a regression; with `strict`, or whether that is open in any row."""
        return self.verdict == "regression" or (strict and bool(self.of("ambiguous")))

    def as_dict(self) -> dict[str, object]:
        """Return the comparison as plain values."""
        return {
            "schema_version": SCHEMA_VERSION,
            "verdict": self.verdict,
            "minimum_effect_pct": 100 * self.minimum_effect,
            "a": _subject(self.a),
            "b": _subject(self.b),
            "rows": [row.as_dict() for row in self.rows],
            "accuracy": self.accuracy.as_dict() if self.accuracy else None,
            "missing": [vars(point) | {"is_loss": point.is_loss} for point in self.missing],
            "changes": [vars(change) for change in self.changes],
            "doubts": list(self.doubts),
        }


class ComparedRow(TypedDict):
    """What a comparison reads of a batch size."""

    dtype: str
    batch_size: Size
    status: Status
    doubts: list[str]
    whole: NotRequired[Totals]
    rounds: NotRequired[Size | None]
    timed_batches: NotRequired[Size | None]
    throughput_half_width_pct: NotRequired[NonNegative | None]
    latency_per_batch_ms_mean: NotRequired[NonNegative | None]


class ComparedPass(TypedDict):
    """What a comparison reads of the pass over the dataset."""

    throughput_samples_per_sec: Positive
    dtype: str


class Compared(TypedDict):
    """What a comparison reads of `baseline_metrics.json`."""

    machine_fingerprint: str | None
    work_fingerprint: str | None
    model: Model
    device: Device
    batch_sizes: list[ComparedRow]
    full_dataset_metrics: ComparedPass | None


def compare(
    runs: Sequence[Results], minimum_effect_pct: float | None = None, *, force: bool = False
) -> list[RunComparison]:
    """Return what there is to say about each further run against the first; the rows of all are judged together.

    Without a minimum effect that of the devices is used. Raises InputError where machine or work differ, unless `force`
    turns that into a doubt, and where a run has no batch size in common with the first.
    """
    if minimum_effect_pct is not None and not 0 < minimum_effect_pct < math.inf:
        raise InputError(f"--minimum-effect is {minimum_effect_pct:g}; give a percentage above 0, such as 2")
    if not 2 <= len(runs) <= len(ascii_uppercase):
        raise InputError(
            f"a comparison takes 2 to {len(ascii_uppercase)} results folders, --baseline is one; {len(runs)} given"
        )
    a, *others = (replace(run, name=name) for run, name in zip(runs, ascii_uppercase, strict=False))
    doubts = [tuple([*_differing_ground(a, b, force), *_unfinished(a, b)]) for b in others]
    documents = [run.document for run in runs]
    least = minimum_effect_pct / 100 if minimum_effect_pct else minimum_effect(*documents)
    rows = between_runs(a, others, least)
    for b, own in zip(others, rows, strict=True):
        if not own:
            raise InputError(
                f"{a.path} and {b.path} have no dtype and batch size in common that both have measured; "
                f"{a.name} has {_listed(a.points)}, {b.name} has {_listed(b.points)}"
            )
    return [
        RunComparison(a, b, least, tuple(own), accuracy(a, b), _missing(a, b), _changes(a, b), beware)
        for b, own, beware in zip(others, rows, doubts, strict=True)
    ]


def plain(comparisons: Sequence[RunComparison]) -> dict[str, Any]:
    """Return one comparison, or several, as plain values for JSON."""
    first, *others = (comparison.as_dict() for comparison in comparisons)
    return {"schema_version": SCHEMA_VERSION, "comparisons": [first, *others]} if others else first


def read(path: Path, layout: Layout) -> Results:
    """Return the run in the folder `path`, or of the metrics file `path`; `layout` gives the names of its files.

    Raises InputError where there is none, or where it cannot be read.
    """
    folder, metrics = (path, path / layout.metrics.name) if path.is_dir() else (path.parent, path)
    layout = replace(layout, results=folder, metrics=metrics)
    document = _document(metrics)
    try:
        measured = {(row["dtype"], row["batch_size"]) for row in document["batch_sizes"] if row["status"] in MEASURED}
        with files.naming(layout.raw_samples), layout.raw_samples.open(encoding="utf-8", newline="") as file:
            visits = visits_of(csv.DictReader(file), document)
    except FileNotFoundError:
        raise InputError(f"{layout.raw_samples} is missing; a comparison needs every timing of the sweep") from None
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"{folder}: its metrics and {layout.raw_samples.name} cannot be read: {error!r}") from None
    points = rounds_of(visit for visit in visits if _point(visit) in measured)
    return Results(path, document, points, _shards(layout), _marks(layout), _parts(layout))


def visits_of(rows: Iterable[Mapping[str, str]], document: Document) -> list[Visit]:
    """Return the visits whose timings are these rows of `raw_samples.csv`; `document` is that of their run."""
    wholes = {
        (row["dtype"], row["batch_size"]): Totals(**row["whole"]) for row in document["batch_sizes"] if "whole" in row
    }
    timings: dict[tuple[str, int, int], list[Timing]] = {}
    sessions: dict[tuple[str, int, int], str] = {}
    disturbed: set[tuple[str, int, int]] = set()
    for row in rows:
        key = row["dtype"], int(row["batch_size"]), int(row["round"])
        sessions[key] = row["session"]
        if row["disturbed"] == "1":
            disturbed.add(key)
        timings.setdefault(key, []).append(
            Timing(
                quantity=row["quantity"],  # type: ignore[arg-type]
                index=int(row["index"]),
                seconds=float(row["seconds"]),
                samples=int(row["samples"]),
                tokens_real=int(row["tokens_real"]),
                tokens_padded=int(row["tokens_padded"]),
            )
        )
    return [
        Visit(
            *key,
            "ok",
            sessions[key],
            tuple(readings),
            disturbances=RECORDED if key in disturbed else (),
            whole=wholes.get(key[:2]),
        )
        for key, readings in timings.items()
    ]


def rounds_of(visits: Iterable[Visit]) -> dict[Point, Rounds]:
    """Return what the rounds say, by dtype and batch size."""
    by_point: dict[Point, list[Visit]] = {}
    for visit in visits:
        by_point.setdefault(_point(visit), []).append(visit)
    rounds = {point: Rounds.of(made) for point, made in by_point.items()}
    return {point: made for point, made in rounds.items() if made.seconds}


def _shards(layout: Layout) -> Shards | None:
    """Return the shards of the pass over the dataset; None where the folder has no complete set. Raises OSError."""
    from utils.evaluation import parts, plan  # with pyarrow, which a comparison of sweeps does without

    folder = EvaluationFolder(layout.evaluation)
    try:
        planned = plan.load(folder)
    except InputError:
        return None
    records = [parts.load_record(folder, planned, shard) for shard in planned.shards]
    identity = planned.identity
    rows = _digest([identity.dataset_sha256, identity.sample_seed, msgspec.to_builtins(planned.shards)])
    return Shards(rows, tuple(record.seconds for record in records if record)) if all(records) else None


def _marks(layout: Layout) -> Marks | None:
    """Return which predictions were right; None where the folder has no predictions with labels."""
    path = layout.predictions
    try:
        with files.naming(path), path.open(encoding="utf-8", newline="") as file:
            rows = csv.DictReader(file)  # without labels nothing is right or wrong
            known = [(int(row["row_id"]), row["label_name"], row["correct"] == "1") for row in rows if row["correct"]]
    except FileNotFoundError:
        return None
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"{path} cannot be read: {error!r}") from None
    if not known:
        return None
    return Marks.of([(number, label) for number, label, _ in known], [right for *_, right in known])


def _digest(value: object) -> str:
    return files.sha256_of(value)[:16]


def _document(path: Path) -> Document:
    try:
        return read_document(path, METRICS_VERSION, Compared)
    except FileNotFoundError:
        raise InputError(f"{path} is missing; give a results folder in which step 02 has run") from None
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read: {error}; measure again (step 02)") from None
    except OtherVersion:
        raise InputError(
            f"{path} is not a metrics file of schema version {METRICS_VERSION}; measure again (step 02)"
        ) from None


def _point(visit: Visit) -> Point:
    return visit.dtype, visit.batch_size


def pair_dtypes(a: Sequence[str], b: Sequence[str]) -> list[tuple[str, str]]:
    """Return which dtype of A is compared with which of B: equal ones, or the only one of each."""
    if len(a) == len(b) == 1:
        return [(a[0], b[0])]
    return [(dtype, dtype) for dtype in a if dtype in b]


def minimum_effect(*documents: Document) -> float:
    """Return the least difference worth a verdict on the devices of these documents, as a share; the largest counts."""
    kinds = [document["device"].get("type") for document in documents]
    return max(MINIMUM_EFFECT.get(kind, max(MINIMUM_EFFECT.values())) for kind in kinds)


def between_runs(a: Results, others: Sequence[Results], least_effect: float) -> list[list[Row]]:
    """Return for each other run a row for each batch size that A has too, and one for the dataset if both passed it."""
    unjudged = [[*_points_between(a, b), *_pass_between(a, b)] for b in others]
    judged = iter(judge([contrast for own in unjudged for _, contrast in own if contrast], least_effect))
    return [[_judged(row, next(judged)) if contrast else row for row, contrast in own] for own in unjudged]


def _points_between(a: Results, b: Results) -> Iterator[tuple[Row, Contrast]]:
    for dtype_a, dtype_b in pair_dtypes(a.dtypes, b.dtypes):
        for first in a.points:
            second = dtype_b, first[1]
            if first[0] == dtype_a and second in b.points:
                rounds = a.points[first], b.points[second]
                contrast = _independent(*rounds, (a.name, b.name))
                yield _row((first, second), rounds, _doubts(a, first, b, second)), contrast


def _pass_between(a: Results, b: Results) -> Iterator[tuple[Row, Contrast | None]]:
    if row := _whole_dataset(a, b):
        yield row, _shard_contrast(a, b)


def _judged(row: Row, comparison: Comparison) -> Row:
    return replace(row, time_ratio=comparison.ratio, comparison=comparison, reason=None)


def between_dtypes(document: Document, points: Mapping[Point, Rounds]) -> list[Row]:
    """Return each further dtype of one run against its first, batch size by batch size.

    Dtypes take turns within a round, so that they are compared round by round, where enough rounds have both.
    `points` is what `rounds_of` returns. A is the first dtype of every row.
    """
    dtypes = list(dict.fromkeys(row["dtype"] for row in document["batch_sizes"]))
    sizes = list(dict.fromkeys(row["batch_size"] for row in document["batch_sizes"]))
    pairs = [((dtypes[0], size), (dtype, size)) for dtype in dtypes[1:] for size in sizes]
    pairs = [pair for pair in pairs if pair[0] in points and pair[1] in points]
    contrasts = [_side_by_side(points[first], points[second]) for first, second in pairs]
    judged = judge(contrasts, minimum_effect(document))
    rows = (_row(pair, (points[pair[0]], points[pair[1]])) for pair in pairs)
    return [_judged(row, comparison) for row, comparison in zip(rows, judged, strict=True)]


def _independent(a: Rounds, b: Rounds, names: tuple[str, str] = ("A", "B")) -> Contrast:
    """Return the contrast of two runs; without an interval where disturbed rounds stand for either."""
    return _undisturbed(independent([*a.seconds.values()], [*b.seconds.values()]), a, b, names)


def _side_by_side(a: Rounds, b: Rounds) -> Contrast:
    """Return the contrast of two dtypes of one run, paired by round where five rounds or more have both."""
    common = [number for number in a.seconds if number in b.seconds]
    if len(common) < LEAST_ROUNDS:
        return _independent(a, b)
    sides = ([rounds.seconds[number] for number in common] for rounds in (a, b))
    return _undisturbed(paired(*sides), a, b)


def _undisturbed(contrast: Contrast, a: Rounds, b: Rounds, names: tuple[str, str] = ("A", "B")) -> Contrast:
    """Return the contrast without an interval where disturbed rounds count: how far they are off nobody knows."""
    sides = zip(names, (a, b), strict=True)
    counts = [f"{made.disturbed} of {len(made.seconds)} in {side}" for side, made in sides if made.disturbed]
    if not counts:
        return contrast
    reason = f"something else used the machine in too many rounds: {', '.join(counts)}; measure again when it is quiet"
    return replace(contrast, error=None, freedom=None, variances=None, reason=reason)


@dataclass(frozen=True)
class Budget:
    """What a sweep must spend so that a second one of the same work gives an answer in nine of ten rows.

    `enough` of `rows` measured ones have it already; `max_seconds` is that of the settings, None where rounds vary too
    much for any.
    """

    rows: int
    enough: int
    max_seconds: float | None

    @property
    def is_met(self) -> bool:
        """Whether nine of ten rows have it."""
        return self.enough >= SAME_SHARE * self.rows

    def text(self, minimum_effect: float) -> str:
        """Return what to set so that equal runs are found the same, as one line."""
        now = f"{self.enough} of {self.rows} batch sizes" if self.enough else "no batch size"
        same = f"two runs of this work would be the same within {100 * minimum_effect:g} % at {now}"
        if self.max_seconds is None:
            return f"{same}; rounds vary too much here for a budget that would do better: quiet the machine"
        return f"{same}; at nearly all with profiling.max_seconds_per_batch_size={self.max_seconds:.0f}"


def budget_for_same(document: Document) -> Budget | None:
    """Return the budget to find equal runs the same, by how much the rounds of this one varied; None if unknown."""
    least = minimum_effect(document)
    return _budget(document, lambda spread, tests: rounds_for_same(spread, least))


def gate_text(document: Document, least: float | None = None) -> str | None:
    """Return what a later run must spend for a gate to catch a slowdown of `GATES`, as one line; None if unknown.

    Every row of a gate is to catch it nine times in ten, with the minimum effect `least`, or that of the device.
    """
    least = least or minimum_effect(document)
    gates = []
    for effect in GATES:
        budget = _budget(document, lambda spread, tests, effect=effect: rounds_to_find(spread, effect, least, tests))
        if budget is None:
            return None
        if effect <= least:
            what = f"at most half the time, whatever is spent: --minimum-effect is {100 * least:g}"
        elif budget.max_seconds is None:
            what = "not reliably with any budget here: rounds vary too much, quiet the machine"
        elif budget.enough == budget.rows:
            what = "with the budget of this run"
        else:
            what = f"with profiling.max_seconds_per_batch_size={budget.max_seconds:.0f} in both runs"
            what += f" (this one: {budget.enough} of {budget.rows} batch sizes)"
        gates.append(f"a slowdown of {100 * effect:g} % {what}")
    return f"found in nine of ten runs: {'; '.join(gates)}"


def _budget(document: Document, rounds_for: Callable[[float, int], int | None]) -> Budget | None:
    """Return the budget for the rounds that `rounds_for` asks for, by the spread of rounds and the number of rows."""
    judged = [
        (row, half_width, rounds)
        for row in document["batch_sizes"]
        if row["status"] in MEASURED
        and (half_width := row.get("throughput_half_width_pct")) is not None
        and (rounds := row.get("rounds"))
    ]
    needs, enough = list[float](), 0
    for row, half_width, rounds in judged:
        needed = rounds_for(max(half_width / 100 / reach(1.0, rounds), 1e-6), len(judged))
        if needed is None:
            needs.append(math.inf)
            continue
        enough += needed <= rounds
        timed_s = (row["timed_batches"] or 0) / rounds * (row["latency_per_batch_ms_mean"] or 0.0) / 1e3
        typical_s = max(row.get("reference_ms") or 0.0, 100.0) / 1e3  # which a visit also runs untimed, to keep warm
        is_queued = row.get("enqueue_per_batch_ms") is not None  # on a GPU, where all batches run once more in a row
        visit_s = (2 if is_queued else 1) * timed_s + 2 * typical_s
        needs.append(max(needed * visit_s, needed / ROUNDS_PER_S))
    if not needs:
        return None
    return Budget(len(needs), enough, None if math.inf in needs else float(math.ceil(max(needs))))


def accuracy(a: Results, b: Results) -> Accuracy | None:
    """Return how the accuracy differs on the rows both have predicted; None where there are none.

    A row with another label in B is another row: it is left out, like one that only one run has predicted.
    """
    if a.marks is None or b.marks is None:
        return None
    if a.marks.digest == b.marks.digest:
        return Accuracy(paired_shares(a.marks.right(), b.marks.right()))
    if a.marks.rows is None or b.marks.rows is None:
        return None
    first, second = (dict(zip(run.marks.rows, run.marks.right(), strict=True)) for run in (a, b))
    common = [row for row in first if row in second]
    if not common:
        return None
    alone = len(first) + len(second) - 2 * len(common)
    doubts = (f"{alone} row(s) of one run have no row of equal id and label in the other and are left out",)
    return Accuracy(paired_shares([first[row] for row in common], [second[row] for row in common]), doubts)


def _row(pair: tuple[Point, Point], rounds: tuple[Rounds, Rounds], doubts: tuple[str, ...] = ()) -> Row:
    (dtype_a, size), (dtype_b, _) = pair
    rates = [1 / estimate([*made.seconds.values()]).value for made in rounds]
    return Row(dtype_a, dtype_b, size, rates[0], rates[1], time_ratio=rates[0] / rates[1], doubts=doubts)


def _doubts(a: Results, first: Point, b: Results, second: Point) -> tuple[str, ...]:
    sides = ((a.name, a.rows[first]), (b.name, b.rows[second]))
    doubts = [f"{side}: {doubt}" for side, row in sides for doubt in row.get("doubts", ())]
    if not a.points[first].timed_as(b.points[second]):
        doubts.append("texts: the two runs timed other batches, so that the choice of texts is part of the difference")
    return tuple(doubts)


def _whole_dataset(a: Results, b: Results) -> Row | None:
    """Return the pass over the dataset as it stands in both documents, not judged yet; None if one has not made it."""
    first, second = a.document["full_dataset_metrics"], b.document["full_dataset_metrics"]
    if not first or not second:
        return None
    rates = first["throughput_samples_per_sec"], second["throughput_samples_per_sec"]
    reason = f"no interval without {LEAST_SHARDS} or more shards that are the same in both runs"
    return Row(first["dtype"], second["dtype"], None, *rates, time_ratio=rates[0] / rates[1], reason=reason)


def _shard_contrast(a: Results, b: Results) -> Contrast | None:
    if not a.shards or not b.shards or a.shards.rows != b.shards.rows or len(a.shards.seconds) < LEAST_SHARDS:
        return None
    return paired(a.shards.seconds, b.shards.seconds)


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
        f"{run.name}: step 02 had not finished when this was written"
        for run in (a, b)
        if run.document.get("complete") is False
    ]


def _missing(a: Results, b: Results) -> tuple[Unpaired, ...]:
    """Return the points that only one run has measured, in the order of the sweeps; A's dtype names a mapped pair."""
    to_b = dict(pair_dtypes(a.dtypes, b.dtypes))
    to_a = {second: first for first, second in to_b.items()}
    known_a = {point: row["status"] for point, row in a.rows.items()}
    known_b = {(to_a.get(dtype, dtype), size): row["status"] for (dtype, size), row in b.rows.items()}
    return tuple(
        Unpaired(*point, known_a.get(point), known_b.get(point))
        for point in dict.fromkeys([*known_a, *known_b])
        if (known_a.get(point) in MEASURED) != (known_b.get(point) in MEASURED)
    )


def _changes(a: Results, b: Results) -> tuple[Change, ...]:
    """Return by dotted name what is not the same and is what a comparison is made to judge."""
    parts_a, parts_b = (a.parts, b.parts) if a.parts and b.parts else ({}, {})
    first, second = _flat({**_facts(a), **parts_a}), _flat({**_facts(b), **parts_b})
    return tuple(
        Change(name, first.get(name), second.get(name))
        for name in dict.fromkeys([*first, *second])
        if first.get(name) != second.get(name)
    )


def _facts(run: Results) -> dict[str, object]:
    document = run.document
    return {
        "model": {key: document["model"].get(key) for key in MODEL_KEYS},
        "dtypes": ", ".join(run.dtypes),
        "boundby_version": document.get("boundby_version"),
    }


def _parts(layout: Layout) -> dict[str, object] | None:
    """Return what the receipt of step 02 says it depended on; None where there is none. Raises OSError."""
    try:
        parts = steps.read(layout.receipt("02"), steps.Marker).parts
    except (FileNotFoundError, ValueError):
        return None
    return {name: getattr(parts, name) for name in JUDGED_PARTS}


def _flat(value: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    flat: dict[str, object] = {}
    for key, item in value.items():
        if isinstance(item, Mapping):
            flat |= _flat(item, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = item
    return flat


def _subject(run: Results) -> dict[str, object]:
    model = run.document["model"]
    return {
        "name": run.name,
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
