"""Kill an evaluation at its n-th write, then run it again, for many n; print what was found as a line of JSON.

    python tests/evaluation_kill_driver.py FOLDER all|some|random [KILLS]

`all` is every write; `some` are the writes 1, 3 and 9. With `random` it is killed at random moments instead, and goes
on from there, again and again. A process of its own, because it forks, as `kill_driver` does. Plan, parts, predictions
and metrics are made in one go.
"""

import json
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests import evaluation_workplace as workplace
from tests.kill_driver import in_child, unreadable

ROWS = 20  # two shards
ACTIONS = ("plan", "run", "finalize")


def main() -> int:
    folder = Path(sys.argv[1])
    preload()
    settings = workplace.prepare(folder, workplace.texts(ROWS))

    def act() -> int:
        return max(workplace.evaluate(settings, *ACTIONS))

    started = time.monotonic()
    assert in_child(act) == 0
    undisturbed = workplace.results(folder / "results" / "evaluation")
    if sys.argv[2] == "random":
        found = at_random(act, folder / "results", undisturbed, int(sys.argv[3]), (time.monotonic() - started) / 2)
    else:
        found = at_writes(act, folder / "results", undisturbed, is_every=sys.argv[2] == "all")
    print(json.dumps({**found, "parts": sum(name.startswith("part-") for name in undisturbed)}))
    return 0


def at_writes(act: Callable[[], int], results: Path, undisturbed: dict[str, bytes], is_every: bool) -> dict[str, Any]:
    kills, problems, write = 0, [], 1
    while True:
        shutil.rmtree(results)
        if in_child(act, kill_at=write) != -signal.SIGKILL:
            return {"kills": kills, "problems": problems}
        kills += 1
        problems += [f"write {write}: {problem}" for problem in unreadable(results)]
        before = {path: path.stat().st_ino for path in results.rglob("part-*")}
        code = in_child(act)
        problems += [f"write {write}: the next attempt ended with {code}"] if code else []
        problems += [
            f"write {write}: {path.name} was done twice" for path in before if path.stat().st_ino != before[path]
        ]
        if workplace.results(results / "evaluation") != undisturbed:
            problems.append(f"write {write}: other bytes than without a kill")
        problems += [f"write {write}: {path.name} is left over" for path in results.rglob(".tmp-*")]
        write = write + 1 if is_every else 3 * write


def at_random(
    act: Callable[[], int], results: Path, undisturbed: dict[str, bytes], kills: int, longest_s: float
) -> dict[str, Any]:
    rng, finished, problems = random.Random(0), 0, []
    shutil.rmtree(results)
    for number in range(1, kills + 1):
        before = {path: path.read_bytes() for path in results.rglob("part-*")}
        moment = rng.uniform(0, longest_s)
        code = in_child(act, kill_after_s=moment)
        torn = unreadable(results) if results.exists() else []
        lost = [path.name for path, content in before.items() if path.read_bytes() != content]
        print(f"kill {number}/{kills} after {moment:.2f} s: exit {code}, {len(before)} parts before", file=sys.stderr)
        problems += [f"kill {number}: exit {code}, {torn}, lost {lost}"] if torn or lost or code not in (0, -9) else []
        if code == 0:
            finished += 1
            if workplace.results(results / "evaluation") != undisturbed:
                problems.append(f"kill {number}: other bytes than without a kill")
            shutil.rmtree(results)
    return {"kills": kills, "finished": finished, "problems": problems}


def preload() -> None:
    """Import what an evaluation imports, and start no thread: a forked child cannot use threads of its parent."""
    import sklearn.metrics  # noqa: F401
    import transformers.models.bert.modeling_bert  # noqa: F401

    from utils import baseline  # noqa: F401
    from utils.evaluation import planning, run  # noqa: F401

    planning.SHARD_ROWS["cpu"] = workplace.SHARD_ROWS


if __name__ == "__main__":
    sys.exit(main())
