"""A real browser for tests: headless Chromium over the pipe of its DevTools protocol, which needs no package."""

import fcntl
import json
import os
import select
import shutil
import subprocess
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
ANSWER_S = 60.0
ARGUMENTS = (
    "--headless",
    "--no-sandbox",  # as root, which test machines mostly are, Chromium does not start with it
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--no-first-run",
    "--remote-debugging-pipe",
)


def executable() -> str | None:
    """Return the browser of this machine, or None."""
    return next((result for result in map(shutil.which, NAMES) if result), None)


class Browser:
    """One page, and everything it said, asked for or ran into since it was opened."""

    def __init__(self, program: str, folder: Path) -> None:
        pipes = [end for _ in range(2) for end in os.pipe()]
        read_there, self._write, self._read, write_there = pipes
        there = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (read_there, write_there)]
        command = f'exec "$0" "$@" 3<&{there[0]} 4>&{there[1]}'  # where the browser looks for the pipe
        self._process = subprocess.Popen(
            ["bash", "-c", command, program, *ARGUMENTS, f"--user-data-dir={folder}", "about:blank"],
            pass_fds=there,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for end in (read_there, write_there, *there):
            os.close(end)
        self._unread, self._number, self._session = b"", 0, None
        self._is_loaded = False
        self.said: list[str] = []
        self.requests: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def close(self) -> None:
        self._session = None
        self.call("Browser.close")
        self._process.wait()
        os.close(self._write)
        os.close(self._read)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        number = self._send(method, **parameters)
        while True:
            answer = self._next()
            if answer.get("id") == number:
                assert "error" not in answer, (method, answer["error"])
                return answer["result"]
            self._note(answer)

    def open(self, page: Path | str, width: int = 1280, scheme: str = "light") -> None:
        """Load a page (a file, or an address) and wait until it is loaded; what an earlier page said is forgotten."""
        metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **metrics)
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.said, self.requests = [], []
        self._is_loaded = False
        self.call("Page.navigate", url=page if isinstance(page, str) else page.as_uri())
        while not self._is_loaded:
            self._note(self._next())

    def run(self, script: str) -> Any:
        """Return the value of a script, which may be a promise. Raises AssertionError where it throws."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def text(self, selector: str) -> str:
        return self.texts(selector)[0]

    def texts(self, selector: str) -> list[str]:
        every = f"[...document.querySelectorAll({json.dumps(selector)})]"
        return self.run(f"{every}.map((each) => (each.innerText ?? each.textContent).trim())")

    def set(self, selector: str, value: str) -> None:
        self.run(
            f"""(() => {{
              const field = document.querySelector({json.dumps(selector)});
              field.value = {json.dumps(value)};
              for (const kind of ["input", "change"]) field.dispatchEvent(new Event(kind, {{bubbles: true}}));
            }})()"""
        )

    def wait_for(self, selector: str) -> None:
        self.run(
            f"""new Promise((done) => {{
              const look = () => document.querySelector({json.dumps(selector)}) ? done() : requestAnimationFrame(look);
              look();
            }})"""
        )

    def click(self, selector: str) -> None:
        """Click with the mouse in the middle of the first element, brought into view."""
        x, y = self.point(selector)
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, button="left", clickCount=1, x=x, y=y)

    def point(self, selector: str) -> tuple[float, float]:
        """Move the mouse to the middle of the first element, brought into view; return where that is."""
        x, y = self.run(
            f"""(() => {{
              const found = document.querySelector({json.dumps(selector)});
              found.scrollIntoView({{block: "center", inline: "center"}});
              const box = found.getBoundingClientRect();
              return [box.x + box.width / 2, box.y + box.height / 2];
            }})()"""
        )
        for step in (1, 0):  # a chart answers to movement
            self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x + step, y=y)
        return x, y

    def press(self, key: str, code: int, text: str = "") -> None:
        pressed = {"key": key, "code": key, "windowsVirtualKeyCode": code}
        self.call("Input.dispatchKeyEvent", type="keyDown", text=text, **pressed)
        self.call("Input.dispatchKeyEvent", type="keyUp", **pressed)

    def write(self, text: str) -> None:
        """Type a text where the focus is."""
        self.call("Input.insertText", text=text)

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._unread:
            ready, _, _ = select.select([self._read], [], [], ANSWER_S)
            assert ready, f"the browser said nothing for {ANSWER_S:.0f} s"
            more = os.read(self._read, 1 << 20)
            assert more, f"the browser ended with code {self._process.wait()}"
            self._unread += more
        message, _, self._unread = self._unread.partition(b"\0")
        return json.loads(message)

    def _note(self, event: dict[str, Any]) -> None:
        parameters = event.get("params", {})
        match event.get("method"):
            case "Runtime.consoleAPICalled":
                self.said.append(" ".join(str(parameter.get("value")) for parameter in parameters["args"]))
            case "Runtime.exceptionThrown":
                self.said.append(json.dumps(parameters["exceptionDetails"]))
            case "Log.entryAdded":
                self.said.append(parameters["entry"]["text"])
            case "Page.javascriptDialogOpening":
                self.said.append(f"dialog: {parameters['message']}")
                self._send("Page.handleJavaScriptDialog", accept=True)
            case "Page.loadEventFired":
                self._is_loaded = True
            case "Network.requestWillBeSent":
                self.requests.append(parameters["request"]["url"])

    def _send(self, method: str, **parameters: Any) -> int:
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        return self._number
