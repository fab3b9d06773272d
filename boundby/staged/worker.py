"""A process that has one stage: it takes messages, computes, and hands on, until the connections close.

Every worker is its stage, its cores and its threads for as long as it lives. It ends when the process that started it
does, however that ends: the connection it reads from closes then.
"""

import contextlib
import os
import queue
import signal
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten

from boundby.device import synchronizer
from boundby.staged import wire
from boundby.staged.cutting import Program
from boundby.staged.places import Place
from boundby.staged.recording import Value
from boundby.staged.stage import StageModel

SENDABLE = (type(None), bool, int, float, str)  # that a model's output may hold beside tensors


@dataclass(frozen=True)
class Ends:
    """The connections of a worker: to the process that started it, and to its neighbours."""

    control: socket.socket
    before: socket.socket | None  # None for the first stage, which is told by `control`
    behind: socket.socket | None  # None for the last one


def serve(skeleton: nn.Module, program: Program, place: Place, ends: Ends) -> None:
    """Be a stage until the connections close. What goes wrong is told to the process that started this one."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process; the one that started this ends it
    try:
        if place.cores:
            os.sched_setaffinity(0, place.cores)
        torch.set_num_threads(place.threads)
        _Worker(skeleton, program, place, ends).work()
    except (EOFError, ConnectionError):
        pass
    except Exception as error:
        with contextlib.suppress(OSError):
            wire.send(ends.control, {"kind": "error", "text": f"{type(error).__name__}: {error}"})


class _Worker:
    """A stage, its connections, and the times of its requests."""

    def __init__(self, skeleton: nn.Module, program: Program, place: Place, ends: Ends) -> None:
        self._program, self._place, self._ends = program, place, ends
        self._stage = StageModel(skeleton, program, place.device)
        self._synchronize = synchronizer(torch.device(place.device))
        self._spans: list[tuple[int, int]] = []  # begin and end of each computation
        self._sent_bytes = 0
        self._values: dict[Value, torch.Tensor] = {}  # that came in last

    def work(self) -> None:
        self._load()
        for header, tensors in self._messages():
            if header["kind"] != "request":
                {"report": self._report, "occupy": self._occupy}[header["kind"]](header)
                continue
            repeats = header.pop("repeats", 1)
            for place in range(repeats):
                self._request({**header, "answers": place + 1 == repeats and header["answers"]}, tensors)

    def _load(self) -> None:
        while True:
            header, tensors = wire.receive(self._ends.control)
            if header["kind"] == "begin":
                wire.send(self._ends.control, {"kind": "ready"})
                return
            self._stage.load(header["names"], tensors[0])

    def _request(self, header: dict[str, Any], tensors: list[torch.Tensor]) -> None:
        arrived = (each.to(self._place.device) for each in tensors)
        self._values = dict(zip(self._program.arriving, arrived, strict=True))
        leaving, output = self._compute()
        if self._ends.behind is not None:
            self._sent_bytes = wire.send(self._ends.behind, header, [leaving[each] for each in self._program.leaving])
        elif header["answers"]:
            self._answer(header, output)

    def _compute(self) -> tuple[dict[Value, torch.Tensor], Any]:
        begin = time.perf_counter_ns()
        found = self._stage.run(self._values)
        self._synchronize()
        self._spans.append((begin, time.perf_counter_ns()))
        return found

    def _occupy(self, header: dict[str, Any]) -> None:
        """Compute the last request again and again where this stage is meant, beside the others that are."""
        if self._ends.behind is not None:
            wire.send(self._ends.behind, header)
        end = time.perf_counter_ns() + header["nanoseconds"]
        while self._program.index in header["stages"]:
            self._compute()
            if time.perf_counter_ns() >= end:
                break
        wire.send(self._ends.control, {"kind": "done"})

    def _answer(self, header: dict[str, Any], output: Any) -> None:
        if not header["outputs"]:
            wire.send(self._ends.control, {"kind": "done"})
            return
        leaves, spec = tree_flatten(output)
        unknown = next((each for each in leaves if not isinstance(each, (torch.Tensor, *SENDABLE))), None)
        if unknown is not None:
            raise ValueError(f"the model's output holds a {type(unknown).__name__}, which cannot be sent")
        plain = [{"tensor": True} if isinstance(each, torch.Tensor) else {"plain": each} for each in leaves]
        tensors = [each for each in leaves if isinstance(each, torch.Tensor)]
        wire.send(self._ends.control, {"kind": "done", "leaves": plain, "structure": str(spec)}, tensors)

    def _report(self, header: dict[str, Any]) -> None:
        wire.send(self._ends.control, {"kind": "times", "spans": self._spans, "sent_bytes": self._sent_bytes})
        self._spans = []
        if self._ends.behind is not None:
            wire.send(self._ends.behind, header)

    def _messages(self) -> Iterator[wire.Message]:
        """Yield what comes in. A thread of its own receives, so that a link carries while this stage computes."""
        inbox: queue.SimpleQueue[wire.Message | None] = queue.SimpleQueue()
        threading.Thread(target=self._receive, args=(inbox,), daemon=True, name="boundby-inbox").start()
        while (message := inbox.get()) is not None:
            yield message

    def _receive(self, inbox: "queue.SimpleQueue[wire.Message | None]") -> None:
        link = self._place.link
        try:
            while True:
                header, tensors = wire.receive(self._ends.before or self._ends.control)
                if link is not None and header["kind"] == "request":
                    time.sleep(link.seconds(sum(each.nbytes for each in tensors)))
                inbox.put((header, tensors))
        except (EOFError, OSError):
            inbox.put(None)
