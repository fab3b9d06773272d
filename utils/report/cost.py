"""What it costs on the rented machine, where its price is set."""

from collections.abc import Callable, Mapping
from typing import Any

from utils.render.blocks import Block, DefinitionList, Heading
from utils.render.formatting import number, unknown
from utils.report.sources import ReportData

MILLION = 1_000_000
SECONDS_PER_HOUR = 3600
SEVERAL = 1.02  # seconds of all machines over those in which any was busy, above which several were


def section(data: ReportData) -> list[Block]:
    """Return hours and cost of a million samples and of the dataset; nothing without a price."""
    price = data.config.pod.price_per_hour
    if price is None:
        return []
    ways: list[tuple[str, Callable[[int], str]]] = []
    if data.chosen:
        rate = data.chosen["throughput_samples_per_sec_mean"]
        how = f"batch size {data.chosen['batch_size']}, texts as they come"
        ways.append((how, lambda rows: f"{_hours(rows / rate)}, cost {_money(rows / rate, price)}"))
    if full := data.full:
        ways.append(("as in the whole-dataset pass", lambda rows: of_pass(full, rows, price)))
    pairs = [("1 million samples", f"{text(MILLION)} ({how})") for how, text in ways]
    rows = data.document["dataset"].get("rows")
    if rows and ways:
        how, text = ways[-1]
        pairs.append((f"{rows:,} samples", f"{text(rows)} (this dataset, {how})"))
    pairs = pairs or [("1 million samples", unknown(data.choice["reason"]))]
    return [Heading(f"Cost at {price:g} per hour (pod.price_per_hour)"), DefinitionList(pairs)]


def of_pass(full: Mapping[str, Any], rows: int, price: float | None) -> str:
    """Return the hours of so many rows on the machines of this pass, and their cost at this price of one per hour."""
    scale = rows / full["samples"]
    seconds, machines_s = full["inference_time_s"], full.get("machine_time_s")
    said = _hours(scale * seconds)
    if price is None:
        return said
    if machines_s is None:
        return f"{said}, cost {unknown(reason(full))}"
    several = f" for {_hours(scale * machines_s)} of all machines" if machines_s > SEVERAL * seconds else ""
    return f"{said}, cost {_money(scale * machines_s, price)}{several}"


def reason(full: Mapping[str, Any]) -> str:
    """Return why it is not known how long machines and devices were busy in this pass."""
    return full.get("machine_time_reason") or "an earlier version did not note which machines predicted"


def _hours(seconds: float) -> str:
    return f"{number(seconds / SECONDS_PER_HOUR)} hours"


def _money(seconds: float, price: float) -> str:
    cost = seconds / SECONDS_PER_HOUR * price
    return f"{cost:,.2f}" if cost >= 1 else number(cost)
