"""Record where the time of the steps goes: of any training program, or of a small model that is trained here.

Reads:  scikit-learn's digits; configs/training.yaml
Writes: a folder of its own below runs/, or the one of --output: config.json, metrics.json and, with --profiler on,
        stage_times.json, stage_log.jsonl, profiler_summary.json, manifest.json, trace.json, op_stats.csv
Exit:   0 trained · 1 the training failed · 2 usage or input · 3 the environment lacks something · 130 interrupted; with
        a program after `--` its own. It needs no change: torch itself tells of its loaders, backwards and optimizers

    python scripts/profile_training.py [--profiler on|off] [--epochs N] [--steps-per-epoch N] [--steps N]
        [--model baseline_cnn|resnet|efficientnet] [--run-id NAME] [--output DIR] [--try]
        [--config FILE] [key.sub=value ...]
    python scripts/profile_training.py [--run-id NAME] [--output DIR] -- python train.py ARGS
    torchrun --nproc-per-node 2 scripts/profile_training.py --profiler on
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # find the packages of this checkout

from utils.command import InputError, cli

SMALLER = "lower training.batch_size and raise training.accumulate_grad_batches"
SETTINGS = cli.Settings("utils.training.settings", "TrainingSettings", cli.ROOT / "configs" / "training.yaml", SMALLER)
FLAGS = {  # flag: setting, what it is
    "--epochs": ("training.max_epochs", "N", "times over the data"),
    "--steps-per-epoch": ("training.steps_per_epoch", "N", "optimizer steps of one epoch (default: all data once)"),
    "--steps": ("training.max_steps", "N", "optimizer steps in all, in as many epochs as that takes"),
    "--model": ("model", "NAME", "baseline_cnn, resnet or efficientnet"),
}


def add_arguments(parser) -> None:
    parser.add_argument(
        "--profiler", action=cli.Flag, key="profiling.enabled", choices=("on", "off"), help="record the run, or not"
    )
    for flag, (key, value, text) in FLAGS.items():
        parser.add_argument(flag, action=cli.Flag, key=key, metavar=value, help=text)
    parser.add_argument("--run-id", metavar="NAME", help="name of the folder below runs/ (default: time and model)")
    parser.add_argument("--output", type=Path, metavar="DIR", help="the folder itself; new or empty")
    parser.add_argument(
        "--try",
        action="store_true",
        dest="tries",
        help="then try each fix that applies, in 2 minutes",
    )
    parser.set_defaults(program=())


@cli.tool(add_arguments, SETTINGS)
def main(run: cli.Run) -> int:
    if run.args.program:
        from utils.training import program, run_folder

        if run.args.tries:
            raise InputError("--try changes the demo's loop; a program of your own is recorded as it is")
        code, folder = program.run(run.args.program, run.args.run_id, run.args.output, run.say, run.note)
        run.give(lambda: {**run_folder.told(folder), "exit_code": code})
        return code
    from utils.training import run as training
    from utils.training import run_folder

    settings, after = run.config, None
    if run.args.tries:
        from utils.training import fixes

        settings, after = fixes.recorded(run.config), fixes.tried
    folder = training.run(settings, run.args.run_id, run.args.output, run.say, run.note, after)
    run.give(lambda: run_folder.told(folder))
    return cli.DONE


if __name__ == "__main__":
    sys.exit(main())
