"""What is known of the stages of a training run: plain records, for the writer, the reader and everyone who asks."""

import math
from typing import Annotated, Any, Literal

import msgspec
import numpy as np

from boundby.capture import Remark

SCHEMA_VERSION = 2  # of every file that a profiled loop writes
Kind = Literal["step", "stage", "background", "span", "excluded"]
Status = Literal["running", "finished", "failed"]
STEP = "step"  # the name of the steps themselves, whose self time is in no stage
NS_PER_S = 10**9

Rank = Annotated[int, msgspec.Meta(ge=0, lt=100_000)]
Processes = Annotated[int, msgspec.Meta(ge=1, le=100_000)]  # of a run; more than anybody has would be counted for ever

ABSENT = -1  # in a column of times or ids: not known, or there is none
OCCURRENCE = np.dtype(
    [
        ("index", "<i8"),  # of the row in its run
        ("step", "<i8"),
        ("start_ns", "<i8"),  # of the host, since the start of the run
        ("host_ns", "<i8"),  # without what was excluded
        ("self_ns", "<i8"),  # of it, in no stage inside
        ("device_ns", "<i8"),  # between the marks of begin and end
        ("gap_ns", "<i8"),  # of the device, since the end of the stage before
        ("stage", "<i2"),
        ("parent", "<i2"),  # the stage around it
        ("thread", "<i2"),
        ("flags", "<i2"),
    ]
)
METRIC = np.dtype([("index", "<i8"), ("step", "<i8"), ("metric", "<i8"), ("value", "<f8")])
NULLABLE = ("device_ns", "gap_ns", "parent")  # columns that may hold `ABSENT`

DISTURBED = 1  # a profiler was at work in this step, or in one of this span
RAISED = 2  # an exception left the stage
CUT = 4  # its end never came: the stage around it ended first
UNUSUAL = DISTURBED | RAISED | CUT  # kept out of the summaries


class Statistics(msgspec.Struct, frozen=True):
    """What a stream of `n` values says, in the unit of the values; the quantiles rest on `sampled` of them.

    A quantile that the sample does not support is None, as everything but the counts is when there is no value.
    """

    n: int
    total: float
    mean: float | None = None
    minimum: float | None = None
    maximum: float | None = None
    median: float | None = None
    p90: float | None = None
    p95: float | None = None
    p99: float | None = None
    sampled: int = 0


class Name(msgspec.Struct, frozen=True):
    """What an occurrence is one of.

    A `stage` is a part of a step, and `background` a stage on another thread than the loop's. A `span` holds steps,
    such as an epoch. `excluded` is time of other work, such as an evaluation, that is taken out of its step.
    """

    name: str
    kind: Kind


class StageSummary(msgspec.Struct, frozen=True):
    """All occurrences of one name, without those of disturbed steps and those that did not end well (`unusual`)."""

    name: str
    kind: Kind
    host_s: Statistics
    self_total_s: float  # in no stage inside
    share: float | None  # of the time of all steps, by self time; None for what is no part of a step
    device_s: Statistics | None  # between its marks on the device; None where there are none
    starvation_s: Statistics | None  # of the device, from the end of the stage before to the start of this one
    unusual: int


class MetricSummary(msgspec.Struct, frozen=True):
    """All values that the program gave for one metric."""

    name: str
    values: Statistics
    non_finite: int  # NaN, infinity and what is beyond 1e100, in no other number


class OpenStage(msgspec.Struct, frozen=True):
    """A stage that had begun and not ended when this was written."""

    name: str
    since_s: float


class Summaries(msgspec.Struct, frozen=True):
    """The summaries of a run, of all its occurrences and values."""

    stages: tuple[StageSummary, ...] = ()
    metrics: tuple[MetricSummary, ...] = ()


class StageTimes(msgspec.Struct, frozen=True, kw_only=True, rename={"metric_rows": "metrics"}):
    """The stages of one run of one process, up to the moment it was written; its fields are those of the document.

    `occurrences` are rows of `OCCURRENCE`, the last ones of the run: `stage` and `parent` are places in `names`.
    `metric_rows` are rows of `METRIC`, whose `metric` is a place in `metric_names`.
    """

    schema_version: int = SCHEMA_VERSION
    status: Status  # "running" also for a run that was killed
    error: str | None
    rank: Rank
    world_size: Processes
    pid: int | None
    host: str  # where that process is, by `environment.host_id`
    launcher: int | None  # its parent process there
    started_unix_s: float | None
    written_unix_s: float | None
    elapsed_s: float
    first_step: int
    last_step: int | None  # that has ended; None before the first
    device: str | None  # whose times are in `device_s`
    num_occurrences: int  # ever, of which `occurrences` are the last
    num_metric_rows: int
    summary: Summaries
    open: tuple[OpenStage, ...]
    remarks: tuple[Remark, ...]
    names: tuple[Name, ...]
    metric_names: tuple[str, ...]
    occurrences: np.ndarray
    metric_rows: np.ndarray

    def __post_init__(self) -> None:
        """Raise ValueError where the rows are of another type."""
        if self.occurrences.dtype != OCCURRENCE or self.metric_rows.dtype != METRIC:
            raise ValueError("occurrences and metric_rows are rows of OCCURRENCE and METRIC")

    @property
    def stages(self) -> tuple[StageSummary, ...]:
        """Return the summary of every name that has occurred."""
        return self.summary.stages

    @property
    def metrics(self) -> tuple[MetricSummary, ...]:
        """Return the summary of every metric."""
        return self.summary.metrics

    def stage(self, name: str, kind: Kind = "stage") -> StageSummary | None:
        """Return the summary of one name, None where it has none."""
        return next((stage for stage in self.stages if (stage.name, stage.kind) == (name, kind)), None)

    @property
    def step(self) -> StageSummary | None:
        """Return the summary of the steps, None before the first has ended."""
        return self.stage(STEP, "step")

    def rows_of(self, name: str, kind: Kind = "stage") -> np.ndarray:
        """Return the occurrences of one name, the oldest first."""
        indices = [index for index, known in enumerate(self.names) if known == Name(name, kind)]
        return self.occurrences[np.isin(self.occurrences["stage"], indices)]

    def values_of(self, metric: str) -> tuple[np.ndarray, np.ndarray]:
        """Return the steps and the finite values of one metric."""
        indices = [index for index, known in enumerate(self.metric_names) if known == metric]
        rows = self.metric_rows[np.isin(self.metric_rows["metric"], indices)]
        rows = rows[np.isfinite(rows["value"])]
        return rows["step"], rows["value"]


def bytes_of(times: StageTimes) -> bytes:
    """Return the document as strict JSON, encoded at a fiftieth of the cost of Python's own encoder."""
    return msgspec.json.encode(times, enc_hook=columns_of) + b"\n"


def times_from(content: bytes) -> StageTimes:
    """Return the records of a document. Raises ValueError naming what is wrong with it."""
    try:
        times = msgspec.json.decode(content, type=StageTimes, dec_hook=_rows_of)
    except (KeyError, OverflowError, RecursionError) as error:
        raise ValueError(f"its columns are no table: {type(error).__name__}: {error}") from None
    if times.schema_version != SCHEMA_VERSION:
        raise ValueError(f"its schema_version is {times.schema_version}, not {SCHEMA_VERSION}")
    return times


def columns_of(rows: Any) -> dict[str, list[Any] | None]:
    """Return rows as columns: null for unknown values, and for a column without any known value."""
    return {name: _column(rows[name], name in NULLABLE) for name in rows.dtype.names}


def _column(values: np.ndarray, is_nullable: bool) -> list[Any] | None:
    plain: list[Any] = values.tolist()
    if values.dtype.kind == "f":
        return [value if math.isfinite(value) else None for value in plain]
    if not is_nullable:
        return plain
    return None if (values == ABSENT).all() else [None if value == ABSENT else value for value in plain]


def _rows_of(_: type, document: Any) -> np.ndarray:
    columns = msgspec.convert(document, dict[str, list[int | float | None] | None])
    dtype = METRIC if "metric" in columns else OCCURRENCE
    rows = np.zeros(len(columns["index"] or ()), dtype=dtype)
    for name in dtype.names or ():
        values = columns[name]
        absent = math.nan if dtype[name].kind == "f" else ABSENT
        rows[name] = absent if values is None else [absent if value is None else value for value in values]
    return rows


class SharedMark:
    """A mark that may end one stage and begin the gap before the next."""

    __slots__ = ("mark", "users")

    def __init__(self, mark: Any) -> None:
        self.mark = mark
        self.users = 1


class Step:
    """The step that runs; its stages refer to it, since its number may become known at its end only."""

    __slots__ = ("flags", "number")

    def __init__(self, number: int) -> None:
        self.number = number
        self.flags = 0


class Occurrence:
    """One occurrence of a stage, from its begin until it is added up. Times are ns of the host's clock.

    It has no `__init__` and no slots: each stage begins one, and what most of them leave as it is stands in the class.
    """

    is_excluded = False
    is_span = False  # it holds steps, so that its flags are its own
    repeated = 0  # begins of its name inside it, while it is excluded
    inside = 0  # in stages inside
    paused = 0  # excluded
    flags = 0
    parent = ABSENT
    opened: SharedMark | None = None  # mark at its begin
    closed: SharedMark | None = None  # mark at its end
    after: SharedMark | None = None  # mark at the end of the stage before
    name: str
    stage: int
    began: int
    host: int
    step: Step
    thread: int
