"""A GPU that is lost on the way: what was measured stays, one line says so, and nothing more is asked of it."""

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from boundby.bound.bench import Bench
from boundby.bound.trials import Candidate, Made, graph_replay, try_out
from boundby.bound.verdict import Fix
from boundby.capture import CaptureOptions, capture
from boundby.layers.engine import ObservabilityEngine
from boundby.machine.device import synchronizer
from boundby.machine.sampler import DeviceLostError, Sampler
from boundby.timing.timer import Timer
from tests import evaluation_workplace as workplace
from tests.fakes import FakeTokenizer
from tests.gpu_double import H100, Card, Machine, plugged_in
from tests.tiny_models import save_bert
from utils.baseline import instruments
from utils.baseline.inference import Guard, InferenceProfiler, SweepSettings, _Plan
from utils.baseline.rounds import Visit
from utils.command import cli
from utils.steps import steps

ROOT = Path(__file__).resolve().parents[2]
GPU = torch.device("cuda")
ASSERT = "AcceleratorError: CUDA error: device-side assert triggered"
SLOW = H100.slower(1, host=300)  # few calls fill a second
QUICK = (
    "profiling.batch_sizes=[1,2]", "profiling.num_measurement_runs=1", "profiling.num_warmup_runs=1",
    "profiling.max_seconds_per_batch_size=0.001",
)  # fmt: skip


@contextmanager
def counted(card: Card) -> Iterator[tuple[Machine, list[BaseException]]]:
    """Plug the card in; the errors that it has answered with tell how often it was asked after it was lost."""
    with plugged_in(card) as machine:
        answered: list[BaseException] = []
        check = machine.check

        def counting() -> None:
            try:
                check()
            except Exception as error:
                answered.append(error)
                raise

        machine.check = counting  # type: ignore[method-assign]
        yield machine, answered


def tiny() -> Any:
    from transformers import BertConfig, BertForSequenceClassification

    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1}
    return BertForSequenceClassification(BertConfig(vocab_size=64, num_labels=3, **sizes)).eval().to("cuda")


def swept(card: Card) -> tuple[list[Visit], str | None, int]:
    """Return the visits of a sweep, how it ended, and how often the card was asked after it was lost."""
    made: list[Visit] = []
    ended = None
    with counted(card) as (machine, answered):
        timer = Timer(machine.read, synchronizer(GPU))
        guard = Guard(instruments.watch(GPU), machine.sleep)
        with Sampler(instruments.source(GPU)) as sampler:
            owner = InferenceProfiler(tiny(), FakeTokenizer(), GPU, timer=timer, guard=guard, sampler=sampler)
            try:
                owner.profile_multiple_batch_sizes(
                    ["a b c", "d e"] * 2,
                    [1, 2],
                    1,
                    settings=SweepSettings(num_warmup_runs=1, max_seconds=0.001),
                    on_visit=made.append,
                )
            except DeviceLostError as lost:
                ended = str(lost)
    return made, ended, len(answered)


@pytest.mark.parametrize("failure", ["assert", "illegal"])
@pytest.mark.parametrize("launch", [40, 70, 110, 170, 260, 400, 640])
def test_a_sweep_commits_the_visit_in_which_the_gpu_was_lost_and_asks_it_nothing_more(launch, failure):
    made, ended, asked = swept(SLOW.with_(fails_at=launch, failure=failure))
    *finished, failed = made
    assert asked == 1
    assert {visit.status for visit in finished} <= {"ok"}
    assert failed.status == "failed" and failed.message.startswith("AcceleratorError: CUDA error: ")
    assert ended == f"batch size {failed.batch_size} in float32: {failed.message}"


def test_a_driver_that_says_the_gpu_is_lost_ends_the_sweep_too():
    made, ended, _ = swept(SLOW.with_(fails_at=110, failure="lost"))
    assert made[-1].status == "failed" and ("unspecified launch failure" in ended or "GPU is lost" in ended)


@pytest.fixture
def here(tmp_path, monkeypatch) -> list[str]:
    """The command line of a sweep that takes no time, and looks into nothing."""
    monkeypatch.setattr("utils.baseline.sweep.find_limits", lambda *_: None)
    monkeypatch.setattr("utils.baseline.instruments.energy", lambda *_: (None, None, "it is not of interest here"))
    return workplace.prepare(
        tmp_path, workplace.texts(8), save_bert(tmp_path / "model"), *QUICK, "evaluation.enabled=false"
    )


def step(settings: list[str], card: Card, *flags: str) -> int:
    main = importlib.import_module("scripts.02_baseline_inference").main
    with plugged_in(card):
        return main([*settings, *flags])


def statuses(folder: Path) -> dict[int, str]:
    document = json.loads((folder / "results" / "baseline_metrics.json").read_text())
    return {row["batch_size"]: row["status"] for row in document["batch_sizes"]}


def test_what_has_lost_the_gpu_twice_is_a_failed_row_and_the_others_are_measured(here, tmp_path, capsys, monkeypatch):
    measure, lost = _Plan._measure, []

    def measured(self: Any, batch_size: int, *others: Any) -> Any:
        if batch_size == 2 and len(lost) < 2:
            lost.append(batch_size)
            raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered\nand more")
        return measure(self, batch_size, *others)

    monkeypatch.setattr(_Plan, "_measure", measured)
    for flags in ((), ("--resume",)):
        assert step(here, SLOW, *flags) == 3
        said = capsys.readouterr().err.splitlines()[-1]
        assert said.startswith("error: batch size 2 in float32: AcceleratorError: CUDA error: an illegal memory access")
        assert said.endswith("--resume")
        assert statuses(tmp_path) == {1: "noisy", 2: "failed"}
    assert step(here, SLOW, "--resume") == 4
    assert (len(lost), statuses(tmp_path)) == (2, {1: "noisy", 2: "failed"})


def test_what_has_lost_the_gpu_once_is_measured_when_it_is_resumed(here, tmp_path):
    assert step(here, SLOW.with_(fails_at=500)) == 3
    assert step(here, SLOW, "--resume") == 0
    assert statuses(tmp_path) == {1: "noisy", 2: "noisy"}


SCRIPT = '''"""A tool."""
import atexit, sys
import torch
from utils.command import cli

atexit.register(print, "the usual end")

@cli.tool(settings=None)
def main(run):
    run.say("measured")
    raise torch.AcceleratorError("CUDA error: uncorrectable ECC error encountered")

if __name__ == "__main__":
    sys.exit(main())
'''


def test_a_script_ends_with_3_and_frees_nothing_on_a_lost_gpu(tmp_path):
    """At its usual end a process of torch frees graphs and events, which aborts it on such a GPU."""
    (tmp_path / "tool.py").write_text(SCRIPT)
    variables = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, tmp_path / "tool.py"], env=variables, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (3, "measured\n")
    assert (
        done.stderr.startswith("error: AcceleratorError: CUDA error: uncorrectable ECC error") and "\n" in done.stderr
    )
    assert "Traceback" not in done.stderr


def test_a_trial_and_a_capture_that_lose_the_gpu_end_the_others_and_clean_nothing_up():
    released: list[None] = []
    for index in range(3):
        with counted(H100) as (machine, answered):
            one = torch.ones(8, device="cuda")

            def forward(one: torch.Tensor = one) -> None:
                one.add_(1)

            def loses(machine: Machine = machine, forward: Callable[[], None] = forward) -> None:
                forward()
                machine.broken = "CUDA error: device-side assert triggered"

            other = Candidate(Fix("threads", {"threads": 1, "instead_of": 2}), lambda: Made(forward))  # noqa: B023
            losing = (
                Candidate(Fix("double_batch"), lambda: Made(loses)),  # noqa: B023
                Candidate(Fix("double_batch"), lambda: loses() or Made(forward)),  # noqa: B023
                graph_replay(loses, 0.25),
            )[index]
            with pytest.raises(DeviceLostError, match="device-side assert"):
                try_out(
                    forward, [losing, other],
                    Bench(Timer(machine.read, synchronizer(GPU)), release=lambda: released.append(1), trials_s=100.0),
                )  # fmt: skip
            assert len(answered) == 1 and not released


def test_a_capture_of_a_lost_gpu_is_left_as_it_is(tmp_path, monkeypatch):
    left: list[str] = []
    for name in ("start", "stop", "leave"):
        monkeypatch.setattr(f"boundby.capture.session.Session.{name}", lambda *_, name=name, **__: left.append(name))
    with counted(H100) as (machine, answered):
        one = torch.ones(8, device="cuda")

        def losing(number: int) -> None:
            machine.broken = "CUDA error: device-side assert triggered"
            one.add_(1)

        with pytest.raises(torch.AcceleratorError):
            capture(losing, steps=1, warmup=0, trace_path=tmp_path / "trace.json", device=GPU, options=CaptureOptions())
    assert (len(answered), left) == (1, ["start", "leave"])


class Losing(torch.nn.Linear):
    """Loses the GPU in its call number `at`."""

    def __init__(self, machine: Machine, at: int) -> None:
        super().__init__(4, 4)
        self.machine, self.left = machine, at

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        self.left -= 1
        if self.left == 0:
            self.machine.broken = "CUDA error: device-side assert triggered"
        return super().forward(states)


@pytest.mark.parametrize("call", range(2, 26, 3))
def test_probes_of_layers_ask_a_lost_gpu_nothing(tmp_path, call):
    with counted(H100) as (machine, answered):
        inner = torch.nn.Sequential(torch.nn.Sequential(Losing(machine, call)))
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), inner).to("cuda")
        with pytest.raises((torch.AcceleratorError, DeviceLostError)), ObservabilityEngine(model, tmp_path) as engine:
            engine.profile(torch.ones(2, 4, device="cuda"), num_runs=5)
        assert len(answered) == 1


def test_a_tool_says_to_start_it_again_and_a_loss_within_another_error_is_found(capsys):
    def body(run: cli.Run) -> None:
        try:
            raise torch.AcceleratorError("CUDA error: unspecified launch failure\nand more")
        except RuntimeError as error:
            raise ValueError("the compiler failed") from error

    assert cli.command("A tool.", body, [], settings=None) == 3
    assert capsys.readouterr().err == (
        "error: AcceleratorError: CUDA error: unspecified launch failure; this process can no longer use the GPU. "
        "Finished work is kept: start the same command again\n"
    )


def test_a_point_is_given_up_after_two_losses_and_a_torn_log_says_nothing(tmp_path):
    layout = SimpleNamespace(losses=lambda number: tmp_path / f"{number}-losses.jsonl")
    assert steps.given_up("05", layout) == []
    lines = ['{"point": "int8"}', '{"point": "compiled"}', '{"point": "int8"}', '{"poi']
    (tmp_path / "05-losses.jsonl").write_text("\n".join(lines))
    assert steps.given_up("05", layout) == ["int8"]
