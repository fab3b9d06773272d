"""The examples that make something leave what they say."""

import ast
import csv
import json
import re
import runpy
import shlex
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


NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))
SHELL = re.compile(r"^(\s*)[!%](.+)$", re.MULTILINE)


def cells(notebook: Path, kind: str) -> list[str]:
    return ["".join(cell["source"]) for cell in json.loads(notebook.read_text())["cells"] if cell["cell_type"] == kind]


def as_python(cell: str) -> str:
    """Return a cell as Python, with what it runs by the shell as calls of `shell`."""
    return SHELL.sub(lambda match: f"{match[1]}shell({match[2]!r})", cell)


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_one_that_jupyter_opens_and_its_cells_are_python(notebook):
    document = json.loads(notebook.read_text())
    assert (document["nbformat"], document["cells"][0]["cell_type"]) == (4, "markdown")
    assert len({cell["id"] for cell in document["cells"]}) == len(document["cells"])
    assert all(set(cell) >= {"outputs", "execution_count"} for cell in document["cells"] if cell["cell_type"] == "code")
    for cell in cells(notebook, "code"):
        ast.parse(as_python(cell))


@pytest.fixture
def first_card(tmp_path, monkeypatch, capsys):
    """Run the notebook for a free card with a shell that only notes; return what it ran and printed."""
    notebook, ran = ROOT / "examples" / "first_card.ipynb", []
    (tmp_path / "boundby-checkout").mkdir()
    monkeypatch.chdir(tmp_path)
    check = {"verdict": "look", "name": "depth", "value": 254, "unit": "launches", "why": "254 launches, expected 512"}
    (tmp_path / "first_card.jsonl").write_text(f'{{"device": "T4"}}\n{json.dumps(check)}\n')
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "card.txt").write_text("Limited by  memory\n")
    names = {"shell": ran.append}
    for cell in cells(notebook, "code"):
        exec(compile(as_python(cell), notebook.name, "exec"), names)
    return ran, capsys.readouterr().out


def test_the_notebook_for_a_free_card_sets_up_checks_the_card_and_runs_the_pipeline(first_card):
    ran, said = first_card
    order = ["cd boundby-checkout", "bash setup_environment.sh --gpu", "make gpu", "run_pipeline.py", "make bundle"]
    positions = [next(at for at, line in enumerate(ran) if word in line) for word in order]
    assert positions == sorted(positions)
    assert "look      depth: 254 launches  (254 launches, expected 512)" in said and "Limited by  memory" in said


def test_the_notebook_for_a_free_card_names_files_targets_and_flags_that_exist(first_card):
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    flags = (ROOT / "setup_environment.sh").read_text() + (ROOT / "run_pipeline.py").read_text()
    flags += (ROOT / "tests" / "gpu" / "conftest.py").read_text()
    for words in map(shlex.split, first_card[0]):
        if words[0] == "make":
            assert words[1] in targets
        if words[0] in ("make", "bash", ".venv/bin/python"):
            named = " ".join(words[1:]).replace("ARGS=", "").split()
            assert [
                word for word in named if word.endswith((".py", ".sh", ".yaml")) and not (ROOT / word).exists()
            ] == []
            assert [word for word in named if word.startswith("--") and not re.search(rf"{word}[\")]", flags)] == []


def test_the_notebook_for_a_free_card_holds_no_output_of_any_card():
    document = json.loads((ROOT / "examples" / "first_card.ipynb").read_text())
    code = [cell for cell in document["cells"] if cell["cell_type"] == "code"]
    assert [cell for cell in code if cell["outputs"] or cell["execution_count"]] == []
