"""Load a model and its tokenizer so that what is measured is what was meant, and say how large the model is."""

import contextlib
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors import safe_open
from transformers import AutoTokenizer

from boundby.formatting import first_line
from boundby.inference import SPARE_MEMORY, Tokens, batches_in_order, collate, forward, in_dtype, rotary_of, tokenize
from boundby.machine import device as devices
from boundby.machine import free_bytes, is_gpu
from boundby.timing import wilson_interval
from utils.command import EnvironmentLacksError, InputError, PipelineError
from utils.models import tasks
from utils.models.source import (
    ModelSource,
    check_code,
    fetch,
    hashed_alone,
    locate,
    own_dtype,
    require_attention,
)
from utils.settings import AUTO, Model

__all__ = ["ModelSource", "fetch", "locate"]  # what finds a model, beside what loads it

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
AGREEMENT_ROWS = 64  # enough for a wrong padding token to show, few enough for a second or two on a CPU
AGREEMENT_BATCH = 16
AGREEMENT_EXTREMES = 4  # shortest and longest texts of all among them
QUICKSTART_FOLDER = Path("data/quickstart")
NO_LIMIT = 10**9  # tokenizers without a limit state 10^30
# Buffers that earlier versions of transformers saved, and what an encoder computes of its states for other tasks.
NO_PARAMETER = re.compile(
    r"(^|\.)(position_ids|token_type_ids|(original_)?inv_freq|(sin|cos)_cached|masked_bias|pooler)(\.|$)"
)
CONSTANT = ("BOOL", "U8", "I16", "U16", "I32", "U32", "I64", "U64")  # without I8, which holds weights


@dataclass(frozen=True)
class DtypeChoice:
    """The dtype that a model is held in, by a setting of model.dtype; `reason` says why where that is auto."""

    dtype: str
    setting: str
    reason: str | None = None
    doubt: str | None = None

    def in_float32(self, because: str) -> "DtypeChoice":
        """Return the choice of float32 instead, with a doubt that says why."""
        doubt = f"model.dtype=auto holds the model in float32: {because}"
        return DtypeChoice("float32", self.setting, because, doubt)


def choose_dtype(setting: str, folder: Path, device: torch.device) -> DtypeChoice:
    """Return the dtype in which `setting` has the checkpoint in `folder` held on this device.

    auto is the checkpoint's own where the device multiplies in it, else float32, which holds every number of the others
    and does not overflow. Raises InputError for a checkpoint that cannot be read.
    """
    if setting != AUTO:
        has = devices.multiplies_in(device, setting)
        slow = f"model.dtype={setting} is emulated by {_named(device)}, slower than float32; auto takes float32 there"
        return DtypeChoice(setting, setting, doubt=None if has else slow)
    own, by = own_dtype(folder)
    choice = DtypeChoice(own or "", setting, f"the checkpoint's own, by {by}")
    if own not in DTYPES:
        return choice.in_float32(f"by {by} the checkpoint is in {own or 'no floating-point numbers'}")
    if not devices.multiplies_in(device, own):
        return choice.in_float32(
            f"the checkpoint's own {own}, by {by}, is emulated by {_named(device)}, slower than that"
        )
    return choice


def _named(device: torch.device) -> str:
    return str(devices.describe(device).get("name") or "this CPU")


@dataclass(frozen=True)
class LoadedModel:
    """A classifier in eval mode on its device, with the seconds from reading its files to being ready there."""

    model: Any
    tokenizer: Any
    source: ModelSource
    device: torch.device
    dtype: str
    load_time_s: float
    choice: DtypeChoice | None = None


def load_model_and_tokenizer(
    model_name: str,
    device: str | torch.device = "auto",
    dtype: str = "float32",
    *,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> tuple[Any, Any]:
    """Return the classifier called `model_name`, a Hub id or a folder, and its tokenizer; downloads what is missing."""
    wanted = Model(name=model_name, revision=revision)
    source = fetch(wanted, QUICKSTART_FOLDER, trust_remote_code=trust_remote_code, progress=_say_nothing)
    loaded = load(source, device, dtype, trust_remote_code=trust_remote_code)
    return loaded.model, loaded.tokenizer


def load(
    source: ModelSource,
    device: str | torch.device = "auto",
    dtype: str = "float32",
    *,
    trust_remote_code: bool = False,
    clock: Callable[[], float] = time.perf_counter,
) -> LoadedModel:
    """Return the model of `source` in `dtype`, or as `choose_dtype` reads auto, on `device`, with its tokenizer.

    Reads local files only.
    """
    target = _device(device)
    if is_gpu(target):
        devices.runtime(target).set_device(target)  # streams, events and graphs belong to the current GPU
    choice = choose_dtype(dtype, source.path, target)
    started = clock()
    tokenizer = load_tokenizer(source, trust_remote_code)
    model = _load_weights(source, target, choice.dtype, trust_remote_code)
    _agree_on_padding(model, tokenizer, source.name)
    devices.synchronizer(target)()
    return LoadedModel(model, tokenizer, source, target, choice.dtype, clock() - started, choice)


def load_agreeing(
    source: ModelSource,
    device: str | torch.device,
    dtype: str,
    texts: Sequence[str],
    limits: tuple[int, float],
    *,
    trust_remote_code: bool = False,
) -> tuple[LoadedModel, Any]:
    """Return the model in `dtype`, and how far its batches give these texts what each gets alone.

    `limits` are the tokens to cut texts to and the least share that must agree. A half precision that auto has chosen
    is held against float32 alone: where surely fewer agree, or it gives what is no number, float32 takes its place.
    Raises InputError where too few agree.
    """
    loaded = load(source, device, dtype, trust_remote_code=trust_remote_code)
    max_length, least = effective_max_length(loaded, limits[0])[0], limits[1]
    choice = loaded.choice
    if choice and choice.setting == AUTO and choice.dtype != "float32":
        if not has_room_for_float32(loaded):
            doubt = f"labels in {choice.dtype} were not held against float32, for which there is no memory beside it"
            loaded = replace(loaded, choice=replace(choice, doubt=doubt))
        else:
            agreed, why_not = _agreement_with_float32(loaded, texts, max_length, least)
            if why_not is None:
                return loaded, agreed
            del loaded  # the weights, before others take their room
            devices.release_memory(_device(device))
            loaded = load(source, device, "float32", trust_remote_code=trust_remote_code)
            loaded = replace(loaded, choice=choice.in_float32(why_not))
    agreed = agreement(loaded, texts, max_length)
    agreed.require(least)
    return loaded, agreed


def has_room_for_float32(loaded: LoadedModel) -> bool:
    """Tell whether a copy of the model in float32 takes no more than half of the memory that is free."""
    weights = sum(parameter.numel() for parameter in loaded.model.parameters())
    return bool(weights * torch.float32.itemsize <= SPARE_MEMORY * free_bytes(loaded.device))


def _agreement_with_float32(
    loaded: LoadedModel, texts: Sequence[str], max_length: int, least: float
) -> tuple[Any, str | None]:
    """Return how batches agree with float32 one text at a time, and why float32 has to be taken, None where not.

    Some dozens of texts may have a near tie that stands for few of all: what is sure counts, and the evaluation holds
    more of them against float32.
    """
    try:
        agreed = agreement(loaded, texts, max_length, replace(loaded, model=in_dtype(loaded.model, torch.float32)))
    except InputError:
        return None, f"{loaded.dtype} gives NaN or infinity"
    same = round(agreed.share * agreed.rows)
    if wilson_interval(same, agreed.rows)[1] >= least:
        return agreed, None
    return agreed, (
        f"in {loaded.dtype} {same} of {agreed.rows} texts get what they get in float32, and evaluation.min_agreement "
        f"asks for {least:.1%}"
    )


def agreement(loaded: LoadedModel, texts: Sequence[str], max_length: int, by_one: LoadedModel | None = None) -> Any:
    """Return how far padded batches of 16 texts of mixed lengths, in the order given, give each what it gets alone.

    Padding, masks and precision must not change it. `by_one` is the model for single texts where that is another one.
    Batches are halved where memory is too short. Raises InputError where the model gives what is no number.
    """
    tokens = tokenize(loaded.tokenizer, texts, max_length)
    alone, batched = _logits(by_one or loaded, tokens, 1), _largest(loaded, tokens, AGREEMENT_BATCH)
    if not (np.isfinite(alone).all() and np.isfinite(batched).all()):
        raise InputError(
            f"{loaded.source.name}: gives NaN or infinity in {loaded.dtype}; use model.dtype=float32 or bfloat16"
        )
    return tasks.of(loaded.source.task).agreement(alone, batched)


def _largest(loaded: LoadedModel, tokens: Tokens, batch_rows: int) -> np.ndarray:
    """Return the logits in batches of `batch_rows`, or the half, and so on, where memory runs out."""
    while True:
        try:
            return _logits(loaded, tokens, batch_rows)
        except Exception as error:  # a model may raise anything
            if batch_rows == 1 or not devices.is_out_of_memory(error):
                raise
        devices.release_memory(loaded.device)  # outside the except block: its traceback holds the tensors
        batch_rows //= 2


def _logits(loaded: LoadedModel, tokens: Tokens, batch_rows: int) -> np.ndarray:
    every = range(len(tokens.ids))
    batches = batches_in_order(rotary_of(loaded.model), tokens, every, batch_rows)
    parts = []
    with torch.inference_mode():
        for rows in batches:
            batch = collate(tokens, rows, loaded.tokenizer.pad_token_id, loaded.device)
            parts.append(forward(loaded.model, batch).float().cpu().numpy())
    return np.concatenate(parts)[np.argsort(np.concatenate(batches))]


def agreement_texts(texts: Sequence[str]) -> list[str]:
    """Return up to 64 of the texts in random order, the shortest and the longest (by characters) among them."""
    order = np.random.default_rng(0).permutation(len(texts)).tolist()
    by_length = sorted(order, key=lambda row: len(texts[row]))
    ends = {*by_length[:AGREEMENT_EXTREMES], *by_length[-AGREEMENT_EXTREMES:]}
    others = [row for row in order if row not in ends][: max(0, AGREEMENT_ROWS - len(ends))]
    kept = ends.union(others)
    return [texts[row] for row in order if row in kept]


def use_matmul_precision(precision: str) -> None:
    """Set torch's precision of float32 matmuls for the rest of this process: highest, high or medium."""
    torch.set_float32_matmul_precision(precision)


def load_tokenizer(source: ModelSource, trust_remote_code: bool = False) -> Any:
    """Return the tokenizer of `source`, padding on the right. Raises InputError for code that is not trusted."""
    if not trust_remote_code:
        check_code(source.path, source.name)
    with _explained(source, "its tokenizer") as folder:
        return AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=trust_remote_code, padding_side="right"
        )


def token_counter(source: ModelSource, trust_remote_code: bool = False) -> Callable[[list[str]], list[int]]:
    """Return what counts the tokens of texts, special ones included, uncut."""
    tokenizer = load_tokenizer(source, trust_remote_code)

    def count(texts: list[str]) -> list[int]:
        encoded = tokenizer(texts, truncation=False, return_attention_mask=False, verbose=False)
        return [len(ids) for ids in encoded["input_ids"]]

    return count


def longest_input(loaded: LoadedModel) -> int | None:
    """Return the most tokens the model takes, special ones included; None where neither it nor its tokenizer says."""
    limits = [limit for limit in (most_positions(loaded.model),) if limit]
    if loaded.tokenizer.model_max_length < NO_LIMIT:
        limits.append(loaded.tokenizer.model_max_length)
    return min(limits, default=None)


def most_positions(model: Any) -> int | None:
    """Return the most tokens that the positions of the model reach; None where it does not say."""
    text = model.config.get_text_config() if hasattr(model.config, "get_text_config") else model.config
    stated = getattr(text, "max_position_embeddings", None)
    return min((limit for limit in (stated, _learned_positions(model)) if limit), default=None)


def effective_max_length(loaded: LoadedModel, wanted: int) -> tuple[int, str | None]:
    """Return the tokens that texts are cut to, and why that is fewer than `wanted`, or None when it is not."""
    longest = longest_input(loaded)
    if longest is None or longest >= wanted:
        return wanted, None
    return longest, f"profiling.max_length is {wanted}, but the model takes {longest} tokens; texts are cut there"


def _learned_positions(model: Any) -> int | None:
    """Return how many tokens the model's position embeddings reach; None for a model without any."""
    for name, module in model.named_modules():
        if name.endswith("position_embeddings") and isinstance(module, torch.nn.Embedding):
            # RoBERTa's positions start after the id of padding, so its 514 rows reach 512 tokens.
            unused = 0 if module.padding_idx is None else module.padding_idx + 1
            return module.num_embeddings - unused
    return None


def _device(wanted: str | torch.device) -> torch.device:
    try:
        return devices.pick_device(wanted) if isinstance(wanted, str) else wanted
    except (ValueError, RuntimeError) as error:
        raise EnvironmentLacksError(
            f"model.device: {error}; use model.device=cpu, or a machine with that GPU"
        ) from None


def _load_weights(source: ModelSource, target: torch.device, dtype: str, trust_remote_code: bool) -> Any:
    require_attention(source)
    with _explained(source, "the model", target) as folder:
        model, loading_info = tasks.of(source.task).load_weights(
            folder,
            dtype=DTYPES[dtype],
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=trust_remote_code,
            ignore_mismatched_sizes=True,  # it is found out below, and said in one line
        )
        if loading_info["mismatched_keys"]:
            layer, has, needs = min(loading_info["mismatched_keys"])
            raise InputError(
                f"{source.name}: {layer} is {tuple(has)} in its weights, but config.json asks for {tuple(needs)}; give "
                "config.json the sizes that the model was trained with (id2label names as many classes as there are)"
            )
        if loading_info["missing_keys"]:
            missing = ", ".join(sorted(loading_info["missing_keys"])[:3])
            raise InputError(
                f"{source.name}: the weights lack {missing}, which would be random numbers; "
                "use a model that was fine-tuned for this task"
            )
        require_all_used(model, loading_info["unexpected_keys"], folder, source.name)
        return model.to(target).eval()


def require_all_used(model: Any, unexpected: Iterable[str], folder: Path, name: str) -> None:
    """Raise InputError where weights in `folder` have no place in a part that the model has: a layer, a bias of one.

    Of no effect are parts that it lacks as a whole (heads of other tasks, a pooler), and what is no parameter.
    `unexpected` are the names that transformers could not use, without those that it leaves out on purpose.
    """
    unused = unused_weights(model, unexpected)
    if unused and (unused := unused - _constants(folder)):
        raise InputError(
            f"{name}: {len(unused)} of its weights have no place in the model that config.json describes, such as "
            f"{', '.join(sorted(unused)[:3])}, and another model than theirs would be measured; give config.json the "
            "layers and settings that it was trained with, or save the smaller model with `save_pretrained`"
        )


def unused_weights(model: Any, unexpected: Iterable[str]) -> set[str]:
    """Return those of the `unexpected` names of weights that lie in parts of the model and are no known buffers."""
    base = getattr(model, "base_model", model)
    prefix = f"{getattr(base, 'base_model_prefix', '')}."
    parts = {name for name, part in (*base.named_children(), *model.named_children()) if part is not base}
    return {
        name
        for name in unexpected
        if name.removeprefix(prefix).partition(".")[0] in parts and not NO_PARAMETER.search(name)
    }


def _constants(folder: Path) -> set[str]:
    """Return the names of the masks and indices among the weights in a folder: no parameter holds integers."""
    names: set[str] = set()
    for path in folder.rglob("*.safetensors"):
        with safe_open(path, "pt") as file:
            names |= {name for name in file.keys() if file.get_slice(name).get_dtype() in CONSTANT}  # noqa: SIM118
    return names


def _agree_on_padding(model: Any, tokenizer: Any, name: str) -> None:
    """Give tokenizer and model one padding token: decoders such as Qwen and GPT-2 find the end of a text by it."""
    if tokenizer.pad_token_id is None:
        if tokenizer.eos_token is None:
            raise InputError(f"{name}: its tokenizer has no padding and no end token; set pad_token in its files")
        tokenizer.pad_token = tokenizer.eos_token
    rows = model.get_input_embeddings().num_embeddings
    if tokenizer.pad_token_id >= rows:
        raise InputError(
            f"{name}: the padding token {tokenizer.pad_token!r} has id {tokenizer.pad_token_id}, "
            f"but the model knows {rows} tokens; the tokenizer is not of this model"
        )
    model.config.pad_token_id = tokenizer.pad_token_id


@contextlib.contextmanager
def _explained(source: ModelSource, part: str, target: torch.device | None = None) -> Iterator[Path]:
    """Yield the folder to load from; keep the loader's chatter off the terminal, its failures are one message."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    folder = source.path
    try:
        with hashed_alone(source.path) as folder:
            yield folder
    except PipelineError:
        raise
    except ImportError as error:
        raise EnvironmentLacksError(f"{source.name}: {part} needs a package: {first_line(error)}") from error
    except Exception as error:  # any type: loaders of many libraries meet damaged files here
        if devices.is_out_of_memory(error):
            raise EnvironmentLacksError(
                f"{source.name}: {target} has no memory for the model ({first_line(error)}); "
                "use model.dtype=bfloat16, a larger device, or stop what else runs there"
            ) from error
        fault = first_line(error).replace(str(folder), str(source.path))
        raise InputError(f"{source.name}: cannot load {part} from {source.path}: {fault}") from error


def _say_nothing(text: str) -> None:
    """Take a note of progress and do nothing with it."""


RULE = "=" * 70


@dataclass(frozen=True)
class ModelSummary:
    """A model in numbers.

    `size_bytes` is what parameters and buffers hold, each tensor once, without activations. `max_positions` is None
    where neither model nor tokenizer states a limit.
    """

    model_type: str
    parameters_total: int
    parameters_trainable: int
    size_bytes: int
    dtype: str
    of_task: Mapping[str, tuple[str, int]]
    max_positions: int | None
    load_time_s: float

    def as_dict(self) -> dict[str, str | int | float | None]:
        """Return the summary as the documents of the pipeline hold it; `size_mb` is in 10^6 bytes."""
        return {
            "type": self.model_type,
            "parameters_total": self.parameters_total,
            "parameters_trainable": self.parameters_trainable,
            "size_mb": self.size_bytes / 1e6,
            "dtype": self.dtype,
            **{name: value for name, (_, value) in self.of_task.items()},
            "max_positions": self.max_positions,
            "load_time_s": self.load_time_s,
        }

    def lines(self) -> list[str]:
        """Return the block for the console, sizes in MB of 10^6 bytes."""
        return [
            "MODEL SUMMARY",
            RULE,
            f"Model Type: {self.model_type}",
            f"Total Parameters: {_counted(self.parameters_total)}",
            f"Trainable Parameters: {_counted(self.parameters_trainable)}",
            f"Model Size: {self.size_bytes / 1e6:,.2f} MB ({self.dtype})",
            *(f"{title}: {value}" for title, value in self.of_task.values()),
            f"Longest Input: {f'{self.max_positions:,} tokens' if self.max_positions else 'no limit stated'}",
            f"Load Time: {self.load_time_s:.2f} s",
            RULE,
        ]


def summarize(loaded: LoadedModel) -> ModelSummary:
    """Return the size of a loaded model; parameters that layers share are counted once."""
    parameters = list(loaded.model.parameters())
    tensors = [*parameters, *loaded.model.buffers()]
    return ModelSummary(
        model_type=loaded.model.config.model_type,
        parameters_total=sum(parameter.numel() for parameter in parameters),
        parameters_trainable=sum(parameter.numel() for parameter in parameters if parameter.requires_grad),
        size_bytes=sum(tensor.numel() * tensor.element_size() for tensor in tensors),
        dtype=loaded.dtype,
        of_task=tasks.of(loaded.source.task).summary(loaded.model),
        max_positions=longest_input(loaded),
        load_time_s=loaded.load_time_s,
    )


def _counted(number: int) -> str:
    return f"{number:,} ({number / 1e6:.2f}M)"
