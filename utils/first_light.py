"""What to look at first on a GPU: each thing that no machine without one can show, with what is expected of it.

A check measures figures and says whether they hold; one that raises, hangs or ends its process has failed, and the
others go on in another process. Those that use the GPU of that process come first, the one that breaks a capture after
them, and whole programs last, beside nothing else on the GPU. `sizes` are small in the tests, where stand-ins take the
place of the GPU.
"""

import itertools
import math
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import numpy as np
import torch

from boundby import ceilings, environment
from boundby.attention_mask import unread
from boundby.cli import PACKAGE
from boundby.device import (
    Allocator,
    describe,
    device_queue,
    gpu_source,
    has_bfloat16_products,
    is_gpu,
    release_memory,
    runtime,
    synchronizer,
)
from boundby.disturbance import NVML_THROTTLED
from boundby.inference import Predictor, PredictorOptions, collate, forward, one_by_one
from boundby.inference.packing import has_varlen
from boundby.inference.reference import in_dtype
from boundby.inference.strategies import HALF
from boundby.judgement import IDLE_DEVICE
from boundby.layers.engine import ObservabilityEngine
from boundby.sampler import DriverSource, Sampler
from boundby.timer import QUEUE_DEPTH, Timer
from boundby.trials import graph_replay, try_out
from boundby.work import transformer_flops, transformer_shape
from utils.profiler import InferenceProfiler

Figures = dict[str, Any]
Outcome = Literal["ok", "look", "failed", "not here"]
PROGRAM_S = 240.0  # that one whole program may take
TIME_IS_UP = "no time was left for it"
STARTS_S = 90.0  # for a process to import torch and find the GPU
LEAST_LIMIT_S = 5.0
EVALUATION_S = 30.0  # of predicting; a slow card gets fewer texts

LACKING = 3  # the exit code of our programs where something is not installed


class NotHereError(Exception):
    """What a check needs is not on this machine, and nothing is wrong for that."""


@dataclass(frozen=True)
class Sizes:
    """How large the models and sets are; the usual ones are for a card."""

    hidden: int = 896
    layers: int = 24
    inner: int = 4864
    vocabulary: int = 32768
    texts: int = 50_000
    mean_tokens: int = 100
    batch_sizes: tuple[int, ...] = (1, 8, 32)
    gpt2: str = "gpt2"
    energy_s: float = 3.0
    launches: int = 2000
    sweep_s: float = 5.0  # of each batch size


@dataclass(frozen=True)
class Card:
    """The GPU that is looked at."""

    device: torch.device
    sizes: Sizes = Sizes()
    until: float = math.inf  # of the monotonic clock; no check begins later, and no program goes on

    @property
    def timer(self) -> Timer:
        """Return the wall clock, and what waits for the GPU."""
        return Timer(synchronize=synchronizer(self.device))

    @property
    def dtype(self) -> torch.dtype:
        """bfloat16 where the GPU multiplies in it."""
        return torch.bfloat16 if has_bfloat16_products(self.device) else torch.float32


@dataclass(frozen=True)
class Check:
    """One thing to look at: how it is measured, what is expected in words, and whether figures are as expected."""

    name: str
    expected: str
    measure: Callable[[Card], Figures]
    holds: Callable[[Mapping[str, Any]], bool]
    is_program: bool = False
    limit_s: float = 90.0  # after which it hangs


@dataclass(frozen=True)
class Line:
    """What came of a check: the figures, or why there are none."""

    name: str
    expected: str
    verdict: Outcome
    figures: Figures
    seconds: float
    reason: str | None = None

    def __str__(self) -> str:
        """Return one line for a person."""
        value = self.reason or ", ".join(f"{name} {_shown(value)}" for name, value in self.figures.items())
        return f"{self.verdict:8}  {self.name}: {value}  [expected: {self.expected}]  {self.seconds:.0f} s"


def look(card: Card, checks: Sequence[Check]) -> Iterator[Line]:
    """Yield a line for every check, as it ends; one whose turn comes too late is not made."""
    for check in checks:
        began = time.monotonic()
        if began > card.until:
            yield Line(check.name, check.expected, "not here", {}, 0.0, TIME_IS_UP)
            continue
        figures: Figures = {}
        reason: str | None = None
        try:
            figures = check.measure(card)
            verdict: Outcome = "ok" if check.holds(figures) else "look"
        except NotHereError as missing:
            verdict, reason = "not here", str(missing)
        except Exception as error:  # whatever breaks on a card nobody has seen yet is what this program is for
            verdict, reason = "failed", f"{type(error).__name__}: {(str(error) or '?').splitlines()[0]}"
        yield Line(check.name, check.expected, verdict, figures, time.monotonic() - began, reason)
        release_memory(card.device)


def watched(card: Card, checks: Sequence[Check], start: str = "spawn") -> Iterator[tuple[Line, dict[str, Any]]]:
    """Yield what `look` does of checks among `CHECKS`, from another process, and the document of all lines so far.

    An error of the GPU may stay until its process ends, so that another one goes on after a check that failed.
    """
    left, lines, head = deque(checks), list[Line](), dict[str, Any]()
    while left:
        alike = list(itertools.takewhile(lambda check: check.is_program == left[0].is_program, left))
        for line, found in _answers(card, alike, multiprocessing.get_context(start)):
            left.popleft()
            lines.append(line)
            head = found or head
            yield line, {"schema_version": 1, **head, "checks": [asdict(each) for each in lines]}


def _answers(card: Card, checks: Sequence[Check], there: Any) -> Iterator[tuple[Line, dict[str, Any]]]:
    """Yield the lines of one process up to the first that failed, and the document of the card."""
    if time.monotonic() > card.until:
        yield from ((Line(each.name, each.expected, "not here", {}, 0.0, TIME_IS_UP), {}) for each in checks)
        return
    ours, theirs = there.Pipe(duplex=False)
    process = there.Process(target=_look_there, args=(theirs, card, [check.name for check in checks]))
    process.start()
    theirs.close()
    head: dict[str, Any] = {}
    try:
        for check in checks:
            began = time.monotonic()
            try:
                left_s = max(0.0, card.until - began) + LEAST_LIMIT_S
                head = head or _received(ours, min(STARTS_S, left_s))
                line = _received(ours, min(check.limit_s, left_s))
            except (EOFError, OSError) as error:
                is_late = isinstance(error, TimeoutError) and time.monotonic() > card.until
                reason = TIME_IS_UP if is_late else str(error) or "its process ended"
                spent_s = time.monotonic() - began
                line = Line(check.name, check.expected, "not here" if is_late else "failed", {}, spent_s, reason)
            yield line, head
            if line.verdict == "failed" or line.reason == TIME_IS_UP:
                return
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # with the programs that it has begun
        process.kill()
        process.join(LEAST_LIMIT_S)  # one that hangs in the driver does not end


def _received(connection: Connection, seconds: float) -> Any:
    if not connection.poll(seconds):
        raise TimeoutError(f"no answer within {seconds:.0f} s")
    return connection.recv()


def _look_there(connection: Connection, card: Card, names: Sequence[str]) -> None:
    os.setsid()
    connection.send(machine(card))
    for line in look(card, [check for check in CHECKS if check.name in names]):
        connection.send(line)


def machine(card: Card) -> dict[str, Any]:
    """Return the card, the machine it is in and the versions, as plain values for JSON."""
    return {
        "device": describe(card.device),
        "machine": environment.machine(),
        "versions": environment.versions(),
        "settings": environment.settings(),
    }


def _shown(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


# What is looked at: models with random weights in the shape of Qwen2.5-0.5B, texts of long-tailed lengths.


def tokenizer(vocabulary: int) -> Any:
    """Return a tokenizer of numbered words, a token each; the first id is the padding's."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"[PAD]": 0, "[UNK]": 1, **{f"w{number}": number for number in range(2, vocabulary)}}
    made = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="[PAD]", unk_token="[UNK]")


def texts(sizes: Sizes, count: int) -> list[str]:
    """Return texts of random words, log-normal in their lengths."""
    random = np.random.default_rng(0)
    lengths = random.lognormal(np.log(sizes.mean_tokens) - 0.18, 0.6, count).clip(4, 5 * sizes.mean_tokens).astype(int)
    return [" ".join(f"w{word}" for word in random.integers(2, sizes.vocabulary, length)) for length in lengths]


def classifier(card: Card) -> Any:
    """Return a classifier in the shape of Qwen2.5-0.5B, with random weights, on the GPU."""
    from transformers import Qwen2Config, Qwen2ForSequenceClassification

    sizes = card.sizes
    heads = max(2, sizes.hidden // 64)
    config = Qwen2Config(
        vocab_size=sizes.vocabulary,
        hidden_size=sizes.hidden,
        intermediate_size=sizes.inner,
        num_hidden_layers=sizes.layers,
        num_attention_heads=heads,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        num_labels=8,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    with card.device:  # else the weights are drawn on the host, for seconds
        return Qwen2ForSequenceClassification(config).to(card.dtype).eval()


def _padded(card: Card) -> tuple[Any, dict[str, torch.Tensor]]:
    """Return the model and a batch with padding."""
    model, known = classifier(card), tokenizer(card.sizes.vocabulary)
    predictor_tokens = _tokens(known, texts(card.sizes, 8))
    batch = collate(predictor_tokens, range(8), 0, card.device)
    return model, {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask}


def _tokens(known: Any, given: Sequence[str]) -> Any:
    from boundby.inference import tokenize

    return tokenize(known, given, 512)


def masks(card: Card) -> Figures:
    """Time a padded batch on the device behind a backlog: as it is, and with a mask that is ready."""
    model, inputs = _padded(card)
    ready, queue, timer = unread(model, inputs), device_queue(card.device), card.timer
    if ready is None or queue is None:
        raise NotHereError("no mask can be made ready for this model and device")
    figures: Figures = {}
    with torch.inference_mode():
        for name, given in (("its own mask", inputs), ("a ready mask", ready)):
            for _ in range(3):
                model(**given)
            enqueue_s = timer.enqueue(lambda given=given: model(**given))
            found = timer.on_device(lambda given=given: model(**given), queue, enqueue_s)
            figures[name] = "no time" if found.seconds is None else f"{1e3 * found.seconds:.2f} ms"
    return figures


def graph(card: Card) -> Figures:
    """Replay a padded batch as a graph, in pairs with the eager call."""
    model, inputs = _padded(card)
    ready = unread(model, inputs) or inputs
    with torch.inference_mode():
        found = try_out(
            lambda: model(**inputs),
            [graph_replay(lambda: model(**ready), IDLE_DEVICE)],
            card.timer,
            budget_s=20.0,
        )
    return {
        "factor": found.trials[0].measured.value if found.trials else None,
        "problems": [each.reason for each in found.untried] + [doubt.text for doubt in found.doubts],
    }


def packed(card: Card) -> Figures:
    """Compute packed texts beside other neighbours, and each by itself."""
    if not has_varlen() or (card.dtype not in HALF and is_gpu(card.device)):
        raise NotHereError("this torch, or this GPU, has no attention for variable lengths")
    model, known, given = classifier(card), tokenizer(card.sizes.vocabulary), texts(card.sizes, 256)
    options = PredictorOptions(512, str(card.dtype).removeprefix("torch."))
    predictor = Predictor(model, known, options, given[:64])
    order = np.random.default_rng(1).permutation(len(given))
    together = predictor.predict(given).logits
    shuffled = np.empty_like(together)
    shuffled[order] = predictor.predict([given[row] for row in order]).logits
    alone = one_by_one(in_dtype(model, torch.float32), _tokens(known, given), range(len(given)))
    return {
        "way": predictor.strategy,
        "difference to one by one": float(np.abs(together - alone).max()),
        "allowed": predictor.check.allowed,
        "difference to other neighbours": float(np.abs(together - shuffled).max()),
    }


def queue_depth(card: Card) -> Figures:
    """Launch tiny kernels behind a held device until the host has to wait."""
    queue, one = device_queue(card.device), torch.ones(1, device=card.device)
    if queue is None:
        raise NotHereError("the device has no queue")
    for _ in range(2):  # the first launch loads the kernel, which waits for the device
        one.add_(1)
        card.timer.synchronize()
        queue.hold(0.2)
    launched = 0
    while launched < card.sizes.launches:
        start = time.perf_counter()
        one.add_(1)
        if time.perf_counter() - start > 0.02:
            break
        launched += 1
    card.timer.synchronize()
    return {"launches before the host waits": launched}


def attention(card: Card) -> Figures:
    """Name the kernel that torch chooses for attention, without a mask and with one."""
    from torch.nn.attention import SDPBackend

    states = torch.randn(4, 8, 128, 64, device=card.device, dtype=card.dtype)
    mask = torch.ones(4, 1, 128, 128, dtype=torch.bool, device=card.device).tril()
    chosen = getattr(torch, "_fused_sdp_choice", None)
    if chosen is None:
        raise NotHereError("this torch does not tell its choice")
    names = {backend.value: backend.name for backend in SDPBackend.__members__.values()}
    return {
        "cuDNN": torch.backends.cudnn.version(),
        "without a mask": names[chosen(states, states, states, is_causal=True)],
        "with a mask": names[chosen(states, states, states, attn_mask=mask)],
    }


def products(card: Card) -> Figures:
    """Measure products in bursts and for a second, with the clock."""
    name = str(card.dtype).removeprefix("torch.")
    [found] = ceilings.measure(card.device, dtypes=(name,)).compute[:1]
    burst = found.burst_flops_per_s or found.flops_per_s
    return {
        "TFLOP/s sustained": found.flops_per_s / 1e12,
        "in a burst": burst / 1e12,
        "MHz": found.sm_clock_mhz,
        "clock events": found.clock_event_reasons or 0,
    }


def energy(card: Card) -> Figures:
    """Hold the energy counter against power times time under load."""
    source = gpu_source(card.device)
    if not isinstance(source, DriverSource):
        raise NotHereError(source.reason or "no readings")
    square = torch.randn(4096, 4096, device=card.device, dtype=card.dtype)

    def work() -> None:
        began = time.perf_counter()
        while time.perf_counter() - began < card.sizes.energy_s:
            for _ in range(20):
                torch.mm(square, square)
            card.timer.synchronize()

    with Sampler(source) as sampler:
        work()  # the power that NVML tells is the mean of the last second
        try:
            start, joules = sampler.clock(), source.joules()
            work()
            used, end = source.joules() - joules, sampler.clock()
        except OSError as error:
            raise NotHereError(str(error)) from error
        watts = sampler.by_quantity(start, end).get("gpu_power_w")
    if not watts:
        raise NotHereError(f"no power was read: {sampler.why_not('gpu_power_w')}")
    return {"J by the counter": used, "W x s": float(np.mean(watts)) * (end - start), "reasons": dict(source.reasons)}


def peak_memory(card: Card) -> Figures:
    """Hold the peak of a temporary tensor against torch's own statistics."""
    allocator = Allocator(card.device)
    release_memory(card.device)
    allocator.reset_peaks()
    before = allocator.allocated
    torch.empty(64 * 2**20, dtype=torch.uint8, device=card.device)
    torch_s = runtime(card.device).memory_stats(card.device)["allocated_bytes.all.peak"]
    return {"MiB above": (allocator.peak_allocated - before) / 2**20, "torch's": (torch_s - before) / 2**20}


def out_of_memory(card: Card) -> Figures:
    """Let a sweep run out of memory at its largest batch size, and measure a smaller one afterwards."""
    model, known = classifier(card), tokenizer(card.sizes.vocabulary)
    total = describe(card.device)["memory_bytes"]
    share = (runtime(card.device).memory_reserved(card.device) + 2**30) / total
    runtime(card.device).set_per_process_memory_fraction(min(1.0, share), card.device)
    try:
        profiler = InferenceProfiler(model, known, card.device)
        rows = profiler.profile_multiple_batch_sizes(texts(card.sizes, 4096), [2, 4096], 3, 512, max_seconds=2.0)
    finally:
        runtime(card.device).set_per_process_memory_fraction(1.0, card.device)
    with torch.inference_mode():
        again = model(input_ids=torch.full((2, 8), 5, device=card.device)).logits
    return {**{f"batch {row['batch_size']}": row["status"] for row in rows}, "finite": bool(again.isfinite().all())}


def sweep(card: Card) -> Figures:
    """Sweep the classifier over batch sizes."""
    profiler = InferenceProfiler(classifier(card), tokenizer(card.sizes.vocabulary), card.device)
    rows = profiler.profile_multiple_batch_sizes(
        texts(card.sizes, 2048), card.sizes.batch_sizes, 10, 512, max_seconds=card.sizes.sweep_s
    )
    per_s = {f"batch {row['batch_size']}, texts/s": row["throughput_samples_per_sec_mean"] for row in rows}
    unknown = [row["batch_size"] for row in rows if row["device_per_batch_ms"] is None]
    return {**per_s, "statuses": [row["status"] for row in rows], "without a device time": unknown}


def evaluation(card: Card) -> Figures:
    """Predict a whole set, beside batches of 32 in the order of arrival, and beside the limit of products."""
    model, known = classifier(card), tokenizer(card.sizes.vocabulary)
    given = texts(card.sizes, card.sizes.texts)
    name = str(card.dtype).removeprefix("torch.")
    predictor = Predictor(model, known, PredictorOptions(512, name), given[:256])
    some = _tokens(known, given[:512])
    predictor.predict_tokens(some)
    few_s = predictor.predict_tokens(some).seconds.compute_s
    given = given[: max(512, int(512 * EVALUATION_S / few_s))]
    tokens = predictor.tokenize(given)
    found = predictor.predict_tokens(tokens)
    seconds = found.seconds.compute_s + found.seconds.transfer_s
    few = min(1024, len(given))
    timer, start = card.timer, time.perf_counter()
    with torch.inference_mode():
        for first in range(0, few, 32):
            forward(model, collate(tokens, range(first, min(few, first + 32)), 0, card.device)).argmax(-1).tolist()
    timer.synchronize()
    plain_s = (time.perf_counter() - start) / few
    shape, limit = transformer_shape(model), ceilings.measure(card.device, dtypes=(name,)).configured(name)
    assert shape is not None and limit is not None
    flops = sum(transformer_flops(shape, 1, int(length)) for length in tokens.lengths)
    return {
        "texts/s": len(given) / seconds,
        "way": predictor.strategy,
        "x batches of 32": plain_s * len(given) / seconds,
        "of the limit of products": flops / seconds / limit.flops_per_s,
        "s for 369,475 texts": 369_475 * seconds / len(given),
    }


def layers(card: Card) -> Figures:
    """Profile GPT-2 layer by layer; together they are the whole."""
    from utils.layers.models import build, inputs_for

    model = build(card.sizes.gpt2).to(card.device).eval()
    inputs = inputs_for(model, 1, 128)
    with TemporaryDirectory() as folder:
        report = ObservabilityEngine(model, folder).profile(inputs, 30, max_seconds=20.0)
    profile = report.profile
    return {
        "layers over the whole": profile.coverage.ratio,
        "status": profile.coverage.status,
        "device times": sum(layer.device_self_s is not None for layer in profile.layers),
        "doubts": [doubt.partition(":")[0] for doubt in profile.doubts],
    }


def broken_capture(card: Card) -> Figures:
    """Capture a call that reads from the device, which fails, and look whether all is as before."""
    one = torch.ones(1, device=card.device)

    def reads() -> object:
        return one.add_(1).item()

    found = try_out(reads, [graph_replay(reads, IDLE_DEVICE)], card.timer, budget_s=20.0)
    there = runtime(card.device)
    before = there.memory_reserved(card.device)
    torch.empty(64 * 2**20, dtype=torch.uint8, device=card.device)
    release_memory(card.device)
    return {
        "refused": [each.kind for each in found.untried],
        "doubts": [doubt.text for doubt in found.doubts],
        "MiB kept": max(0, there.memory_reserved(card.device) - before) / 2**20,
        "current stream": "default" if there.current_stream() == there.default_stream() else "another",
    }


def _program(card: Card, command: Sequence[object]) -> Figures:
    """Run a program of this checkout, and return its exit code, seconds and last words."""
    start = time.monotonic()
    environment_of_it = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [str(part) for part in command],
        cwd=PACKAGE.parent,
        env=environment_of_it,
        capture_output=True,
        text=True,
        timeout=max(1.0, min(PROGRAM_S, card.until - start)),
        check=False,
    )
    said = (done.stderr if done.returncode else done.stdout).strip().splitlines()
    return {"exit": done.returncode, "s": time.monotonic() - start, **({"said": said[-1:]} if done.returncode else {})}


def quickstart(card: Card) -> Figures:
    """Run the whole pipeline on the quickstart's model and data."""
    with TemporaryDirectory() as folder:
        settings = [f"output.results_dir={folder}/results", f"model.device={card.device}"]
        found = _program(card, [sys.executable, "run_pipeline.py", "--config", "configs/quickstart.yaml", *settings])
        reports = len(list(Path(folder).glob("results/*report*")))
    return {**found, "reports": reports}


def _training(card: Card, framework: str) -> Figures:
    with TemporaryDirectory() as folder:
        options = ["--profiler", "on", "--framework", framework, "--steps", 30, "--output", f"{folder}/run"]
        found = _program(card, [sys.executable, "scripts/profile_training.py", *options])
        if found["exit"] == LACKING:
            raise NotHereError(" ".join(found["said"]))
        found["recorded"] = sum(path.stat().st_size > 0 for path in Path(folder).rglob("*stage_times.json"))
    return found


def nsys(card: Card) -> Figures:
    """Record a range with Nsight Systems, where it is installed."""
    found = shutil.which("nsys")
    if found is None:
        raise NotHereError("nsys is not installed")
    code = (
        "import torch; one = torch.ones(1, device='cuda'); torch.cuda.profiler.start(); "
        "torch.cuda.nvtx.range_push('first light'); one.add_(1).item(); torch.cuda.nvtx.range_pop(); "
        "torch.cuda.profiler.stop()"
    )
    with TemporaryDirectory() as folder:
        options = ["-t", "cuda,nvtx", "-c", "cudaProfilerApi", "--capture-range-end=stop", "-o", f"{folder}/it"]
        done = _program(card, [found, "profile", *options, sys.executable, "-c", code])
        return {**done, "reports": len(list(Path(folder).glob("it*.nsys-rep")))}


def _is_near(value: float, other: float, share: float) -> bool:
    return abs(value - other) <= share * other


RAN = "exit 0"
MEASURED = {"ok", "noisy"}  # in so few seconds an interval may be wide
CHECKS: tuple[Check, ...] = (
    Check("device time of a padded batch", "a time with a ready mask", masks, lambda f: f["a ready mask"] != "no time"),
    Check(
        "packed texts",
        "the way is packed, differences within what is allowed, none to other neighbours",
        packed,
        lambda f: (
            "packed" in f["way"]
            and f["difference to one by one"] <= f["allowed"]
            and f["difference to other neighbours"] <= f["allowed"] / 10
        ),
    ),
    Check(
        "depth of the launch queue",
        f"about {QUEUE_DEPTH:,}",
        queue_depth,
        lambda f: QUEUE_DEPTH / 2 <= f["launches before the host waits"] <= 2 * QUEUE_DEPTH,
    ),
    Check(
        "attention",
        "a fused kernel both times",
        attention,
        lambda f: all(f[name] not in ("MATH", "ERROR") for name in ("without a mask", "with a mask")),
    ),
    Check(
        "products",
        "sustained 60 to 105 % of a burst, and no clock lowered for heat",
        products,
        lambda f: 0.6 <= f["TFLOP/s sustained"] / f["in a burst"] <= 1.05 and not f["clock events"] & NVML_THROTTLED,
    ),
    Check("energy", "within 15 %", energy, lambda f: _is_near(f["J by the counter"], f["W x s"], 0.15)),
    Check("peak of memory", "64 and the same", peak_memory, lambda f: f["MiB above"] == f["torch's"] == 64),
    Check(
        "out of memory in a sweep",
        "batch 2 measured, batch 4096 oom, and the GPU computes on",
        out_of_memory,
        lambda f: f["batch 2"] in MEASURED and (f["batch 4096"], f["finite"]) == ("oom", True),
    ),
    Check(
        "sweep of a classifier of 0.5 billion parameters",
        "every batch size with its device time",
        sweep,
        lambda f: set(f["statuses"]) <= MEASURED and not f["without a device time"],
    ),
    Check(
        "evaluation",
        "60 % of the limit of products or more, which takes packed texts; an H200 has 369,475 of them in 60 s",
        evaluation,
        lambda f: f["of the limit of products"] >= 0.6,
    ),
    Check(
        "layers of GPT-2",
        "together 97 to 103 % of the whole, with device times",
        layers,
        lambda f: f["status"] == "pass" and f["device times"] > 0,
    ),
    Check(
        "graph replay of a padded batch",
        "a factor of 0.87 or more, no problem",
        graph,
        lambda f: f["factor"] is not None and f["factor"] >= 0.87 and not f["problems"],
    ),
    Check(
        "a capture that fails",
        "refused, no doubt, 0 MiB kept, the default stream",
        broken_capture,
        lambda f: (f["refused"], f["doubts"], f["MiB kept"], f["current stream"]) == (["failed"], [], 0, "default"),
    ),
    *(
        Check(
            f"30 steps with the callback for {title}",
            f"{RAN}, recorded",
            lambda card, framework=framework: _training(card, framework),
            lambda f: f["exit"] == 0 and f["recorded"] > 0,
            is_program=True,
            limit_s=PROGRAM_S + LEAST_LIMIT_S,
        )
        for framework, title in (("trainer", "the Trainer"), ("lightning", "Lightning"))
    ),
    Check("a range of nsys", f"{RAN}, a report", nsys, lambda f: f["exit"] == 0 and f["reports"] > 0, True),
    Check(
        "quickstart",
        f"{RAN}, a report",
        quickstart,
        lambda f: f["exit"] == 0 and f["reports"] > 0,
        is_program=True,
        limit_s=PROGRAM_S + LEAST_LIMIT_S,
    ),
)
