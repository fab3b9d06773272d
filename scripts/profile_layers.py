"""Profile a model layer by layer: time, memory, work and bottlenecks of each module.

Reads:  a preset with random weights, a folder with weights, or a model of the Hub; configs/layers.yaml
Writes: NAME_metrics.jsonl, NAME_summary.json, NAME_dashboard.html and logs/ in the output folder
Exit:   0 fine · 1 the profile is not representative · 2 usage or input · 3 the environment lacks something

    python scripts/profile_layers.py [--architecture PRESET | --model NAME_OR_FOLDER] [--num-samples 50]
        [--batch-size 1] [--sequence-length 128] [--new-tokens 0] [--dtype float32] [--device auto] [--output DIR]
        [--config FILE] [--trust-remote-code] [--json] [key.sub=value ...]
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # find the packages of this checkout

from utils.command import cli

SMALLER = "lower --batch-size, --sequence-length or --new-tokens, use --dtype bfloat16"
SETTINGS = cli.Settings("utils.tracing.layers", "LayerSettings", cli.ROOT / "configs" / "layers.yaml", SMALLER)
FLAGS = {  # flag: setting, what it is
    "--num-samples": ("measurement.num_samples", "runs with probes, and as many without"),
    "--batch-size": ("measurement.batch_size", "samples per run"),
    "--sequence-length": ("measurement.sequence_length", "tokens per sample"),
    "--new-tokens": ("measurement.new_tokens", "tokens to generate after these: prefill and decode apart"),
    "--dtype": ("model.dtype", "float32, float16 or bfloat16"),
    "--device": ("model.device", "auto, cpu, cuda, cuda:1"),
}


def add_arguments(parser) -> None:
    which = parser.add_mutually_exclusive_group()
    preset, weights = "a preset with random weights", "a folder with weights, or a name on the Hub"
    which.add_argument("--architecture", action=cli.Flag, key="model.architecture", clears="model.name", help=preset)
    which.add_argument("--model", action=cli.Flag, key="model.name", is_text=True, help=weights)
    for flag, (key, text) in FLAGS.items():
        parser.add_argument(flag, action=cli.Flag, key=key, help=text)
    parser.add_argument("--output", action=cli.Flag, key="output.dir", is_text=True, help="folder of the files")
    parser.add_argument("--trust-remote-code", action="store_true", help="run Python code that the model brings")


@cli.tool(add_arguments, SETTINGS)
def main(run: cli.Run) -> int:
    from boundby import files
    from utils.tracing import profiling

    report, dashboard = profiling.profile_as_set(run.config, run.note, trust_remote_code=run.args.trust_remote_code)
    run.give(
        lambda: files.read_json(dashboard.with_name(f"{report.profile.profile_name}_summary.json")),
        lambda: f"{report}\nwrote {dashboard} and the files beside it",
    )
    return int(report.profile.coverage.status == "not representative")


if __name__ == "__main__":
    sys.exit(main())
