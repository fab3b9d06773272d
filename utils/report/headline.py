"""The first lines: what this is, whether it can be taken at face value, and the five things to know."""

from utils.report import advice
from utils.report.sources import ReportData
from utils.report.typesetting import WIDTH, clean, command_lines, labelled, listed, number, paragraph, spread, unknown

DONE = {True: "met", False: "missed", None: "unknown"}


def section(data: ReportData) -> list[str]:
    """Return the title, warnings about the run as a whole, and a summary."""
    document = data.document
    device = document["device"].get("name") or (data.machine or {}).get("cpu") or "an unknown machine"
    written = document["written"].replace("T", " ").replace("+00:00", " UTC")
    rule = "=" * WIDTH
    return [
        rule,
        *paragraph(f"BASELINE REPORT: {clean(document['model'].get('name') or 'unknown model')} on {clean(device)}"),
        f"measured {clean(written)} by boundby {clean(document['boundby_version'])}",
        rule,
        *_warnings(data),
        *summary(data),
    ]


def summary(data: ReportData) -> list[str]:
    """Return the five things to know as labelled lines."""
    steps = advice.advice(data)
    return labelled(
        [
            ("Optimal batch size", _optimal(data)),
            ("Accuracy", _accuracy(data)),
            ("Whole dataset", _speed(data)),
            ("Targets", _targets(data)),
            ("First thing to do", f"{steps[0].title} ({steps[0].effect})" if steps else "nothing stands out"),
        ]
    )


def _warnings(data: ReportData) -> list[str]:
    lines = []
    if data.document["synthetic"]:
        lines += paragraph(
            "SYNTHETIC DATA: the texts and the model were made on this machine (quickstart). The figures show that the "
            "pipeline works and how fast this machine runs a small model; they say nothing about a real task."
        )
        lines.append("")
    if not data.document["complete"]:
        lines += paragraph(
            "INCOMPLETE: step 02 has not finished; this is what it had measured by then. To go on where it stopped:"
        )
        lines += [*command_lines(data.command.run("--from", "2", "--resume"), "    "), ""]
    return lines


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
