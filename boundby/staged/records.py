"""What a run or a simulation of a plan yields: frozen records, each with a label that says where its numbers are from.

Loads no torch. Times are seconds. `measured` was run on the devices named; `emulated` was run too, but part of it was
made up: a link by sleep, or nodes by processes that share cores; `simulated` was computed from the plan.
"""

from dataclasses import dataclass
from typing import Any, Literal

from boundby.partition.costs import Basis
from boundby.stats import Estimate, Summary

Label = Literal["measured", "emulated", "simulated"]


@dataclass(frozen=True)
class StageTimes:
    """What one stage computed. `compute` is with one request in the whole pipeline, `busy_compute` with many."""

    node: str
    device: str
    threads: int
    cores: tuple[int, ...]  # that the worker was bound to; empty where it was not
    units: tuple[str, ...]
    weight_bytes: int  # of its units, each storage once
    compute: Summary
    busy_compute: Summary
    label: Label


@dataclass(frozen=True)
class TransferTimes:
    """From the end of one stage's computation to the beginning of the next one's, with one request in the pipeline."""

    source: str
    target: str
    size_bytes: int  # that were sent; a plan's size is what its profile could see
    seconds: Summary
    label: Label


@dataclass(frozen=True)
class Measured:
    """A pipeline that was run: `latency` of requests one at a time, then `requests` at once.

    `latency` begins when the first stage computes and ends when the last one has; so do `first_finish_s` and
    `last_finish_s`, of the first and last of the requests that were there at once. `period` is the time between two
    finishes, once every stage is at work.
    """

    stages: tuple[StageTimes, ...]
    transfers: tuple[TransferTimes, ...]
    latency: Summary
    requests: int
    first_finish_s: float
    last_finish_s: float
    period: Summary | None  # None where there were too few requests for the stages
    label: Label
    doubts: tuple[str, ...]


@dataclass(frozen=True)
class Contention:
    """How many times as long a node computes while the others of its machine do; `units` are what it computed.

    `rounds` has together over alone of every round, of medians, and `slowdown` their median. `alone` and `together`
    are of one computation, in all rounds.
    """

    node: str
    machine: str
    beside: tuple[str, ...]  # the nodes that computed meanwhile
    units: tuple[str, ...]
    device: str
    threads: int
    cores: tuple[int, ...]
    alone: Summary
    together: Summary
    rounds: tuple[float, ...]
    slowdown: Estimate
    label: Label
    doubts: tuple[str, ...]

    @property
    def factor(self) -> float:
        """Return the slow-down as a node takes it: nobody computes faster for others, so less than 1 is noise."""
        return max(1.0, self.slowdown.value)


@dataclass(frozen=True)
class Simulated:
    """A pipeline that was computed event by event; `basis` says what its times rest on."""

    requests: int
    first_finish_s: float
    last_finish_s: float
    period_s: float | None  # None, with the reason, where the finishes are not evenly spaced yet
    finishes_s: tuple[float, ...]
    basis: Basis
    reason: str | None = None
    label: Label = "simulated"


@dataclass(frozen=True)
class Error:
    """One prediction beside what was found; `signed` is predicted over found, minus one."""

    name: str
    predicted: float
    found: float
    signed: float | None  # None where nothing was found to divide by
    unit: str = "s"


@dataclass(frozen=True)
class Comparison:
    """A plan beside what was run. `stages` and `transfers` are in the order of the plan."""

    stages: tuple[Error, ...]
    busy_stages: tuple[Error, ...]
    transfers: tuple[Error, ...]
    transfer_sizes: tuple[Error, ...]
    latency: Error
    period: Error | None
    last_finish: Error
    label: Label  # of what was run
    doubts: tuple[str, ...]


@dataclass(frozen=True)
class CutTimes:
    """What one cut took for the objective, once in each round."""

    name: str
    rounds_s: tuple[float, ...]
    median_s: float
    predicted_s: float
    label: Label
    doubts: tuple[str, ...] = ()


@dataclass(frozen=True)
class Regret:
    """How much longer the chosen cut took than the best one that was run, as a share.

    `noise` is how far one cut differs from round to round: the standard error of the difference of the two medians
    as a share; None with one round. With a regret of at most twice that, the two cannot be told apart.
    """

    chosen: CutTimes
    best: CutTimes
    cuts: tuple[CutTimes, ...]
    regret: float
    noise: float | None
    label: Label

    @property
    def doubts(self) -> tuple[str, ...]:
        """Return what is doubtful about any of the cuts, each doubt once."""
        return tuple(dict.fromkeys(doubt for cut in self.cuts for doubt in cut.doubts))

    @property
    def is_within_noise(self) -> bool:
        """Tell whether chosen and best cannot be told apart."""
        return self.noise is not None and self.regret <= 2 * self.noise


@dataclass(frozen=True)
class StagedRun:
    """What a plan gave for its inputs, and how long it took."""

    outputs: Any
    measured: Measured
