"""A model is found, checked and loaded so that batches and single texts get the same labels, or it is refused."""

import hashlib
import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.tiny_models import LABELS, WORDS, edit_config, save_bert, save_qwen
from utils.command.errors import EnvironmentLacksError, InputError
from utils.evaluation import planning
from utils.models import loading as models
from utils.models import source as model_source
from utils.quickstart import cache
from utils.settings.schema import Model
from utils.tracing.layers import models as layers

TEXTS = [" ".join(WORDS[: 1 + length % len(WORDS)] * (1 + length // 9)) for length in range(40)]


@pytest.fixture(scope="module")
def bert(tmp_path_factory) -> Path:
    return save_bert(tmp_path_factory.mktemp("bert"))


@pytest.fixture(scope="module")
def qwen(tmp_path_factory) -> Path:
    return save_qwen(tmp_path_factory.mktemp("qwen"))


@pytest.fixture
def copy(bert, tmp_path) -> Path:
    return Path(shutil.copytree(bert, tmp_path / "copy"))


def fetch(folder: Path | str, *, trust: bool = False, revision: str | None = None) -> models.ModelSource:
    wanted = Model(name=str(folder), revision=revision)
    return models.fetch(wanted, Path("unused"), trust_remote_code=trust, progress=lambda text: None)


def refusal(folder: Path | str, **how: object) -> str:
    with pytest.raises(InputError) as caught:
        fetch(folder, **how)
    assert caught.value.exit_code == 2 and "\n" not in str(caught.value)
    return str(caught.value)


def test_folder_is_found_in_both_ways_with_one_fingerprint_that_follows_weights_and_tokenizer_alone(copy):
    source = fetch(copy)
    assert source == models.locate(Model(name=str(copy)), Path("unused"))
    assert (source.origin, source.path, source.revision) == ("folder", copy, None)
    (copy / "README.md").write_text("About this model")
    assert fetch(copy).fingerprint == source.fingerprint
    edit_config(copy, classifier_dropout=0.5)
    changed = fetch(copy).fingerprint
    assert changed != source.fingerprint
    (copy / "model.safetensors").write_bytes((copy / "model.safetensors").read_bytes() + b" ")
    assert fetch(copy).fingerprint not in (source.fingerprint, changed)


def test_what_is_no_folder_of_a_model_is_refused_without_asking_the_hub(bert):
    for name in ("./absent", "/absent/model", "~/absent/model", "a/b/c", bert / "config.json"):
        assert "there is no such folder" in refusal(name)
    assert "model.revision is 'v1'" in refusal(bert, revision="v1")


INDEX = "model.safetensors.index.json"
SHARDS = json.dumps({"weight_map": {"a": "model.safetensors", "b": "model-00002-of-00002.safetensors"}})


@pytest.mark.parametrize(
    ("name", "content", "fault"),
    [
        ("config.json", None, "has no config.json; is it a model?"),
        *(("config.json", content, "config.json: ") for content in ("{", "[]", '"text"')),
        ("config.json", {"architectures": ["BertForMaskedLM"]}, "(config.json names BertForMaskedLM"),
        ("config.json", {"architectures": None}, "is not a sequence classifier (config.json names nothing"),
        ("config.json", {"id2label": {"0": "score"}}, "has 1 label"),
        ("config.json", {"id2label": None, "num_labels": 1}, "has 1 label"),
        ("config.json", {"problem_type": "multi_label_classification"}, "several labels per text"),
        ("tokenizer_config.json", {"auto_map": {"AutoTokenizer": ["code.T", None]}}, "--trust-remote-code"),
        (INDEX, SHARDS, "weights are incomplete, model-00002-of-00002.safetensors is missing"),
        *((INDEX, content, "model.safetensors.index.json: ") for content in ("{", "{}", "[]", '{"weight_map": 3}')),
        ("model.safetensors", "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n", "`git lfs pull`"),
    ],
)
def test_a_file_that_is_missing_damaged_or_of_another_kind_of_model_is_refused(copy, name, content, fault):
    path = copy / name
    if content is None:
        path.unlink()
    else:
        changed = isinstance(content, dict)
        path.write_text(json.dumps({**json.loads(path.read_text()), **content}) if changed else content)
    assert fault in refusal(copy)


def test_adapters_missing_tokenizers_and_pickled_weights_are_refused_with_the_way_out(copy):
    (copy / "model.safetensors").rename(copy / "pytorch_model.bin")
    message = refusal(copy)
    assert "has no safetensors weights, only pytorch_model.bin" in message and "Convert" in message
    (copy / "pytorch_model.bin").rename(copy / "model.safetensors")
    for path in copy.glob("tokenizer*"):
        path.unlink()
    assert "has no tokenizer" in refusal(copy) and "save_pretrained" in refusal(copy)
    (copy / "config.json").unlink()
    (copy / "adapter_config.json").write_text("{}")
    assert "merge it into its base model" in refusal(copy)


def test_an_adapter_beside_a_whole_model_would_redirect_it_and_is_refused(copy):
    (copy / "adapter_config.json").write_text('{"base_model_name_or_path": "some/other"}')
    assert "adapter_config.json" in refusal(copy) and "instead of the weights here" in refusal(copy)


def test_weights_from_the_hub_that_were_altered_in_the_cache_are_refused(copy, monkeypatch):
    weights = copy / "model.safetensors"
    blob = weights.rename(copy / hashlib.sha256(weights.read_bytes()).hexdigest())
    weights.symlink_to(blob)
    monkeypatch.setattr(model_source.hub, "snapshot", lambda *arguments, **options: copy)
    assert models.locate(Model(name="some/model"), Path("unused")).origin == "hub"
    blob.write_bytes(blob.read_bytes()[:-1] + b"?")
    with pytest.raises(InputError, match="was changed or damaged after it was downloaded"):
        models.locate(Model(name="some/model"), Path("unused"))


def indexed(folder: Path, name: str, at: Path | None = None) -> Path:
    """Let the index name the weights of `folder` as `name`, and move them to `at`, or to that path in the folder."""
    weights = folder / "model.safetensors"
    names = dict.fromkeys(load_file(weights), name)
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": names}))
    target = at or folder / name
    target.parent.mkdir(parents=True, exist_ok=True)
    return weights.rename(target)


@pytest.mark.parametrize("name", ["../outside/part.safetensors", "sub/../../outside/part.safetensors", "{outside}"])
def test_weights_that_an_index_names_out_of_the_folder_are_refused(copy, tmp_path, name):
    (copy / "sub").mkdir()
    outside = tmp_path / "outside" / "part.safetensors"
    named = name.format(outside=outside)
    indexed(copy, named, outside)
    for ways in (refusal, layers_refusal):
        assert f"{copy / INDEX}: names {named!r}, which leads out of the model's folder; copy" in ways(copy)
    with pytest.raises(InputError, match="leads out"):
        models.load(models.ModelSource("x", copy, "folder", None, ""), "cpu")  # as of a plan


def layers_refusal(folder: Path) -> str:
    with pytest.raises(InputError) as caught:
        layers.prepare(layers.Model(name=str(folder), device="cpu"))
    return str(caught.value)


@pytest.mark.parametrize("link", ["model.safetensors", "part.safetensors", "sub"])
def test_weights_that_a_link_leads_to_out_of_the_folder_are_refused(copy, tmp_path, link):
    outside = tmp_path / "outside" / "part.safetensors"
    if link == "model.safetensors":
        outside.parent.mkdir()
        (copy / link).rename(outside)
    else:
        indexed(copy, "sub/part.safetensors" if link == "sub" else link, outside)
    (copy / link).symlink_to(outside.parent if link == "sub" else outside)
    for ways in (refusal, layers_refusal):
        assert f"leads to {outside}, outside of the model's folder" in ways(copy)


def test_a_snapshot_of_the_hubs_cache_is_a_folder_whose_weights_are_links_to_its_blobs(bert, tmp_path):
    repository = tmp_path / "models--some--model"
    snapshot = Path(shutil.copytree(bert, repository / "snapshots" / "abc"))
    (repository / "blobs").mkdir()
    (snapshot / "model.safetensors").rename(repository / "blobs" / "0123")
    (snapshot / "model.safetensors").symlink_to("../../blobs/0123")
    link = tmp_path / "link"
    link.symlink_to(snapshot)
    assert fetch(snapshot).fingerprint == fetch(link).fingerprint == fetch(bert).fingerprint
    assert models.load(fetch(link), "cpu").source.path == link


def test_weights_in_a_subfolder_are_loaded_from_there_and_hashed_under_that_path(copy):
    part = indexed(copy, "sub/part.safetensors")
    before, hashes = fetch(copy), planning.model_hashes(copy)
    assert models.load(before, "cpu").model.classifier.bias.shape == (len(LABELS),)
    shutil.copy(part, copy / "part.safetensors")  # of the same name, and loaded by nobody
    assert fetch(copy).fingerprint == before.fingerprint and planning.model_hashes(copy) == hashes
    weights = load_file(part)
    save_file({**weights, "classifier.bias": torch.full((3,), 7.0)}, part, {"format": "pt"})
    assert fetch(copy).fingerprint != before.fingerprint
    assert planning.model_hashes(copy)[0] != hashes[0] and planning.model_hashes(copy)[1] == hashes[1]
    assert models.load(fetch(copy), "cpu").model.classifier.bias.tolist() == [7.0] * 3


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("pytorch_model.bin", "names 'pytorch_model.bin', which is no .safetensors file; others can run code"),
        ("\0.safetensors", "which no file is called"),
        ("\ud800.safetensors", "which no file is called"),
        ("loop.safetensors", "weights are incomplete, loop.safetensors is missing"),
    ],
)
def test_an_index_that_names_what_is_no_file_of_safetensors_is_refused(copy, name, fault):
    (copy / "loop.safetensors").symlink_to("loop.safetensors")
    indexed(copy, name, copy / "moved")
    assert fault in refusal(copy)


def test_whole_weights_beside_an_index_are_loaded_and_are_what_is_hashed(copy):
    shutil.copy(copy / "model.safetensors", copy / "part.safetensors")
    (copy / INDEX).write_text(json.dumps({"weight_map": {"a": "part.safetensors"}}))
    names = {path.name for path in model_source.weight_files(copy)}
    assert names == {"config.json", "model.safetensors"}


@pytest.mark.parametrize(
    ("name", "changes", "is_refused"),
    [
        ("other.safetensors", {"transformers_weights": "other.safetensors"}, True),  # named by config.json
        ("shard-00000-model-00001-of-00001.safetensors", {}, False),  # of a distributed checkpoint, which goes first
    ],
)
def test_other_weights_that_loaders_would_take_are_not_loaded_since_they_are_not_hashed(
    copy, name, changes, is_refused
):
    weights = load_file(copy / "model.safetensors")
    edit_config(copy, **changes)
    before = fetch(copy)
    save_file({**weights, "classifier.bias": torch.full((3,), 7.0)}, copy / name, {"format": "pt"})
    assert fetch(copy) == before
    if not is_refused:
        assert torch.equal(models.load(before, "cpu").model.classifier.bias, weights["classifier.bias"])
        return
    with pytest.raises(InputError, match=f"cannot load the model from {copy}: ") as caught:
        models.load(before, "cpu")
    assert "boundby-model" not in str(caught.value)


@pytest.mark.parametrize(
    "changes", [{"auto_map": {"AutoModel": "code.Model"}}, {"_attn_implementation_internal": "someone/kernel"}]
)
def test_code_that_comes_with_a_model_is_refused_without_the_flag(copy, changes):
    edit_config(copy, **changes)
    assert "--trust-remote-code" in refusal(copy)
    assert fetch(copy, trust=True) == models.locate(Model(name=str(copy)), Path("unused"))
    with pytest.raises(InputError, match="--trust-remote-code"):
        models.load(models.locate(Model(name=str(copy)), Path("unused")), "cpu")


def test_quickstart_is_prepared_by_step_01_and_only_located_later(monkeypatch, tmp_path):
    prepared = SimpleNamespace(model_dir=tmp_path, content_hash="c" * 64)
    asked = []
    monkeypatch.setattr(cache, "prepare", lambda folder, progress: asked.append(folder) or prepared, raising=False)
    monkeypatch.setattr(cache, "is_ready", lambda folder: bool(asked), raising=False)
    wanted = Model(name="quickstart")
    with pytest.raises(InputError, match="scripts/01_download_data.py"):
        models.locate(wanted, tmp_path)
    fetched = models.fetch(wanted, tmp_path, trust_remote_code=False, progress=lambda text: None)
    assert fetched == models.locate(wanted, tmp_path)
    assert (fetched.origin, fetched.fingerprint, asked[0]) == ("quickstart", "c" * 64, tmp_path)


@pytest.mark.parametrize(("name", "dtype"), [("float32", torch.float32), ("bfloat16", torch.bfloat16)])
def test_model_has_the_dtype_asked_for_and_is_in_eval_mode(bert, name, dtype):
    loaded = models.load(fetch(bert), "cpu", name)
    assert {parameter.dtype for parameter in loaded.model.parameters()} == {dtype}
    assert not loaded.model.training and loaded.dtype == name and loaded.device == torch.device("cpu")
    assert loaded.tokenizer.padding_side == "right"
    with pytest.raises(EnvironmentLacksError, match="model.device: .*use model.device=cpu"):
        models.load(fetch(bert), "cuda:99", name)


def test_loading_is_silent_timed_and_has_a_public_name(bert, capfd):
    readings = iter([10.0, 12.5])
    assert models.load(fetch(bert), torch.device("cpu"), clock=lambda: next(readings)).load_time_s == 2.5
    model, tokenizer = models.load_model_and_tokenizer(str(bert), device="cpu", dtype="float32")
    assert model.config.num_labels == len(LABELS) and tokenizer("good").input_ids
    assert capfd.readouterr() == ("", "")


def test_damaged_weights_a_damaged_tokenizer_or_one_of_another_model_are_refused(copy):
    path = copy / "tokenizer.json"
    whole, content = path.read_text(), (copy / "model.safetensors").read_bytes()
    path.write_text(whole.replace('"[PAD]":2', '"[PAD]":900').replace('"[PAD]": 2', '"[PAD]": 900'))
    with pytest.raises(InputError, match="has id 900, but the model knows 15 tokens"):
        models.load(fetch(copy), "cpu")
    path.write_text(whole)
    (copy / "model.safetensors").write_bytes(content[: len(content) // 2])
    with pytest.raises(InputError, match="cannot load the model from"):
        models.load(fetch(copy), "cpu")
    path.write_text("{")
    with pytest.raises(InputError, match="cannot load its tokenizer from"):
        models.load(fetch(copy), "cpu")


def test_head_of_another_size_or_random_is_refused(copy):
    weights = load_file(copy / "model.safetensors")
    save_file({name: value for name, value in weights.items() if "classifier" not in name}, copy / "model.safetensors")
    with pytest.raises(InputError, match="the weights lack classifier.bias, classifier.weight, which would be random"):
        models.load(fetch(copy), "cpu")
    save_file(weights, copy / "model.safetensors", {"format": "pt"})
    edit_config(copy, id2label={"0": "a", "1": "b"}, label2id={"a": 0, "b": 1})
    with pytest.raises(InputError, match=r"bias is \(\d+,\) in its weights, but config.json asks for \(2,\)"):
        models.load(fetch(copy), "cpu")


@pytest.mark.parametrize("folder", ["bert", "qwen"])
@pytest.mark.parametrize("task", ["sequence_classification", "sentence_embeddings"])
def test_a_configuration_with_fewer_layers_than_the_weights_is_refused(folder, task, request, tmp_path):
    copy = Path(shutil.copytree(request.getfixturevalue(folder), tmp_path / "copy"))
    edit_config(copy, num_hidden_layers=1, layer_types=None, tie_word_embeddings=False)
    with pytest.raises(
        InputError, match=r"have no place in the model.* such as .*layers?\.1\..*save_pretrained"
    ) as caught:
        models.load(replace(fetch(copy), task=task), "cpu")
    assert "\n" not in str(caught.value)
    assert "of its weights have no place in the model that config.json describes" in layers_refusal(copy)


def add_weights(folder: Path, **more: torch.Tensor) -> None:
    path = folder / "model.safetensors"
    save_file({**load_file(path), **more}, path, {"format": "pt"})


LAYER = "bert.encoder.layer.0.attention.self."


@pytest.mark.parametrize(
    "name",
    [
        f"{LAYER}query.lora_A.default.weight",  # of an adapter that nobody has merged
        f"{LAYER}query.SCB",  # the scales of weights in eight bits whose configuration is gone
        "bert.encoder.emb_norm.weight",
        "encoder.layer.2.output.dense.bias",  # of a base model, whose names have no prefix
        "classifier.dense.weight",
    ],
)
def test_a_weight_that_has_no_place_in_a_part_of_the_model_is_refused(copy, name):
    add_weights(copy, **{name: torch.ones(4)})
    with pytest.raises(InputError, match=f": 1 of its weights have no place in .* such as {name}, and another"):
        models.load(fetch(copy), "cpu")


def test_heads_of_other_tasks_and_what_is_no_parameter_may_stay_unused(copy, qwen, tmp_path):
    constants = {
        "bert.embeddings.position_ids": torch.arange(4),
        "bert.embeddings.token_type_ids": torch.zeros(4),
        f"{LAYER}bias": torch.ones(4, dtype=torch.uint8),  # as GPT-Neo's mask is called
        f"{LAYER}masked_bias": torch.tensor(-1e9),
        f"{LAYER}rotary_emb.inv_freq": torch.ones(4),
    }
    heads = ["cls.predictions.bias", "lm_head.decoder.weight", "qa_outputs.bias"]
    add_weights(copy, **constants, **{name: torch.ones(4) for name in heads})
    assert models.load(fetch(copy), "cpu").model.num_labels == len(LABELS)
    assert (
        type(layers.prepare(layers.Model(name=str(copy), device="cpu")).model).__name__
        == "BertForSequenceClassification"
    )
    other = Path(shutil.copytree(qwen, tmp_path / "other"))
    parts = ["lm_head.weight", "model.pooler.dense.bias", "model.visual.blocks.0.norm.bias", "mtp.layers.0.norm.weight"]
    add_weights(other, **{name: torch.ones(4) for name in parts})
    assert models.load(fetch(other), "cpu").model.num_labels == len(LABELS)


@pytest.mark.parametrize("folder", ["bert", "qwen"])
def test_batches_give_the_labels_of_single_texts(folder, request):
    loaded = models.load(fetch(request.getfixturevalue(folder)), "cpu")
    agreement = models.agreement(loaded, TEXTS, max_length=64)
    assert (agreement.rows, agreement.same_labels, agreement.share) == (40, 40, 1.0)
    assert agreement.max_abs_logit_difference < 1e-4 and agreement.lowest_margin > 0
    agreement.require(1.0)
    assert agreement.as_dict()["share"] == 1.0


def test_the_texts_of_the_agreement_hold_the_shortest_and_the_longest_and_are_the_same_each_time():
    texts = ["x" * (5 + row % 7) for row in range(5000)]
    texts[4321], texts[1234] = "x" * 400, "x"
    chosen = models.agreement_texts(texts)
    assert len(chosen) == 64 and {"x" * 400, "x"} < set(chosen)
    assert models.agreement_texts(texts) == chosen
    assert sorted(models.agreement_texts(texts[:3])) == sorted(texts[:3])


def test_answers_that_are_wrong_or_no_numbers_fail_the_agreement(qwen, bert):
    loaded = models.load(fetch(qwen), "cpu")
    assert loaded.tokenizer.pad_token == "[END]"  # a decoder without a padding token pads with its end token
    assert loaded.model.config.pad_token_id == loaded.tokenizer.pad_token_id
    loaded.model.config.pad_token_id = WORDS.index("a") + 3
    agreement = models.agreement(loaded, TEXTS, max_length=64)
    assert agreement.share < 1
    with pytest.raises(InputError, match=f"agree on {agreement.same_labels} of 40 texts.*pad_token_id"):
        agreement.require(0.995)
    loaded = models.load(fetch(bert), "cpu")
    with torch.no_grad():
        loaded.model.classifier.bias.fill_(float("nan"))
    with pytest.raises(InputError, match="gives NaN or infinity in float32"):
        models.agreement(loaded, TEXTS, max_length=64)


def test_limits_of_length_are_those_of_model_and_tokenizer_without_positions_kept_for_padding(bert, capfd):
    from transformers import RobertaConfig, RobertaForSequenceClassification

    def loaded_as(model):
        tokenizer = SimpleNamespace(model_max_length=10**30)
        return models.LoadedModel(model, tokenizer, None, torch.device("cpu"), "float32", 0.0)

    config = {"vocab_size": 20, "max_position_embeddings": 66, "hidden_size": 16, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "intermediate_size": 16, "pad_token_id": 1}
    model = RobertaForSequenceClassification(RobertaConfig(**config, **heads))
    length, _ = models.effective_max_length(loaded_as(model), 512)
    assert length == 64
    model(torch.ones((1, length), dtype=torch.long) * 5)
    with pytest.raises((IndexError, RuntimeError)):
        model(torch.ones((1, length + 1), dtype=torch.long) * 5)
    model = torch.nn.Linear(1, 1)
    model.config = SimpleNamespace()
    assert models.effective_max_length(loaded_as(model), 4096) == (4096, None)
    count = models.token_counter(fetch(bert))
    assert count(["good", "good bad", "good " * 500]) == [1, 2, 500]
    assert capfd.readouterr().err == ""
    loaded = models.load(fetch(bert), "cpu")
    assert models.effective_max_length(loaded, 64) == (64, None)
    length, reason = models.effective_max_length(loaded, 512)
    assert length == 64 and "profiling.max_length is 512, but the model takes 64 tokens" in reason
    loaded.tokenizer.model_max_length = 32
    assert models.effective_max_length(loaded, 512)[0] == 32


def test_summary_shows_every_quantity_with_its_unit():
    labels = {"num_labels": ("Labels", 23)}
    summary = models.ModelSummary(
        "qwen2", 494_033_920, 494_033_920, 1_976_135_680, "float32", labels, max_positions=32_768, load_time_s=4.8149
    )
    shown = [line.partition(": ")[2] for line in summary.lines()[2:-1]]
    parameters = "494,033,920 (494.03M)"
    assert shown == ["qwen2", parameters, parameters, "1,976.14 MB (float32)", "23", "32,768 tokens", "4.81 s"]
    assert "no limit" in replace(summary, max_positions=None).lines()[7]
    assert summary.as_dict()["size_mb"] == 1976.13568 and summary.as_dict()["type"] == "qwen2"


def test_summary_counts_parameters_buffers_and_what_is_trainable(bert):
    loaded = models.load(fetch(bert), "cpu", "bfloat16")
    loaded.model.classifier.bias.requires_grad_(False)
    summary = models.summarize(loaded)
    total = sum(parameter.numel() for parameter in loaded.model.parameters())
    buffers = sum(buffer.numel() * buffer.element_size() for buffer in loaded.model.buffers())
    assert summary.parameters_total == total and summary.parameters_trainable == total - len(LABELS)
    assert summary.size_bytes == 2 * total + buffers and buffers > 0
    assert (summary.model_type, summary.as_dict()["num_labels"], summary.max_positions) == ("bert", 3, 64)


def test_agreement_is_told_of_smaller_batches_where_memory_is_short(bert, monkeypatch):
    loaded = models.load(fetch(bert), "cpu")
    sizes, own = [], models.forward

    def short(model, batch):
        sizes.append(len(batch.rows))
        if sizes[-1] > 4:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return own(model, batch)

    monkeypatch.setattr(models, "forward", short)
    assert models.agreement(loaded, TEXTS, max_length=64).share == 1
    assert sizes[40:42] == [16, 8] and set(sizes[42:]) == {4}
