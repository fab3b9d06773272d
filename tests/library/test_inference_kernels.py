"""Kernels of a CPU: attention, norms, rounding and rotary embeddings as torch gives them."""

import multiprocessing
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import FunctionType

import pytest
import torch
from torch.nn import functional

from boundby.inference import fused, kernels
from boundby.inference.packing import grouped_attention, pack
from tests import classifiers

GENERATOR = torch.Generator()
LENGTHS = (82, 47, 33, 32, 17, 16, 15, 5, 1)
ALL = 10**6  # of a window's side
CLOSE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def some(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=GENERATOR.manual_seed(len(shape))).to(dtype)


def starts(lengths: tuple[int, ...]) -> torch.Tensor:
    return functional.pad(torch.tensor(lengths).cumsum(0), (1, 0)).int()


def attended(states, lengths, window, scale):
    """Return attention inside each text by torch's own, in float64."""
    parts, first = [], 0
    for length in lengths:
        query, key, value = (each[:, :, first : first + length].double() for each in states)
        distance = torch.arange(length) - torch.arange(length)[:, None]
        mask = (-window[0] <= distance) & (distance <= window[1])
        parts.append(functional.scaled_dot_product_attention(query, key, value, mask, scale=scale, enable_gqa=True))
        first += length
    return torch.cat(parts, dim=2).transpose(1, 2)


@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize(
    ("heads", "of_keys", "width", "window"),
    [(12, 12, 32, (ALL, ALL)), (6, 2, 64, (ALL, 0)), (4, 4, 16, (5, 7)), (4, 1, 128, (20, 0)), (2, 2, 80, (0, 0))],
)
def test_attends_inside_each_text_whatever_its_length_heads_and_window(heads, of_keys, width, window, dtype):
    tokens = sum(LENGTHS)
    query = some(1, tokens, heads, width, dtype=dtype).transpose(1, 2)  # as a product leaves them
    key = some(1, of_keys, tokens, width, dtype=dtype)  # as a rotary embedding does
    value = some(1, tokens, of_keys, 3, width, dtype=dtype)[:, :, :, 1].transpose(1, 2)  # out of one product for all
    found = torch.ops.boundby.attention(query, key, value, starts(LENGTHS), 1, 0.2, *window)
    expected = attended((query, key, value), LENGTHS, window, 0.2)
    torch.testing.assert_close(found.double(), expected, atol=CLOSE[dtype], rtol=CLOSE[dtype])


@pytest.mark.parametrize("scores", [1e-4, 30.0, 1e4])
def test_scores_of_any_size_give_weights_that_sum_to_one(scores):
    states = [some(1, 2, 40, 16) * scores, some(1, 2, 40, 16), torch.ones(1, 2, 40, 16)]
    found = torch.ops.boundby.attention(*states, starts((40,)), 1, 1.0, ALL, ALL)
    torch.testing.assert_close(found, torch.ones_like(found), atol=1e-5, rtol=0)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("place", range(3), ids=("query", "key", "value"))
def test_what_is_not_finite_shows_in_the_answers_as_torch_has_it(place, value):
    states = list(some(3, 1, 2, 20, 16))
    states[place][0, 0, 4, 3] = value
    found = torch.ops.boundby.attention(*states, starts((20,)), 1, 0.25, ALL, ALL)
    expected = functional.scaled_dot_product_attention(*states, scale=0.25).transpose(1, 2)
    assert torch.equal(found.isfinite(), expected.isfinite()) and not found.isfinite().all()


@pytest.mark.parametrize("dtype", CLOSE)
def test_norms_are_those_of_torch_and_the_residual_is_added_before(dtype):
    states, residual = some(2, 1, 700, 96, dtype=dtype)
    weight, bias = some(2, 96)
    double = {"weight": weight.double(), "bias": bias.double(), "eps": 1e-5}
    summed = functional.layer_norm(states.double() + residual.double(), (96,), **double)
    centred = torch.ops.boundby.norm(states, weight, bias, 1e-5, True)
    plain = torch.ops.boundby.norm(states, weight, None, 1e-5, False)
    own = states.clone()
    assert torch.ops.boundby.add_norm_(own, residual, weight, bias, 1e-5) is own
    expected = (
        functional.layer_norm(states.double(), (96,), **double),
        functional.rms_norm(states.double(), (96,), weight.double(), 1e-5),
        summed,
    )
    for found, right in zip((centred, plain, own), expected, strict=True):
        assert found.dtype == dtype
        torch.testing.assert_close(found.double(), right, atol=CLOSE[dtype], rtol=CLOSE[dtype])


def test_bytes_are_the_nearest_with_ties_to_the_even_one_and_end_at_the_ends():
    inputs = torch.tensor([[-0.5, 0.5, 1.5, 2.5, -200.0, 200.0, 126.4, -127.6] * 2])
    expected = torch.tensor([[0, 0, 2, 2, -128, 127, 126, -128] * 2]) + 128
    assert torch.ops.boundby.rounded(inputs, None, torch.ones(16)).tolist() == expected.tolist()
    halves = torch.full_like(inputs, 0.5)
    assert torch.ops.boundby.rounded(inputs, halves, torch.full((16,), 2.0)).tolist() == expected.tolist()


def test_a_rotary_embedding_turns_states_where_they_are_and_leaves_other_kinds_to_the_model():
    from transformers.models.qwen2.modeling_qwen2 import apply_rotary_pos_emb

    query, key = some(1, 9, 4, 64).transpose(1, 2), some(1, 9, 2, 64).transpose(1, 2)
    cosine, sine = some(2, 1, 9, 64)
    expected = apply_rotary_pos_emb(query, key, cosine, sine)
    narrow = [each[..., :16].contiguous() for each in (query, key, cosine, sine)]
    of_narrow = apply_rotary_pos_emb(*narrow)
    found = fused.rotated(apply_rotary_pos_emb, query, key, cosine, sine)
    assert found[0] is query and found[1] is key
    for result, right in zip(found, expected, strict=True):
        torch.testing.assert_close(result, right)
    assert torch.equal(fused.rotated(apply_rotary_pos_emb, *narrow)[0], of_narrow[0])


@pytest.mark.parametrize("threads", [2, 3, 5])
def test_threads_share_the_work_and_change_no_bit(threads, monkeypatch):
    for least in ("NORMED", "ROUNDED", "MULTIPLIED"):
        monkeypatch.setattr(kernels, least, 1)
    states = some(3, 1, 6, sum(LENGTHS), 32)
    given, before = some(1, 1000, 64), torch.get_num_threads()
    weight = torch.ones(64)

    def compute() -> list[torch.Tensor]:
        return [
            torch.ops.boundby.attention(*states, starts(LENGTHS), 1, 0.2, ALL, 0),
            torch.ops.boundby.attention(states[0], *states[1:, :, :2], starts(LENGTHS), 1, 0.2, ALL, ALL),
            torch.ops.boundby.norm(given, weight, None, 1e-6, True),
            torch.ops.boundby.rounded(given, None, weight),
        ]

    try:
        torch.set_num_threads(1)
        alone = compute()
        torch.set_num_threads(threads)
        assert all(map(torch.equal, compute(), alone))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("is_queued", [False, True])
def test_work_is_done_once_where_there_may_be_no_more_threads(is_queued, monkeypatch):
    class Refusing(ThreadPoolExecutor):
        def submit(self, *call):
            if is_queued:  # as a pool does that takes the work and then cannot start its thread
                super().submit(*call).result()
            raise RuntimeError("can't start new thread")

    done, before = list[int](), torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        with Refusing() as pool:
            monkeypatch.setattr(kernels, "_threads", lambda: pool)
            kernels._in_shares(10, lambda first, last: done.extend(range(first, last)), 1)
    finally:
        torch.set_num_threads(before)
    assert sorted(done) == list(range(10))


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_process_has_threads_of_its_own(monkeypatch):
    monkeypatch.setattr(kernels, "NORMED", 1)
    given, weight, before = torch.ones(1, 1000, 64), torch.ones(64), torch.get_num_threads()
    mine, theirs = multiprocessing.Pipe()

    def normed() -> float:
        return float(torch.ops.boundby.norm(given, weight, None, 0.0, False).numpy().sum())

    try:
        torch.set_num_threads(2)
        normed()  # in threads, which a child has not
        child = multiprocessing.get_context("fork").Process(target=lambda: theirs.send(normed()), daemon=True)
        child.start()
    finally:
        torch.set_num_threads(before)
    answered = mine.poll(60)
    child.kill()
    child.join()
    assert answered and mine.recv() == 64_000


def _kept_in(folder: Path) -> str:
    code = (
        "import torch; from boundby.inference import kernels\n"
        "print(float(torch.ops.boundby.rounded(torch.ones(2, 16), None, torch.ones(16)).sum()))"
    )
    where = os.environ | {"NUMBA_CACHE_DIR": str(folder)}
    return subprocess.run([sys.executable, "-c", code], env=where, capture_output=True, text=True, check=True).stdout


def test_what_cannot_be_kept_on_disk_is_compiled_all_the_same(tmp_path: Path):
    (tmp_path / "file").touch()
    assert _kept_in(tmp_path / "file" / "folder") == f"{32 * 129.0}\n"


def test_a_damaged_file_of_the_compiler_is_passed_over(tmp_path: Path):
    assert _kept_in(tmp_path) == f"{32 * 129.0}\n"
    (index,) = tmp_path.rglob("*.nbi")
    index.write_bytes(b"")
    assert _kept_in(tmp_path) == f"{32 * 129.0}\n"


@pytest.mark.parametrize("length", [3, 20, 70])
@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (2, 0), (9, 9), (-1, 3)])
def test_without_numba_the_answers_are_the_same(window, length, monkeypatch):
    states = some(3, 1, 4, 2 * length, 16)
    texts = [torch.zeros(length, dtype=torch.int64).numpy()] * 2
    current = pack(texts, torch.zeros(2, dtype=torch.int64).numpy(), None, torch.device("cpu"))
    with current:
        ours, _ = grouped_attention(torch.nn.Identity(), *states, torch.tensor(window))
        monkeypatch.setattr(fused, "has_kernels", lambda: False)
        plain, _ = grouped_attention(torch.nn.Identity(), *states, torch.tensor(window))
    torch.testing.assert_close(ours, plain)
    assert not torch.equal(ours, plain) or length == 3  # two ways indeed


def test_a_forward_that_somebody_put_in_or_watches_stays():
    model = classifiers.build("qwen2", 12, None)
    layers = model.model.layers
    layers[0].self_attn.forward = put_in = lambda *_, **__: None
    layers[0].mlp.register_forward_hook(lambda *_: None)
    mlps = [layer.mlp for layer in layers]
    fused.join(model)
    assert layers[0].self_attn.forward is put_in and layers[0].mlp is mlps[0]
    assert layers[1].mlp is not mlps[1] and "forward" in vars(layers[1].self_attn)
    fused.turn_as_written(model)  # for torch's compiler
    assert layers[0].self_attn.forward is put_in and "forward" not in vars(layers[1].self_attn)


def test_a_forward_keeps_what_it_closes_over():
    from transformers.models.qwen2 import modeling_qwen2

    class Attention(modeling_qwen2.Qwen2Attention):
        pass

    def closing(before):
        def forward(self, *given, **named):
            called.append(apply_rotary_pos_emb)  # noqa: F821  # of the globals that are put in
            return before(self, *given, **named)

        return FunctionType(forward.__code__, vars(modeling_qwen2), "forward", None, forward.__closure__)

    called = list[object]()
    Attention.forward = closing(modeling_qwen2.Qwen2Attention.forward)
    model = classifiers.build("qwen2", 12, None)
    for layer in model.model.layers:
        layer.self_attn.__class__ = Attention
    fused.join(model)
    with torch.inference_mode():
        model(input_ids=torch.ones(1, 5, dtype=torch.int64))
    assert called and all(isinstance(each, partial) for each in called)


def test_memory_that_is_shared_between_values_is_left_to_torch():
    states, wide = some(1, 4, 32), some(64)
    assert fused.takes(states, some(32)) and not fused.takes(states, wide[::2]) and not fused.takes(states, wide)
    key = some(1, 4, 1, 64).transpose(1, 2).expand(1, 3, 4, 64)
    angles = some(2, 1, 4, 64)
    assert fused.rotated(lambda *_: "the model's", key, key, *angles) == "the model's"


def test_flops_of_attention_are_those_of_each_text():
    from boundby.work import operators

    states = some(3, 1, 4, 10, 16)
    call = torch.ops.boundby.attention.default
    texts = [torch.zeros(length, dtype=torch.int64).numpy() for length in (6, 4)]
    current = pack(texts, torch.zeros(2, dtype=torch.int64).numpy(), None, torch.device("cpu"))
    given = (*states, current.starts, current.pairs, 0.25, ALL, ALL)
    assert operators.flops(call, given, {}, kernels.attention(*given)) == 4 * (6 * 6 + 4 * 4) * 4 * 16
