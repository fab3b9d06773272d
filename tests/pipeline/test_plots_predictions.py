"""The figures of the predictions: which classes are confused, and what a confidence is worth."""

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure

from tests import predicted_quality as predicted
from utils.plots import calibration, confusion, style

ABOUT = style.Subject("a model, float32", "on a machine, texts, measured 2026-11-21", is_synthetic=False)


def first(figure: Figure) -> Axes:
    return figure.axes[0]


def drawn(figure: Figure) -> Axes:
    """Lay the figure out, where any warning is an error; return its first axes."""
    figure.draw_without_rendering()
    return figure.axes[0]


def named(labels) -> list[str]:
    return [label.get_text() for label in labels]


def cells(axes: Axes) -> dict[tuple[int, int], str]:
    places = {
        (text.get_position()[1], text.get_position()[0]): text.get_text() for text in axes.texts if text.get_text()
    }
    return {(int(line), int(column)): text for (line, column), text in places.items()}


@pytest.mark.parametrize("classes", [2, 6, confusion.SHOWN])
def test_few_classes_are_all_shown_in_their_order(classes):
    counts = predicted.random_counts(classes, 400)
    names = [f"class {number}" for number in range(classes)]
    axes = drawn(confusion.figure(counts, ABOUT, names))
    assert named(axes.get_yticklabels()) == named(axes.get_xticklabels()) == names
    assert cells(axes) == {
        (line, column): str(counts[line, column])
        for line in range(classes)
        for column in range(classes)
        if counts[line, column] or line == column
    }
    wrong = counts.sum() - np.trace(counts)
    assert axes.get_title(loc="left") == f"{classes} classes: {wrong} of 400 rows are predicted wrong"


@pytest.mark.parametrize("classes", [77, 1000])
def test_of_many_classes_the_most_confused_are_shown_and_the_title_says_so(classes):
    counts = predicted.random_counts(classes, 20 * classes)
    axes = drawn(confusion.figure(counts, ABOUT, [f"class {number}" for number in range(classes)]))
    names = named(axes.get_yticklabels())
    shown = [int(name.split()[1]) for name in names]
    assert len(set(shown)) == confusion.SHOWN and named(axes.get_xticklabels()) == [*names, confusion.OTHERS]
    together = counts + counts.T
    np.fill_diagonal(together, 0)
    assert set(np.unravel_index(together.argmax(), together.shape)) <= set(shown)
    inside = counts[np.ix_(shown, shown)]
    mistakes = [inside.sum() - np.trace(inside), counts.sum() - np.trace(counts)]
    assert axes.get_title(loc="left") == (
        f"The {confusion.SHOWN} most confused of {classes:,} classes: {mistakes[0]:,} of all {mistakes[1]:,} mistakes "
        "are among them"
    )


def test_counts_of_shown_classes_add_up_to_all_their_rows():
    counts = predicted.random_counts(77, 2000)
    shown = confusion.chosen(counts)
    part = confusion.with_others(counts, shown)
    assert part.shape == (confusion.SHOWN, confusion.SHOWN + 1)
    assert part.sum(axis=1).tolist() == counts.sum(axis=1)[shown].tolist()


def test_confused_classes_stand_side_by_side():
    counts = 10 * np.eye(40, dtype=int)
    pairs = [(3 * number, 3 * number + 20) for number in range(6)]
    for line, column in pairs:
        counts[line, column] = 5 + line
    shown = confusion.chosen(counts)
    assert len(shown) == confusion.SHOWN  # filled up with classes that nothing is taken for
    assert [abs(shown.index(line) - shown.index(column)) for line, column in pairs] == [1] * 6
    assert confusion.chosen(counts) == shown


def test_class_without_rows_is_said_and_zero_hits_are_drawn_as_zero():
    axes = first(confusion.figure(np.array([[0, 4, 0], [1, 2, 0], [0, 0, 0]]), ABOUT, "abc"))
    assert confusion.NO_ROWS in [text.get_text() for text in axes.texts]
    assert cells(axes)[0, 0] == "0" and cells(axes)[0, 1] == "4"
    drawn_cells = [mesh.get_array().reshape(3, 3) for mesh in axes.collections]
    assert all(mesh.mask[2].all() for mesh in drawn_cells)  # what is not drawn shows the grey behind it
    assert to_rgba(axes.get_facecolor()) == to_rgba(confusion.GREY)


def test_names_that_somebody_else_chose_are_drawn_as_they_are():
    names = ["$x^2$", "a very long name of a class that nobody can read to its end at all", "\u202eevil\n"]
    axes = drawn(confusion.figure(np.diag([1, 2, 3]), ABOUT, names))
    [formula, long, control] = named(axes.get_yticklabels())
    assert formula == "$x^2$" and len(long) == confusion.LONGEST_CLASS and control == "evil"


# Calibration


def test_every_bin_is_a_point_with_its_interval():
    found = predicted.reliability(3000, overconfident=0.1)
    axes = first(calibration.figure(found, ABOUT))
    [line] = [line for line in axes.get_lines() if line.get_label() == "bin, with its 95 % interval"]
    assert list(line.get_xdata()) == [each.mean_confidence for each in found.bins]
    assert list(line.get_ydata()) == [each.accuracy for each in found.bins]
    intervals = [collection.get_segments()[0][:, 1].tolist() for collection in axes.collections]
    assert intervals == [[each.accuracy_ci_low, each.accuracy_ci_high] for each in found.bins]
    assert axes.get_title(loc="left") == "Right predictions by confidence, 15 bins of equal mass"
    low, high = axes.get_ylim()
    assert low <= min(end for end, _ in intervals) and high >= 1


@pytest.mark.parametrize("rows", [1, 3000])
def test_bins_of_few_rows_are_hollow_and_no_others(rows):
    axes = drawn(calibration.figure(predicted.reliability(rows), ABOUT))
    [line] = [line for line in axes.get_lines() if line.get_label().startswith("bin")]
    assert line.get_label() == f"bin{' of few rows' if rows == 1 else ''}, with its 95 % interval"
    assert (line.get_markerfacecolor() == "white") == (rows == 1)


def test_distribution_has_all_predictions_right_ones_below_wrong_ones():
    found = predicted.reliability(500)
    axes = calibration.figure(found, ABOUT).axes[1]
    heights = [sum(bar.get_height() for bar in container) for container in axes.containers]
    assert heights == [sum(found.distribution.correct), 500 - sum(found.distribution.correct)]
    assert axes.get_title(loc="left") == "How sure it is: 500 predictions"
    assert [bar.get_hatch() for bar in axes.containers[1]][:1] == ["//"]  # not by colour alone
