"""Run the same texts in other ways, side by side, and say which one to use: precisions, compiled, other checkpoints.

Reads:  the normalised dataset and the model that step 01 left; results/baseline_metrics.json where step 02 has run
Writes: results/variants.json, variants.csv, changed_labels.csv; the report of step 04 anew, where there is one

    python scripts/05_compare_variants.py [--config FILE] [--resume] [key.sub=value ...]
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # find the packages of this checkout

from utils.command import cli
from utils.steps import step


@step("05")
def main(run: cli.Run) -> int:
    config = run.config
    if not config.variants.enabled:
        run.note("variants.enabled is false: nothing to compare")
        return cli.DONE

    from utils import data
    from utils.models import loading as models
    from utils.models import tasks
    from utils.report import assembly
    from utils.report import variants as section
    from utils.variants import comparison

    if not tasks.of(config.model.task).HAS_PREDICTED_LABELS:
        run.note(f"no labels are predicted by model.task={config.model.task}: nothing to compare variants by")
        return cli.DONE
    source = models.locate(config.model, run.layout.dataset.parent)
    receipt = data.check_receipt(config, run.layout, source)
    rows = data.load_texts(run.layout, sha256=receipt.dataset.sha256)
    result = comparison.compare(run, receipt, source, rows)
    run.say("\n".join(section.console_lines(result)))
    is_renewed = assembly.renew(run)
    card = run.layout.card.read_text(encoding="utf-8").splitlines() if is_renewed else None
    run.give(lambda: {"variants": result, "card": card})
    if is_renewed:
        run.say(f"the report is made anew with it: {run.layout.html_report}")
    return cli.DONE


if __name__ == "__main__":
    sys.exit(main())
