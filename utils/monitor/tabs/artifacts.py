"""The files of the run, to look at and to take home; and what is missing, with the reason."""

import json

import streamlit as st

from boundby.training.results import MANIFEST
from utils.monitor import text
from utils.monitor.run import LARGEST_DOWNLOAD, RunFile
from utils.monitor.shown import Shown
from utils.monitor.tabs import parts

PREVIEW_BYTES = 20_000
AT_HAND_BYTES = 4 * 2**20  # of a file that is offered as it is; a larger one is read when it is asked for
READABLE = (".json", ".jsonl", ".csv", ".txt", ".log", ".yaml", ".md")


def show(shown: Shown) -> None:
    """Show the files, offer them, and say what the manifest lists as missing."""
    found = shown.folder.files()
    rows = [
        {
            "file": text.plain(each.path),
            "size": text.size(each.size_bytes),
            "written": text.ago(each.changed_unix_s, shown.now),
            "what it is": each.purpose,
        }
        for each in found
    ]
    parts.table(rows)
    if found:
        _one(shown, found)
    _missing(shown)


def _one(shown: Shown, found: list[RunFile]) -> None:
    by_path = {each.path: each for each in found}
    names = dict(zip(by_path, text.distinct([text.plain(each) for each in by_path]), strict=True))
    path = st.selectbox("File", list(by_path), format_func=lambda each: names.get(each, each), key="file")
    chosen = by_path.get(path or "", found[0])
    name = text.plain(chosen.path.rpartition("/")[2])
    if chosen.size_bytes > LARGEST_DOWNLOAD:
        st.info(f"Files above {text.size(LARGEST_DOWNLOAD)} do not go through the browser; copy this one:")
        st.code(str(shown.folder.folder.resolve() / chosen.path), language=None)
        return
    st.download_button(
        "Download",
        data=_content(shown, chosen) if chosen.size_bytes <= AT_HAND_BYTES else lambda: _content(shown, chosen),
        file_name=name,
        mime="application/octet-stream",
        on_click="ignore",
        key="download",
    )
    if chosen.path.lower().endswith(READABLE):
        _preview(shown, chosen)


def _content(shown: Shown, chosen: RunFile) -> bytes:
    """Return the content of a file; the reason in its place where it cannot be read any more."""
    try:
        return shown.folder.read(chosen.path)
    except (OSError, ValueError) as error:
        return f"This file could not be read: {text.reason(error, shown.folder.folder)}\n".encode()


def _preview(shown: Shown, chosen: RunFile) -> None:
    try:
        content = shown.folder.read(chosen.path, PREVIEW_BYTES, is_cut=True).decode("utf-8", "replace")
    except (OSError, ValueError) as error:
        st.warning("This file cannot be read.")
        st.text(text.reason(error, shown.folder.folder))
        return
    cut = chosen.size_bytes > PREVIEW_BYTES
    with st.expander(f"The first {text.size(PREVIEW_BYTES)} of it" if cut else "Look at it"):
        st.code(content if cut else _indented(content), language=None, height=400)


def _indented(content: str) -> str:
    try:
        return json.dumps(json.loads(content), indent=2, ensure_ascii=False)
    except (ValueError, RecursionError):
        return content


def _missing(shown: Shown) -> None:
    names = [each.path for each in shown.folder.files() if each.path.endswith(MANIFEST) and "/" not in each.path]
    rows = []
    for name in names:
        document, fault = shown.folder.document(name)
        if fault:
            rows.append({"file": name, "what": name, "why": fault})
        if document.get("trace_reason"):
            rows.append(_remark(name, {"what": "trace", "reason": document["trace_reason"]}))
        for key in ("unavailable", "downgrades"):
            listed = document.get(key)
            rows += [_remark(name, each) for each in (listed if isinstance(listed, list) else [])]
    if rows:
        st.subheader("What is missing or less than asked for, and why", anchor=False)
        parts.table(rows)
    elif not names:
        st.info("There is no manifest yet; it comes with the first trace, or at the end of the run.")


def _remark(name: str, remark: object) -> dict[str, str]:
    given = remark if isinstance(remark, dict) else {"reason": remark}
    return {
        "file": name,
        "what": text.plain(str(given.get("what", ""))),
        "why": text.plain(str(given.get("reason")), text.REASON_CHARACTERS),
    }
