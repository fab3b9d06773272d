"""Settings: defaults in one place, every mistake reported with its place, overrides on top."""

from pathlib import Path

import pytest
import yaml

from utils.settings import SettingsError
from utils.settings.schema import Config, Targets, read_settings
from utils.settings.yaml_file import load

ROOT = Path(__file__).resolve().parents[2]
MINIMAL = "model:\n  name: some/model\ndataset:\n  file: texts.csv\n"


@pytest.fixture
def written(tmp_path):
    def write(text: str) -> Path:
        path = tmp_path / "settings.yaml"
        path.write_text(text, encoding="utf-8")
        return path

    return write


def problems(path: Path, *overrides: str) -> list[str]:
    with pytest.raises(SettingsError) as failure:
        load(Config, path, overrides)
    return str(failure.value).replace(f"{path}", "FILE").splitlines()


def leaves(value, prefix=""):
    if not isinstance(value, dict):
        return {prefix}
    return {leaf for key, inner in value.items() for leaf in leaves(inner, f"{prefix}.{key}".lstrip("."))}


def test_config_files_state_every_key_or_leave_it_out(written):
    stated = yaml.safe_load((ROOT / "configs/config.yaml").read_text())
    config = load(Config, ROOT / "configs/config.yaml")
    assert leaves(stated) == leaves(config.model_dump())
    bare = Config(model={"name": config.model.name}, dataset={"hf_name": config.dataset.hf_name})
    assert config.model_copy(update={"targets": Targets()}) == bare
    config = load(Config, ROOT / "configs/quickstart.yaml")
    assert config.dataset.quickstart and config.dataset.hf_name is None and config.model.name == "quickstart"
    assert load(Config, written(MINIMAL)).profiling.batch_sizes is None


def test_all_mistakes_are_reported_at_once_with_their_place(written):
    path = written(MINIMAL + "profiling:\n  batch_szies: [1]\n  num_warmup_runs: ten\n  batch_sizes: [0, 2]\n")
    lines = problems(path)
    assert "FILE:6:3: profiling.batch_szies: unknown key, did you mean 'batch_sizes'?" in lines
    assert (
        "FILE:7:3: profiling.num_warmup_runs: input should be a valid integer, "
        "unable to parse string as an integer (got 'ten')" in lines
    )
    assert "FILE:8:17: profiling.batch_sizes[0]: input should be greater than 0 (got 0)" in lines
    assert lines[-1] == "3 problems; nothing was run"
    path = written(MINIMAL + "trace:\n  stacks: true\n  stacks: false\n")
    assert "FILE:7:3: trace.stacks: duplicate key; it first stands at FILE:6:3" in problems(path)


def test_override_is_read_as_yaml(written):
    config = load(
        Config, written(MINIMAL), ["profiling.batch_sizes=[1,8]", "dataset.sample_sizes=null", "model.dtype=bfloat16"]
    )
    assert config.profiling.batch_sizes == [1, 8] and config.model.dtype == "bfloat16"
    assert load(Config, written(MINIMAL), ["pod.price_per_hour=2.5"]).pod.price_per_hour == 2.5


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("profiling.batch_szies=[1]", "command line: profiling.batch_szies: unknown key, did you mean 'batch_sizes'?"),
        ("nonsense", "command line: 'nonsense' is not of the form key.sub=value"),
        ("profiling.batch_sizes=[1", "command line: profiling.batch_sizes: the value is not YAML"),
        ("model.device=gpu", "command line: model.device: string should match pattern"),
        ("profiling.batch_sizes=[4,4]", "command line: profiling.batch_sizes: each value may stand once"),
        ("profiling.batch_sizes=[]", "command line: profiling.batch_sizes: list should have at least 1 item"),
        ("layers.enabled=maybe", "command line: layers.enabled: input should be a valid boolean"),
        ("layers.num_runs=0", "command line: layers.num_runs: input should be greater than 0 (got 0)"),
        ("output.metrics_file=../x.json", "command line: output.metrics_file: string should match pattern"),
    ],
)
def test_wrong_override_is_reported_as_such(written, override, expected):
    assert problems(written(MINIMAL), override)[0].startswith(expected)


def test_two_sources_of_data_are_refused_with_the_way_out(written):
    lines = problems(written(MINIMAL + "  hf_name: a/b\n"))
    assert lines[0].startswith(
        "FILE:3:1: dataset: exactly one of hf_name, file and quickstart names the data, here hf_name and file"
    )


def test_quickstart_model_needs_the_quickstart_data(written):
    lines = problems(written(MINIMAL), "model.name=quickstart")
    assert "dataset.quickstart=true" in lines[0]


POD = ROOT / "configs/config.yaml"


def test_own_model_and_texts_take_the_place_of_those_of_the_pod_run():
    config, dropped = read_settings(POD, ["model.name=org/own", "dataset.file=texts.csv", "targets.accuracy=0.9"])
    assert (config.dataset.file, config.dataset.hf_name) == ("texts.csv", None)
    assert config.targets == Targets(accuracy=0.9)
    assert dropped == ["targets", "dataset.hf_name"]
    assert read_settings(POD)[1] == []


def test_own_model_is_not_measured_on_the_texts_of_another_unless_asked_for():
    with pytest.raises(SettingsError, match=r"belongs to another model.*dataset\.file=texts\.csv.*dataset\.hf_name="):
        read_settings(POD, ["model.name=org/own"])
    kept, _ = read_settings(POD, ["model.name=org/own", "dataset.hf_name=codefactory4791/amazon_test"])
    assert kept.dataset.hf_name == "codefactory4791/amazon_test"
    with pytest.raises(SettingsError, match=r"dataset\.quickstart=true"):
        read_settings(ROOT / "configs/quickstart.yaml", ["model.name=org/own"])


def test_what_describes_a_dataset_leaves_with_it_and_the_rest_of_an_own_file_stays(written):
    own = written(
        "model: {name: a/b, revision: v1}\n"
        "dataset: {hf_name: a/d, split: dev, revision: v2, text_column: body}\n"
        "targets: {accuracy: 0.7}\n"
    )
    config, dropped = read_settings(own, ["model.name=a/c", "dataset.file=x.csv"])
    assert (config.model.revision, config.dataset.split, config.dataset.text_column) == (None, None, "text")
    assert config.targets.accuracy == 0.7
    assert dropped == ["model.revision", "dataset.hf_name", "dataset.split", "dataset.revision", "dataset.text_column"]
    config, dropped = read_settings(own, ["dataset.hf_name=a/e"])
    assert (config.dataset.text_column, dropped) == ("body", ["dataset.revision"])


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("model: {name: [", "FILE:1:16: is not YAML"),
        ("- a\n- b\n", "FILE: holds no settings"),
        ("", "FILE: holds no settings"),
        ("a: &x [1]\nb: [*x, *x]\n", "FILE:2:5: is not YAML: aliases (*x) are refused"),
        ("model: !!python/object/apply:os.system [ls]\n", "FILE:1:8: is not YAML: could not determine"),
        ("x: " + "y" * 1_000_001, "FILE: has 1000004 bytes; a configuration has at most 100000"),
    ],
)
def test_file_that_is_not_settings_is_explained(written, content, expected):
    assert problems(written(content))[0].startswith(expected)


def test_file_that_cannot_be_read_is_explained(tmp_path):
    path = tmp_path / "settings.yaml"
    path.write_bytes(b"model: {name: \xff}")
    assert problems(path) == ["FILE: is not UTF-8 (byte 14); save it as UTF-8"]
    assert "configs/quickstart.yaml" in problems(tmp_path / "none.yaml")[0]
