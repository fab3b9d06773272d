"""Fixtures that several files of this folder share; a file whose clock or texts are others has its own."""

import sys
from collections.abc import Iterator
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
    """A clock of a training loop."""
    return FakeNanoseconds()


@pytest.fixture
def timer(clock: FakeNanoseconds) -> Iterator[StageTimer]:
    """The stages of a training loop on that clock; it has begun."""
    timer = StageTimer(clock=clock)
    timer.start()
    yield timer
    timer.stop()


@pytest.fixture(scope="module")
def texts() -> list[str]:
    """Texts to be classified."""
    from tests import classifiers

    return classifiers.reviews(24)


@pytest.fixture(scope="module")
def tokenizer(texts: list[str]) -> Any:
    """The tokenizer of the texts."""
    from tests import classifiers

    return classifiers.tokenizer(texts)
