"""The profile by layer in step 03: the classifier on one batch of real texts."""

from typing import Any

from boundby.inference import collate, tokenize
from boundby.layers.ranking import blocks
from boundby.layers.records import ModelProfile
from utils.artifacts import LAYER_PROFILE
from utils.cli import Run
from utils.data import Rows, sample
from utils.layers import profiling
from utils.models import LoadedModel
from utils.tracing import TEXT_SEED, choose_batch_size

SHOWN = 5


def record(run: Run, loaded: LoadedModel, rows: Rows, max_length: int) -> ModelProfile:
    """Profile the layers on a batch of the size that is traced, write the files, and return the profile."""
    batch_size, _ = choose_batch_size(run)
    texts = sample(rows, min(len(rows.texts), batch_size), TEXT_SEED).texts
    tokens = tokenize(loaded.tokenizer, texts, max_length)
    batch = collate(tokens, range(len(texts)), loaded.tokenizer.pad_token_id, loaded.device)
    mask = batch.attention_mask if batch.is_padded else None
    inputs: dict[str, Any] = {"input_ids": batch.input_ids, "attention_mask": mask}
    settings = run.config.layers
    report, _ = profiling.profile(
        loaded.model,
        inputs,
        name=run.config.model.name,
        folder=run.layout.layers,
        limits=profiling.limits_of_machine(run.layout.ceilings, loaded.device, loaded.dtype),
        num_runs=settings.num_runs,
        warmup_runs=settings.warmup_runs,
        max_seconds=settings.max_seconds,
        profile_name=LAYER_PROFILE,
        note=run.note,
    )
    return report.profile


def console_lines(profile: ModelProfile) -> list[str]:
    """Return how far the profile can be trusted and the longest blocks, as lines for the terminal."""
    coverage = profile.coverage
    lines = [
        f"profiled {sum(each.calls > 0 for each in profile.layers)} layers in {profile.num_runs} runs: coverage "
        f"{100 * coverage.ratio:.1f} % ({coverage.status}), overhead {100 * profile.overhead:+.1f} %"
    ]
    for row in blocks(profile)[:SHOWN]:
        lines.append(f"  {100 * row.share:5.1f} % {1e3 * row.seconds:10.3f} ms  {row.label}")
    return lines
