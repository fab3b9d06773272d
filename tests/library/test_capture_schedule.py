"""The arithmetic of cycles, names and sizes."""

from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerAction

from boundby.capture import Naming, Schedule, naming_of_process, nsight_variable
from boundby.capture.schedule import Content, Span

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
