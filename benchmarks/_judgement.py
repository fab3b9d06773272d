"""What the attempts of `repeatability.py` amount to: plain numbers in, plain sentences out."""

from collections.abc import Sequence
from statistics import median

WITHIN = 0.03  # of the plain loop, by the median over the repeats


def spread(values: Sequence[float]) -> float | None:
    """Return the range of the values as a share of their median; None where there are fewer than two."""
    return (max(values) - min(values)) / median(values) if len(values) > 1 else None


def ratios(ours: Sequence[float | None], theirs: Sequence[float | None]) -> list[float]:
    """Return ours over theirs for every repeat in which both have a value."""
    return [mine / other for mine, other in zip(ours, theirs, strict=True) if mine is not None and other is not None]


def says_disturbed(doubts: Sequence[str]) -> bool:
    """Tell whether any doubt of a row says that the measurement was disturbed."""
    return any("disturbed" in doubt.lower() for doubt in doubts)


def failures(
    ours: Sequence[float | None], plain: Sequence[float | None], disturbed_doubts: Sequence[str] | None
) -> list[str]:
    """Return what falls short, one sentence each; [] where all holds.

    `ours` and `plain` hold the samples per second of each repeat, None for an attempt without a value;
    `disturbed_doubts` are those of our row with one core loaded, None where that run gave no row.
    """
    found = [
        f"{name} gave no value in {missing} of {len(values)} repeats"
        for name, values in (("ours", ours), ("the plain loop", plain))
        if (missing := sum(value is None for value in values))
    ]
    found += _off(ratios(ours, plain))
    found += _wider(spread(_known(ours)), spread(_known(plain)))
    if disturbed_doubts is None:
        found.append("ours gave no row with one core loaded")
    elif not says_disturbed(disturbed_doubts):
        found.append("with one core loaded by another process our row has no doubt that says 'disturbed'")
    return found


def _off(each: Sequence[float]) -> list[str]:
    if each and abs(median(each) - 1) > WITHIN:
        return [f"ours is {100 * (median(each) - 1):+.1f} % from the plain loop, allowed are {100 * WITHIN:.0f} %"]
    return []


def _wider(ours: float | None, plain: float | None) -> list[str]:
    if ours is not None and plain is not None and ours > plain:
        return [f"ours spreads over {100 * ours:.1f} %, the plain loop over {100 * plain:.1f} %"]
    return []


def _known(values: Sequence[float | None]) -> list[float]:
    return [value for value in values if value is not None]
