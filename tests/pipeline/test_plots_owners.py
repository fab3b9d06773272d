"""The picture of owners: bars that are as long as the shares, padding hatched, nothing without owners."""

import pytest

from tests import baseline_document as results
from tests.diagnosed_rows import diagnosed
from tests.report_reading import answered
from utils.plots import owners, style


def test_bars_are_the_shares_of_the_owners_with_padding_hatched_at_their_ends():
    document = results.document(answered(diagnosed(results.cpu_rows([1, 8]))))
    figure = owners.figure(document["batch_sizes"], style.subject(document))
    figure.draw_without_rendering()
    [axes] = figure.axes
    shapes = [row["verdict"]["reference"]["shape"] for row in document["batch_sizes"]]
    assert [label.get_text() for label in axes.get_yticklabels()] == shapes
    own = [bar for bar in axes.patches if bar.get_hatch() is None]
    assert [bar.get_width() for bar in own[:5]] == pytest.approx([50, 5, 15, 20, 12])  # left over is negative: no bar
    hatched = [bar for bar in axes.patches if bar.get_hatch()]
    share = document["batch_sizes"][1]["padding_pct"] / 100
    assert [bar.get_width() for bar in hatched] == pytest.approx([share * each for each in (50, 5, 15, 20, 12)])
    assert axes.get_xlim()[1] == pytest.approx(102)
