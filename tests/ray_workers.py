"""The processes that Ray has started below this one."""

import psutil


def started() -> list[psutil.Process]:
    """Return all processes of Ray below this one."""
    return [each for each in psutil.Process().children(recursive=True) if "ray" in " ".join(_command(each))]


def actors() -> list[psutil.Process]:
    """Return the actors that predict shards."""
    return [each for each in started() if _command(each)[:1] and _command(each)[0].startswith("ray::Worker")]


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:  # it has ended meanwhile
        return []
