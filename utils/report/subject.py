"""What was measured on what, and how."""

from collections.abc import Mapping
from typing import Any

from utils.render.blocks import Block, DefinitionList, Heading, Paragraph
from utils.render.formatting import clean, number, quantity, unknown
from utils.report.sources import Missing, ReportData

METHOD = (
    "real texts in the order of arrival; the first (cold) call is kept apart, then warm-up until the times "
    "settle; every batch size is visited in several rounds of shuffled order. Latency is one call, waited for; "
    "throughput is calls queued one after another (the same on a CPU). Intervals are 95 %, over rounds."
)


def section(data: ReportData) -> list[Block]:
    """Return model, dataset, machine, software and method."""
    pairs = [*_model(data), *_dataset(data), *_machine(data), ("Software", _software(data))]
    return [Heading("What was measured on what"), DefinitionList(pairs), Paragraph(METHOD, strong="Method:")]


def _model(data: ReportData) -> list[tuple[str, str]]:
    model = data.document["model"]
    if not model:
        return [("Model", unknown("it was not loaded yet"))]
    origin = {"hub": "Hugging Face Hub", "folder": "local folder", "quickstart": "made on this machine"}
    revision = f", revision {clean(model['revision'])}" if model.get("revision") else ""
    total, trainable = model.get("parameters_total"), model.get("parameters_trainable")
    return [
        ("Model", f"{clean(model.get('name'))} ({origin.get(model.get('origin'), 'unknown origin')}{revision})"),
        ("Type", clean(model.get("type"))),
        ("Labels", _count(model.get("num_labels"))),
        ("Parameters", f"{_count(total)} ({_count(trainable)} trainable)"),
        ("Size", f"{quantity(model.get('size_mb'), 'MB')} in {clean(model.get('dtype'))}"),
        ("Load time", quantity(model.get("load_time_s"), "s")),
        ("Measured in", ", ".join(data.dtypes) or unknown("no batch size was measured yet")),
    ]


def _dataset(data: ReportData) -> list[tuple[str, str]]:
    dataset = data.document["dataset"]
    source = dataset.get("source") or {}
    details = [f"{key} {clean(source[key])}" for key in ("config_name", "split", "revision") if source.get(key)]
    facts = [clean(source.get("name") or "unknown"), *details, f"{_count(dataset.get('rows'))} rows"]
    return [
        ("Dataset", ", ".join(facts)),
        ("Longest text", f"{data.document['max_length']:,} tokens, longer ones are cut; {_truncated(data.full)}"),
    ]


def _truncated(full: Mapping[str, Any] | None) -> str:
    if full is None:
        return "how many: " + unknown("the whole dataset was not evaluated")
    if full["truncated"] is None:
        return "how many: " + unknown("a tokenizer written in Python does not tell")
    return f"{full['truncated']:,} of {full['samples']:,} were"


def _machine(data: ReportData) -> list[tuple[str, str]]:
    device, machine = data.document["device"], data.machine
    pairs = []
    if data.is_on_gpu:
        facts = [clean(device.get("name")), f"{number(device.get('memory_bytes', 0) / 1e9)} GB"]
        facts += [f"compute capability {clean(device.get('capability'))}", f"CUDA {clean(device.get('cuda'))}"]
        driver = f"driver {clean(machine.hardware['driver'])}" if machine and machine.hardware.get("driver") else ""
        pairs.append(("GPU", ", ".join(filter(None, [*facts, driver]))))
    if isinstance(machine, Missing):
        return [*pairs, ("CPU", unknown(machine.reason))]
    found = machine.hardware
    quota = f", quota of {found['cpu_quota_cores']:g} cores" if found.get("cpu_quota_cores") else ""
    threads = f", {device['threads']} torch threads" if device.get("threads") else ""
    cores = f"{found['usable_cores']} of {found['logical_cores']} cores usable{quota}{threads}"
    return [
        *pairs,
        ("CPU", f"{clean(found['cpu'])}, {cores}"),
        ("Memory", f"{number(found['memory_bytes'] / 1e9)} GB"),
    ]


def _software(data: ReportData) -> str:
    if isinstance(data.machine, Missing):
        return unknown(data.machine.reason)
    versions = data.machine.versions
    if not versions:
        return unknown(None)
    return ", ".join(f"{clean(name)} {clean(version or 'not installed')}" for name, version in versions.items())


def _count(value: int | None) -> str:
    return unknown("the metrics file does not say") if value is None else f"{value:,}"
