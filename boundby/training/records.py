"""What is known of the stages of a training run: plain records, for the writer, the reader and everyone who asks."""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from boundby.training.remarks import Remark
from boundby.training.ring import METRIC, OCCURRENCE
from boundby.training.tally import Statistics

Kind = Literal["step", "stage", "background", "span", "excluded"]
Status = Literal["running", "finished", "failed"]
STEP = "step"  # the name of the steps themselves, whose self time is in no stage


@dataclass(frozen=True)
class Name:
    """What an occurrence is one of.

    A `stage` is a part of a step, and `background` a stage on another thread than the loop's. A `span` holds steps,
    such as an epoch. `excluded` is time of other work, such as an evaluation, that is taken out of its step.
    """

    name: str
    kind: Kind


@dataclass(frozen=True)
class StageSummary:
    """All occurrences of one name, without those of disturbed steps and those that did not end well (`unusual`)."""

    name: str
    kind: Kind
    host_s: Statistics
    self_total_s: float  # in no stage inside
    share: float | None  # of the time of all steps, by self time; None for what is no part of a step
    device_s: Statistics | None  # between its marks on the device; None where there are none
    starvation_s: Statistics | None  # of the device, from the end of the stage before to the start of this one
    unusual: int


@dataclass(frozen=True)
class MetricSummary:
    """All values that the program gave for one metric."""

    name: str
    values: Statistics
    non_finite: int  # NaN, infinity and what is beyond 1e100, in no other number


@dataclass(frozen=True)
class OpenStage:
    """A stage that had begun and not ended when this was written."""

    name: str
    since_s: float


@dataclass(frozen=True)
class StageTimes:
    """The stages of one run of one process, up to the moment it was written.

    `occurrences` are rows of `boundby.training.ring.OCCURRENCE`, the last ones of the run: `stage` and `parent` are
    places in `names`. `metric_rows` are rows of `METRIC`, whose `metric` is a place in `metric_names`.
    """

    status: Status  # "running" also for a run that was killed
    error: str | None
    rank: int
    world_size: int
    pid: int | None
    started_unix_s: float | None
    written_unix_s: float | None
    elapsed_s: float
    first_step: int
    last_step: int | None  # that has ended; None before the first
    device: str | None  # whose times are in `device_s`
    stages: tuple[StageSummary, ...]
    metrics: tuple[MetricSummary, ...]
    open: tuple[OpenStage, ...]
    remarks: tuple[Remark, ...]
    names: tuple[Name, ...]
    metric_names: tuple[str, ...]
    occurrences: np.ndarray
    metric_rows: np.ndarray
    num_occurrences: int  # ever, of which `occurrences` are the last
    num_metric_rows: int

    def __post_init__(self) -> None:
        """Raise ValueError where the rows are of another type."""
        if self.occurrences.dtype != OCCURRENCE or self.metric_rows.dtype != METRIC:
            raise ValueError("occurrences and metric_rows are rows of OCCURRENCE and METRIC")

    def stage(self, name: str, kind: Kind = "stage") -> StageSummary | None:
        """Return the summary of one name, None where it has none."""
        return next((each for each in self.stages if (each.name, each.kind) == (name, kind)), None)

    @property
    def step(self) -> StageSummary | None:
        """Return the summary of the steps, None before the first has ended."""
        return self.stage(STEP, "step")

    def rows_of(self, name: str, kind: Kind = "stage") -> np.ndarray:
        """Return the occurrences of one name, the oldest first."""
        places = [place for place, each in enumerate(self.names) if each == Name(name, kind)]
        return self.occurrences[np.isin(self.occurrences["stage"], places)]
