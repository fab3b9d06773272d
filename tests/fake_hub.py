"""A Hugging Face Hub on this machine: serves recorded repositories from a folder to the real client code.

The folder holds `models/<owner>/<name>/…` and `datasets/<owner>/<name>/…`. Every repository has one commit, `COMMIT`,
known as `main` and `v1.0`. Of a repository in `gated` the files are refused, as the Hub does it: metadata stays
readable, files get 401 without a token and 403 with one that has no access. One in `failing` gets its status always.
"""

import hashlib
import json
import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

COMMIT = "5f0c6f7a4d2b3e1908a7b6c5d4e3f2a1908b7c6d"
REVISIONS = ("main", COMMIT, "v1.0")


class FakeHub:
    """A server for the time of a `with` block; `url` is what HF_ENDPOINT has to be, `requests` what was asked."""

    def __init__(self, folder: Path, gated: Mapping[str, int], failing: Mapping[str, int]) -> None:
        """Serve `folder`; `gated` and `failing` map repositories to the status of the refusal."""
        self.folder, self.gated, self.failing = folder, gated, failing
        self.requests: list[str] = []
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> "FakeHub":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def answer(self, path: str, form: Mapping[str, list[str]]) -> "Answer":
        """Return what the Hub says to a request for `path`."""
        api = path.startswith("/api/")
        parts = path.removeprefix("/api/").strip("/").split("/")
        kind = parts.pop(0) if parts[0] in ("models", "datasets") else "models"
        repository, rest = "/".join(parts[:2]), parts[2:]
        folder = self.folder / kind / repository
        if repository in self.failing:
            return Answer.refusal(self.failing[repository], None, "Service unavailable")
        if len(parts) < 2 or not folder.is_dir():
            return Answer.refusal(401, "RepoNotFound" if len(parts) >= 2 else None, "Repository not found")
        if len(rest) > 1 and rest[1] not in REVISIONS:
            return Answer.refusal(404, "RevisionNotFound", f"Invalid rev id: {rest[1]}")
        if api:
            return self._metadata(repository, folder, rest, form)
        if repository in self.gated:
            return Answer.refusal(self.gated[repository], "GatedRepo", f"Access to {repository} is restricted")
        return self._file(folder.joinpath(*rest[2:]))

    def _metadata(self, repository: str, folder: Path, rest: list[str], form: Mapping[str, list[str]]) -> "Answer":
        entries = [_entry(path, folder) for path in sorted(folder.rglob("*"))]
        action = rest[0] if rest else "revision"
        if action == "revision":
            siblings = [{"rfilename": entry["path"]} for entry in entries if entry["type"] == "file"]
            return Answer.json({"id": repository, "sha": COMMIT, "siblings": siblings, "tags": [], "private": False})
        if action == "paths-info":
            return Answer.json([entry for entry in entries if entry["path"] in form.get("paths", [])])
        below = "/".join(rest[2:])
        inside = [entry for entry in entries if entry["path"].startswith(f"{below}/" if below else "")]
        if below and not inside:
            return Answer.refusal(404, "EntryNotFound", f"{below} does not exist on main")
        direct = "recursive" not in form or form["recursive"] == ["False"]
        depth = below.count("/") + 1 if below else 0
        return Answer.json([entry for entry in inside if not direct or entry["path"].count("/") == depth])

    def _file(self, path: Path) -> "Answer":
        if not path.is_file():
            return Answer.refusal(404, "EntryNotFound", "Entry not found", {"X-Repo-Commit": COMMIT})
        content = path.read_bytes()
        headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{_sha1(content)}"', "Accept-Ranges": "bytes"}
        return Answer(200, content, headers)


class Answer:
    """A status, a body and headers."""

    def __init__(self, status: int, body: bytes, headers: Mapping[str, str]) -> None:
        """Keep the three."""
        self.status, self.body, self.headers = status, body, headers

    @classmethod
    def json(cls, value: Any) -> "Answer":
        """Return a value as the Hub's API does."""
        return cls(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    @classmethod
    def refusal(cls, status: int, code: str | None, message: str, headers: Mapping[str, str] | None = None) -> "Answer":
        """Return an error as the Hub does: its code and its message stand in headers."""
        named = {"X-Error-Code": code} if code else {}
        return cls(
            status, json.dumps({"error": message}).encode(), {**named, "X-Error-Message": message, **(headers or {})}
        )


def _handler(hub: FakeHub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._reply(with_body=True)

        def do_HEAD(self) -> None:
            self._reply(with_body=False)

        def do_POST(self) -> None:
            self._reply(with_body=True)

        def _reply(self, with_body: bool) -> None:
            url = urlsplit(self.path)
            sent = self.rfile.read(int(self.headers.get("Content-Length") or 0)).decode()
            hub.requests.append(f"{self.command} {unquote(url.path)}")
            answer = hub.answer(unquote(url.path), {**parse_qs(url.query), **_form(sent)})
            body, status = answer.body, answer.status
            self.send_response(status)
            for name, value in answer.headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if with_body:
                self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Say nothing: `requests` has it."""

    return Handler


def _form(sent: str) -> dict[str, list[str]]:
    return json.loads(sent) if sent.startswith("{") else parse_qs(sent)


def _entry(path: Path, folder: Path) -> dict[str, Any]:
    name = path.relative_to(folder).as_posix()
    if path.is_dir():
        return {"type": "directory", "path": name, "oid": _sha1(name.encode()), "size": 0}
    content = path.read_bytes()
    return {"type": "file", "path": name, "oid": _sha1(content), "size": len(content)}


def _sha1(content: bytes) -> str:
    return hashlib.sha1(content, usedforsecurity=False).hexdigest()
