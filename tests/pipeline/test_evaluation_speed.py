"""What makes an evaluation faster is settled by its plan, and a process that would do otherwise refuses to run."""

import itertools
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from boundby.formatting import Missing
from boundby.inference import last_layer, strategies
from boundby.inference.fixes import COMPILE_S
from boundby.inference.reference import compare_logits
from boundby.work.roofline import Interval
from tests import evaluation_workplace as workplace
from utils.command.artifacts import EvaluationFolder
from utils.command.errors import EnvironmentLacksError, PipelineError
from utils.evaluation import plan as plans
from utils.evaluation import planning, tuning

LONG_S = 2000.0
TEXTS = workplace.texts(12)
TOKENS = sum(len(text.split()) for text, _ in TEXTS)  # of the tokenizer, words


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return workplace.prepare(tmp_path_factory.mktemp("evaluation"), TEXTS)


@pytest.fixture
def here(settings: list[str], tmp_path: Path) -> tuple[EvaluationFolder, list[str]]:
    """A folder for results of its own, and the command line of an evaluation there."""
    return EvaluationFolder(tmp_path / "evaluation"), [*settings, f"output.results_dir={tmp_path}"]


def test_a_planned_trim_is_told_in_the_metrics_and_nothing_is_predicted_where_it_is_refused(here, monkeypatch, capsys):
    folder, settings = here
    assert workplace.evaluate(settings, "plan") == [0]
    assert plans.load(folder).choices.trim is True
    with monkeypatch.context() as patch:
        patch.setattr(last_layer, "is_known", lambda _: False)
        assert workplace.evaluate(settings, "run") == [1]
    said = capsys.readouterr().err
    assert "'packed, sorted by length, last layer trimmed', which the self-check refuses here for 'packed, sor" in said
    assert not folder.part(0).exists()
    assert workplace.evaluate(settings, "run", "finalize") == [0, 0]
    assert json.loads(folder.metrics.read_text())["metrics"]["trim"] is True


def test_a_plan_without_the_trim_is_carried_out_without_it(here, monkeypatch):
    folder, settings = here
    with monkeypatch.context() as patch:
        patch.setattr(last_layer, "is_known", lambda _: False)
        assert workplace.evaluate(settings, "plan") == [0]
    assert plans.load(folder).choices.trim is False
    monkeypatch.setattr(last_layer, "reading", None)  # which nothing may call
    assert workplace.evaluate(settings, "run", "finalize") == [0, 0]
    assert json.loads(folder.metrics.read_text())["metrics"]["trim"] is False


def test_what_follows_a_choice_of_precision_is_reckoned_in_that_precision(here, monkeypatch):
    seconds = {"float32": 1.0, "float32_fast": 0.25}
    asked: list[tuple[str, float]] = []

    def chosen(model, tokenizer, sample, rule, options):
        faster = replace(options, precision="float32_fast", packs=False)
        return SimpleNamespace(options=faster, report=None, reasons=(), reference=None)

    def compilation(setting, predictor, compiled, texts, load, foreseen):
        asked.append((predictor.options.precision, load.seconds))
        return plans.Compilation(False, "it is a test")

    monkeypatch.setattr(planning, "choose_precision", chosen)
    monkeypatch.setattr(tuning, "seconds_per_token", lambda predictor, _: seconds[predictor.options.precision])
    monkeypatch.setattr(tuning, "choose_compilation", compilation)
    assert workplace.evaluate(here[1], "plan evaluation.precision=fastest") == [0]
    assert asked == [("float32_fast", 0.25 * TOKENS)]
    assert workplace.evaluate(here[1], "run evaluation.precision=fastest") == [0]  # by the batches that were chosen
    assert plans.load(here[0]).choices.strategy == "padded with a mask"


def test_the_texts_that_a_gpu_computes_one_by_one_are_in_what_choosing_a_precision_costs(here, monkeypatch):
    texts, alone_s = 12, 2.0
    monkeypatch.setattr(planning, "is_gpu", lambda device: True)
    monkeypatch.setattr(planning, "device_name", lambda device: "a GPU")
    monkeypatch.setattr(tuning, "seconds_per_token", lambda *_: 1 / TOKENS)
    monkeypatch.setattr(tuning, "seconds_alone", lambda *_: alone_s)
    assert workplace.evaluate(here[1], "plan evaluation.precision=same") == [0]
    cost_s = planning.PASSES * 1.0 + texts * alone_s
    reason = f"not measured: that would take about {cost_s:.0f} s, all texts about 1 s"
    assert plans.load(here[0]).reasons.precision == reason


@pytest.mark.parametrize(("difference", "expected"), [(0.1, 0.5), (0.6, 1.5)])  # 0.2 was seen on the sample
def test_the_margin_of_near_ties_grows_with_the_differences_in_full_batches(here, monkeypatch, difference, expected):
    asked: list[int] = []
    report = compare_logits("int8", np.array([[1.2, 0.0]]), np.array([[1.0, 0.0]]))

    def chosen(model, tokenizer, sample, rule, options):
        return SimpleNamespace(options=replace(options, guard_margin=0.5), report=report, reasons=(), reference=None)

    def guard(predictor, model, texts, rule):
        asked.append(predictor.token_budget)
        return rule(difference, 1.0)

    monkeypatch.setattr(planning, "choose_precision", chosen)
    monkeypatch.setattr(tuning, "guard_in_full_batches", guard)
    assert workplace.evaluate(here[1], "plan evaluation.precision=guarded") == [0]
    choices = plans.load(here[0]).choices
    assert (pytest.approx(choices.guard_margin), asked) == (expected, [choices.token_budget])


class Timed:
    """A predictor that needs `seconds` for any texts; the layers of it took `compile_s` to compile."""

    device = torch.device("cpu")

    def __init__(self, seconds: float, compile_s: float | None = None, logits: tuple[float, ...] = (1.0, 0.0)) -> None:
        self.check = SimpleNamespace(compile_s=compile_s)
        self.doubts = ("a strategy", "not compiled: no headers")
        logits = np.array([logits])
        spent = SimpleNamespace(compute_s=seconds)
        self.found = SimpleNamespace(logits=logits, labels=logits.argmax(axis=1), seconds=spent)

    def tokenize(self, texts: list[str]) -> list[str]:
        return texts

    def predict_tokens(self, _tokens: list[str]) -> SimpleNamespace:
        return self.found


@pytest.fixture
def compiler(monkeypatch):
    monkeypatch.setattr(tuning, "compile_obstacle", lambda _: None)


FORESEEN = Interval(150.0, 0.0, 300.0)


def chosen(setting, compiled, whole_s=LONG_S, foreseen=FORESEEN):
    load = tuning.Load(whole_s / 1e-4, 1e-4)
    return tuning.choose_compilation(setting, Timed(1.0), lambda: compiled, ["text"], load, lambda: foreseen)


def test_layers_are_compiled_where_that_pays(compiler, monkeypatch):
    compilation = chosen("auto", Timed(0.9, 99.0, (1.0, 0.25)))
    assert (
        compilation.on
        and compilation.reason == "compiling takes 99 s and saves 200 s [200, 200] of about 2000 s per worker"
    )
    assert (
        compilation.compile_s,
        compilation.compiled_s,
        compilation.eager_s,
        compilation.max_abs_logit_difference,
    ) == (99.0, 0.9, 1.0, 0.25)
    assert compilation.guard(0.5) == 1.5 and compilation.guard(0.0) == 0.0
    compilation = chosen("auto", Timed(0.9, 201.0))
    assert not compilation.on and compilation.guard(0.5) == 0.5
    assert compilation.reason.endswith("saves 200 s [200, 200] of about 2000 s per worker, not surely more than that")
    assert chosen("on", Timed(0.9, 201.0)).on
    slower = chosen("auto", Timed(1.1, 1.0))
    assert not slower.on and "saves -200 s" in slower.reason
    assert chosen("off", Timed(1.0)).reason == "evaluation.compile=off"
    monkeypatch.setattr(tuning, "compile_obstacle", lambda _: "g++ is missing")
    assert chosen("auto", None).reason == "not compiled: g++ is missing"
    with pytest.raises(EnvironmentLacksError, match="g\\+\\+ is missing; install it"):
        chosen("on", None)


def test_a_gain_that_swings_about_what_compiling_costs_is_not_taken(compiler):
    class Swinging(Timed):
        times = itertools.cycle([0.8, 1.0])

        def predict_tokens(self, _tokens):
            self.found.seconds = SimpleNamespace(compute_s=next(self.times))
            return self.found

    compilation = chosen("auto", Swinging(0.8, 150.0))
    assert not compilation.on and "not surely more than that" in compilation.reason


def test_compiling_is_tried_where_it_is_predicted_to_save_what_it_takes(compiler):
    cost_s = COMPILE_S + tuning.PASSES * tuning.MEASURED_TOKENS * 1e-4
    for saved_s in (cost_s - 1, cost_s + 1):
        tried = []
        foreseen = Interval(saved_s, 0.0, 2 * saved_s)
        compilation = tuning.choose_compilation(
            "auto", Timed(1.0), lambda tried=tried: tried.append(1) or Timed(0.5, 1.0), ["text"],
            tuning.Load(599e4, 1e-4),
            lambda foreseen=foreseen: foreseen,
        )  # fmt: skip
        assert compilation.on == bool(tried) == (saved_s > cost_s)
        reason = f"not measured: trying it takes about {cost_s:.0f} s, and it is predicted to save {saved_s:.0f} s [0, "
        assert compilation.on or compilation.reason.startswith(reason)
    short = chosen("auto", None, whole_s=5.0, foreseen=None)  # there is nothing to call
    assert short.reason == f"not measured: a worker needs about 5 s, trying it about {cost_s:.0f} s"
    unknown = chosen("auto", None, foreseen=Missing("the limit of products in bfloat16 is not known"))
    assert unknown.reason == "not measured: the limit of products in bfloat16 is not known"


@pytest.mark.parametrize(
    ("compiled", "reason"),
    [
        (Timed(0.5), "not compiled: no headers"),
        (Timed(0.5, 1.0, (0.0, 1.0)), "not compiled: 1 of 1 texts get another label"),
    ],
)
def test_layers_that_cannot_be_compiled_stay_as_they_are_unless_that_was_asked_for(compiler, compiled, reason):
    compilation = chosen("auto", compiled)
    assert (compilation.on, compilation.reason) == (False, reason)
    with pytest.raises(PipelineError, match=f"evaluation.compile=on: {reason}"):
        chosen("on", compiled)


def test_a_planned_compilation_is_carried_out_or_refused(here, compiler, monkeypatch, tmp_path, capsys):
    folder, settings = here
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "compiled"))
    monkeypatch.setattr(strategies, "BACKEND", "eager")  # traced, and run as traced
    assert workplace.evaluate(settings, "plan evaluation.compile=on") == [0]
    made = plans.load(folder)
    assert made.choices.compile and made.identity.compile == "on" and made.reasons.compile.compile_s > 0
    assert workplace.evaluate(settings, "run evaluation.compile=off") == [2]
    assert "compile is off, planned was on" in capsys.readouterr().err
    with monkeypatch.context() as patch:
        patch.delattr(strategies, "compile_layers")
        assert workplace.evaluate(settings, "run evaluation.compile=on") == [1]
    assert "trimmed, compiled', which the self-check refuses here" in capsys.readouterr().err
    assert workplace.evaluate(settings, "run evaluation.compile=on", "finalize evaluation.compile=on") == [0, 0]
    assert json.loads(folder.metrics.read_text())["metrics"]["compile"] is True
    torch._dynamo.reset()
