"""What was finished is taken up by step 02 and its report; what is to be done anew comes back from nowhere."""

import importlib
import json
from pathlib import Path

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from tests import evaluation_workplace as workplace
from utils.baseline import sweep as baselines
from utils.command.artifacts import EvaluationFolder
from utils.evaluation import plan as plans
from utils.evaluation import planning


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return workplace.prepare(tmp_path_factory.mktemp("anew"), workplace.texts())


@pytest.fixture
def at(made, tmp_path, monkeypatch):
    """Return the folder and the command line of a runner of that name, and what its store holds."""
    monkeypatch.setitem(planning.SHARD_ROWS, "cpu", workplace.SHARD_ROWS)

    def runner(name: str, *more: str) -> tuple[EvaluationFolder, list[str]]:
        return EvaluationFolder(tmp_path / name / "evaluation"), [*made, f"output.results_dir={tmp_path / name}", *more]

    yield runner
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]


def baseline(settings: list[str], *flags: str) -> int:
    return importlib.import_module("scripts.02_baseline_inference").main([*settings, *workplace.QUICK, *flags])


def starts(folder: EvaluationFolder) -> list[float]:
    return [json.loads(path.read_text())["started_s"] for path in sorted(folder.path.glob("cost-*.json"))]


def stored(url: str, earlier: bool = False) -> set[str]:
    """Return the names of the files of the evaluation in a store, or of the earlier ones."""
    system, root = fsspec.core.url_to_fs(url)
    positions = [Path(path).relative_to(root) for path in system.find(root)]
    return {path.name for path in positions if (path.parts[0] == "previous" if earlier else len(path.parts) == 1)}


def test_step_02_resumes_a_finished_evaluation_and_without_resume_makes_another(at, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(baselines, "find_limits", lambda *_: None)  # which measures the limits of this machine
    store = f"file://{tmp_path}/store"
    folder, settings = at("one", f"evaluation.storage={store}")
    assert workplace.evaluate(settings, *workplace.WHOLE) == [0, 0, 0]
    before, bytes_before = starts(folder), workplace.results(folder.path)
    assert baseline(settings, "--resume") == 0
    assert starts(folder) == before and workplace.results(folder.path) == bytes_before
    metrics = json.loads((folder.path.parent / "baseline_metrics.json").read_text())
    assert metrics["full_dataset_metrics"]["plan"] == plans.load(folder).fingerprint
    assert not (folder.path.parent / "previous").exists() and not stored(store, earlier=True)
    assert baseline(settings, "--resume", "evaluation.limit=30") == 0  # another evaluation, told by its plan
    assert "rows is 30, planned was 40" in capsys.readouterr().err
    assert len(starts(folder)) == 2 and min(starts(folder)) > max(before)
    assert len(stored(store, earlier=True)) == 7
    second = starts(folder)
    assert baseline(settings, "evaluation.limit=30") == 0
    assert len(starts(folder)) == 2 and min(starts(folder)) > max(second)
    assert len(stored(store)) == 5


def test_the_card_is_drawn_before_the_whole_set_and_again_after_it(at, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(baselines, "find_limits", lambda *_: None)
    monkeypatch.setenv("BOUNDBY_RUN_STARTED", "20260101T000000Z")
    monkeypatch.setenv("BOUNDBY_RUN_LEFT", "02 04")
    evaluate, card = baselines.evaluate, tmp_path / "one" / "card.txt"
    before = []

    def looked_at(*given):
        before.extend([card.read_text(), *capsys.readouterr()])
        return evaluate(*given)

    monkeypatch.setattr(baselines, "evaluate", looked_at)
    _, settings = at("one")
    assert baseline(settings) == 0
    early, out, err = before
    assert "; not measured yet in the pass over the whole set " in " ".join(early.split()) and early in out
    assert "Accuracy    not measured yet\n" in early and "finish the measurement" not in early
    assert " left, if the whole set goes no faster than batch size 1\n" in err
    late = card.read_text()
    assert "not measured yet" not in late and "in the pass over the whole set (" in " ".join(late.split())
    assert late in capsys.readouterr().out


def test_a_card_without_a_whole_set_to_come_waits_for_none(at, tmp_path, monkeypatch):
    monkeypatch.setattr(baselines, "find_limits", lambda *_: None)
    _, settings = at("one", "evaluation.enabled=false")
    assert baseline(settings) == 0
    assert "not measured yet" not in (tmp_path / "one" / "card.txt").read_text()


@pytest.mark.parametrize("kind", ["memory", "file"])
def test_anew_takes_nothing_from_the_store(at, tmp_path, kind):
    store = "memory://run" if kind == "memory" else f"file://{tmp_path}/store"
    folder, settings = at("one", f"evaluation.storage={store}")
    assert workplace.evaluate(settings, *workplace.WHOLE) == [0, 0, 0]
    before, held = starts(folder), stored(store)
    assert len(held) == 7
    assert workplace.evaluate(settings, "plan --anew") == [0]
    assert stored(store) == {"plan.json"} and stored(store, earlier=True) == held
    assert workplace.evaluate(settings, "run", "finalize") == [0, 0]
    assert len(starts(folder)) == len(before) and min(starts(folder)) > max(before)
    assert stored(store) == held


def test_parts_that_another_machine_has_kept_are_not_those_of_the_plan_made_anew(at, capsys):
    first, second = (at(name, "evaluation.storage=memory://run") for name in ("one", "two"))
    assert workplace.evaluate(first[1], "plan", "run --shards 0/2") == [0, 0]
    assert workplace.evaluate(second[1], "run --shards 1/2", "finalize") == [0, 0]
    before = starts(second[0])
    assert workplace.evaluate(first[1], "plan --anew", "run --shards 0/2") == [0, 0]
    assert workplace.evaluate(second[1], "finalize", "run --shards 1/2", "finalize") == [1, 0, 0]
    assert "was planned anew; what lay here is in" in capsys.readouterr().err
    assert min(starts(second[0])) > max(before)
    assert len(list(second[0].path.parent.glob("previous/*/evaluation/part-*"))) == 3
    both = [plans.load(folder) for folder, _ in (first, second)]
    assert both[0] == both[1] and both[0].attempt is not None
    assert workplace.evaluate(first[1], "plan --anew") == [0]
    assert plans.load(first[0]).attempt not in (None, both[0].attempt)


def test_a_runner_with_a_plan_for_something_else_than_the_store_is_refused_and_moves_nothing(at, capsys):
    store = "evaluation.storage=memory://run"
    (folder, alone), (_, settings) = at("one", "evaluation.limit=10"), at("two", store)
    assert workplace.evaluate(alone, "plan", "run") == [0, 0]
    assert workplace.evaluate(settings, "plan") == [0]
    left, held = workplace.results(folder.path), stored("memory://run")
    assert workplace.evaluate([*alone, store], "plan", "run") == [2, 2]
    assert "are for different things: here rows is 10, planned was 40" in capsys.readouterr().err
    assert workplace.results(folder.path) == left and stored("memory://run") == held


def test_an_evaluation_behind_a_link_is_not_planned_anew_on_another_disk(at, tmp_path, capsys):
    folder, settings = at("one")
    (tmp_path / "big").mkdir()
    folder.path.parent.mkdir()
    folder.path.symlink_to(tmp_path / "big")
    assert workplace.evaluate(settings, "plan") == [0]
    assert workplace.evaluate(settings, "plan --anew") == [2]
    assert "is a link or a mounted disk" in capsys.readouterr().err
    assert folder.path.is_symlink() and (tmp_path / "big" / "plan.json").exists()
