"""What every test has to leave as it found it."""

import gc
import logging
import signal
import sys
import threading
from collections.abc import Iterator

import pytest

LOGGERS = ("", "boundby", "py.warnings")
SIGNALS = (signal.SIGINT, signal.SIGTERM)


LONGEST = ("test_gpu_pipeline.py", "test_planted_machines.py", "test_end_to_end.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the longest tests first: one of them at the end keeps a single worker busy for minutes.

    Workers begin with the tests of a file in a row, so that what those share is made once.
    """
    items.sort(key=lambda item: item.path.name not in LONGEST)


@pytest.fixture(autouse=True, scope="session")
def _heap_of_modules_is_set_aside() -> None:
    """Keep the million objects of torch and its friends out of every later look through the heap, of 0.1 to 1 s each.

    A recording that begins looks for other profilers among the objects, and a collection at the end of a module for
    what was left open; both look only at what came after the imports.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _leaves_nothing_behind() -> Iterator[None]:
    """Fail the test that leaves a sampler thread, a logging handler or a signal handler; take the handlers back."""
    threads = set(threading.enumerate())
    loggers = {name: list(logging.getLogger(name).handlers) for name in LOGGERS}
    signals = {number: signal.getsignal(number) for number in SIGNALS}
    main = sys.modules["__main__"]
    yield
    sys.modules["__main__"] = main  # Streamlit's AppTest leaves its page there, which every spawned process would run
    left = [f"thread {entry.name}" for entry in threading.enumerate() if entry not in threads and _is_ours(entry)]
    for name, handlers in loggers.items():
        logger = logging.getLogger(name)
        left += [f"logger {name!r} has {handler}" for handler in logger.handlers if handler not in handlers]
        logger.handlers[:] = handlers
    for number, handler in signals.items():
        if signal.getsignal(number) is not handler:
            left.append(f"{signal.Signals(number).name} is handled by {signal.getsignal(number)}")
            signal.signal(number, handler)
    assert not left, f"the test left behind: {'; '.join(left)}"


def _is_ours(thread: threading.Thread) -> bool:
    return thread.name.startswith("boundby")


@pytest.fixture(autouse=True)
def collections_of_the_test_process_are_no_stage(monkeypatch, request):
    """Keep the collector, which takes long in a process with the heap of all tests, out of the stages of a loop."""
    if request.node.get_closest_marker("truth") is None:
        monkeypatch.setattr("boundby.training.manager.SHORT_COLLECTION_NS", 10**12)
