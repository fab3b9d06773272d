"""What to do next, derived from the figures: repairs first, then speed by its possible gain, then what is missing."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from boundby.bound import Fix, factor
from boundby.cli import typed
from boundby.formatting import listed, number, times
from boundby.work import Interval
from utils.baseline import Choice, Row, VariantRow
from utils.report import variants
from utils.report.sources import Missing, ReportData

LEAST_GAIN = 1.05  # a smaller factor is not worth a change
LEAST_BOUND = 1.2  # a fix of which only the most that it can give is known
STILL_RISING = 1.05  # throughput of the largest batch size over the one before
REPAIR, SPEED, TRIAL, CHECK = range(4)


@dataclass(frozen=True)
class Advice:
    """One thing to do; `factor` is that of the throughput; `at_most` is known where it is not."""

    kind: int
    title: str
    why: str
    command: str | None = None
    factor: Interval | None = None
    is_measured: bool = False
    at_most: float | None = None

    @property
    def gain(self) -> float:
        """What the throughput may be multiplied by; a bound alone counts for little, since it is no prediction."""
        return self.factor.value if self.factor else min(self.at_most or 0.0, LEAST_GAIN)

    @property
    def effect(self) -> str:
        """What it may bring, in a few words."""
        if self.factor:
            return f"{'measured' if self.is_measured else 'predicted'} {factor(self.factor)}"
        if self.at_most:
            return f"at most {times(self.at_most)}×"
        kinds = {REPAIR: "needed for a complete result", TRIAL: "gain not known yet", CHECK: "makes the result surer"}
        return kinds.get(self.kind, "")


@dataclass(frozen=True)
class Option:
    """A fix of the verdict that is worth a command: what it gave here, what is predicted, or what it gives at most."""

    fix: Fix
    factor: Interval | None
    is_measured: bool
    at_most: float | None
    basis: str
    same_labels: float | None = None

    @property
    def gain(self) -> float:
        """The factor of the throughput; 0 where only the most that it can be is known."""
        return self.factor.value if self.factor else 0.0


def advice(data: ReportData) -> list[Advice]:
    """Return what to do, the most pressing first."""
    steps = [*_repairs(data), *_unsettled(data), *_speed(data), *_trials(data), *_checks(data)]
    return sorted(steps, key=lambda step: (step.kind, -step.gain, -(step.at_most or 0)))


def _repairs(data: ReportData) -> Iterator[Advice]:
    if not data.document["complete"] and not data.is_under_way:
        resume = data.command.run("--from", "2", "--resume")
        yield Advice(REPAIR, "Finish the measurement", "Step 02 was interrupted; finished rounds are kept.", resume)
    failed = [row for row in data.rows if row["status"] == "failed"]
    if failed:
        where = listed([row["batch_size"] for row in failed])
        why = f"Batch size {where} failed: {failed[0]['reasons']['all']}. {data.layout.log('02')} has the details."
        yield Advice(REPAIR, "Find out why batch sizes failed", why, data.command.run("--from", "2"))
    if data.chosen is None and any(row["status"] == "oom" for row in data.rows):
        size, length = data.rows[0]["batch_size"], data.document["max_length"]
        why = f"Batch size {size} ran out of memory. Shorter texts, bfloat16 or a larger machine may help."
        smaller = [f"profiling.max_length={length // 2}", "model.dtype=bfloat16", "profiling.batch_sizes=[1,2,4]"]
        yield Advice(REPAIR, "Make the model fit", why, data.trial("smaller", *smaller))


def _unsettled(data: ReportData) -> Iterator[Advice]:
    """Yield another measurement where what limits cannot be told because other programs ran."""
    verdict = (data.chosen or {}).get("verdict")
    if not verdict or not verdict.unsettled or verdict.unsettled.kind not in ("disturbed", "unexplained"):
        return
    why = f"What limits is not settled: {verdict.unsettled.text}."
    yield Advice(REPAIR, "Measure again while nothing else runs", why, data.command.run("--from", "2"))


def _speed(data: ReportData) -> Iterator[Advice]:
    row = data.chosen
    if row is None:
        return
    compared = [fix for _, fix in variants.tried(data)]
    options = [option for option in worthwhile(row) if option.fix not in compared]
    yield from _variant(data) if compared else _fastest(data, row, options)
    yield from _batch_size(data, row)
    yield from _dtype(data, row, compared)
    for option in options:
        yield from _option(data, row, option)


def _variant(data: ReportData) -> Iterator[Advice]:
    """Yield the variant that step 05 recommends, which took the place of all that was tried on one batch."""
    chosen, compared = variants.recommended(data), data.variants
    if chosen is None or isinstance(compared, Missing):
        return
    exactness, command, runs_here = chosen["exactness"], variants.command(compared, data), chosen.get("runs_here", True)
    why = f"Tried over {compared['texts']:,} texts, against {variants.compared_with(compared)}; "
    why += f"{exactness['same_labels']:,} of {exactness['rows']:,} labels stay."
    title = f"Use {chosen['words']}"
    if not runs_here:
        title += " in a program of your own"
        why += "" if command else " Its lines stand under the table of the variants."
    elif not command:
        title = _own_batches(chosen, compared["batch_size"])
        why += " The pass over the whole set runs that way already."
    yield Advice(SPEED, title, why, command, Interval(**chosen["gain"]), is_measured=True)


def _own_batches(chosen: VariantRow, batch_size: int) -> str:
    if batch_size == 1:
        return "Compute several texts at once"
    return "Batch texts of similar length" if chosen.get("is_padded") else "Pack the texts (no padding)"


def worthwhile(row: Row) -> Iterator[Option]:
    """Yield the fixes that gained here, and of those not tried the ones that should: what was refuted is left out."""
    verdict = row.get("verdict")
    if not verdict:
        return
    for trial in verdict.trials:
        if trial.is_fix and trial.outcome == "gains" and trial.measured.value >= LEAST_GAIN:
            share = trial.same_labels.share.value if trial.same_labels else None
            yield Option(trial.fix, trial.measured, True, None, "", share)
    # A bound is told where nothing was tried or predicted, and of the input, which overlaps with the forward whole.
    is_bound_only = not verdict.trials and not any(gain.predicted for gain in verdict.gains)
    for gain in verdict.gains:
        known = gain.predicted
        if known is None and gain.at_most >= LEAST_BOUND and (is_bound_only or gain.fix.kind == "overlap_input"):
            yield Option(gain.fix, None, False, gain.at_most, gain.basis)
        elif known and known.low > 1 and known.value >= LEAST_GAIN:
            yield Option(gain.fix, known, False, None, gain.basis)


def _fastest(data: ReportData, row: Row, options: Sequence[Option]) -> Iterator[Advice]:
    """Yield the pass over the whole set, which batches by length, in the fastest precision, if it was in float32."""
    full = data.full
    if full is None or not data.task.HAS_PREDICTED_LABELS:
        return
    if not full["precision"] == full["dtype"] == row["dtype"] == "float32":
        return
    mean, low, high = (row[f"throughput_samples_per_sec_{end}"] for end in ("mean", "ci_low", "ci_high"))
    rate = full["throughput_samples_per_sec"]
    passed = gain = Interval(rate / mean, rate / (high or mean), rate / (low or mean))
    cheaper = [option for option in options if option.fix.kind in ("dtype", "matmul_precision") and option.factor]
    best = max(cheaper, key=lambda option: option.gain, default=None)
    why = (
        f"The pass over the whole set, sorted by length, had {times(passed.value)}× the throughput of batch size "
        f"{row['batch_size']} with unsorted texts"
    )
    if best and (on_top := best.factor):
        gain = Interval(passed.value * on_top.value, passed.low * on_top.low, passed.high * on_top.high)
        why += f", and {best.fix} should give {times(on_top.value)}× on top"
    if gain.value < LEAST_GAIN or gain.low <= 1:
        return
    least = 100 * data.config.evaluation.min_agreement
    why += f". A precision is taken only where it keeps {least:g} % of the labels."
    title = "Sort by length, in the fastest precision that keeps the labels"
    command = data.trial("fastest", "evaluation.precision=fastest")
    yield Advice(SPEED, title, why, command, gain, is_measured=best is None)


def _option(data: ReportData, row: Row, option: Option) -> Iterator[Advice]:
    """Yield the advice that a fix of the verdict leads to; none for what has advice of its own."""
    kind, settings = option.fix.kind, option.fix.settings
    title, command = str(option.fix), None
    why = f"{option.basis[0].upper()}{option.basis[1:]}." if option.basis else ""
    if kind in ("better_kernels", "batch_size"):
        return
    if kind == "remove_padding":
        title = "batch texts of similar length together"
        why = f"{row['padding_pct']:.0f} % of the tokens are padding." if row["padding_pct"] else why
        if data.full and data.full["padding_pct"] < (row["padding_pct"] or 0):
            why += f" The pass over the whole set sorts them and pads {data.full['padding_pct']:.0f} %"
            why += "; boundby.inference does so in a program of yours."
    elif kind == "dtype":
        dtype = str(settings["dtype"])
        if dtype in data.dtypes:
            return  # measured, and said as such
        same = f"{100 * option.same_labels:.1f} % of the labels stayed the same. " if option.same_labels else ""
        why = f"{same}The command measures the accuracy too."
        command = data.trial(dtype, f"model.dtype={dtype}", "profiling.dtypes=null")
    elif kind == "matmul_precision":
        precision = settings["precision"]
        command = data.trial(f"{precision}", f"model.matmul_precision={precision}")
    elif kind == "threads":
        command = f"OMP_NUM_THREADS={settings['threads']} {data.trial('threads')}"
    elif kind == "double_batch":
        size = row["batch_size"]
        command = data.trial("larger", f"profiling.batch_sizes=[{size},{2 * size},{4 * size}]")
    elif kind in ("fuse_operators", "issue_at_once") and data.full:
        command = data.trial("compiled", "evaluation.compile=on")
    title = f"{title[0].upper()}{title[1:]}"
    yield Advice(SPEED, title, why, command, option.factor, option.is_measured, option.at_most)


def _batch_size(data: ReportData, row: Row) -> Iterator[Advice]:
    smallest = next(row for row in data.of(row["dtype"]) if row["throughput_samples_per_sec_mean"])
    gain = _ratio(row, smallest)
    if gain.value < LEAST_GAIN or gain.low <= 1:
        return
    rates = [number(size["throughput_samples_per_sec_mean"]) for size in (row, smallest)]
    latencies = [number(size["latency_per_batch_ms_median"]) for size in (row, smallest)]
    why = (
        f"{rates[0]} samples/s against {rates[1]} at batch size {smallest['batch_size']}; a batch then takes "
        f"{latencies[0]} ms instead of {latencies[1]} ms."
    )
    yield Advice(SPEED, f"Use batch size {row['batch_size']}", why, factor=gain, is_measured=True)


def _ratio(row: Row, other: Row) -> Interval:
    """Return how many times the throughput of `other` a row has, from the ends of both intervals."""
    mean, low, high = (f"throughput_samples_per_sec_{end}" for end in ("mean", "ci_low", "ci_high"))
    least, most = row[low] or row[mean], row[high] or row[mean]
    other_least, other_most = other[low] or other[mean], other[high] or other[mean]
    return Interval(row[mean] / other[mean], least / other_most, most / other_least)


def _dtype(data: ReportData, row: Row, compared: Sequence[Fix | None]) -> Iterator[Advice]:
    for dtype in data.dtypes[1:]:
        best = data.best[dtype]
        faster = next((row for row in data.of(dtype) if row["batch_size"] == best["batch_size"]), None)
        gain = _ratio(faster, row) if faster and Fix("dtype", {"dtype": dtype}) not in compared else None
        if gain and gain.value >= LEAST_GAIN and gain.low > 1:
            why = (
                f"{number(best['throughput_samples_per_sec'])} samples/s at batch size {best['batch_size']}. The "
                "command measures the accuracy too, since labels may change."
            )
            command = data.trial(dtype, f"model.dtype={dtype}", "profiling.dtypes=null")
            yield Advice(SPEED, f"Run the model in {dtype}", why, command, gain, is_measured=True)


def _trials(data: ReportData) -> Iterator[Advice]:
    row = data.chosen
    if row is None:
        return
    rows = data.of(row["dtype"])
    rates = [point["throughput_samples_per_sec_mean"] for point in rows]
    if None not in rates and len(rates) > 1 and rates[-1] >= STILL_RISING * rates[-2]:
        largest = rows[-1]["batch_size"]
        why = f"The throughput still rises at batch size {largest}, the largest that was tried."
        sizes = ",".join(str(size) for size in (largest, 2 * largest, 4 * largest))
        command = data.trial("larger", f"profiling.batch_sizes=[{sizes}]", "evaluation.enabled=false")
        yield Advice(TRIAL, "Try larger batch sizes", why, command)
    if data.is_on_gpu and data.dtypes == ["float32"]:
        command = data.trial("dtypes", "profiling.dtypes=[float32,bfloat16]", "evaluation.enabled=false")
        why = "GPUs have faster units for it, and it halves the memory of the weights."
        yield Advice(TRIAL, "Measure bfloat16 beside float32", why, command)
    for target in data.targets:
        if target["met"] is False:
            yield Advice(TRIAL, *_missed(data, target["name"]))


def _missed(data: ReportData, name: str) -> tuple[str, str]:
    """Return title and reason for a target that is missed."""
    choice = data.choice
    if name == "latency_per_sample_ms":
        return "Meet the latency target", _alternative(choice["under_latency"])
    if name == "gpu_memory_mb":
        return "Meet the memory target", _alternative(choice["within_gpu_memory"])
    if name == "throughput_samples_per_sec":
        best = choice["max_throughput"]
        rate = f"{number(best['throughput_samples_per_sec'])} samples/s at batch size {best['batch_size']}"
        return "Meet the throughput target", f"The sweep reached {rate}; another dtype, length or machine changes it."
    if name == "gpu_utilization_pct":
        return (
            "Raise the GPU utilisation",
            "Larger batches or sorted texts leave fewer gaps; the sweep shows how it grows.",
        )
    mistakes = data.layout.evaluated.confident_mistakes
    return "Meet the accuracy target", f"Start with the surest mistakes, in {mistakes}: wrong labels are among them."


def _alternative(choice: Choice) -> str:
    if choice["batch_size"] is None:
        return f"No batch size does ({choice['reason']}): a shorter profiling.max_length, another dtype or machine may."
    rate = number(choice["throughput_samples_per_sec"])
    return f"Batch size {choice['batch_size']} ({rate} samples/s in the sweep) is {choice['reason']}."


def _checks(data: ReportData) -> Iterator[Advice]:
    noisy = [row for row in data.rows if row["status"] == "noisy"]
    if noisy and not any(_unsettled(data)):
        sizes = sorted({row["batch_size"] for row in noisy})
        settings = [
            f"profiling.batch_sizes=[{','.join(map(str, sizes))}]",
            f"profiling.max_seconds_per_batch_size={2 * data.config.profiling.max_seconds_per_batch_size:g}",
        ]
        command = data.trial("again", *settings, "evaluation.enabled=false")
        why = (
            f"Batch size {listed(sizes)}: the interval is too wide. Stop other programs; the command doubles the time."
        )
        yield Advice(CHECK, "Measure noisy batch sizes again", why, command)
    if data.chosen and isinstance(data.operators, Missing):
        enabled = [] if data.config.trace.enabled else ["trace.enabled=true"]
        why = f"The operators are not known: {data.operators.reason}."
        yield Advice(CHECK, "Record a trace", why, data.command.run("--from", "3", *enabled))
    yield from _evaluation(data)
    if data.document["synthetic"]:
        command = typed("run", "model.name=NAME", "dataset.file=FILE.csv")
        why = (
            "These figures are of a synthetic model. Give the name or folder of yours, and a file with texts; it "
            "needs no labels."
        )
        yield Advice(CHECK, "Measure your own model", why, command)


def _evaluation(data: ReportData) -> Iterator[Advice]:
    full, rows = data.full, data.document["dataset"].get("rows")
    if full is None:
        if data.document["complete"] and data.chosen:
            command = data.command.run("--from", "2", "evaluation.enabled=true")
            yield Advice(CHECK, "Evaluate the dataset", "Accuracy and speed over all texts are not known.", command)
        return
    if rows and full["samples"] < rows:
        command = data.command.run("--from", "2", "evaluation.limit=null", "dataset.sample_sizes=null")
        yield Advice(CHECK, "Evaluate every row", f"{full['samples']:,} of {rows:,} rows were evaluated.", command)
    if full["truncated"]:
        length = data.document["max_length"]
        longest = data.document["model"].get("max_positions") or 2 * length
        share = 100 * full["truncated"] / full["samples"]
        why = f"{full['truncated']:,} texts ({share:.2f} %) were cut to {length} tokens; what was cut cannot count."
        if longest > length:
            command = data.trial("longer", f"profiling.max_length={min(2 * length, longest)}")
            yield Advice(CHECK, "See whether the cut texts cost accuracy", why, command)
