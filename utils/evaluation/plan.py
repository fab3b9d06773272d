"""Fix what the evaluation does before it starts, so that its result depends on nothing else."""

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import msgspec
from msgspec import structs

from boundby import files
from boundby.cli import typed
from utils.command import EvaluationFolder, InputError

SCHEMA_VERSION = 7
BATCHING = "longest-first-2"  # name of the rule that makes batches of a shard's lengths; a new rule gets a new name
PLAN_COMMAND = typed("evaluate", "plan")
OF_THE_MACHINE = ("device", "device_name", "arithmetic", "versions")  # fields of an identity
GUARD = 4.0  # as in `same`: twice what can flip a label, and that twice


class Shard(msgspec.Struct, frozen=True):
    """A range of positions in the evaluated rows, `stop` excluded.

    `offset` is the byte of its first row in the dataset; `rows_sha256` a hash of its row ids, texts and labels.
    """

    id: int
    start: int
    stop: int
    offset: int
    first_row_id: int
    last_row_id: int
    rows_sha256: str

    @property
    def rows(self) -> int:
        """Number of rows."""
        return self.stop - self.start


class Identity(msgspec.Struct, frozen=True):
    """What is evaluated with what: task, rows, model, tokenizer, and the machine. Nothing here was measured.

    The first `rows` in the order of `sample_seed` are evaluated, all where it is None. `max_length`, `token_budget`,
    `dtype` and `compile` are as the settings ask for them. The last four fields are all of a machine that may change
    the last digits of a result.
    """

    task: str
    rows: int
    dataset_rows: int
    dataset_sha256: str
    sample_seed: int | None
    model_fingerprint: str
    model_sha256: str
    tokenizer_sha256: str
    labels: tuple[str, ...]
    dtype: str
    matmul_precision: str
    max_length: int
    precision: str
    min_agreement: float
    token_budget: int | None
    compile: str
    device: str
    device_name: str
    arithmetic: dict[str, str | tuple[str, ...]]
    versions: dict[str, str | None]


class Converted(msgspec.Struct, frozen=True):
    """A model that was converted for another library: the library's version and a hash of the files."""

    version: str
    sha256: str


class Choices(msgspec.Struct, frozen=True):
    """What planning has settled: it holds for every shard on every worker.

    Batches follow from token lengths, `batching`, `strategy` and `token_budget` alone. `packs`, `trim`, `compile` and
    `guard_margin` are those of `PredictorOptions`. `converted`: the model of an engine, whose key is then `precision`.
    A worker loads the model in `model_dtype` and computes in `dtype`.
    """

    token_budget: int
    batching: str
    strategy: str
    packs: bool
    trim: bool
    compile: bool
    max_length: int
    precision: str
    model_dtype: str
    dtype: str
    guard_margin: float
    threads_per_worker: int
    converted: Converted | None = None


class Budget(msgspec.Struct, frozen=True):
    """Tokens per batch, why so many, and the seconds that the same texts took by budget (None: not measured)."""

    token_budget: int
    reason: str
    seconds: dict[str, float] | None = None


class Compilation(msgspec.Struct, frozen=True):
    """Whether the layers are compiled, and why; None: not measured.

    `compile_s` is what each process needs first; the other seconds are the least for the same texts.
    """

    on: bool
    reason: str
    compile_s: float | None = None
    compiled_s: float | None = None
    eager_s: float | None = None
    max_abs_logit_difference: float | None = None

    def guard(self, margin: float) -> float:
        """Return the margin below which a row is computed again, wider by what compiling changes; 0 stays 0."""
        difference = self.max_abs_logit_difference if margin and self.on else None
        return margin + GUARD * (difference or 0.0)


class EngineChoice(msgspec.Struct, frozen=True):
    """Which engine computes, None: ours; why; and what was measured: seconds to convert, times as fast as ours."""

    name: str | None
    reason: str
    convert_s: float | None = None
    gain: float | None = None
    gain_low: float | None = None
    gain_high: float | None = None
    won_back_after_texts: int | None = None


class Reasons(msgspec.Struct, frozen=True):
    """Why the choices are what they are. None: not measured, and of `engine`: not asked for or not installed."""

    precision: str
    exactness: dict[str, Any] | None
    precision_doubts: list[str]
    token_budget: Budget
    compile: Compilation
    strategy_doubts: list[str]
    engine: EngineChoice | None = None
    labels_doubt: str | None = None  # where too few of them are those of float32


class Places(msgspec.Struct, frozen=True):
    """Where the plan's inputs lay when it was made; a copy elsewhere gives the same result."""

    dataset: str
    model: str
    model_name: str
    converted: str | None = None


class Plan(msgspec.Struct, frozen=True, dict=True):
    """Everything a prediction depends on, and why its choices are what they are.

    `attempt` tells evaluations apart that follow one another in a store. `check_offsets` are the bytes of the rows with
    the fewest and the most tokens, on which every worker checks its predictor.
    """

    identity: Identity
    choices: Choices
    shards: tuple[Shard, ...]
    places: Places
    reasons: Reasons
    attempt: str | None = None
    check_offsets: tuple[int, ...] = ()

    @cached_property
    def fingerprint(self) -> str:
        """A hash of what the result depends on; every part carries it, so it is computed once and not per shard."""
        parts = msgspec.to_builtins([self.identity, self.choices, self.shards])
        return files.sha256_of([*parts, *self.check_offsets, *([self.attempt] if self.attempt else [])])


def save(plan: Plan, folder: EvaluationFolder) -> None:
    """Write the plan with its fingerprint."""
    files.write_json(
        folder.plan, {"schema_version": SCHEMA_VERSION, "fingerprint": plan.fingerprint, **msgspec.to_builtins(plan)}
    )


def load(folder: EvaluationFolder) -> Plan:
    """Return the plan of `folder`. Raises InputError when it is not there, damaged or of another version."""
    try:
        content = folder.plan.read_bytes()
    except FileNotFoundError:
        raise InputError(f"{folder.plan}: nothing is planned; run `{PLAN_COMMAND}` first") from None
    except OSError as error:
        raise InputError(f"{folder.plan}: cannot be read ({error}); {PLAN_COMMAND} --anew") from None
    return decoded(content, str(folder.plan))


def decoded(content: bytes, name: str) -> Plan:
    """Return the plan that a file at `place` holds. Raises InputError when it is damaged or of another version."""
    try:
        record = json.loads(content)
        version = record.get("schema_version") if isinstance(record, dict) else None
        if version != SCHEMA_VERSION:
            raise InputError(
                f"{name}: is of version {version}, this program reads {SCHEMA_VERSION}; {PLAN_COMMAND} --anew"
            )
        plan = msgspec.convert(record, Plan)
    except (ValueError, RecursionError) as error:  # as msgspec's is
        raise InputError(f"{name}: cannot be read ({error}); {PLAN_COMMAND} --anew") from None
    if plan.fingerprint != record.get("fingerprint"):
        raise InputError(f"{name}: was edited or damaged, its fingerprint differs; {PLAN_COMMAND} --anew")
    return plan


def differences(planned: Identity, wanted: Identity) -> list[str]:
    """Return what a plan was made for and what is wanted now, one text for each field that differs."""
    return list(_differing("", structs.asdict(planned), structs.asdict(wanted)))


def require_same(plan: Plan, wanted: Identity, folder: EvaluationFolder) -> None:
    """Raise InputError, with what differs and the way out, unless the plan is one for what is wanted."""
    differing = differences(plan.identity, wanted)
    if differing:
        raise InputError(
            f"{folder.plan}: is a plan for something else: "
            f"{'; '.join(differing)}. Nothing was changed. Undo that, choose "
            f"another output.results_dir, or move plan and parts aside and plan again with `{PLAN_COMMAND} --anew`"
        )


def _differing(path: str, old: Mapping[str, object], new: Mapping[str, object]) -> Iterator[str]:
    for name in dict.fromkeys([*old, *new]):
        before, now = old.get(name), new.get(name)
        if isinstance(before, dict) and isinstance(now, dict):
            yield from _differing(f"{path}{name}.", before, now)
        elif isinstance(before, tuple) and isinstance(now, tuple) and (words := _told_apart(before, now)):
            yield f"{path}{name} {words}"
        elif before != now:
            yield f"{path}{name} is {_shown(now)}, planned was {_shown(before)}"


def _told_apart(before: Sequence[object], now: Sequence[object]) -> str:
    """Return which values of the plan there are not and which there are besides; nothing where only their order is."""
    lacking = ", ".join(str(value) for value in before if value not in now)
    besides = ", ".join(str(value) for value in now if value not in before)
    return " and ".join([*([f"lacks {lacking}"] if lacking else []), *([f"has {besides} besides"] if besides else [])])


def _shown(value: object) -> str:
    text = str(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
