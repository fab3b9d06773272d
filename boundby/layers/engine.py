"""`ObservabilityEngine`: profile any module layer by layer, and write what was found.

Each thing is measured in runs of its own, for each measurement disturbs the others: runs without probes, runs for
time, for the device's time, for memory, for shapes and for work. Probes are on the model during such a run alone.
"""

import contextlib
import logging
import math
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from msgspec import structs
from torch import nn

from boundby import files
from boundby.layers import report as reports
from boundby.layers.measurement import Instruments, ProfiledModel, instruments_for, measure
from boundby.layers.passes import tensors_in
from boundby.layers.probes import Targets, find_targets
from boundby.layers.records import ModelProfile
from boundby.layers.report import Report
from boundby.work import Limits, unread

WARMUP_RUNS, PROFILE_RUNS = 10, 50
logger = logging.getLogger("boundby.layers")
logger.addHandler(logging.NullHandler())  # else Python writes warnings to stderr where a program set nothing up


class ObservabilityEngine:
    """Profiles `model` layer by layer and writes files into `log_dir`.

    `config` may name `model_name`, `profile_name` (of the files, by default made of the model's name), `shape` (what
    the inputs are, in words) and `inference_mode`; other keys are the caller's. The model runs without gradients,
    under `torch.no_grad`; with `inference_mode` True under `torch.inference_mode`, after which no backward may use
    what the model made and kept; with False as it is called, gradients included. `limits` are those of this machine
    (`Ceilings.limits`), without which nothing is said about what limits a layer. As a context manager it is finalized
    at the end of the block.
    """

    def __init__(
        self,
        model: nn.Module,
        log_dir: str | Path,
        config: Mapping[str, Any] | None = None,
        *,
        limits: Limits | None = None,
        instruments: Instruments | None = None,
    ) -> None:
        self._config = dict(config or {})
        self._model, self._limits, self._instruments = model, limits, instruments
        self._folder = Path(log_dir)
        self._model_name = str(self._config.get("model_name") or type(model).__name__)
        chosen = self._config.get("profile_name")
        self._name = _file_name(str(chosen)) if chosen else f"{_plain(self._model_name)}_profile"
        self._journal = _Journal(self._folder / "logs" / f"{self._name}.log")
        self._targets: Targets | None = None
        self._report: Report | None = None
        self._is_warm = self._is_saved = self._is_finalized = False

    def instrument(self) -> None:
        """Find the layers. Probes go on the model only while it is measured.

        Raises ValueError where the model cannot be watched layer by layer: compiled or scripted as a whole.
        """
        self._refuse_finalized()
        with self._noting_errors():
            self._targets = find_targets(self._model)
        self._journal.note(f"{self._model_name}: {len(self._targets.probed)} modules to watch")
        for reason in self._targets.opaque_reasons:
            self._journal.note(reason, logging.WARNING)

    def warmup(self, inputs: Any, num_warmup_runs: int = WARMUP_RUNS) -> None:
        """Run the model as it is, so that later runs find caches filled.

        `inputs`: a mapping gives keyword arguments, a tuple positional ones, anything else the only argument.
        """
        self._refuse_finalized()
        with self._noting_errors(), self._gradients():
            for _ in range(num_warmup_runs):
                _call(self._model, inputs)
        self._is_warm = True
        self._journal.note(f"{num_warmup_runs} warm-up runs")

    def profile(self, inputs: Any, num_runs: int = PROFILE_RUNS, max_seconds: float = math.inf) -> Report:
        """Return what `num_runs` runs say of every layer; `inputs` are as in `warmup`.

        Does what is missing: `instrument`, `warmup`. After 5 runs no more are made than fit into `max_seconds`, in
        which the other passes lie too, but no warm-up. Raises ChangedProgramError where the model runs other operators
        when it is watched. An error of the model passes through, and nothing stays on it.
        """
        if num_runs < 1:
            raise ValueError(f"num_runs is {num_runs}; at least 1 run is needed")
        if not max_seconds > 0:
            raise ValueError(f"max_seconds is {max_seconds}; give more than 0, or nothing for no limit")
        if self._targets is None:
            self.instrument()
        if not self._is_warm:
            self.warmup(inputs)
        self._refuse_finalized()
        with self._noting_errors(), self._gradients():
            self._report = self._measured(inputs, num_runs, max_seconds)
        self._journal.note(f"measured {self._report.profile.num_runs} runs with probes and as many without")
        self._is_saved = False
        for doubt in self._report.profile.doubts:
            self._journal.note(f"doubt: {doubt}", logging.WARNING)
        return self._report

    def save(self, name: str | None = None) -> tuple[Path, Path]:
        """Write `NAME_metrics.jsonl` and `NAME_summary.json`; return their paths."""
        report = self._named(name)
        metrics = self._folder / f"{report.profile.profile_name}_metrics.jsonl"
        summary = self._folder / f"{report.profile.profile_name}_summary.json"
        lines = reports.write_metrics(metrics, report)
        reports.write_summary(summary, report.profile)
        self._is_saved = True
        self._journal.note(f"wrote {metrics} ({lines} lines) and {summary}")
        return metrics, summary

    def save_dashboard(self, name: str | None = None) -> Path:
        """Write `NAME_dashboard.html` and what `save` writes; return the path of the dashboard.

        Its title is `name` where one is given, else the model's name, with the shape of the inputs if that is known.
        """
        from boundby.layers.dashboard import page

        report = self._named(name)
        path = self._folder / f"{report.profile.profile_name}_dashboard.html"
        with self._noting_errors():
            self.save(name)
            files.write_text(path, page(report.profile, title=name or _title(report.profile)))
        self._journal.note(f"wrote {path}")
        return path

    def finalize(self) -> None:
        """Write what was profiled and not yet saved, and let the model go. A second call does nothing."""
        if self._is_finalized:
            return
        try:
            if self._report is not None and not self._is_saved:
                self.save()
        finally:
            self._is_finalized = True
            self._targets = self._report = None
            del self._model

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.finalize()

    def _measured(self, inputs: Any, num_runs: int, max_seconds: float) -> Report:
        assert self._targets is not None
        device = _device(self._model, inputs)
        instruments = self._instruments or instruments_for(device)
        if instruments.marks is not None and (ready := unread(self._model, inputs)):
            inputs = ready
            self._journal.note("the mask is made before the runs: the model's own way waits for the device to read it")
        profiled = ProfiledModel(
            model=self._model,
            model_name=self._model_name,
            profile_name=self._name,
            targets=self._targets,
            device=device,
            run=lambda: _call(self._model, inputs),
        )
        report = measure(profiled, num_runs, instruments, self._limits, max_seconds)
        shape = self._config.get("shape")
        return replace(report, profile=structs.replace(report.profile, shape=str(shape) if shape else None))

    def _named(self, name: str | None) -> Report:
        """Return the report under another name; raises RuntimeError where nothing was profiled."""
        if self._report is None:
            raise RuntimeError("there is no profile to save; call profile(inputs) before this, and finalize() after it")
        if name is None:
            return self._report
        return replace(self._report, profile=structs.replace(self._report.profile, profile_name=_file_name(name)))

    def _gradients(self) -> contextlib.AbstractContextManager[Any]:
        wanted = self._config.get("inference_mode")
        if wanted is None:
            return torch.no_grad()
        return torch.inference_mode() if wanted else contextlib.nullcontext()

    def _refuse_finalized(self) -> None:
        if self._is_finalized:
            raise RuntimeError("this engine is finalized and has let the model go; make a new one")

    @contextlib.contextmanager
    def _noting_errors(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self._journal.note(f"{type(error).__name__}: {error}", logging.ERROR)
            raise


class _Journal:
    """What the engine did and what went wrong, a line each; the lines go to the logger `boundby.layers` too.

    The file at `path` is complete at any time.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lines: list[str] = []

    def note(self, text: str, level: int = logging.INFO) -> None:
        """Add a line."""
        logger.log(level, "%s", text)
        moment = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        self._lines.append(f"{moment} {logging.getLevelName(level).lower()}: {text}\n")
        files.write_text(self.path, "".join(self._lines))


def _call(model: Callable[..., Any], inputs: Any) -> object:
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple) else model(inputs)


def _device(model: nn.Module, inputs: Any) -> torch.device:
    """Return where the model computes: the device of its first parameter or buffer, else of its inputs."""
    tensors = (*model.parameters(), *model.buffers(), *tensors_in(inputs))
    return next((tensor.device for tensor in tensors), torch.device("cpu"))


def _plain(name: str) -> str:
    """Return a name that can be part of a file name: "meta-llama/Llama" becomes "meta-llama-Llama"."""
    return re.sub(r"[^\w.-]+", "-", name).strip("-.") or "model"


def _file_name(name: str) -> str:
    if not name or name in (".", "..") or Path(name).name != name or "\0" in name:
        raise ValueError(f"profile name {name!r} cannot begin the name of a file; give one without slashes")
    return name


def _title(profile: ModelProfile) -> str:
    given = profile.shape or ", ".join(profile.layers[0].input_shapes[:1])
    return f"{profile.model_name}, {given}" if given else profile.model_name
