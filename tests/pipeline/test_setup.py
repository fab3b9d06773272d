"""What installs and packs: requirement files, pyproject.toml, setup_environment.sh, Makefile, .ci/run."""

import ast
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path

import gpu_and_torch
import lock
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from boundby import files
from tests.fakes import fake_program

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
IMPORTED_AS = {
    "pynvml": "nvidia-ml-py",
    "sklearn": "scikit-learn",
    "yaml": "pyyaml",
    "huggingface_hub": "huggingface-hub",
}
# Whoever uses these parts has them.
BROUGHT_BY_THE_CALLER = {"torch", "transformers", "accelerate", "lightning", "ray", "streamlit", "altair"}
BROUGHT_BY_THE_CALLER |= {"nncf", "onnx", "onnxruntime", "openvino", "mlflow", "wandb", "tensorboard", "tokenizers"}
WITH_ROCM = {"amdsmi"}  # it comes with the driver, in its version
BROUGHT_BY_THE_CALLER |= {"torchao"}  # for fp8, in the version that fits their torch


def requirements(name: str) -> list[str]:
    lines = (ROOT / "setup" / name).read_text(encoding="utf-8").splitlines()
    return [text for line in lines if (text := line.partition("#")[0].strip())]


def third_party_imports(folder: str) -> set[str]:
    """Return the distributions that the files of `folder` import at any depth."""
    modules: set[str] = set()
    for path in (ROOT / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                modules |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                modules.add(node.module.partition(".")[0])
    modules -= set(sys.stdlib_module_names) | {"boundby", "utils"}
    return {IMPORTED_AS.get(name, name) for name in modules}


# --- what is installed


@pytest.mark.parametrize("name", ["requirements.txt", "requirements-torch.txt", "requirements-test.txt"])
def test_every_requirement_is_pinned_to_one_version(name):
    assert requirements(name)
    assert [line for line in requirements(name) if not re.fullmatch(r"[a-z0-9-]+==\d+(\.\d+)+", line)] == []


@pytest.mark.parametrize("environment", lock.ENVIRONMENTS)
def test_every_pin_is_locked_at_its_version_and_all_that_is_locked_has_hashes(environment):
    pinned = {tuple(line.split("==")) for line in requirements(lock.requirements(environment).name)}
    assert pinned <= set(lock.locked(environment))
    text = (ROOT / "setup/locks" / f"{environment}.txt").read_text(encoding="utf-8")
    entries = re.findall(r"^\w.*?(?=^\w|\Z)", text, flags=re.MULTILINE | re.DOTALL)
    assert [entry for entry in entries if "--hash=sha256:" not in entry] == []
    assert [name for name, _ in lock.locked(environment) if lock.WITH_TORCH.fullmatch(name)] == []


def locked_here(environment: str) -> set[str]:
    """Return the names that a lock installs on this machine."""
    text = (ROOT / "setup/locks" / f"{environment}.txt").read_text(encoding="utf-8")
    entries = [Requirement(line) for line in re.findall(r"^(\w.*?) *\\?$", text, flags=re.MULTILINE)]
    return {entry.name for entry in entries if entry.marker is None or entry.marker.evaluate()}


def needed_here(environment: str) -> set[str]:
    """Return the names that the packages of an environment ask for, themselves included, but for torch's own."""
    needed: set[tuple[str, frozenset[str]]] = set()
    waiting = [Requirement(line) for line in requirements(lock.requirements(environment).name)]
    while waiting:
        asked = waiting.pop()
        wanted = (canonicalize_name(asked.name), frozenset(asked.extras))
        if wanted in needed or lock.WITH_TORCH.fullmatch(wanted[0]):
            continue
        needed.add(wanted)
        for line in importlib.metadata.requires(asked.name) or []:
            more = Requirement(line)
            if more.marker is None or any(more.marker.evaluate({"extra": extra}) for extra in ("", *asked.extras)):
                waiting.append(more)
    return {name for name, _ in needed}


@pytest.mark.parametrize("environment", lock.ENVIRONMENTS)
def test_each_environment_is_whole_with_no_other_beside_it_than_the_core(environment):
    try:
        needed = needed_here(environment)
    except importlib.metadata.PackageNotFoundError as error:
        pytest.skip(f"{error.name} is not installed: bash setup_environment.sh --test")
    assert needed and needed - locked_here("core") - locked_here(environment) == set()


def test_a_lock_leaves_out_what_the_core_installs_on_the_same_platforms_alone(monkeypatch, tmp_path):
    core = "click==8 \\\n    --hash=sha256:1\ncolorama==1 ; sys_platform == 'win32' \\\n    --hash=sha256:2\n"
    docs = "click==8 \\\n    --hash=sha256:1\ncolorama==1 \\\n    --hash=sha256:2\npathspec==1 \\\n"

    def resolved(*arguments: str) -> str:
        return docs if any("docs" in argument or "-test" in argument for argument in arguments) else core

    monkeypatch.setattr(lock, "SETUP", tmp_path)
    monkeypatch.setattr(lock, "_resolved", resolved)
    lock.lock()
    assert (tmp_path / "locks/core.txt").read_text().partition("\n")[2] == core
    for environment in ("test", "docs"):  # both whole: one may be installed without the other
        assert (tmp_path / f"locks/{environment}.txt").read_text().partition("\n")[2] == docs.partition("sha256:1\n")[2]


@pytest.mark.parametrize(
    ("answer", "code", "said"),
    [
        ({"vulns": []}, 0, "no known vulnerability in 1 of 1 locked packages"),
        ({"vulns": [{"id": "CVE-1", "fix_versions": ["2"]}]}, 1, "a 1: CVE-1, mended in 2"),
        ({"skip_reason": "not found"}, 0, "skipped, the index has no advisories"),
        (None, 0, "skipped, no route to host"),
    ],
)
def test_an_audit_fails_for_what_is_known_and_says_why_it_is_skipped(monkeypatch, capsys, answer, code, said):
    text = json.dumps({"dependencies": [{"name": "a", "version": "1", **answer}]}) if answer else ""
    done = subprocess.CompletedProcess([], code, stdout=text, stderr="WARNING\nno route to host\n")
    monkeypatch.setattr(subprocess, "run", lambda *args, **options: done)
    assert lock.main(["--audit"]) == code
    assert said in capsys.readouterr().out


def test_torch_is_pinned_alone_in_its_own_file():
    assert requirements("requirements-torch.txt") == ["torch==2.13.0"]
    assert "torch" not in gpu_and_torch.pins()


def test_all_that_the_pipeline_imports_is_pinned():
    imported = third_party_imports("boundby") | third_party_imports("utils") | third_party_imports("scripts")
    assert imported - BROUGHT_BY_THE_CALLER - WITH_ROCM - set(gpu_and_torch.pins()) == set()


def test_all_that_the_library_imports_is_declared():
    extras = PROJECT["project"]["optional-dependencies"].values()
    declared = {
        re.match(r"[\w-]+", line)[0] for lines in (PROJECT["project"]["dependencies"], *extras) for line in lines
    }
    of_the_trainer = {"transformers", "accelerate"}  # which its callback meets only where a program uses it
    assert third_party_imports("boundby") - of_the_trainer - WITH_ROCM - declared == set()


# --- setup_environment.sh

STUB = r"""
echo "$*" >>"$TREE/calls"
torch=$(<"$TREE/torch")
case "$*" in
    -c*version*) echo "$torch" ;;
    *gpu_and_torch.py) printf '%s\tcpu\t/machine/torch/__init__.py\n' "$torch"; [[ $torch != unusable ]] ;;
    *choose_torch.py) cat "$TREE/none_fits" 2>/dev/null && exit 3; echo 9 ${CHOICE:--r setup/requirements-torch.txt} ;;
    *"pip install -r setup/requirements-torch.txt"* | *"pip install torch=="*) echo 2.13.0 >"$TREE/torch" ;;
    *"pip install --require-hashes"*) [[ ! -f $TREE/replaces_torch ]] || echo 9.9 >"$TREE/torch" ;;
esac
"""


@pytest.fixture
def tree(tmp_path):
    """Return a checkout in a folder with a space, whose .venv/bin/python is a stub that writes down its calls."""
    folder = tmp_path / "a checkout"
    shutil.copytree(ROOT / "setup", folder / "setup", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "setup_environment.sh", folder)
    (folder / ".venv").mkdir()
    fake_program(folder / ".venv" / "bin", "python", STUB)
    (folder / "torch").write_text("2.11.0\n", encoding="utf-8")
    return folder


def set_up(tree: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = ["/bin/bash", str(tree / "setup_environment.sh"), *arguments]
    given = {"PATH": os.environ["PATH"], "TREE": str(tree), **environment}
    return subprocess.run(command, capture_output=True, text=True, cwd="/", env=given, check=False)


def installed(tree: Path) -> list[str]:
    """Return the pip installations since the last call of this function."""
    calls = (tree / "calls").read_text(encoding="utf-8").splitlines()
    (tree / "calls").write_text("", encoding="utf-8")
    return [call.partition("pip install ")[2] for call in calls if "pip install " in call]


CORE = "--require-hashes --no-deps -rsetup/locks/core.txt"


def test_usable_torch_is_kept_and_the_rest_is_installed_as_locked(tree):
    answer = set_up(tree)
    assert (answer.returncode, installed(tree)) == (0, [CORE])
    assert answer.stdout.endswith("next      make run\n")


@pytest.mark.parametrize(
    "choice", ["-r setup/requirements-torch.txt", "torch==2.11.0+cu126 --index-url https://a/cu126"]
)
def test_unusable_torch_is_replaced_by_the_one_that_was_chosen(tree, choice):
    (tree / "torch").write_text("unusable\n", encoding="utf-8")
    assert set_up(tree, CHOICE=choice).returncode == 0
    assert installed(tree) == [choice, CORE]


def test_what_the_choice_of_a_torch_says_is_the_last_line_where_none_fits(tree):
    (tree / "torch").write_text("unusable\n", encoding="utf-8")
    (tree / "none_fits").write_text("take another GPU\n", encoding="utf-8")
    answer = set_up(tree)
    assert (answer.returncode, installed(tree)) == (3, [])
    assert answer.stderr.splitlines()[-1] == "setup_environment.sh: take another GPU"


def test_another_driver_than_at_the_last_setup_is_looked_at_again(tree, tmp_path):
    fake_program(
        tmp_path / "programs",
        "cat",
        '[[ $* != */proc/driver/nvidia/version* ]] || echo driver $DRIVER; exec /bin/cat "$@"',
    )
    path = f"{tmp_path / 'programs'}:{os.environ['PATH']}"
    for driver, expected in (("580", [CORE]), ("580", []), ("550", [CORE])):
        set_up(tree, "--quiet", PATH=path, DRIVER=driver)
        assert installed(tree) == expected


def test_second_setup_installs_nothing_and_quietly_says_nothing(tree):
    set_up(tree)
    installed(tree)
    answer = set_up(tree, "--quiet")
    assert (answer.returncode, answer.stdout, answer.stderr, installed(tree)) == (0, "", "", [])


def test_a_changed_lock_is_installed_again(tree):
    set_up(tree)
    installed(tree)
    with (tree / "setup/locks/core.txt").open("a", encoding="utf-8") as file:
        file.write("msgspec==0.1\n")
    set_up(tree, "--quiet")
    assert installed(tree) == [CORE]


def test_environment_of_the_tests_is_one_for_a_run_too(tree):
    set_up(tree, "--test")
    extras = " ".join(f"-rsetup/locks/{name}.txt" for name in ("training", "monitor", "ray", "engines", "docs", "test"))
    assert installed(tree) == [f"{CORE} {extras}"]
    set_up(tree)
    assert installed(tree) == []


def test_changed_torch_pin_replaces_a_torch_that_setup_installed_alone(tree):
    pin = tree / "setup/requirements-torch.txt"
    set_up(tree)
    pin.write_text("torch==2.14.0\n", encoding="utf-8")
    set_up(tree)
    assert installed(tree) == [CORE, CORE]
    (tree / ".venv/.boundby-torch").write_text("torch==2.13.0\n", encoding="utf-8")
    pin.write_text("torch==2.15.0\n", encoding="utf-8")
    set_up(tree)
    assert installed(tree) == ["-r setup/requirements-torch.txt", CORE]


def test_failed_installation_ends_with_pips_reason_and_the_log(tree):
    fake_program(
        tree / ".venv/bin", "python", STUB + '[[ $* != *"pip install"* ]] || { echo "ERROR: no network"; exit 1; }'
    )
    answer = set_up(tree)
    assert answer.returncode == 3
    assert "pip failed: ERROR: no network (all of it: .venv/pip.log)" in answer.stderr


def test_folder_that_is_no_environment_is_left_alone(tree):
    answer = set_up(tree, BOUNDBY_VENV=str(tree / "setup"))
    assert answer.returncode == 3
    assert "holds something else than a virtual environment" in answer.stderr
    assert (tree / "setup/verify.py").exists()


def test_python_of_another_version_is_refused_with_the_way_out(tree, tmp_path):
    fake_program(tmp_path / "old", "python3", "echo 3 10 /usr")
    answer = set_up(tree, BOUNDBY_VENV=str(tmp_path / "new"), BOUNDBY_PYTHON=str(tmp_path / "old/python3"))
    assert answer.returncode == 3
    assert "no Python 3.11 or 3.12 among" in answer.stderr
    assert "BOUNDBY_PYTHON=" in answer.stderr


def test_setup_that_fails_says_why_and_leaves_no_mark(tree):
    assert set_up(tree, "--tset").returncode == 2
    (tree / "replaces_torch").touch()
    answer = set_up(tree)
    assert answer.returncode == 3
    assert "torch changed from '2.11.0" in answer.stderr
    assert not (tree / ".venv/.boundby-ready").exists()


# --- Makefile and CI


@pytest.mark.parametrize("script", ["setup_environment.sh", ".ci/run"])
def test_shell_script_parses(script):
    assert subprocess.run(["/bin/bash", "-n", str(ROOT / script)], capture_output=True, check=False).stderr == b""


def make(*arguments: str, folder: Path = ROOT) -> subprocess.CompletedProcess[str]:
    command = ["make", "-f", str(ROOT / "Makefile"), "-C", str(folder), "--no-print-directory", *arguments]
    given = {"PATH": os.environ["PATH"]}
    return subprocess.run(command, capture_output=True, text=True, env=given, check=False)


@pytest.mark.parametrize("target", ["run", "test", "truth", "bench", "lint", "bundle", "clean"])
def test_make_knows_the_target_and_explains_it(target):
    assert make("-n", target).returncode == 0
    assert re.search(rf"^make {target} +\w", make("help").stdout, flags=re.MULTILINE)


def test_make_run_sets_up_the_core_alone_and_bench_says_when_there_is_nothing(tmp_path):
    assert make("-n", "run", "ARGS=--resume").stdout.splitlines() == [
        "bash setup_environment.sh --quiet",
        '".venv/bin/python" run_pipeline.py --config configs/quickstart.yaml --resume',
    ]
    (tmp_path / "setup_environment.sh").touch()
    assert make("bench", folder=tmp_path).stdout == "benchmarks/ holds no benchmark; nothing was measured\n"


def test_bundle_takes_what_one_reads_at_home_and_names_what_it_leaves(tmp_path):
    taken = ["run.json", "raw_samples.csv", "plots/roofline.png", ".receipts/02.json", "profiler_traces/trace.json.gz"]
    left = ["previous/20260101T000000Z/run.json", "evaluation/part-00000.parquet", ".tmp-1-a-run.json"]
    for name in [*taken, *left, "layers/huge.jsonl"]:
        path = tmp_path / "my results" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    os.truncate(tmp_path / "my results/layers/huge.jsonl", 200_000_000)  # sparse: takes no room on the disk
    answer = make("bundle", f"RESULTS={tmp_path / 'my results'}", folder=tmp_path)
    (bundle,) = tmp_path.glob("boundby-results-*.tar.gz")
    with tarfile.open(bundle) as archive:
        assert sorted(archive.getnames()) == sorted(f"my results/{name}" for name in taken)
    assert "left out, 200 MB or more: my results/layers/huge.jsonl" in answer.stdout
    assert f"scp -P PORT 'root@HOST:{bundle}' ." in answer.stdout


def test_bundle_follows_links_of_the_results_and_in_them(tmp_path):
    volume = tmp_path / "volume"
    for name in ["run/run.json", "evaluation/predictions.csv"]:
        (volume / name).parent.mkdir(parents=True)
        (volume / name).write_text("{}")
    (volume / "run/evaluation").symlink_to(volume / "evaluation")
    (tmp_path / "results").symlink_to(volume / "run")
    assert make("bundle", "RESULTS=results", folder=tmp_path).returncode == 0
    (bundle,) = tmp_path.glob("boundby-results-*.tar.gz")
    with tarfile.open(bundle) as archive:
        assert {member.name: member.size for member in archive} == dict.fromkeys(
            ["results/run.json", "results/evaluation/predictions.csv"], 2
        )


def test_bundle_without_a_run_fails_and_says_so(tmp_path):
    answer = make("bundle", "RESULTS=results", folder=tmp_path)
    assert answer.returncode != 0
    assert "results/run.json is missing" in answer.stderr
    assert list(tmp_path.iterdir()) == []


def test_earlier_runs_are_removed_but_for_the_newest_and_nothing_else(tmp_path):
    names = ["20261101T000000Z", "20261102T000000Z", "20261102T000000Z-2", "20261102T000000Z-10", "my notes"]
    for name in names:
        (tmp_path / "previous" / name).mkdir(parents=True)
    answer = make("prune", "KEEP=2", f"RESULTS={tmp_path}")
    assert {path.name for path in (tmp_path / "previous").iterdir()} == set(names[2:])
    assert (answer.returncode, answer.stdout.count("removed ")) == (0, 2)
    assert make("prune", "KEEP=all", f"RESULTS={tmp_path}").returncode != 0
    assert make("prune", f"RESULTS={tmp_path / 'absent'}").returncode == 0


def test_clean_keeps_data_and_the_environment(tmp_path):
    for folder in ("results", "data", ".venv", "utils/__pycache__"):
        (tmp_path / folder).mkdir(parents=True)
    for name in ("README.md", "run.json", "plots/roofline.png"):
        files.write_text(tmp_path / "results" / name, "content")
    assert make("clean", folder=tmp_path).returncode == 0
    assert {path.name for path in tmp_path.iterdir()} == {"data", "results", ".venv", "utils"}
    assert [path.name for path in (tmp_path / "results").iterdir()] == ["README.md"]
    assert not (tmp_path / "utils/__pycache__").exists()
