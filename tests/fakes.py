"""Stand-ins for time, threads, devices and tokenizers, so that a test compares with `==` and never waits."""

from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from boundby.machine.disturbance import Conditions


class FakeClock:
    """A clock that moves only when told to. Steps that are sums of powers of two stay exact."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


class FakeNanoseconds:
    """A clock of whole nanoseconds, as `time.perf_counter_ns`, that moves only when told to."""

    def __init__(self, now: int = 0) -> None:
        self.now = now

    def __call__(self) -> int:
        return self.now

    def advance(self, seconds: float) -> None:
        self.wait(round(seconds * 1_000_000_000))

    def wait(self, nanoseconds: int) -> None:
        self.now += nanoseconds


class FakeThreads:
    """The number of threads that torch is asked for and told, without any that would wait for a core."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, number: int = 1) -> None:
        self.number = number
        monkeypatch.setattr("torch.get_num_threads", lambda: self.number)
        monkeypatch.setattr("torch.set_num_threads", self.set)

    def set(self, number: int) -> None:
        self.number = number


class FakeWatch:
    """Sees others use `foreign` cores in a window, whose number counts from 0."""

    def __init__(self, foreign: Callable[[int], float] = lambda window: 0.0) -> None:
        self.windows, self._foreign = 0, foreign

    def start(self) -> "FakeWatch":
        return self

    def stop(self) -> Conditions:
        import torch

        self.windows += 1
        foreign = float(self._foreign(self.windows - 1))
        return Conditions(seconds=1.0, cores=torch.get_num_threads(), foreign_cores=foreign)


class QueuedDevice:
    """A device that runs behind the host: work of known length, in order, once it is issued. A mark is when it passed.

    `held` are the backlogs asked for; the device keeps each for `keeps` times as long. With a `depth` the queue holds
    so many pieces of work and marks, and the host waits for room.
    """

    def __init__(self, clock: FakeClock, keeps: float = 1.0, depth: int | None = None) -> None:
        self.clock, self._keeps = clock, keeps
        self._idle_at = 0.0
        self._ends: deque[float] = deque(maxlen=depth)
        self.held: list[float] = []

    def issue(self, host_s: float, device_s: float) -> None:
        self.clock.advance(host_s)
        if len(self._ends) == self._ends.maxlen:
            self.clock.now = max(self.clock.now, self._ends[0])
        self._idle_at = max(self._idle_at, self.clock.now) + device_s
        self._ends.append(self._idle_at)

    def synchronize(self) -> None:
        self.clock.now = max(self.clock.now, self._idle_at)

    def hold(self, seconds: float) -> None:
        self.held.append(seconds)
        self.issue(0.0, self._keeps * seconds)

    def mark(self) -> float:
        self.issue(0.0, 0.0)
        return self._idle_at

    def has_passed(self, mark: float) -> bool:
        return self.clock.now >= mark

    def seconds_between(self, start: float, end: float) -> float:
        return end - start


class FakeTokenizer:
    """Makes one token of each word, of a vocabulary of 32, at a cost per text; notes every call."""

    pad_token_id = 7

    def __init__(self, clock: FakeClock | None = None, seconds_per_text: float = 0.0) -> None:
        self._clock, self._seconds = clock or FakeClock(), seconds_per_text
        self.calls: list[tuple[list[str], dict[str, Any]]] = []

    def __call__(self, texts: list[str], **options: Any) -> Any:
        self.calls.append((texts, options))
        self._clock.advance(self._seconds * len(texts))
        words, longest = [text.split() for text in texts], options["max_length"]
        encodings = [SimpleNamespace(overflowing=words_of_text[longest:]) for words_of_text in words]
        ids = [[1 + ord(word[0]) % 31 for word in words_of_text[:longest]] for words_of_text in words]
        return type("Encoded", (dict,), {"encodings": encodings})(input_ids=ids)


RECORDED = Path(__file__).parent / "gpu_double" / "recorded"  # what nvidia-smi answers, by machine


def fake_nvidia_smi(folder: Path, machine: str) -> None:
    """Write an nvidia-smi in `folder` that answers as it was recorded on a machine, and any other call with code 2."""
    fake_program(
        folder,
        "nvidia-smi",
        f"""
asked="$ nvidia-smi${{*:+ $*}}" code=2
while IFS= read -r line; do
    case $line in
        '$ '*) on=; [[ $line != "$asked" ]] || on=1 code=0 ;;
        'exit '*) [[ -z $on ]] || code=${{line#exit }} ;;
        *) [[ -z $on ]] || printf '%s\\n' "$line" ;;
    esac
done <'{RECORDED / machine}.txt'
exit $code""",
    )


def fake_program(folder: Path, name: str, body: str) -> None:
    """Write the bash script `body` as the executable `name` in `folder`."""
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/bash\n{body}\n", encoding="utf-8")
    (folder / name).chmod(0o755)
