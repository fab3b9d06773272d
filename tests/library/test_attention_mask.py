"""A padded forward that reads nothing back from the device, counted on real models."""

import pytest
import torch
from torch.profiler import profile

from boundby.inference import Tokens
from boundby.inference.precision import PRECISIONS
from boundby.inference.strategies import Padded
from boundby.work.attention_mask import ready_mask, unread
from tests.classifiers import bert, qwen2

IDS = torch.tensor([[5, 6, 7, 8, 9, 10], [5, 6, 7, 8, 0, 0], [5, 6, 0, 0, 0, 0]])
INPUTS = {"input_ids": IDS, "attention_mask": (IDS > 0).long()}


def host_reads(model, inputs):
    """Return the logits, and how often the host reads a value that the device computed."""
    with torch.inference_mode(), profile(acc_events=True) as seen:
        logits = model(**inputs).logits
    return logits, sum(event.count for event in seen.key_averages() if event.key == "aten::_local_scalar_dense")


@pytest.mark.parametrize("make", [bert, qwen2])
def test_a_padded_batch_with_a_ready_mask_is_the_same_forward_without_a_host_read(make):
    model = make(20, 0).eval()
    ready = unread(model, INPUTS)
    (own, reads), (logits, no_reads) = host_reads(model, INPUTS), host_reads(model, ready)
    assert (reads > 0, no_reads) == (True, 0)
    assert torch.equal(logits, own)


def test_a_causal_model_padded_without_a_mask_reads_nothing_back():
    way = Padded(qwen2(20, 0).eval(), None, PRECISIONS["float32"], trims=False, masked=False)
    tokens = Tokens([ids[ids > 0].numpy() for ids in IDS], 0)
    with torch.inference_mode(), profile(acc_events=True) as seen:
        way.logits(tokens, range(3))
    assert not [event for event in seen.key_averages() if event.key == "aten::_local_scalar_dense"]


def test_a_model_that_is_not_known_to_take_a_ready_mask_is_called_as_it_is():
    model = bert(20, 0)
    model.set_attn_implementation("eager")
    assert ready_mask(model, INPUTS["attention_mask"]) is None
    assert ready_mask(lambda **_: None, INPUTS["attention_mask"]) is None
    assert unread(model, INPUTS) is unread(model, (IDS,)) is unread(model, {"input_ids": IDS}) is None
