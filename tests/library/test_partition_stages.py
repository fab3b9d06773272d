"""Models cut into stages give what the whole of them gives, or are refused; and a stage alone is run and timed."""

import itertools

import pytest
import torch
from msgspec.structs import replace
from torch import nn

from boundby.partition.running import run
from boundby.partition.stages import CutError, cut_stage, first_tensor, named
from tests.layer_models import small
from tests.partition_cases import UNITS, plan_of

CPU = torch.device("cpu")
X = torch.arange(8.0).reshape(2, 4)


def stages_of(model, plan, inputs):
    return [cut_stage(model, plan, index, inputs, CPU) for index in range(len(plan.stages))]


def output_of(stages, inputs):
    hidden = ()
    for stage in stages:
        hidden = (stage.module(*hidden, **named(inputs)),)
    return hidden[0]


def whole_of(model, inputs):
    with torch.no_grad():
        return first_tensor(model(**inputs) if isinstance(inputs, dict) else model(inputs))


@pytest.mark.parametrize("family", UNITS)
def test_every_cut_in_two_gives_the_output_of_the_whole_model(family):
    model, inputs = small(family)
    for cut in range(1, len(UNITS[family])):
        if (family, cut) == ("gpt2", 1):
            continue  # between the two embeddings, whose sum is the hidden state
        stages = stages_of(model, plan_of(UNITS[family], cut), inputs)
        assert torch.equal(output_of(stages, inputs), whole_of(model, inputs)), f"cut {cut}"
        assert stages[0].leaving.shape == stages[1].entering.shape and stages[0].leaving.is_meta
    if family in ("bert", "qwen2"):  # and in stages of one unit each
        units = [name for name in UNITS[family] if name not in ("dropout", "model.rotary_emb")]
        stages = stages_of(model, plan_of(units, *range(1, len(units))), inputs)
        assert torch.equal(output_of(stages, inputs), stages[0].whole)


def test_inputs_other_than_those_a_model_was_cut_with_give_their_own_output():
    model, inputs = small("bert")
    stages = stages_of(model, plan_of(UNITS["bert"], 2), inputs)
    mask = inputs["attention_mask"].clone()
    mask[1, 3:] = 0
    others = {"input_ids": inputs["input_ids"].flip(1), "attention_mask": mask}
    assert torch.equal(output_of(stages, others), whole_of(model, others))
    assert not torch.equal(output_of(stages, others), stages[0].whole)


def test_a_stage_has_the_weights_of_its_own_units_alone_and_tied_ones_are_on_both_sides():
    model, inputs = small("gpt2")
    both = stages_of(model, plan_of(UNITS["gpt2"], 4), inputs)
    tied = model.lm_head.weight.nbytes
    whole = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    assert sum(stage.weight_bytes for stage in both) == whole + tied
    foreign = both[1].module.model.transformer.h[0].attn.c_attn.weight
    assert foreign.is_meta and both[1].module.model.lm_head.weight.data_ptr() == model.lm_head.weight.data_ptr()


def test_cutting_leaves_the_model_as_it_was():
    model, inputs = small("bert")
    before = {name: (set(vars(module)), id(module)) for name, module in model.named_modules()}
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    output_of(stages_of(model, plan_of(UNITS["bert"], 2), inputs), inputs)
    assert before == {name: (set(vars(module)), id(module)) for name, module in model.named_modules()}
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())


class Two(nn.Module):
    """Two layers, called as `how` says."""

    def __init__(self, how):
        super().__init__()
        self.a, self.b, self.how = nn.Linear(4, 4), nn.Linear(4, 4), how

    def forward(self, x):
        return self.how(self, x)


def test_an_input_that_is_used_past_the_cut_is_there_and_a_sequential_model_is_cut_anywhere():
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(), nn.Linear(8, 3), nn.Identity()).eval()
    for cuts in itertools.combinations(range(1, 5), 2):
        assert torch.equal(output_of(stages_of(model, plan_of("01234", *cuts), X), X), model(X))
    model = Two(lambda m, x: m.b(m.a(x)) + x).eval()
    assert torch.equal(output_of(stages_of(model, plan_of("ab", 1), X), X), model(X))


@pytest.mark.parametrize(
    "how",
    [lambda m, x: (lambda hidden: m.b(hidden) + hidden)(m.a(x)), lambda m, x: m.a(x) + m.b(x + 1)],
    ids=["residual", "branch"],
)
def test_more_than_the_hidden_state_across_a_cut_never_passes_for_an_output(how):
    model = Two(how).eval()
    assert output_of(stages_of(model, plan_of("ab", 1), X), X).isnan().any()


@pytest.mark.parametrize(
    ("model", "units", "says"),
    [
        (Two(lambda m, x: m.a(m.b(m.a(x)))), "ab", "a is called after b"),
        (Two(lambda m, x: m.b(m.b(m.a(x)))), "ab", "b is called 2 times"),
        (Two(lambda m, x: m.a(x)), "ab", "b is called 0 times"),
        (nn.Sequential(nn.Sequential(nn.Linear(4, 4)), nn.Linear(4, 4)), ["0", "0.0", "1"], "inside of another"),
        (nn.Sequential(*[nn.Linear(4, 4)] * 2), "01", "0 and 1 are the same module"),
        (nn.Sequential(nn.Linear(4, 4)), "07", "no module '7'"),
        (nn.Sequential(nn.ReLU(), torch.jit.ScriptModule()), "01", "1 is a ScriptModule"),
    ],
    ids=["back", "twice", "never", "nested", "shared", "missing", "script"],
)
def test_a_model_that_cannot_be_cut_so_is_refused(model, units, says):
    with pytest.raises(CutError, match=says):
        stages_of(model.eval(), plan_of(units, 1), X)


def test_a_model_in_training_mode_or_compiled_is_refused():
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout())
    with pytest.raises(CutError, match=r"call model\.eval\(\)"):
        stages_of(model, plan_of("01", 1), X)
    model.eval()[1]._compiled_call_impl = model[1].forward
    with pytest.raises(CutError, match="1 is compiled"):
        stages_of(model, plan_of("01", 1), X)


def test_a_stage_alone_is_run_without_torchrun_and_timed_by_the_clock_that_is_given():
    model, inputs = small("bert")
    ticks = itertools.count(0, 1000).__next__
    staged = run(model, plan_of(UNITS["bert"]), inputs, requests=5, singles=3, warmup=2, now=ticks)
    assert torch.equal(staged.outputs, whole_of(model, inputs))
    measured = staged.measured
    [stage] = measured.stages
    assert (stage.compute.n, stage.busy_compute.n, stage.compute.median) == (3, 5, pytest.approx(1e-6))
    assert stage.weight_bytes == sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    assert stage.slowdown == 1 and measured.transfers == ()
    assert (measured.latency.median, measured.period.median) == (pytest.approx(1e-6), pytest.approx(2e-6))
    assert measured.last_finish_s == pytest.approx(9e-6) and measured.difference == 0


@pytest.mark.parametrize(
    ("plan", "options", "says"),
    [
        (plan_of("01", 1), {}, "2 stages, and 1 processes"),
        (plan_of("01"), {"requests": 0}, "0 requests"),
        (replace(plan_of("01"), stages=(replace(plan_of("01").stages[0], on_gpu=True),)), {}, "cannot be run here"),
    ],
)
def test_what_cannot_be_run_here_is_refused(plan, options, says, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).eval()
    with pytest.raises(ValueError, match=says):
        run(model, plan, X, **options)


def test_outputs_that_differ_from_those_of_the_whole_model_are_refused():
    class Odd(nn.Sequential):
        def forward(self, x):
            return super().forward(x) + torch.rand(1)

    with pytest.raises(CutError, match="the difference is"):
        run(Odd(nn.Linear(4, 4)).eval(), plan_of("0"), X)
