"""Starts the page: Streamlit's own server, for this machine alone, which asks nobody and tells nobody anything."""

import importlib.util
import os
import socket
import sys
from pathlib import Path
from typing import NoReturn

from boundby.cli import PIPELINE
from utils.command import InputError, lacking

ADDRESS = "127.0.0.1"
PORT = 8501
APP = Path(__file__).with_name("app.py")
OPTIONS = {
    "server.address": ADDRESS,
    "server.headless": "true",
    "server.showEmailPrompt": "false",
    "server.fileWatcherType": "none",
    "server.enableCORS": "true",
    "server.enableXsrfProtection": "true",
    "server.enableStaticServing": "false",
    "browser.gatherUsageStats": "false",
    "client.showErrorDetails": "none",
    "client.showErrorLinks": "false",
    "client.toolbarMode": "minimal",
    "global.developmentMode": "false",
    "runner.magicEnabled": "false",
}
HOSTS = (ADDRESS, "localhost")  # no other name may be made to lead here (DNS rebinding)


def serve(runs: Path, port: int, stall_s: float) -> NoReturn:
    """Become the server of the page on the runs in a folder, as `check` has found possible."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(PIPELINE), os.environ.get("PYTHONPATH", "")])}
    os.execve(sys.executable, command(runs, port, stall_s), environment)


def check(runs: Path, port: int, stall_s: float) -> None:
    """Raise InputError for a folder or a port that cannot be, `lacking` where Streamlit is missing."""
    if not runs.is_dir():
        fault = "is no folder" if runs.exists() else "is not there"
        raise InputError(f"RUNS: {runs} {fault}; name the folder that holds the runs, or make it: mkdir -p {runs}")
    if not 0 < port < 2**16:
        raise InputError(f"--port: {port}; a port is a number from 1 to 65535, such as {PORT}")
    if not stall_s > 0:
        raise InputError(f"--stall-after: {stall_s:g}; seconds without progress, more than 0")
    if importlib.util.find_spec("streamlit") is None:
        raise lacking("streamlit")
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((ADDRESS, port))
        except OSError as error:
            raise InputError(f"--port: {port} cannot be used ({error.strerror}); choose another") from None


def command(runs: Path, port: int, stall_s: float) -> list[str]:
    """Return the command of the server."""
    options = [f"--{name}={value}" for name, value in (OPTIONS | {"server.port": str(port)}).items()]
    options += [f"--server.allowedHosts={host}" for host in HOSTS]
    return [
        sys.executable,
        "-m",
        "utils.training.monitor",
        "run",
        str(APP),
        *options,
        "--",
        str(runs.resolve()),
        str(stall_s),
    ]
