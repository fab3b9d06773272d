"""The words of an answer: what limits, how sure that is, what can be done about it, and what that gains.

Every door of Boundby answers in them: a forward, a trace, a layer, a training run. They are values, so that a program
decides by kinds, settings and numbers; the sentences that people read are made from them, and nothing reads those.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
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
    """What `changes.toml` knows of one kind of fix: its words, the bounds it can help with (() is any), what to try.

    `words` and `tried` (how a trial of it is called) may name its settings in braces. `is_bounded`: what it could gain
    can be told.
    """

    words: str
    relieves: tuple[Bound, ...] = ()
    steps: tuple[str, ...] = ()
    tried: str | None = None
    is_bounded: bool = True


CHANGES = msgspec.toml.decode(Path(__file__).with_name("changes.toml").read_bytes(), type=dict[str, Change])
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
