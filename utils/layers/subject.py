"""The model to profile: built from a preset, or loaded from a folder or the Hub."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from boundby.device import pick_device
from utils import hub
from utils.errors import EnvironmentLacksError, InputError
from utils.layers import architectures
from utils.layers.settings import Model
from utils.model_source import CODE, FILES, check_code
from utils.models import DTYPES


@dataclass(frozen=True)
class Subject:
    """A model on its device, ready for inference."""

    model: torch.nn.Module
    name: str
    device: torch.device


def prepare(wanted: Model, *, trust_remote_code: bool = False) -> Subject:
    """Return the model that the settings ask for. Raises a PipelineError that names the way out.

    Python code that a folder or a repository brings is run only where it is trusted.
    """
    try:
        device = pick_device(wanted.device)
    except (ValueError, RuntimeError) as error:
        raise EnvironmentLacksError(
            f"model.device: {error}; use model.device=cpu, or a machine with that GPU"
        ) from None
    if wanted.name:
        model, name = _load(wanted.name, wanted.revision, DTYPES[wanted.dtype], trust_remote_code)
    elif wanted.architecture:
        model, name = architectures.build(wanted.architecture).to(DTYPES[wanted.dtype]), wanted.architecture
    else:
        raise InputError("model: give an architecture (a preset) or a name (a folder, or a name on the Hub)")
    return Subject(model.to(device).eval(), name, device)


def _load(name: str, revision: str | None, dtype: torch.dtype, trusted: bool) -> tuple[torch.nn.Module, str]:
    """Return the model with the class that its configuration names, from safetensors alone, and what to call it."""
    import transformers

    folder = Path(name)
    is_folder = folder.is_dir()
    if not is_folder:
        folder = hub.snapshot(hub.Repository("model", name, revision), (*FILES, CODE) if trusted else FILES)
    if not trusted:
        check_code(folder, name, with_tokenizer=False)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    local = {"local_files_only": True, "trust_remote_code": trusted}
    try:
        config = transformers.AutoConfig.from_pretrained(folder, **local)
        model = _kind(config).from_pretrained(folder, dtype=dtype, use_safetensors=True, **local)
    except ImportError as error:
        raise EnvironmentLacksError(f"{name}: the model needs a package: {_first_line(error)}") from error
    except Exception as error:  # any type: loaders of several libraries meet damaged files here
        raise InputError(f"{name}: cannot be loaded as a model: {_first_line(error)}") from error
    if getattr(model.config, "pad_token_id", None) is None:  # decoders that classify refuse batches without one
        model.config.pad_token_id = getattr(model.config, "eos_token_id", None)
    return model, folder.resolve().name if is_folder else name


def _kind(config: Any) -> Any:
    """Return the class that the configuration names, of the model's own code or of transformers, else the base model.

    A class of its own is given by the auto class that finds it: "AutoModelForCausalLM": "modeling.Mine".
    """
    import transformers

    own = {str(place).rpartition(".")[2]: key for key, place in (getattr(config, "auto_map", None) or {}).items()}
    for name in map(str, config.architectures or []):
        kind = getattr(transformers, own.get(name, name), None)
        if name in own or (isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)):
            return kind
    return transformers.AutoModel


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n")[0] or type(error).__name__
