"""Why a batch size is as fast as it is: the work of its forwards, the limits of the machine, replays and trials.

The batch size that is chosen is looked into in full, on its reference batch: it is replayed operator by operator, and
what can be tried is tried. Of the others the bound and the limits are told, and what the sweep itself shows.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from statistics import mean, median
from typing import Any, TypeVar

import numpy as np
import psutil
import torch
from msgspec import structs

from boundby.bound import (
    Bench,
    Call,
    Candidate,
    Doubt,
    Evidence,
    Fix,
    Forward,
    Gain,
    Lengths,
    Machine,
    Times,
    Trial,
    Tried,
    Untried,
    Verdict,
    attention_backend,
    bottleneck,
    counted_quietly,
    doubts_of,
    judge,
    loads,
    trials,
)
from boundby.formatting import Missing, first_line, known
from boundby.inference import Batch, fixes, forward
from boundby.machine import (
    POWER_CAP,
    Ceilings,
    EnergyMeter,
    changed_clock,
    is_gpu,
    is_host,
    made_current,
    memory_limit_bytes,
    naming_loss,
    raise_if_lost,
    release_memory,
)
from boundby.timing import Work, estimate
from boundby.work import (
    Interval,
    OperatorLoad,
    count,
    fit_length_cost,
    fixed_cost,
    transformer_flops,
    transformer_shape,
    unread,
)
from utils.baseline.columns import MB, MEASURED, Finding, per_batch
from utils.baseline.document import Row
from utils.baseline.rounds import Visit, named, rounds, usable
from utils.baseline.selection import Selection

T = TypeVar("T")
FORMULA_TOLERANCE = 0.05  # counted and formula agree to 1 % for the families that are known
DOUBTS_OF_A_VERDICT = ("noisy", "disturbed", "drift", "warm-up", "throttled")  # those that its figures rest on
ENERGY_WINDOWS = 3
MOST_COMPARED = 256  # texts whose labels are compared
COMPARED_SHARE = 0.05  # of the seconds for trials, for each pass over them
INPUT_MATTERS = 0.05  # of the time of a forward
COUNTED_TOKENS = 16  # of the reference batch at least, to tell by shorter texts what padding costs


@dataclass(frozen=True)
class Subject:
    """The model that was swept, with the instruments to look at it again.

    `has_labels` False: it scores no labels. `given_up` is what has lost the GPU too often to be run again, by the words
    of the loss.
    """

    model: Any
    selection: Selection
    ceilings: Ceilings
    bench: Bench
    energy: EnergyMeter | Missing = Missing("no energy counter was given")
    idle_w: float | None = None
    has_labels: bool = True
    given_up: Sequence[str] = ()


def diagnose(
    subject: Subject,
    rows: Sequence[Row],
    visits: Sequence[Visit],
    on_finding: Callable[[Finding], None],
    chosen: int | None = None,
) -> None:
    """Tell `on_finding` of every measured row of one dtype, smallest batch size first; in full of the `chosen` one.

    Raises DeviceLostError where the GPU does nothing more for this process.
    """
    measured = [row for row in rows if row["status"] in MEASURED]
    fixed_s = fixed_cost([(_padded_tokens(row) * row["batch_size"], _isolated(row).value) for row in measured])
    for row in measured:
        point = f"what limits {named(row['batch_size'], row['dtype'])}"
        if point in subject.given_up:
            continue
        own = usable([visit for visit in visits if visit.batch_size == row["batch_size"] and visit.status == "ok"])
        with naming_loss(point), torch.inference_mode(), made_current(subject.selection.device):
            on_finding(_Case(subject, row, own, measured, fixed_s, row["batch_size"] == chosen).finding())
        release_memory(subject.selection.device)


@dataclass(frozen=True)
class _Case:
    """One batch size: its batches are those that were timed; `is_chosen`: it is looked into in full."""

    subject: Subject
    row: Row
    visits: Sequence[Visit]
    measured: Sequence[Row]
    fixed_s: float | None
    is_chosen: bool = False

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
    def machine(self) -> Machine:
        return Machine(self.subject.ceilings, self.row["dtype"])

    @cached_property
    def work(self) -> list[OperatorLoad] | Missing:
        """What the operators do in one forward, as the mean over the batches."""
        clock = self.subject.bench.timer.clock if self.on_host else None
        return _tried(lambda: loads([counted_quietly(self._call(batch), clock) for batch in self.batches]))

    @cached_property
    def forward(self) -> Forward | Doubt:
        """What was measured and counted, or why it cannot be judged."""
        weights_bytes = float(sum(parameter.nbytes for parameter in self.subject.model.parameters()))
        return self.machine.forward(self._times(), self.work, weights_bytes, self.on_host)

    def finding(self) -> Finding:
        work = self.work
        useful = work if isinstance(work, Missing) else _tried(self._useful_flops)
        left = self._left_without_padding(useful)
        verdict = self._verdict(left)
        why = Missing(str(verdict.doubts[-1])) if isinstance(work, Missing) else None
        configured = self.subject.ceilings.configured(self.row["dtype"])
        watch = None if self.on_host else self.subject.bench.watch.start()
        energy, net = self._energy()
        slowed = [disturbance.text for disturbance in watch.stop().on_the_device()] if watch else []
        if slowed and not isinstance(energy, Missing):
            text = f"while energy was measured {'; '.join(slowed)}"
            verdict = structs.replace(verdict, doubts=(*verdict.doubts, Doubt("disturbed", text)))
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
            attention_backend=self._attention(),
        )

    def _attention(self) -> str | Missing:
        batch = self.subject.selection.reference(self.row["batch_size"])
        return _tried(lambda: attention_backend(self._call(batch)))

    def _verdict(self, left: float) -> Verdict:
        """Return the verdict: of the chosen size in full, on its reference batch; of others by what is known."""
        known_before = Evidence(
            padding=1 - left,
            tried=Tried(trials=tuple(self._swept())),
            gains=list(self._padding_gain(left)),
            doubts=list(self._doubts()),
        )
        point = f"replays and trials of {named(self.row['batch_size'], self.row['dtype'])}"
        doubt: Doubt | None = None
        if point in self.subject.given_up:
            doubt = Doubt("replay", "the reference batch is not run again: that has lost the GPU before")
        elif self.is_chosen and isinstance(self.forward, Forward):
            try:
                with naming_loss(point):
                    return self._in_full(known_before)
            except Exception as error:  # a forward may raise anything; the sweep must not be lost for it
                doubt = Doubt("replay", f"the reference batch could not be run again ({first_line(error)})")
        gains, doubts = [*known_before.gains], [*known_before.doubts, *([doubt] if doubt else []), *self.machine.doubts]
        if isinstance(self.forward, Forward):
            gains += self.machine.other_precisions(self.forward)
        return judge(self.forward, structs.replace(known_before, gains=gains, doubts=doubts))

    def _in_full(self, known_before: Evidence) -> Verdict:
        subject, selection = self.subject, self.subject.selection
        batch = selection.reference(self.row["batch_size"])
        work = self._call(batch)
        candidates, untried = self._candidates(batch, work)
        on_host = batch.to(torch.device("cpu")) if is_gpu(self.device) else None
        others = [row["batch_size"] for row in self.measured if row is not self.row]
        call = Call(
            work,
            make_input=lambda: selection.tokenize(batch),
            bring=(lambda: on_host.to(self.device)) if on_host else None,
            bare=_cut(subject.model, batch, batch.shape.tokens) if is_gpu(self.device) else None,
            shape=(batch.shape.samples, batch.shape.tokens),
            lengths=self._lengths(batch),
            measured_s=self._reference_s(),
            batch_sizes={size: selection.reference(size).shape.tokens for size in others},
            candidates=candidates,
            known=structs.replace(known_before, tried=known_before.tried.joined(Tried(untried=tuple(untried)))),
        )
        return bottleneck(call, self.machine, subject.bench)

    def _candidates(self, batch: Batch, work: Work) -> tuple[list[Candidate], list[Untried]]:
        """Return what can be tried on this batch beside what can be tried on any callable, and what cannot."""
        subject, precision = self._compared(batch), self.machine.faster_precision
        dtypes = [getattr(torch, name) for name in self.machine.other_dtypes]
        offered: list[Candidate | Untried | None] = [
            fixes.without_padding(subject),
            *(fixes.in_another_dtype(subject, dtype) for dtype in dtypes),
            fixes.with_reduced_precision_matmul(subject, *precision) if precision else None,
            self._doubled(batch),
            self._input_ahead(batch, work),
            self._physical_cores(work),
            fixes.compiled(subject),
        ]
        return (
            [candidate for candidate in offered if isinstance(candidate, Candidate)],
            [candidate for candidate in offered if isinstance(candidate, Untried)],
        )

    def _compared(self, batch: Batch) -> fixes.Subject:
        """Return the model, the batch, and as many texts to compare labels by as the seconds for trials allow."""
        subject, selection = self.subject, self.subject.selection
        per_text_s = self.row["latency_per_sample_ms_mean"] / 1e3
        most = min(MOST_COMPARED, len(selection.texts), int(COMPARED_SHARE * subject.bench.trials_s / per_text_s))
        sample = np.unique(np.linspace(0, len(selection.texts) - 1, max(0, most)).astype(int)).tolist()
        return fixes.Subject(
            subject.model, selection.tokenizer, selection.tokens, batch, sample, has_labels=subject.has_labels
        )

    def _reference_s(self) -> Interval | None:
        """Return the seconds of the reference batch in the sweep; None where it was not timed."""
        value, low, high = (self.row.get(f"reference_ms{end}") for end in ("", "_ci_low", "_ci_high"))
        return Interval(value, low or value, high or value).times(1e-3) if value else None

    def _doubled(self, batch: Batch) -> Candidate | None:
        peak_mb = self.row["memory_cpu_peak_mb"]
        if self.on_host and peak_mb and 2 * peak_mb * MB > memory_limit_bytes():
            return None  # Linux would end the process rather than raise an error
        twice = self.subject.selection.batch([*batch.rows, *batch.rows])
        return trials.doubled_batch(self._call(twice))

    def _physical_cores(self, work: Work) -> Candidate | None:
        """Return the trial of one thread for each physical core; half the threads are tried in any case."""
        cores = psutil.cpu_count(logical=False) or 0
        is_half = cores == torch.get_num_threads() // 2
        return trials.fewer_threads(work, cores) if self.on_host and not is_half else None

    def _input_ahead(self, batch: Batch, work: Work) -> Candidate | None:
        input_s = self.row["tokenize_per_batch_ms"] / 1e3
        if input_s < INPUT_MATTERS * _isolated(self.row).value:
            return None
        return fixes.with_input_ahead(work, lambda: self.subject.selection.tokenize(batch))

    def _lengths(self, batch: Batch) -> Lengths | None:
        """Return what is padding in the batch; None where it has too few tokens to tell by shorter ones."""
        tokens = batch.shape.tokens
        if tokens < COUNTED_TOKENS:
            return None
        real = [int(self.subject.selection.tokens.lengths[row]) for row in batch.rows]
        return Lengths(real, tokens, partial(_cut, self.subject.model, batch))

    def _swept(self) -> Iterator[Trial]:
        """Yield the other batch sizes of this sweep as trials: they were measured already."""
        own = self.row
        for row in self.measured:
            if row is own:
                continue
            value = row["throughput_samples_per_sec_mean"] / own["throughput_samples_per_sec_mean"]
            reach = np.hypot(_half_width(row), _half_width(own))
            measured = Interval(value, value / (1 + reach), value * (1 + reach))
            yield Trial(Fix("batch_size", {"batch_size": row["batch_size"]}), measured, source="sweep")

    @property
    def _flops(self) -> float:
        return sum(load.flops for load in known(self.work) or ())

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
        return int(count(self._call(batch)).flops)

    def _doubts(self) -> Iterator[Doubt]:
        """Yield the doubts on the times, on limits under another clock, and on FLOPs far from what they should be."""
        yield from (doubt for doubt in doubts_of(self.row) if doubt.kind in DOUBTS_OF_A_VERDICT)
        limit = self.subject.ceilings.configured(self.row["dtype"])
        own = [clock for visit in self.visits if visit.conditions for clock in visit.conditions.gpu_sm_clock_mhz]
        if limit and limit.sm_clock_mhz and (changed := changed_clock([limit.sm_clock_mhz], own)):
            events = limit.clock_event_reasons
            is_usual = events is None or events & POWER_CAP  # of products, which reach the card's power limit
            if not (is_usual and median(own) > limit.sm_clock_mhz):
                yield Doubt("throttled", f"the limits of this machine, and this batch size: {changed}")
        shape = transformer_shape(self.subject.model)
        if shape is None or isinstance(self.work, Missing):
            return
        ratio = self._flops / mean(transformer_flops(shape, *batch.input_ids.shape) for batch in self.batches)
        if abs(ratio - 1) > FORMULA_TOLERANCE:
            text = f"the counted FLOPs are {ratio:.2f} times those of the formula for this kind of transformer"
            yield Doubt("work", text)

    def _times(self) -> Times:
        device = [self.row["batch_size"] * seconds for seconds in rounds(self.visits, "device")]
        return Times(
            isolated_s=_isolated(self.row),
            device_s=Interval.of(estimate(device)) if device else None,
            enqueue_s=per_batch(self.visits, "enqueue"),
            input_s=self.row["tokenize_per_batch_ms"] / 1e3,
            transfer_s=per_batch(self.visits, "transfer"),
            fixed_s=self.fixed_s,
        )

    def _left_without_padding(self, useful: float | Missing) -> float:
        """Return the share of the FLOPs that is not for padding; of the tokens, where those are not known."""
        flops, useful_flops = self._flops, known(useful)
        return useful_flops / flops if useful_flops and flops else 1 - self.row["padding_pct"] / 100

    def _padding_gain(self, left: float) -> Iterator[Gain]:
        """Yield the most that leaving out the padding could bring: the rest, at the limits."""
        if isinstance(self.forward, Doubt) or left >= 1 or self.forward.attribution.least_s <= 0:
            return
        basis = f"{100 * (1 - left):.0f} % of the FLOPs are for padding"
        least_s = left * self.forward.attribution.least_s
        yield Gain(Fix("remove_padding"), self.forward.times.working_s.value / least_s, basis)

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
            raise_if_lost(error)
            return Missing(first_line(error)), Missing(first_line(error))
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
        raise_if_lost(error)
        return Missing(f"it cannot be counted ({first_line(error)})")


def _cut(model: Any, batch: Batch, tokens: int) -> Work:
    """Return the forward of the batch with its first tokens alone, and with a mask if the batch itself has one.

    On a GPU that mask is ready: nothing is read back from the device.
    """
    ids, mask = batch.input_ids[:, :tokens].contiguous(), None
    if batch.is_padded:
        mask = batch.attention_mask[:, :tokens].clone()
        mask[0, -1] = 0  # a mask that hides nothing would be left out, and the operators were others
    inputs = {"input_ids": ids, "attention_mask": mask}
    given = (unread(model, inputs) if is_gpu(ids.device) else None) or inputs
    return lambda: model(**given)


def _half_width(row: Row) -> float:
    """Return half of the interval of the throughput as a share of it; 0 where one round gave none."""
    low, high = row["throughput_samples_per_sec_ci_low"], row["throughput_samples_per_sec_ci_high"]
    return (high - low) / (2 * row["throughput_samples_per_sec_mean"]) if low and high else 0.0


def _isolated(row: Row) -> Interval:
    """Return the seconds of one forward of this row."""
    value, low, high = (row[f"latency_per_sample_ms_{name}"] for name in ("mean", "ci_low", "ci_high"))
    scale = row["batch_size"] / 1e3
    return Interval(value * scale, (low or value) * scale, (high or value) * scale)


def _padded_tokens(row: Row) -> float:
    """Return the tokens of one sample of this row, padding included."""
    return float(row["tokens_per_sec_padded"] / row["throughput_samples_per_sec_mean"])
