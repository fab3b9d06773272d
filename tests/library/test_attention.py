"""The backend of attention is what a forward was seen to use, on the host and on a card."""

from types import SimpleNamespace

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from boundby.bound.attention import attention_backend, backend_of
from boundby.formatting import Missing
from tests.gpu_double import A100, H100, T4, plugged_in

STATES = torch.ones(2, 4, 8, 16)


def events(*names: str | tuple[str, ...]) -> list[SimpleNamespace]:
    """Return events of the profiler; those of a tuple lie within one another."""
    made = []
    for entry in names:
        parent = None
        for name in (entry,) if isinstance(entry, str) else entry:
            parent = SimpleNamespace(name=name, cpu_parent=parent)
            made.append(parent)
    return made


def eager(states: torch.Tensor) -> torch.Tensor:
    return torch.softmax(states @ states.transpose(-1, -2), -1) @ states


@pytest.mark.parametrize(("backend", "name"), [(SDPBackend.FLASH_ATTENTION, "flash"), (SDPBackend.MATH, "math")])
def test_the_kernel_that_a_setting_leads_to_is_named(backend, name):
    with sdpa_kernel(backend):
        assert attention_backend(lambda: scaled_dot_product_attention(STATES, STATES, STATES)) == name


def test_products_and_a_softmax_are_eager_attention_and_products_alone_are_none():
    assert attention_backend(lambda: eager(STATES)) == "eager"
    assert attention_backend(lambda: STATES @ STATES.transpose(-1, -2)) == Missing(
        "torch sees no operator of attention in a forward"
    )


@pytest.mark.parametrize(
    ("card", "dtype", "has_mask", "name"),
    [
        (H100, torch.float32, True, "mem_efficient"),
        (H100, torch.bfloat16, True, "cudnn"),
        (A100, torch.bfloat16, True, "mem_efficient"),
        (A100, torch.bfloat16, False, "flash"),
        (T4, torch.float16, False, "mem_efficient"),
        (T4, torch.bfloat16, False, "math"),
    ],
)
def test_a_card_takes_another_kernel_by_mask_and_dtype_and_that_one_is_named(card, dtype, has_mask, name):
    with plugged_in(card), torch.inference_mode():
        states = STATES.to("cuda", dtype)
        mask = torch.ones(2, 1, 8, 8, dtype=torch.bool, device="cuda") if has_mask else None
        answer = attention_backend(lambda: scaled_dot_product_attention(states, states, states, attn_mask=mask))
    assert answer == name


@pytest.mark.parametrize(("seen", "name"), [
    (events(("aten::_scaled_dot_product_flash_attention", "aten::_flash_attention_forward")), "flash"),
    (events(("aten::_scaled_dot_product_flash_attention", "flash_attn_3::fwd")), "flash"),
    (events("flash_attn::_flash_attn_varlen_forward"), "flash_attn"),
    (events(("torch_attn::_varlen_attn", "aten::_flash_attention_forward")), "flash"),
    (events("aten::_scaled_dot_product_attention_math", "aten::_scaled_dot_product_cudnn_attention",
            "aten::_scaled_dot_product_cudnn_attention"), "cudnn+math"),
    (events("mamba::selective_scan_fwd", "aten::_softmax"), "eager"),
])  # fmt: skip
def test_of_operators_within_one_another_the_outermost_counts(seen, name):
    assert backend_of(seen) == name


def test_another_implementation_of_a_kernel_of_torch_is_named_with_it(monkeypatch):
    monkeypatch.setattr("torch.nn.attention.current_flash_attention_impl", lambda: "FA3", raising=False)
    assert backend_of(events("aten::_scaled_dot_product_flash_attention")) == "flash (FA3)"
    assert backend_of(events("aten::_scaled_dot_product_cudnn_attention")) == "cudnn"
    assert backend_of(events("flash_attn::_flash_attn_forward")) == "flash_attn"
