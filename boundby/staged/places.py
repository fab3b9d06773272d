"""Where the stages of a plan compute on this machine: a device, and threads bound to cores."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from boundby.device import pick_device
from boundby.disturbance import usable_cpus
from boundby.partition.links import Link, Links
from boundby.partition.plan import PartitionPlan, Stage


@dataclass(frozen=True)
class Workers:
    """How workers compute: with `threads` threads each, bound to as many cores of their own where there are enough.

    `devices` says by name of node where it is: "cpu", "cuda:0". Without it a node of kind "cpu" is on the CPU and one
    of kind "gpu" on the next GPU. `links` makes links slow, by sleep.
    """

    threads: int = 1
    is_pinned: bool = True
    devices: Mapping[str, str] = field(default_factory=dict)
    links: Links | None = None


@dataclass(frozen=True)
class Place:
    """Where a worker computes. `link` is emulated on the way in: it carries one message at a time, by sleep."""

    device: str
    threads: int
    cores: tuple[int, ...]  # empty where it is not bound
    link: Link | None = None


def places_of(plan: PartitionPlan, workers: Workers) -> tuple[Place, ...]:
    """Return a place for every stage. Raises ValueError for a device that is not there, or that nothing names."""
    threads, devices, links = workers.threads, workers.devices, workers.links
    if threads < 1:
        raise ValueError(f"threads is {threads}; a worker computes with 1 or more")
    if links is not None and not plan.overlap:
        raise ValueError("links are emulated beside the computation alone: plan with overlap=True")
    names = {stage.node for stage in plan.stages}
    if not set(devices) <= names:
        raise ValueError(f"devices names {sorted(set(devices) - names)}; the plan has {sorted(names)}")
    cores = sorted(usable_cpus())
    bound = workers.is_pinned and len(plan.stages) * threads <= len(cores)
    chosen = list(_devices(plan.stages, devices))
    return tuple(
        Place(
            device=device,
            threads=threads,
            cores=tuple(cores[index * threads : (index + 1) * threads]) if bound else (),
            link=links.between(plan.stages[index - 1].node, stage.node) if links and index else None,
        )
        for index, (stage, device) in enumerate(zip(plan.stages, chosen, strict=True))
    )


def share_cores(places: Sequence[Place]) -> bool:
    """Tell whether there are more threads than cores, so that stages wait for one another's."""
    return sum(each.threads for each in places) > len(usable_cpus())


def _devices(stages: Sequence[Stage], given: Mapping[str, str]) -> Iterator[str]:
    gpus = 0
    for stage in stages:
        if stage.node in given:
            name = given[stage.node]
        elif stage.kind == "cpu":
            name = "cpu"
        elif stage.kind == "gpu":
            name, gpus = f"cuda:{gpus}", gpus + 1
        else:
            raise ValueError(f"{stage.node} is a {stage.kind}: say where it is, devices={{{stage.node!r}: 'cuda:0'}}")
        try:
            yield str(pick_device(name))
        except ValueError as error:
            raise ValueError(f"{stage.node} cannot be run here: {error}. Compute the plan with simulate") from error
