"""Times that a trace writes as decimal µs, as exact integer nanoseconds.

Older traces count µs since 1970, about 1.7e15, where neighbouring doubles are 250 ns apart: no parser of floats reads
them right.
"""

from collections.abc import Sequence
from decimal import Decimal

import numpy as np

LONGEST_DURATION_US = 2.0**46 / 1000  # 19 hours: the sum of 100,000 such durations is an int64 as well
LONGEST_US = 2.0**61 / 1000  # 73 years: int64 nanoseconds also hold the difference of two such times plus a third
MOST_DIGITS = 16  # of the whole µs below LONGEST_US
FRACTION_DIGITS = 3
PLAIN = np.zeros(256, dtype=np.int64)
PLAIN[list(b"0123456789.,")] = 1


def whole_nanoseconds(microseconds: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return durations of float µs as int64 ns, and a mask of the usable ones; others (NaN, over 19 hours) are 0."""
    usable = np.abs(microseconds) < LONGEST_DURATION_US
    microseconds = np.where(usable, microseconds, 0.0)
    whole = np.floor(microseconds)  # the product of the whole number and 1000 would lose nanoseconds above 4.5e12
    return whole.astype(np.int64) * 1000 + np.rint((microseconds - whole) * 1000).astype(np.int64), usable


def exact_nanoseconds(texts: Sequence[bytes]) -> tuple[np.ndarray, np.ndarray]:
    """Return decimal texts of µs as int64 ns without a detour over doubles that are too coarse, and the usable ones."""
    joined = b",".join(texts)
    characters = np.frombuffer(joined + b",", dtype=np.uint8)
    aligned = _aligned(characters, len(texts))
    if aligned is not None:
        return aligned, np.ones(len(texts), dtype=bool)
    end = np.flatnonzero(characters == ord(","))
    if len(end) != len(texts) or not len(texts):
        return _one_by_one(texts)
    start = np.concatenate([[0], end[:-1] + 1])
    point = end.copy()
    points = np.flatnonzero(characters == ord("."))
    of_row = np.searchsorted(end, points)
    point[of_row] = points
    odd = np.zeros(len(end), dtype=bool)  # a sign, an exponent, quotes, nothing at all, or too long
    if PLAIN @ np.bincount(characters, minlength=256) != len(characters):
        odd |= np.add.reduceat(PLAIN[characters] == 0, start) > 0
    if (of_row[1:] == of_row[:-1]).any():
        odd |= np.add.reduceat(characters == ord("."), start) > 1
    odd |= (point == start) | (point - start > MOST_DIGITS)
    found = _digit_by_digit(characters, start, point, end)
    usable = np.ones(len(end), dtype=bool)
    for row in np.flatnonzero(odd).tolist():
        found[row : row + 1], usable[row : row + 1] = _one_by_one([texts[row]])
    return found, usable


def _aligned(characters: np.ndarray, count: int) -> np.ndarray | None:
    """Return the numbers where all have as many digits before and behind the point; None where they do not.

    They do in traces that count from 1970, and in nearly all pieces of others: a tenth of the time of the general way.
    """
    width, rest = divmod(len(characters), max(count, 1))
    if rest or width < 2:
        return None
    table = characters.reshape(count, width)
    points = np.flatnonzero(table[0] == ord("."))
    point = int(points[0]) if len(points) == 1 else width - 1
    places = [place for place in range(width - 1) if place != point]
    digits = table[:, places] - np.uint8(ord("0"))  # what is no digit wraps around, above 9
    is_aligned = (table[:, -1] == ord(",")).all() and (table[:, point] == table[0, point]).all()
    if len(points) > 1 or not 0 < point <= MOST_DIGITS or not is_aligned or digits.max() > 9:
        return None
    found = np.zeros(count, dtype=np.int64)
    for place in range(point + FRACTION_DIGITS):
        found *= 10
        if place < len(places):
            found += digits[:, place]
    return found + (digits[:, point + FRACTION_DIGITS] >= 5 if len(places) > point + FRACTION_DIGITS else 0)


def _digit_by_digit(characters: np.ndarray, start: np.ndarray, point: np.ndarray, end: np.ndarray) -> np.ndarray:
    """Return the numbers whose digits stand from `start` to `point` and behind it to `end`, times 1000 and rounded."""
    digits = characters.astype(np.int64) - ord("0")
    found = np.zeros(len(end), dtype=np.int64)
    length = point - start
    last = len(digits) - 1
    for place in range(min(int(length.max()), MOST_DIGITS)):
        there = length > place
        found = np.where(there, 10 * found + digits[np.minimum(start + place, last)], found)
    for place in range(1, FRACTION_DIGITS + 1):
        at = point + place
        found = 10 * found + np.where(at < end, digits[np.minimum(at, last)], 0)
    after = point + FRACTION_DIGITS + 1
    return found + ((after < end) & (digits[np.minimum(after, last)] >= 5))


def _one_by_one(texts: Sequence[bytes]) -> tuple[np.ndarray, np.ndarray]:
    found = np.zeros(len(texts), dtype=np.int64)
    usable = np.zeros(len(texts), dtype=bool)
    for row, text in enumerate(texts):
        try:
            microseconds = Decimal(bytes(text).decode().strip('"'))
            if microseconds.is_finite() and abs(microseconds) < LONGEST_US:
                found[row] = int((microseconds * 1000).to_integral_value())
                usable[row] = True
        except (ArithmeticError, UnicodeDecodeError):  # no number, or one with an absurd exponent
            continue
    return found, usable
