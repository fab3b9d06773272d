"""Draw every figure there are rows for, and say why the others are not drawn."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from boundby import files
from utils.report.sources import ReportData

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw(data: ReportData) -> dict[Path, str | None]:
    """Write the pictures; return each path with None, or with the reason why it was not drawn."""
    from utils.plots import batch_size_comparison, metrics_heatmap, operators, style

    layout, about = data.layout, style.subject(data.document, data.machine)
    no_rows = None if data.rows else "not drawn: no batch size was measured yet"
    no_operators = None if data.operators else f"not drawn: {data.operators_reason}"
    choice, targets = data.choice, data.config.targets
    plan: dict[Path, tuple[str | None, Callable[[], Figure]]] = {
        layout.batch_size_plot: (
            no_rows,
            lambda: batch_size_comparison.figure(data.rows, about, choice, targets),
        ),
        layout.heatmap_plot: (no_rows, lambda: metrics_heatmap.figure(data.rows, about, choice)),
        layout.operators_plot: (no_operators, lambda: operators.figure(data.operators, about)),
    }
    for path, (reason, make) in plan.items():
        if reason is None:
            _save(make(), path)
        else:
            path.unlink(missing_ok=True)  # a picture of an earlier run would pass for this one's
    return {path: reason for path, (reason, _) in plan.items()}


def _save(figure: "Figure", path: Path) -> None:
    with files.replacing(path) as temporary:
        figure.savefig(temporary)
