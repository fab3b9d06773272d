"""Say what a trace of torch.profiler shows: where the time went, why the device was idle, and what could be gained.

Reads:  TRACE...: Chrome traces (JSON, plain or packed) from anywhere, or folders of them; several are ranks of one job
Writes: nothing; with --flame-graph the one file
Exit:   0 fine · 1 a finding: a trace is inconclusive or damaged · 2 usage, or no trace that can be read

    python scripts/analyze_trace.py TRACE... [--json] [--diff OTHER] [--group-by name|shapes|module|stack]
                                             [--top N] [--steps N] [--rank N] [--flame-graph FILE]
"""

import gc
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # find the packages of this checkout

from utils.command import cli


def add_arguments(parser) -> None:
    parser.add_argument("traces", type=Path, nargs="+", metavar="TRACE", help="a trace, or a folder of traces")
    parser.add_argument("--diff", type=Path, metavar="OTHER", help="say what is slower or faster in OTHER")
    parser.add_argument(
        "--group-by",
        choices=("name", "shapes", "module", "stack"),
        default="name",
        help="what the calls of an operator are told apart by (default: %(default)s alone)",
    )
    parser.add_argument("--top", type=int, metavar="N", help="rows of each table of operators or kernels (default: 15)")
    parser.add_argument("--steps", type=int, metavar="N", help="how many steps the trace should hold")
    parser.add_argument("--rank", type=int, metavar="N", help="the rank to show in detail (default: the slowest)")
    parser.add_argument("--flame-graph", type=Path, metavar="FILE", help="draw the Python stacks as an HTML page")


@cli.tool(add_arguments, settings=None)
def main(run: cli.Run) -> int:
    from utils.tracing import traces

    args = run.args
    traces.check_counts(top=args.top, steps=args.steps)
    asked = {"group_by": args.group_by, "expected_steps": args.steps, "with_callers": args.diff is not None}
    examined = traces.examine(args.traces, **asked)
    index, is_finding = examined.index_of(args.rank), examined.is_finding
    if args.diff:
        other = traces.examine([args.diff], **asked)
        pair = traces.Pair(examined.only(args.rank), other.only(args.rank), args.group_by)
        is_finding = is_finding or other.is_finding
    else:
        pair = None

    def document():
        from utils.tracing import trace_document as document

        return document.of(examined) if pair is None else document.of_pair(pair)

    def text():
        from utils.tracing import trace_text as text

        return "\n".join(text.lines(examined, index, args.top) if pair is None else text.pair_lines(pair, args.top))

    run.give(document, text)
    if args.flame_graph:
        trace = examined.traces[index].analysis.path
        drawn = traces.write_flame_graph(trace, args.flame_graph)
        run.note(f"wrote {args.flame_graph}" if drawn else f"{trace} holds no Python stacks: record it with_stack=True")
        is_finding = is_finding or not drawn
    return int(is_finding)


if __name__ == "__main__":
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # nothing here multiplies; threads take up to 50 ms to start
    gc.disable()  # hardly anything here is a cycle; looking for them in what is imported and read takes 10 ms
    sys.exit(main())
