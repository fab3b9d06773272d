"""Who spent the time: attribution by call path, exact to the nanosecond, and what must not disturb it."""

import copy
import dataclasses
import gc
import inspect
import threading
import warnings
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from boundby.layers.engine import ObservabilityEngine
from boundby.layers.judgement import kept_waiting
from boundby.layers.passes import ChangedProgramError, see_program, tensors_in
from boundby.layers.probes import CallLog, CallTimes, CallTree, attached, find_targets, timing_probe
from boundby.layers.timing import corrected
from tests.fakes import FakeClock
from tests.layer_cases import CASES, Core, Does, misses, takes
from tests.layer_models import Calls, Takes, families, instruments, layer, profiled, self_ns, small

ONE = torch.ones(1)


@pytest.fixture
def clock():
    return FakeClock(0)


class Fails(Takes):
    """Takes its time, then raises `error` if there is one."""

    error: type[BaseException] | None = ValueError

    def forward(self, x: Any) -> Any:
        super().forward(x)
        if self.error is not None:
            raise self.error("broken")
        return x


def is_bare(model: nn.Module) -> bool:
    return all("forward" not in module.__dict__ for module in model.modules())


@pytest.mark.parametrize("case", CASES)
def test_every_layer_is_found_to_take_what_it_took_whatever_way_it_is_called(case, tmp_path):
    core = Core()
    made = CASES[case](core)
    assert misses(profiled(made.model, made.inputs, tmp_path, 30, clock=core).profile, made) == []


def test_a_layer_that_waits_and_one_whose_core_others_had_say_so(tmp_path):
    core = Core()

    def others(self: Any, x: Any) -> Any:
        core.compute(1000)
        core.wait(4000 if self.runs in (12, 30) else 0)
        return x

    pushed = Does(others)
    model = nn.Sequential(takes(core, 5000, "wait"), takes(core, 1000), pushed)
    profile = profiled(model, ONE, tmp_path, 20, clock=core).profile
    clocks = {layer.path: (layer.cpu_self_s, layer.undisturbed_self_s) for layer in profile.layers}
    assert clocks == {"": (None, None), "0": (0, None), "1": (None, None), "2": (None, pytest.approx(1e-3))}
    assert "it computed for at most 0 µs of its self time of 5.00 ms" in layer(profile, "0").doubts[0]
    mean = layer(profile, "2").host_self_s.mean
    runs = round((mean - 1e-3) * 20 / 4e-3)  # of the two, those that were timed with probes
    assert 1 <= runs <= 2 and f"without the {runs} of 20 runs" in layer(profile, "2").doubts[0]
    said = [doubt.partition(";")[0] for doubt in profile.doubts if doubt.startswith(("waits", "disturbed"))]
    assert said == [
        "waits: 0 waited for part of the time",
        "disturbed: some runs had to wait, which made the means of 2 longer",
    ]
    assert kept_waiting([1.0] * 4, [0.0, 0.02, 0.07, 0.0]) == {2} and kept_waiting([1.0], []) == frozenset()


def test_time_is_split_between_a_module_and_those_inside_to_the_nanosecond(clock, tmp_path):
    model = Calls(clock, 10, a=Takes(clock, 1000), b=Calls(clock, 7, c=Takes(clock, 300), d=Takes(clock, 20)))
    profile = profiled(model, ONE, tmp_path, clock=clock).profile
    assert layer(profile, "b").host_inclusive_s.median == pytest.approx(334e-9)
    assert layer(profile, "").host_inclusive_s.median == pytest.approx(1354e-9)
    assert profile.coverage.ratio == pytest.approx(1) and profile.coverage.status == "pass"
    assert profile.coverage.leaf_ratio == pytest.approx(1320 / 1354)


def test_a_shared_module_has_a_path_under_each_caller_and_goes_by_the_name_nearest_to_it(clock, tmp_path):
    shared = Takes(clock, 100)
    shared.weight = nn.Parameter(torch.ones(5))
    model = Calls(clock, 0, a=Calls(clock, 1, s=shared), b=Calls(clock, 2, times=2, s=shared))
    profile = profiled(model, ONE, tmp_path, clock=clock).profile
    assert layer(profile, "a.s").storages == layer(profile, "b.s").storages
    assert layer(profile, "").parameters == 5, "shared weights count once"
    model = Calls(clock, 0, a=Calls(clock, 0, a=Calls(clock, 1, s=shared), s=shared))
    spent = self_ns(profiled(model, ONE, tmp_path, clock=clock).profile)
    assert spent == {"": 0, "a": 0, "a.a": 1, "a.a.s": 100, "a.s": 100}


def test_a_module_that_is_never_called_is_listed_without_times_and_keeps_its_parameters(clock, tmp_path):
    inner = {"a": Takes(clock, 5), "b": Calls(clock, 0, c=nn.Linear(2, 3)), "listed": nn.ModuleList()}
    model = Does(lambda m, x: m.a(x), **inner)
    profile = profiled(model, ONE, tmp_path, clock=clock).profile
    unused = layer(profile, "b.c")
    assert (unused.calls, unused.self_s, unused.parameters, unused.parent) == (0, None, 9, "b")
    assert [layer.path for layer in profile.layers] == ["", "a", "b", "b.c"]
    attention = nn.MultiheadAttention(8, 2, batch_first=True).eval()  # uses weights of a layer that it does not call
    profile = profiled(attention, (torch.ones(1, 3, 8),) * 3, tmp_path).profile
    projection = layer(profile, "out_proj")
    assert (projection.calls, projection.self_s, projection.parameters) == (0, None, 8 * 8 + 8)
    assert layer(profile, "").host_self_s.median == pytest.approx(layer(profile, "").host_inclusive_s.median)


def test_keyword_arguments_none_and_dataclasses_show_their_tensors(clock, tmp_path):
    @dataclasses.dataclass
    class Output:
        first: torch.Tensor
        second: Any

    class Gives(nn.Module):
        def forward(self, *, x, mask=None, more=None):
            return Output(x, {"y": [x.double(), None]})

    class Passes(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Gives()

        def forward(self, x, extra):
            return self.inner(x=x, more=extra)

    inputs = {"x": torch.ones(2, 3), "extra": {"k": (torch.ones(1).int(), "text")}}
    profile = profiled(Passes(), inputs, tmp_path).profile
    inner = layer(profile, "inner")
    assert inner.input_shapes == ("float32[2, 3]", "int32[1]")
    assert inner.output_shapes == ("float32[2, 3]", "float64[2, 3]")
    assert inner.output_bytes == 6 * 4 + 6 * 8
    grows = Does(lambda m, x: m.a(torch.cat([m.a(x), x])), a=nn.Identity())
    inner = layer(profiled(grows, ONE, tmp_path).profile, "a")
    assert (inner.input_shapes, inner.output_bytes) == (("float32[1]",), 4 + 8)
    assert "later calls have other shapes" in inner.doubts[0]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_interrupted_model_is_left_bare_and_profiles_right_afterwards(error, clock, tmp_path):
    failing = Fails(clock, 100)
    failing.error = None
    model = Calls(clock, 1, a=Calls(clock, 2, b=failing), c=Takes(clock, 30))
    engine = ObservabilityEngine(model, tmp_path, instruments=instruments(clock))
    engine.warmup(ONE, 1)
    failing.error = error
    with pytest.raises(error, match="broken"):
        engine.profile(ONE, 2)
    assert is_bare(model)
    failing.error = None
    assert self_ns(engine.profile(ONE, 2).profile) == {"": 2, "a": 2, "a.b": 100, "c": 30}
    assert "error: " in (tmp_path / "logs" / "Calls_profile.log").read_text()


@pytest.mark.parametrize("error", [ValueError, RuntimeError])
def test_an_error_of_the_model_passes_through_whichever_run_it_comes_in(error, clock, tmp_path):
    def failing(m, x):
        clock.advance(100)
        if m.runs == m.times:
            raise error("broken")
        return x + 1

    model = Does(failing)
    model.times = 0  # the run to fail in
    ObservabilityEngine(model, tmp_path, instruments=instruments(clock)).profile(ONE, 1)
    for run in range(2, model.runs + 1):
        model.runs, model.times = 0, run
        with pytest.raises(error, match="broken"):
            ObservabilityEngine(model, tmp_path, instruments=instruments(clock)).profile(ONE, 1)


def test_a_run_cut_off_inside_a_layer_leaves_no_trace_in_the_next(clock):
    model = Calls(clock, 1, a=Takes(clock, 5), b=Fails(clock, 100))
    targets = find_targets(model)
    tree, log = CallTree(targets.names), CallLog()
    with attached(targets, timing_probe(log, clock)):
        for _ in range(2):
            log.clear()
            with pytest.raises(ValueError, match="broken"):
                model(ONE)
    times = tree.times(log)
    spent_by_path = {call.path: (spent.self_ns, spent.calls) for call, spent in times.items()}
    assert spent_by_path == {"": (2, 1), "a": (5, 1), "b": (100, 1)}


def test_a_call_from_another_thread_belongs_to_no_layer_of_this_one(clock, tmp_path):
    def threaded(m, x):
        clock.advance(5)
        worker = threading.Thread(target=m.a, args=(x,))
        worker.start()
        worker.join()
        return m.b(x)

    model = Does(threaded, a=Calls(clock, 1, c=Takes(clock, 10)), b=Takes(clock, 200))
    profile = profiled(model, ONE, tmp_path, clock=clock).profile
    apart = layer(profile, "(other thread)>a")
    assert apart.is_concurrent and "another thread" in apart.doubts[0] and apart.parent == ""
    assert self_ns(profile) == {"": 16, "b": 200, "(other thread)>a": 1, "(other thread)>a.c": 10}
    assert any(doubt.startswith("threads: 2 layers") for doubt in profile.doubts)


def test_threads_that_run_the_same_model_at_once_do_not_mix(clock):
    model = Calls(clock, 0, a=Takes(clock, 0))
    targets = find_targets(model)
    tree, log = CallTree(targets.names), CallLog()
    with attached(targets, timing_probe(log, clock)):
        workers = [threading.Thread(target=lambda: [model(ONE) for _ in range(200)]) for _ in range(4)]
        for worker in workers:
            worker.start()
        for _ in range(200):
            model(ONE)
        for worker in workers:
            worker.join()
    counted = {call.path: spent.calls for call, spent in tree.times(log).items()}
    assert counted == {"": 200, "a": 200, "(other thread)>(model)": 800, "(other thread)>(model).a": 800}


def test_a_scripted_layer_is_left_alone_and_a_scripted_model_refused(tmp_path):
    class Scale(nn.Module):
        def forward(self, x):
            return x * 2

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scripted = torch.jit.script(Scale())
    profile = profiled(nn.Sequential(scripted, nn.Linear(1, 1)), ONE, tmp_path).profile
    assert layer(profile, "0").calls == 0 and "ScriptModule" in layer(profile, "0").doubts[0]
    assert any("ScriptModule" in doubt for doubt in profile.doubts)
    with pytest.raises(ValueError, match="ScriptModule"):
        find_targets(scripted)


def test_a_compiled_model_is_refused_and_layers_that_data_parallel_copies_are_left_alone():
    inner = nn.Linear(2, 2)
    inner.compile(backend="eager")

    class Decorated(nn.Module):
        @torch.compile(backend="eager")
        def forward(self, x):
            return x

    for model in (torch.compile(nn.Linear(2, 2), backend="eager"), nn.Sequential(inner), Decorated()):
        with pytest.raises(ValueError, match="compiled by torch.compile"):
            find_targets(model)
    targets = find_targets(nn.DataParallel(nn.Sequential(nn.Linear(2, 2))))
    assert [targets.names[index] for index in targets.probed] == [("",)]


@pytest.mark.parametrize("family", families())
def test_a_watched_model_runs_the_same_operators_and_gives_the_same_result(family):
    model, inputs = small(family)
    run = (lambda: model(**inputs)) if isinstance(inputs, dict) else (lambda: model(inputs))
    targets = find_targets(model)
    with torch.inference_mode():
        plain, expected = see_program(run).calls, run()
        with attached(targets, timing_probe(CallLog(), FakeClock(0))):
            watched, result = see_program(run).calls, run()
    assert watched == plain
    pairs = list(zip(tensors_in(result), tensors_in(expected), strict=True))
    assert pairs and all(torch.equal(one, other) for one, other in pairs)
    assert any("_transformer_encoder_layer_fwd" in name for name in plain) == (family == "encoder")


def test_a_model_that_notices_the_probes_is_refused(tmp_path):
    class Notices(nn.Linear):
        def forward(self, x):
            return super().forward(x) if "forward" in self.__dict__ else x + 1

    with pytest.raises(ChangedProgramError, match=r"other operators \(.*aten::add.Tensor: 1 and 0 times"):
        profiled(nn.Sequential(Notices(1, 1)), ONE, tmp_path)


def test_nothing_stays_attached_and_no_activation_stays_alive(tmp_path):
    seen = []

    class Seen(nn.Linear):
        def forward(self, x):
            activation = super().forward(x)
            seen.append(weakref.ref(activation))
            return activation

    model = nn.Sequential(Seen(4, 4), nn.Dropout())
    calls: list[str] = []
    model[0].register_forward_hook(lambda *_: calls.append("hook"))
    before = model.eval()(torch.ones(1, 4))
    report = profiled(model, torch.ones(1, 4), tmp_path)
    gc.collect()
    assert report and seen and all(activation() is None for activation in seen[1:])
    assert is_bare(model) and len(calls) == len(seen)
    assert torch.equal(model(torch.ones(1, 4)), before)


def test_a_forward_of_an_instance_is_put_back_a_watched_one_keeps_its_signature_and_a_copy_its_own_weights(tmp_path):
    class Copies(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(1, 1, bias=False)

        def forward(self, x):
            other = copy.deepcopy(self.inner)
            nn.init.constant_(other.weight, 3.0)
            assert list(inspect.signature(self.inner.forward).parameters) == ["input"]
            return other(x)

    model = Copies()
    with attached(find_targets(model), timing_probe(CallLog(), FakeClock(0))):
        assert model(ONE) == 3
    model = nn.Sequential(nn.Linear(1, 1))
    patched = model[0].forward = lambda x: x + 5
    profile = profiled(model, ONE, tmp_path).profile
    assert model[0].forward is patched and layer(profile, "0").calls == 1 and model(ONE) == 6


def test_the_cost_of_probes_is_taken_from_the_caller_and_closure_stays_exact():
    tree = CallTree((("",), ("a",), ("b",)))
    root = tree.top.calling(0)
    a, b = root.calling(1), root.calling(2)
    times = {root: CallTimes(9000, 5000, 1, 3), a: CallTimes(3000, 3000, 2, 0), b: CallTimes(1000, 1000, 1, 0)}
    selves, inclusive = corrected(times, 1000)
    assert selves == {root: 2000, a: 3000, b: 1000}
    assert inclusive == {root: 6000, a: 3000, b: 1000}
    assert corrected(times, 4000)[0][root] == 0  # never below nothing
