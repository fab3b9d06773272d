"""Chrome traces of torch.profiler, ours or anyone's: columns, tables, causes. Loads neither torch nor pandas.

`table` turns a file into columns of integer nanoseconds and `analysis` these into what they say: where the time of
every device went, and why it was idle. `operators` has the calls of operators and the folded Python stacks.
"""

from boundby.trace.analysis import Analysis, analyze
from boundby.trace.decoding import MAX_JSON_BYTES, NotATrace
from boundby.trace.operator_table import OPERATOR_COLUMNS, operator_rows, rows_by_name
from boundby.trace.operators import OpStat, folded_stacks, op_stats
from boundby.trace.table import Trace, read_trace, step_count

__all__ = [
    "MAX_JSON_BYTES",
    "OPERATOR_COLUMNS",
    "Analysis",
    "NotATrace",
    "OpStat",
    "Trace",
    "analyze",
    "folded_stacks",
    "op_stats",
    "operator_rows",
    "read_trace",
    "rows_by_name",
    "step_count",
]
