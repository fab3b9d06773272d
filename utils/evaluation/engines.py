"""Let ONNX Runtime or OpenVINO compute an evaluation where it surely wins: converted once, kept beside the results."""

import json
import shutil
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from msgspec import structs

from boundby import files
from boundby.inference import (
    ENGINES,
    LEAST_CALIBRATION,
    MOST_CALIBRATION,
    PRECISIONS,
    ExactnessReport,
    Library,
    Precision,
    PrecisionRule,
    Predictor,
    Sample,
    as_precision,
    check_rows,
    choose_precision,
    file_of,
    open_session,
    search_token_budget,
)
from boundby.machine import environment, has_bfloat16_matmul, is_host
from boundby.timing import estimate
from boundby.work import Interval
from utils.command import EnvironmentLacksError, InputError, PipelineError, contents, lacking
from utils.evaluation.engine_process import ENGINE_S, EngineFailed, EngineProcess, obstacle, reason_of
from utils.evaluation.plan import PLAN_COMMAND, Converted, EngineChoice, Plan
from utils.models import LoadedModel

SHARE = 0.1  # of what an evaluation takes may go into trying engines: so much slower does one get that wins nothing
PROMISING = ("openvino_int8", "openvino_bfloat16", "openvino", "onnxruntime_int8", "onnxruntime")  # in this order
TURNS, TURN_TEXTS = 5, 512
BUDGETS = (512, 1024, 2048)  # tokens of a padded batch to choose from: with fewer there is less to pad
PASSES = 6  # over the sample: choosing, then budgets and turns on a part of it
RECEIPT = "converted.json"


@dataclass(frozen=True)
class Shelf:
    """Where converted models lie; `closed` says why none may be used."""

    folder: Path
    closed: str | None = None
    trust_remote_code: bool = False


@dataclass(frozen=True)
class Chosen:
    """The record of the choice; where an engine was taken, its predictor, how its labels compare, and its file."""

    record: EngineChoice
    predictor: Predictor | None = None
    report: ExactnessReport | None = None
    file: Path | None = None
    converted: Converted | None = None


def choose(
    own: Predictor, loaded: LoadedModel, sample: Sample, rule: PrecisionRule, whole_s: float, shelf: Shelf
) -> Chosen | None:
    """Return the engine that is surely faster than `own` with the agreement that `rule` asks for, or why there is none.

    None where no engine is installed for this device. `sample` has its reference; trying may take a tenth of `whole_s`.
    """
    names = [name for name in PROMISING if not ENGINES[name].lacking]
    if not names or not is_host(own.device):
        return None
    if shelf.closed:
        return Chosen(EngineChoice(None, shelf.closed))
    if not has_bfloat16_matmul(own.device):
        names = [name for name in names if ENGINES[name].precision != "bfloat16"]
    texts = sample.check_texts or sample.texts
    start, reasons = time.perf_counter(), list[str]()
    compared_s = PASSES * own.predict(sample.texts).seconds.total_s
    offered: dict[str, tuple[Precision, Path, float]] = {}
    failed: dict[str, list[str]] = {}
    with ExitStack() as stack:
        workplace = _Workplace(loaded, own, texts, shelf, stack)
        for name in names:
            words, needs_s = ENGINES[name].words, workplace.needs_s(name)
            if time.perf_counter() - start + needs_s + compared_s > SHARE * whole_s:
                reasons.append(f"{words} was not tried: getting it ready takes about {needs_s:.0f} s and comparing it "
                               f"{compared_s:.0f} s, too much for all texts' {whole_s:.0f} s")  # fmt: skip
                break
            try:
                file, seconds = workplace.file(name)
                session = open_session(file, ENGINES[name], torch.get_num_threads())
                offered[name] = as_precision(name, session), file, seconds
            except Exception as error:  # libraries raise anything
                failed.setdefault(reason_of(error), []).append(words)
    reasons = [*(f"not {', '.join(words)}: {said}" for said, words in failed.items()), *reasons]
    return _fastest(own, loaded, sample, rule, offered, reasons)


def _fastest(
    own: Predictor,
    loaded: LoadedModel,
    sample: Sample,
    rule: PrecisionRule,
    offered: dict[str, tuple[Precision, Path, float]],
    reasons: list[str],
) -> Chosen:
    if not offered:
        return Chosen(EngineChoice(None, "; ".join(reasons)))
    precisions = {name: precision for name, (precision, _, _) in offered.items()}
    try:
        choice = choose_precision(
            loaded.model, loaded.tokenizer, sample, rule, own.options, precisions=tuple(precisions.values())
        )
    except ValueError as error:
        return Chosen(EngineChoice(None, "; ".join([*reasons, str(error)])))
    texts = sample.texts[:TURN_TEXTS]
    competing = [trial.predictor for trial in choice.trials]
    if own.options.token_budget is None:
        budgets = [search_token_budget(engine, texts, BUDGETS).token_budget for engine in competing]
        competing = [engine.with_token_budget(budget) for engine, budget in zip(competing, budgets, strict=True)]
    rounds = np.array(turns([own, *competing], texts))
    number = int(np.median(rounds[:, 1:], axis=0).argmin())
    own_s, engine_s = rounds[:, 0], rounds[:, 1 + number]
    engine, report = competing[number], choice.trials[number].report
    name = engine.options.precision
    _, file, convert_s = offered[name]
    gain = Interval.of(estimate((own_s / engine_s).tolist()))
    said = f"{ENGINES[name].words} is {gain.value:.2f} [{gain.low:.2f}, {gain.high:.2f}] times as fast"
    record = EngineChoice(None, "", convert_s, gain.value, gain.low, gain.high)
    if gain.low <= 1:
        record = structs.replace(record, reason="; ".join([*reasons, *choice.reasons, f"{said}: no sure gain"]))
        return Chosen(record)
    after = int(convert_s * len(texts) / float((own_s - engine_s).mean())) + 1
    reason = f"{said} as {own.options.precision.replace('_', ' ')} here"
    if convert_s:
        reason += f"; converting took {convert_s:.0f} s, won back after {after:,} texts"
    record = structs.replace(record, name=name, reason=reason, won_back_after_texts=after)
    return Chosen(record, engine, report, file, Converted(_version(name), _sha256(file)))


def turns(predictors: Sequence[Predictor], texts: Sequence[str]) -> list[list[float]]:
    """Return the seconds that each takes for the same texts, in turns: a list for each of five rounds."""
    rounds = []
    for number in range(TURNS + 1):
        order = range(len(predictors)) if number % 2 else range(len(predictors) - 1, -1, -1)
        seconds = {index: predictors[index].predict(texts).seconds.total_s for index in order}
        rounds.append([seconds[index] for index in range(len(predictors))])
    return rounds[1:]  # the first pass is cold


class _Workplace:
    """Converts the model for each library, in a process of its own, unless it lies on the shelf."""

    def __init__(
        self, loaded: LoadedModel, own: Predictor, texts: Sequence[str], shelf: Shelf, stack: ExitStack
    ) -> None:
        self._loaded, self._own, self._shelf, self._stack = loaded, own, shelf, stack
        order = check_rows(own.tokenize(texts).lengths)
        self._probe = [texts[row] for row in order]
        self._calibration = list(texts[:MOST_CALIBRATION])
        self._processes: dict[str, EngineProcess | EngineFailed] = {}
        self._converting_s: dict[str, float] = {}

    def needs_s(self, name: str) -> float:
        """Return about how long it takes to get an engine ready; 0 where it lies on the shelf."""
        if self._kept(name):
            return 0.0
        library = ENGINES[name].library
        converting = 0.0 if library in self._processes else ENGINE_S[library]
        return converting + (ENGINE_S[name] if ENGINES[name].precision == "int8" else 0.0)

    def file(self, name: str) -> tuple[Path, float]:
        """Return the file of this engine, and the seconds it took now, converting included. Raises EngineFailed."""
        engine, folder = ENGINES[name], self._folder(name)
        path = file_of(folder, engine.library, engine.precision)
        if self._kept(name):
            return path, 0.0
        if engine.calibrated and len(self._calibration) < LEAST_CALIBRATION:
            raise EngineFailed(f"its ranges are found with {LEAST_CALIBRATION} texts or more")
        start = time.perf_counter()
        if engine.library not in self._processes:
            self._processes[engine.library] = self._converted(engine.library, folder)
            self._converting_s[engine.library] = time.perf_counter() - start
            start = time.perf_counter()
        process = self._processes[engine.library]
        if isinstance(process, EngineFailed):
            raise process
        process.open(name, self._calibration if engine.calibrated else ())
        process.logits(name, self._probe, len(self._probe))  # one that ends its process does not end this one
        files.write_json(folder / RECEIPT, {**self._receipt(folder), name: _sha256(path)})
        return path, self._converting_s[engine.library] + time.perf_counter() - start

    def _converted(self, library: Library, folder: Path) -> EngineProcess | EngineFailed:
        """Return the process that converted the model, or why it could not: it is asked once for all precisions."""
        if wrong := obstacle(self._loaded, self._shelf.folder):
            return EngineFailed(wrong[1])
        options, trust = self._own.options, self._shelf.trust_remote_code
        try:
            process = EngineProcess(self._loaded.source, library, options.max_length, folder, trust)
            self._stack.callback(process.close)
            process.convert()
        except EngineFailed as error:
            if not self._receipt(folder):  # else another precision lies there from an earlier plan
                shutil.rmtree(folder, ignore_errors=True)
            return error
        return process

    def _kept(self, name: str) -> bool:
        folder, engine = self._folder(name), ENGINES[name]
        path = file_of(folder, engine.library, engine.precision)
        return path.is_file() and self._receipt(folder).get(name) == _sha256(path)

    def _receipt(self, folder: Path) -> dict[str, str]:
        try:
            receipt = json.loads((folder / RECEIPT).read_bytes())
        except (OSError, ValueError):
            return {}
        return receipt if isinstance(receipt, dict) else {}

    def _folder(self, name: str) -> Path:
        """Return the folder of a library's files: of this model, these versions and these texts for the ranges."""
        library = ENGINES[name].library
        packages = {package for engine in ENGINES.values() if engine.library == library for package in engine.packages}
        versions = environment.versions(("torch", "transformers", *sorted(packages)))
        weights = self._loaded.source.fingerprint
        key = files.sha256_of([library, weights, versions, self._own.options.max_length, self._calibration])
        return self._shelf.folder / f"{library}-{key[:16]}"


def tidy(shelf: Shelf, kept: Path | None) -> None:
    """Remove what lies on the shelf but for the folder of this file."""
    for folder in shelf.folder.glob("*"):
        if kept is None or folder != kept.parent:
            shutil.rmtree(folder, ignore_errors=True)


def precisions_of(made: Plan) -> dict[str, Precision]:
    """Return the precisions to look up the plan's in, with its converted model loaded.

    Raises EnvironmentLacksError without the library, InputError where version or file differ from the plan, and
    PipelineError where it cannot be loaded.
    """
    name, planned = made.choices.precision, made.choices.converted
    if planned is None:
        return PRECISIONS
    engine, path = ENGINES[name], Path(made.places.converted or "")
    anew = f"; `{PLAN_COMMAND} --anew` plans without it"
    if engine.lacking:
        raise EnvironmentLacksError(f"the plan computes with {engine.words}; {lacking(*engine.lacking)}{anew}")
    if (version := _version(name)) != planned.version:
        raise InputError(f"the plan computes with {engine.words} {planned.version}, {version} is installed{anew}")
    try:
        is_planned = _sha256(path) == planned.sha256
    except OSError:
        is_planned = False
    if not is_planned:
        raise InputError(f"{path}: the converted model of the plan is gone, or another one{anew}")
    try:
        session = open_session(path, engine, torch.get_num_threads())
    except Exception as error:  # libraries raise anything
        raise PipelineError(f"{path}: {engine.words} cannot load it ({error}){anew}") from error
    return {**PRECISIONS, name: as_precision(name, session)}


def _version(name: str) -> str:
    return str(environment.versions((ENGINES[name].library,))[ENGINES[name].library])


def _sha256(path: Path) -> str:
    """Return a hash of a converted model: OpenVINO's weights lie beside its graph. Raises OSError."""
    return files.sha256_of({file.name: contents.sha256(file) for file in sorted(path.parent.glob(f"{path.stem}.*"))})
