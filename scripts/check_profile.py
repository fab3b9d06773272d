"""Check every artefact of a profile: it is there, is the one that was written, and its traces are complete.

Reads:  RUN: a results folder in which step 03 has run, or a folder with a profiler's manifest.json
Writes: nothing; with --report the one file
Exit:   0 fine · 1 a finding: something is missing, damaged or changed · 2 usage, or no profile there

Without RUN the results folder of the settings is checked; where they ask for no trace, there is nothing to check.

    python scripts/check_profile.py RUN [--analysis] [--brief] [--report FILE] [--json]
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # find the packages of this checkout

from utils.command import cli


def add_arguments(parser) -> None:
    parser.add_argument(
        "run", nargs="?", metavar="RUN", help="the folder (default: output.results_dir of the settings)"
    )
    parser.add_argument("--analysis", action="store_true", help="say what the trace shows and what to do about it")
    parser.add_argument("--brief", action="store_true", help="one line where all is well")
    parser.add_argument("--report", type=Path, metavar="FILE", help="also write the text to FILE")


@cli.tool(add_arguments)
def main(run: cli.Run) -> int:
    from boundby import files
    from utils.tracing import recording, report

    args = run.args
    folder = recording.folder_of(run)
    if folder is None:
        if not args.brief:
            run.note("trace.enabled is false: there is no profile to check")
        return cli.DONE
    checked = recording.check(folder, run.layout)
    text = "\n".join(report.lines(checked, with_analysis=args.analysis, brief=args.brief))
    run.give(lambda: report.values(checked, with_analysis=args.analysis), lambda: text)
    if args.report:
        files.write_text(args.report, text + "\n")
        run.note(f"wrote {args.report}")
    return cli.FAILED if checked.faults else cli.DONE


if __name__ == "__main__":
    sys.exit(main())
