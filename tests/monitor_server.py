"""The monitor as a person starts it, with a real browser on its page."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from tests import browser

ROOT = Path(__file__).resolve().parents[1]
PATIENCE_S = 60.0  # for what should take a second or two


def patiently(is_so: Callable[[], bool], what: str) -> None:
    """Return when it is so; fail when it never is."""
    end = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < end, what
        threading.Event().wait(0.2)  # a machine that is busy enough already


def free_port() -> int:
    """Return a port that is free, and none that the system gives to other tests, which ask it for any."""
    for port in range(20_000 + os.getpid() % 10_000, 32_000):
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("no port is free")


class Monitor:
    def __init__(self, runs: Path, port: int, pid: int, here: browser.Browser) -> None:
        self.runs = runs
        self.port = port
        self.pid = pid
        self.here = here

    def open(self, width: int = 1280) -> None:
        self.here.open(f"http://127.0.0.1:{self.port}", width=width)

    def wait_for_text(self, text: str) -> None:
        patiently(lambda: text in self.here.run("document.body.innerText"), f"the page never says {text!r}")

    def choose_tab(self, name: str, text: str) -> None:
        """Choose the tab that is called so, as often as a page that still loads needs, until it says the text."""
        find = (
            f"[...document.querySelectorAll('[role=tab]')].find((each) => each.innerText.trim() === {json.dumps(name)})"
        )

        def shows() -> bool:
            if self.here.run(f"({find})?.ariaSelected") != "true":
                self.here.run(f"({find})?.click()")
            return text in self.here.run("document.body.innerText")

        patiently(shows, f"the tab {name} never says {text!r}")

    def metric(self, label: str) -> str:
        result = self.here.texts("[data-testid=stMetric]")
        return next((text.partition("\n")[2].strip() for text in result if text.startswith(label)), "")


@contextlib.contextmanager
def serving(runs: Path, folder: Path, *arguments: str) -> Iterator[Monitor]:
    """Serve the runs from a process of its own, whose log and browser profile go to `folder`."""
    program = browser.executable()
    assert program is not None
    port = free_port()
    command = [sys.executable, str(ROOT / "scripts" / "monitor.py"), str(runs), "--port", str(port), *arguments]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log)

    def answers() -> bool:
        assert process.poll() is None, (folder / "log").read_text()
        with socket.socket() as asking:
            return asking.connect_ex(("127.0.0.1", port)) == 0

    try:
        patiently(answers, "the server does not answer")
        here = browser.Browser(program, folder / "profile")
        try:
            yield Monitor(runs, port, process.pid, here)
        finally:
            here.close()
    finally:
        process.terminate()
        process.wait()
