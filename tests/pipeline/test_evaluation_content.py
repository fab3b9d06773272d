"""A result rests on what was read: texts that are edited at any moment end in an error, never in a number."""

import importlib
import json
import os
from pathlib import Path

import pytest
from msgspec import structs

from boundby import files
from boundby.machine import environment
from tests import evaluation_workplace as workplace
from tests.tiny_models import save_bert
from utils.baseline import sweep as baseline
from utils.command import contents
from utils.command.artifacts import EvaluationFolder, Layout
from utils.command.errors import InputError
from utils.data import Rows
from utils.evaluation import parts, planning, shards
from utils.evaluation import plan as plans
from utils.evaluation import run as evaluation
from utils.settings.schema import Config
from utils.steps import steps


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("content")
    return folder, workplace.prepare(folder, workplace.texts())


@pytest.fixture
def evaluation_folder(made, tmp_path, monkeypatch):
    """A folder for results of its own, the command line of an evaluation there, and a dataset that gets restored."""
    monkeypatch.setitem(planning.SHARD_ROWS, "cpu", workplace.SHARD_ROWS)
    dataset = made[0] / "data" / "val_df.csv"
    before = dataset.read_bytes()
    yield EvaluationFolder(tmp_path / "evaluation"), [*made[1], f"output.results_dir={tmp_path}"], dataset
    dataset.write_bytes(before)


def edit_texts(dataset: Path) -> None:
    status, content = dataset.stat(), dataset.read_bytes()
    head, last = content[: content.rindex(b"\n", 0, -1)], content[content.rindex(b"\n", 0, -1) :]
    with dataset.open("r+b") as file:  # the same inode
        file.write(head + last.replace(b" ", b"-"))
    os.utime(dataset, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert dataset.stat().st_size == status.st_size and dataset.read_bytes() != content


def test_texts_edited_after_the_plan_are_not_predicted_and_edited_before_the_end_give_no_number(
    evaluation_folder,
):
    folder, settings, dataset = evaluation_folder
    before = dataset.read_bytes()
    assert workplace.evaluate(settings, "plan") == [0]
    edit_texts(dataset)
    assert workplace.evaluate(settings, "run", "finalize") == [2, 2]
    with pytest.raises(InputError, match="planned"):
        shards.ShardPredictor.open(folder.plan)
    assert workplace.results(folder.path) == {}
    dataset.write_bytes(before)
    assert workplace.evaluate(settings, "run") == [0]
    edit_texts(dataset)
    with pytest.raises(InputError, match="planned"):
        evaluation.finalize(plans.load(folder), folder, dataset)
    assert not folder.metrics.exists() and not folder.predictions.exists()


def test_texts_edited_between_two_shards_end_the_second(evaluation_folder):
    folder, settings, dataset = evaluation_folder
    assert workplace.evaluate(settings, "plan") == [0]
    predictor = shards.ShardPredictor.open(folder.plan)
    assert predictor.predict_shard(0).status == "predicted"
    edit_texts(dataset)
    with pytest.raises(InputError, match="rows 32 to 39"):
        predictor.predict_shard(2)
    assert list(workplace.results(folder.path)) == ["part-00000.parquet"]


def test_a_part_proves_which_texts_it_was_made_of(evaluation_folder):
    folder, settings, _ = evaluation_folder
    assert workplace.evaluate(settings, "plan", "run") == [0, 0]
    plan = plans.load(folder)
    part = parts.load(folder, plan, plan.shards[0])
    other = structs.replace(part.record, texts_sha256=Rows(None, ["x"], None).texts_sha256)
    parts.commit(folder.part(0).read_bytes(), other, folder)
    assert parts.load(folder, plan, plan.shards[0]) is None


def test_another_model_at_the_planned_place_is_refused_by_every_worker(evaluation_folder):
    folder, settings, _ = evaluation_folder
    assert workplace.evaluate(settings, "plan") == [0]
    weights = Path(plans.load(folder).places.model) / "model.safetensors"
    before = weights.read_bytes()
    weights.write_bytes(before[:-4] + b"\0\0\x80\x3f")
    try:
        with pytest.raises(InputError, match="another model"):
            shards.ShardPredictor.open(folder.plan)
    finally:
        weights.write_bytes(before)
    weights.with_name("README.md").write_text("notes beside the weights change nothing")
    assert shards.ShardPredictor.open(folder.plan).predict_shard(0).status == "predicted"


def test_weights_written_into_while_they_are_used_commit_nothing(evaluation_folder):
    folder, settings, _ = evaluation_folder
    assert workplace.evaluate(settings, "plan") == [0]
    predictor = shards.ShardPredictor.open(folder.plan)
    weights = Path(plans.load(folder).places.model) / "model.safetensors"
    before = weights.read_bytes()
    weights.write_bytes(before[:-4] + b"\0\0\x80\x3f")
    try:
        with pytest.raises(InputError, match="another model"):
            predictor.predict_shard(0)
    finally:
        weights.write_bytes(before)
    assert workplace.results(folder.path) == {}


def test_code_that_was_edited_since_the_plan_is_refused(evaluation_folder, monkeypatch):
    folder, settings, _ = evaluation_folder
    assert workplace.evaluate(settings, "plan") == [0]
    planned = planning.versions()
    monkeypatch.setattr(planning, "versions", lambda: {**planned, "boundby_code": "edited"})
    assert workplace.evaluate(settings, "run") == [2]
    with pytest.raises(InputError, match="boundby_code is edited"):
        shards.ShardPredictor.open(folder.plan)
    assert workplace.evaluate(settings, "finalize") == [1]  # it computes nothing: only the parts are missing


@pytest.mark.parametrize("moment", ["plan", "predict", "conclude", "after it"])
def test_step_02_ends_without_a_number_when_texts_change_during_it_and_runs_again_when_they_did_after_it(
    evaluation_folder, monkeypatch, capsys, moment
):
    folder, settings, dataset = evaluation_folder
    monkeypatch.setattr(baseline, "find_limits", lambda *_: None)  # which measures the limits of this machine
    step, results = importlib.import_module("scripts.02_baseline_inference").main, folder.path.parent
    if moment == "after it":
        assert step([*settings, *workplace.QUICK]) == 0
        edit_texts(dataset)
    else:
        work = getattr(evaluation, moment)
        with monkeypatch.context() as patch:
            patch.setattr(evaluation, moment, lambda *given, **options: edit_texts(dataset) or work(*given, **options))
            assert step([*settings, *workplace.QUICK]) == 2
        said = capsys.readouterr().err
        assert str(dataset) in said and "01_download_data.py" in said
        assert json.loads((results / "baseline_metrics.json").read_text())["full_dataset_metrics"] is None
        assert not (results / ".receipts" / "02.json").exists()
    assert step([*settings, *workplace.QUICK, "--resume"]) == 2
    assert moment != "after it" or "step 02: runs (inputs.dataset changed" in capsys.readouterr().err


def test_a_hash_is_read_again_while_the_file_may_change_under_the_same_times(tmp_path, monkeypatch):
    path, read, sha256 = tmp_path / "file", [], files.sha256
    path.write_text("one")
    monkeypatch.setattr(files, "sha256", lambda name: read.append(name) or sha256(name))
    changed_ns = path.stat().st_ctime_ns
    monkeypatch.setattr(contents.time, "time_ns", lambda: changed_ns + contents.SETTLED_NS)
    assert contents.sha256(path) == contents.sha256(path) and len(read) == 2
    monkeypatch.setattr(contents.time, "time_ns", lambda: changed_ns + contents.SETTLED_NS + 1)
    assert contents.sha256(path) == contents.sha256(path) and len(read) == 3
    path.write_text("two")
    assert contents.sha256(path) == sha256(path)


@pytest.fixture
def large(tmp_path, monkeypatch):
    """A file that counts as large, hashed long after it was written; gives it and what is read of it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(contents, "LARGE_BYTES", 1)
    monkeypatch.setattr(contents.time, "time_ns", lambda now=contents.time.time_ns: now() + 10 * contents.SETTLED_NS)
    path, read, sha256 = tmp_path / "file", [], files.sha256
    path.write_text("one")
    monkeypatch.setattr(files, "sha256", lambda name: read.append(name) or sha256(name))
    return path, read, sha256


def in_another_process(monkeypatch) -> None:
    monkeypatch.setattr(contents, "_known", {})


def test_a_large_file_is_read_once_for_all_processes(large, monkeypatch):
    path, read, sha256 = large
    digest = contents.sha256(path)
    in_another_process(monkeypatch)
    assert contents.sha256(path) == digest == sha256(path) and len(read) == 1


@pytest.mark.parametrize("way", ["in place", "moved over"])
def test_content_swapped_under_the_same_size_and_time_is_read_again(large, monkeypatch, way):
    path, _, sha256 = large
    before, status = contents.sha256(path), path.stat()
    other = path if way == "in place" else path.with_name("other")
    other.write_text("two")
    os.utime(other, ns=(status.st_atime_ns, status.st_mtime_ns))
    other.replace(path)
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (status.st_size, status.st_mtime_ns)
    assert contents.sha256(path) == sha256(path) != before
    in_another_process(monkeypatch)
    assert contents.sha256(path) == sha256(path)


@pytest.mark.parametrize("damage", [b"", b"\xff", b"[1]", b'{"/x": 3}', b"[" * 100_000])
def test_a_damaged_list_of_hashes_is_as_good_as_none(large, monkeypatch, damage):
    path, _, sha256 = large
    contents.sha256(path)
    in_another_process(monkeypatch)
    next(path.parent.glob("cache/boundby/*")).write_bytes(damage)
    assert contents.sha256(path) == sha256(path)


def test_a_step_is_outdated_by_swapped_weights_and_by_nothing_else_that_lies_beside_them(tmp_path):
    model = save_bert(tmp_path / "model")
    config = Config.model_validate({"model": {"name": str(model)}, "dataset": {"file": "texts.csv"}})
    layout = Layout.of(config)
    before = steps.parts("02", config, layout)
    for name in ("README.md", ".DS_Store", "README.txt", "trainer_state.json"):
        (model / name).write_text("x")
    assert steps.difference(before, steps.parts("02", config, layout)) is None
    weights = model / "model.safetensors"
    content, status = weights.read_bytes(), weights.stat()
    weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    os.utime(weights, ns=(status.st_atime_ns, status.st_mtime_ns))
    changed = steps.difference(before, steps.parts("02", config, layout))
    assert changed and changed.startswith(f"inputs.model_files.{weights} changed")


def other_package(name: str, version: str | None):
    def replaced(patch: pytest.MonkeyPatch) -> None:
        known = environment._version
        patch.setattr(environment, "_version", lambda package: version if package == name else known(package))

    return replaced


def other_answer(target: str, answer: object):
    return lambda patch: patch.setattr(target, lambda: answer)


UNLIKE = {  # what makes a worker round otherwise: how it is seen, and told
    "a library less": (other_package("pyarrow", None), "versions.pyarrow is None, planned was "),
    "a library more": (other_package("kernels", "0.9"), "versions.kernels is 0.9, planned was None"),
    "another torch": (other_package("torch", "2.9.0"), "versions.torch is 2.9.0, planned was "),
    "another build": (other_answer("utils.evaluation.planning.torch_build", "b"), "versions.torch_build is b, planned"),
    "another libc": (
        other_answer("boundby.machine.environment.libc", "musl 1"),
        "versions.libc is musl 1, planned was ",
    ),
    "other kernels of torch": (
        other_answer("torch.backends.cpu.get_cpu_capability", "DEFAULT"),
        "arithmetic.capability is DEFAULT, planned was ",
    ),
    "other instructions": (
        other_answer("boundby.machine.environment.instructions", ("avx", "new")),
        "arithmetic.instructions lacks ",
    ),
    "kernels of oneDNN": (
        lambda patch: patch.setenv("ONEDNN_MAX_CPU_ISA", "SSE41"),
        "versions.ONEDNN_MAX_CPU_ISA is SSE41, planned was None",
    ),
    "a limit of threads": (
        lambda patch: patch.setenv("OMP_THREAD_LIMIT", "1"),
        "versions.OMP_THREAD_LIMIT is 1, planned was None",
    ),
    "switches of TF32": (
        lambda patch: patch.setenv("NVIDIA_TF32_OVERRIDE", "1"),
        "versions.NVIDIA_TF32_OVERRIDE is 1, planned was None",
    ),
}


@pytest.mark.parametrize("unlike", UNLIKE)
def test_a_worker_that_may_round_otherwise_is_refused_in_a_line_that_names_the_difference(
    evaluation_folder, monkeypatch, capsys, unlike
):
    folder, settings, _ = evaluation_folder
    differs, message = UNLIKE[unlike]
    assert workplace.evaluate(settings, "plan", "run --shards 0/3") == [0, 0]
    left = workplace.results(folder.path)
    with monkeypatch.context() as patch:
        differs(patch)
        assert workplace.evaluate(settings, "run", "plan") == [2, 2]
        assert capsys.readouterr().err.count(message) == 2
        with pytest.raises(InputError, match="not such a machine as was planned for") as refused:
            shards.ShardPredictor.open(folder.plan)
        said = str(refused.value)
        assert message in said and "--anew" in said and len(said.splitlines()) == 1
        assert workplace.evaluate(settings, "finalize") == [1]  # it computes nothing: only parts are missing
        assert workplace.results(folder.path) == left
    assert workplace.evaluate(settings, "run", "finalize") == [0, 0]


def test_step_02_that_may_round_otherwise_starts_anew_on_resume_and_says_why(evaluation_folder, monkeypatch, capsys):
    monkeypatch.setattr(baseline, "find_limits", lambda *_: None)  # which measures the limits of this machine
    folder, settings, _ = evaluation_folder
    step = importlib.import_module("scripts.02_baseline_inference").main
    assert workplace.evaluate(settings, "plan", "run --shards 0/3") == [0, 0]
    UNLIKE["a library more"][0](monkeypatch)
    assert step([*settings, *workplace.QUICK, "--resume"]) == 0
    assert "evaluation starts anew (versions.kernels is 0.9, planned was None)" in capsys.readouterr().err
    assert plans.load(folder).identity.versions["kernels"] == "0.9"
    assert len(list(folder.path.parent.glob("previous/*/evaluation/part-*"))) == 1


def test_lists_that_differ_are_told_by_what_is_lacking_and_what_is_besides(evaluation_folder):
    folder, settings, _ = evaluation_folder
    assert workplace.evaluate(settings, "plan") == [0]
    planned = plans.load(folder).identity
    others = {
        (*planned.labels, "new"): "labels has new besides",
        ("new", *planned.labels[1:]): f"labels lacks {planned.labels[0]} and has new besides",
        planned.labels[::-1]: f"labels is {planned.labels[::-1]}, planned was {planned.labels}",
    }
    differences = {labels: plans.differences(planned, structs.replace(planned, labels=labels)) for labels in others}
    assert {labels: [text[:40] for text in texts] for labels, texts in differences.items()} == {
        labels: [text[:40]] for labels, text in others.items()
    }
