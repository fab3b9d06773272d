"""The model to profile and inputs for it: built from a preset, or loaded from a folder or the Hub.

Presets have random weights: what a layer costs does not depend on what it has learnt. Every size is written out: the
defaults of a library change, and some of them are those of another variant.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from boundby.layers import Generation
from boundby.machine import pick_device
from boundby.timing import Shape
from utils.command import EnvironmentLacksError, InputError
from utils.models import (
    CODE,
    DTYPES,
    FILES,
    check_code,
    check_weights,
    hashed_alone,
    hub,
    most_positions,
    require_all_used,
)
from utils.tracing.layers import Model

IMAGE_SIZE, COLOURS = 224, 3
GPT2 = {"vocab_size": 50_257, "n_positions": 1024, "n_embd": 768, "n_layer": 12, "n_head": 12}
ENCODER = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072}
BERT = {"vocab_size": 30_522, "max_position_embeddings": 512, **ENCODER}
RESNET = {"embedding_size": 64, "num_labels": 1000}

# name: configuration class, model class, sizes; both classes are those of transformers
PRESETS: dict[str, tuple[str, str, Mapping[str, int | str | list[int]]]] = {
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", GPT2),
    "gpt2-medium": ("GPT2Config", "GPT2LMHeadModel", {**GPT2, "n_embd": 1024, "n_layer": 24, "n_head": 16}),
    "gpt2-large": ("GPT2Config", "GPT2LMHeadModel", {**GPT2, "n_embd": 1280, "n_layer": 36, "n_head": 20}),
    "gpt2-xl": ("GPT2Config", "GPT2LMHeadModel", {**GPT2, "n_embd": 1600, "n_layer": 48, "n_head": 25}),
    "distilgpt2": ("GPT2Config", "GPT2LMHeadModel", {**GPT2, "n_layer": 6}),
    "bert-base": ("BertConfig", "BertForSequenceClassification", BERT),
    "bert-large": (
        "BertConfig",
        "BertForSequenceClassification",
        {**BERT, "hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096},
    ),
    "minilm-l6": (
        "BertConfig",
        "BertForSequenceClassification",
        {**BERT, "hidden_size": 384, "num_hidden_layers": 6, "intermediate_size": 1536},
    ),
    "distilbert-base": (
        "DistilBertConfig",
        "DistilBertForSequenceClassification",
        {"vocab_size": 30_522, "dim": 768, "n_layers": 6, "n_heads": 12, "hidden_dim": 3072},
    ),
    "qwen2-0.5b": (
        "Qwen2Config",
        "Qwen2ForCausalLM",
        {
            "vocab_size": 151_936,
            "hidden_size": 896,
            "intermediate_size": 4864,
            "num_hidden_layers": 24,
            "num_attention_heads": 14,
            "num_key_value_heads": 2,
            "max_position_embeddings": 32_768,
            "tie_word_embeddings": True,
        },
    ),
    "t5-small": (
        "T5Config",
        "T5ForConditionalGeneration",
        {"vocab_size": 32_128, "d_model": 512, "d_kv": 64, "d_ff": 2048, "num_layers": 6, "num_heads": 8},
    ),
    "resnet-18": (
        "ResNetConfig",
        "ResNetForImageClassification",
        {**RESNET, "depths": [2, 2, 2, 2], "hidden_sizes": [64, 128, 256, 512], "layer_type": "basic"},
    ),
    "resnet-50": (
        "ResNetConfig",
        "ResNetForImageClassification",
        {**RESNET, "depths": [3, 4, 6, 3], "hidden_sizes": [256, 512, 1024, 2048], "layer_type": "bottleneck"},
    ),
    "vit-base": (
        "ViTConfig",
        "ViTForImageClassification",
        {**ENCODER, "image_size": IMAGE_SIZE, "patch_size": 16, "num_labels": 1000},
    ),
}


@dataclass(frozen=True)
class PreparedModel:
    """A model on its device, ready for inference."""

    model: torch.nn.Module
    name: str
    device: torch.device


def prepare(wanted: Model, *, trust_remote_code: bool = False) -> PreparedModel:
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
        model, name = build(wanted.architecture).to(DTYPES[wanted.dtype]), wanted.architecture
    else:
        raise InputError("model: give an architecture (a preset) or a name (a folder, or a name on the Hub)")
    return PreparedModel(model.to(device).eval(), name, device)


def _load(name: str, revision: str | None, dtype: torch.dtype, trusted: bool) -> tuple[torch.nn.Module, str]:
    """Return the model with the class that its configuration names, from safetensors alone, and what to call it."""
    import transformers

    folder = Path(name)
    is_folder = folder.is_dir()
    if not is_folder:
        folder = hub.snapshot(hub.Repository("model", name, revision), (*FILES, CODE) if trusted else FILES)
    if not trusted:
        check_code(folder, name, with_tokenizer=False)
    check_weights(folder, name)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    local = {"local_files_only": True, "trust_remote_code": trusted}
    with hashed_alone(folder) as shown:
        try:
            config = transformers.AutoConfig.from_pretrained(shown, **local)
            model, loading = _kind(config).from_pretrained(
                shown, dtype=dtype, use_safetensors=True, output_loading_info=True, **local
            )
        except ImportError as error:
            raise EnvironmentLacksError(f"{name}: the model needs a package: {_first_line(error)}") from error
        except Exception as error:  # any type: loaders of several libraries meet damaged files here
            fault = _first_line(error).replace(str(shown), str(folder))
            raise InputError(f"{name}: cannot be loaded as a model: {fault}") from error
        require_all_used(model, loading["unexpected_keys"], shown, name)
    if getattr(model.config, "pad_token_id", None) is None:  # decoders that classify refuse batches without one
        model.config.pad_token_id = getattr(model.config, "eos_token_id", None)
    return model, folder.resolve().name if is_folder else name


def _kind(config: Any) -> Any:
    """Return the class that the configuration names, of the model's own code or of transformers, else the base model.

    A class of its own is given by the auto class that finds it: "AutoModelForCausalLM": "modeling.Mine".
    """
    import transformers

    own = {str(path).rpartition(".")[2]: key for key, path in (getattr(config, "auto_map", None) or {}).items()}
    for name in map(str, config.architectures or []):
        kind = getattr(transformers, own.get(name, name), None)
        if name in own or (isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)):
            return kind
    return transformers.AutoModel


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n")[0] or type(error).__name__


def build(name: str) -> torch.nn.Module:
    """Return the model of a preset with random weights, ready for inference. Raises InputError for an unknown name."""
    import transformers

    if name not in PRESETS:
        raise InputError(f"--architecture {name}: no such preset; there are {', '.join(PRESETS)}")
    configuration, model, sizes = PRESETS[name]
    return getattr(transformers, model)(getattr(transformers, configuration)(**sizes)).eval()


def inputs_for(model: torch.nn.Module, batch_size: int, sequence_length: int) -> Mapping[str, torch.Tensor]:
    """Return keyword arguments of random tokens or pixels that the model accepts, on its device.

    Raises InputError where it takes neither, or fewer positions than `sequence_length`.
    """
    main = getattr(model, "main_input_name", None)
    make = MAKERS.get(main)
    if make is None:
        taken = main or "nothing that it names"
        raise InputError(
            f"{type(model).__name__} takes {taken}; inputs are made for tokens (input_ids) and images (pixel_values) "
            "alone: give yours to boundby.layers.engine.ObservabilityEngine in a program of your own"
        )
    return make(model, model.config, batch_size, sequence_length, next(model.parameters()).device)


def generating(
    model: torch.nn.Module, inputs: Mapping[str, torch.Tensor], new_tokens: int
) -> tuple[torch.nn.Module, Mapping[str, torch.Tensor]]:
    """Return a model that generates so many tokens after `inputs`, and its inputs; both as they are for none.

    Raises InputError where it cannot generate, or has fewer positions.
    """
    if not new_tokens:
        return model, inputs
    given = {name: tensor for name, tensor in inputs.items() if not name.startswith("decoder_")}
    config: Any = model.config
    length = new_tokens + (0 if getattr(config, "is_encoder_decoder", False) else inputs["input_ids"].shape[1])
    positions = most_positions(model)
    if positions and length > positions:
        raise InputError(f"--new-tokens {new_tokens}: {length} tokens in all, and the model has {positions} positions")
    settings = {"max_new_tokens": new_tokens, "min_new_tokens": new_tokens, "do_sample": False, "num_beams": 1}
    settings |= {"use_cache": True, "pad_token_id": getattr(config, "pad_token_id", None) or 0}
    try:
        return Generation(model, **settings), given
    except ValueError as error:
        raise InputError(f"--new-tokens {new_tokens}: {error}") from None


def shape_of(inputs: Mapping[str, torch.Tensor], new_tokens: int = 0) -> str | None:
    """Return what one run takes in words; None where it is no text."""
    after = f" and {new_tokens} new" if new_tokens else ""
    return f"{Shape(*inputs['input_ids'].shape)}{after}" if "input_ids" in inputs else None


def _tokens(
    model: torch.nn.Module, config: Any, batch_size: int, length: int, device: torch.device
) -> dict[str, torch.Tensor]:
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    positions = most_positions(model)
    if positions and length > positions:
        raise InputError(f"--sequence-length {length}: the model has {positions} positions at most")
    random = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, text.vocab_size, (batch_size, length), generator=random)
    is_encoder_decoder = getattr(config, "is_encoder_decoder", False)
    if is_encoder_decoder and text.eos_token_id is not None:  # their classifiers want one end in each text, the last
        tokens[tokens == text.eos_token_id] = (text.eos_token_id + 1) % text.vocab_size
        tokens[:, -1] = text.eos_token_id
    tokens = tokens.to(device)
    inputs = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    return {**inputs, "decoder_input_ids": tokens} if is_encoder_decoder else inputs


def _pixels(
    model: torch.nn.Module, config: Any, batch_size: int, length: int, device: torch.device
) -> dict[str, torch.Tensor]:
    size = getattr(config, "image_size", IMAGE_SIZE)
    height, width = (size, size) if isinstance(size, int) else tuple(size)
    colours = getattr(config, "num_channels", COLOURS)
    random = torch.Generator().manual_seed(0)
    pixels = torch.randn((batch_size, colours, height, width), generator=random)
    return {"pixel_values": pixels.to(device, next(model.parameters()).dtype)}


MAKERS: dict[str | None, Callable[..., dict[str, torch.Tensor]]] = {"input_ids": _tokens, "pixel_values": _pixels}
