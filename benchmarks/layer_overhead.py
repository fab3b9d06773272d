"""What does watching every layer cost? Our probes beside torch.profiler, on the same models, in one run.

The models: GPT-2, BERT, ResNet-50 and four layers of Qwen2-0.5B with random weights, the MiniLM classifier in
../shared/models where it is there, and 201 modules that compute next to nothing. Float32, CPU, the default threads.
Every attempt is a fresh process in which each watched forward has a bare one beside it; its ratio is the median over
these pairs. `plain` puts nothing on the model either time, so its ratio is noise alone. The methods take turns, in
reverse every second time. torch.profiler records shapes, stacks and memory, which it takes to tell layers apart.
Exit 1: a probe of ours surely (by the interval over the repeats) costs more than 2.5 µs per call of a module, or the
layers surely account for less than 97 % or more than 103 % of the time of a model that takes 20 ms or longer.

    python benchmarks/layer_overhead.py [--repeats 5] [--seconds 4] [--only MODEL ...]
"""

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # find the packages of this checkout

from benchmarks import _attempts, _layer_overhead
from boundby.machine import environment
from boundby.timing import Estimate, estimate

HERE = Path(__file__).resolve().parent
OURS = "probes"
MOST_SECONDS = 600.0  # of one process
MOST_US_PER_CALL = 2.5
LEAST_COVERAGE, MOST_COVERAGE = 0.97, 1.03
LEAST_PLAIN_S = 0.020  # below, the cost of the probes themselves decides about the coverage

Values = Sequence[float | None]


@dataclass(frozen=True)
class Watched:
    """One model with our probes, an entry per attempt: seconds without, the ratio with over without, the coverage."""

    model: str
    calls: int  # of modules in a forward
    plain_s: Values
    ratios: Values
    coverages: Values

    @property
    def us_per_call(self) -> Estimate | None:
        """Microseconds that the probes add to each call of a module."""
        result = interval(self.ratios)
        if result is None or not self.calls:
            return None
        scale = 1e6 * median(known(self.plain_s)) / self.calls
        low, high = (None if end is None else scale * (end - 1) for end in (result.low, result.high))
        return replace(result, value=scale * (result.value - 1), low=low, high=high)

    @property
    def coverage(self) -> Estimate | None:
        """The share of the plain time that the layers account for."""
        return interval(self.coverages)

    @property
    def is_coverage_judged(self) -> bool:
        """Whether the model is long enough for its coverage to be held against the limits."""
        return bool(known(self.plain_s)) and median(known(self.plain_s)) >= LEAST_PLAIN_S


def known(values: Values) -> list[float]:
    """Return the values of the attempts that have one."""
    return [value for value in values if value is not None]


def interval(values: Values) -> Estimate | None:
    """Return the geometric mean of the attempts with its interval; None where no attempt has a value."""
    return estimate(known(values)) if known(values) else None


def failures(models: Sequence[Watched]) -> list[str]:
    """Return what falls short, one sentence each; [] where nothing surely does."""
    result = []
    for item in models:
        if missing := sum(value is None for value in item.ratios):
            result.append(f"{item.model}: ours gave no value in {missing} of {len(item.ratios)} attempts")
        cost, coverage = item.us_per_call, item.coverage
        if cost and _is_dear(cost):
            result.append(f"{item.model}: a probe costs {cost.value:.2f} µs per call, {MOST_US_PER_CALL} at most")
        if coverage and item.is_coverage_judged and _is_outside(coverage):
            allowed = f"{100 * LEAST_COVERAGE:.0f} to {100 * MOST_COVERAGE:.0f} %"
            result.append(
                f"{item.model}: the layers account for {100 * coverage.value:.1f} % of its time, not {allowed}"
            )
    return result


def unsettled(models: Sequence[Watched]) -> list[str]:
    """Return what the attempts do not decide, a few words each."""
    result = []
    for item in models:
        cost, coverage = item.us_per_call, item.coverage
        if cost is None or not (_is_dear(cost) or _is_cheap(cost)):
            result.append(f"the cost of a probe on {item.model}")
        if item.is_coverage_judged and coverage and not _is_outside(coverage) and not _is_covered(coverage):
            result.append(f"the coverage on {item.model}")
    return result


def _is_dear(cost: Estimate) -> bool:
    return cost.low is not None and cost.low > MOST_US_PER_CALL


def _is_cheap(cost: Estimate) -> bool:
    return cost.high is not None and cost.high <= MOST_US_PER_CALL


def _is_covered(coverage: Estimate) -> bool:
    known_ends = coverage.low is not None and coverage.high is not None
    return known_ends and coverage.low >= LEAST_COVERAGE and coverage.high <= MOST_COVERAGE


def _is_outside(coverage: Estimate) -> bool:
    too_much = coverage.low is not None and coverage.low > MOST_COVERAGE
    return too_much or (coverage.high is not None and coverage.high < LEAST_COVERAGE)


@dataclass(frozen=True)
class Attempt:
    """What one process found; the numbers are None, with the reason in `said`, where it failed."""

    plain_s: float | None = None
    ratio: float | None = None
    calls: int = 0
    coverage: float | None = None
    said: str = ""


Found = dict[tuple[str, str], list[Attempt]]  # by model and method


def main(argv: Sequence[str] | None = None) -> int:
    """Run all attempts and print them, then what they amount to."""
    args = _arguments(argv)
    versions = {name: version for name, version in environment.versions().items() if version}
    print(f"machine {environment.machine_fingerprint()}: {json.dumps(environment.machine())}")
    print(f"settings: {json.dumps(environment.settings())}")
    print(f"versions: {json.dumps(versions)}")
    if "minilm" not in _layer_overhead.cases():
        print(f"minilm: left out, {_layer_overhead.MINILM} is missing")
    result = _take_turns(args.only or _layer_overhead.cases(), args.repeats, args.seconds)
    _print_ratios(result)
    return judge(list(_watched(result)))


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=4.0, help="of forwards in each attempt")
    parser.add_argument("--only", nargs="+", choices=_layer_overhead.cases(), help="these models alone")
    args = parser.parse_args(argv)
    if args.repeats < 1 or args.seconds <= 0:
        parser.error("--repeats must be 1 or more and --seconds above 0")
    return args


def _take_turns(models: Sequence[str], repeats: int, seconds: float) -> Found:
    result: Found = {(model, method): [] for model in models for method in _layer_overhead.METHODS}
    print("\nrepeat  model          method    plain ms   ratio  what it says of it")
    for repeat in range(repeats):
        for model, method in reversed(result) if repeat % 2 else result:
            attempt = attempt_of(model, method, seconds)
            result[model, method].append(attempt)
            numbers = f"{_ms(attempt.plain_s):>9} {_number(attempt.ratio, 4):>7}"
            print(f"{repeat + 1:>6}  {model:<14} {method:<8} {numbers}  {attempt.said}", flush=True)
    return result


def attempt_of(model: str, method: str, seconds: float) -> Attempt:
    """Return what one fresh process measures of a model."""
    command = [sys.executable, str(HERE / "_layer_overhead.py"), method, model, "--seconds", str(seconds)]
    try:
        message = json.loads(_attempts.last_line(command, MOST_SECONDS))
    except _attempts.AttemptFailed as reason:
        return Attempt(said=str(reason))
    said = f"{message['runs']} forwards each way, {message['threads']} threads"
    calls = message["calls"] or 0
    if calls:
        cost_us = 1e6 * message["plain_s"] * (message["ratio"] - 1) / calls
        said += f", {cost_us:+.2f} µs per call of {calls} ({message['probe_us']:.2f} calibrated)"
        said += f", coverage {100 * message['coverage']:.1f} %"
    return Attempt(message["plain_s"], message["ratio"], calls, message["coverage"], said)


def _print_ratios(found: Mapping[tuple[str, str], Sequence[Attempt]]) -> None:
    print("\nmodel          method    ratio of time with to without, with its interval; spread over the repeats")
    for (model, method), attempts in found.items():
        ratios = [attempt.ratio for attempt in attempts]
        ratio, width = interval(ratios), _attempts.spread(known(ratios))
        spread = "unknown" if width is None else f"{100 * width:.1f} %"
        text = shown(ratio, 3)
        print(f"{model:<14} {method:<8}  {text}; {spread}")


def _watched(found: Mapping[tuple[str, str], Sequence[Attempt]]) -> Iterator[Watched]:
    for (model, method), attempts in found.items():
        if method == OURS:
            yield Watched(
                model,
                calls=max(attempt.calls for attempt in attempts),
                plain_s=[attempt.plain_s for attempt in attempts],
                ratios=[attempt.ratio for attempt in attempts],
                coverages=[attempt.coverage for attempt in attempts],
            )


def judge(models: Sequence[Watched]) -> int:
    """Print the cost and the coverage of ours and what falls short, and return the exit code."""
    print()
    for item in models:
        print(f"{item.model}: µs per call {shown(item.us_per_call, 2)}, coverage {shown(item.coverage, 3)}")
    short = failures(models)
    for failure in short:
        print(f"FAILED: {failure}")
    still_open = unsettled(models)
    for name in still_open:
        print(f"not settled: {name}; quiet the machine or raise --repeats")
    if not short:
        print("nothing surely falls short" if still_open else "passed: everything is within its limits")
    return 1 if short else 0


def shown(found: Estimate | None, digits: int) -> str:
    """Return the value with the ends of its interval, where it has any."""
    if found is None:
        return "unknown"
    ends = "" if found.low is None or found.high is None else f" [{found.low:.{digits}f}, {found.high:.{digits}f}]"
    return f"{found.value:.{digits}f}{ends}"


def _ms(seconds: float | None) -> str:
    return _number(None if seconds is None else 1e3 * seconds, 3)


def _number(value: float | None, digits: int) -> str:
    return "unknown" if value is None else f"{value:.{digits}f}"


if __name__ == "__main__":
    sys.exit(main())
