"""Engine recorded in a loop that somebody else drives, on the CPU, and what happens when it ends early or fails."""

import gzip
import json
import warnings
from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerAction

from boundby.capture import (
    CaptureManifest,
    CaptureOptions,
    Cycle,
    Naming,
    Recorder,
    Schedule,
    naming_of_process,
    nsight_variable,
)
from boundby.capture.engine import Engine
from boundby.capture.schedule import Content, Span

CPU = torch.device("cpu")
ONE, TWO = Schedule(1, 1, 2), Schedule(1, 1, 2, 2)


def work() -> None:
    torch.ones(4, 4) @ torch.ones(4, 4)


def loop(recorder: Recorder, steps: int, *, total_steps: int | None = None, step=work) -> CaptureManifest:
    recorder.start(total_steps)
    for _ in range(steps):
        step()
        recorder.step()
    return recorder.stop()


def recorder_of(folder: Path, schedule: Schedule, *, naming=None, on_cycle=None, **options) -> Recorder:
    options |= {name: folder / path for name, path in options.items() if name.endswith("_path")}
    given = {"options": CaptureOptions(**options), "naming": naming or Naming(), "on_cycle": on_cycle}
    return Recorder(schedule, folder / "trace.json.gz", device=CPU, **given)


def events_of(cycle: Cycle) -> list[dict]:
    return json.loads(gzip.decompress(cycle.trace_path.read_bytes()))["traceEvents"]


def marks_of(cycle: Cycle) -> list[str]:
    return sorted(event["name"] for event in events_of(cycle) if event["name"].startswith("ProfilerStep#"))


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def whats(manifest: CaptureManifest) -> list[str]:
    return [remark.what for remark in manifest.downgrades]


def test_each_cycle_leaves_a_trace_of_its_own_steps_the_last_one_stacks_too_and_its_owner_is_told(tmp_path):
    cycles: list[Cycle] = []
    manifest = loop(recorder_of(tmp_path, TWO, on_cycle=cycles.append, stacks_path="stacks.txt"), 8)
    first, second = manifest.cycles
    assert tuple(cycles) == manifest.cycles
    assert marks_of(first) == ["ProfilerStep#2", "ProfilerStep#3"]
    assert marks_of(second) == ["ProfilerStep#6", "ProfilerStep#7"]
    assert sum(event["name"] == "aten::mm" for event in events_of(second)) == 2
    assert (first.first_step, first.steps_recorded, second.first_step) == (2, 2, 6)
    assert (manifest.steps_expected, manifest.steps_recorded) == (4, 4)
    assert (manifest.downgrades, manifest.warnings) == ((), ())
    assert [remark.what for remark in manifest.unavailable] == ["device events", "memory snapshot"]
    assert (manifest.trace_path, manifest.trace_bytes) == (first.trace_path, first.trace_path.stat().st_size)
    assert names_in(tmp_path) == ["stacks.txt", "trace_cycle1.json.gz", "trace_cycle2.json.gz"]
    assert (first.stacks, second.stacks) == (False, True)
    assert not any(event.get("cat") == "python_function" for event in events_of(first))
    assert "test_capture_recorder.py" in manifest.stacks_path.read_text()


def test_a_single_cycle_holds_the_stacks_and_says_so_and_ranks_do_not_overwrite_each_other(tmp_path):
    manifest = loop(recorder_of(tmp_path, ONE, naming=Naming(1, 2), stacks_path="stacks.txt"), 4)
    assert names_in(tmp_path) == ["rank1_stacks.txt", "rank1_trace.json.gz"]
    assert (manifest.rank, manifest.world_size) == (1, 2)
    manifest = loop(recorder_of(tmp_path, ONE, stacks_path="stacks.txt"), 4)
    assert manifest.trace_path == tmp_path / "trace.json.gz"
    assert manifest.stacks_path == tmp_path / "stacks.txt"
    assert [(remark.what, remark.is_foreseen) for remark in manifest.downgrades] == [("trace", True)]
    assert manifest.estimated_bytes is None and manifest.estimate_reason  # a size is known from the second cycle on


def test_the_recorder_starts_and_stops_at_any_depth_of_calls(tmp_path):
    def deep(act, levels=5):
        return deep(act, levels - 1) if levels else act()

    recorder = recorder_of(tmp_path, Schedule(0, 0, 4), stacks_path="stacks.txt")
    deep(recorder.start)
    work()
    recorder.step()
    manifest = deep(recorder.stop, 2)
    assert manifest.steps_recorded == 1 and manifest.stacks_path.stat().st_size > 0


def test_a_schedule_longer_than_the_loop_is_shortened_and_a_loop_without_steps_has_nothing_to_record(tmp_path):
    manifest = loop(recorder_of(tmp_path, Schedule(4, 4, 1, 3)), 7, total_steps=7)
    assert manifest.steps_recorded == 1
    [remark] = manifest.downgrades
    assert "1 x (2 wait + 4 warm-up + 1 active) instead" in remark.reason
    manifest = loop(recorder_of(tmp_path, ONE), 0, total_steps=0)
    assert (manifest.trace_path, manifest.cycles, whats(manifest)) == (None, (), ["schedule"])


def test_a_loop_that_ends_inside_a_recording_leaves_what_there_was(tmp_path):
    manifest = loop(recorder_of(tmp_path, Schedule(1, 1, 3, 2)), 3)
    (cycle,) = manifest.cycles
    assert (cycle.steps_expected, cycle.steps_recorded) == (3, 1)
    assert sum(event["name"] == "aten::mm" for event in events_of(cycle)) == 1
    assert [(remark.what, remark.reason) for remark in manifest.downgrades] == [
        ("steps", "1 of 3 are in the trace"),
        ("trace", "the loop ended inside it: its last ProfilerStep mark is no whole step"),
        ("cycles", "1 of 2; the loop ended after 3 steps"),
    ]


@pytest.mark.parametrize("steps", [0, 1, 2])  # in the wait, in the warm-up, at the very start of the recording
def test_a_loop_that_ends_before_the_recording_leaves_no_file(tmp_path, steps):
    manifest = loop(recorder_of(tmp_path, ONE, stacks_path="stacks.txt"), steps)
    assert (manifest.trace_path, manifest.steps_recorded, list(tmp_path.iterdir())) == (None, 0, [])
    assert whats(manifest)[-2:] == ["cycles", "stacks"]


def test_an_error_of_the_loop_passes_and_leaves_what_there_was_and_calls_out_of_turn_do_nothing(tmp_path):
    recorder = recorder_of(tmp_path, Schedule(0, 1, 3))
    recorder.step()
    with pytest.raises(ZeroDivisionError), recorder:
        recorder.start()
        for number in range(9):
            work()
            if number == 2:
                raise ZeroDivisionError
            recorder.step()
    manifest = recorder.manifest
    assert manifest.steps_recorded == 1 and manifest.trace_path.exists()
    recorder.step()
    recorder.start()
    assert recorder.stop() == manifest


def test_a_path_that_is_no_trace_is_refused_and_an_owner_that_fails_does_not_stop_the_loop(tmp_path):
    with pytest.raises(ValueError, match=r"trace\.txt.*\.json"):
        Recorder(ONE, Path("trace.txt"), device=CPU)
    manifest = loop(recorder_of(tmp_path, TWO, on_cycle=lambda cycle: 1 / 0), 8)
    assert (manifest.steps_recorded, whats(manifest)) == (4, ["on_cycle"])


def test_the_loop_pays_in_its_windows_alone_and_its_warnings_are_caught_only_at_their_ends(tmp_path, monkeypatch):
    at_work, caught_at, ended = [], [], []
    step, catch = Engine.step, warnings.catch_warnings
    monkeypatch.setattr(Engine, "step", lambda engine: at_work.append(len(ended)) or step(engine))
    monkeypatch.setattr(warnings, "catch_warnings", lambda **options: caught_at.append(len(ended)) or catch(**options))
    loop(recorder_of(tmp_path, Schedule(1, 1, 6)), 20, step=lambda: ended.append(1))
    assert sorted(set(caught_at)) == [1, 2, 8]  # it holds for all threads of the program
    assert at_work == list(range(2, 9))  # from the end of the warm-up to that of the recording


def failing(*args: object, **kwargs: object) -> None:
    raise RuntimeError("!stack.empty() INTERNAL ASSERT FAILED\nframe #0: c10::Error")


@pytest.mark.parametrize("method", ["start", "step", "export_chrome_trace"])
def test_a_failing_profiler_costs_its_cycle_alone(tmp_path, monkeypatch, method):
    recorder = recorder_of(tmp_path, TWO)
    recorder.start()
    with monkeypatch.context() as patch:
        patch.setattr(torch.profiler.profile, method, failing)
        for _ in range(4):
            recorder.step()
    for _ in range(4):
        recorder.step()
    manifest = recorder.stop()
    assert [cycle.steps_recorded for cycle in manifest.cycles] == [0, 2]
    assert manifest.downgrades[0].reason == "RuntimeError: !stack.empty() INTERNAL ASSERT FAILED"
    assert whats(manifest) == ["trace", "cycles"]


@pytest.mark.skipif(not hasattr(torch.autograd, "_is_kineto_stopped"), reason="this torch does not tell")
def test_a_device_that_stops_collecting_ends_the_cycle(tmp_path, monkeypatch):
    ended = []
    start = torch.profiler.profile.start_trace

    def start_as_on_a_device(profile):
        start(profile)
        profile.use_device = "cpu"

    monkeypatch.setattr(torch.profiler.profile, "start_trace", start_as_on_a_device)
    monkeypatch.setattr(torch.autograd, "_is_kineto_stopped", lambda: len(ended) == 2)
    manifest = loop(recorder_of(tmp_path, Schedule(0, 1, 3)), 4, step=lambda: ended.append(1))
    assert marks_of(manifest.cycles[0]) == ["ProfilerStep#1"]
    assert [remark.reason for remark in manifest.downgrades] == ["1 of 3 are in the trace"]
    assert "stopped early" in manifest.warnings[0]


@pytest.mark.parametrize(("total", "cycles"), [(None, [(True, 0), (False, 2)]), (7, [(True, 0)])])
def test_a_failure_with_stacks_is_tried_again_without_where_the_loop_is_long_enough(
    tmp_path, monkeypatch, total, cycles
):
    step = torch.profiler.profile.step
    monkeypatch.setattr(
        torch.profiler.profile, "step", lambda profile: failing() if profile.with_stack else step(profile)
    )
    manifest = loop(recorder_of(tmp_path, ONE, stacks_path="stacks.txt"), total or 8, total_steps=total)
    assert [(cycle.stacks, cycle.steps_recorded) for cycle in manifest.cycles] == cycles
    assert (manifest.trace_path, manifest.stacks_path) == (None if total else tmp_path / "trace.json.gz", None)
    assert {*whats(manifest)} - {"cycles"} == {"trace", "stacks"}


def test_a_device_that_fails_ends_the_recording_alone(tmp_path, monkeypatch):
    recorder = recorder_of(tmp_path, Schedule(0, 1, 1))
    recorder.start()
    monkeypatch.setattr("boundby.capture.engine.Engine.step", failing)
    recorder.step()
    manifest = recorder.stop()
    assert whats(manifest)[0] == "recorder"
    assert list(tmp_path.iterdir()) == []


def bulky() -> None:
    ones = torch.ones(2, 2)
    for _ in range(200):
        ones.add(ones)


def test_the_size_of_a_cycle_shortens_the_next_one(tmp_path):
    whole = loop(recorder_of(tmp_path / "whole", Schedule(0, 1, 4, 2)), 10, step=bulky)
    assert whole.estimated_bytes == whole.cycles[0].json_bytes
    limit = whole.cycles[0].json_bytes * 3 // 5
    part = loop(recorder_of(tmp_path / "part", Schedule(0, 1, 4, 2), max_trace_bytes=limit), 20, step=bulky)
    assert [cycle.steps_recorded for cycle in part.cycles] == [0, 2, 2]  # one more in place of the one that was too big
    assert whats(part) == ["steps"]
    assert all(cycle.json_bytes <= limit for cycle in part.cycles[1:])


@pytest.mark.parametrize(
    ("schedule", "steps", "total", "recorded", "kept"),
    [
        (ONE, 40, None, [0, 0, 1], "trace.json.gz"),
        (ONE, 4, 4, [2], "trace.json.gz"),
        (ONE, 6, 6, [2], "trace.json.gz"),
        (ONE, 7, 7, [0, 1], "trace.json.gz"),  # a second cycle, of one step, ends after 7
        (TWO, 8, 8, [0, 1], "trace_cycle2.json.gz"),
        (Schedule(1, 1, 3, 2), 4, 100, [2], "trace_cycle1.json.gz"),  # the loop ends in it
    ],
)
def test_of_traces_above_the_limit_one_is_kept_where_no_smaller_one_can_follow(
    tmp_path, schedule, steps, total, recorded, kept
):
    manifest = loop(recorder_of(tmp_path, schedule, max_trace_bytes=10), steps, total_steps=total)
    assert [cycle.steps_recorded for cycle in manifest.cycles] == recorded
    last = manifest.cycles[-1]
    assert (last.trace_path, names_in(tmp_path)) == (tmp_path / kept, [kept])
    assert set(marks_of(last)) >= {f"ProfilerStep#{last.first_step + number}" for number in range(recorded[-1])}
    assert "kept all the same" in next(
        downgrade.reason for downgrade in manifest.downgrades if downgrade.what == "trace"
    )
    assert [what for what in whats(manifest) if what != "cycles"][-1] == "trace"


def test_a_trace_that_is_too_large_to_be_read_is_not_kept(tmp_path, monkeypatch):
    monkeypatch.setattr("boundby.capture.recorder.MAX_JSON_BYTES", 20)
    manifest = loop(recorder_of(tmp_path, ONE, max_trace_bytes=10), 4, total_steps=4)
    assert (manifest.cycles[0].steps_recorded, manifest.trace_path, names_in(tmp_path)) == (0, None, [])


NAME = Path("out") / "trace.json.gz"


@pytest.mark.parametrize(
    ("field", "value", "least"),
    [
        *(("wait", -1, 0), ("warmup", -1, 0), ("active", 0, 1), ("repeat", -1, 1), ("every", -1, 0)),
        *(("repeat", 0, 1), ("active", 1.5, 1), ("wait", "4", 0), ("warmup", None, 0), ("repeat", True, 1)),
    ],
)
def test_a_schedule_that_cannot_be_names_the_field(field, value, least):
    with pytest.raises(ValueError, match=rf"^schedule: {field} is {value!r}; give an int of at least {least}"):
        Schedule(**{"wait": 1, "warmup": 1, "active": 1, field: value})


def test_a_schedule_of_parameters_names_them_as_the_user_did():
    given = {"rest": 4, "warm": 3, "record": 2, "cycles": 5, "apart": 60}
    assert Schedule.of_parameters(**given) == Schedule(4, 3, 2, 5, 60)
    with pytest.raises(ValueError, match=r"^record is 2\.0; give an int of at least 1$"):
        Schedule.of_parameters(**given | {"record": 2.0})


@pytest.mark.parametrize(
    ("schedule", "steps", "total", "fitted"),
    [
        (Schedule(4, 4, 1), 9, 9, Schedule(4, 4, 1)),
        (Schedule(1, 1, 2, 3), 12, 11, Schedule(1, 1, 2, 2)),
        (Schedule(1, 1, 2, 3, every=2), 12, 12, Schedule(1, 1, 2, 3, every=2)),  # cycles do not overlap
        (Schedule(1, 1, 2, 3, every=10), 24, 13, Schedule(1, 1, 2, 1, every=10)),
        (Schedule(1, 1, 2, 3, every=10), 24, 14, Schedule(1, 1, 2, 2, every=10)),
        (Schedule(4, 4, 2), 10, 7, Schedule(1, 4, 2)),
        (Schedule(4, 4, 2), 10, 4, Schedule(0, 2, 2)),
        (Schedule(4, 4, 2, 5), 50, 2, Schedule(0, 1, 1)),
        (Schedule(4, 0, 2), 6, 1, Schedule(0, 0, 1)),
        (Schedule(4, 4, 2), 10, 1, Schedule(0, 0, 1)),
        (Schedule(4, 4, 2), 10, 0, None),
    ],
)
def test_a_schedule_is_shortened_to_the_loop(schedule, steps, total, fitted):
    assert (schedule.steps, schedule.fitted(total)) == (steps, fitted)
    assert fitted is None or fitted.steps <= total


def test_a_span_follows_the_actions_of_torchs_own_schedule():
    span = Span(first=7, warmup=2, active=3)
    own = torch.profiler.schedule(wait=0, warmup=2, active=3, repeat=1)
    assert [span.action(7 + number) for number in range(7)] == [own(number) for number in range(7)]
    assert span.action(0) == ProfilerAction.WARMUP  # torch asks for it before it can be told the first step


def test_names_carry_what_would_collide():
    assert Naming().path(NAME) == NAME
    assert Naming().path(NAME, cycle=2) == Path("out/trace_cycle2.json.gz")
    assert Naming(3, 8).path(NAME) == Path("out/rank3_trace.json.gz")
    assert Naming(3, 8).path(NAME, cycle=1) == Path("out/rank3_trace_cycle1.json.gz")
    assert Naming(0, 2).path(Path("stacks")) == Path("rank0_stacks")


@pytest.mark.parametrize(
    ("variables", "naming"),
    [
        ({}, Naming(0, 1)),
        ({"RANK": "2", "WORLD_SIZE": "4"}, Naming(2, 4)),
        ({"RANK": "2"}, Naming(2, 3)),
        ({"RANK": "two"}, Naming(0, 1)),
    ],
)
def test_the_rank_comes_from_the_launcher_unless_there_is_a_process_group(monkeypatch, variables, naming):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert naming_of_process() == naming
    for name, answer in {"is_initialized": True, "get_rank": 1, "get_world_size": 2}.items():
        monkeypatch.setattr(torch.distributed, name, lambda answer=answer: answer)
    assert naming_of_process() == Naming(1, 2)


@pytest.mark.parametrize(
    ("environment", "variable"),
    [
        ({}, None),
        ({"NSYS_PROFILING_SESSION_ID": "17"}, "NSYS_PROFILING_SESSION_ID"),
        ({"NV_NSIGHT_INJECTION_TRANSPORT_TYPE": "2"}, "NV_NSIGHT_INJECTION_TRANSPORT_TYPE"),
        ({"NVPROF_ID": "1"}, "NVPROF_ID"),
        ({"CUDA_INJECTION64_PATH": "/opt/nvidia/nsight-systems/libcupti.so"}, "CUDA_INJECTION64_PATH"),
        ({"LD_PRELOAD": "/x/libToolsInjectionProxy64.so"}, "LD_PRELOAD"),
        ({"CUDA_INJECTION64_PATH": "/opt/other/tool.so", "LD_PRELOAD": "libjemalloc.so"}, None),
    ],
)
def test_a_nsight_session_is_recognised(environment, variable):
    assert nsight_variable(environment) == variable


def test_a_content_too_large_gives_up_steps_then_stacks_then_shapes():
    content: Content | None = Content(4, shapes=True, memory=True, stacks=True)
    within = [content.within(step_bytes, 300) for step_bytes in (75.0, 76.0, 150.0, 1000.0)]
    assert [(fitting.steps, remark is None) for fitting, remark in within] == [
        (4, True),
        *((n, False) for n in (3, 2, 1)),
    ]
    given_up = []
    while content:
        content, remark = content.less(json_bytes=1000, limit=300)
        given_up.append((remark.what, content))
    assert given_up == [
        ("steps", Content(1, shapes=True, memory=True, stacks=True)),
        ("stacks", Content(1, shapes=True, memory=True)),
        ("shapes and memory", Content(1, shapes=False, memory=False)),
        ("trace", None),
    ]
