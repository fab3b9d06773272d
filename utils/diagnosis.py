"""Why a batch size is as fast as it is: the work of its forwards, the limits of the machine, and interventions."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import mean, median
from typing import Any, TypeVar

import numpy as np
import torch

from boundby import trials
from boundby.bottleneck import counted_quietly, interval, loads
from boundby.ceilings import Ceilings
from boundby.device import is_host, is_out_of_memory, release_memory
from boundby.energy import EnergyMeter
from boundby.environment import memory_limit_bytes
from boundby.inference import Batch, forward
from boundby.judgement import Times, judge, precision_gain
from boundby.roofline import Interval, Limits, OperatorLoad, attribute, fixed_cost
from boundby.stats import estimate
from boundby.timer import Timer, Work
from boundby.verdict import Doubt, Fix, Gain, Trial, Verdict, doubts_of
from boundby.work import count, fit_length_cost, transformer_flops, transformer_shape
from utils.metrics import MB, per_batch
from utils.optimal import MEASURED
from utils.selection import Selection
from utils.visits import Visit, usable

T = TypeVar("T")
FORMULA_TOLERANCE = 0.05  # counted and formula agree to 1 % for the families that are known
DOUBTS_OF_A_VERDICT = ("noisy", "disturbed", "drift", "warm-up")  # those that its figures rest on
FORWARDS_OF_A_TRIAL = 4 * trials.PAIRS + 2
ENERGY_WINDOWS = 3


@dataclass(frozen=True)
class Finding:
    """What was found out about one batch size: columns of its row, the verdict, the interventions and reasons."""

    batch_size: int
    columns: Mapping[str, Any]
    verdict: Verdict
    reasons: Mapping[str, str] = field(default_factory=dict)

    def fill(self, row: dict[str, Any]) -> dict[str, Any]:
        """Return the row with its columns, its verdict, and its doubts joined by those of the verdict."""
        known = {name for name, value in self.columns.items() if value is not None}
        reasons = {name: why for name, why in row["reasons"].items() if name not in known} | dict(self.reasons)
        doubts = list(dict.fromkeys([*doubts_of(row), *self.verdict.doubts]))
        said = {"doubts": [str(doubt) for doubt in doubts], "doubt_kinds": [doubt.kind for doubt in doubts]}
        return {**row, **self.columns, **said, "reasons": reasons, "verdict": self.verdict.as_dict()}


@dataclass(frozen=True)
class Subject:
    """The model that was swept, with the instruments to look at it again."""

    model: Any
    selection: Selection
    timer: Timer
    ceilings: Ceilings
    max_seconds: float
    energy: EnergyMeter | None = None
    idle_w: float | None = None
    energy_reason: str | None = None


def diagnose(
    subject: Subject, rows: Sequence[Mapping[str, Any]], visits: Sequence[Visit], on_finding: Callable[[Finding], None]
) -> None:
    """Tell `on_finding` of every measured row of one dtype, smallest batch size first."""
    measured = [row for row in rows if row["status"] in MEASURED]
    fixed_s = fixed_cost([(_padded_tokens(row) * row["batch_size"], _isolated(row).value) for row in measured])
    for row in measured:
        own = usable([each for each in visits if each.batch_size == row["batch_size"] and each.status == "ok"])
        case = _Case(subject, row, own, measured, fixed_s)
        with torch.inference_mode():
            on_finding(case.finding())
        release_memory(subject.selection.device)


class _Case:
    """One batch size: its batches are those that were timed."""

    def __init__(
        self,
        subject: Subject,
        row: Mapping[str, Any],
        visits: Sequence[Visit],
        measured: Sequence[Mapping[str, Any]],
        fixed_s: float | None,
    ) -> None:
        self.subject, self.row, self.visits, self.measured, self.fixed_s = subject, row, visits, measured, fixed_s
        self.device, self.dtype = subject.selection.device, row["dtype"]
        self.on_host = is_host(self.device)
        self.batches = subject.selection.batches(row["batch_size"], visits[0].batches)
        self.limits = subject.ceilings.limits(self.dtype)
        self.weights_bytes = float(sum(each.nbytes for each in subject.model.parameters()))

    def finding(self) -> Finding:
        """Return what is found; a model whose operators cannot be counted gets an inconclusive verdict."""
        loads, reason = _tried(lambda: self._loads(self.batches))
        failed: list[Doubt] = []
        tried = tuple(self._trials(failed)) if loads and self.limits else ()
        useful, useful_reason = _tried(self._useful_flops) if loads else (None, reason)
        verdict = judge(
            self._times(),
            loads or (),
            self.limits,
            weights_bytes=self.weights_bytes,
            on_host=self.on_host,
            trials=tried,
            gains=list(self._gains(loads or (), useful)),
            doubts=[*self._doubts(), *self._miscounted(loads or ()), *failed],
            unknown=Doubt("work", reason)
            if reason
            else Doubt("ceilings", f"the limits of this machine in {self.dtype} were not measured"),
        )
        columns, reasons = self._columns(loads or (), useful, verdict)
        if loads and columns["useful_flops_pct"] is None:
            reasons["useful_flops_pct"] = useful_reason or "the forward has no FLOPs"
        energy, energy_reasons = self._energy()
        return Finding(self.row["batch_size"], columns | energy, verdict, {**reasons, **energy_reasons})

    def _loads(self, batches: Sequence[Batch]) -> list[OperatorLoad]:
        """Return what the operators do in one forward, as the mean over the batches."""
        return loads(
            [
                counted_quietly(self._call(batch), self.subject.timer.clock if self.on_host else None)
                for batch in batches
            ]
        )

    def _useful_flops(self) -> float:
        """Return the FLOPs of a forward without padding, as the mean over the batches. Raises ValueError if unknown."""
        lengths = self.subject.selection.tokens.lengths
        cost = fit_length_cost(self._flops_at, [int(each) for each in lengths])
        if cost.reason is not None:
            raise ValueError(cost.reason)
        return mean(cost.flops([int(lengths[row]) for row in batch.rows]) or 0 for batch in self.batches)

    def _flops_at(self, batch_size: int, tokens: int) -> int:
        """Return the FLOPs of a batch of real tokens without padding: the longest text, cut or repeated."""
        selection = self.subject.selection
        longest = max(selection.tokens.ids, key=len)
        row = np.resize(longest, tokens).astype(np.int64)
        row[-1] = longest[-1]  # some models look for the token that ends a text
        ids = torch.from_numpy(np.tile(row, (batch_size, 1))).to(self.device)
        batch = Batch(tuple(range(batch_size)), ids, torch.ones_like(ids), tokens_real=ids.numel())
        return count(self._call(batch)).flops

    def _miscounted(self, loads: Sequence[OperatorLoad]) -> list[Doubt]:
        """Return a doubt where the counted FLOPs are far from the formula of a transformer whose shape is known."""
        shape = transformer_shape(self.subject.model)
        if shape is None or not loads:
            return []
        formula = mean(transformer_flops(shape, *batch.input_ids.shape) for batch in self.batches)
        ratio = sum(each.flops for each in loads) / formula
        if abs(ratio - 1) <= FORMULA_TOLERANCE:
            return []
        return [
            Doubt("work", f"the counted FLOPs are {ratio:.2f} times those of the formula for this kind of transformer")
        ]

    def _doubts(self) -> list[Doubt]:
        of_times = [doubt for doubt in doubts_of(self.row) if doubt.kind in DOUBTS_OF_A_VERDICT]
        return [*of_times, *(Doubt("disturbed", text) for text in self.subject.ceilings.doubts)]

    def _times(self) -> Times:
        device = [value for visit in self.visits if (value := visit.seconds_per_batch("device"))]
        return Times(
            isolated_s=_isolated(self.row),
            device_s=interval(estimate(device)) if device else None,
            enqueue_s=per_batch(self.visits, "enqueue"),
            input_s=self.row["tokenize_per_batch_ms"] / 1e3,
            transfer_s=per_batch(self.visits, "transfer"),
            fixed_s=self.fixed_s,
        )

    def _trials(self, failed: list[Doubt]) -> Iterator[Trial]:
        """Yield what was changed on purpose, on the batch of median length, where it takes no longer than the sweep.

        One that runs out of memory was not made; another error is told in `failed` and loses no result.
        """
        typical = sorted(self.batches, key=lambda batch: batch.tokens_padded)[len(self.batches) // 2]
        work, seconds = self._call(typical), _isolated(self.row).value
        for make, relative_cost in ((self._doubled, 1.5), (self._changed_setting, 2.0)):
            if relative_cost * FORWARDS_OF_A_TRIAL * seconds > self.subject.max_seconds:
                continue
            try:
                yield from make(typical, work, self.subject.timer)
            except Exception as error:  # as above: a forward may raise anything
                if not is_out_of_memory(error):
                    failed.append(Doubt("intervention", f"{type(error).__name__}: {_said(error)}"))

    def _doubled(self, batch: Batch, work: Work, timer: Timer) -> Iterator[Trial]:
        peak_mb = self.row["memory_cpu_peak_mb"]
        if self.on_host and peak_mb and 2 * peak_mb * MB > memory_limit_bytes():
            return  # Linux would end the process rather than raise an error
        twice = self.subject.selection.batch([*batch.rows, *batch.rows])
        yield trials.doubled_batch(work, self._call(twice), timer, self._predicted(batch, twice))

    def _predicted(self, batch: Batch, twice: Batch) -> float:
        """Return what the limits say of the time of `batch` over that of `twice`."""
        assert self.limits is not None
        once, double = (
            attribute(
                self._loads([each]), self.limits, self.weights_bytes, _isolated(self.row).value, self.on_host
            ).least_s
            for each in (batch, twice)
        )
        return once / double

    def _machine(self) -> tuple[Limits, float, float, bool]:
        """Return what operators are held against: limits, bytes of the weights, measured seconds, where they run."""
        assert self.limits is not None  # else nothing is attributed
        return self.limits, self.weights_bytes, self._times().working_s.value, self.on_host

    def _changed_setting(self, batch: Batch, work: Work, timer: Timer) -> Iterator[Trial]:
        change = trials.fewer_threads if self.on_host else trials.graph_replay
        tried = change(work, timer)
        if tried:
            yield tried
        other = self._best_precision()
        if other:
            changed = trials.other_precision(work, timer, *other)
            if changed:
                yield changed

    def _best_precision(self) -> tuple[str, float] | None:
        """Return the setting of float32 products with the highest limit, and how many times that of the one in use."""
        configured = self.subject.ceilings.configured("float32")
        if self.dtype != "float32" or configured is None:
            return None
        best = self.subject.ceilings.best("float32")
        return (best.precision, best.flops_per_s / configured.flops_per_s) if best.precision else None

    def _gains(self, loads: Sequence[OperatorLoad], useful: float | None) -> Iterator[Gain]:
        """Yield what could be changed and the most it could bring, by the figures of this sweep and of the machine."""
        flops = sum(each.flops for each in loads)
        kind, left = ("FLOPs", useful / flops) if useful and flops else ("tokens", 1 - self.row["padding_pct"] / 100)
        if left < 1:
            basis = f"{100 * (1 - left):.0f} % of the {kind} are of padding"
            yield Gain(Fix("remove_padding"), 1 / left, basis)
        best = max(self.measured, key=lambda row: row["throughput_samples_per_sec_mean"])
        ratio = best["throughput_samples_per_sec_mean"] / self.row["throughput_samples_per_sec_mean"]
        if best is not self.row:
            fix = Fix("batch_size", {"batch_size": best["batch_size"]})
            yield Gain(fix, ratio, "measured in this sweep", measured=Interval.exact(ratio))
        if not loads or self.limits is None:
            return
        found = attribute(loads, *self._machine())
        precision = self._best_precision()
        if precision:
            name, gain = precision
            yield precision_gain(Fix("matmul_precision", {"precision": name}), found, gain, bytes_factor=1.0)
        configured = self.subject.ceilings.configured(self.dtype)
        for each in self.subject.ceilings.compute:
            if each.dtype != self.dtype and each.dtype != "float32" and self.dtype == "float32" and configured:
                gain = each.flops_per_s / configured.flops_per_s
                yield precision_gain(Fix("dtype", {"dtype": each.dtype}), found, gain, bytes_factor=2.0)

    def _columns(
        self, loads: Sequence[OperatorLoad], useful: float | None, verdict: Verdict
    ) -> tuple[dict[str, Any], dict[str, str]]:
        columns: dict[str, Any] = {
            "bound": verdict.bound,
            "share_of_limit_pct": None if verdict.share_of_limit is None else 100 * verdict.share_of_limit,
            "confidence": verdict.confidence,
        }
        why = str(verdict.doubts[-1]) if verdict.doubts else ""
        reasons = {"share_of_limit_pct": why} if verdict.share_of_limit is None else {}
        if not loads:
            names = ("flops_per_batch", "useful_flops_pct", "bytes_per_batch", "flops_per_sec", "share_of_ceiling_pct")
            return columns, {**reasons, **dict.fromkeys(names, why)}
        flops = sum(each.flops for each in loads)
        rate = flops / _isolated(self.row).value
        configured = self.subject.ceilings.configured(self.dtype)
        columns |= {
            "flops_per_batch": flops,
            "useful_flops_pct": 100 * useful / flops if useful else None,
            "bytes_per_batch": sum(each.weight_bytes + each.other_bytes for each in loads),
            "flops_per_sec": rate,
            "share_of_ceiling_pct": 100 * rate / configured.flops_per_s if configured else None,
        }
        if configured is None:
            reasons["share_of_ceiling_pct"] = f"the ceiling in {self.dtype} was not measured"
        return columns, reasons

    def _energy(self) -> tuple[dict[str, Any], dict[str, str]]:
        """Return the energy by sample, gross and without what the idle machine takes, or why it is not known."""
        meter, names = self.subject.energy, ("energy_per_sample_j", "energy_per_sample_net_j")
        if meter is None:
            return {}, dict.fromkeys(names, self.subject.energy_reason or "no energy counter was given")
        calls = [self._call(batch) for batch in self.batches]

        def one_pass() -> None:
            for call in calls:
                call()

        samples = sum(len(batch.rows) for batch in self.batches)
        try:
            windows = [meter.of(one_pass) for _ in range(ENERGY_WINDOWS)]
        except Exception as error:  # of the counter, or of a forward
            return {}, dict.fromkeys(names, _said(error))
        gross = median(each.joules_per_call for each in windows) / samples
        if self.subject.idle_w is None:
            return {names[0]: gross}, {names[1]: "the idle power was not measured"}
        net = median(each.net_joules_per_call(self.subject.idle_w) for each in windows) / samples
        return {names[0]: gross, names[1]: net}, {}

    def _call(self, batch: Batch) -> Work:
        return lambda: forward(self.subject.model, batch)


def _tried(make: Callable[[], T]) -> tuple[T | None, str | None]:
    """Return the result, or None and the reason: a model may do what cannot be counted."""
    try:
        return make(), None
    except Exception as error:  # a model, or torch's formulas, may raise anything; the sweep must not be lost for it
        return None, f"it cannot be counted ({_said(error)})"


def _said(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]


def _isolated(row: Mapping[str, Any]) -> Interval:
    """Return the seconds of one forward of this row."""
    value, low, high = (row[f"latency_per_sample_ms_{name}"] for name in ("mean", "ci_low", "ci_high"))
    scale = row["batch_size"] / 1e3
    return Interval(value * scale, (low or value) * scale, (high or value) * scale)


def _padded_tokens(row: Mapping[str, Any]) -> float:
    """Return the tokens of one sample of this row, padding included."""
    return row["tokens_per_sec_padded"] / row["throughput_samples_per_sec_mean"]
