"""The columns of the sweep, each once: what it is, where its value comes from, and why that may be missing.

The rows of `detailed_metrics.csv` and `baseline_metrics.json`, what a reader checks in them, the tables of
docs/metrics.md (`markdown`) and the heat map are made from this table, so that a new column is one more entry.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from statistics import median, stdev
from typing import TYPE_CHECKING, Any, Literal, NotRequired, TypedDict, get_args

from boundby.bound import Bound, Confidence, Doubt, Verdict, doubts_of
from boundby.formatting import Missing
from boundby.machine import LEAST_WINDOW_S, changed_clock
from boundby.timing import Estimate, Summary, Totals, drift, estimate, least_samples, reach, summarize
from utils.baseline.rounds import Quantity, Visit, reference_rounds, rounds, usable, whole_of
from utils.evaluation import NonNegative, Positive, Size

Section = Literal["sweep", "memory", "device", "work"]
Status = Literal["ok", "noisy", "oom", "failed", "skipped_oom"]
MEASURED = ("ok", "noisy")
NO_REFERENCE = "the reference batch was not timed"
NOT_DIAGNOSED = "the sweep was not finished; the verdict is made after it"
MB = 1e6
LEAST_READINGS = 5
LEAST_DRIFT = 0.02
DRIFT_WIDTHS = 2.5  # half intervals; rounds that do not drift pass it in 3 of 100 sweeps, at one they did in 40


Value = float | int | str | bool | Missing


@dataclass(frozen=True)
class Point:
    """The visits of one batch size that was measured, and what they say together."""

    visits: Sequence[Visit]
    half_width: float  # of the throughput, above which the row is noisy

    @property
    def first(self) -> Visit:
        """The first visit, which has the cold call and the warm-up."""
        return self.visits[0]

    @cached_property
    def counted(self) -> list[Visit]:
        """The visits that count: those that nothing disturbed, where they are enough."""
        return usable(self.visits)

    @cached_property
    def latency(self) -> Estimate:
        """Seconds per sample of calls timed alone."""
        return estimate(self._isolated)

    @cached_property
    def throughput(self) -> Estimate:
        """Seconds per sample of calls queued one after another."""
        return estimate(self.queued)

    @cached_property
    def queued(self) -> list[float]:
        """Seconds per sample of each round, of calls queued one after another; on a CPU of calls timed alone."""
        return rounds(self.counted, "pipelined") or self._isolated

    @cached_property
    def _isolated(self) -> list[float]:
        return rounds(self.counted, "isolated")

    @cached_property
    def batches(self) -> Summary:
        """Seconds of all forwards that were timed alone."""
        return summarize([timing.seconds for visit in self.counted for timing in visit.of("isolated")])

    @property
    def is_noisy(self) -> bool:
        """Whether the throughput is less certain than was asked for."""
        return self.throughput.half_width is None or self.throughput.half_width > self.half_width

    @cached_property
    def reference(self) -> Estimate | None:
        """Seconds of the reference batch; None where it was not timed."""
        values = reference_rounds(self.counted)
        return estimate(values) if values else None

    @cached_property
    def whole(self) -> Totals:
        """What the dataset holds in batches of this size."""
        totals = whole_of(self.visits)
        assert totals is not None  # batches were timed
        return totals

    @property
    def real(self) -> float:
        """Tokens of one text."""
        return self.whole.tokens_real / self.whole.samples

    @property
    def padded(self) -> float:
        """Tokens of one text with its padding."""
        return self.whole.tokens_padded / self.whole.samples

    @property
    def samples_per_batch(self) -> float:
        """Texts in a batch: as many as were asked for, but for the last one."""
        return self.whole.samples / self.whole.batches


@dataclass(frozen=True)
class Finding:
    """What was found out about one batch size after the sweep: work by forward, energy by sample, and the verdict."""

    batch_size: int
    verdict: Verdict
    isolated_s: float
    flops: float | Missing
    useful_flops: float | Missing
    moved_bytes: float | Missing
    peak_flops_per_s: float | Missing
    energy_j: float | Missing
    energy_net_j: float | Missing
    attention_backend: str | Missing = Missing(NOT_DIAGNOSED)

    def fill(self, row: "Row") -> "Row":
        """Return the row with what was found, and its doubts joined by those of the verdict."""
        values = {column.name: column.diagnosed(self) for column in COLUMNS if column.diagnosed}
        doubts = list(dict.fromkeys([*doubts_of(row), *self.verdict.doubts]))
        reasons = {name: why for name, why in row["reasons"].items() if name not in values}
        return {**row, **_plain(values, doubts, reasons), "verdict": self.verdict.as_dict()}


@dataclass(frozen=True)
class Meaning:
    """What a column, or several that belong together, is and is not, and where docs/metrics.md says so."""

    says: str
    is_not: str = ""
    section: Section = "sweep"


@dataclass(frozen=True)
class Column:
    """A column: its name with the unit, its meaning, and its value `of` a measured point or `diagnosed` afterwards.

    `kind` is the type of a value, which may be None but where every measured row has one, of the type `known`. `shown`
    names it in the heat map, where `is_better` says whether more or less is.
    """

    name: str
    meaning: Meaning
    of: Callable[[Point], Value] | None = None
    diagnosed: Callable[[Finding], Value] | None = None
    kind: Any = NonNegative | None
    known: Any = None
    shown: str | None = None
    is_better: Literal["more", "less"] = "less"


def rows(visits: Sequence[Visit], batch_sizes: Sequence[int], half_width: float) -> "list[Row]":
    """Return a row per batch size with the keys of `COLUMNS`, `doubt_kinds`, and `reasons` for what is None.

    A row whose throughput is less certain than `half_width` (a share) has the status `noisy`.
    """
    made = list[Row]()
    out_of_memory_at: int | None = None
    for batch_size in sorted(batch_sizes):
        own = [visit for visit in visits if visit.batch_size == batch_size]
        failed = next((visit for visit in own if visit.status != "ok"), None)
        if failed:
            made.append(_empty(failed.dtype, batch_size, failed.status, failed.message or failed.status))
            if failed.status == "oom":
                out_of_memory_at = out_of_memory_at or batch_size
        elif own:
            made.append(row(Point(own, half_width)))
        elif out_of_memory_at:
            reason = f"batch size {out_of_memory_at} ran out of memory"
            made.append(_empty(visits[0].dtype, batch_size, "skipped_oom", reason))
    return made


def row(point: Point) -> "Row":
    """Return the row of a measured point before anything else is found out about it.

    Beside its columns stands `whole`, what the dataset holds in batches of this size.
    """
    values = {column.name: column.of(point) if column.of else Missing(NOT_DIAGNOSED) for column in COLUMNS}
    return {**_plain(values, list(_doubts(point)), {}), "whole": asdict(point.whole)}


def _plain(values: Mapping[str, Value], doubts: Sequence[Doubt], reasons: Mapping[str, str]) -> "Row":
    missing = {name: value.reason for name, value in values.items() if isinstance(value, Missing)}
    return {
        **{name: None if isinstance(value, Missing) else value for name, value in values.items()},
        "doubts": [str(doubt) for doubt in doubts],
        "doubt_kinds": [doubt.kind for doubt in doubts],
        "reasons": {**reasons, **missing},
    }


def _empty(dtype: str, batch_size: int, status: str, reason: str) -> "Row":
    known = {"dtype": dtype, "batch_size": batch_size, "status": status, "doubts": [], "doubt_kinds": []}
    return {**dict.fromkeys(NAMES), **known, "reasons": {"all": reason}}


def per_batch(visits: Sequence[Visit], quantity: Quantity) -> float | None:
    """Return the seconds of the mean batch of the dataset, the median of all visits; None where none was timed."""
    whole, seconds = whole_of(visits), rounds(visits, quantity)
    return median(seconds) * whole.samples / whole.batches if whole and seconds else None


def _tokenize_s(point: Point) -> float:
    """Return the seconds of the tokenizer for the mean batch, by the tokens it made."""
    per_token = median(t.seconds / t.tokens_real for visit in point.visits for t in visit.of("tokenize"))
    return per_token * point.whole.tokens_real / point.whole.batches


def sampled(visits: Sequence[Visit], quantity: str) -> float | Missing:
    """Return the mean of what was read beside all visits."""
    readings = [value for visit in visits for value in visit.readings.get(quantity, ())]
    window = sum(visit.window_s for visit in visits)
    if not readings and quantity in visits[0].reading_reasons:
        return Missing(visits[0].reading_reasons[quantity])
    if window < LEAST_WINDOW_S or len(readings) < LEAST_READINGS:
        few = f"{len(readings)} readings in {window:.1f} s"
        return Missing(f"{few}; a mean takes {LEAST_READINGS} in {LEAST_WINDOW_S:.0f} s")
    return sum(readings) / len(readings)


def _known(value: float | None, reason: str, scale: float = 1.0) -> float | Missing:
    return Missing(reason) if value is None else value * scale


def _end(value: float | None, scale: float = 1.0) -> float | Missing:
    return _known(value, "one round gives no interval", scale)


def _inverse(value: float | None) -> float | Missing:
    return _end(1 / value if value else None)


def _ratio(above: float | Missing, below: float | Missing, scale: float = 1.0) -> float | Missing:
    if isinstance(above, Missing):
        return above
    if isinstance(below, Missing):
        return below
    return scale * above / below if below else Missing("the forward has no FLOPs")


def _first(value: Any) -> Value:
    return Missing("the first round did not record it") if value is None else value


def _percentile(name: str) -> Callable[[Point], Value]:
    def of(point: Point) -> Value:
        needed = least_samples(int(name[1:]) / 100)
        reason = f"{point.batches.n} timed batches; at least {needed} support it"
        return _known(getattr(point.batches, name), reason, 1e3)

    return of


def _reference(point: Point, end: Callable[[Estimate], float | None]) -> float | Missing:
    return _end(end(point.reference), 1e3) if point.reference else Missing(NO_REFERENCE)


def _reference_tokens(point: Point) -> int | Missing:
    timed = next((timing for visit in point.visits for timing in visit.of("reference")), None)
    return timed.tokens_padded // timed.samples if timed else Missing(NO_REFERENCE)


def _most(field: str) -> Callable[[Point], Value]:
    """Return the column of the most of all visits, in MB."""

    def of(point: Point) -> Value:
        used = [visit.memory for visit in point.visits]
        values = [value for memory in used if (value := getattr(memory, field, None)) is not None]
        reasons = "; ".join(point.first.memory.reasons if point.first.memory else ())
        return max(values) / MB if values else Missing(reasons or "unknown")

    return of


def _reading(name: str) -> Callable[[Point], Value]:
    return lambda point: sampled(point.visits, name)


def _timed(quantity: Quantity) -> Callable[[Point], Value]:
    return lambda point: _known(per_batch(point.counted, quantity), point.first.device_reason or "unknown", 1e3)


def _device_by(point: Point) -> Value:
    ways = dict.fromkeys(visit.device_by for visit in point.counted if visit.device_by)
    return ", ".join(ways) if ways else Missing(point.first.device_reason or "unknown")


def _doubts(point: Point) -> Iterator[Doubt]:
    interval, batches = point.throughput, point.batches
    if interval.half_width is None:
        text = "one round gives no interval; raise num_measurement_runs or max_seconds_per_batch_size"
        yield Doubt("noisy", text)
    elif point.is_noisy:
        text = (
            f"the 95 % interval is ±{100 * interval.half_width:.1f} %, wider than {100 * point.half_width:.1f} %; "
            "quiet the machine or raise max_seconds_per_batch_size"
        )
        yield Doubt("noisy", text)
    if point.first.warm_up and not point.first.warm_up.converged:
        yield Doubt("warm-up", "it did not converge")
    if batches.outliers:
        text = f"{batches.outliers} of {batches.n} batches lie ten standard deviations or more from the median"
        yield Doubt("outliers", text)
    moved = drift(point.queued)
    if moved is not None and abs(moved) > max(LEAST_DRIFT, DRIFT_WIDTHS * _reach(point.queued)):
        direction = "longer" if moved > 0 else "shorter"
        text = f"the last third of the rounds took {100 * abs(moved):.1f} % {direction} than the first"
        yield Doubt("drift", text)
    clocks = sorted((visit.conditions.gpu_sm_clock_mhz for visit in point.counted if visit.conditions), key=_middle)
    if clocks and (changed := changed_clock(clocks[0], clocks[-1])):
        yield Doubt("throttled", f"two of the rounds: {changed}")
    for text in sorted({text for visit in point.counted if visit.memory for text in visit.memory.doubts}):
        yield Doubt("memory", text)
    yield from _disturbed(point.counted)


def _middle(clocks: Sequence[float]) -> float:
    return median(clocks) if clocks else math.inf


def _reach(rounds: Sequence[float]) -> float:
    """Return half the interval of these rounds, as a share, as if they were independent: those that drift are not."""
    return reach(stdev(map(math.log, rounds)), len(rounds))


def _disturbed(visits: Sequence[Visit]) -> Iterator[Doubt]:
    """Yield one doubt on the disturbances of the visits that count, if there are any."""
    texts: dict[str, list[str]] = {}
    for disturbance in (disturbance for visit in visits for disturbance in visit.disturbances):
        texts.setdefault(disturbance.kind, []).append(disturbance.text)
    if texts:
        rounds = sum(bool(visit.disturbances) for visit in visits)
        examples = "; ".join(f"{said[0]}{f' (in {len(said)})' if len(texts) > 1 else ''}" for said in texts.values())
        yield Doubt("disturbed", f"{rounds} of {len(visits)} rounds: {examples}")


LATENCY = Meaning(
    "seconds per sample of one pass over the whole dataset in order of arrival, in batches of this size, each timed "
    "alone. A round times some of the batches, drawn over all lengths; its time is scaled by what all batches cost "
    "over what these cost ([method](method.md)). Geometric mean over the rounds. `_ci_low`, `_ci_high`, here and below:"
    " 95 % t-interval on the logarithms of one value per round, widened by 1.1; it covers the choice of texts and the "
    "noise",
    is_not="what one user waits for: at batch size 32 a user waits for the batch; nor is the interval the spread"
    " of single calls: consecutive calls are not independent, rounds are",
)
BATCH = Meaning(
    "one forward, from an idle device to an idle device. The mean is over all batches of the dataset; the spread is "
    "that of the timed ones, of which every batch of the dataset is as likely as any other, and holds the spread of "
    "text lengths",
    is_not="the time of a request: tokenization, transfer and queueing are not in it",
)
REFERENCE = Meaning(
    "the batch of typical cost, whose padded tokens are nearest to the mean of all batches of this size: the tokens to "
    "which its texts are padded, and its own time, measured in every round, median of up to three calls in a row. "
    "Trace, layers and verdict look at this batch",
    is_not="the mean batch: long batches cost more than short ones save, and a batch that was just run is faster",
)
PERCENTILE = Meaning(
    "percentiles over the batches of the dataset, from those that were timed; only where these support them: 29, 59 "
    "and 299 timed batches",
    is_not="a guess from ten runs; below that they are null",
)
THROUGHPUT = Meaning(
    "samples over time in a pass over the whole dataset in order of arrival, with forwards queued one after another "
    "and one wait at the end (GPU); on a CPU a call that returns has finished, so it is the inverse of the latency per "
    "sample",
    is_not="the speed of the evaluation, which batches by length: see below",
)
TOKENS = Meaning(
    "tokens of the texts, and tokens the model computes, per second",
)
WARM_UP = Meaning(
    "untimed forwards of the first round, and whether their times had settled by then",
)
HELD = Meaning(
    "held by tensors, and held by PyTorch's allocator, after a round",
    is_not="what the driver's tool shows: the context comes on top",
    section="memory",
)
PEAK = Meaning(
    "the most of either since the start of the timed part, weights included",
    section="memory",
)
RESIDENT = Meaning(
    "resident set of the process, and its peak in the round (Linux resets it per round)",
    is_not="memory of the model alone: Python and libraries are in it",
    section="memory",
)
SENSOR = Meaning(
    "means of the driver's readings beside the timed work",
    is_not="energy: the power sensor sees a part of the time",
    section="device",
)
DEVICE = Meaning(
    "GPU: the device's own time with the queue filled beforehand, the host's time to issue the forward, "
    "the time to bring the batch to the device; mean over the batches of the dataset, median over the rounds. Null "
    "on a CPU",
    is_not="parts of the latency that add up: they overlap",
    section="device",
)
ENERGY = Meaning(
    "from the counter of joules, over windows of at least 5 s; net is without what the idle machine takes",
    is_not="an estimate: without a counter they are null",
    section="device",
)
WORK = Meaning(
    "what the operators of one forward compute and move, counted, mean over the timed batches",
    is_not="what a cache lets through to memory: bytes are an upper bound",
    section="work",
)
RATE = Meaning(
    "FLOPs over the isolated latency, and their share of the measured peak in this dtype with the settings in use",
    is_not="a utilisation by a data sheet's peak",
    section="work",
)
LIMIT = Meaning(
    "what limits the forward, and the time that the limits alone need over the time measured",
    section="work",
)
COLUMNS: tuple[Column, ...] = (
    Column("dtype", Meaning("the number format of the weights"), lambda p: p.first.dtype, kind=str),
    Column("batch_size", Meaning("texts in a forward"), lambda p: p.first.batch_size, kind=Size),
    Column(
        "status",
        Meaning("`ok`, or what is wrong with the row: see below"),
        lambda p: "noisy" if p.is_noisy else "ok",
        kind=Status,
    ),
    Column("rounds", Meaning("rounds that count"), lambda p: len(p.counted)),
    Column("timed_batches", Meaning("forwards that were timed alone"), lambda p: p.batches.n, known=Size),
    Column(
        "latency_per_sample_ms_mean",
        LATENCY,
        lambda p: p.latency.value * 1e3,
        known=Positive,
        shown="latency per sample, ms",
    ),
    Column("latency_per_sample_ms_ci_low", LATENCY, lambda p: _end(p.latency.low, 1e3)),
    Column("latency_per_sample_ms_ci_high", LATENCY, lambda p: _end(p.latency.high, 1e3)),
    Column(
        "latency_per_token_ms_mean",
        Meaning(
            "the same per real token, padding not counted", is_not="a decoding speed; a classifier makes no tokens"
        ),
        lambda p: p.latency.value * 1e3 / p.real,
        known=Positive,
    ),
    Column("latency_per_batch_ms_mean", BATCH, lambda p: p.latency.value * p.samples_per_batch * 1e3, known=Positive),
    Column(
        "latency_per_batch_ms_median",
        BATCH,
        lambda p: p.batches.median * 1e3,
        known=Positive,
        shown="latency per batch, median, ms",
    ),
    Column("latency_per_batch_ms_std", BATCH, lambda p: _known(p.batches.std, "one timed batch has no spread", 1e3)),
    Column("latency_per_batch_ms_min", BATCH, lambda p: p.batches.minimum * 1e3, known=Positive),
    Column("latency_per_batch_ms_max", BATCH, lambda p: p.batches.maximum * 1e3, known=Positive),
    Column("latency_per_batch_ms_q1", BATCH, lambda p: p.batches.q1 * 1e3, known=Positive),
    Column("latency_per_batch_ms_q3", BATCH, lambda p: p.batches.q3 * 1e3, known=Positive),
    Column("reference_tokens", REFERENCE, _reference_tokens),
    Column("reference_ms", REFERENCE, lambda p: _reference(p, lambda e: e.value), shown="reference batch, ms"),
    Column("reference_ms_ci_low", REFERENCE, lambda p: _reference(p, lambda e: e.low)),
    Column("reference_ms_ci_high", REFERENCE, lambda p: _reference(p, lambda e: e.high)),
    Column("latency_per_batch_ms_p90", PERCENTILE, _percentile("p90")),
    Column("latency_per_batch_ms_p95", PERCENTILE, _percentile("p95"), shown="latency per batch, 95th percentile, ms"),
    Column("latency_per_batch_ms_p99", PERCENTILE, _percentile("p99")),
    Column(
        "throughput_samples_per_sec_mean",
        THROUGHPUT,
        lambda p: 1 / p.throughput.value,
        known=Positive,
        shown="throughput, samples/s",
        is_better="more",
    ),
    Column("throughput_samples_per_sec_ci_low", THROUGHPUT, lambda p: _inverse(p.throughput.high)),
    Column("throughput_samples_per_sec_ci_high", THROUGHPUT, lambda p: _inverse(p.throughput.low)),
    Column(
        "throughput_half_width_pct",
        Meaning(
            "half of that interval as a share; above `profiling.ci_half_width`, and without one above 5 % (2 % on a "
            "GPU), the row is `noisy`"
        ),
        lambda p: _end(p.throughput.half_width, 100),
        shown="uncertainty of the throughput, ± %",
    ),
    Column("batches_per_sec", THROUGHPUT, lambda p: 1 / p.throughput.value / p.samples_per_batch, known=Positive),
    Column(
        "tokens_per_sec_real",
        TOKENS,
        lambda p: p.real / p.throughput.value,
        known=Positive,
        shown="real tokens/s",
        is_better="more",
    ),
    Column("tokens_per_sec_padded", TOKENS, lambda p: p.padded / p.throughput.value, known=Positive),
    Column(
        "padding_pct",
        Meaning("share of computed tokens that are padding when all texts are batched as they come, counted"),
        lambda p: 100 * (1 - p.real / p.padded),
        known=NonNegative,
        shown="padding, % of tokens",
    ),
    Column(
        "tokenize_per_batch_ms",
        Meaning("the tokenizer on the texts of the mean batch, called batch by batch, outside the timed forward"),
        lambda p: 1e3 * _tokenize_s(p),
        known=NonNegative,
        shown="tokenizing a batch, ms",
    ),
    Column(
        "cold_call_ms",
        Meaning(
            "the first forward at this batch size in its process, kept apart from all others",
            is_not="a steady latency; it holds allocation, kernel selection and caches",
        ),
        lambda p: _first(next((t.seconds * 1e3 for t in p.first.of("cold")), None)),
        shown="first (cold) call, ms",
    ),
    Column("warmup_runs", WARM_UP, lambda p: _first(p.first.warm_up and p.first.warm_up.runs)),
    Column(
        "warmup_converged", WARM_UP, lambda p: _first(p.first.warm_up and p.first.warm_up.converged), kind=bool | None
    ),
    Column("memory_allocated_mb", HELD, _most("device_allocated_bytes")),
    Column("memory_reserved_mb", HELD, _most("device_reserved_bytes")),
    Column("memory_peak_mb", PEAK, _most("device_peak_allocated_bytes"), shown="GPU memory, peak allocated, MB"),
    Column("memory_peak_reserved_mb", PEAK, _most("device_peak_reserved_bytes"), shown="GPU memory, peak reserved, MB"),
    Column("memory_cpu_mb", RESIDENT, _most("process_bytes")),
    Column("memory_cpu_peak_mb", RESIDENT, _most("process_peak_bytes"), shown="CPU memory, peak, MB"),
    Column(
        "gpu_utilization_pct",
        Meaning(
            "the driver's: the share of its last period (1/6 s to 1 s) in which a kernel ran, averaged over at least 2 "
            "s of timed work",
            is_not="a sign of what limits the model: one tiny kernel after another gives 100 %",
            section="device",
        ),
        _reading("gpu_utilization_pct"),
        shown="GPU utilisation, %",
        is_better="more",
    ),
    Column("gpu_power_w", SENSOR, _reading("gpu_power_w")),
    Column("gpu_sm_clock_mhz", SENSOR, _reading("gpu_sm_clock_mhz")),
    Column(
        "cpu_utilization_pct",
        Meaning(
            "share of all cores' time in which anything ran, a waiting thread that spins included",
            is_not="useful work",
            section="device",
        ),
        _reading("cpu_utilization_pct"),
    ),
    Column("device_per_batch_ms", DEVICE, _timed("device")),
    Column("enqueue_per_batch_ms", DEVICE, _timed("enqueue")),
    Column("transfer_per_batch_ms", DEVICE, _timed("transfer")),
    Column(
        "device_time_by",
        Meaning(
            "in which way the device's own time was taken: behind a `backlog` that holds the device; for more launches "
            "than its queue holds by replaying a `graph`, or in `chunks`, each behind a backlog; for a forward that "
            "waits for the device by its `kernels`, added up",
            is_not="all the same: a graph has shorter gaps between kernels, and kernels added up have none",
            section="device",
        ),
        _device_by,
        kind=NotRequired[str | None],  # documents of earlier runs lack it
    ),
    Column("energy_per_sample_j", ENERGY, diagnosed=lambda f: f.energy_j),
    Column("energy_per_sample_net_j", ENERGY, diagnosed=lambda f: f.energy_net_j, kind=float | None),
    Column(
        "attention_backend",
        Meaning(
            "what computed attention in the reference batch, by its operators: a backend of "
            "`torch.nn.attention.SDPBackend` (`flash`, `mem_efficient`, `cudnn`, `math`), another library "
            "(`flash_attn`), or `eager`; several are joined by +",
            is_not="the setting: a kernel that does not take a mask or a dtype gives way to another",
            section="work",
        ),
        diagnosed=lambda f: f.attention_backend,
        kind=NotRequired[str | None],
    ),
    Column("flops_per_batch", WORK, diagnosed=lambda f: f.flops),
    Column(
        "useful_flops_pct",
        Meaning("FLOPs that the same texts need without padding", section="work"),
        diagnosed=lambda f: _ratio(f.useful_flops, f.flops, 100),
    ),
    Column("bytes_per_batch", WORK, diagnosed=lambda f: f.moved_bytes),
    Column("flops_per_sec", RATE, diagnosed=lambda f: _ratio(f.flops, f.isolated_s)),
    Column(
        "share_of_ceiling_pct", RATE, diagnosed=lambda f: _ratio(_ratio(f.flops, f.isolated_s), f.peak_flops_per_s, 100)
    ),
    Column("bound", LIMIT, diagnosed=lambda f: f.verdict.bound, kind=Bound | None),
    Column(
        "share_of_limit_pct",
        LIMIT,
        diagnosed=lambda f: _known(f.verdict.share_of_limit, "; ".join(map(str, f.verdict.doubts[-1:])), 100),
    ),
    Column(
        "confidence",
        Meaning(
            "`high`, `medium`, `low`: whether trials bear it out, and whether the figures are doubtful",
            is_not="a probability",
            section="work",
        ),
        diagnosed=lambda f: f.verdict.confidence,
        kind=Confidence | None,
    ),
    Column(
        "disturbed_rounds",
        Meaning(
            "rounds that something else disturbed and repeats did not escape; left out where five others exist",
            section="work",
        ),
        lambda p: sum(visit.is_disturbed for visit in p.visits),
    ),
    Column(
        "doubts",
        Meaning("what speaks against the row, by kind: see below", section="work"),
        lambda p: "",
        kind=list[str],
    ),
)
NAMES = tuple(column.name for column in COLUMNS)
# One batch size of the sweep in one dtype; a row may have more. `reasons` says why a column is None, under `all` where
# the whole row is empty; `whole` is what the dataset holds in batches of this size.
_BESIDE = {
    "doubt_kinds": list[str],
    "reasons": dict[str, str],
    "verdict": NotRequired[Verdict],
    "whole": NotRequired[Totals],
}
if TYPE_CHECKING:  # the table is made as the program runs: a type checker knows no key of it
    Row = dict[str, Any]
    MeasuredRow = dict[str, Any]
else:
    Row = TypedDict("Row", {**{column.name: column.kind for column in COLUMNS}, **_BESIDE})
    MeasuredRow = TypedDict("MeasuredRow", {column.name: column.known for column in COLUMNS if column.known})


def explained(page: str) -> str:
    """Return docs/metrics.md with its tables on the columns made anew; columns of one meaning share a line."""
    for section in get_args(Section):
        lines = [f"<!-- columns: {section} -->", "| column | definition | what it is not |", "| --- | --- | --- |"]
        for meaning in dict.fromkeys(column.meaning for column in COLUMNS if column.meaning.section == section):
            names = ", ".join(f"`{column.name}`" for column in COLUMNS if column.meaning == meaning)
            lines.append(f"| {names} | {meaning.says} | {meaning.is_not} |")
        start = page.index(lines[0])
        page = page[:start] + "\n".join(lines) + page[page.index("\n\n", start) :]
    return page
