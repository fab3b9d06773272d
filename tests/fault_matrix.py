"""Faults at operations on files of the steps and of the evaluation, and what came of them.

    python -m tests.fault_matrix NOTES --scenes NAME … [--how fail|edit|kill|share] [--most N]

A process of its own, because each attempt is a fork of it. NOTES gets a line of JSON per injection. After each fault
all files must be readable, and the same command must end well, with the result of an undisturbed run.
"""

import argparse
import contextlib
import csv
import errno
import functools
import gc
import importlib
import io
import json
import os
import random
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from boundby import files
from tests import evaluation_workplace as workplace
from tests.injection import Ended, Fault, faults, in_child
from utils.command import cli
from utils.steps import step

SMALL_SHARD = 8  # rows, so that a small dataset has several shards
LIGHT = ("writers", "a step")
STORED = "evaluate run, in a store"
PLAYED = ("step 01", *(f"evaluate {action}" for action in workplace.WHOLE), STORED, "step 02", "step 04")
SCRIPTS = {"step 01": "01_download_data", "step 02": "02_baseline_inference", "step 04": "04_visualize_results"}
SMALL = ("profiling.num_measurement_runs=1", "variants.enabled=false")
WORDS = {errno.ENOSPC: "no space left", errno.ENOLCK: "has no locks"}  # of a message; else the system's own
STOPPED = (130, 143, -9)

Act = Callable[[], int | None]


@dataclass(frozen=True)
class Scene:
    """A command that is disturbed: the folder before it, itself, what continues it, and what is then to be there."""

    name: str
    before: Path
    act: Act
    resume: Act
    result: Callable[[Path], Any]


@dataclass
class Note:
    """One injection and what was wrong after it; nothing where all was well."""

    scene: str
    kind: str
    number: int
    wrong: dict[str, str]


class Theatre:
    """A small model with its data, on which all scenes play, each after what comes before it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.stage = folder, folder / "stage"
        self.stage.mkdir(parents=True)

    def scenes(self, wanted: set[str]) -> Iterator[Scene]:
        """Yield the scenes of these names; the stage is what it is before each."""
        if wanted & set(LIGHT):
            yield from (scene for scene in self._light() if scene.name in wanted)
        if wanted <= set(LIGHT):
            return
        preload()
        from tests.test_end_to_end import command_line

        made = in_child(lambda: print(json.dumps(command_line(self.stage))))  # type: ignore[func-returns-value]
        settings = [*json.loads(made.said.splitlines()[-1]), *SMALL]
        for name in PLAYED:
            if name == "step 02":  # measures and evaluates by itself
                shutil.rmtree(self.stage / "results")
            scene = self._evaluation(name, settings) if name.startswith("evaluate") else self._step(name, settings)
            if name in wanted:
                yield scene
                wanted = wanted - {name}
                if not wanted:
                    return
                self.set(scene)
            if name != STORED:
                ended = in_child(scene.act)
                assert ended.code == 0, ended.said

    def set(self, scene: Scene) -> None:
        """Bring the stage to what it is before the scene."""
        shutil.rmtree(self.stage)
        shutil.copytree(scene.before, self.stage, symlinks=True)

    def _kept(self) -> Path:
        folder = self.folder / f"kept-{len(list(self.folder.iterdir()))}"
        return Path(shutil.copytree(self.stage, folder, symlinks=True))

    def _light(self) -> Iterator[Scene]:
        """Yield what needs no model: all writers, and the life of a step with a body of three visits."""
        (self.stage / "texts.csv").write_text("text,labels\nhello,0\n")
        (self.stage / "config.yaml").write_text(
            f"model: {{name: some/model}}\ndataset: {{file: {self.stage / 'texts.csv'}}}\n"
            f"output: {{results_dir: {self.stage / 'results'}}}\n"
        )
        main, settings = step("02")(three_visits), ["--config", str(self.stage / "config.yaml")]
        act, resume = functools.partial(main, settings), functools.partial(main, [*settings, "--resume"])
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            act()  # here, so that no child has to load and to compute what stays the same
        shutil.rmtree(self.stage / "results")
        write = functools.partial(write_all, self.stage / "results")
        scenes = [Scene(LIGHT[0], self._kept(), write, write, _written)]
        scenes.append(Scene(LIGHT[1], self._kept(), act, resume, _visited))
        shutil.rmtree(self.stage)
        self.stage.mkdir()
        yield from scenes

    def _step(self, name: str, settings: list[str]) -> Scene:
        main = importlib.import_module(f"scripts.{SCRIPTS[name]}").main
        result = {"step 01": _data, "step 02": _measured}.get(name, functools.partial(_recorded, name[-2:]))
        resume = functools.partial(main, [*settings, "--resume"])
        return Scene(name, self._kept(), functools.partial(main, settings), resume, result)

    def _evaluation(self, name: str, settings: list[str]) -> Scene:
        if name == STORED:
            settings = [*settings, f"evaluation.storage=file://{self.stage}/store"]
            shutil.rmtree(self.stage / "results")
            in_child(functools.partial(_evaluated, settings, "plan"))
        action = name.split()[1].rstrip(",")
        act = functools.partial(_evaluated, settings, action)
        resume = functools.partial(_evaluated, settings, *workplace.WHOLE[workplace.WHOLE.index(action) :])
        return Scene(name, self._kept(), act, resume, _predictions)


def _evaluated(settings: list[str], *actions: str) -> int:
    return max(workplace.evaluate(settings, *actions))


def _written(folder: Path) -> Any:
    paths = sorted(path for path in (folder / "results").rglob("*.[jc]s*") if path.is_file())
    return [(path.name, path.read_text().splitlines()[-1]) for path in paths]


def _visited(folder: Path) -> Any:
    return json.loads((folder / "results" / "baseline_metrics.json").read_text()), _recorded("02", folder)


def _data(folder: Path) -> Any:
    return [(folder / "data" / name).read_text() for name in ("val_df.csv", "label_mappings.json", "rejected_rows.csv")]


def _predictions(folder: Path) -> Any:
    return {name: str(content) for name, content in workplace.results(folder / "results" / "evaluation").items()}


def _measured(folder: Path) -> Any:
    metrics = json.loads((folder / "results" / "baseline_metrics.json").read_text())
    sizes = [row["batch_size"] for row in metrics["batch_sizes"]]
    return _predictions(folder), metrics["complete"], sizes, _recorded("02", folder)


def _recorded(number: str, folder: Path) -> Any:
    receipt = json.loads((folder / "results" / ".receipts" / f"{number}.json").read_text())
    sizes = [(output["path"], output["bytes"]) for output in receipt["outputs"]]
    return receipt["status"], [path for path, size in sizes if Path(path).stat().st_size == size]


def three_visits(run: cli.Run) -> None:
    """Stand in for step 02: three visits, each committed to a log, and the results that follow from them."""
    log = run.layout.visits("float32")
    done = {visit["round"] for visit in files.read_json_lines(log)} if run.resuming else set()
    for number in range(3):
        if number not in done:
            files.append_json_line(log, {"batch_size": 1, "round": number, "session": "one"})
    rounds = sorted({visit["round"] for visit in files.read_json_lines(log)})
    files.write_csv(run.layout.detailed_metrics, [{"round": number} for number in rounds], ["round"])
    files.write_json(run.layout.metrics, {"rounds": rounds})
    run.say("measured")


def write_all(folder: Path) -> int:
    """Write with each of the writers, and sweep, as a tool does."""

    def body(run: cli.Run) -> None:
        files.remove_orphans(folder)
        files.write_json(folder / "metrics.json", {"whole": True})
        files.append_json_line(folder / "log.jsonl", {"whole": True})
        files.write_csv(folder / "deep" / "er" / "table.csv", [{"a": 1}], ["a"])
        files.write_bytes(folder / "deep" / "picture.bin", bytes(9000))
        files.write_json(folder / "metrics.json", {"whole": files.read_json(folder / "metrics.json")["whole"]})

    return cli.command("", body, [], settings=None)


def preload() -> None:
    """Import what the steps import, and start no thread: a forked child cannot use threads of its parent."""
    import matplotlib.backends.backend_agg  # noqa: F401
    import matplotlib.figure
    import pyarrow.parquet  # noqa: F401
    import sklearn.metrics  # noqa: F401
    import transformers.models.bert.modeling_bert  # noqa: F401

    from boundby.bound import analysis, bench
    from boundby.machine import ceilings
    from utils.baseline import sweep  # noqa: F401
    from utils.evaluation import planning, run  # noqa: F401
    from utils.tracing import capture as tracing  # noqa: F401

    planning.SHARD_ROWS["cpu"] = SMALL_SHARD
    analysis.ROUND_S, bench.REPLAY_S = 0.001, 0.1  # what is found is of no interest here
    ceilings.measure.__kwdefaults__["budget_s"] = 0.1
    picture = io.BytesIO()
    matplotlib.figure.Figure((1, 1)).savefig(picture)
    matplotlib.figure.Figure.savefig = lambda self, path: Path(path).write_bytes(picture.getvalue())
    gc.collect()
    gc.freeze()  # else each child looks through all modules, again and again


def fail(theatre: Theatre, scene: Scene, most: int) -> Iterator[Note]:
    """Disturb a scene by up to `most` faults of those that are possible, chosen by a seed."""
    expected, done = undisturbed(theatre, scene)
    chosen = list(faults(done))
    random.Random(0).shuffle(chosen)
    for fault in chosen[:most]:
        yield judged(theatre, scene, fault, expected)


def edit(theatre: Theatre, scene: Scene, most: int) -> Iterator[Note]:
    """Change a text, or a weight under the same size and time, at up to `most` of the files that the scene opens."""
    expected, done = undisturbed(theatre, scene)
    opens = sum(operation == "open" for operation, _ in done)
    for number in sorted({1 + round(index * (opens - 1) / max(1, most - 1)) for index in range(most)}):
        for change in (text_edited, weights_swapped):
            act = functools.partial(change, theatre.stage)
            act.__name__ = change.__name__.replace("_", " ")  # type: ignore[attr-defined]
            yield judged(theatre, scene, Fault("open", number, act), expected)


def text_edited(stage: Path) -> None:
    path = stage / "data" / "val_df.csv"
    path.write_bytes(path.read_bytes().replace(b"refund", b"parcel", 1))


def weights_swapped(stage: Path) -> None:
    path = stage / "model" / "model.safetensors"
    content, status = path.read_bytes(), path.stat()
    path.write_bytes(content[:-4] + bytes(255 - byte for byte in content[-4:]))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def kill(theatre: Theatre, scene: Scene, most: int) -> Iterator[Note]:
    """Kill the scene at random moments and go on from there, again and again."""
    theatre.set(scene)
    longest_s = in_child(scene.resume).seconds
    expected, rng, results = scene.result(theatre.stage), random.Random(0), theatre.stage / "results"
    theatre.set(scene)
    for number in range(1, most + 1):
        before = Committed.of(results)
        ended, wrong = in_child(scene.resume, kill_after_s=rng.uniform(0, longest_s)), {}
        before.require(results, wrong)
        if ended.left:
            wrong["leaked"] = "a process"
        if ended.code not in (0, -9):
            wrong["lost"] = f"ended with {ended.code}: {ended.said[-300:]}"
        if ended.code == 0:
            require_same(scene, theatre.stage, expected, wrong)
            theatre.set(scene)
        yield Note(scene.name, "killed at random", number, wrong)


def share(theatre: Theatre, scene: Scene, most: int) -> Iterator[Note]:
    """Play the scene twice at the same time: at least one ends well, and the other one does, too, or is refused."""
    (_, expected), _ = undisturbed(theatre, scene)
    for number in range(1, most + 1):
        theatre.set(scene)
        ended = in_child(lambda: both(scene.act))
        again, wrong = in_child(scene.resume), {}
        if ended.code != 0 or again.code != 0 or "Traceback" in ended.said:
            wrong["lost"] = f"ended with {ended.code}, then {again.code}: {ended.said[-300:]}"
        require_same(scene, theatre.stage, expected, wrong)
        yield Note(scene.name, "two at once", number, wrong)


def both(act: Act) -> int:
    """Do it in two processes; return 0 where at least one ended well and the other was refused."""
    pid = os.fork()
    if pid == 0:
        os._exit(act() or 0)
    codes = {act() or 0, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])}
    return 0 if 0 in codes and codes <= {0, 2} else max(codes)


WAYS = {"fail": fail, "edit": edit, "kill": kill, "share": share}


def undisturbed(theatre: Theatre, scene: Scene) -> tuple[tuple[Any, Any], list[tuple[str, str]]]:
    """Return what the scene leaves, what it leaves when it is gone on with, and what it did with files."""
    theatre.set(scene)
    ended = in_child(scene.act, theatre.stage)
    assert ended.code == 0, ended.said
    left = scene.result(theatre.stage)
    in_child(scene.resume)
    return (left, scene.result(theatre.stage)), ended.done


def judged(theatre: Theatre, scene: Scene, fault: Fault, expected: tuple[Any, Any]) -> Note:
    """Inject one fault; return what was wrong after it."""
    theatre.set(scene)
    results = theatre.stage / "results"
    before = Committed.of(results)
    ended = in_child(scene.act, theatre.stage, fault)
    wrong, after = wrong_end(ended, fault), Committed.of(results)
    before.require(results, wrong)
    if ended.code == 0:
        require_same(scene, theatre.stage, expected[0], wrong)
    if callable(fault.what):  # as who edited takes it back
        for name in ("data", "model"):
            shutil.copytree(scene.before / name, theatre.stage / name, dirs_exist_ok=True)
    again = in_child(scene.resume)
    if again.code != 0:
        wrong["lost"] = f"the next attempt ended with {again.code}: {again.said[-300:]}"
    else:
        require_same(scene, theatre.stage, expected[1], wrong)
    if gone := after.visits - Committed.of(results).visits:
        wrong["lost"] = f"visits {gone}"
    if left := [path.name for path in theatre.stage.rglob(".tmp-*")]:
        wrong["leaked"] = f"{left}"
    return Note(scene.name, fault.kind, fault.number, wrong)


@dataclass(frozen=True)
class Committed:
    """What results hold for good: the bytes of parts, and the visits of the sweep."""

    parts: dict[Path, bytes]
    visits: set[tuple[Any, ...]]

    @classmethod
    def of(cls, results: Path) -> "Committed":
        lines = (line for log in results.rglob("02-visits-*.jsonl") for line in files.read_json_lines(log))
        visits = {(visit["batch_size"], visit["round"], visit["session"]) for visit in lines}
        return cls({path: path.read_bytes() for path in results.rglob("part-*")}, visits)

    def require(self, results: Path, wrong: dict[str, str]) -> None:
        """Note what is gone or changed, and what a reader would stumble over."""
        if any(not path.exists() or path.read_bytes() != content for path, content in self.parts.items()):
            wrong["lost"] = "a part"
        if gone := self.visits - Committed.of(results).visits:
            wrong["lost"] = f"visits {gone}"
        if torn := [problem for path in sorted(results.rglob("[!.]*")) if (problem := unreadable(path))]:
            wrong["lost"] = f"{torn}"


def unreadable(path: Path) -> str | None:
    """Return what a reader of a file of the results would stumble over."""
    import pyarrow.parquet

    readers = {".json": lambda: json.loads(path.read_bytes()), ".parquet": lambda: pyarrow.parquet.read_table(path)}
    try:
        readers.get(path.suffix, path.stat)()
        if path.suffix == ".csv":
            with path.open(encoding="utf-8", newline="") as file:
                assert len({len(row) for row in csv.reader(file)}) == 1, "rows of several widths"
    except (ValueError, AssertionError, OSError) as error:
        return f"{path.name}: {error}"
    return None


def require_same(scene: Scene, stage: Path, expected: Any, wrong: dict[str, str]) -> None:
    """Note a result that is not the one of an undisturbed run."""
    try:
        result = scene.result(stage)
    except (OSError, ValueError, KeyError) as error:
        wrong["lost"] = f"after exit 0: {type(error).__name__}: {error}"
        return
    if result != expected:
        wrong["mixed"] = f"{result} instead of {expected}"[:2000]


def wrong_end(ended: Ended, fault: Fault) -> dict[str, str]:
    """Return what is wrong with how a program ended: a message names the file and the reason, once."""
    errors = [line for line in ended.said.splitlines() if line.startswith("error: ")]
    wrong = {"leaked": "a process"} if ended.left else {}
    if "Traceback" in ended.said or ended.code not in (0, 1, 2, 3, 4, *STOPPED):
        wrong["tracebacks"] = f"ended with {ended.code}: {ended.said[-600:]}"
    if ended.code in (1, 2, 3):
        if len(errors) != 1:
            wrong["untrue messages"] = f"{len(errors)} messages: {ended.said[-300:]}"
        elif isinstance(fault.what, int):
            paths = [path for operation, path in ended.done if operation == fault.operation][fault.number - 1 :]
            names = {re.sub(r"\.tmp-\d+-\w+-\w+-", "", Path(path).name) for path in paths}
            names |= {Path(path).parent.name for path in paths}
            reason = WORDS.get(fault.what, os.strerror(fault.what))
            if reason not in errors[0] or not any(name in errors[0] for name in names):
                wrong["untrue messages"] = errors[0]
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("notes", type=Path)
    parser.add_argument("--scenes", nargs="+", required=True)
    parser.add_argument("--most", type=int, default=sys.maxsize, help="injections per scene")
    parser.add_argument("--how", choices=WAYS, default="fail")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, args.notes.open("a") as file:
        theatre, is_sound = Theatre(Path(folder)), True
        for scene in theatre.scenes(set(args.scenes)):
            for note in WAYS[args.how](theatre, scene, args.most):
                file.write(json.dumps(asdict(note)) + "\n")
                if note.wrong:
                    is_sound = False
                    print(f"{note.scene}, {note.kind} at {note.number}: {note.wrong}", flush=True)
    return 0 if is_sound else 1


if __name__ == "__main__":
    sys.exit(main())
