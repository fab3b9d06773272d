"""Make the quickstart once, and find it again by its content hash. The door of step 01; imports no torch.

    data/quickstart/
      model-<hash>/   model, tokenizer, validation.csv (the texts that are evaluated); written last, quickstart.json
      .lock           held while building; what is half-built when nobody holds it is swept

The hash covers the recipe, the code and word lists of this package and the versions that shape the result.
"""

import dataclasses
import shutil
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

from boundby import files
from utils.command import held
from utils.quickstart.recipe import Recipe

RECORD, VALIDATION = "quickstart.json", "validation.csv"
NOTE = "Synthetic: texts, labels and model were made by this program. The accuracy says nothing about real reviews."
BUILDING_PREFIX = ".building-"
MAKING_S = 1800.0  # that another process is waited for at most
SHAPING_PACKAGES = ("tokenizers", "torch", "transformers")


@dataclasses.dataclass(frozen=True)
class QuickstartFiles:
    """Where the quickstart lies; `validation_csv` has the columns text and label_name."""

    model_dir: Path
    validation_csv: Path
    content_hash: str


def content_hash(recipe: Recipe | None = None) -> str:
    """Return the SHA-256 of all that decides what `prepare` makes; takes milliseconds."""
    sources = sorted(path for path in Path(__file__).parent.iterdir() if path.suffix in (".py", ".toml"))
    return files.sha256_of(
        {
            "recipe": dataclasses.asdict(recipe or Recipe()),
            "sources": {path.name: files.sha256(path) for path in sources},
            "versions": {name: _series(name) for name in SHAPING_PACKAGES},
        }
    )


def model_dir(folder: Path, recipe: Recipe | None = None) -> Path:
    """Return the folder that holds, or will hold, the model made by this recipe."""
    return Path(folder) / f"model-{content_hash(recipe)[:12]}"


def is_ready(folder: Path, recipe: Recipe | None = None) -> bool:
    """Return whether `prepare` would find its work done; takes milliseconds."""
    return _is_complete(model_dir(folder, recipe))


def prepare(folder: Path, *, progress: Callable[[str], None], recipe: Recipe | None = None) -> QuickstartFiles:
    """Return the quickstart's files, made in about a minute on two cores or found complete from an earlier time.

    Raises OSError when the folder cannot be written, and InputError when another process is at it for half an hour.
    """
    recipe = recipe or Recipe()
    target = model_dir(folder, recipe)
    with held(target.parent / ".lock", MAKING_S, progress, "end it if it hangs"):
        if not _is_complete(target):
            _make(target, recipe, progress)
    return QuickstartFiles(target, target / VALIDATION, content_hash(recipe))


def _make(target: Path, recipe: Recipe, progress: Callable[[str], None]) -> None:
    """Build beside `target` and rename, so that a kill at any instruction leaves nothing that looks complete."""
    if target.exists():
        progress(f"{target} is damaged or incomplete; making it again")
        shutil.rmtree(target)
    for stale in target.parent.glob(f"{BUILDING_PREFIX}*"):  # the lock is ours, so nobody is building there
        shutil.rmtree(stale)
    building = target.with_name(f"{BUILDING_PREFIX}{target.name}")
    building.mkdir()
    try:
        _build(building, recipe, progress)
        building.rename(target)
    finally:
        shutil.rmtree(building, ignore_errors=True)


def _build(folder: Path, recipe: Recipe, progress: Callable[[str], None]) -> None:
    from utils.quickstart import classifier, texts  # torch and transformers: seconds

    progress(f"making {recipe.rows_train + recipe.rows_validation:,} synthetic reviews (seed {recipe.seed})")
    reviews = texts.generate(recipe.rows_train + recipe.rows_validation, recipe.seed)
    train, validation = reviews[: recipe.rows_train], reviews[recipe.rows_train :]
    start = time.perf_counter()
    progress(f"training a tokenizer and a classifier on {len(train):,} of them")
    classifier.build(folder, train, texts.LABELS, recipe=recipe, progress=progress)
    train_seconds = time.perf_counter() - start
    rows = ({"text": review.text, "label_name": texts.LABELS[review.label]} for review in validation)
    files.write_table(folder / VALIDATION, rows, ("text", "label_name"))
    accuracy = classifier.accuracy(folder, validation)
    files.write_json(folder / RECORD, _record(folder, recipe, train_seconds, accuracy))


def _record(folder: Path, recipe: Recipe, train_seconds: float, accuracy: float) -> dict[str, Any]:
    return {
        "synthetic": True,
        "note": NOTE,
        "content_hash": content_hash(recipe),
        "seed": recipe.seed,
        "rows_train": recipe.rows_train,
        "rows_validation": recipe.rows_validation,
        "validation_accuracy": accuracy,
        "train_seconds": train_seconds,
        "files": {path.name: _fingerprint(path) for path in sorted(folder.iterdir())},
    }


def _is_complete(folder: Path) -> bool:
    try:
        listed = files.read_json(folder / RECORD)["files"]
        return all(_fingerprint(folder / name) == fingerprint for name, fingerprint in listed.items())
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return False


def _fingerprint(path: Path) -> dict[str, Any]:
    return {"size_bytes": path.stat().st_size, "sha256": files.sha256(path)}


def _series(package: str) -> str:
    try:
        return ".".join(metadata.version(package).split(".")[:2])
    except metadata.PackageNotFoundError:
        return "absent"
