"""The words of an answer: what limits, how sure that is, what can be done about it, and what that gains.

Every door of Boundby answers in them: a forward, a trace, a layer, a training run. They are values, so that a program
decides by kinds, settings and numbers; the sentences that people read are made from them, and nothing reads those.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import msgspec

from boundby.formatting import percent, times
from boundby.work import Interval

Bound = Literal[
    "compute",
    "memory",
    "launch",
    "transfer",
    "input",
    "optimizer",
    "communication",
    "under_utilised",
    "mixed",
    "inconclusive",
]
Confidence = Literal["high", "medium", "low"]
Confirmation = Literal["confirmed", "untested"]
Outcome = Literal["gains", "no_change", "loses"]
Sign = Literal["confirms", "ambiguous", "too_uncertain", "refutes", "silent"]
TrialSource = Literal["pairs", "sweep"]
UntriedKind = Literal["out_of_memory", "failed", "over_budget", "not_possible"]
# Where the time of a forward goes: the least that compute and memory need by the limits, what these kernels need beyond
# that at these shapes, what running them inside the model adds, the host between operators, and what stays unexplained.
PartKind = Literal["compute", "memory", "kernels", "around", "host", "unexplained"]
CauseKind = Literal["padding", "compute", "memory", "kernels", "around", "host", "unexplained", "input", "transfer"]
UnsettledKind = Literal["trials_disagree", "close", "unexplained", "disturbed", "unknown"]

ARITHMETIC: tuple[Bound, ...] = ("compute", "memory", "mixed", "under_utilised")
RIVALS: tuple[Bound, ...] = ("compute", "memory", "launch")  # a trial that cannot tell them apart confirms nothing
LEAST_GAIN = 1.02


PLAIN: dict[Bound, str] = {
    "launch": "dispatch overhead",
    "transfer": "copying the input to the device",
    "input": "preparing the input",
    "compute": "compute",
    "optimizer": "the optimizer",
    "under_utilised": "work too small for this machine",
    "mixed": "several things at once",
    "inconclusive": "nothing that is known",
}


def plain(bound: Bound) -> str:
    """Return a bound in words, within a sentence."""
    return PLAIN.get(bound, bound)


class Doubt(msgspec.Struct, frozen=True):
    """What speaks against a number or an answer, by its kind ("noisy", "disturbed", "drift", ...) and in words."""

    kind: str
    text: str

    def __str__(self) -> str:
        """Return the kind and the words, as people read them."""
        return f"{self.kind}: {self.text}"


class Change(msgspec.Struct, frozen=True):
    """What is known of one kind of fix: its words, the bounds it can help with (() is any) and what to try.

    `words` and `tried` (how a trial of it is called) may name its settings in braces. `is_bounded`: what it could gain
    can be told.
    """

    words: str
    relieves: tuple[Bound, ...] = ()
    steps: tuple[str, ...] = ()
    tried: str | None = None
    is_bounded: bool = True


CHANGES: dict[str, Change] = {
    # of one forward
    "remove_padding": Change("remove padding", ARITHMETIC, tried="no padding"),
    "better_kernels": Change("better kernels for these shapes", ARITHMETIC),
    "dtype": Change("run in {dtype}", ARITHMETIC, tried="{dtype}"),
    "matmul_precision": Change("float32 matmul at precision '{precision}'", ARITHMETIC, tried="precision {precision}"),
    "batch_size": Change("use batch size {batch_size}", tried="batch size {batch_size}"),
    "double_batch": Change("double the batch", ("under_utilised", "launch", "optimizer"), tried="the batch doubled"),
    "threads": Change("{threads} of {instead_of} threads"),
    "overlap_input": Change("tokenize in a background worker"),
    "issue_at_once": Change("launch the work at once (CUDA graphs, torch.compile)", tried="replayed as a CUDA graph"),
    "fuse_operators": Change("fuse operators (torch.compile)"),
    # of a loop, as they are tried
    "worker_processes": Change("load the input in worker processes", ("input",), tried="{workers} worker processes"),
    "pin_memory": Change("pin the memory of the input", ("transfer",), tried="pinned memory"),
    "autocast": Change("compute in bfloat16 (torch.autocast)", ARITHMETIC, tried="bfloat16 autocast"),
    "fused_optimizer": Change("use a fused optimizer (fused=True)", ("optimizer",), tried="fused optimizer"),
    "other": Change("{words}"),
    # of a loop, by what its trace or its stages show
    "load_ahead": Change(
        "prepare the input ahead (DataLoader workers, prefetching, pinned memory)",
        ("input",),
        (
            "DataLoader(num_workers=2 to 8 per GPU, persistent_workers=True, prefetch_factor=2 or more)",
            "DataLoader(pin_memory=True) and .to(device, non_blocking=True): the copy then runs beside the computation",
            "tokenize, decode and resize once, before the loop",
        ),
    ),
    "tokenize_ahead": Change(
        "tokenize ahead (once before the loop, or in other processes)",
        ("input",),
        (
            "tokenize the whole set once, before the loop, and keep the numbers",
            "a fast tokenizer (use_fast=True), a list of texts per call; DataLoader(num_workers=2 or more) around it",
            "sort texts by length where their order does not matter: less padding for the same texts",
        ),
    ),
    "stay_asynchronous": Change(
        "take the waits for the device out of the loop (.item(), .cpu(), printing)",
        ("launch",),
        (
            "take .item(), .cpu(), .tolist(), print() and `if tensor:` out of the loop; log every n-th step only",
            "add up losses and metrics on the device and fetch them at the end",
            'torch.cuda.set_sync_debug_mode("warn") names the lines that wait',
        ),
    ),
    "launch_less": Change(
        "launch less and sooner (torch.compile, CUDA graphs, larger batches)",
        ("launch",),
        (
            'torch.compile(model, mode="reduce-overhead"), or a CUDA graph, where shapes are fixed',
            "larger batches: as many launches do more work",
            "fused optimizers (fused=True), and less Python between the operators",
        ),
    ),
    "do_less_between": Change(
        "do less between the operators (torch.compile, less Python in the loop)",
        ("launch",),
        (
            "torch.compile: fewer operators, and less Python between them",
            "larger batches: the same Python for more work",
            "the flame graph and stacks.txt name the Python lines",
        ),
    ),
    "shorten_python": Change(
        "do less in Python, or do it before or beside the loop",
        ("launch",),
        (
            "move it before the loop, to every n-th step, or to another process; vectorize what remains",
            "with a device: issue the next work first, and do the rest while the device is busy with it",
            "where it has no name: record Python stacks (with_stack), or mark it with torch.profiler.record_function",
        ),
    ),
    "collect_rarely": Change(
        "collect garbage rarely, and outside of the loop",
        ("launch",),
        (
            "gc.disable() in the loop and gc.collect() every n-th step, or gc.freeze() before it",
            "look for reference cycles that keep tensors alive: they are what makes the collector run",
        ),
    ),
    "save_beside": Change(
        "save less often, or beside the loop",
        ("launch",),
        (
            "copy the state to pinned memory and write it from another thread (torch.distributed.checkpoint)",
            "save every n-th time only, and to a local disk first",
        ),
    ),
    "keep_allocated": Change(
        "keep memory in the allocator's cache (no empty_cache; expandable segments)",
        ("launch",),
        (
            "PYTORCH_ALLOC_CONF=expandable_segments:True (torch up to 2.9 heeds only PYTORCH_CUDA_ALLOC_CONF)",
            "no torch.cuda.empty_cache() in the loop",
            "run the longest batch first, so that the cache holds blocks large enough for all others",
        ),
    ),
    "compile_ahead": Change(
        "compile before the loop, and keep shapes fixed",
        ("launch",),
        (
            "run every shape once before the part that counts",
            "pad to a few lengths, or torch.compile(dynamic=True); TORCH_LOGS=recompiles says why it compiles again",
            "keep the cache from run to run: TORCHINDUCTOR_CACHE_DIR on a disk that stays",
        ),
    ),
    "load_kernels_ahead": Change(
        "warm up before the part that counts (kernels are loaded at their first use)",
        ("launch",),
        (
            "run every shape once before the loop, or before the first request",
            "with CUDA, CUDA_MODULE_LOADING=EAGER loads all kernels at the start instead",
            "record a few steps later: what is done once is no part of the loop",
        ),
    ),
    "free_the_driver": Change(
        "keep other threads from holding the driver while work is launched",
        ("launch",),
        (
            "allocate pinned memory once, before the loop; pin_memory=True with few workers does so in a thread",
            "no cudaMalloc, cudaFree (hipMalloc, hipFree) or module loading in other threads meanwhile",
            "see which other processes use the device (nvidia-smi, amd-smi)",
        ),
    ),
    "fewer_kernels": Change(
        "fewer and larger kernels (fusion): the pauses lie between the kernels of one graph",
        ("under_utilised",),
        (
            "torch.compile before capturing the graph: fused kernels instead of many small ones",
            "larger batches: as many kernels do more work",
        ),
    ),
    "launch_together": Change(
        "launch many kernels at once (CUDA graphs)",
        ("launch",),
        (
            'a CUDA graph, or torch.compile(mode="reduce-overhead"): many kernels follow one launch',
            "fewer and larger kernels: larger batches, fused operators",
        ),
    ),
    "order_streams": Change(
        "order the streams so that the device need not wait for an event",
        ("communication",),
        (
            "see which stream is waited for (the trace in a viewer shows it), and begin its work sooner",
            "give copies and communication streams of their own, and wait only where their result is used",
        ),
    ),
    "hide_communication": Change(
        "hide communication behind computation",
        ("communication",),
        (
            "overlap it with the backward pass: DistributedDataParallel with bucket_cap_mb tried at 10, 25 and "
            "100, gradient_as_bucket_view=True; FSDP with prefetching",
            "communicate less: accumulate gradients under no_sync(), or compress them to bfloat16",
            "where ranks wait for one another, compare their traces: the slowest has the longest step of its own",
        ),
    ),
    "wait_less": Change(
        "bring rank {rank} up to the others, which wait for it in their collectives",
        ("communication",),
        (
            "look at the trace of that rank first: what it does for itself is what all others wait for",
            "even out the work: batches of equal length, no logging or saving on one rank alone",
        ),
    ),
    "hide_copies": Change(
        "copy from pinned memory without blocking, beside the computation",
        ("transfer",),
        (
            "copy from pinned memory with non_blocking=True, on a stream of its own",
            "leave on the device what the next step needs again, and convert types there",
        ),
    ),
    "cheaper_update": Change(
        "make the update cheaper (fused or foreach, where the optimizer has it) or rarer (accumulate gradients)",
        ("optimizer",),
        (
            "fused=True (or foreach=True) in the optimizer; zero_grad(set_to_none=True), which is the default",
            "accumulate gradients over several batches: one update for all of them",
            "an optimizer with less state, where the memory for it is what takes the time",
        ),
    ),
    "log_less": Change(
        "do callbacks, logging and checkpoints less often, or beside the loop",
        ("under_utilised",),
        (
            "log and save every n-th step only, and from another thread or process",
            "add up losses and metrics on the device; no .item() or print() in each step",
            "evaluate and save less often, or on part of the data",
        ),
    ),
    "faster_work": Change(
        "make the work itself faster (larger batches, bfloat16, torch.compile)",
        ("compute",),
        (
            "a larger batch, if memory allows: more work for each operator",
            "bfloat16 (torch.autocast) and torch.compile, each checked against the loss curve",
            "the table of operators (op_stats.csv) and the verdict on the trace say which operators to begin with",
        ),
        is_bounded=False,
    ),
    "clip_on_device": Change(
        "clip the gradients on their device, in one go",
        ("optimizer",),
        (
            "torch.nn.utils.clip_grad_norm_(parameters, maximum, foreach=True)",
            "no .item() on the norm, and no loop over parameters in Python; log the norm every n-th step",
        ),
    ),
    "cheaper_schedule": Change(
        "compute the learning rate more cheaply, or every n-th step",
        ("optimizer",),
        ("a table of the rates made before the loop (LambdaLR), or a step of the scheduler every n-th step",),
    ),
    "evaluate_less": Change(
        "evaluate less often, or on part of the data",
        ("under_utilised",),
        ("evaluate every n-th step, on a fixed part of the data, under torch.inference_mode()",),
    ),
    "generate_faster": Change(
        "generate the answers faster (more prompts at once, a KV cache, bfloat16, an inference engine)",
        ("compute", "memory", "launch"),
        (
            "more prompts per call of generate(), sorted by length; use_cache=True; bfloat16",
            "an engine made for generation, fed with the weights of the policy after each update",
            "several updates of the policy per rollout, where the algorithm allows it",
        ),
    ),
    "score_faster": Change(
        "score more answers per call, without gradients (reward)",
        ("compute", "memory", "launch"),
        ("torch.inference_mode() and bfloat16; rules and remote calls in a pool, beside the next rollout",),
    ),
    "lighter_reference": Change(
        "make the reference cheaper (no gradients, bfloat16, answers of known prompts kept)",
        ("compute", "memory", "launch"),
        (
            "torch.inference_mode() and bfloat16; with LoRA the policy without its adapters is the reference",
            "keep its log-probabilities where the same answers are used again",
        ),
    ),
    "mark_stages": Change(
        "mark more of the loop",
        steps=(
            "mark more of the loop: with profiler.stage(name)",
            "look into the trace: what is between the stages there",
        ),
        is_bounded=False,
    ),
    "record_more": Change(
        "record what the host did",
        steps=(
            "record Python stacks (with_stack), or mark the program with torch.profiler.record_function",
            "see whether other processes use the cores or the device",
        ),
        is_bounded=False,
    ),
    "leave_out": Change("take out what the loop does in no stage"),
    "shorten_stage": Change("shorten {stage}"),
    "straggler": Change("bring rank {rank} up to the others ({stage})"),
}
# What helps against each cause of lost time in a trace: idling, and communication and copies that nothing hides.
OF_CAUSES: dict[str, str] = {
    "input": "load_ahead",
    "synchronisation": "stay_asynchronous",
    "launch": "launch_less",
    "allocator": "keep_allocated",
    "compile": "compile_ahead",
    "launch_latency": "launch_together",
    "stream_wait": "order_streams",
    "untraced": "record_more",
    "python": "shorten_python",
    "tokenizing": "tokenize_ahead",
    "garbage_collection": "collect_rarely",
    "saving": "save_beside",
    "loading": "load_kernels_ahead",
    "driver": "free_the_driver",
    "graph_pause": "fewer_kernels",
    "communication": "hide_communication",
    "memcpy": "hide_copies",
}
# Of a trace without work of a device, where the cause lies between the operators.
OF_CAUSES_ON_HOST: dict[str, str] = {"launch": "do_less_between"}
# Of the stages of a training loop, by what their time counts for.
OF_STAGES: dict[Bound, str] = {
    "input": "load_ahead",
    "transfer": "hide_copies",
    "communication": "hide_communication",
    "optimizer": "cheaper_update",
    "under_utilised": "log_less",
    "compute": "faster_work",
    "inconclusive": "mark_stages",
}


class Fix(msgspec.Struct, frozen=True):
    """A change that someone can make: a kind of `CHANGES` and its settings. `str` of it is its words."""

    kind: str
    settings: Mapping[str, str | int] = msgspec.field(default_factory=dict)

    def __hash__(self) -> int:
        """Return one hash for all settings of a kind."""
        return hash(self.kind)

    def __post_init__(self) -> None:
        """Raise ValueError for a kind that is not known."""
        if self.kind not in CHANGES:
            raise ValueError(f"{self.kind!r} is no kind of fix; the kinds are {', '.join(CHANGES)}")

    def __str__(self) -> str:
        """Return what to do, in a few words."""
        return self.change.words.format(**self.settings)

    @property
    def change(self) -> Change:
        """What is known of this kind of fix."""
        return CHANGES[self.kind]

    def as_dict(self) -> dict[str, Any]:
        """Return plain values: the fix in words, with its kind and settings beside."""
        return {"fix": str(self), "kind": self.kind, "settings": dict(self.settings)}


def fix_of_cause(cause: str, on_host: bool = False) -> Fix | None:
    """Return what helps against a cause of lost time in a trace; None where nothing does."""
    kind = (OF_CAUSES_ON_HOST.get(cause) if on_host else None) or OF_CAUSES.get(cause)
    return Fix(kind) if kind else None


class SameLabels(msgspec.Struct, frozen=True):
    """How many of the texts that were compared keep their label under a fix; the interval of the share is Wilson's."""

    same: int
    of: int
    share: Interval


class Trial(msgspec.Struct, frozen=True):
    """A fix that was made here: its factor of the throughput, measured, beside what was predicted before it was tried.

    `expected` is the range of the factor that each bound speaks for, where they differ. `source`: "pairs" are runs with
    and without the fix, one right after the other, `pairs` of them; "sweep" is another batch size of the same sweep.
    `same_labels` is None for what changes no arithmetic. `is_fix` False: made to tell bounds apart, nothing to advise.
    """

    fix: Fix
    measured: Interval
    predicted: Interval | None = None
    at_most: float | None = None
    expected: Mapping[Bound, tuple[float, float]] = msgspec.field(default_factory=dict)
    same_labels: SameLabels | None = None
    source: TrialSource = "pairs"
    pairs: int = 0
    is_fix: bool = True

    @property
    def name(self) -> str:
        """What was changed, in a few words."""
        return (self.fix.change.tried or self.fix.change.words).format(**self.fix.settings)

    @property
    def outcome(self) -> Outcome:
        """Whether the fix gains or loses: no change where its interval holds 1, or the difference is below 2 %."""
        if self.measured.low > 1 and self.measured.value >= LEAST_GAIN:
            return "gains"
        return "loses" if self.measured.high < 1 and self.measured.value <= 1 / LEAST_GAIN else "no_change"

    @property
    def is_within_bound(self) -> bool:
        """Whether what was measured is at most what was said to be possible, within its interval."""
        return self.at_most is None or self.measured.low <= self.at_most

    def says_of(self, bound: Bound) -> Sign:
        """Return what the trial says of a bound.

        It confirms where its whole interval lies in the expected range (ambiguous, where it lies in that of compute,
        memory or launch as well), and refutes where none of it does.
        """
        if bound not in self.expected:
            return "silent"
        low, high = self.expected[bound]
        if self._lies_in(bound):
            return "ambiguous" if self.rivals(bound) else "confirms"
        return "refutes" if self.measured.high < low or self.measured.low > high else "too_uncertain"

    def rivals(self, bound: Bound) -> tuple[Bound, ...]:
        """Return the other bounds that the outcome fits just as well."""
        return tuple(name for name in self.expected if name in RIVALS and name != bound and self._lies_in(name))

    def beside(self, gains: "Sequence[Gain]") -> "Trial":
        """Return the trial beside what was predicted of its fix."""
        gain = next((gain for gain in gains if gain.fix == self.fix), None)
        return msgspec.structs.replace(self, predicted=gain.predicted, at_most=gain.at_most) if gain else self

    def _lies_in(self, bound: Bound) -> bool:
        low, high = self.expected[bound]
        return low <= self.measured.low and self.measured.high <= high

    def as_dict(self) -> dict[str, Any]:
        """Return plain values: the fix in words, with its kind and settings beside; without the expected ranges."""
        values = {**values_of(self), **self.fix.as_dict(), "trial": self.name, "outcome": self.outcome}
        del values["expected"]
        return values


class Untried(msgspec.Struct, frozen=True):
    """A fix that was not tried, or whose trial came to nothing, and why; what was measured stands without it."""

    fix: Fix
    kind: UntriedKind
    reason: str

    def as_dict(self) -> dict[str, Any]:
        """Return plain values: the fix in words, with its kind and settings beside."""
        return {**self.fix.as_dict(), "why": self.kind, "reason": self.reason}


class Tried(msgspec.Struct, frozen=True):
    """What came of the candidates; `doubts` are on the machine while they were measured."""

    trials: tuple[Trial, ...] = ()
    untried: tuple[Untried, ...] = ()
    doubts: tuple[Doubt, ...] = ()

    def joined(self, others: "Tried") -> "Tried":
        """Return both."""
        return Tried(
            self.trials + others.trials,
            self.untried + others.untried,
            tuple(dict.fromkeys(self.doubts + others.doubts)),
        )

    def with_predictions(self, gains: "Sequence[Gain]") -> "Tried":
        """Return the same trials, each beside what was predicted of its fix."""
        return msgspec.structs.replace(self, trials=tuple(trial.beside(gains) for trial in self.trials))


class Part(msgspec.Struct, frozen=True):
    """Whose a part of the time of one forward is; `padding_share` of these seconds went into padding, None if unknown.

    They may be negative: the parts are differences of times, and nothing is clipped, so that they add up.
    """

    kind: PartKind
    seconds: float
    padding_share: float | None = None


class MatmulSpeed(msgspec.Struct, frozen=True):
    """The speed of the matrix products of a forward as a share of the peak: inside the model, and alone and hot."""

    in_model: float
    alone: float


class Reference(msgspec.Struct, frozen=True):
    """The batch of typical cost that sweep, replays, trials, trace and layers share, and its measured time.

    `str` of it is its shape, as in "8 × 154 tokens".
    """

    samples: int
    tokens: int
    seconds: Interval

    def __str__(self) -> str:
        """Return the shape in words."""
        return f"{self.samples} × {self.tokens} tokens"


class Cause(msgspec.Struct, frozen=True):
    """One thing that limits a forward: padding, or a part without its padding; `share` is that of the time.

    `flops_share` is padding's share of the FLOPs. `confirmed_by` is the trial that bore it out.
    """

    kind: CauseKind
    share: float
    flops_share: float | None = None
    confirmed_by: Fix | None = None


class Unsettled(msgspec.Struct, frozen=True):
    """Why the evidence does not decide what limits, and, in `text`, what would settle it."""

    kind: UnsettledKind
    text: str


class Gain(msgspec.Struct, frozen=True):
    """What a fix that was not tried would do to the throughput, as a factor: predicted, and at most.

    `basis` is what `at_most` rests on, in words.
    """

    fix: Fix
    at_most: float
    basis: str
    predicted: Interval | None = None

    @property
    def relieves(self) -> tuple[Bound, ...]:
        """The bounds that it can help with; () is any."""
        return self.fix.change.relieves

    def as_dict(self) -> dict[str, Any]:
        """Return plain values: the fix in words, with its kind and settings beside."""
        return {**values_of(self), **self.fix.as_dict(), "relieves": self.relieves}


class Verdict(msgspec.Struct, frozen=True):
    """What limits, and how sure that is.

    `share_of_limit` is the time that the limit alone needs over the time measured. `parts` add up to the time of
    `reference`, `limited_by` ranks what limits it, the first first, and `matmul` says how fast its matrix products
    are. `gains` are of fixes that were not tried, the largest first; a trial takes the place of the gain of its fix.
    `step_s` is how long a step of a trace took, None where it marks none.
    """

    bound: Bound
    alternatives: tuple[Bound, ...]
    share_of_limit: float | None
    confidence: Confidence
    confirmation: Confirmation
    gains: tuple[Gain, ...]
    evidence: tuple[str, ...]
    doubts: tuple[Doubt, ...] = ()
    step_s: float | None = None
    trials: tuple[Trial, ...] = ()
    untried: tuple[Untried, ...] = ()
    reference: Reference | None = None
    breakdown: tuple[Part, ...] = ()
    limited_by: tuple[Cause, ...] = ()
    matmul: MatmulSpeed | None = None
    unsettled: Unsettled | None = None

    def __str__(self) -> str:
        """Return what limits, whether that is settled, and the best that is known to help, in one sentence."""
        share = "" if self.share_of_limit is None else f", which alone needs {percent(self.share_of_limit)} of the time"
        words = f"limited by {plain(self.bound)}{share}"
        tried = [trial for trial in self.trials if trial.is_fix and trial.outcome == "gains"]
        if tried:
            best = max(tried, key=lambda trial: trial.measured.value)
            words += f"; {best.name}: {times(best.measured.value)} times as fast, measured"
        elif self.gains:
            words += f"; {self.gains[0].fix}: at most {times(self.gains[0].at_most)} times as fast, not tried"
        return words if self.unsettled is None else f"{words}; not settled: {self.unsettled.text}"

    __repr__ = __str__

    @property
    def settled(self) -> bool:
        """Whether the evidence decides what limits."""
        return self.unsettled is None

    def as_dict(self) -> dict[str, Any]:
        """Return plain values: fixes, doubts and what would settle it in words, with their kinds beside."""
        values = values_of(self)
        if self.step_s is None:
            del values["step_s"]
        return {
            **values,
            "gains": [gain.as_dict() for gain in self.gains],
            "doubts": [str(doubt) for doubt in self.doubts],
            "doubt_kinds": [doubt.kind for doubt in self.doubts],
            "trials": [trial.as_dict() for trial in self.trials],
            "untried": [untried.as_dict() for untried in self.untried],
            "reference": self.reference and {**values_of(self.reference), "shape": str(self.reference)},
            "settled": self.settled,
            "would_settle": self.unsettled.text if self.unsettled else None,
            "unsettled": self.unsettled.kind if self.unsettled else None,
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Verdict":
        """Return the verdict that `as_dict` gave, without what its trials expected.

        Raises LookupError, TypeError or ValueError.
        """
        kind = values["unsettled"]
        return msgspec.convert(
            {
                **values,
                "gains": [_with_fix(gain) for gain in values["gains"]],
                "doubts": [values_of(doubt) for doubt in doubts_of(values)],
                "trials": [_with_fix(trial) for trial in values["trials"]],
                "untried": [{**_with_fix(untried), "kind": untried["why"]} for untried in values["untried"]],
                "unsettled": {"kind": kind, "text": values["would_settle"]} if kind else None,
            },
            Verdict,
        )


def values_of(record: Any) -> Any:
    """Return a record, of msgspec or a dataclass, as a dict, the records in it too."""
    if isinstance(record, tuple | list):
        return tuple(map(values_of, record))
    names = getattr(record, "__struct_fields__", ()) or getattr(record, "__dataclass_fields__", ())
    return {name: values_of(getattr(record, name)) for name in names} if names else record


def _with_fix(values: Mapping[str, Any]) -> dict[str, Any]:
    return {**values, "fix": {"kind": values["kind"], "settings": values.get("settings", {})}}


def inconclusive(doubts: Iterable[Doubt], gains: Iterable[Gain] = ()) -> Verdict:
    """Return the verdict that says nothing, and why."""
    known = tuple(doubts)
    missing = Unsettled("unknown", known[-1].text) if known else None
    return Verdict("inconclusive", (), None, "low", "untested", tuple(gains), (), known, unsettled=missing)


def untested(gains: Iterable[Gain], trials: Iterable[Trial]) -> list[Gain]:
    """Return the gains of fixes that no trial made: what was tried replaces what was predicted."""
    tried = [trial.fix for trial in trials]
    return [gain for gain in gains if gain.fix not in tried]


def doubts_of(values: Mapping[str, Any]) -> list[Doubt]:
    """Return the doubts in `doubts` and `doubt_kinds` of plain values."""
    named = zip(values["doubts"], values["doubt_kinds"], strict=True)
    return [Doubt(kind, text[len(f"{kind}: ") :]) for text, kind in named]
