"""What to know first: whether this can be taken at face value, the figures, the subject, and what is doubtful."""

from utils.document import FullDataset
from utils.render.blocks import Admonition, Block, BulletList, CodeBlock, DefinitionList, Heading, Paragraph
from utils.render.formatting import clean, listed, number, quantity, spread, unknown
from utils.report import advice, verdict
from utils.report.sources import Missing, ReportData

DONE = {True: "met", False: "missed", None: "unknown"}
METHOD = (
    "real texts in the order of arrival; the first (cold) call is kept apart, then warm-up until the times "
    "settle; every batch size is visited in several rounds of shuffled order. Latency is one call, waited for; "
    "throughput is calls queued one after another (the same on a CPU). Intervals are 95 %, over rounds."
)
LONGEST_DOUBT = 400


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
            (data.task.SCORE, _score(data)),
            ("Whole dataset", _speed(data)),
            ("Targets", _targets(data)),
        ]
    )


def _warnings(data: ReportData) -> list[Block]:
    warnings: list[Block] = []
    if data.document["synthetic"]:
        text = (
            "the texts and the model were made on this machine (quickstart). The figures show that the pipeline works "
            "and how fast this machine runs a small model; they say nothing about a real task."
        )
        warnings.append(Admonition([Paragraph(text, strong="SYNTHETIC DATA:")]))
    if not data.document["complete"]:
        text = "step 02 has not finished; this is what it had measured by then. To go on where it stopped:"
        resume = CodeBlock(data.command.run("--from", "2", "--resume"))
        warnings.append(Admonition([Paragraph(text, strong="INCOMPLETE:"), resume]))
    return warnings


def _optimal(data: ReportData) -> str:
    row = data.chosen
    if row is None:
        return unknown(data.choice["reason"])
    rate, latency = row["throughput_samples_per_sec_mean"], row["latency_per_sample_ms_mean"]
    half_width = row["throughput_half_width_pct"]
    shown = f" +- {spread(half_width)} %" if half_width is not None else ""
    return f"{row['batch_size']} in {row['dtype']}: {number(rate)} samples/s{shown}, {number(latency)} ms per sample"


def _score(data: ReportData) -> str:
    full = data.full
    if full is None:
        return unknown(data.document["full_dataset_reason"])
    return data.task.headline(full)


def _speed(data: ReportData) -> str:
    full = data.full
    if full is None:
        return unknown(data.document["full_dataset_reason"])
    return f"{number(full['inference_time_s'])} s, {number(full['throughput_samples_per_sec'])} samples/s"


def _targets(data: ReportData) -> str:
    words = [DONE[target["met"]] for target in data.targets]
    return listed([f"{words.count(word)} {word}" for word in dict.fromkeys(words)]) or "none are set"


def subject(data: ReportData) -> list[Block]:
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
        facts += [f"compute capability {clean(device.get('capability'))}", f"CUDA {clean(device.get('cuda'))}"]
        driver = f"driver {clean(machine.hardware['driver'])}" if machine and machine.hardware.get("driver") else ""
        pairs.append(("GPU", ", ".join(filter(None, [*facts, driver]))))
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


def doubtful(data: ReportData) -> list[Block]:
    """Return every doubt once, with the batch sizes it is about."""
    texts = [clean(doubt, LONGEST_DOUBT) for doubt in doubts(data)]
    return [Heading("Doubts"), BulletList(texts) if texts else Paragraph("No doubt was raised.")]


def doubts(data: ReportData) -> list[str]:
    """Return the doubts about data, batch sizes, trace and settings."""
    return [*data.document["doubts"], *_settings(data), *_agreement(data), *_rows(data), *_full(data), *_trace(data)]


def _settings(data: ReportData) -> list[str]:
    asked, measured = data.config.model.name, data.document["model"].get("name")
    if measured in (None, asked):
        return []
    return [
        f"this report was made with settings for model {asked!r}, but the results are of {measured!r}; targets, price "
        "and commands are those of the settings, so give step 04 the --config and overrides of the measurement"
    ]


def _agreement(data: ReportData) -> list[str]:
    agreement = data.document["agreement"]
    if not agreement or agreement["share"] == 1:
        return []
    share, rows = agreement["share"], agreement["rows"]
    return [f"batched and one-by-one predictions differ in {100 * (1 - share):.1f} % of {rows} texts"]


def _rows(data: ReportData) -> list[str]:
    about: dict[tuple[str, str], list[int]] = {}
    for row in data.rows:
        for doubt in row["doubts"]:
            about.setdefault((row["dtype"], doubt), []).append(row["batch_size"])
    return [f"batch size {listed(sizes)} ({dtype}): {doubt}" for (dtype, doubt), sizes in about.items()]


def _full(data: ReportData) -> list[str]:
    full = data.full or {}
    texts = []
    if full.get("truncated"):
        share = 100 * full["truncated"] / full["samples"]
        texts.append(f"{full['truncated']:,} texts ({share:.2f} %) were cut to {data.document['max_length']} tokens")
    if full.get("out_of_memory"):
        texts.append(
            f"memory ran out {full['out_of_memory']:,} times over the whole dataset; the batches were repeated"
        )
    return texts


def _trace(data: ReportData) -> list[str]:
    remarks = [f"trace: {remark.what}: {remark.reason}" for remark in data.manifest.downgrades]
    return remarks + [f"trace: torch warns: {text}" for text in data.manifest.warnings]
