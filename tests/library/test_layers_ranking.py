"""Which layers matter: rankings of profiles whose times are given."""

import pytest
from msgspec.structs import replace

from boundby.layers.ranking import blocks, by_self_time
from boundby.layers.records import LayerProfile, ModelProfile
from boundby.timing.stats import summarize
from tests.layer_profiles import layer, model_profile


def a_layer(path: str, kind: str, self_s: float, inclusive_s: float, **others: object) -> LayerProfile:
    times = {"host_self_s": summarize([self_s]), "host_inclusive_s": summarize([inclusive_s])}
    return layer(path, kind, None, **{**times, "bytes_self": 8.0, "gain_at_limit_s": self_s / 2, **others})


def a_profile(*layers: LayerProfile) -> ModelProfile:
    return model_profile(layers)


GPT = (
    a_layer("", "LM", 0.1, 10.0),
    a_layer("transformer", "Model", 0.4, 7.9),
    a_layer("transformer.wte", "Embedding", 0.5, 0.5),
    a_layer("transformer.h.0", "Block", 1.0, 3.0, parent="transformer"),
    a_layer("transformer.h.0.mlp", "MLP", 2.0, 2.0),
    a_layer("transformer.h.1", "Block", 1.5, 4.0, parent="transformer"),
    a_layer("transformer.h.1.mlp", "MLP", 2.5, 2.5),
    a_layer("lm_head", "Linear", 2.0, 2.0, parent=""),
)


def test_blocks_of_a_decoder_and_layers_by_their_own_time_are_ranked_and_add_up_to_the_whole():
    rows = blocks(a_profile(*GPT))
    labels = [row.label.removeprefix("transformer.") for row in rows]
    assert labels == ["h.1", "h.0", "lm_head", "wte", "transformer (self)", "(model) (self)"]
    assert sum(row.seconds for row in rows) == pytest.approx(10)
    assert [row.share for row in rows] == pytest.approx([0.4, 0.3, 0.2, 0.05, 0.04, 0.01])
    rows = by_self_time(a_profile(*GPT))
    assert [row.path for row in rows][:2] == ["transformer.h.1.mlp", "transformer.h.0.mlp"]
    assert sum(row.seconds for row in rows) == pytest.approx(10) and sum(row.share for row in rows) == pytest.approx(1)


def test_the_gain_of_a_block_is_that_of_all_inside_and_unknown_where_one_is():
    rows = {row.label: row for row in blocks(a_profile(*GPT))}
    assert rows["transformer.h.1"].gain_at_limit_s == pytest.approx(2.0)
    assert rows["transformer (self)"].gain_at_limit_s == pytest.approx(0.2)
    unknown = [replace(row, gain_at_limit_s=None) if row.path.endswith("1.mlp") else row for row in GPT]
    rows = {row.label: row for row in blocks(a_profile(*unknown))}
    assert rows["transformer.h.1"].gain_at_limit_s is None
    assert rows["transformer.h.0"].gain_at_limit_s == pytest.approx(1.5)


STAGES = (
    a_layer("", "Net", 0.0, 8.0),
    a_layer("stages.0", "Stage", 0.0, 4.0, parent="", bytes_self=0.0),
    a_layer("stages.0.layers.0", "Bottleneck", 1.0, 2.0, parent="stages.0"),
    a_layer("stages.0.layers.0.c.0", "Conv", 0.5, 0.5, parent="stages.0.layers.0"),
    a_layer("stages.0.layers.0.c.1", "Conv", 0.5, 0.5, parent="stages.0.layers.0"),
    a_layer("stages.0.layers.1", "Bottleneck", 2.0, 2.0, parent="stages.0"),
    a_layer("stages.1", "Stage", 4.0, 4.0, parent=""),
)


def test_a_stage_that_only_calls_its_layers_is_opened_unless_its_work_is_not_known():
    rows = {row.label: row.seconds for row in blocks(a_profile(*STAGES))}
    assert rows == {"stages.0.layers.0": 2.0, "stages.0.layers.1": 2.0, "stages.1": 4.0}
    unknown = [replace(row, bytes_self=None) for row in STAGES]
    assert {row.label for row in blocks(a_profile(*unknown))} == {"stages.0", "stages.1"}


def test_a_layer_that_is_called_again_and_again_is_a_block():
    albert = (
        a_layer("", "Albert", 0.0, 6.0),
        a_layer("encoder", "Encoder", 1.0, 6.0),
        a_layer("encoder.layer", "Layer", 2.0, 5.0, calls=12.0),
        a_layer("encoder.layer.ffn", "Linear", 3.0, 3.0, calls=12.0),
    )
    assert [row.label for row in blocks(a_profile(*albert))] == ["encoder.layer", "encoder (self)"]


def test_uncalled_and_concurrent_layers_are_in_no_ranking():
    others = (
        a_layer("unused", "Linear", 1.0, 1.0, parent="", calls=0.0, host_self_s=None, host_inclusive_s=None),
        a_layer("(other thread)>a", "Linear", 5.0, 5.0, parent="", is_concurrent=True),
    )
    plain, with_others = a_profile(*GPT), a_profile(*GPT, *others)
    assert blocks(with_others) == blocks(plain) and by_self_time(with_others) == by_self_time(plain)
