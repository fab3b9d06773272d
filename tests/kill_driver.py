"""Kill a step at its n-th write, then continue it, for many n; print what was found as one line of JSON.

    python tests/kill_driver.py all|some SCRIPT RESULTS [argument ...]

`all` is every write; `some` are the writes 1, 3, 9, 27, …

A process of its own, because it forks: heavy modules are loaded once here and each attempt runs in a child. A write is
a rename into place or a flush of the log. After each kill every file under RESULTS must be readable, and the same
command with --resume must end well.
"""

import contextlib
import csv
import importlib
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

SMALL_SHARD = 20  # rows, so that a small dataset has several shards


def main() -> int:
    which, script, results, arguments = sys.argv[1], sys.argv[2], Path(sys.argv[3]), sys.argv[4:]
    step = importlib.import_module(f"scripts.{script}")
    preload()
    base = results.with_name("base")
    shutil.copytree(results, base)
    kills, problems, write = 0, [], 1
    while True:
        shutil.rmtree(results)
        shutil.copytree(base, results)
        if in_child(lambda: step.main(arguments), kill_at=write) != -signal.SIGKILL:  # noqa: B023 (called at once)
            break
        kills += 1
        problems += [f"write {write}: {problem}" for problem in unreadable(results)]
        committed = visits(results)
        code = in_child(lambda: step.main([*arguments, "--resume"]))
        if code != 0:
            problems.append(f"write {write}: --resume ended with {code}")
        problems += [f"write {write}: visit {each} was lost" for each in committed - visits(results)]
        problems += [f"write {write}: {path.name} is left over" for path in results.rglob(".tmp-*")]
        problems += [f"write {write}, resumed: {problem}" for problem in unreadable(results)]
        write = write + 1 if which == "all" else 3 * write
    shutil.rmtree(base)
    print(json.dumps({"kills": kills, "problems": problems}))
    return 0


def preload() -> None:
    """Import what the steps import, and start no thread: a forked child cannot use threads of its parent."""
    import matplotlib.figure  # noqa: F401
    import pyarrow.parquet  # noqa: F401
    import sklearn.metrics  # noqa: F401
    import transformers.models.bert.modeling_bert  # noqa: F401

    from utils import baseline, tracing  # noqa: F401
    from utils.evaluation import planning, run  # noqa: F401

    planning.SHARD_ROWS["cpu"] = SMALL_SHARD


def in_child(act: Callable[[], int], kill_at: int | None = None, kill_after_s: float | None = None) -> int:
    """Return the exit code of `act` in a forked child, negative for a signal."""
    pid = os.fork()
    if pid == 0:
        silence()
        if kill_at is not None:
            arm(kill_at)
        code = 70
        with contextlib.suppress(BaseException):
            code = act()
        os._exit(code)
    if kill_after_s is not None:
        time.sleep(kill_after_s)
        os.kill(pid, signal.SIGKILL)  # it cannot be gone: nobody has asked for its exit code
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def silence() -> None:
    null = os.open(os.environ.get("KILL_DRIVER_LOG", os.devnull), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(null, stream)


def arm(kill_at: int) -> None:
    """Let the process kill itself instead of making its write number `kill_at`."""
    from boundby import files

    done = 0
    rename, append = os.replace, files.append_json_line

    def count() -> None:
        nonlocal done
        done += 1
        if done == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    def counted_replace(source: str, target: str) -> None:
        count()
        rename(source, target)

    def torn_append(path: str, value: object) -> None:
        nonlocal done
        if done + 1 == kill_at:  # a kill in the middle of a line
            with Path(path).open("ab") as log:
                log.write(files.encode_json(value).encode()[:40])
        count()
        append(path, value)

    os.replace = counted_replace
    files.append_json_line = torn_append


def visits(results: Path) -> set[tuple]:
    """Return the committed visits as (log, batch size, round, session)."""
    found = set()
    for log in results.rglob("02-visits-*.jsonl"):
        for line in log.read_text(encoding="utf-8").splitlines():
            with contextlib.suppress(ValueError):
                visit = json.loads(line)
                found.add((log.name, visit["batch_size"], visit["round"], visit["session"]))
    return found


def unreadable(results: Path) -> list[str]:
    """Return what a reader of the results would stumble over."""
    import pyarrow.parquet

    problems = []
    for path in sorted(results.rglob("*")):
        if not path.is_file() or path.name.startswith(".tmp-"):
            continue
        try:
            if path.suffix == ".json":
                json.loads(path.read_text(encoding="utf-8"))
            elif path.suffix == ".csv":
                with path.open(encoding="utf-8", newline="") as file:
                    widths = {len(row) for row in csv.reader(file)}
                assert len(widths) == 1, f"rows of {widths} cells"
            elif path.suffix == ".parquet":
                pyarrow.parquet.read_table(path)
            elif path.suffix == ".png":
                assert path.read_bytes().endswith(b"IEND\xaeB`\x82"), "torn picture"
        except (ValueError, AssertionError, OSError) as error:
            problems.append(f"{path.name}: {error}")
    return problems


if __name__ == "__main__":
    sys.exit(main())
