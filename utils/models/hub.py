"""The Hugging Face Hub: snapshots and commits of repositories, and each of its failures as one message."""

import contextlib
import errno
import shutil
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from boundby.cli import typed
from utils.command import EnvironmentLacksError, InputError, PipelineError

OFFLINE_DEFAULT = f"without network, try the offline default: `{typed('run', '--config', 'configs/quickstart.yaml')}`"
HEARTBEAT_S = 30.0


@dataclass(frozen=True)
class Repository:
    """A model or dataset on the Hub, at a commit, tag or branch; None is the default branch."""

    kind: Literal["model", "dataset"]
    name: str
    revision: str | None = None

    def __str__(self) -> str:
        """Return what messages call it."""
        return f"{self.kind} '{self.name}'"

    @property
    def page(self) -> str:
        """The address where a person looks at it."""
        from huggingface_hub import constants

        return f"{constants.ENDPOINT}/{'datasets/' if self.kind == 'dataset' else ''}{self.name}"


def snapshot(repository: Repository, patterns: Sequence[str], *, cached_only: bool = False) -> Path:
    """Return the folder of the repository's top-level files that match `patterns`, named after its commit.

    Downloads what is missing unless `cached_only`. When the Hub does not answer, a complete cached snapshot is enough.
    """
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.utils import disable_progress_bars  # type: ignore[attr-defined]  # handed on without `as`

    if not sys.stderr.isatty() and constants.HF_HUB_DISABLE_PROGRESS_BARS is None:
        disable_progress_bars()  # a log file has `announced`
    with explained(repository):
        folder = snapshot_download(
            repository.name,
            repo_type=repository.kind,
            revision=repository.revision,
            allow_patterns=list(patterns),
            ignore_patterns=["*/*"],  # checkpoints and exports in subfolders can be larger than the model
            local_files_only=cached_only,
        )
    return Path(folder)


def dataset_commit(repository: Repository) -> str:
    """Return the commit that the dataset's revision stands for now. Asks the Hub."""
    from huggingface_hub import HfApi

    with explained(repository):
        return str(HfApi().dataset_info(repository.name, revision=repository.revision).sha)


def is_offline() -> bool:
    """Tell whether the user has forbidden to ask the Hub (HF_HUB_OFFLINE)."""
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


@contextlib.contextmanager
def explained(repository: Repository) -> Iterator[None]:
    """Turn a failure of the Hub or of a download inside the block into one message; other errors pass unchanged."""
    try:
        yield
    except PipelineError:
        raise
    except Exception as error:
        explanation = explain(error, repository)
        if explanation is None:
            raise
        raise explanation from error


@contextlib.contextmanager
def announced(text: str, progress: Callable[[str], None], every_s: float = HEARTBEAT_S) -> Iterator[None]:
    """Say `text` at the start of the block and again every `every_s` seconds; on a terminal leave that to the bars."""
    progress(text)
    if sys.stderr.isatty():
        yield
        return
    over = threading.Event()

    def beat() -> None:
        beats = 0
        while not over.wait(every_s):
            beats += 1
            progress(f"{text} ({beats * every_s:.0f} s)")

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def explain(error: BaseException, repository: Repository) -> PipelineError | None:
    """Return what happened, to what, and the way out; None when the error is not of the Hub or the disk."""
    causes = list(_causes(error))
    for explanation in (_disk, _refusal, _absence, _answer, _silence):
        failure = explanation(causes, repository)
        if failure is not None:
            return failure
    return None


def _disk(causes: list[BaseException], repository: Repository) -> PipelineError | None:
    from huggingface_hub import constants

    full = (errno.ENOSPC, errno.EDQUOT)
    if not any(getattr(cause, "errno", None) in full or "Not enough disk space" in str(cause) for cause in causes):
        return None
    cache = Path(constants.HF_HOME)
    free = shutil.disk_usage(next(folder for folder in (cache, *cache.parents) if folder.exists())).free
    return EnvironmentLacksError(
        f"the disk is full while downloading {repository} to {cache}: {free} bytes are free; "
        "free some space, or set HF_HOME to a folder on a larger disk"
    )


def _refusal(causes: list[BaseException], repository: Repository) -> PipelineError | None:
    """Explain what a token or a request for access cures."""
    from huggingface_hub import errors

    if _has(causes, errors.GatedRepoError) or any("is a gated dataset" in str(cause) for cause in causes):
        return InputError(
            f"{repository} is gated: request access at {repository.page}, "
            "then run `hf auth login` or set HF_TOKEN to a token of that account"
        )
    status = _status(causes)
    if status == 403 or (status == 401 and not _has(causes, errors.RepositoryNotFoundError)):
        return InputError(
            f"the Hub refuses access to {repository} (status {status}); "
            "check that the token of `hf auth login` or HF_TOKEN is valid and may read it"
        )
    return None


def _absence(causes: list[BaseException], repository: Repository) -> PipelineError | None:
    from huggingface_hub import errors

    if _has(causes, errors.RevisionNotFoundError):
        return InputError(
            f"{repository} has no revision '{repository.revision}'; see {repository.page}/commits, "
            f"or set {repository.kind}.revision to null for the default branch"
        )
    if _has(causes, errors.RepositoryNotFoundError):
        return InputError(
            f"there is no {repository} on the Hub, or it is private; check the name at {repository.page}, "
            "and for a private one run `hf auth login` or set HF_TOKEN"
        )
    if _has(causes, errors.HFValidationError):
        return InputError(f"'{repository.name}' is neither a folder nor the name of a {repository.kind} on the Hub")
    return None


def _answer(causes: list[BaseException], repository: Repository) -> PipelineError | None:
    status = _status(causes)
    if status is None:
        return None
    return EnvironmentLacksError(f"the Hub answers {repository} with status {status}; try later, or {OFFLINE_DEFAULT}")


def _silence(causes: list[BaseException], repository: Repository) -> PipelineError | None:
    from huggingface_hub import constants, errors

    if is_offline():
        return EnvironmentLacksError(
            f"{repository} is not in the cache ({constants.HF_HUB_CACHE}) and HF_HUB_OFFLINE forbids to download it; "
            f"unset HF_HUB_OFFLINE, or {OFFLINE_DEFAULT}"
        )
    for cause in causes:
        transport = type(cause).__module__.partition(".")[0] in ("httpx", "httpx2")
        if transport or (isinstance(cause, ConnectionError | TimeoutError) and not isinstance(cause, PipelineError)):
            return EnvironmentLacksError(
                f"{constants.ENDPOINT} cannot be reached for {repository} ({cause}); "
                f"check the network, or {OFFLINE_DEFAULT}"
            )
    if _has(causes, errors.LocalEntryNotFoundError):
        return EnvironmentLacksError(
            f"{repository} is not in the cache ({constants.HF_HUB_CACHE}); download it, or {OFFLINE_DEFAULT}"
        )
    return None


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield the error and what led to it, innermost last."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _has(causes: list[BaseException], kind: type[BaseException]) -> bool:
    return any(isinstance(cause, kind) for cause in causes)


def _status(causes: list[BaseException]) -> int | None:
    """Return the HTTP status that the Hub answered with, if it answered."""
    for cause in causes:
        status = getattr(getattr(cause, "response", None), "status_code", None)
        if isinstance(status, int):
            return status
    return None
