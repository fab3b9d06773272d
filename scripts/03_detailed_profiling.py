"""Record where the time goes: an operator trace of a few batches at the optimal batch size.

Reads:  the normalised dataset and the model that step 01 left; results/baseline_metrics.json where step 02 has run
Writes: results/profiler_traces/ (trace.json.gz, trace_analysis.json, op_stats.csv, key_averages.txt, stacks.txt,
        flame_graph.html, memory_timeline.csv, memory_snapshot.pickle on a GPU, manifest.json)

    python scripts/03_detailed_profiling.py [--config FILE] [--resume] [key.sub=value ...]
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # find the packages of this checkout

from utils import cli


@cli.step("03")
def main(run: cli.Run) -> int:
    if not run.config.trace.enabled:
        run.note("trace.enabled is false: nothing to record")
        return cli.DONE

    from boundby.device import pick_device
    from utils import data, models, tracing

    source = models.locate(run.config.model, run.layout.dataset.parent)
    data.check_receipt(run.config, run.layout, source)
    rows = data.load_texts(run.layout)
    device = pick_device(run.config.model.device)
    models.use_matmul_precision(run.config.model.matmul_precision)
    loaded = models.load(source, device, run.config.model.dtype, trust_remote_code=run.args.trust_remote_code)
    max_length, _ = models.effective_max_length(loaded, run.config.profiling.max_length)

    manifest = tracing.record(run, loaded, rows, max_length)
    run.say("\n".join(tracing.console_lines(manifest)))
    run.say(f"wrote {run.layout.traces}")
    return cli.DONE if manifest["trace_path"] else cli.INCOMPLETE


if __name__ == "__main__":
    sys.exit(main())
