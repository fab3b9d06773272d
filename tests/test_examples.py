"""The examples that make something leave what they say."""

import csv
import runpy
from pathlib import Path

import pytest
from transformers import AutoModelForSequenceClassification

from examples import make_it_smaller
from tests import classifiers

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize("family", ["bert", "qwen2"])
def test_smaller_models_load_as_any_other_with_fewer_layers_or_a_narrower_inside(family, tmp_path, capsys):
    words = classifiers.reviews(40)
    tokenizer = classifiers.tokenizer(words)
    classifiers.build(family, len(tokenizer), tokenizer.pad_token_id).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    with (tmp_path / "texts.csv").open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([["text"], *([word] for word in words)])
    given = [str(tmp_path / name) for name in ("model", "texts.csv", "small")]
    assert make_it_smaller.main([*given, "--layers", "1", "--inner", "0.25", "--minutes", "0.001"]) == 0
    said = capsys.readouterr().out
    for name, layers, inner in (("pruned", classifiers.LAYERS, classifiers.INNER // 4), ("distilled", 1, 64)):
        smaller = AutoModelForSequenceClassification.from_pretrained(tmp_path / "small" / name)
        assert (smaller.config.num_hidden_layers, smaller.config.intermediate_size) == (layers, inner)
        assert f"{name}: {smaller.num_parameters() / 1e6:.1f} of" in said


@pytest.mark.filterwarnings("ignore")  # of the frameworks, about what a small example does not need
@pytest.mark.parametrize(
    ("example", "said"),
    [
        ("layers_and_a_plan", ["dashboard", "stage", "node_a"]),  # of the engine and the planner
        ("learn_from_feedback", ["rollout", "What:", "Next:"]),
        ("train_with_transformers", ["backward", "What:", "Next:", "profiler_summary.json"]),
        ("train_with_lightning", ["backward", "What:", "Next:", "profiler_summary.json"]),
    ],
)
def test_the_examples_of_engine_planner_and_loops_run_and_say_what_they_found(
    example, said, monkeypatch, tmp_path, tmp_path_factory, capfd
):
    kept = tmp_path_factory.mktemp("kept")
    monkeypatch.setattr("tempfile.tempdir", str(kept))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", [example])
    runpy.run_path(str(ROOT / "examples" / f"{example}.py"), run_name="__main__")
    out = capfd.readouterr().out
    assert [word for word in said if word not in out] == []
    assert not any(tmp_path.iterdir()), "nothing is left where it was run"
    named = [Path(word) for word in out.split() if word.startswith(str(kept))]
    assert named and all(path.exists() for path in named), "what it names can be opened afterwards"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("example", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.stem)
def test_every_example_says_how_it_is_used_and_runs_nothing(example, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", [example.name, "--help"])
    with pytest.raises(SystemExit, match="^0$"):
        runpy.run_path(str(example), run_name="__main__")
    assert capsys.readouterr().out.startswith(f"usage: {example.name}") and not any(tmp_path.iterdir())
