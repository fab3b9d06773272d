"""What a forward does: FLOPs and bytes known by construction, and the same FLOPs by formula."""

import itertools
from collections.abc import Callable
from functools import cache
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import flop_registry, register_flop_formula

from boundby.bound.recording import record
from boundby.work import (
    TransformerShape,
    UnknownWorkError,
    Work,
    count,
    fit_length_cost,
    operators,
    transformer_flops,
    transformer_shape,
)
from boundby.work.operators import is_composite
from boundby.work.roofline import OperatorLoad
from tests.fakes import FakeClock

FLOAT = 4  # bytes
X, Y, STATE = torch.ones(4, 8), torch.ones(4, 8), torch.ones(4, 8)
N = 32 * FLOAT  # bytes of each
TABLE, IDS = torch.ones(1000, 8), torch.tensor([[3, 1, 4], [1, 5, 9]])
SMALL_TABLE, NO_IDS = TABLE[:2], torch.zeros_like(IDS)
IDS_BYTES, ROWS_BYTES = 6 * 8, 6 * 8 * FLOAT
SIZE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
GROUPED = {**SIZE, "num_key_value_heads": 2}
COMMON = {"vocab_size": 40, "num_labels": 3, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1}
SHAPES = ((1, 7), (3, 16), (2, 32))  # texts, tokens
LENGTHS = (1, 3, 5, 9, 14, 16, 16, 2)


def only(work: Work) -> OperatorLoad:
    (operator,) = work.operators
    return operator


@pytest.fixture(scope="module")
def build():
    transformers = pytest.importorskip("transformers")
    families = {
        "Bert": SIZE,
        "Camembert": SIZE,
        "DistilBert": {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48},
        "GPT2": {"n_embd": 32, "n_layer": 2, "n_head": 4},
        "Llama": GROUPED,
        "Mistral": GROUPED,
        "Qwen2": GROUPED,
        "Qwen3": {**GROUPED, "head_dim": 16},
        "Roberta": SIZE,
        "XLMRoberta": SIZE,
    }

    @cache
    def make(family, attention="sdpa"):
        config = getattr(transformers, f"{family}Config")(**families[family], **COMMON, attn_implementation=attention)
        return getattr(transformers, f"{family}ForSequenceClassification")(config).eval()

    return make


def forward(model: torch.nn.Module, texts: int, tokens: int, padding: int = 0) -> Callable[[], object]:
    """Return a forward of `texts` of `tokens`, the last `padding` tokens of the first text not real."""
    ids = torch.arange(texts * tokens).reshape(texts, tokens) % 30 + 2
    if not padding:
        return lambda: model(input_ids=ids)
    mask = torch.ones_like(ids)
    mask[0, tokens - padding :] = 0
    return lambda: model(input_ids=ids * mask, attention_mask=mask)


def test_bytes_are_read_written_given_from_outside_and_new_where_a_result_is_allocated():
    layer, given = torch.nn.Linear(4, 3), torch.ones(2, 4)
    sizes = {"weight_bytes": (3 + 8 + 12) * FLOAT, "other_bytes": 6 * FLOAT, "new_bytes": 6 * FLOAT}
    shapes = ((3,), (2, 4), (4, 3))
    expected = OperatorLoad(name="aten::addmm", shapes=shapes, calls=1, flops=2 * 2 * 4 * 3, seconds=None, **sizes)
    assert only(count(lambda: layer(given))) == expected
    held, other, weight = torch.ones(4, 4), torch.ones(4, 4), torch.ones(8, 8)
    assert only(count(lambda: held + other)).new_bytes == 16 * FLOAT
    assert only(count(lambda: held.add_(other))).new_bytes == 0
    assert only(count(lambda: torch.add(held, other, out=held))).new_bytes == 0
    first, second = count(lambda: (X @ weight) @ weight).operators[0], count(lambda: (X + Y) + X).operators[0]
    assert first.weight_bytes == N + 2 * 64 * FLOAT  # of the two products together: one reads X, both the weight
    assert second.weight_bytes == 3 * N


@pytest.mark.parametrize(
    ("call", "flops", "moved"),
    [
        (lambda: torch.ones(2, 3, 4) @ torch.ones(2, 4, 5), 2 * 2 * 3 * 4 * 5, (24 + 40 + 30) * FLOAT),
        (lambda: torch.ones(2, 3, 4) @ torch.ones(4, 5), 2 * 6 * 4 * 5, (24 + 20 + 30) * FLOAT),
        (lambda: torch.ones(3, 4) @ torch.ones(4), 2 * 12, (12 + 4 + 3) * FLOAT),
        (lambda: torch.ones(5) @ torch.ones(5), 2 * 5, (5 + 5 + 1) * FLOAT),
        (lambda: torch.addmv(torch.ones(3), torch.ones(3, 4), torch.ones(4)), 2 * 12, (3 + 12 + 4 + 3) * FLOAT),
        (lambda: torch.ones(3, 5).addmm_(torch.ones(3, 4), torch.ones(4, 5)), 2 * 60, (12 + 20 + 2 * 15) * FLOAT),
        (lambda: torch.mm(torch.ones(3, 4), torch.ones(4, 5), out=torch.empty(3, 5)), 2 * 60, (12 + 20 + 15) * FLOAT),
        (
            lambda: torch.baddbmm(torch.empty(2, 3, 5), torch.ones(2, 3, 4), torch.ones(2, 4, 5), beta=0),
            2 * 120,
            (24 + 40 + 30) * FLOAT,
        ),
    ],
    ids=["bmm", "folded", "mv", "dot", "addmv", "addmm_", "out", "beta=0"],
)
def test_products(call, flops, moved):
    product = count(call).operators[-1]  # those before it fill the operands
    assert (product.flops, product.bytes) == (flops, moved)


@pytest.mark.parametrize(
    ("groups", "flops", "weights"), [(1, 2 * 2 * 36 * 4 * 4 * 9, 4 * 4 * 9), (4, 2 * 2 * 36 * 4 * 9, 4 * 9)]
)
def test_a_convolution_multiplies_the_channels_of_its_group(groups, flops, weights):
    layer, given = torch.nn.Conv2d(4, 4, 3, groups=groups), torch.ones(2, 4, 8, 8)
    operator = only(count(lambda: layer(given)))
    assert operator.flops == flops
    assert operator.bytes == (2 * 4 * 64 + weights + 4 + 2 * 4 * 36) * FLOAT


GATHERED = ROWS_BYTES + IDS_BYTES + ROWS_BYTES
BYTES = {
    "add": (lambda: X + Y, 3 * N),
    "scalar": (lambda: X + 1, 2 * N),
    "square": (lambda: X * X, 2 * N),
    "cast": (lambda: X.clone().bfloat16(), 2 * N + N + N // 2),
    "cat": (lambda: torch.cat([X, Y]), 4 * N),
    "expanded": (lambda: torch.ones(1, 8).expand(4, 8) + Y, 32 + 32 + 2 * N),  # made, then read once and not four times
    "windows": (lambda: torch.arange(8.0).unfold(0, 4, 1).clone(), 32 + 32 + 5 * 4 * FLOAT),  # over 8 elements
    "slice": (lambda: X[:, :2].clone(), 2 * 4 * 2 * FLOAT),
    "nothing": (lambda: X[:0] + 1, 0),
    "zeros": (lambda: torch.zeros(4, 8), N),
    "zeros_like": (lambda: torch.zeros_like(X), N),
    "new_full": (lambda: X.new_full((2,), 3.0), 2 * FLOAT),
    "norm": (lambda: F.layer_norm(X, (8,)), 2 * N + 2 * 4 * FLOAT),  # and a mean and a deviation per row
    # a change in place reads only what it needs
    "add_": (lambda: STATE.add_(Y), 3 * N),
    "mul_": (lambda: STATE.mul_(2), 2 * N),
    "copy_": (lambda: STATE.copy_(Y), 2 * N),
    "copy_ to a slice": (lambda: STATE[:, :2].copy_(Y[:, :2]), 2 * N // 4),
    "copy_ of one": (lambda: STATE.copy_(Y.new_ones(1)), FLOAT + FLOAT + N),
    "fill_": (lambda: STATE.fill_(3), N),
    "zero_": (lambda: STATE.zero_(), N),
    "uniform_": (lambda: STATE.uniform_(), N),
    # a gather reads the rows it gathers, and no more than the table
    "embedding": (lambda: F.embedding(IDS, TABLE), GATHERED),
    "index": (lambda: TABLE[IDS], GATHERED),
    "index_select": (lambda: TABLE.index_select(0, IDS.view(-1)), GATHERED),
    "take": (lambda: torch.take(TABLE, IDS.view(6, 1).expand(6, 8)), GATHERED),
    "gather": (lambda: TABLE.gather(0, IDS.view(6, 1).expand(6, 8)), GATHERED),
    "by keyword": (lambda: torch.ops.aten.embedding(weight=TABLE, indices=IDS), GATHERED),
    "small table": (lambda: F.embedding(NO_IDS, SMALL_TABLE), 64 + IDS_BYTES + ROWS_BYTES),
}


@pytest.mark.parametrize(("call", "moved"), BYTES.values(), ids=BYTES)
def test_bytes_are_those_of_what_is_read_and_written(call, moved):
    work = count(call)
    assert (work.bytes, work.flops) == (moved, 0)


@pytest.mark.parametrize("frozen", [False, True])
def test_a_bag_of_embeddings_reads_every_row_it_adds(frozen):
    bag, ids, offsets = torch.nn.EmbeddingBag(1000, 8, mode="sum"), IDS.view(-1), torch.tensor([0, 4])
    bag.weight.requires_grad_(not frozen)
    with torch.no_grad():
        outputs = torch.ops.aten._embedding_bag(bag.weight, ids, offsets)  # the sums, and the bookkeeping beside them
    operator = only(count(lambda: bag(ids, offsets)))
    assert operator.bytes == ROWS_BYTES + ids.nbytes + offsets.nbytes + sum(output.nbytes for output in outputs)


NO_WORK = {
    "view": lambda: X.view(8, 4).t()[1:].unsqueeze(0).expand(3, -1, -1).transpose(0, 1).detach(),
    "split": lambda: [*X.split(2), *X.chunk(2), *X.unbind(), *torch.unsafe_split(X, 2)],
    "allocation": lambda: torch.empty(8).resize_(4),
    "view in place": lambda: torch.empty_like(X).unsqueeze_(0),
    "nothing to convert": lambda: X.contiguous().reshape(2, 16).to(torch.float32),
    "dropout of a model in use": lambda: F.dropout(X, 0.5, training=False),
}


@pytest.mark.parametrize("call", NO_WORK.values(), ids=NO_WORK)
@pytest.mark.parametrize("inference", [False, True])
def test_views_and_allocations_are_no_work(call, inference):
    def recorded():
        torch.empty(0)  # so that the call has an operator to see at all
        with torch.profiler.record_function("block"):
            call()

    with torch.inference_mode(inference):
        assert count(recorded) == Work(operators=(), least_bytes=0)


def test_calls_of_one_operator_at_the_same_shapes_add_up():
    work = count(lambda: (X + Y, X[:2] + Y[:2], X + 1, Y + X))
    assert [(operator.name, operator.shapes, operator.calls, operator.bytes) for operator in work.operators] == [
        ("aten::add", ((4, 8), (4, 8)), 2, 6 * N),
        ("aten::add", ((2, 8), (2, 8)), 1, 3 * N // 2),
        ("aten::add", ((4, 8),), 1, 2 * N),
    ]
    assert (work.calls, work.bytes) == (4, 6 * N + 3 * N // 2 + 2 * N)


@pytest.mark.parametrize("mask", [None, torch.ones(2, 1, 5, 5)], ids=["no mask", "mask"])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_attention_counts_the_scores_and_the_sum_of_every_query_head(mask, kv_heads):
    query, key, value = torch.ones(2, 4, 5, 8), torch.ones(2, kv_heads, 5, 8), torch.ones(2, kv_heads, 5, 8)
    work = count(lambda: F.scaled_dot_product_attention(query, key, value, mask, enable_gqa=kv_heads != 4))
    assert work.flops == 2 * 2 * 4 * 5 * 5 * (8 + 8)
    moved = 2 * query.nbytes + 2 * key.nbytes + 2 * 4 * 5 * FLOAT  # q, out, k, v, and the logarithm of each row's sum
    assert work.bytes == moved + (mask.nbytes if mask is not None else 0)
    query, key = torch.ones(1, 2, 3, 8), torch.ones(1, 2, 7, 8)  # of other lengths: their product
    assert count(lambda: F.scaled_dot_product_attention(query, key, key)).flops == 2 * 2 * 3 * 7 * (8 + 8)


@pytest.mark.parametrize("is_varlen", [True, False])
def test_attention_of_packed_texts_counts_the_pairs_of_each_text(is_varlen):
    from torch.nn.attention import varlen  # which defines its operator

    assert varlen
    lengths, heads, width = (5, 3, 1), 4, 8
    starts = torch.tensor([0, 5, 8, 9], dtype=torch.int32)
    query, key, value = torch.zeros(3, sum(lengths), heads, width)
    pairs = sum(length**2 for length in lengths)
    if is_varlen:
        func, given = torch.ops.torch_attn._varlen_attn.default, (query, key[:, :2], value[:, :2], starts, None, 5, 5)
    else:
        func, given = torch.ops.aten._efficient_attention_forward.default, (
            query[None], key[None], value[None], None, starts, starts, 5, 5, 0.0, 2,
        )  # fmt: skip
    assert operators.flops(func, given, {}, None) == 2 * pairs * heads * 2 * width
    ends = torch.arange(4, dtype=torch.int32)  # one query of each text, as in a last layer that is trimmed
    position = 3 if is_varlen else 4
    one = [*given[:position], ends, starts, *given[position + 2 :]]
    assert operators.flops(func, one, {}, None) == 2 * sum(lengths) * heads * 2 * width
    if not is_varlen:
        dense = [*given[:4], None, None, None, None, 0.0, 0]
        assert operators.flops(func, dense, {}, None) == 2 * sum(lengths) ** 2 * heads * 2 * width


def test_a_fused_layer_without_a_formula_is_refused_with_the_way_out():
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    texts = torch.ones(2, 3, 8)
    with pytest.raises(ValueError, match=r"aten::_transformer_encoder_layer_fwd.*set_fastpath_enabled\(False\)"):
        count(lambda: layer(texts))
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        assert count(lambda: layer(texts)).flops == 2 * 6 * (4 * 8 * 8 + 2 * 8 * 16) + 4 * 2 * 3 * 3 * 8
    finally:
        torch.backends.mha.set_fastpath_enabled(True)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (
            lambda: torch.ops.higher_order.cond(torch.tensor(True), lambda x: (x + 1,), lambda x: (x,), (X,)),
            "the work of cond is not known",
        ),
        (lambda: torch.eye(3).to_sparse_coo() * 2, "layout torch.sparse_coo"),
        (lambda: None, "ran no operator"),
    ],
    ids=["of higher order", "sparse", "nothing"],
)
def test_what_cannot_be_counted_is_refused(call, says):
    with pytest.raises(ValueError, match=says):
        count(call)


@pytest.mark.parametrize("watched", [count, record])
def test_an_operator_that_torch_itself_refuses_to_show_is_one_of_unknown_work(watched):
    def refused():
        raise NotImplementedError("There was no rule registered for HOP cond and mode <mode>.")

    def unfinished():
        raise NotImplementedError("no forward")

    with pytest.raises(UnknownWorkError, match="the work of cond is not known; use"):
        watched(refused)
    with pytest.raises(NotImplementedError, match="no forward"):
        watched(unfinished)


@pytest.fixture
def spin():
    """Return an operator of our own whose two calls take 0.5 s and 0.25 s of `spin.clock`."""
    library = torch.library.Library("boundby_test", "DEF")
    library.define("spin(Tensor x) -> Tensor")
    clock, seconds = FakeClock(), [0.5, 0.25]

    def run(x):
        clock.advance(seconds.pop(0))
        return x.clone()

    library.impl("spin", run, "CompositeExplicitAutograd")
    operator = torch.ops.boundby_test.spin
    yield SimpleNamespace(clock=clock, operator=operator)
    flop_registry.pop(operator, None)
    library._destroy()


def test_an_operator_from_elsewhere_needs_a_formula(spin):
    with pytest.raises(ValueError, match=r"FLOPs of boundby_test::spin are not known.*register_flop_formula"):
        count(lambda: spin.operator(X))


def test_a_clock_times_the_operators_and_not_the_counting(spin):
    @register_flop_formula(spin.operator)
    def slow_to_count(shape, out_shape):
        spin.clock.advance(64.0)
        return 7

    work = count(lambda: (spin.operator(X), spin.operator(X), X + Y), clock=spin.clock)
    assert [(operator.name, operator.calls, operator.flops, operator.seconds) for operator in work.operators] == [
        ("boundby_test::spin", 2, 14, 0.75),
        ("aten::add", 1, 0, 0.0),
    ]
    assert spin.clock.now == 2 * 64.0 + 0.75


def test_least_bytes_leave_out_what_stays_in_between():
    first, second, unused = torch.nn.Linear(8, 16), torch.nn.Linear(16, 2), torch.nn.Linear(8, 8)
    model = torch.nn.Sequential(first, torch.nn.ReLU(), second)
    model.unused = unused
    weights = sum(parameter.nbytes for layer in (first, second) for parameter in layer.parameters())
    work = count(lambda: {"logits": torch.nn.Sequential.forward(model[:3], X)})
    assert work.least_bytes == weights + N + 4 * 2 * FLOAT
    assert work.bytes == work.least_bytes + 4 * 4 * 16 * FLOAT  # the hidden layer, and after its ReLU


LEAST_BYTES = {
    "read twice": (lambda: (X + Y, X * Y), 2 * N + 2 * N),
    "rows": (lambda: F.embedding(IDS, TABLE), GATHERED),
    "rows twice": (lambda: [F.embedding(IDS, TABLE).sum() for _ in range(2)], ROWS_BYTES + IDS_BYTES + 2 * FLOAT),
    "two views": (lambda: (X.t().clone(), X.clone()), N + 2 * N),
    "halves": (lambda: [(X[:2] + 1).sum(), (X[2:] + 1).sum()], N + 2 * FLOAT),
    "changed in between": (lambda: (X + 1).add_(Y), 2 * N + N),
    "returned twice": (lambda: (X + 1,) * 2, N + N),
    "view returned": (lambda: [X.view(-1), X.sum()], N + FLOAT),
    "only written": (lambda: torch.empty(8).fill_(1), 32),
    "copied into": (lambda: torch.ones(4, 8).copy_(X).sum(), N + FLOAT),
    "change of what was there": (lambda: STATE.add_(Y), 3 * N),
    "replaced": (lambda: STATE.copy_(Y), 2 * N),
}


@pytest.mark.parametrize(("call", "moved"), LEAST_BYTES.values(), ids=LEAST_BYTES)
def test_least_bytes_are_given_and_returned_bytes_once(call, moved):
    assert count(call).least_bytes == moved


def test_gradients_are_off_while_counting_and_nothing_stays_installed_even_after_an_error():
    layer = torch.nn.Linear(8, 2)
    kept: list[torch.Tensor] = []
    count(lambda: kept.append(layer(X)))
    assert not kept[0].requires_grad
    assert torch.is_grad_enabled() and torch._C._len_torch_dispatch_stack() == 0
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        count(lambda: torch.nn.Linear(4, 2)(X))
    assert torch.is_grad_enabled() and torch._C._len_torch_dispatch_stack() == 0


def test_a_call_in_inference_mode_counts_the_same():
    def model_and_input():
        return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(), torch.nn.Linear(8, 2)).eval(), X.clone()

    model, given = model_and_input()
    expected = count(lambda: model(given[None]).relu_())
    with torch.inference_mode():
        inference_model, inference_given = model_and_input()
        assert count(lambda: model(given[None]).relu_()) == expected
        assert count(lambda: inference_model(inference_given[None]).relu_()) == expected
        assert count(lambda: inference_given.add_(1)).bytes == 2 * N
    assert count(torch.inference_mode()(lambda: model(given[None]).relu_())) == expected
    assert expected.flops == 2 * 4 * 8 * (8 + 2)


def test_a_compiled_module_counts_as_the_eager_one_and_a_subclass_of_tensor_by_its_parts():
    from torch.testing._internal.two_tensor import TwoTensor

    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 2))
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad():
        compiled(X)
    assert count(lambda: compiled(X)) == count(lambda: model(X))
    assert count(lambda: model[1](TwoTensor(X, Y))).flops == 2 * count(lambda: model[1](X)).flops


def test_the_formula_adds_up_by_hand():
    shape = TransformerShape(
        layers=2, hidden=8, heads=2, kv_heads=1, head_dim=4, intermediate=16, gated=True, labels=3, pooled=False
    )
    weights = 64 + 32 + 32 + 64 + 3 * 128  # q, k, v, o, feed-forward
    squares = 2 * 2 * (2 * 3 * 3 * 4 * 2)  # texts x heads, scores and sums
    assert transformer_flops(shape, 2, 3) == 2 * (2 * 6 * weights + squares) + 2 * 6 * 8 * 3


OTHER_FAMILIES = ("Camembert", "DistilBert", "Llama", "Mistral", "Qwen3", "Roberta", "XLMRoberta")


@pytest.mark.parametrize(
    ("family", "attention", "is_padded"),
    [
        *itertools.product(["Bert", "GPT2", "Qwen2"], ["sdpa", "eager"], [False, True]),
        *((family, "sdpa", False) for family in OTHER_FAMILIES),
    ],
)
def test_counted_flops_agree_with_the_formula(build, family, attention, is_padded):
    model = build(family, attention)
    for texts, tokens in SHAPES[1:2] if family in OTHER_FAMILIES else SHAPES:
        counted = count(forward(model, texts, tokens, padding=tokens // 3 if is_padded else 0)).flops
        expected = transformer_flops(transformer_shape(model), texts, tokens)
        assert counted == pytest.approx(expected, rel=0.01), (texts, tokens)


def test_the_shape_is_that_of_the_config_or_none_where_the_formula_is_not_known(build):
    common = {"layers": 2, "hidden": 32, "heads": 4, "labels": 3, "pooled": False}
    qwen = TransformerShape(**common, kv_heads=2, head_dim=16, intermediate=48, gated=True)
    gpt = TransformerShape(**common, kv_heads=4, head_dim=8, intermediate=128, gated=False)
    assert (transformer_shape(build("Qwen3")), transformer_shape(build("GPT2"))) == (qwen, gpt)
    model = build("Bert")
    assert transformer_shape(torch.compile(model, backend="eager")) == transformer_shape(model) is not None
    assert transformer_shape(torch.nn.Linear(4, 3)) is None
    assert transformer_shape(model.bert) is None  # no classifier
    assert transformer_shape(SimpleNamespace(config=SimpleNamespace(model_type="mixtral"))) is None


@pytest.mark.parametrize("family", ["Bert", "GPT2", "Qwen2"])
def test_useful_flops_are_the_sum_over_the_texts_each_alone_and_inference_mode_changes_none(build, family):
    call = forward(build(family, "eager"), 3, 16, padding=5)
    expected = count(call)
    with torch.inference_mode():
        assert count(call) == expected
    model = build(family)

    def count_at(batch, tokens):
        return count(forward(model, batch, tokens)).flops

    useful = fit_length_cost(count_at, LENGTHS).flops(LENGTHS)
    assert useful == sum(count_at(1, tokens) for tokens in LENGTHS)
    assert count_at(len(LENGTHS), max(LENGTHS)) > useful


def parabola(batch: int, tokens: int) -> int:
    return batch * (1000 + 30 * tokens + 7 * tokens**2)


def window(batch: int, tokens: int) -> int:
    """Return the FLOPs of attention to the last 100 tokens."""
    return batch * tokens * min(tokens, 100)


def test_four_forwards_of_one_text_are_enough_for_any_lengths():
    asked: list[tuple[int, int]] = []

    def count_at(batch, tokens):
        asked.append((batch, tokens))
        return parabola(batch, tokens)

    lengths = [*range(1, 513), 7, 7]
    assert fit_length_cost(count_at, lengths).flops(lengths) == sum(parabola(1, tokens) for tokens in lengths)
    assert len(asked) == len(set(asked)) == 4 and {batch for batch, _ in asked} == {1}
    assert {1, 512} < {tokens for _, tokens in asked}


def test_attention_over_a_window_has_no_parabola_beyond_it_and_says_so_and_up_to_three_lengths_are_counted():
    for longest in (101, 200, 512, 4000):
        cost = fit_length_cost(window, range(1, longest + 1))
        assert cost.flops([5, 6]) is None
        assert cost.reason is not None and cost.reason.startswith("FLOPs are no parabola of the tokens")
    for lengths in ((9,), (9, 9, 300), (2, 90, 300, 90), range(1, 101)):
        assert fit_length_cost(window, lengths).flops(lengths) == sum(window(1, tokens) for tokens in lengths)


def test_a_cost_serves_any_choice_of_its_lengths_and_no_lengths_are_an_error():
    cost = fit_length_cost(parabola, range(1, 65))
    assert cost.flops([3, 60, 60]) == parabola(1, 3) + 2 * parabola(1, 60)
    assert cost.flops([]) == 0
    with pytest.raises(ValueError, match="no lengths"):
        fit_length_cost(parabola, [])


def test_a_query_of_a_tensor_subclass_is_made_of_no_other_operators():
    assert not is_composite(torch.ops.prim.device.default)  # of which torch knows no kernels
