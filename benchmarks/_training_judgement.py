"""What the attempts of `training_overhead.py` amount to: plain numbers in, plain sentences out."""

from collections.abc import Mapping, Sequence

from boundby.stats import Estimate, estimate

MOST = {"off": 0.001, "stage timer": 0.01}  # of a step of 5 ms; a thousandth is 0.0 %, as the marks that do nothing
MOST_SPARE_S = 20e-6  # of a bare step beyond its spins: 2 µs on an idle machine, 70 with seven programs to a core


def cost(ratios: Sequence[float]) -> Estimate:
    """Return the time with over the time without, with its interval over the attempts."""
    return estimate(ratios)


def failures(found: Mapping[str, Sequence[float]]) -> list[str]:
    """Return what surely costs more than it may, one sentence each."""
    return [
        f"{name} costs {_percent(cost(ratios).value)}, {_percent(1 + MOST[name])} at most"
        for name, ratios in found.items()
        if (low := cost(ratios).low) is not None and low > 1 + MOST[name]
    ]


def unsettled(found: Mapping[str, Sequence[float]]) -> list[str]:
    """Return the names of what neither surely fails nor surely passes."""
    passed = [name for name, ratios in found.items() if (high := cost(ratios).high) and high <= 1 + MOST[name]]
    failed = [name for name, ratios in found.items() if (low := cost(ratios).low) and low > 1 + MOST[name]]
    return [name for name in found if name not in passed and name not in failed]


def described(ratio: Estimate) -> str:
    """Return a cost in percent with its interval."""
    if ratio.low is None or ratio.high is None:
        return _percent(ratio.value)
    return f"{_percent(ratio.value)} [{_percent(ratio.low)}, {_percent(ratio.high)}]"


def _percent(ratio: float) -> str:
    return f"{100 * (ratio - 1):+.2f} %"
