"""The monitor as a person uses it: its server, and a real browser on its page."""

import http.client
import threading

import psutil
import pytest

from boundby.training import StageTimer, TimerOptions
from boundby.training.store import Pace
from tests import browser
from tests.monitor_runs import HOSTILE, USUAL, write_run
from tests.monitor_server import Monitor, patiently, serving

pytest.importorskip("streamlit", reason="Streamlit is not installed")
PROGRAM = browser.executable()
pytestmark = [
    pytest.mark.skipif(PROGRAM is None, reason=f"there is no browser: none of {', '.join(browser.NAMES)}"),
    pytest.mark.timeout(300),
]
WIDTHS = (900, 1300, 2560)  # beside that of a phone
CUT = """[...document.querySelectorAll("[data-testid=stMain] *")].filter((each) => each.innerText && each.clientWidth
    && each.scrollWidth > each.clientWidth + 1 && ["hidden", "clip"].includes(getComputedStyle(each).overflowX)
).map((each) => each.innerText)"""
TABS = {"Timing": "Stages of the steps", "Memory": "Memory over", "Artifacts": "Download"}


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    folder = tmp_path_factory.mktemp("monitor")
    (folder / "runs").mkdir()
    with serving(folder / "runs", folder, "--stall-after", "2") as result:
        yield result


@pytest.fixture
def monitor(served):
    """The monitor, which must ask nobody but its own server, and have nothing to complain of."""
    yield served
    ours = (f"http://127.0.0.1:{served.port}/", "data:", "blob:")
    assert [request for request in served.here.requests if not request.startswith(ours)] == [] and served.here.requests
    assert served.here.said == []


def train(timer: StageTimer, is_stuck: threading.Event, is_over: threading.Event) -> None:
    """Run steps of about 10 ms until it is over; while it is stuck, hang in `data`."""
    while not is_over.is_set():
        for name, milliseconds in USUAL.items():
            with timer.stage(name):
                is_over.wait(milliseconds / 1e3)
                while name == "data" and is_stuck.is_set() and not is_over.wait(0.05):
                    pass
        timer.metrics({"loss": 1.0})
        timer.step()


def is_stalled(monitor: Monitor) -> bool:
    return any("Stalled run" in text for text in monitor.here.texts("[data-testid=stAlert]"))


def test_a_live_run_appears_moves_and_raises_an_alert_when_it_stalls(monitor):
    monitor.open()
    monitor.wait_for_text("There is no run in this folder yet.")
    monitor.wait_for_text(f"--output {monitor.runs / 'first'}")
    timer = StageTimer(monitor.runs / "live", options=TimerOptions(pace=Pace(flush_s=0.2, document_s=0.5)))
    is_stuck, is_over = threading.Event(), threading.Event()
    timer.start()
    loop = threading.Thread(target=train, args=(timer, is_stuck, is_over))
    loop.start()
    try:
        monitor.wait_for_text("1 run, 1 running")
        patiently(lambda: monitor.metric("Last step") not in ("", "none yet"), "no step is shown")
        before = monitor.metric("Last step")
        patiently(lambda: monitor.metric("Last step") not in ("", before), "the run does not move")
        patiently(lambda: not is_stalled(monitor), "a run that moves counts as stalled")
        is_stuck.set()
        patiently(lambda: is_stalled(monitor), "a run that is stuck raises no alert")
        monitor.wait_for_text("it is in data")
    finally:
        is_over.set()
        loop.join()
        timer.stop()
    monitor.wait_for_text("1 run, 0 running")
    patiently(lambda: not is_stalled(monitor), "the alert stays")


def test_every_tab_fits_a_phone_and_names_that_are_programs_stay_names(monitor):
    run = write_run(monitor.runs / HOSTILE.replace("/", "|"), 60, USUAL | {HOSTILE: 2.0})
    (run / f"{HOSTILE.replace('/', '|')[:80]}.txt").write_text(HOSTILE)
    monitor.open(width=400)
    monitor.wait_for_text("<script>alert(1)</script>")  # a stage in the verdict
    for name in (*TABS, "Overview"):
        monitor.choose_tab(name, TABS.get(name, "What limits it"))
        assert monitor.here.run("document.documentElement.scrollWidth") <= 400
        assert monitor.here.run("document.querySelectorAll('img[src*=\"192.0.2.1\"], a[href^=javascript]').length") == 0
        assert monitor.here.run("[...document.scripts].filter((each) => each.text.includes('alert')).length") == 0
    for width in WIDTHS:
        monitor.open(width=width)
        monitor.wait_for_text("What limits it")
        assert monitor.here.run("document.documentElement.scrollWidth") <= width and monitor.here.run(CUT) == []


def test_only_this_machine_under_its_own_name_is_served(served):
    listening = [
        connection.laddr.ip
        for connection in psutil.Process(served.pid).net_connections()
        if connection.status == "LISTEN"
    ]
    assert listening == ["127.0.0.1"]
    upgrade = {"Connection": "Upgrade", "Upgrade": "websocket"}
    upgrade |= {"Sec-WebSocket-Version": "13", "Sec-WebSocket-Key": "AAAAAAAAAAAAAAAAAAAAAA=="}
    for host, status in (("evil.example", 403), ("127.0.0.1", 101), ("localhost", 101)):
        asking = http.client.HTTPConnection("127.0.0.1", served.port, timeout=30)
        asking.request("GET", "/_stcore/stream", headers={**upgrade, "Host": host})
        assert asking.getresponse().status == status, host
        asking.close()
