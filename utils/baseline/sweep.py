"""The baseline of one model on one machine: the sweep, the full dataset, and the document that holds them."""

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from typing import Any, cast

from boundby import __version__, files
from boundby.bound import Doubt, bench, plain
from boundby.formatting import Missing
from boundby.machine import (
    Ceilings,
    Demand,
    Sampler,
    ceilings,
    describe,
    environment,
    free_bytes,
    gpu_source,
    is_gpu,
    naming_loss,
    pick_device,
    release_memory,
    uuid_of,
    visible_gpus,
)
from boundby.timing import StopRule, Timer
from utils import data
from utils.baseline import columns, diagnosis, instruments, memory
from utils.baseline import rounds as visits
from utils.baseline.ceiling_share import share_of_ceiling
from utils.baseline.columns import MEASURED, Finding
from utils.baseline.document import Agreement, Device, Document, MachineState, Model, Row
from utils.baseline.inference import Guard, InferenceProfiler, SweepSettings, take_turns
from utils.baseline.optimum import judge, optimal
from utils.baseline.rounds import Visit, named
from utils.baseline.selection import Selection
from utils.command import METRICS_VERSION, PipelineError, Run, removed
from utils.data import DataReceipt, Rows
from utils.evaluation import FullDataset, Known, evaluate
from utils.models import LoadedModel, ModelSource, tasks
from utils.models import loading as models
from utils.settings import AUTO
from utils.steps import steps

ShowCard = Callable[[Run, int, bool], None]  # of how many texts the whole set has, and whether it is still to come
TOGETHER_S = 20.0  # for the limits of the machine and the replays of all batch sizes
STATUS_WORDS = {"oom": "does not fit into memory", "skipped_oom": "not tried"}
SHARED_MEMORY = 0.25  # of what is free may hold the model in further dtypes while one of them is measured


@dataclass
class Sweep:
    """What is known in one dtype so far: the visits, and by batch size what was found out about them."""

    batch_sizes: Sequence[int]
    half_width: float
    visits: list[Visit]
    findings: dict[int, Finding] = field(default_factory=dict)

    @property
    def rows(self) -> list[Row]:
        """The rows of the batch sizes that were reached."""
        rows = columns.rows(self.visits, self.batch_sizes, self.half_width)
        findings = self.findings
        return [findings[row["batch_size"]].fill(row) if row["batch_size"] in findings else row for row in rows]

    @property
    def is_measured(self) -> bool:
        """Whether any batch size could be measured."""
        return any(row["status"] in MEASURED for row in self.rows)


@dataclass
class Result:
    """What step 02 has found so far; `sweeps` by dtype, the model's own first, which `dtype` is once it is loaded."""

    run: Run
    receipt: DataReceipt
    dtype: str | None = None
    model: Model = field(default_factory=Model)
    device: Device = field(default_factory=Device)
    agreement: Agreement | None = None
    max_length: int | None = None
    sweeps: dict[str, Sweep] = field(default_factory=dict)
    ceilings: Ceilings | None = None
    energy: instruments.Energy | None = None
    demands: dict[int, Demand | Missing] = field(default_factory=dict)  # of batches, by the tokens of their texts
    full: FullDataset | None = None
    doubts: list[str] = field(default_factory=list)
    machine_state: MachineState = field(default_factory=instruments.machine_state)

    @property
    def rows(self) -> list[Row]:
        """The rows of all dtypes."""
        return [row for sweep in self.sweeps.values() for row in sweep.rows]

    @property
    def own_sweep(self) -> Sweep | None:
        """The sweep in the model's own dtype."""
        return self.sweeps.get(self.dtype) if self.dtype else None

    @property
    def failed_points(self) -> int:
        """How many batch sizes failed for another reason than memory."""
        return sum(row["status"] == "failed" for row in self.rows)

    def save(self, complete: bool = False) -> None:
        """Write `raw_samples.csv` and both metrics files as far as they are known."""
        layout, rows = self.run.layout, self.rows
        made = (visit for sweep in self.sweeps.values() for visit in sweep.visits)
        files.write_csv(layout.raw_samples, visits.raw_rows(made), visits.RAW_COLUMNS)
        flat = [{**row, "doubts": "; ".join(row["doubts"])} for row in rows]
        files.write_csv(layout.detailed_metrics, flat, columns.NAMES)
        files.write_json(layout.metrics, removed(self.document(complete, rows)))

    def answer(self) -> dict[str, Any]:
        """Return the part of the metrics file that answers: the batch size to use, every row, and the whole set."""
        names = ("optimal", "batch_sizes", "full_dataset_metrics", "targets", "doubts")
        document = removed(self.document(True, self.rows))
        return {name: document[name] for name in names}

    def document(self, complete: bool, rows: Sequence[Row]) -> Document:
        """Return the content of the metrics file."""
        config = self.run.config
        first = [row for row in rows if row["dtype"] == self.dtype]
        best = optimal(first, config.targets)
        chosen = next((row for row in first if row["batch_size"] == best["batch_size"]), None)
        full: Any = self.full
        if full:
            full = {**full, **share_of_ceiling(full, first, self.ceilings, self.device["type"])}
        return {
            "schema_version": METRICS_VERSION,
            "boundby_version": __version__,
            "written": datetime.now(UTC).isoformat(timespec="seconds"),
            "complete": complete,
            "machine_fingerprint": environment.machine_fingerprint(),
            "work_fingerprint": self._work_fingerprint(),
            "synthetic": self.receipt.synthetic,
            "model": self.model,
            "dataset": {
                "source": asdict(self.receipt.source),
                **asdict(self.receipt.dataset),  # type: ignore[typeddict-item]  # which tells no keys
                "rows": self.receipt.rows,
                "columns": self.receipt.columns,
                "has_labels": self.receipt.has_labels,
            },
            "device": self.device,
            "agreement": self.agreement,
            "ceilings": self.ceilings,
            "ceilings_reason": None if self.ceilings else columns.NOT_DIAGNOSED,
            "machine_state": self.machine_state,
            "max_length": self.max_length,
            "batch_sizes": list(rows),
            "optimal": best,
            "full_dataset_metrics": full,
            "full_dataset_reason": None if self.full else self._why_not_evaluated(),
            "memory": memory.forecast(self.own_sweep.visits if self.own_sweep else (), self.demands),
            "targets": judge(config.targets, chosen, self.full),
            "doubts": list(dict.fromkeys([*self.receipt.doubts, *self.doubts])),
        }

    def _work_fingerprint(self) -> str:
        """Return a hash of what was done, apart from model and machine: two runs with the same can be compared."""
        data = {"rows": self.receipt.dataset.sha256, "labels": self.receipt.labels_sha256}
        method = {"max_length": self.max_length, "method": METRICS_VERSION}
        return files.sha256_of({**data, **method})[:16]

    def _why_not_evaluated(self) -> str:
        if not self.run.config.evaluation.enabled:
            return "evaluation.enabled is false"
        sweep = self.own_sweep
        return (
            "no batch size could be measured" if sweep and sweep.rows and not sweep.is_measured else "not reached yet"
        )


def measure(run: Run, receipt: DataReceipt, source: ModelSource, rows: Rows, show_card: ShowCard) -> Result:
    """Return the sweep in every dtype and the whole dataset in the model's own; saved as it grows.

    The card is shown at the end, and before the whole set, which may take hours: who sees the answer may stop there.

    Raises PipelineError when nothing could be measured and memory is not the reason.
    """
    result = Result(run, receipt)
    waiting = steps.sweep_dtypes(run.config)
    while waiting:
        loaded = _load(result, source, waiting, rows)
        waiting = [dtype for dtype in waiting[1:] if dtype not in {model.dtype for model in loaded}]
        run.say("PROFILING MULTIPLE BATCH SIZES")
        subject = _sweep(result, loaded, rows)
        while loaded:  # the model's own dtype is the last one in memory, where the evaluation has it for itself
            model = loaded.pop()
            run.say("\n".join(console_rows(result.sweeps[model.dtype].rows)))
            if not result.sweeps[model.dtype].is_measured:
                continue
            _leave_alone(model, loaded)
            find_limits(result, model, *subject)
            if run.config.evaluation.enabled and model.dtype == result.dtype:
                show_card(run, receipt.rows, True)
                run.say("FULL DATASET EVALUATION")
                result.full = _evaluated(result, model)
                run.say("\n".join(console_evaluation(result.full, run.config.model.task)))
    data.check_receipt(run.config, run.layout, source)  # what was measured is still what lies there
    _require_a_measurement(result.rows)
    result.save(complete=True)
    show_card(run, receipt.rows, False)
    return result


def _known(result: Result) -> Known:
    """Return what planning the evaluation rests on: the limits of the machine, and what a trial of compiling gained."""
    findings = result.own_sweep.findings.values() if result.own_sweep else ()
    trials = [trial for finding in findings for trial in finding.verdict.trials if trial.fix.kind == "fuse_operators"]
    return Known(lambda: result.ceilings, trials[0].measured if trials else None)


def _evaluated(result: Result, loaded: LoadedModel) -> FullDataset:
    """Return the metrics over the whole dataset; what slowed the GPU meanwhile is a doubt."""
    watch = instruments.watch(loaded.device).start()
    with naming_loss("the evaluation of the whole dataset"), Sampler(gpu_source(loaded.device)) as sampler:
        full = evaluate(result.run, loaded, result.receipt, _known(result))
        readings = sampler.by_quantity(-math.inf, math.inf)
    seen = watch.stop().with_gpu(readings).on_the_device()
    slowed = [
        disturbance.text for disturbance in seen if disturbance.kind == "gpu_throttled"
    ]  # its workers are other processes
    result.doubts += [str(Doubt("disturbed", f"while the whole dataset was evaluated {text}")) for text in slowed]
    return full


def _load(result: Result, source: ModelSource, dtypes: Sequence[str], rows: Rows) -> list[LoadedModel]:
    """Return the model in all of these dtypes, or in the first alone where memory may not hold them all."""
    run, loaded = result.run, list[LoadedModel]()
    device = pick_device(run.config.model.device)
    for dtype in dtypes:
        if dtype in {model.dtype for model in loaded}:
            continue  # what auto is
        if loaded and not _has_room(loaded[0], dtypes[1:]):
            text = "dtypes were measured one after another, since memory may not hold the model in all of them"
            result.doubts += [str(Doubt("disturbed", f"{text}: a change of load in between looks like their doing"))]
            return loaded
        limits = run.config.profiling.max_length, run.config.evaluation.min_agreement
        trusted, texts = run.args.trust_remote_code, models.agreement_texts(rows.texts)
        with naming_loss(f"the model in {dtype}, before the sweep"):
            checked = models.load_agreeing(source, device, dtype, texts, limits, trust_remote_code=trusted)
        _note(result, *checked)
        loaded.append(checked[0])
    return loaded


def _leave_alone(loaded: LoadedModel, others: Sequence[LoadedModel]) -> None:
    """Bring the models that wait off the GPU, and this one back where it made room for another."""
    if is_gpu(loaded.device):
        for other in others:
            other.model.to("cpu")
        release_memory(loaded.device)
        loaded.model.to(loaded.device)


def _has_room(loaded: LoadedModel, dtypes: Sequence[str]) -> bool:
    """Tell whether the model in these further dtypes takes at most a share of the memory that is free."""
    weights = sum(parameter.numel() for parameter in loaded.model.parameters())
    wanted = sum(weights * models.DTYPES[dtype].itemsize for dtype in dtypes)
    return bool(wanted <= SHARED_MEMORY * free_bytes(loaded.device))


def _note(result: Result, loaded: LoadedModel, agreement: Any) -> None:
    """Note what is measured and the longest input, and how batched and single predictions agree."""
    run, source, choice = result.run, loaded.source, loaded.choice
    result.max_length, doubt = models.effective_max_length(loaded, run.config.profiling.max_length)
    result.doubts += [doubt] if doubt else []
    summary = models.summarize(loaded)
    run.say("\n".join(summary.lines()))
    if choice and choice.doubt:
        result.doubts += [choice.doubt]
        run.note(f"doubt: {choice.doubt}")
    elif choice and choice.reason:
        run.note(f"model.dtype={choice.setting}: {choice.dtype}, {choice.reason}")
    if result.model:
        return  # the model's own dtype comes first
    result.dtype = run.resolved["model.dtype"] = loaded.dtype
    result.model = {
        "name": source.name,
        "origin": source.origin,
        "task": source.task,
        "revision": source.revision,
        "fingerprint": source.fingerprint,
        **summary.as_dict(),  # type: ignore[typeddict-item]  # which tells no keys
        "dtype_setting": run.config.model.dtype,
        "dtype_reason": choice.reason if choice else None,
        "load_time_s": loaded.load_time_s,
    }
    result.device = cast(Device, describe(loaded.device))
    if is_gpu(loaded.device):
        visible, uuid = visible_gpus(loaded.device), cast(str, uuid_of(loaded.device))
        result.device |= {"uuid": uuid, "visible_gpus": visible}
        if visible > 1:
            run.note(f"the sweep uses one of {visible} GPUs, {loaded.device} ({uuid}); the others are left out of it")
    is_held = run.config.model.dtype == AUTO and loaded.dtype != "float32" and not (choice and choice.doubt)
    result.agreement = cast(Agreement, {**agreement.as_dict(), "against": "float32" if is_held else loaded.dtype})


def _sweep(result: Result, loaded: Sequence[LoadedModel], rows: Rows) -> tuple[Selection, Timer]:
    """Measure all batch sizes in the dtypes of `loaded`, which take turns; every visit is saved at once.

    Returns what was measured and with which timer.
    """
    run, config, device = result.run, result.run.config.profiling, loaded[0].device
    assert result.max_length is not None  # noted with the model
    selection = Selection.of(rows.texts, loaded[0].tokenizer, result.max_length, device)
    sizes = steps.sweep_sizes(run.config, is_on_gpu=is_gpu(device))
    settings = SweepSettings(
        sizes,
        config.num_measurement_runs,
        config.num_warmup_runs,
        config.ci_half_width,
        config.max_seconds_per_batch_size,
    )
    half_width, lost = settings.widest(device), steps.given_up("02", run.layout)
    for dtype in (model.dtype for model in loaded):
        kept = visits.read(run.layout.visits(dtype)) if run.resuming else []
        finished = [visit for visit in kept if visit.status != "failed" or named(visit.batch_size, dtype) in lost]
        if finished:
            run.note(f"{dtype}: {len(finished)} finished rounds are kept")
        result.sweeps[dtype] = Sweep(sizes, half_width, finished)
    kept = [visit for model in loaded for visit in result.sweeps[model.dtype].visits]
    in_words = ", ".join(model.dtype for model in loaded)
    rule, points = settings.rule(device), [(size, model.dtype) for size in sizes for model in loaded]
    source = instruments.source(device)
    with Sampler(source) as sampler, run.progress(None, f"sweep {in_words}") as progress:
        before = len(kept)

        def commit(visit: Visit) -> None:
            visits.append(run.layout.visits(visit.dtype), visit)
            result.sweeps[visit.dtype].visits.append(visit)
            result.save()
            made = [visit for model in loaded for visit in result.sweeps[model.dtype].visits]
            progress.total = len(made) - before + _most_left(made, points, rule)
            progress.advance(1, _pace(visit))

        guard = Guard(instruments.watch(device))
        profilers = [
            InferenceProfiler(model.model, model.tokenizer, device, sampler=sampler, guard=guard) for model in loaded
        ]
        # Before anything is computed: a GPU that has just been under load takes more watts when idle.
        result.energy = result.energy or instruments.energy(device, profilers[0].timer)
        take_turns(profilers, selection, settings, finished=kept, on_visit=commit)
        if source.nonsense:
            doubt = Doubt("readings", "; ".join(f"{name}: {why}" for name, why in sorted(source.nonsense.items())))
            result.doubts = list(dict.fromkeys([*result.doubts, str(doubt)]))
    if loaded[0].dtype == result.dtype:
        measured = [row["batch_size"] for row in result.sweeps[loaded[0].dtype].rows if row["status"] in MEASURED]
        result.demands = memory.demands(loaded[0].model, selection, measured)
    result.save()
    return selection, profilers[0].timer


def find_limits(result: Result, loaded: LoadedModel, selection: Selection, timer: Timer) -> None:
    """Find out what limits each batch size; every finding is saved at once."""
    run, sweep = result.run, result.sweeps[loaded.dtype]
    replay_s = bench.REPLAY_S
    if result.ceilings is None:
        wanted = tuple(
            dict.fromkeys([*ceilings.usual_dtypes(loaded.device), *steps.sweep_dtypes(run.config, result.dtype)])
        )
        with naming_loss("the limits of this machine"), run.progress(None, "limits of this machine"):
            result.ceilings, path, is_new = ceilings.cached(run.layout.ceilings, loaded.device, wanted)
        run.note(
            f"limits of this machine: {f'measured in {result.ceilings.seconds:.1f} s' if is_new else f'from {path}'}"
        )
        result.doubts += [str(Doubt("disturbed", text)) for text in result.ceilings.doubts]
        replay_s = seconds_for_replays(result.ceilings.seconds if is_new else 0.0)
        if replay_s < bench.REPLAY_S:
            run.note(f"replays get {replay_s:.1f} s: the rest of {TOGETHER_S:g} s for them and the limits is used up")
    meter, idle_w, reason = result.energy or instruments.energy(loaded.device, timer)
    subject = diagnosis.Subject(
        model=loaded.model,
        selection=selection,
        ceilings=result.ceilings,
        bench=instruments.bench(loaded.device, timer, replay_s, run.config.profiling.max_seconds_per_batch_size),
        energy=meter or Missing(reason or "there is no energy counter"),
        idle_w=idle_w,
        has_labels=tasks.of(run.config.model.task).HAS_PREDICTED_LABELS,
        given_up=steps.given_up("02", run.layout),
    )
    chosen = optimal(sweep.rows, run.config.targets)["batch_size"] if loaded.dtype == result.dtype else None
    if chosen is not None:
        run.note(f"batch size {chosen} is replayed and fixes are tried on it; of the others the limits are told")
    measured = sum(row["status"] in MEASURED for row in sweep.rows)
    with run.progress(measured, f"what limits {loaded.dtype}") as progress, contextlib.ExitStack() as looking:
        seconds, opened = round(replay_s + subject.bench.trials_s), list[Any]()

        def tell(text: str, left_s: float) -> None:
            if not opened:
                label = f"replays and trials of batch size {chosen}, seconds"
                opened.append(looking.enter_context(run.progress(seconds, label)))
            opened[0].left(left_s, text)

        def keep(finding: Finding) -> None:
            looking.close()
            sweep.findings[finding.batch_size] = finding
            result.save()
            progress.advance(1, f"batch {finding.batch_size}: {plain(finding.verdict.bound)}")

        subject = replace(subject, bench=replace(subject.bench, tell=tell))
        diagnosis.diagnose(subject, sweep.rows, sweep.visits, keep, chosen)


def seconds_for_replays(ceilings_s: float) -> float:
    """Return what replays may take where measuring the limits of the machine took so long: both have a budget."""
    return min(bench.REPLAY_S, max(0.0, TOGETHER_S - ceilings_s))


def _most_left(made: Sequence[Visit], points: Sequence[tuple[int, str]], rule: StopRule) -> int:
    """Return how many visits there may be still; a size beyond one that ran out of memory gets none."""
    known = {point: [visit for visit in made if (visit.batch_size, visit.dtype) == point] for point in points}
    full = {dtype: size for (size, dtype), own in known.items() if any(visit.status == "oom" for visit in own)}
    return sum(
        rule.most_left(visits.outcomes(own))
        for (size, dtype), own in known.items()
        if own or size < full.get(dtype, math.inf)
    )


def _require_a_measurement(rows: Sequence[Row]) -> None:
    failed = [row for row in rows if row["status"] == "failed"]
    if failed and not any(row["status"] in MEASURED for row in rows):
        raise PipelineError(
            f"no batch size could be measured; batch size {failed[0]['batch_size']}: {failed[0]['reasons']['all']}"
        )


def _pace(visit: Visit) -> str:
    per_sample = visits.throughput_rounds([visit])
    rate = f"{1 / per_sample[0]:.1f} samples/s" if per_sample else visit.status
    return f"round {visit.round} batch {visit.batch_size} {visit.dtype}: {rate}"


def console_rows(rows: Sequence[Row]) -> list[str]:
    """Return the sweep as lines for the terminal, as the user knows them: one block per batch size."""
    lines = []
    for row in rows:
        lines.append(f"Batch Size {row['batch_size']} ({row['dtype']}):")
        if row["throughput_samples_per_sec_mean"] is None:
            lines.append(f"  {STATUS_WORDS.get(row['status'], row['status'])}: {row['reasons']['all']}")
            continue
        low, high = row["throughput_samples_per_sec_ci_low"], row["throughput_samples_per_sec_ci_high"]
        interval = f" [{low:.2f}, {high:.2f}]" if low else ""
        lines.append(f"  Latency/sample: {row['latency_per_sample_ms_mean']:.3f} ms")
        lines.append(
            f"  Throughput: {row['throughput_samples_per_sec_mean']:.2f}{interval} samples/sec ({row['status']})"
        )
        memory = row["memory_peak_mb"]
        held = row["memory_cpu_peak_mb"] or row["memory_cpu_mb"]
        lines.append(f"  GPU Memory: {memory:,.2f} MB" if memory else f"  CPU Memory: {held:,.0f} MB")
    return lines


def console_evaluation(full: FullDataset, task: str) -> list[str]:
    """Return the evaluation as lines for the terminal."""
    return [
        f"Samples: {full['samples']:,}",
        *(f"{title}: {value}" for title, value in tasks.of(task).described(full)),
        f"Inference time: {full['inference_time_s']:,.2f} seconds",
        f"Throughput: {full['throughput_samples_per_sec']:.2f} samples/sec",
    ]
