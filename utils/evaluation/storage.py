"""Share an evaluation through a store that many machines reach by URL: object storage, or a folder.

The store holds the files of the evaluation's folder under their own names, each all or nothing. A damaged one is found
when it is read, and predicted again.
"""

import glob
import hashlib
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from filelock import FileLock
from msgspec import structs

from boundby import files
from utils.command import EnvironmentLacksError, EvaluationFolder, InputError, contents, started_at, without
from utils.evaluation import plan as plans
from utils.evaluation import planning
from utils.evaluation.shards import Executor, Receipt
from utils.models import model_files

FETCHED_S = 3600.0  # that another worker's copying is waited for at most; Ray tries again elsewhere after that
AT_ONCE = 64  # files per request for many
PLAN, PREVIOUS = "plan.json", "previous"
OF_A_PLAN = re.compile(r"(part|cost)-\d+\.\w+")


class Storage:
    """The files of one evaluation at a URL of fsspec, such as s3://bucket/folder or file:///mnt/shared/folder."""

    def __init__(self, url: str) -> None:
        import fsspec
        from fsspec.implementations.local import LocalFileSystem

        try:
            self._system, self._root = fsspec.core.url_to_fs(url)
        except ImportError as error:
            raise EnvironmentLacksError(f"evaluation.storage is {url!r}: {error}, here and for all workers") from None
        except ValueError as error:
            raise InputError(
                f"evaluation.storage is {url!r}: {error}; it is a URL such as s3://bucket/folder"
            ) from None
        if glob.has_magic(self._root):
            raise InputError(f"evaluation.storage is {url!r}: a store has no wildcard in its name")
        self.url = without(url)  # as it is shown
        self._is_local = isinstance(self._system, LocalFileSystem)

    def pull_plan(self, folder: EvaluationFolder) -> None:
        """Copy the plan into `folder` if the store has one."""
        self._get({folder.plan.name: folder.plan})

    def plan(self) -> plans.Plan | None:
        """Return the plan of the store, None where it has none. Raises InputError when that is damaged."""
        try:
            content = self._system.cat_file(self._at(PLAN))
        except FileNotFoundError:
            return None
        return plans.decoded(content, f"{self.url}/{PLAN}")

    def set_aside(self) -> str | None:
        """Move parts, costs and plan to `previous/<UTC>/` of the store; return its URL, None if it was empty."""
        present = self._names("")
        ours = [[name for name in present if OF_A_PLAN.fullmatch(name)], [name for name in present if name == PLAN]]
        if not any(ours):
            return None
        earlier = self._names(PREVIOUS)
        name, number = started_at(), 1
        while name in earlier:
            number += 1
            name = f"{started_at()}-{number}"
        for names in ours:
            self._move(names, f"{PREVIOUS}/{name}")
        return f"{self.url}/{PREVIOUS}/{name}"

    def attempt(self) -> str | None:
        """Return a name for an evaluation after those that were set aside, None where none was."""
        earlier = self._names(PREVIOUS)
        return files.sha256_of(earlier)[:16] if earlier else None

    def push_plan(self, folder: EvaluationFolder) -> plans.Plan | None:
        """Copy dataset, model and plan into the store, the plan last.

        Where another planner was first, its plan stays, replaces that in `folder`, and is returned.
        """
        made = plans.load(folder)
        dataset, model = _inputs(made)
        copies = {dataset: Path(made.places.dataset)}
        home = Path(made.places.model)
        copies |= {f"{model}/{path.relative_to(home).as_posix()}": path for path in model_files(home)}
        for name, path in copies.items():
            if not self._is_whole(name, path):
                self._put(path, name)
        if self._put_first(folder.plan, PLAN):
            return None
        theirs = plans.decoded(self._system.cat_file(self._at(PLAN)), f"{self.url}/{PLAN}")
        plans.require_same(theirs, made.identity, folder)
        self.pull_plan(folder)
        return theirs

    def fetch_inputs(self, root: Path) -> Path:
        """Return the path of the store's plan below `root`, with copies of its dataset and model.

        Raises InputError when there is none, or when the copies are not what was planned.
        """
        with FileLock(root / ".inputs.lock", timeout=FETCHED_S, fallback_to_soft=False):
            self.pull_plan(EvaluationFolder(root))
            made = plans.load(EvaluationFolder(root))
            folder = EvaluationFolder(root / f"evaluation-{made.fingerprint[:16]}")
            if not folder.plan.exists():
                places = self._fetched(made, folder.path)
                plans.save(structs.replace(made, places=places), folder)  # last: where it is, the copies are
        return Path(folder.plan)

    def pull(self, folder: EvaluationFolder, shards: Sequence[int]) -> set[int]:
        """Copy the parts into `folder` that it lacks and the store has; return the ids of their shards."""
        absent = [shard for shard in shards if not (folder.part(shard).exists() and folder.cost(shard).exists())]
        pulled: set[int] = set()
        for start in range(0, len(absent), AT_ONCE):
            some = absent[start : start + AT_ONCE]
            got = self._get({path.name: path for shard in some for path in (folder.cost(shard), folder.part(shard))})
            pulled |= {shard for shard in some if folder.part(shard).name in got}
        return pulled

    def push(self, folder: EvaluationFolder, receipt: Receipt, pulled: set[int]) -> None:
        """Copy what a shard left into the store, the part last, unless the store has it or another runner brings it."""
        cost, part = folder.cost(receipt.shard), folder.part(receipt.shard)
        if receipt.status == "claimed":
            return
        if receipt.status == "kept" and (receipt.shard in pulled or self._system.exists(self._at(part.name))):
            return
        self._put(cost, cost.name)
        self._put(part, part.name)

    def _fetched(self, made: plans.Plan, folder: Path) -> plans.Places:
        """Copy dataset and model into `folder`, proven to be those of the plan; return where they are."""
        dataset, model = _inputs(made)
        start = f"/{self._at(model)}/".replace("//", "/")
        listed = [f"/{path}".replace("//", "/").removeprefix(start) for path in self._system.find(self._at(model))]
        if any(".." in name.split("/") for name in listed):
            raise InputError(f"{self.url}: {model} holds a file whose name leads out of it; plan again with --anew")
        for name in (dataset, *(f"{model}/{name}" for name in listed)):
            with files.replacing(folder / name) as temporary:
                self._system.get_file(self._at(name), str(temporary))
        wanted = made.identity.dataset_sha256, (made.identity.model_sha256, made.identity.tokenizer_sha256)
        if (files.sha256(folder / dataset), planning.model_hashes(folder / model)) != wanted:
            raise InputError(f"{self.url}: dataset or model there are not those of the plan; plan again with --anew")
        return structs.replace(made.places, dataset=str(folder / dataset), model=str(folder / model))

    def _get(self, paths: Mapping[str, Path]) -> set[str]:
        """Copy those of the named files to their paths that are there; return their names."""
        names = {self._at(name): name for name in paths}
        contents = self._system.cat(list(names), on_error="return") if names else {}
        for where, content in contents.items():
            if isinstance(content, FileNotFoundError):
                continue
            if isinstance(content, Exception):
                raise content
            files.write_bytes(paths[names[where]], content)
        return {names[where] for where, content in contents.items() if not isinstance(content, Exception)}

    def _names(self, folder: str) -> list[str]:
        """Return the names of what is in a folder of the store, in order."""
        self._system.invalidate_cache()  # another machine may have written there
        try:
            return sorted(Path(path).name for path in self._system.ls(self._at(folder).rstrip("/"), detail=False))
        except FileNotFoundError:
            return []

    def _move(self, names: Sequence[str], folder: str) -> None:
        sources, targets = ([self._at(f"{prefix}{name}") for name in names] for prefix in ("", f"{folder}/"))
        if self._is_local:
            Path(self._at(folder)).mkdir(parents=True, exist_ok=True)
            for source, target in zip(sources, targets, strict=True):
                os.replace(source, target)
        elif names:
            self._system.copy(sources, targets)
            self._system.rm(sources)

    def _put(self, path: Path, name: str) -> None:
        where = self._at(name)
        if self._is_local:
            with files.replacing(where) as temporary:
                shutil.copyfile(path, temporary)
        else:
            self._system.put_file(str(path), where)

    def _is_whole(self, name: str, path: Path) -> bool:
        """Tell by its content whether the store has this file: an upload that broke off may have left a part of it."""
        try:
            if self._system.size(self._at(name)) != path.stat().st_size:
                return False
            with self._system.open(self._at(name), "rb") as file:
                return hashlib.file_digest(file, "sha256").hexdigest() == contents.sha256(path)
        except FileNotFoundError:
            return False

    def _put_first(self, path: Path, name: str) -> bool:
        """Copy a file into the store unless one of the name is there; tell whether it was the first.

        That is one operation where the store has it; else two that write at once are seen when it is read again.
        """
        with files.naming(path):
            where, content = self._at(name), path.read_bytes()
        try:
            if self._is_local:
                whole = Path(where).with_name(files.temporary_name(name))
                try:
                    files.write_bytes(whole, content)
                    os.link(whole, where)
                finally:
                    whole.unlink(missing_ok=True)
            else:
                self._system.pipe_file(where, content, mode="create")
        except FileExistsError:
            return False
        except (OSError, TypeError, ValueError, NotImplementedError):  # it knows no such operation
            if self._system.exists(where):
                return False
            self._put(path, name)
        return bool(self._system.cat_file(where) == content)

    def _at(self, name: str) -> str:
        return f"{self._root.rstrip('/')}/{name}"


def mirrored(executor: Executor, folder: EvaluationFolder, store: Storage) -> Executor:
    """Return `executor` with `folder` kept like the store: what the store has is done, what gets done goes there."""

    def execute(pending: Sequence[int], wait_for_others: bool) -> Iterator[Receipt]:
        pulled = store.pull(folder, pending)
        for receipt in executor(pending, wait_for_others):
            store.push(folder, receipt, pulled)
            yield receipt

    return execute


def _inputs(made: plans.Plan) -> tuple[str, str]:
    """Return the names of the dataset and of the model's folder in the store: their content makes them."""
    identity = made.identity
    model = files.sha256_of([identity.model_sha256, identity.tokenizer_sha256])
    return f"inputs/{identity.dataset_sha256[:16]}.csv", f"inputs/{model[:16]}"
