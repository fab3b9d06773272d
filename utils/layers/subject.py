"""The model to profile: built from a preset, or loaded from a folder or the Hub."""

from dataclasses import dataclass
from pathlib import Path

import torch

from boundby.device import pick_device
from utils import hub
from utils.errors import InputError
from utils.layers import architectures
from utils.layers.settings import Model
from utils.model_source import FILES
from utils.models.loading import DTYPES


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
        raise InputError(f"model.device: {error}") from None
    dtype = DTYPES[wanted.dtype]
    if wanted.name:
        model, name = _load(wanted.name, wanted.revision, dtype), wanted.name
    elif wanted.architecture:
        model, name = architectures.build(wanted.architecture).to(dtype), wanted.architecture
    else:
        raise InputError("model: give an architecture (a preset) or a name (a folder, or a name on the Hub)")
    return Subject(model.to(device).eval(), name, device)


def _load(name: str, revision: str | None, dtype: torch.dtype) -> torch.nn.Module:
    """Return the model with the class that its configuration names, from safetensors alone and without code of its own."""
    import transformers

    folder = Path(name) if Path(name).is_dir() else hub.snapshot(hub.Repository("model", name, revision), FILES)
    try:
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
        found = [getattr(transformers, each, None) for each in config.architectures or []]
        kind = next((each for each in found if each is not None), transformers.AutoModel)
        return kind.from_pretrained(folder, dtype=dtype, use_safetensors=True, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise InputError(f"{name}: cannot be loaded as a model: {str(error).splitlines()[0]}") from None
