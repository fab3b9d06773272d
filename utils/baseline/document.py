"""The records that steps write as JSON and CSV, as report, figures and comparisons read them.

They stay dictionaries, since `detailed_metrics.csv` and the figures choose columns by name; here each key has its type.
Rows are made from the table of `utils.baseline.columns`, and their verdicts are those of `boundby.bound.verdict`.
"""

from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired, Required, TypedDict

import msgspec

from boundby import files
from boundby.bound import Verdict
from boundby.machine import Ceilings
from utils.baseline.columns import MEASURED, MeasuredRow
from utils.baseline.columns import Row as Row
from utils.command import removed
from utils.evaluation import Exactness, FullDataset
from utils.evaluation import NonNegative as NonNegative
from utils.evaluation import Positive as Positive
from utils.evaluation import Size as Size
from utils.settings import Task


class Span(TypedDict):
    """A value and the ends of its interval."""

    value: float
    low: float
    high: float


class Factor(TypedDict):
    """A factor of the throughput and the ends of its interval."""

    value: Positive
    low: Positive
    high: Positive


class Choice(TypedDict):
    """A batch size with its throughput, and why it is this one; or None, and why there is none."""

    batch_size: int | None
    throughput_samples_per_sec: float | None
    reason: str


class Optimal(Choice):
    """The optimal batch size, and those that other wishes lead to."""

    max_throughput: Choice
    within_gpu_memory: Choice
    under_latency: Choice


class Target(TypedDict):
    """A target with the measured value and whether it is met; None and a reason where that cannot be told."""

    name: str
    target: float
    value: float | None
    met: bool | None
    reason: str | None


class Model(TypedDict, total=False):
    """What was measured."""

    name: str
    origin: str
    task: Task
    revision: str | None
    fingerprint: str
    type: str
    parameters_total: int
    parameters_trainable: int
    size_mb: float
    dtype: str
    dtype_setting: str
    dtype_reason: str | None
    num_labels: int | None
    max_positions: int | None
    load_time_s: float


class Source(TypedDict, total=False):
    """Where the texts come from."""

    kind: str
    name: str
    config_name: str | None
    split: str | None
    revision: str | None
    bytes: int | None
    sha256: str | None


class Dataset(TypedDict, total=False):
    """On which texts."""

    source: Source
    path: str
    bytes: int
    sha256: str
    rows: int
    columns: tuple[str | int, str | int | None] | None  # of the source that texts and labels were read from
    has_labels: bool


class Device(TypedDict, total=False):
    """On which device, as `boundby.machine` gives it; of a GPU also which, and of how many that torch sees."""

    type: str
    threads: int
    name: str
    memory_bytes: int
    capability: str
    multiprocessors: int
    cuda: str | None
    rocm: str
    architecture: str
    uuid: str
    visible_gpus: int


class Agreement(TypedDict, total=False):
    """How many texts get the same label alone and in a batch."""

    rows: Required[int]
    same_labels: int
    share: Required[float]
    max_abs_logit_difference: float
    lowest_margin: float
    against: str


class MachineState(TypedDict, total=False):
    """What the process might use, and how busy the machine was at the start."""

    threads: int
    interop_threads: int
    affinity: list[int]
    cpu_quota_cores: float | None
    load_1min: float
    float32_matmul_precision: str


class Operator(TypedDict):
    """One operator of the trace, all its calls together, as `op_stats.csv` gives it; no device time on a CPU."""

    name: str
    calls: int
    cpu_self_ms: float
    cpu_self_pct: float | None
    device_total_ms: float | None
    device_pct: float | None


class TraceSteps(TypedDict):
    """Which steps a trace has and how long they take; None without any."""

    numbers: list[int]
    expected: int | None
    median_ms: float | None
    q1_ms: float | None
    q3_ms: float | None


class StepMark(TypedDict):
    """Where a step begins."""

    number: int
    start_ms: float


class Timeline(TypedDict):
    """What was spent on what, moment by moment."""

    edges_ms: list[float]
    busy_ms: dict[str, list[float]]
    idle_ms: dict[str, list[float]]


class HostTime(TypedDict):
    """What the host was in, and how long."""

    host_in: str
    ms: float


class TracedDevice(TypedDict):
    """How one device spent the window of a trace; `device` is None for the CPU."""

    device: int | None
    window_ms: float
    busy_ms: float
    idle_ms: float
    exposed_ms: dict[str, float]
    idle_by_cause_ms: dict[str, float]
    idle_details: dict[str, list[HostTime]]
    least_without_ms: dict[str, float]
    gaps: int
    steps: list[StepMark]
    timeline: Timeline


class MemoryCourse(TypedDict):
    """The memory of one device, moment by moment."""

    times_ms: list[float]
    allocated_bytes: list[float]
    reserved_bytes: list[float] | None


class Owner(TypedDict):
    """An operator that held memory at the peak; None is what ran outside of all operators."""

    operator: str | None
    inside: str | None
    bytes: int
    allocations: int


class TracedMemory(TypedDict):
    """The memory of one device over a trace, and whose it was at the peak; `device` is None for the CPU."""

    device: int | None
    kept_per_step_bytes: int | None
    peak_bytes: int
    peak_ms: float
    peak_reserved_bytes: int | None
    earlier_bytes: int | None
    others_bytes: int
    owners: list[Owner]
    timeline: MemoryCourse


class Trace(TypedDict):
    """What the report reads of one trace in `trace_analysis.json`."""

    verdict: Verdict
    devices: Annotated[list[TracedDevice], msgspec.Meta(min_length=1)]
    steps: TraceSteps
    memory: NotRequired[list[TracedMemory] | None]


class FittingBatch(TypedDict):
    """The largest batch that stays within nine tenths of so many GB; its peak may be off by the share `error`."""

    gb: int
    samples: int
    error: float


class MemoryForecast(TypedDict):
    """What batches of the longest texts take, of so many tokens, and in all; or why that is unknown."""

    model: dict[str, Any] | None
    tokens: int | None
    fits: list[FittingBatch]
    reason: str | None


class Document(TypedDict):
    """The whole of `baseline_metrics.json`."""

    schema_version: int
    boundby_version: str
    written: str
    complete: bool
    machine_fingerprint: str | None
    work_fingerprint: str | None
    synthetic: bool
    model: Model
    dataset: Dataset
    device: Device
    agreement: Agreement | None
    ceilings: Ceilings | None
    ceilings_reason: str | None
    machine_state: MachineState
    max_length: int | None
    batch_sizes: list[Row]
    optimal: Optimal
    full_dataset_metrics: FullDataset | None
    full_dataset_reason: str | None
    memory: NotRequired[MemoryForecast]
    targets: list[Target]
    doubts: list[str]


class Change(TypedDict):
    """The seconds that a kind of operator took on the same texts in two variants."""

    before_s: float
    after_s: float


class VariantRow(TypedDict, total=False):
    """One variant of step 05; without figures, and with `why` and `reason`, where it could not be taken.

    Factors are of the throughput: `gain` over the reference, `gain_over_base` over `base`, from which the variant
    differs by one `fix`; `predicted` and `tried` are what step 02 says of it on its one batch. `operators` has what
    kinds of operators took in `base` and here, replayed on some texts; {} where torch does not see them. Shares, not
    percent.
    """

    name: Required[str]
    words: Required[str]
    status: Required[Literal["measured", "refused"]]
    fix: dict[str, Any] | None
    why: str
    reason: str
    how: str
    is_padded: bool  # shorter texts of a batch to its longest
    base: str | None
    texts_per_s: Factor
    gain: Factor
    gain_over_base: Factor | None
    predicted: Factor | None
    at_most: float | None
    tried: Factor | None
    latency_ms: Factor
    weight_bytes: int | None
    disk_bytes: int
    extra_bytes: int | None
    one_off_s: float
    won_back_after_texts: int | None
    exactness: Exactness
    changed: int
    operators: dict[str, Change]
    attention_backend: str | None  # what computed attention, as `boundby.bound.attention` names it
    attention_backend_reason: str | None
    program: list[str]  # its lines in a program of one's own
    runs_here: bool  # settings of the pipeline have it
    against: str | None
    million_s: float
    million_cost: float | None


class Recommended(TypedDict):
    """The variant to use, or why there is none.

    Settings and environment run the pipeline with it, the lines of `program` a program of one's own.
    """

    name: str | None
    settings: list[str]
    environment: dict[str, str]
    program: NotRequired[list[str]]
    reason: str | None


class Variants(TypedDict):
    """The whole of `variants.json`; `texts` of `dataset_rows` were compared, the same by every variant."""

    schema_version: int
    written: str
    model_fingerprint: str
    dtype: str
    device: str
    threads: int
    batch_size: int
    texts: int
    dataset_rows: int
    rounds: int
    seconds: float
    min_agreement: float
    max_accuracy_drop: float
    variants: list[VariantRow]
    recommended: Recommended
    doubts: list[str]


def read_document(path: Path, version: int, kind: Any = Document) -> Document:
    """Return the document of this version. Raises OSError, OtherVersion, and ValueError where it is something else.

    Verdicts are as `boundby.bound` has them, also those of an earlier version. A reader of a part of it asks for that
    alone by another `kind`. What the document says beyond these records stays in it: each task has scores of its own.
    """
    content = files.read_json(path)
    written = content.get("schema_version") if isinstance(content, dict) else None
    if written != version:
        raise OtherVersion(written)
    try:
        if "batch_sizes" in content:  # else their lack shows below
            content["batch_sizes"] = with_verdicts(content["batch_sizes"])
        if content.get("ceilings"):
            content["ceilings"] = msgspec.convert(content["ceilings"], Ceilings)
    except (TypeError, AttributeError, LookupError) as error:
        raise ValueError(f"{path} cannot be read: batch_sizes are not rows with verdicts ({error})") from None
    document: Document = shaped(content, kind)
    measured = [row for row in document.get("batch_sizes", ()) if row["status"] in MEASURED]
    if kind is Document and measured:
        shaped({"measured": measured, **document}, _Swept)
    return document


def with_verdicts(rows: Any) -> list[Any]:
    """Return rows of a document with their verdicts read, without credentials; raises as `Verdict.from_dict` does."""
    return [
        {**row, "verdict": Verdict.from_dict(removed(row["verdict"]))} if row.get("verdict") else row for row in rows
    ]


def shaped(value: Any, kind: Any) -> Any:
    """Return `value` as it is where it has the shape of `kind`, with what that does not name; else raise ValueError."""
    msgspec.convert(value, kind)
    return value


class _KnownModel(TypedDict):
    name: str
    type: str
    parameters_total: Size
    size_mb: NonNegative
    dtype: str
    load_time_s: NonNegative


class _KnownDevice(TypedDict):
    type: str


class _Swept(TypedDict):
    """What is known where something was measured."""

    measured: list[MeasuredRow]
    model: _KnownModel
    device: _KnownDevice


class OtherVersion(Exception):
    """A document that another version of the program wrote; `version` is None where it names none."""

    def __init__(self, version: object) -> None:
        super().__init__(f"version {version}")
        self.version = version
