"""The first lines: whether this can be taken at face value, what the model is bound by, why, and what to do next."""

from utils.render.blocks import Admonition, Block, CodeBlock, DefinitionList, Paragraph
from utils.render.formatting import clean, listed, number, spread, unknown
from utils.report import advice, verdict
from utils.report.sources import ReportData

DONE = {True: "met", False: "missed", None: "unknown"}


def title(data: ReportData) -> str:
    """Return which model ran on which machine."""
    cpu = data.machine.hardware.get("cpu") if data.machine else None
    device = data.document["device"].get("name") or cpu or "an unknown machine"
    return f"{clean(data.document['model'].get('name') or 'unknown model')} on {clean(device)}"


def detail(data: ReportData) -> str:
    """Return when it was measured and by what."""
    written = data.document["written"].replace("T", " ").replace("+00:00", " UTC")
    return f"measured {clean(written)} by boundby {clean(data.document['boundby_version'])}"


def section(data: ReportData) -> list[Block]:
    """Return warnings about the run as a whole, and a summary."""
    return [*_warnings(data), summary(data)]


def summary(data: ReportData) -> DefinitionList:
    """Return the verdict in three lines, and the figures to know."""
    steps = advice.advice(data)
    return DefinitionList(
        [
            ("What", verdict.what(data)),
            ("Why", verdict.why(data)),
            ("Next", f"{steps[0].title} ({steps[0].effect})" if steps else "nothing stands out"),
            ("Optimal batch size", _optimal(data)),
            ("Accuracy", _accuracy(data)),
            ("Whole dataset", _speed(data)),
            ("Targets", _targets(data)),
        ]
    )


def _warnings(data: ReportData) -> list[Block]:
    found: list[Block] = []
    if data.document["synthetic"]:
        text = (
            "the texts and the model were made on this machine (quickstart). The figures show that the pipeline works "
            "and how fast this machine runs a small model; they say nothing about a real task."
        )
        found.append(Admonition([Paragraph(text, strong="SYNTHETIC DATA:")]))
    if not data.document["complete"]:
        text = "step 02 has not finished; this is what it had measured by then. To go on where it stopped:"
        resume = CodeBlock(data.command.run("--from", "2", "--resume"))
        found.append(Admonition([Paragraph(text, strong="INCOMPLETE:"), resume]))
    return found


def _optimal(data: ReportData) -> str:
    row = data.chosen
    if row is None:
        return unknown(data.choice["reason"])
    rate, latency = row["throughput_samples_per_sec_mean"], row["latency_per_sample_ms_mean"]
    half_width = row["throughput_half_width_pct"]
    shown = f" +- {spread(half_width)} %" if half_width is not None else ""
    return f"{row['batch_size']} in {row['dtype']}: {number(rate)} samples/s{shown}, {number(latency)} ms per sample"


def _accuracy(data: ReportData) -> str:
    full = data.full
    if full is None:
        return unknown(data.document["full_dataset_reason"])
    ends = f"[{full['accuracy_ci_low']:.4f}, {full['accuracy_ci_high']:.4f}]"
    return f"{full['accuracy']:.4f} {ends}, F1 macro {full['f1_macro']:.4f}, on {full['samples']:,} texts"


def _speed(data: ReportData) -> str:
    full = data.full
    if full is None:
        return unknown(data.document["full_dataset_reason"])
    return f"{number(full['inference_time_s'])} s, {number(full['throughput_samples_per_sec'])} samples/s"


def _targets(data: ReportData) -> str:
    words = [DONE[target["met"]] for target in data.targets]
    return listed([f"{words.count(word)} {word}" for word in dict.fromkeys(words)]) or "none are set"
