"""A program of a name of one's choice, for tests that put it before the real one."""

from pathlib import Path


def fake_program(folder: Path, name: str, body: str) -> None:
    """Write the bash script `body` as the executable `name` in `folder`."""
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/bash\n{body}\n", encoding="utf-8")
    (folder / name).chmod(0o755)
