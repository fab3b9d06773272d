"""Fixtures that several files of this folder share; a file whose clock or texts are others has its own."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from boundby.training import StageTimer
from tests.fakes import FakeNanoseconds


@pytest.fixture(autouse=True)
def _no_profiler_outlives_a_test() -> Iterator[None]:
    yield
    profiler = sys.modules.get("torch.autograd.profiler")
    assert profiler is None or not profiler._is_profiler_enabled


@pytest.fixture
def clock() -> FakeNanoseconds:
    return FakeNanoseconds()


class FakeCuda:
    """Keeps what is asked of `torch.cuda` in `calls`, in their order; `broken` names the calls that raise."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from torch import _C, cuda

        self.calls: list[Any] = []
        self.broken: tuple[str, ...] = ()
        monkeypatch.setattr(cuda, "synchronize", lambda device=None: None)
        monkeypatch.setattr(cuda.memory, "_record_memory_history", self._history)
        monkeypatch.setattr(cuda.memory, "_dump_snapshot", self._dump)
        monkeypatch.setattr(_C, "_cuda_isHistoryEnabled", lambda: False, raising=False)  # which asks the driver
        monkeypatch.setattr(cuda.nvtx, "range_push", self._note)
        monkeypatch.setattr(cuda.nvtx, "range_pop", lambda: self._note("pop"))
        monkeypatch.setattr(cuda.nvtx, "range_start", lambda name: self._note(f"begin {name}") or f"end {name}")
        monkeypatch.setattr(cuda.nvtx, "range_end", self._note)
        monkeypatch.setattr(cuda.profiler, "start", lambda: self._note("start"))
        monkeypatch.setattr(cuda.profiler, "stop", lambda: self._note("stop"))

    def _note(self, call: Any) -> None:
        if call in self.broken:
            raise RuntimeError(f"{call} is broken")
        self.calls.append(call)

    def _history(self, enabled: str | None = "all", **settings: Any) -> None:
        self._note("on" if enabled else "off")
        from boundby.capture.instruments import MAX_ENTRIES

        assert not enabled or settings == {"stacks": "python", "max_entries": MAX_ENTRIES}

    def _dump(self, path: str) -> None:
        Path(path).write_bytes(b"half")
        self._note("dump")
        Path(path).write_bytes(b"snapshot")


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    return FakeCuda(monkeypatch)


@pytest.fixture
def nsys(monkeypatch: pytest.MonkeyPatch) -> None:
    """A session of Nsight Systems, beside which torch's profiler must not run."""
    monkeypatch.setenv("NSYS_PROFILING_SESSION_ID", "7")

    def forbidden(*_: Any, **__: Any) -> None:
        raise AssertionError("torch.profiler beside Nsight")

    monkeypatch.setattr("torch.profiler.profile.__init__", forbidden)


@pytest.fixture
def timer(clock: FakeNanoseconds) -> Iterator[StageTimer]:
    """The stages of a training loop on that clock; it has begun."""
    timer = StageTimer(clock=clock)
    timer.start()
    yield timer
    timer.stop()


@pytest.fixture(scope="module")
def texts() -> list[str]:
    from tests import classifiers

    return classifiers.reviews(24)


@pytest.fixture(scope="module")
def tokenizer(texts: list[str]) -> Any:
    from tests import classifiers

    return classifiers.tokenizer(texts)
