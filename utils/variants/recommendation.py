"""The rule by which a variant is recommended: it keeps enough of the answers, and needs least for a million texts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from boundby.inference import ExactnessReport
from boundby.work import Interval

Kind = Literal["same_arithmetic", "reduced", "other_model"]
MILLION = 1_000_000
AS_GOOD = 1.02  # of the throughput: a simpler variant that may be this close is taken instead


@dataclass(frozen=True)
class Tolerance:
    """What may change: the least share of labels as in the reference, and the most that accuracy may fall."""

    min_agreement: float
    max_accuracy_drop: float


@dataclass(frozen=True)
class Candidate:
    """A variant as the rule sees it. `is_usable`: settings of the pipeline, or lines of a program, compute so."""

    name: str
    texts_per_s: float
    one_off_s: float
    report: ExactnessReport
    kind: Kind
    is_usable: bool

    @property
    def million_s(self) -> float:
        """Seconds for a million texts, getting ready included."""
        return self.one_off_s + MILLION / self.texts_per_s


@dataclass(frozen=True)
class Recommendation:
    """The variant to use, None where none keeps enough; and of each variant that does not, what speaks against it."""

    name: str | None
    against: Mapping[str, str]


def objection(report: ExactnessReport, kind: Kind, tolerance: Tolerance) -> str | None:
    """Return what speaks against these answers, None where they are good enough.

    Labels must agree with the reference's; of another model, whose accuracy is known, that counts instead. What is
    asked for must hold at the lower end of the 95 % interval, unless the arithmetic is the same.
    """
    counts_labels = kind != "other_model" or report.accuracy_difference is None
    is_exact = kind == "same_arithmetic"
    if counts_labels and (report.agreement if is_exact else report.agreement_low) < tolerance.min_agreement:
        sure = report.agreement < tolerance.min_agreement
        surely = "" if sure else f", of all texts surely {_percent(report.agreement_low)} or more"
        wanted = _percent(tolerance.min_agreement)
        return f"{_percent(report.agreement)} of {report.rows:,} labels stay{surely}; {wanted} are asked for"
    low = report.accuracy_difference if is_exact else report.accuracy_difference_low
    if low is not None and low < -tolerance.max_accuracy_drop:
        fell = f"accuracy changes by {100 * (report.accuracy_difference or 0):+.2f} points"
        return f"{fell} and may fall by {-100 * low:.2f}; at most {100 * tolerance.max_accuracy_drop:g} is allowed"
    return None


def recommend(
    candidates: Sequence[Candidate], factors: Mapping[tuple[str, str], Interval], tolerance: Tolerance
) -> Recommendation:
    """Return the recommended variant; `candidates` come simplest first.

    `factors` are the throughputs of the first of a pair over the second.
    """
    against = {
        candidate.name: said
        for candidate in candidates
        if (said := objection(candidate.report, candidate.kind, tolerance))
    }
    allowed = [candidate for candidate in candidates if candidate.is_usable and candidate.name not in against]
    if not allowed:
        return Recommendation(None, against)
    best = min(allowed, key=lambda candidate: candidate.million_s)
    simplest = next(
        candidate for candidate in allowed if candidate is best or factors[best.name, candidate.name].low <= AS_GOOD
    )
    return Recommendation(simplest.name, against)


def won_back_after(one_off_s: float, texts_per_s: float, reference_texts_per_s: float) -> int | None:
    """Return after how many texts getting ready has paid for itself; None where the variant is no faster."""
    saved_s = 1 / reference_texts_per_s - 1 / texts_per_s
    return None if saved_s <= 0 else int(one_off_s / saved_s) + 1


def _percent(share: float) -> str:
    return f"{100 * share:.2f} %"
