"""Compare the variants on the texts of the dataset, and leave what was found: JSON, a table, the texts that changed."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import cached_property

import numpy as np

from boundby import files
from boundby.bound import Doubt, Fix, Verdict
from boundby.formatting import Missing, known
from boundby.inference import MOST_CALIBRATION, ExactnessReport, compare_logits
from boundby.machine import busy_threads, pick_device, synchronizer
from boundby.timing import Timer, estimate
from boundby.work import Interval
from utils.baseline import OtherVersion, Recommended, Span, VariantRow, Variants, instruments, read_document
from utils.command import METRICS_VERSION, Layout, Run
from utils.data import DataReceipt, Rows
from utils.models import LoadedModel, ModelSource
from utils.models import loading as models
from utils.steps import steps
from utils.variants import operators, reasons, rounds, stock
from utils.variants.recommendation import Candidate, Recommendation, Tolerance, recommend, won_back_after
from utils.variants.rounds import Measured, Refusal
from utils.variants.ways import PACKED, REFERENCE, Variant, Way, Workshop, called, variants

SCHEMA_VERSION = 2
PROBE_TEXTS = 64
USUAL_BATCH_SIZE = 32  # of the texts as they come, where step 02 has found none
SECONDS_PER_HOUR = 3600
DTYPE = "float32"  # of the reference
TABLE = (
    "name", "words", "status", "reason", "texts_per_s", "texts_per_s_low", "texts_per_s_high", "gain", "gain_low",
    "gain_high", "latency_ms", "latency_ms_low", "latency_ms_high", "weight_mb", "extra_mb", "disk_mb", "one_off_s",
    "won_back_after_texts", "same_labels", "texts", "agreement_low", "agreement_high", "accuracy",
    "accuracy_difference", "accuracy_difference_low", "accuracy_difference_high", "base", "gain_over_base", "predicted",
    "tried", "million_s", "million_cost", "against", "attention_backend",
)  # fmt: skip
CHANGED = ("variant", "row_id", "label", "in_float32", "in_variant", "text")


@dataclass
class Comparison:
    """What step 05 has found; `sizes` are the texts of each round, `dataset_rows` all texts there are."""

    rows: Rows
    dataset_rows: int
    made: list[Measured] = field(default_factory=list)
    refused: dict[str, Refusal] = field(default_factory=dict)
    sizes: list[int] = field(default_factory=list)
    operators: dict[str, reasons.Operators] = field(default_factory=dict)
    doubts: list[str] = field(default_factory=list)

    @property
    def reference(self) -> Measured:
        """The texts as they come, in float32."""
        return next(timed for timed in self.made if timed.variant.name == REFERENCE)

    @cached_property
    def reports(self) -> dict[str, ExactnessReport]:
        """How the answers of each variant compare with those of the reference."""
        labels = None if self.rows.labels is None else self.rows.labels.tolist()
        own, is_all = np.concatenate(self.reference.logits), len(self.rows) == self.dataset_rows
        return {
            timed.variant.name: compare_logits(timed.variant.name, np.concatenate(timed.logits), own, labels, is_all)
            for timed in self.made
        }


def compare(run: Run, receipt: DataReceipt, source: ModelSource, rows: Rows, timer: Timer | None = None) -> Variants:
    """Measure all variants within `variants.max_seconds`, write what was found, and return it."""
    config, settings = run.config, run.config.variants
    device = pick_device(config.model.device)
    timer = timer or Timer(synchronize=synchronizer(device))
    start = timer.clock()
    deadline = start + settings.max_seconds
    models.use_matmul_precision("highest")
    loaded = models.load(source, device, DTYPE, trust_remote_code=run.args.trust_remote_code)
    max_length, _ = models.effective_max_length(loaded, config.profiling.max_length)
    verdict, batch_size = _baseline(run.layout)
    chosen = batch_size or USUAL_BATCH_SIZE
    probe = _spread(rows.texts, PROBE_TEXTS)
    lengths = np.array([len(text) for text in rows.texts])
    shop = Workshop(
        loaded,
        max_length,
        chosen,
        probe,
        timer.clock,
        run.args.trust_remote_code,
        by_length=sorted((rows.texts[row] for row in rounds.usual_part(lengths)), key=len),
        calibration=_spread(rows.texts, MOST_CALIBRATION),
        folder=run.layout.engines,
    )
    own = steps.measured_dtype(config, run.layout)
    own = own or models.choose_dtype(config.model.dtype, source.path, device).dtype
    listed = as_compared(variants(device, settings, stock.variants(device)), own)
    try:
        with run.progress(len(listed), "make the variants") as progress:
            made, refused = rounds.make(
                listed, shop, timer, deadline, lambda text: progress.advance(1, text), steps.given_up("05", run.layout)
            )
        comparison = Comparison(rows, receipt.rows, made, refused)
        comparison.doubts += [str(Doubt("disturbed", text)) for text in shop.doubts]
        comparison.operators = operators.replay(made, shop.pack(), len(probe), timer, device, deadline)
        left, most = deadline - timer.clock(), settings.rows or len(rows)
        parts = rounds.parts_of(lengths, made, len(probe), left, most)
        _measure(run, comparison, parts, timer, deadline)
    finally:
        shop.close()
    document = _document(run, shop, comparison, listed, verdict)
    document["seconds"] = timer.clock() - start
    files.write_csv(run.layout.changed_labels, _changed(comparison, loaded), CHANGED)
    files.write_csv(
        run.layout.variants_table, [_flat(row, document["batch_size"] == 1) for row in document["variants"]], TABLE
    )
    files.write_json(run.layout.variants, document)
    for refusal in comparison.refused.values():
        if refusal.lost:
            raise refusal.lost
    return document


def as_compared(listed: Sequence[Variant], own: str) -> list[Variant]:
    """Return the variants with settings that run them as they are compared: in float32, where `own` is not that."""
    if own == DTYPE:
        return list(listed)
    return [
        variant
        if variant.settings is None or any(setting.startswith("model.dtype=") for setting in variant.settings)
        else replace(variant, settings=(f"model.dtype={DTYPE}", *variant.settings))
        for variant in listed
    ]


def _spread(texts: Sequence[str], number: int) -> list[str]:
    """Return texts spread over the lengths of all, the shortest and the longest among them."""
    by_length = sorted(texts, key=len)
    indexes = np.unique(np.linspace(0, len(by_length) - 1, min(number, len(by_length))).round().astype(int))
    return [by_length[index] for index in np.random.default_rng(0).permutation(indexes).tolist()]


def _baseline(layout: Layout) -> tuple[Verdict | None, int | None]:
    """Return the verdict of the batch size that step 02 recommends, and that size."""
    try:
        document = read_document(layout.metrics, METRICS_VERSION)
    except (OSError, ValueError, OtherVersion):
        return None, None
    size = document.get("optimal", {}).get("batch_size")
    row = next((row for row in document["batch_sizes"] if row["batch_size"] == size), None)
    return (row.get("verdict") if row else None), size


def _measure(run: Run, comparison: Comparison, parts: Sequence[np.ndarray], timer: Timer, deadline: float) -> None:
    """Let the variants take turns, and note what else used the machine meanwhile."""
    texts = [[comparison.rows.texts[position] for position in part] for part in parts]
    device = pick_device(run.config.model.device)
    watch = instruments.watch(device).start()
    with run.progress(None, "compare the variants") as progress:

        def on_round(number: int) -> None:
            progress.advance(1, f"round {number}")

        made, refused, taken = rounds.take_turns(comparison.made, texts, timer, deadline, on_round)
    seen = watch.stop().disturbances(busy_threads(device))
    comparison.doubts += [str(Doubt("disturbed", disturbance.text)) for disturbance in seen if disturbance.is_passing]
    comparison.made, comparison.sizes = made, [len(parts[part]) for part in taken]
    comparison.refused |= refused
    comparison.rows = comparison.rows.take(np.concatenate(parts[: len(set(taken))]))


def _document(
    run: Run, shop: Workshop, comparison: Comparison, listed: Sequence[Variant], verdict: Verdict | None
) -> Variants:
    settings, price = run.config.variants, run.config.pod.price_per_hour
    measured = {timed.variant.name: _row(timed, comparison, verdict) for timed in comparison.made}
    candidates = [_candidate(timed, comparison) for timed in comparison.made]
    own = next((timed.way for timed in comparison.made if timed.variant.name == PACKED), None)
    factors = {(a.variant.name, b.variant.name): a.over(b) for a in comparison.made for b in comparison.made}
    chosen = recommend(candidates, factors, Tolerance(settings.min_agreement, settings.max_accuracy_drop))
    for candidate in candidates:
        row = measured[candidate.name]
        row["against"], row["million_s"] = chosen.against.get(candidate.name), candidate.million_s
        row["million_cost"] = None if price is None else candidate.million_s / SECONDS_PER_HOUR * price
    return {
        "schema_version": SCHEMA_VERSION,
        "written": datetime.now(UTC).isoformat(timespec="seconds"),
        "model_fingerprint": shop.loaded.source.fingerprint,
        "dtype": DTYPE,
        "device": shop.loaded.device.type,
        "threads": rounds.threads(),
        "batch_size": shop.batch_size,
        "texts": len(comparison.rows),
        "dataset_rows": comparison.dataset_rows,
        "rounds": len(comparison.sizes),
        "seconds": 0.0,
        "min_agreement": settings.min_agreement,
        "max_accuracy_drop": settings.max_accuracy_drop,
        "variants": [
            measured.get(variant.name) or _refused(variant, own, comparison.refused[variant.name]) for variant in listed
        ],
        "recommended": _as_recommended(chosen, listed, measured),
        "doubts": comparison.doubts,
    }


def _row(timed: Measured, comparison: Comparison, verdict: Verdict | None) -> VariantRow:
    """Return what is known of one variant but for what the rule says of it."""
    variant, reference = timed.variant, comparison.reference
    base = next((other for other in comparison.made if other.variant.name == variant.base), None)
    report = comparison.reports[variant.name]
    speed = timed.texts_per_s(comparison.sizes)
    predicted, at_most, tried = _foretold(variant.fix, verdict)
    return {
        "name": variant.name,
        "words": called(variant, timed.way),
        "status": "measured",
        "fix": variant.fix and variant.fix.as_dict(),
        "how": timed.way.how,
        "is_padded": timed.way.is_padded,
        "base": variant.base,
        "texts_per_s": _span(speed),
        "gain": _span(timed.over(reference)),
        "gain_over_base": _span(timed.over(base)) if base else None,
        "predicted": predicted,
        "at_most": at_most,
        "tried": tried,
        "latency_ms": _span(Interval.of(estimate(timed.single_s)).times(1e3)),
        "weight_bytes": timed.way.weight_bytes,
        "disk_bytes": timed.way.disk_bytes,
        "extra_bytes": timed.extra_bytes,
        "one_off_s": timed.one_off_s,
        "won_back_after_texts": won_back_after(
            timed.one_off_s, speed.value, reference.texts_per_s(comparison.sizes).value
        ),
        "exactness": report.as_dict(),  # type: ignore[typeddict-item]
        "changed": report.rows - report.same_labels,
        "operators": reasons.beside(
            comparison.operators.get(variant.base or ""), comparison.operators.get(variant.name)
        ),
        "attention_backend": known(timed.attention),
        "attention_backend_reason": timed.attention.reason if isinstance(timed.attention, Missing) else None,
        "program": list(timed.way.program),
        "runs_here": variant.settings is not None,
        "against": None,
    }


def _foretold(fix: Fix | None, verdict: Verdict | None) -> tuple[Span | None, float | None, Span | None]:
    """Return what step 02 predicted of a fix, its bound, and what came where it was tried, all of one batch."""
    if fix is None or verdict is None:
        return None, None, None
    if trial := next((trial for trial in verdict.trials if trial.fix == fix), None):
        return trial.predicted and _span(trial.predicted), trial.at_most, _span(trial.measured)
    gain = next((gain for gain in verdict.gains if gain.fix == fix), None)
    return (gain.predicted and _span(gain.predicted), gain.at_most, None) if gain else (None, None, None)


def _candidate(timed: Measured, comparison: Comparison) -> Candidate:
    return Candidate(
        timed.variant.name,
        timed.texts_per_s(comparison.sizes).value,
        timed.one_off_s,
        comparison.reports[timed.variant.name],
        timed.variant.kind,
        timed.variant.settings is not None or bool(timed.way.program),
    )


def _as_recommended(
    chosen: Recommendation, listed: Sequence[Variant], measured: Mapping[str, VariantRow]
) -> Recommended:
    variant = next((entry for entry in listed if entry.name == chosen.name), None)
    if variant is None:
        return {
            "name": None,
            "settings": [],
            "environment": {},
            "program": [],
            "reason": "no variant that the pipeline or a program of yours can run keeps as much as was asked for",
        }
    return {
        "name": variant.name,
        "settings": list(variant.settings or ()),
        "environment": dict(variant.environment),
        "program": measured[variant.name]["program"],
        "reason": None,
    }


def _refused(variant: Variant, own: Way | None, refusal: Refusal) -> VariantRow:
    return {
        "name": variant.name,
        "words": called(variant, own),
        "status": "refused",
        "why": refusal.why,
        "reason": refusal.text,
    }


def _changed(comparison: Comparison, loaded: LoadedModel) -> Iterator[dict[str, object]]:
    """Yield the texts to which a variant gives another label than the reference does."""
    names = loaded.model.config.id2label
    own = np.concatenate(comparison.reference.logits).argmax(axis=1)
    for timed in comparison.made:
        theirs = np.concatenate(timed.logits).argmax(axis=1)
        for row in np.flatnonzero(own != theirs).tolist():
            label = None if comparison.rows.labels is None else names[int(comparison.rows.labels[row])]
            yield {
                "variant": timed.variant.name,
                "row_id": int(comparison.rows.row_ids[row]),
                "label": label,
                "in_float32": names[int(own[row])],
                "in_variant": names[int(theirs[row])],
                "text": comparison.rows.texts[row],
            }


def _span(interval: Interval) -> Span:
    return {"value": interval.value, "low": interval.low, "high": interval.high}


def _flat(row: VariantRow, is_alone: bool) -> dict[str, object]:
    """Return the row of the table for spreadsheets."""
    reason = {"reason": reasons.sentence(row, is_alone)} if row["status"] == "measured" else {}
    flat: dict[str, object] = dict(row) | reason
    for name in ("texts_per_s", "gain", "latency_ms", "gain_over_base", "predicted", "tried"):
        span = row.get(name)
        if span:
            flat |= {name: span["value"], f"{name}_low": span["low"], f"{name}_high": span["high"]}  # type: ignore[index]
    exactness = row.get("exactness")
    if exactness:
        flat |= {**exactness, "texts": exactness["rows"]}
        flat |= {f"{name}_mb": None if (size := row[f"{name}_bytes"]) is None else size / 1e6  # type: ignore[literal-required]
                 for name in ("weight", "extra", "disk")}  # fmt: skip
    return flat
