"""What memory larger batches would take, and which fit into machines of usual sizes, from the peaks of the sweep."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from boundby.formatting import Missing
from utils.baseline.document import FittingBatch, MemoryForecast
from utils.baseline.rounds import Visit

if TYPE_CHECKING:  # torch, which `forecast_in_words` does without
    from boundby.machine import Demand
    from utils.baseline.selection import Selection

GB = 1e9
USUAL_GB = (8, 16, 24, 48, 80, 141)
NOT_COUNTED = "what a batch holds was not counted"


def demands(model: Any, selection: "Selection", batch_sizes: Sequence[int]) -> "dict[int, Demand | Missing]":
    """Return what the largest batch of each of these sizes holds, by the tokens of its texts."""
    from boundby.inference import Batch, forward
    from boundby.machine import demand, raise_if_lost

    by_tokens: dict[int, Demand | Missing] = {}
    for size in batch_sizes:
        arrivals = selection.arrivals(size)
        ids = selection.batch(arrivals.rows(arrivals.largest)).input_ids[:1]
        tokens = ids.shape[1]

        def padded(samples: int, ids: Any = ids, tokens: int = tokens) -> object:
            same = ids.repeat(samples, 1)
            mask = same.new_ones(same.shape)
            mask[-1, tokens // 2 :] = 0  # a mask takes memory, and few of the largest batches do without
            return forward(model, Batch(tuple(range(samples)), same, mask, int(mask.sum())))

        if tokens not in by_tokens:
            try:
                by_tokens[tokens] = demand(padded, tokens)
            except Exception as error:  # a model may raise anything; the sweep is done
                raise_if_lost(error)
                by_tokens[tokens] = Missing(f"counting what a batch holds failed: {type(error).__name__}: {error}")
    return by_tokens


def forecast(visits: Sequence[Visit], demands: "Mapping[int, Demand | Missing] | None" = None) -> MemoryForecast:
    """Return the largest batch of the longest texts that fits, by the first visits, which hold a batch of these.

    On a GPU the peak is what its allocator took from the device, on a CPU that of the whole process.
    """
    from boundby.machine import KEPT_BELOW, Peak, fit_peaks

    if not demands:
        return _unknown(NOT_COUNTED)
    peaks, is_gpu = [], False
    for visit in visits:
        memory = visit.memory
        for largest in visit.of("largest")[:1] if memory else ():
            assert memory
            reserved = memory.device_peak_reserved_bytes
            held = reserved or memory.process_peak_bytes
            is_gpu = is_gpu or bool(reserved)
            if held:
                peaks.append(Peak(largest.samples, largest.tokens_padded // largest.samples, held))
    known = {tokens: demand for tokens, demand in demands.items() if demand}
    model = fit_peaks(peaks, known, 0 if is_gpu else KEPT_BELOW)
    if isinstance(model, Missing):
        return _unknown(model.reason)
    tokens = max(known)
    fits: list[FittingBatch] = []
    for size in USUAL_GB:
        samples = model.most_samples(size * GB)
        at = model.at(max(1, samples))
        error = max(at.high / at.value - 1, 1 - at.low / at.value)
        fits.append({"gb": size, "samples": samples, "error": error})
    far = fits[-1]["samples"] + 1
    bytes_per_sample = (model.demand.live_bytes(2 * far) - model.demand.live_bytes(far)) / far
    line = {"fixed_bytes": model.base.value, "bytes_per_sample": bytes_per_sample}
    return {"model": line, "tokens": tokens, "fits": fits, "reason": None}


def _unknown(reason: str) -> MemoryForecast:
    return {"model": None, "tokens": None, "fits": [], "reason": reason}


def forecast_in_words(forecast: MemoryForecast) -> str:
    """Return the forecast as a sentence or two."""
    if forecast["model"] is None:
        return f"The largest batch that fits is not known: {forecast['reason']}."
    model, tokens = forecast["model"], forecast["tokens"] or 0
    fits = [(f"{batch['samples']:,}" if batch["samples"] else "none", batch["gb"]) for batch in forecast["fits"]]
    fitting = ", ".join(f"{samples} in {gb} GB" for samples, gb in fits)
    off = round(100 * max((batch["error"] for batch in forecast["fits"] if batch["samples"]), default=0))
    return (
        f"Batches of the longest texts ({tokens:,} tokens) take {model['fixed_bytes'] / GB:.2g} GB and "
        f"{model['bytes_per_sample'] / 1e6:.2g} MB for each text. The largest that fit: {fitting}"
        f"{f'; the memory that this rests on may be off by {off} %' if off else ''}."
    )
