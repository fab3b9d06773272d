"""The record of a pass over the whole dataset, as metrics.json and the documents of later steps hold it.

It stays a dictionary, since each task adds scores of its own; here each key that all share has its type.
"""

from typing import Annotated, NotRequired, TypedDict

import msgspec

Positive = Annotated[float, msgspec.Meta(gt=0)]
NonNegative = Annotated[float, msgspec.Meta(ge=0)]
Size = Annotated[int, msgspec.Meta(ge=1, le=2**53)]
Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]


class Exactness(TypedDict):
    """How predictions compare with those in float32, one text at a time; shares, not percent."""

    rows: int
    same_labels: int
    agreement: float
    agreement_low: float
    agreement_high: float
    max_abs_logit_difference: float
    mean_abs_logit_difference: float
    accuracy_difference: NotRequired[float | None]
    accuracy_difference_low: NotRequired[float | None]
    accuracy_difference_high: NotRequired[float | None]


class Subset(TypedDict):
    """The scores of the first rows of a seeded sample."""

    samples: int
    accuracy: float
    f1_macro: float
    f1_weighted: float


class CeilingShare(TypedDict):
    """How much of the measured limit the pass used; None with a reason where it cannot be told."""

    useful_flops_per_sec: float | None
    share_of_ceiling_pct: float | None
    ceiling_flops_per_sec: float | None
    share_of_ceiling_reason: str | None


class Phases(TypedDict):
    """What the time of the workers went to."""

    tokenize: NonNegative
    transfer: NonNegative
    compute: NonNegative
    wait: NonNegative


class FullDataset(TypedDict):
    """The pass over the whole dataset: its time, its cost and how it was made; each task adds its scores."""

    samples: Size
    samples_of: NotRequired[list[Subset]]
    accuracy: NotRequired[float | None]  # None without labels
    accuracy_reason: NotRequired[str | None]
    inference_time_s: NonNegative
    worker_time_s: float
    machine_time_s: NonNegative | None
    device_time_s: NonNegative | None
    machine_time_reason: str | None
    tokenize_time_s: NonNegative
    phases_s: Phases
    latency_per_sample_ms: Positive
    throughput_samples_per_sec: Positive
    tokens_per_sec_real: Positive
    useful_tokens: Count
    computed_tokens: Count
    padding_pct: NonNegative
    computed_texts: Count
    guarded_texts: Count
    truncated: Count | None
    out_of_memory: Count
    token_budget: Count
    dtype: str
    precision: str
    strategy: str
    trim: bool
    compile: bool
    exactness: Exactness | None
    exactness_reason: str | None
    labels_doubt: str | None
    gpu_mem_used: float | None
    gpu_mem_used_mb: float | None
    gpu_mem_used_reason: str | None
    cpu_mem_peak_mb: float | None
    plan: NotRequired[str]
    useful_flops_per_sec: float | None
    share_of_ceiling_pct: float | None
    ceiling_flops_per_sec: float | None
    share_of_ceiling_reason: str | None
