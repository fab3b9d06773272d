"""The model's own forward with one thing changed at a time, as a program of one's own would change it.

All compute padded batches sorted by length, on a GPU in half precision. A change (attention, cache, fp8, compiler, CUDA
graphs) is an entry of `CHANGES`, with the lines of a program that make it: the pipeline has no settings for them.
"""

import warnings
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import attention
from torch.nn.attention import SDPBackend, sdpa_kernel

from boundby.bound import LEFTOVER, CaptureLeftoverError, Fix, captured
from boundby.formatting import first_line
from boundby.inference import Batch, Precision, Tokens, collate, forward, in_dtype, is_causal, rotary_of, tokenize
from boundby.machine import has_bfloat16_matmul, is_gpu, runtime
from utils.command import EnvironmentLacksError, require_installed
from utils.models import FLASH_ATTENTION
from utils.variants.recommendation import Kind
from utils.variants.ways import SORTED, Refused, Variant, Way, Workshop, padded, require_memory, requiring, sorted_size

HALF = "sorted_half"
# Compute capability that a package needs for it: products of eight floating bits are those of Ada and Hopper.
CAPABILITY = {"torchao": (8, 9), "flash-attn": (8, 0), "flash-attn-3": (8, 0), "flash-attn-4": (9, 0)}
# Tokens to which a batch is padded where each shape is captured or compiled: few shapes, and a fifth more tokens.
LENGTHS = sorted(steps * 2**power for power in range(3, 20) for steps in (2, 3))
COMPILE_S, AUTOTUNE_S = 60.0, 120.0  # a classifier of 24 layers, one graph for all of them
NO_KERNEL = ("No available kernel", "No viable backend")
NOT_ITS_OWN = ("not used because", "runtime disabled")  # what torch warns of the kernels that were not asked for
UNMASKED = "model(input_ids=ids)  # no mask: the padding is on the right, and no token of a decoder sees a later one"
SHAPED = f"# padded to the next of {', '.join(map(str, LENGTHS[:6]))}, ... tokens, the last batch by copies of a text"

Compute = Callable[[Batch], torch.Tensor]


def _masked(model: Any, shop: Workshop, size: int) -> Compute:
    return partial(forward, model)


@dataclass(frozen=True)
class Change:
    """One change to a copy of the model, the block entered for every call, and its lines in a program.

    `check` raises Refused where it is not available here. `computing` returns what gives the logits of a batch of
    `size` texts at most; with `is_captured` as a graph.
    """

    words: str
    program: tuple[str, ...] = ()
    apply: Callable[[Any], object] = lambda model: None
    setting: Callable[[], AbstractContextManager[Any]] = nullcontext
    check: Callable[[Workshop], None] = lambda shop: None
    computing: Callable[[Any, Workshop, int], Compute] = _masked
    fix: Fix | None = None
    kind: Kind | None = None
    setup_s: float = 0.0
    is_captured: bool = False
    is_compiled: bool = False


def variants(device: torch.device) -> list[Variant]:
    """Return the stock forward in half precision, and what differs from it by one change.

    Elsewhere than on a GPU it is in float32, which is the variant `sorted`.
    """
    dtype = _dtype(device)
    name, listed, base, kind = str(dtype).removeprefix("torch."), list[Variant](), SORTED, "same_arithmetic"
    if dtype != torch.float32:
        plain, fix = partial(_changed, Change("")), Fix("dtype", {"dtype": name})
        listed, base, kind = (
            [Variant(HALF, f"{name}, sorted by length", plain, SORTED, fix, kind="reduced")],
            HALF,
            "reduced",
        )
    return listed + [
        Variant(key, f"{name}, {change.words}", partial(_changed, change), base, change.fix, setup_s=change.setup_s,
                require=change.check, kind=change.kind or kind)
        for key, change in CHANGES.items()
    ]  # fmt: skip


def _dtype(device: torch.device) -> torch.dtype:
    if not is_gpu(device):
        return torch.float32
    return torch.bfloat16 if has_bfloat16_matmul(device) else torch.float16


def _changed(change: Change, shop: Workshop) -> Way:
    """Return the stock forward with this change. Raises Refused with what torch says where no kernel takes it."""
    dtype = _dtype(shop.loaded.device)
    if shop.stock is None:
        require_memory(shop.loaded, Precision(str(dtype), dtype))
        shop.stock = in_dtype(shop.loaded.model, dtype)
    model, size = in_dtype(shop.stock, dtype), sorted_size(shop, shop.stock)
    with change.setting():
        change.apply(model)
        with torch.inference_mode():
            way = padded(shop, model, size, change.computing(model, shop, size))
        if change.is_captured:
            way = replace(way, work=padded(shop, model, size, _in_few_shapes(model, shop, size)).work)
        elif not change.is_compiled:
            _try(way, shop.probe)
    return replace(
        way,
        setting=change.setting,
        is_compiled=change.is_compiled,
        is_captured=change.is_captured,
        program=(*_opening(shop, dtype, size), *change.program),
    )


def _opening(shop: Workshop, dtype: torch.dtype, size: int) -> tuple[str, ...]:
    source, device = shop.loaded.source, shop.loaded.device.type
    name = source.name if source.origin == "hub" else str(source.path)
    loaded = f'from_pretrained("{name}", dtype={dtype}).to("{device}").eval()'
    return (
        "import torch; from transformers import AutoModelForSequenceClassification",
        f"model = AutoModelForSequenceClassification.{loaded}",
        f"# texts sorted by length, padded on the right, in batches of {size}, under torch.inference_mode()",
    )


def _try(way: Way, texts: Sequence[str]) -> None:
    """Compute some texts. Raises Refused with what torch warned of where a kernel does not take them."""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            way.logits(texts)
        except RuntimeError as error:
            if not str(error).startswith(NO_KERNEL):
                raise
            said = dict.fromkeys(str(warning.message).partition(" (Triggered")[0] for warning in warned)
            reasons = [message for message in said if not any(other in message for other in NOT_ITS_OWN)]
            raise Refused("not_possible", "; ".join([first_line(error), *reasons])) from error


def _unmasked(model: Any, shop: Workshop, size: int) -> Compute:
    """Return the forward without a mask, which a kernel may not take. Raises Refused where padding would be seen."""
    if not is_causal(model):
        raise Refused("not_possible", "it takes no mask, without which the tokens of this model see the padding")
    return lambda batch: forward(model, replace(batch, tokens_real=batch.tokens_padded))


def _in_few_shapes(model: Any, shop: Workshop, size: int) -> Compute:
    """Return the forward of batches that are filled up to the next length, and to `size` texts unless it is one.

    Raises Refused where a longer batch has other rotary positions.
    """
    if rotary_of(model):
        raise Refused("not_possible", "its rotary positions depend on the longest text; lengths are rounded up here")
    return lambda batch: _forward(model, *_filled(batch, size, shop))


def _forward(model: Any, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    logits: torch.Tensor = model(input_ids=ids, attention_mask=mask).logits
    return logits


def _filled(batch: Batch, size: int, shop: Workshop) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids and mask in one of few shapes; the head of a decoder looks for the padding by its id."""
    texts, tokens = batch.shape.samples, batch.shape.tokens
    rows = torch.arange(texts if texts == 1 else size, device=batch.input_ids.device).clamp(max=texts - 1)
    added, pad_id = (0, _length(tokens, shop.max_length) - tokens), shop.loaded.tokenizer.pad_token_id
    ids, mask = nn.functional.pad(batch.input_ids, added, value=pad_id), nn.functional.pad(batch.attention_mask, added)
    return ids[rows], mask[rows]


def _length(tokens: int, most: int) -> int:
    return max(tokens, min(most, LENGTHS[bisect_left(LENGTHS, tokens)]))


def _replayed(model: Any, shop: Workshop, size: int) -> Compute:
    """Return the forward as a CUDA graph for each shape, all shapes of the texts captured, the largest first."""
    kept: dict[tuple[int, ...], tuple[torch.Tensor, torch.Tensor, torch.cuda.CUDAGraph, list[torch.Tensor]]] = {}
    _in_few_shapes(model, shop, size)  # raises what is in the way before anything is captured

    def replay(batch: Batch) -> torch.Tensor:
        ids, mask = _filled(batch, size, shop)
        if (shape := tuple(ids.shape)) not in kept:
            logits: list[torch.Tensor] = []

            def work() -> None:
                logits[:] = [_forward(model, ids, mask)]

            pool = next((graph.pool() for _, _, graph, _ in kept.values()), None)
            try:
                kept[shape] = ids, mask, captured(work, pool=pool), logits
            except CaptureLeftoverError:
                shop.doubts.append(LEFTOVER)
                raise
        own_ids, own_mask, graph, answer = kept[shape]
        own_ids.copy_(ids)
        own_mask.copy_(mask)
        graph.replay()
        return answer[0]

    for batch in _shapes(shop, size):
        replay(batch)
    return replay


def _shapes(shop: Workshop, size: int) -> Iterator[Batch]:
    """Yield a batch of each shape that texts from the shortest to the longest may have, the largest first."""
    tokens = tokenize(shop.loaded.tokenizer, shop.probe, shop.max_length)
    longest = max(tokens.ids, key=len)
    ends = (_length(int(end), shop.max_length) for end in (tokens.lengths.min(), tokens.lengths.max()))
    least, most = ends
    for length in sorted({most, *(length for length in LENGTHS if least <= length <= most)}, reverse=True):
        text = Tokens([np.resize(longest, length)], None)
        for texts in dict.fromkeys((size, 1)):
            yield collate(text, [0] * texts, 0, shop.loaded.device)


def _compiled(model: Any, shop: Workshop, size: int) -> Compute:
    compute = _in_few_shapes(model, shop, size)

    def step(batch: Batch) -> torch.Tensor:
        torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
        return compute(batch)

    return step


@contextmanager
def _compiling() -> Iterator[None]:
    """Compile in this process: torch's own ones would outlive a program that is killed."""
    from torch._inductor import config

    with warnings.catch_warnings(), config.patch(compile_threads=1):
        warnings.simplefilter("ignore", DeprecationWarning)  # those of torch's compiler are not ours to cure
        yield


def _compiler(mode: str, setup_s: float, check: Callable[[Workshop], None]) -> Change:
    return Change(
        f"compiled, {mode}",
        (SHAPED, f'model.compile(mode="{mode}", dynamic=True)'),
        lambda model: model.compile(mode=mode, dynamic=True),
        _compiling,
        check,
        _compiled,
        Fix("fuse_operators"),
        setup_s=setup_s,
        is_compiled=True,
    )


def _to_float8(model: Any) -> None:
    """Round weights, and what enters them, to eight floating bits, in place; those of the head stay as they are."""
    from torchao.quantization import Float8DynamicActivationFloat8WeightConfig, PerRow, quantize_

    quantize_(model.base_model, Float8DynamicActivationFloat8WeightConfig(granularity=PerRow()))
    if all(type(parameter.data) is torch.Tensor for parameter in model.parameters()):
        raise Refused("not_possible", "none of its layers has sizes that fp8 takes: multiples of 16")


def _require_cache(shop: Workshop) -> None:
    batch = next(_shapes(shop, 1))
    with torch.inference_mode():
        answer = shop.loaded.model(input_ids=batch.input_ids)
    if getattr(answer, "past_key_values", None) is None:
        raise Refused("not_possible", "this model keeps no keys and values of its forward")


def _require_package(name: str, shop: Workshop) -> None:
    """Raise Refused where this is no GPU that the package has kernels for, and then where it is not installed."""
    requiring("gpu")(shop)
    has, needs = runtime(shop.loaded.device).get_device_capability(shop.loaded.device), CAPABILITY[name]
    if has < needs:
        least, own = (".".join(map(str, version)) for version in (needs, has))
        raise Refused("not_possible", f"it needs compute capability {least}, and this GPU has {own}")
    try:
        require_installed(name)
    except EnvironmentLacksError as error:
        raise Refused("not_installed", str(error)) from None


def _require_sdpa(is_everywhere: bool, shop: Workshop) -> None:
    if not is_everywhere:
        requiring("gpu")(shop)
    own = shop.loaded.model.config._attn_implementation
    if own != "sdpa":
        raise Refused("not_possible", f"the attention of this model is {own!r}, which calls no kernel of torch's SDPA")


def _require_implementation(name: str, package: str | None, shop: Workshop) -> None:
    if shop.loaded.model.config._attn_implementation == name:
        raise Refused("not_possible", "the model has it without a change")
    if package:
        _require_package(package, shop)  # else transformers may fetch a kernel from the Hub, and run it


def _implement(name: str, model: Any) -> None:
    """Change the attention. Raises Refused where transformers does not, with or without a word."""
    try:
        model.set_attn_implementation(name)
    except (ImportError, ValueError) as error:
        raise Refused("not_possible", first_line(error)) from error
    if (own := model.config._attn_implementation) != name:
        raise Refused("not_possible", f"transformers leaves the attention of this model at {own!r}")


def _implementation(name: str, words: str, package: str | None = None) -> Change:
    program = (f'model.set_attn_implementation("{name}")',)
    return Change(words, program, partial(_implement, name), check=partial(_require_implementation, name, package))


def _kernel(backend: SDPBackend, name: str, *, takes_mask: bool = True) -> Change:
    block = f"with torch.nn.attention.sdpa_kernel(torch.nn.attention.{backend}):"
    call, computing = ("model(input_ids=ids, attention_mask=mask)", _masked) if takes_mask else (UNMASKED, _unmasked)
    setting, check = partial(sdpa_kernel, backend), partial(_require_sdpa, takes_mask)
    return Change(f"SDPA {name}", (f"{block} {call}",), setting=setting, check=check, computing=computing)


def _flash(name: str, package: str) -> Change:
    """Return the change to another FlashAttention in torch's own operator."""
    plain = _kernel(SDPBackend.FLASH_ATTENTION, "flash", takes_mask=False)

    def check(shop: Workshop) -> None:
        plain.check(shop)
        known = getattr(attention, "list_flash_attention_impls", list)()  # torch 2.11
        if name not in known:
            has = f"knows {', '.join(known)} alone" if known else "has no choice of it"
            raise Refused("not_possible", f"torch {torch.__version__} {has}")
        _require_package(package, shop)

    @contextmanager
    def setting() -> Iterator[None]:
        attention.activate_flash_attention_impl(name)
        try:
            with plain.setting():
                yield
        finally:
            attention.restore_flash_attention_impl()

    program = (f'torch.nn.attention.activate_flash_attention_impl("{name}")', *plain.program)
    return replace(plain, words=f"SDPA flash, {name}", program=program, setting=setting, check=check)


# Simplest first. Graphs come last: a capture that fails may leave the process in another state.
CHANGES = {
    "use_cache_off": Change(
        "no key-value cache",
        ("model.config.get_text_config().use_cache = False",),
        lambda model: setattr(model.config.get_text_config(), "use_cache", False),
        check=_require_cache,
    ),
    "sdpa": _implementation("sdpa", "SDPA"),
    "sdpa_math": _kernel(SDPBackend.MATH, "math"),
    "sdpa_mem_efficient": _kernel(SDPBackend.EFFICIENT_ATTENTION, "mem_efficient"),
    "sdpa_cudnn": _kernel(SDPBackend.CUDNN_ATTENTION, "cudnn"),
    "sdpa_flash": _kernel(SDPBackend.FLASH_ATTENTION, "flash", takes_mask=False),
    "eager": _implementation("eager", "eager attention"),
    "sdpa_fa3": _flash("FA3", FLASH_ATTENTION["flash_attention_3"]),
    "sdpa_fa4": _flash("FA4", FLASH_ATTENTION["flash_attention_4"]),
    **{name: _implementation(name, f"FlashAttention {name[-1]}", package) for name, package in FLASH_ATTENTION.items()},
    "fp8": Change(
        "fp8 layers",
        (
            "from torchao.quantization import Float8DynamicActivationFloat8WeightConfig, PerRow, quantize_",
            "quantize_(model.base_model, Float8DynamicActivationFloat8WeightConfig(granularity=PerRow()))",
        ),
        _to_float8,
        check=partial(_require_package, "torchao"),
        kind="reduced",
    ),
    "compiled_reduce_overhead": _compiler("reduce-overhead", COMPILE_S, requiring("gpu", "compiler")),
    "compiled_max_autotune": _compiler("max-autotune", AUTOTUNE_S, requiring("compiler")),
    "cuda_graphs": Change(
        "CUDA graphs",
        (
            SHAPED,
            "graph = torch.cuda.CUDAGraph()  # one for each shape, after three calls of it on another stream",
            "with torch.cuda.graph(graph): logits = model(input_ids=ids, attention_mask=mask).logits",
            "ids.copy_(batch_ids); mask.copy_(batch_mask); graph.replay()  # for each batch: then logits are its own",
        ),
        check=requiring("gpu"),
        computing=_replayed,
        fix=Fix("issue_at_once"),
        is_captured=True,
    ),
}
