"""Device times of calls that are more launches than a queue holds: operators that issue work to a bounded queue."""

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from boundby.bound import device_time as module
from boundby.bound.device_time import CaptureLeftoverError, DeviceTimer, Launches, launches
from boundby.timing.timer import CHUNK, MOST_HELD, QUEUE_DEPTH, DeviceTime, Timer
from boundby.work.operators import does_work
from tests.fakes import FakeClock, QueuedDevice

HOST_S, KERNEL_S = 2.0**-15, 2.0**-16  # of one launch: 31 and 15 us
ONE = torch.ones(1)
# Launches of a Qwen2 classifier with a ready mask, counted; a GPU adds two for each of its layers, to pad the mask.
QWEN2 = {
    (24, "float32"): 1008 + 48,
    (24, "bfloat16"): 1109 + 48,
    (28, "float32"): 1172 + 56,
    (28, "bfloat16"): 1289 + 56,
}


class Issues(TorchDispatchMode):
    """Issues every operator that does work to a device."""

    def __init__(self, device: QueuedDevice) -> None:
        super().__init__()
        self._device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if does_work(func):
            self._device.issue(HOST_S, KERNEL_S)
        return func(*args, **(kwargs or {}))


class Graph:
    """A captured call, which the host issues as one launch."""

    def __init__(self, device: QueuedDevice, seconds: float) -> None:
        self._device, self._seconds = device, seconds

    def replay(self) -> None:
        self._device.issue(HOST_S, self._seconds)


@pytest.fixture
def device() -> Iterator[QueuedDevice]:
    device = QueuedDevice(FakeClock(), depth=QUEUE_DEPTH)
    with Issues(device):
        yield device


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch, device: QueuedDevice) -> SimpleNamespace:
    """Capture a call, unless there is an `error`; `tried` counts the captures."""
    settings = SimpleNamespace(error=None, tried=0)

    def captured(work: Callable[[], object], warm_ups: int) -> Graph:
        settings.tried += 1
        if settings.error:
            raise settings.error
        return Graph(device, KERNEL_S * launches(work).number)

    monkeypatch.setattr(module, "captured", captured)
    return settings


@pytest.fixture
def timer(device: QueuedDevice) -> DeviceTimer:
    return DeviceTimer(Timer(device.clock, device.synchronize), device)


def forward(number: int) -> Callable[[], object]:
    def work() -> None:
        for _ in range(number):
            torch.add(ONE.view(1, 1), ONE)  # a view launches nothing

    return work


@pytest.mark.parametrize("captured", [True, False], ids=["as a graph", "in chunks"])
@pytest.mark.parametrize("model", QWEN2, ids=str)
def test_a_forward_of_the_pods_model_has_a_device_time(timer, captures, captured, model):
    captures.error = None if captured else RuntimeError("operation not permitted when stream is capturing")
    number = QWEN2[model]
    times = timer.times(forward(number), number * HOST_S, number=3)
    assert times == 3 * [DeviceTime(number * KERNEL_S, by="graph" if captured else "chunks")]


@pytest.mark.parametrize("number", [1, CHUNK, MOST_HELD])
def test_a_forward_that_the_queue_holds_is_timed_behind_one_backlog_and_never_captured(timer, captures, number):
    assert timer.times(forward(number), number * HOST_S) == [DeviceTime(number * KERNEL_S, by="backlog")]
    assert captures.tried == 0


def test_what_the_host_did_not_issue_in_time_is_issued_in_chunks(timer, captures, device):
    assert timer.times(forward(2 * CHUNK), enqueue_s=0.0) == [DeviceTime(2 * CHUNK * KERNEL_S, by="chunks")]
    assert captures.tried == 0 and len(device.held) == 1 + 2


def test_a_forward_for_which_there_is_no_way_has_no_time_and_says_that_the_queue_was_full(timer, captures, device):
    captures.error = RuntimeError("no")

    def restless() -> None:  # its host is never done in time
        forward(1200)()
        device.synchronize()

    [times] = timer.times(restless, 1200 * HOST_S)
    assert times == DeviceTime(
        None, "the queue of launches was full: the call is about 1,200, and the queue holds about 1,024"
    )
    [times] = timer.times(lambda: device.synchronize(), HOST_S, like="it has no operator")
    assert times == DeviceTime(None, "the device reached the call before the host had issued all of it")


def test_a_graph_that_could_not_be_captured_is_not_tried_again(timer, captures):
    captures.error = torch.OutOfMemoryError()
    for _ in range(2):
        [times] = timer.times(forward(1200), 1200 * HOST_S)
        assert times.by == "chunks"
    assert (captures.tried, timer.leftover) == (1, None)


def test_what_a_capture_left_in_the_process_is_told(timer, captures):
    captures.error = CaptureLeftoverError("the stream still captures")
    timer.times(forward(1200), 1200 * HOST_S)
    assert timer.leftover == "a graph could not be captured and left the process in an unknown state"


def test_an_error_of_the_forward_passes_through(timer):
    with pytest.raises(ZeroDivisionError):
        timer.times(lambda: 1 / 0, HOST_S)


def test_a_forward_that_waits_for_the_device_is_timed_by_its_kernels_alone(timer, captures, monkeypatch):
    monkeypatch.setattr(module, "launches", lambda work: Launches(1200, waits=True))
    [times] = timer.times(forward(1200), 1200 * HOST_S)
    assert times == DeviceTime(None, module.WAITS) and captures.tried == 0  # a CPU build records no kernels
    event = SimpleNamespace(time_range=SimpleNamespace(elapsed_us=lambda: 250_000.0), is_user_annotation=False)
    events = [
        SimpleNamespace(**vars(event), device_type=SimpleNamespace(name=name)) for name in ("CUDA", "CUDA", "CPU")
    ]

    class Profile:
        def __init__(self, **_: Any) -> None: ...

        def __enter__(self) -> "Profile":
            return self

        def __exit__(self, *_: object) -> None: ...

        def events(self) -> list[Any]:
            return events

    monkeypatch.setattr(torch.profiler, "profile", Profile)
    assert timer.times(forward(1200), HOST_S) == [DeviceTime(0.5, by="kernels")]
    monkeypatch.setattr(module, "is_another_at_work", lambda: True)  # two of them end the process
    assert timer.times(forward(1200), HOST_S) == [DeviceTime(None, module.WAITS)]


class Answers(TorchDispatchMode):
    """Answers what tensors without values cannot: whatever is asked of them is 1."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            return func(*args, **(kwargs or {}))
        except (RuntimeError, NotImplementedError):
            return 1 if func is torch.ops.aten._local_scalar_dense.default else ONE


@pytest.mark.parametrize(
    ("read", "waits"),
    [
        (lambda given, _: given.sum().item(), True),
        (lambda given, _: given.nonzero(), True),
        (lambda given, _: bool((given > 0).all()), True),
        (lambda given, _: torch.equal(given, given), True),
        (lambda given, _: given[given > 0], True),
        (lambda given, _: given.masked_fill(given > 0, 1.0), False),
        (lambda given, _: given[torch.zeros(1, dtype=torch.int64, device="meta")], False),
        (lambda given, _: given.cpu(), True),
        (lambda given, _: given.to("cpu", non_blocking=True), False),
        (lambda given, host: given.copy_(host), True),
        (lambda given, host: given.copy_(host, non_blocking=True), False),
        (lambda given, host: host.to("meta"), True),
        (lambda given, _: given.to(torch.bfloat16), False),
        (lambda given, host: host.nonzero(), False),  # the host's own
        (lambda given, host: host.sum().item(), False),
        (lambda given, _: torch.nn.functional.linear(given, given), False),
    ],
)
def test_a_read_from_the_device_is_told_from_what_merely_looks_like_one(read, waits):
    given, host = torch.ones(4, 4, device="meta"), torch.ones(4, 4)
    with torch.inference_mode(), Answers():
        assert launches(lambda: read(given, host)).waits == waits


def test_what_composite_operators_are_made_of_is_counted_and_views_are_not():
    weights = torch.ones(8, 4)
    with torch.inference_mode():
        assert launches(lambda: torch.nn.functional.linear(ONE.expand(2, 4), weights).view(-1)).number == 1
        gru = torch.nn.GRU(4, 4)
        assert launches(lambda: gru(torch.ones(300, 1, 4))).number > 300
