"""The operators of a trace and the ranges that the program marks: how often each ran, what time it took and caused.

Of a trace that was recorded with `with_stack=True`, who calls them, and the stacks as flame-graph tools read them.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import Literal

import msgspec
import numpy as np

from boundby.trace.intervals import HostTree, host_tree, sums
from boundby.trace.structure import Structure
from boundby.trace.table import ABSENT, ANNOTATION, OPERATOR, PYTHON_FRAME, Trace

MODULE = "nn.Module: "
PACKAGES = r"site-packages|dist-packages|torch|transformers|lib/python[\d.]*|lightning|accelerate"
PROFILER = "boundby/(capture|integrations|training)"  # it marks the stages around a program's own lines
LIBRARY = rf"(^|/)(({PACKAGES}|{PROFILER})/|(threading|contextlib)\.py)"
OWN_FRAME = re.compile(rf"^(?!.*{LIBRARY})(?P<file>[^()<>]+\.py)\((?P<line>\d+)\): ")
LARGEST_SIZE = 2**48  # of one dimension of a tensor
LARGEST_KEY = 2**63 - 1
STACK_FRAMES = 5  # of the innermost ones, as in torch's own table
Grouping = Literal["shapes", "stack", "module"]
BY_SHAPES: tuple[Grouping, ...] = ("shapes",)
Shape = tuple[int, ...]
Shapes = Sequence[Shape]


class OpStat(msgspec.Struct, frozen=True):
    """All calls of one operator that agree in what they are grouped by.

    `cpu_total_ns` includes the operators it called, `cpu_self_ns` does not: the latter adds up to the time in which
    each thread was inside any operator. `device_total_ns` is the time of the kernels, copies and memsets launched by
    the calls and the operators they called; it overlaps between operators that call one another. `device_self_ns`
    leaves the called ones out and adds up to the time of all work that an operator launched.
    """

    name: str
    input_shapes: str | None  # JSON text; None where shapes were not recorded or not grouped by
    calls: int
    cpu_total_ns: int
    cpu_self_ns: int
    cpu_self_share: float | None  # of the self time of all operators; None where that is zero
    device_total_ns: int | None  # None where the trace holds no device event
    device_share: float | None  # of the time of all device events
    device_self_ns: int | None
    flops: int | None = None  # of all calls; None where no formula is known for the operator or no shapes
    stack: str | None = None  # the innermost frames, outermost first, joined by ";"
    module: str | None = None  # the innermost nn.Module that made the call

    @property
    def flops_per_s(self) -> float | None:
        """FLOP/s over the device time, or the CPU time where there is no device; None where unknown or no time."""
        nanoseconds = self.cpu_total_ns if self.device_total_ns is None else self.device_total_ns
        return self.flops / nanoseconds * 1e9 if self.flops and nanoseconds else None


def op_stats(trace: Trace, group_by: Collection[Grouping] = BY_SHAPES) -> list[OpStat]:
    """Return one record per operator and whatever else it is grouped by, the one with the most self time first.

    Python frames, user annotations and `ProfilerStep` marks are no operators.
    """
    return operator_stats(Structure(trace), group_by)


def operator_stats(structure: Structure, group_by: Collection[Grouping] = BY_SHAPES) -> list[OpStat]:
    """Return the same of a trace whose structure is known."""
    rows, self_ns, parent, call = _calls(structure.trace, structure.tree)
    group, names, shapes, stacks, modules = _groups(structure.trace, structure.tree, rows, group_by)
    count = len(names)
    cpu_self = sums(group, self_ns[rows], count).tolist()
    whole_self = sum(cpu_self)
    device_total: list[int] | list[None] = [None] * count
    device_self, whole_device = device_total, None
    if len(structure.links.rows):
        total_ns, own_ns, whole_device = _device_time(structure, parent, call)
        device_total, device_self = (sums(group, ns[rows], count).tolist() for ns in (total_ns, own_ns))
    columns = zip(
        names,
        shapes,
        stacks,
        modules,
        np.bincount(group, minlength=count).tolist(),
        sums(group, np.maximum(structure.trace.duration_ns[rows], 0), count).tolist(),
        cpu_self,
        device_total,
        device_self,
        strict=True,
    )
    stats = []
    for name, shape, stack, module, calls, total, own, on_device, own_on_device in columns:
        flops = operator_flops(name, shape)
        stats.append(
            OpStat(
                name=name,
                input_shapes=shape,
                calls=calls,
                cpu_total_ns=total,
                cpu_self_ns=own,
                cpu_self_share=own / whole_self if whole_self else None,
                device_total_ns=on_device,
                device_share=on_device / whole_device if whole_device and on_device is not None else None,
                device_self_ns=own_on_device,
                flops=None if flops is None else flops * calls,
                stack=stack,
                module=module,
            )
        )
    return sorted(stats, key=lambda stat: stat.cpu_self_ns, reverse=True)


def _calls(trace: Trace, tree: HostTree) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return the rows of the calls of operators; for every event its self time, the operator around it, its call."""
    is_op, segments = trace.is_operator, tree.segments
    every = np.arange(len(is_op))
    operator = tree.nearest(every, is_op)  # the event itself, or the operator around it
    parent = tree.nearest(tree.parent, is_op)
    call = _outermost_dispatch(trace, is_op, parent)
    inside = np.flatnonzero(segments.row != ABSENT)
    owner = operator[segments.row[inside]]
    inside, owner = inside[owner != ABSENT], owner[owner != ABSENT]
    self_ns = sums(owner, segments.start_ns[inside + 1] - segments.start_ns[inside], len(is_op))
    return np.flatnonzero(is_op & (call == every)), _moved(self_ns, call), parent, call


def _device_time(structure: Structure, parent: np.ndarray, call: np.ndarray) -> tuple[np.ndarray, np.ndarray, int]:
    """Return the device time that each call and what it called launched, that it launched itself, and that of all."""
    owner = structure.launching_operator
    duration_ns = structure.links.end_ns - structure.links.start_ns
    own_ns = sums(owner[owner != ABSENT], duration_ns[owner != ABSENT], len(parent))
    total_ns = own_ns.copy()
    owner = np.flatnonzero(own_ns)
    carried_ns = own_ns[owner]
    while len(owner):  # once per level of nesting
        owner = parent[owner]
        owner, carried_ns = owner[owner != ABSENT], carried_ns[owner != ABSENT]
        np.add.at(total_ns, owner, carried_ns)
    return total_ns, _moved(own_ns, call), int(duration_ns.sum())


def _groups(
    trace: Trace, tree: HostTree, rows: np.ndarray, group_by: Collection[Grouping]
) -> tuple[np.ndarray, list[str], list[str | None], list[str | None], list[str | None]]:
    """Return the group of each call, and name, shapes, stack and module of each group."""
    shapes = trace.input_shapes[rows] if "shapes" in group_by else np.full(len(rows), ABSENT)
    inside = tree.nearest(tree.parent[rows], is_module(trace)) if "module" in group_by else np.full(len(rows), ABSENT)
    modules = names_of(trace, inside)
    frames = _frames(trace, tree, rows) if "stack" in group_by else np.zeros((0, len(rows)), dtype=np.int64)
    _, first, group = np.unique(
        _combined([trace.name[rows], shapes, modules, *frames]), return_index=True, return_inverse=True
    )
    stacks = frames[::-1, first].T.tolist()  # the outermost frame first
    return (
        group,
        [trace.names[name] for name in trace.name[rows[first]].tolist()],
        [None if shape == ABSENT else trace.shapes[shape] for shape in shapes[first].tolist()],
        [";".join(trace.names[name] for name in stack if name != ABSENT) or None for stack in stacks],
        [None if name == ABSENT else trace.names[name].removeprefix(MODULE) for name in modules[first].tolist()],
    )


def line_of(structure: Structure, row: int) -> str | None:
    """Return `file.py:12` of the innermost function of the program around an event; None where no stacks tell."""
    trace, tree = structure.trace, structure.tree
    is_frame = trace.in_categories([PYTHON_FRAME])
    while row != ABSENT:
        frame = OWN_FRAME.match(trace.names[trace.name[row]]) if is_frame[row] else None
        if frame:
            return f"{frame['file'].rpartition('/')[2]}:{frame['line']}"
        row = int(tree.parent[row])
    return None


def _combined(keys: Sequence[np.ndarray]) -> np.ndarray:
    """Return one integer per row, equal exactly where all keys are equal."""
    whole = keys[0].astype(np.int64)
    size = int(whole.max(initial=0)) + 1
    for key in keys[1:]:
        values = int(key.max(initial=0)) + 2
        if size * values > LARGEST_KEY:
            different, whole = np.unique(whole, return_inverse=True)
            size = len(different)
        whole = whole * values + key + 1
        size *= values
    return whole


def _frames(trace: Trace, tree: HostTree, rows: np.ndarray) -> np.ndarray:
    """Return the names of the innermost Python frames around `rows`, one line per frame, the innermost first."""
    is_frame = trace.in_categories([PYTHON_FRAME])
    frames, names = tree.nearest(tree.parent[rows], is_frame), []
    for _ in range(STACK_FRAMES):
        names.append(names_of(trace, frames))
        frames = tree.nearest(np.where(frames == ABSENT, ABSENT, tree.parent[frames]), is_frame)
    return np.stack(names)


def names_of(trace: Trace, rows: np.ndarray) -> np.ndarray:
    """Return the number of the name of each row; that of `ABSENT` is `ABSENT`."""
    return np.where(rows == ABSENT, ABSENT, trace.name[rows])


def _moved(nanoseconds: np.ndarray, call: np.ndarray) -> np.ndarray:
    """Return the values added up at the call that each event belongs to."""
    filled = np.flatnonzero(nanoseconds)
    return sums(call[filled], nanoseconds[filled], len(nanoseconds))


def is_module(trace: Trace) -> np.ndarray:
    """Return a mask of the events that are calls of an nn.Module, recorded with Python stacks."""
    is_module = np.array([name.startswith(MODULE) for name in trace.names], dtype=bool)
    mask: np.ndarray = is_module[trace.name] & trace.in_categories([PYTHON_FRAME])
    return mask


def _outermost_dispatch(trace: Trace, is_op: np.ndarray, parent: np.ndarray) -> np.ndarray:
    """Return, for every event, the row of the call that it belongs to: itself, unless an operator dispatched to itself.

    An operator with nothing inside but one of its own name (`aten::mul` with a number does so) is one call, as in the
    tables of torch. In old traces of whole µs, one of 0 µs may also have come just before.
    """
    inner = np.flatnonzero(is_op & (parent != ABSENT))
    outer = parent[inner]
    is_only_one = np.bincount(outer, minlength=len(parent))[outer] == 1
    again = is_only_one & (trace.name[inner] == trace.name[outer]) & (trace.duration_ns[inner] > 0)
    call = np.arange(len(parent))
    call[inner[again]] = outer[again]
    while not np.array_equal(call, call[call]):
        call = call[call]
    return call


def operator_flops(name: str, input_shapes: str | None) -> int | None:
    """Return the FLOPs of one call, a multiplication and an addition counted as two.

    `input_shapes` is the JSON text of the trace. None where there is no formula for the operator, or where the shapes
    do not fit it. Of a convolution the trace lacks the output shape, so it has none.
    Source of the formulas: torch.utils.flop_counter.
    """
    formula = FORMULAS.get(name)
    if formula is None or input_shapes is None:
        return None
    try:
        flops = formula([_shape(sizes) for sizes in json.loads(input_shapes)])
    except (ValueError, TypeError, IndexError):
        return None
    return flops if 0 < flops < 2**63 else None  # more is no operator of this world, and no float


def _shape(value: object) -> Shape:
    """Return the sizes of a tensor, () for what is none; raises ValueError where they are not sizes."""
    sizes = value if isinstance(value, list) else []
    if not all(type(size) is int and 0 <= size < LARGEST_SIZE for size in sizes):
        raise ValueError("a size is no whole number, or an absurd one")
    return tuple(sizes)


def _product(a: Shape, b: Shape) -> int:
    """Return the FLOPs of [..., m, k] @ [..., k, n]."""
    (*batch, rows, inner), (*_, inner_b, columns) = a, b
    if inner != inner_b:
        raise ValueError("the shapes do not fit")
    return 2 * math.prod(batch) * rows * inner * columns


def _linear(shapes: Shapes) -> int:
    (*batch, inner), (outputs, inner_b) = shapes[0], shapes[1]
    if inner != inner_b:
        raise ValueError("the shapes do not fit")
    return 2 * math.prod(batch) * inner * outputs


def _attention(shapes: Shapes) -> int:
    """Return the FLOPs of query @ key and scores @ value, of [batch, heads, length, size] each."""
    query, key, value = shapes[:3]
    batch, heads, length, size = query
    return 2 * batch * heads * length * key[2] * (size + value[3])


FORMULAS: dict[str, Callable[[Shapes], int]] = {
    "aten::mm": lambda shapes: _product(shapes[0], shapes[1]),
    "aten::bmm": lambda shapes: _product(shapes[0], shapes[1]),
    "aten::addmm": lambda shapes: _product(shapes[1], shapes[2]),
    "aten::baddbmm": lambda shapes: _product(shapes[1], shapes[2]),
    "aten::_addmm_activation": lambda shapes: _product(shapes[1], shapes[2]),
    "aten::_scaled_mm": lambda shapes: _product(shapes[0], shapes[1]),
    "mkldnn::_linear_pointwise": _linear,
    "onednn::qlinear_pointwise": lambda shapes: 2 * math.prod(shapes[0]) * shapes[4][0],
    "aten::linear": _linear,
    "aten::_scaled_dot_product_flash_attention": _attention,
    "aten::_scaled_dot_product_efficient_attention": _attention,
    "aten::_scaled_dot_product_cudnn_attention": _attention,
    "aten::_scaled_dot_product_flash_attention_for_cpu": _attention,
}


class AnnotationStat(msgspec.Struct, frozen=True):
    """All ranges of one name. `device_ns` counts the work launched in them, but not that of ranges inside them.

    Work that another thread launches, as that of the backward pass is, counts for the range that the main thread is in.
    """

    name: str
    calls: int
    host_ns: int
    device_ns: int


def annotation_stats(structure: Structure) -> list[AnnotationStat]:
    """Return one record per name, the one with the most device time, then host time, first; step marks are none."""
    trace, tree, linked, main = structure.trace, structure.tree, structure.links, structure.activity.main_thread
    wanted = trace.in_categories([ANNOTATION]) & ~trace.is_step_mark
    rows = np.flatnonzero(wanted)
    owner = tree.nearest(linked.launch, wanted)
    if main is not None:
        elsewhere = np.flatnonzero((owner == ABSENT) & (linked.launch != ABSENT))
        around = tree.segments.row_at(main, trace.start_ns[linked.launch[elsewhere]])
        owner[elsewhere] = tree.nearest(around, wanted)
    launched, count = owner != ABSENT, len(trace.names)
    device_ns = sums(trace.name[owner[launched]], (linked.end_ns - linked.start_ns)[launched], count)
    host_ns = sums(trace.name[rows], np.maximum(trace.duration_ns[rows], 0), count)
    calls = np.bincount(trace.name[rows], minlength=count)
    stats = [
        AnnotationStat(trace.names[name], int(calls[name]), int(host_ns[name]), int(device_ns[name]))
        for name in np.flatnonzero(calls).tolist()
    ]
    return sorted(stats, key=lambda stat: (-stat.device_ns, -stat.host_ns))


MAX_FRAMES = 256  # of a deeper stack the outer frames are left out; it also ends a circle of parents
PROFILER_FILE = "torch/profiler/profiler.py"  # starting the recorder takes milliseconds that are not the program's
ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")  # would make every call of a bound method a frame of its own
BUILT_IN = re.compile(r"<built-in (?:method|function) (?P<function>\S+)(?: of .+)?>")
MODULE_CALL = re.compile(r"^nn\.Module: ")
SEPARATORS = str.maketrans(" ;\t\r\n", "_____")


def frame_name(name: str) -> str:
    """Return the name of an event of the host; a function of C loses its address and the object that it belongs to."""
    built_in = BUILT_IN.fullmatch(name)
    return f"{built_in['function']} (built-in)" if built_in else name


def folded_stacks(trace: Trace) -> list[str]:
    """Return lines `outer;inner;innermost weight`, the heaviest first; the weight is the stack's own time in ns.

    Frames of the profiler itself are left out, and so are threads on which no operator ran, unless there is no other:
    they mostly wait (a progress bar's monitor, an idle pool). The list is empty where the trace holds no Python frames.
    """
    frames = [ADDRESS.sub("", name).translate(SEPARATORS) for name in trace.names]
    is_frame = trace.in_categories([PYTHON_FRAME])
    works = np.isin(trace.thread, trace.thread[trace.in_categories([OPERATOR])])
    rows = np.flatnonzero(is_frame & works if (is_frame & works).any() else is_frame).tolist()
    row_of_id = {int(trace.python_id[row]): row for row in rows if trace.python_id[row] != ABSENT}
    parent = {row: row_of_id.get(int(trace.python_parent_id[row]), ABSENT) for row in rows}
    duration_ns = {row: max(int(trace.duration_ns[row]), 0) for row in rows}
    self_ns = dict(duration_ns)
    for row in rows:
        if parent[row] != ABSENT:
            self_ns[parent[row]] -= duration_ns[row]
    weights: Counter[str] = Counter()
    for row in rows:
        stack = [frames[trace.name[at]] for at in _outwards(row, parent)]
        if self_ns[row] > 0 and not any(PROFILER_FILE in frame for frame in stack):
            weights[";".join(reversed(stack))] += self_ns[row]
    return [f"{stack} {weight}" for stack, weight in weights.most_common()]


def _outwards(row: int, parent: dict[int, int]) -> list[int]:
    """Return `row`, its caller, the caller's caller and so on, at most `MAX_FRAMES` of them."""
    chain: list[int] = []
    while row != ABSENT and len(chain) < MAX_FRAMES:
        chain.append(row)
        row = parent[row]
    return chain


class Caller(msgspec.Struct, frozen=True):
    """Who calls an operator: the operator around it, and where in the program; None where the trace does not tell."""

    operator: str | None
    location: str | None  # the innermost frame of the program's own files, else nn.Module, else range that it marks


def callers(trace: Trace) -> dict[str, dict[Caller, int]]:
    """Return how often each operator is called by whom."""
    tree = host_tree(trace)
    rows = np.flatnonzero(trace.is_operator)
    around = np.append(tree.parent, ABSENT)[rows]
    annotations = trace.in_categories([ANNOTATION]) & ~trace.is_step_mark
    frames = trace.in_categories([PYTHON_FRAME])
    location = np.full(len(rows), ABSENT)
    for wanted in (trace.named(OWN_FRAME, frames), trace.named(MODULE_CALL, frames), annotations):
        if wanted.any():
            location = np.where(location == ABSENT, tree.nearest(around, wanted), location)
    columns = [trace.name[rows]]
    columns += [
        np.where(rows_around == ABSENT, ABSENT, trace.name[rows_around])
        for rows_around in (tree.nearest(around, trace.is_operator), location)
    ]
    names = (*trace.names, None)  # the last is that of ABSENT
    calls_of: dict[str, dict[Caller, int]] = {}
    calls = Counter(zip(*(column.tolist() for column in columns), strict=True))
    for (name, operator, where), count in calls.items():
        calls_of.setdefault(trace.names[name], {})[Caller(names[operator], names[where])] = count
    return calls_of
