"""Find the model's files, on the Hub, in a folder or among the quickstart's, and refuse what cannot be measured."""

import contextlib
import json
import math
import os
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Literal

import msgspec

from boundby import files
from boundby.cli import typed
from boundby.formatting import first_line
from utils.command import EnvironmentLacksError, InputError, contents, require_installed
from utils.models import hub, tasks
from utils.settings import DEFAULT_TASK, QUICKSTART, Model

DOWNLOAD = f"run `{typed('download')}` with the same --config and overrides"
CONFIG = "config.json"
WEIGHTS, WEIGHTS_INDEX = "model.safetensors", "model.safetensors.index.json"
CODE = "*.py"
TOKENIZERS = ("tokenizer.json", "vocab.txt", "vocab.json", "*.model", "*.tiktoken")
FILES = ("*.json", "model*.safetensors", "*.txt", "*.model", "*.tiktoken", "*.jinja")  # that are downloaded
# What transformers reads beside the weights, and code of the model. Whatever else lies in a folder (notes, states of a
# training, keys) changes no result, and is nobody else's business.
READ = (
    CONFIG, "generation_config.json", "preprocessor_config.json", "chat_template.json", "*.jinja", CODE,
    "tokenizer.json", "tokenizer.*.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "normalizer.json", "*vocab.json", "vocab-*.json", "*vocab.txt", "merges.txt", "dict.txt", "bpe.codes",
    "emoji.json", "word_*.json", "byte_maps.json", "tekken.json",
    "*.model", "tokenizer.model.*", "*.spm", "*.tokenizer", "*.tiktoken",
    "modules.json", "config_sentence_transformers.json", "sentence_*_config.json",
)  # fmt: skip
# What transformers calls an attention that is not its own, and the package that has it.
FLASH_ATTENTION = {
    "flash_attention_2": "flash-attn", "flash_attention_3": "flash-attn-3", "flash_attention_4": "flash-attn-4",
}  # fmt: skip
ADAPTER = "adapter_config.json"
PICKLED = ("*.bin", "*.pt", "*.pth", "*.h5", "*.ckpt", "*.msgpack")
STORED = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}  # as safetensors calls them
SHA256 = re.compile(r"[0-9a-f]{64}")
POINTER_START = b"version https://git-lfs"

Progress = Callable[[str], None]


@dataclass(frozen=True)
class ModelSource:
    """A model on this disk; `fingerprint` identifies its content, `revision` is the commit of a Hub model."""

    name: str
    path: Path
    origin: Literal["hub", "folder", "quickstart"]
    revision: str | None
    fingerprint: str
    task: str = DEFAULT_TASK


def fetch(model: Model, quickstart_folder: Path, *, trust_remote_code: bool, progress: Progress) -> ModelSource:
    """Return the model after downloading or making what is missing. Raises a PipelineError that names the way out."""
    if model.name == QUICKSTART:
        return _made_here(quickstart_folder, progress)
    if _is_folder(model):
        source = _in_folder(model)
    else:
        repository = hub.Repository("model", model.name, model.revision)
        with hub.announced(f"fetching {repository} from the Hub", progress):
            folder = hub.snapshot(repository, (*FILES, CODE) if trust_remote_code else FILES)
        source = _from_hub(model, folder)
    if not trust_remote_code:
        check_code(source.path, source.name)
    return source


def locate(model: Model, quickstart_folder: Path) -> ModelSource:
    """Return the model that step 01 has put on this disk, without network. Raises InputError with the way out."""
    if model.name == QUICKSTART:
        from utils.quickstart import cache

        if not cache.is_ready(quickstart_folder):
            raise InputError(f"{quickstart_folder}: the quickstart model is missing or damaged; {DOWNLOAD}")
        return _made_here(quickstart_folder, lambda text: None)
    if _is_folder(model):
        return _in_folder(model)
    repository = hub.Repository("model", model.name, model.revision)
    try:
        return _from_hub(model, hub.snapshot(repository, FILES, cached_only=True))
    except EnvironmentLacksError:
        raise InputError(f"{repository} has not been downloaded; {DOWNLOAD}") from None


def _made_here(folder: Path, progress: Progress) -> ModelSource:
    from utils.quickstart import cache

    made = cache.prepare(folder, progress=progress)
    return ModelSource(QUICKSTART, made.model_dir, "quickstart", None, made.content_hash)


def label_matcher(model: ModelSource, class_names: Sequence[str] | None) -> Any:
    """Return what gives the labels of a dataset their ids; `class_names` are those of a Hub dataset's integers."""
    task = tasks.of(model.task)
    return task.label_matcher(task.read_labels(_read_config(model.path), f"{model.path / CONFIG}"), class_names)


def check_code(folder: Path, name: str, *, with_tokenizer: bool = True) -> None:
    """Raise InputError when the model's files name code to run: its own classes, or kernels from the Hub."""
    config = _read_config(folder)
    try:
        tokenizer = _read_json(folder / "tokenizer_config.json")
    except FileNotFoundError:
        tokenizer = {}
    kernels = [key for key, value in config.items() if "attn_implementation" in key and "/" in str(value)]
    has_classes = config.get("auto_map") or (with_tokenizer and tokenizer.get("auto_map"))
    named = ["auto_map"] if has_classes else kernels
    if named:
        raise InputError(
            f"{name}: brings Python code of its own ({named[0]}), which would run on this machine; "
            "read it, then add --trust-remote-code if you trust it"
        )


def require_attention(source: ModelSource) -> None:
    """Raise EnvironmentLacksError where the checkpoint asks for an attention that is not installed.

    Transformers might fetch a kernel from the Hub in its place, and run it.
    """
    config = _read_config(source.path)
    for key in ("attn_implementation", "_attn_implementation"):
        if package := FLASH_ATTENTION.get(str(config.get(key))):
            try:
                require_installed(package)
            except EnvironmentLacksError as error:
                said = f"{source.name}: {key} in its {CONFIG} is {config[key]}; {error}, or take the key out"
                raise EnvironmentLacksError(said) from None


def _check_files(folder: Path, name: str, task: str) -> None:
    """Raise InputError, with the way out, when the folder does not hold a model that can be measured."""
    config = _read_config(folder)
    tasks.of(task).require_model(config, f"{folder / CONFIG}", name)
    if not any(_matching(folder, TOKENIZERS)):
        raise InputError(
            f"{name}: has no tokenizer ({', '.join(TOKENIZERS)}); copy the files of the tokenizer it was trained with "
            "beside the weights, with `tokenizer.save_pretrained(…)`"
        )
    if (folder / ADAPTER).exists():
        raise InputError(
            f"{folder / ADAPTER}: lies beside {CONFIG}, and transformers would load the base model that it names "
            "instead of the weights here; merge the adapter and save the whole model, or move that file away"
        )
    check_weights(folder, name)


def _is_folder(model: Model) -> bool:
    folder = Path(model.name).expanduser()
    if folder.is_dir():
        if model.revision is not None:
            raise InputError(f"model.revision is {model.revision!r}, but {folder} is a folder; set it to null")
        return True
    if folder.exists() or model.name.startswith((".", "/", "~")) or model.name.count("/") > 1:
        raise InputError(f"model.name is {model.name!r}: there is no such folder (relative to {Path.cwd()})")
    return False


def _in_folder(model: Model) -> ModelSource:
    folder = Path(model.name).expanduser()
    _check_files(folder, model.name, model.task)
    fingerprint = files.sha256_of(hashes(folder, model_files(folder)))
    return ModelSource(model.name, folder, "folder", None, fingerprint, model.task)


def _from_hub(model: Model, folder: Path) -> ModelSource:
    _check_files(folder, model.name, model.task)
    for path in model_files(folder):
        stored = path.resolve()  # the cache calls large files after their SHA-256
        if SHA256.fullmatch(stored.name) and contents.sha256(stored) != stored.name:
            raise InputError(f"{stored}: was changed or damaged after it was downloaded; delete it, then {DOWNLOAD}")
    return ModelSource(
        model.name, folder, "hub", folder.name, folder.name, model.task
    )  # a snapshot is called after its commit


def model_files(folder: Path) -> list[Path]:
    """Return the files of the model in `folder` that decide its result, and no others that may lie there.

    Raises InputError where its weights lie elsewhere.
    """
    weights = [folder / name for name in _weights(folder)]
    return sorted({*_matching(folder, READ), *(path for path in weights if path.is_file())})


def weight_files(folder: Path) -> list[Path]:
    """Return those of `model_files` that are weights, their index, code, or say what is built of them."""
    named = {folder / name for name in (CONFIG, *_weights(folder))}
    return [path for path in model_files(folder) if path in named or path.match(CODE)]


def hashes(folder: Path, paths: Iterable[Path]) -> dict[str, str]:
    """Return the SHA-256 of files of `folder` by their paths there, as an index of weights writes them."""
    return {path.relative_to(folder).as_posix(): contents.sha256(path) for path in paths}


@contextlib.contextmanager
def hashed_alone(folder: Path) -> Iterator[Path]:
    """Yield a folder that shows `model_files(folder)` and nothing else, for as long as the block runs.

    Loaders take other files in their place where there are any: adapters, pieces of distributed checkpoints, weights
    and configurations that config.json names.
    """
    with tempfile.TemporaryDirectory(prefix="boundby-model-") as temporary:
        shown = Path(temporary, folder.resolve().name)  # code that a model brings is imported under this name
        for path in model_files(folder):
            link = shown / path.relative_to(folder)
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(path.resolve())
        yield shown


def own_dtype(folder: Path) -> tuple[str | None, str]:
    """Return the dtype of the checkpoint in `folder` and what says so: its configuration, else most of its weights.

    None where its weights are no floating-point numbers. Raises InputError for weights that cannot be read.
    """
    config = _read_config(folder)
    for key in ("dtype", "torch_dtype"):
        stated = config.get(key)
        if isinstance(stated, str) and stated != "auto":
            return stated.removeprefix("torch."), f"{key} of its {CONFIG}"
    counted = Counter[str]()
    for path in weight_files(folder):
        if path.suffix == ".safetensors":
            counted += _stored(path)
    most = counted.most_common(1)
    return (STORED.get(most[0][0], most[0][0]) if most else None), "most of its weights"


def _stored(path: Path) -> Counter[str]:
    """Return how many floating-point numbers of each dtype a file of weights holds, by its header."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy") as file:
            tensors = [file.get_slice(name) for name in file.keys()]  # noqa: SIM118  (it is no mapping)
            sizes = [(tensor.get_dtype(), math.prod(tensor.get_shape())) for tensor in tensors]
    except (SafetensorError, OSError) as error:
        raise InputError(f"{path}: cannot be read as safetensors weights: {first_line(error)}") from None
    counted = Counter[str]()
    for dtype, size in sizes:
        if "F" in dtype:  # F64, F32, F16, BF16, F8_…: all others are integers
            counted[dtype] += size
    return counted


def _weights(folder: Path) -> set[str]:
    """Return the paths in `folder` of the weight files that transformers loads, and of their index if it reads that.

    Raises InputError for one that leads out of the folder.
    """
    if not (folder / WEIGHTS).exists():
        return _indexed(folder)
    _require_inside(folder, WEIGHTS)
    return {WEIGHTS}  # which it takes without a look at an index beside it


def _indexed(folder: Path) -> set[str]:
    """Return the paths of the index of the weights and of the files that it names; none where there is no index."""
    names = {WEIGHTS_INDEX, *_shards(folder / WEIGHTS_INDEX)} if (folder / WEIGHTS_INDEX).exists() else set()
    for name in names:
        _require_inside(folder, name)
    return names


def _require_inside(folder: Path, name: str) -> None:
    """Raise InputError unless the file lies in `folder`, or in the cache of the Hub, to which its snapshots link."""
    try:
        path = Path(os.path.realpath(folder / name))
    except ValueError as error:
        raise InputError(f"{folder / WEIGHTS_INDEX}: names {name!r}, which no file is called: {error}") from None
    is_cached = path.parent.name == "blobs" and path.parent.parent.name.startswith("models--")
    if not (path.is_relative_to(os.path.realpath(folder)) or is_cached):
        raise InputError(
            f"{folder / name}: leads to {path}, outside of the model's folder; "
            "copy that file into the folder under this name"
        )


def _matching(folder: Path, patterns: Iterable[str]) -> list[Path]:
    paths = {path for pattern in patterns for path in folder.glob(pattern)}
    return sorted(path for path in paths if path.is_file() and not path.name.startswith("."))


def _read_config(folder: Path) -> Mapping[str, object]:
    try:
        return _read_json(folder / CONFIG)
    except FileNotFoundError:
        adapter = (folder / "adapter_config.json").exists()
        hint = "it holds an adapter: merge it into its base model and save that" if adapter else "is it a model?"
        raise InputError(f"{folder}: has no {CONFIG}; {hint}") from None


def _read_json(path: Path) -> dict[str, Any]:
    """Return an object as transformers reads it, NaN and large numbers included. Raises OSError, InputError.

    What cannot be read may name code to run.
    """
    try:
        document = json.loads(files.read_bytes(path))
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: cannot be read: {error}") from None
    if not isinstance(document, dict):
        raise InputError(f"{path}: is no JSON object")
    return document


def check_weights(folder: Path, name: str) -> None:
    """Raise InputError, with the way out, unless the weights in `folder` are whole, and safetensors alone."""
    needed = _weights(folder) | _indexed(folder)  # an index that is at fault may be the one that was meant
    if not needed:
        pickled = [path.name for path in _matching(folder, PICKLED)]
        only = f", only {', '.join(pickled)}" if pickled else ""
        raise InputError(
            f"{name}: has no safetensors weights{only}; pickled weights (.bin, .pt) can run code and are not read. "
            "Convert them where you trust them, with `model.save_pretrained(…)`, or have the Hub do it: "
            "https://huggingface.co/spaces/safetensors/convert"
        )
    for shard in sorted(needed):
        path = folder / shard
        if not path.is_file():
            raise InputError(f"{name}: weights are incomplete, {shard} is missing; copy or download it")
        with files.naming(path), path.open("rb") as file:
            if file.read(len(POINTER_START)) == POINTER_START:
                raise InputError(f"{path}: is a Git LFS pointer, not weights; run `git lfs pull` in {folder}")


def _shards(index: Path) -> set[str]:
    """Return the paths of the weight files that an index names, relative to its folder."""
    try:
        named = msgspec.convert(_read_json(index).get("weight_map"), dict[str, str])
    except ValueError as error:
        raise InputError(f"{index}: is not a list of weight files: {error}") from None
    paths = {name: PurePosixPath(name) for name in named.values()}
    for name, path in paths.items():
        if path.is_absolute() or ".." in path.parts:
            raise InputError(
                f"{index}: names {name!r}, which leads out of the model's folder; "
                "copy that file into the folder, and write its path from there"
            )
        if path.suffix != ".safetensors":
            raise InputError(f"{index}: names {name!r}, which is no .safetensors file; others can run code")
    return {path.as_posix() for path in paths.values()}
