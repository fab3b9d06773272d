"""A training program of somebody's own, recorded without a change to it."""

import importlib
import json
import sys
from pathlib import Path

import pytest

from boundby.training import StageTimes, read_stage_times
from utils.command.console import Console

TRAIN = """
import sys, torch
from torch.utils.data import DataLoader, TensorDataset

model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
rows = TensorDataset(torch.randn(24, 4), torch.zeros(24, dtype=torch.long))
for epoch in range(2):
    for x, y in DataLoader(rows, batch_size=4):
        for part in (x[:2], x[2:]):
            torch.nn.functional.cross_entropy(model(part), y[:2]).backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        for x, y in DataLoader(rows, batch_size=12):
            model(x)
    model.train()
import sitecustomize_of_the_user
print("trained", sys.argv[1])
sys.exit(7)
"""


OWN_WAYS = """
import torch
from torch.utils.data import DataLoader

policy = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(policy.parameters(), lr=0.1)
x = torch.randn(8, 4)

def learn(x):
    policy(x).sum().backward()
    optimizer.step()

for step in range(4):
    with torch.no_grad():
        policy(x)  # a rollout
    learn(x)
policy.eval()
for step in range(4):
    learn(x)
policy.train()
for x in DataLoader(x, 4, num_workers=1):
    learn(x)
with torch.no_grad():
    for y in DataLoader(torch.randn(8, 4), 4):
        policy(y)  # an evaluation that leaves the mode as it is
learn(x)
with torch.no_grad():
    policy(x)
learn(x)
"""


def counts(times: StageTimes) -> dict[str, int]:
    """Return how often each stage of the loop occurred; a long collection of garbage may fall into any of them."""
    stages = [stage for stage in times.stages if stage.kind in ("stage", "excluded")]
    return {stage.name: stage.host_s.n for stage in stages if stage.name != "garbage_collection"}


@pytest.fixture
def train(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    """Return what records a program and gives the exit code, what was shown, and the run folder."""

    def start(*program: str) -> tuple[int, str, Path]:
        folder = tmp_path / "run"
        code = importlib.import_module("scripts.profile_training").main(["--output", str(folder), "--", *program])
        return code, capfd.readouterr().out, folder

    return start


def test_records_the_stages_of_a_program_and_passes_its_exit_code_on(train, tmp_path, monkeypatch) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    own = tmp_path / "own"
    own.mkdir()
    (own / "sitecustomize.py").write_text("import sys, types; sys.modules['sitecustomize_of_the_user'] = types")
    monkeypatch.setenv("PYTHONPATH", str(own))
    code, shown, folder = train(sys.executable, str(tmp_path / "train.py"), "--lr=3")
    assert code == 7 and shown.startswith("trained --lr=3\n") and "What:" in shown
    times = read_stage_times(folder)
    counted = counts(times)
    assert counted == {"data": 12, "forward": 22, "backward": 22, "optimizer": 11, "evaluation": 2}
    assert (times.status, times.first_step, times.step.host_s.n) == ("finished", 1, 11)  # the first, cold one is none
    assert [remark.what for remark in times.remarks] == []
    assert json.loads((folder / "program.json").read_text())["exit_code"] == 7
    assert importlib.import_module("scripts.check_profile").main([str(folder)]) == 0


def test_a_rollout_is_no_evaluation_nor_is_training_in_eval_mode_and_ending_workers_is_waiting_for_data(train) -> None:
    _, shown, folder = train(sys.executable, "-c", OWN_WAYS)
    counted = counts(read_stage_times(folder))
    # In eval mode the first forward may be of an evaluation; of the loader there are a start, two batches and an end.
    assert counted == {"data": 4, "forward": 6 + 3 + 5, "backward": 11, "optimizer": 11, "evaluation": 2}, shown


def test_a_program_goes_on_where_it_cannot_be_recorded_and_the_reason_is_told(train, tmp_path, monkeypatch) -> None:
    (tmp_path / "torch.py").write_text("is_torch = False")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    code, shown, _ = train(sys.executable, "-c", "import torch; print('went on', torch.is_torch)")
    assert code == 0 and shown.startswith("went on False\n") and "nothing was recorded: " in shown


@pytest.mark.parametrize(
    ("program", "exit_code"), [("raise SystemExit(3)", 3), ("import os; os.kill(os.getpid(), 9)", 137)]
)
def test_a_program_without_training_keeps_its_exit_code(train, program: str, exit_code: int) -> None:
    code, shown, _ = train(sys.executable, "-c", program)
    assert code == exit_code and "no second optimizer step" in shown


def test_nothing_is_said_between_the_lines_of_the_program(train, monkeypatch) -> None:
    monkeypatch.setattr(Console, "heartbeat", lambda console: pytest.fail("its lines are not the last ones shown"))
    assert train(sys.executable, "-c", "print('trained')")[0] == 0


def test_a_program_that_is_not_there_ends_with_2(train) -> None:
    assert train("no-such-program")[0] == 2
