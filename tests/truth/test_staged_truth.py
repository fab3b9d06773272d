"""A plan beside what two workers of one thread each really take: prediction errors, and the regret of the choice.

Profile, link, contention and stages are measured in runs of their own. Nodes are processes of one machine, so what
they share (memory, clock, other work) is in the figures; they say nothing of two machines.
"""

import subprocess
import sys
import textwrap
from pathlib import Path
from statistics import median

import psutil
import pytest
import torch

from boundby.layers.engine import ObservabilityEngine
from boundby.partition import ExecutionPlanner, VirtualNode
from boundby.staged.comparison import compare
from boundby.staged.contention import contention_of
from boundby.staged.cuts import every_cut, plan_at
from boundby.staged.records import Comparison, Regret
from boundby.staged.running import run
from boundby.staged.settling import Settled, settle
from boundby.staged.simulation import simulate
from boundby.staged.trials import measured_link, regret
from boundby.timer import Timer
from tests.layer_models import token_ids

pytestmark = [pytest.mark.truth, pytest.mark.timeout(3600)]

ROOT = Path(__file__).resolve().parents[2]
ATTEMPTS = 10
MOST_ERROR, MOST_REGRET = 0.15, 0.05
# Of the machine from before the profile until after the run, as the whole model in this process shows it: half of the
# error that is allowed. It has two speeds a fifth apart, and changes within a minute.
MOST_DRIFT = 0.07
RAM_GB = 0.1  # neither holds the whole model: there are two stages, however much they slow one another down
NODES = [VirtualNode(name, "cpu", ram_gb=RAM_GB, machine="this one") for name in ("first", "second")]


@pytest.fixture
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    shape = {"n_layer": 6, "n_embd": 512, "n_head": 8, "vocab_size": 8192, "n_positions": 128}
    model = GPT2LMHeadModel(GPT2Config(**shape, bos_token_id=1, eos_token_id=1)).eval()
    return model, {"input_ids": token_ids(1, 64, 8000), "use_cache": False}


def planner_of(gpt2, folder) -> ExecutionPlanner:
    model, inputs = gpt2
    return ExecutionPlanner(ObservabilityEngine(model, folder).profile(inputs, 30), extra_live_bytes=0)


def planned(gpt2, folder):
    """Return the planner, the measured link, and the plan of most throughput over two nodes, with their contention."""
    model, inputs = gpt2
    planner, link = planner_of(gpt2, folder), measured_link()
    found = settle(
        lambda nodes: planner.generate_plan(nodes, "throughput", link, in_order=True),
        lambda plan: contention_of(model, plan, inputs),
        NODES,
    )
    print(f"link: {link.latency_s * 1e6:.0f} us, {link.bytes_per_s / 1e9:.2f} GB/s")
    show_contention(found)
    return planner, link, found


def show_contention(found: Settled) -> None:
    for turn in found.turns:
        for each in turn.contention:
            slowed = each.slowdown
            print(
                f"contention of {each.node} ({each.units[0]} ... {each.units[-1]}) beside {', '.join(each.beside)}: "
                f"{slowed.value:.3f} ({slowed.low:.3f} to {slowed.high:.3f}), alone {1e3 * each.alone.median:.2f} ms, "
                f"together {1e3 * each.together.median:.2f} ms ({each.label}) {'; '.join(each.doubts)}"
            )
    print(f"settled: {found.is_settled} after {len(found.turns)} turns")


def forward_s(gpt2) -> float:
    """Return what a forward of the whole model takes in this process."""
    (model, inputs), timer = gpt2, Timer()
    with torch.no_grad():
        return median(timer.isolated(lambda: model(**inputs)) for _ in range(30))


def show(attempt: int, found: Comparison) -> None:
    named = {"compute": found.stages, "busy compute": found.busy_stages, "transfer": found.transfers}
    named |= {"": tuple(each for each in (found.latency, found.period, found.last_finish) if each)}
    print(f"attempt {attempt} ({found.label}): {'; '.join(found.doubts)}")
    for what, errors in named.items():
        for each in errors:
            print(
                f"  {each.name} {what}: predicted {1e3 * each.predicted:.3f} ms, found {1e3 * each.found:.3f} ms, "
                f"{100 * each.signed:+.1f} %"
            )


def test_predictions_of_stages_latency_and_period_are_within_15_percent(gpt2, tmp_path, one_thread):
    model, inputs = gpt2
    for attempt in range(1, ATTEMPTS + 1):
        _, link, settled = planned(gpt2, tmp_path / f"contention {attempt}")
        alone_s = [forward_s(gpt2)]
        chains = planner_of(gpt2, tmp_path / f"profile {attempt}").chains  # anew, so that it is of the run's minute
        alone_s.append(forward_s(gpt2))
        plan = plan_at([settled.plan.stages[1].first_unit], settled.plan, chains, settled.nodes, link)
        result = run(model, plan, inputs)
        alone_s.append(forward_s(gpt2))
        drift = max(alone_s) / min(alone_s) - 1
        with torch.no_grad():
            assert torch.equal(result.outputs.logits, model(**inputs).logits)
        simulated = simulate(plan, 40)
        assert simulated.period_s <= plan.period_s * (1 + 1e-9)
        assert simulated.first_finish_s <= simulated.last_finish_s <= plan.latency_s + 39 * plan.period_s
        found = compare(plan, result.measured)
        print(plan)
        show(attempt, found)
        print(f"  simulated period: {1e3 * simulated.period_s:.3f} ms")
        alone = ", ".join(f"{1e3 * each:.2f}" for each in alone_s)
        print(f"  the model alone before the profile, between it and the run, after the run: {alone} ms")
        errors = [each.signed for each in (*found.stages, found.latency, found.period)]
        contention = [each.doubts for turn in settled.turns for each in turn.contention]
        is_clean = drift <= MOST_DRIFT and not is_disturbed(plan.doubts, found.doubts, *contention)
        if max(map(abs, errors)) <= MOST_ERROR or is_clean:
            break
    assert max(map(abs, errors)) <= MOST_ERROR


def is_disturbed(*doubts: tuple[str, ...]) -> bool:
    return any(each.startswith("disturbed:") for some in doubts for each in some)


def test_the_chosen_cut_is_within_5_percent_or_the_noise_of_the_best_one_that_was_run(gpt2, tmp_path, one_thread):
    planner, link, settled = planned(gpt2, tmp_path)
    plan = settled.plan
    chosen = plan.stages[1].units[0]
    found = regret(*gpt2, every_cut(plan, planner.chains, settled.nodes, link), chosen)
    show_cuts(found)
    assert found.regret <= MOST_REGRET or found.is_within_noise


def show_cuts(found: Regret) -> None:
    for each in found.cuts:
        rounds = ", ".join(f"{1e3 * value:.2f}" for value in each.rounds_s)
        mark = " <- chosen" if each.name == found.chosen.name else " <- best" if each.name == found.best.name else ""
        print(
            f"cut before {each.name}: predicted {1e3 * each.predicted_s:.2f} ms, found {1e3 * each.median_s:.2f} ms "
            f"({rounds}; {100 * (each.predicted_s / each.median_s - 1):+.1f} %){mark}"
        )
    noise = "unknown" if found.noise is None else f"{100 * found.noise:.1f} %"
    print(f"regret {100 * found.regret:.1f} %, noise {noise} ({found.label}): {'; '.join(found.doubts)}")


def test_workers_end_when_the_process_that_started_them_is_killed():
    code = """
        import torch
        from torch import nn
        from boundby.staged.pipeline import Pipeline
        from tests.staged_plans import plan_of

        Pipeline._check = lambda pipeline: (print(*pipeline.pids, flush=True), input())
        with Pipeline(nn.Sequential(nn.Linear(4, 4)).eval(), plan_of("0"), torch.ones(1, 4)):
            pass
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        pids = [int(each) for each in parent.stdout.readline().split()]
        assert len(pids) == 1 and psutil.pid_exists(pids[0])
        parent.kill()
    living = [psutil.Process(each) for each in pids if psutil.pid_exists(each)]
    assert psutil.wait_procs(living, timeout=60)[1] == []
