"""How much of this machine's measured limit the pass over the whole dataset used, counting tokens of texts alone."""

from collections.abc import Sequence

from boundby.machine import Ceilings, is_host
from utils.baseline.document import Row
from utils.evaluation import CeilingShare, FullDataset


def share_of_ceiling(full: FullDataset, rows: Sequence[Row], ceilings: Ceilings | None, device: str) -> CeilingShare:
    """Return useful FLOP/s over the ceiling in percent, and that ceiling; None and a reason where it cannot be told.

    The FLOPs that a token needs are those counted in the sweep, whose texts are a sample of the same dataset: padding
    left out, each text that was computed counted once. The seconds are those of each device, added up.
    """
    row = next((row for row in rows if row.get("useful_flops_pct") and row["tokens_per_sec_real"]), None)
    ceiling = _ceiling(full, ceilings, device)
    if row is None:
        return _unknown("the FLOPs of a forward were not counted")
    if ceiling is None:
        return _unknown(f"no ceiling was measured for {full['precision']}")
    if full["device_time_s"] is None:
        return _unknown(full["machine_time_reason"])
    tokens = row["tokens_per_sec_real"] / row["throughput_samples_per_sec_mean"] * row["batch_size"]
    flops = full["useful_tokens"] * row["flops_per_batch"] * row["useful_flops_pct"] / 100 / tokens
    rate = flops / full["device_time_s"]
    if rate > ceiling:  # prepacked weights have kernels of their own
        return _unknown("its kernels are faster than those that the ceiling was measured with")
    return {
        "useful_flops_per_sec": rate,
        "share_of_ceiling_pct": 100 * rate / ceiling,
        "ceiling_flops_per_sec": ceiling,
        "share_of_ceiling_reason": None,
    }


def _ceiling(full: FullDataset, ceilings: Ceilings | None, device: str) -> float | None:
    """Return the measured FLOP/s of matrix products in the precision of the pass, under its setting."""
    if full["precision"] == "int8":  # held in float32 beside its products of eight bits, whose ceiling is not measured
        return None
    for roof in ceilings.compute if ceilings else ():
        fast = "medium" if is_host(device) else "high"  # what the precision float32_fast sets
        wanted = fast if full["precision"] == "float32_fast" else None
        is_setting = roof.precision == wanted if wanted else roof.is_configured
        if roof.dtype == full["dtype"] and is_setting:
            return roof.flops_per_s
    return None


def _unknown(reason: str | None) -> CeilingShare:
    return {
        "useful_flops_per_sec": None,
        "share_of_ceiling_pct": None,
        "ceiling_flops_per_sec": None,
        "share_of_ceiling_reason": reason,
    }
