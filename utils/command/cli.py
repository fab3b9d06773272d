"""The command line that all scripts share: arguments, settings, exit codes, and errors as one message."""

import argparse
import contextlib
import errno
import functools
import importlib
import json
import os
import re
import resource
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

try:
    import msgspec
except ModuleNotFoundError as error:  # the first package that every script needs
    sys.stderr.write(
        f"error: {error.name}: not installed for {sys.executable}; `bash setup_environment.sh` makes .venv with all "
        "that is needed: run it, then .venv/bin/python\n"
    )
    sys.exit(3)

from boundby import cli as installed
from boundby.machine import DeviceLostError
from utils.command.console import Console
from utils.command.credentials import Parser
from utils.command.errors import EnvironmentLacksError, GpuLostError, InputError, PipelineError, lacking
from utils.settings import SettingsError

if TYPE_CHECKING:
    from utils.command.artifacts import Layout
    from utils.settings import Config

ROOT = installed.PIPELINE
DEFAULT_CONFIG = ROOT / "configs" / "config.yaml"

DONE, FAILED, INCOMPLETE, INTERRUPTED, TERMINATED = 0, 1, 4, 130, 143
RUN_BEGUN_VARIABLE = "BOUNDBY_RUN_BEGUN"  # set by the runner after its first step, so that no later one repeats it
OF_MEMORY = ("DefaultCPUAllocator", "std::bad_alloc", "Cannot allocate memory")  # what libraries say of it
_FAILS = "{disk} failed or is gone ({reason}). Finished work is kept: add --resume once the disk is back"
_FORBIDS = "{reason}; change its permissions, or choose another output.results_dir for results"
OF_THE_MACHINE = {  # what an OSError means for people, by its number
    errno.ENOSPC: "no space left on {disk}{space}; free some and add --resume",
    errno.EDQUOT: "this user's quota on {disk} is used up; free some and add --resume",
    errno.EMFILE: "this process may open no more than {limit} files; raise `ulimit -n` and add --resume",
    **dict.fromkeys((errno.EIO, errno.ESTALE), _FAILS),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST, errno.EISDIR), _FORBIDS),
    errno.ENAMETOOLONG: "{reason}; choose another folder or file in the settings",
}


STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
ONE_STOP_S = 1.0  # in which several signals mean one: the terminal sends its own, and the runner passes it on


class Terminated(BaseException):
    """SIGTERM arrived, or the terminal was closed."""


class Settings(msgspec.Struct, frozen=True):
    """Which settings a script reads: the class of their schema, by module and name so that --help need not load it.

    `smaller` says which of them to change where memory runs out.
    """

    module: str
    schema: str
    default: Path
    smaller: str


PIPELINE = Settings(
    "utils.settings.schema",
    "Config",
    DEFAULT_CONFIG,
    "lower profiling.max_length or trace.batch_size, use model.dtype=bfloat16",
)


class Run(msgspec.Struct):
    """What a script is given: settings, places, and a voice. A script with settings of its own has no layout."""

    config: "Config"  # None, as the layout, where a tool takes no settings
    layout: "Layout"
    args: argparse.Namespace
    console: Console
    resuming: bool = False
    resolved: dict[str, str] = {}  # what settings that leave the choice to the program came to

    def say(self, text: str) -> None:
        """Show a result on stdout."""
        self.console.say(text)

    def note(self, text: str) -> None:
        """Show progress or a doubt on stderr."""
        self.console.note(text)

    def give(self, document: Callable[[], dict[str, Any] | str], text: Callable[[], str] | None = None) -> None:
        """Give the result: its text on stdout or, with --json, its document, which then stands there alone.

        Only the one that is wanted is made. A document that is a text is JSON already.
        """
        if self.args.json:
            self.console.document = document()
        elif text:
            self.say(text())

    @property
    def progress(self) -> Callable[..., Any]:
        """Open a progress display: `with run.progress(total, label) as progress: progress.advance(1, text)`.

        `progress.total` and `progress.left_s`, the seconds left where the work knows better than the pace so far, may
        be set at any time; None is unknown.
        """
        return self.console.progress


Body = Callable[[Run], int | None]
Main = Callable[..., int]
AddArguments = Callable[[argparse.ArgumentParser], None]


def main_of(script: Body, body: Body, *settings: Any, **options: Any) -> Main:
    """Return the command of a script: it runs `body`, and ends the process where that is the script's own."""
    of_script = script.__globals__

    @functools.wraps(script)
    def main(argv: Sequence[str] | None = None) -> int:
        is_script = of_script["__name__"] == "__main__"
        return command(of_script["__doc__"], body, argv, *settings, **options, is_script=is_script)

    return main


class Flag(argparse.Action):
    """A flag that overrides the setting `key`, and sets `clears`, which would win over it, to null.

    Its value is read as YAML; with `is_text` it is the text as it stands, such as a folder that is called 2026.
    `parser.add_argument("--dtype", action=cli.Flag, key="model.dtype")`
    """

    def __init__(self, *args: Any, key: str, clears: str | None = None, is_text: bool = False, **options: Any) -> None:
        super().__init__(*args, **options)
        self._key, self._clears, self._is_text = key, clears, is_text

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        """Note the override; it comes after those of the command line."""
        cleared = [f"{self._clears}=null"] if self._clears else []
        value = json.dumps(values) if self._is_text else values  # JSON is YAML
        namespace.flags = [*namespace.flags, *cleared, f"{self._key}={value}"]


def tool(
    add_arguments: AddArguments | None = None, settings: Settings | None = PIPELINE, *, serves: bool = False
) -> Callable[[Body], Main]:
    """Turn `main(run)` of an unnumbered script into its command: errors and exit code, no receipt.

    With `settings` None it takes no settings, and `run` has none. One that `serves` waits for others, and is silent.
    """
    return lambda body: main_of(body, body, add_arguments, settings, has_heartbeat=not serves)


def require_action(args: argparse.Namespace, **owners: str) -> None:
    """Raise InputError for a flag that is given and belongs to another `args.action`; `owners` are theirs by flag."""
    for flag, owner in owners.items():
        if getattr(args, flag) not in (None, False) and args.action != owner:
            raise InputError(f"--{flag} belongs to `{owner}` and means nothing to `{args.action}`; leave it out there")


def command(
    description: str | None,
    body: Body,
    argv: Sequence[str] | None = None,
    add_arguments: AddArguments | None = None,
    settings: Settings | None = PIPELINE,
    *,
    has_heartbeat: bool = True,
    is_script: bool = False,
) -> int:
    """Parse, load the settings, run `body`; turn every failure into one message and an exit code.

    With `has_heartbeat` the console says every ten seconds that the body is still at work. Where the parser
    has a default for `program`, that is what follows `--`; it writes to the same terminal, so the console stays silent.
    Where a GPU is lost, the process of a script ends here: at its usual end Python would free what lies on the GPU.
    """
    parser = Parser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    if settings:
        text = "settings (default: %(default)s)"
        parser.add_argument("--config", type=_settings_file, default=settings.default, metavar="FILE", help=text)
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    parser.add_argument("--json", action="store_true", help="print one JSON document; all else is on stderr")
    if add_arguments:
        add_arguments(parser)
    parser.set_defaults(flags=[])
    if settings:
        parser.add_argument("overrides", nargs="*", metavar="key.sub=value", help="settings that override the file's")
    given = sys.argv[1:] if argv is None else list(argv)
    program: list[str] = []
    if parser.get_default("program") is not None and "--" in given:
        given, program = given[: given.index("--")], given[given.index("--") + 1 :]
    args = _with_all_overrides(parser.parse_intermixed_args(given))
    args.program = program
    if parser.get_default("program") is not None and (
        bare := [argument for argument in args.overrides if "=" not in argument]
    ):
        parser.error(f"a program stands behind --, such as: boundby train -- {' '.join(bare)}")
    console, is_lost = Console(), False
    with console.documented() if args.json else contextlib.nullcontext():
        try:
            with _stops_raise(), console.heartbeat() if has_heartbeat and not program else contextlib.nullcontext():
                code, error = body(_prepare(args, console, settings)) or DONE, None
        except KeyboardInterrupt:
            code, error = INTERRUPTED, "interrupted"
        except Terminated:
            code, error = TERMINATED, "terminated"
        except (Exception, DeviceLostError) as failed:
            if args.debug:
                console.note(traceback.format_exc())
            failure = as_pipeline_error(failed, settings, resumes=hasattr(args, "resume"))
            code, error, is_lost = failure.exit_code, str(failure), isinstance(failure, GpuLostError)
        if error:
            console.note(error if code in (INTERRUPTED, TERMINATED) else f"error: {error}")
            earlier = console.document if isinstance(console.document, dict) else {}
            console.document = {**earlier, "error": error, "exit_code": code}
        if os.environ.get("RANK", "0") == "0":  # of the processes of a job the first speaks for all
            console.document = console.document or {"exit_code": code}
            console.publish()
    if is_lost and is_script:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):  # a dead terminal
                stream.flush()
        os._exit(code)
    return code


def _settings_file(name: str) -> Path:
    """Return the file of settings that is meant: one here, or one of those that come with the program."""
    here, shipped = Path(name), ROOT / name
    return shipped if not here.exists() and shipped.is_relative_to(ROOT / "configs") else here


def _with_all_overrides(args: argparse.Namespace) -> argparse.Namespace:
    """Give back to the overrides the `key.sub=value` that stand where RUN, or several, may stand."""
    if isinstance(several := getattr(args, "runs", None), list):
        args.overrides += [str(given) for given in several if "=" in str(given) and not given.exists()]
        args.runs = [given for given in several if str(given) not in args.overrides]
    given = getattr(args, "run", None)
    if isinstance(given, str) and "=" in given and hasattr(args, "overrides") and not Path(given).is_dir():
        args.run, args.overrides = None, [given, *args.overrides]
    return args


def _prepare(args: argparse.Namespace, console: Console, settings: Settings | None) -> Run:
    if settings is None:
        return Run(cast("Config", None), cast("Layout", None), args, console)
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    overrides = [*args.overrides, *args.flags]
    if settings is not PIPELINE:
        from utils.settings import load

        schema = getattr(importlib.import_module(settings.module), settings.schema)
        return Run(load(schema, args.config, overrides), cast("Layout", None), args, console)
    from utils.command.artifacts import Layout
    from utils.settings import read_settings

    config, dropped = read_settings(args.config, overrides)
    if dropped and RUN_BEGUN_VARIABLE not in os.environ:
        console.note(
            f"ignored in {_nearby(args.config)}, since it belongs to another model or dataset: {', '.join(dropped)}"
        )
    return Run(config, Layout.of(config), args, console)


def _nearby(path: Path) -> Path:
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


@contextlib.contextmanager
def _stops_raise() -> Iterator[None]:
    """Let a signal to stop unwind the program, so that files are closed and state is written.

    One that is ignored stays so.
    """
    last = float("-inf")

    def stop(signum: int, frame: object) -> None:
        nonlocal last
        before, last = last, time.monotonic()
        if last - before >= ONE_STOP_S:
            raise KeyboardInterrupt if signum == signal.SIGINT else Terminated

    previous: dict[int, Any] = {}
    masked = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    if threading.current_thread() is threading.main_thread():  # elsewhere the caller keeps its own handling
        previous = {
            signum: signal.getsignal(signum) for signum in STOPS if signal.getsignal(signum) is not signal.SIG_IGN
        }
    try:
        for signum in previous:
            signal.signal(signum, stop)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, previous)  # the runner lets an interrupt wait until here
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, masked)
        for signum, handler in previous.items():
            signal.signal(signum, handler)


def as_pipeline_error(
    error: Exception | DeviceLostError, settings: Settings | None, *, resumes: bool = False
) -> PipelineError:
    """Return the failure as one message with its way out and its exit code; `resumes` where `--resume` goes on."""
    if lost := _lost(error):
        if isinstance(error, PipelineError) and error.__cause__ is None:  # of another process, with its way out
            return GpuLostError(str(error))
        way_out = "go on with --resume" if resumes else "start the same command again"
        return GpuLostError(f"{lost}; this process can no longer use the GPU. Finished work is kept: {way_out}")
    if isinstance(error, PipelineError):
        return error
    if isinstance(error, SettingsError):
        return InputError(str(error))
    if isinstance(error, ModuleNotFoundError) and error.name:
        return lacking(error.name.partition(".")[0])
    if isinstance(error, OSError) and error.errno in OF_THE_MACHINE:
        return EnvironmentLacksError(_explained(error))
    if type(error).__name__ in ("OutOfMemoryError", "MemoryError") or any(word in str(error) for word in OF_MEMORY):
        way_out = f"{settings.smaller}, or a larger device" if settings else "use a machine with more memory"
        said = (re.sub(r"\[enforce fail at [^]]*\]\s*", "", str(error)).splitlines() or ["no more is known"])[0]
        return PipelineError(f"out of memory{' outside the sweep' if settings is PIPELINE else ''} ({said}); {way_out}")
    return PipelineError(f"{type(error).__name__}: {error} (--debug shows the traceback)")


def _lost(error: Exception | DeviceLostError) -> str | None:
    """Return how the GPU was lost for this process; None where it was not."""
    if sys.modules.get("torch") is None:  # it is not installed, or nothing has needed it
        return str(error) if isinstance(error, DeviceLostError) else None
    from boundby.machine import raise_if_lost

    try:
        raise_if_lost(error)
    except DeviceLostError as lost:
        return str(lost)
    return None


def _explained(error: OSError) -> str:
    """Return which file, disk or limit failed, and the way out."""
    name = os.fsdecode(error.filename) if isinstance(error.filename, str | bytes) else None
    disk = Path(name or ".").absolute()
    while not (os.path.ismount(disk) or disk == disk.parent):  # which is false for a name that cannot be
        disk = disk.parent
    space = ""
    if error.errno == errno.ENOSPC and name:
        with contextlib.suppress(OSError):
            left = os.statvfs(disk)
            has_inodes = left.f_favail or not left.f_files  # some file systems count none
            space = f" ({left.f_bavail * left.f_frsize / 1e6:.0f} MB free)" if has_inodes else " (no inode is free)"
    words = OF_THE_MACHINE[error.errno or 0].format(
        disk=f"the disk at {disk}" if name else "a disk",
        space=space,
        limit=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        reason=error.strerror,
    )
    return f"{f'{name}: ' if name else ''}{words}"
