"""What it costs on the rented machine, where its price is set."""

from utils.report.blocks import Block, DefinitionList, Heading
from utils.report.sources import ReportData
from utils.report.typesetting import number, unknown

MILLION = 1_000_000
SECONDS_PER_HOUR = 3600


def section(data: ReportData) -> list[Block]:
    """Return hours and cost of a million samples and of the dataset; nothing without a price."""
    price = data.config.pod.price_per_hour
    if price is None:
        return []
    rates = []
    if data.chosen:
        rate = data.chosen["throughput_samples_per_sec_mean"]
        rates.append((f"batch size {data.chosen['batch_size']}, texts as they come", rate))
    if data.full:
        rates.append(("as in the whole-dataset pass", data.full["throughput_samples_per_sec"]))
    pairs = [("1 million samples", f"{text(MILLION / rate, price)} ({how})") for how, rate in rates]
    rows = data.document["dataset"].get("rows")
    if rows and rates:
        how, rate = rates[-1]
        pairs.append((f"{rows:,} samples", f"{text(rows / rate, price)} (this dataset, {how})"))
    pairs = pairs or [("1 million samples", unknown(data.choice["reason"]))]
    return [Heading(f"Cost at {price:g} per hour (pod.price_per_hour)"), DefinitionList(pairs)]


def text(seconds: float, price: float | None) -> str:
    """Return so many seconds in hours, and what they cost at this price per hour."""
    hours = seconds / SECONDS_PER_HOUR
    if price is None:
        return f"{number(hours)} hours"
    cost = hours * price
    return f"{number(hours)} hours, cost {f'{cost:,.2f}' if cost >= 1 else number(cost)}"
