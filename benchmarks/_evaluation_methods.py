"""The ways to get the labels of many texts that `evaluation.py` compares; each returns one label index per text."""

import contextlib
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks._evaluation_cases import MAX_LENGTH, Case
from boundby.device import has_bfloat16_products
from boundby.inference.engines import ENGINES, MOST_CALIBRATION
from utils.model_source import ModelSource
from utils.variants.engines import EngineFailed, EngineProcess

SPEC_BATCH, SORTED_BATCH = 64, 32
PIPELINE_BATCHES = (1, 8, 32, 64)
SPEC, LONGEST, CHARACTERS, PIPELINE = "padded to 512", "padded to longest", "sorted by characters", "pipeline"

ENGINE_BATCHES, SEARCHED_TEXTS = (32, 64, 128), 512

Label = Callable[[Sequence[str]], list[int]]


def peers(case: Case) -> dict[str, Label]:
    """Return the other ways, by name."""
    found: dict[str, Label] = {
        SPEC: lambda texts: _batches(case, texts, range(len(texts)), SPEC_BATCH, "max_length"),
        LONGEST: lambda texts: _batches(case, texts, range(len(texts)), SPEC_BATCH, "longest"),
        CHARACTERS: lambda texts: _batches(
            case, texts, np.argsort([-len(each) for each in texts]).tolist(), SORTED_BATCH, "longest"
        ),
    }
    return found | {f"{PIPELINE} {size}": _pipeline(case, size) for size in PIPELINE_BATCHES}


def _batches(case: Case, texts: Sequence[str], order: Sequence[int], size: int, padding: str) -> list[int]:
    """Return labels from batches of fixed size in the order given, tokenized as they come."""
    labels = [0] * len(texts)
    with torch.inference_mode():
        for start in range(0, len(order), size):
            rows = order[start : start + size]
            encoded = case.tokenizer(
                [texts[row] for row in rows],
                padding=padding,
                truncation=True,
                max_length=MAX_LENGTH,
                return_tensors="pt",
            )
            found = case.model(input_ids=encoded["input_ids"], attention_mask=encoded["attention_mask"]).logits
            for row, label in zip(rows, found.argmax(dim=1).tolist(), strict=True):
                labels[row] = label
    return labels


def _pipeline(case: Case, size: int) -> Label:
    from transformers import pipeline

    made: Any = pipeline("text-classification", model=case.model, tokenizer=case.tokenizer, device="cpu")
    ids = case.model.config.label2id

    def label(texts: Sequence[str]) -> list[int]:
        found = made(list(texts), batch_size=size, truncation=True, max_length=MAX_LENGTH)
        return [ids[each["label"]] for each in found]

    return label


@contextlib.contextmanager
def engines(case: Case) -> Iterator[dict[str, Label]]:
    """Yield ONNX Runtime and OpenVINO in each precision, in a process for each, at their best batch size.

    Their texts are sorted by length; those that OpenVINO's eight bits are calibrated with are the last ones.
    """
    found: dict[str, Label] = {}
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as processes:
        source = ModelSource(str(case.folder), case.folder, "folder", None, "")
        running: dict[str, EngineProcess] = {}
        for name, engine in ENGINES.items():
            try:
                if engine.lacking:
                    raise EngineFailed(f"{' and '.join(engine.lacking)} not installed")
                if engine.precision == "bfloat16" and not has_bfloat16_products(torch.device("cpu")):
                    raise EngineFailed("this CPU has no bfloat16 products")
                if engine.library not in running:
                    process = EngineProcess(source, engine.library, MAX_LENGTH, Path(folder) / engine.library)
                    processes.callback(process.close)
                    process.convert()
                    running[engine.library] = process
                process = running[engine.library]
                process.open(name, case.texts[-MOST_CALIBRATION:] if engine.calibrated else ())
                size = _best_size(partial(process.logits, name), case.texts[:SEARCHED_TEXTS])
            except EngineFailed as error:
                print(f"{engine.words}: left out: {error}", flush=True)
                continue
            print(f"{engine.words}: batches of {size} sorted by length", flush=True)
            found[engine.words] = partial(_labels, partial(process.logits, name), size)
        yield found


def _labels(logits: Callable[[Sequence[str], int], np.ndarray], size: int, texts: Sequence[str]) -> list[int]:
    found: list[int] = logits(texts, size).argmax(axis=1).tolist()
    return found


def _best_size(logits: Callable[[Sequence[str], int], np.ndarray], texts: Sequence[str]) -> int:
    seconds = {}
    for size in ENGINE_BATCHES:
        logits(texts, size)
        start = time.perf_counter()
        logits(texts, size)
        seconds[size] = time.perf_counter() - start
    return min(seconds, key=lambda size: seconds[size])
