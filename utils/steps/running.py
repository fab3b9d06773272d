"""The life of a step, from lock to receipt: what `main(run)` of a numbered script becomes as a command."""

import argparse
import contextlib
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from boundby import files
from boundby.machine import DeviceLostError
from utils.command import (
    DONE,
    FAILED,
    INCOMPLETE,
    INTERRUPTED,
    PIPELINE,
    TERMINATED,
    AddArguments,
    Body,
    Main,
    Run,
    Terminated,
    as_pipeline_error,
    held,
    log_to,
    main_of,
    set_aside,
    stop_logging,
)

if TYPE_CHECKING:
    from utils.steps.steps import Parts

STATUS = {DONE: "ok", INCOMPLETE: "incomplete", INTERRUPTED: "interrupted", TERMINATED: "interrupted"}


def step(number: str, add_more: AddArguments | None = None) -> Callable[[Body], Main]:
    """Turn `main(run)` of a numbered script into its command: receipts, resume, log, lock, exit code."""

    def add_arguments(parser: argparse.ArgumentParser) -> None:
        if add_more:
            add_more(parser)
        parser.add_argument("--resume", action="store_true", help="keep finished work of an interrupted run")
        parser.add_argument("--trust-remote-code", action="store_true", help="run Python code that the model brings")

    return lambda body: main_of(body, lambda run: _live(number, body, run), add_arguments)


def _live(number: str, body: Body, run: Run) -> int:
    """Run one step from lock to receipt."""
    from utils.steps import estimate, steps  # what they need may not be installed: the command says so

    layout = run.layout
    way_out = "wait for it, or choose another output.results_dir"
    with held(layout.lock, 0.0, run.note, way_out), _logged(layout.log(number)):
        steps.require_ours(number, layout)
        files.remove_orphans(layout.results)
        files.remove_orphans(layout.dataset.parent, recursive=False)  # which may be a folder of the user's own
        parts = steps.parts(number, run.config, layout)
        if run.args.resume:
            decision = steps.decide(number, run.config, layout)
            run.note(f"step {number}: {'runs' if decision.run else 'kept'} ({decision.reason})")
            if not decision.run:
                run.give(lambda: _step_document(number, run, "kept", decision.reason))
                return DONE
        code = _recorded(number, body, run, parts)
        if line := estimate.standing(number, run.config, layout, run.args.resume):
            run.note(line)
        run.give(lambda: _step_document(number, run, STATUS.get(code, "failed"), None))
        return code


def _step_document(number: str, run: Run, status: str, reason: str | None) -> dict[str, Any]:
    """Return what --json prints of a step: what the step gave, how it ended, and where its results are."""
    from utils.steps import steps

    written = [str(path) for path in steps.outputs(number, run.layout) if path.exists()]
    ended = {"step": number, "title": steps.STEPS[number].title, "status": status, "reason": reason, "files": written}
    return {**(run.console.document or {}), **ended}


def _recorded(number: str, body: Body, run: Run, parts: "Parts") -> int:
    """Run the body of a step; leave its state in run.json and, when it has finished, its receipt."""
    from utils.steps import steps

    started, clock = datetime.now(UTC).isoformat(timespec="seconds"), time.monotonic()
    files.make_folder(run.layout.receipt(number).parent)  # first: without it, what is written next is not known as ours
    steps.record(number, run.layout, run.config, {"status": "running", "started": started})
    code = FAILED
    try:
        _make_room(number, run, parts)
        steps.begin(number, run.layout, parts)
        code = body(run) or DONE
    except KeyboardInterrupt:
        code = INTERRUPTED
        raise
    except Terminated:
        code = TERMINATED
        raise
    except (Exception, DeviceLostError) as error:
        code = as_pipeline_error(error, PIPELINE).exit_code
        if isinstance(error, DeviceLostError) and error.point:
            with contextlib.suppress(OSError):
                files.append_json_line(run.layout.losses(number), {"point": error.point})
        raise
    finally:
        facts = {
            "status": STATUS.get(code, "failed"),
            "exit_code": code,
            "started": started,
            "seconds": round(time.monotonic() - clock, 3),
            "resolved": run.resolved,
        }
        if code in (DONE, INCOMPLETE):
            steps.finish(number, run.layout, parts, **facts)
        with contextlib.suppress(OSError):  # a full disk must not hide the error that led here
            steps.record(number, run.layout, run.config, facts)
    return code


def _make_room(number: str, run: Run, parts: "Parts") -> None:
    """Keep what `--resume` may build on; move the outputs of an earlier measurement away."""
    from utils.steps import steps

    if not steps.STEPS[number].measures:
        return
    earlier = steps.continuation(number, parts, run.layout)
    run.resuming = run.args.resume and not earlier.run
    if run.args.resume:
        run.note(f"step {number}: {'continues' if run.resuming else 'starts anew'} ({earlier.reason})")
    elif run.layout.marker(number).exists():
        run.note("an interrupted run is moved to previous/; --resume would have continued it")
    if not run.resuming:
        folder = set_aside(steps.stale_with(number, run.layout, resumes=run.args.resume), run.layout)
        if folder:
            run.note(f"step {number}: the earlier outputs are in {folder}")


@contextlib.contextmanager
def _logged(path: Path) -> Iterator[None]:
    handler = log_to(path)
    try:
        yield
    finally:
        stop_logging(handler)
