"""The settings of the pipeline: one frozen record per section of the YAML, unknown keys refused.

Defaults live here and stand in `configs/config.yaml` for the reader, but for its targets; a test holds the two equal.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    StringConstraints,
    field_validator,
    model_validator,
)

from boundby.cli import PIPELINE
from utils.settings.errors import SettingsError
from utils.settings.yaml_file import Values, load

SHIPPED = tuple(PIPELINE / "configs" / name for name in ("config.yaml", "quickstart.yaml"))  # of somebody else
QUICKSTART = "quickstart"
DEFAULT_TASK: Final = "sequence_classification"
SOURCES = ("hf_name", "file", "quickstart")
OF_SOURCE = ("config_name", "split", "revision", "text_column", "label_column")  # they describe one dataset
TEXT_COLUMN, LABEL_COLUMN = "text", "labels"
NO_DISKS = ("/proc", "/sys", "/dev")
RESERVED_NAMES = {
    "run.json", "raw_samples.csv", "variants.json", "variants.csv", "changed_labels.csv", "baseline_summary_report.txt",
    "report.html",
}  # fmt: skip


def _on_a_disk(name: str) -> str:
    path = Path(name).expanduser().absolute()
    if any(path.is_relative_to(folder) for folder in NO_DISKS) and not path.is_relative_to("/dev/shm"):
        raise ValueError(f"{path} is on no disk; name a folder that can be written to")
    return name


Name = Annotated[str, StringConstraints(min_length=1)]
# The shell leaves `~` alone in `model.name=~/x`.
LocalOrHub = Annotated[Name, AfterValidator(lambda name: str(Path(name).expanduser()) if name[0] == "~" else name)]
Task = Literal["sentence_embeddings", "sequence_classification"]  # the packages of utils/models/tasks/
Dtype = Literal["float32", "bfloat16", "float16"]
AUTO = "auto"  # of a dtype: the checkpoint's own, where the device multiplies in it
Device = Annotated[str, StringConstraints(pattern=r"^(auto|cpu|cuda(:\d+)?)$")]
FileName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")]
# YAML reads a bare on or off as a truth value.
Switch = Annotated[
    Literal["auto", "off", "on"],
    BeforeValidator(lambda value: ("off", "on")[value] if isinstance(value, bool) else value),
]
VariantName = Literal[
    "sorted", "float32_prepacked", "half_threads", "float32_fast", "bfloat16", "float16", "int8", "compiled",
    "bfloat16_compiled", "onnxruntime", "onnxruntime_int8", "openvino", "openvino_bfloat16", "openvino_int8",
    "sorted_half", "use_cache_off", "sdpa", "sdpa_math", "sdpa_mem_efficient", "sdpa_cudnn", "sdpa_flash", "eager",
    "sdpa_fa3", "sdpa_fa4", "flash_attention_2", "flash_attention_3", "flash_attention_4", "fp8",
    "compiled_reduce_overhead", "compiled_max_autotune", "cuda_graphs",
]  # fmt: skip
Fraction = Annotated[float, Field(ge=0, le=1)]
Column = PositiveInt | Name  # a number is the place of a column where the file has no header; 1 is the first


class Section(BaseModel):
    """A part of the settings: unknown keys and infinite numbers are refused, and values do not change."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, protected_namespaces=())


class Model(Section):
    """The model: where it comes from, what it is used for and how it is held."""

    name: LocalOrHub
    revision: Name | None = None
    task: Task = DEFAULT_TASK
    device: Device = "auto"
    dtype: Literal["auto", Dtype] = "auto"
    matmul_precision: Literal["highest", "high", "medium"] = "highest"


class Dataset(Section):
    """The texts: exactly one of `hf_name`, `file` and `quickstart`.

    With `label_column` None there are no labels, and accuracy is not measured. A column with the default name is also
    found under the usual other ones.
    """

    hf_name: Name | None = None
    config_name: Name | None = None
    split: Name | None = None
    revision: Name | None = None
    file: LocalOrHub | None = None
    quickstart: bool = False
    local_path: Annotated[Name, AfterValidator(_on_a_disk)] = "./data/val_df.csv"
    text_column: Column = TEXT_COLUMN
    label_column: Column | None = LABEL_COLUMN
    sample_sizes: Annotated[list[PositiveInt], Field(min_length=1)] | None = None

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        sources = {"hf_name": self.hf_name, "file": self.file, "quickstart": self.quickstart or None}
        given = [name for name, value in sources.items() if value is not None]
        if len(given) != 1:
            stated = " and ".join(given) if given else "none"
            raise ValueError(
                f"exactly one of hf_name, file and quickstart names the data, here {stated}; "
                "set the others to null (quickstart to false)"
            )
        if not self.local_path.endswith(".csv"):
            raise ValueError(f"local_path is a .csv file, here {self.local_path!r}")
        return self


class Profiling(Section):
    """The batch-size sweep."""

    batch_sizes: Annotated[list[PositiveInt], Field(min_length=1)] | None = None
    num_warmup_runs: PositiveInt = 3
    num_measurement_runs: PositiveInt = 10
    max_length: Annotated[int, Field(ge=2)] = 512
    ci_half_width: Annotated[float, Field(gt=0, lt=1)] | None = None
    max_seconds_per_batch_size: PositiveFloat = 15
    dtypes: Annotated[list[Dtype], Field(min_length=1)] | None = None

    @field_validator("batch_sizes", "dtypes")
    @classmethod
    def _no_repeats(cls, values: list[Any] | None) -> list[Any] | None:
        if values is not None and len(set(values)) != len(values):
            raise ValueError("each value may stand once")
        return values


class Evaluation(Section):
    """The pass over the whole dataset."""

    enabled: bool = True
    limit: PositiveInt | None = None
    precision: Literal["same", "fastest", "guarded"] = "same"
    min_agreement: Fraction = 0.995
    engine: Literal["local", "ray"] = "local"
    workers: PositiveInt | None = None
    gpus_per_worker: PositiveFloat | None = None
    storage: Name | None = None
    token_budget: PositiveInt | None = None
    compile: Switch = "auto"

    @model_validator(mode="after")
    def _workers_are_of_ray(self) -> "Evaluation":
        if self.engine == "local" and (self.workers or 1) > 1:
            raise ValueError(
                f"workers is {self.workers}, and engine=local has one: set evaluation.engine=ray, or start "
                "`python scripts/evaluate.py run` once for each GPU, with model.device=cuda:0, cuda:1, ..."
            )
        return self


class Trace(Section):
    """The operator trace of step 03."""

    enabled: bool = True
    batch_size: PositiveInt | None = None
    warmup_steps: NonNegativeInt = 2
    active_steps: PositiveInt = 3
    stacks: bool = True
    shapes: bool = True
    memory: bool = True
    nvtx: bool = False
    max_mb: PositiveInt = 500


class Layers(Section):
    """The layer profile of step 03."""

    enabled: bool = True
    num_runs: PositiveInt = 50  # with probes, and as many without
    warmup_runs: NonNegativeInt = 10
    max_seconds: PositiveFloat = 120  # the number of runs is lowered to fit


class Variants(Section):
    """The comparison of step 05: other ways to run the same texts, and what may change in the answers."""

    enabled: bool = True
    which: Annotated[list[VariantName], Field(min_length=1)] | None = None
    models: list[LocalOrHub] = []
    min_agreement: Fraction = 0.995
    max_accuracy_drop: Fraction = 0.01
    max_seconds: PositiveFloat = 300
    rows: PositiveInt | None = None


class Targets(Section):
    """What the report compares the results with; None is no target."""

    latency_per_sample_ms: PositiveFloat | None = None
    throughput_samples_per_sec: PositiveFloat | None = None
    gpu_memory_mb: PositiveFloat | None = None
    gpu_utilization_pct: Annotated[float, Field(gt=0, le=100)] | None = None
    accuracy: Fraction | None = None


class Pod(Section):
    """The rented machine."""

    price_per_hour: PositiveFloat | None = None


class Output(Section):
    """Where results go."""

    results_dir: Annotated[Name, AfterValidator(_on_a_disk)] = "./results"
    metrics_file: FileName = "baseline_metrics.json"
    detailed_metrics_file: FileName = "detailed_metrics.csv"

    @model_validator(mode="after")
    def _two_files(self) -> Self:
        taken = {self.metrics_file, self.detailed_metrics_file} & RESERVED_NAMES
        if taken:
            raise ValueError(f"{sorted(taken)[0]!r} is the name of another file of the results")
        if self.metrics_file == self.detailed_metrics_file:
            raise ValueError(f"metrics_file and detailed_metrics_file are both {self.metrics_file!r}")
        return self


class Config(Section):
    """All settings of one run."""

    model: Model
    dataset: Dataset
    profiling: Profiling = Profiling()
    evaluation: Evaluation = Evaluation()
    trace: Trace = Trace()
    layers: Layers = Layers()
    variants: Variants = Variants()
    targets: Targets = Targets()
    pod: Pod = Pod()
    output: Output = Output()

    @model_validator(mode="after")
    def _quickstart_model_needs_its_data(self) -> Self:
        if self.model.name == QUICKSTART and not self.dataset.quickstart:
            raise ValueError(
                "model.name is 'quickstart', a model that is trained on the quickstart data; "
                "name your own model, or set dataset.quickstart=true"
            )
        return self


def read_settings(path: Path, overrides: Sequence[str] = ()) -> tuple[Config, list[str]]:
    """Return the settings of `path` with `overrides`, and which keys of the file were left out for them.

    What the file says of its own model or dataset goes with it when another is given: the other source of data and
    what describes it, the model's revision and, from a file that comes with the program, the targets. Raises
    SettingsError for mistakes, and where somebody else's dataset would be left for a model that is given.
    """
    dropped: list[str] = []

    def adapt(stated: Values, values: Values, given: frozenset[str]) -> None:
        dropped.extend(_drop_leftovers(stated, values, given, is_shipped=path.resolve() in SHIPPED))

    config = load(Config, path, overrides, adapt)
    given = {override.partition("=")[0] for override in overrides}
    has_source = any(_is_given(f"dataset.{source}", given) for source in SOURCES)
    if "model.name" in given and path.resolve() in SHIPPED and not has_source and _has_other_model(path, config):
        leftover = "quickstart=true" if config.dataset.quickstart else f"hf_name={config.dataset.hf_name}"
        raise SettingsError(
            f"command line: model.name is {config.model.name!r}, but the dataset of {path} belongs to another model. "
            "Add dataset.file=texts.csv, which needs no labels, or dataset.hf_name=org/dataset; to use that dataset "
            f"nevertheless, add dataset.{leftover}"
        )
    return config, dropped


def _drop_leftovers(stated: Values, values: Values, given: frozenset[str], *, is_shipped: bool) -> list[str]:
    """Remove what the file states of a model or dataset that is not used; return what of it a person may miss."""
    model, dataset = (_section(values, name) for name in ("model", "dataset"))
    own_model, own_dataset = (_section(stated, name) for name in ("model", "dataset"))
    leaving: list[tuple[str, str]] = []
    if "model.name" in given and model.get("name") != own_model.get("name"):
        leaving.append(("model", "revision"))
        leaving += [("targets", name) for name in _section(stated, "targets")] if is_shipped else []
    chosen = [name for name in SOURCES if f"dataset.{name}" in given and dataset.get(name)]
    if len(chosen) == 1:
        leaving += [("dataset", name) for name in SOURCES if name != chosen[0]]
        if own_dataset.get(chosen[0]) is None:  # another kind of source; files of one kind may share their columns
            leaving += [("dataset", name) for name in OF_SOURCE]
        elif dataset[chosen[0]] != own_dataset[chosen[0]]:
            leaving.append(("dataset", "revision"))
        if own_dataset.get("quickstart") and chosen[0] != "quickstart":
            leaving.append(("dataset", "local_path"))
    dropped = []
    for section, name in leaving:
        if not _is_given(f"{section}.{name}", given) and name in _section(values, section):
            value = values[section].pop(name)
            shown = section if section == "targets" else f"{section}.{name}"
            dropped += [shown] if _says_something(name, value) else []
    return list(dict.fromkeys(dropped))


def _section(values: Values, name: str) -> dict[str, Any]:
    section = values.get(name)
    return section if isinstance(section, dict) else {}


def _is_given(key: str, given: frozenset[str] | set[str]) -> bool:
    return key in given or key.partition(".")[0] in given


def _says_something(name: str, value: object) -> bool:
    """Tell whether leaving this value out changes anything that a person may want to know."""
    return value not in (None, False, TEXT_COLUMN, LABEL_COLUMN) and name != "local_path"


def _has_other_model(path: Path, config: Config) -> bool:
    return load(Config, path).model.name != config.model.name
