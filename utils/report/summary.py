"""What to know first: the card, whether this can be taken at face value, the subject, and what is doubtful."""

from boundby.bound import card as cards
from boundby.formatting import clean, number, quantity, unknown
from utils.evaluation import FullDataset
from utils.render import Admonition, Block, Card, CodeBlock, DefinitionList, Paragraph
from utils.report import card
from utils.report.figures import Content, Folded
from utils.report.sources import Missing, ReportData

METHOD = (
    "Real texts in the order of arrival. The first (cold) call is kept apart; then the model is warmed up until its "
    "times settle. Every batch size is visited in several rounds of shuffled order. A latency is that of one call, "
    "waited for; throughput is that of calls queued one after another (the same on a CPU). Intervals are 95 %."
)


def title(data: ReportData) -> str:
    """Return which model ran on which machine."""
    cpu = data.machine.hardware.get("cpu") if data.machine else None
    device = data.document["device"].get("name") or cpu or "an unknown machine"
    return f"{clean(data.document['model'].get('name') or 'unknown model')} on {clean(device)}"


def detail(data: ReportData) -> str:
    """Return when it was measured and by what."""
    written = data.document["written"].replace("T", " ").replace("+00:00", " UTC")
    return f"measured {clean(written)} by boundby {clean(data.document['boundby_version'])}"


def opening(data: ReportData) -> list[Block]:
    """Return the card, and warnings about the run as a whole."""
    facts = card.facts(data)
    entries = [(entry.label, entry.texts, entry.command) for entry in cards.entries(facts)]
    return [Card(cards.title(facts), entries, cards.lines(facts)), *_warnings(data)]


def _warnings(data: ReportData) -> list[Block]:
    warnings: list[Block] = []
    if data.document["synthetic"]:
        text = (
            "texts and model were made on this machine. The figures say how fast it runs a small model, and nothing "
            "about a real task."
        )
        warnings.append(Admonition([Paragraph(text, strong="SYNTHETIC DATA:")]))
    if not data.document["complete"]:
        text = "step 02 has not finished; this is what it had measured by then. To go on where it stopped:"
        resume = CodeBlock(data.command.run("--from", "2", "--resume"))
        warnings.append(Admonition([Paragraph(text, strong="INCOMPLETE:"), resume]))
    return warnings


def subject(data: ReportData) -> list[Content]:
    """Return, folded, model, dataset, machine, software and method."""
    pairs = [*_model(data), *_dataset(data), *_machine(data), ("Software", _software(data))]
    return [Folded("What was measured on what, and how", [DefinitionList(pairs), Paragraph(METHOD)])]


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
        *(
            [("Dtype", f"{clean(model.get('dtype'))} by model.dtype=auto: {clean(model.get('dtype_reason'), 200)}")]
            if data.is_auto
            else []
        ),
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


def _truncated(full: FullDataset | None) -> str:
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
        if device.get("rocm"):
            facts += [clean(device.get("architecture")), f"ROCm {clean(device['rocm'])}"]
        else:
            facts += [f"compute capability {clean(device.get('capability'))}", f"CUDA {clean(device.get('cuda'))}"]
        driver = f"driver {clean(machine.hardware['driver'])}" if machine and machine.hardware.get("driver") else ""
        uuid = clean(device.get("uuid") or "")
        pairs.append(("GPU", ", ".join(filter(None, [*facts, driver, uuid]))))
        if (visible := device.get("visible_gpus", 1)) > 1:
            pairs.append(("Other GPUs", f"{visible - 1}, left out of the sweep"))
    if isinstance(machine, Missing):
        return [*pairs, ("CPU", unknown(machine.reason))]
    hardware = machine.hardware
    quota = f", quota of {hardware['cpu_quota_cores']:g} cores" if hardware.get("cpu_quota_cores") else ""
    threads = f", {device['threads']} torch threads" if device.get("threads") else ""
    cores = f"{hardware['usable_cores']} of {hardware['logical_cores']} cores usable{quota}{threads}"
    return [
        *pairs,
        ("CPU", f"{clean(hardware['cpu'])}, {cores}"),
        ("Memory", f"{number(hardware['memory_bytes'] / 1e9)} GB"),
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
