"""The least time that the machine's measured limits allow for the useful tokens, and where the rest of it goes."""

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from msgspec.structs import replace

from boundby.ceilings import Ceilings
from boundby.inference import PRECISIONS, Precision, Predictor
from boundby.inference.precision import calibrate
from boundby.roofline import Interval, OperatorLoad, attribute
from boundby.work import OperatorWork, count

PRODUCTS = ("mm", "addmm", "bmm", "linear", "baddbmm", "matmul", "mkldnn::_linear_pointwise",
            "onednn::qlinear_pointwise")  # fmt: skip
PREPARED = ("mkldnn::_linear_pointwise", "onednn::qlinear_pointwise")  # with kernels, and a limit, of their own
KINDS = ("products", "attention", "element-wise")
SIZE, CALLS = 1024, 7  # of the square products of a prepared layer


@dataclass(frozen=True)
class Roofline:
    """Least seconds for the texts, the sum over operators, and by kind the least and those of a counted pass."""

    least_s: float
    least_by_kind: dict[str, float]
    seconds_by_kind: dict[str, float]

    def lines(self, spent_s: float) -> list[str]:
        """Return what takes the time, as lines; `spent_s` is what the texts took uncounted."""
        found = [
            f"  {kind}: {self.seconds_by_kind[kind]:.2f} s counted, least {self.least_by_kind[kind]:.2f} s"
            for kind in KINDS
        ]
        rest = spent_s - sum(self.seconds_by_kind.values())
        return [*found, f"  the rest of {spent_s:.2f} s (dispatch, tokenizing, batches): {rest:.2f} s"]


def of(predictor: Predictor, texts: Sequence[str], weights_bytes: float, ceilings: Ceilings) -> Roofline:
    """Return the roofline of what the predictor computes for the texts, which its packs pad with nothing.

    Layers that are prepared are held against what such a layer reaches in that precision, all else against the products
    of the dtype with the settings in use: coarser ones are none that it may use.
    """
    limits = ceilings.limits(predictor.dtype)
    precision = PRECISIONS[predictor.options.precision]
    reached = layer_rate(precision) if precision.convert else 0.0
    stock = 0.0 if precision.name == "int8" else limits.flops_per_s.value  # a prepared layer may fall short of those
    prepared = replace(limits, flops_per_s=Interval.exact(max(stock, reached)))
    least, spent = defaultdict(float), defaultdict(float)
    for forward in predictor.forwards(predictor.tokenize(texts)):
        for each in count(forward, clock=time.perf_counter).operators:
            roof = prepared if each.name in PREPARED else limits
            found = attribute([_load(each)], roof, weights_bytes, each.seconds or 1e-9, on_host=False)
            least[_kind(each)] += found.compute_s + found.memory_s
            spent[_kind(each)] += each.seconds or 0.0
    return Roofline(sum(least.values()), *({kind: times[kind] for kind in KINDS} for times in (least, spent)))


def layer_rate(precision: Precision, clock: Callable[[], float] = time.perf_counter) -> float:
    """Return the FLOP/s of the best of some square products by a linear layer of a working copy in this precision."""
    layer = torch.nn.Sequential(torch.nn.Linear(SIZE, SIZE).requires_grad_(False))
    copy, inputs = precision.copy_of(layer), torch.randn(SIZE, SIZE, dtype=precision.dtype)
    seconds = []
    with torch.inference_mode(), precision.active(inputs.device):
        calibrate(copy, lambda: copy(inputs))
        for _ in range(CALLS):
            start = clock()
            copy(inputs)
            seconds.append(clock() - start)
    return 2 * SIZE**3 / min(seconds)


def _kind(work: OperatorWork) -> str:
    name = work.name.removeprefix("aten::")
    if "attention" in name:
        return "attention"
    return "products" if name in PRODUCTS else "element-wise"


def _load(work: OperatorWork) -> OperatorLoad:
    return OperatorLoad(
        name=work.name,
        calls=work.calls,
        flops=work.flops,
        weight_bytes=work.given_bytes,
        other_bytes=work.bytes - work.given_bytes,
        new_bytes=work.new_bytes,
    )


def limits_text(ceilings: Ceilings) -> str:
    """Return the measured limits as one line."""
    rates = [
        f"{each.dtype} {each.precision or ''} {each.flops_per_s / 1e9:.0f}".replace("  ", " ")
        for each in ceilings.compute
    ]
    memory = [f"{each.level} {each.bytes_per_s / 1e9:.0f}" for each in ceilings.memory]
    return f"GFLOP/s: {', '.join(rates)}; GB/s: {', '.join(memory)}; {torch.get_num_threads()} threads"
