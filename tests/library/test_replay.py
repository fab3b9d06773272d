"""A forward run again as its operators: times of operators that move a fake clock, so the split is exact."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import register_flop_formula

from boundby.bound.bench import Bench
from boundby.bound.recording import program, record
from boundby.bound.replay import Lengths, Setting, replay
from boundby.bound.verdict import Fix
from boundby.formatting import Missing
from boundby.machine.sampler import DeviceLostError
from boundby.timing.timer import QUEUE_DEPTH, Timer
from boundby.work.operators import tensors_in
from boundby.work.roofline import Interval
from tests.fakes import FakeClock, FakeWatch, QueuedDevice

HALF = Fix("dtype", {"dtype": "bfloat16"})
THREADS = Fix("threads", {"threads": 1, "instead_of": 2})
KERNEL_S = 2.0**-4


class Machine:
    """Operators that take a known time for each row they are given, more where the one before was another."""

    def __init__(self) -> None:
        self.clock, self.slower, self.cold_s = FakeClock(), 1.0, 0.0
        self.device_s, self.issue_s = 0.0, 0.0
        self.last: object = None

    def run(self, given: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        seconds = KERNEL_S * given.shape[0] * self.slower * (0.5 if given.dtype is torch.bfloat16 else 1.0)
        seconds += self.cold_s * (self.last != weight.data_ptr())
        self.last = weight.data_ptr()
        self.device_s += seconds
        self.clock.advance(self.issue_s or seconds)
        return given + weight

    @contextmanager
    def half_speed(self) -> Iterator[None]:
        self.slower = 2.0
        yield
        self.slower = 1.0


MACHINE = Machine()


@torch.library.custom_op("boundby_tests::work", mutates_args=())
def work(given: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return MACHINE.run(given, weight)


@register_flop_formula(torch.ops.boundby_tests.work)
def flops_of_work(given: Any, weight: Any, *, out_shape: Any, **_: Any) -> int:
    return math.prod(out_shape)


@pytest.fixture
def machine() -> Machine:
    MACHINE.__init__()  # type: ignore[misc]
    return MACHINE


def model(given: torch.Tensor, weights: tuple[torch.Tensor, ...], between_s: float = 0.0) -> Callable[[], torch.Tensor]:
    def forward() -> torch.Tensor:
        hidden = given
        for weight in weights:
            MACHINE.clock.advance(between_s)
            hidden = work(hidden, weight)
        return hidden

    return forward


WEIGHTS = (torch.ones(8), torch.ones(8))


def replayed(forward, **options):
    given = {name: options.pop(name) for name in ("watch", "queue", "tell", "replay_s") if name in options}
    return replay(forward, Bench(Timer(MACHINE.clock), **{"watch": FakeWatch(), "trials_s": 0.0, **given}), **options)


def test_a_forward_is_its_operators_and_what_is_between_them(machine):
    machine.cold_s = 2.0**-6
    measured = replayed(model(torch.ones(4, 8), WEIGHTS, between_s=2.0**-5))
    [operator] = measured.operators
    assert operator.load.calls == measured.calls == 2
    assert (operator.load.shapes, operator.load.flops) == (((4, 8), (8,)), 64)
    assert operator.hot_s == 2 * 4 * KERNEL_S  # the weights of one call, hot
    assert measured.in_order_s.value == operator.in_order_s == 2 * (4 * KERNEL_S + machine.cold_s)
    assert measured.forward_s.value == measured.in_order_s.value + 2 * 2.0**-5
    assert measured.cut == () and measured.on_host and measured.rounds >= 3


def test_settings_are_replayed_in_turns_with_what_is_in_use(machine):
    settings = [Setting(HALF, dtype=torch.bfloat16), Setting(THREADS, entered=machine.half_speed)]
    variants = replayed(model(torch.ones(4, 8), WEIGHTS), settings=settings).variants
    ratios = {variant.fix.kind: variant.time_ratio for variant in variants}
    assert isinstance(ratios["dtype"], Interval) and ratios["dtype"].value == pytest.approx(0.5)
    assert isinstance(ratios["threads"], Interval) and ratios["threads"].value == pytest.approx(2.0)


def test_padding_is_the_work_that_shorter_texts_would_not_have(machine):
    def cut_to(tokens: int) -> Callable[[], torch.Tensor]:
        return model(torch.ones(tokens, 8), WEIGHTS)

    measured = replayed(cut_to(16), lengths=Lengths([16, 4], 16, cut_to))
    assert measured.operators[0].padding_share == pytest.approx(1 - 10 / 16)
    assert [(shape.tokens, shape.seconds) for shape in measured.shapes] == [
        (tokens, 2 * tokens * KERNEL_S)
        for tokens in (4, 8, 10, 16)  # 10 of each is what 16 and 4 come to
    ]
    assert isinstance(replayed(cut_to(2), lengths=Lengths([2], 2, cut_to)).padding, Missing)


def test_what_the_budget_does_not_reach_is_named_with_its_time(machine):
    cheap, dear = torch.ones(1, 8), torch.ones(64, 8)
    measured = replayed(lambda: (work(cheap, WEIGHTS[0]), work(dear, WEIGHTS[1])), replay_s=4.5 * 65 * KERNEL_S)
    assert measured.rounds == 1
    [cut] = measured.cut
    assert cut.kind == "budget" and cut.operators == ("boundby_tests::work",)
    assert sum(operator.hot_s is None for operator in measured.operators) >= 1


@pytest.mark.parametrize("budget_s", [20.0, 60.0])
def test_replays_end_with_their_budget_and_tell_how_much_of_it_is_left(machine, budget_s):
    left: list[float] = []
    measured = replayed(model(torch.ones(4, 8), WEIGHTS), replay_s=budget_s, tell=lambda _, left_s: left.append(left_s))
    assert measured.seconds <= budget_s and left == sorted(left, reverse=True) and left[-1] >= 0


def test_rounds_that_something_disturbed_do_not_count(machine):
    assert (
        replayed(
            model(torch.ones(4, 8), WEIGHTS), watch=FakeWatch(lambda window: 2.0 * (window < 2)), replay_s=60.0
        ).doubts
        == ()
    )
    always = replayed(model(torch.ones(4, 8), WEIGHTS), watch=FakeWatch(lambda window: 2.0), replay_s=60.0)
    assert always.doubts == (f"other processes used 2.0 of {torch.get_num_threads()} cores",)


class Queue:
    """A device whose time passes as work is queued, behind a host that is never late."""

    def hold(self, seconds: float) -> None:
        pass

    def mark(self) -> float:
        return MACHINE.device_s

    def has_passed(self, mark: float) -> bool:
        return False

    def seconds_between(self, start: float, end: float) -> float:
        return end - start


def test_on_a_device_operators_take_the_device_s_time_and_the_host_its_own(machine):
    machine.issue_s = 2.0**-7
    measured = replayed(model(torch.ones(4, 8), WEIGHTS), queue=Queue())
    assert (
        measured.operators[0].hot_s == measured.in_order_s.value == measured.operators[0].in_order_s == 2 * 4 * KERNEL_S
    )
    assert (measured.dispatch_s, measured.views_s, measured.on_host) == (0.0, 0.0, False)


def changes_in_place() -> torch.Tensor:
    return torch.arange(6.0).view(2, 3).t().add_(1).mul(2)


def splits_and_joins() -> torch.Tensor:
    first, second = torch.arange(8.0).chunk(2)
    return torch.cat([second, first]).softmax(0)


def normalises() -> torch.Tensor:
    return functional.layer_norm(functional.linear(torch.ones(2, 3, 4), torch.ones(5, 4)), (5,)).cumsum(1)


def attends() -> torch.Tensor:
    query = torch.linspace(-1, 1, 64).view(1, 2, 8, 4)
    return functional.scaled_dot_product_attention(query, query, query, is_causal=True)


def looks_up() -> torch.Tensor:
    ids = torch.tensor([[1, 2], [2, 0]])
    return functional.embedding(ids, torch.arange(12.0).view(4, 3)).masked_fill((ids == 0)[..., None], -1.0)[ids > 0]


@pytest.mark.parametrize("forward", [changes_in_place, splits_and_joins, normalises, attends, looks_up])
def test_a_program_computes_what_the_forward_does(forward):
    with torch.inference_mode():
        recording = record(forward)
        for step, args, kwargs in recording.walk():
            if step is recording.steps[-1]:
                result = step.func(*args, **kwargs)
        program(recording).run()
        assert torch.equal(next(tensors_in(result)), forward())


def test_an_operator_that_changes_a_buffer_is_not_called_alone(machine):
    buffer = torch.zeros(4)
    measured = replay(lambda: buffer.add_(1), Bench(watch=FakeWatch(), replay_s=2.0))
    assert [(cut.kind, cut.operators) for cut in measured.cut] == [("not_replayable", ("aten::add_",))]


def test_a_call_without_operators_cannot_be_replayed():
    with pytest.raises(ValueError, match="no operator"):
        replayed(lambda: None)


def test_nothing_is_kept_longer_than_it_is_needed():
    recording = record(lambda: torch.ones(4).add(1).mul(2).sub(3))
    assert [len(slots) for slots in recording.last_uses] == [0, 1, 1, 2]


class Launches(TorchDispatchMode):
    """Issues every operator to a device with a bounded queue; in a GPU that is what torch does."""

    def __init__(self, device: QueuedDevice, host_s: float, kernel_s: float) -> None:
        super().__init__()
        self.device, self._host_s, self._kernel_s = device, host_s, kernel_s

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.device.issue(self._host_s, self._kernel_s)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("operators", [100, 340, 1345])
def test_operators_have_their_times_in_order_however_many_of_them_the_queue_holds(machine, operators):
    host_s, kernel_s = 2.0**-15, 2.0**-16
    device = QueuedDevice(machine.clock, depth=QUEUE_DEPTH)
    given = torch.ones(1)

    def forward() -> None:
        hidden = given
        for _ in range(operators):
            hidden = hidden + given

    with Launches(device, host_s, kernel_s):
        timer = Timer(machine.clock, device.synchronize)
        measured = replay(forward, Bench(timer, device, FakeWatch(), replay_s=5.0))
    [operator] = measured.operators
    assert measured.in_order_s == Interval.exact(operators * kernel_s)
    assert operator.in_order_s == operators * kernel_s  # between the marks of each
    assert operator.hot_s == operators * kernel_s  # alone, in blocks of 132 calls


@pytest.mark.parametrize("which", ["alone", "setting"])
def test_an_operator_that_loses_the_gpu_ends_the_replay(machine, monkeypatch, which):
    lost = torch.AcceleratorError("CUDA error: device-side assert triggered")

    def loses(*_: Any, **__: Any) -> None:
        raise lost

    @contextmanager
    def losing():
        raise lost
        yield

    if which == "alone":
        monkeypatch.setattr("boundby.bound.replay._Replayer._alone", loses)
    settings = [Setting(THREADS, entered=losing)] if which == "setting" else []
    with pytest.raises(DeviceLostError, match="device-side assert"):
        replayed(model(torch.ones(4, 8), WEIGHTS), settings=settings)
