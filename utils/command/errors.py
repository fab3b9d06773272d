"""The errors a person can cause or cure, each with the exit code it ends a program with.

PipelineError              1  a step failed
├── InputError             2  bad configuration, usage or input data
└── EnvironmentLacksError  3  a driver, disk space or the network is missing
    └── GpuLostError       3  this process can no longer use the GPU
"""

import importlib.metadata

from boundby.cli import IS_INSTALLED

# Package -> the extra of the wheel that brings it; the option of setup_environment.sh has the same name.
EXTRAS = {
    "accelerate": "training", "lightning": "training", "tensorboard": "training",
    "ray": "ray", "streamlit": "monitor", "altair": "monitor",
    **dict.fromkeys(("nncf", "onnx", "onnxruntime", "onnxscript", "openvino"), "engines"),
}  # fmt: skip
# Clients of services, and what has to fit the torch and the GPU that are there: none of them is pinned by us.
INSTALLED_BY = {
    "mlflow": "pip install mlflow",
    "wandb": "pip install wandb",
    "torchao": "pip install torchao",
    "flash-attn": "pip install flash-attn --no-build-isolation",
    "flash-attn-3": "it is built from the folder hopper of github.com/Dao-AILab/flash-attention",
    "flash-attn-4": "pip install --pre flash-attn-4",
}


class PipelineError(Exception):
    """A failure whose message says what, where, the value and the way out; no traceback is needed."""

    exit_code = 1


class InputError(PipelineError):
    """The configuration, the command line or the data is at fault."""

    exit_code = 2


class EnvironmentLacksError(PipelineError):
    """The machine lacks something: a driver, disk space, the network."""

    exit_code = 3


def require_installed(distribution: str) -> None:
    """Raise EnvironmentLacksError, with what installs it, where this package is not installed."""
    try:
        importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        raise lacking(distribution) from None


class GpuLostError(EnvironmentLacksError):
    """This process can no longer use the GPU, and has to end without asking it for anything."""


def lacking(*packages: str) -> EnvironmentLacksError:
    """Return the error that names packages which are not installed, with the line that installs them."""
    if packages[0] in INSTALLED_BY:
        return EnvironmentLacksError(f"{packages[0]}: not installed; {INSTALLED_BY[packages[0]]}")
    extra = EXTRAS.get(packages[0])
    option = f" --{extra}" if extra else ""
    line = f"pip install 'boundby[{extra or 'transformers'}]'" if IS_INSTALLED else f"bash setup_environment.sh{option}"
    return EnvironmentLacksError(f"{' and '.join(packages)}: not installed; {line}")
