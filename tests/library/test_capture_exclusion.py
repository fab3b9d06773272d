"""A torch profiler of the program beside ours: theirs is as it would be alone, and the process lives."""

import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, schedule

from boundby.capture import session
from tests.rival_profilers import STEPS

ROOT = Path(__file__).resolve().parents[2]
CPU = [ProfilerActivity.CPU]
AT_WORK, BEGUN = f"trace: {session.AT_WORK}", f"trace: {session.BEGUN}"


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """Return a folder with what each case came to, in a process that a fault would end."""
    folder = tmp_path_factory.mktemp("rivals")
    command = [sys.executable, "-m", "tests.rival_profilers", str(folder)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 0, f"{sorted(each.name for each in folder.iterdir())}\n{ended.stderr}"
    return folder


@pytest.mark.parametrize(
    ("case", "theirs", "ours", "said"),
    [
        ("alone", [1], 2, None),  # it ended before ours began
        ("around", [STEPS], 0, AT_WORK),
        ("warm_before", [2], 0, AT_WORK),
        ("begun_in_warm_up", [2], 2, BEGUN),  # in a later cycle
        ("begun_in_recording", [3], 0, BEGUN),
        ("warm_in_recording", [2], 0, BEGUN),
        ("in_turns", [2, 2, 0], 0, AT_WORK),
        ("of_another_thread", [1], 0, BEGUN),
        ("before_in_another_thread", [1], 0, AT_WORK),
    ],
)
def test_theirs_records_every_step_of_its_own_and_ours_gives_way(outcomes, case, theirs, ours, said):
    found = json.loads((outcomes / f"{case}.json").read_text())
    assert (found["theirs"], found["ours"], found["traced"]) == (theirs, ours, ours)
    assert [each for each in found["downgrades"] if each in (AT_WORK, BEGUN)] == [each for each in [said] if each]
    assert found["later"] == 1, "a profiler that comes later records as if nothing had been"


@pytest.mark.filterwarnings("ignore:.*Profiler")
def test_a_profiler_is_at_work_from_its_warm_up_to_its_end():
    class Derived(profile):
        pass

    seen = [session.is_another_at_work()]
    with Derived(activities=CPU, schedule=schedule(wait=1, warmup=1, active=1, repeat=1)) as theirs:
        for _ in range(4):
            seen.append(session.is_another_at_work())
            theirs.step()
    with profile(activities=CPU, schedule=schedule(wait=0, warmup=2, active=1)):  # it is stopped in its warm-up
        seen.append(session.is_another_at_work())
    assert [*seen, session.is_another_at_work()] == [False, False, True, True, False, True, False]


def test_a_thread_that_no_step_answers_goes_on_after_a_while(monkeypatch):
    monkeypatch.setattr(session, "LONGEST_WAIT_S", 0.0)
    prepared: list[str] = []
    monkeypatch.setattr(session.autograd_profiler, "_prepare_profiler", prepared.append)
    watch = session.Watch(lambda: prepared.append("ours has ended"))
    watch.on()
    thread = threading.Thread(target=lambda: session.autograd_profiler._prepare_profiler("theirs"))
    thread.start()
    thread.join()
    watch.answer()
    watch.off()
    assert prepared == ["theirs", "ours has ended"]


def test_what_is_ours_ends_nothing_and_nothing_of_torch_stays_replaced():
    def functions():
        return session.autograd_profiler._prepare_profiler, session.autograd_profiler._run_on_profiler_start

    before = functions()
    ended: list[str] = []
    watch = session.Watch(lambda: ended.append("ours"))
    watch.on()
    watch.own(lambda: torch.profiler.profile(activities=CPU).__enter__().stop())
    assert ended == []
    watch.off()
    assert functions() == before
