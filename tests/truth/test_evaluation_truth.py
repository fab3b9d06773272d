"""The evaluation under kills, several runners, and a million rows; run by `make truth`."""

import multiprocessing
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import evaluation_workplace as workplace

ROOT = Path(__file__).resolve().parents[2]
SIZES = (10_000, 100_000, 1_000_000)
GROWTH_BYTES = 64e6  # of the peak from 10 thousand to a million rows: 24 bytes a row would be allowed, a text would not
PLANNING_S = 60.0
SIGTERM_S = 3.0
pytestmark = pytest.mark.truth


@pytest.fixture(scope="module")
def long(tmp_path_factory):
    """An evaluation of several shards that takes seconds: its command line, and what it leaves undisturbed."""
    folder = tmp_path_factory.mktemp("long")
    settings = [*workplace.prepare(folder, workplace.texts(12_000)), "evaluation.token_budget=2048"]
    assert workplace.evaluate(settings, "plan", "run", "finalize") == [0, 0, 0]
    return settings, workplace.results(folder / "results" / "evaluation")


def start(settings: list[str], results: Path, action: str) -> subprocess.Popen:
    command = [sys.executable, str(ROOT / "scripts" / "evaluate.py"), *action.split(), *settings]
    return subprocess.Popen([*command, f"output.results_dir={results}"], stderr=subprocess.PIPE, text=True)


def ended(process: subprocess.Popen) -> int:
    """Return the exit code of the process when it has ended, with its pipe closed."""
    process.communicate()
    return process.returncode


def parts(results: Path) -> int:
    return len(list((results / "evaluation").glob("part-*.parquet")))


def finish(settings: list[str], results: Path) -> dict[str, bytes]:
    for action in ("run", "finalize"):
        assert ended(start(settings, results, action)) == 0
    return workplace.results(results / "evaluation")


def test_three_runners_at_once_leave_the_same_bytes(long, tmp_path):
    settings, undisturbed = long
    assert ended(start(settings, tmp_path, "plan")) == 0
    runners = [start(settings, tmp_path, "run") for _ in range(3)]
    codes = [ended(runner) for runner in runners]
    print(f"three runners: exits {codes}, {parts(tmp_path)} parts")
    assert codes == [0, 0, 0]
    assert finish(settings, tmp_path) == undisturbed


def test_sigterm_ends_a_run_within_seconds(long, tmp_path):
    settings, undisturbed = long
    assert ended(start(settings, tmp_path, "plan")) == 0
    runner = start(settings, tmp_path, "run")
    while parts(tmp_path) == 0 and runner.poll() is None:
        time.sleep(0.05)
    runner.send_signal(signal.SIGTERM)
    began = time.monotonic()
    while "terminated" not in runner.stderr.readline():  # then the shard is given up; the interpreter still tidies up
        assert runner.poll() is None
    took_s = time.monotonic() - began
    code = ended(runner)
    print(f"exit {code}, {took_s:.2f} s after SIGTERM, {parts(tmp_path)} parts kept")
    assert code == 143 and took_s < SIGTERM_S
    assert finish(settings, tmp_path) == undisturbed


def evaluate_in_process(settings: list[str], answer) -> None:
    """Evaluate in this process; send the seconds of each action and the peak in bytes."""
    seconds = [time.monotonic()]
    for action in workplace.WHOLE:
        assert workplace.evaluate(settings, action) == [0]
        seconds.append(time.monotonic())
    phases = [after - before for before, after in zip(seconds, seconds[1:], strict=False)]
    answer.send((phases, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024))


def test_memory_is_flat_time_linear_and_planning_short_up_to_a_million_rows(tmp_path):
    by_rows = {}
    for rows in SIZES:
        here, there = multiprocessing.get_context("spawn").Pipe()
        settings = [*workplace.prepare(tmp_path / str(rows), workplace.texts(rows)), "evaluation.token_budget=2048"]
        process = multiprocessing.get_context("spawn").Process(target=evaluate_in_process, args=(settings, there))
        process.start()
        there.close()
        (plan_s, run_s, finalize_s), peak = by_rows[rows] = here.recv()
        process.join()
        print(
            f"{rows:,} rows: plan {plan_s:.1f} s, run {run_s:.1f} s, finalize {finalize_s:.1f} s, {peak / 1e6:.0f} MB"
        )
    peaks = [peak for _, peak in by_rows.values()]
    assert max(peaks) - peaks[0] < GROWTH_BYTES
    assert by_rows[SIZES[-1]][0][0] < PLANNING_S
    per_row = [sum(phases) / rows for rows, (phases, _) in by_rows.items()]
    assert per_row[-1] < 1.5 * per_row[1]  # the smallest pays for the start
