"""The settings of `profile_layers.py`: the schema of configs/layers.yaml."""

from pydantic import NonNegativeInt, PositiveInt

from utils.settings import Device, Dtype, FileName, LocalOrHub, Name, Section


class Model(Section):
    """Which model: a preset with random weights, or weights from a folder or the Hub."""

    architecture: Name | None = "gpt2"  # a preset; ignored where `name` is given
    name: LocalOrHub | None = None  # a folder, or a name on the Hub
    revision: Name | None = None
    device: Device = "auto"
    dtype: Dtype = "float32"


class Measurement(Section):
    """How much is run on which input."""

    num_samples: PositiveInt = 50  # runs with probes, and as many without
    warmup_runs: NonNegativeInt = 10
    batch_size: PositiveInt = 1
    sequence_length: PositiveInt = 128
    new_tokens: NonNegativeInt = 0  # to generate after these; 0 is one forward


class Output(Section):
    """Where the files go."""

    dir: Name = "./results/profiles"  # and not results/layers, which step 03 owns and moves aside
    profile_name: FileName | None = None  # of the files; made of the model's name where it is null


class LayerSettings(Section):
    """Everything that configs/layers.yaml may hold."""

    model: Model = Model()
    measurement: Measurement = Measurement()
    output: Output = Output()
