"""Take a run to where people keep results: rows, card and pictures to MLflow, Weights & Biases or TensorBoard."""

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from utils.baseline import MEASURED
from utils.command import Layout, removed
from utils.report.run_summary import chosen, metrics

PROJECT = "boundby"
NAMES = ("model", "revision", "task", "device", "machine_fingerprint", "work_fingerprint", "boundby_version", "written")


@dataclass(frozen=True)
class Exported:
    """What of a run is taken along: `rows` by dtype and batch size, and of all rows `totals`; figures are numbers."""

    name: str
    settings: Mapping[str, str]
    rows: Mapping[tuple[str, int], Mapping[str, float]]
    totals: Mapping[str, float]
    card: str
    pictures: tuple[Path, ...]
    files: tuple[Path, ...]


def read(layout: Layout) -> Exported:
    """Return what is taken along of the run. Raises InputError where step 02 has left nothing that can be read."""
    document = removed(metrics(layout))
    known = {**document["model"], **document, "model": document["model"].get("name")}
    known["device"] = document["device"].get("name") or document["device"].get("type")
    best = chosen(document)
    settings = {name: str(known[name]) for name in NAMES if known.get(name) is not None}
    if best:
        settings |= {"batch_size": str(best[1]["batch_size"]), "dtype": best[1]["dtype"]}
        settings |= {"bound": str(best[1].get("bound"))}
    return Exported(
        name=layout.results.resolve().name,
        settings=settings,
        rows={
            (row["dtype"], row["batch_size"]): _figures(row)
            for row in document["batch_sizes"]
            if row["status"] in MEASURED
        },
        totals=_figures(document["full_dataset_metrics"] or {}),
        card=layout.card.read_text(encoding="utf-8") if layout.card.is_file() else "",
        pictures=tuple(sorted(layout.plots.glob("*.png"))),
        files=tuple(path for path in (layout.metrics, layout.card, layout.html_report) if path.is_file()),
    )


def to_mlflow(run: Exported, uri: str) -> str:
    """Log it as a run of the experiment `PROJECT` at this URI; a step is a batch size. Return what was made."""
    from mlflow.entities import Metric, Param
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name(PROJECT)
    identifier = experiment.experiment_id if experiment else client.create_experiment(PROJECT)
    made = client.create_run(identifier, run_name=run.name)
    key, now = made.info.run_id, made.info.start_time
    figures = [Metric(name, value, now, step) for name, value, step in _series(run)]
    settings = [Param(name, value) for name, value in run.settings.items()]
    for start in range(0, max(len(figures), 1), 1000):  # as many as one call takes
        client.log_batch(key, figures[start : start + 1000], settings if start == 0 else [])
    for path in run.files:
        client.log_artifact(key, str(path))
    for path in run.pictures:
        client.log_artifact(key, str(path), "plots")
    client.set_terminated(key)
    return f"run {key} of experiment {PROJECT}, at {uri}"


def to_wandb(run: Exported, folder: Path) -> str:
    """Log it offline into the folder; `wandb sync` uploads it. Return what was made."""
    import wandb

    folder.mkdir(parents=True, exist_ok=True)
    settings = wandb.Settings(console="off", silent=True)
    config = dict(run.settings)
    made = wandb.init(
        project=PROJECT,
        name=run.name,
        dir=str(folder),
        mode="offline",
        config=config,
        settings=settings,
        reinit="create_new",
    )
    for (dtype, size), figures in run.rows.items():
        made.log({"batch_size": size, **{f"{dtype}/{name}": value for name, value in figures.items()}})
    made.log({f"pictures/{path.stem}": wandb.Image(str(path)) for path in run.pictures})
    made.summary.update({**{f"whole_set/{name}": value for name, value in run.totals.items()}, "card": run.card})
    folder = Path(made.settings.sync_dir)
    made.finish()
    wandb.teardown()  # it waits for the writer, which has a process of its own
    return f"{folder}; upload it with: wandb sync {folder}"


def to_tensorboard(run: Exported, folder: Path) -> str:
    """Write an event file into the folder; a step is a batch size. Return what was made."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.plugins.text.summary_v2 import text_pb
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    writer = EventFileWriter(str(folder))
    try:
        for name, value, step in _series(run):
            writer.add_event(Event(step=step, summary=Summary(value=[Summary.Value(tag=name, simple_value=value)])))
        for path in run.pictures:
            content = path.read_bytes()
            width, height = struct.unpack(">II", content[16:24])  # of the first chunk of a PNG
            picture = Summary.Image(width=width, height=height, colorspace=4, encoded_image_string=content)
            writer.add_event(Event(summary=Summary(value=[Summary.Value(tag=f"plots/{path.stem}", image=picture)])))
        texts = {"card": "\n".join(f"    {line}" for line in run.card.splitlines()), **run.settings}
        for name, text in texts.items():
            writer.add_event(Event(summary=text_pb(f"boundby/{name}", text)))
    finally:
        writer.close()
    return f"{folder}; look at it with: tensorboard --logdir {folder}"


def _series(run: Exported) -> Iterator[tuple[str, float, int]]:
    """Yield every figure with its name and its step."""
    for (dtype, size), figures in run.rows.items():
        yield from ((f"{dtype}/{name}", value, size) for name, value in figures.items())
    yield from ((f"whole_set/{name}", value, 0) for name, value in run.totals.items())


def _figures(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a row; what is not known is no number."""
    return {
        name: float(value)
        for name, value in row.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and name != "batch_size"
    }
