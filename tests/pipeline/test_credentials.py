"""No secret is written or printed: secrets are set wherever they can be, and sought in every byte that comes out."""

import importlib
import shutil
from pathlib import Path

import fsspec
import pytest

import run_pipeline
from tests import baseline_document as results
from tests.evaluation_workplace import evaluate, prepare, texts
from tests.report_reading import run_in, traced
from tests.tiny_models import save_bert
from utils.command import cli, credentials
from utils.report import assembly
from utils.steps import step

SECRET = "cAnArY0123456789"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (f"s3://key:{SECRET}@bucket/run", "s3://***@bucket/run"),
        (f"'https://me:{SECRET}/a@b@host:80/x'", "'https://***@host:80/x'"),
        (f"https://{SECRET}@host", "https://***@host"),
        (f"a=https://a:{SECRET}@h/ b=ray://u:{SECRET}@head:10001", "a=https://***@h/ b=ray://***@head:10001"),
        (f"simplecache::https://u:{SECRET}@h/x", "simplecache::https://***@h/x"),
        (f"https://h/x?X-Amz-Signature={SECRET}&part=3", "https://h/x?X-Amz-Signature=***&part=3"),
        (f"https://h/x?part=3&sig={SECRET}#top", "https://h/x?part=3&sig=***#top"),
        (f"HF_TOKEN is hf_{SECRET}{SECRET}", "HF_TOKEN is ***"),
        ("https://host:8080/a@b?page=2 and me@example.org", "https://host:8080/a@b?page=2 and me@example.org"),
        ("s3://bucket/run, model org/name@main", "s3://bucket/run, model org/name@main"),
    ],
)
def test_user_info_signatures_and_tokens_are_cut_and_nothing_else(text, shown):
    assert credentials.without(text) == shown
    assert credentials.removed({"places": [text, 1, None]}) == {"places": [shown, 1, None]}


@pytest.fixture
def secrets(tmp_path, monkeypatch):
    """Set a secret in the environment and beside a model; return the settings of an evaluation that has one too."""
    for name in ("HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "WANDB_API_KEY", "JUPYTER_TOKEN", "GITHUB_TOKEN"):
        monkeypatch.setenv(name, SECRET)
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "config").write_text(f'[remote "origin"]\n\turl = https://me:{SECRET}@github.com/me/x.git\n')
    monkeypatch.setenv("HF_ENDPOINT", f"https://user:{SECRET}@127.0.0.1:9")
    monkeypatch.setenv("RAY_ADDRESS", f"ray://user:{SECRET}@127.0.0.1:9")
    model = save_bert(tmp_path / "model")
    for name in (
        ".env",
        ".netrc.json",
        "notes.txt",
        "optimizer.pt",
        "trainer_state.json",
        "credentials.json",
        "run.ipynb",
        "a.safetensors",
    ):
        (model / name).write_text(SECRET)
    store = f"evaluation.storage=memory://user:{SECRET}@run"
    yield prepare(tmp_path / "made", texts(12), model, store)
    shutil.rmtree(model)
    fsspec.filesystem("memory").rm("/", recursive=True)


def test_a_secret_appears_in_no_byte_that_is_written_or_printed(secrets, tmp_path, capfd):
    def fail(run: cli.Run) -> None:
        raise OSError(f"no answer from {run.config.evaluation.storage}?sig={SECRET}")

    assert evaluate(secrets, "plan", "run", "plan --anew") == [0, 0, 0]
    fail.__globals__["__doc__"] = "A step."
    assert step("02")(fail)([*secrets, "--debug"]) == 1
    assert evaluate([*secrets, "evaluation.engine=ray", "evaluation.precision=fastest"], "run") != [0]
    with pytest.raises(SystemExit):
        run_pipeline.main(["--only", "1", f"--storage=s3://u:{SECRET}@b"])
    run_pipeline.announce_failure("02", 1, run_pipeline.arguments().parse_intermixed_args(secrets), 1.0)
    hub = ["model.name=some/model", "dataset.hf_name=some/set", "dataset.file=null"]
    assert importlib.import_module("utils.report.dry_run").main(["01", "02", "--", *secrets, *hub]) == 0
    importlib.import_module("scripts.04_visualize_results").main(secrets)
    printed = "".join(capfd.readouterr())
    assert "***@run" in printed
    assert SECRET not in printed
    written = {path: path.read_bytes() for path in (tmp_path / "made").rglob("*") if path.is_file()}
    assert [path for path, content in written.items() if SECRET.encode() in content] == []
    store = fsspec.filesystem("memory")
    stored = {path: store.cat_file(path) for path in store.find("/")}
    assert len(stored) > 5
    assert [path for path, content in stored.items() if SECRET.encode() in content] == []


def test_a_secret_in_settings_and_names_appears_nowhere_in_the_report(tmp_path, monkeypatch, capfd):
    folder = tmp_path / "made"
    link = f"https://me:{SECRET}@host/texts.csv?sig={SECRET}"
    overrides = [f"evaluation.storage=s3://key:{SECRET}@bucket/run", f"model.name=hf_{SECRET}{SECRET}"]
    document = results.document(results.cpu_rows([1, 8], noisy=[8]), doubts=[f"read from {link}"])
    document["dataset"]["source"]["name"] = document["model"]["name"] = link
    document["full_dataset_metrics"]["precision"] = f"hf_{SECRET}{SECRET}"
    run = run_in(folder, overrides)
    results.store(run.layout, document, **traced())
    assembly.write(run)
    written = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path != run.layout.metrics}
    assert len(written) > 5
    assert [path.name for path, content in written.items() if SECRET.encode() in content] == []


def test_a_store_gets_the_files_of_the_model_and_no_others(secrets):
    assert evaluate(secrets, "plan") == [0]
    names = {Path(path).name for path in fsspec.filesystem("memory").find("/") if "/inputs/" in path}
    assert {name for name in names if not name.endswith(".csv")} == {
        "config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
    }  # fmt: skip
