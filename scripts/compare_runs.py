"""Compare results folders or training runs: is B faster than A, slower, the same or not to be told, and as accurate?

Reads:  of all folders baseline_metrics.json, raw_samples.csv, evaluation/ and the receipt of step 02, or a baseline; of
        training runs stage_times.json, stage_log.jsonl and config.json
Writes: nothing; with --save-baseline the one file
Exit:   0 fine · 1 a regression: B is slower, fails or is less accurate (--strict: or that is open) · 2 usage or input

Further runs are held against A as well, in one table. A folder named results/previous/<UTC> holds an earlier run. In
place of a folder its metrics file may be given, in place of A a baseline that was saved: a small file, fit for git.

    python scripts/compare_runs.py A B [C ...] [--json|--markdown] [--force] [--strict] [--minimum-effect PCT]
    python scripts/compare_runs.py RUN --save-baseline FILE [--name NAME]
    python scripts/compare_runs.py RUN [...] --baseline FILE [--name NAME] [--json|--markdown] [...]
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # find the packages of this checkout

from utils.command import cli


def add_arguments(parser) -> None:
    text = "results: of the run A to compare with, then of one or more to judge"
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help=text)
    file = parser.add_mutually_exclusive_group()
    parser.add_argument("--markdown", action="store_true", help="write it for a comment on a pull request")
    file.add_argument("--baseline", type=Path, metavar="FILE", help="take A from this file: every RUN is judged")
    file.add_argument("--save-baseline", type=Path, metavar="FILE", help="keep RUN there as a baseline")
    parser.add_argument("--name", default="default", help="which baseline of the file (default: %(default)s)")
    parser.add_argument("--force", action="store_true", help="compare although machine or work differ")
    parser.add_argument("--strict", action="store_true", help="end with 1 also where a row is ambiguous")
    parser.add_argument(
        "--minimum-effect",
        type=float,
        metavar="PCT",
        help="least difference worth a verdict in percent (default: 2 on a GPU, 3 on a CPU)",
    )


@cli.tool(add_arguments)
def main(run: cli.Run) -> int:
    from utils.comparison import baselines, blocks, facts
    from utils.training import comparison

    args = run.args
    if comparison.are_trainings(args.runs):
        trained = comparison.compare(args.runs, None if args.minimum_effect is None else args.minimum_effect / 100)
        run.give(lambda: comparison.told(trained), lambda: "\n".join(comparison.lines(trained)))
        return int(any(judged.is_finding(args.strict) for judged in trained))
    runs = [facts.read(path, run.layout) for path in args.runs]
    if args.save_baseline:
        saved = baselines.save(args.save_baseline, args.name, runs)
        run.give(lambda: {"baseline": str(args.save_baseline), "name": args.name}, lambda: saved)
        return cli.DONE
    if args.baseline:
        runs.insert(0, baselines.load(args.baseline, args.name))
    compared = facts.compare(runs, args.minimum_effect, force=args.force)

    def text():
        gate = facts.gate_text(compared[0].a.document, compared[0].minimum_effect) if args.baseline else None
        return blocks.markdown_text(compared, gate) if args.markdown else "\n".join(blocks.lines(compared, gate))

    run.give(lambda: facts.plain(compared), text)
    return int(any(judged.is_finding(args.strict) for judged in compared))


if __name__ == "__main__":
    sys.exit(main())
