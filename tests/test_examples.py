"""The examples that make something leave what they say."""

import csv

import pytest
from transformers import AutoModelForSequenceClassification

from examples import make_it_smaller
from tests import classifiers


@pytest.mark.parametrize("family", ["bert", "qwen2"])
def test_smaller_models_load_as_any_other_with_fewer_layers_or_a_narrower_inside(family, tmp_path, capsys):
    words = classifiers.reviews(40)
    tokenizer = classifiers.tokenizer(words)
    classifiers.build(family, len(tokenizer), tokenizer.pad_token_id).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    with (tmp_path / "texts.csv").open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([["text"], *([word] for word in words)])
    given = [str(tmp_path / name) for name in ("model", "texts.csv", "small")]
    assert make_it_smaller.main([*given, "--layers", "1", "--inner", "0.25", "--minutes", "0.001"]) == 0
    said = capsys.readouterr().out
    for name, layers, inner in (("pruned", classifiers.LAYERS, classifiers.INNER // 4), ("distilled", 1, 64)):
        smaller = AutoModelForSequenceClassification.from_pretrained(tmp_path / "small" / name)
        assert (smaller.config.num_hidden_layers, smaller.config.intermediate_size) == (layers, inner)
        assert f"{name}: {smaller.num_parameters() / 1e6:.1f} of" in said
