"""Random small traces, sound and damaged ones, the same for the same seed."""

import copy
import json
import random
import re
from decimal import Decimal
from typing import Any

UNITS_NS = (1, 250, 1000, 4000)
BASES_NS = (0, 17_250, -40_000, 4_458_676_522_690_655, 1_712_195_495_519_689_047)
HOST_NAMES = (
    ("aten::mm", "cpu_op"),
    ("aten::mm", "Operator"),
    ("aten::add", "cpu_op"),
    ("aten::item", "cpu_op"),
    ("Optimizer.step#SGD.step", "user_annotation"),
    ("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", "user_annotation"),
    ("train.py(12): forward", "python_function"),
    ("nn.Module: Linear_0", "python_function"),
    ("torch/utils/data/dataloader.py(701): __next__", "python_function"),
    ("_compile.compile_inner (dynamo_timed)", "cpu_op"),
    ("cudaStreamSynchronize", "cuda_runtime"),
    ("hipDeviceSynchronize", "cuda_runtime"),
    ("cudaMalloc", "cuda_runtime"),
    ("cudaStreamWaitEvent", "cuda_runtime"),
    ("cuMemMap", "cuda_driver"),
)
CALL_NAMES = ("cudaLaunchKernel", "cudaMemcpyAsync", "cudaGraphLaunch", "hipLaunchKernel", "cuLaunchKernel")
WORK_NAMES = (
    ("gemm", "kernel"),
    ("relu", "Kernel"),
    ("ncclDevKernel_AllReduce", "kernel"),
    ("Memcpy HtoD (Pinned -> Device)", "gpu_memcpy"),
    ("Memcpy DtoH (Device -> Pageable)", "gpu_memcpy"),
    ("Memset (Device)", "gpu_memset"),
)
HOSTILE = (
    *(None, True, "", "x", "NaN", "1e9999999", "\ud800", [], [[1], {}], {}, {"a": [{}, {}]}, 0, -1, 1.5, 1e308, -1e308),
    *(2**31, 2**53, 2**63, 2**64, -(2**63), 10**30, 10**400, float("nan"), float("inf"), -float("inf")),
    *("ProfilerStep#" + "9" * 5000, "ProfilerStep#9223372036854775808", "kernel", "cpu_op", "i", "B", "E", "M"),
)


class Generator:
    """One random trace; `text` is its JSON."""

    def __init__(self, choose: random.Random) -> None:
        self._choose = choose
        self._unit = choose.choice(UNITS_NS)
        self._base = choose.choice(BASES_NS)
        self._length = choose.choice((20, 60, 150))
        self._correlation = 100
        self._devices = choose.choice(((0,), (0,), (0, 1), (3,)))
        self.events: list[dict] = []
        for thread in range(choose.randrange(1, 4)):
            if choose.random() < 0.5:
                self._nested(thread, 0, self._length, 4)
            else:
                for _ in range(choose.randrange(12)):
                    self._add(choose.choice(HOST_NAMES), thread, self._moment(), self._span())
            for _ in range(choose.choice((0, 2, 12))):
                self._launch(thread)
        for _ in range(choose.choice((0, 0, 0, 2))):
            self._work(None, self._moment())
        self._marks()
        for _ in range(choose.choice((0, 0, 3))):
            args = {"stream": choose.choice((7, 0, 20)), "device": 0}
            self._add(("Stream Wait Event", "cuda_sync"), 7, self._moment(), 1, args)
        if choose.random() < 0.8:
            choose.shuffle(self.events)

    def text(self) -> str:
        """Return the trace as JSON, its times as exact decimals."""
        text = json.dumps({"schemaVersion": 1, "traceEvents": self.events}, indent=self._choose.choice((None, None, 2)))
        return re.sub(r'"<([^>]*)>"', r"\1", text)

    def _moment(self) -> int:
        return self._choose.randrange(self._length)

    def _span(self) -> int:
        return self._choose.choice((-3, 0, 1, 1, 2, 3, 5, 8, 13, 30))

    def _add(
        self, what: tuple[str, str], tid: int, start: int, span: int, args: dict | None = None, pid: int = 1
    ) -> None:
        name, category = what
        args = dict(args or {})
        if category == "cpu_op" and self._choose.random() < 0.5:
            args |= {"External id": self._choose.randrange(8), "Input Dims": [[self._choose.randrange(1, 3), 4], []]}
        ts, dur = (Decimal(ns) / 1000 for ns in (self._base + start * self._unit, span * self._unit))
        event = {
            "ph": "X",
            "cat": category,
            "name": name,
            "pid": pid,
            "tid": tid,
            "ts": f"<{ts:f}>",
            "dur": f"<{dur:f}>",
        }
        self.events.append(event | ({"args": args} if args else {}))

    def _nested(self, thread: int, start: int, end: int, levels: int) -> None:
        while start < end and self._choose.random() < 0.9:
            first = self._choose.randrange(start, end)
            last = self._choose.randrange(first, end) + 1
            self._add(self._choose.choice(HOST_NAMES), thread, first, last - first)
            if levels:
                self._nested(thread, first, last, levels - 1)
            start = last

    def _launch(self, thread: int) -> None:
        moment = self._moment()
        name = self._choose.choice(CALL_NAMES)
        self._correlation += 1
        category = "cuda_driver" if name.startswith("cuL") else self._choose.choice(("cuda_runtime", "Runtime"))
        self._add((name, category), thread, moment, self._span(), {"correlation": self._correlation})
        works = self._choose.choice((0, 1, 1, 1)) if name != "cudaGraphLaunch" else self._choose.randrange(5)
        for _ in range(works):
            delay = self._choose.choice((-2, 0, 1, 2, 5, 20))
            self._work(self._correlation, moment + delay)

    def _work(self, correlation: int | None, start: int) -> None:
        stream = self._choose.choice((7, 7, 0, 20))
        args = {"stream": stream, "device": self._choose.choice(self._devices)}
        if correlation is not None:
            args["correlation"] = correlation
        if self._choose.random() < 0.2:
            args["External id"] = self._choose.randrange(8)
        self._add(self._choose.choice(WORK_NAMES), stream, start, self._span(), args, pid=args["device"])

    def _marks(self) -> None:
        start = self._choose.randrange(5)
        for number in range(self._choose.choice((0, 0, 1, 2, 4))):
            span = self._choose.randrange(1, 25)
            category = self._choose.choice(("user_annotation", "user_annotation", "cpu_op"))
            if self._choose.random() < 0.9:
                self._add((f"ProfilerStep#{number + 8}", category), 0, start, span)
            if self._choose.random() < 0.3:
                self._add((f"ProfilerStep#{number + 8}", "gpu_user_annotation"), 7, start + 2, span, pid=0)
            start += span + self._choose.choice((0, 0, 1, -1))


def random_trace(seed: int) -> str:
    """Return the JSON of a sound trace; the same for the same seed."""
    return Generator(random.Random(seed)).text()


def with_hostile_values(seed: int) -> bytes:
    """Return a trace of which some values are replaced by others of any type and size."""
    choose = random.Random(seed)
    trace = json.loads(random_trace(seed))
    for _ in range(choose.choice((1, 1, 3, 10))):
        index: Any = trace
        while isinstance(index, dict | list) and index:
            key = choose.choice(list(index)) if isinstance(index, dict) else choose.randrange(len(index))
            if not isinstance(index[key], dict | list) or choose.random() < 0.1:
                break
            index = index[key]
        if isinstance(index, dict | list) and index:
            index[key] = copy.deepcopy(choose.choice(HOSTILE))
    trace = trace if isinstance(trace, dict) else {"traceEvents": trace}
    return json.dumps(trace).encode()


def with_damaged_bytes(content: bytes, choose: random.Random) -> bytes:
    """Return the content with some of its bytes flipped, cut out, repeated, exchanged or put in."""
    damaged = bytearray(content)
    for _ in range(choose.choice((1, 1, 2, 5, 20))):
        at = choose.randrange(len(damaged) + 1)
        until = min(len(damaged), at + choose.choice((1, 1, 4, 40, 400)))
        match choose.randrange(6):
            case 0 if at < len(damaged):
                damaged[at] ^= 1 << choose.randrange(8)
            case 1:
                del damaged[at:until]
            case 2:
                damaged[at:at] = damaged[at:until]
            case 3:
                damaged[at:at] = choose.choice(
                    (b'"', b"{", b"}", b"[", b"]", b",", b"},{", b"\\", b"\xff", b"\0", b"-", b"e9")
                )
            case 4:
                source = choose.randrange(len(damaged) + 1)
                damaged[at:until] = damaged[source : source + until - at]
            case _:
                del damaged[at if choose.random() < 0.05 else len(damaged) :]
    return bytes(damaged)
