"""Fix what the evaluation does before it starts, so that its result depends on nothing else."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from boundby import files

SCHEMA_VERSION = 1
# Padded tokens per batch. Starting values, not measured by this program yet: a GPU wants more, to hide its launches.
TOKEN_BUDGET = {"cpu": 2048, "cuda": 16384}
# Rows per shard, which is what a kill costs at most.
SHARD_ROWS = {"cpu": 1024, "cuda": 16384}


@dataclass(frozen=True)
class Shard:
    """A range of positions in the evaluated rows, `stop` excluded."""

    id: int
    start: int
    stop: int


@dataclass(frozen=True)
class Plan:
    """Everything a prediction depends on. Within a shard, batches follow from the token lengths and the budget."""

    rows: int
    dataset_sha256: str
    model_fingerprint: str
    labels: tuple[str, ...]
    dtype: str
    device: str
    max_length: int
    token_budget: int
    sample_seed: int | None
    shards: tuple[Shard, ...]

    @property
    def fingerprint(self) -> str:
        """A hash of the plan; every shard file carries it."""
        return files.sha256_of(asdict(self))


def shards(rows: int, size: int) -> tuple[Shard, ...]:
    """Return consecutive shards of at most `size` rows that cover all rows once."""
    starts = range(0, rows, size)
    return tuple(Shard(number, start, min(start + size, rows)) for number, start in enumerate(starts))


def save(plan: Plan, path: Path) -> None:
    """Write the plan with its fingerprint."""
    files.write_json(path, {"schema_version": SCHEMA_VERSION, "fingerprint": plan.fingerprint, **asdict(plan)})


def saved_fingerprint(path: Path) -> str | None:
    """Return the fingerprint of the plan at `path`, None where there is none that can be read."""
    try:
        content: Any = files.read_json(path)
    except (OSError, ValueError):
        return None
    return content.get("fingerprint") if isinstance(content, dict) else None
