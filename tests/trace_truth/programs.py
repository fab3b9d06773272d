"""Programs for the simulated machine: those of every day by name, with their known gains, and random ones."""

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tests.trace_truth.simulator import (
    AUTOGRAD,
    BACKGROUND,
    COMPUTE,
    COPY,
    IDLE,
    LOADER,
    MAIN,
    MS,
    OTHER,
    QUEUE,
    US,
    Action,
    Collective,
    Program,
    all_reduce,
    allocate,
    device_synchronize,
    event_synchronize,
    frame,
    free,
    give,
    gloo_all_reduce,
    hold_driver,
    item,
    join,
    kernels,
    launch,
    loader,
    mark,
    memset,
    next_batch,
    on_thread,
    operator,
    record,
    sequence,
    spawn,
    step,
    take,
    to_device,
    to_host,
    wait_event,
    work,
)

STEPS = 4
# Functions as the profiler writes them, by what the host does in them.
FRAMES = {
    "input": "torch/utils/data/dataloader.py(733): __next__",
    "tokenizing": "transformers/tokenization_utils_fast.py(512): _batch_encode_plus",
    "saving": "torch/serialization.py(943): save",
    "gc": "<built-in function collect>",
}


@dataclass(frozen=True)
class Case:
    """A program, what it gains without one cause or several, and the cause to begin with: () where none is worth it."""

    program: Program
    gains: Mapping[tuple[str, ...], float]
    first: tuple[str, ...]
    rank: int = 0


def loop(name: str, *body: Action, steps: int = STEPS, threads: tuple = (), **options: object) -> Program:
    """The same steps one after the other, on the main thread."""
    whole = sequence(*(step(number, *body) for number in range(steps)))
    return Program(name, ((0, MAIN, whole), *threads), **options)


def forward(milliseconds: float, count: int = 10) -> Action:
    return kernels(count, round(milliseconds * MS / count))


def backward(milliseconds: float, count: int = 10) -> Action:
    def gradient(number: int) -> Action:
        kernel = launch(round(milliseconds * MS / count), "ampere_sgemm_64x128_nt")
        inner = operator("MmBackward0", operator("aten::mm", kernel))
        return operator("autograd::engine::evaluate_function: MmBackward0", inner)

    return on_thread(AUTOGRAD, *(gradient(number) for number in range(count)))


def optimizer(count: int = 3, length: int = 50 * US) -> Action:
    return mark("Optimizer.step#AdamW.step", kernels(count, length, name="aten::_foreach_add_"))


def host(cause: str, name: str, milliseconds: float) -> Action:
    """Host work in a mark of the user."""
    return mark(name, work(round(milliseconds * MS), cause, name))


def only_first(action: Action) -> Action:
    """Done once only, the first time it is reached."""

    def play(thread):
        done = thread.machine.gates["once", id(action)]
        if not done.level:
            done.level = 1
            yield from action(thread)

    return play


def ranks(name: str, count: int, body: Callable[[int, int], list[Action]], **options: object) -> Program:
    """The same number of steps on every rank; `body` is that of a rank in a step."""

    def steps_of(rank: int) -> Action:
        return sequence(*(step(number, *body(rank, number)) for number in range(STEPS)))

    return Program(name, tuple((rank, MAIN, steps_of(rank)) for rank in range(count)), **options)


def _reduced(key: object, transfer_ms: float, members: int = 1, peer_ms: float = 0) -> Action:
    collective = Collective(key, round(transfer_ms * MS), members, round(peer_ms * MS))
    return sequence(all_reduce(collective), wait_event("reduced", COMPUTE))


def _four_ranks(slow: int) -> Program:
    def body(rank: int, number: int) -> list[Action]:
        return [forward(12 if rank == slow else 6), _reduced(number, 2, 4), optimizer()]

    return ranks("four ranks", 4, body)


def _two_hosts(slow: int) -> Program:
    def body(rank: int, number: int) -> list[Action]:
        product = operator("aten::addmm", length=(30 if rank == slow else 10) * MS)
        return [product, spawn(OTHER, gloo_all_reduce(Collective(number, 3 * MS, 2))), join(OTHER)]

    return ranks("two processes with gloo", 2, body, has_device=False)


def random_program(seed: int) -> Program:
    """Return a program of one to four steps that mixes what people's steps consist of, with random durations."""
    draw = random.Random(seed)

    def scaled(low: float, high: float) -> float:
        return low * (high / low) ** draw.random()

    device_ms = scaled(0.3, 10)
    count = draw.randint(2, 10)
    steps = draw.randint(1, 4)
    has_stacks = draw.random() < 0.2
    has_steps = draw.random() < 0.8  # without them a thread beside the loop would be part of the window

    def some() -> float:
        return device_ms * scaled(0.05, 5)

    def unmarked() -> Action:
        """Python between operators, longer than what lies between any two."""
        return work(int(max(0.3, some()) * MS))

    def once(action: Action) -> Action:
        return only_first(action) if draw.random() < 0.5 else action

    def named(cause: str, *names: str) -> Action:
        name, length = draw.choice(names), some()
        if has_stacks and draw.random() < 0.5:
            return frame(
                FRAMES.get(cause, f"train.py(40): {name.replace(' ', '_')}"), work(int(length * MS), cause, name)
            )
        return host(cause, name, length)

    def loaded() -> Action:
        return sequence(device_synchronize(), once(named("saving", "torch.save", "save_checkpoint")))

    def copied() -> Action:
        length = int(device_ms * scaled(0.05, 2) * MS)
        return sequence(to_device(length, stream=COPY), record("copied", COPY), wait_event("copied", COMPUTE))

    def reduced() -> Action:
        peer_ms = device_ms * scaled(0.2, 3) if draw.random() < 0.5 else 0
        return _reduced("gradients", device_ms * scaled(0.05, 2), 1, peer_ms)

    def locked() -> Action:
        holding = spawn(OTHER, hold_driver(int(some() * MS)))
        return sequence(holding, work(10 * US, "operators"), kernels(3, 5 * US), join(OTHER))

    def compiled() -> Action:
        return once(mark("entire_frame_compile (dynamo_timed)", work(int(some() * MS), "compile")))

    def module() -> Action:
        return operator("aten::conv2d", launch(int(device_ms * MS / 10), "sm80_xmma_fprop", loading=int(some() * MS)))

    def graph() -> Action:
        nodes, length = draw.randint(5, 40), int(scaled(2, 50) * US)
        return launch(
            length, "triton_poi_fused_add", via="cudaGraphLaunch", nodes=nodes, node_gap=int(scaled(0.3, 3) * US)
        )

    def slow_operators() -> Action:
        name = draw.choice(
            ("aten::index", "aten::cat", "torchvision::nms", "autograd::engine::evaluate_function: MyFunction")
        )
        return operator(name, launch(5 * US), length=int(some() * MS))

    def tiny_kernels() -> Action:
        return kernels(draw.randint(5, 30), int(scaled(1, 8) * US), host=int(scaled(3, 30) * US), name="aten::add")

    def overlapped() -> Action:
        """The backward pass of DistributedDataParallel: each bucket is reduced while the next gradients are made."""
        buckets = draw.randint(1, 3)
        peer_ms = device_ms * scaled(0.1, 0.5) if draw.random() < 0.3 else 0
        collective = Collective("bucket", int(device_ms * scaled(0.05, 1) * MS), 1, int(peer_ms * MS))
        part = backward(device_ms / 2 / buckets, max(1, count // buckets))
        return sequence(
            *(entry for _ in range(buckets) for entry in (part, on_thread(AUTOGRAD, all_reduce(collective)))),
            wait_event("reduced", COMPUTE),
        )

    before: list[tuple[float, Callable[[], Action]]] = [
        (0.1, lambda: next_batch(int(some() * MS))),
        (0.1, next_batch),
        (0.1, lambda: named("input", "load data", "data loading", "get_batch")),
        (0.15, lambda: named("tokenizing", "tokenize", "tokenizer")),
        (0.15, lambda: to_device(int(device_ms * scaled(0.02, 1) * MS), pageable=True)),
        (0.15, lambda: to_device(int(device_ms * scaled(0.02, 1) * MS))),
        (0.1, copied),
        (0.1, compiled),
    ]
    middle: list[tuple[float, Callable[[], Action]]] = [
        (0.1, module),
        (0.1, locked),
        (0.08, lambda: once(sequence(*[allocate(int(some() * MS / 4))] * 2))),
        (0.05, lambda: once(free(int(some() * MS / 4)))),
        (0.1, graph),
        (0.1, slow_operators),
        (0.15, tiny_kernels),
        (0.1, unmarked),
        (0.1, memset),
        (0.15, lambda: item(waits_in_copy=draw.random() < 0.5)),
    ]
    after: list[tuple[float, Callable[[], Action]]] = [
        (0.15, reduced),
        (0.3, lambda: optimizer(draw.randint(1, 4), int(device_ms * MS / 50))),
        (0.3, lambda: item(waits_in_copy=draw.random() < 0.5)),
        (0.15, lambda: to_host(int(scaled(2, 100) * US))),
        (0.1, device_synchronize),
        (0.05, lambda: sequence(record("logged"), optimizer(2, 50 * US), event_synchronize("logged"))),
        (0.12, lambda: named("python", "postprocess", "metrics", "encode texts")),
        (0.12, unmarked),
        (0.06, lambda: named("gc", "gc.collect")),
        (0.06, loaded),
    ]

    def chosen(menu: list[tuple[float, Callable[[], Action]]]) -> list[Action]:
        return [make() for share, make in menu if draw.random() < share]

    def generated() -> Action:
        """Tokens of a text one by one: each is looked at on the host before the next is made."""
        tokens, few = draw.randint(3, 8), draw.randint(1, 4)
        python = work(int(scaled(5, 100) * US), "operators")
        element = sequence(kernels(few, int(device_ms * MS / tokens / few)), item(waits_in_copy=False), python)
        return sequence(*[element] * tokens)

    def wrapped(name: str, action: Action) -> Action:
        """The same in a mark or a function around it, as loops have them."""
        if draw.random() < 0.3:
            action = mark(name, action)
        return frame(f"train.py({draw.randint(10, 99)}): {name}", action)

    is_training = draw.random() < 0.5
    alone = generated() if draw.random() < 0.2 else forward(device_ms, count)
    work_of_model = [wrapped("forward", forward(device_ms / 2, count) if is_training else alone)]
    if is_training:
        part = overlapped() if draw.random() < 0.2 else backward(device_ms / 2, count)
        work_of_model.append(wrapped("backward", part))

    def prefetched(length: int) -> Action:
        """A thread that loads batches and copies them on a stream of its own."""
        element = sequence(
            mark("load_batch", work(length, "input")),
            to_device(length // 10, stream=COPY),
            record("prefetched", COPY),
            give("prefetched", capacity=2),
        )
        return sequence(*[element] * steps)

    def background() -> Action:
        """A thread that nobody waits for, with more events than the loop."""
        return sequence(*[operator("aten::add", length=int(scaled(5, 50) * US)) for _ in range(100)])

    has_prefetcher = draw.random() < 0.08
    first = [mark("get_batch", take("prefetched")), wait_event("prefetched", COMPUTE)] if has_prefetcher else []
    body = [*first, *chosen(before), work_of_model[0], *chosen(middle), *work_of_model[1:], *chosen(after)]
    return loop(
        f"random program {seed}",
        *body,
        steps=steps,
        threads=(
            (0, LOADER, loader(steps, int(some() * MS), prefetched=draw.randint(1, 3))),
            *(((0, BACKGROUND, background()),) if draw.random() < 0.15 and has_steps else ()),
            *(((0, OTHER + 1, prefetched(int(some() * MS))),) if has_prefetcher else ()),
        ),
        unrecorded=frozenset({LOADER}),
        latency=int(scaled(0.5, 5) * US),
        has_steps=has_steps,
        has_stacks=has_stacks,
        is_rocm=draw.random() < 0.1,
        queue=draw.choice((QUEUE, QUEUE, QUEUE, 12)),
        first_step=draw.choice((0, 0, 0, 1)) if steps > 1 else 0,
        factors=tuple(draw.lognormvariate(0, 0.1) for _ in range(97)),
    )


def random_program_of_the_host(seed: int) -> Program:
    """Return a program without a device: operators, and what passes between them."""
    draw = random.Random(seed)
    length = 20 * MS * draw.random() + MS

    def some() -> int:
        return int(length * 0.05 * 100 ** draw.random())

    def operators() -> Action:
        return sequence(*(operator("aten::addmm", length=int(length / 5)) for _ in range(5)))

    menu = (
        (0.2, lambda: next_batch(some())),
        (0.2, lambda: mark("tokenize", work(some(), "tokenizing", "tokenize"))),
        (0.2, lambda: mark("metrics", work(some(), "python", "metrics"))),
        (0.2, lambda: work(max(2 * MS, some()), "unrecorded")),
        (0.1, lambda: mark("gc.collect", work(some(), "gc", "gc.collect"))),
        (0.1, lambda: mark("torch.save", work(some(), "saving", "torch.save"))),
    )
    body = [operators(), *(make() for share, make in menu if draw.random() < share)]
    draw.shuffle(body)
    return loop(
        f"random program of the host {seed}",
        *body,
        steps=draw.randint(1, 4),
        has_device=False,
        has_steps=draw.random() < 0.8,
        factors=tuple(draw.lognormvariate(0, 0.1) for _ in range(97)),
    )


def cases() -> dict[str, Case]:
    """Return what people run every day, by a name that says it."""
    return {
        "data loading": Case(
            loop("data loading", next_batch(int(31.3 * MS)), to_device(50 * US), forward(5), backward(10)),
            {("input",): 2.33},
            ("input",),
        ),
        "pageable copy": Case(
            loop("pageable copy", to_device(10 * MS, pageable=True), forward(10), backward(10)),
            {("memcpy",): 1.5},
            ("memcpy",),
        ),
        "results to the host": Case(
            loop("results to the host", forward(10), to_host(), work(int(6.6 * MS))),
            {("synchronisation",): 1.66, ("python",): 1.66},
            ("synchronisation",),
        ),
        "collectives": Case(
            loop("collectives", forward(15), _reduced("gradients", 20)),
            {("transfer",): 35 / 15},
            ("transfer",),
        ),
        "copies on a stream": Case(
            loop(
                "copies on a stream",
                to_device(16 * MS, stream=COPY),
                record("copied", COPY),
                wait_event("copied", COMPUTE),
                forward(10),
                record("used", COMPUTE),
                wait_event("used", COPY),
            ),
            {("memcpy",): 2.6},
            ("memcpy",),
        ),
        "compiling": Case(
            loop(
                "compiling",
                only_first(mark("entire_frame_compile (dynamo_timed)", work(26 * MS, "compile"))),
                forward(10),
            ),
            {("compile",): 1.66},
            ("compile",),
        ),
        "a slow rank": Case(_four_ranks(2), {("straggler",): 14.15 / 8.15}, ("straggler",), rank=0),
        "three streams": Case(
            loop(
                "three streams",
                *(
                    sequence(
                        work(2 * MS), forward(1), kernels(3, 400 * US, stream=COPY), kernels(2, 300 * US, stream=28)
                    )
                    for _ in range(3)
                ),
            ),
            {("python",): 1.85},
            ("python",),
        ),
        "autograd": Case(
            loop(
                "autograd",
                forward(2),
                on_thread(
                    AUTOGRAD, operator("autograd::engine::evaluate_function: MyFunctionBackward", length=12 * MS)
                ),
                backward(4),
            ),
            {("operators",): 2.2},
            ("operators",),
        ),
        "hidden loader": Case(
            loop(
                "hidden loader",
                next_batch(),
                to_device(50 * US),
                forward(10),
                to_host(),
                threads=((0, LOADER, loader(STEPS, 6 * MS)),),
                unrecorded=frozenset({LOADER}),
            ),
            {("input",): 1.0},
            (),
        ),
        "inference with a tokenizer": Case(
            loop(
                "inference with a tokenizer",
                host("tokenizing", "tokenize", 47.8),
                to_device(10 * US, pageable=True),
                forward(1.9),
                to_host(),
            ),
            {("tokenizing",): 25.7, ("synchronisation",): 1.03},
            ("tokenizing",),
        ),
        "data and item": Case(
            loop("data and item", host("input", "load data", 19.4), forward(2), backward(2.7), optimizer(), item()),
            {("input",): 4.99, ("synchronisation",): 1.16},
            ("input",),
        ),
        "tokenizer and synchronize": Case(
            loop("tokenizer and synchronize", host("tokenizing", "tokenize", 15), forward(10), device_synchronize()),
            {("tokenizing",): 2.49, ("synchronisation",): 1.42},
            ("tokenizing",),
        ),
        "Python between steps": Case(
            loop("Python between steps", forward(10), item(), work(10 * MS)),
            {("python",): 2.0, ("synchronisation",): 2.0},
            ("python",),
        ),
        "saving": Case(
            loop(
                "saving",
                forward(10),
                device_synchronize(),
                only_first(host("saving", "torch.save", 133.3)),
            ),
            {("saving",): 4.33, ("synchronisation",): 1.06},
            ("saving",),
        ),
        "garbage": Case(
            loop("garbage", forward(10), item(), host("gc", "gc.collect", 20)),
            {("gc",): 2.99, ("synchronisation",): 1.5},
            ("gc",),
        ),
        "loading a module": Case(
            loop(
                "loading a module",
                forward(8),
                item(),
                operator("aten::conv2d", launch(2 * MS, "sm80_xmma_fprop_implicit_gemm", loading=38 * MS)),
            ),
            {("loading",): 1.94},
            ("loading",),
        ),
        "a locked driver": Case(
            loop(
                "a locked driver",
                spawn(OTHER, hold_driver(int(10 * MS))),
                work(20 * US),
                forward(1),
                join(OTHER),
                item(),
            ),
            {("driver",): 10.6},
            ("driver",),
        ),
        "a graph of tiny nodes": Case(
            loop(
                "a graph of tiny nodes",
                launch(2 * US, "elementwise", via="cudaGraphLaunch", nodes=1000, node_gap=660),
                steps=2,
            ),
            {("graph_gaps",): 1.33},
            ("graph_gaps",),
        ),
        "a thread that was not recorded": Case(
            loop(
                "a thread that was not recorded",
                operator("aten::addmm", length=100 * US),
                work(40 * MS, "unrecorded"),
                has_device=False,
            ),
            {("unrecorded",): 401},
            ("unrecorded",),
        ),
        "two processes with gloo": Case(_two_hosts(1), {("straggler",): 33 / 13}, ("straggler",), rank=0),
        "emptying the cache": Case(
            loop("emptying the cache", forward(6), free(6 * MS), forward(2)),
            {("allocator",): 14 / 8},
            ("allocator",),
        ),
        "a full queue": Case(
            loop("a full queue", kernels(400, 60 * US), to_host(), steps=2, queue=64), {IDLE: 1.0}, ()
        ),
        "nothing to gain": Case(loop("nothing to gain", forward(20), optimizer()), {IDLE: 1.0}, ()),
    }
