"""What the rates of `evaluation.py` amount to: plain numbers in, plain sentences out."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

LEAST_SHARE, AIMED_SHARE = 0.6, 0.8  # of the per-operator roofline on useful tokens
LEAST_FASTER = 1.25  # times float32's, for bfloat16 products to be worth a bound


@dataclass(frozen=True)
class Bound:
    """Ours must be at least `times` a peer; `aim` is what is hoped for."""

    ours: str
    peer: str
    times: float
    aim: float


@dataclass(frozen=True)
class Measured:
    """One case: texts per second of each repeat by method, and what the labels and the roofline say.

    `unjudged` tells, by our method, why its bounds cannot be met on this machine by anyone.
    """

    name: str
    rates: dict[str, list[float]]
    same_labels: int
    texts: int
    shares: dict[str, float | None]
    unjudged: dict[str, str]


SAME, FASTEST, SPEC, BEST_PIPELINE = "ours same", "ours fastest", "padded to 512", "pipeline, best"
FLOAT32_ENGINES, BEST_FLOAT32, BEST_ENGINE = ("ONNX Runtime", "OpenVINO"), "float32 engine, best", "engine, best"
OTHER_WAYS = ("pipeline", "padded", "sorted", "ours")  # all but the engines begin with one of these
BOUNDS = {
    "long-tailed": (
        Bound(SAME, SPEC, 8.0, 8.0),
        Bound(SAME, BEST_PIPELINE, 1.6, 1.6),
        Bound(FASTEST, BEST_PIPELINE, 3.0, 4.0),
    ),
    "short": (
        Bound(SAME, BEST_PIPELINE, 1.9, 3.2),
        Bound(SAME, BEST_FLOAT32, 1.3, 1.3),
        Bound(FASTEST, BEST_PIPELINE, 9.0, 9.0),
        Bound(FASTEST, BEST_ENGINE, 1.25, 1.25),
    ),
}
SHARES = {"long-tailed": (SAME, FASTEST), "short": ()}


def unjudged(has_bfloat16: bool, times_float32: float) -> dict[str, str]:
    """Return why the bounds of `fastest` cannot be met here, by our method; {} where bfloat16 products are fast.

    `times_float32` is the measured ceiling of bfloat16 products over that of float32's fastest.
    """
    if not has_bfloat16:
        return {FASTEST: "this CPU has no bfloat16 products"}
    if times_float32 < LEAST_FASTER:
        return {FASTEST: f"bfloat16 products are no faster here: {times_float32:.2f} times float32's"}
    return {}


def share(least_s: float, spent_s: float) -> float | None:
    """Return the share of the roofline; None above 1, where what was measured as a limit is none."""
    return least_s / spent_s if least_s <= spent_s else None


def with_best(rates: dict[str, list[float]], correct: Mapping[str, int]) -> dict[str, list[float]]:
    """Return the rates with those of the best pipeline, of the best float32 engine and of the best engine, by medians.

    An engine counts only where it has as many `correct` labels as ours in `fastest`.
    """
    engines = [name for name in rates if not name.startswith(OTHER_WAYS)]
    kinds = {
        BEST_PIPELINE: [name for name in rates if name.startswith("pipeline ")],
        BEST_FLOAT32: [name for name in engines if name in FLOAT32_ENGINES],
        BEST_ENGINE: [name for name in engines if correct.get(name, 0) >= correct.get(FASTEST, 0)],
    }
    best = {kind: max((rates[name] for name in names), key=median) for kind, names in kinds.items() if names}
    return {**rates, **best}


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Return the median over the repeats of ours over theirs; each pair ran within one repeat."""
    return median(mine / other for mine, other in zip(ours, theirs, strict=True))


def lines(case: Measured) -> list[str]:
    """Return each bound with what was found, as a line."""
    return [
        f"{bound.ours} / {bound.peer}: {ratio(case.rates[bound.ours], case.rates[bound.peer]):.2f} x"
        f" (at least {bound.times:g}, aim {bound.aim:g})"
        for bound in BOUNDS[case.name]
        if bound.peer in case.rates
    ]


def failures(case: Measured) -> list[str]:
    """Return what falls short, one sentence each; [] where all holds or cannot be judged here."""
    found = []
    for bound in BOUNDS[case.name]:
        if bound.peer not in case.rates:
            continue
        times = ratio(case.rates[bound.ours], case.rates[bound.peer])
        if times < bound.times and bound.ours not in case.unjudged:
            found.append(f"{case.name}: {bound.ours} is {times:.2f} x {bound.peer}, {bound.times:g} is asked for")
    if case.same_labels != case.texts:
        found.append(f"{case.name}: {SAME} gives {case.texts - case.same_labels} of {case.texts} texts another label")
    for method in SHARES[case.name]:
        share = case.shares[method]
        if share is not None and share < LEAST_SHARE and method not in case.unjudged:
            found.append(f"{case.name}: {method} reaches {share:.0%} of the roofline, {LEAST_SHARE:.0%} are asked for")
    return found
