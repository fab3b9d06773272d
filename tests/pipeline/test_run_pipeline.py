"""The runner: order, flags, fresh processes, exit codes and the command that continues."""

import json
import os
import re
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import run_pipeline

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = [step["script"].removesuffix(".py") for step in run_pipeline.STEPS.values()]


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A folder whose numbered scripts log their arguments, pid and environment, and end as the test says."""
    (tmp_path / "scripts").mkdir()
    for name in SCRIPTS:
        ending = f"endings/{name[:2]}"
        (tmp_path / "scripts" / f"{name}.py").write_text(
            "import os, sys, pathlib\n"
            f"with open({str(tmp_path / 'ran')!r}, 'a') as log: print('{name[:2]}', *sys.argv[1:], file=log)\n"
            f"with open({str(tmp_path / 'pids')!r}, 'a') as log: print(os.getpid(), file=log)\n"
            f"with open({str(tmp_path / 'starts')!r}, 'a') as log: print(os.environ['BOUNDBY_RUN_STARTED'], file=log)\n"
            f"ending = pathlib.Path({str(tmp_path)!r}) / {ending!r}\n"
            "exec(ending.read_text()) if ending.exists() else None\n"
        )
    (tmp_path / "scripts" / "check_profile.py").write_text(
        "import sys, pathlib\n"
        f"with open({str(tmp_path / 'checks')!r}, 'a') as log: print(*sys.argv[1:], file=log)\n"
        f"ending = pathlib.Path({str(tmp_path)!r}) / 'endings/check'\n"
        "exec(ending.read_text()) if ending.exists() else None\n"
    )
    (tmp_path / "endings").mkdir()
    monkeypatch.setattr(run_pipeline, "ROOT", tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("BOUNDBY_RUN_STARTED", raising=False)
    yield tmp_path
    os.environ.pop("BOUNDBY_RUN_STARTED", None)


def ran(checkout: Path) -> list[str]:
    path = checkout / "ran"
    return path.read_text().splitlines() if path.exists() else []


def checks(checkout: Path) -> list[str]:
    path = checkout / "checks"
    return path.read_text().splitlines() if path.exists() else []


def end(checkout: Path, number: str, code: str) -> None:
    (checkout / "endings" / number).write_text(code)


def test_runs_all_steps_in_order_each_in_its_own_process(checkout, capsys):
    assert run_pipeline.main([]) == 0
    assert ran(checkout) == ["00", "01", "02", "03", "04", "05"]
    assert len(set((checkout / "pids").read_text().split())) == 6
    assert len(set((checkout / "starts").read_text().split())) == 1
    assert "$ python scripts/02_baseline_inference.py" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--skip-check", "--skip-profiling"], ["01", "02", "04", "05"]),
        (["--skip-download", "--skip-baseline", "--skip-visualize", "--skip-variants"], ["00", "03"]),
        (["--only", "3"], ["03"]),
        (["--from", "3"], ["03", "04", "05"]),
        (["--from", "2", "--skip-visualize"], ["02", "03", "05"]),
    ],
)
def test_flags_choose_the_steps(checkout, flags, expected):
    assert run_pipeline.main(flags) == 0
    assert ran(checkout) == expected


def test_json_is_the_documents_of_the_steps_and_how_the_run_ended(checkout, capfd):
    printed = """print('{"step": "04", "card": ["Limited by  memory"]}')"""
    end(checkout, "04", f"import sys; assert '--json' in sys.argv; {printed}")
    end(checkout, "05", "raise SystemExit(1)")
    assert run_pipeline.main(["--json", "--from", "4"]) == 1
    document = json.loads(capfd.readouterr().out)
    assert document["steps"] == [{"step": "04", "card": ["Limited by  memory"]}] and document["card"] == [
        "Limited by  memory"
    ]
    assert document["exit_code"] == 1 and document["to_continue"] == "python run_pipeline.py --from 5 --resume"


def test_hands_config_flags_and_overrides_to_every_step(checkout):
    run_pipeline.main(["--only", "1", "--config", "my.yaml", "--resume", "a.b=[1, 2]", "--trust-remote-code", "c=d"])
    assert ran(checkout) == ["01 --config my.yaml --resume --trust-remote-code a.b=[1, 2] c=d"]


@pytest.mark.parametrize("code", [1, 2, 3, 130, 143])
def test_a_failed_step_ends_the_run_with_its_code_and_the_command_that_continues(checkout, capfd, code):
    end(checkout, "02", f"sys.exit({code})")
    assert run_pipeline.main(["--config", "my.yaml", "model.name=a b"]) == code
    assert ran(checkout)[-1].startswith("02")
    expected = "to continue: python run_pipeline.py --from 2 --config my.yaml 'model.name=a b' --resume"
    assert expected in capfd.readouterr().err


def test_failed_points_do_not_stop_the_run_but_show_in_its_code(checkout):
    end(checkout, "02", "sys.exit(4)")
    assert run_pipeline.main([]) == 4
    assert len(ran(checkout)) == 6


@pytest.mark.parametrize(
    ("flags", "times"),
    [([], 1), (["--only", "3"], 1), (["--from", "3"], 1), (["--skip-profiling"], 0), (["--only", "4"], 0)],
)
def test_the_profile_is_checked_whenever_step_03_has_run(checkout, flags, times):
    assert run_pipeline.main(flags) == 0
    assert len(checks(checkout)) == times


def test_the_check_of_the_profile_gets_the_settings_and_no_flag_of_a_step(checkout, capfd):
    flags = ["--config", "my.yaml", "--resume", "--trust-remote-code", "--debug"]
    run_pipeline.main(["--only", "3", *flags, "output.results_dir=a b"])
    assert checks(checkout) == ["--brief --config my.yaml --debug output.results_dir=a b"]
    assert "check_profile" not in capfd.readouterr().out
    end(checkout, "check", f"assert open({str(checkout / 'ran')!r}).read().split()[-1] == '03'")
    assert run_pipeline.main(["--skip-check"]) == 0


@pytest.mark.parametrize("code", ["sys.exit(1)", "sys.exit(2)", "import os; os.kill(os.getpid(), 9)"])
def test_a_finding_about_the_profile_stops_no_step_but_shows_in_the_code(checkout, capfd, code):
    end(checkout, "check", code)
    assert run_pipeline.main([]) == 4
    assert ran(checkout)[-1] == "05"
    captured = capfd.readouterr()
    assert "the profile has faults or cannot be checked" in captured.err
    assert "to see every fault: python scripts/check_profile.py" in captured.err
    assert re.search(
        r"all steps finished in \d+ s, but some points failed or the profile has faults \(exit code 4\)", captured.out
    )


@pytest.mark.parametrize(("code", "is_checked"), [(4, True), (1, False), (130, False)])
def test_a_profile_is_checked_where_the_step_has_left_a_receipt(checkout, code, is_checked):
    end(checkout, "03", f"sys.exit({code})")
    assert run_pipeline.main([]) == code
    assert bool(checks(checkout)) == is_checked


@pytest.mark.parametrize("code", [130, 143])
def test_an_interrupted_check_ends_the_run(checkout, capfd, code):
    end(checkout, "check", f"sys.exit({code})")
    assert run_pipeline.main([]) == code
    assert ran(checkout)[-1] == "03"
    assert "to continue: python run_pipeline.py --from 3 --resume" in capfd.readouterr().err


def test_a_killed_step_and_a_missing_network_are_explained(checkout, capfd):
    end(checkout, "02", "os.kill(os.getpid(), 9)")
    assert run_pipeline.main([]) < 0
    assert "step 02 was killed, usually because main memory ran out" in capfd.readouterr().err
    end(checkout, "01", "sys.exit(3)")
    assert run_pipeline.main([]) == 3
    assert "configs/quickstart.yaml" in capfd.readouterr().err


@pytest.mark.parametrize("flags", [["--only", "7"], ["--from", "9"], ["--no-such-flag"]])
def test_unknown_step_or_flag_is_a_usage_error(checkout, flags):
    with pytest.raises(SystemExit) as ended:
        run_pipeline.main(flags)
    assert ended.value.code == 2
    assert ran(checkout) == []


def test_the_table_names_the_scripts_that_are_there_in_their_order():
    present = sorted(path.name for path in (ROOT / "scripts").glob("[0-9][0-9]_*.py"))
    assert [step["script"] for step in run_pipeline.STEPS.values()] == present
    assert all(step["script"].startswith(f"{number}_") for number, step in run_pipeline.STEPS.items())
    assert all((ROOT / "scripts" / step["check"]).is_file() for step in run_pipeline.STEPS.values() if "check" in step)


def test_sigterm_reaches_a_step_that_is_just_being_started(checkout, monkeypatch):
    end(checkout, "02", "print('ready', flush=True)\nsys.stdin.read()")  # until it is told
    received = []

    class Started(subprocess.Popen):
        def __init__(self, *arguments, **settings):
            super().__init__(*arguments, **{**settings, "stdin": subprocess.PIPE, "stdout": subprocess.PIPE})
            assert self.stdout.readline() == b"ready\n"
            os.kill(os.getpid(), signal.SIGTERM)

        def wait(self, timeout=None):
            with self.stdin, self.stdout:  # a step that was not told ends by itself
                pass
            return super().wait(timeout)

    monkeypatch.setenv("BOUNDBY_RUN_STARTED", "now")
    before = signal.signal(signal.SIGTERM, lambda *_: received.append("the runner"))  # which would have died
    monkeypatch.setattr(run_pipeline.subprocess, "Popen", Started)
    try:
        assert run_pipeline.run_step("02_baseline_inference.py", []) == 143
    finally:
        signal.signal(signal.SIGTERM, before)
    assert received == []


@pytest.fixture
def started(checkout):
    """Starts a run whose step 02 says that it is ready and then waits; gives the runner and the id of its step."""
    ready = (
        "import signal, time\nsignal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])\nprint('ready', flush=True)"
    )
    end(checkout, "02", f"{ready}\ntime.sleep(60)")
    code = "\n".join(
        [
            "import pathlib, run_pipeline, signal, sys",
            f"run_pipeline.ROOT = pathlib.Path({str(checkout)!r})",
            "signal.signal(signal.SIGINT, signal.default_int_handler)",  # a test in the background ignores it
            "sys.exit(run_pipeline.main([]))",
        ]
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=checkout,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    while "ready" not in process.stdout.readline():
        assert process.poll() is None
    yield process, int((checkout / "pids").read_text().split()[-1])
    process.kill()
    process.communicate()


@pytest.mark.parametrize(("name", "code"), [("SIGTERM", 143), ("SIGINT", 130), ("SIGHUP", 143), ("SIGQUIT", 143)])
def test_a_signal_to_the_runner_alone_reaches_the_step_and_it_says_how_to_continue(started, name, code):
    runner, step = started
    runner.send_signal(signal.Signals[name])
    _, errors = runner.communicate()
    assert runner.returncode == code
    assert "--from 2" in errors
    assert not Path(f"/proc/{step}").exists()  # the runner has waited for it


@pytest.mark.parametrize(("name", "code"), [("SIGTERM", 143), ("SIGINT", 130)])
def test_a_signal_to_the_step_alone_ends_the_run_which_says_how_to_continue(started, name, code):
    runner, step = started
    os.kill(step, signal.Signals[name])
    _, errors = runner.communicate()
    assert runner.returncode == code
    assert "step 02 " in errors and "--from 2" in errors


def test_an_interrupt_of_a_step_that_still_imports_is_one_word_and_no_traceback(checkout):
    end(
        checkout,
        "02",
        "os.kill(os.getpid(), 2)\nfrom utils.command import cli\nsys.exit(cli.command('', print, [], settings=None))",
    )
    code = f"import run_pipeline, pathlib, sys; run_pipeline.ROOT = pathlib.Path({str(checkout)!r})"
    command = [sys.executable, "-c", f"{code}\nsys.exit(run_pipeline.main([]))"]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert done.returncode == 130
    assert "interrupted\n\nstep 02 ended with exit code 130" in done.stderr and "Traceback" not in done.stderr


def test_a_step_does_not_outlive_a_runner_that_is_killed(started):
    runner, step = started
    with open(os.pidfd_open(step)) as ended:
        runner.kill()
        assert select.select([ended], [], [], 30)[0]


@pytest.mark.parametrize("streams", [">/dev/full", ">&-", "2>/dev/full", "2>&-", ">&- 2>&-", "<&- >&-"])
def test_a_stream_that_is_dead_ends_no_run(checkout, streams):
    end(checkout, "03", "sys.exit(4)")
    code = f"import run_pipeline, pathlib, sys; run_pipeline.ROOT = pathlib.Path({str(checkout)!r}); "
    command = ["bash", "-c", f'exec "$0" -c "$1" {streams}', sys.executable, f"{code}sys.exit(run_pipeline.main([]))"]
    done = subprocess.run(command, cwd=checkout, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True)
    assert (done.returncode, b"Traceback" in done.stderr) == (4, False)
    assert ran(checkout) == ["00", "01", "02", "03", "04", "05"]


AFTER = "echo $BOUNDBY_EXIT_CODE ${BOUNDBY_RUN_STARTED-none} >>ended"


def ended(checkout: Path) -> list[str]:
    """Return what the command of --then has left: the exit code it was told, and what it knows of the run."""
    path = checkout / "ended"
    return path.read_text().splitlines() if path.exists() else []


def in_a_process(checkout: Path, code: str, *flags: str) -> subprocess.CompletedProcess:
    start = f"import os, pathlib, signal, sys, run_pipeline; run_pipeline.ROOT = pathlib.Path({str(checkout)!r})"
    command = [sys.executable, "-c", f"{start}\n{code}\nsys.exit(run_pipeline.exit_code(run_pipeline.main()))", *flags]
    known = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=checkout, env=known, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("ending", "code", "seen_code"),
    [("", 0, 0), ("sys.exit(4)", 4, 4), ("sys.exit(3)", 3, 3), ("os.kill(os.getpid(), 9)", 1, 1)],
)
def test_a_command_runs_at_the_end_however_it_ends_and_is_told_the_exit_code(checkout, ending, code, seen_code):
    end(checkout, "02", ending)
    done = in_a_process(checkout, "", "--from", "2", "--then", f"{AFTER}; cp ran seen")
    assert (done.returncode, ended(checkout)) == (code, [f"{seen_code} none"])
    assert done.stdout.count(f"$ {AFTER}") == 1
    assert (checkout / "seen").read_text() == (checkout / "ran").read_text()


def test_a_command_that_fails_is_said_and_changes_no_exit_code(checkout, capfd):
    assert run_pipeline.main(["--only", "4", "--then", "no-such-program hf_abcdefghijklmnopqrstuvwx"]) == 0
    said = capfd.readouterr()
    assert "the command of --then ended with exit code 127: no-such-program ***" in said.err
    assert "hf_abc" not in said.out
    assert run_pipeline.main(["--only", "4", "--then", "kill -9 $$"]) == 0
    assert "the command of --then was ended by signal 9: kill -9 $$" in capfd.readouterr().err


@pytest.mark.parametrize("command", ["", "  "])
def test_an_empty_command_is_a_usage_error_since_nothing_would_end_the_machine(checkout, capfd, command):
    with pytest.raises(SystemExit) as stopped:
        run_pipeline.main(["--then", command])
    assert stopped.value.code == 2 and ran(checkout) == []
    assert "--then is empty" in capfd.readouterr().err


def test_the_command_that_continues_ends_as_this_one(checkout, capfd):
    end(checkout, "02", "sys.exit(1)")
    run_pipeline.main(["--then", "echo 'a b'"])
    assert """run_pipeline.py --from 2 --then 'echo '"'"'a b'"'"'' --resume""" in capfd.readouterr().err


def test_with_json_the_document_stands_alone_and_is_there_before_the_command_runs(checkout, capfd):
    end(checkout, "04", """print('{"step": "04"}')""")
    assert run_pipeline.main(["--json", "--only", "4", "--then", "echo of the command; kill -9 $$"]) == 0
    said = capfd.readouterr()
    assert json.loads(said.out)["exit_code"] == 0
    assert "of the command" in said.err


@pytest.mark.parametrize(("name", "code"), [("SIGTERM", 143), ("SIGINT", 130), ("SIGHUP", 143), ("SIGQUIT", 143)])
def test_a_signal_during_a_step_ends_the_pipeline_and_the_command_runs(checkout, name, code):
    unblock = "signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])"
    end(checkout, "02", f"import signal, time\n{unblock}\nos.kill(os.getppid(), signal.{name})\ntime.sleep(60)")
    done = in_a_process(checkout, "signal.signal(2, signal.default_int_handler)", "--then", AFTER)
    assert (done.returncode, ended(checkout)) == (code, [f"{code} none"])


@pytest.mark.parametrize(("name", "code"), [("SIGTERM", 143), ("SIGINT", 130), ("SIGHUP", 143)])
def test_a_signal_between_two_steps_ends_the_pipeline_and_the_command_runs(checkout, name, code):
    between = f"run_pipeline.run_step = lambda *_, **__: os.kill(os.getpid(), signal.{name}) or 0"
    done = in_a_process(checkout, f"signal.signal(2, signal.default_int_handler)\n{between}", "--then", AFTER)
    assert (done.returncode, ended(checkout)) == (code, [f"{code} none"])


def test_a_signal_while_the_command_runs_does_not_end_it(checkout):
    command = f"kill -TERM $PPID; {AFTER}"
    done = in_a_process(checkout, "", "--only", "4", "--then", command)
    assert (done.returncode, ended(checkout)) == (0, ["0 none"])


def test_a_runner_that_breaks_runs_the_command_too_and_tells_of_a_failure(checkout):
    breaks = "def run_step(*_, **__): raise OSError('no process can be started')\nrun_pipeline.run_step = run_step"
    done = in_a_process(checkout, breaks, "--then", AFTER)
    assert (done.returncode, ended(checkout)) == (1, ["1 none"])
    assert "no process can be started" in done.stderr


def test_a_signal_that_is_ignored_stays_ignored(checkout):
    end(checkout, "02", "os.kill(os.getppid(), 1)")  # under nohup
    done = in_a_process(checkout, "signal.signal(1, signal.SIG_IGN)", "--then", AFTER)
    assert (done.returncode, ended(checkout), ran(checkout)[-1]) == (0, ["0 none"], "05")


def test_every_step_is_told_which_are_left(checkout):
    for number in ("03", "05"):
        end(checkout, number, "open('left', 'a').write(os.environ['BOUNDBY_RUN_LEFT'] + '.')")
    run_pipeline.main(["--from", "3", "--skip-visualize"])
    assert (checkout / "left").read_text() == "03 05.05."
