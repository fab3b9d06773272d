"""Read profiles by layer, each for one kind of node, and plan with them."""

import re
from collections.abc import Sequence
from pathlib import Path

from boundby.layers.records import ModelProfile
from boundby.layers.report import read_profile
from boundby.partition import ExecutionPlanner, Infeasible, PartitionPlan
from boundby.partition.objectives import Objective
from boundby.partition.planner import kind_of
from utils.errors import InputError
from utils.nodes_config import MB, NodesConfig

SUMMARIES = "*_summary.json"
WITH_KIND = re.compile(r"([A-Za-z][\w-]*)=(.+)", re.DOTALL)

Profiles = dict[str, ModelProfile]


def read_profiles(given: Sequence[str]) -> Profiles:
    """Return the profiles by kind of node; each is given as FILE, as a folder with one, or as KIND=FILE.

    Raises InputError where one cannot be read or a kind has two.
    """
    found: Profiles = {}
    for each in given:
        stated = None if Path(each).exists() else WITH_KIND.fullmatch(each)
        kind, path = (stated[1], stated[2]) if stated else (None, each)
        profile = _read(Path(path))
        kind = kind or kind_of(profile)
        if kind in found:
            raise InputError(f"{path} is a second profile of kind {kind!r}; name the kind of one: KIND={path}")
        found[kind] = profile
    return found


def plan(
    profiles: Profiles, settings: NodesConfig, objective: Objective, requests: int | None
) -> tuple[PartitionPlan | None, Infeasible | None]:
    """Return the best plan, or what is missing for one. Raises InputError for what cannot be planned."""
    if (objective == "requests") != (requests is not None):
        raise InputError("--objective requests and --requests M go together: M is how many are to be done soonest")
    workload = settings.workload
    extra = workload.extra_live_mb
    try:
        planner = ExecutionPlanner(
            profiles,
            kv_cache_bytes=round(workload.kv_cache_mb_per_block * MB),
            extra_live_bytes=None if extra is None else round(extra * MB),
            inputs_in_flight=workload.inputs_in_flight,
        )
        found = planner.generate_plan(
            [node.virtual() for node in settings.nodes],
            objective,
            settings.link_table(),
            requests=1 if requests is None else requests,
            overlap=settings.overlap,
            in_order=settings.in_order,
        )
    except Infeasible as missing:
        return None, missing
    except ValueError as error:
        raise InputError(str(error)) from None
    return found, None


def _read(path: Path) -> ModelProfile:
    if path.is_dir():
        summaries = sorted(path.glob(SUMMARIES))
        if len(summaries) != 1:
            raise InputError(f"{path} holds {len(summaries)} profiles ({SUMMARIES}); name one file")
        [path] = summaries
    try:
        return read_profile(path)
    except FileNotFoundError:
        raise InputError(f"{path} is not there; give the {SUMMARIES} of a profile by layer") from None
    except (OSError, ValueError) as error:
        raise InputError(str(error)) from None
