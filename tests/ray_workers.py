"""The processes that Ray has started below a process."""

import psutil


def started(below: int | None = None) -> list[psutil.Process]:
    """Return all processes of Ray below that process, None for this one."""
    return [
        process for process in psutil.Process(below).children(recursive=True) if "ray" in " ".join(command(process))
    ]


def actors(below: int | None = None) -> list[psutil.Process]:
    return [process for process in started(below) if command(process)[0].startswith("ray::Worker")]


def command(process: psutil.Process) -> list[str]:
    """Return the command line; one that has ended has an empty word for it."""
    try:
        return process.cmdline() or [""]
    except psutil.Error:
        return [""]
