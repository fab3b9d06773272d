"""What to do next, derived from the figures: repairs first, then speed by its possible gain, then what is missing."""

from collections.abc import Iterator
from dataclasses import dataclass

from utils.document import Choice, Row
from utils.render.formatting import listed, number, times
from utils.report.sources import Missing, ReportData

LEAST_GAIN = 1.05  # a smaller factor is not worth a change
STILL_RISING = 1.05  # throughput of the largest batch size over the one before
REPAIR, SPEED, TRIAL, CHECK = range(4)


@dataclass(frozen=True)
class Advice:
    """One thing to do; `gain` is a factor on the throughput, None where it cannot be told from these figures."""

    kind: int
    title: str
    why: str
    command: str | None = None
    gain: float | None = None
    is_measured: bool = False

    @property
    def effect(self) -> str:
        """What it may bring, in a few words."""
        kinds = {REPAIR: "needed for a complete result", TRIAL: "gain not known yet", CHECK: "makes the result surer"}
        if self.gain is None:
            return kinds.get(self.kind, "")
        limit = "measured" if self.is_measured else "at most"
        return f"{limit} {times(self.gain)} times the throughput"


def advice(data: ReportData) -> list[Advice]:
    """Return what to do, the most pressing first."""
    steps = [*_repairs(data), *_speed(data), *_trials(data), *_checks(data)]
    return sorted(steps, key=lambda step: (step.kind, -(step.gain or 0)))


def _repairs(data: ReportData) -> Iterator[Advice]:
    if not data.document["complete"]:
        resume = data.command.run("--from", "2", "--resume")
        yield Advice(REPAIR, "Finish the measurement", "Step 02 was interrupted; finished visits are kept.", resume)
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


def _speed(data: ReportData) -> Iterator[Advice]:
    row = data.chosen
    if row is None:
        return
    yield from _batch_size(data, row)
    yield from _dtype(data, row)
    yield from _gains(data, row)


def _gains(data: ReportData, row: Row) -> Iterator[Advice]:
    """Yield the fixes of the verdict that somebody can do; what was tried here counts for what it gave."""
    for gain in (row.get("verdict") or {}).get("gains", ()):
        fix, kind, settings = gain["fix"], gain.get("kind"), gain.get("settings", {})  # older results have no kinds
        why, tried = f"{gain['basis'][0].upper()}{gain['basis'][1:]}.", gain.get("measured")
        factor = tried["value"] if tried else gain["at_most"]
        if factor < LEAST_GAIN or kind in ("better_kernels", "batch_size"):
            continue
        command = None
        if kind == "remove_padding":
            fix = "Batch texts of similar length together"
            if data.full and data.full["padding_pct"] < row["padding_pct"]:
                why += f" The whole-dataset pass sorts them and pads {data.full['padding_pct']:.1f} %."
        elif kind == "dtype":
            dtype = settings["dtype"]
            if dtype in data.dtypes:
                continue  # measured, and said as such
            why += " Labels may change: the command measures the accuracy too."
            command = data.trial(dtype, f"model.dtype={dtype}", "profiling.dtypes=null")
        elif kind == "matmul_precision":
            precision = settings["precision"]
            command = data.trial(precision, f"model.matmul_precision={precision}")
        yield Advice(SPEED, f"{fix[0].upper()}{fix[1:]}", why, command, factor, is_measured=tried is not None)


def _batch_size(data: ReportData, row: Row) -> Iterator[Advice]:
    smallest = next(point for point in data.of(row["dtype"]) if point["throughput_samples_per_sec_mean"])
    gain = row["throughput_samples_per_sec_mean"] / smallest["throughput_samples_per_sec_mean"]
    if gain < LEAST_GAIN:
        return
    rates = [number(point["throughput_samples_per_sec_mean"]) for point in (row, smallest)]
    latencies = [number(point["latency_per_batch_ms_median"]) for point in (row, smallest)]
    why = (
        f"{rates[0]} samples/s against {rates[1]} at batch size {smallest['batch_size']}; a batch then takes "
        f"{latencies[0]} ms instead of {latencies[1]} ms."
    )
    yield Advice(SPEED, f"Use batch size {row['batch_size']}", why, gain=gain, is_measured=True)


def _dtype(data: ReportData, row: Row) -> Iterator[Advice]:
    for dtype in data.dtypes[1:]:
        best = data.best[dtype]
        rate = best["throughput_samples_per_sec"]
        gain = rate / row["throughput_samples_per_sec_mean"] if rate else 0.0
        if gain >= LEAST_GAIN:
            why = (
                f"{number(rate)} samples/s at its optimal batch size {best['batch_size']}, measured here. Labels may "
                "change: the command measures the accuracy too."
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
    if noisy:
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
        command = "python run_pipeline.py model.name=NAME dataset.hf_name=null dataset.file=FILE.csv"
        why = (
            "These figures are of a synthetic model. Give the name or folder of yours and a file with text and labels."
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
