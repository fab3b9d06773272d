"""The stages of a Trainer's steps, on a clock that only the parts of the training move."""

from typing import NamedTuple

import pytest

from boundby.integrations.transformers import ProfCallback
from boundby.training import StageTimes, read_stage_times
from tests import trainer_runs
from tests.fakes import FakeNanoseconds
from tests.trainer_runs import EVALUATING, losses, on_watch


class Run(NamedTuple):
    times: StageTimes
    accumulate: int
    is_attached: bool

    def per_step(self, name: str) -> list[int]:
        """Return the ns of a stage in each step that is like any other: the loader reads one batch ahead."""
        rows = self.times.rows_of(name)
        return [int(rows["host_ns"][rows["step"] == step].sum()) for step in range(1, 8)]


@pytest.fixture(
    scope="module",
    params=[(1, False), (2, False), (1, True), (2, True)],
    ids=["alone", "alone, 2 micro-batches", "attached", "attached, 2 micro-batches"],
)
def run(request, tmp_path_factory):
    accumulate, is_attached = request.param
    folder, watch = tmp_path_factory.mktemp("run"), FakeNanoseconds()
    callback = ProfCallback(str(folder), profile_memory=False, with_stack=False)
    settings = EVALUATING | {"save_strategy": "no", "gradient_accumulation_steps": accumulate}
    with on_watch(watch):
        losses(folder, callback, attach=is_attached, watch=watch, **settings)
    return Run(read_stage_times(folder), accumulate, is_attached)


def test_forward_backward_clip_and_optimizer_are_told_apart_and_so_are_callbacks_when_attached(run):
    assert run.per_step("forward") == [run.accumulate * trainer_runs.FORWARD] * 7
    assert run.per_step("optimizer") == [trainer_runs.OPTIMIZER] * 7
    assert run.per_step("callbacks" if run.is_attached else "logging") == [trainer_runs.CALLBACK] * 7
    backward, clip = run.accumulate * trainer_runs.BACKWARD, trainer_runs.CLIP
    if run.is_attached:
        assert (run.per_step("backward"), run.per_step("clip")) == ([backward] * 7, [clip] * 7)
    else:
        assert run.per_step("backward") == [backward + clip] * 7, "the events do not tell when clipping begins"


def test_data_holds_the_copies_to_the_device_which_an_attached_callback_knows(run):
    copies = run.accumulate * trainer_runs.TRANSFER
    data = run.accumulate * trainer_runs.LOAD + copies
    assert run.per_step("data") == [data] * 7
    if run.is_attached:
        assert run.per_step("h2d") == [copies] * 7
        assert set(run.times.rows_of("data")["self_ns"][1:8].tolist()) == {data - copies}


def test_evaluations_are_in_no_step_and_not_in_forward_and_nothing_is_out_of_order(run):
    evaluated = 2 * (trainer_runs.EVALUATE + trainer_runs.LOAD + trainer_runs.TRANSFER)
    assert run.times.rows_of("evaluation", "excluded")["host_ns"].tolist() == [evaluated] * 3
    steps = run.times.rows_of("step", "step")
    micro_batch = trainer_runs.LOAD + trainer_runs.TRANSFER + trainer_runs.FORWARD + trainer_runs.BACKWARD
    whole = run.accumulate * micro_batch + trainer_runs.CLIP + trainer_runs.OPTIMIZER + trainer_runs.CALLBACK
    assert steps["host_ns"][1:8].tolist() == [whole] * 7
    assert run.times.remarks == () and run.times.open == ()
    assert run.times.status == "finished" and run.times.last_step == 9
    assert {each.name for each in run.times.stages if each.kind == "span"} == {"epoch"}
