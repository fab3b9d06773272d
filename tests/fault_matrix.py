"""Every fault at every operation on files of every step, tool and worker, and what came of it.

    python -m tests.fault_matrix NOTES [--scenes NAME …] [--most N] [--minutes M]     inject, and go on where it ended
    python -m tests.fault_matrix NOTES --table                                        print the table of all notes

A process of its own, because it forks: it loads what the steps import, computes nothing itself, and each attempt runs
in a child. NOTES is a file of JSON lines, one per injection. After each fault all files must be readable, and the same
command must end well without it, with the result of an undisturbed run and nothing that was committed lost.
"""

import argparse
import contextlib
import dataclasses
import errno
import functools
import gc
import importlib
import io
import itertools
import json
import os
import pty
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import psutil

import run_pipeline
from boundby import files
from tests import evaluation_workplace as workplace
from tests.injection import (
    KILLED,
    LOST_DATA,
    LOST_NAMES,
    SIGNALS,
    Ended,
    Fault,
    ForkedStep,
    faults,
    forget_handlers,
    in_child,
    is_left,
    unreadable,
    visits,
)
from tests.trace_truth import recorder
from tests.trace_truth.programs import cases
from tests.trace_truth.simulator import played
from utils import cli, steps  # noqa: F401  (which each child would load)

MOST_WAIT_S = 120.0  # seconds, for a run to end once it was told to
TARGETS = ("runner", "step", "group")
SMALL_SHARD = 8  # rows, so that a small dataset has several shards
LIGHT = ("writers", "a step", "a step that goes on", "a step anew")
SMALL = ("profiling.num_measurement_runs=1", "variants.which=[bfloat16]", "variants.max_seconds=1")
WORDS = {  # what a message about an error says of it
    errno.ENOSPC: "no space left",
    errno.EDQUOT: "quota",
    errno.EFBIG: "ulimit -f",
    errno.EMFILE: "may open no more than",
    errno.ENOLCK: "has no locks",
    errno.EOPNOTSUPP: "has no locks",
    errno.ENOSYS: "has no locks",
}
OUTCOMES = ("same result", "refused with one true message", "resumed without loss")
FAULTS = ("lost", "mixed", "leaked", "tracebacks", "untrue messages", "hung")


@dataclass(frozen=True)
class Scene:
    """A command that is disturbed: the folder before it, itself, what continues it, and what is then to be there."""

    name: str
    before: Path
    act: Callable[[], int | None]
    resume: Callable[[], int | None]
    result: Callable[[Path, str], Any]  # of the folder, and of what was printed


@dataclass
class Note:
    """One injection and what came of it; `faults` is empty where all was well."""

    scene: str
    kind: str
    number: int
    outcome: str
    faults: dict[str, str]

    @property
    def place(self) -> tuple[str, str, int]:
        """What was injected."""
        return self.scene, self.kind, self.number


class Theatre:
    """A small model with its data, on which all scenes play, each after what comes before it."""

    def __init__(self, folder: Path, names: list[str]) -> None:
        self.folder, self.stage, self._names = folder, folder / "stage", names
        self.stage.mkdir(parents=True)
        self._kept = 0
        if names and set(names) <= set(LIGHT):
            return
        preload()
        from tests.test_end_to_end import command_line

        made = in_child(lambda: print(json.dumps(command_line(self.stage))))  # type: ignore[func-returns-value]
        self.settings = [*json.loads(made.said.splitlines()[-1]), *SMALL]
        self.stored = [*self.settings, f"evaluation.storage=file://{self.stage}/store"]

    def scenes(self) -> list[Scene]:
        """Return the scenes of these names, all if there are none; each is played once for what comes after it."""
        wanted = set(self._names)
        made = [] if wanted and not wanted & set(LIGHT) else self._light()
        if not wanted or wanted - set(LIGHT):
            made += [self._step("01_download_data", self._data), *self._evaluation()]
        if not wanted or wanted - {each.name for each in made}:
            made += self._steps()
        return [each for each in made if not wanted or each.name in wanted]

    def set(self, scene: Scene) -> None:
        """Bring the stage to what it is before the scene."""
        shutil.rmtree(self.stage)
        shutil.copytree(scene.before, self.stage, symlinks=True)

    def _kept_now(self) -> Path:
        self._kept += 1
        return Path(shutil.copytree(self.stage, self.folder / f"kept-{self._kept}", symlinks=True))

    def _played(self, act: Callable[[], int | None]) -> None:
        ended = in_child(act, limit_s=300)
        assert ended.code == 0, ended.said

    def _light(self) -> list[Scene]:
        """Return what needs no model: all writers, and the life of a step with a body of three visits."""
        (self.stage / "texts.csv").write_text("text,labels\nhello,0\n")
        (self.stage / "config.yaml").write_text(
            f"model: {{name: some/model}}\ndataset: {{file: {self.stage / 'texts.csv'}}}\n"
            f"output: {{results_dir: {self.stage / 'results'}}}\n"
        )
        main, settings = cli.step("02")(three_visits), ["--config", str(self.stage / "config.yaml")]
        act, resume = functools.partial(main, settings), functools.partial(main, [*settings, "--resume"])
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            act()  # here, so that no child has to load and to compute what stays the same
        shutil.rmtree(self.stage / "results")
        write = functools.partial(write_all, self.stage / "results")
        found = [Scene(LIGHT[0], self._kept_now(), write, write, self._written)]
        found.append(Scene(LIGHT[1], self._kept_now(), act, resume, self._visited))
        in_child(act, self.stage, Fault("write", 20, KILLED))
        found.append(Scene(LIGHT[2], self._kept_now(), resume, resume, self._visited))
        self._played(resume)
        found.append(Scene(LIGHT[3], self._kept_now(), act, resume, self._visited))
        shutil.rmtree(self.stage)
        self.stage.mkdir()
        return found

    def _written(self, folder: Path, said: str) -> Any:
        paths = sorted(path for path in (folder / "results").rglob("*.[jc]s*") if path.is_file())
        return [(path.name, path.read_text().splitlines()[-1]) for path in paths]

    def _visited(self, folder: Path, said: str) -> Any:
        metrics = json.loads((folder / "results" / "baseline_metrics.json").read_text())
        return metrics, self._recorded("02")(folder, said)

    def _step(self, script: str, result: Callable[[Path, str], Any]) -> Scene:
        main = importlib.import_module(f"scripts.{script}").main
        act = functools.partial(main, self.settings)
        scene = Scene(f"step {script[:2]}", self._kept_now(), act, lambda: main([*self.settings, "--resume"]), result)
        self._played(act)
        return scene

    def _evaluation(self) -> list[Scene]:
        found = []
        before = self._kept_now()
        for where, settings in (("", self.settings), (", in a store", self.stored)):
            for done, action in enumerate(workplace.WHOLE):
                act = functools.partial(_evaluated, settings, action)
                resume = functools.partial(_evaluated, settings, *workplace.WHOLE[done:])
                found.append(Scene(f"evaluate {action}{where}", self._kept_now(), act, resume, self._predictions))
                self._played(act)
            if where:
                break
            shutil.rmtree(self.stage)
            shutil.copytree(before, self.stage)
        shutil.rmtree(self.stage)
        shutil.copytree(before, self.stage)
        return [*found, *self._tools()]

    def _tools(self) -> list[Scene]:
        trace = self.stage / "trace.json"  # one of a simulated machine, of which something can be concluded
        trace.write_text(recorder.text(played(cases()["data loading"].program)))
        return [self._tool("validate_dataset", self.settings), self._tool("analyze_trace", [str(trace)])]

    def _tool(self, script: str, arguments: list[str]) -> Scene:
        act = functools.partial(importlib.import_module(f"scripts.{script}").main, arguments)
        return Scene(script, self._kept_now(), act, act, lambda folder, said: re.sub(r"\d", "", said))

    def _piped(self, *flags: str) -> Callable[[], int]:
        def act() -> int:
            with patch.object(run_pipeline, "subprocess", SimpleNamespace(Popen=ForkedStep)):
                code = run_pipeline.main(["--skip-check", *self.settings, *flags])
                return run_pipeline.FAILED if code < 0 else code  # as its last line does

        return act

    def _steps(self) -> list[Scene]:
        made = [Scene("pipeline", self._kept_now(), self._piped(), self._piped("--resume"), self._all)]
        made.append(self._step("02_baseline_inference", self._measured))
        made.append(self._step("03_detailed_profiling", self._recorded("03")))
        results = str(self.stage / "results")
        made.append(self._tool("check_profile", [results]))
        made.append(self._tool("compare_runs", [results, results]))
        made.append(self._step("04_visualize_results", self._recorded("04")))
        made.append(self._step("05_compare_variants", self._recorded("05")))
        return made

    def _data(self, folder: Path, said: str) -> Any:
        names = ("val_df.csv", "label_mappings.json", "rejected_rows.csv")
        return [(folder / "data" / name).read_text() for name in names]

    def _predictions(self, folder: Path, said: str) -> Any:
        return {name: str(content) for name, content in workplace.results(folder / "results" / "evaluation").items()}

    def _measured(self, folder: Path, said: str) -> Any:
        metrics = json.loads((folder / "results" / "baseline_metrics.json").read_text())
        sizes = [row["batch_size"] for row in metrics["batch_sizes"]]
        return self._predictions(folder, said), metrics["complete"], sizes, self._recorded("02")(folder, said)

    def _all(self, folder: Path, said: str) -> Any:
        return self._measured(folder, said), [self._recorded(number)(folder, said) for number in ("03", "04", "05")]

    def _recorded(self, number: str) -> Callable[[Path, str], Any]:
        def outputs(folder: Path, said: str) -> Any:
            receipt = json.loads((folder / "results" / ".receipts" / f"{number}.json").read_text())
            sizes = [(each["path"], each["bytes"]) for each in receipt["outputs"]]
            return receipt["status"], [path for path, size in sizes if Path(path).stat().st_size == size]

        return outputs


def three_visits(run: cli.Run) -> None:
    """Stand in for step 02: three visits, each committed to a log, and the results that follow from them."""
    log = run.layout.visits("float32")
    done = {each["round"] for each in files.read_json_lines(log)} if run.resuming else set()
    for number in range(3):
        if number not in done:
            files.append_json_line(log, {"batch_size": 1, "round": number, "session": "one"})
    rounds = sorted({each["round"] for each in files.read_json_lines(log)})
    files.write_csv(run.layout.detailed_metrics, [{"round": each} for each in rounds], ["round"])
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


def texts_edited(stage: Path) -> None:
    """Exchange a word of a text."""
    _edit(stage / "data" / "val_df.csv", b"refund", b"parcel")


def labels_edited(stage: Path) -> None:
    """Give a row another label."""
    _edit(stage / "data" / "val_df.csv", b",0,praise", b",1,complaint")


def weights_swapped(stage: Path) -> None:
    """Change the last weight, and leave size and time as they were."""
    path = stage / "model" / "model.safetensors"
    content, status = path.read_bytes(), path.stat()
    path.write_bytes(content[:-4] + bytes(255 - each for each in content[-4:]))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def tokenizer_edited(stage: Path) -> None:
    """Take the token of a word away."""
    _edit(stage / "model" / "tokenizer.json", b'"refund"', b'"drac"')


def model_config_edited(stage: Path) -> None:
    """Change a constant of the model."""
    _edit(stage / "model" / "config.json", b"1e-12", b"1e-02")


EDITS = (texts_edited, labels_edited, weights_swapped, tokenizer_edited, model_config_edited)


def _edit(path: Path, old: bytes, new: bytes) -> None:
    content = path.read_bytes()
    assert old in content, f"{path} has no {old!r}, so that the edit would be none"
    path.write_bytes(content.replace(old, new, 1))


def both(act: Callable[[], int | None]) -> int:
    """Do it in two processes at the same time; return 0 where at least one ended well and the other was refused."""
    pid = os.fork()
    if pid == 0:
        os._exit(act() or 0)
    codes = {act() or 0, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])}
    return 0 if 0 in codes and codes <= {0, 2} else max(codes)


def _evaluated(settings: list[str], *actions: str) -> int:
    return max(workplace.evaluate(settings, *actions))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("notes", type=Path)
    parser.add_argument("--scenes", nargs="*", default=[])
    parser.add_argument("--most", type=int, default=sys.maxsize, help="injections per scene")
    parser.add_argument("--how", choices=WAYS, default="fail")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--table", action="store_true")
    args = parser.parse_args()
    if args.table:
        print(table(read(args.notes)))
        return 0
    deadline = time.monotonic() + 60 * args.minutes
    with tempfile.TemporaryDirectory() as folder:
        theatre = Theatre(Path(folder), args.scenes)
        for scene in theatre.scenes():
            WAYS[args.how](theatre, scene, args.notes, args.most, deadline)
    return int(any(note.faults for note in read(args.notes)))


def preload() -> None:
    """Import what the steps import, and start no thread: a forked child cannot use threads of its parent."""
    import matplotlib.backends.backend_agg  # noqa: F401
    import matplotlib.figure
    import pyarrow.parquet  # noqa: F401
    import sklearn.metrics  # noqa: F401
    import transformers.models.bert.modeling_bert  # noqa: F401

    from boundby import bench, bottleneck, ceilings
    from utils import baseline, tracing  # noqa: F401
    from utils.evaluation import planning, run  # noqa: F401

    planning.SHARD_ROWS["cpu"] = SMALL_SHARD
    bottleneck.ROUND_S, bench.REPLAY_S = 0.001, 0.1  # what is found is of no interest here
    ceilings.measure.__kwdefaults__["budget_s"] = 0.1
    picture = io.BytesIO()
    matplotlib.figure.Figure((1, 1)).savefig(picture)
    matplotlib.figure.Figure.savefig = lambda self, path: Path(path).write_bytes(picture.getvalue())
    gc.collect()
    gc.freeze()  # else each child looks through all modules, again and again


def play(
    theatre: Theatre, scene: Scene, notes: Path, most: int, deadline: float,
    wanted: Callable[[Fault], bool] = lambda fault: True,
) -> None:  # fmt: skip
    """Disturb a scene by up to `most` faults that are not among the notes, chosen by a seed, and note each."""
    theatre.set(scene)
    undisturbed = in_child(scene.act, theatre.stage)
    assert undisturbed.code == 0, undisturbed.said
    expected = both_results(theatre, scene, undisturbed.said)
    known = {note.place for note in read(notes) if note.scene == scene.name}
    chosen = [fault for fault in faults(undisturbed.done) if wanted(fault)]
    random.Random(0).shuffle(chosen)
    for fault in chosen[:most]:
        if time.monotonic() > deadline:
            return
        if (scene.name, fault.kind, fault.number) in known:
            continue
        write(notes, judged(theatre, scene, fault, expected))


def stops(fault: Fault) -> bool:
    """Tell whether this is a signal or an end."""
    return fault.what == KILLED or isinstance(fault.what, signal.Signals)


def darkens(fault: Fault) -> bool:
    """Tell whether this is a loss of power."""
    return fault.what in (LOST_DATA, LOST_NAMES)


def edit(theatre: Theatre, scene: Scene, notes: Path, most: int, deadline: float) -> None:
    """Edit what the scene works on before it, at any file it opens, and after it."""
    theatre.set(scene)
    undisturbed = in_child(scene.act, theatre.stage)
    expected = both_results(theatre, scene, undisturbed.said)
    known = {note.place for note in read(notes)}
    opens = sum(operation == "open" for operation, _ in undisturbed.done)
    for number in sorted({1 + round(each * (opens - 1) / max(1, most - 1)) for each in range(most)}):
        for change in EDITS:
            done = functools.partial(change, theatre.stage)
            done.__name__ = change.__name__  # type: ignore[attr-defined]
            fault = Fault("open", number, done)
            if (scene.name, fault.kind, number) not in known and time.monotonic() < deadline:
                write(notes, judged(theatre, scene, fault, expected))


def kill(theatre: Theatre, scene: Scene, notes: Path, most: int, deadline: float) -> None:
    """Kill the scene at random moments and go on from there, again and again; count those that found parts on disk."""
    theatre.set(scene)
    undisturbed = in_child(scene.resume)
    longest_s = undisturbed.seconds / 2
    expected = scene.result(theatre.stage, undisturbed.said)
    rng, results = random.Random(0), theatre.stage / "results"
    done = sum(note.scene == f"{scene.name}, parts on disk" for note in read(notes))
    rng.seed(done)
    theatre.set(scene)
    while done < most and time.monotonic() < deadline:
        before = {path: path.read_bytes() for path in results.rglob("part-*")}
        committed = visits(results)
        ended = in_child(scene.resume, kill_after_s=rng.uniform(0, longest_s))
        found: dict[str, str] = {}
        torn = unreadable(results)
        if torn or any(path.read_bytes() != content for path, content in before.items()):
            found["lost"] = f"{torn or 'a part'}"
        if gone := committed - visits(results):
            found["lost"] = f"visits {gone}"
        if ended.left:
            found["leaked"] = "a process"
        if ended.code not in (0, -signal.SIGKILL):
            found["lost"] = f"ended with {ended.code}: {ended.said[-300:]}"
        if ended.code == 0:
            same(scene, theatre.stage, ended, expected, found)
            theatre.set(scene)
        elif before or list(results.rglob("part-*")):
            done += 1
            note = Note(f"{scene.name}, parts on disk", "killed at random", done, "resumed without loss", found)
            write(notes, note)


def share(theatre: Theatre, scene: Scene, notes: Path, most: int, deadline: float) -> None:
    """Play the scene twice at the same time."""
    theatre.set(scene)
    undisturbed = in_child(scene.resume)
    expected = scene.result(theatre.stage, undisturbed.said)
    for number in range(sum(note.kind == "two at once" and note.scene == scene.name for note in read(notes)), most):
        if time.monotonic() > deadline:
            return
        theatre.set(scene)
        ended, found = in_child(lambda: both(scene.act)), {}
        if ended.code != 0:
            found["lost"] = f"ended with {ended.code}: {ended.said[-300:]}"
        found |= {"tracebacks": ended.said[-300:]} if "Traceback" in ended.said else {}
        again = in_child(scene.resume)
        if again.code != 0:
            found["lost"] = f"the next attempt ended with {again.code}: {again.said[-300:]}"
        same(scene, theatre.stage, again, expected, found)
        outcome = OUTCOMES["error: " in ended.said]
        write(notes, Note(scene.name, "two at once", number + 1, outcome, found))


def dead_terminal() -> None:
    """Let both streams lead to a terminal that is gone."""
    ours, theirs = pty.openpty()
    for stream in (1, 2):
        os.dup2(theirs, stream)
    os.close(theirs)
    os.close(ours)


def lead(path: str, *streams: int) -> None:
    """Let the streams of this process lead to a file."""
    for stream in streams:
        os.dup2(os.open(path, os.O_RDWR), stream)


def close(*streams: int) -> None:
    """Close the streams of this process, as if it had been started without them."""
    for stream in streams:
        os.close(stream)
        setattr(sys, ("stdin", "stdout", "stderr")[stream], None)


def broken_pipe() -> None:
    """Let both streams lead to a pipe that nobody reads."""
    reading, writing = os.pipe()
    lead(f"/proc/self/fd/{writing}", 1, 2)
    os.close(reading)


def reopened() -> None:
    """Open the streams that are left as a new process would: whether one can seek is asked once."""
    for number, name in ((1, "stdout"), (2, "stderr")):
        if getattr(sys, name) is not None:
            setattr(sys, name, open(number, "w", closefd=False))  # noqa: SIM115


STREAMS: dict[str, Callable[[], None]] = {
    "stdout on a full disk": functools.partial(lead, "/dev/full", 1),
    "stderr on a full disk": functools.partial(lead, "/dev/full", 2),
    "both streams on a full disk": functools.partial(lead, "/dev/full", 1, 2),
    "stdout closed": functools.partial(close, 1),
    "stderr closed": functools.partial(close, 2),
    "all streams closed": functools.partial(close, 0, 1, 2),
    "a terminal that is gone": dead_terminal,
    "a pipe that nobody reads": broken_pipe,
}


def deafen(theatre: Theatre, scene: Scene, notes: Path, most: int, deadline: float) -> None:
    """Play the scene with streams that are dead."""
    theatre.set(scene)
    undisturbed = in_child(scene.act)
    expected, _ = both_results(theatre, scene, undisturbed.said)
    known = {note.place for note in read(notes)}
    for kind, kill_streams in STREAMS.items():
        if (scene.name, kind, 1) in known or time.monotonic() > deadline:
            continue
        theatre.set(scene)
        ended = in_child(lambda: (kill_streams(), reopened(), scene.act())[2])  # noqa: B023 (called at once)
        found = {} if ended.code == 0 else {"lost": f"ended with {ended.code}: {ended.said[-300:]}"}
        if scene.resume is not scene.act:  # what a tool prints is gone
            same(scene, theatre.stage, ended, expected, found)
        write(notes, Note(scene.name, kind, 1, "same result", found))


def interrupt(theatre: Theatre, scene: Scene, notes: Path, most: int, deadline: float) -> None:
    """Send every signal to a real runner, its step or both, once and twice, each at `most` moments of the whole."""
    number, results = scene.name.split()[-1], theatre.stage / "results"
    script = [sys.executable, str(workplace.ROOT / "run_pipeline.py"), "--skip-check", *theatre.settings]
    command = script if number == "pipeline" else [*script, "--only", number]

    def left(folder: Path, said: str) -> Any:  # what forks and real steps leave alike: shards and pictures differ
        receipts = [json.loads(path.read_text()) for path in sorted((results / ".receipts").glob("0?.json"))]
        outputs = [each for receipt in receipts for each in receipt["outputs"]]
        torn = [each["path"] for each in outputs if Path(each["path"]).stat().st_size != each["bytes"]]
        tables = [*(folder / "data").glob("*.csv"), *(results / "evaluation").glob("*.csv")]
        ended = [(receipt["step"], receipt["status"]) for receipt in receipts]
        return ended, torn, {path.name: path.read_text() for path in tables}

    theatre.set(scene)
    began = time.monotonic()
    undisturbed = subprocess.run(command, capture_output=True, text=True)
    assert undisturbed.returncode == 0, undisturbed.stderr
    whole_s, expected = time.monotonic() - began, left(theatre.stage, "")
    compared = dataclasses.replace(scene, result=left)
    known = {note.place for note in read(notes)}
    ways = [(*way, times) for way in itertools.product(TARGETS, SIGNALS) for times in (1, 2)]
    ways += [(whom, signal.SIGKILL, 1) for whom in TARGETS[:2]]
    for moment, (whom, signum, times) in itertools.product(range(1, most + 1), ways):
        kind = f"{signum.name} to the {whom}{' twice' if times > 1 else ''}"
        if (scene.name, kind, moment) in known or time.monotonic() > deadline:
            continue
        theatre.set(scene)
        after_s = random.Random(f"{scene.name} {kind} {moment}").uniform(0, whole_s)
        code, said, found = signalled(command, whom, signum, times, after_s)
        done = visits(results)
        again = in_child(scene.resume)
        if again.code != 0 or done - visits(results):
            found["lost"] = f"after {after_s:.1f} s, the next attempt ended with {again.code}: {again.said[-300:]}"
        same(compared, theatre.stage, again, expected, found)
        if names := [path.name for path in theatre.stage.rglob(".tmp-*")]:
            found["leaked"] = f"{names}"
        write(notes, Note(scene.name, kind, moment, "same result" if code == 0 else "resumed without loss", found))


def signalled(
    command: list[str], whom: str, signum: signal.Signals, times: int, after_s: float
) -> tuple[int, str, dict[str, str]]:
    """Start a runner and send it, its step or both a signal; return its exit code, its words and what was wrong."""
    found: dict[str, str] = {}
    with tempfile.TemporaryFile("w+") as log:
        runner = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True, preexec_fn=forget_handlers)
        began, steps = time.monotonic(), []
        while runner.poll() is None and (time.monotonic() - began < after_s or (whom == "step" and not steps)):
            time.sleep(0.01)
            steps = psutil.Process(runner.pid).children() if runner.poll() is None else []
        is_told = runner.poll() is None
        for _ in range(times):
            with contextlib.suppress(ProcessLookupError):
                if whom == "group":
                    os.killpg(runner.pid, signum)
                else:
                    os.kill(steps[0].pid if whom == "step" and steps else runner.pid, signum)
        try:
            code = runner.wait(MOST_WAIT_S)
        except subprocess.TimeoutExpired:
            os.killpg(runner.pid, signal.SIGKILL)
            code = runner.wait()
            found["hung"] = f"after {kind_and_moment(signum, whom, after_s)}"
        if is_left(runner.pid):
            found["leaked"] = f"a process, after {kind_and_moment(signum, whom, after_s)}"
        log.seek(0)
        said = log.read()
    stopped = {signal.SIGINT: (130,), signal.SIGKILL: (1, -signal.SIGKILL)}.get(signum, (143,))
    has_begun = "$ python scripts/" in said
    if code not in (0, *stopped, *(() if has_begun else (-signum,))) or (code == 0 and is_told and whom == "runner"):
        found["lost"] = f"{kind_and_moment(signum, whom, after_s)}: ended with {code}: {said[-300:]}"
    if "Traceback" in said:
        found["tracebacks"] = f"{kind_and_moment(signum, whom, after_s)}: {said[-1200:]}"
    ended = [line for line in said.splitlines() if line.startswith(("to continue: ", "error: "))]
    if has_begun and code not in (0, -signal.SIGKILL) and (len(ended) != 1 or "to continue: " not in ended[0]):
        found["untrue messages"] = f"{kind_and_moment(signum, whom, after_s)}: {said[-600:]}"
    return code, said, found


def kind_and_moment(signum: signal.Signals, whom: str, after_s: float) -> str:
    """Return what was sent, to whom and when, for people."""
    return f"{signum.name} to the {whom} after {after_s:.2f} s"


WAYS = {
    "fail": play,
    "stop": functools.partial(play, wanted=stops),
    "darken": functools.partial(play, wanted=darkens),
    "edit": edit,
    "kill": kill,
    "share": share,
    "deafen": deafen,
    "interrupt": interrupt,
}


def write(notes: Path, note: Note) -> None:
    """Note it, and say what was wrong."""
    with notes.open("a") as file:
        file.write(json.dumps(asdict(note)) + "\n")
    if note.faults:
        print(f"{note.scene}, {note.kind} at {note.number}: {note.faults}", flush=True)


def both_results(theatre: Theatre, scene: Scene, said: str) -> tuple[Any, Any]:
    """Return what the scene has just left, and what it leaves when it is gone on with."""
    return scene.result(theatre.stage, said), (in_child(scene.resume), scene.result(theatre.stage, said))[1]


def judged(theatre: Theatre, scene: Scene, fault: Fault, expected: tuple[Any, Any]) -> Note:
    """Inject one fault; return what came of it."""
    theatre.set(scene)
    results = theatre.stage / "results"
    committed = {path: path.read_bytes() for path in results.rglob("part-*")}
    ended = in_child(scene.act, theatre.stage, fault)
    found, outcome = wrong(ended, fault), "resumed without loss"
    torn, done = unreadable(results), visits(results)
    if torn or any(not path.exists() or path.read_bytes() != content for path, content in committed.items()):
        found["lost"] = f"{torn or 'a part'}"
    if ended.code == 0:
        outcome = "same result"
        same(scene, theatre.stage, ended, expected[0], found)
    elif ended.code in (1, 2, 3, 4):
        outcome = "refused with one true message"
    if callable(fault.what):  # as who edited takes it back
        for name in ("data", "model"):
            shutil.copytree(scene.before / name, theatre.stage / name, dirs_exist_ok=True)
    again = in_child(scene.resume)
    if again.code != 0:
        found["lost"] = f"the next attempt ended with {again.code}: {again.said[-300:]}"
    else:
        same(scene, theatre.stage, again, expected[1], found)
    if gone := done - visits(results):
        found["lost"] = f"visits {gone}"
    if left := [path.name for path in theatre.stage.rglob(".tmp-*")]:
        found["leaked"] = f"{left}"
    return Note(scene.name, fault.kind, fault.number, outcome, found)


def same(scene: Scene, stage: Path, ended: Ended, expected: Any, found: dict[str, str]) -> None:
    """Note among what was `found` that the result is not the one of an undisturbed run."""
    try:
        result = scene.result(stage, ended.said)
    except (OSError, ValueError, KeyError) as error:
        found["lost"] = f"after exit 0: {type(error).__name__}: {error}"
        return
    if result != expected:
        found["mixed"] = f"{result} instead of {expected}"[:2000]


def wrong(ended: Ended, fault: Fault) -> dict[str, str]:
    """Return what is wrong with how a program ended."""
    errors = [line for line in ended.said.splitlines() if line.startswith("error: ") or " was killed; " in line]
    if not errors and "\nFAULT: " in ended.said:  # a profile was checked: the file and the reason stand above, wrapped
        errors = [" ".join(ended.said.split())]
    found = {"leaked": "a process"} if ended.left else {}
    if ended.code is None:
        found["hung"] = ended.said[-300:]
    if "Traceback" in ended.said or ended.code == 70:
        found["tracebacks"] = ended.said[-600:]
    if ended.code in (1, 2, 3):
        paths = [path for operation, path in ended.done if operation == fault.operation][fault.number - 1 :]
        names = {re.sub(r"\.tmp-\d+-\w+-\w+-", "", name) for path in paths for name in (Path(path).name, path)}
        names |= {Path(path).parent.name for path in paths}
        words = WORDS.get(fault.what, "") if isinstance(fault.what, int) else ""  # type: ignore[call-overload]
        reason = os.strerror(fault.what) if isinstance(fault.what, int) else ""
        if len(errors) != 1:
            found["untrue messages"] = f"{len(errors)} messages: {ended.said[-300:]}"
        elif isinstance(fault.what, int) and not (
            any(name in errors[0] for name in names) and ((words and words in errors[0]) or reason in errors[0])
        ):
            found["untrue messages"] = errors[0]
    elif ended.code not in (0, None, 4, 70, 130, 143, -signal.SIGKILL):
        found["tracebacks"] = f"ended with {ended.code}"
    return found


def read(notes: Path) -> list[Note]:
    """Return what was noted so far."""
    return [Note(**json.loads(line)) for line in notes.read_text().splitlines()] if notes.exists() else []


def table(notes: list[Note]) -> str:
    """Return the matrix in Markdown: what was injected, how often, and what came of it."""
    lines = [f"{len(notes):,} injections of {len({note.kind for note in notes})} kinds", ""]
    for title, key in (("scene", "scene"), ("kind", "kind")):
        lines.append(f"| {title} | injections | {' | '.join((*OUTCOMES, *FAULTS))} |")
        lines.append("| --- " * (2 + len(OUTCOMES) + len(FAULTS)) + "|")
        for name in [*sorted({getattr(note, key) for note in notes}), "all"]:
            some = [note for note in notes if name in ("all", getattr(note, key))]
            outcomes = Counter(note.outcome for note in some)
            faulty = Counter(fault for note in some for fault in note.faults)
            counts = [len(some), *(outcomes[each] for each in OUTCOMES), *(faulty[each] for each in FAULTS)]
            lines.append(f"| {name} | {' | '.join(str(count) for count in counts)} |")
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
