"""Why a variant is faster or not: what kinds of its operators take, beside those of the variant it differs from."""

from collections.abc import Mapping, Sequence

from boundby.formatting import times
from utils.baseline import Change, Factor, VariantRow

Operators = dict[str, float]  # seconds by kind, which add up to the forward
MATMUL, ATTENTION, DISPATCH, BETWEEN, QUANTIZATION, OTHER = (
    "matmul", "attention", "dispatch", "between", "quantization", "other"
)  # fmt: skip
WORDS = {
    MATMUL: "matmul",
    ATTENTION: "attention",
    "activation": "activations",
    "copies": "copies",
    OTHER: "normalization and elementwise",
    QUANTIZATION: "quantize/dequantize",
    DISPATCH: "dispatch overhead",
    BETWEEN: "all but matmul and attention",
}
SEEN = 0.05  # of the time, which a kind must have to be told
NEW = 0.1  # of what it takes now at most, before, of a kind that is said to be new
CHANGED = 1.1  # times as fast or as slow, to be told as such


def beside(before: Operators | None, after: Operators | None) -> dict[str, Change]:
    """Return each kind with its seconds before and after; {} where one of them is not known."""
    if not before or not after:
        return {}
    if BETWEEN in after and BETWEEN not in before:
        same = {kind: seconds for kind, seconds in before.items() if kind in (MATMUL, ATTENTION)}
        before = {**same, BETWEEN: sum(before.values()) - sum(same.values())}
    kinds = [kind for kind in WORDS if kind in before or kind in after]
    return {kind: {"before_s": before.get(kind, 0.0), "after_s": after.get(kind, 0.0)} for kind in kinds}


def sentence(row: VariantRow, is_alone: bool = False) -> str | None:
    """Return which operators got faster and which did not; None where that is not known."""
    changes: Mapping[str, Change] = row.get("operators") or {}
    before, after = (sum(change[end] for change in changes.values()) for end in ("before_s", "after_s"))
    if not before or not after:
        return None
    gain = row.get("gain_over_base")
    if gain and _contradicts(before / after, gain):
        return f"its operators on some texts do not show it: there they were {times(before / after)}× as fast"
    faster, slower, same, new = list[str](), list[str](), list[str](), list[str]()
    same_s = 0.0
    for kind, change in sorted(changes.items(), key=lambda item: -max(item[1]["before_s"], item[1]["after_s"])):
        then, now = change["before_s"], change["after_s"]
        words = WORDS.get(kind, kind)  # of a file of another version
        if then < SEEN * before and now < SEEN * after:
            continue
        if then < NEW * now:
            new.append(f"{words}: {100 * now / after:.0f} % of the time now")
        elif then >= CHANGED * now:
            faster.append(f"{words} {times(then / now)}× faster" if now else f"{words} gone")
        elif now >= CHANGED * then:
            slower.append(f"{words} {times(now / then)}× slower ({100 * now / after:.0f} % of the time now)")
        else:
            same.append(words)
            same_s += now
    unchanged = f"not {_listed(same, 'nor')}: {100 * same_s / after:.0f} % of the time now" if same and faster else ""
    as_before = "" if faster or slower or new else "every kind of operator takes what it took"
    added = f"new is {_listed(new, 'and')}" if new else ""
    gained, lost = [", ".join(faster), unchanged], [", ".join(slower), added]
    parts = gained + lost if after <= before else lost + gained
    said = "; ".join(part for part in (*parts, as_before) if part)
    if row.get("base") != "unsorted" or is_alone:  # one text has no padding
        return said
    return f"{'less padding' if row.get('is_padded') else 'fewer tokens, since nothing is padded'}: {said}"


def _contradicts(factor: float, gain: Factor) -> bool:
    """Tell whether some texts got faster or slower by a factor that the gain over all texts does not have."""
    if gain["low"] > 1 / CHANGED and gain["high"] < CHANGED:
        return not CHANGED**-2 < factor < CHANGED**2
    return factor > CHANGED if gain["high"] < 1 else gain["low"] > 1 and factor < 1 / CHANGED


def _listed(words: Sequence[str], last: str) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} {last} {words[-1]}"
