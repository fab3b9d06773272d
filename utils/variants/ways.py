"""The variants of step 05: what each is called, how it is made, and the settings that run the pipeline with it."""

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from boundby.bound import Fix
from boundby.inference import (
    COMPILE_S,
    ENGINES,
    HOST_BUDGET,
    LEAST_CALIBRATION,
    PRECISIONS,
    SPARE_MEMORY,
    Batch,
    Engine,
    Library,
    Precision,
    Predictor,
    PredictorOptions,
    batches_in_order,
    can_prepack,
    collate,
    forward,
    rotary_of,
    tokenize,
    weight_bytes,
)
from boundby.machine import (
    compile_obstacle,
    fast_float32_precision,
    free_bytes,
    has_bfloat16_matmul,
    host_threads,
    is_gpu,
    is_host,
)
from boundby.timing import Work
from utils.command import InputError, PipelineError, lacking
from utils.evaluation import ENGINE_S, EngineFailed, EngineProcess, obstacle
from utils.models import LoadedModel, ModelSource, fetch, model_files
from utils.models import loading as models
from utils.settings import Model
from utils.settings import Variants as Settings
from utils.variants.recommendation import Kind

RefusalKind = Literal[
    "not_possible",
    "not_installed",
    "other_labels",
    "too_few_texts",
    "over_budget",
    "out_of_memory",
    "no_space",
    "failed",
]
REFERENCE, PACKED = "unsorted", "packed"  # which are always there: others are compared with them
SORTED = "sorted"
ONE_BY_ONE = "one text at a time"
SORTED_SIZES = (8, 32, 128)  # texts to a batch that a sorted pipeline may choose from: its best one counts
ENGINE_SIZES = (16, 32, 64, 128)
SORTED_PAST = 1.15  # times as long per text as the best so far, and no larger size is tried
# Beside those of the evaluation; models trained in bfloat16 overflow in float16, which shows here and is refused.
ALL_PRECISIONS = {**PRECISIONS, "float16": Precision("float16", torch.float16)}


class Refused(Exception):
    """A variant that this machine or model cannot take, by its kind and in words."""

    def __init__(self, kind: RefusalKind, text: str) -> None:
        super().__init__(text)
        self.kind: RefusalKind = kind


@dataclass(frozen=True)
class Way:
    """Texts in, logits `[rows, labels]` in float32 out, tokenizing included; `setting` is entered for every call.

    `weight_bytes`: held to compute with, None where only the engine knows; `disk_bytes`: of the files. `earlier_s`:
    spent for another variant on what this one needs too. `rise`: growth of the memory of a process of its own. `work`:
    a call that only computes, None where torch does not see its operators. `program`: lines that compute so, () for
    none.
    """

    logits: Callable[[Sequence[str]], np.ndarray]
    weight_bytes: int | None
    disk_bytes: int
    how: str = ""
    is_padded: bool = True
    setting: Callable[[], AbstractContextManager[None]] = nullcontext
    earlier_s: float = 0.0
    rise: Callable[[Sequence[str]], int | None] | None = None
    work: Callable[[Sequence[str]], Work] | None = None
    is_compiled: bool = False
    is_captured: bool = False
    program: tuple[str, ...] = ()


@dataclass
class Workshop:
    """What the variants are made of: the model in float32, and how its texts are cut and batched.

    `probe`: texts of all lengths, to check and warm up; `by_length`: one part, sorted; `calibration`: some of all.
    Converted models lie in `folder`. `stock`: the model in the dtype of `utils.variants.stock`; `sizes`: the best batch
    sizes of sorted texts; `doubts`: what making a variant has left behind.
    """

    loaded: LoadedModel
    max_length: int
    batch_size: int
    probe: Sequence[str]
    clock: Callable[[], float]
    trust_remote_code: bool = False
    by_length: Sequence[str] = ()
    calibration: Sequence[str] = ()
    folder: Path = Path("engines")
    made: dict[str, Predictor] = field(default_factory=dict)
    engines: dict[Library, tuple[EngineProcess, float]] = field(default_factory=dict)
    failed: dict[Library, EngineFailed] = field(default_factory=dict)
    stock: Any = None
    sizes: dict[torch.dtype, int] = field(default_factory=dict)
    doubts: list[str] = field(default_factory=list)

    def neighbours(self, size: int) -> Sequence[str]:
        """Return so many texts of similar length, as one batch of a sorted part has them."""
        texts = self.by_length or self.probe
        start = max(0, (len(texts) - size) // 2)
        return texts[start : start + size]

    def pack(self) -> Sequence[str]:
        """Return the texts of the probe that a usual pack holds, and a batch at least: fewer are calls above all."""
        lengths = tokenize(self.loaded.tokenizer, self.probe, self.max_length).lengths
        return self.probe[: max(self.batch_size, int(np.searchsorted(np.cumsum(lengths), HOST_BUDGET, "right")))]

    def engine(self, library: Library) -> tuple[EngineProcess, float]:
        """Return the process that holds the model converted for this library, and the seconds that took earlier.

        Raises Refused where there is no room.
        """
        if library in self.engines:
            return self.engines[library]
        if library in self.failed:  # for another precision
            raise self.failed[library]
        if wrong := obstacle(self.loaded, self.folder):
            raise Refused(*wrong)
        folder, process = self.folder / library, None
        try:
            process = EngineProcess(self.loaded.source, library, self.max_length, folder, self.trust_remote_code)
            start = self.clock()
            process.convert()
        except EngineFailed as error:
            if process:
                process.close()
            shutil.rmtree(folder, ignore_errors=True)  # what it wrote in part takes the room of others
            self.failed[library] = error
            raise
        self.engines[library] = process, self.clock() - start
        return process, 0.0

    def close(self) -> None:
        """End the processes and remove the converted models."""
        for process, _ in self.engines.values():
            process.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def predictor(self, precision: str, *, compiled: bool = False) -> Predictor:
        """Return the predictor of this precision. Raises Refused where it cannot be."""
        key = f"{precision}, compiled" if compiled else precision
        if key not in self.made:
            require_memory(self.loaded, ALL_PRECISIONS[precision])
            options = PredictorOptions(self.max_length, precision, compile=compiled)
            model, tokenizer = self.loaded.model, self.loaded.tokenizer
            made = Predictor(model, tokenizer, options, self.probe, precisions=ALL_PRECISIONS)
            if compiled and not made.compiled:
                raise Refused("failed", made.doubts[-1].removeprefix("not compiled: "))
            self.made[key] = made
        return self.made[key]


@dataclass(frozen=True)
class Variant:
    """One way to be compared. It differs from `base` by `fix` alone, as step 02 may have tried it.

    `settings` and `environment` run the pipeline with it; None where it has no such way. `setup_s`: about what making
    it takes. `require` raises Refused where no time would help. `kind`: what may change in the answers.
    """

    name: str
    words: str
    make: Callable[[Workshop], Way]
    base: str | None = PACKED
    fix: Fix | None = None
    settings: tuple[str, ...] | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    setup_s: float = 0.0
    require: Callable[[Workshop], None] = lambda shop: None
    kind: Kind = "same_arithmetic"


def variants(device: torch.device, settings: Settings, stock: Sequence[Variant] = ()) -> list[Variant]:
    """Return the variants to compare, simplest first, those that may be refused among them.

    `which` are the names of those wanted beside the two that others are compared with; None: all, of `stock` on a GPU
    alone. What one of `stock` differs from by one change is compared as well.
    """
    known, which = _of_this_model(device, settings.min_agreement), settings.which
    if which is None:
        wanted = [*known, *(stock if is_gpu(device) else ())]
    else:
        names = (*which, *(variant.base for variant in stock if variant.name in which), REFERENCE, PACKED)
        wanted = [variant for variant in (*known, *stock) if variant.name in names]
    listed = [*wanted, *map(_checkpoint, dict.fromkeys(settings.models))]
    stays = (*ENGINES, *(variant.name for variant in stock))
    return [
        variant if variant.base in (None, REFERENCE) or variant.name in stays else _unpadded(variant)
        for variant in listed
    ]


def _unpadded(variant: Variant) -> Variant:
    """Return it by the name that the report, the card and the picture have for it."""
    return replace(variant, words=f"{variant.words}, {PACKED}")


def called(variant: Variant, way: Way | None) -> str:
    """Return the words for a variant that is made this way.

    The batches of a model that cannot be packed are padded, and those of one text are not.
    """
    if way is None:
        return variant.words
    if variant.name == REFERENCE and not way.is_padded:
        return ONE_BY_ONE
    return variant.words.replace(PACKED, "padded") if way.is_padded else variant.words


def _of_this_model(device: torch.device, min_agreement: float) -> list[Variant]:
    threads = torch.get_num_threads()
    coarser = fast_float32_precision(device) or "highest"
    half = max(1, threads // 2)
    fewer = f"{half} of {threads} threads" if threads > 1 else "fewer threads"
    of_threads = Fix("threads", {"threads": half, "instead_of": threads})
    of_products, bf16 = Fix("matmul_precision", {"precision": coarser}), Fix("dtype", {"dtype": "bfloat16"})
    fp16, fused = Fix("dtype", {"dtype": "float16"}), Fix("fuse_operators")
    any_precision = ("evaluation.precision=fastest", f"evaluation.min_agreement={min_agreement:g}")
    return [
        Variant(REFERENCE, "padded, unsorted", _as_they_come, base=None),
        Variant(SORTED, "padded, sorted by length", _sorted, base=REFERENCE),
        Variant(PACKED, PACKED, partial(_in, "float32"), REFERENCE, Fix("remove_padding"), settings=()),
        Variant("float32_prepacked", "prepacked weights", partial(_in, "float32_prepacked"), settings=(),
                require=requiring("prepacking")),
        Variant("half_threads", fewer, partial(_with_threads, half), fix=of_threads,
                require=requiring("threads"), settings=(), environment={"OMP_NUM_THREADS": str(half)}),
        Variant("float32_fast", "reduced-precision matmul", partial(_in, "float32_fast"), fix=of_products,
                settings=(f"model.matmul_precision={coarser}",), kind="reduced"),
        Variant("bfloat16", "bfloat16", partial(_in, "bfloat16"), fix=bf16, settings=("model.dtype=bfloat16",),
                require=requiring("bfloat16"), kind="reduced"),
        Variant("float16", "float16", partial(_in, "float16"), fix=fp16, settings=("model.dtype=float16",),
                require=requiring("float16"), kind="reduced"),
        Variant("int8", "int8", partial(_in, "int8"), settings=any_precision, kind="reduced"),
        Variant("compiled", "compiled", partial(_compiled, "float32"), fix=fused, setup_s=COMPILE_S,
                require=requiring("compiler"), settings=("evaluation.compile=on",)),
        Variant("bfloat16_compiled", "compiled bfloat16", partial(_compiled, "bfloat16"), "bfloat16", fused,
                settings=("model.dtype=bfloat16", "evaluation.compile=on"), setup_s=COMPILE_S,
                require=requiring("bfloat16", "compiler"), kind="reduced"),
        *(Variant(name, engine.words, partial(_engine, name), SORTED if name == engine.library else engine.library,
                  setup_s=ENGINE_S.get(name, 0.0), require=partial(_require_engine, engine),
                  kind="same_arithmetic" if engine.precision == "float32" else "reduced")
          for name, engine in ENGINES.items()),
    ]  # fmt: skip


def _checkpoint(name: str) -> Variant:
    make = partial(_other_model, name)
    return Variant(f"model:{name}", Path(name).name, make, settings=(f"model.name={name}",), kind="other_model")


def _as_they_come(shop: Workshop) -> Way:
    way = padded(shop, shop.loaded.model, shop.batch_size, by_length=False)
    return replace(way, is_padded=shop.batch_size > 1)


def _sorted(shop: Workshop) -> Way:
    model = shop.loaded.model
    return replace(padded(shop, model, sorted_size(shop, model)), work=None)


def sorted_size(shop: Workshop, model: Any) -> int:
    """Return the batch size at which padded batches of similar length take least by the model in its dtype."""
    if model.dtype not in shop.sizes:
        timed = _best_size(shop, SORTED_SIZES, lambda texts, size: padded(shop, model, size).logits(texts))
        shop.sizes[model.dtype] = timed
    return shop.sizes[model.dtype]


def _best_size(shop: Workshop, sizes: Sequence[int], logits: Callable[[Sequence[str], int], object]) -> int:
    """Return the batch size at which the sorted texts of a part take least, so that a way is compared at its best.

    Timed is one batch of texts of similar length; their lengths tell how much more padding the whole part has.
    """

    def padded(texts: Sequence[str], size: int) -> int:
        lengths = -np.sort(-tokenize(shop.loaded.tokenizer, texts, shop.max_length).lengths)
        starts = range(0, len(lengths), size)
        return int(sum(lengths[start] * len(lengths[start : start + size]) for start in starts))

    part = shop.by_length or shop.probe
    seconds: dict[int, float] = {}
    for size in sizes:
        texts = shop.neighbours(size)
        logits(texts, size)
        start = shop.clock()
        logits(texts, size)
        seconds[size] = (shop.clock() - start) * padded(part, size) / padded(texts, size)
        if seconds[size] > SORTED_PAST * min(seconds.values()) or len(texts) < size:
            break
    return min(seconds, key=lambda size: seconds[size])


def padded(
    shop: Workshop,
    model: Any,
    size: int,
    compute: Callable[[Batch], torch.Tensor] | None = None,
    *,
    by_length: bool = True,
) -> Way:
    """Return the way of batches of `size` padded texts, of similar length or as they come.

    `compute` gives the logits of a batch, those of its texts first; None: the model's own forward.
    """
    tokenizer, run = shop.loaded.tokenizer, compute or partial(forward, model)

    def batches(texts: Sequence[str]) -> Iterator[Batch]:
        tokens = tokenize(tokenizer, texts, shop.max_length)
        order = np.argsort(-tokens.lengths, kind="stable") if by_length else np.arange(len(texts))
        for rows in batches_in_order(rotary_of(model), tokens, order.tolist(), size):
            yield collate(tokens, rows, tokenizer.pad_token_id or 0, shop.loaded.device)

    def logits(texts: Sequence[str]) -> np.ndarray:
        logits = np.empty((len(texts), model.config.num_labels), dtype=np.float32)
        with torch.inference_mode():
            for batch in batches(texts):
                logits[list(batch.rows)] = run(batch)[: len(batch.rows)].float().cpu().numpy()
        return logits

    def work(texts: Sequence[str]) -> Work:
        made = list(batches(texts))
        return lambda: [run(batch) for batch in made]

    return replace(_way(logits, model, shop.loaded, f"batches of {size}"), work=work)


def _way(
    logits: Callable[[Sequence[str]], np.ndarray],
    model: Any,
    loaded: LoadedModel,
    how: str,
    setting: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Way:
    weights = [path for path in model_files(loaded.source.path) if path.suffix == ".safetensors"]
    disk_bytes = sum(path.stat().st_size for path in weights)
    return Way(logits, weight_bytes(model), disk_bytes, how, setting=setting)


def _predicting(predictor: Predictor, loaded: LoadedModel) -> Way:
    def work(texts: Sequence[str]) -> Work:
        forwards = predictor.forwards(predictor.tokenize(texts))
        return lambda: [forward() for forward in forwards]

    way = _way(lambda texts: predictor.predict(texts).logits, predictor.model, loaded, predictor.strategy)
    made = _program(predictor.options)
    return replace(way, is_padded=predictor.is_padded, work=work, is_compiled=predictor.compiled, program=made)


def _program(options: PredictorOptions) -> tuple[str, ...]:
    """Return the lines that predict texts of one's own with these options."""
    changed = ((option.name, getattr(options, option.name)) for option in fields(options))
    given = ", ".join(f"{name}={value!r}" for name, value in changed if value != PredictorOptions.__dict__.get(name))
    names, more = "Predictor, PredictorOptions", ""
    if options.precision not in PRECISIONS:
        made = f"Precision({options.precision!r}, {ALL_PRECISIONS[options.precision].dtype})"
        names, more = f"Precision, {names}", f", precisions={{{options.precision!r}: {made}}}"
    call = f"Predictor(model, tokenizer, PredictorOptions({given}), texts[:64]{more})"
    imports = f"from boundby.inference import {names}"
    return *(("import torch",) if more else ()), imports, f"{call}.predict(texts).labels"


def _in(precision: str, shop: Workshop) -> Way:
    way = _predicting(shop.predictor(precision), shop.loaded)
    return replace(way, setting=partial(ALL_PRECISIONS[precision].active, shop.loaded.device))


def _compiled(precision: str, shop: Workshop) -> Way:
    return _predicting(shop.predictor(precision, compiled=True), shop.loaded)


def _with_threads(number: int, shop: Workshop) -> Way:
    if number >= torch.get_num_threads():
        raise Refused("not_possible", "there is one thread")
    way = _in("float32", shop)
    program = ("import torch", f"torch.set_num_threads({number})", *way.program)
    return replace(way, setting=lambda: host_threads(number), program=program)


# What a variant needs of a device: the reason where that is not available.
NEEDS: dict[str, Callable[[torch.device], str | None]] = {
    "bfloat16": lambda device: None if has_bfloat16_matmul(device) else NO_BFLOAT16,
    "float16": lambda device: None if is_gpu(device) else "float16 is fast on a GPU only",
    "prepacking": lambda device: None if can_prepack(device) else "this device has no kernels for prepacked weights",
    "threads": lambda device: None if is_host(device) else "the threads of the host do not compute for a GPU",
    "compiler": lambda device: compile_obstacle(device),
    "gpu": lambda device: None if is_gpu(device) else "only a GPU has that choice",
    "host": lambda device: None if is_host(device) else "engines are compared on a CPU only",
}
NO_BFLOAT16 = "this processor has no bfloat16 products: it would emulate them, slower"


def requiring(*needs: str) -> Callable[[Workshop], None]:
    """Return what raises Refused where the device lacks any of `NEEDS`."""

    def require(shop: Workshop) -> None:
        for reason in (NEEDS[name](shop.loaded.device) for name in needs):
            if reason:
                raise Refused("not_possible", reason)

    return require


def _require_engine(engine: Engine, shop: Workshop) -> None:
    if engine.lacking:
        raise Refused("not_installed", str(lacking(*engine.lacking)))
    requiring("host", *(["bfloat16"] if engine.precision == "bfloat16" else []))(shop)
    if engine.calibrated and len(shop.calibration) < LEAST_CALIBRATION:
        raise Refused("too_few_texts", f"its ranges are found with {LEAST_CALIBRATION} texts or more; the dataset has "
                      f"{len(shop.calibration)}")  # fmt: skip


def _engine(name: str, shop: Workshop) -> Way:
    """Return the model converted for another library, at its best batch size of texts sorted by length."""
    engine = ENGINES[name]
    process, earlier_s = shop.engine(engine.library)
    size_bytes = process.open(name, shop.calibration if engine.calibrated else ())
    size = _best_size(shop, ENGINE_SIZES, partial(process.logits, name))
    return Way(
        lambda texts: process.logits(name, texts, size),
        weight_bytes=None if engine.precision == "bfloat16" else size_bytes,  # converted once more as it is loaded
        disk_bytes=size_bytes,
        how=f"batches of {size}",
        earlier_s=earlier_s,
        rise=lambda texts: process.rise(name, texts, size),
    )


def _other_model(name: str, shop: Workshop) -> Way:
    """Return the checkpoint in float32 without padding, its labels put into the order of the reference's."""
    own = shop.loaded
    source = _source(Model(name=name, task=own.source.task), shop)
    loaded = models.load(source, own.device, "float32", trust_remote_code=shop.trust_remote_code)
    order = _same_labels(loaded.model.config.id2label, own.model.config.id2label)
    max_length, _ = models.effective_max_length(loaded, shop.max_length)
    predictor = Predictor(loaded.model, loaded.tokenizer, PredictorOptions(max_length), shop.probe)
    way = _predicting(predictor, loaded)
    return replace(way, logits=lambda texts: way.logits(texts)[:, order])


def _source(model: Model, shop: Workshop) -> ModelSource:
    """Return the checkpoint, fetched from the Hub where it is not on this disk. Raises Refused."""
    folder = shop.loaded.source.path.parent
    try:
        return models.locate(model, folder)
    except InputError:
        pass
    try:
        return fetch(model, folder, trust_remote_code=shop.trust_remote_code, progress=lambda text: None)
    except PipelineError as error:
        raise Refused("failed", str(error).removeprefix("model.name is ")) from error


def _same_labels(theirs: Mapping[int, str], own: Mapping[int, str]) -> list[int]:
    """Return where each of our labels stands among theirs. Raises Refused where they are not the same labels."""
    columns = {label: column for column, label in theirs.items()}
    if set(columns) != set(own.values()):
        lacking, more = (
            sorted(map(str, labels)) for labels in (set(own.values()) - set(columns), set(columns) - set(own.values()))
        )
        known = [f"lacks {_some(lacking)}"] if lacking else []
        known += [f"has {_some(more)} besides"] if more else []
        raise Refused("other_labels", f"its labels are others than this model's: it {' and '.join(known)}")
    return [columns[own[column]] for column in range(len(own))]


def _some(labels: Sequence[str], shown: int = 3) -> str:
    more = f" and {len(labels) - shown} more" if len(labels) > shown else ""
    return ", ".join(labels[:shown]) + more


def require_memory(loaded: LoadedModel, precision: Precision) -> None:
    """Raise Refused where a copy of the weights may not fit: Linux would end the process rather than raise an error."""
    if precision.keeps_weights:
        return
    wanted = sum(parameter.numel() for parameter in loaded.model.parameters()) * precision.dtype.itemsize
    if wanted > SPARE_MEMORY * free_bytes(loaded.device):
        raise Refused("out_of_memory", f"a copy of the weights takes {wanted / 1e9:.1f} GB, which may not be free")
