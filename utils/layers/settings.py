"""The settings of `profile_layers.py`: the schema of configs/layers.yaml."""

from typing import Literal

from pydantic import NonNegativeInt, PositiveInt

from utils.config import Section


class Model(Section):
    """Which model: a preset with random weights, or weights from a folder or the Hub."""

    architecture: str | None = "gpt2"  # a preset; ignored where `name` is given
    name: str | None = None  # a folder, or a name on the Hub
    revision: str | None = None
    device: str = "auto"
    dtype: Literal["float32", "float16", "bfloat16"] = "float32"


class Measurement(Section):
    """How much is run on which input."""

    num_samples: PositiveInt = 50  # runs with probes, and as many without
    warmup_runs: NonNegativeInt = 10
    batch_size: PositiveInt = 1
    sequence_length: PositiveInt = 128


class Output(Section):
    """Where the files go."""

    dir: str = "./results/layers"
    profile_name: str | None = None  # of the files; made of the model's name where it is null


class LayerSettings(Section):
    """Everything that configs/layers.yaml may hold."""

    model: Model = Model()
    measurement: Measurement = Measurement()
    output: Output = Output()
