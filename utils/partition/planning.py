"""What a plan is made of and kept in: the nodes of `configs/nodes.yaml`, profiles by layer, and the file of a plan."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, NamedTuple, Self

import msgspec
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from boundby import files
from boundby.cli import typed
from boundby.layers import ModelProfile, read_profile
from boundby.partition import (
    ExecutionPlanner,
    Infeasible,
    Link,
    Links,
    Objective,
    PartitionPlan,
    VirtualNode,
    check_names,
    kind_of,
)
from utils.command import InputError
from utils.settings import Name, Section, load

SCHEMA_VERSION = 3
SUMMARIES, MODEL = "*_summary.json", "config.json"
EXAMPLES = "planned for the example nodes in {}, not for this machine: state yours there, or with --nodes FILE"
WITH_KIND = re.compile(r"([A-Za-z][\w-]*)=(.+)", re.DOTALL)
SHAPE = re.compile(r"\w+\[(\d+)(?:, (\d+))?")

Profiles = dict[str, ModelProfile]

GB, MB = 1e9, 1e6


class Node(Section):
    """One device."""

    name: Name
    kind: Name
    vram_gb: PositiveFloat | None = None
    ram_gb: PositiveFloat | None = None
    speed: PositiveFloat | None = None
    reserve_gb: NonNegativeFloat = 0
    headroom: Annotated[float, Field(ge=0, lt=1)] = 0.1
    machine: Name | None = None
    contention: Annotated[float, Field(ge=1)] | None = None

    @model_validator(mode="after")
    def _is_a_node(self) -> Self:
        self.virtual()
        return self

    def virtual(self) -> VirtualNode:
        """Return it as the planner takes it. Raises ValueError for memory or contention that it cannot have."""
        return VirtualNode(**self.model_dump())


class LinkCost(Section):
    """What a link takes."""

    gb_per_s: PositiveFloat
    latency_us: NonNegativeFloat = 0
    measured: bool = False

    def link(self) -> Link:
        """Return it as the planner takes it."""
        return Link(self.gb_per_s * GB, self.latency_us / 1e6, self.measured)


class Pair(LinkCost):
    """The link between two nodes."""

    between: Annotated[list[Name], Field(min_length=2, max_length=2)]


class LinkSettings(Section):
    """The links."""

    default: LinkCost = LinkCost(gb_per_s=1.25, latency_us=50)
    pairs: list[Pair] = []


class Workload(Section):
    """What a stage holds beside weights and activations."""

    inputs_in_flight: PositiveInt = 1
    batch_size: PositiveInt | None = None  # that of the profile
    kv_cache_tokens: NonNegativeInt = 0
    kv_cache_mb_per_block: NonNegativeFloat = 0
    extra_live_mb: NonNegativeFloat | None = None


class NodesConfig(Section):
    """All of it."""

    nodes: Annotated[list[Node], Field(min_length=1)]
    links: LinkSettings = LinkSettings()
    in_order: bool = False
    workload: Workload = Workload()

    @model_validator(mode="after")
    def _names_are_clear(self) -> Self:
        ways = [tuple(pair.between) for pair in self.links.pairs]
        if len(set(ways)) < len(ways):
            again = next(way for way in ways if ways.count(way) > 1)
            raise ValueError(f"links.pairs gives {again[0]} to {again[1]} twice")
        check_names([node.virtual() for node in self.nodes], self.link_table())
        return self

    def link_table(self) -> Links:
        """Return the links as the planner takes them."""
        pairs = {(pair.between[0], pair.between[1]): pair.link() for pair in self.links.pairs}
        return Links(self.links.default.link(), pairs)


def read_nodes(path: Path) -> NodesConfig:
    """Return the settings in the file. Raises InputError that lists every mistake with its place."""
    if not path.is_file():
        raise InputError(f"{path}: no such file of nodes; copy configs/nodes.yaml and state your own")
    return load(NodesConfig, path)


def read_profiles(given: Sequence[str]) -> Profiles:
    """Return the profiles by kind of node; each is given as FILE, as a folder with one, or as KIND=FILE.

    A preset, and a folder with a model and no profile, is profiled here.

    Raises InputError where one cannot be read or a kind has two.
    """
    profiles: Profiles = {}
    for source in given:
        stated = None if Path(source).exists() else WITH_KIND.fullmatch(source)
        kind, path = (stated[1], stated[2]) if stated else (None, source)
        profile = _measured(path) if _is_model(Path(path)) else _read(Path(path))
        kind = kind or kind_of(profile)
        if kind in profiles:
            raise InputError(f"{path} is a second profile of kind {kind!r}; name the kind of one: KIND={path}")
        profiles[kind] = profile
    return profiles


def plan(
    profiles: Profiles,
    settings: NodesConfig,
    objective: Objective,
    requests: int | None,
) -> tuple[PartitionPlan | None, Infeasible | None]:
    """Return the best plan, or what is missing for one. Raises InputError for what cannot be planned."""
    if (objective == "requests") != (requests is not None):
        raise InputError("--objective requests and --requests M go together: M is how many requests")
    workload = settings.workload
    extra = workload.extra_live_mb
    try:
        planner = ExecutionPlanner(
            profiles,
            kv_cache_bytes=round(workload.kv_cache_mb_per_block * MB),
            extra_live_bytes=None if extra is None else round(extra * MB),
            inputs_in_flight=workload.inputs_in_flight,
            kv_cache_tokens=workload.kv_cache_tokens,
            batch_size=workload.batch_size,
        )
        best = planner.generate_plan(
            [node.virtual() for node in settings.nodes],
            objective,
            settings.link_table(),
            requests=1 if requests is None else requests,
            in_order=settings.in_order,
        )
    except Infeasible as missing:
        return None, missing
    except ValueError as error:
        raise InputError(str(error)) from None
    return best, None


def for_examples(outcome: PartitionPlan | Infeasible, path: Path) -> PartitionPlan | Infeasible:
    """Return the plan with the note that its nodes are those of an example; what is missing names them itself."""
    if isinstance(outcome, Infeasible):
        return outcome
    return msgspec.structs.replace(outcome, notes=(EXAMPLES.format(path.name), *outcome.notes))


class PlannedModel(msgspec.Struct, frozen=True):
    """Which model a plan is for: a preset, a folder or a name on the Hub, and what tells it from another one."""

    name: str
    dtype: str
    parameters: int
    batch_size: int
    sequence_length: int  # 1 for what is no text
    threads: int | None = None  # that its profile was made with, on a CPU


class Source(msgspec.Struct, frozen=True):
    """A profile that a plan rests on: of which kind of node, model and device."""

    kind: str
    model: str
    profile: str
    device: str


class Missing(msgspec.Struct, frozen=True):
    """What is missing for a plan, as `Infeasible` has it."""

    node: str
    unit: str
    short_bytes: int
    extra_bytes: int
    extra_bytes_by_node: dict[str, int]


class PlanFile(msgspec.Struct, frozen=True):
    """A plan as it is kept, with the model that it is for; or what is missing for one. Seconds and bytes."""

    schema_version: int
    model: PlannedModel
    profiles: tuple[Source, ...]
    feasible: bool
    plan: PartitionPlan | None
    missing: Missing | None
    reason: str | None


class Planned(NamedTuple):
    """A plan to be run, and the model that it is for."""

    model: PlannedModel
    plan: PartitionPlan


def plan_file(outcome: PartitionPlan | Infeasible, profiles: Profiles, model: str | None = None) -> PlanFile:
    """Return the outcome as it is kept; `model` says where the model is."""
    first = next(iter(profiles.values()))
    root = first.layers[0]
    sizes = SHAPE.match(root.input_shapes[0]) if root.input_shapes else None
    planned = PlannedModel(
        name=_location(model or first.model_name),
        dtype=first.dtype,
        parameters=root.parameters,
        batch_size=int(sizes[1]) if sizes else 1,
        sequence_length=int(sizes[2] or 1) if sizes else 1,
        threads=int(first.environment["threads"]) if "threads" in first.environment else None,
    )
    sources = tuple(
        Source(kind, profile.model_name, profile.profile_name, profile.device_name)
        for kind, profile in profiles.items()
    )
    if isinstance(outcome, PartitionPlan):
        return PlanFile(SCHEMA_VERSION, planned, sources, feasible=True, plan=outcome, missing=None, reason=None)
    missing = Missing(outcome.node, outcome.unit, outcome.short_bytes, outcome.extra_bytes, outcome.extra_by_node)
    return PlanFile(SCHEMA_VERSION, planned, sources, feasible=False, plan=None, missing=missing, reason=str(outcome))


def read_plan(path: Path, model: str | None = None) -> Planned:
    """Return the plan that `plan_partition.py --json` wrote; `model` says where its model is, if the file does not.

    Raises InputError for a file that holds no plan to be run.
    """
    again = f"make it with `{typed('plan', 'PROFILE', '--json')}`"
    try:
        file = files.read_as(path, PlanFile)
    except FileNotFoundError:
        raise InputError(f"{path} is not there; {again}") from None
    except (OSError, ValueError) as error:
        raise InputError(f"{path} is no plan of this version that can be read: {error}; {again}") from None
    if file.schema_version != SCHEMA_VERSION:
        version = file.schema_version
        raise InputError(f"{path} is of an older or newer version ({version}, here {SCHEMA_VERSION}); {again} anew")
    if file.plan is None:
        raise InputError(f"{path} holds no plan to run: {file.reason}")
    return Planned(msgspec.structs.replace(file.model, name=_location(model or file.model.name)), file.plan)


def _location(model: str) -> str:
    return str(Path(model).resolve()) if Path(model).is_dir() else model


def _is_model(path: Path) -> bool:
    if path.exists():
        return (path / MODEL).is_file() and not any(path.glob(SUMMARIES))
    return not path.suffix and path.name == str(path)  # a preset; its loader refuses what is none


def _measured(model: str) -> ModelProfile:
    """Profile the model on one text of the usual length and leave the files of it where profiles lie."""
    from utils.tracing import LayerSettings, Model, profiling

    which = Model(name=model) if Path(model).is_dir() else Model(architecture=model)
    report, _ = profiling.profile_as_set(LayerSettings(model=which), lambda text: None, for_plan=True)
    return report.profile


def _read(path: Path) -> ModelProfile:
    if path.name.endswith("_metrics.jsonl"):  # it has the times of every run; all else is in the summary beside it
        path = path.with_name(path.name.replace("_metrics.jsonl", "_summary.json"))
    elif path.suffix in (".html", ".txt"):  # a report, or the dashboard
        beside = path.with_name(path.name.replace("_dashboard.html", "_summary.json"))
        path = beside if beside.is_file() else path.parent
    if path.is_dir():
        summaries = sorted(path.glob(SUMMARIES)) or sorted((path / "layers").glob(SUMMARIES))
        if len(summaries) != 1:
            raise InputError(f"{path} holds {len(summaries)} profiles ({SUMMARIES}); name one file")
        [path] = summaries
    try:
        return read_profile(path)
    except FileNotFoundError:
        raise InputError(f"{path} is not there; give the {SUMMARIES} of a profile by layer") from None
    except (OSError, ValueError) as error:
        raise InputError(str(error)) from None
