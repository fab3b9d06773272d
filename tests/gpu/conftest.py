"""Checks of a card: each in a process of its own within a limit of its own, eight minutes in all, a line of JSON each.

    python -m pytest tests/gpu [--lines FILE] [--small] [-k WORDS]

A check is a test with the marker `gpu`: in which range its value is expected, in which unit, and the reason for the
range, which a healthy H200, H100, A100 or T4 does not miss. It hands its value to `measured`, once. Its process is
forked from this one, which has imported what the checks need and never touches the GPU: a hang, an error that stays and
a failed capture cost one check. Without a GPU there is one line, and exit code 3; in a run of other tests the checks
are left out.
"""

import math
import multiprocessing
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from _pytest.runner import runtestprotocol

from boundby import files

HERE = Path(__file__).resolve().parent
NODES = "tests/gpu/"
MEASUREMENTS = HERE.parents[1] / "docs" / "measurements"
SECONDS = 480.0  # for all checks
LIMIT_S = 90.0  # of a check that names none
STARTS_S = 90.0  # until a process has found the GPU
ENDS_S = 5.0  # of a process that was killed
LEAST_S = 5.0  # with less left no check begins
NO_CARD = 3
TIME_IS_UP = "no time was left for it"
HEAD = pytest.StashKey[dict[str, Any] | str]()  # the card and its machine, or why there is none
UNTIL = pytest.StashKey[float]()
LINES = pytest.StashKey[Path]()


class NoAnswerError(Exception):
    """A process gave no answer: it took too long, or it ended."""


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("gpu", "checks of a card")
    group.addoption("--lines", type=Path, metavar="FILE", help="where the lines go")
    group.addoption("--small", action="store_true", help="small models and short runs, for a stand-in of a card")


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> int | None:
    """End with one line and 3 where there is no card and only these checks were asked for."""
    if config.option.collectonly or getattr(config.option, "help", False) or not all(_is_here(config)):
        return None
    result = head(config)
    if isinstance(result, dict):
        return None
    sys.stderr.write(f"{result}\n")
    return NO_CARD


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave the checks out of a run that has not named them: they take minutes, and a card that nothing else uses."""
    if any(_is_here(config)):
        return
    checks = [item for item in items if item.path.is_relative_to(HERE)]
    items[:] = [item for item in items if item not in checks]
    if checks:
        config.hook.pytest_deselected(items=checks)


def _is_here(config: pytest.Config) -> Iterator[bool]:
    """Tell of each argument whether it names checks."""
    for argument in config.args:
        position = config.invocation_params.dir / argument.partition("::")[0]
        yield position.resolve().is_relative_to(HERE)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> bool | None:
    """Run a check in a process of its own, and tell its line; leave other tests to whom they are for."""
    if not item.path.is_relative_to(HERE):
        return None  # pytest calls this hook of every folder for every test
    began = time.monotonic()
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    reports = _run(item)
    for report in reports:
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    _tell(item.config, line(item, reports, time.monotonic() - began))
    return True


def pytest_report_teststatus(report: pytest.TestReport) -> tuple[str, str, str] | None:
    """Show no letter for a check, which has its line."""
    if report.nodeid.startswith(NODES) and (report.when == "call" or not report.passed):
        return report.outcome, "", ""
    return None


def head(config: pytest.Config) -> dict[str, Any] | str:
    """Return the card, its machine and the versions as plain values for JSON, or why there is no card."""
    if HEAD not in config.stash:
        config.stash[UNTIL] = time.monotonic() + SECONDS
        try:
            config.stash[HEAD] = apart(_card, STARTS_S)
        except NoAnswerError as error:
            config.stash[HEAD] = f"the GPU cannot be asked: {error}"
    return config.stash[HEAD]


def _card() -> dict[str, Any] | str:
    import torch

    from boundby.machine import environment
    from boundby.machine.device import built_for, describe

    if not torch.cuda.is_available():
        return f"no GPU that torch {torch.__version__} ({built_for()}) sees: run this on a machine with one"
    try:
        device = describe(torch.device("cuda", 0))
    except RuntimeError as error:
        return f"the GPU cannot be used: {str(error).splitlines()[0]}"
    known = {"machine": environment.machine(), "versions": environment.versions(), "settings": environment.settings()}
    return {"device": device, **known}


def apart(work: Callable[[], Any], limit_s: float) -> Any:
    """Return what `work` returns in a process forked from this one. Raises NoAnswerError without an answer in time.

    The process, and all that it has begun, is gone afterwards.
    """
    there = multiprocessing.get_context("fork")
    ours, theirs = there.Pipe(duplex=False)
    process = there.Process(target=_answer, args=(theirs, work))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads, which only libraries have here, and at rest
        process.start()
    theirs.close()
    try:
        if not ours.poll(max(0.0, limit_s)):
            raise NoAnswerError(f"no answer within {limit_s:.0f} s")
        return ours.recv()
    except EOFError:
        process.join(ENDS_S)
        raise NoAnswerError(f"its process ended with {process.exitcode}") from None
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()
        process.join(ENDS_S)  # one that hangs in the driver does not end
        ours.close()


def _answer(connection: Connection, work: Callable[[], Any]) -> None:
    os.setsid()
    connection.send(work())


def _run(item: pytest.Item) -> list[pytest.TestReport]:
    """Return the reports of a check, those of its process or one of our own."""
    hook, config, result = item.config.hook, item.config, head(item.config)
    if isinstance(result, str):
        return [_report(item, "skipped", result)]
    if "card" in item.fixturenames:
        import tests.gpu.subject  # noqa: F401 -- before the fork, for all checks once

    left_s = config.stash[UNTIL] - time.monotonic()
    if left_s < LEAST_S:
        return [_report(item, "skipped", TIME_IS_UP)]

    def reports() -> list[dict[str, Any]]:
        made = runtestprotocol(item, log=False, nextitem=None)
        return [hook.pytest_report_to_serializable(config=config, report=item) for item in made]

    limit_s = item.get_closest_marker("gpu").kwargs.get("limit_s", LIMIT_S)
    try:
        answers = apart(reports, min(limit_s, left_s))
    except NoAnswerError as error:
        if left_s < limit_s and time.monotonic() >= config.stash[UNTIL]:
            return [_report(item, "skipped", TIME_IS_UP)]
        return [_report(item, "failed", str(error))]
    return [hook.pytest_report_from_serializable(config=config, data=answer) for answer in answers]


def _report(item: pytest.Item, outcome: Any, reason: str) -> pytest.TestReport:
    path, number, _ = item.location
    text = (path, (number or 0) + 1, f"Skipped: {reason}") if outcome == "skipped" else reason
    return pytest.TestReport(item.nodeid, item.location, {}, outcome, text, "call")


def line(item: pytest.Item, reports: Sequence[pytest.TestReport], seconds: float) -> dict[str, Any]:
    """Return the line of a check.

    Its verdict is "ok", "look" where the value is not as expected, "failed" where there is none, or "not here" where
    this machine lacks what it needs.
    """
    expected = item.get_closest_marker("gpu").kwargs
    figures = next((dict(report.user_properties) for report in reports if report.user_properties), {})
    bad = next((report for report in reports if report.failed), None)
    missing = next((report for report in reports if report.skipped), None)
    why = None
    if bad is not None:
        crash = getattr(bad.longrepr, "reprcrash", None)
        why = (crash.message if crash else str(bad.longrepr)).strip().splitlines()[0].removeprefix("Failed: ")
    elif missing is not None and isinstance(missing.longrepr, tuple):
        why = missing.longrepr[2].removeprefix("Skipped: ")
    elif "value" not in figures:
        why = "it measured nothing"
    verdict = "not here" if missing else "ok" if why is None else "look" if "value" in figures else "failed"
    return {
        "name": item.name.removeprefix("test_").replace("_", " "),
        "value": figures.get("value"),
        "expected": [expected["low"], expected["high"]],
        "unit": expected["unit"],
        "reason": expected["reason"],
        "verdict": verdict,
        "why": why,
        "seconds": round(seconds, 1),
        "facts": figures.get("facts", {}),
    }


def _tell(config: pytest.Config, found: dict[str, Any]) -> None:
    """Print a line and append it to the file, before the next check can lose it."""
    if LINES not in config.stash:
        given = config.getoption("--lines", None)
        config.stash[LINES] = given or MEASUREMENTS / f"{datetime.now(UTC):%Y-%m-%d}-gpu.jsonl"
        if not isinstance(head(config), str):
            files.make_folder(config.stash[LINES].parent)
            files.write_text(config.stash[LINES], f"{files.encode_json(head(config))}\n")
    if not isinstance(head(config), str):
        files.append_json_line(config.stash[LINES], found)
    terminal = config.pluginmanager.get_plugin("terminalreporter")
    if terminal is not None:
        terminal.ensure_newline()
        terminal.write_line(files.encode_json(found))


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if LINES in config.stash:
        terminalreporter.write_line(f"wrote {config.stash[LINES]}")


@pytest.fixture
def measured(request: pytest.FixtureRequest, record_property: Callable[[str, Any], None]) -> Callable[..., None]:
    """Hand the value of a check over, with what else was seen; fails where it is not in the range of the marker.

    None is no value: it is in no range.
    """
    expected = request.node.get_closest_marker("gpu").kwargs

    def judge(value: float | None, **facts: Any) -> None:
        record_property("value", value)
        record_property("facts", facts)
        low, high = (expected["low"], math.inf if expected["high"] is None else expected["high"])
        if value is None or not low <= value <= high:
            shown = "at least {low:g}" if expected["high"] is None else "{low:g} to {high:g}"
            text = shown.format(low=low, high=high)
            pytest.fail(f"{value} {expected['unit']}, expected {text}: {expected['reason']}", pytrace=False)

    return judge


@pytest.fixture
def card(request: pytest.FixtureRequest) -> Any:
    """The card of this machine, with the sizes that were asked for."""
    import torch  # here, so that a machine without a card is told at once

    from tests.gpu.subject import SMALL, Card, Sizes

    return Card(torch.device("cuda", 0), SMALL if request.config.getoption("--small", False) else Sizes())
