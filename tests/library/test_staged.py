"""Models cut into stages give what the whole of them gives, or are refused."""

import itertools
import socket

import pytest
import torch
from torch import nn

from boundby.staged import wire
from boundby.staged.absent import Absent, CutError
from boundby.staged.cutting import are_equal, skeleton, stages_of, weights
from tests.layer_models import small
from tests.staged_plans import UNITS, plan_of, run_here


def given(family):
    model, inputs = small(family)
    return model, {**inputs, "use_cache": False} if family in ("gpt2", "qwen2") else inputs


def refuses(model, inputs, *units, cuts=(1,)):
    with pytest.raises(CutError) as caught:
        run_here(stages_of(model, plan_of(units, *cuts), inputs), inputs)
    return str(caught.value)


@pytest.mark.parametrize("family", UNITS)
def test_every_cut_in_two_gives_the_outputs_of_the_whole_model(family):
    model, inputs = given(family)
    with torch.no_grad():
        whole = model(**inputs) if isinstance(inputs, dict) else model(inputs)
    for cut in range(1, len(UNITS[family])):
        found = run_here(stages_of(model, plan_of(UNITS[family], cut), inputs), inputs)
        assert type(found) is type(whole) and are_equal(found, whole), f"cut {cut}"


@pytest.mark.parametrize("family", ["gpt2", "bert", "qwen2"])
def test_every_unit_in_a_stage_of_its_own_gives_the_outputs_of_the_whole_model(family):
    model, inputs = given(family)
    units = UNITS[family]
    stages = stages_of(model, plan_of(units, *range(1, len(units))), inputs)
    assert are_equal(run_here(stages, inputs), stages.outputs)


def test_inputs_other_than_those_a_model_was_cut_with_give_their_own_outputs():
    model, inputs = given("gpt2")
    stages = stages_of(model, plan_of(UNITS["gpt2"], 4), inputs)
    others = {**inputs, "input_ids": inputs["input_ids"].flip(1) + 1}
    with torch.no_grad():
        assert are_equal(run_here(stages, others), model(**others))
        assert not are_equal(model(**others), stages.outputs)


def test_a_padded_batch_gives_its_own_outputs_though_the_model_was_cut_without_padding():
    model, inputs = given("bert")
    stages = stages_of(model, plan_of(UNITS["bert"], 2), inputs)
    mask = inputs["attention_mask"].clone()
    mask[1, 3:] = 0
    with torch.no_grad():
        padded = {**inputs, "attention_mask": mask}
        assert are_equal(run_here(stages, padded), model(**padded))


def test_a_sequential_model_is_cut_anywhere():
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(), nn.Linear(8, 3), nn.Identity()).eval()
    x = torch.randn(5, 4)
    for cuts in itertools.combinations(range(1, 5), 2):
        found = run_here(stages_of(model, plan_of("01234", *cuts), x), x)
        assert torch.equal(found, model(x))


def test_a_stage_has_the_weights_of_its_own_units_alone():
    model, inputs = given("gpt2")
    stages = stages_of(model, plan_of(UNITS["gpt2"], 4), inputs)
    body = skeleton(model, stages.programs, "cpu")
    assert all(isinstance(each, Absent) for each in body.parameters())
    names = [name for program in stages.programs for each, _ in weights(model, program) for name in each]
    assert sorted(names) == sorted(
        name for name, _ in [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]
    )


def test_tied_weights_go_to_both_sides_of_a_cut_and_once_into_one_stage():
    model, inputs = given("gpt2")
    both = [list(weights(model, each)) for each in stages_of(model, plan_of(UNITS["gpt2"], 4), inputs).programs]
    assert [sum("lm_head.weight" in n or "transformer.wte.weight" in n for n, _ in each) for each in both] == [1, 1]
    (one,) = stages_of(model, plan_of(UNITS["gpt2"]), inputs).programs
    tied = [names for names, _ in weights(model, one) if "lm_head.weight" in names]
    assert tied == [("transformer.wte.weight", "lm_head.weight")]


def test_only_what_later_stages_need_crosses_a_cut():
    model, inputs = given("qwen2")
    stages = stages_of(model, plan_of(UNITS["qwen2"], 3, 5), inputs)
    units = [call.unit for call in stages.programs[0].calls]
    named = [[(units[v.call] if v.call >= 0 else "input", v.leaf) for v in each.arriving] for each in stages.programs]
    assert named[0] == [("input", 0), ("input", 1)]
    assert named[1] == [("input", 1), ("model.rotary_emb", 0), ("model.rotary_emb", 1), ("model.layers.0", 0)]
    assert named[2] == [("input", 1), ("model.norm", 0)]


def test_cutting_leaves_the_model_as_it_was():
    model, inputs = given("bert")
    before = {name: (set(vars(module)), id(module)) for name, module in model.named_modules()}
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    run_here(stages_of(model, plan_of(UNITS["bert"], 2), inputs), inputs)
    assert before == {name: (set(vars(module)), id(module)) for name, module in model.named_modules()}
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())


def test_a_forward_set_on_a_module_stays_after_the_model_raises():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).eval()
    model[1].forward = own = model[1].forward

    def raising(x):
        raise KeyboardInterrupt

    model[0].forward = raising
    with pytest.raises(KeyboardInterrupt):
        stages_of(model, plan_of("01", 1), torch.ones(1, 4))
    assert vars(model[0])["forward"] is raising and vars(model[1])["forward"] is own


class Two(nn.Module):
    """Two layers, called as `how` says."""

    def __init__(self, how):
        super().__init__()
        self.a, self.b, self.how = nn.Linear(4, 4), nn.Linear(4, 4), how

    def forward(self, x):
        return self.how(self, x)


X = torch.arange(8.0).reshape(2, 4)


def cut(how):
    model = Two(how).eval()
    found = run_here(stages_of(model, plan_of("ab", 1), X), X)
    assert are_equal(found, how(model, X))
    return found


def test_a_connection_past_the_cut_is_carried():
    cut(lambda m, x: m.b(m.a(x)) + m.a.out_features * x)


def test_code_that_looks_at_values_between_units_takes_the_same_way():
    cut(lambda m, x: m.b(x) if bool((m.a(x) > 1e9).any()) else m.b(-x))
    cut(lambda m, x: m.a(x)[x > 3].sum() + m.b(x * int(x.max())))


def test_other_values_that_lead_another_way_raise():
    model = Two(lambda m, x: m.b(m.a(x)) if bool((x > 0).any()) else m.a(m.b(x))).eval()
    stages = stages_of(model, plan_of("ab", 1), X)
    with pytest.raises(CutError, match="called in another order"):
        run_here(stages, -X)


def test_other_shapes_than_a_model_was_cut_with_are_refused():
    model = Two(lambda m, x: m.b(m.a(x))).eval()
    stages = stages_of(model, plan_of("ab", 1), X)
    with pytest.raises(CutError, match="other shapes"):
        stages.check_inputs(X[:1])


class Appends(nn.Module):
    def forward(self, x, seen):
        seen.append(x + 1)
        return x


class Pair(nn.Module):
    def forward(self, x):
        return x, 3


class Cacheless:
    """Could hold anything."""


@pytest.mark.parametrize(
    ("how", "message"),
    [
        (lambda m, x: m.a(m.b(m.a(x))), "a is called after units on node_1 have begun"),
        (lambda m, x: m.b(m.a(x).add_(1)), "changes what a unit returned"),
        (lambda m, x: m.b(nn.functional.linear(m.a(x), m.a.weight)), "weight a.weight"),
        (lambda m, x: m.b(m.a(x)) + torch.rand(1), "different outputs for equal inputs"),
    ],
    ids=["back", "in-place", "foreign weight", "chance"],
)
def test_what_could_give_other_outputs_is_refused(how, message):
    assert message in refuses(Two(how).eval(), X, "a", "b")


def test_a_tensor_that_leaves_a_unit_other_than_by_its_return_value_is_refused():
    model = Two(lambda m, x: m.b(m.a(x)) + m.a.kept).eval()

    class Keeps(nn.Linear):
        def forward(self, x):
            self.kept = (x * 2).sum()
            return super().forward(x)

    model.a = Keeps(4, 4).eval()
    assert "a made and did not return" in refuses(model, X, "a", "b")


def test_a_unit_that_changes_a_list_it_is_given_is_refused():
    def how(m, x):
        seen = []
        return m.b(m.a(x, seen)) + seen[0]

    model = Two(how).eval()
    model.a = Appends().eval()
    assert "changes a list" in refuses(model, X, "a", "b")


def test_a_unit_that_changes_its_input_in_place_is_refused():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True)).eval()
    assert "inplace=True" in refuses(model, X, "0", "1")


def test_a_unit_that_returns_more_than_tensors_is_refused():
    model = Two(lambda m, x: m.b(m.a(x)[0])).eval()
    model.a = Pair().eval()
    assert "a returns a int" in refuses(model, X, "a", "b")


def test_a_unit_that_is_given_an_object_is_refused():
    model = Two(lambda m, x: m.b(m.a(x, Cacheless()))).eval()
    model.a.forward = lambda x, cache: x
    assert "holds a Cacheless" in refuses(model, X, "a", "b")


def test_a_decoder_with_a_cache_is_refused_with_the_way_out():
    model, inputs = small("gpt2")
    assert "use_cache=False" in refuses(model, inputs, *UNITS["gpt2"], cuts=(4,))


def test_units_within_one_another_are_refused():
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4)), nn.Linear(4, 4)).eval()
    assert "0.0 is called inside of 0" in refuses(model, X, "0", "0.0", "1")


def test_one_module_under_two_names_is_refused():
    layer = nn.Linear(4, 4)
    assert "0 and 1 are the same module" in refuses(nn.Sequential(layer, layer).eval(), X, "0", "1")


def test_a_unit_that_is_not_there_is_refused():
    assert "no module '7'" in refuses(nn.Sequential(nn.Linear(4, 4)).eval(), X, "0", "7")


def test_a_model_in_training_mode_is_refused():
    assert "call model.eval()" in refuses(nn.Sequential(nn.Linear(4, 4), nn.Dropout()), X, "0", "1")


def test_a_compiled_model_is_refused():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval()
    model[1]._compiled_call_impl = model[1].forward
    assert "1 is compiled" in refuses(model, X, "0", "1")


def test_a_script_module_as_unit_is_refused():
    class Scripted(torch.jit.ScriptModule):
        pass

    assert "1 is a ScriptModule" in refuses(nn.Sequential(nn.ReLU(), Scripted()).eval(), X, "0", "1")


def test_an_absent_tensor_makes_absent_ones_and_never_numbers():
    away = Absent((2, 3), torch.float32, "cpu", "x", (3, 1))
    found = (away.t() @ torch.ones(2, 4)).to(torch.bfloat16)
    assert isinstance(found, Absent) and found.shape == (3, 4) and found.dtype == torch.bfloat16
    for read in (bool, float, lambda t: t.sum().item(), torch.nonzero, lambda t: torch.ones(2, 3)[t > 0]):
        with pytest.raises((CutError, ValueError, RuntimeError)):
            read(away)


def test_absent_values_are_never_written_into_a_tensor():
    away = Absent((2,), torch.float32, "cpu", "h.0", (1,))
    here = torch.ones(2)
    with pytest.raises(CutError, match="writes values of h.0"):
        here.add_(away)
    with pytest.raises(CutError, match="writes values of h.0"):
        here[:1] = away[:1]
    assert torch.equal(here, torch.ones(2))


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6).reshape(2, 3),
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.randn(4, 6)[:, ::2],
        torch.randn(3).bfloat16(),
        torch.tensor(True),
        torch.empty(0, 3),
        torch.ones(1, 1).expand(2, 3),
    ],
    ids=["int", "channels last", "strided", "bfloat16", "scalar", "empty", "expanded"],
)
def test_a_tensor_arrives_as_it_was_sent(tensor):
    ours, theirs = socket.socketpair()
    with ours, theirs:
        wire.send(ours, {"kind": "x"}, [tensor, tensor])
        header, (one, other) = wire.receive(theirs)
    assert header == {"kind": "x"} and one is other
    assert one.dtype == tensor.dtype and torch.equal(one, tensor)
    if tensor.dim() == 4:
        assert one.stride() == tensor.stride()


def test_a_message_that_breaks_off_is_an_end():
    ours, theirs = socket.socketpair()
    with theirs:
        ours.sendall(wire.LENGTH.pack(100) + b"{")
        ours.close()
        with pytest.raises(EOFError):
            wire.receive(theirs)
