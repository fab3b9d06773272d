"""The README and the docs tell the truth: every file, command, flag, word and setting they name exists."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import run_pipeline
from boundby import __main__ as command
from boundby import cli
from docs import draw_card, generate_api

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGES += sorted((ROOT / "docs" / "decisions").glob("*.md"))
OURS = re.compile(r"(?<![\w./-])((?:scripts|examples|setup|configs|docs|utils|boundby|tests|benchmarks)/[\w./-]*\w)")
MAKE = re.compile(r"\bmake ([a-z]+)\b")
SECTIONS = "model|dataset|profiling|evaluation|trace|layers|variants|targets|pod|output"
SETTING = re.compile(rf"(?<![\w.])({SECTIONS})\.([a-z_0-9]+)\b")
WORD = re.compile(r"\bboundby ([a-z][a-z-]+)\b")
FLAG = re.compile(r"(?<![\w-])(--[a-z][a-z-]+)")
LINK = re.compile(r"\]\((?!https?:)([^)#]+)")
FOREIGN_FLAGS = {
    "--system-site-packages",
    *("--nvtx", "--nvtx-include", "--kernel-name", "--launch-skip", "--launch-count"),  # of Nsight Compute
    *("--set", "--target-processes", "--replay-mode", "--import", "--page"),
    *("--capture-range-end", "--cuda-graph-trace"),  # of Nsight Systems
    *("--array", "--gpus", "--requeue", "--open-mode", "--parsable", "--dependency", "--wrap"),  # of Slurm
    *("--rm", "--user", "--build-arg"),  # of Docker
    *("--execute", "--inplace"),  # of Jupyter
}
NOT_TARGETS = {"sure"}
INVENTED = {"configs/my.yaml", "scripts/NN_"}  # an example of what a user may have, and any numbered script


def ids(page: Path) -> str:
    return page.name


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_every_file_that_is_named_exists(page):
    text = page.read_text(encoding="utf-8")
    named = set(OURS.findall(text)) - INVENTED
    missing = [name for name in named if not (ROOT / name).exists() and not list(ROOT.glob(f"{name}*"))]
    missing += [link for link in LINK.findall(text) if not (page.parent / link).exists()]
    assert missing == []


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_every_link_between_files_leads_to_a_page_of_the_site(page):
    linked = {(page.parent / link).resolve().relative_to(ROOT).as_posix() for link in LINK.findall(page.read_text())}
    assert [name for name in linked if not name.startswith("docs/") and name not in generate_api.PAGES] == []


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_every_make_target_that_is_named_exists(page):
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z][a-z-]*):", makefile, re.MULTILINE))
    named = {
        name
        for line in re.findall(r"`[^`\n]+`|^make .*$", page.read_text(), re.MULTILINE)
        for name in MAKE.findall(line)
    }
    assert named - NOT_TARGETS <= targets


def settings(name: str) -> dict[str, dict]:
    return yaml.safe_load((ROOT / "configs" / name).read_text())


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_every_setting_that_is_named_exists(page):
    stated = {name: set(keys) for name, keys in settings("config.yaml").items()}
    for name in ("layers.yaml", "training.yaml"):
        for section, keys in settings(name).items():
            stated[section] = stated.get(section, set()) | (set(keys) if isinstance(keys, dict) else set())
    files = {"json", "csv", "md", "py", "yaml", "png", "parquet"}
    named = {(section, key) for section, key in SETTING.findall(page.read_text()) if key not in files}
    assert {(section, key) for section, key in named if key not in stated[section]} <= {("profiling", "batch_szies")}


@pytest.fixture(scope="module")
def known_flags() -> set[str]:
    """Every flag that one of our programs answers for in its help or its source."""
    programs = [ROOT / "run_pipeline.py", ROOT / "setup" / "verify.py", *sorted((ROOT / "scripts").glob("*.py"))]
    runs = [subprocess.run([sys.executable, str(path), "--help"], capture_output=True, text=True) for path in programs]
    assert all(run.returncode == 0 for run in runs), [run.stderr for run in runs]
    texts = [run.stdout for run in runs] + [command.SHOWN]
    sources = (
        ROOT / "tests" / "gpu" / "conftest.py",
        ROOT / "setup_environment.sh",
        ROOT / "setup" / "lock.py",
        *(ROOT / "examples").glob("*.py"),
    )
    texts += [path.read_text() for path in sources]
    return set(FLAG.findall(" ".join(texts)))


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_every_flag_that_is_named_exists(page, known_flags):
    assert set(FLAG.findall(page.read_text())) - FOREIGN_FLAGS <= known_flags


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_every_word_of_the_command_that_is_named_exists(page):
    lines = re.findall(r"`[^`\n]+`|^boundby .*$", page.read_text(), re.MULTILINE)
    assert {word for line in lines for word in WORD.findall(line)} <= set(cli.COMMANDS)


def test_getting_started_lists_every_word_of_the_command():
    page = (ROOT / "docs" / "getting-started.md").read_text()
    assert [word for word, (file, _) in cli.COMMANDS.items() if f"| `{word}` | `{file}` | " not in page] == []


def test_the_navigation_of_the_site_names_every_page_once():
    named = re.findall(r"([\w/.-]+)\.md$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    pages = [str(path.relative_to(ROOT / "docs").with_suffix("")) for path in (ROOT / "docs").rglob("*.md")]
    assert len(named) == len(set(named)) and set(pages) <= set(named)


def test_the_picture_shows_the_card_that_stands_in_the_readme():
    drawn = draw_card.drawn(draw_card.card_of_readme())
    assert draw_card.PICTURE.read_text() == drawn, "python docs/draw_card.py"


def test_the_drawing_of_the_house_names_every_room():
    drawing = re.search(r"```\n(scripts/.*?)```", (ROOT / "docs" / "architecture.md").read_text(), re.DOTALL)[1]
    drawn = {word for line in drawing.splitlines() for word in re.split(r"\s{2,}", line[14:])[0].split(" · ")}
    rooms = {path.parent.name for top in ("boundby", "utils") for path in (ROOT / top).glob("*/__init__.py")}
    assert drawn - {"00 … 05 and the tools", "files", "formatting"} == rooms


def test_the_code_that_runs_and_simulates_a_plan_does_so(tmp_path, monkeypatch, capsys):
    import torch
    from torch import nn

    page = (ROOT / "docs" / "layers-and-planner.md").read_text(encoding="utf-8")
    code = re.search(r"### Run or simulate a plan\n.*?```python\n(.*?)```", page, re.DOTALL)[1]
    model, inputs = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))).eval(), torch.ones(2, 64)
    names = {"__name__": "__main__", "model": model, "inputs": inputs}
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "docs/layers-and-planner.md", "exec"), names)
    assert torch.equal(names["staged"].outputs, model(inputs))
    said = capsys.readouterr().out
    assert "simulated: " in said and said.count("s predicted") == 1 + 2  # the stage, the latency and the last finish


def test_every_metrics_column_is_explained():
    from utils.baseline.columns import explained

    page = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    assert page == explained(page), "write what `utils.baseline.columns.explained` returns to docs/metrics.md"


def test_runner_help_names_every_step():
    text = run_pipeline.arguments().format_help()
    assert all(f"--skip-{step['skip']}" in text for step in run_pipeline.STEPS.values())
