"""Run a plan, one process per stage: predictions beside measurements, and outputs equal to the whole model's.

Reads:  PLAN: the JSON of a plan; the preset, folder or model of the Hub that it names
Writes: PLAN.run.json (--simulate: PLAN.simulated.json) beside the plan, or the file of --output
Exit:   0 fine · 1 a stage failed, or gives other outputs than the model · 2 usage or input · 3 a device is lacking

On this machine the script starts the processes itself. Across machines start it on each with torchrun, the machine of
the first stages with --node-rank 0; stage n of the plan is process n:

    python scripts/run_plan.py PLAN [--requests N] [--model NAME_OR_FOLDER] [--output FILE] [--simulate]
    torchrun --nnodes 2 --node-rank 0 --nproc-per-node 1 --master-addr HOST --master-port 29500 scripts/run_plan.py PLAN
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # find the packages of this checkout

from utils.command import cli


def add_arguments(parser) -> None:
    parser.add_argument("plan", type=Path, metavar="PLAN", help="the JSON document of a plan")
    parser.add_argument("--model", metavar="NAME_OR_FOLDER", help="the model, if the plan does not say where it is")
    parser.add_argument("--requests", type=int, metavar="N", help="how many at once (default: the plan's, or 40)")
    parser.add_argument("--output", type=Path, metavar="FILE", help="keep the measurement there")
    parser.add_argument("--simulate", action="store_true", help="simulate event by event; start no process")


@cli.tool(add_arguments, settings=None)
def main(run: cli.Run) -> int:
    from boundby import files
    from boundby.partition import simulate
    from utils.partition import planning, report, running

    args = run.args
    file = planning.read_plan(args.plan, args.model)
    requests = running.requests_of(file, args.requests)
    output = running.output_of(args.plan, args.output, "simulated" if args.simulate else "run")
    if args.simulate or running.is_stage():
        outcome = simulate(file.plan, requests) if args.simulate else running.be_a_stage(file, requests)
        if not running.is_first():
            return cli.DONE
        run.say(report.of_simulation(file, outcome) if args.simulate else report.of_run(file, outcome))
        running.keep(output, args.plan, file, outcome)
        run.note(f"wrote {output}")
    else:
        run.note(f"starting {len(file.plan.stages)} processes, one for each stage")
        options = ["--model", file.model.name, "--requests", requests, "--output", output]
        running.start(file, [__file__, args.plan, *options])
    run.give(lambda: files.read_json(output))
    return cli.DONE


if __name__ == "__main__":
    sys.exit(main())
