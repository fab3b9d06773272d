"""`scripts/profile_layers.py`: presets of the published sizes, inputs that models take, files, flags and refusals."""

import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import yaml

from boundby.layers.report import read_profile
from tests.tiny_models import edit_config, save_bert
from utils.command.artifacts import Layout
from utils.command.errors import EnvironmentLacksError, InputError
from utils.settings.schema import Config
from utils.settings.yaml_file import load
from utils.steps import steps
from utils.tracing.layers import LayerSettings, Model, models, profiling

ROOT = Path(__file__).resolve().parents[2]
PARAMETERS = {  # of the published weights; classifiers of text have two classes, those of images a thousand
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "distilgpt2": 81_912_576,
    "bert-base": 109_482_240 + 2 * 769,
    "bert-large": 335_141_888 + 2 * 1025,
    "minilm-l6": 22_713_216 + 2 * 385,
    "distilbert-base": 66_362_880 + 768 * 769 + 2 * 769,
    "qwen2-0.5b": 494_032_768,
    "t5-small": 60_506_624,
    "resnet-18": 11_689_512,
    "resnet-50": 25_557_032,
    "vit-base": 86_567_656,
}
FILES = {"_metrics.jsonl", "_summary.json", "_dashboard.html"}
SMALL = ["--num-samples", "3", "--batch-size", "2", "--sequence-length", "8", "measurement.warmup_runs=1"]
TINY = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
TINY_PAIR = {"vocab_size": 40, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 16}
TINY_PAIR |= {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "decoder_ffn_dim": 16}

Command = Callable[..., tuple[int, str, str]]


# Presets


@pytest.mark.parametrize("name", models.PRESETS)
def test_preset_has_as_many_parameters_as_the_published_model(name):
    with torch.device("meta"):
        model = models.build(name)
    assert sum(parameter.numel() for parameter in model.parameters()) == PARAMETERS[name]  # torch yields tied ones once
    assert not model.training


# Inputs


def small(configuration: str, kind: str, **sizes: Any) -> torch.nn.Module:
    return getattr(transformers, kind)(getattr(transformers, configuration)(**sizes)).eval()


def bart(**sizes: Any) -> torch.nn.Module:
    return small("BartConfig", "BartForSequenceClassification", **TINY_PAIR, **sizes)


def test_text_models_take_tokens_of_the_asked_shape_without_padding_for_both_halves_and_with_one_end_in_each_text():
    sizes = {"vocab_size": 20, "n_positions": 16, "n_embd": 8, "n_layer": 1, "n_head": 2, "eos_token_id": 1}
    model = small("GPT2Config", "GPT2LMHeadModel", **sizes, bos_token_id=1)
    inputs = models.inputs_for(model, 3, 16)
    assert {name: given.shape for name, given in inputs.items()} == {"input_ids": (3, 16), "attention_mask": (3, 16)}
    assert inputs["attention_mask"].all() and inputs["input_ids"].max() < 20
    assert model(**inputs).logits.shape == (3, 16, 20)
    model = bart(max_position_embeddings=32)
    inputs, again = (models.inputs_for(model, 4, 32) for _ in range(2))
    assert torch.equal(inputs["input_ids"], again["input_ids"])
    assert set(inputs) == {"input_ids", "attention_mask", "decoder_input_ids"}
    ends = inputs["input_ids"] == model.config.eos_token_id
    assert ends[:, -1].all() and ends.sum() == 4
    assert model(**inputs).logits.shape == (4, model.config.num_labels)


def test_new_tokens_are_generated_by_models_that_can_and_have_positions_for_them():
    sizes = {"vocab_size": 20, "n_positions": 16, "n_embd": 8, "n_layer": 1, "n_head": 2, "eos_token_id": 1}
    model = small("GPT2Config", "GPT2LMHeadModel", **sizes, bos_token_id=1)
    inputs = models.inputs_for(model, 2, 12)
    assert models.generating(model, inputs, 0) == (model, inputs)
    generation, given = models.generating(model, inputs, 4)
    assert generation(**given).shape == (2, 16) and models.shape_of(given, 4).endswith(" and 4 new")
    with pytest.raises(InputError, match="--new-tokens 5: 17 tokens in all, and the model has 16 positions"):
        models.generating(model, inputs, 5)
    classifier = small("BertConfig", "BertForSequenceClassification", vocab_size=9, **TINY)
    with pytest.raises(InputError, match="BertForSequenceClassification generates no text"):
        models.generating(classifier, models.inputs_for(classifier, 1, 8), 2)


@pytest.mark.parametrize(
    ("size", "channels", "shape"), [(32, 1, (2, 1, 32, 32)), ([32, 16], 3, (2, 3, 32, 16))], ids=["one", "two"]
)
def test_image_models_take_pixels_of_their_size_and_dtype(size, channels, shape):
    sizes = {"image_size": size, "patch_size": 16, "num_channels": channels}
    model = small("ViTConfig", "ViTModel", **sizes, **TINY).to(torch.bfloat16)
    inputs = models.inputs_for(model, 2, 128)
    assert inputs["pixel_values"].shape == shape and inputs["pixel_values"].dtype == torch.bfloat16
    if channels == 1:
        assert model(**inputs).last_hidden_state.shape == (2, 5, 8)


def test_more_tokens_than_positions_are_refused_and_the_id_of_padding_takes_one():
    roberta = {"max_position_embeddings": 34, "pad_token_id": 1, "vocab_size": 9}
    for model in (bart(max_position_embeddings=32), small("RobertaConfig", "RobertaModel", **roberta, **TINY)):
        assert model(**models.inputs_for(model, 1, 32))
        with pytest.raises(InputError, match="--sequence-length 33: the model has 32 positions at most"):
            models.inputs_for(model, 1, 33)


@pytest.mark.parametrize(
    ("model", "taken"), [(torch.nn.Linear(2, 2), "nothing that it names"), ("speech", "input_features")]
)
def test_model_that_takes_neither_tokens_nor_images_is_refused_with_a_way_out(model, taken):
    if model == "speech":
        special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
        model = small("WhisperConfig", "WhisperModel", num_mel_bins=8, **TINY_PAIR, **special)
    with pytest.raises(InputError, match=f"takes {taken}; .* give yours to boundby.layers.engine"):
        models.inputs_for(model, 1, 8)


# Models


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return save_bert(tmp_path_factory.mktemp("models") / "tiny-bert")


@pytest.fixture
def damaged(folder, tmp_path) -> Path:
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in folder.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    return copy


def test_folder_is_loaded_with_the_class_it_names_called_after_itself_and_takes_batches(folder, tmp_path):
    prepared = models.prepare(Model(name=str(folder), device="cpu", dtype="bfloat16"))
    assert type(prepared.model).__name__ == "BertForSequenceClassification" and not prepared.model.training
    assert {parameter.dtype for parameter in prepared.model.parameters()} == {torch.bfloat16}
    assert (prepared.name, prepared.device) == ("tiny-bert", torch.device("cpu"))
    with pytest.raises(InputError, match="model: give an architecture"):
        models.prepare(Model(architecture=None, device="cpu"))
    shape = {"n_layer": 1, "n_embd": 8, "n_head": 2, "vocab_size": 9, "n_positions": 16, "num_labels": 3}
    small("GPT2Config", "GPT2ForSequenceClassification", **shape, eos_token_id=8).save_pretrained(tmp_path)
    model = models.prepare(Model(name=str(tmp_path), device="cpu")).model  # without a token of padding
    assert model(**models.inputs_for(model, 4, 16)).logits.shape == (4, 3)


@pytest.mark.parametrize("named", [["SomethingOfMyOwn"], ["pipeline"], None])
def test_folder_that_names_no_class_of_transformers_is_loaded_as_its_base_model_without_code_of_a_tokenizer(
    damaged, named
):
    (damaged / "tokenizer_config.json").write_text('{"auto_map": {"AutoTokenizer": ["code.T", null]}}')
    edit_config(damaged, architectures=named)
    assert type(models.prepare(Model(name=str(damaged), device="cpu")).model).__name__ == "BertModel"


OWN_CODE = """
from transformers import BertConfig, BertForSequenceClassification, BertModel

class MineConfig(BertConfig):
    model_type = "mine"

class MineForTexts(BertForSequenceClassification):
    config_class = MineConfig

class Mine(BertModel):
    config_class = MineConfig
"""


@pytest.fixture
def own(damaged, tmp_path, monkeypatch) -> Path:
    """Return the folder of a model whose classes lie beside it."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", list(sys.path))  # where the cache of such modules is added
    (damaged / "own.py").write_text(OWN_CODE)
    classes = {
        "AutoConfig": "own.MineConfig",
        "AutoModel": "own.Mine",
        "AutoModelForSequenceClassification": "own.MineForTexts",
    }
    edit_config(damaged, auto_map=classes, architectures=["MineForTexts"], model_type="mine")
    return damaged


@pytest.mark.parametrize(("named", "kind"), [(["MineForTexts"], "MineForTexts"), (["Mine"], "Mine"), (None, "Mine")])
def test_trusted_code_of_a_model_is_run(own, named, kind):
    edit_config(own, architectures=named)
    prepared = models.prepare(Model(name=str(own), device="cpu"), trust_remote_code=True)
    assert type(prepared.model).__name__ == kind and not prepared.model.training


def pickled(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (pickled, "has no safetensors weights, only pytorch_model.bin; pickled weights"),
        (lambda folder: (folder / "model.safetensors").write_text("\0" * 100), "cannot be loaded as a model: "),
        (
            lambda folder: edit_config(folder, auto_map={"AutoModel": "modeling.Mine"}),
            r"brings Python code of its own \(auto_map\), .* add --trust-remote-code if you trust",
        ),
    ],
    ids=["pickled", "damaged", "code"],
)
def test_a_folder_that_is_no_model_or_brings_code_is_refused_with_the_way_out(damaged, damage, said):
    damage(damaged)
    with pytest.raises(InputError, match=said):
        models.prepare(Model(name=str(damaged), device="cpu"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_absent_gpu_is_a_lack_of_the_environment():
    with pytest.raises(EnvironmentLacksError, match=r"model.device: .* use model.device=cpu"):
        models.prepare(Model(device="cuda"))


# The script


@pytest.fixture
def run(monkeypatch, capsys, tmp_path) -> Command:
    """Return what runs the script without measuring the limits of the machine, and gives exit code, stdout, stderr."""
    monkeypatch.setattr(profiling, "limits_of_machine", lambda *args: None)
    monkeypatch.chdir(tmp_path)

    def start(*arguments: Any) -> tuple[int, str, str]:
        code = importlib.import_module("scripts.profile_layers").main([str(argument) for argument in arguments])
        return code, *capsys.readouterr()

    return start


def test_folder_is_profiled_from_end_to_end(run, folder, tmp_path):
    code, shown, notes = run("--model", folder, "--device", "cpu", "--output", tmp_path / "out", *SMALL)
    assert code in (0, 1), notes  # 1 only for coverage, which a loaded machine decides
    names = {path.name for path in (tmp_path / "out").iterdir() if path.is_file()}
    assert names == {f"tiny-bert_profile{suffix}" for suffix in FILES}
    assert (tmp_path / "out" / "logs" / "tiny-bert_profile.log").is_file()
    profile = read_profile(tmp_path / "out" / "tiny-bert_profile_summary.json")
    assert (profile.model_name, profile.num_runs, profile.device) == ("tiny-bert", 3, "cpu")
    metrics = (tmp_path / "out" / "tiny-bert_profile_metrics.jsonl").read_text(encoding="utf-8")
    lines = [json.loads(line) for line in metrics.splitlines()]
    assert {line["run"] for line in lines} == {0, 1, 2}
    assert "int64[2, 8]" in lines[0]["input_shapes"] and lines[0]["layer_name"] == "(model)"
    assert shown.startswith("tiny-bert: ") or shown.startswith("tiny-bert_profile: ")
    assert f"wrote {tmp_path / 'out' / 'tiny-bert_profile_dashboard.html'}" in shown
    again = run("--model", folder, "--device", "cpu", "--output", tmp_path / "json", *SMALL, "--json")[1]
    assert json.loads(again) == json.loads((tmp_path / "json" / "tiny-bert_profile_summary.json").read_text())
    assert (
        "tiny-bert of 2 × 8 tokens on cpu: 1 warm-up runs" in notes
        and "tiny-bert: 3 runs with probes and as many without" in notes
    )


def test_every_setting_of_the_file_is_its_default_and_files_go_where_no_step_moves_them_aside():
    assert load(LayerSettings, ROOT / "configs" / "layers.yaml", []) == LayerSettings()
    config = Config.model_validate(yaml.safe_load((ROOT / "configs" / "config.yaml").read_text(encoding="utf-8")))
    folder, layout = Path(LayerSettings().output.dir), Layout.of(config)
    assert folder.parent == layout.results
    for step in steps.STEPS:
        assert not [stale for stale in steps.stale_with(step, layout) if folder.is_relative_to(stale)]


class Recorded:
    """Stands in for loading and measuring; keeps what it is asked for."""

    def __init__(self, status: str) -> None:
        self.status = status
        self.wanted: Model | None = None
        self.is_trusted: bool | None = None
        self.shape: tuple[int, ...] = ()
        self.settings: profiling.Wanted | None = None

    def prepare(self, wanted: Model, *, trust_remote_code: bool) -> models.PreparedModel:
        self.wanted, self.is_trusted = wanted, trust_remote_code
        return models.PreparedModel(bart(), "some model", torch.device("cpu"))

    def profile(
        self, model: torch.nn.Module, inputs: dict[str, torch.Tensor], settings: Any, note: Any
    ) -> tuple[Any, Path]:
        self.shape, self.settings = tuple(inputs["input_ids"].shape), settings
        profile = type("Profile", (), {"coverage": type("Coverage", (), {"status": self.status})})
        return type("Report", (), {"profile": profile, "__str__": lambda self: "what was found"})(), Path("page.html")


@pytest.fixture
def recorded(monkeypatch) -> Callable[[str], Recorded]:
    def put(status: str) -> Recorded:
        stand_in = Recorded(status)
        monkeypatch.setattr(models, "prepare", stand_in.prepare)
        monkeypatch.setattr(profiling, "profile", stand_in.profile)
        return stand_in

    return put


@pytest.mark.parametrize(("status", "code"), [("pass", 0), ("warn", 0), ("not representative", 1)])
def test_only_a_profile_that_is_not_representative_ends_with_1(run, recorded, status, code):
    recorded(status)
    ended, shown, _ = run()
    assert ended == code and shown == "what was found\nwrote page.html and the files beside it\n"


def test_flags_override_the_command_line_which_overrides_the_file(run, recorded, tmp_path):
    (tmp_path / "my.yaml").write_text(
        "model: {architecture: bert-base, dtype: bfloat16}\n"
        "measurement: {num_samples: 7, warmup_runs: 2, batch_size: 3, sequence_length: 9}\n"
        "output: {dir: here, profile_name: mine}\n"
    )
    stand_in = recorded("pass")
    flags = ["--num-samples", 5, "--sequence-length", 11, "--output", "there"]
    run("--config", tmp_path / "my.yaml", "measurement.batch_size=4", "measurement.num_samples=8", *flags)
    assert stand_in.wanted == Model(architecture="bert-base", dtype="bfloat16")
    assert stand_in.shape == (4, 11)
    assert (stand_in.settings.num_runs, stand_in.settings.warmup_runs) == (5, 2)
    assert (stand_in.settings.folder, stand_in.settings.profile_name) == (Path("there"), "mine")


@pytest.mark.parametrize(
    ("flags", "wanted"),
    [
        (["--model", "org/model"], Model(name="org/model")),
        (["--architecture", "gpt2-xl"], Model(architecture="gpt2-xl")),
        (["--architecture", "gpt2-xl", "model.name=org/model"], Model(architecture="gpt2-xl")),
        (["--dtype", "float16", "--device", "cuda:1"], Model(dtype="float16", device="cuda:1")),
        (["--model", "2026"], Model(name="2026")),
    ],
)
def test_flags_choose_the_model_and_whether_its_code_is_trusted(run, recorded, flags, wanted):
    stand_in = recorded("pass")
    assert run(*flags)[0] == 0
    assert stand_in.wanted == wanted and not stand_in.is_trusted
    assert run("--trust-remote-code", *flags)[0] == 0 and stand_in.is_trusted


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--architecture", "gpt5"], "--architecture gpt5: no such preset; there are gpt2, gpt2-medium"),
        (["--dtype", "int8"], "model.dtype"),
        (["--device", "tpu"], "model.device"),
        (["--batch-size", "0"], "measurement.batch_size"),
        (["--num-samples", "-1"], "measurement.num_samples"),
        (["--model", "./not/there"], "neither a folder nor the name of a model"),
        (["output.profile_name=../up"], "output.profile_name"),
        (["measurement.batchsize=2"], "did you mean 'batch_size'"),
        (["model.trust_remote_code=true"], "trust_remote_code"),  # a flag of the command line alone
    ],
)
def test_wrong_input_ends_with_2_and_one_message(run, arguments, said):
    code, shown, notes = run(*arguments)
    assert (code, shown) == (2, "") and said in notes and "Traceback" not in notes


def test_memory_that_runs_out_is_answered_with_settings_of_this_tool(run, monkeypatch):
    def full(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(profiling, "profile", full)
    code, _, notes = run("--architecture", "distilgpt2", "--device", "cpu")
    assert (
        code == 1 and "out of memory (CUDA out of memory.); lower --batch-size, --sequence-length or --new-to" in notes
    )


def test_preset_and_model_together_are_wrong_usage(run):
    with pytest.raises(SystemExit) as ended:
        run("--model", "org/model", "--architecture", "gpt2")
    assert ended.value.code == 2


def test_model_of_the_hub_is_fetched_with_code_only_where_that_is_trusted(folder, monkeypatch):
    fetched = []
    monkeypatch.setattr(models.hub, "snapshot", lambda repository, files: fetched.append((repository, files)) or folder)
    for trusted in (False, True):
        prepared = models.prepare(Model(name="org/tiny", revision="v1", device="cpu"), trust_remote_code=trusted)
        assert (prepared.name, type(prepared.model).__name__) == ("org/tiny", "BertForSequenceClassification")
    (repository, files), (_, with_code) = fetched
    assert (repository.name, repository.revision) == ("org/tiny", "v1")
    assert set(with_code) - set(files) == {"*.py"} and "model*.safetensors" in files and "*.bin" not in with_code
