"""The arrows of the design: who imports whom, what a script may be, and what importing a module costs."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
OURS = ("boundby", "utils", "scripts", "tests", "setup", "examples", "benchmarks")
TORCH_FREE = (
    "boundby.files", "boundby.timing.stats", "boundby.timing.rounds", "boundby.trace", "boundby.trace.memory",
    "boundby.trace.operator_table", "boundby.formatting", "boundby.timing.timer", "boundby.machine.environment",
    "boundby.machine.sampler", "boundby.timing.compare", "boundby.machine.disturbance", "boundby.machine.energy",
    "boundby.capture.patches", "boundby.bound.judgement", "boundby.bound.card", "boundby.work.roofline",
    "boundby.bound.verdict", "boundby.bound.split", "boundby.bound.prediction", "boundby.layers.records",
    "boundby.layers.ranking", "boundby.layers.report", "boundby.layers.dashboard", "boundby.layers.webpage",
    "boundby.partition", "boundby.training",
)  # fmt: skip
HEAVY = ("torch", "transformers", "pandas", "matplotlib", "sklearn", "datasets", "pyarrow", "numpy")
LONGEST_SCRIPT = 80
MOST_DEVICE_BRANCHES = 8
FORBIDDEN_CALLS = ("eval", "exec")
FORBIDDEN_MODULES = ("pickle", "dill", "joblib", "shelve", "marshal")
FORBIDDEN_NAMES = ("helpers", "common", "misc", "utils")


def python_files(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def imports(path: Path) -> set[str]:
    result: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            result |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            result |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return result


def test_the_runner_loads_next_to_nothing_of_ours():
    loaded = "import sys, run_pipeline; print([name for name in sys.modules if name.startswith(('utils.', 'boundby'))])"
    done = subprocess.run([sys.executable, "-c", loaded], cwd=ROOT, capture_output=True, text=True)
    of_the_command = {f"utils.command{name}" for name in ("", ".credentials", ".streams")}
    assert set(ast.literal_eval(done.stdout)) == {"boundby", "boundby.cli", "boundby.formatting", *of_the_command}


@pytest.mark.parametrize("path", python_files("scripts"), ids=lambda path: path.name)
def test_script_is_a_protocol(path):
    source = path.read_text(encoding="utf-8")
    tree = ast.parse(source)
    docstring = ast.get_docstring(tree) or ""
    assert len(source.splitlines()) <= LONGEST_SCRIPT
    assert "Reads:" in docstring and "Writes:" in docstring and f"python scripts/{path.name}" in docstring
    assert not [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    assert "main" in functions and functions <= {"main", "add_arguments"}
    assert "torch" not in {name.split(".")[0] for name in imports(path)}


@pytest.mark.parametrize("module", [module for module in TORCH_FREE])
def test_arithmetic_modules_cost_no_torch(module):
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_the_analysis_of_a_trace_loads_no_scipy():
    """It took 0.14 of the 0.44 s in which a trace of 60,000 events was read and judged."""
    code = "import sys, boundby.trace, utils.tracing.trace_text; sys.exit('scipy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("plan_partition", "--objective"),
        ("profile_layers", "1 the profile is not representative"),
        ("profile_training", "--steps-per-epoch"),
    ],
)
def test_help_says_what_there_is_and_loads_nothing_heavy(script, said):
    names = (*HEAVY, "pydantic")
    code = (
        f"import sys, contextlib, scripts.{script} as script\n"
        "with contextlib.suppress(SystemExit): script.main(['--help'])\n"
        f"print([name for name in {names!r} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.rstrip().endswith("\n[]") and said in done.stdout, done.stderr


@pytest.mark.parametrize(
    "module",
    [
        "utils.command.cli",
        "utils.steps.steps",
        "utils.report.dry_run",
        "utils.settings.yaml_file",
        "utils.settings.schema",
    ],
)
def test_what_a_dry_run_needs_is_light(module):
    code = f"import sys, {module}; print([name for name in {HEAVY!r} if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    allowed = ["numpy"] if module in ("utils.steps.steps", "utils.report.dry_run") else []
    assert [name for name in ast.literal_eval(result.stdout) if name not in allowed] == [], result.stderr


def test_nothing_is_unpickled_or_evaluated():
    for path in python_files("boundby", "utils", "scripts"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        calls = {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
        assert not calls & {*FORBIDDEN_CALLS, "torch.load", "yaml.load", "yaml.unsafe_load", "yaml.full_load"}, path
        assert not {name.split(".")[0] for name in imports(path)} & set(FORBIDDEN_MODULES), path


def test_no_file_is_a_junk_drawer():
    assert [path for path in python_files("boundby", "utils", "scripts") if path.stem in FORBIDDEN_NAMES] == []


def test_only_files_writes_in_the_library_and_the_pipeline():
    """`open(..., "w")`, `write_text` and their kin stand in `boundby/files.py` alone; the log handler appends."""
    allowed = {
        ROOT / "boundby" / "files.py",
        ROOT / "boundby" / "machine" / "memory.py",
    }  # memory writes to /proc/self/clear_refs
    for path in set(python_files("boundby", "utils", "scripts")) - allowed:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                name, owner = node.func.attr, ast.unparse(node.func.value)
                assert name not in ("write_text", "write_bytes") or owner == "files", f"{path}:{node.lineno}"


def test_library_prints_nothing():
    for path in set(python_files("boundby", "utils")) - {ROOT / "boundby" / "__main__.py"}:  # that one is the command
        calls = {ast.unparse(node.func) for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)}
        assert "print" not in calls, path


def test_project_speaks_of_itself_alone():
    outside = [
        path
        for path in python_files("boundby", "utils", "scripts", "setup", "examples")
        if "../shared" in path.read_text()
    ]
    assert outside == []


# Where a model is run, and its errors do not end everything.
GOES_ON_AFTER_ERRORS = (
    "boundby/bound/replay.py", "boundby/bound/trials.py", "boundby/bound/analysis.py", "boundby/bound/device_time.py",
    "boundby/inference/selfcheck.py", "boundby/inference/planning.py", "boundby/inference/predictor.py",
    "boundby/layers/passes.py", "boundby/layers/engine.py", "boundby/layers/probes.py", "boundby/training/fixes.py",
    "utils/baseline/inference.py", "utils/baseline/diagnosis.py", "utils/baseline/memory.py",
    "utils/models/loading.py", "utils/baseline/sweep.py", "utils/tracing/capture.py", "utils/variants/rounds.py",
    "utils/variants/operators.py", "utils/variants/comparison.py",
)  # fmt: skip
OF_ANY_MODEL = ("Exception", "BaseException", "RuntimeError", "CANNOT_RUN")


@pytest.mark.parametrize("name", GOES_ON_AFTER_ERRORS)
def test_nothing_carries_on_with_a_gpu_that_is_lost(name):
    """Whoever swallows what a model may raise asks first whether the GPU is lost, or raises what is none of its own."""

    def calls(nodes: list[ast.stmt]) -> set[str]:
        result = (item for node in nodes for item in ast.walk(node))
        return {ast.unparse(item.func) for item in result if isinstance(item, ast.Call)}

    tree = ast.parse((ROOT / name).read_text(encoding="utf-8"))
    for attempt in (node for node in ast.walk(tree) if isinstance(node, ast.Try)):
        for handler in attempt.handlers:
            caught = ast.unparse(handler.type) if handler.type else "BaseException"
            if any(re.search(rf"\b{item}\b", caught) for item in OF_ANY_MODEL):
                raises = any(isinstance(node, ast.Raise) for node in ast.walk(handler))
                asks = {"raise_if_lost", "is_sticky"} & calls(handler.body) or "naming_loss" in calls(attempt.body)
                assert raises or asks, f"{name}:{handler.lineno}"


def test_few_places_know_the_name_of_a_device():
    """Another vendor's GPU needs the two modules in `homes`; all else asks what a device can do."""
    name = re.compile(
        r"""\b(type|device|kind)["')\]]*\s*(==|!=|(not )?in)\s*[("'{\[]+\s*["']?(cuda|cpu|mps|xpu|hip)\b"""
    )
    homes = {ROOT / "boundby" / "machine" / "device.py", ROOT / "boundby" / "machine" / "sampler.py"}
    branches = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in python_files("boundby", "utils", "scripts")
        if path not in homes
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if name.search(line)
    ]
    assert len(branches) <= MOST_DEVICE_BRANCHES, branches


PINS = sorted((ROOT / "setup").glob("requirements*.txt"))
IMPORTED_AS = {"nvidia-ml-py": "pynvml", "scikit-learn": "sklearn", "pyyaml": "yaml"}
THROUGH = {  # pinned, and imported by what imports them
    "tensorboard": "torch.utils.tensorboard",
    "onnxscript": "torch.onnx",  # its exporter writes with it
    "accelerate": "transformers",  # its Trainer
    "pytorch-lightning": "lightning",
    "altair": "streamlit",  # the charts of the monitor are drawn by it
}
TOOLS = {
    "import-linter",
    "hatchling",
    "hypothesis",
    "mkdocs-material",
    "mypy",
    "pip-audit",
    "pytest",
    "pytest-timeout",
    "pytest-xdist",
    "ruff",
}  # of tests and make


def imported() -> set[str]:
    names: set[str] = set()
    paths = [
        ROOT / "run_pipeline.py",
        *(path for top in ("boundby", "utils", "scripts", "setup", "examples") for path in (ROOT / top).rglob("*.py")),
    ]
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module:
                names.add(node.module)
    return {".".join(name.split(".")[:length]) for name in names for length in range(1, name.count(".") + 2)}


@pytest.mark.parametrize("page", PINS, ids=lambda path: path.name)
def test_every_pinned_package_is_imported(page):
    pinned = set(re.findall(r"^([\w.-]+)==", page.read_text(encoding="utf-8"), re.MULTILINE)) - TOOLS
    modules = imported()
    unused = {
        name
        for name in pinned
        if IMPORTED_AS.get(name, name.replace("-", "_")) not in modules and THROUGH.get(name) not in modules
    }
    assert unused == set()


def test_every_pin_names_one_version():
    lines = [line for page in PINS for line in page.read_text(encoding="utf-8").splitlines() if line and line[0] != "#"]
    assert lines and all(re.match(r"[\w.-]+==[\w.]+(\s+#.*)?$", line) for line in lines), lines
