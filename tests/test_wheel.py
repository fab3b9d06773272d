"""The wheel and the command `boundby`: what is installed, what its words run, and how it names them."""

import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import boundby
from boundby.__main__ import COMPLETIONS
from boundby.cli import COMMANDS

ROOT = Path(__file__).resolve().parents[1]
CARD = "quickstart on a machine\nLimited by   padding first\n"


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    made = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(made)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    with zipfile.ZipFile(next(made.glob("*.whl"))) as wheel:
        wheel.extractall(made / "site")
    return made / "site"


@pytest.fixture
def call(installed, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(installed))

    def started(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, *arguments], cwd=tmp_path, capture_output=True, text=True)

    return started


def test_installs_one_package_and_nothing_beside_it(installed):
    assert {path.name for path in installed.iterdir()} == {"boundby", f"boundby-{boundby.__version__}.dist-info"}
    assert not list(installed.rglob("*.pyc"))


def test_every_word_runs_a_file_that_is_installed(installed, call):
    assert [file for file, _ in COMMANDS.values() if not (installed / "boundby" / "pipeline" / file).is_file()] == []
    shown = call("-m", "boundby")
    assert shown.returncode == 0 and all(f"  {word} " in shown.stdout for word in COMMANDS)
    assert call("-m", "boundby", "--version").stdout == f"boundby {boundby.__version__}\n"


def test_a_word_that_is_no_command_ends_with_2_and_the_known_ones(call):
    refused = call("-m", "boundby", "xyz")
    assert refused.returncode == 2 and "'xyz'; known: run, check" in refused.stderr


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        (["rnu"], "did you mean run?"),
        (["explain", "model"], "a call in Python: boundby.explain(model, batch)"),
        (["run", "--dryrun"], "unrecognized arguments: --dryrun; did you mean --dry-run?"),
        (["train", "python", "train.py"], "stands behind --, such as: boundby train -- python train.py"),
        (["compare"], "the following arguments are required: RUN\n"),
    ],
)
def test_a_slip_ends_with_2_and_what_may_have_been_meant(call, typed, meant):
    refused = call("-m", "boundby", *typed)
    assert refused.returncode == 2 and meant in refused.stderr


@pytest.mark.parametrize("word", ["run", "trace", "compare", "plan"])
def test_help_names_commands_as_they_are_typed_where_it_is_installed(call, word):
    shown = call("-m", "boundby", word, "--help")
    assert shown.returncode == 0 and f"usage: boundby {word} " in shown.stdout
    assert not re.search(r"python \S*\.py|scripts/\w+\.py", shown.stdout)


def test_shows_the_card_of_a_run_again_without_torch(call, tmp_path):
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "card.txt").write_text(CARD)
    (tmp_path / "torch.py").write_text("raise ImportError('loaded')")
    shown = call("-m", "boundby", "view")
    assert shown.returncode == 0 and shown.stdout.startswith(CARD)
    missing = call("-m", "boundby", "view", "elsewhere")
    assert missing.returncode == 2 and "`boundby report` writes it" in missing.stderr


def test_names_the_extra_that_brings_a_missing_package(call, tmp_path):
    blocked = "import sys; sys.modules['torch'] = None; from boundby.__main__ import main; main(['layers'])"
    assert "torch: not installed; pip install 'boundby[transformers]'" in call("-c", blocked).stderr


@pytest.mark.parametrize("shell", COMPLETIONS)
def test_completes_words_in_every_shell(call, shell):
    lines = call("-m", "boundby", "--completion", shell).stdout
    assert all(word in lines for word in COMMANDS)
    assert call("-m", "boundby", "--completion", "csh").returncode == 2


def test_completes_words_and_options_in_bash(call, tmp_path):
    (tmp_path / "boundby").write_text(f'#!/bin/sh\nexec {sys.executable} -m boundby "$@"\n')
    (tmp_path / "boundby").chmod(0o755)
    asked = (
        f'PATH={tmp_path}:$PATH; eval "$(boundby --completion bash)"; '
        'ask() { COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _boundby; echo "${COMPREPLY[@]}"; }; '
        "ask boundby tra; ask boundby trace --gr"
    )
    result = subprocess.run(["bash", "-c", asked], cwd=tmp_path, capture_output=True, text=True)
    assert result.stdout == "train trace\n--group-by\n" or result.stdout == "trace train\n--group-by\n", result.stderr
