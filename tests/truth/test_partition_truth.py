"""Plans run in processes of one thread each: equal outputs, prediction errors, the regret of the choice, and ends.

Profile, link, contention and stages are measured in runs of their own. Nodes are processes of one machine, so what
they share (memory, clock, other work) is in the figures; they say nothing of two machines.
"""

import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from statistics import median

import psutil
import pytest
import torch

from boundby import files
from boundby.layers.engine import ObservabilityEngine
from boundby.partition import ExecutionPlanner, Link, PartitionPlan, VirtualNode
from boundby.timing.timer import Timer
from tests.layer_models import token_ids
from utils.partition import planning

pytestmark = [pytest.mark.truth, pytest.mark.timeout(3600)]

ROOT = Path(__file__).resolve().parents[2]
ATTEMPTS, ROUNDS = 10, 3
MOST_ERROR, MOST_REGRET = 0.15, 0.05
# Of the machine from before the profile until after the run, as the whole model in this process shows it: half of the
# error that is allowed. It has two speeds a fifth apart, and changes within a minute.
MOST_DRIFT = 0.07
ETHERNET = Link(1e9, 2e-4, is_measured=True)
RAM_GB = 0.1  # neither holds the whole model: there are two stages, however much they slow one another down
NODES = [VirtualNode(name, "cpu", ram_gb=RAM_GB, machine="this one") for name in ("first", "second", "third")]
SIZES = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 128}
CLASSIFIER = {"vocab_size": 500, "num_labels": 5, "pad_token_id": 0}
GPT2 = {"n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": 64, "bos_token_id": 1, "eos_token_id": 1}
FAMILIES = {
    "Bert": {**SIZES, "max_position_embeddings": 64},
    "GPT2": GPT2,
    "Qwen2": {**SIZES, "max_position_embeddings": 64, "num_key_value_heads": 2},
}


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    yield
    torch.set_num_threads(before)


def made(folder, family, length=32, **sizes):
    """Return a classifier of random weights that lies in a folder, inputs, and its profile."""
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**CLASSIFIER, **sizes)
    model = getattr(transformers, f"{family}ForSequenceClassification")(config).eval()
    model.save_pretrained(folder / "model")
    ids = token_ids(1, length, 400) + 1
    return model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def profiled(model, inputs, folder, runs=30):
    return ObservabilityEngine(model, folder / "profile").profile(inputs, runs).profile


def kept(folder, plan: PartitionPlan, profile) -> Path:
    path = folder / "plan.json"
    path.write_text(files.encode_json(planning.plan_file(plan, {"cpu": profile}, str(folder / "model"))))
    return path


def ran(path: Path, *options) -> dict:
    """Run a kept plan; return what was kept of it."""
    command = [sys.executable, "scripts/run_plan.py", path, *options]
    done = subprocess.run([str(part) for part in command], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(path.with_name(f"{path.stem}.run.json").read_text())


@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize("family", FAMILIES)
def test_two_and_three_processes_give_the_outputs_of_the_whole_model(family, stages, tmp_path):
    model, inputs = made(tmp_path, family, **FAMILIES[family])
    profile = profiled(model, inputs, tmp_path, 3)
    units = ExecutionPlanner(profile).chains["cpu"].units
    blocks = [index for index, unit in enumerate(units) if unit.is_block]
    plan = ExecutionPlanner(profile).plan_at(blocks[1:stages], NODES[:stages], "throughput", ETHERNET)
    assert ran(kept(tmp_path, plan, profile), "--requests", 4)["difference"] <= 1e-5


def test_two_torchruns_run_a_plan_as_two_machines_do(tmp_path):
    model, inputs = made(tmp_path, "Bert", **FAMILIES["Bert"])
    profile = profiled(model, inputs, tmp_path, 3)
    path = kept(tmp_path, ExecutionPlanner(profile).plan_at([2], NODES[:2], "throughput", ETHERNET), profile)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
    torchrun += ["--master-addr", "localhost", "--master-port", "29533"]
    both = [
        subprocess.Popen([*torchrun, "--node-rank", str(rank), "scripts/run_plan.py", str(path)], cwd=ROOT)
        for rank in (1, 0)
    ]
    assert [process.wait(600) for process in both] == [0, 0]
    assert len(json.loads(path.with_name("plan.run.json").read_text())["stages"]) == 2


def test_stages_end_when_the_process_that_started_them_is_killed(tmp_path):
    model, inputs = made(tmp_path, "Bert", **FAMILIES["Bert"])
    profile = profiled(model, inputs, tmp_path, 3)
    path = kept(tmp_path, ExecutionPlanner(profile).plan_at([2], NODES[:2], "throughput", ETHERNET), profile)
    command = [sys.executable, "scripts/run_plan.py", str(path), "--requests", "1000000"]
    with subprocess.Popen(command, cwd=ROOT) as parent:
        stages = []
        while not (len(stages) == 2 and all(stage.cpu_times().user > 3 for stage in stages)):  # and at work
            stages = psutil.Process(parent.pid).children()
            time.sleep(0.1)
        parent.kill()
    assert psutil.wait_procs(stages, timeout=60)[1] == []


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gpt2")
    shape = {**GPT2, "n_layer": 6, "n_embd": 512, "n_head": 8, "n_positions": 128}
    return folder, *made(folder, "GPT2", length=64, **shape)


def known(run: dict) -> tuple[list[VirtualNode], Link]:
    factors = [max(1.0, stage["busy_compute"]["median"] / stage["compute"]["median"]) for stage in run["stages"]]
    nodes = [replace(node, contention=factor) for node, factor in zip(NODES, factors, strict=False)]
    return nodes, Link(**run["transfers"][0]["link"])


def forward_s(model, inputs) -> float:
    timer = Timer()
    with torch.no_grad():
        return median(timer.isolated(lambda: model(**inputs)) for _ in range(30))


def test_predictions_of_stages_latency_and_period_are_within_15_percent(gpt2):
    folder, model, inputs = gpt2
    for attempt in range(1, ATTEMPTS + 1):
        profile = profiled(model, inputs, folder)
        plan = ExecutionPlanner(profile, extra_live_bytes=0).generate_plan(
            NODES[:2], "throughput", ETHERNET, in_order=True
        )
        nodes, link = known(ran(kept(folder, plan, profile)))
        alone_s = [forward_s(model, inputs)]
        profile = profiled(model, inputs, folder)  # anew, so that it is of the run's minute
        plan = ExecutionPlanner(profile, extra_live_bytes=0).plan_at(
            [plan.stages[1].first_unit], nodes, "throughput", link
        )
        alone_s.append(forward_s(model, inputs))
        run = ran(kept(folder, plan, profile))
        alone_s.append(forward_s(model, inputs))
        comparison = run["comparison"]
        errors = [*comparison["stages"], comparison["latency"], comparison["period"]]
        print(plan)
        print(f"attempt {attempt}: {'; '.join(run['doubts'])}")
        for error in (*errors, *comparison["busy_stages"], *comparison["transfers"], comparison["last_finish"]):
            print(
                f"  {error['name']}: predicted {1e3 * error['predicted']:.3f} ms, found "
                f"{1e3 * error['measured']:.3f} ms, {100 * error['signed']:+.1f} %"
            )
        print(f"  the model alone: {', '.join(f'{1e3 * alone_:.2f}' for alone_ in alone_s)} ms")
        is_clean = max(alone_s) / min(alone_s) - 1 <= MOST_DRIFT and "disturbed" not in str(run["doubts"])
        worst = max(abs(error["signed"]) for error in errors)
        if worst <= MOST_ERROR or is_clean:
            break
    assert worst <= MOST_ERROR


def test_the_chosen_cut_is_within_5_percent_or_the_noise_of_the_best_one_that_was_run(gpt2):
    folder, model, inputs = gpt2
    profile = profiled(model, inputs, folder)
    planner = ExecutionPlanner(profile, extra_live_bytes=0)
    chosen = planner.generate_plan(NODES[:2], "throughput", ETHERNET, in_order=True).stages[1].first_unit
    cuts = [index for index, unit in enumerate(planner.chains["cpu"].units) if unit.is_block and index]
    periods: dict[int, list[float]] = {cut: [] for cut in {*cuts, chosen}}
    for turn in range(ROUNDS):
        for cut in sorted(periods, reverse=turn % 2 == 1):
            path = kept(folder, planner.plan_at([cut], NODES[:2], "throughput", ETHERNET), profile)
            periods[cut].append(ran(path)["period"]["median"])
    for cut, rounds in periods.items():
        print(f"cut before unit {cut}: {', '.join(f'{1e3 * round:.2f}' for round in rounds)} ms", cut == chosen)
    medians = {cut: median(rounds) for cut, rounds in periods.items()}
    best = min(medians, key=medians.__getitem__)
    noise = max(max(periods[cut]) - min(periods[cut]) for cut in (chosen, best))
    assert medians[chosen] <= max(medians[best] * (1 + MOST_REGRET), medians[best] + noise)
