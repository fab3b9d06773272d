"""`model.dtype: auto` is the checkpoint's own dtype where the device has it and labels stay those of float32."""

import importlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from boundby.inference import selfcheck
from boundby.machine import device as devices
from tests import evaluation_workplace as workplace
from tests.gpu_double import H100, T4, plugged_in
from tests.report_reading import pod, section, text
from tests.tiny_models import WORDS, edit_config, save_bert
from utils.baseline import sweep as baseline
from utils.command.artifacts import EvaluationFolder, Layout
from utils.command.errors import InputError
from utils.evaluation import plan as plans
from utils.models import loading as models
from utils.models import source as model_source
from utils.settings.schema import Model, read_settings
from utils.steps import steps
from utils.tracing.layers import profiling

TEXTS = [" ".join(WORDS[: 1 + length % len(WORDS)]) for length in range(40)]
CPU, GPU = torch.device("cpu"), torch.device("cuda:0")


def saved(folder: Path, **changes: object) -> Path:
    """Save a classifier whose weights are in bfloat16, with these changes of its configuration."""
    path = save_bert(folder) / "model.safetensors"
    save_file({name: weight.bfloat16() for name, weight in load_file(path).items()}, path, {"format": "pt"})
    edit_config(folder, **{"dtype": "bfloat16", **changes})
    return folder


def source(folder: Path) -> models.ModelSource:
    return models.locate(Model(name=str(folder)), Path("unused"))


@pytest.fixture
def device_with(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Have every device multiply in these dtypes and in float32; a GPU is called Tesla T4."""

    def have(*dtypes: str) -> None:
        monkeypatch.setattr(devices, "has_bfloat16_matmul", lambda device: "bfloat16" in dtypes)
        monkeypatch.setattr(devices, "has_float16_matmul", lambda device: "float16" in dtypes)
        named = {"type": "cuda", "name": "Tesla T4"}
        monkeypatch.setattr(devices, "describe", lambda device: named if device == GPU else {"type": "cpu"})

    return have


@pytest.mark.parametrize(
    ("changes", "dtype", "by"),
    [
        ({}, "bfloat16", "dtype of its config.json"),
        ({"dtype": None, "torch_dtype": "torch.float16"}, "float16", "torch_dtype of its config.json"),
        ({"dtype": "auto"}, "bfloat16", "most of its weights"),
        ({"dtype": None}, "bfloat16", "most of its weights"),
        ({"dtype": {"text_config": "float32"}}, "bfloat16", "most of its weights"),
    ],
)
def test_the_own_dtype_is_what_the_configuration_says_or_most_weights_have(tmp_path, changes, dtype, by):
    folder = saved(tmp_path, **changes)
    path = folder / "model.safetensors"
    few = {name: weight.float() if "bias" in name else weight for name, weight in load_file(path).items()}
    few["position_ids"] = torch.arange(10**6)  # integers are no weights
    save_file(few, path, {"format": "pt"})
    assert model_source.own_dtype(folder) == (dtype, by)


def test_all_parts_of_divided_weights_count(tmp_path):
    folder = saved(tmp_path, dtype=None)
    (folder / "model.safetensors").unlink()  # which would be taken without a look at an index
    for name, size, dtype in (("a", 10**5, torch.float16), ("b", 10, torch.bfloat16)):
        save_file({name: torch.zeros(size, dtype=dtype)}, folder / f"{name}.safetensors", {"format": "pt"})
    index = {"weight_map": {"a": "a.safetensors", "b": "b.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert model_source.own_dtype(folder)[0] == "float16"


def test_weights_that_cannot_be_read_are_named(tmp_path):
    folder = saved(tmp_path)
    edit_config(folder, dtype=None)
    (folder / "model.safetensors").write_bytes(b"\xff" * 64)
    with pytest.raises(InputError, match=r"model\.safetensors: cannot be read as safetensors weights"):
        models.choose_dtype("auto", folder, CPU)


@pytest.mark.parametrize(
    ("own", "device", "has", "chosen", "doubt"),
    [
        ("float32", CPU, ("bfloat16", "float16"), "float32", None),
        ("bfloat16", GPU, ("bfloat16", "float16"), "bfloat16", None),
        (
            "bfloat16",
            GPU,
            ("float16",),
            "float32",
            "own bfloat16, by dtype of its config.json, is emulated by Tesla T4",
        ),
        ("bfloat16", CPU, (), "float32", "is emulated by this CPU"),
        ("float16", GPU, ("float16",), "float16", None),
        ("float16", CPU, ("bfloat16",), "float32", "own float16, by dtype of its config.json, is emulated by this CPU"),
        ("float64", GPU, ("bfloat16", "float16"), "float32", "the checkpoint is in float64"),
        ("float8_e4m3fn", GPU, ("bfloat16", "float16"), "float32", "the checkpoint is in float8_e4m3fn"),
    ],
)
def test_auto_is_the_own_dtype_where_the_device_multiplies_in_it(
    tmp_path, device_with, own, device, has, chosen, doubt
):
    device_with(*has)
    (tmp_path / "config.json").write_text(json.dumps({"dtype": own}))
    choice = models.choose_dtype("auto", tmp_path, device)
    assert (choice.dtype, choice.setting) == (chosen, "auto")
    assert choice.reason and (choice.doubt is None) == (doubt is None)
    if doubt:
        assert choice.doubt.startswith("model.dtype=auto holds the model in float32: ") and doubt in choice.doubt


def test_a_dtype_that_is_asked_for_is_taken_and_said_to_be_emulated(tmp_path, device_with):
    device_with("float16")
    choice = models.choose_dtype("bfloat16", tmp_path, GPU)
    assert (choice.dtype, choice.reason) == ("bfloat16", None)
    assert choice.doubt == (
        "model.dtype=bfloat16 is emulated by Tesla T4, slower than float32; auto takes float32 there"
    )
    assert models.choose_dtype("float16", tmp_path, GPU).doubt is models.choose_dtype("float32", tmp_path, GPU).doubt


@pytest.mark.parametrize(("major", "has"), [(6, False), (7, True), (9, True)])
def test_float16_is_fast_from_volta_on(monkeypatch, major, has):
    properties = SimpleNamespace(major=major)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    assert devices.has_float16_matmul(GPU) is has


def test_a_checkpoint_in_bfloat16_is_loaded_and_held_against_float32(tmp_path, device_with):
    device_with("bfloat16")
    loaded, agreed = models.load_agreeing(source(saved(tmp_path)), "cpu", "auto", TEXTS, (64, 0.9))
    assert loaded.dtype == "bfloat16" and {weight.dtype for weight in loaded.model.parameters()} == {torch.bfloat16}
    assert agreed.max_abs_logit_difference > 0 and agreed.share >= 0.9
    assert loaded.choice.reason == "the checkpoint's own, by dtype of its config.json"


def test_labels_that_are_surely_not_those_of_float32_put_auto_into_float32(tmp_path, device_with, monkeypatch):
    device_with("bfloat16")
    folder = saved(tmp_path)
    path = folder / "model.safetensors"
    weights = load_file(path)
    weights["classifier.weight"] = weights["classifier.weight"][:1].repeat(3, 1) * torch.tensor([[1], [1.004], [1.008]])
    weights["classifier.weight"] += 3e-3 * torch.randn(3, 16, generator=torch.Generator().manual_seed(0))
    weights["classifier.weight"] = weights["classifier.weight"].to(torch.bfloat16)
    weights["classifier.bias"] = torch.zeros(3, dtype=torch.bfloat16)
    save_file(weights, path, {"format": "pt"})
    loaded, agreed = models.load_agreeing(source(folder), "cpu", "auto", TEXTS, (64, 1.0))
    assert loaded.dtype == "float32" and agreed.share == 1.0
    assert "in bfloat16" in loaded.choice.doubt and "of 40 texts get what they get in float32" in loaded.choice.doubt
    monkeypatch.setattr(models, "free_bytes", lambda device: 1000)
    unheld, _ = models.load_agreeing(source(folder), "cpu", "auto", TEXTS, (64, 0.1))
    assert unheld.dtype == "bfloat16" and "were not held against float32" in unheld.choice.doubt


def test_a_plan_by_auto_tells_the_share_of_labels_and_serves_a_worker(tmp_path, device_with):
    device_with("bfloat16")
    texts = workplace.texts()
    settings = workplace.prepare(tmp_path, texts, saved(tmp_path / "model"), "evaluation.min_agreement=0.7")
    assert workplace.evaluate(settings, *workplace.WHOLE) == [0, 0, 0]
    folder = EvaluationFolder(tmp_path / "results" / "evaluation")
    made, metrics = plans.load(folder), json.loads(folder.metrics.read_text())["metrics"]
    assert (made.identity.dtype, made.choices.model_dtype, made.choices.dtype) == ("auto", "bfloat16", "bfloat16")
    assert metrics["dtype"] == metrics["exactness"]["precision"] == "bfloat16"
    assert metrics["exactness"]["rows"] == len(texts) and metrics["exactness"]["agreement"] >= 0.7
    assert made.reasons.precision == f"bfloat16 by model.dtype=auto, held against float32 on {len(texts)} texts"


def test_a_plan_by_auto_computes_in_float32_where_the_sample_does_not_keep_its_labels(
    tmp_path, device_with, monkeypatch
):
    device_with("bfloat16")
    monkeypatch.setattr(models, "agreement_texts", lambda texts: list(texts[:4]))  # too few to be sure of anything
    settings = workplace.prepare(tmp_path, workplace.texts(), saved(tmp_path / "model"))
    planning = importlib.import_module("utils.evaluation.planning")

    def refuse(*arguments: object, **options: object) -> None:
        raise ValueError("not bfloat16: 30 of 40 labels agree")

    monkeypatch.setattr(planning, "choose_precision", refuse)
    assert workplace.evaluate(settings, *workplace.WHOLE) == [0, 0, 0]
    folder = EvaluationFolder(tmp_path / "results" / "evaluation")
    made, metrics = plans.load(folder), json.loads(folder.metrics.read_text())["metrics"]
    assert (made.choices.model_dtype, made.choices.dtype) == ("bfloat16", "float32") and made.choices.guard_margin > 0
    assert metrics["labels_doubt"] == (
        "the whole dataset is computed in float32, by model.dtype=auto: not bfloat16: 30 of 40 labels agree"
    )


def test_step_02_says_what_auto_came_to_and_step_03_follows_it(tmp_path, device_with, monkeypatch):
    device_with("bfloat16")
    monkeypatch.setattr(baseline, "find_limits", lambda *arguments: None)
    settings = workplace.prepare(tmp_path, workplace.texts(), saved(tmp_path / "model"), *workplace.QUICK)
    settings += ["evaluation.enabled=false", "evaluation.min_agreement=0.5", "profiling.dtypes=[float32,bfloat16]"]
    settings += ["trace.enabled=false", "layers.num_runs=1", "layers.warmup_runs=0"]
    assert importlib.import_module("scripts.02_baseline_inference").main(settings) == 0
    results = tmp_path / "results"
    document = json.loads((results / "baseline_metrics.json").read_text())
    assert (document["model"]["dtype"], document["model"]["dtype_setting"]) == ("bfloat16", "auto")
    assert [row["dtype"] for row in document["batch_sizes"]] == ["bfloat16", "float32"]
    assert document["optimal"]["batch_size"] == 1 and not any("dtype" in doubt for doubt in document["doubts"])
    for record in (results / ".receipts" / "02.json", results / "run.json"):
        said = json.loads(record.read_text())
        assert said.get("resolved", said.get("steps", {}).get("02", {}).get("resolved")) == {"model.dtype": "bfloat16"}
    config, _ = read_settings(Path(settings[1]), settings[2:])
    assert steps.measured_dtype(config, Layout.of(config)) == "bfloat16"
    device_with()  # step 02 has decided
    monkeypatch.setattr(profiling, "limits_of_machine", lambda *arguments: None)
    assert importlib.import_module("scripts.03_detailed_profiling").main(settings) == 0
    assert json.loads((results / ".receipts" / "03.json").read_text())["resolved"] == {"model.dtype": "bfloat16"}


def test_card_and_report_say_that_the_dtype_was_left_to_the_program(read):
    data = pod(read)
    data.document["model"] |= {"dtype_setting": "auto", "dtype_reason": "the checkpoint's own, by dtype of its config"}
    assert "float32 (auto)" in text(data)
    data.document["model"]["dtype"] = "bfloat16"
    data.document["agreement"] |= {"rows": 64, "share": 63 / 64, "against": "float32"}
    differ = "predictions, batched in bfloat16 and one by one in float32, differ in 1.6 % of 64 texts"
    assert differ in " ".join(text(data).split())
    said = section(data, "What was measured on what, and how")
    assert "Dtype: bfloat16 by model.dtype=auto: the checkpoint's own, by dtype of its config" in said


@pytest.mark.parametrize(
    ("card", "dtype", "doubt"),
    [
        (H100, "bfloat16", None),
        (T4, "float32", "the checkpoint's own bfloat16, by dtype of its config.json, is emulated by Tesla T4"),
    ],
    ids=["H100", "T4"],
)
def test_a_card_is_swept_and_evaluated_in_what_it_multiplies_in(card, dtype, doubt, tmp_path, monkeypatch):
    monkeypatch.setattr(baseline, "find_limits", lambda *arguments: None)
    monkeypatch.setattr(steps, "BATCH_SIZES", (1,))
    monkeypatch.setattr(steps, "LARGER_SIZES", (2,))
    quick = [setting for setting in workplace.QUICK if "batch_sizes" not in setting]
    settings = workplace.prepare(tmp_path, workplace.texts(10), saved(tmp_path / "model"), *quick)
    settings += ["evaluation.min_agreement=0.5", "model.device=cuda"]
    with plugged_in(card):
        assert importlib.import_module("scripts.02_baseline_inference").main(settings) == 0
    document = json.loads((tmp_path / "results" / "baseline_metrics.json").read_text())
    assert (document["model"]["dtype"], document["model"]["dtype_setting"]) == (dtype, "auto")
    assert [row["batch_size"] for row in document["batch_sizes"]] == [1, 2]
    assert {row["dtype"] for row in document["batch_sizes"]} == {dtype}
    assert document["full_dataset_metrics"]["dtype"] == dtype
    assert (document["full_dataset_metrics"]["exactness"] or {}).get("precision") == (dtype if doubt is None else None)
    said = [doubt_text for doubt_text in document["doubts"] if "model.dtype" in doubt_text]
    assert said == (
        [] if doubt is None else [f"model.dtype=auto holds the model in float32: {doubt}, slower than that"]
    )


def test_a_model_that_fits_in_its_own_dtype_alone_is_evaluated_in_it_and_that_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr(baseline, "find_limits", lambda *arguments: None)
    monkeypatch.setattr(models, "free_bytes", lambda device: 1000)
    settings = workplace.prepare(tmp_path, workplace.texts(10), saved(tmp_path / "model"), *workplace.QUICK)
    in_dtype = selfcheck.in_dtype

    def without_room(model: Any, dtype: torch.dtype) -> Any:
        if dtype == torch.float32 and next(model.parameters()).dtype != dtype:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return in_dtype(model, dtype)

    monkeypatch.setattr(selfcheck, "in_dtype", without_room)
    with plugged_in(H100):
        assert importlib.import_module("scripts.02_baseline_inference").main([*settings, "model.device=cuda"]) == 0
    document = json.loads((tmp_path / "results" / "baseline_metrics.json").read_text())
    full = document["full_dataset_metrics"]
    assert (full["dtype"], full["strategy"], full["exactness"]) == (
        "bfloat16",
        "packed, variable-length attention",
        None,
    )
    said = "labels in bfloat16 were not held against float32, for which there is no memory beside it"
    assert full["labels_doubt"] == said and said in document["doubts"]


def test_a_dtype_that_a_card_emulates_is_said_to_be_where_it_is_asked_for(tmp_path):
    with plugged_in(T4):
        choice = models.choose_dtype("bfloat16", tmp_path, GPU)
    assert choice.doubt.startswith("model.dtype=bfloat16 is emulated by Tesla T4, slower than float32")


def test_sweeps_without_sizes_of_their_own_go_further_on_a_gpu():
    config, _ = read_settings(workplace.ROOT / "configs" / "config.yaml")
    assert steps.sweep_sizes(config, is_on_gpu=False) == [1, 4, 8, 16, 32, 64]
    assert steps.sweep_sizes(config, is_on_gpu=True) == [1, 4, 8, 16, 32, 64, 128, 256]
    config, _ = read_settings(workplace.ROOT / "configs" / "config.yaml", ["profiling.batch_sizes=[2]"])
    assert steps.sweep_sizes(config, is_on_gpu=True) == [2]
