"""Why a batch size is as fast as it is: the work of its forwards, the limits of the machine, and trials."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import mean, median
from typing import Any, TypeVar

import numpy as np
import torch

from boundby import trials
from boundby.bottleneck import Forward, counted_quietly, loads, other_precisions, verdict_on
from boundby.ceilings import Ceilings
from boundby.device import is_host, is_out_of_memory, release_memory
from boundby.energy import EnergyMeter
from boundby.environment import memory_limit_bytes
from boundby.inference import Batch, forward
from boundby.judgement import Times
from boundby.known import Missing, known
from boundby.roofline import Interval, OperatorLoad, attribute, fixed_cost
from boundby.stats import estimate
from boundby.timer import Timer, Work
from boundby.verdict import Doubt, Fix, Gain, Trial, doubts_of
from boundby.work import count, fit_length_cost, transformer_flops, transformer_shape
from utils.columns import MB, Finding, per_batch
from utils.document import Row
from utils.optimal import MEASURED
from utils.selection import Selection
from utils.visits import Visit, usable

T = TypeVar("T")
FORMULA_TOLERANCE = 0.05  # counted and formula agree to 1 % for the families that are known
DOUBTS_OF_A_VERDICT = ("noisy", "disturbed", "drift", "warm-up")  # those that its figures rest on
FORWARDS_OF_A_TRIAL = 4 * trials.PAIRS + 2
ENERGY_WINDOWS = 3


@dataclass(frozen=True)
class Subject:
    """The model that was swept, with the instruments to look at it again."""

    model: Any
    selection: Selection
    timer: Timer
    ceilings: Ceilings
    max_seconds: float
    energy: EnergyMeter | Missing = Missing("no energy counter was given")
    idle_w: float | None = None


def diagnose(
    subject: Subject, rows: Sequence[Row], visits: Sequence[Visit], on_finding: Callable[[Finding], None]
) -> None:
    """Tell `on_finding` of every measured row of one dtype, smallest batch size first."""
    measured = [row for row in rows if row["status"] in MEASURED]
    fixed_s = fixed_cost([(_padded_tokens(row) * row["batch_size"], _isolated(row).value) for row in measured])
    for row in measured:
        own = usable([visit for visit in visits if visit.batch_size == row["batch_size"] and visit.status == "ok"])
        with torch.inference_mode():
            on_finding(_Case(subject, row, own, measured, fixed_s).finding())
        release_memory(subject.selection.device)


@dataclass(frozen=True)
class _Case:
    """One batch size: its batches are those that were timed."""

    subject: Subject
    row: Row
    visits: Sequence[Visit]
    measured: Sequence[Row]
    fixed_s: float | None

    @cached_property
    def device(self) -> torch.device:
        return self.subject.selection.device

    @cached_property
    def on_host(self) -> bool:
        return is_host(self.device)

    @cached_property
    def batches(self) -> list[Batch]:
        return self.subject.selection.batches(self.row["batch_size"], self.visits[0].batches)

    @cached_property
    def forward(self) -> Forward:
        """What was measured and counted; a model whose operators cannot be counted has no work."""
        return Forward(
            times=self._times(),
            work=_tried(lambda: self._loads(self.batches)),
            ceilings=self.subject.ceilings,
            dtype=self.row["dtype"],
            weights_bytes=float(sum(parameter.nbytes for parameter in self.subject.model.parameters())),
            on_host=self.on_host,
        )

    def finding(self) -> Finding:
        work = self.forward.work
        tried, failed = self._trials() if self.forward.attribution else ([], [])
        useful = work if isinstance(work, Missing) else _tried(self._useful_flops)
        verdict = verdict_on(
            self.forward,
            trials=tried,
            gains=[*self._gains(useful), *other_precisions(self.forward)],
            doubts=[*self._doubts(), *failed],
        )
        why = Missing(str(verdict.doubts[-1])) if isinstance(work, Missing) else None
        configured = self.subject.ceilings.configured(self.row["dtype"])
        energy, net = self._energy()
        return Finding(
            batch_size=self.row["batch_size"],
            verdict=verdict,
            isolated_s=_isolated(self.row).value,
            flops=self._flops if why is None else why,
            useful_flops=useful if why is None else why,
            moved_bytes=sum(load.weight_bytes + load.other_bytes for load in known(work) or ()) if why is None else why,
            peak_flops_per_s=configured.flops_per_s
            if configured
            else Missing(f"the ceiling in {self.row['dtype']} was not measured"),
            energy_j=energy,
            energy_net_j=net,
        )

    @property
    def _flops(self) -> float:
        return sum(load.flops for load in known(self.forward.work) or ())

    def _loads(self, batches: Sequence[Batch]) -> list[OperatorLoad]:
        """Return what the operators do in one forward, as the mean over the batches."""
        clock = self.subject.timer.clock if self.on_host else None
        return loads([counted_quietly(self._call(batch), clock) for batch in batches])

    def _useful_flops(self) -> float:
        """Return the FLOPs of a forward without padding, as the mean over the batches. Raises ValueError if unknown."""
        lengths = self.subject.selection.tokens.lengths
        cost = fit_length_cost(self._flops_at, [int(length) for length in lengths])
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

    def _doubts(self) -> Iterator[Doubt]:
        """Yield the doubts on the times, and one where the counted FLOPs are far from what they should be."""
        yield from (doubt for doubt in doubts_of(self.row) if doubt.kind in DOUBTS_OF_A_VERDICT)
        shape = transformer_shape(self.subject.model)
        if shape is None or isinstance(self.forward.work, Missing):
            return
        ratio = self._flops / mean(transformer_flops(shape, *batch.input_ids.shape) for batch in self.batches)
        if abs(ratio - 1) > FORMULA_TOLERANCE:
            text = f"the counted FLOPs are {ratio:.2f} times those of the formula for this kind of transformer"
            yield Doubt("work", text)

    def _times(self) -> Times:
        device = [value for visit in self.visits if (value := visit.seconds_per_batch("device"))]
        return Times(
            isolated_s=_isolated(self.row),
            device_s=Interval.of(estimate(device)) if device else None,
            enqueue_s=per_batch(self.visits, "enqueue"),
            input_s=self.row["tokenize_per_batch_ms"] / 1e3,
            transfer_s=per_batch(self.visits, "transfer"),
            fixed_s=self.fixed_s,
        )

    def _trials(self) -> tuple[list[Trial], list[Doubt]]:
        """Return what was changed on purpose, on the batch of median length, where it takes no longer than the sweep.

        One that runs out of memory was not made; another error is a doubt and loses no result.
        """
        typical = sorted(self.batches, key=lambda batch: batch.tokens_padded)[len(self.batches) // 2]
        work, seconds = self._call(typical), _isolated(self.row).value
        tried: list[Trial] = []
        failed: list[Doubt] = []
        for make, relative_cost in ((self._doubled, 1.5), (self._changed_setting, 2.0)):
            if relative_cost * FORWARDS_OF_A_TRIAL * seconds > self.subject.max_seconds:
                continue
            try:
                tried += make(typical, work, self.subject.timer)
            except Exception as error:  # as above: a forward may raise anything
                if not is_out_of_memory(error):
                    failed.append(Doubt("intervention", f"{type(error).__name__}: {_said(error)}"))
        return tried, failed

    def _doubled(self, batch: Batch, work: Work, timer: Timer) -> Iterator[Trial]:
        peak_mb = self.row["memory_cpu_peak_mb"]
        if self.on_host and peak_mb and 2 * peak_mb * MB > memory_limit_bytes():
            return  # Linux would end the process rather than raise an error
        twice = self.subject.selection.batch([*batch.rows, *batch.rows])
        yield trials.doubled_batch(work, self._call(twice), timer, self._least_s(batch) / self._least_s(twice))

    def _least_s(self, batch: Batch) -> float:
        """Return the time that the limits ask for one forward of a batch."""
        limits = self.forward.limits
        assert limits is not None  # else nothing is tried
        seconds, weights_bytes = _isolated(self.row).value, self.forward.weights_bytes
        return attribute(self._loads([batch]), limits, weights_bytes, seconds, self.on_host).least_s

    def _changed_setting(self, batch: Batch, work: Work, timer: Timer) -> Iterator[Trial]:
        change = trials.fewer_threads if self.on_host else trials.graph_replay
        precision = self.forward.faster_precision
        yield from filter(None, [change(work, timer)])
        if precision:
            yield from filter(None, [trials.other_precision(work, timer, *precision)])

    def _gains(self, useful: float | Missing) -> Iterator[Gain]:
        """Yield what could be changed and the most it could bring, by the figures of this sweep."""
        flops, useful_flops = self._flops, known(useful)
        is_counted = bool(useful_flops and flops)
        left = useful_flops / flops if useful_flops and flops else 1 - self.row["padding_pct"] / 100
        if left < 1:
            basis = f"{100 * (1 - left):.0f} % of the {'FLOPs' if is_counted else 'tokens'} are of padding"
            yield Gain(Fix("remove_padding"), 1 / left, basis)
        best = max(self.measured, key=lambda row: row["throughput_samples_per_sec_mean"])
        if best is not self.row:
            ratio = best["throughput_samples_per_sec_mean"] / self.row["throughput_samples_per_sec_mean"]
            fix = Fix("batch_size", {"batch_size": best["batch_size"]})
            yield Gain(fix, ratio, "measured in this sweep")

    def _energy(self) -> tuple[float | Missing, float | Missing]:
        """Return the energy by sample, gross and without what the idle machine takes."""
        meter, idle_w = self.subject.energy, self.subject.idle_w
        if isinstance(meter, Missing):
            return meter, meter
        calls = [self._call(batch) for batch in self.batches]

        def one_pass() -> None:
            for call in calls:
                call()

        samples = sum(len(batch.rows) for batch in self.batches)
        try:
            windows = [meter.of(one_pass) for _ in range(ENERGY_WINDOWS)]
        except Exception as error:  # of the counter, or of a forward
            return Missing(_said(error)), Missing(_said(error))
        gross = median(window.joules_per_call for window in windows) / samples
        if idle_w is None:
            return gross, Missing("the idle power was not measured")
        return gross, median(window.net_joules_per_call(idle_w) for window in windows) / samples

    def _call(self, batch: Batch) -> Work:
        return lambda: forward(self.subject.model, batch)


def _tried(make: Callable[[], T]) -> T | Missing:
    """Return the result, or why there is none: a model may do what cannot be counted."""
    try:
        return make()
    except Exception as error:  # a model, or torch's formulas, may raise anything; the sweep must not be lost for it
        return Missing(f"it cannot be counted ({_said(error)})")


def _said(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]


def _isolated(row: Row) -> Interval:
    """Return the seconds of one forward of this row."""
    value, low, high = (row[f"latency_per_sample_ms_{name}"] for name in ("mean", "ci_low", "ci_high"))
    scale = row["batch_size"] / 1e3
    return Interval(value * scale, (low or value) * scale, (high or value) * scale)


def _padded_tokens(row: Row) -> float:
    """Return the tokens of one sample of this row, padding included."""
    return row["tokens_per_sec_padded"] / row["throughput_samples_per_sec_mean"]
