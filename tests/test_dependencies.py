"""Every package that setup/ pins is there because the program imports it."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
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
        *(path for top in ("boundby", "utils", "scripts", "setup") for path in (ROOT / top).rglob("*.py")),
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
