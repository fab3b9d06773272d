"""What the predictions are like: which classes go wrong, whether confidence can be believed, the surest mistakes."""

from collections.abc import Sequence
from pathlib import Path

from boundby.formatting import NOTHING, clean
from utils.models import Calibration, ClassScore, ConfidentMistake, Quality
from utils.render import Block, BulletList, OrderedList, Paragraph, Table
from utils.report.figures import Content, Folded, show
from utils.report.pictures import calibration, confusion
from utils.report.sources import Missing, ReportData

CLASSES = "Classes and confusions"
SHOWN = 10
LONGEST_CLASS = 34  # characters
LONGEST_NAME, LONGEST_TEXT = 40, 200  # characters
BY_CHANCE = 1.5  # times the error by chance, from which an error is called one
NOTABLE = 0.02  # error below which nobody needs to act


def classes(data: ReportData) -> list[Content]:
    """Return, folded, the worst classes, the most confused pairs and the matrix."""
    quality = data.quality
    if isinstance(quality, Missing):
        why: list[Content] = [Paragraph(f"Not known: {quality.reason}.")] if data.is_scored else []
        return [Folded(CLASSES, [*why, show(data, confusion.figure, quality)])]
    picture = show(data, confusion.figure, quality.confusion, quality.names)
    worst, pairs = _worst(data, quality.record.classes), _pairs(data, quality)
    return [Folded(CLASSES, [Paragraph(_overview(quality.record.classes)), *worst, *pairs, picture])]


def _overview(scores: Sequence[ClassScore]) -> str:
    present = [score for score in scores if score.support]
    never = [clean(score.label_name, LONGEST_CLASS) for score in present if not score.predicted]
    flawless = sum(score.f1 == 1 for score in present)
    counted = f"All {len(scores):,}" if len(present) == len(scores) else f"{len(present):,} of {len(scores):,}"
    text = f"{counted} classes have rows; {f'{flawless:,}' if flawless else 'none'} of them without a mistake"
    if never:
        more = f" and {len(never) - SHOWN:,} more" if len(never) > SHOWN else ""
        text += f". Never predicted: {', '.join(never[:SHOWN])}{more}"
    return f"{text}."


def _worst(data: ReportData, scores: Sequence[ClassScore]) -> list[Block]:
    wrong = [score for score in scores if score.support and score.f1 < 1]
    worst = sorted(wrong, key=lambda score: (score.f1, -score.support, score.label))[:SHOWN]
    if not worst:
        return []
    rows = [
        [
            clean(score.label_name, LONGEST_CLASS),
            f"{score.support:,}",
            f"{score.predicted:,}",
            NOTHING if score.precision is None else f"{score.precision:.3f}",
            f"{score.recall:.3f}",
            f"{score.recall_ci_low:.2f} to {score.recall_ci_high:.2f}",
            f"{score.f1:.3f}",
        ]
        for score in worst
    ]
    notes = [f"{_file(data, data.layout.evaluated.per_class)} has all {len(scores):,} classes"]
    if any(score.precision is None for score in worst):
        notes.append(f"{NOTHING}: a class that is never predicted has no precision")
    headers = ["class", "rows", "pre-\ndicted", "preci-\nsion", "recall", "its 95 %\ninterval", "F1"]
    return [Table(headers, rows, left=[0], caption="The worst classes by F1", notes=notes)]


def _pairs(data: ReportData, quality: Quality) -> list[Block]:
    rows = [
        [
            clean(pair.label_name, LONGEST_CLASS),
            clean(pair.prediction_name, LONGEST_CLASS),
            f"{pair.rows:,}",
            f"{100 * pair.share:.1f}",
        ]
        for pair in quality.record.most_confused[:SHOWN]
    ]
    notes = [f"{_file(data, data.layout.evaluated.confusion_matrix)} has every pair"]
    headers = ["label", "predicted as", "rows", "% of the\nlabel's rows"]
    return [Table(headers, rows, left=[0, 1], caption="Most confused", notes=notes)] if rows else []


def _file(data: ReportData, path: Path) -> str:
    return f"{data.layout.evaluation.name}/{path.name}"


def confidence(data: ReportData) -> list[Content]:
    """Return, folded, what the confidence is worth, and the surest mistakes; nothing where that is not known."""
    quality = data.quality
    if isinstance(quality, Missing):
        return [Folded("", [show(data, calibration.figure, quality)])]
    measured = quality.record.calibration
    items = BulletList([_judgement(measured), _error(measured), *_usable(measured)])
    mistakes = _mistakes(data, quality.record.confident_mistakes)
    picture = show(data, calibration.figure, measured)
    return [Folded("Confidence, and the surest mistakes", [items, picture, *mistakes])]


def _judgement(measured: Calibration) -> str:
    """Return whether confidences are too high or too low, and what to do about it."""
    mean, low, high = measured.mean_confidence, measured.accuracy_ci_low, measured.accuracy_ci_high
    text = f"The model is right in {100 * measured.accuracy:.1f} % of the texts, and says {100 * mean:.1f} % on average"
    if low <= mean <= high:
        if measured.ece < max(NOTABLE, BY_CHANCE * measured.ece_by_chance):
            return f"{text}: the confidence can be taken for the chance of being right."
        return (
            f"{text}: right on the whole, but some confidences are too high and others too low (see the picture). A "
            "threshold can be used, a probability not be taken at its word."
        )
    return (
        f"{text}: it is {'overconfident' if mean > high else 'underconfident'}. Before a probability or a threshold is "
        "used, fit a temperature on other labelled texts and divide the logits by it: labels stay as they are."
    )


def _error(measured: Calibration) -> str:
    ece, chance, bins = measured.ece, measured.ece_by_chance, len(measured.bins)
    surely = "no more than chance explains" if ece < BY_CHANCE * chance else "more than chance explains"
    return (
        f"Expected calibration error: {ece:.4f} over {bins} bin{'s'[: bins != 1]} of equal mass, {surely}: a "
        f"perfectly calibrated model would show about {chance:.4f} on so many texts. Brier score: "
        f"{measured.brier_score:.4f} (0 is perfect; always saying 50 % gives 0.25)."
    )


def _usable(measured: Calibration) -> list[str]:
    """Return what share of the texts can be left to the model at which accuracy."""
    lines = []
    for threshold in measured.thresholds:
        goal = f"To be right in at least {100 * threshold.accuracy_at_least:.0f} %"
        if threshold.confidence is None:
            return [*lines, f"{goal}: no confidence is high enough to be sure of that."]
        start, share = f"{threshold.confidence:.3f}", 100 * threshold.share
        taken = f"take predictions from a confidence of {start} on, {share:.0f} % of the texts"
        taken = "take every prediction" if threshold.rows == measured.rows else taken
        ends = f"[{100 * threshold.accuracy_ci_low:.1f}, {100 * threshold.accuracy_ci_high:.1f}]"
        lines.append(f"{goal}: {taken}; {100 * threshold.accuracy:.1f} % {ends} are right.")
    return lines


def _mistakes(data: ReportData, mistakes: Sequence[ConfidentMistake]) -> list[Block]:
    if not mistakes:
        return []
    opening = "Read these first, since the label may be the wrong one"
    if len(mistakes) > SHOWN:
        opening += f"; {_file(data, data.layout.evaluated.confident_mistakes)} has {len(mistakes)}"
    entries = [[Paragraph(_described(mistake)), Paragraph(_quoted(mistake.text))] for mistake in mistakes[:SHOWN]]
    return [Paragraph(f"{opening}:", strong="The surest mistakes."), OrderedList(entries)]


def _described(mistake: ConfidentMistake) -> str:
    label, prediction = (clean(name, LONGEST_NAME) for name in (mistake.label_name, mistake.prediction_name))
    return f"Row {mistake.row_id}, {label}: predicted as {prediction} with {100 * mistake.confidence:.2f} %"


def _quoted(text: str) -> str:
    """Return the beginning of a text on one line."""
    line = clean(text, longest=len(text))
    return f'"{line}"' if len(line) <= LONGEST_TEXT else f'"{line[: LONGEST_TEXT - 3].rstrip()}..."'
