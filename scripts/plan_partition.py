"""Plan how to split a model over devices, from its profile by layer: the best plan, or what is missing for one.

Reads:  PROFILE...: the *_summary.json of a profile by layer, the *_metrics.jsonl or the dashboard beside it, a report
        of the pipeline, or the folder of one; a preset or a folder with a model is profiled first, here. Several are of
        one model on different kinds of nodes. FILE is of kind cpu or gpu by its device, KIND=FILE of the kind you name.
        --nodes: the nodes
Writes: nothing; with --picture the one file. The profile of a model that it profiles lies in results/profiles
Exit:   0 fine · 1 a finding: no split fits · 2 usage or input

    python scripts/plan_partition.py PROFILE... [--nodes configs/nodes.yaml] [--objective latency|throughput|requests]
                                                [--requests M] [--json] [--model FOLDER] [--picture FILE]
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # find the packages of this checkout

from utils.command import cli

EXAMPLE = cli.ROOT / "configs" / "nodes.yaml"


def add_arguments(parser) -> None:
    parser.add_argument("profiles", nargs="+", metavar="PROFILE", help="a profile by layer, or KIND=PROFILE")
    parser.add_argument(
        "--nodes",
        type=Path,
        metavar="FILE",
        help="the nodes and their links (default: the example in configs/nodes.yaml)",
    )
    parser.add_argument(
        "--objective",
        choices=("latency", "throughput", "requests"),
        default="latency",
        help="what to minimise (default: %(default)s of one request)",
    )
    parser.add_argument("--requests", type=int, metavar="M", help="with --objective requests: how many")
    parser.add_argument(
        "--model", metavar="NAME_OR_FOLDER", help="where a run of the plan finds it (default: the profile's)"
    )
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw the plan as a PNG")


@cli.tool(add_arguments, settings=None)
def main(run: cli.Run) -> int:
    import msgspec

    from utils.partition import planning, report

    args = run.args
    report.check_picture(args.picture)
    settings = planning.read_nodes(args.nodes or EXAMPLE)
    profiles = planning.read_profiles(args.profiles)
    plan, missing = planning.plan(profiles, settings, args.objective, args.requests)
    outcome = planning.for_examples(plan or missing, EXAMPLE) if args.nodes is None else plan or missing
    run.give(
        lambda: msgspec.to_builtins(planning.plan_file(outcome, profiles, args.model)),
        lambda: report.of_plan(outcome, profiles),
    )
    if plan and args.picture:
        report.draw(args.picture, plan, profiles)
        run.note(f"wrote {args.picture}")
    return cli.DONE if plan else cli.FAILED


if __name__ == "__main__":
    sys.exit(main())
