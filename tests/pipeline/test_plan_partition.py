"""`scripts/plan_partition.py` as a person and a program meet it: text, one JSON document, a picture, exit codes."""

import importlib
import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from msgspec.structs import replace

from boundby.layers.records import ModelProfile
from boundby.layers.report import write_summary
from boundby.partition import ExecutionPlanner, Link, VirtualNode
from tests import layer_profiles as profiles
from utils.partition import picture as partition
from utils.partition import planning
from utils.report.pictures import style

Command = Callable[..., tuple[int, str, str]]
WIDEST = 100
EXAMPLE = profiles.REPOSITORY / "configs" / "nodes.yaml"
ALIKE = {
    "nodes": [{"name": "one", "kind": "cpu", "ram_gb": 0.5}, {"name": "two", "kind": "cpu", "ram_gb": 0.5}],
    "links": {"default": {"gb_per_s": 1.0, "latency_us": 10, "measured": True}},
}


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Command:
    def start(*arguments: Any) -> tuple[int, str, str]:
        code = importlib.import_module("scripts.plan_partition").main([str(argument) for argument in arguments])
        return code, *capsys.readouterr()

    return start


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    """Store GPT-2 as a CPU gives it."""
    return store(tmp_path / "cpu", profiles.gpt2())


def store(folder: Path, made: ModelProfile) -> Path:
    path = folder / "gpt2_summary.json"
    write_summary(path, made)
    return path


def nodes(folder: Path, **changes: Any) -> Path:
    path = folder / "nodes.yaml"
    path.write_text(json.dumps({**ALIKE, **changes}))  # which is YAML too
    return path


def test_a_plan_is_told_with_its_stages_and_what_it_was_chosen_from(run, profile, tmp_path) -> None:
    code, out, err = run(profile, "--nodes", nodes(tmp_path), "--objective", "throughput")
    assert (code, err) == (0, "")
    assert out.startswith("2 stages, time between two requests of many: ")
    assert "gpt2, profiled on AMD EPYC, 2 cores (cpu)" in out
    for expected in ("Stages:", "Transfers:", "What limits it:", "equal split", "greedy by bytes", "requests/s"):
        assert expected in out
    assert max(map(len, out.splitlines())) <= WIDEST


def test_one_json_document_holds_the_same_plan(run, profile, tmp_path) -> None:
    code, out, _ = run(profile, "--nodes", nodes(tmp_path), "--objective", "requests", "--requests", 8, "--json")
    document = json.loads(out)
    plan = document["plan"]
    assert code == 0 and document["feasible"] and document["profiles"][0]["kind"] == "cpu"
    assert plan["value_s"] == pytest.approx(plan["latency_s"] + 7 * plan["period_s"])
    assert plan["requests_per_s"] == pytest.approx(1 / plan["period_s"]) and plan["requests_per_s_reason"] is None
    for stage in plan["stages"]:
        memory = stage["memory_bytes"]
        parts = ("weights", "kv_cache", "activations", "inputs_in_flight")
        assert memory["total"] == sum(memory[part] for part in parts) == stage["usable_bytes"] - memory["free"]
    assert [stage["first_unit"] for stage in plan["stages"]] == [0, plan["stages"][0]["end_unit"]]


def test_nodes_of_one_machine_claim_throughput_with_their_measured_contention_alone(run, profile, tmp_path) -> None:
    shared = [{**node, "machine": "pod"} for node in ALIKE["nodes"]]
    code, out, _ = run(profile, "--nodes", nodes(tmp_path, nodes=shared), "--objective", "throughput")
    assert code == 0 and "(assumed)" in out.splitlines()[0] and "not claimed: how much the nodes of one machine" in out
    assert "one and two share a machine (pod)" in " ".join(out.split())
    known = nodes(tmp_path, nodes=[{**node, "contention": 1.25} for node in shared])
    picture = tmp_path / "shared.png"
    code, out, err = run(profile, "--nodes", known, "--objective", "throughput", "--picture", picture)
    assert f"wrote {picture}" in err and picture.read_bytes().startswith(b"\x89PNG")
    assert code == 0 and "(measured)" in out.splitlines()[0] and "requests/s" in out and "busy: while" in out
    assert max(map(len, out.splitlines())) <= WIDEST
    stages = json.loads(run(profile, "--nodes", known, "--objective", "throughput", "--json")[1])["plan"]["stages"]
    assert [stage["machine"] for stage in stages] == ["pod"] * 2


def test_the_same_model_of_two_kinds_is_planned_with_both_times(run, profile, tmp_path) -> None:
    gpu = store(tmp_path / "gpu", profiles.with_memory(profiles.gpt2()))
    both = nodes(tmp_path, nodes=[*ALIKE["nodes"], {"name": "three", "kind": "gpu", "vram_gb": 0.1}])
    code, out, _ = run(profile, gpu.parent, "--nodes", both, "--json")
    assert code == 0 and [source["kind"] for source in json.loads(out)["profiles"]] == ["cpu", "gpu"]
    named = nodes(tmp_path, nodes=[{"name": "big", "kind": "h200", "vram_gb": 141}])
    code, out, _ = run(f"h200={gpu}", profile, "--nodes", named, "--json")
    assert code == 0 and json.loads(out)["plan"]["basis"] == "measured"
    shutil.copytree(profile.parent, tmp_path / "h200=x")  # a folder whose name has an equals sign is a folder
    assert run(tmp_path / "h200=x", "--nodes", nodes(tmp_path))[0] == 0


def test_no_split_that_fits_is_a_finding_that_says_what_is_missing(run, profile, tmp_path) -> None:
    small = [{"name": name, "kind": "cpu", "ram_gb": 0.1, "headroom": 0} for name in ("one", "two")]
    code, out, _ = run(profile, "--nodes", nodes(tmp_path, nodes=small), "--picture", tmp_path / "none.png")
    assert code == 1 and out.startswith("INFEASIBLE: ") and "MB more" in out
    assert not (tmp_path / "none.png").exists()
    code, out, _ = run(profile, "--nodes", nodes(tmp_path, nodes=small), "--json")
    missing = json.loads(out)["missing"]
    assert code == 1 and missing["extra_bytes"] == min(missing["extra_bytes_by_node"].values()) > 0
    small[0]["ram_gb"] += missing["extra_bytes"] / 1e9
    assert run(profile, "--nodes", nodes(tmp_path, nodes=small))[0] == 0


def test_the_example_states_every_setting_and_can_be_planned_for(run, profile, tmp_path) -> None:
    code, out, _ = run(profile)
    assert code == 0 and out.startswith("1 stage, latency of one request: ")
    stated = yaml.safe_load(EXAMPLE.read_text())
    read = planning.read_nodes(EXAMPLE)
    assert set(stated) == set(planning.NodesConfig.model_fields)
    assert set(stated["workload"]) == set(planning.Workload.model_fields)
    assert read.workload == planning.Workload() and read.links.default == planning.LinkSettings().default
    assert (read.in_order, read.nodes[0].headroom) == (False, 0.1)
    known = {key for node in stated["nodes"] for key in node}
    assert known == set(planning.Node.model_fields)
    pairs = [{"between": ["one", "two"], "gb_per_s": 12, "latency_us": 20, "measured": True}]
    links = planning.read_nodes(nodes(tmp_path, links={"pairs": pairs})).link_table()
    assert links.between("two", "one") == Link(12e9, 20e-6, True), "in SI units"
    assert links.between("one", "x") == Link(1.25e9, 50e-6, False)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"nodes": []}, "nodes: list should have at least 1 item"),
        ({"nodes": [{"name": "a", "kind": "cpu", "ram_gb": 4, "sped": 1}]}, "unknown key"),
        ({"nodes": [{"name": "a", "kind": "cpu", "ram_gb": 4, "contention": 1.2}]}, "but no machine is named"),
        ({"nodes": [{**ALIKE["nodes"][0], "machine": "m", "contention": 0.5}]}, "greater than or equal to 1"),
        ({"nodes": ALIKE["nodes"] * 2}, "node 'one' is given twice"),
        ({"links": {"pairs": [{"between": ["one", "six"], "gb_per_s": 1}]}}, "names 'six'; the nodes are one, two"),
        ({"links": {"pairs": [{"between": ["one", "one"], "gb_per_s": 1}]}}, "from 'one' to itself"),
        ({"links": {"pairs": [{"between": ["one", "two"], "gb_per_s": 1}] * 2}}, "gives one to two twice"),
        ({"links": {"default": {"gb_per_s": 0}}}, "greater than 0"),
        ({"workloads": {}}, "did you mean 'workload'?"),
        ({"nodes": [{"name": "a", "kind": "cpu", "ramgb": 4}]}, "nodes[0].ramgb: unknown key, did you mean 'ram_gb'?"),
    ],
)
def test_wrong_nodes_end_with_two_and_say_where(run, profile, tmp_path, changes, says) -> None:
    code, _, err = run(profile, "--nodes", nodes(tmp_path, **changes))
    assert code == 2 and says in err and "nodes.yaml" in err


def test_a_plan_is_made_of_what_lies_beside_the_profile_and_says_that_the_nodes_are_examples(run, profile, tmp_path):
    expected = run(profile, "--nodes", nodes(tmp_path))[1]
    (tmp_path / "results" / "layers").mkdir(parents=True)
    shutil.copy(profile, tmp_path / "results" / "layers")
    beside = (profile.with_name("gpt2_metrics.jsonl"), profile.with_name("gpt2_dashboard.html"))
    for given in (*beside, tmp_path / "results", tmp_path / "results" / "report.html"):
        assert run(given, "--nodes", nodes(tmp_path))[:2] == (0, expected) and "not for this machine" not in expected
    assert "for the example nodes in nodes.yaml, not for this machine" in " ".join(run(profile)[1].split())
    assert "not for this machine" in json.loads(run(profile, "--json")[1])["plan"]["notes"][0]


def test_a_preset_is_profiled_before_it_is_planned(run, tmp_path, monkeypatch):
    made = profiles.gpt2()
    monkeypatch.setattr(planning, "_measured", lambda model: replace(made, model_name=model))
    code, shown, _ = run("distilgpt2", "--nodes", nodes(tmp_path))
    assert code == 0 and "distilgpt2, profiled on" in shown


def test_what_cannot_be_used_ends_with_two(run, profile, tmp_path) -> None:
    (tmp_path / "other.json").write_text("[]")
    (tmp_path / "empty").mkdir()
    known = nodes(tmp_path)
    other = store(tmp_path / "gpu", profiles.with_memory(profiles.gpt2(blocks=6)))
    for arguments, says in (
        ([profile, other, "--nodes", known], "not of the same model: 17 and 11 units"),
        (["missing.json"], "missing.json is not there"),
        (["no-such-preset"], "no such preset"),
        ([tmp_path / "other.json"], "is no summary of a profile by layer"),
        ([tmp_path / "empty"], "holds 0 profiles"),
        ([profile, profile], "is a second profile of kind 'cpu'"),
        ([profile, "--nodes", tmp_path / "no.yaml"], "no such file of nodes"),
        ([profile, "--nodes", known, "--objective", "requests"], "go together"),
        ([profile, "--nodes", known, "--requests", 3], "go together"),
        ([profile, "--nodes", known, "--picture", tmp_path / "a.jpg"], "ends with .png"),
    ):
        code, out, err = run(*arguments)
        assert (code, out) == (2, "") and says in err, says


def test_of_long_names_of_units_the_ends_are_told(run, tmp_path) -> None:
    made = profiles.gpt2(blocks=2)
    long = {row.path: row.path.replace("transformer", "the_whole_model.its_language_model") for row in made.layers}
    layers = (replace(layer, path=long[layer.path], parent=long.get(layer.parent)) for layer in made.layers)
    path = store(tmp_path / "long", replace(made, layers=tuple(layers)))
    assert "wte ... lm_head " in run(path, "--nodes", nodes(tmp_path))[1]


def test_names_of_strangers_change_no_line(run, tmp_path) -> None:
    made = profiles.gpt2(blocks=2)
    odd = tuple(replace(layer, path=layer.path.replace("h.", "h\x1b[31m\n."), name=layer.name) for layer in made.layers)
    relative = {row.path: new.path for row, new in zip(made.layers, odd, strict=True)}
    odd = tuple(replace(row, parent=relative.get(row.parent)) for row in odd)
    path = store(tmp_path / "odd", replace(made, layers=odd, model_name="<b>\x1b[0m\u202e", device_name="\x00x\n"))
    code, out, _ = run(path, "--nodes", nodes(tmp_path), "--picture", tmp_path / "odd.png")
    assert code == 0 and not set("\x1b\x00\u202e") & set(out)


# The picture.


def figure(ram_gb: float, **plan: Any) -> Any:
    planner = ExecutionPlanner(profiles.gpt2())
    plan_drawn = planner.generate_plan([VirtualNode(name, "cpu", ram_gb=ram_gb) for name in "abc"], **plan)
    drawn = partition.figure(plan_drawn, style.Subject("a plan", "of a model", is_synthetic=False))
    drawn.savefig(io.BytesIO(), dpi=40)
    return plan_drawn, drawn


def test_the_picture_shows_every_stage_and_transfer() -> None:
    plan, drawn = figure(0.5, objective="throughput")
    time, memory = drawn.axes
    assert [label.get_text() for label in time.get_yticklabels()] == ["a (cpu)", "b (cpu)", "c (cpu)"]
    written = [text.get_text() for text in time.texts]
    assert sum(" kB" in text for text in written) == 2 and sum("units, " in text for text in written) == 3
    assert "may come every" in time.get_title("left")
    assert sum("that may be used" in text.get_text() for text in memory.texts) == len(plan.stages)
    _, drawn = figure(4)
    assert len(drawn.axes[0].get_yticklabels()) == 1
