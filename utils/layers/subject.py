"""The model to profile: built from a preset, or loaded from a folder or the Hub."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from boundby.device import pick_device
from utils import hub
from utils.errors import EnvironmentLacksError, InputError
from utils.layers import architectures
from utils.layers.settings import Model
from utils.model_source import CONFIG, FILES
from utils.models.loading import DTYPES

OWN_CODE = (
    "brings Python code of its own ({key}), which is not run here; read it, load the model in a program of yours, and "
    "give it to boundby.layers.engine.ObservabilityEngine"
)


@dataclass(frozen=True)
class Subject:
    """A model on its device, ready for inference."""

    model: torch.nn.Module
    name: str
    device: torch.device


def prepare(wanted: Model) -> Subject:
    """Return the model that the settings ask for. Raises a PipelineError that names the way out."""
    try:
        device = pick_device(wanted.device)
    except (ValueError, RuntimeError) as error:
        raise EnvironmentLacksError(
            f"model.device: {error}; use model.device=cpu, or a machine with that GPU"
        ) from None
    if wanted.name:
        model, name = _load(wanted.name, wanted.revision, DTYPES[wanted.dtype])
    elif wanted.architecture:
        model, name = architectures.build(wanted.architecture).to(DTYPES[wanted.dtype]), wanted.architecture
    else:
        raise InputError("model: give an architecture (a preset) or a name (a folder, or a name on the Hub)")
    return Subject(model.to(device).eval(), name, device)


def _load(name: str, revision: str | None, dtype: torch.dtype) -> tuple[torch.nn.Module, str]:
    """Return the model with the class that its configuration names, from safetensors alone, and what to call it."""
    import transformers

    folder = Path(name)
    is_folder = folder.is_dir()
    if not is_folder:
        folder = hub.snapshot(hub.Repository("model", name, revision), FILES)
    _refuse_code(folder, name)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
        model = _kind(config).from_pretrained(folder, dtype=dtype, use_safetensors=True, local_files_only=True)
    except ImportError as error:
        raise EnvironmentLacksError(f"{name}: the model needs a package: {_first_line(error)}") from error
    except Exception as error:  # any type: loaders of several libraries meet damaged files here
        raise InputError(f"{name}: cannot be loaded as a model: {_first_line(error)}") from error
    return model, folder.resolve().name if is_folder else name


def _kind(config: Any) -> Any:
    """Return the class of transformers that the configuration names; where it has none of that name, the base model."""
    import transformers

    found = [getattr(transformers, str(each), None) for each in config.architectures or []]
    known = (each for each in found if isinstance(each, type) and issubclass(each, transformers.PreTrainedModel))
    return next(known, transformers.AutoModel)


def _refuse_code(folder: Path, name: str) -> None:
    """Raise InputError where the configuration cannot be read, or names code to run: classes, or kernels of the Hub."""
    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{folder / CONFIG}: cannot be read: {error}; is it the folder of a model?") from None
    if not isinstance(config, dict):
        raise InputError(f"{folder / CONFIG}: is not a model's configuration")
    kernels = (key for key, value in config.items() if "attn_implementation" in key and "/" in str(value))
    key = "auto_map" if config.get("auto_map") else next(kernels, None)
    if key:
        raise InputError(f"{name}: {OWN_CODE.format(key=key)}")


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n")[0] or type(error).__name__
