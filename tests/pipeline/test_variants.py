"""Step 05: the same texts in other ways, what each gives, what was refused and why, and which one to use."""

import csv
import errno
import importlib
import json
import shutil
import sys
import unittest.mock
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from boundby.inference import ExactnessReport, compare_logits
from boundby.inference.engines import ENGINES, open_session
from boundby.inference.precision import calibrate, to_int8
from boundby.machine.device import has_int8_matmul
from boundby.machine.sampler import DeviceLostError
from boundby.timing.timer import Timer
from boundby.work.roofline import Interval
from tests import evaluation_workplace as workplace
from tests.fakes import FakeClock
from tests.tiny_models import LABELS
from utils.command.errors import EnvironmentLacksError
from utils.evaluation.engine_process import EngineFailed, EngineProcess, reason_of
from utils.report import variants as section
from utils.settings.schema import Variants
from utils.variants import comparison, operators, rounds, ways
from utils.variants.reasons import beside, sentence
from utils.variants.recommendation import Candidate, Tolerance, objection, recommend, won_back_after
from utils.variants.rounds import Measured
from utils.variants.ways import Refused, Variant, Way, Workshop, called

TOLERANCE = Tolerance(0.99, 0.01)
LOGITS = np.eye(2, dtype=np.float32)


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return workplace.prepare(tmp_path_factory.mktemp("variants"), workplace.texts(40))


@pytest.fixture
def here(settings: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, list[str]]:
    """A folder for results of its own, and the command line of a comparison there in which nothing is compiled."""
    which = "variants.which=[sorted,bfloat16,int8,float16]"
    monkeypatch.setattr(rounds, "MOST_ROUNDS", 5)
    return tmp_path, [*settings, f"output.results_dir={tmp_path}", which, "variants.max_seconds=60"]


def run(arguments: Sequence[str], step: str = "05_compare_variants") -> int:
    return importlib.import_module(f"scripts.{step}").main(list(arguments))


def by_name(folder: Path) -> dict[str, dict]:
    return {row["name"]: row for row in json.loads((folder / "variants.json").read_text())["variants"]}


def test_every_variant_is_a_row_with_figures_or_with_the_reason_why_it_is_not_to_be_had(here, monkeypatch, capsys):
    folder, arguments = here
    monkeypatch.setattr("utils.variants.ways.has_bfloat16_matmul", lambda device: False)
    assert run(arguments) == 0
    rows = by_name(folder)
    assert list(rows) == ["unsorted", "sorted", "packed", "bfloat16", "float16", "int8"]
    assert {name: rows[name]["why"] for name in ("bfloat16", "float16")} == dict.fromkeys(
        ("bfloat16", "float16"), "not_possible"
    )
    for name in ("unsorted", "sorted", "packed"):
        assert rows[name]["exactness"]["same_labels"] == rows[name]["exactness"]["rows"] == 40
        assert rows[name]["exactness"]["accuracy_difference"] == 0 and rows[name]["against"] is None
    with (folder / "variants.csv").open() as file:
        table = {row["name"]: row for row in csv.DictReader(file)}
    assert list(table) == list(rows)
    assert table["unsorted"]["attention_backend"] == rows["unsorted"]["attention_backend"] == "flash"
    with (folder / "changed_labels.csv").open() as file:
        assert all(row["in_float32"] != row["in_variant"] for row in csv.DictReader(file))
    assert "not bfloat16, packed: this processor has no bfloat16 products" in capsys.readouterr().out


def test_another_checkpoint_is_compared_by_the_names_of_its_labels_and_refused_where_they_are_others(here, settings):
    folder, arguments = here
    own = Path(next(setting for setting in settings if setting.startswith("model.name")).partition("=")[2])
    for name, change in (
        ("turned", lambda labels: [*labels[1:], labels[0]]),
        ("strange", lambda labels: [*labels[1:], "x"]),
    ):
        shutil.copytree(own, folder / name)
        config = json.loads((own / "config.json").read_text())
        labels = change([config["id2label"][key] for key in sorted(config["id2label"], key=int)])
        config |= {
            "id2label": dict(enumerate(labels)),
            "label2id": {label: column for column, label in enumerate(labels)},
        }
        (folder / name / "config.json").write_text(json.dumps(config))
    checkpoints = ",".join(str(folder / name) for name in ("turned", "strange", "nowhere"))
    assert run([*arguments, "variants.which=[sorted]", f"variants.models=[{checkpoints}]"]) == 0
    turned, strange, nowhere = list(by_name(folder).values())[-3:]
    assert turned["status"] == "measured" and turned["exactness"]["same_labels"] < 40
    assert (
        strange["why"] == "other_labels" and "it lacks " in strange["reason"] and "has x besides" in strange["reason"]
    )
    assert nowhere["why"] == "failed" and "there is no such folder" in nowhere["reason"]


def test_a_conversion_that_fails_costs_its_own_row_alone(here, monkeypatch):
    folder, arguments = here

    def fail(model: object) -> None:
        raise OSError("no kernel")

    precisions = importlib.import_module("utils.variants.ways").ALL_PRECISIONS
    monkeypatch.setitem(precisions, "int8", replace(precisions["int8"], convert=fail))
    assert run(arguments) == 0
    rows = by_name(folder)
    assert (rows["int8"]["why"], rows["int8"]["reason"]) == ("failed", "OSError: no kernel")
    assert rows["packed"]["status"] == "measured"


@pytest.mark.skipif(not has_int8_matmul(torch.device("cpu")), reason="this processor has no products of eight bits")
def test_quantization_is_a_kind_of_its_own():
    model, inputs = torch.nn.Sequential(torch.nn.Sequential(torch.nn.Linear(64, 64))), torch.ones(32, 64)
    to_int8(model)
    calibrate(model, lambda: model(inputs))
    paced = Paced()
    item = paced.measured("unsorted", 0.1)
    item.way = replace(item.way, work=lambda texts: lambda: model(inputs))
    by_variant = operators.replay([item], ["a"] * 8, 8, Timer(paced.clock), torch.device("cpu"), 1e9)["unsorted"]
    assert {"matmul", "quantization"} <= set(by_variant)


def test_settings_run_a_variant_in_float32_where_the_model_s_own_dtype_is_another():
    listed = ways.variants(torch.device("cpu"), Variants(models=["./other"]))
    assert comparison.as_compared(listed, "float32") == listed
    settings = {variant.name: variant.settings for variant in comparison.as_compared(listed, "bfloat16")}
    assert settings["packed"] == ("model.dtype=float32",)
    assert settings["compiled"] == ("model.dtype=float32", "evaluation.compile=on")
    assert settings["bfloat16"] == ("model.dtype=bfloat16",)
    assert settings["model:./other"] == ("model.dtype=float32", "model.name=./other")
    assert settings["sorted"] is None


def test_the_kernels_of_packed_texts_are_attention():
    kernels = ("_varlen_attn", "_efficient_attention_forward", "_scaled_dot_product_flash_attention")
    assert {operators._kind(name) for name in kernels} == {"attention"}


class Paced:
    """Ways that take so many seconds for a text by a clock of their own."""

    def __init__(self) -> None:
        self.clock = FakeClock()

    def measured(self, name: str, text_s: float, fails_at: int | None = None) -> Measured:
        calls = [0]

        def logits(texts: Sequence[str]) -> np.ndarray:
            calls[0] += 1
            if calls[0] == fails_at:
                raise Refused("failed", "broken")
            self.clock.advance(text_s * len(texts))
            return np.tile(LOGITS[0], (len(texts), 1))

        return Measured(Variant(name, name, lambda shop: None), Way(logits, 1, 1), 0.0, 16 * text_s, None)


class FakeEngine:
    """A process of an engine in which the one library can convert nothing, and the other computes noughts and ones."""

    def __init__(self, source, library, max_length, folder, trust_remote_code):
        self.library = library

    def convert(self) -> None:
        if self.library == "onnxruntime":
            raise EngineFailed("RuntimeError: no such operator")

    def open(self, engine: str, calibration: Sequence[str]) -> int:
        return 7

    def logits(self, engine: str, texts: Sequence[str], size: int) -> np.ndarray:
        return np.eye(len(LABELS), dtype=np.float32)[[len(text) % len(LABELS) for text in texts]]

    def rise(self, engine: str, texts: Sequence[str], size: int) -> int | None:
        return None

    def close(self) -> None:
        pass


def test_an_engine_that_cannot_be_had_costs_its_own_row_alone_and_leaves_no_files(here, monkeypatch, capsys):
    folder, arguments = here
    which = "variants.which=[onnxruntime,openvino,openvino_bfloat16,openvino_int8]"
    monkeypatch.setattr("utils.variants.ways.EngineProcess", FakeEngine)
    monkeypatch.setattr("utils.variants.ways.has_bfloat16_matmul", lambda device: False)
    monkeypatch.setattr("importlib.util.find_spec", lambda name, package=None: object())
    assert run([*arguments, which]) == 0
    rows = by_name(folder)
    assert (rows["onnxruntime"]["why"], rows["onnxruntime"]["reason"]) == ("failed", "RuntimeError: no such operator")
    assert rows["openvino_bfloat16"]["why"] == "not_possible"
    assert rows["openvino_int8"]["reason"].endswith("64 texts or more; the dataset has 40")
    assert rows["openvino"]["status"] == "measured" and rows["openvino"]["against"].endswith("are asked for")
    assert rows["openvino"]["attention_backend"] is None and rows["openvino"]["attention_backend_reason"]
    assert rows["openvino"]["disk_bytes"] == 7 and not (folder / "engines").exists()
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=1000))
    assert run([*arguments, which]) == 0
    assert by_name(folder)["openvino"]["why"] == "no_space"
    monkeypatch.setattr("importlib.util.find_spec", lambda name, package=None: None)
    capsys.readouterr()
    assert run([*arguments, "variants.which=[openvino,openvino_bfloat16]"]) == 0
    assert by_name(folder)["openvino"]["why"] == "not_installed"
    said = capsys.readouterr().out.split()
    missing = "not OpenVINO; OpenVINO bfloat16: openvino: not installed; bash setup_environment.sh --engines"
    assert missing in " ".join(said)  # once for both


def test_a_library_that_does_not_load_is_said_to_be_at_fault_and_not_the_model(tmp_path, monkeypatch):
    (tmp_path / "openvino.py").write_text("raise ImportError('libtbb.so: cannot open shared object file')")
    monkeypatch.syspath_prepend(tmp_path)
    said = "^openvino is installed and cannot be loaded: ImportError: libtbb.so: cannot open shared object file$"
    with pytest.raises(EngineFailed, match=said):
        EngineProcess(None, "openvino", 64, tmp_path)


def test_converted_models_give_the_labels_of_the_model_itself(tmp_path):
    for name in ("onnxruntime", "onnxscript", "openvino", "nncf"):
        pytest.importorskip(name, reason="setup/requirements-engines.txt is not installed")
    arguments = workplace.prepare(tmp_path, workplace.texts(80))
    names = ["onnxruntime", "onnxruntime_int8", "openvino", "openvino_int8"]
    assert run([*arguments, f"variants.which=[{','.join(names)}]", "variants.max_seconds=240"]) == 0
    rows = by_name(tmp_path / "results")
    assert {name: rows[name].get("reason") for name in names} == dict.fromkeys(names)
    assert [rows[name]["exactness"]["same_labels"] for name in ("onnxruntime", "openvino")] == [80, 80]
    assert all(rows[name]["disk_bytes"] > 0 for name in names) and not (tmp_path / "results" / "engines").exists()


SLOW_QUANTIZATION = {"matmul": (0.5, 0.4), "other": (0.5, 0.5), "quantization": (0.0, 0.6)}


@pytest.mark.parametrize(("changes", "said"), [
    ({"matmul": (0.58, 0.2), "other": (0.07, 0.07), "activation": (0.07, 0.07)},
     "matmul 2.90× faster; not normalization and elementwise nor activations: 41 % of the time now"),
    (SLOW_QUANTIZATION, "new is quantize/dequantize: 40 % of the time now; matmul 1.25× faster; "
                    "not normalization and elementwise: 33 % of the time now"),
    ({"matmul": (0.4, 0.8), "dispatch": (0.4, 0.41)}, "matmul 2.00× slower (66 % of the time now)"),
    ({"matmul": (56.0, 0.2)}, "matmul 280× faster"),
    # A kind of another version has the name that it had there.
    ({"matmul": (0.4, 0.1), "norm": (0.1, 0.1)}, "matmul 4.0× faster; not norm: 50 % of the time now"),
    ({"matmul": (0.4, 0.41)}, "every kind of operator takes what it took"),
    ({}, None),
])  # fmt: skip
def test_the_reason_names_what_got_faster_and_what_did_not_and_of_a_loss_what_costs_first(changes, said):
    operators = {kind: {"before_s": before, "after_s": after} for kind, (before, after) in changes.items()}
    assert sentence({"name": "int8", "words": "int8", "status": "measured", "operators": operators}) == said


def test_a_model_that_cannot_be_packed_is_not_said_to_have_no_padding():
    way = Way(lambda texts: LOGITS, 1, 1, "padded with a mask")
    assert called(Variant("int8", "int8, packed", lambda shop: way), way) == "int8, padded"
    alone = replace(way, is_padded=False)
    reference = Variant("unsorted", "padded, unsorted", lambda shop: alone, None)
    assert called(reference, alone) == "one text at a time"
    changes = {"matmul": {"before_s": 1.0, "after_s": 0.5}}
    row = {"base": "unsorted", "is_padded": way.is_padded, "operators": changes}
    assert sentence(row).startswith("less padding: ")


def test_a_converted_model_that_gives_logits_of_other_texts_is_refused(monkeypatch):
    of_eight = SimpleNamespace(run=lambda names, inputs: [np.zeros((8, 2), dtype=np.float32)])
    options = SimpleNamespace(add_session_config_entry=lambda key, value: None)
    fake = SimpleNamespace(SessionOptions=lambda: options, InferenceSession=lambda *args, **settings: of_eight)
    monkeypatch.setitem(sys.modules, "onnxruntime", fake)
    session = open_session(Path("model.onnx"), ENGINES["onnxruntime"], 1)
    assert session(np.ones((8, 3)), np.ones((8, 3))).shape == (8, 2)
    with pytest.raises(ValueError, match="gives 8 rows of logits for 5 texts"):
        session(np.ones((5, 3)), np.ones((5, 3)))


def test_a_loss_that_its_operators_do_not_show_is_given_no_reason_of_theirs():
    row = {"name": "int8", "words": "int8", "operators": {"matmul": {"before_s": 1.2, "after_s": 1.0}}}
    assert sentence(row | {"gain_over_base": {"value": 1.1, "low": 0.9, "high": 1.3}}) == "matmul 1.20× faster"
    lost = sentence(row | {"gain_over_base": {"value": 0.8, "low": 0.7, "high": 0.9}})
    assert lost == "its operators on some texts do not show it: there they were 1.20× as fast"
    known = row | {"gain_over_base": {"value": 1.0, "low": 0.96, "high": 1.04}}
    assert sentence(known) == "matmul 1.20× faster", "one batch is not all texts"
    known["operators"] = {"matmul": {"before_s": 1.0, "after_s": 1.5}}
    assert sentence(known) == "its operators on some texts do not show it: there they were 0.67× as fast"


def test_a_reason_is_told_once_and_what_is_faster_but_unsure_is_named():
    def row(name: str, speed: float, **more) -> dict:
        about = {"rows": 30, "same_labels": 30, "agreement": 1.0, "accuracy_difference": None}
        span = {"value": speed / 100, "low": speed / 100, "high": speed / 100}
        return {"name": name, "words": name, "status": "measured", "texts_per_s": {"value": speed}, "gain": span,
                "gain_over_base": span, "base": "unsorted", "latency_ms": {"value": 1.0}, "weight_bytes": None,
                "million_cost": None, "against": None, "exactness": about} | more  # fmt: skip

    few = "too few"
    changes = {"matmul": {"before_s": 1.0, "after_s": 2.0}}
    rows = [row("unsorted", 100), row("slow", 50, operators=changes), row("a", 200, against=few),
            row("b", 300, against=few)]  # fmt: skip
    document = {"variants": rows, "recommended": {"name": "unsorted"}, "texts": 30, "dataset_rows": 3000, "rounds": 2,
             "threads": 1, "batch_size": 8, "doubts": [], "min_agreement": 0.99,
             "max_accuracy_drop": 0.01}  # fmt: skip
    said = " ".join(" ".join(section.console_lines(document)).split())
    assert "not allowed: a; b: too few" in said and "b was faster, but 30 texts are too few to allow it" in said
    assert (
        "slow, 0.50× [0.50, 0.50] against unsorted: fewer tokens, since nothing is padded: matmul 2.00× slower" in said
    )
    rows[3]["exactness"] = rows[3]["exactness"] | {"accuracy_difference": -0.05}
    assert "b was faster" not in " ".join(section.console_lines(document)), "that it is worse is sure enough"
    document["dataset_rows"] = 30
    assert "are too few to allow" not in " ".join(section.console_lines(document))


def test_a_failure_is_told_by_its_cause_on_one_line():
    def wrapped(cause: Exception) -> Exception:
        try:
            raise RuntimeError("Failed to export.\nNext steps: ...") from cause
        except RuntimeError as error:
            return error

    assert reason_of(wrapped(ValueError("found conflicts:\n\n - a shape of 3\nmore"))) == (
        "ValueError: found conflicts: - a shape of 3"
    )
    ours = EnvironmentLacksError("tiny: cpu has no memory for the model; use model.dtype=bfloat16")
    ours.__cause__ = RuntimeError("DefaultCPUAllocator: not enough memory")
    assert reason_of(ours) == str(ours), "what we say has the way out in it"
    placed = RuntimeError("Exception from src/infer_request.cpp:224:\nException from src/graph.cpp:1628:\nNode Add\n")
    assert reason_of(placed) == "RuntimeError: Node Add"
    full = reason_of(wrapped(OSError(errno.ENOSPC, "No space left on device")))
    assert full.startswith("its file cannot be written: No space left on device; output.results_dir")
    assert reason_of(RuntimeError("basic_ios::clear: iostream error")).startswith(
        "its file cannot be written: the disk is full"
    )
    assert reason_of(EngineFailed("its process ended (exit code -9)")) == "its process ended (exit code -9)"


def test_operators_are_told_apart_on_the_same_texts_and_a_fused_model_by_what_is_left():
    layer = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.LayerNorm(8))
    paced, inputs = Paced(), torch.ones(2, 8)
    made = [paced.measured("unsorted", 0.1), paced.measured("compiled", 0.1)]

    def work() -> None:
        paced.clock.advance(1.0)
        layer(inputs)

    for timed, is_compiled in zip(made, (False, True), strict=True):
        timed.way = replace(timed.way, work=lambda texts: work, is_compiled=is_compiled)
    made[1].variant = replace(made[1].variant, base="unsorted")
    by_variant = operators.replay(made, ["a"] * 8, 8, Timer(paced.clock), torch.device("cpu"), 1e9)
    assert set(by_variant["unsorted"]) == {"matmul", "activation", "other", "dispatch"}
    assert sum(by_variant["unsorted"].values()) == pytest.approx(1.0) == sum(by_variant["compiled"].values())
    assert set(by_variant["compiled"]) == {"matmul", "between"} and 0 < by_variant["compiled"]["matmul"] < 1
    assert operators.replay(made, ["a"] * 8, 8, Timer(paced.clock), torch.device("cpu"), 0.0) == {}


@pytest.mark.parametrize(("costs", "said"), [
    ({"linear": 3.0, "layer_norm": 6.0},
     "normalization and elementwise 6.0× slower (67 % of the time now); matmul 1.33× faster"),
    ({"linear": 9.0, "layer_norm": 1.0}, "matmul 2.25× slower (90 % of the time now)"),
    ({"linear": 4.0, "layer_norm": 1.0, "between": 5.0}, "new is dispatch overhead: 50 % of the time now"),
])  # fmt: skip
def test_the_reason_of_a_loss_is_what_its_clock_was_spent_on(monkeypatch, costs, said):
    monkeypatch.setattr("boundby.work.operators.flops", lambda *call: 0)  # of operators made up here
    paced, before = Paced(), {"linear": 4.0, "layer_norm": 1.0}
    made = [paced.measured("packed", 0.1), paced.measured("int8", 0.1)]
    now = dict[str, float]()
    with torch.library._scoped_library("paced", "DEF") as library:
        for name in before:
            library.define(f"{name}(Tensor values) -> Tensor")

            def compute(values: torch.Tensor, name: str = name) -> torch.Tensor:
                paced.clock.advance(now[name])
                return values + 1

            library.impl(name, compute, "CPU")

        def work() -> None:
            torch.ops.paced.layer_norm(torch.ops.paced.linear(torch.ones(2)))
            paced.clock.advance(now.get("between", 0.0))

        for timed, own in zip(made, (before, costs), strict=True):
            costing = partial(unittest.mock.patch.dict, now, own, clear=True)
            timed.way = replace(timed.way, work=lambda texts: work, setting=costing)
        by_variant = operators.replay(made, ["a"] * 8, 8, Timer(paced.clock), torch.device("cpu"), 1e9)
    changes = beside(by_variant["packed"], by_variant["int8"])
    assert sentence({"operators": changes, "gain_over_base": {"value": 0.5, "low": 0.4, "high": 0.6}}) == said


def test_a_machine_that_slows_down_meanwhile_makes_no_variant_slower_than_another():
    paced, inputs, layer = Paced(), torch.ones(2, 8), torch.nn.Linear(8, 8)
    made = [paced.measured(name, 0.1) for name in ("unsorted", "bfloat16", "compiled")]

    def work() -> None:
        paced.clock.advance(1.0 if paced.clock() < 8 else 3.0)
        layer(inputs)

    for timed in made:
        timed.way = replace(timed.way, work=lambda texts: work, is_compiled=timed.variant.name == "compiled")
    by_variant = operators.replay(made, ["a"] * 8, 8, Timer(paced.clock), torch.device("cpu"), 1e9)
    assert len({round(sum(timed.values()), 6) for timed in by_variant.values()}) == 1


def test_nothing_is_compared_where_that_is_switched_off(here, capsys):
    folder, arguments = here
    assert run([*arguments, "variants.enabled=false"]) == 0
    assert not (folder / "variants.json").exists()
    assert "variants.enabled is false" in capsys.readouterr().err


def test_rounds_give_factors_of_the_same_texts_and_one_that_fails_leaves_the_others():
    paced = Paced()
    made = [paced.measured("unsorted", 0.5), paced.measured("twice", 0.25), paced.measured("broken", 0.25, 9)]
    running, refused, taken = rounds.take_turns(
        made, [["a"] * 4, ["b"] * 8] * 3, Timer(paced.clock), 1e9, lambda number: None
    )
    assert [timed.variant.name for timed in running] == ["unsorted", "twice"] and refused["broken"].text == "broken"
    assert taken == [0, 1, 2, 3, 4, 5]  # all six parts, then every interval is narrow
    factor = running[1].over(running[0])
    assert factor == Interval(2.0, 2.0, 2.0) and running[1].texts_per_s([4, 8] * 3).value == pytest.approx(4.0)
    assert sum(len(logits) for logits in running[0].logits) == 36


def test_time_is_the_reason_only_where_more_of_it_would_help():
    paced = Paced()

    def short(shop: object) -> None:
        raise Refused("too_few_texts", "ten texts are too few")

    def way(shop: object) -> Way:
        return paced.measured("any", 0.1).way

    listed = [
        Variant("unsorted", "", way, None),
        Variant("openvino", "", way, "unsorted", setup_s=15.0),
        Variant("openvino_bfloat16", "", way, "openvino"),  # of the same conversion
        Variant("openvino_int8", "", way, "openvino", require=short, setup_s=15.0),
    ]
    shop = SimpleNamespace(loaded=SimpleNamespace(device=torch.device("cpu")), probe=["a"])
    made, refused = rounds.make(listed, shop, Timer(paced.clock), paced.clock() + 20.0, lambda text: None)
    assert [timed.variant.name for timed in made] == ["unsorted"]
    assert {name: refusal.why for name, refusal in refused.items()} == {
        "openvino": "over_budget", "openvino_bfloat16": "over_budget", "openvino_int8": "too_few_texts",
    }  # fmt: skip


def test_at_the_deadline_two_rounds_are_made_and_no_more():
    paced = Paced()
    _, _, taken = rounds.take_turns(
        [paced.measured("unsorted", 1.0)], [["a"] * 4] * 9, Timer(paced.clock), 0.0, lambda number: None
    )
    assert len(taken) == rounds.FEWEST_ROUNDS


@pytest.mark.parametrize(("texts", "seconds", "most", "number", "covered"), [
    (1000, 1e6, 1000, 5, 1000), (1000, 100.0, 1000, 14, 1000), (1000, 1e6, 300, 5, 300), (3, 1e6, 3, 3, 3),
])  # fmt: skip
def test_parts_are_spread_over_all_texts_and_fit_the_seconds(texts, seconds, most, number, covered):
    made = [Paced().measured("unsorted", 0.2)]
    parts = rounds.parts_of(np.arange(texts) % 80, made, 16, seconds, most)
    positions = np.sort(np.concatenate(parts))
    assert len(parts) == number and len(positions) == len(set(positions.tolist())) == covered
    assert all((np.diff(part) > 0).all() for part in parts)  # in the order of arrival


def padded_tokens(lengths: np.ndarray, size: int) -> int:
    longest_first = -np.sort(-lengths)
    return sum(int(longest_first[at]) * len(longest_first[at : at + size]) for at in range(0, len(lengths), size))


@pytest.mark.parametrize("texts", [700, 3000])
def test_a_part_has_texts_of_every_length_and_no_more_padding_when_sorted_than_all_of_them(texts):
    lengths = np.random.default_rng(0).gamma(2, 8, texts).astype(int) + 1
    parts = rounds.parts_of(lengths, [Paced().measured("unsorted", 0.2)], 16, 1e6, texts)
    quarters = np.quantile(lengths, (0.25, 0.5, 0.75))
    assert all(set(np.searchsorted(quarters, lengths[part])) == {0, 1, 2, 3} for part in parts)
    for size in (8, 16):
        assert sum(padded_tokens(lengths[part], size) for part in parts) < 1.02 * padded_tokens(lengths, size)
    assert 1 <= len(rounds.usual_part(lengths)) <= max(map(len, parts))


@pytest.mark.parametrize(("a_batch_s", "size"), [(0.0, 8), (1.0, 32), (1e6, 128)])
def test_a_sorted_way_has_the_batch_size_at_which_a_whole_part_takes_least(a_batch_s, size, monkeypatch):
    """Alone, texts of one length are fastest in the largest batch; a whole part has padding there."""
    clock = FakeClock()

    def logits(texts: Sequence[str], size: int) -> None:
        lengths = np.array([len(text) for text in texts])
        clock.advance(0.01 * padded_tokens(lengths, size) + a_batch_s * -(-len(texts) // size))

    monkeypatch.setattr(ways, "tokenize", lambda tokenizer, texts, most: SimpleNamespace(
        lengths=np.array([len(text) for text in texts])))  # fmt: skip
    by_length = ["a" * (1 + index // 4) for index in range(128)] + ["a" * 40] * 200 + ["a" * 150] * 20
    shop = Workshop(SimpleNamespace(tokenizer=None), 512, 8, by_length, clock, by_length=by_length)
    assert ways._best_size(shop, (8, 32, 128), logits) == size


def report(same: int, rows: int, gained: int = 0, lost: int = 0) -> ExactnessReport:
    """Answers of which `same` keep their label; of those that change, so many become right and wrong."""
    reference = np.tile(LOGITS[0], (rows, 1))
    logits = reference.copy()
    logits[: rows - same] = LOGITS[1]
    labels = [0] * rows
    labels[:gained] = [1] * gained
    labels[gained + lost : rows - same] = [2] * (rows - same - gained - lost)
    return compare_logits("x", logits, reference, labels)


def test_what_keeps_too_few_answers_is_not_allowed_and_the_reason_has_the_figures():
    assert objection(report(1000, 1000), "reduced", TOLERANCE) is None
    assert "95.00 % of 1,000 labels stay; 99.00 % are asked for" in objection(report(950, 1000), "reduced", TOLERANCE)
    few = objection(report(100, 100), "reduced", TOLERANCE)
    assert few == "100.00 % of 100 labels stay, of all texts surely 96.30 % or more; 99.00 % are asked for"
    assert objection(report(100, 100), "same_arithmetic", TOLERANCE) is None
    fell = objection(report(9800, 10000, lost=200), "other_model", TOLERANCE)
    assert fell.startswith("accuracy changes by -2.00 points and may fall by 2.")
    assert objection(report(9000, 10000, gained=500, lost=500), "other_model", TOLERANCE) is None


def test_the_fastest_for_a_million_texts_is_recommended_and_the_simplest_of_equals():
    good = report(1000, 1000)
    candidates = [
        Candidate("plain", 100.0, 0.0, good, "same_arithmetic", True),
        Candidate("close", 195.0, 0.0, good, "reduced", True),
        Candidate("best", 200.0, 0.0, good, "reduced", True),
        Candidate("slow to make", 220.0, 4000.0, good, "reduced", True),
        Candidate("wrong", 900.0, 0.0, report(500, 1000), "reduced", True),
        Candidate("elsewhere", 900.0, 0.0, good, "same_arithmetic", False),
    ]
    factors = {("best", "plain"): Interval(2.0, 1.9, 2.1), ("best", "close"): Interval(1.03, 1.0, 1.06)}
    recommendation = recommend(candidates, factors, TOLERANCE)
    assert recommendation.name == "close" and list(recommendation.against) == ["wrong"]
    sure = factors | {("best", "close"): Interval(1.05, 1.04, 1.06)}
    assert recommend(candidates, sure, TOLERANCE).name == "best"
    assert recommend(candidates[4:], {}, TOLERANCE).name is None
    assert won_back_after(10.0, 200.0, 100.0) == 2001 and won_back_after(10.0, 100.0, 100.0) is None


def test_the_report_gains_the_section_and_its_picture_when_step_05_has_run_after_step_04(here, capsys):
    folder, arguments = here
    quick = ["profiling.batch_sizes=[2]", "profiling.max_seconds_per_batch_size=0.2", "evaluation.enabled=false"]
    settings = [*arguments, *quick, "pod.price_per_hour=2"]
    assert run(settings, "02_baseline_inference") == 0 and run(settings, "04_visualize_results") == 0
    with (folder / "detailed_metrics.csv").open() as file:
        assert [row["attention_backend"] for row in csv.DictReader(file)] == ["flash"]
    assert "Which variant to use" not in (folder / "baseline_summary_report.txt").read_text()
    assert run(settings) == 0
    text = (folder / "baseline_summary_report.txt").read_text()
    document = json.loads((folder / "variants.json").read_text())
    assert "Which variant to use" in text and "python run_pipeline.py" in text
    assert all(row["million_cost"] for row in document["variants"] if row["status"] == "measured")
    assert (folder / "plots" / "variants.png").is_file()
    assert section.console_lines(document)[0].strip()
    assert run([*settings, "--resume"], "04_visualize_results") == 0
    assert "step 04: kept (up to date)" in capsys.readouterr().err


def test_a_variant_that_loses_the_gpu_leaves_the_rounds_before(monkeypatch):
    paced = Paced()
    made = [paced.measured("unsorted", 0.5), paced.measured("twice", 0.25), paced.measured("losing", 0.25)]
    one_round = rounds._one_round

    def loses(timed: Measured, *others: object, **named: object) -> None:
        if timed.variant.name == "losing" and len(timed.seconds) == at:
            raise torch.AcceleratorError("CUDA error: unspecified launch failure\nand more")
        one_round(timed, *others, **named)

    monkeypatch.setattr(rounds, "_one_round", loses)
    at = 3
    running, refused, taken = rounds.take_turns(
        made, [["a"] * 4] * 9, Timer(paced.clock), 1e9, lambda number: None
    )  # fmt: skip
    assert ([timed.variant.name for timed in running], taken) == (["unsorted", "twice"], [0, 1, 2])
    assert all(len(timed.seconds) == len(timed.single_s) == len(timed.logits) == 3 for timed in running)
    assert str(refused["losing"].lost) == "losing: AcceleratorError: CUDA error: unspecified launch failure"
    at = 1
    again = [paced.measured(name, 0.5) for name in ("unsorted", "losing")]
    with pytest.raises(DeviceLostError, match="^losing: "):  # one round says nothing
        rounds.take_turns(again, [["a"] * 4] * 9, Timer(paced.clock), 1e9, lambda number: None)


def test_a_variant_that_lost_the_gpu_before_is_not_tried_again_and_the_others_are():
    paced = Paced()
    listed = [
        Variant(name, f"{name} in words", lambda shop: paced.measured("any", 0.1).way) for name in ("unsorted", "new")
    ]
    shop = SimpleNamespace(loaded=SimpleNamespace(device=torch.device("cpu")), probe=["a"])
    made, refused = rounds.make(listed, shop, Timer(paced.clock), 1e9, lambda text: None, ["new in words"])
    assert [timed.variant.name for timed in made] == ["unsorted"]
    assert refused["new"].text == "it has lost the GPU before, and is not tried again"
