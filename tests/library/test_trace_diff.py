"""What differs between two traces, on traces with known answers and on real ones."""

import itertools

import pytest

from boundby.trace import analyze, read_trace
from boundby.trace.difference import Amount, Diff, StepSpread, diff
from boundby.trace.operators import Caller, callers
from tests.traces import GPU_TRACES, REAL_NAMES, analysis_of, call, event, step, work, write


def loop(folder, lengths, *, kernel="gemm", kernel_us=100.0, shapes="[[8]]"):
    """Return a loop of steps of these lengths, each with one operator of 40 us that launches a kernel."""
    folder.mkdir(exist_ok=True)
    dims = {} if shapes is None else {"Input_Dims": [[int(shapes.strip("[]"))]]}
    events, at = [], 0.0
    for number, length in enumerate(lengths):
        events += [
            step(number, at, length),
            event("aten::mm", at + 10, 40, **dims),
            call(at + 20, 10, number + 1),
            work(at + 60, kernel_us, number + 1, name=kernel),
        ]
        at += length
    return analysis_of(folder, *events)


def only(result: Diff, name: str):
    [change] = [operator for operator in (*result.operators, *result.kernels) if operator.name == name]
    return change


def test_equal_traces_do_not_differ(tmp_path):
    difference = diff(loop(tmp_path, [500, 510, 520]), loop(tmp_path, [500, 510, 520]))
    assert difference.is_per_step and difference.group_by == "shapes" and difference.is_beyond_spread is False
    assert [operator.weight for operator in (*difference.operators, *difference.kernels)] == [0, 0]
    assert {item.change_ns for item in (*difference.busy, *difference.idle)} == {0}


def test_amounts_are_per_step_where_both_traces_have_steps(tmp_path):
    difference = diff(loop(tmp_path, [500] * 3), loop(tmp_path, [500] * 6, kernel_us=150))
    kernel = only(difference, "gemm")
    assert kernel.a == Amount(1.0, pytest.approx(100_000), pytest.approx(100_000), None)
    assert kernel.b == Amount(1.0, pytest.approx(150_000), pytest.approx(150_000), None)
    assert kernel.difference("device_total_ns") == pytest.approx(50_000)
    assert kernel.difference("calls") == 0
    operator = only(difference, "aten::mm")
    assert operator.difference("cpu_self_ns") == pytest.approx(0)
    assert operator.difference("device_self_ns") == pytest.approx(50_000)
    compute = next(item for item in difference.busy if item.name == "compute")
    assert (compute.a_ns, compute.b_ns) == (pytest.approx(100_000), pytest.approx(150_000))
    assert sum(item.change_ns for item in difference.idle) == pytest.approx(-50_000)


def test_without_steps_in_one_trace_amounts_are_totals(tmp_path):
    plain = analysis_of(tmp_path, event("aten::mm", 0, 40), call(5, 10, 1), work(60, 100, 1))
    difference = diff(plain, loop(tmp_path, [500] * 3, shapes=None))
    assert not difference.is_per_step
    assert only(difference, "gemm").difference("device_total_ns") == 200_000
    assert only(difference, "gemm").difference("calls") == 2
    assert (difference.step_a, difference.is_beyond_spread) == (None, None)
    assert difference.step_b == StepSpread(3, 500_000, 500_000, 500_000)


def test_what_one_trace_lacks_has_one_side(tmp_path):
    difference = diff(loop(tmp_path, [500] * 3, kernel="old"), loop(tmp_path, [500] * 3, kernel="new"))
    assert only(difference, "old").b is None
    assert only(difference, "new").a is None
    assert only(difference, "old").difference("device_total_ns") == pytest.approx(-100_000)
    assert only(difference, "new").difference("device_total_ns") == pytest.approx(100_000)
    assert only(difference, "new").difference("cpu_self_ns") is None


def test_other_shapes_are_another_operator(tmp_path):
    difference = diff(loop(tmp_path, [500] * 3, shapes="[[8]]"), loop(tmp_path, [500] * 3, shapes="[[16]]"))
    sides = {(operator.input_shapes, operator.a is None, operator.b is None) for operator in difference.operators}
    assert sides == {("[[8]]", False, True), ("[[16]]", True, False)}


def test_operators_match_by_name_where_a_trace_lacks_shapes(tmp_path):
    two_shapes = [event("aten::mm", 0, 40, Input_Dims=[[8]]), event("aten::mm", 50, 20, Input_Dims=[[16]])]
    difference = diff(analysis_of(tmp_path, *two_shapes), analysis_of(tmp_path, event("aten::mm", 0, 50)))
    [change] = difference.operators
    assert difference.group_by == "name"
    assert (change.name, change.input_shapes) == ("aten::mm", None)
    assert change.a == Amount(2.0, None, None, 60_000.0)
    assert change.difference("cpu_self_ns") == -10_000


def test_device_time_is_unknown_where_a_trace_has_no_device(tmp_path):
    with_device = analysis_of(tmp_path, event("aten::mm", 0, 40), call(5, 10, 1), work(60, 100, 1))
    difference = diff(analysis_of(tmp_path, event("aten::mm", 0, 50)), with_device)
    change = only(difference, "aten::mm")
    assert change.difference("device_total_ns") is None
    assert change.weight == 10_000
    kinds = {item.name: (item.a_ns, item.b_ns) for item in difference.busy}
    assert kinds["operators"] == (50_000, None)
    assert kinds["compute"] == (None, 100_000)


@pytest.mark.parametrize(
    ("a", "b", "beyond"),
    [
        ([500, 510, 520, 530], [540, 550, 560, 570], True),
        ([540, 550, 560, 570], [500, 510, 520, 530], True),
        ([500, 510, 520, 560], [505, 515, 540, 570], False),
        ([500, 510], [540, 550, 560], None),
    ],
)
def test_the_change_of_the_step_is_held_against_the_spread_of_the_steps(tmp_path, a, b, beyond):
    assert diff(loop(tmp_path, a), loop(tmp_path, b)).is_beyond_spread is beyond


def test_the_largest_changes_come_first_whichever_way_they_go(tmp_path):
    names = ["aten::a", "aten::b", "aten::c"]
    first = [event(name, 100 * index, 50) for index, name in enumerate(names)]
    changes = zip(names, (5, -30, 10), strict=True)
    second = [event(name, 100 * index, 50 + change) for index, (name, change) in enumerate(changes)]
    difference = diff(analysis_of(tmp_path, *first), analysis_of(tmp_path, *second))
    ranked = [(operator.name, operator.difference("cpu_self_ns")) for operator in difference.operators]
    assert ranked == [("aten::b", -30_000), ("aten::c", 10_000), ("aten::a", 5_000)]


# Like with like


def job(folder, *, steps=4, batch=8, copies=1, device="NVIDIA H100", kind="float", lost=0, **header):  # noqa: PLR0913
    """Return a loop whose steps multiply a batch and then copy it `copies` times, all in one function."""
    folder.mkdir(exist_ok=True)
    header = {"deviceProperties": [{"name": device}]} | header
    events, number = [], 100
    events += [work(2 * index, 2, 900 + index, name="early") for index in range(lost)]
    for index in range(steps):
        at = 1000 * index
        events += [step(index, at, 1000), event("train.py(42): step", at, 900, "python_function")]
        names = [("aten::mm", "gemm", 300)] + [("aten::copy_", "copy_kernel", 20)] * copies
        for name, kernel, length in names:
            number += 1
            dims, types = [[batch, 64], [64, 32]], [kind, kind]
            events += [event(name, at + 10, 10, Input_Dims=dims, Input_type=types), call(at + 12, 4, number)]
            events.append(work(at + 30, length, number, name=kernel))
            at += 25 if name == "aten::copy_" else 320
    return analyze(read_trace(write(folder, *events, **header)))


def host_only(folder):
    folder.mkdir()
    return analysis_of(
        folder, *(item for k in range(4) for item in (step(k, 1000 * k, 1000), event("aten::mm", 1000 * k, 9)))
    )


def test_two_traces_of_one_kind_are_compared_without_a_warning(tmp_path):
    assert diff(job(tmp_path / "a"), job(tmp_path / "b", copies=3)).unlike == ()


@pytest.mark.parametrize(
    ("kind", "other", "text"),
    [
        ("device", {"device": "AMD Instinct MI300X"}, "A ran on NVIDIA H100, B on AMD Instinct MI300X"),
        ("ranks", {"distributedInfo": {"rank": 0, "world_size": 8}}, "A is of a job of 1 rank(s), B of 8"),
        ("steps", {"steps": 6}, "A holds 4 step(s), B 6 step(s)"),
        ("shapes", {"batch": 16}, "inputs have other sizes: aten::mm takes [[8, 64], [64, 32]] in A"),
        ("types", {"kind": "c10::Half"}, "operators of A take float, those of B Half"),
        ("backlog", {"lost": 12}, "12 device operations of B (0.0 ms) were launched before its recording began"),
    ],
)
def test_what_makes_two_traces_unlike_is_told_by_kind(tmp_path, kind, other, text):
    (unlike,) = diff(job(tmp_path / "a"), job(tmp_path / "b", **other)).unlike
    assert (unlike.kind, text in unlike.text) == (kind, True)


def test_two_ranks_of_one_job_and_a_host_alone_are_unlike(tmp_path):
    ranks = [job(tmp_path / f"{rank}", distributedInfo={"rank": rank, "world_size": 2}) for rank in (0, 1)]
    assert [item.kind for item in diff(*ranks).unlike] == ["ranks"]
    assert "host_only" in [item.kind for item in diff(ranks[0], host_only(tmp_path / "host")).unlike]


def test_work_from_before_the_recording_is_not_in_the_amounts(tmp_path):
    difference = diff(job(tmp_path / "a"), job(tmp_path / "b", lost=12))
    assert "early" not in [kernel.name for kernel in difference.kernels]
    assert {kernel.difference("calls") for kernel in difference.kernels} == {0.0}


@pytest.mark.parametrize("group_by", ["name", "shapes"])
def test_operators_are_matched_by_what_was_asked_for(tmp_path, group_by):
    difference = diff(job(tmp_path / "a"), job(tmp_path / "b", batch=16), group_by=group_by)
    assert difference.group_by == group_by
    assert all((operator.only_in is None) == (group_by == "name") for operator in difference.operators)


def test_the_change_is_traced_to_who_made_it_and_who_called_that(tmp_path):
    sides, called_by = [], []
    for name, copies in (("a", 1), ("b", 5)):
        sides.append(job(tmp_path / name, copies=copies))
        called_by.append(callers(read_trace(tmp_path / name / "trace.json")))
    difference = diff(*sides, group_by="name", called_by=tuple(called_by))
    part = next(item for item in difference.parts if item.name == "compute")
    assert part.change_ns == pytest.approx(80_000)
    by = part.contributor
    assert (by.name, by.change_ns, by.calls_change) == ("aten::copy_", pytest.approx(80_000), pytest.approx(4))
    assert by.caller == Caller(None, "train.py(42): step")
    assert diff(sides[0], sides[0]).parts == ()


@pytest.fixture(scope="module")
def real():
    if not GPU_TRACES.exists():
        pytest.skip(f"needs the traces in {GPU_TRACES}")
    return [analyze(read_trace(GPU_TRACES / name)) for name in REAL_NAMES]


def test_real_changes_add_up_and_turn_their_sign_with_the_sides(real):
    for a, b in itertools.combinations(real, 2):
        result, turned = diff(a, b), diff(b, a)
        spent = [
            sum(kernel.total_ns for kernel in side.kernels) - sum(item.total_ns for item in side.backlog)
            for side in (a, b)
        ]
        whole = [total / len(side.step_numbers) for total, side in zip(spent, (a, b), strict=True)]
        changes = [kernel.difference("device_total_ns") for kernel in result.kernels]
        assert sum(changes) == pytest.approx(whole[1] - whole[0])
        step_ns = [side.window_ns / len(side.step_numbers) for side in (a, b)]
        assert sum(item.change_ns for item in (*result.busy, *result.idle)) == pytest.approx(step_ns[1] - step_ns[0])
        for quantity in ("calls", "cpu_self_ns", "device_self_ns"):
            back = {
                (operator.name, operator.input_shapes): operator.difference(quantity) for operator in turned.operators
            }
            for operator in result.operators:
                assert operator.difference(quantity) == pytest.approx(-back[operator.name, operator.input_shapes])
        weights = [operator.weight for operator in result.operators]
        assert weights == sorted(weights, reverse=True)
