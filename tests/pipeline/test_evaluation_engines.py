"""An engine computes where it surely wins, converts once, and one that is gone, another or broken is one message."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from msgspec import structs

from boundby.inference.engines import ENGINES
from boundby.timing.stats import estimate
from tests import evaluation_workplace as workplace
from utils.command.artifacts import EvaluationFolder
from utils.evaluation import engines
from utils.evaluation import plan as plans

FAST, LEVEL = [(2.0, 1.0)] * 5, [(1.0, 1.0), (1.1, 1.0)] * 3


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return workplace.prepare(tmp_path_factory.mktemp("engines"), workplace.texts(80), None)


@pytest.fixture
def engine(settings: list[str], monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """One engine that is installed: it computes the model itself, its logits times `scale`, and wins by `turns`."""
    from transformers import AutoModelForSequenceClassification

    name = next(setting for setting in settings if setting.startswith("model.name")).partition("=")[2]
    model = AutoModelForSequenceClassification.from_pretrained(name).eval()
    fake = SimpleNamespace(conversions=0, scale=1.0, turns=FAST, calls=0, breaks_at=None)

    class Process:
        def __init__(self, source, library, max_length, folder, trust_remote_code):
            self.folder = folder

        def convert(self) -> None:
            fake.conversions += 1
            self.folder.mkdir(parents=True)
            (self.folder / "model.xml").write_text("converted")

        def open(self, engine: str, calibration: list[str]) -> int:
            return 9

        def logits(self, engine: str, texts: list[str], size: int) -> None:
            pass

        def close(self) -> None:
            pass

    def session(ids: np.ndarray, mask: np.ndarray) -> np.ndarray:
        fake.calls += 1
        if fake.breaks_at and fake.calls >= fake.breaks_at:
            raise RuntimeError("no such kernel")
        with torch.inference_mode():
            return fake.scale * model(torch.from_numpy(ids), torch.from_numpy(mask)).logits.numpy()

    for key in ENGINES:
        packages = () if key == "openvino" else ("no_such_package",)
        monkeypatch.setitem(ENGINES, key, replace(ENGINES[key], packages=packages))
    monkeypatch.setattr(engines, "EngineProcess", Process)
    monkeypatch.setattr(engines, "open_session", lambda path, engine, threads: session)
    monkeypatch.setattr(engines, "turns", lambda predictors, texts: fake.turns)
    smallest = lambda predictor, texts, budgets: SimpleNamespace(token_budget=min(budgets))  # noqa: E731
    monkeypatch.setattr(engines, "search_token_budget", smallest)
    monkeypatch.setattr(engines, "SHARE", 1e9)
    only_float32 = {name: precision for name, precision in engines.PRECISIONS.items() if name == "float32"}
    monkeypatch.setattr("boundby.inference.planning.available", lambda device: tuple(only_float32.values()))
    return fake


def asked(settings: list[str], folder: Path) -> list[str]:
    return [*settings, f"output.results_dir={folder}", "evaluation.precision=fastest"]


def planned(folder: Path) -> plans.Plan:
    return plans.load(EvaluationFolder(folder / "evaluation"))


def test_an_engine_that_surely_wins_computes_every_row_and_is_converted_once(settings, engine, tmp_path, capsys):
    arguments = asked(settings, tmp_path / "fastest")
    assert workplace.evaluate(arguments, *workplace.WHOLE) == [0, 0, 0]
    made = planned(tmp_path / "fastest")
    assert (made.choices.precision, made.choices.strategy) == ("openvino", "converted, padded with a mask")
    assert made.reasons.engine.gain == pytest.approx(2.0) and made.reasons.engine.won_back_after_texts > 0
    assert "OpenVINO is 2.00 [2.00, 2.00] times as fast as float32 here" in " ".join(capsys.readouterr().out.split())
    same = [*settings, f"output.results_dir={tmp_path / 'same'}"]
    assert workplace.evaluate(same, *workplace.WHOLE) == [0, 0, 0]  # which asks no engine
    assert workplace.labels(tmp_path / "fastest") == workplace.labels(tmp_path / "same")
    record = json.loads((tmp_path / "fastest" / "evaluation" / "metrics.json").read_text())["metrics"]
    assert record["precision"] == "openvino" and record["exactness"]["same_labels"] == 80
    assert workplace.evaluate(arguments, "plan --anew") == [0] and engine.conversions == 1


@pytest.mark.parametrize(("asked_for", "taken"), [("null", 512), ("128", 128)])
def test_an_engine_has_the_budget_that_is_best_for_its_padded_batches_unless_one_is_asked_for(
    settings, engine, tmp_path, asked_for, taken
):
    budget = f"evaluation.token_budget={asked_for}"
    assert workplace.evaluate([*asked(settings, tmp_path), budget], "plan") == [0]
    assert (planned(tmp_path).choices.precision, planned(tmp_path).choices.token_budget) == ("openvino", taken)


@pytest.mark.parametrize(("changes", "reason"), [
    ({"turns": LEVEL}, "no sure gain"),
    ({"scale": -1.0}, "its logits differ from the stock forward's"),
    ({"share": 0.1}, "OpenVINO was not tried: getting it ready takes about 15 s and comparing it "),
    ({"room": 1000}, "not OpenVINO: the converted model takes"),
], ids=["no faster", "other logits", "too few texts", "no room"])  # fmt: skip
def test_an_engine_that_does_not_win_leaves_ours_a_reason_and_no_files(
    settings, engine, tmp_path, monkeypatch, changes, reason
):
    vars(engine).update({name: value for name, value in changes.items() if hasattr(engine, name)})
    monkeypatch.setattr(engines, "SHARE", changes.get("share", 1e9))
    if "room" in changes:
        monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=changes["room"]))
    assert workplace.evaluate(asked(settings, tmp_path), "plan") == [0]
    made = planned(tmp_path)
    assert made.choices.precision == "float32" and made.choices.converted is None
    assert made.reasons.engine.name is None and reason in made.reasons.engine.reason
    assert not list((tmp_path / "converted").glob("*"))


def test_converting_counts_for_each_precision_of_a_library(settings, engine, tmp_path, monkeypatch):
    clock = SimpleNamespace(now_s=0.0, perf_counter=lambda: clock.now_s)

    def make(process: object, name: str, calibration: list[str]) -> None:
        clock.now_s += 5.0
        if name == "openvino_int8":
            raise engines.EngineFailed("no range was found")

    def convert(process: Any) -> None:
        clock.now_s += 20.0
        process.folder.mkdir(parents=True)
        (process.folder / "model.xml").write_text("converted")

    monkeypatch.setattr(engines, "time", clock)
    monkeypatch.setitem(ENGINES, "openvino_int8", replace(ENGINES["openvino_int8"], packages=()))
    monkeypatch.setattr(engines.EngineProcess, "convert", convert)
    monkeypatch.setattr(engines.EngineProcess, "open", make)
    assert workplace.evaluate(asked(settings, tmp_path), "plan") == [0]
    assert planned(tmp_path).reasons.engine.convert_s == 25.0  # of which int8, tried before, had spent 20


def test_a_conversion_that_fails_is_made_once_for_all_precisions_and_told_once(settings, engine, tmp_path, monkeypatch):
    def fail(process: object) -> None:
        engine.conversions += 1
        raise engines.EngineFailed("ValueError: no such operator")

    monkeypatch.setitem(ENGINES, "openvino_int8", replace(ENGINES["openvino_int8"], packages=()))
    monkeypatch.setattr(engines.EngineProcess, "convert", fail)
    assert workplace.evaluate(asked(settings, tmp_path), *workplace.WHOLE) == [0, 0, 0]
    made = planned(tmp_path)
    assert made.choices.precision == "float32" and engine.conversions == 1
    assert made.reasons.engine.reason == "not OpenVINO int8, OpenVINO: ValueError: no such operator"


def gone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    next((folder / "converted").glob("*/model.xml")).unlink()


def uninstalled(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ENGINES, "openvino", replace(ENGINES["openvino"], packages=("no_such_package",)))


def upgraded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = planned(folder)
    converted = structs.replace(made.choices.converted, version="1.0")
    plans.save(
        structs.replace(made, choices=structs.replace(made.choices, converted=converted)),
        EvaluationFolder(folder / "evaluation"),
    )


def unreadable(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*given: Any) -> None:
        raise RuntimeError("bad graph")

    monkeypatch.setattr(engines, "open_session", fail)


@pytest.mark.parametrize(("change", "code", "said"), [
    (gone, 2, "the converted model of the plan is gone, or another one"),
    (uninstalled, 3, "the plan computes with OpenVINO; no_such_package: not installed"),
    (upgraded, 2, "the plan computes with OpenVINO 1.0, "),
    (unreadable, 1, "OpenVINO cannot load it (bad graph)"),
])  # fmt: skip
def test_what_cannot_be_resumed_with_its_engine_is_one_message(
    settings, engine, tmp_path, monkeypatch, capsys, change, code, said
):
    arguments = asked(settings, tmp_path)
    assert workplace.evaluate(arguments, "plan") == [0]
    change(tmp_path, monkeypatch)
    capsys.readouterr()
    assert workplace.evaluate(arguments, "run") == [code]
    message = " ".join(capsys.readouterr().err.split())
    assert said in message and "--anew" in message and "Traceback" not in message


def test_an_engine_that_fails_on_the_way_ends_the_run_and_the_same_command_goes_on(settings, engine, tmp_path, capsys):
    arguments = asked(settings, tmp_path)
    assert workplace.evaluate(arguments, "plan") == [0]
    before = engine.calls
    assert workplace.evaluate(arguments, "run", "finalize") == [0, 0]
    expected, needed = workplace.labels(tmp_path), engine.calls - before
    for path in (tmp_path / "evaluation").glob("part-*"):
        path.unlink()
    engine.breaks_at = engine.calls + needed  # its last batch
    capsys.readouterr()
    assert workplace.evaluate(arguments, "run") == [1]
    assert "no such kernel" in capsys.readouterr().err
    engine.breaks_at = None
    assert workplace.evaluate(arguments, "run") == [0] and workplace.labels(tmp_path) == expected


@pytest.mark.parametrize(
    ("seconds", "taken"),
    [
        ((1.0, 2.0, 3.0), "float32"),
        ((2.0, 1.0, 3.0), "openvino_int8"),
        ((3.0, 2.0, 1.0), "openvino"),
        ((1.01, 1.0, 1.005), "openvino_int8"),  # a little faster is faster
        ((1.0, 1.0, 1.0), "float32"),
    ],
)
def test_fastest_is_the_fastest_of_ours_and_of_every_engine(settings, engine, tmp_path, monkeypatch, seconds, taken):
    monkeypatch.setitem(ENGINES, "openvino_int8", replace(ENGINES["openvino_int8"], packages=(), precision="float32"))
    engine.turns = [seconds] * 5
    assert workplace.evaluate(asked(settings, tmp_path), "plan") == [0]
    assert planned(tmp_path).choices.precision == taken


def test_true_candidates_are_measured_and_none_is_faster_than_what_is_taken(settings, tmp_path, monkeypatch):
    pytest.importorskip("openvino", reason="setup/requirements-engines.txt is not installed")
    monkeypatch.setattr(engines, "SHARE", 1e9)
    turns, seen = engines.turns, []

    def watched(predictors: list[Any], texts: list[str]) -> list[list[float]]:
        rounds = turns(predictors, texts)
        seen.append(([predictor.options.precision for predictor in predictors], np.array(rounds)))
        return rounds

    monkeypatch.setattr(engines, "turns", watched)
    arguments = [*asked(settings, tmp_path / "fastest"), "evaluation.min_agreement=0.5"]
    assert workplace.evaluate(arguments, "plan") == [0]
    ((names, rounds),) = seen
    assert {"openvino", "onnxruntime"} <= set(names[1:])
    fastest = 1 + int(np.median(rounds[:, 1:], axis=0).argmin())
    gain = estimate((rounds[:, 0] / rounds[:, fastest]).tolist())
    assert planned(tmp_path / "fastest").choices.precision == names[fastest if gain.low > 1 else 0]
    monkeypatch.setattr(engines, "turns", lambda predictors, texts: [[9.0] + [1.0] * (len(predictors) - 1)] * 5)
    assert workplace.evaluate(arguments, "plan --anew", "run", "finalize") == [0, 0, 0]
    assert planned(tmp_path / "fastest").choices.precision in names[1:]
    same = [*settings, f"output.results_dir={tmp_path / 'same'}"]
    assert workplace.evaluate(same, *workplace.WHOLE) == [0, 0, 0]
    assert np.mean(np.array(workplace.labels(tmp_path / "fastest")) == workplace.labels(tmp_path / "same")) > 0.5
