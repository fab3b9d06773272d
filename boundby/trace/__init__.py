"""Chrome traces of torch.profiler, ours or anyone's, as columns and tables. Loads neither torch nor pandas.

`reader` turns a file into columns of integer nanoseconds, `operators` into a table of operators, `stacks` into folded
Python stacks.
"""

from boundby.trace.operators import OPERATOR_COLUMNS, OpStat, op_stats, operator_rows, rows_by_name
from boundby.trace.reader import Trace, read_trace, step_count
from boundby.trace.stacks import folded_stacks

__all__ = [
    "OPERATOR_COLUMNS",
    "OpStat",
    "Trace",
    "folded_stacks",
    "op_stats",
    "operator_rows",
    "read_trace",
    "rows_by_name",
    "step_count",
]
