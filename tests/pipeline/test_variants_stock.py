"""The model's own forward with one thing changed: what is tried on which machine, what is refused, in which words."""

import contextlib
import sys
import warnings
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import numpy as np
import pytest
import torch

from boundby.inference.engines import ENGINES
from boundby.timing.timer import Timer
from tests.fakes import FakeClock
from tests.gpu_double import A100, H100, T4, Card, plugged_in
from tests.tiny_models import edit_config, save_bert, save_qwen
from utils.command.errors import EnvironmentLacksError
from utils.data import Rows
from utils.models import loading as models
from utils.models.source import FLASH_ATTENTION
from utils.report import variants as section
from utils.settings.schema import Model, VariantName, Variants
from utils.variants import comparison, rounds, stock, ways
from utils.variants.recommendation import Tolerance, recommend
from utils.variants.rounds import Measured, Refusal
from utils.variants.ways import Refused, Variant, Way, Workshop

CPU = torch.device("cpu")
TEXTS = ["good", "bad parcel please", "where is my parcel", "late late refund the broken parcel please", "is my", "a"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("stock")
    return {"encoder": save_bert(folder / "bert"), "decoder": save_qwen(folder / "qwen")}


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every optional package count as installed."""
    monkeypatch.setattr(stock, "require_installed", lambda name: None)


def workshop(folder: Path, device: str = "cpu") -> Workshop:
    loaded = models.load(models.locate(Model(name=str(folder)), folder), device)
    return Workshop(loaded, 64, 4, TEXTS, FakeClock(), sizes=dict.fromkeys(models.DTYPES.values(), 4))


def made(
    folder: Path, *names: str, card: Card | None = None
) -> tuple[dict[str, Measured], dict[str, Refusal], Workshop]:
    """Return the stock variants of these names that can be made, on the card or the host, and why others cannot."""
    with plugged_in(card) if card else contextlib.nullcontext():
        shop = workshop(folder, "cuda" if card else "cpu")
        listed = [variant for variant in stock.variants(shop.loaded.device) if variant.name in names]
        reference = Variant("unsorted", "", ways._as_they_come, None)
        measured, refused = rounds.make([reference, *listed], shop, Timer(FakeClock()), 1e9, lambda text: None)
        for timed in measured:
            with timed.way.setting():
                timed.logits = [timed.way.logits(TEXTS)]
    return {timed.variant.name: timed for timed in measured}, refused, shop


def reasons(refused: dict[str, Refusal]) -> dict[str, tuple[str, str]]:
    return {name: (refusal.why, refusal.text) for name, refusal in refused.items()}


def test_every_variant_has_a_name_in_the_settings_and_is_compared_with_one_that_is_there():
    with plugged_in(H100):
        device = torch.device("cuda:0")
        listed = ways.variants(device, Variants(), stock.variants(device))
    names = [variant.name for variant in listed]
    assert {*names} - {"unsorted", "packed"} == {*get_args(VariantName)}
    assert all(variant.base in names[:index] for index, variant in enumerate(listed) if variant.base)
    assert not any("padding" in variant.words for variant in listed if variant.name in stock.CHANGES)


def test_without_names_they_are_tried_on_a_gpu_and_by_name_anywhere_beside_what_they_change():
    def names(which: list[str] | None) -> list[str]:
        return [variant.name for variant in ways.variants(CPU, Variants(which=which), stock.variants(CPU))]

    assert not {*names(None)} & {*stock.CHANGES, stock.HALF}
    assert {*ENGINES} <= {*names(None)}
    assert names(["eager"]) == ["unsorted", "sorted", "packed", "eager"]
    with plugged_in(T4):
        card = torch.device("cuda:0")
        listed = ways.variants(card, Variants(which=["eager"]), stock.variants(card))
    assert [variant.name for variant in listed] == ["unsorted", "packed", "sorted_half", "eager"]
    assert listed[-1].words == "float16, eager attention", "a T4 multiplies in no bfloat16"


def test_on_a_host_each_computes_the_same_labels_by_the_attention_that_was_asked_for(folders):
    measured, refused, _ = made(folders["decoder"], "eager", "sdpa_math", "use_cache_off")
    assert refused == {} and {name: timed.attention for name, timed in measured.items()} == {
        "unsorted": "flash", "eager": "eager", "sdpa_math": "math", "use_cache_off": "flash",
    }  # fmt: skip
    for timed in measured.values():
        np.testing.assert_allclose(timed.logits[0], measured["unsorted"].logits[0], atol=1e-5)


def test_what_a_host_has_not_is_a_row_with_the_reason(folders):
    _, refused, _ = made(folders["encoder"], *{*stock.CHANGES} - {"compiled_max_autotune"})
    only = ("not_possible", "only a GPU has that choice")
    reason_of = reasons(refused)
    of_gpus = {"sdpa_flash", "sdpa_fa3", "sdpa_fa4", "fp8", "cuda_graphs", "compiled_reduce_overhead"}
    assert {name for name, timed in reason_of.items() if timed == only} == of_gpus | {*FLASH_ATTENTION}
    assert reason_of["sdpa"] == ("not_possible", "the model has it without a change")
    assert reason_of["use_cache_off"] == ("not_possible", "this model keeps no keys and values of its forward")
    assert reason_of["sdpa_cudnn"][1].startswith("No viable backend for scaled_dot_product_attention was found")


def test_a_card_is_offered_every_kernel_and_each_row_says_which_it_took(folders):
    kernels = ("sorted_half", "sdpa_math", "sdpa_mem_efficient", "sdpa_cudnn", "sdpa_flash", "eager")
    measured, refused, _ = made(folders["decoder"], *kernels, card=H100)
    assert refused == {} and {name: timed.attention for name, timed in measured.items()} == {
        "unsorted": "mem_efficient", "sorted_half": "cudnn", "sdpa_math": "math", "eager": "eager",
        "sdpa_mem_efficient": "mem_efficient", "sdpa_cudnn": "cudnn", "sdpa_flash": "flash",
    }  # fmt: skip
    for timed in measured.values():
        np.testing.assert_allclose(timed.logits[0], measured["unsorted"].logits[0], atol=0.1)
    assert (
        measured["sdpa_flash"]
        .way.program[-1]
        .startswith(
            "with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION): model(input_ids=ids)"
        )
    )
    assert 'dtype=torch.bfloat16).to("cuda")' in measured["eager"].way.program[1]
    assert measured["eager"].way.program[-1] == 'model.set_attn_implementation("eager")'


def test_a_kernel_without_masks_is_refused_to_a_model_whose_tokens_would_see_the_padding(folders):
    _, refused, _ = made(folders["encoder"], "sdpa_flash", card=H100)
    said = "it takes no mask, without which the tokens of this model see the padding"
    assert reasons(refused)["sdpa_flash"] == ("not_possible", said)


def test_a_card_without_a_kernel_refuses_it(folders):
    _, refused, _ = made(folders["decoder"], "sdpa_flash", "sdpa_cudnn", card=T4)
    said = ("not_possible", "No available kernel. Aborting execution.")
    assert reasons(refused) == dict.fromkeys(("sdpa_flash", "sdpa_cudnn"), said)


def test_what_torch_warns_of_the_kernel_is_the_reason_and_what_it_says_of_others_is_not():
    def logits(texts: object) -> np.ndarray:
        for said in ("Flash attention kernel not used because: (Triggered internally at sdp.cpp:1.)",
                     "Flash Attention does not support non-null attn_mask. (Triggered internally at sdp.cpp:2.)",
                     "CuDNN attention has been runtime disabled. (Triggered internally at sdp.cpp:3.)"):  # fmt: skip
            warnings.warn(said, stacklevel=1)
        raise RuntimeError("No available kernel. Aborting execution.")

    with pytest.raises(Refused) as refused:
        stock._try(Way(logits, 1, 1), TEXTS)
    assert (
        str(refused.value)
        == "No available kernel. Aborting execution.; Flash Attention does not support non-null attn_mask."
    )

    def too_large(texts: object) -> np.ndarray:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        stock._try(Way(too_large, 1, 1), TEXTS)


@pytest.mark.parametrize("kind", ["decoder", "encoder"])
def test_graphs_are_captured_for_each_length_and_give_the_logits_of_the_forward(folders, kind):
    with plugged_in(H100) as machine:
        shop = workshop(folders[kind], "cuda")
        [plain, graphs] = [
            variant for variant in stock.variants(shop.loaded.device) if variant.name in (stock.HALF, "cuda_graphs")
        ]
        own, way = plain.make(shop), graphs.make(shop)
        launches = machine.launches
        logits = way.logits(TEXTS)
        replayed = machine.launches - launches
        np.testing.assert_allclose(logits, own.logits(TEXTS), atol=0.002)
        assert replayed < (machine.launches - launches) / 4, "a replay issues a graph in one go"
        counts = [machine.launches]
        for _ in range(2):
            logits = way.logits(["good " * 40])
            counts.append(machine.launches)
        np.testing.assert_allclose(logits, own.logits(["good " * 40]), atol=0.002)
        assert counts[1] - counts[0] > 4 * (counts[2] - counts[1]), "another length is captured when it comes"
    assert way.is_captured and way.program[-1].startswith("ids.copy_(batch_ids)")


def test_lengths_are_rounded_up_by_less_than_a_half_and_not_beyond_the_longest():
    wide = [stock._length(tokens, 512) for tokens in range(16, 513)]
    assert max(to / tokens for to, tokens in zip(wide, range(16, 513), strict=True)) < 1.5
    assert len({*wide}) <= 11 and stock._length(500, 510) == 510 and stock._length(600, 512) == 600


def test_a_model_whose_positions_depend_on_the_longest_text_is_not_padded_to_longer_ones(folders, monkeypatch):
    monkeypatch.setattr(stock, "rotary_of", lambda model: True)
    monkeypatch.setattr(ways, "compile_obstacle", lambda device: None)
    _, refused, _ = made(folders["decoder"], "cuda_graphs", "compiled_max_autotune", card=H100)
    said = ("not_possible", "its rotary positions depend on the longest text; lengths are rounded up here")
    assert reasons(refused) == dict.fromkeys(("compiled_max_autotune", "cuda_graphs"), said)


def test_a_capture_that_fails_is_a_row_with_the_reason_and_the_others_go_on(folders, monkeypatch):
    """The forward of a decoder with its head waits for the device where a hook reads from it."""
    plain = stock._forward

    def reading(model: Any, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        logits = plain(model, ids, mask)
        float(logits[0, 0])
        return logits

    monkeypatch.setattr(stock, "_forward", reading)
    measured, refused, shop = made(folders["decoder"], "cuda_graphs", "sorted_half", "eager", card=H100)
    why, text = reasons(refused)["cuda_graphs"]
    assert why == "failed" and "CUDA error" in text and {*measured} == {"unsorted", "sorted_half", "eager"}
    assert shop.doubts == []


def test_a_capture_that_leaves_the_process_in_another_state_makes_the_comparison_doubtful(folders, monkeypatch):
    def broken(work: object, *, pool: object) -> None:
        raise stock.CaptureLeftoverError("memory is no longer given back")

    monkeypatch.setattr(stock, "captured", broken)
    _, refused, shop = made(folders["decoder"], "cuda_graphs", card=H100)
    assert reasons(refused)["cuda_graphs"][0] == "failed"
    assert shop.doubts == ["a graph could not be captured and left the process in an unknown state"]


@pytest.mark.parametrize(("card", "said"), [
    (T4, "it needs compute capability 8.9, and this GPU has 7.5"),
    (A100, "it needs compute capability 8.9, and this GPU has 8.0"),
    (H100, "torchao: not installed; pip install torchao"),
    (H100.with_(capability=(8, 9)), "torchao: not installed; pip install torchao"),
])  # fmt: skip
def test_fp8_needs_the_card_first_and_then_the_package(folders, card, said):
    _, refused, _ = made(folders["decoder"], "fp8", card=card)
    assert refused["fp8"].text == said


@pytest.fixture
def torchao(monkeypatch: pytest.MonkeyPatch, installed: None) -> list[tuple[Any, dict]]:
    """A torchao that rounds nothing, and notes which modules it was given."""
    calls: list[tuple[Any, dict]] = []
    fake = SimpleNamespace(
        PerRow=lambda: "by row",
        Float8DynamicActivationFloat8WeightConfig=lambda **settings: settings,
        quantize_=lambda model, config: calls.append((model, config)),
    )
    monkeypatch.setitem(sys.modules, "torchao", SimpleNamespace(quantization=fake))
    monkeypatch.setitem(sys.modules, "torchao.quantization", fake)
    return calls


def test_fp8_rounds_the_layers_of_a_copy_and_not_the_head(folders, torchao):
    measured, refused, shop = made(folders["decoder"], "fp8", card=H100)
    [(layers, config)] = torchao
    assert refused == {} and config == {"granularity": "by row"} and not hasattr(layers, "score")
    assert layers is not shop.loaded.model.base_model and measured["fp8"].variant.kind == "reduced"
    assert measured["fp8"].way.program[-1].startswith("quantize_(model.base_model, Float8DynamicActivationFloat8Weight")


def test_fp8_that_no_layer_takes_is_refused_and_one_of_another_api_a_failure(folders, torchao, monkeypatch):
    monkeypatch.setattr(sys.modules["torchao.quantization"], "quantize_", lambda model, config: None)
    with pytest.raises(Refused, match="none of its layers has sizes that fp8 takes: multiples of 16"):
        stock._to_float8(SimpleNamespace(base_model=None, parameters=lambda: [torch.nn.Parameter(torch.ones(2))]))
    monkeypatch.delattr(sys.modules["torchao.quantization"], "PerRow")
    _, refused, _ = made(folders["decoder"], "fp8", card=H100)
    assert refused["fp8"].why == "failed" and "PerRow" in refused["fp8"].text


@pytest.mark.parametrize(("name", "way_out"), [
    ("flash_attention_2", "pip install flash-attn --no-build-isolation"),
    ("flash_attention_3", "it is built from the folder hopper of github.com/Dao-AILab/flash-attention"),
    ("flash_attention_4", "pip install --pre flash-attn-4"),
    ("sdpa_fa4", "pip install --pre flash-attn-4"),
])  # fmt: skip
def test_an_attention_that_is_not_installed_is_a_row_with_the_line_that_installs_it(folders, name, way_out):
    _, refused, _ = made(folders["decoder"], name, card=H100)
    assert refused[name].why == "not_installed" and refused[name].text.endswith(f": not installed; {way_out}")


@pytest.mark.parametrize(("card", "refused", "least"), [(T4, 3, "8.0"), (A100, 4, "9.0")])
def test_an_attention_that_is_not_of_this_card_is_not_said_to_lack_a_package(folders, card, refused, least):
    name = f"flash_attention_{refused}"
    _, measured, _ = made(folders["decoder"], name, card=card)
    own = ".".join(map(str, card.capability))
    assert reasons(measured)[name] == ("not_possible", f"it needs compute capability {least}, and this GPU has {own}")


def test_an_attention_that_transformers_does_not_take_is_refused_with_its_words(folders, installed, monkeypatch):
    from transformers import PreTrainedModel

    def too_old(model: Any, name: str) -> None:
        raise ImportError("FlashAttention2 requires at least version `2.3.3`.\nmore")

    monkeypatch.setattr(PreTrainedModel, "set_attn_implementation", too_old)
    _, refused, _ = made(folders["decoder"], "flash_attention_2", card=A100)
    said = "FlashAttention2 requires at least version `2.3.3`."
    assert reasons(refused)["flash_attention_2"] == ("not_possible", said)
    monkeypatch.setattr(PreTrainedModel, "set_attn_implementation", lambda model, name: None)
    _, refused, _ = made(folders["decoder"], "flash_attention_2", card=A100)
    assert refused["flash_attention_2"].text == "transformers leaves the attention of this model at 'sdpa'"


def test_another_flash_attention_of_torch_is_on_for_its_calls_alone(installed, monkeypatch):
    calls: list[str] = []
    module = torch.nn.attention
    monkeypatch.setattr(module, "list_flash_attention_impls", lambda: ["FA3"])
    monkeypatch.setattr(module, "activate_flash_attention_impl", lambda name: calls.append(name))
    monkeypatch.setattr(module, "restore_flash_attention_impl", lambda: calls.append("restored"))
    change = stock.CHANGES["sdpa_fa3"]
    with pytest.raises(ValueError), change.setting():
        assert calls == ["FA3"] and not torch.backends.cuda.math_sdp_enabled()
        raise ValueError
    assert calls == ["FA3", "restored"] and torch.backends.cuda.math_sdp_enabled()
    shop = SimpleNamespace(loaded=SimpleNamespace(
        device=torch.device("cuda:0"), model=SimpleNamespace(config=SimpleNamespace(_attn_implementation="sdpa"))
    ))  # fmt: skip
    with plugged_in(H100):
        change.check(shop)
    with pytest.raises(Refused, match=f"torch {torch.__version__.replace('+', '.')} knows FA3 alone"):
        stock.CHANGES["sdpa_fa4"].check(shop)
    monkeypatch.delattr(module, "list_flash_attention_impls")
    with pytest.raises(Refused, match="has no choice of it"):
        change.check(shop)


def test_a_model_with_attention_of_its_own_has_no_kernel_to_choose(folders):
    shop = workshop(folders["encoder"])
    shop.loaded.model.config._attn_implementation_internal = "eager"
    with pytest.raises(Refused, match="the attention of this model is 'eager', which calls no kernel"):
        stock.CHANGES["sdpa_math"].check(shop)


@pytest.mark.parametrize(("name", "mode"), [
    ("compiled_reduce_overhead", "reduce-overhead"), ("compiled_max_autotune", "max-autotune")
])  # fmt: skip
def test_the_whole_forward_is_compiled_in_the_mode_that_is_named_and_in_few_shapes(folders, monkeypatch, name, mode):
    shapes, compiled, processes = list[tuple[int, ...]](), list[dict](), set[int]()
    monkeypatch.setattr(ways, "compile_obstacle", lambda device: None)
    monkeypatch.setattr(torch.nn.Module, "compile", lambda model, **settings: compiled.append(settings))
    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", lambda: None)
    plain = stock._forward

    def noted(model: Any, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        shapes.append(tuple(ids.shape))
        processes.add(torch._inductor.config.compile_threads)
        return plain(model, ids, mask)

    monkeypatch.setattr(stock, "_forward", noted)
    measured, refused, _ = made(folders["decoder"], name, card=H100)
    assert refused == {} and compiled == [{"mode": mode, "dynamic": True}]
    assert {*shapes} == {(4, 16)}, "the last batch is filled up"
    assert processes == {1}, "torch's own processes would outlive a program that is killed"
    assert measured[name].way.program[-1] == f'model.compile(mode="{mode}", dynamic=True)'
    assert measured[name].way.is_compiled and measured[name].variant.fix.kind == "fuse_operators"


def test_a_checkpoint_that_asks_for_an_attention_that_is_not_installed_ends_with_the_way_out(tmp_path):
    folder = save_bert(tmp_path / "model")
    edit_config(folder, attn_implementation="flash_attention_2")
    with pytest.raises(EnvironmentLacksError) as error:
        workshop(folder)
    assert str(error.value) == (
        f"{folder}: attn_implementation in its config.json is flash_attention_2; flash-attn: not installed; "
        "pip install flash-attn --no-build-isolation, or take the key out"
    )


def row(name: str, gain: float, **more: Any) -> dict[str, Any]:
    about = {"rows": 300, "same_labels": 300, "agreement": 1.0, "accuracy_difference": None}
    span = {"value": gain, "low": 0.99 * gain, "high": 1.01 * gain}
    return {"name": name, "words": name.replace("_", " "), "status": "measured", "gain": span, "gain_over_base": None,
            "texts_per_s": {"value": 100 * gain}, "base": None, "latency_ms": {"value": 1.0}, "weight_bytes": None,
            "million_cost": None, "against": None, "exactness": about, "runs_here": True} | more  # fmt: skip


def found_with(recommended: str, *rows: dict[str, Any]) -> dict[str, Any]:
    chosen = next(row for row in rows if row["name"] == recommended)
    answer = {"name": recommended, "settings": [], "environment": {}, "program": chosen.get("program", [])}
    return {"variants": list(rows), "recommended": answer, "texts": 300, "dataset_rows": 300, "rounds": 5, "doubts": [],
            "threads": 1, "batch_size": 8, "min_agreement": 0.99, "max_accuracy_drop": 0.01}  # fmt: skip


def test_the_recommendation_names_the_lines_of_a_program_where_it_is_surely_faster():
    lines = ["import torch", 'model.set_attn_implementation("flash_attention_2")']
    stock_row = partial(row, "flash_attention_2", program=lines, runs_here=False)
    said = section.console_lines(found_with("flash_attention_2", row("unsorted", 1.0), stock_row(2.0)))
    assert said[-3:] == ["In a program of your own:", *(f"  {line}" for line in lines)]
    slow_to_make = found_with("packed", row("unsorted", 1.0), row("packed", 2.0), stock_row(4.0))
    assert "evaluation.precision=fastest takes it" not in " ".join(section.console_lines(slow_to_make))
    engine = found_with("unsorted", row("unsorted", 1.0), row("openvino", 4.0, runs_here=False))
    assert "evaluation.precision=fastest takes it" in " ".join(" ".join(section.console_lines(engine)).split())
    said = section.console_lines(found_with("flash_attention_2", row("unsorted", 1.0), stock_row(1.0)))
    assert " ".join(said).endswith(
        "Keep the pipeline as it is: no other way it can run keeps enough labels and is surely faster."
    )


def test_what_a_program_alone_can_run_may_be_recommended_and_an_engine_may_not():
    ways_made = {
        "unsorted": Way(lambda texts: np.eye(2), 1, 1),
        "graphs": Way(lambda texts: np.eye(2), 1, 1, program=("graph.replay()",)),
        "engine": Way(lambda texts: np.eye(2), 1, 1),
    }
    speeds = {"unsorted": 1.0, "graphs": 0.5, "engine": 0.25}
    measured = [
        Measured(Variant(name, name, lambda shop: None, None), way, 0.0, 1.0, None, "flash", [speeds[name]] * 5,
                 [0.1] * 5, [np.eye(2)])
        for name, way in ways_made.items()
    ]  # fmt: skip
    texts = Rows(np.arange(2), ["a", "b"], None)
    comparing = comparison.Comparison(texts, 2, measured, {}, [2] * 5)
    candidates = [comparison._candidate(timed, comparing) for timed in measured]
    factors = {(a.variant.name, b.variant.name): a.over(b) for a in measured for b in measured}
    chosen = recommend(candidates, factors, Tolerance(0.99, 0.01))
    assert chosen.name == "graphs"
    rows = {timed.variant.name: comparison._row(timed, comparing, None) for timed in measured}
    answer = comparison._as_recommended(chosen, [timed.variant for timed in measured], rows)
    assert answer["program"] == ["graph.replay()"] and answer["settings"] == []
    assert rows["graphs"]["attention_backend"] == "flash" and not rows["graphs"]["runs_here"]
