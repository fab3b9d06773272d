"""What torch compiles for us is kept where nobody else can write: pickles and machine code are run from there."""

import ast
import os
import stat
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

from boundby.inference import strategies
from boundby.machine import compile_cache
from boundby.machine.compile_cache import TORCH, TRITON, use_private_cache
from boundby.training import fixes

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch) -> Path:
    """Return the cache folder of a user who has set no variable."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in (TORCH, TRITON):
        monkeypatch.setenv(name, "")  # so that it is taken back
        monkeypatch.delenv(name)
    return tmp_path / "cache" / "boundby"


def mode(folder: Path) -> int:
    return stat.S_IMODE(folder.lstat().st_mode)


def in_silence() -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return use_private_cache()


def after_a_warning(*told: str) -> Path:
    with pytest.warns(RuntimeWarning) as caught:
        folder = use_private_cache()
    assert [part for part in told if part not in str(caught[0].message)] == []
    return folder


def test_compiled_code_is_kept_in_a_folder_of_the_user_alone_that_stays(home):
    before = os.umask(0o002)
    try:
        folder = in_silence()
    finally:
        os.umask(before)
    assert folder.is_relative_to(home) and mode(folder) == 0o700
    assert os.environ[TORCH] == str(folder) and TRITON not in os.environ  # which torch puts below the other
    os.environ[TRITON] = str(folder / "triton" / "0")  # as torch does
    assert in_silence() == folder and os.environ[TRITON] == str(folder / "triton" / "0")


def test_the_folder_in_tmp_that_torch_names_by_itself_is_not_taken_for_the_users_choice(home, monkeypatch):
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    monkeypatch.setenv(TORCH, default_cache_dir())
    monkeypatch.setenv(TRITON, f"{default_cache_dir()}/triton/0")
    assert in_silence().is_relative_to(home) and TRITON not in os.environ


def a_link(folder: Path) -> None:
    (folder.parent / "real").mkdir(mode=0o700)
    folder.symlink_to(folder.parent / "real")


FAULTS = [
    (lambda folder: folder.mkdir() or folder.chmod(0o777), "is open to others (mode 777)"),
    (lambda folder: folder.mkdir() or folder.chmod(0o750), "is open to others (mode 750)"),
    (a_link, "is a link or a file, and no folder"),
    (lambda folder: folder.touch(mode=0o600), "is a link or a file, and no folder"),
    (lambda folder: folder.mkdir(mode=0o700) or folder.parent.chmod(0o777), "can be replaced by others"),
]


@pytest.mark.parametrize(("spoil", "fault"), FAULTS)
def test_a_folder_that_others_can_reach_is_replaced_by_a_new_temporary_one(spoil, fault):
    own = in_silence()
    own.rmdir()
    del os.environ[TORCH]
    spoil(own)
    folder = after_a_warning(f"boundby's cache: {own}", fault)
    assert folder != own and mode(folder) == 0o700 and os.environ[TORCH] == str(folder)
    assert in_silence() == folder  # as do the processes that this one starts


def test_a_folder_that_another_user_has_made_is_replaced_by_a_new_temporary_one(monkeypatch):
    own = in_silence()
    del os.environ[TORCH]
    monkeypatch.setattr(os, "geteuid", lambda: own.stat().st_uid + 1)
    assert after_a_warning(f"belongs to user {own.stat().st_uid}, not to ") not in (own, None)


def test_a_user_without_a_home_or_without_room_there_compiles_into_a_temporary_folder(home, monkeypatch):
    home.parent.touch()
    assert mode(after_a_warning("cannot be used: ")) == 0o700

    def has_none():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(compile_cache, "user_cache", has_none)
    del os.environ[TORCH]
    assert mode(in_silence()) == 0o700


@pytest.mark.parametrize("variable", [TORCH, TRITON])
def test_a_private_folder_that_the_user_names_is_used_and_made_if_it_is_missing(tmp_path, monkeypatch, variable):
    monkeypatch.setenv(variable, str(tmp_path / "named" / "deep"))
    for _ in range(2):
        in_silence()
        assert os.environ[variable] == str(tmp_path / "named" / "deep") and mode(tmp_path / "named" / "deep") == 0o700


@pytest.mark.parametrize("variable", [TORCH, TRITON])
@pytest.mark.parametrize(("spoil", "fault"), FAULTS)
def test_a_folder_that_the_user_names_and_others_can_reach_is_passed_over(
    home, tmp_path, monkeypatch, variable, spoil, fault
):
    named = tmp_path / "above" / "named"
    named.parent.mkdir()
    spoil(named)
    monkeypatch.setenv(variable, str(named))
    assert after_a_warning(f"{variable}: {named}", fault).is_relative_to(home)
    assert not str(os.environ.get(variable, "")).startswith(str(named))


def test_layers_and_training_loops_are_compiled_into_it(home, monkeypatch):
    given = []

    def compiler(*_arguments, **options):
        given.append((os.environ.get(TORCH), options["options"]["cpp_cache_precompile_headers"]))

    layers = nn.ModuleList([nn.Linear(1, 1)])
    monkeypatch.setattr(strategies.last_layer, "layers", lambda _model: layers)
    monkeypatch.setattr(nn.Module, "compile", compiler)
    monkeypatch.setattr(torch, "compile", compiler)
    strategies.compile_layers(nn.Linear(1, 1), but_last=False)
    del os.environ[TORCH]
    unused = dict.fromkeys(("move", "loss"))
    recipe = fixes.Recipe(torch.device("cpu"), lambda: nn.Linear(1, 1), lambda *_: None, lambda *_: [], **unused)
    fixes.Loop(recipe, fixes.Change(compiles=True))
    assert [(str(home) in folder, has_headers) for folder, has_headers in given] == [(True, False)] * 2


def test_torch_knows_the_options_that_layers_are_compiled_with():
    assert set(compile_cache.COMPILE_OPTIONS) <= set(torch._inductor.list_options())


def test_nothing_of_ours_compiles_without_it():
    compiling = set()
    for path in [*(ROOT / "boundby").rglob("*.py"), *(ROOT / "utils").rglob("*.py"), *(ROOT / "scripts").glob("*.py")]:
        calls = [node for node in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(node, ast.Call)]
        has_options = (node for node in calls if {keyword.arg for keyword in node.keywords} & {"options", "backend"})
        if any(isinstance(node.func, ast.Attribute) and node.func.attr == "compile" for node in has_options) or any(
            ast.unparse(node.func) == "torch.compile" for node in calls
        ):
            compiling.add(path.relative_to(ROOT).as_posix())
            assert any(ast.unparse(node.func) == "use_private_cache" for node in calls), path
    assert compiling == {"boundby/inference/strategies.py", "boundby/training/fixes.py"}
