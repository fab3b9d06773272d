"""Run the numbered scripts in order, each in a process of its own, so that no step inherits another's warm state.

python run_pipeline.py                                        the pod run, configs/config.yaml
python run_pipeline.py --config configs/quickstart.yaml       the offline default
python run_pipeline.py --resume                               keep what an interrupted run has finished
python run_pipeline.py --dry-run                              what would run, why, and how long it may take
python run_pipeline.py --then "runpodctl stop pod $RUNPOD_POD_ID"   a pod that ends by itself, also after a failure
"""

import argparse
import contextlib
import ctypes
import functools
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from boundby.cli import COMMANDS, IS_INSTALLED, typed
from boundby.formatting import minutes
from utils.command import REMOVED, Parser, streams, without

ROOT = Path(__file__).resolve().parent
STEPS: dict[str, dict[str, Any]] = tomllib.loads((ROOT / "utils" / "steps" / "steps.toml").read_text(encoding="utf-8"))
UNSOUND = "some points failed or the profile has faults"
WORDS = {file: word for word, (file, _) in COMMANDS.items()}  # of the command, by the file that they run
OFFLINE_DEFAULT = typed("run", "--config", "configs/quickstart.yaml")
NO_MODEL = f"""no model is named: configs/config.yaml's is downloaded and measured. For yours, or a small one made here:
    {typed("run", "model.name=FOLDER_OR_NAME", "dataset.file=TEXTS.csv")}
    {OFFLINE_DEFAULT}"""
# What a step is sent for what this process is sent. Of the last two it would die without writing its state.
PASSED_ON = {
    signal.SIGINT: signal.SIGINT,
    signal.SIGTERM: signal.SIGTERM,
    signal.SIGHUP: signal.SIGTERM,
    signal.SIGQUIT: signal.SIGTERM,
}
PR_SET_PDEATHSIG = 1  # linux/prctl.h
DONE, FAILED, LACKING, INCOMPLETE, INTERRUPTED, TERMINATED = 0, 1, 3, 4, 130, 143
EXIT_CODE_VARIABLE = "BOUNDBY_EXIT_CODE"  # for the command of --then
LEFT_VARIABLE = "BOUNDBY_RUN_LEFT"  # as utils/steps/estimate.py reads it
OF_THE_RUN = "BOUNDBY_RUN_"  # variables that mean this run alone
STDERR = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run the chosen steps until one fails; return the exit code of the pipeline."""
    parser = arguments()
    args = parser.parse_intermixed_args(argv)
    streams.open_standard()
    os.environ.setdefault("BOUNDBY_RUN_STARTED", time.strftime("%Y%m%dT%H%M%SZ", time.gmtime()))
    steps, started = chosen(args, parser), time.monotonic()
    if not (
        args.config
        or args.resume
        or args.first
        or args.only
        or any("model.name=" in override for override in args.overrides)
    ):
        say(NO_MODEL, "stderr")
    if args.dry_run:
        return dry_run(steps, args)
    if args.then is None:
        return run(steps, args, started)
    return followed(args.then, lambda: run(steps, args, started), STDERR if args.json else None)


def run(steps: Sequence[str], args: argparse.Namespace, started: float) -> int:
    """Run the steps, print their documents where they are wanted, and return the exit code of the pipeline."""
    documents: list[dict[str, Any]] | None = [] if args.json else None
    with contextlib.redirect_stdout(sys.stderr) if args.json else contextlib.nullcontext():
        code, way_on = run_steps(steps, args, started, documents)
    if documents is not None:
        card = next((document["card"] for document in reversed(documents) if document.get("card")), None)
        ended = {"exit_code": code, "seconds": round(time.monotonic() - started, 3), "to_continue": way_on}
        say(json.dumps({**ended, "card": card, "steps": documents}, indent=2))
    return code


def run_steps(
    steps: Sequence[str], args: argparse.Namespace, started: float, documents: list[dict[str, Any]] | None
) -> tuple[int, str | None]:
    """Run the steps until one fails; return the exit code, and the command that continues where one has failed."""
    worst = DONE
    for at, number in enumerate(steps):
        step = STEPS[number]
        code = run_step(step["script"], step_arguments(args), documents=documents, left=steps[at:])
        os.environ["BOUNDBY_RUN_BEGUN"] = "1"
        if "check" in step and code in (DONE, INCOMPLETE):
            code = max(code, check(step["check"], args, documents))
        if code not in (DONE, INCOMPLETE):
            return code, announce_failure(number, code, args, time.monotonic() - started)
        worst = max(worst, code)
    finished = f"all steps finished in {minutes(time.monotonic() - started)}"
    say(f"\n{finished}" if worst == DONE else f"\n{finished}, but {UNSOUND} (exit code {worst})")
    return worst, None


def followed(command: str, pipeline: Callable[[], int], stdout: int | None = None) -> int:
    """Return the exit code of the pipeline; once it has ended, however it ended, run `command` by the shell.

    It finds the exit code in `EXIT_CODE_VARIABLE`, prints to `stdout`, and changes nothing about that code. A signal to
    stop ends the pipeline, and none keeps the command from running.
    """
    code, is_over = FAILED, False

    def stop(signum: int, frame: object) -> None:
        nonlocal is_over
        if not is_over:
            is_over = True
            raise KeyboardInterrupt if PASSED_ON[signum] == signal.SIGINT else SystemExit(TERMINATED)

    previous = taken_over(stop)
    try:
        try:
            code = pipeline()
        finally:
            is_over = True
    except KeyboardInterrupt:  # between two steps
        code = INTERRUPTED
    except SystemExit:
        code = TERMINATED
    finally:
        run_after(command, exit_code(code), stdout)
        for signum, handler in previous.items():
            signal.signal(signum, handler)
    return code


def run_after(command: str, code: int, stdout: int | None) -> None:
    """Run the command of --then, and say where it fails."""
    say(f"\n$ {without(command)}", "stdout" if stdout is None else "stderr")
    known = {name: value for name, value in os.environ.items() if not name.startswith(OF_THE_RUN)}
    known[EXIT_CODE_VARIABLE] = str(code)
    failed = subprocess.run(command, shell=True, stdout=stdout, env=known, check=False).returncode
    if failed:
        ended = f"was ended by signal {-failed}" if failed < 0 else f"ended with exit code {failed}"
        say(f"the command of --then {ended}: {without(command)}", "stderr")


def taken_over(handler: Callable[[int, object], None]) -> dict[int, Any]:
    """Have `handler` take the signals to stop but those that are ignored; return who took them before."""
    previous = {
        signum: signal.getsignal(signum) for signum in PASSED_ON if signal.getsignal(signum) is not signal.SIG_IGN
    }
    for signum in previous:
        signal.signal(signum, handler)
    return previous


def exit_code(code: int) -> int:
    """Return what this process ends with where a step was ended by a signal that has no code of its own."""
    return FAILED if code < 0 else code


def arguments() -> argparse.ArgumentParser:
    """Return the command line of the pipeline."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("--config", metavar="FILE", help="settings (default: configs/config.yaml)")
    for number, step in STEPS.items():
        parser.add_argument(f"--skip-{step['skip']}", action="store_true", help=f"leave out step {number}")
    parser.add_argument("--only", metavar="N", type=int, help="run step N alone")
    parser.add_argument("--from", dest="first", metavar="N", type=int, help="start at step N")
    parser.add_argument("--resume", action="store_true", help="keep what an earlier run has finished")
    parser.add_argument("--dry-run", action="store_true", help="print what each step would do and why; run nothing")
    parser.add_argument(
        "--then",
        metavar="COMMAND",
        help=f"run this in a shell at the end, also of a failure; it gets ${EXIT_CODE_VARIABLE}",
    )
    parser.add_argument("--trust-remote-code", action="store_true", help="run Python code that the model brings")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    parser.add_argument("--json", action="store_true", help="print one JSON document; all else is on stderr")
    parser.add_argument("overrides", nargs="*", metavar="key.sub=value", help="settings that override the file's")
    return parser


def chosen(args: argparse.Namespace, parser: argparse.ArgumentParser) -> list[str]:
    """Return the numbers of the steps that the flags leave; ends with a usage error on a step that does not exist."""
    for flag, number in (("--only", args.only), ("--from", args.first)):
        if number is not None and f"{number:02d}" not in STEPS:
            parser.error(f"{flag} {number}: there is no such step; known: {', '.join(STEPS)}")
    if args.then is not None and not args.then.strip():
        parser.error("--then is empty, so nothing would end this machine; give a command, or leave --then out")
    if args.only is not None:
        return [f"{args.only:02d}"]
    return [number for number in STEPS if not is_skipped(number, args) and int(number) >= (args.first or 0)]


def is_skipped(number: str, args: argparse.Namespace) -> bool:
    """Tell whether the flag that leaves out this step is given."""
    return bool(getattr(args, f"skip_{STEPS[number]['skip']}"))


def step_arguments(args: argparse.Namespace) -> list[str]:
    """Return the arguments that every step is given."""
    return passed_on(args, "resume", "debug", "trust_remote_code")


def at_the_end(args: argparse.Namespace) -> list[str]:
    """Return the argument for what runs after the pipeline, where one is given."""
    return [] if args.then is None else ["--then", args.then]


def passed_on(args: argparse.Namespace, *flags: str) -> list[str]:
    """Return the settings as arguments, with those of the `flags` that are given."""
    given = [f"--{name.replace('_', '-')}" for name in flags if getattr(args, name)]
    return [*(["--config", args.config] if args.config else []), *given, *args.overrides]


def check(script: str, args: argparse.Namespace, documents: list[dict[str, Any]] | None) -> int:
    """Check what the profiling step left; whatever is found stops nothing, only an interruption does."""
    code = run_step(script, ["--brief", *passed_on(args, "debug")], is_shown=False, documents=documents)
    if code in (DONE, INTERRUPTED, TERMINATED):
        return code
    again = shown(f"scripts/{script}", passed_on(args, "debug"))
    say(f"the profile has faults or cannot be checked (exit code {code}); the remaining steps still run", "stderr")
    say(f"to see every fault: {again}", "stderr")
    return INCOMPLETE


def run_step(
    script: str,
    arguments: Sequence[str],
    is_shown: bool = True,
    documents: list[dict[str, Any]] | None = None,
    left: Sequence[str] = (),
) -> int:
    """Run one script, its command printed first if it `is_shown`; return its exit code.

    Where `documents` are collected, what it prints is one of them. It is told which steps are `left`, itself first.
    Signals to stop are passed on to it, and it ends with this process however that ends.
    """
    path = ROOT / "scripts" / script
    command = [sys.executable, str(path), *([] if documents is None else ["--json"]), *arguments]
    if is_shown:
        say(f"\n$ {shown(f'scripts/{script}', arguments)}")
    early: list[int] = []  # while the step was being started
    late: list[int] = []
    process: subprocess.Popen[bytes] | None = None

    def pass_on(signum: int, frame: object) -> None:
        if process is None:
            early.append(signum)
        else:
            late.append(signum)
            process.send_signal(PASSED_ON[signum])

    previous = taken_over(pass_on)
    try:
        with tempfile.TemporaryFile() as printed:
            stdout = None if documents is None else printed  # a pipe would wait for all who have it
            process = subprocess.Popen(
                command,
                stdout=stdout,
                env={**os.environ, LEFT_VARIABLE: " ".join(left)},
                preexec_fn=functools.partial(end_with, os.getpid()),
            )
            for signum in early:
                process.send_signal(PASSED_ON[signum])
            code = as_exit_code(process.wait())
            if documents is not None:
                printed.seek(0)
                with contextlib.suppress(ValueError):  # of one that was killed
                    documents.append(json.load(printed))
    finally:
        for signum, handler in previous.items():
            signal.signal(signum, handler)
    if code in (DONE, INCOMPLETE) and (stops := [*early, *late]):  # it had just ended: the next one must not begin
        return as_exit_code(-PASSED_ON[stops[0]])
    return code


def end_with(parent: int) -> None:
    """Have the system end this process, which is about to become a step, when its parent dies; on Linux.

    An interrupt waits until the step can take it: while it imports, Python would answer with a traceback.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # it has died already
        os._exit(TERMINATED)


def say(text: str, stream: str = "stdout") -> None:
    """Print a line; a stream that is dead ends nothing."""
    streams.write(getattr(sys, stream), text)


def as_exit_code(code: int) -> int:
    """Return the exit code for the end of a process that a signal may have ended."""
    return {-signal.SIGINT: INTERRUPTED, -signal.SIGTERM: TERMINATED}.get(code, code)


def announce_failure(number: str, code: int, args: argparse.Namespace, seconds: float) -> str:
    """Say how the step ended and which command continues, and return that command."""
    if code == -signal.SIGKILL:
        ended = "was killed, usually because main memory ran out: try smaller batch sizes"
    elif code < 0:
        ended = f"was ended by signal {-code}"
    else:
        ended = f"ended with exit code {code}"
    resume = [*step_arguments(args), *([] if args.resume else ["--resume"])]
    skipped = [f"--skip-{step['skip']}" for name, step in STEPS.items() if is_skipped(name, args)]
    where = ["--only" if args.only is not None else "--from", str(int(number)), *skipped, *at_the_end(args)]
    say(f"\nstep {number} {ended}, {minutes(seconds)} after the start", "stderr")
    again = shown("run_pipeline.py", [*where, *resume])
    fill_in = f" (with what {REMOVED} stands for)" if REMOVED in again else ""
    say(f"to continue{fill_in}: {again}", "stderr")
    if number == "01" and code == LACKING:
        say(f"offline default: {OFFLINE_DEFAULT}", "stderr")
    return again


def shown(file: str, arguments: Sequence[str]) -> str:
    """Return the command that runs a file of ours as a person would type it here, without credentials."""
    safe = map(without, arguments)
    if IS_INSTALLED or Path.cwd() == ROOT:
        return typed(WORDS[file], *safe)
    return shlex.join(["python", str(ROOT / file), *safe])


def dry_run(steps: Sequence[str], args: argparse.Namespace) -> int:
    """Print what the steps would do, from a process that may load the settings."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    command = [
        sys.executable,
        "-m",
        "utils.report.dry_run",
        *steps,
        "--",
        *step_arguments(args),
        *at_the_end(args),
        *(["--json"] if args.json else []),
    ]
    return subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, check=False).returncode


if __name__ == "__main__":
    try:
        code = main()
    except KeyboardInterrupt:  # between two steps
        code = INTERRUPTED
    sys.exit(exit_code(code))
