"""What the predictions are like: which classes go wrong, whether confidence can be believed, the surest mistakes."""

from collections.abc import Sequence

from boundby.formatting import NOTHING, clean, listed
from utils.models import Calibration, ClassScore, ConfidentMistake, Quality, Threshold
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
    return [Folded(CLASSES, [Paragraph(_overview(quality)), *worst, *pairs, picture])]


def _overview(quality: Quality) -> str:
    every, present = quality.record.classes, [row for row in quality.record.classes if row.support]
    never = [row for row in present if not row.predicted]
    flawless = sum(row.f1 == 1 for row in present)
    counted = f"All {len(every):,}" if len(present) == len(every) else f"{len(present):,} of {len(every):,}"
    said = f"{counted} classes have rows; {f'{flawless:,}' if flawless else 'none'} of them without a mistake"
    if never:
        names = ", ".join(clean(row.label_name, LONGEST_CLASS) for row in never[:SHOWN])
        more = f" and {len(never) - SHOWN:,} more" if len(never) > SHOWN else ""
        said += f". Never predicted: {names}{more}"
    return f"{said}."


def _worst(data: ReportData, classes: Sequence[ClassScore]) -> list[Block]:
    ranked = sorted(
        (each for each in classes if each.support and each.f1 < 1),
        key=lambda each: (each.f1, -each.support, each.label),
    )
    if not ranked:
        return []
    rows = [
        [
            clean(each.label_name, LONGEST_CLASS),
            f"{each.support:,}",
            f"{each.predicted:,}",
            _share(each.precision),
            _share(each.recall),
            f"{each.recall_ci_low:.2f} to {each.recall_ci_high:.2f}",
            _share(each.f1),
        ]
        for each in ranked[:SHOWN]
    ]
    notes = [f"{_file(data, data.layout.evaluated.per_class.name)} has all {len(classes):,} classes"]
    if any(each.precision is None for each in ranked[:SHOWN]):
        notes.append(f"{NOTHING}: a class that is never predicted has no precision")
    headers = ["class", "rows", "pre-\ndicted", "preci-\nsion", "recall", "its 95 %\ninterval", "F1"]
    return [Table(headers, rows, left=[0], caption="The worst classes by F1", notes=notes)]


def _pairs(data: ReportData, quality: Quality) -> list[Block]:
    if not quality.record.most_confused:
        return []
    rows = [
        [
            clean(each.label_name, LONGEST_CLASS),
            clean(each.prediction_name, LONGEST_CLASS),
            f"{each.rows:,}",
            f"{100 * each.share:.1f}",
        ]
        for each in quality.record.most_confused[:SHOWN]
    ]
    notes = [f"{_file(data, data.layout.evaluated.confusion_matrix.name)} has every pair"]
    headers = ["label", "predicted as", "rows", "% of the\nlabel's rows"]
    return [Table(headers, rows, left=[0, 1], caption="Most confused", notes=notes)]


def _share(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.3f}"


def _file(data: ReportData, name: str) -> str:
    return f"{data.layout.evaluation.name}/{name}"


def confidence(data: ReportData) -> list[Content]:
    """Return, folded, what the confidence is worth, and the surest mistakes; nothing where that is not known."""
    quality = data.quality
    if isinstance(quality, Missing):
        return [Folded("", [show(data, calibration.figure, quality)])]
    found = quality.record.calibration
    said = BulletList([_judgement(found), _error(found), *_usable(found), *_few(found)])
    mistakes = _mistakes(data, quality.record.confident_mistakes)
    return [Folded("Confidence, and the surest mistakes", [said, show(data, calibration.figure, found), *mistakes])]


def _judgement(calibration: Calibration) -> str:
    """Return whether confidences are too high or too low, and what to do about it."""
    mean = calibration.mean_confidence
    right = f"{100 * calibration.accuracy:.1f} %"
    said = f"The model is right in {right} of the texts, and says {100 * mean:.1f} % on average"
    low, high = calibration.accuracy_ci_low, calibration.accuracy_ci_high
    is_seen = calibration.ece >= max(NOTABLE, BY_CHANCE * calibration.ece_by_chance)
    if low <= mean <= high and not is_seen:
        return f"{said}: the confidence can be taken for the chance of being right."
    fix = (
        "Before a probability or a threshold is used, fit a temperature on other labelled texts and divide the logits "
        "by it: labels stay as they are."
    )
    if mean > high:
        return f"{said}: it is overconfident. {fix}"
    if mean < low:
        return f"{said}: it is underconfident. {fix}"
    return (
        f"{said}: right on the whole, but some confidences are too high and others too low (see the picture). A "
        "threshold can be used, a probability not be taken at its word."
    )


def _error(calibration: Calibration) -> str:
    ece, chance = calibration.ece, calibration.ece_by_chance
    surely = "no more than chance explains" if ece < BY_CHANCE * chance else "more than chance explains"
    return (
        f"Expected calibration error: {ece:.4f} over {_bins(len(calibration.bins))} of equal mass, {surely}: a "
        f"perfectly calibrated model would show about {chance:.4f} on so many texts. Brier score: "
        f"{calibration.brier_score:.4f} (0 is perfect; always saying 50 % gives 0.25)."
    )


def _usable(calibration: Calibration) -> list[str]:
    """Return what share of the texts can be left to the model at which accuracy."""
    found = []
    for each in calibration.thresholds:
        goal = f"{100 * each.accuracy_at_least:.0f} %"
        if each.confidence is None:
            missed = goal
            found.append(f"To be right in at least {missed}: no confidence is high enough to be sure of that.")
            break
        ends = f"[{100 * each.accuracy_ci_low:.1f}, {100 * each.accuracy_ci_high:.1f}]"
        where = "take every prediction" if each.rows == calibration.rows else _taken(each)
        found.append(f"To be right in at least {goal}: {where}; {100 * each.accuracy:.1f} % {ends} are right.")
    return found


def _taken(threshold: Threshold) -> str:
    share = 100 * threshold.share
    return f"take predictions from a confidence of {threshold.confidence:.3f} on, {share:.0f} % of the texts"


def _few(calibration: Calibration) -> list[str]:
    few = [each for each in calibration.bins if each.has_few_rows]
    if not few:
        return []
    rows = listed([f"{each.rows:,}" for each in few])
    return [f"{_bins(len(few))} of {len(calibration.bins)} with few rows ({rows}): these figures say little."]


def _bins(count: int) -> str:
    return f"{count} bin" if count == 1 else f"{count} bins"


def _mistakes(data: ReportData, mistakes: Sequence[ConfidentMistake]) -> list[Block]:
    if not mistakes:
        return []
    file = f"{data.layout.evaluation.name}/{data.layout.evaluated.confident_mistakes.name}"
    opening = "Read these first, since the label may be the wrong one"
    if len(mistakes) > SHOWN:
        opening += f"; {file} has {len(mistakes)}"
    return [
        Paragraph(f"{opening}:", strong="The surest mistakes."),
        OrderedList([[Paragraph(_described(each)), Paragraph(_quoted(each.text))] for each in mistakes[:SHOWN]]),
    ]


def _described(mistake: ConfidentMistake) -> str:
    label, prediction = (clean(name, LONGEST_NAME) for name in (mistake.label_name, mistake.prediction_name))
    return f"Row {mistake.row_id}, {label}: predicted as {prediction} with {100 * mistake.confidence:.2f} %"


def _quoted(text: str) -> str:
    """Return the beginning of a text on one line."""
    line = clean(text, longest=len(text))
    return f'"{line}"' if len(line) <= LONGEST_TEXT else f'"{line[: LONGEST_TEXT - 3].rstrip()}..."'
