"""What the normalised dataset was made from, and whether that is what the configuration asks for now."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec

from boundby import files
from utils import contents
from utils.artifacts import Layout
from utils.config import Config
from utils.data.statistics import DatasetStatistics
from utils.errors import InputError
from utils.model_source import DOWNLOAD, ModelSource

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class DataReceipt:
    """The record beside the normalised dataset, written last.

    `source` has the fields of a `DataSource`; `model` is which model the labels were matched with, `labels_sha256` a
    hash of its label names in order; `dataset` is path, bytes and SHA-256 of the normalised file.
    """

    schema_version: int
    request: dict[str, Any]
    source: dict[str, Any]
    model: dict[str, Any]
    labels_sha256: str
    dataset: dict[str, Any]
    rows: int
    synthetic: bool
    statistics: DatasetStatistics
    doubts: list[str]

    def lines(self) -> list[str]:
        """Return what was prepared from what, as lines of text."""
        source, model = self.source, self.model
        split = f", split {source['split']}" if source["split"] else ""
        synthetic = ", synthetic" if self.synthetic else ""
        return [
            f"Model: {model['name']} ({model['origin']}{_at(model)})",
            f"Dataset: {source['name']} ({source['kind']}{split}{_at(source)}){synthetic}",
            *self.statistics.lines(),
            f"Written: {self.dataset['path']} ({self.dataset['bytes'] / 1e6:,.1f} MB)",
        ]

    def save(self, path: Path) -> None:
        """Write the receipt as JSON."""
        files.write_json(path, asdict(self))


def request_of(config: Config) -> dict[str, Any]:
    """Return the settings that decide what data and which model step 01 fetches."""
    dataset = config.dataset.model_dump(mode="json", exclude={"sample_sizes"})
    return {
        "model.name": config.model.name,
        "model.revision": config.model.revision,
        **{f"dataset.{key}": value for key, value in dataset.items()},
    }


def identify_model(model: ModelSource) -> dict[str, Any]:
    """Return which model `model` is."""
    return {**asdict(model), "path": str(model.path)}


def identify_file(path: Path) -> dict[str, Any]:
    """Return which bytes the file at `path` holds now."""
    return {"path": str(path), "bytes": path.stat().st_size, "sha256": contents.sha256(path)}


def check_receipt(config: Config, layout: Layout, model: ModelSource | None = None) -> DataReceipt:
    """Return the receipt, once it is certain that the data on disk is what the configuration asks for.

    With `model`, also that the labels were matched with just that model. Raises InputError with the command to run.
    """
    receipt = _read(layout.data_receipt)
    _check_request(receipt, request_of(config), layout.data_receipt)
    _check_dataset(receipt, layout)
    matched = receipt.model.get("fingerprint")
    if model is not None and model.fingerprint != matched:
        raise InputError(
            f"{layout.data_receipt}: the labels were matched with another content of model '{model.name}' "
            f"(fingerprint {str(matched)[:12]}, now {model.fingerprint[:12]}); {DOWNLOAD}"
        )
    if receipt.source.get("kind") == "file":
        _check_source_file(receipt.source, layout)
    return receipt


def _read(path: Path) -> DataReceipt:
    try:
        content = files.read_json(path)
        version = content.get("schema_version") if isinstance(content, dict) else None
        if version != SCHEMA_VERSION:
            raise InputError(f"{path}: is of version {version}, this program reads {SCHEMA_VERSION}; {DOWNLOAD}")
        return msgspec.convert(content, DataReceipt)
    except FileNotFoundError:
        raise InputError(f"{path}: the data has not been fetched; {DOWNLOAD}") from None
    except (OSError, ValueError) as error:  # msgspec's error is a ValueError
        raise InputError(f"{path}: cannot be read ({error}); {DOWNLOAD}") from None


def _check_request(receipt: DataReceipt, wanted: Mapping[str, Any], place: Path) -> None:
    keys = dict.fromkeys([*wanted, *receipt.request])
    differing = [
        f"{key} is {wanted.get(key)!r}, the data was made with {receipt.request.get(key)!r}"
        for key in keys
        if wanted.get(key) != receipt.request.get(key)
    ]
    if differing:
        raise InputError(f"{place}: the configuration asks for other data: {'; '.join(differing)}; {DOWNLOAD}")


def _check_dataset(receipt: DataReceipt, layout: Layout) -> None:
    path = layout.dataset
    if not path.is_file():
        raise InputError(f"{path}: is missing, though its receipt is there; {DOWNLOAD}")
    found = identify_file(path)
    stated = receipt.dataset
    if (found["bytes"], found["sha256"]) != (stated.get("bytes"), stated.get("sha256")):
        raise InputError(
            f"{path}: holds data that the receipt does not match ({found['bytes']} bytes, sha256 "
            f"{found['sha256'][:12]}; the receipt says {stated.get('bytes')} bytes, "
            f"{str(stated.get('sha256'))[:12]}); {DOWNLOAD}"
        )


def _check_source_file(source: Mapping[str, Any], layout: Layout) -> None:
    """Refuse a local source that was edited since; one that is gone is no fault, its copy is here."""
    path = Path(source["name"])
    try:
        found = contents.sha256(path)
    except OSError:
        return
    if found != source["sha256"]:
        raise InputError(f"{path}: has changed since {layout.dataset} was made from it; {DOWNLOAD}")


def _at(origin: Mapping[str, Any]) -> str:
    return f", commit {origin['revision']}" if origin["revision"] else ""
