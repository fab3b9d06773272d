"""The real Hub clients load models and datasets from a recorded Hub, and each failure is one message with a way out."""

import errno
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from tests.fake_hub import COMMIT, FakeHub
from tests.tiny_models import LABELS, save_bert
from utils.command.errors import EnvironmentLacksError, InputError
from utils.models import hub

ROOT = Path(__file__).resolve().parents[2]
OFFLINE_DEFAULT = "python run_pipeline.py --config configs/quickstart.yaml"


def card(**values: Any) -> str:
    """Return the README of a dataset with these facts, as YAML, of which JSON is a part."""
    return f"---\n{json.dumps(values)}\n---\n"


LABELLED = {"names": {"0": "question", "1": "praise"}}
FEATURES = [{"name": "text", "dtype": "string"}, {"name": "labels", "dtype": {"class_label": LABELLED}}]
SPLITS = [{"split": split, "path": f"data/{split}-*"} for split in ("train", "test")]
CARD = card(dataset_info={"features": FEATURES}, configs=[{"config_name": "default", "data_files": SPLITS}])
HOLDOUT = [{"split": "holdout", "path": "holdout.csv"}]
OTHER_SPLITS = card(configs=[{"config_name": "default", "data_files": HOLDOUT}])
CONFIGS = card(configs=[{"config_name": name, "data_files": "french.csv"} for name in ("french", "german")])
NEVER_DOWNLOADED = (".bin", "modeling.py", "checkpoint-1/model.safetensors")


@pytest.fixture(scope="module")
def recorded(tmp_path_factory) -> Iterator[FakeHub]:
    folder = tmp_path_factory.mktemp("hub")
    good = save_bert(folder / "models" / "org" / "good")
    for name in ("gated", "locked", "down", "pickled"):
        shutil.copytree(good, good.with_name(name))
    pickled = good.with_name("pickled")
    (pickled / "model.safetensors").rename(pickled / "pytorch_model.bin")
    (good / "pytorch_model.bin").write_bytes(b"pickled")
    (good / "modeling.py").write_text("raise SystemExit")
    (good / "checkpoint-1").mkdir()
    (good / "checkpoint-1" / "model.safetensors").write_bytes(b"a checkpoint")
    data = folder / "datasets" / "org"
    save_classes(data / "classes", CARD)
    for name in ("gated", "locked"):
        save_csv(data / name, "test.csv")
    save_csv(data / "table", "test.csv")
    save_csv(data / "other_splits", "holdout.csv")
    (data / "other_splits" / "README.md").write_text(OTHER_SPLITS)
    save_csv(data / "configs", "french.csv")
    (data / "configs" / "README.md").write_text(CONFIGS)
    (data / "empty").mkdir()
    (data / "empty" / "README.md").write_text("nothing here")
    with FakeHub(folder, gated={"org/gated": 401, "org/locked": 403}, failing={"org/down": 503}) as served:
        yield served


def save_classes(folder: Path, card: str) -> None:
    (folder / "data").mkdir(parents=True)
    (folder / "README.md").write_text(card)
    schema = pyarrow.schema({"text": pyarrow.string(), "labels": pyarrow.int64()})
    for split, texts, labels in (
        ("train", ["learn"], [0]),
        ("test", ["why?", "nice", "who?", "nobody"], [0, 1, 0, -1]),
    ):
        table = pyarrow.table({"text": texts, "labels": labels}, schema)
        parquet.write_table(table, folder / "data" / f"{split}-00000-of-00001.parquet")


def save_csv(folder: Path, name: str) -> None:
    folder.mkdir(parents=True)
    (folder / name).write_text('text,labels\nNA,complaint\n"two\nlines",praise\n')


def ask(scenarios: list[dict[str, Any]], folder: Path, endpoint: str, **settings: str) -> list[dict[str, Any]]:
    """Return the outcome of each scenario in a client with its cache in `folder`."""
    folder.mkdir(exist_ok=True)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
    environment = {**kept, "HF_HOME": str(folder / "cache"), "HF_ENDPOINT": endpoint, "NO_PROXY": "*", **settings}
    command = [sys.executable, "-W", "error", str(ROOT / "tests" / "hub_client.py"), json.dumps(scenarios)]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr and "%|" not in done.stderr  # no bars in a log
    return json.loads(done.stdout)


def fetching(name: str, revision: str | None = None, call: str = "fetch") -> dict[str, Any]:
    return {"call": call, "model": {"name": name, "revision": revision}}


def normalising(name: str, model: str = "org/good", **dataset: Any) -> dict[str, Any]:
    local = f"data/{name.replace('/', '-')}.csv"
    return {"call": "normalise", "model": {"name": model}, "dataset": {"hf_name": name, "local_path": local, **dataset}}


ONLINE = {
    "model": fetching("org/good"), "tag": fetching("org/good", "v1.0"),
    "located": fetching("org/good", call="locate"), "no revision": fetching("org/good", "v9"),
    "no model": fetching("org/absent"), "no name": fetching("org/a name"), "gated": fetching("org/gated"),
    "locked": fetching("org/locked"), "pickled": fetching("org/pickled"), "down": fetching("org/down"),
    "not located": fetching("org/other", call="locate"), "classes": normalising("org/classes"),
    "train": normalising("org/classes", split="train", revision="v1.0"), "table": normalising("org/table"),
    "no dataset": normalising("org/absent"), "no dataset revision": normalising("org/table", revision="v9"),
    "gated dataset": normalising("org/gated"), "locked dataset": normalising("org/locked"),
    "no config": normalising("org/table", config_name="french"), "several configs": normalising("org/configs"),
    "no split": normalising("org/table", split="train"), "no usual split": normalising("org/other_splits"),
    "no column": normalising("org/table", text_column="body"), "no data": normalising("org/empty"),
}  # fmt: skip
OFFLINE = {
    "model": fetching("org/good"),
    "located": fetching("org/good", call="locate"),
    "other model": fetching("org/other"),
    "classes": normalising("org/classes"),
    "table": normalising("org/table"),
    "same commit": normalising("org/table", revision=COMMIT),
    "other revision": normalising("org/table", revision="v1.0"),
    "other dataset": normalising("org/unseen"),
}


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("client")


@pytest.fixture(scope="module")
def online(recorded, cache) -> dict[str, dict[str, Any]]:
    """Return what the calls give while the Hub answers; their downloads stay in `cache`."""
    return dict(zip(ONLINE, ask(list(ONLINE.values()), cache, recorded.url), strict=True))


@pytest.fixture(scope="module")
def offline(recorded, cache, online) -> dict[str, dict[str, Any]]:
    """Return what the calls give in offline mode, with the cache that `online` has left."""
    recorded.requests.clear()
    outcomes = ask(list(OFFLINE.values()), cache, recorded.url, HF_HUB_OFFLINE="1")
    assert recorded.requests == []
    return dict(zip(OFFLINE, outcomes, strict=True))


@pytest.fixture
def closed_port() -> Iterator[str]:
    """Return an endpoint that refuses: its port is held, so that nobody else listens there, and not listened on."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{held.getsockname()[1]}"


def assert_refused(outcome: dict[str, Any], exit_code: int, *parts: str) -> None:
    assert outcome.get("exit_code") == exit_code, outcome
    assert "\n" not in outcome["message"]
    assert [part for part in parts if part not in outcome["message"]] == [], outcome["message"]


def test_model_is_fetched_at_its_commit_without_pickles_code_and_checkpoints(online, recorded):
    assert online["model"]["revision"] == COMMIT and online["model"]["origin"] == "hub"
    assert online["model"]["files"] == ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
    assert online["tag"] == online["located"] == online["model"]
    assert not [request for request in recorded.requests if request.endswith(NEVER_DOWNLOADED)]


REFUSED = {  # exit code, and parts of the message
    "no revision": (2, "model 'org/good' has no revision 'v9'", "model.revision to null"),
    "no model": (2, "there is no model 'org/absent' on the Hub", "or it is private", "hf auth login"),
    "no name": (2, "'org/a name' is neither a folder nor the name of a model"),
    "gated": (2, "model 'org/gated' is gated", "request access at http://127.0.0.1", "HF_TOKEN"),
    "locked": (2, "model 'org/locked' is gated", "request access at http://127.0.0.1", "HF_TOKEN"),
    "gated dataset": (2, "dataset 'org/gated' is gated", "/datasets/org/gated", "hf auth login"),
    "locked dataset": (2, "dataset 'org/locked' is gated", "/datasets/org/locked", "hf auth login"),
    "pickled": (2, "org/pickled: has no safetensors weights", "Convert"),
    "down": (3, "answers model 'org/down' with status 503", OFFLINE_DEFAULT),
    "not located": (2, "has not been downloaded", "python scripts/01_download_data.py"),
    "no dataset": (2, "there is no dataset 'org/absent' on the Hub"),
    "no dataset revision": (2, "dataset 'org/table' has no revision 'v9'", "dataset.revision to null"),
    "no config": (2, "dataset.config_name is 'french'", "default"),
    "several configs": (2, "dataset.config_name is None", "['french', 'german']"),
    "no split": (2, "no split 'train'", "set dataset.split to one of: test"),
    "no usual split": (2, "no split 'test' or 'validation' or 'train'", "one of: holdout"),
    "no column": (2, "no column 'body' (dataset.text_column)", "There are: text, labels"),
    "no data": (2, "dataset 'org/empty' holds no data files that can be read"),
}


@pytest.mark.parametrize("scenario", REFUSED)
def test_what_the_hub_does_not_give_is_one_message_with_a_way_out(online, scenario):
    assert_refused(online[scenario], *REFUSED[scenario])


def test_dataset_has_the_split_asked_for_its_texts_as_they_are_and_classes_by_name(online):
    dataset, source = online["classes"], online["classes"]["source"]
    assert dataset["texts"] == ["why?", "nice", "who?"]  # the row labelled -1, the Hub's "no label", is left out
    assert [LABELS[label] for label in dataset["labels"]] == ["question", "praise", "question"]
    assert (source["split"], source["revision"], source["config_name"]) == ("test", COMMIT, "default")
    assert online["train"]["texts"] == ["learn"] and online["train"]["source"]["split"] == "train"
    assert online["table"]["texts"] == ["NA", "two\nlines"] and online["table"]["labels"] == [1, 0]


def test_offline_mode_uses_the_cache_alone_and_lacks_what_is_not_there(offline, online):
    assert offline["model"] == offline["located"] == online["model"]
    assert offline["classes"] == online["classes"] and offline["table"] == online["table"]
    assert offline["same commit"]["source"]["revision"] == COMMIT
    assert_refused(offline["other model"], 3, "model 'org/other' is not in the cache", "HF_HUB_OFFLINE")
    assert_refused(offline["other dataset"], 3, "dataset 'org/unseen' is not in the cache", OFFLINE_DEFAULT)
    assert_refused(offline["other revision"], 3, COMMIT, "'v1.0'", "HF_HUB_OFFLINE")


def test_unreachable_hub_hinders_only_what_is_not_cached(cache, online, closed_port, tmp_path):
    folder = save_bert(tmp_path / "model")
    model, dataset = ask(
        [fetching("org/good"), normalising("org/table", model=str(folder))], tmp_path / "client", closed_port
    )
    assert_refused(
        model, 3, f"{closed_port} cannot be reached for model 'org/good'", "Connection refused", OFFLINE_DEFAULT
    )
    assert_refused(dataset, 3, f"{closed_port} cannot be reached for dataset 'org/table'", OFFLINE_DEFAULT)
    outcomes = ask([fetching("org/good"), fetching("org/good", call="locate")], cache, closed_port)
    assert outcomes == [online["model"], online["located"]]


def test_step_01_ends_with_the_exit_code_of_an_environment_that_lacks_the_hub(tmp_path, closed_port):
    command = [sys.executable, str(ROOT / "scripts" / "01_download_data.py")]
    environment = {**os.environ, "HF_HOME": str(tmp_path), "HF_ENDPOINT": closed_port, "NO_PROXY": "*"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 3 and done.stdout == ""
    assert OFFLINE_DEFAULT in done.stderr.splitlines()[-1] and "Traceback" not in done.stderr


def test_what_went_wrong_is_explained_by_its_cause_and_a_mistake_of_ours_is_not():
    import httpx2

    repository = hub.Repository("model", "org/good")
    with (
        pytest.raises(EnvironmentLacksError, match=r"disk is full.*model 'org/good'.*\d+ bytes are free.*HF_HOME"),
        hub.explained(repository),
    ):
        try:
            raise OSError(errno.ENOSPC, "No space left on device")
        except OSError as error:
            raise RuntimeError("the download failed") from error
    for error, said in (
        (httpx2.ConnectError("[Errno -2] Name or service not known"), "cannot be reached"),
        (httpx2.ReadTimeout("timed out"), "timed out"),
    ):
        explanation = hub.explain(error, repository)
        assert isinstance(explanation, EnvironmentLacksError) and said in str(explanation)
    for error in (KeyError("a bug"), InputError("already explained")):
        with pytest.raises(type(error)) as caught, hub.explained(repository):
            raise error
        assert caught.value is error


def test_long_download_is_announced_again_and_again_in_a_log():
    enough = threading.Event()
    notes: list[str] = []

    def progress(text: str) -> None:
        notes.append(text)
        if len(notes) == 3:
            enough.set()

    with hub.announced("fetching", progress, every_s=0.001):
        assert enough.wait(60)
    assert notes[:3] == ["fetching", "fetching (0 s)", "fetching (0 s)"]
    assert not [thread for thread in threading.enumerate() if "beat" in thread.name]
