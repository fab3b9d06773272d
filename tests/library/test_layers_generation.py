"""Generated text by layer: reading the prompt and adding tokens are told apart, whatever way a model generates."""

from typing import Any

import pytest
import torch
from torch import nn

from boundby.layers.generation import Generation
from boundby.layers.ranking import blocks
from boundby.partition import ExecutionPlanner
from boundby.work import count
from tests.fakes import FakeClock
from tests.layer_cases import Cache
from tests.layer_models import Takes, layer, profiled, self_ns, small

PROMPT, NEW = 6, 3
SETTINGS = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False, "use_cache": True, "pad_token_id": 0}


class Writer(nn.Module):
    """Calls itself for each of `passes`, (cached, tokens), with 7 ns before it; a layer takes 100 ns for a token."""

    def __init__(self, clock: FakeClock, passes: list[tuple[int | None, int]], *, is_pair: bool = False) -> None:
        super().__init__()
        self.clock, self.passes, self.layer = clock, passes, Takes(clock, 100)
        self.config = type("Config", (), {"is_encoder_decoder": is_pair})

    def can_generate(self) -> bool:
        return True

    def generate(self, input_ids: torch.Tensor) -> torch.Tensor:
        for cached, tokens in self.passes:
            self.clock.advance(7)
            cache = None if cached is None else Cache(cached)
            self(input_ids=torch.ones(1, tokens), past_key_values=cache)
        return input_ids

    def forward(self, input_ids: torch.Tensor, past_key_values: Any = None) -> None:
        for _ in range(input_ids.shape[1]):
            self.layer(input_ids)


@pytest.mark.parametrize(
    ("passes", "prefills", "decodes"),
    [
        pytest.param([(0, 6), (6, 1), (7, 1)], 1, 2, id="with a cache"),
        pytest.param([(None, 6), (None, 7), (None, 8)], 3, 0, id="without a cache"),
        pytest.param([(0, 4), (4, 2), (6, 1)], 2, 1, id="prompt in chunks"),
        pytest.param([(0, 6), (6, 3), (8, 3)], 1, 2, id="several tokens are guessed at once"),
        pytest.param([(None, 6), (None, 1), (None, 1)], 1, 2, id="a state that tells no length"),
        pytest.param([(4, 2), (6, 1)], 1, 1, id="a cache from before"),
    ],
)
def test_passes_are_told_apart_by_what_the_cache_holds_and_all_times_add_up(passes, prefills, decodes, tmp_path):
    clock = FakeClock(0)
    model = Writer(clock, passes)
    profile = profiled(Generation(model), torch.ones(1, PROMPT), tmp_path, clock=clock).profile
    tokens = [count for _, count in passes]
    expected = {"prefill.layer": 100 * sum(tokens[:prefills]), "decode.layer": 100 * sum(tokens[prefills:])}
    spent = {path: ns for path, ns in self_ns(profile).items() if ns}
    assert spent == {"": 7 * len(passes), **{path: ns for path, ns in expected.items() if ns}}
    assert {phase.name: phase.calls for phase in profile.passes} == {
        name: number for name, number in (("prefill", prefills), ("decode", decodes)) if number
    } | ({} if decodes else {"decode": 0})


def test_a_decoder_beside_an_encoder_is_prefilled_with_the_token_it_begins_with(tmp_path):
    clock = FakeClock(0)
    model = Writer(clock, [(0, 1), (1, 1), (2, 1)], is_pair=True)
    profile = profiled(Generation(model), torch.ones(1, PROMPT), tmp_path, clock=clock).profile
    assert [phase.calls for phase in profile.passes] == [1, 2]


@pytest.mark.parametrize(("family", "stack"), [("gpt2", "transformer.h"), ("qwen2", "model.layers")])
def test_real_decoders_generate_the_same_and_have_all_their_work_in_the_two_passes(family, stack, tmp_path):
    model, inputs = small(family)
    generation = Generation(model, **SETTINGS)
    with torch.no_grad():
        assert torch.equal(generation(**inputs), model.generate(**inputs, **SETTINGS))
    report = profiled(generation, inputs, tmp_path)
    profile = report.profile
    assert [(phase.name, phase.calls) for phase in profile.passes] == [("prefill", 1), ("decode", NEW - 1)]
    decode_ms = profile.passes[1].inclusive_s.median * 1e3
    assert "prefill: " in str(report) and f"decode: {decode_ms:.2f} ms, {NEW - 1} passes of " in str(report)
    own = [layer for layer in profile.layers if layer.calls]
    assert sum(layer.flops_self for layer in own) == count(lambda: model.generate(**inputs, **SETTINGS)).flops
    assert sum(layer.host_self_s.mean for layer in own) == pytest.approx(profile.layers[0].host_inclusive_s.mean)
    rows = {row.path for row in blocks(profile)}
    assert rows >= {f"{phase}.{stack}.{number}" for phase in ("prefill", "decode") for number in (0, 1)}
    assert layer(profile, f"decode.{stack}.0").input_shapes[0] == "float32[2, 1, 32]"
    with pytest.raises(ValueError, match="plan with the profile of one forward"):
        ExecutionPlanner(profile)


def test_the_model_is_as_it_was_whatever_ends_a_run_and_one_that_cannot_generate_is_refused():
    model = Writer(FakeClock(0), [(0, 6), (6, 1)])
    patched = model.forward = model.forward
    generation = Generation(model)
    generation.prefill.passes.append((1, -1))  # no tensor has such a shape
    with pytest.raises(RuntimeError):
        generation(torch.ones(1, PROMPT))
    assert model.forward is patched and generation.prefill.__dict__["forward"] is patched
    assert generation.decode.layer is model.layer
    with pytest.raises(ValueError, match="Linear generates no text"):
        Generation(nn.Linear(1, 1))
