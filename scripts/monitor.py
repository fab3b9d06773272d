"""Show training runs in the browser while they go on: overview, timing, memory and artifacts.

Reads:  RUNS: a folder of run folders, or one run folder (default: runs)
Writes: nothing
Exit:   0 ended · 2 usage, or no such folder · 3 Streamlit is not installed

The page is at http://127.0.0.1:8501 and for this machine alone; from elsewhere: ssh -L 8501:127.0.0.1:8501 HOST

    python scripts/monitor.py [RUNS] [--port 8501] [--stall-after SECONDS]
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # find the packages of this checkout

from utils.command import cli


def add_arguments(parser) -> None:
    parser.add_argument("runs", type=Path, nargs="?", default=Path("runs"), metavar="RUNS", help="the folder of runs")
    parser.add_argument("--port", type=int, default=8501, help="of the page (default: %(default)s)")
    parser.add_argument(
        "--stall-after",
        type=float,
        default=30.0,
        metavar="SECONDS",
        help="without progress, after which a run counts as stalled (default: %(default)g)",
    )


@cli.tool(add_arguments, settings=None, serves=True)
def main(run: cli.Run) -> int:
    from utils.training import server

    args = run.args
    server.check(args.runs, args.port, args.stall_after)
    address = f"http://{server.ADDRESS}:{args.port}"
    run.note(f"the page of {args.runs} is at {address}; Ctrl+C ends it")
    run.give(lambda: {"address": address, "runs": str(args.runs)})
    run.console.publish()  # what follows has no end
    server.serve(args.runs, args.port, args.stall_after)


if __name__ == "__main__":
    sys.exit(main())
