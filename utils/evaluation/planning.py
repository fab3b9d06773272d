"""Make the plan of an evaluation: what it is about, and the choices that are measured once and then hold."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from boundby import files
from boundby.cli import PACKAGE, PIPELINE
from boundby.formatting import Missing
from boundby.inference import (
    PRECISIONS,
    SAMPLE_ROWS,
    ExactnessReport,
    PrecisionRule,
    Predictor,
    PredictorOptions,
    Sample,
    choose_precision,
    same_guard,
    tokenize,
)
from boundby.machine import arithmetic, environment, is_gpu, multiplies_in, pick_device, runtime, torch_build
from utils.command import InputError
from utils.data import DataReceipt, Rows
from utils.evaluation import engines, rows, tuning
from utils.evaluation.engines import Shelf
from utils.evaluation.plan import BATCHING, Budget, Choices, Compilation, Identity, Places, Plan, Reasons
from utils.evaluation.tuning import Known, Load
from utils.models import (
    LoadedModel,
    ModelSource,
    effective_max_length,
    has_room_for_float32,
    hashes,
    model_files,
    tasks,
    weight_files,
)
from utils.settings import AUTO, Config

SAMPLE_SEED = 0
# Rows per shard, which is what a kill costs at most. It depends on nothing but the device: workers come and go.
SHARD_ROWS = {"cpu": 1024, "cuda": 16384}
CODE = (  # of a prediction
    "boundby/inference",
    "boundby/machine/device.py",
    "utils/evaluation",
    "utils/models/tasks",
    "utils/models/loading.py",
    "utils/data",
)
CHECK_TEXTS = 256  # the texts of the self-check: any worker finds the same ones
CHECK_EXTREMES = 16  # shortest and longest rows of all among them, in tokens
PASSES = 11  # over the sample that choosing a precision takes, text by text and in batches


@dataclass(frozen=True)
class _Chosen:
    """Options of the predictor, why they are so, and how far its labels are from those of float32 one by one."""

    options: PredictorOptions
    reason: str
    report: ExactnessReport | None = None
    doubts: tuple[str, ...] = ()
    sample: Sample | None = None  # with its reference, where it was measured
    labels_doubt: str | None = None


def identity(config: Config, receipt: DataReceipt, source: ModelSource) -> Identity:
    """Return what the settings, the data and the model on disk ask to be evaluated."""
    device = pick_device(config.model.device)
    size, seed = sample(config, receipt.rows)
    model_sha256, tokenizer_sha256 = model_hashes(source.path)
    return Identity(
        task=source.task,
        rows=size,
        dataset_rows=receipt.rows,
        dataset_sha256=receipt.dataset.sha256,
        sample_seed=seed,
        model_fingerprint=source.fingerprint,
        model_sha256=model_sha256,
        tokenizer_sha256=tokenizer_sha256,
        labels=tuple(receipt.statistics.counts),
        dtype=config.model.dtype,
        matmul_precision=config.model.matmul_precision,
        max_length=config.profiling.max_length,
        precision=config.evaluation.precision,
        min_agreement=config.evaluation.min_agreement,
        token_budget=config.evaluation.token_budget,
        compile=config.evaluation.compile,
        **machine(device),
    )


def machine(device: torch.device) -> dict[str, Any]:
    """Return the fields of an identity that tell of this machine: who predicts must have those of who planned."""
    return {
        "device": device.type,
        "device_name": device_name(device),
        "arithmetic": arithmetic(device),
        "versions": versions(),
    }


def versions() -> dict[str, str | None]:
    """Return the versions of what computes or may, a hash of our code that does, and what changes digits."""
    return {
        **environment.versions(environment.COMPUTING),
        "torch_build": torch_build(),
        "libc": environment.libc(),
        "boundby_code": _code_sha256(),
        **environment.numerics(),
    }


@functools.cache  # as it was when this process began: what it has imported stays as it is
def _code_sha256() -> str:
    homes = {"boundby": PACKAGE.parent, "utils": PIPELINE}
    folders = [homes[name.partition("/")[0]] / name for name in CODE]
    sources = [path for folder in folders for path in ([folder] if folder.suffix else sorted(folder.rglob("*.py")))]
    return files.sha256_of({str(path.relative_to(PACKAGE.parent)): files.sha256(path) for path in sources})


def require_planned_model(made: Plan, folder: Path) -> None:
    """Raise InputError unless `folder` holds just the model and tokenizer that were planned."""
    if model_hashes(folder) != (made.identity.model_sha256, made.identity.tokenizer_sha256):
        raise InputError(
            f"{folder}: holds another model or tokenizer than was planned; bring that one here, or plan anew"
        )


def model_hashes(folder: Path) -> tuple[str, str]:
    """Return a hash of the model's weights and code, and one of its tokenizer and other settings."""
    weights = weight_files(folder)
    others = [path for path in model_files(folder) if path not in weights]
    return files.sha256_of(hashes(folder, weights)), files.sha256_of(hashes(folder, others))


def device_name(device: torch.device) -> str:
    """Return which processor computes on `device`."""
    return str(runtime(device).get_device_name(device)) if is_gpu(device) else environment.machine()["cpu"]


def make(
    wanted: Identity, dataset: Path, loaded: LoadedModel, workers: int, shelf: Shelf, known: Known | None = None
) -> Plan:
    """Return a plan for `wanted`: one pass over the dataset, and short measurements where they are predicted to pay.

    Predictions rest on what is `known`. The model of an engine is written to `shelf`.
    """
    max_length, _ = effective_max_length(loaded, wanted.max_length)
    extremes = rows.Extremes(CHECK_EXTREMES, lambda texts: tokenize(loaded.tokenizer, texts, max_length).lengths)
    shards = tuple(rows.split(dataset, wanted, SHARD_ROWS[wanted.device], extremes))
    rows.require_planned(dataset, wanted)
    planner = _Planner(
        wanted,
        loaded,
        rows.first_rows(dataset, shards, SAMPLE_ROWS),
        rows.first_texts(dataset, shards, tuning.SAMPLE_ROWS),
        rows.check_texts(dataset, shards, extremes.offsets, CHECK_TEXTS),
        known or Known(),
    )
    predictor = planner.predictor(PredictorOptions(max_length, _precision_of(loaded), wanted.token_budget))
    load = planner.load(predictor, extremes.tokens)
    chosen = planner.precision(predictor, load)
    if replace(chosen.options, guard_margin=0.0) != predictor.options:
        predictor = planner.predictor(chosen.options)
        load = planner.load(predictor, extremes.tokens)  # what the rest of the plan costs and saves is in this one
    engine = planner.engine(predictor, chosen, load.shared(workers), shelf)
    if engine and engine.predictor and engine.report:
        predictor = engine.predictor
        chosen = replace(chosen, options=predictor.options, report=engine.report)
        load = planner.load(predictor, extremes.tokens)
    budget = planner.budget(predictor, load)
    predictor = predictor.with_token_budget(budget.token_budget)
    compiled = Compilation(False, "not compiled: a converted model computes")
    if not (engine and engine.predictor):
        compiled = planner.compilation(predictor, load.shared(workers))
    choices = Choices(
        token_budget=budget.token_budget,
        batching=BATCHING,
        strategy=predictor.strategy,
        packs=predictor.options.packs,
        trim=predictor.trim,
        compile=compiled.on,
        max_length=max_length,
        precision=chosen.options.precision,
        model_dtype=loaded.dtype,
        dtype=predictor.dtype,
        guard_margin=compiled.guard(planner.guard(predictor, chosen)),
        threads_per_worker=max(1, torch.get_num_threads() // workers),
        converted=engine.converted if engine else None,
    )
    file = engine.file if engine else None
    places = Places(
        str(dataset.absolute()),
        str(loaded.source.path.absolute()),
        loaded.source.name,
        str(file.absolute()) if file else None,
    )
    reasons = Reasons(
        precision=chosen.reason,
        exactness=chosen.report.as_dict() if chosen.report else None,
        precision_doubts=list(chosen.doubts),
        token_budget=budget,
        compile=compiled,
        strategy_doubts=list(predictor.doubts),
        engine=engine.record if engine else None,
        labels_doubt=chosen.labels_doubt,
    )
    return Plan(wanted, choices, shards, places, reasons, check_offsets=extremes.offsets)


def rule_of(precision: str, min_agreement: float) -> PrecisionRule:
    """Return the rule that `evaluation.precision` stands for."""
    return PrecisionRule("same" if precision == "same" else "fastest", min_agreement, precision == "guarded")


def sample(config: Config, dataset_rows: int) -> tuple[int, int | None]:
    """Return how many rows are evaluated, and the seed of their sample, None when it is every row."""
    subsets = config.dataset.sample_sizes
    size = min(config.evaluation.limit or dataset_rows, max(subsets or [dataset_rows]), dataset_rows)
    return size, SAMPLE_SEED if subsets or size < dataset_rows else None


def _precision_of(loaded: LoadedModel) -> str:
    """Return the precision of a model as it is held; float16 is computed in float32 where a device only emulates it."""
    is_emulated = loaded.dtype == "float16" and not multiplies_in(loaded.device, loaded.dtype)
    return "float32" if is_emulated else loaded.dtype


@dataclass(frozen=True)
class _Planner:
    """Makes the choices of one plan, with texts from all over the dataset: some to measure on, some to check with."""

    wanted: Identity
    loaded: LoadedModel
    sample: Rows
    texts: Sequence[str]
    check_texts: Sequence[str]
    known: Known

    def predictor(self, options: PredictorOptions) -> Predictor:
        """Return a predictor with these options, checked as each worker checks its own."""
        return Predictor(self.loaded.model, self.loaded.tokenizer, options, self.check_texts)

    def load(self, predictor: Predictor, tokens: int) -> Load:
        """Return the work of all texts in this predictor."""
        return Load(tokens, tuning.seconds_per_token(predictor, self.texts))

    def precision(self, predictor: Predictor, load: Load) -> _Chosen:
        """Return the precision that the settings allow, measured where they ask for it or that is predicted to pay.

        `same` stays with the model's precision, that of `predictor`, or takes faster kernels of float32.
        """
        wanted, options = self.wanted, predictor.options
        if not tasks.of(wanted.task).HAS_PREDICTED_LABELS:
            return _unmeasured(options, f"no labels are predicted by model.task={wanted.task}")
        if wanted.precision == "same" and options.precision != "float32":
            if wanted.dtype == AUTO:
                return self._held_against_float32(predictor)
            return _unmeasured(options, f"evaluation.precision=same computes in model.dtype={wanted.dtype}")
        texts = self.sample.texts
        cost_s = PASSES * load.seconds * len(texts) / wanted.rows
        if is_gpu(predictor.device):  # one text after another is bound by launch there, and far longer than in batches
            cost_s += len(texts) * tuning.seconds_alone(self.loaded.model, predictor, texts)
        if wanted.precision == "same" and (reason := self._does_not_pay(load, cost_s)):
            guard = same_guard(predictor.check.max_abs_difference, predictor.check.largest_logit)
            return _unmeasured(replace(options, guard_margin=guard), reason)
        measured = self._measured()
        rule = rule_of(wanted.precision, wanted.min_agreement)
        choice = choose_precision(self.loaded.model, self.loaded.tokenizer, measured, rule, options)
        reason = f"the fastest on {len(texts)} texts that evaluation.precision={wanted.precision} allows"
        measured = replace(measured, reference=choice.reference)
        return _Chosen(choice.options, reason, choice.report, choice.reasons, measured)

    def _does_not_pay(self, load: Load, cost_s: float) -> str | None:
        """Return why faster kernels of float32 are not tried at this cost; None where that is predicted to pay."""
        if load.seconds <= cost_s:
            return f"that would take about {cost_s:.0f} s, all texts about {load.seconds:.0f} s"
        saved = tuning.saved_by_kernels(self.loaded.model, self.loaded.device, load, self.known.limits())
        if isinstance(saved, Missing):
            return saved.reason
        if saved.value > cost_s:
            return None
        ends = f"{saved.value:.0f} s [{saved.low:.0f}, {saved.high:.0f}]"
        return f"that would take about {cost_s:.0f} s, and is predicted to save {ends} of {load.seconds:.0f} s"

    def _held_against_float32(self, predictor: Predictor) -> _Chosen:
        """Return the half precision of the model, as far as it keeps the labels of float32, else float32.

        What agrees too seldom has near ties computed again in float32, if that is enough. The reference is computed in
        batches: a GPU that gets one text at a time waits for its launches.
        """
        loaded, own = self.loaded, predictor.options.precision
        if not has_room_for_float32(loaded):
            doubt = f"labels in {own} were not held against float32, for which there is no memory beside it"
            return replace(_unmeasured(predictor.options, doubt), labels_doubt=doubt)
        exact = predictor.exact
        measured = replace(self._measured(), reference=exact.predict(self.sample.texts).logits)
        rule = rule_of("fastest", self.wanted.min_agreement)
        try:
            choice = choose_precision(
                loaded.model, loaded.tokenizer, measured, rule, predictor.options, precisions=[PRECISIONS[own]]
            )
        except ValueError as error:
            options = replace(exact.options, token_budget=predictor.options.token_budget)
            doubt = f"the whole dataset is computed in float32, by model.dtype=auto: {error}"
            return _Chosen(options, doubt, labels_doubt=doubt)
        reason = f"{own} by model.dtype=auto, held against float32 on {len(self.sample.texts)} texts"
        return _Chosen(choice.options, reason, choice.report, choice.reasons)

    def _measured(self) -> Sample:
        """Return the sample that precisions are measured on."""
        rows = self.sample
        labels = None if rows.labels is None else rows.labels.tolist()
        return Sample(rows.texts, labels, is_all=len(rows.texts) == self.wanted.rows, check_texts=self.check_texts)

    def engine(self, own: Predictor, chosen: _Chosen, load: Load, shelf: Shelf) -> engines.Chosen | None:
        """Return the engine that computes in place of `own`, or why none does; None where none may."""
        if self.wanted.precision == "same" or chosen.sample is None or self.wanted.compile == "on":
            return None
        rule = rule_of(self.wanted.precision, self.wanted.min_agreement)
        return engines.choose(own, self.loaded, chosen.sample, rule, load.seconds, shelf)

    def guard(self, predictor: Predictor, chosen: _Chosen) -> float:
        """Return the margin below which a row is computed again: the chosen one, widened for full batches."""
        margin = chosen.options.guard_margin
        if not margin:
            return margin
        seen = chosen.report.max_abs_logit_difference if chosen.report else 0.0

        def widened(difference: float, _largest: float) -> float:
            return margin * difference / seen if seen else 2 * difference

        is_exact = self.wanted.precision == "same" and PRECISIONS[chosen.options.precision].keeps_weights
        rule = same_guard if is_exact else widened
        return max(margin, tuning.guard_in_full_batches(predictor, self.loaded.model, self.texts, rule))

    def budget(self, predictor: Predictor, load: Load) -> Budget:
        """Return the tokens per batch."""
        if self.wanted.token_budget is not None:
            return Budget(self.wanted.token_budget, "evaluation.token_budget")
        return tuning.choose_budget(predictor, self.texts, load)

    def compilation(self, predictor: Predictor, load: Load) -> Compilation:
        """Return whether the layers are compiled; `load` is a worker's share."""
        lengths = predictor.tokenize(self.texts).lengths
        measured = self.texts[: int(np.searchsorted(np.cumsum(lengths), tuning.MEASURED_TOKENS)) + 1]

        def compiled() -> Predictor:
            return self.predictor(replace(predictor.options, compile=True))

        foreseen = functools.partial(tuning.saved_by_compiling, predictor, self.loaded.model, load, self.known)
        return tuning.choose_compilation(self.wanted.compile, predictor, compiled, measured, load, foreseen)


def _unmeasured(options: PredictorOptions, reason: str) -> _Chosen:
    return _Chosen(options, f"not measured: {reason}")
