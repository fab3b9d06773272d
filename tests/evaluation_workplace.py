"""A small dataset and model for the evaluation, and what its folder holds."""

import csv
import importlib
import random
from collections.abc import Iterable, Sequence
from pathlib import Path

from tests.tiny_models import LABELS, WORDS, save_bert
from utils.evaluation import parts

ROOT = Path(__file__).resolve().parents[1]
ROWS, SHARD_ROWS = 40, 16
WHOLE = ("plan", "run", "finalize")
QUICK = (  # a sweep of step 02 that takes no time
    "profiling.batch_sizes=[1]",
    "profiling.num_measurement_runs=1",
    "profiling.num_warmup_runs=1",
    "profiling.max_seconds_per_batch_size=0.001",
)


def texts(rows: int = ROWS, seed: int = 0) -> list[tuple[str, str]]:
    """Return different texts of 1 to 30 words with a label each."""
    rng = random.Random(seed)
    made = [" ".join(rng.choices(WORDS, k=1 + row % 30)) for row in range(rows)]
    return [(f"{text} {row}", LABELS[row % len(LABELS)]) for row, text in enumerate(made)]


def prepare(folder: Path, rows: Iterable[tuple[str, str]], model: Path | None = None, *more: str) -> list[str]:
    """Write these rows as a dataset below `folder`, normalise it, and return the command line of an evaluation."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "texts.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["text", "labels"])
        writer.writerows(rows)
    settings = [
        "--config",
        str(ROOT / "configs" / "config.yaml"),
        f"model.name={model or save_bert(folder / 'model')}",
        "dataset.hf_name=null",
        f"dataset.file={folder / 'texts.csv'}",
        f"dataset.local_path={folder / 'data' / 'val_df.csv'}",
        f"output.results_dir={folder / 'results'}",
        "profiling.max_length=64",
        "evaluation.token_budget=128",  # several batches in a shard
        *more,
    ]
    assert importlib.import_module("scripts.01_download_data").main(settings) == 0
    return settings


def evaluate(settings: Sequence[str], *actions: str) -> list[int]:
    """Return the exit codes of `scripts/evaluate.py` with each of these actions; "run --shards 0/2" is one."""
    main = importlib.import_module("scripts.evaluate").main
    return [main([*action.split(), *settings]) for action in actions]


def labels(folder: Path) -> list[int]:
    """Return the predicted labels of an evaluation below `folder`, in the order of the dataset."""
    tables = [parts.read(path.read_bytes()) for path in sorted((folder / "evaluation").glob("part-*"))]
    return [label for table in tables for label in table["prediction"].to_pylist()]


def results(folder: Path) -> dict[str, bytes]:
    """Return what depends on the plan alone: parts, predictions and what is made of them."""
    paths = [*folder.glob("part-*.parquet"), *folder.glob("*.csv"), *folder.glob("quality.json")]
    return {path.name: path.read_bytes() for path in sorted(paths)}
