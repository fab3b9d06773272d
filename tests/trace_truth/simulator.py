"""A machine that plays programs: threads of the host, launch queue, streams, locks and ranks, each with a known cause.

What an analysis ought to say of a trace is found here without any rule about gaps: the program is *played again
without a cause*. Whatever it costs because of that cause then takes no time, or does not block; all else stays, and
what follows moves up as the rules of the machine let it. The true gain of a cause is the time of the steps over that
shorter time.

- Causes overlap: of two that delay the same kernel, each alone may gain nothing or both may gain the same. So gains do
  neither add nor multiply; that of several causes is found by playing without all of them.
- Host work that passes while the device is busy is free only as long as the device stays ahead of nothing: where the
  host never catches up, a second less of hidden work lets all that follows begin a second earlier. Played again, that
  counts; in the gaps of the first trace it cannot be seen.
- Without a wait for the device the host goes on at once, and what it does next passes meanwhile: so much the wait gains
  and no more, however much the host does afterwards.
- Without a transfer or copy, that piece of device work takes no time, but keeps its place in the order.
- `everything` leaves the work of the device alone: queue full from the start, order of streams and events kept.

Rules: a piece of device work begins when the stream is free, its launch has arrived and the events it waits for have
happened; a collective ends a transfer after it has begun on every rank. A launching call waits for room in the queue
and for the lock of the driver. Times are whole nanoseconds.
"""

import heapq
import itertools
from collections import defaultdict, deque
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

US = 1_000
MS = 1_000_000
QUEUE = 1_024  # pending launches that CUDA takes before it blocks
BASE_US = 1_000_000  # of the time stamps of a trace
MAIN, AUTOGRAD, LOADER, OTHER, BACKGROUND = 4242, 4301, 4400, 4500, 4600
COMPUTE, NCCL, COPY = 7, 20, 24  # numbers of streams, as torch tends to have them
HOST_CAUSES = (
    "input", "tokenizing", "python", "gc", "saving", "operators", "calls", "synchronisation", "allocator", "compile",
    "loading", "driver", "unrecorded",
)  # fmt: skip
DEVICE_CAUSES = ("latency", "graph_gaps", "straggler", "transfer", "memcpy")
IDLE = (*HOST_CAUSES, "latency", "graph_gaps")  # without these the device is left alone


class Waitable(Protocol):
    def park(self, thread: "Thread") -> None: ...


Plan = Generator[int | Waitable, None, None]
Action = Callable[["Thread"], Plan]


@dataclass(slots=True, eq=False)
class Work:
    """One piece of device work; `start` and `end` are known once all that it waits for is.

    Without a category it is a collective of the hosts, in no queue and in no trace.
    """

    name: str
    category: str | None
    rank: int
    stream: int
    length: int
    correlation: int
    arrived: int
    after: list["Work"]
    args: dict[str, Any]
    pause: int = 0  # of the device, before it begins
    meeting: "Meeting | None" = None
    start: int | None = None
    end: int | None = None
    followers: list["Work"] = field(default_factory=list)
    waiting: list["Thread"] = field(default_factory=list)

    def park(self, thread: "Thread") -> None:
        """Resume the thread when this has ended."""
        if self.end is None:
            self.waiting.append(thread)
        else:
            thread.machine.resume(thread, self.end)


@dataclass(slots=True)
class Meeting:
    """A collective: how many ranks take part, and when each was ready."""

    members: int
    transfer: int
    peer_ns: int = 0
    ready: dict[int, tuple[Work, int]] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class Begun:
    """The moment when a piece of work begins, as something to wait for."""

    work: Work

    def park(self, thread: "Thread") -> None:
        if self.work.start is None:
            self.work.waiting.append(thread)
        else:
            thread.machine.resume(thread, self.work.start)


@dataclass(slots=True, eq=False)
class Gate:
    """Something that several threads share and wait for: a lock, a queue of batches, a signal."""

    level: int = 0
    waiting: deque["Thread"] = field(default_factory=deque)

    def park(self, thread: "Thread") -> None:
        self.waiting.append(thread)

    def change(self, machine: "Machine", by: int) -> None:
        self.level += by
        while self.waiting:
            machine.resume(self.waiting.popleft(), machine.now)


@dataclass(slots=True, eq=False)
class Row:
    """One event of the host."""

    name: str
    category: str
    rank: int
    tid: int
    start: int
    args: dict[str, Any]
    end: int = -1
    waits: bool = False  # a launching call that ends with its work


@dataclass(slots=True, eq=False)
class Thread:
    machine: "Machine"
    rank: int
    tid: int
    recorded: bool = True
    plan: Plan | None = None
    actions: int = 0  # how many it has taken, the same however the program is played
    frames: list[int] = field(default_factory=list)

    def begin(self, name: str, category: str, **args: Any) -> Row:
        row = Row(name, category, self.rank, self.tid, self.machine.now, args)
        if self.recorded:
            self.machine.rows.append(row)
        return row

    def end(self, row: Row) -> None:
        row.end = self.machine.now

    def spend(self, length: int, cause: str, name: str | None = None) -> Plan:
        """Take the time, unless the program is played without this cause."""
        machine = self.machine
        length = self.varied(length)
        if length > 0:
            machine.spent[cause, name] += length
            if cause not in machine.removed and (cause, name) not in machine.removed:
                yield machine.now + length

    def varied(self, length: int) -> int:
        """Return what a length is this time."""
        self.actions += 1
        factors = self.machine.program.factors
        return round(length * factors[self.actions % len(factors)]) if factors else length

    def wait(self, works: Iterable[Work], cause: str) -> Plan:
        """Wait until the device has done these, unless played without this cause."""
        machine, begun = self.machine, self.machine.now
        if cause in machine.removed:
            return
        for work in works:
            while work.end is None or work.end > machine.now:
                yield work
        machine.spent[cause, None] += machine.now - begun


@dataclass(frozen=True)
class Program:
    """Threads by rank and number, and how the machine is; `recorded` are the threads that the trace holds."""

    name: str
    threads: tuple[tuple[int, int, Action], ...]
    latency: int = 2 * US
    queue: int = QUEUE
    unrecorded: frozenset[int] = frozenset()
    first_step: int = 0  # the number of the first recorded step: what came before is only played
    has_steps: bool = True
    has_stacks: bool = False
    has_device: bool = True
    is_rocm: bool = False
    factors: tuple[float, ...] = ()  # by which the times vary


class Machine:
    """Plays a program once; afterwards it holds all that happened."""

    def __init__(self, program: Program, without: frozenset[Any] = frozenset()) -> None:
        self.program, self._without = program, without
        self.removed: frozenset[Any] = frozenset()  # all of it from the begin of the recording
        self.now = 0
        self.rows: list[Row] = []
        self.works: list[Work] = []
        self.spent: defaultdict[tuple[str, str | None], int] = defaultdict(int)
        self.last: dict[tuple[int, int], Work] = {}  # of each stream
        self.recorded: dict[tuple[int, str], Work] = {}  # by event
        self.needed: defaultdict[tuple[int, int], list[Work]] = defaultdict(list)  # by the next work of a stream
        self.pending: defaultdict[int, deque[Work]] = defaultdict(deque)
        self.gates: defaultdict[Any, Gate] = defaultdict(Gate)
        self.meetings: dict[Any, Meeting] = {}
        self.freed: defaultdict[int, int] = defaultdict(int)  # when the last collective of a rank ended
        self.loaded: set[tuple[int, str]] = set()
        self.steps: defaultdict[int, list[tuple[int, int, int]]] = defaultdict(list)
        self._numbers = itertools.count(1)
        self._heap: list[tuple[int, int, Thread]] = []
        self._order = itertools.count()
        for rank, tid, action in program.threads:
            thread = Thread(self, rank, tid, tid not in program.unrecorded)
            thread.plan = action(thread)
            self.resume(thread, 0)
        self._run()

    def resume(self, thread: Thread, at: int) -> None:
        heapq.heappush(self._heap, (max(at, self.now), next(self._order), thread))

    def _run(self) -> None:
        heap = self._heap
        while heap:
            self.now, _, thread = heapq.heappop(heap)
            plan = thread.plan
            assert plan is not None
            for wish in plan:
                if not isinstance(wish, int):
                    wish.park(thread)
                    break
                if heap and heap[0][0] < wish:
                    self.resume(thread, wish)
                    break
                self.now = wish

    def record(self) -> None:
        """Begin the recording: what is played without something is played as ever until then."""
        self.removed = self._without

    def number(self) -> int:
        return next(self._numbers)

    def enqueue(self, work: Work) -> Work:
        """Put work behind its stream and behind the events that the stream was told to wait for."""
        key = work.rank, work.stream
        if key in self.last:
            work.after.append(self.last[key])
        work.after += self.needed.pop(key, ())
        self.last[key] = work
        self.works.append(work)
        if work.category is not None:
            self.pending[work.rank].append(work)
        for earlier in work.after:
            if earlier.end is None:
                earlier.followers.append(work)
        self._settle(work)
        return work

    def _settle(self, work: Work) -> None:
        unsettled = [work]
        while unsettled:
            entry = unsettled.pop()
            if entry.end is not None or any(earlier.end is None for earlier in entry.after):
                continue
            ready = max([entry.arrived, *((earlier.end or 0) + entry.pause for earlier in entry.after)])
            meeting = entry.meeting
            if meeting is None:
                unsettled += self._finish(entry, ready, ready + entry.length)
                continue
            meeting.ready[entry.rank] = entry, ready
            if len(meeting.ready) < meeting.members:
                continue
            last = max([self.freed[entry.rank] + meeting.peer_ns, *(at for _, at in meeting.ready.values())])
            for member, at in meeting.ready.values():
                self.spent["straggler", None] += last - at
                self.freed[member.rank] = last + meeting.transfer
                unsettled += self._finish(member, at, last + meeting.transfer)

    def _finish(self, work: Work, start: int, end: int) -> list[Work]:
        work.start, work.end = start, end
        for thread in work.waiting:
            self.resume(thread, end)
        followers, work.followers, work.waiting = work.followers, [], []
        return followers

    def length(self, rank: int = 0) -> int:
        """Return the time of the recorded steps: from the begin of the first until host and device are done.

        Without marks of steps a trace begins with its first event and ends with its last.
        """
        first = self.program.first_step
        ends = [work.end or 0 for work in self.works if work.rank == rank and work.category is not None]
        steps = [(begun, end) for number, begun, end in self.steps[rank] if number >= first]
        if self.program.has_steps:
            return max([*ends, *(end for _, end in steps)]) - steps[0][0]
        rows = [row for row in self.rows if row.rank == rank and row.start >= steps[0][0]]
        return max([*ends, *(row.end for row in rows)]) - min(row.start for row in rows)


def played(program: Program, *without: Any) -> Machine:
    """Play a program without the given causes: names of causes, or pairs of a cause and the name of one work."""
    return Machine(program, frozenset(without))


# ---- what a program is made of -------------------------------------------------------------------------------------


def sequence(*actions: Action) -> Action:
    def play(thread: Thread) -> Plan:
        for action in actions:
            yield from action(thread)

    return play


def span(name: str, category: str, *actions: Action, **args: Any) -> Action:
    def play(thread: Thread) -> Plan:
        row = thread.begin(name, category, **args)
        for action in actions:
            yield from action(thread)
        thread.end(row)

    return play


def mark(name: str, *actions: Action) -> Action:
    """`record_function` of a user, which takes a moment itself."""
    return span(name, "user_annotation", work(US, "operators"), *actions)


def frame(name: str, *actions: Action) -> Action:
    """A call of a Python function, `file.py(12): name`; in the trace where stacks were recorded."""

    def play(thread: Thread) -> Plan:
        if not thread.machine.program.has_stacks:
            for action in actions:
                yield from action(thread)
            return
        number = thread.machine.number()
        parent = thread.frames[-1] if thread.frames else None
        row = thread.begin(name, "python_function", **{"Python id": number, "Python parent id": parent})
        thread.frames.append(number)
        for action in actions:
            yield from action(thread)
        thread.frames.pop()
        thread.end(row)

    return play


def work(length: int, cause: str = "python", name: str | None = None) -> Action:
    """Host work without any event of its own."""
    return lambda thread: thread.spend(length, cause, name)


def step(number: int, *actions: Action) -> Action:
    def play(thread: Thread) -> Plan:
        machine = thread.machine
        begun = machine.now
        if number >= machine.program.first_step:
            machine.record()
        row = thread.begin(f"ProfilerStep#{number}", "user_annotation") if machine.program.has_steps else None
        yield from thread.spend(2 * US, "operators")
        for action in actions:
            yield from action(thread)
        if row is not None:
            thread.end(row)
        machine.steps[thread.rank].append((number, begun, machine.now))

    return play


def on_thread(tid: int, *actions: Action) -> Action:
    """Do it on another thread while this one waits, as autograd does."""

    def play(thread: Thread) -> Plan:
        other = Thread(thread.machine, thread.rank, tid, tid not in thread.machine.program.unrecorded, thread.plan)
        for action in actions:
            yield from action(other)

    return play


def operator(name: str, *actions: Action, length: int = 4 * US, cause: str = "operators") -> Action:
    """A torch operator with its own time on the host, a third of it after what it calls.

    Where no device takes part that time is the work itself, and no cause of anything.
    """
    after = length // 3

    def own(share: int) -> Action:
        def play(thread: Thread) -> Plan:
            if thread.machine.program.has_device:
                return thread.spend(share, cause, name)
            return thread.spend(share, "computing")

        return play

    return span(name, "cpu_op", own(length - after), *actions, own(after))


def call(name: str, *actions: Action, length: int = US, cause: str = "calls") -> Action:
    """A call of the runtime that launches nothing."""

    def play(thread: Thread) -> Plan:
        row = thread.begin(name, "cuda_runtime", correlation=thread.machine.number())
        yield from thread.spend(length, cause)
        for action in actions:
            yield from action(thread)
        thread.end(row)

    return play


def launch(
    length: int,
    name: str = "ampere_sgemm_128x64_tn",
    *,
    stream: int = COMPUTE,
    via: str = "cudaLaunchKernel",
    category: str = "kernel",
    cause: str | None = None,
    call_ns: int = 5 * US,
    loading: int = 0,
    blocks: bool = False,
    is_wait: bool = False,
    nodes: int = 1,
    node_gap: int = 0,
    collective: "Collective | None" = None,
    **args: Any,
) -> Action:
    """A launching call and its work: `nodes` pieces with pauses for a graph.

    `blocks`: the call waits for the work to end. `is_wait`: it is made for nothing but such a wait.
    """

    def play(thread: Thread) -> Plan:
        machine, rank = thread.machine, thread.rank
        correlation = machine.number()
        row = thread.begin(via, "cuda_runtime", correlation=correlation)
        row.waits = blocks
        lock = machine.gates[rank, "driver"]
        while lock.level:
            yield lock
        if loading and (rank, name) not in machine.loaded:
            machine.loaded.add((rank, name))
            yield from thread.spend(loading, "loading", name)
        yield from thread.spend(call_ns, "synchronisation" if is_wait else "calls")
        pending = machine.pending[rank]
        while len(pending) >= machine.program.queue:
            oldest = pending[0]
            while oldest.start is None or oldest.start > machine.now:
                yield Begun(oldest)
            pending.popleft()
        latency = 0 if "latency" in machine.removed else machine.program.latency
        machine.spent["latency", None] += latency
        gap = 0 if "graph_gaps" in machine.removed else node_gap
        machine.spent["graph_gaps", None] += node_gap * (nodes - 1)
        size = thread.varied(length)
        if cause is not None:
            machine.spent[cause, None] += size
            size = 0 if cause in machine.removed else size
        arrived = machine.now + latency
        meeting = collective.join(thread) if collective else None
        if collective and meeting is None:
            size = collective.cost(machine)
        for node in range(nodes):
            pause = gap if node else 0
            last = machine.enqueue(
                Work(name, category, rank, stream, size, correlation, arrived, [], args, pause, meeting)
            )
        if blocks:
            yield from thread.wait([last], "synchronisation")
        thread.end(row)

    return play


def kernels(count: int, length: int, *, host: int = 4 * US, name: str = "aten::mm", **options: Any) -> Action:
    """As many operators with one kernel each."""
    return sequence(*(operator(name, launch(length, **options), length=host) for _ in range(count)))


def memset(length: int = US, **options: Any) -> Action:
    return launch(length, "Memset (Device)", via="cudaMemsetAsync", category="gpu_memset", bytes=4096, **options)


def memcpy(length: int, kind: str, *, blocks: bool = False, **options: Any) -> Action:
    """The call of a copy; one that blocks keeps the host in it until the copy has ended."""
    name = f"Memcpy {kind}"
    options = {"via": "cudaMemcpyAsync", "category": "gpu_memcpy", "cause": "memcpy", "is_wait": blocks, **options}
    return launch(length, name, blocks=blocks, **options)


def copy(length: int, kind: str = "HtoD (Pinned -> Device)", *, blocks: bool = False, **options: Any) -> Action:
    """`aten::copy_` with its call, and where that blocks a wait for its stream."""
    then = [stream_synchronize(options.get("stream", COMPUTE))] if blocks else []
    copied = operator(
        "aten::copy_", memcpy(length, kind, blocks=blocks, bytes=length * 10, **options), *then, length=3 * US
    )
    return operator("aten::to", operator("aten::_to_copy", copied, length=3 * US), length=3 * US)


def to_device(length: int, *, pageable: bool = False, **options: Any) -> Action:
    kind = "HtoD (Pageable -> Device)" if pageable else "HtoD (Pinned -> Device)"
    return copy(length, kind, blocks=pageable, **options)


def to_host(length: int = 2 * US, **options: Any) -> Action:
    """`.cpu()`."""
    return copy(length, "DtoH (Device -> Pageable)", blocks=True, **options)


def item(*, waits_in_copy: bool = True) -> Action:
    """`.item()`: a copy of a few bytes, and the host waits in it or in the call after it."""
    kind = "DtoH (Device -> Pageable)" if waits_in_copy else "DtoH (Device -> Pinned)"
    read = memcpy(US, kind, blocks=waits_in_copy, is_wait=True, bytes=4)
    cause = "synchronisation"
    inner = operator("aten::_local_scalar_dense", read, stream_synchronize(), length=3 * US, cause=cause)
    return operator("aten::item", inner, length=2 * US, cause=cause)


def stream_synchronize(stream: int = COMPUTE) -> Action:
    def wait(thread: Thread) -> Plan:
        last = thread.machine.last.get((thread.rank, stream))
        yield from thread.wait([last] if last else [], "synchronisation")

    return call("cudaStreamSynchronize", wait, length=2 * US, cause="synchronisation")


def device_synchronize(*then: Action, cause: str = "synchronisation", name: str = "cudaDeviceSynchronize") -> Action:
    def wait(thread: Thread) -> Plan:
        streams = [entry for (rank, _), entry in thread.machine.last.items() if rank == thread.rank]
        yield from thread.wait(streams, cause)

    return call(name, wait, *then, cause=cause)


def event_synchronize(event: str) -> Action:
    """Wait on the host for what was recorded."""

    def wait(thread: Thread) -> Plan:
        awaited = thread.machine.recorded.get((thread.rank, event))
        yield from thread.wait([awaited] if awaited else [], "synchronisation")

    return call("cudaEventSynchronize", wait, length=US, cause="synchronisation")


def allocate(length: int, name: str = "cudaMalloc") -> Action:
    return call(name, length=length, cause="allocator")


def free(length: int = 100 * US) -> Action:
    """`cudaFree`: waits for the whole device first."""
    return device_synchronize(work(length, "allocator"), cause="allocator", name="cudaFree")


def hold_driver(length: int, name: str = "cudaHostAlloc") -> Action:
    """A call that keeps the lock of the driver: launches of other threads wait for it."""

    def hold(thread: Thread) -> Plan:
        lock = thread.machine.gates[thread.rank, "driver"]
        while lock.level:
            yield lock
        lock.change(thread.machine, 1)
        yield from thread.spend(length, "driver", name)
        lock.change(thread.machine, -1)

    return call(name, hold, length=0)


def record(event: str, stream: int = COMPUTE) -> Action:
    def play(thread: Thread) -> Plan:
        last = thread.machine.last.get((thread.rank, stream))
        if last is not None:
            thread.machine.recorded[thread.rank, event] = last
        return
        yield

    return call("cudaEventRecord", play)


def wait_event(event: str, stream: int) -> Action:
    """`cudaStreamWaitEvent`: what this stream does next waits for what was recorded."""

    def play(thread: Thread) -> Plan:
        machine = thread.machine
        awaited = machine.recorded.get((thread.rank, event))
        if awaited is not None:
            machine.needed[thread.rank, stream].append(awaited)
        return
        yield

    return call("cudaStreamWaitEvent", play)


def spawn(tid: int, *actions: Action) -> Action:
    """Begin it on another thread and go on; `join` waits for it."""

    def play(thread: Thread) -> Plan:
        machine = thread.machine
        other = Thread(machine, thread.rank, tid, tid not in machine.program.unrecorded)

        def whole() -> Plan:
            for action in actions:
                yield from action(other)
            machine.gates[thread.rank, "joined", tid].change(machine, 1)

        other.plan = whole()
        machine.resume(other, machine.now)
        yield machine.now + 1  # the other one goes first, however fast this one is

    return play


def join(tid: int) -> Action:
    return take("joined", tid)


def take(*gate: Any) -> Action:
    """Wait until there is one to take."""

    def play(thread: Thread) -> Plan:
        shared = thread.machine.gates[thread.rank, *gate]
        while not shared.level:
            yield shared
        shared.change(thread.machine, -1)

    return play


def give(*gate: Any, capacity: int) -> Action:
    """Add one, once there is room for it."""

    def play(thread: Thread) -> Plan:
        shared = thread.machine.gates[thread.rank, *gate]
        while shared.level >= capacity:
            yield shared
        shared.change(thread.machine, 1)

    return play


def loader(batches: int, length: int, *, prefetched: int = 2) -> Action:
    """A worker process of a DataLoader, which prepares batches ahead; the first ones were ready beforehand."""
    ready = give("batches", capacity=prefetched)
    prepared = sequence(work(length, "input"), ready)
    return sequence(*(ready if number < prefetched else prepared for number in range(batches)))


def next_batch(length: int | None = None) -> Action:
    """`next` of a DataLoader: of worker processes, or of this one where it takes a time itself."""
    if length is None:
        iterator = "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__"
        return mark(iterator, take("batches"), work(20 * US, "input"))
    return mark("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", work(length, "input"))


@dataclass(frozen=True)
class Collective:
    """One collective of several ranks by its key. With one member, its peers are not played: the slowest of them needs
    `peer_ns` from the end of one collective until it is ready for the next.
    """

    key: Any
    transfer: int
    members: int = 1
    peer_ns: int = 0

    def cost(self, machine: Machine) -> int:
        return 0 if "transfer" in machine.removed else self.transfer

    def join(self, thread: Thread) -> Meeting | None:
        """Return where the ranks meet; None where nobody waits for another."""
        machine = thread.machine
        machine.spent["transfer", None] += self.transfer
        if "straggler" in machine.removed:
            return None
        if self.members == 1:
            return Meeting(1, self.cost(machine), self.peer_ns)
        return machine.meetings.setdefault(self.key, Meeting(self.members, self.cost(machine)))


def all_reduce(collective: Collective, *, event: str = "reduced") -> Action:
    """NCCL on a stream of its own, behind what the compute stream was given so far."""
    name = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
    group = {"Collective name": "allreduce", "dtype": "Float", "Group size": max(2, collective.members)}
    enqueued = mark(
        "nccl:all_reduce",
        record(f"before {event}"),
        wait_event(f"before {event}", NCCL),
        launch(0, name, stream=NCCL, via="cudaLaunchKernelExC", collective=collective, **group),
        record(event, NCCL),
    )
    return operator("c10d::allreduce_", operator("record_param_comms", enqueued, length=8 * US), length=6 * US)


def gloo_all_reduce(collective: Collective) -> Action:
    """A collective of the hosts, on whichever thread plays this."""

    def meet(thread: Thread) -> Plan:
        machine = thread.machine
        meeting = collective.join(thread)
        length = collective.cost(machine)
        work = Work("", None, thread.rank, -thread.tid, length, 0, machine.now, [], {}, 0, meeting)
        yield machine.enqueue(work)

    return mark("gloo:all_reduce", meet)
