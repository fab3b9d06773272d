"""Record where the time of the batch of typical cost goes: an operator trace of it, and a profile by layer.

Reads:  the normalised dataset and the model that step 01 left; results/baseline_metrics.json where step 02 has run
Writes: results/profiler_traces/ (trace.json.gz, trace_analysis.json, op_stats.csv, key_averages.txt, stacks.txt,
        flame_graph.html, memory_timeline.csv, memory_snapshot.pickle on a GPU, manifest.json);
        results/layers/ (model_summary.json, model_metrics.jsonl, model_dashboard.html, logs/)

    python scripts/03_detailed_profiling.py [--config FILE] [--resume] [key.sub=value ...]
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # find the packages of this checkout

from utils.command import cli
from utils.steps import step


@step("03")
def main(run: cli.Run) -> int:
    config = run.config
    if not (config.trace.enabled or config.layers.enabled):
        run.note("trace.enabled and layers.enabled are false: nothing to record")
        return cli.DONE

    from boundby.machine import pick_device
    from utils import data
    from utils.models import loading as models
    from utils.steps import steps
    from utils.tracing import capture as tracing
    from utils.tracing import profiling as layers

    source = models.locate(config.model, run.layout.dataset.parent)
    receipt = data.check_receipt(config, run.layout, source)
    rows = data.load_texts(run.layout, sha256=receipt.dataset.sha256)
    device = pick_device(config.model.device)
    models.use_matmul_precision(config.model.matmul_precision)
    dtype = steps.measured_dtype(config, run.layout) or config.model.dtype
    loaded = models.load(source, device, dtype, trust_remote_code=run.args.trust_remote_code)
    run.resolved["model.dtype"] = loaded.dtype
    max_length, _ = models.effective_max_length(loaded, config.profiling.max_length)

    batch = tracing.reference(run, loaded, rows, max_length)
    is_whole = True
    if config.trace.enabled:
        recording = tracing.record(run, loaded, batch)
        taken = recording.taken
        is_whole = taken.trace_path is not None and (taken.stacks_path is not None or not config.trace.stacks)
        run.say("\n".join(recording.lines()))
    if config.layers.enabled:
        run.say("\n".join(layers.console_lines(layers.record(run, loaded, batch))))
    written = [(config.trace, run.layout.traces), (config.layers, run.layout.layers)]
    run.say("wrote " + " and ".join(str(folder) for settings, folder in written if settings.enabled))
    return cli.DONE if is_whole else cli.INCOMPLETE


if __name__ == "__main__":
    sys.exit(main())
