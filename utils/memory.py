"""What memory larger batches would take, and which fit into machines of usual sizes, from the peaks of the sweep."""

from collections.abc import Sequence
from dataclasses import asdict

from utils.document import FittingBatch, MemoryForecast
from utils.visits import Visit

GB = 1e9
USUAL_GB = (8, 16, 24)


def forecast(visits: Sequence[Visit]) -> MemoryForecast:
    """Return the largest batch of the longest texts that fits, by the first visits, which hold a batch of these.

    On a GPU the peak is what its allocator took from the device, on a CPU that of the whole process.
    """
    from boundby.memory import Peak, fit_peaks  # torch, which `told` does without

    peaks, known = [], [(each, each.memory) for each in visits if each.memory and each.of("largest")]
    for visit, memory in known:
        largest = visit.of("largest")[0]
        held = memory.get("device_peak_reserved_bytes") or memory.get("process_peak_bytes")
        if held:
            peaks.append(Peak(largest.samples, largest.tokens_padded // largest.samples, held))
    model = fit_peaks(peaks)
    if not model:
        return {"model": None, "tokens": None, "fits": [], "reason": model.reason}
    tokens = max(peak.tokens for peak in peaks)
    fits: list[FittingBatch] = []
    for size in USUAL_GB:
        samples, or_more = model.most_samples(tokens, size * GB)
        fits.append({"gb": size, "samples": samples, "or_more": or_more})
    return {"model": asdict(model), "tokens": tokens, "fits": fits, "reason": None}


def told(found: MemoryForecast) -> str:
    """Return the forecast as a sentence or two."""
    if found["model"] is None:
        return f"The largest batch that fits is not known: {found['reason']}."
    model, tokens = found["model"], found["tokens"] or 0
    each = tokens * (model["bytes_per_token"] + tokens * model["bytes_per_pair"])
    fitting = ", ".join(f"{_batch(batch)} in {batch['gb']} GB" for batch in found["fits"])
    return (
        f"Batches of the longest texts ({tokens:,} tokens) take {model['fixed_bytes'] / GB:.2g} GB and "
        f"{each / 1e6:.2g} MB for each text (off by up to {model['error']:.0%}). The largest that fit: {fitting}."
    )


def _batch(batch: FittingBatch) -> str:
    if not batch["samples"]:
        return "none"
    return f"{'more than ' if batch['or_more'] else ''}{batch['samples']:,}"
