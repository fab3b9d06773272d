"""Loops whose parts take known times: what each fix is predicted to gain, and what it gains in rounds of steps."""

import dataclasses
import math
from types import SimpleNamespace

import pytest
import torch

from boundby.timing.timer import Timer
from boundby.training import fixes
from boundby.training.fixes import Recipe, try_fixes
from tests.fakes import FakeClock, FakeWatch

CPU = torch.device("cpu")
STEPS = 64
DATA_S, FORWARD_S, UPDATE_S = 2.0**-6, 2.0**-5, 2.0**-6


class Model(torch.nn.Module):
    """A parameter whose forward takes half as long under autocast, and a quarter compiled."""

    def __init__(self, clock):
        super().__init__()
        self.weight, self.clock, self.slow = torch.nn.Parameter(torch.ones(())), clock, 1.0

    def forward(self):
        self.clock.advance(self.slow * FORWARD_S * (0.5 if torch.is_autocast_enabled("cpu") else 1.0))
        return self.weight


class Batches:
    """Batches made one after the other in the loop, or ahead of it by workers: two for each."""

    def __init__(self, clock, workers):
        self.clock, self.workers = clock, workers

    def __iter__(self):
        ready, asked = [self.clock.now], [self.clock.now] * 2 * self.workers
        for _ in range(STEPS):
            if not self.workers:
                self.clock.advance(DATA_S)
            else:
                self.clock.spent_beside_s += DATA_S
                ready.append(max(ready[-1], asked.pop(0)) + DATA_S / self.workers)
                self.clock.now = max(self.clock.now, ready[-1])
                asked.append(self.clock.now)
            yield self.clock.now


@pytest.fixture
def clock():
    clock = FakeClock()
    clock.spent_beside_s = 0.0
    return clock


@pytest.fixture
def recipe(clock, monkeypatch):
    monkeypatch.setattr(fixes, "usable_cpus", lambda: {0, 1, 2, 3, 4, 5, 6, 7})
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    monkeypatch.setattr(fixes, "compile_obstacle", lambda device: None)
    monkeypatch.setattr(torch, "compile", lambda model, options: (setattr(model, "slow", 0.25), model)[1])

    def update(is_fused):
        return lambda: clock.advance(UPDATE_S * (0.25 if is_fused else 1.0))

    return Recipe(
        CPU,
        model=lambda: Model(clock),
        optimizer=lambda parameters, is_fused: SimpleNamespace(step=update(is_fused), zero_grad=lambda: None),
        batches=lambda workers, pins: Batches(clock, workers),
        move=lambda batch: batch,
        loss=lambda model, batch: model(),
    )


def tried(recipe, clock, **options):
    tried = try_fixes(recipe, Timer(clock), budget_s=600.0, watch=FakeWatch(), pause=clock.advance, **options)
    return {trial.fix.kind: trial for trial in tried.trials}, {refused.fix.kind: refused for refused in tried.untried}


def test_each_fix_gains_what_its_part_alone_predicts_and_never_more_than_its_part_takes(recipe, clock):
    trials, untried = tried(recipe, clock)
    step_s = DATA_S + FORWARD_S + UPDATE_S
    gained = {"worker_processes": DATA_S, "autocast": FORWARD_S / 2, "fused_optimizer": UPDATE_S * 0.75}
    for kind, saved_s in {**gained, "fuse_operators": FORWARD_S * 0.75}.items():
        assert trials[kind].measured.value == pytest.approx(step_s / (step_s - saved_s), rel=0.01), kind
        assert trials[kind].is_within_bound
    for kind in gained:
        predicted = trials[kind].predicted
        assert predicted.low <= trials[kind].measured.value <= predicted.high, kind
    assert trials["fuse_operators"].predicted is None, "nobody has calibrated a compiler"
    assert {kind: refused.reason for kind, refused in untried.items()} == {
        "pin_memory": "it is pinned for copies to a GPU"
    }


@pytest.mark.parametrize(("cores", "low", "high"), [(8, 4 / 3, 4 / 3), (2, 1, 4 / 3), (1, 1, 1)])
def test_loading_takes_its_own_time_from_steps_that_use_all_cores(recipe, clock, monkeypatch, cores, low, high):
    monkeypatch.setattr(fixes, "usable_cpus", lambda: set(range(cores)))
    monkeypatch.setattr(fixes, "TICK_S", 0.0)
    predicted = tried(recipe, clock, spent_beside_s=lambda: clock.spent_beside_s)[0]["worker_processes"].predicted
    ends = predicted.low * math.exp(fixes.REST_ERROR), predicted.high
    assert ends == pytest.approx((low, high), rel=0.03)


class Cold(Batches):
    """Batches after which the next update waits for memory."""

    def __iter__(self):
        for batch in super().__iter__():
            self.clock.is_cold = True
            yield batch


def test_what_a_round_adds_to_an_update_stays_with_a_quicker_one(recipe, clock):
    def made_optimizer(parameters, is_fused):
        def step():
            clock.advance(UPDATE_S * (0.5 if is_fused else 1.0) + (UPDATE_S if clock.is_cold else 0.0))
            clock.is_cold = False

        return SimpleNamespace(step=step, zero_grad=lambda: None)

    made = dataclasses.replace(recipe, batches=lambda workers, pins: Cold(clock, workers), optimizer=made_optimizer)
    trial = tried(made, clock)[0]["fused_optimizer"]
    step_s = DATA_S + FORWARD_S + 2 * UPDATE_S
    assert trial.measured.value == pytest.approx(step_s / (step_s - UPDATE_S / 2), rel=0.01)
    assert trial.predicted.value == pytest.approx(trial.measured.value, rel=0.01)


class Hurried(Batches):
    """Batches that workers have ready after a pause, and make in twice a step when asked without one."""

    def __iter__(self):
        given = None
        for _ in range(STEPS):
            if not self.workers or given == self.clock.now:
                self.clock.advance(2 * (FORWARD_S + UPDATE_S) if self.workers else DATA_S)
            given = self.clock.now
            yield given


def test_how_long_workers_take_without_pause_is_no_floor_of_a_round_that_leaves_them_time(recipe, clock):
    made = dataclasses.replace(recipe, batches=lambda workers, pins: Hurried(clock, workers))
    trial = tried(made, clock)[0]["worker_processes"]
    assert trial.measured.value == pytest.approx(4 / 3, rel=0.01)
    assert trial.predicted.low < trial.measured.value <= trial.predicted.high


def test_what_cannot_be_tried_is_named_with_the_reason_and_the_others_stand(recipe, clock, monkeypatch):
    def without_bfloat16(*_, **__):
        raise RuntimeError("no bfloat16 here")

    monkeypatch.setattr(torch, "autocast", without_bfloat16)
    monkeypatch.setattr(fixes, "compile_obstacle", lambda device: "the C++ compiler g++ is missing")
    trials, untried = tried(dataclasses.replace(recipe, workers=4, is_pinned=True), clock)
    assert set(trials) == {"fused_optimizer"}
    assert {kind: (refused.kind, refused.reason) for kind, refused in untried.items()} == {
        "worker_processes": ("not_possible", "4 load it already"),
        "pin_memory": ("not_possible", "it is pinned already"),
        "autocast": ("failed", "RuntimeError: no bfloat16 here"),
        "fuse_operators": ("not_possible", "the C++ compiler g++ is missing"),
    }
