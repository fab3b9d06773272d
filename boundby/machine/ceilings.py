"""The measured limits of this machine: FLOP/s by dtype and setting, bytes/s by working set, the cost of one operator.

Data sheets are no substitute: they quote sparse figures, and tables that match names miss (docs/method.md). A limit is
what the machine can do, so the best of several blocks counts (Chen & Revels 2016); `low` is their median, which tells
how sure that is. Square matmuls set the peak; bytes/s are those of copy and addition, whichever is faster.
"""

import functools
import math
import operator
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import torch

from boundby import files
from boundby.machine import environment
from boundby.machine.device import (
    busy_threads,
    describe,
    device_queue,
    float32_precision,
    gpu_source,
    is_gpu,
    is_host,
    last_level_cache_bytes,
    synchronizer,
)
from boundby.machine.disturbance import HostCounters, Watch
from boundby.machine.records import NEW, Ceilings, ComputeCeiling, MemoryCeiling, SharedCache
from boundby.machine.sampler import Source
from boundby.timing import QUEUE_DEPTH, Timer, Work

SCHEMA_VERSION = 3  # 3: a GPU's matmuls are sustained
BUDGET_S = 5.0  # twice on a disturbed machine
OVERRUN = 1.4  # of the budget, after which what can be left out is
BLOCKS = 7
BLOCK_S = 0.01  # long beside the clock and the wait for the device
# Of matmuls on a GPU, after the short blocks: its power controller acts only after some tenths of a second, and lowers
# the clock then. The second half counts.
SUSTAINED_S, SUSTAINED_BLOCK_S = 1.0, 0.1
PRECISIONS = ("highest", "high", "medium")  # of float32 matmuls, torch.set_float32_matmul_precision
GPU_PRECISIONS = ("highest", "high")  # "medium" is TF32 there, too (`at::Context::allowTF32CuBLAS`)
HOST_SIZES, GPU_SIZES = (256, 512, 1024, 2048), (2048, 4096, 8192)  # of the matrices
HOST_DTYPES, GPU_DTYPES = ("float32", "bfloat16"), ("float32", "bfloat16", "float16")
LEAST_MEMORY_BYTES = 256 * 2**20
LARGEST_SHARE_OF_MEMORY = 0.25
DROP = 1.5  # from one level to the next, to be one
FLAT = 1.15  # between neighbouring sizes beyond every cache
ASSUMED_CACHE_BYTES = (512 * 2**10, 32 * 2**20)  # of a CPU that does not tell
TINY_OPERATORS = 500  # fewer than a GPU's launch queue takes


def usual_dtypes(device: torch.device) -> tuple[str, ...]:
    """Return the dtypes that this kind of device is measured in unless others are asked for."""
    return GPU_DTYPES if is_gpu(device) else HOST_DTYPES


def cached(folder: Path, device: torch.device, dtypes: Sequence[str]) -> tuple[Ceilings, Path, bool]:
    """Return the ceilings of this machine, the file that keeps them, and whether they were measured just now.

    There is one file per machine, device, threads, settings and torch. On a disturbed machine they are measured twice,
    and not kept if that did not help.
    """
    key = [SCHEMA_VERSION, environment.machine_fingerprint(), describe(device), _settings(), list(dtypes)]
    path = folder / f"ceilings-{files.sha256_of(key)[:16]}.json"
    try:
        return files.read_as(path, Ceilings), path, False
    except (OSError, ValueError):
        ceilings = measure(device, dtypes=dtypes)
        if ceilings.doubts:
            ceilings = ceilings.joined(measure(device, dtypes=dtypes))
    if not ceilings.doubts:
        folder.mkdir(parents=True, exist_ok=True)
        files.write_json(path, ceilings)
    return ceilings, path, True


def measure(
    device: torch.device,
    *,
    dtypes: Sequence[str] | None = None,
    budget_s: float = BUDGET_S,
    timer: Timer | None = None,
    watch: Watch | None = None,
    source: Source | None = None,
) -> Ceilings:
    """Return the limits of `device`, measured within about `budget_s`; the settings in use are left as they were.

    What the settings in use allow comes first; other settings are left out, and named, where the budget is used up. On
    a GPU each matmul limit takes a second more; `source` reads its clocks meanwhile, by default NVML.
    """
    timer = timer or Timer(synchronize=synchronizer(device))
    watch = (watch or Watch(HostCounters())).start()
    wanted = dtypes or usual_dtypes(device)
    points = len(wanted) + (len(_precisions(device)) - 1) * ("float32" in wanted)
    start = timer.clock()
    bench = _Bench(device, timer, slot_s=budget_s / (2 * points + 8), deadline=start + OVERRUN * budget_s)
    bench.source = source or gpu_source(device) if is_gpu(device) else None
    with torch.inference_mode():
        dispatch, in_use = bench.dispatch(), float32_precision()
        matmuls = [bench.matmul(dtype, in_use if dtype == "float32" else None, True) for dtype in wanted]
        ladder: list[MemoryCeiling] = []
        cache: SharedCache | None = None
        if is_host(device):
            private, reported = cache_sizes()
            own = private * torch.get_num_threads() // 2
            memory = [bench.memory("private cache", own)]
            ladder = list(bench.ladder(4 * own, reported))
            shared, beyond = levels(ladder)
            cache = SharedCache(reported, shared.working_set_bytes if shared else None)
            memory += [*([shared] if shared else []), beyond, bench.new_memory(beyond)]
        else:
            memory = [bench.memory(level, size) for level, size in _device_sizes(device)]
        matmuls += bench.other_precisions() if "float32" in wanted else []
    events = functools.reduce(operator.or_, (matmul.clock_event_reasons or 0 for matmul in matmuls))
    conditions = replace(watch.stop(), gpu_clock_event_reasons=events)
    seen = "; ".join(disturbance.text for disturbance in conditions.disturbances(busy_threads(device)))
    return Ceilings(
        device=describe(device),
        compute=tuple(
            sorted(
                matmuls,
                key=lambda matmul: (wanted.index(matmul.dtype), PRECISIONS.index(matmul.precision or "highest")),
            )
        ),
        memory=tuple(memory),
        dispatch_s=dispatch[0],
        dispatch_high_s=dispatch[1],
        seconds=timer.clock() - start,
        doubts=(f"the ceilings were measured while {seen}",) if seen else (),
        ladder=tuple(ladder),
        shared_cache=cache,
        cut=tuple(bench.cut),
    )


def levels(ladder: Sequence[MemoryCeiling]) -> tuple[MemoryCeiling | None, MemoryCeiling]:
    """Return the shared cache and main memory from bytes/s by growing working sets.

    The cache reaches to the last size before bytes/s fall below the geometric mean of its best and of the largest
    size's; there is none where they do not fall by `DROP`.
    """
    beyond = msgspec.structs.replace(ladder[-1], level="memory")
    best = max(ladder, key=lambda ceiling: ceiling.bytes_per_s)
    if best.bytes_per_s < DROP * beyond.bytes_per_s:
        return None, beyond
    fallen = math.sqrt(best.bytes_per_s * beyond.bytes_per_s)
    after = (index for index, level in enumerate(ladder) if level.bytes_per_s < fallen and index > ladder.index(best))
    size = ladder[next(after) - 1].working_set_bytes
    return msgspec.structs.replace(best, level="shared cache", working_set_bytes=size), beyond


def _precisions(device: torch.device) -> tuple[str, ...]:
    return GPU_PRECISIONS if is_gpu(device) else PRECISIONS


class _Bench:
    """Times blocks of one operation; `slot_s` is what one limit may take, `deadline` when what can be is cut."""

    def __init__(self, device: torch.device, timer: Timer, slot_s: float, deadline: float) -> None:
        self.device, self.timer, self.slot_s, self.deadline = device, timer, slot_s, deadline
        self.cut: list[str] = []
        self.source: Source | None = None  # of a GPU's clocks
        self._queue = device_queue(device)

    def other_precisions(self) -> Iterator[ComputeCeiling]:
        """Yield the limits of float32 matmuls under the settings that are not in use, while the budget lasts."""
        in_use = float32_precision()
        for precision in reversed(_precisions(self.device)):  # the coarsest is the one that may gain
            if precision == in_use or (is_gpu(self.device) and precision == "high" and in_use == "medium"):
                continue
            if self.timer.clock() > self.deadline:
                self.cut.append(f"float32 matmul at precision '{precision}'")
                continue
            with matmul_precision(precision):
                yield self.matmul("float32", precision, False)

    def ladder(self, size: int, reported: int) -> Iterator[MemoryCeiling]:
        """Yield bytes/s of growing working sets, until they no longer fall: beyond every cache.

        Where they never fell, the sizes reach twice the `reported` cache, as far as memory and the budget do.
        """
        most = int(LARGEST_SHARE_OF_MEMORY * environment.memory_limit_bytes())
        rates: list[float] = []
        while True:
            ceiling = self.memory("shared cache", size)
            yield ceiling
            rates.append(ceiling.bytes_per_s)
            has_fallen = rates[-1] * DROP < max(rates) and rates[-2] < FLAT * rates[-1]
            is_far = size >= LEAST_MEMORY_BYTES and (has_fallen or size >= 2 * reported)
            size *= 2
            if is_far or size > max(most, LEAST_MEMORY_BYTES):
                return
            if self.timer.clock() > self.deadline:
                self.cut.append(f"bytes/s of {size // 2**20} MiB and more")
                return

    def matmul(self, dtype: str, precision: str | None, is_configured: bool) -> ComputeCeiling:
        """Time matmuls of growing size while the next one fits into the slot, and return the best.

        The right factor is transposed, as the weight of a linear layer is: some CPUs multiply bfloat16 seven times
        faster that way.
        """
        best: tuple[float, float, int] | None = None
        error, spent = 0.0, 0.0
        work: Work | None = None
        for size in GPU_SIZES if is_gpu(self.device) else HOST_SIZES:
            flops = 2 * size**3
            if best and spent + BLOCKS * flops / best[0] > self.slot_s:
                break
            left = _filled((size, size), dtype, self.device, seed=0)
            right = _filled((size, size), dtype, self.device, seed=1).t()
            out = torch.empty_like(left)
            if best is None:
                error = _relative_error(left, right)
            work = functools.partial(torch.mm, left, right, out=out)
            fastest, middle, seconds = self._blocks(work)
            spent += seconds
            if best is None or flops / fastest > best[0]:
                best = (flops / fastest, flops / middle, size)
            largest = size
        assert best is not None and work is not None
        if not is_gpu(self.device):
            return ComputeCeiling(dtype, precision, is_configured, best[0], best[1], best[2], error)
        rates, readings = self._sustained(work, 2 * largest**3, best[0])
        clocks = [reading["gpu_sm_clock_mhz"] for reading in readings if "gpu_sm_clock_mhz" in reading]
        events = [
            int(reading["gpu_clock_event_reasons"]) for reading in readings if "gpu_clock_event_reasons" in reading
        ]
        return ComputeCeiling(
            dtype,
            precision,
            is_configured,
            median(rates),
            min(rates),
            largest,
            error,
            burst_flops_per_s=best[0],
            sm_clock_mhz=median(clocks) if clocks else None,
            clock_event_reasons=functools.reduce(operator.or_, events) if events else None,
        )

    def _sustained(self, work: Work, flops: int, rate: float) -> tuple[list[float], list[dict[str, float]]]:
        """Return FLOP/s of the second half of a second without a pause, and what was read while the device computed."""
        calls = max(1, math.ceil(SUSTAINED_BLOCK_S * rate / flops))
        rates: list[float] = []
        readings: list[dict[str, float]] = []
        clock, start = self.timer.clock, self.timer.clock()
        while not rates or clock() - start < SUSTAINED_S:
            began = clock()
            for _ in range(calls):
                work()
            with suppress(OSError):
                readings += [self.source.read()] if self.source and self.source.reason is None else []
            self.timer.synchronize()
            rates.append(calls * flops / (clock() - began))
        return rates[len(rates) // 2 :], readings[len(readings) // 2 :]

    def memory(self, level: str, working_set: int) -> MemoryCeiling:
        """Return the faster of copying and adding where all tensors together have `working_set` bytes."""
        rates = []
        for operation, tensors in (("copy", 2), ("add", 3)):
            count = max(1, working_set // (4 * tensors))
            given = [_touched(count, self.device) for _ in range(tensors - 1)]
            out = torch.empty_like(given[0])
            copying = functools.partial(out.copy_, given[0])
            work = copying if operation == "copy" else functools.partial(torch.add, *given, out=out)
            fastest, middle, _ = self._blocks(work)
            moved = 4 * count * tensors
            rates.append((moved / fastest, moved / middle, operation))
        best = max(rates)
        return MemoryCeiling(level, working_set, best[0], best[1], best[2])

    def new_memory(self, known: MemoryCeiling) -> MemoryCeiling:
        """Return bytes/s of writing to new memory: what an addition takes beyond reading what is there (`known`)."""
        count = known.working_set_bytes // 12
        left, right = (_touched(count, self.device) for _ in range(2))
        reading_s = 8 * count / known.bytes_per_s
        fastest, middle, _ = self._blocks(lambda: torch.add(left, right))
        rates = [4 * count / max(seconds - reading_s, 4 * count / known.bytes_per_s) for seconds in (fastest, middle)]
        return MemoryCeiling(NEW, known.working_set_bytes, rates[0], rates[1], "add")

    def dispatch(self) -> tuple[float, float]:
        """Return the seconds that the host needs to issue one operator: the best, and the median."""
        one = _touched(1, self.device)

        def issue() -> None:
            for _ in range(TINY_OPERATORS):
                torch.add(one, one)

        issue()
        times = [self.timer.enqueue(issue) / TINY_OPERATORS for _ in range(3 * BLOCKS)]
        return min(times), median(times)

    def _blocks(self, work: Work) -> tuple[float, float, float]:
        """Return the seconds of one call in the best block and in the median block, and the seconds spent."""
        start = self.timer.clock()
        self.timer.isolated(work)  # kernels are chosen and memory is mapped by the first call
        once = self.timer.isolated(work)
        calls = max(1, math.ceil(BLOCK_S / max(once, 1e-9)))
        if self._queue is not None:  # beyond its depth the host waits, and its own launches would be the limit
            calls = min(calls, QUEUE_DEPTH // 2)
        times = [once] if once > self.slot_s / 3 else []
        while len(times) < BLOCKS and (len(times) < 1 or self.timer.clock() - start < self.slot_s):
            times.append(self._block(work, calls) / calls)
        return min(times), median(times), self.timer.clock() - start

    def _block(self, work: Work, calls: int) -> float:
        """Return the seconds of `calls` in a row; on a GPU its own, lest the host's launches be the limit."""

        def block() -> None:
            for _ in range(calls):
                work()

        if self._queue is not None:
            on_device = self.timer.on_device(block, self._queue, self.timer.enqueue(block))
            if on_device.seconds is not None:
                return on_device.seconds
        return self.timer.pipelined([work] * calls)


@contextmanager
def matmul_precision(precision: str) -> Iterator[None]:
    """Set how float32 matrix matmuls may be rounded, and set it back."""
    before = float32_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def cache_sizes(root: Path = Path("/sys/devices/system/cpu")) -> tuple[int, int]:
    """Return the bytes of the private cache of one core and of the last-level cache it shares."""
    bytes_by_level: dict[int, int] = {}
    for index in sorted(root.glob("cpu0/cache/index*")):
        try:
            level, kind, size = ((index / name).read_text().strip() for name in ("level", "type", "size"))
        except OSError:
            continue
        if kind != "Instruction" and size.endswith("K"):
            bytes_by_level[int(level)] = int(size[:-1]) * 1024
    if not bytes_by_level:
        return ASSUMED_CACHE_BYTES
    return bytes_by_level.get(2, bytes_by_level[min(bytes_by_level)]), bytes_by_level[max(bytes_by_level)]


def _device_sizes(device: torch.device) -> list[tuple[str, int]]:
    """Return the sizes at which bytes/s of a GPU are measured: inside its cache, and far beyond."""
    cache = last_level_cache_bytes(device) or 0
    return [("cache", cache // 2), ("memory", max(LEAST_MEMORY_BYTES, 8 * cache))]


def _filled(shape: tuple[int, ...], dtype: str, device: torch.device, seed: int) -> torch.Tensor:
    generator = torch.Generator(device).manual_seed(seed)
    values = torch.randn(shape, generator=generator, device=device)
    return values.to(getattr(torch, dtype))


def _touched(count: int, device: torch.device) -> torch.Tensor:
    """Return numbers in memory of their own; random ones would take longer than what is timed."""
    return torch.ones(count, device=device)


def _relative_error(left: torch.Tensor, right: torch.Tensor) -> float:
    """Return the largest error of the matmul, over its largest value, against float64."""
    exact = left.double() @ right.double()
    return float(((left @ right).double() - exact).abs().max() / exact.abs().max())


def _settings() -> dict[str, Any]:
    return {
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "matmul_precision": float32_precision(),
        "environment": environment.settings(),
    }
