"""The baseline of one model on one machine: the sweep, the full dataset, and the document that holds them."""

import random
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import torch

from boundby import __version__, ceilings, environment, files
from boundby.ceilings import Ceilings
from boundby.device import describe, pick_device
from boundby.sampler import Sampler
from boundby.timer import Timer
from boundby.verdict import Doubt
from utils import diagnosis, instruments, metrics, steps, tasks, visits
from utils.artifacts import METRICS_VERSION
from utils.ceiling_share import share_of_ceiling
from utils.cli import Run
from utils.data import DataReceipt, Rows
from utils.errors import PipelineError
from utils.metrics import MetricsCollector
from utils.models import LoadedModel, ModelSummary
from utils.optimal import MEASURED, judge, optimal
from utils.profiler import HALF_WIDTH, Guard, InferenceProfiler
from utils.selection import Selection

POOL_SEED = 0


class Baseline:
    """What step 02 has found so far; `save` writes it whenever there is more."""

    def __init__(self, run: Run, receipt: DataReceipt) -> None:
        self.run, self.receipt = run, receipt
        self.max_length: int | None = None
        self.doubts: list[str] = list(receipt.doubts)
        self.model: dict[str, Any] = {}
        self.device: dict[str, Any] = {}
        self.agreement: dict[str, Any] | None = None
        self.full: dict[str, Any] | None = None
        self.rows: dict[str, list[dict[str, Any]]] = {}
        self.visits: dict[str, list[visits.Visit]] = {}
        self.findings: dict[tuple[str, int], diagnosis.Finding] = {}
        self.ceilings: Ceilings | None = None
        self.machine_state = instruments.machine_state()

    def cut(self, effective: tuple[int, str | None]) -> int:
        """Note the longest input and, where the model allows less than the settings ask for, the doubt; return it."""
        self.max_length, doubt = effective
        if doubt and doubt not in self.doubts:
            self.doubts.append(doubt)
        return self.max_length

    def may_evaluate(self, dtype: str) -> bool:
        """Tell whether the whole dataset is evaluated after the sweep in `dtype`: the model's own, if anything fits."""
        wanted = self.run.config.evaluation.enabled and dtype == self.run.config.model.dtype
        return wanted and any(row["status"] in MEASURED for row in self.rows[dtype])

    def describe_model(self, loaded: LoadedModel, summary: ModelSummary, agreement: Any) -> None:
        """Note what is measured, and that batched and single predictions agree; the model's own dtype comes first."""
        if self.model:
            return
        source = loaded.source
        self.model = {
            "name": source.name,
            "origin": source.origin,
            "task": source.task,
            "revision": source.revision,
            "fingerprint": source.fingerprint,
            **summary.as_dict(),
            "load_time_s": loaded.load_time_s,
        }
        self.device = describe(loaded.device)
        self.agreement = agreement.as_dict()

    def sweep(self, loaded: LoadedModel, rows: Rows) -> None:
        """Measure all batch sizes in the dtype of `loaded`; every visit is saved at once."""
        config = self.run.config.profiling
        log = self.run.layout.visits(loaded.dtype)
        texts = _pool(rows, config.batch_sizes, config.num_measurement_runs)
        finished = [each for each in visits.read(log) if each.status != "failed"] if self.run.resuming else []
        self.visits[loaded.dtype] = list(finished)
        if finished:
            self.run.note(f"{loaded.dtype}: {len(finished)} finished visits are kept")
        source = instruments.source(loaded.device)
        with Sampler(source) as sampler, self.run.progress(None, f"sweep {loaded.dtype}") as progress:

            def commit(visit: visits.Visit) -> None:
                visits.append(log, visit)
                self.visits[loaded.dtype].append(visit)
                self._tabulate(loaded)
                self.save()
                progress.advance(1, self._pace(visit))

            guard = Guard(instruments.watch(loaded.device))
            profiler = InferenceProfiler(loaded.model, loaded.tokenizer, loaded.device, sampler=sampler, guard=guard)
            profiler.profile_multiple_batch_sizes(
                texts,
                config.batch_sizes,
                config.num_measurement_runs,
                self.max_length,
                num_warmup_runs=config.num_warmup_runs,
                ci_half_width=config.ci_half_width,
                max_seconds=config.max_seconds_per_batch_size,
                finished=finished,
                on_visit=commit,
            )
        self._tabulate(loaded)
        self.save()
        self._diagnose(loaded, Selection.of(texts, loaded.tokenizer, self.max_length, loaded.device), profiler.timer)

    def _diagnose(self, loaded: LoadedModel, selection: Selection, timer: Timer) -> None:
        """Find out what limits each batch size; every finding is saved at once."""
        if not any(row["status"] in MEASURED for row in self.rows[loaded.dtype]):
            return
        found = self._limits(loaded.device)
        meter, idle_w, reason = instruments.energy(loaded.device, timer)
        subject = diagnosis.Subject(
            model=loaded.model,
            selection=selection,
            timer=timer,
            ceilings=found,
            max_seconds=self.run.config.profiling.max_seconds_per_batch_size,
            energy=meter,
            idle_w=idle_w,
            energy_reason=reason,
        )
        with self.run.progress(None, f"verdict {loaded.dtype}") as progress:

            def keep(finding: diagnosis.Finding) -> None:
                self.findings[loaded.dtype, finding.batch_size] = finding
                self._tabulate(loaded)
                self.save()
                progress.advance(1, f"batch {finding.batch_size}: {finding.verdict.bound}")

            diagnosis.diagnose(subject, self.rows[loaded.dtype], self.visits[loaded.dtype], keep)

    def _limits(self, device: torch.device) -> Ceilings:
        """Return the ceilings of this machine, measured once and kept beside the data."""
        if self.ceilings is None:
            folder = self.run.layout.ceilings
            wanted = tuple(dict.fromkeys([*ceilings.usual_dtypes(device), *steps.sweep_dtypes(self.run.config)]))
            self.ceilings, path, is_new = ceilings.cached(folder, device, wanted)
            how = f"measured in {self.ceilings.seconds:.1f} s" if is_new else f"from {path}"
            self.run.note(f"ceilings of this machine: {how}")
            doubts = [str(Doubt("disturbed", text)) for text in self.ceilings.doubts]
            self.doubts += [doubt for doubt in doubts if doubt not in self.doubts]
        return self.ceilings

    def save(self, complete: bool = False) -> None:
        """Write `raw_samples.csv` and both metrics files as far as they are known."""
        layout = self.run.layout
        files.write_csv(layout.raw_samples, visits.raw_rows(_flat(self.visits)), visits.RAW_COLUMNS)
        flat = [{**row, "doubts": "; ".join(row["doubts"])} for row in _flat(self.rows)]
        files.write_csv(layout.detailed_metrics, flat, metrics.COLUMNS)
        files.write_json(layout.metrics, self.document(complete))

    def document(self, complete: bool) -> dict[str, Any]:
        """Return the content of the metrics file."""
        config = self.run.config
        first = self.rows.get(config.model.dtype, [])
        best = optimal(first, config.targets)
        chosen = next((row for row in first if row["batch_size"] == best["batch_size"]), None)
        limits = self.ceilings.as_dict() if self.ceilings else None
        full = self.full and {**self.full, **share_of_ceiling(self.full, first, limits, self.device["type"])}
        return {
            "schema_version": METRICS_VERSION,
            "boundby_version": __version__,
            "written": datetime.now(UTC).isoformat(timespec="seconds"),
            "complete": complete,
            "machine_fingerprint": environment.machine_fingerprint(),
            "work_fingerprint": self._work_fingerprint(),
            "synthetic": self.receipt.synthetic,
            "model": self.model,
            "dataset": {"source": self.receipt.source, **self.receipt.dataset, "rows": self.receipt.rows},
            "device": self.device,
            "agreement": self.agreement,
            "ceilings": limits,
            "ceilings_reason": None if self.ceilings else metrics.NOT_DIAGNOSED,
            "machine_state": self.machine_state,
            "max_length": self.max_length,
            "batch_sizes": _flat(self.rows),
            "optimal": best,
            "full_dataset_metrics": full,
            "full_dataset_reason": None if self.full else self._why_not_evaluated(),
            "targets": judge(config.targets, chosen, self.full),
            "doubts": self.doubts,
        }

    def require_a_measurement(self) -> None:
        """Raise PipelineError when nothing was measured and memory is not the reason."""
        rows = _flat(self.rows)
        failed = next((row for row in rows if row["status"] == "failed"), None)
        if failed and not any(row["status"] in MEASURED for row in rows):
            raise PipelineError(
                f"no batch size could be measured; batch size {failed['batch_size']}: {failed['reasons']['all']}"
            )

    @property
    def failed_points(self) -> int:
        """How many batch sizes failed for another reason than memory."""
        return sum(row["status"] == "failed" for row in _flat(self.rows))

    def _tabulate(self, loaded: LoadedModel) -> None:
        config = self.run.config.profiling
        half_width = config.ci_half_width or HALF_WIDTH[loaded.device.type]
        rows = MetricsCollector(loaded.device).rows(self.visits[loaded.dtype], config.batch_sizes, half_width)
        findings = [self.findings.get((loaded.dtype, row["batch_size"])) for row in rows]
        self.rows[loaded.dtype] = [
            finding.fill(row) if finding else row for row, finding in zip(rows, findings, strict=True)
        ]

    def _pace(self, visit: visits.Visit) -> str:
        per_sample = visit.throughput_s_per_sample
        rate = f"{1 / per_sample:.1f} samples/s" if per_sample else visit.status
        return f"round {visit.round} batch {visit.batch_size}: {rate}"

    def _work_fingerprint(self) -> str:
        """Return a hash of what was done, apart from model and machine: two runs with the same can be compared."""
        data = {"rows": self.receipt.dataset["sha256"], "labels": self.receipt.labels_sha256}
        method = {"max_length": self.max_length, "method": METRICS_VERSION, "pool_seed": POOL_SEED}
        return files.sha256_of({**data, **method})[:16]

    def _why_not_evaluated(self) -> str:
        if not self.run.config.evaluation.enabled:
            return "evaluation.enabled is false"
        rows = self.rows.get(self.run.config.model.dtype)
        if rows and not any(row["status"] in MEASURED for row in rows):
            return "no batch size could be measured"
        return "not reached yet"


def dtypes(run: Run) -> list[str]:
    """Return the dtypes of the sweep; the first is the model's own."""
    return steps.sweep_dtypes(run.config)


def device(run: Run) -> torch.device:
    """Return the device the settings ask for."""
    return pick_device(run.config.model.device)


def console_rows(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return the sweep as lines for the terminal, as the user knows them: one block per batch size."""
    lines = []
    for row in rows:
        lines.append(f"Batch Size {row['batch_size']} ({row['dtype']}):")
        if row["throughput_samples_per_sec_mean"] is None:
            lines.append(f"  {row['status']}: {row['reasons']['all']}")
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


def console_evaluation(full: dict[str, Any], task: str) -> list[str]:
    """Return the evaluation as lines for the terminal."""
    return [
        f"Samples: {full['samples']:,}",
        *(f"{title}: {value}" for title, value in tasks.of(task).described(full)),
        f"Inference time: {full['inference_time_s']:,.2f} seconds",
        f"Throughput: {full['throughput_samples_per_sec']:.2f} samples/sec",
    ]


def _pool(rows: Rows, batch_sizes: Sequence[int], runs: int) -> list[str]:
    """Return the texts of the sweep: a seeded sample, enough for `runs` different batches of the largest size."""
    count = min(len(rows.texts), max(batch_sizes) * runs)
    chosen = random.Random(POOL_SEED).sample(range(len(rows.texts)), count)
    return [rows.texts[index] for index in chosen]


def _flat(by_dtype: dict[str, list[Any]]) -> list[Any]:
    return [item for items in by_dtype.values() for item in items]
