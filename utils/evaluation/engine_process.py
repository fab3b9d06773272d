"""A process for each library in which converted models compute, so that its threads and memory are its own."""

import errno
import gc
import importlib
import multiprocessing
import os
import shutil
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from boundby.inference import (
    ENGINES,
    Library,
    Session,
    batches_in_order,
    collate,
    convert,
    file_bytes,
    open_session,
    quantized,
    rotary_of,
    tokenize,
    weight_bytes,
)
from boundby.machine import MemoryMeter, free_bytes
from utils.command import PipelineError
from utils.models import LoadedModel, ModelSource
from utils.models import loading as models

# To load a library, convert and quantize a small classifier on two CPU cores; the first of a library converts.
ENGINE_S = {"onnxruntime": 20.0, "onnxruntime_int8": 8.0, "openvino": 15.0, "openvino_int8": 15.0}
COPIES = 4  # of the float32 weights, that converting holds at once: torch's, the graph's, what is written
FILES = 2  # of that size at most lie on the disk: in float32 and in eight bits
MOST_S = 900.0  # for one answer
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
UNWRITTEN = "iostream error"  # all that OpenVINO says of a full disk
WHERE = "Exception from "  # a line of its sources, as OpenVINO begins
LAST_S = 5.0  # to end
CPU = torch.device("cpu")


def obstacle(loaded: LoadedModel, folder: Path) -> tuple[Literal["out_of_memory", "no_space"], str] | None:
    """Return why there is no room to convert this model into `folder`, which is made; None where there is."""
    wanted, free = weight_bytes(loaded.model), free_bytes(loaded.device)
    if COPIES * wanted > free:
        sizes = f"{COPIES * wanted / 1e9:.1f} GB of memory; {free / 1e9:.1f} GB are free"
        return "out_of_memory", f"converting takes {sizes}"
    folder.mkdir(parents=True, exist_ok=True)
    room = shutil.disk_usage(folder).free
    if FILES * wanted > room:
        sizes = f"{FILES * wanted / 1e6:,.0f} MB of disk, and {room / 1e6:,.0f} MB are free"
        return "no_space", f"the converted model takes {sizes}; output.results_dir names another disk"
    return None


class EngineFailed(ValueError):
    """What the engine, or the end of its process, says."""


class EngineProcess:
    """One library in a process of its own, with as many threads as torch has here; it writes models into `folder`.

    Calls raise EngineFailed.
    """

    def __init__(
        self, source: ModelSource, library: Library, max_length: int, folder: Path, trust_remote_code: bool = False
    ) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        arguments = (theirs, source, library, max_length, folder, torch.get_num_threads(), trust_remote_code)
        self._process = context.Process(target=_serve, args=arguments, daemon=True)
        self._process.start()
        theirs.close()
        try:
            self._ask("ready")
        except EngineFailed:
            self.close()
            raise

    def convert(self) -> None:
        """Convert the model, in float32."""
        try:
            self._ask("convert")
        except EngineFailed as error:
            raise EngineFailed(f"the model cannot be converted: {error}") from None

    def open(self, engine: str, calibration: Sequence[str]) -> int:
        """Make the model of this engine ready, and return the bytes of its file; the texts are for the ranges."""
        size: int = self._ask("open", engine, list(calibration))
        return size

    def logits(self, engine: str, texts: Sequence[str], size: int) -> np.ndarray:
        """Return the logits of the texts in their order, from batches of `size` of similar length."""
        logits: np.ndarray = self._ask("logits", engine, list(texts), size)
        return logits

    def rise(self, engine: str, texts: Sequence[str], size: int) -> int | None:
        """Return by how many bytes the process grows at most while it computes; None where that cannot be known."""
        rise: int | None = self._ask("rise", engine, list(texts), size)
        return rise

    def close(self) -> None:
        """End the process."""
        self._connection.close()
        self._process.join(LAST_S)  # it ends by itself, and gives back what it holds, unless it computes
        self._process.terminate()
        self._process.join()

    def _ask(self, call: str, *arguments: Any) -> Any:
        try:
            self._connection.send((call, arguments))
            if not self._connection.poll(MOST_S):
                self._process.terminate()
                raise EngineFailed(f"it gave no answer within {MOST_S:.0f} s")
            has_worked, answer = self._connection.recv()
        except (EOFError, OSError):  # Linux ends the largest process where memory runs out
            self._process.join()
            raise EngineFailed(f"its process ended (exit code {self._process.exitcode})") from None
        if not has_worked:
            raise EngineFailed(answer)
        return answer


def _serve(connection: Connection, *arguments: Any) -> None:
    """Answer until there is nobody to ask; what the libraries print goes nowhere."""
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    serving = _Serving(*arguments)
    while True:
        try:
            call, values = connection.recv()
        except EOFError:
            return
        try:
            answer = True, getattr(serving, call)(*values)
        except Exception as error:  # exporters and engines raise anything
            answer = False, reason_of(error)
        connection.send(answer)


def reason_of(error: BaseException) -> str:
    """Return what went wrong in one sentence: exporters wrap the reason into pages of advice."""
    while error.__cause__ is not None and not isinstance(error, PipelineError):
        error = error.__cause__
    is_full = isinstance(error, OSError) and error.errno in FULL
    if is_full or UNWRITTEN in str(error):
        why = error.strerror if isinstance(error, OSError) else "the disk is full, or files may not be so large"
        return f"its file cannot be written: {why}; output.results_dir names another disk"
    said = [line.strip() for line in str(error).splitlines() if line.strip()]
    lines = [line for line in said if not line.startswith(WHERE)] or said or ["no reason given"]
    reason = " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
    return reason if isinstance(error, EngineFailed | PipelineError) else f"{type(error).__name__}: {reason}"


class _Serving:
    """The calls of `EngineProcess`, where the library is."""

    def __init__(
        self, source: ModelSource, library: Library, max_length: int, folder: Path, threads: int, trust: bool
    ) -> None:
        self._source, self._library, self._max_length, self._trust = source, library, max_length, trust
        self._folder, self._threads = folder, threads
        self._tokenizer: Any = None
        self._converted: Path | None = None
        self._rotary = rotary_of(None)
        self._sessions: dict[str, Session] = {}
        torch.set_num_threads(threads)

    def ready(self) -> None:
        """Load what every call needs. Raises EngineFailed where the library is there and does not load."""
        try:
            importlib.import_module(self._library)
        except Exception as error:  # it may lack a library of the system
            raise EngineFailed(f"{self._library} is installed and cannot be loaded: {reason_of(error)}") from None
        self._tokenizer = models.load_tokenizer(self._source, self._trust)

    def convert(self) -> None:
        loaded = models.load(self._source, CPU, "float32", trust_remote_code=self._trust)
        self._folder.mkdir(parents=True, exist_ok=True)
        self._converted = convert(loaded.model, self._library, self._folder)
        self._rotary = rotary_of(loaded.model)
        del loaded
        gc.collect()

    def open(self, engine: str, calibration: list[str]) -> int:
        assert self._converted is not None
        path, wanted = self._converted, ENGINES[engine]
        if wanted.precision == "int8":
            path = quantized(path, wanted, (ids.astype(np.int64) for ids in self._tokens(calibration).ids))
        self._sessions[engine] = open_session(path, wanted, self._threads)
        return file_bytes(path)

    def logits(self, engine: str, texts: list[str], size: int) -> np.ndarray:
        tokens, session = self._tokens(texts), self._sessions[engine]
        order = np.argsort(-tokens.lengths, kind="stable").tolist()
        batches = batches_in_order(self._rotary, tokens, order, size)
        parts = []
        for rows in batches:
            batch = collate(tokens, rows, self._tokenizer.pad_token_id or 0, CPU)
            parts.append(session(batch.input_ids.numpy(), batch.attention_mask.numpy()))
        logits = np.concatenate(parts).astype(np.float32, copy=False)
        return logits[np.argsort(np.concatenate(batches))]

    def rise(self, engine: str, texts: list[str], size: int) -> int | None:
        meter = MemoryMeter(CPU)
        meter.start()
        before = meter.stop().process_bytes
        self.logits(engine, texts, size)
        peak = meter.stop().process_peak_bytes
        return None if peak is None or before is None else max(0, peak - before)

    def _tokens(self, texts: list[str]) -> Any:
        return tokenize(self._tokenizer, texts, self._max_length)
