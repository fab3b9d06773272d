"""Ray under the clock and under fire; run by `make truth`, which prints every attempt."""

import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from boundby import files
from tests import evaluation_workplace as workplace
from tests import ray_workers, tiny_models
from utils.command.artifacts import EvaluationFolder
from utils.evaluation import planning, ray_engine

pytest.importorskip("ray", reason="Ray is not installed: bash setup_environment.sh --ray")
pytestmark = [pytest.mark.truth, pytest.mark.timeout(1500)]
ROOT = Path(__file__).resolve().parents[2]
LARGER = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 1024}
ROWS, SHARD_ROWS = 6144, 128
ROUNDS, ROUND_ROWS = 20, 1536  # in each of which some workers are killed, and what each predicts
MOST_KILLS, LONGEST_PAUSE_S = 3, 1.0  # in a round, and before each
ATTEMPTS, LEAST_SHARE, MOST_OVERHEAD_S = 3, 0.9, 0.5
MOST_S = 3.0  # from SIGTERM until a shard is abandoned
DISTRIBUTE = ray_engine.distribute
MOST_LEFT_S = 180.0  # two agents of Ray look for their dead server for more than a minute


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A dataset and a model that has something to compute, and the command line that evaluates it."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in LARGER.items():
            patch.setitem(tiny_models.SIZE, name, value)
        settings = workplace.prepare(tmp_path_factory.mktemp("ray"), workplace.texts(ROWS))
    return [*settings, "evaluation.token_budget=1024"]


def ray_settings(made: list[str], folder: Path, workers: int) -> list[str]:
    return [*made, f"output.results_dir={folder}", f"evaluation.workers={workers}", "evaluation.engine=ray"]


def test_faults_of_workers_killed_in_every_round_cost_no_row_and_no_byte(made, tmp_path, monkeypatch):
    monkeypatch.setitem(planning.SHARD_ROWS, "cpu", SHARD_ROWS)
    settings = [*ray_settings(made, tmp_path, 2), f"evaluation.limit={ROUND_ROWS}"]
    assert workplace.evaluate(settings, "plan") == [0]
    alone = [*settings, "evaluation.engine=local", "evaluation.workers=1"]
    assert workplace.evaluate(alone, "run", "finalize") == [0, 0]
    folder = EvaluationFolder(tmp_path / "evaluation")
    undisturbed = workplace.results(folder.path)
    rng, rounds, kills = random.Random(0), 0, 0
    while rounds < ROUNDS:
        for path in undisturbed:
            (folder.path / path).unlink()
        ended, killed = threading.Event(), []
        killer = threading.Thread(target=kill_workers, args=(ended, killed, rng))
        killer.start()
        try:
            assert workplace.evaluate(settings, "run", "finalize") == [0, 0]
        finally:
            ended.set()
            killer.join()
        rounds, kills = rounds + bool(killed), kills + len(killed)
        same = workplace.results(folder.path) == undisturbed
        print(f"round {rounds}/{ROUNDS}: killed {', '.join(killed) or 'none'}; all as undisturbed: {same}", flush=True)
        assert same
    print(f"{kills} workers killed in {rounds} rounds, 0 rows lost, 0 doubled, 0 bytes changed")
    assert ray_workers.started() == []


def kill_workers(ended: threading.Event, killed: list[str], rng: random.Random) -> None:
    """Kill some workers, mostly one that computes, sometimes one that is still starting."""
    while len(killed) < MOST_KILLS and not ended.wait(rng.uniform(0.05, LONGEST_PAUSE_S)):
        workers = ray_workers.actors()
        busy = [worker for worker in workers if "predict" in ray_workers.command(worker)[0]]
        chosen = rng.choice(workers if rng.random() < 0.25 else busy) if busy else None
        if chosen is not None:
            chosen.kill()
            killed.append("one in a shard" if chosen in busy else "one that starts")


def test_two_workers_with_a_thread_each_are_as_fast_as_one_with_two(made, tmp_path, monkeypatch):
    monkeypatch.setitem(planning.SHARD_ROWS, "cpu", SHARD_ROWS)
    monkeypatch.setattr(ray_engine, "distribute", together)
    if (os.cpu_count() or 1) < 2:
        pytest.skip("needs two cores")
    rates: dict[int, list[float]] = {1: [], 2: []}
    overheads: dict[int, list[float]] = {1: [], 2: []}
    for attempt in range(ATTEMPTS):
        for workers in (1, 2) if attempt % 2 == 0 else (2, 1):
            folder = tmp_path / f"{attempt}-{workers}"
            settings = ray_settings(made, folder, workers)
            planned_for_two_cores = pytest.MonkeyPatch()
            planned_for_two_cores.setattr("torch.get_num_threads", lambda: 2)
            assert workplace.evaluate(settings, "plan") == [0]
            planned_for_two_cores.undo()
            assert workplace.evaluate(settings, "run", "finalize") == [0, 0]
            rate, overhead = speed(EvaluationFolder(folder / "evaluation"), workers)
            rates[workers].append(rate)
            overheads[workers].append(overhead)
            print(
                f"attempt {attempt + 1}, {workers} workers: {rate:.1f} rows/s, {1e3 * overhead:.1f} ms beside a shard"
            )
    one, two = (statistics.median(rates[workers]) for workers in (1, 2))
    most = max(statistics.median(overhead) for overhead in overheads.values())
    print(f"two workers with a thread each: {two / one:.3f} of one with two; at most {1e3 * most:.1f} ms per shard")
    assert two / one >= LEAST_SHARE
    assert most <= MOST_OVERHEAD_S


def together(ray, workers, *arguments):
    """Have shards predicted only when all workers have their model, so that starting does not count."""
    ray.get([worker.start.remote() for worker in workers])
    return DISTRIBUTE(ray, workers, *arguments)


def speed(folder: EvaluationFolder, workers: int) -> tuple[float, float]:
    """Return rows per second over the whole set, and the seconds per shard that a worker spent beside predicting."""
    metrics = json.loads(folder.metrics.read_text())["metrics"]
    costs = [files.read_json(path) for path in folder.path.glob("cost-*.json")]
    began = min(cost["started_s"] for cost in costs)
    whole = max(cost["started_s"] + cost["seconds"] for cost in costs) - began
    beside = whole * workers - sum(cost["seconds"] for cost in costs)
    return metrics["samples"] / whole, beside / len(costs)


def test_sigterm_abandons_the_shard_at_once_and_a_killed_program_takes_ray_with_it(made, tmp_path):
    settings = ray_settings(made, tmp_path, 1)
    command = [sys.executable, str(ROOT / "scripts" / "evaluate.py")]
    subprocess.run([*command, "plan", *settings], check=True, capture_output=True, timeout=600)
    for number, expected in ((signal.SIGTERM, 143), (signal.SIGKILL, -signal.SIGKILL)):
        with subprocess.Popen([*command, "run", *settings], stderr=subprocess.PIPE, text=True) as run:
            assert next(line for line in run.stderr if re.search(r"evaluation \d+/", line))
            left = psutil.Process(run.pid).children(recursive=True)
            workers = ray_workers.actors(run.pid)
            began = time.monotonic()
            run.send_signal(number)
            working = psutil.wait_procs(workers, timeout=60)[1]
            abandoned = time.monotonic() - began
            code = run.wait(60)
            ended = time.monotonic() - began
        gone, alive = psutil.wait_procs(left, timeout=MOST_LEFT_S)
        all_s = time.monotonic() - began
        print(
            f"{number.name}: {len(workers)} worker gone after {abandoned:.2f} s, exit {code} after {ended:.2f} s, "
            f"{len(gone)} processes of Ray gone after {all_s:.1f} s"
        )
        assert len(workers) == 1 and working == alive == []
        assert code == expected and (number == signal.SIGKILL or abandoned < MOST_S)
    subprocess.run([*command, "run", *settings], check=True, capture_output=True, timeout=600)
    subprocess.run([*command, "finalize", *settings], check=True, capture_output=True, timeout=600)
