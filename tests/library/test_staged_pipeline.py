"""Worker processes: outputs of the whole model, labelled times, errors that say why, and no process left behind."""

import psutil
import pytest
import torch
from torch import nn

from boundby.partition import Link, Links
from boundby.staged.absent import CutError
from boundby.staged.cutting import are_equal
from boundby.staged.pipeline import Pipeline, StageError
from boundby.staged.places import Workers, places_of, share_cores
from boundby.staged.running import measured
from tests.staged_plans import Fails, plan_of

PATIENCE_S = 60


def gone(pids) -> bool:
    """Tell whether all processes end; waits for them."""
    living = [psutil.Process(each) for each in pids if psutil.pid_exists(each)]
    return not psutil.wait_procs(living, timeout=PATIENCE_S)[1]


class Counts(nn.Sequential):
    """Gives, beside a tensor, how many of its inputs are above a half, as a number."""

    def forward(self, x):
        return {"out": super().forward(x), "above": int((x > 0.5).sum()), "note": None}


def test_workers_give_the_outputs_of_the_whole_model_and_labelled_times_until_one_fails_and_all_end():
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), Fails(), nn.Linear(64, 8))
    model = Counts(layers).eval()
    nn.init.constant_(layers[0].bias, 9.0)  # so that a random input stays positive, and its negative does not
    x, y = torch.rand(2, 3, 8) * torch.tensor([1.0, 0.5]).reshape(2, 1, 1)
    workers = Workers(links=Links(default=Link(1e6, 1e-3)))  # carries 864 bytes in 1.864 ms
    with (
        pytest.raises(StageError, match=r"stage 1 \(node_1\): ArithmeticError: a negative number"),
        Pipeline(model, plan_of(["0.0", "0.1", "0.2", "0.3"], 2), x, workers) as pipeline,
    ):
        pids = pipeline.pids
        assert all(map(psutil.pid_exists, pids)) and len(pids) == 2
        with torch.no_grad():
            wanted = model(x), model(y)
            layers[3].bias.add_(1)  # of the caller's model: the workers have weights of their own
        assert are_equal(pipeline.infer(x), wanted[0]) and are_equal(pipeline.infer(y), wanted[1])
        assert wanted[0]["above"] != wanted[1]["above"]
        with pytest.raises(CutError, match="other shapes"):
            pipeline.infer(x[:1])
        found = measured(pipeline, requests=6, singles=3, warmup=1)
        at_work = [[len(each.begin) > 0 for each in pipeline.occupy(who, 0.0)] for who in ([1], [0], [0, 1])]
        assert at_work == [[False, True], [True, False], [True, True]]
        longer = (pipeline.occupy([0, 1], 0.02) for _ in range(100))  # who waits for a core may compute but once
        assert any(
            all(each.end[-1] - each.begin[0] >= 0.015e9 and len(each.begin) > 1 for each in both) for both in longer
        )
        assert are_equal(pipeline.infer(x), wanted[0])
        pipeline.infer(-1e3 * x)
    assert gone(pids)
    assert found.label == "emulated" and [each.label for each in found.transfers] == ["emulated"]
    assert found.transfers[0].size_bytes == 4 * (3 * 64 + 3 * 8)  # and the input, which is counted in
    assert found.transfers[0].seconds.minimum >= 1.864e-3  # what sleeps does so for at least this long
    assert [each.weight_bytes for each in found.stages] == [4 * (8 * 64 + 64), 4 * (64 * 8 + 8)]
    assert [each.units for each in found.stages] == [("0.0", "0.1"), ("0.2", "0.3")]
    assert [each.compute.n for each in found.stages] == [3, 3] and found.latency.n == 3
    assert [each.busy_compute.n for each in found.stages] == [6, 6] and found.period.n == 4
    parts = sum(each.compute.minimum for each in found.stages) + found.transfers[0].seconds.minimum
    assert parts <= found.latency.minimum and found.first_finish_s < found.last_finish_s
    assert any("emulated" in each for each in found.doubts)


def test_workers_end_when_the_start_is_interrupted(monkeypatch):
    pids = []

    def interrupted(pipeline):
        pids.extend(pipeline.pids)
        raise KeyboardInterrupt

    monkeypatch.setattr(Pipeline, "_check", interrupted)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).eval()
    with pytest.raises(KeyboardInterrupt), Pipeline(model, plan_of("01", 1), torch.ones(1, 4)):
        pass
    assert len(pids) == 2 and gone(pids)


def test_a_model_that_cannot_be_sent_is_refused_before_any_worker_runs():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).eval()
    model.note = lambda: None
    pipeline = Pipeline(model, plan_of("01", 1), torch.ones(1, 4))
    with pytest.raises(CutError, match="cannot be sent to the worker of node_0"), pipeline:
        pass
    assert pipeline.pids == ()


def test_places_have_cores_of_their_own_where_there_are_enough(monkeypatch):
    monkeypatch.setattr("boundby.staged.places.usable_cpus", lambda: {7, 2, 5, 3})
    plan = plan_of("01", 1)
    assert [each.cores for each in places_of(plan, Workers(2))] == [(2, 3), (5, 7)]
    assert [each.cores for each in places_of(plan, Workers(3))] == [(), ()]
    assert [share_cores(places_of(plan, Workers(threads))) for threads in (1, 2, 3)] == [False, False, True]
    assert [each.cores for each in places_of(plan, Workers(is_pinned=False))] == [(), ()]


def test_a_device_that_is_not_there_is_refused_with_the_way_out():
    with pytest.raises(ValueError, match="node_1 cannot be run here: .* simulate"):
        places_of(plan_of("01", 1), Workers(devices={"node_1": "cuda:63"}))
    with pytest.raises(ValueError, match="devices names"):
        places_of(plan_of("01", 1), Workers(devices={"node_9": "cpu"}))


def test_links_are_not_emulated_for_a_plan_without_overlap():
    with pytest.raises(ValueError, match="overlap=True"):
        places_of(plan_of("01", 1, overlap=False), Workers(links=Links()))
