"""What is looked at first on a GPU: every check has failed once on purpose, and measures what it judges."""

import json
import os
import subprocess
import time
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2Model

from boundby.trials import Candidate, Made
from boundby.verdict import Fix
from scripts import check_gpu
from utils import first_light
from utils.first_light import CHECKS, Card, Check, Line, NotHereError, Sizes, look, watched

CARD = Card(
    torch.device("cpu"),
    Sizes(
        hidden=128,
        layers=2,
        inner=64,
        vocabulary=100,
        texts=96,
        mean_tokens=12,
        batch_sizes=(1, 2),
        launches=50,
        sweep_s=0.2,
    ),
)
PROGRAM = {"exit": 0, "s": 1.0}
# Of every check figures that are as expected, and by how much each may be wrong to be noticed.
FIGURES: dict[str, tuple[dict[str, Any], list[dict[str, Any]]]] = {
    "device time of a padded batch": (
        {"its own mask": "no time", "a ready mask": "1.25 ms"},
        [{"a ready mask": "no time"}],
    ),
    "graph replay of a padded batch": (
        {"factor": 1.4, "problems": []},
        [{"factor": 0.8}, {"factor": None}, {"problems": ["it left the process in an unknown state"]}],
    ),
    "packed texts": (
        {"way": "packed, x", "difference to one by one": 0.1, "allowed": 0.2, "difference to other neighbours": 0.0},
        [{"way": "padded"}, {"difference to one by one": 0.3}, {"difference to other neighbours": 0.1}],
    ),
    "depth of the launch queue": (
        {"launches before the host waits": 1022},
        [{"launches before the host waits": 100}, {"launches before the host waits": 4000}],
    ),
    "attention": (
        {"cuDNN": 91002, "without a mask": "FLASH_ATTENTION", "with a mask": "EFFICIENT_ATTENTION"},
        [{"without a mask": "MATH"}, {"with a mask": "ERROR"}],
    ),
    "products": (
        {"TFLOP/s sustained": 650.0, "in a burst": 750.0, "MHz": 1700.0, "clock events": 0x4},
        [{"TFLOP/s sustained": 400.0}, {"TFLOP/s sustained": 800.0}, {"clock events": 0x40}],
    ),
    "energy": ({"J by the counter": 2000.0, "W x s": 2100.0, "reasons": {}}, [{"W x s": 2500.0}]),
    "peak of memory": ({"MiB above": 64.0, "torch's": 64.0}, [{"MiB above": 0.0}, {"torch's": 66.0}]),
    "out of memory in a sweep": (
        {"batch 2": "noisy", "batch 4096": "oom", "finite": True},
        [{"batch 2": "failed"}, {"batch 4096": "ok"}, {"finite": False}],
    ),
    "sweep of a classifier of 0.5 billion parameters": (
        {"statuses": ["ok", "noisy"], "without a device time": []},
        [{"statuses": ["ok", "oom"]}, {"without a device time": [8]}],
    ),
    "evaluation": (
        {
            "texts/s": 7000.0,
            "way": "packed, x",
            "x batches of 32": 25.0,
            "of the limit of products": 0.65,
            "s for 369,475 texts": 53.0,
        },
        [{"of the limit of products": 0.5}],
    ),
    "layers of GPT-2": (
        {"layers over the whole": 0.99, "status": "pass", "device times": 150, "doubts": []},
        [{"status": "warn"}, {"device times": 0}],
    ),
    "a capture that fails": (
        {"refused": ["failed"], "doubts": [], "MiB kept": 0.0, "current stream": "default"},
        [{"refused": []}, {"doubts": ["a doubt"]}, {"MiB kept": 64.0}, {"current stream": "another"}],
    ),
    "quickstart": ({**PROGRAM, "reports": 2}, [{"exit": 1}, {"reports": 0}]),
    "30 steps with the callback for the Trainer": ({**PROGRAM, "recorded": 1}, [{"exit": 3}, {"recorded": 0}]),
    "30 steps with the callback for Lightning": ({**PROGRAM, "recorded": 1}, [{"exit": 3}, {"recorded": 0}]),
    "a range of nsys": ({**PROGRAM, "reports": 1}, [{"exit": 1}, {"reports": 0}]),
}
BY_NAME = {check.name: check for check in CHECKS}


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)
def test_a_check_accepts_what_is_expected_and_nothing_that_is_not(check):
    good, wrong = FIGURES[check.name]
    assert check.holds(good)
    assert [check.holds({**good, **change}) for change in wrong] == [False] * len(wrong)


class HeldQueue:
    """A device that is far behind, and whose queue is full after `depth` launches, or is slow to say so."""

    def hold(self, seconds: float) -> None: ...

    def mark(self) -> int:
        return 0

    def has_passed(self, mark: int) -> bool:
        return False

    def seconds_between(self, start: int, end: int) -> float:
        return 0.001


@pytest.mark.parametrize(
    "name",
    [
        "device time of a padded batch",
        "packed texts",
        "depth of the launch queue",
        "attention",
        "products",
        "evaluation",
        "sweep of a classifier of 0.5 billion parameters",
    ],
)
def test_a_check_measures_what_it_judges(name, monkeypatch):
    product = SimpleNamespace(flops_per_s=1e12, burst_flops_per_s=None, sm_clock_mhz=None, clock_event_reasons=None)
    limits = SimpleNamespace(compute=[product], configured=lambda dtype: product)
    monkeypatch.setattr(first_light.ceilings, "measure", lambda *_, **__: limits)
    monkeypatch.setattr(first_light, "device_queue", lambda device: HeldQueue())
    monkeypatch.setattr(first_light, "has_varlen", lambda: True)
    [line] = look(CARD, [BY_NAME[name]])
    assert line.reason is None and line.verdict in ("ok", "look")
    assert set(FIGURES[name][0]) <= set(line.figures)


class FakeMemory:
    """The runtime and the allocator of a GPU of 64 GiB whose tensors are counted, or whose statistics are `off`."""

    total = 64 * 2**30

    def __init__(self, monkeypatch: pytest.MonkeyPatch, off: int = 0, kept: int = 0, stream: str = "default") -> None:
        self.off, self.kept, self.stream = off, kept, stream
        self.allocated = self.peak_allocated = self.asked = 0
        self.shares: list[float] = []
        empty = torch.empty

        def counted(*size: int, **how: Any) -> torch.Tensor:
            made = empty(*size, **how)
            self.peak_allocated = max(self.peak_allocated, self.allocated + made.numel() * made.itemsize)
            return made

        monkeypatch.setattr(first_light.torch, "empty", counted)
        monkeypatch.setattr(first_light, "runtime", lambda device: self)
        monkeypatch.setattr(first_light, "Allocator", lambda device: self)
        monkeypatch.setattr(first_light, "describe", lambda device: {"memory_bytes": self.total})

    def reset_peaks(self) -> None:
        self.peak_allocated = self.allocated

    def memory_stats(self, device: torch.device) -> dict[str, int]:
        return {"allocated_bytes.all.peak": self.peak_allocated + self.off}

    def memory_reserved(self, device: torch.device) -> int:
        self.asked += 1
        return self.kept * (self.asked > 1)  # from the first look on

    def set_per_process_memory_fraction(self, share: float, device: torch.device) -> None:
        self.shares.append(share)

    def current_stream(self) -> str:
        return self.stream

    def default_stream(self) -> str:
        return "default"


@pytest.mark.parametrize(("off", "verdict"), [(0, "ok"), (2 * 2**20, "look")])
def test_the_peak_of_memory_is_held_against_torchs_own(off, verdict, monkeypatch):
    FakeMemory(monkeypatch, off)
    [line] = look(CARD, [BY_NAME["peak of memory"]])
    assert (line.verdict, line.figures["MiB above"]) == (verdict, 64.0)


@pytest.mark.parametrize(("room", "verdict"), [(2, "ok"), (1, "look")], ids=["for two texts", "for one"])
def test_a_sweep_runs_out_of_memory_at_its_largest_batch_alone_and_gets_all_memory_back(room, verdict, monkeypatch):
    memory = FakeMemory(monkeypatch)
    make = first_light.classifier

    def small(card: Card) -> Any:
        model = make(card)

        def check(module: Any, given: Any, named: dict[str, Any]) -> None:
            if memory.shares[-1] < 1 and len(named["input_ids"]) > room:
                raise torch.OutOfMemoryError("out of memory")

        model.register_forward_pre_hook(check, with_kwargs=True)
        return model

    monkeypatch.setattr(first_light, "classifier", small)
    [line] = look(CARD, [BY_NAME["out of memory in a sweep"]])
    assert (line.verdict, line.reason) == (verdict, None)
    assert memory.shares == [pytest.approx(1 / 64), 1.0]


@pytest.mark.parametrize(
    ("kept", "stream", "verdict"), [(0, "default", "ok"), (64 * 2**20, "default", "look"), (0, "capture", "look")]
)
def test_a_capture_that_fails_is_looked_at_for_what_it_leaves(kept, stream, verdict, monkeypatch):
    def refused(work: Any, idle_share: float) -> Candidate:
        def made() -> Made:
            raise RuntimeError("operation not permitted when stream is capturing")

        return Candidate(Fix("issue_at_once"), made)

    FakeMemory(monkeypatch, kept=kept, stream=stream)
    monkeypatch.setattr(first_light, "graph_replay", refused)
    [line] = look(CARD, [BY_NAME["a capture that fails"]])
    assert (line.verdict, line.figures["refused"]) == (verdict, ["failed"])


def test_a_padded_batch_is_replayed_beside_the_eager_call(monkeypatch):
    monkeypatch.setattr(
        first_light, "graph_replay", lambda work, _: Candidate(Fix("issue_at_once"), lambda: Made(work))
    )
    [line] = look(CARD, [BY_NAME["graph replay of a padded batch"]])
    assert line.figures["factor"] > 0 and line.figures["problems"] == []


def test_the_layers_of_a_gpt_2_without_device_times_are_looked_at(monkeypatch):
    sizes = GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=50)
    monkeypatch.setattr("utils.layers.models.build", lambda name: GPT2Model(sizes))
    monkeypatch.setattr(
        "utils.layers.models.inputs_for", lambda model, *size: {"input_ids": torch.ones(size, dtype=int)}
    )
    [line] = look(CARD, [BY_NAME["layers of GPT-2"]])
    assert (line.verdict, line.reason, line.figures["device times"]) == ("look", None, 0)


LEAVES = {  # where each program leaves what is counted, after the argument that names its place
    "quickstart": ("output.results_dir=", "/report.txt"),
    "30 steps with the callback for the Trainer": ("--output", "/stage_times.json"),
    "30 steps with the callback for Lightning": ("--output", "/stage_times.json"),
    "a range of nsys": ("-o", ".nsys-rep"),
}


@pytest.mark.parametrize(("code", "leaves", "verdict"), [(0, True, "ok"), (0, False, "look"), (1, True, "look")])
@pytest.mark.parametrize("name", LEAVES)
def test_a_program_is_judged_by_its_exit_and_by_what_it_leaves(name, code, leaves, verdict, monkeypatch):
    option, ending = LEAVES[name]

    def program(command: list[str], **_: Any) -> SimpleNamespace:
        stated = next((word.removeprefix(option) for word in command if option in word and word != option), None)
        place = Path(f"{stated or command[command.index(option) + 1]}{ending}")
        if leaves:
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text("recorded")
        return SimpleNamespace(returncode=code, stdout="done", stderr="it broke")

    monkeypatch.setattr(first_light.subprocess, "run", program)
    monkeypatch.setattr(first_light.shutil, "which", lambda name: name)
    [line] = look(CARD, [BY_NAME[name]])
    assert (line.verdict, line.reason, line.figures["exit"]) == (verdict, None, code)


def test_the_energy_of_a_card_is_held_against_its_power(monkeypatch):
    class Counter(first_light.DriverSource):
        """Reads 100 W, and the same joules every time: a counter that stands still."""

        def __init__(self) -> None:
            self.reasons = {}

        def read(self):
            return {"gpu_power_w": 100.0}

        def joules(self):
            return 7.0

    card = Card(CARD.device, Sizes(energy_s=0.5))
    monkeypatch.setattr(first_light, "gpu_source", lambda device: Counter())
    monkeypatch.setattr(first_light.torch, "randn", lambda *_, **__: torch.ones(2, 2))
    [line] = look(card, [BY_NAME["energy"]])
    assert (line.verdict, line.figures["J by the counter"]) == ("look", 0.0)
    assert line.figures["W x s"] > 0

    def lacks(_: Counter) -> float:
        raise OSError("NVML: Not Supported")

    monkeypatch.setattr(Counter, "joules", lacks)  # as on many a GeForce
    [line] = look(card, [BY_NAME["energy"]])
    assert (line.verdict, line.reason) == ("not here", "NVML: Not Supported")


def test_a_check_that_raises_has_failed_one_that_lacks_something_has_not_and_the_time_is_kept():
    def broken(card: Card) -> dict[str, Any]:
        raise RuntimeError("CUDA error: an illegal memory access\nmore")

    def lacking(card: Card) -> dict[str, Any]:
        raise NotHereError("nsys is not installed")

    checks = [Check("a", "x", broken, bool), Check("b", "x", lacking, bool), Check("c", "x", lambda _: {"n": 2}, bool)]
    lines = list(look(CARD, checks))
    assert [line.verdict for line in lines] == ["failed", "not here", "ok"]
    assert "a: RuntimeError: CUDA error: an illegal memory access  [expected: x]" in str(lines[0])
    assert [line.reason for line in look(replace(CARD, until=0.0), checks)] == ["no time was left for it"] * 3


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_check_that_hangs_or_ends_its_process_costs_no_other_and_what_it_began_is_ended(monkeypatch):
    reader, writer = os.pipe()

    def fine(card: Card) -> dict[str, Any]:
        return {"process": os.getpid()}

    def hangs(card: Card) -> dict[str, Any]:
        subprocess.Popen(["sleep", "300"], pass_fds=[writer])
        time.sleep(300)
        return {}

    def ends(card: Card) -> dict[str, Any]:
        os._exit(3)

    makes = {"a": fine, "b": hangs, "c": ends, "d": fine, "e": fine}
    checks = [Check(name, "x", make, bool, name == "e", 0.3 if name == "b" else 90) for name, make in makes.items()]
    monkeypatch.setattr(first_light, "CHECKS", checks)
    monkeypatch.setattr(first_light, "LEAST_LIMIT_S", 0.0)
    found = list(watched(CARD, checks, "fork"))
    lines, documents = zip(*found, strict=True)
    assert [line.verdict for line in lines] == ["ok", "failed", "failed", "ok", "ok"]
    assert [line.reason for line in lines[1:3]] == ["no answer within 0 s", "its process ended"]
    assert len({line.figures["process"] for line in lines if line.figures}) == 3  # a program is beside nothing else
    assert [len(document["checks"]) for document in documents] == [1, 2, 3, 4, 5]
    assert all(document["device"]["type"] == "cpu" for document in documents)
    os.close(writer)
    assert os.read(reader, 1) == b""  # nobody else has it open any more
    os.close(reader)


def test_what_was_seen_is_written_before_the_next_check(tmp_path, monkeypatch):
    def interrupted(card: Card, checks: list[Check]) -> Any:
        yield (line := Line("a", "x", "ok", {"n": 1}, 0.0)), {"checks": [asdict(line)]}
        raise KeyboardInterrupt

    monkeypatch.setattr("boundby.device.pick_device", lambda name: torch.device("cuda:0"))
    monkeypatch.setattr(first_light, "watched", interrupted)
    assert check_gpu.main(["--output", str(tmp_path / "seen.json")]) == 130
    assert [check["name"] for check in json.loads((tmp_path / "seen.json").read_text())["checks"]] == ["a"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_there_is_one_line_and_exit_3(capsys):
    assert check_gpu.main([]) == 3
    said = capsys.readouterr()
    assert said.out == "" and said.err.strip().count("\n") == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)
def test_it_is_as_expected_on_this_gpu(check):
    [line] = look(Card(torch.device("cuda:0")), [check])
    if line.verdict == "not here":
        pytest.skip(str(line.reason))
    assert line.verdict == "ok", str(line)
