"""Where the labelled texts come from: a dataset on the Hub, a local file, or the quickstart set."""

import contextlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from boundby import files
from utils import hub
from utils.config import Dataset
from utils.data.tables import Row, find_columns, read_rows
from utils.errors import EnvironmentLacksError, InputError
from utils.model_source import Progress

SPLITS = ("test", "validation", "train")  # without dataset.split, the first that exists
BATCH_ROWS = 1000
CSV_OPTIONS = {"keep_default_na": False}  # else the text "NA" of a CSV on the Hub would become null


@dataclass(frozen=True)
class DataSource:
    """What identifies a source; what a kind of source does not have is None."""

    kind: Literal["hub", "file", "quickstart"]
    name: str
    config_name: str | None = None
    split: str | None = None
    revision: str | None = None
    bytes: int | None = None
    mtime_ns: int | None = None
    sha256: str | None = None

    def __str__(self) -> str:
        """Return what messages call it."""
        details = [part for part in (self.config_name, self.split) if part]
        return f"{self.name} ({', '.join(details)})" if details else self.name


@dataclass(frozen=True)
class OpenedSource:
    """A source with its rows, to be read once; `class_names` are those of a Hub dataset's integer labels."""

    source: DataSource
    label_column: str
    rows: Iterator[Row]
    class_names: Sequence[str] | None = None


def open_source(dataset: Dataset, quickstart_folder: Path, progress: Progress) -> OpenedSource:
    """Return the rows of the source that the configuration names. May use the network and make the quickstart set."""
    if dataset.quickstart:
        return _open_quickstart(quickstart_folder, progress)
    if dataset.file is not None:
        return open_file(Path(dataset.file).expanduser(), dataset.text_column, dataset.label_column)
    return _open_hub(dataset, progress)


def open_file(path: Path, text_column: str, label_column: str) -> OpenedSource:
    """Return the rows of a local file, identified by its content."""
    rows = read_rows(path, text_column, label_column)
    try:
        status, sha256 = path.stat(), files.sha256(path)
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from None
    source = DataSource("file", str(path), bytes=status.st_size, mtime_ns=status.st_mtime_ns, sha256=sha256)
    return OpenedSource(source, label_column, rows)


def _open_quickstart(folder: Path, progress: Progress) -> OpenedSource:
    from utils.quickstart import cache

    made = cache.prepare(folder, progress=progress)
    source = DataSource("quickstart", "quickstart", split="validation", sha256=made.content_hash)
    return OpenedSource(source, "label_name", read_rows(made.validation_csv, "text", "label_name"))


def _open_hub(dataset: Dataset, progress: Progress) -> OpenedSource:
    """Download the dataset where it is not cached, and choose its split; the rows stay memory-mapped on disk."""
    repository = hub.Repository("dataset", str(dataset.hf_name), dataset.revision)
    commit = None if hub.is_offline() else hub.dataset_commit(repository)
    with hub.announced(f"reading {repository} from the Hub", progress), _explained(dataset), hub.explained(repository):
        builder = _builder(dataset, commit)
        builder.download_and_prepare()
        splits = builder.as_dataset()
    if commit is None:
        _check_cached_revision(repository, builder.hash)
    split = _choose_split(list(splits), dataset)
    table = splits[split]
    find_columns(f"{repository}, split '{split}'", table.column_names, dataset.text_column, dataset.label_column)
    feature = table.features[dataset.label_column]
    return OpenedSource(
        source=DataSource("hub", str(dataset.hf_name), table.info.config_name, split, builder.hash),
        label_column=dataset.label_column,
        rows=_table_rows(table.select_columns([dataset.text_column, dataset.label_column]), dataset),
        class_names=list(feature.names) if hasattr(feature, "names") else None,
    )


def _builder(dataset: Dataset, commit: str | None) -> Any:
    """Return what builds the dataset at `commit`; without one, from the newest copy in the cache."""
    import datasets

    if not sys.stderr.isatty():
        datasets.disable_progress_bars()  # a log file has `hub.announced`
    datasets.utils.logging.set_verbosity_error()  # what matters is raised
    choice = (f"hf://datasets/{dataset.hf_name}", dataset.config_name)  # never a folder of that name
    if commit is not None:
        builder = datasets.load_dataset_builder(*choice, revision=commit)
        if hasattr(builder.config, "keep_default_na"):
            builder = datasets.load_dataset_builder(*choice, revision=commit, **CSV_OPTIONS)
        return builder
    try:
        return datasets.load_dataset_builder(*choice)
    except ValueError:  # cached with the options of a CSV
        return datasets.load_dataset_builder(*choice, **CSV_OPTIONS)


@contextlib.contextmanager
def _explained(dataset: Dataset) -> Iterator[None]:
    """Turn what `datasets` says about the content of a repository into one message."""
    from datasets.exceptions import DataFilesNotFoundError, DatasetGenerationError
    from datasets.load import EmptyDatasetError

    name = f"dataset '{dataset.hf_name}'"
    try:
        yield
    except (DataFilesNotFoundError, EmptyDatasetError) as error:
        raise InputError(f"{name} holds no data files that can be read: {_first_line(error)}") from error
    except DatasetGenerationError as error:
        raise InputError(f"{name} cannot be read: {_first_line(error.__cause__ or error)}") from error
    except ValueError as error:
        if "config" not in str(error).lower():
            raise
        said = " ".join(str(error).split())  # names the configurations there are, in several lines
        raise InputError(f"{name}: dataset.config_name is {dataset.config_name!r}: {said}") from error


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


def _check_cached_revision(repository: hub.Repository, cached: str) -> None:
    """Refuse a cached copy of which it is not certain, offline, that it is the revision asked for."""
    if repository.revision not in (None, cached):
        raise EnvironmentLacksError(
            f"HF_HUB_OFFLINE is set, and the cached copy of {repository} is of commit {cached}, which may not be "
            f"'{repository.revision}'; unset HF_HUB_OFFLINE, or set dataset.revision to that commit"
        )


def _choose_split(splits: list[str], dataset: Dataset) -> str:
    wanted = [dataset.split] if dataset.split else SPLITS
    found = next((split for split in wanted if split in splits), None)
    if found is None:
        raise InputError(
            f"dataset '{dataset.hf_name}' has no split {' or '.join(map(repr, wanted))}; "
            f"set dataset.split to one of: {', '.join(splits)}"
        )
    return found


def _table_rows(table: Any, dataset: Dataset) -> Iterator[Row]:
    names_a_class = hasattr(table.features[dataset.label_column], "names")
    number = 0
    for batch in table.iter(BATCH_ROWS):
        for text, label in zip(batch[dataset.text_column], batch[dataset.label_column], strict=True):
            yield Row(number, text, None if names_a_class and label == -1 else label)  # -1 is the Hub's "no label"
            number += 1
