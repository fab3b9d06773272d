"""The numbers over the whole dataset, where their time went, how exact they are, and what the dataset costs."""

from collections.abc import Callable

from boundby.formatting import number, quantity, times, unknown
from utils.evaluation import FullDataset
from utils.render import Block, DefinitionList, Heading, Paragraph, Table
from utils.report.figures import Content, Folded
from utils.report.sources import ReportData

PHASES = {
    "tokenize": "tokenizing",
    "compute": "computing",
    "transfer": "transfer of results",
    "wait": "waiting for tokens",
}
OVERLAPPING = 1.02  # phases over the time of the workers, above which something was done beside computing
LEAST_REST = 0.005  # of the time, to be shown
MILLION = 1_000_000
SECONDS_PER_HOUR = 3600
SEVERAL = 1.02  # seconds of all machines over those in which any was busy, above which several were


def section(data: ReportData) -> list[Content]:
    """Return scores, speed and exactness of the pass over the dataset, and folded where its time went."""
    heading = Heading("The whole dataset")
    full = data.full
    if full is None:
        return [heading, Paragraph(f"Not evaluated: {data.document['full_dataset_reason']}.")]
    folded = [DefinitionList(_more(full, data)), *_phases(full), *_subsets(full)]
    return [heading, DefinitionList(_pairs(full, data)), Folded("More of the pass over the whole dataset", folded)]


def _pairs(full: FullDataset, data: ReportData) -> list[tuple[str, str]]:
    seconds, rows = full["inference_time_s"], data.document["dataset"].get("rows")
    part = f" of {rows:,} (a seeded sample)" if rows and rows != full["samples"] else ""
    ways = [(full["precision"], True), ("last layer trimmed", full["trim"]), ("compiled", full["compile"])]
    return [
        ("Samples", f"{full['samples']:,}{part} in {number(seconds)} s"),
        *([(data.task.SCORE, data.task.headline(full))] if data.is_scored else []),
        ("Throughput", f"{number(full['throughput_samples_per_sec'])} samples/s, tokenizing included"
         f"{_beside(full, data)}"),
        ("Batches", f"{full['strategy']}, at most {full['token_budget']:,} tokens each, {full['padding_pct']:.1f} % "
         f"padding; {', '.join(name for name, is_taken in ways if is_taken)}"),
        ("Labels", _exactness(full)),
        *([] if full["truncated"] == 0 else [("Texts cut", _cut(full))]),
    ]  # fmt: skip


def _beside(full: FullDataset, data: ReportData) -> str:
    """Return why this is another speed than that of the sweep."""
    row = data.chosen
    if row is None or row["dtype"] != full["dtype"]:
        return ""
    ratio = full["throughput_samples_per_sec"] / row["throughput_samples_per_sec_mean"]
    return f"; {times(ratio)}× that of batch size {row['batch_size']} with unsorted texts"


def _more(full: FullDataset, data: ReportData) -> list[tuple[str, str]]:
    rows = data.document["dataset"].get("rows") or full["samples"]
    whole = of_pass(full, rows, data.config.pod.price_per_hour)
    hours = f", {_gpu_hours(full, rows)}" if data.is_on_gpu else ""
    return [
        *(data.task.described(full) if data.is_scored else []),
        ("Time per sample", f"{number(full['latency_per_sample_ms'])} ms: all the time divided by the samples, "
         "not what one request takes"),
        ("Tokens", f"{number(full['tokens_per_sec_real'])} of texts in a second"),
        ("Tokenizing", f"{number(full['tokenize_time_s'])} s"),
        ("Of the peak", _ceiling(full)),
        ("Whole set", f"{rows:,} samples at {number(full['throughput_samples_per_sec'])} samples/s: {whole}{hours}"),
        ("GPU memory, peak", quantity(full["gpu_mem_used_mb"], "MB", full["gpu_mem_used_reason"])),
        ("CPU memory, peak", quantity(full["cpu_mem_peak_mb"], "MB", "the kernel does not tell")),
    ]  # fmt: skip


def _ceiling(full: FullDataset) -> str:
    if full["share_of_ceiling_pct"] is None:
        return unknown(full["share_of_ceiling_reason"])
    rate, ceiling = (number(full[f"{name}_flops_per_sec"] / 1e9) for name in ("useful", "ceiling"))
    how = "padding not counted" + ("; the trimmed layer counts in full" if full["trim"] else "")
    return f"{full['share_of_ceiling_pct']:.1f} %: {rate} of {ceiling} matmul GFLOP/s, {how}"


def _gpu_hours(full: FullDataset, rows: int) -> str:
    seconds = full["device_time_s"]
    if seconds is None:
        return f"GPU-hours {unknown(full['machine_time_reason'])}"
    return f"{number(rows / full['samples'] * seconds / SECONDS_PER_HOUR)} GPU-hours"


def _exactness(full: FullDataset) -> str:
    """Return how the predictions compare with float32 one text at a time."""
    guarded = full["guarded_texts"]
    again = f"; {guarded:,} near ties were computed again in float32" if guarded else ""
    report = full["exactness"]
    if not report:
        is_plain = full["precision"] == "float32" and full["exactness_reason"]
        plain = "in float32, as the model gives them; a self-check passed"
        return (plain if is_plain else unknown(full["exactness_reason"])) + again
    low, high = 100 * report["agreement_low"], 100 * report["agreement_high"]
    text = (
        f"{report['same_labels']:,} of {report['rows']:,} labels as in float32 one text at a time "
        f"({100 * report['agreement']:.2f} % [{low:.2f}, {high:.2f}]); logits differ by at most "
        f"{number(report['max_abs_logit_difference'])}, {number(report['mean_abs_logit_difference'])} on average"
    )
    change = [report.get(f"accuracy_difference{end}") for end in ("", "_low", "_high")]
    if None not in change:
        value, low, high = (100 * share for share in change)
        text += f"; accuracy {value:+.2f} [{low:+.2f}, {high:+.2f}] percentage points"
    return text + again


def _phases(full: FullDataset) -> list[Block]:
    """Return where the time of the workers went."""
    phases = full["phases_s"]
    total, known = full["worker_time_s"], sum(phases.values())
    rows = [[PHASES[name], number(phases[name]), f"{100 * phases[name] / total:.1f}"] for name in PHASES]
    if total - known > LEAST_REST * total:
        rows.append(["anything else", number(total - known), f"{100 * (1 - known / total):.1f}"])
    notes = []
    if known > OVERLAPPING * total:
        notes.append("tokenizing went on beside computing, so the shares add up to more than 100 %")
    if total > OVERLAPPING * full["inference_time_s"]:
        notes.append(f"several workers ran at once: together {number(total)} s in {number(full['inference_time_s'])} s")
    return [Table(["phase", "s", "% of the\ntime"], rows, left=[0], caption="Where the time went", notes=notes)]


def _cut(full: FullDataset) -> str:
    if full["truncated"] is None:
        return unknown("a tokenizer written in Python does not tell")
    return f"{full['truncated']:,} ({100 * full['truncated'] / full['samples']:.2f} %)"


def _subsets(full: FullDataset) -> list[Block]:
    subsets = full.get("samples_of") or []
    if not subsets:
        return []
    rows = [
        [f"{subset['samples']:,}", *(f"{subset[key]:.4f}" for key in ("accuracy", "f1_macro", "f1_weighted"))]
        for subset in subsets
    ]
    return [Table(["first samples", "accuracy", "F1 macro", "F1 weighted"], rows)]


def cost(data: ReportData) -> list[Block]:
    """Return hours and cost of a million samples and of the dataset; nothing without a price."""
    price = data.config.pod.price_per_hour
    if price is None:
        return []
    ways: list[tuple[str, Callable[[int], str]]] = []
    if data.chosen:
        rate = data.chosen["throughput_samples_per_sec_mean"]
        how = f"batch size {data.chosen['batch_size']}, unsorted texts"
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


def of_pass(full: FullDataset, rows: int, price: float | None) -> str:
    """Return the hours of so many rows on the machines of this pass, and their cost at this price of one per hour."""
    scale = rows / full["samples"]
    seconds, machines_s = full["inference_time_s"], full["machine_time_s"]
    hours = _hours(scale * seconds)
    if price is None:
        return hours
    if machines_s is None:
        return f"{hours}, cost {unknown(full['machine_time_reason'])}"
    several = f" for {_hours(scale * machines_s)} of all machines" if machines_s > SEVERAL * seconds else ""
    return f"{hours}, cost {_money(scale * machines_s, price)}{several}"


def _hours(seconds: float) -> str:
    if seconds < SECONDS_PER_HOUR:
        return f"{number(seconds)} s" if seconds < 60 else f"{number(seconds / 60)} minutes"
    return f"{number(seconds / SECONDS_PER_HOUR)} hours"


def _money(seconds: float, price: float) -> str:
    cost = seconds / SECONDS_PER_HOUR * price
    return f"{cost:,.2f}" if cost >= 1 else number(cost)
