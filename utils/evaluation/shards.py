"""Predict one shard and keep it: one parquet file per shard, complete or absent."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from boundby import files
from boundby.device import is_out_of_memory, release_memory
from boundby.inference import Tokens, collate, forward, token_budget_batches, tokenize
from boundby.memory import MemoryMeter
from boundby.timer import Timer
from utils.evaluation.plan import Plan, Shard

METADATA_KEY = b"boundby"


@dataclass(frozen=True)
class ShardResult:
    """The predictions of one shard, in the order of its rows, and what they cost."""

    table: pa.Table
    facts: dict[str, Any]


class ShardPredictor:
    """Predicts shards of a plan with one model."""

    def __init__(self, model: Any, tokenizer: Any, device: torch.device, plan: Plan, timer: Timer) -> None:
        self.model, self.tokenizer, self.device, self.plan, self.timer = model, tokenizer, device, plan, timer
        self._halvings = 0

    def predict(self, shard: Shard, row_ids: np.ndarray, texts: Sequence[str], labels: np.ndarray) -> ShardResult:
        """Return the predictions for these texts, which are the rows of `shard`.

        Raises ValueError when a logit is not finite, naming the row.
        """
        self._halvings = 0
        meter = MemoryMeter(self.device)
        meter.start()
        self.timer.synchronize()
        start = self.timer.clock()
        tokens = tokenize(self.tokenizer, texts, self.plan.max_length)
        tokenized = self.timer.clock()
        logits, padded = self._logits(tokens)
        seconds = self.timer.clock() - start
        broken = ~np.isfinite(logits).all(axis=1)
        if broken.any():
            raise ValueError(
                f"row {row_ids[broken.argmax()]} has logits that are not finite in {self.plan.dtype}; "
                "try model.dtype=float32"
            )
        memory = meter.stop()
        facts = {
            "plan": self.plan.fingerprint,
            "shard": shard.id,
            "seconds": seconds,
            "tokenize_s": tokenized - start,
            "tokens_real": int(tokens.lengths.sum()),
            "tokens_padded": padded,
            "truncated": tokens.truncated,
            "halvings": self._halvings,
            "device_peak_bytes": memory.device_peak_allocated_bytes,
            "process_peak_bytes": memory.process_peak_bytes,
            "memory_reasons": memory.reasons,
        }
        return ShardResult(_table(row_ids, labels, tokens.lengths, logits), facts)

    def _logits(self, tokens: Tokens) -> tuple[np.ndarray, int]:
        """Return logits in fp32 in the order of the rows, and the number of padded tokens that were computed."""
        logits = np.empty((len(tokens.ids), len(self.plan.labels)), dtype=np.float32)
        padded = 0
        waiting = token_budget_batches(tokens.lengths, self.plan.token_budget)[::-1]
        while waiting:
            rows = waiting.pop()
            done = self._predict_rows(tokens, rows)
            if done is None:  # out of memory: the same rows in two halves
                self._halvings += 1
                middle = len(rows) // 2
                waiting += [rows[middle:], rows[:middle]]
                continue
            logits[rows], count = done
            padded += count
        return logits, padded

    def _predict_rows(self, tokens: Tokens, rows: list[int]) -> tuple[np.ndarray, int] | None:
        """Return the logits of one batch, or None when memory ran out and the batch can be halved."""
        try:
            with torch.inference_mode():
                batch = collate(tokens, rows, self.tokenizer.pad_token_id, self.device)
                return forward(self.model, batch).float().cpu().numpy(), batch.tokens_padded
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error) or len(rows) == 1:
                raise
        release_memory(self.device)  # outside the except block: its traceback holds the tensors
        return None


def save(result: ShardResult, path: Path) -> None:
    """Write the shard's file, all or nothing, with its facts inside."""
    metadata = {METADATA_KEY: files.encode_json(result.facts).encode()}
    with files.replacing(path) as temporary:
        pq.write_table(result.table.replace_schema_metadata(metadata), temporary)


def load(path: Path, plan: Plan, shard: Shard) -> ShardResult | None:
    """Return the shard stored at `path`; None where it is absent, damaged, or of another plan."""
    try:
        table = pq.read_table(path)
        facts = json.loads((table.schema.metadata or {})[METADATA_KEY])
    except (OSError, ValueError, KeyError):  # pyarrow's errors are ValueErrors and OSErrors
        return None
    if facts.get("plan") != plan.fingerprint or facts.get("shard") != shard.id:
        return None
    return ShardResult(table, facts) if table.num_rows == shard.stop - shard.start else None


def _table(row_ids: np.ndarray, labels: np.ndarray, lengths: np.ndarray, logits: np.ndarray) -> pa.Table:
    shifted = np.exp(logits - logits.max(axis=1, keepdims=True))
    probabilities = shifted / shifted.sum(axis=1, keepdims=True)
    two_best = np.sort(logits, axis=1)[:, -2:]
    return pa.table(
        {
            "row_id": pa.array(row_ids, pa.int64()),
            "label": pa.array(labels, pa.int32()),
            "prediction": pa.array(logits.argmax(axis=1), pa.int32()),
            "confidence": pa.array(probabilities.max(axis=1), pa.float32()),
            "margin": pa.array(two_best[:, 1] - two_best[:, 0], pa.float32()),
            "n_tokens": pa.array(lengths, pa.int32()),
            "logits": pa.array(list(logits), pa.list_(pa.float32())),
        }
    )
