"""The tree of calls: which module was called from where, with the time it took in the current run.

What is done during a call stays small: three numbers are added to a list. The tree is made of them after the run, with
the nanoseconds of each call in its node; the self time of a node is its sum less those of its callees. The sum of all
self times is then the root's inclusive time, exactly.
"""

import threading
from collections.abc import Iterator, Sequence
from threading import get_ident

CallLog = dict[int, list[int]]  # by thread: -1 less the index of the module, when the call begins, and when it ends
ELSEWHERE = "(other thread)"
ROOT = "(model)"  # in the path of a model that is called again from inside or from another thread


class Call:
    """A module as it is called from one place. `ns` and `calls` add up over the calls of the current run."""

    __slots__ = ("callees", "caller", "calls", "index", "name", "ns", "path", "tree")

    def __init__(self, tree: "CallTree", caller: "Call | None", index: int, name: str, path: str) -> None:
        self.tree, self.caller, self.index, self.name, self.path = tree, caller, index, name, path
        self.callees: dict[int, Call] = {}
        self.ns = 0
        self.calls = 0

    def calling(self, index: int) -> "Call":
        """Return the node of module number `index` when it is called from here, made at the first call."""
        return self.callees.get(index) or self.tree.add(self, index)

    @property
    def self_ns(self) -> int:
        """Nanoseconds of the current run in this module and in none that it called."""
        return self.ns - sum(each.ns for each in self.callees.values())

    @property
    def inner_calls(self) -> int:
        """How often it called other modules in the current run."""
        return sum(each.calls for each in self.callees.values())


class CallTree:
    """All call paths of a model. `names` are the qualified names of each module: a shared one has several."""

    def __init__(self, names: Sequence[tuple[str, ...]]) -> None:
        self._names = names
        self._paths: set[str] = set()
        self._lock = threading.Lock()
        self.top = Call(self, None, -1, "", "")
        self.elsewhere = Call(self, None, -1, "", ELSEWHERE)
        self._lanes: dict[int, list[Call]] = {}

    def add(self, caller: Call, index: int) -> Call:
        """Return a new node below `caller`, or that which another thread has just made.

        Its path is the module's name below that of the caller, as long as it has one there and the path is free;
        else the caller's path, ">", and its first name.
        """
        with self._lock:
            if index in caller.callees:
                return caller.callees[index]
            name, path = self._named(caller, index)
            self._paths.add(path)
            call = caller.callees[index] = Call(self, caller, index, name, path)
            return call

    def enter_root(self) -> None:
        """Set the present thread on its way: whatever an interrupted run left behind is forgotten."""
        self._lanes[get_ident()] = [self.top]

    def lane(self) -> list[Call]:
        """Return where the present thread stands: the one call in the list is that which it is in."""
        return self._lanes.get(get_ident()) or self._lanes.setdefault(get_ident(), [self.elsewhere])

    def here(self) -> Call:
        """Return the call that the present thread is in."""
        return self.lane()[0]

    def fill(self, log: CallLog) -> None:
        """Set the times to those of the calls in the log that have ended; this thread is the one that ran the model."""
        for each in self.walk():
            each.ns = each.calls = 0
        for thread, numbers in log.copy().items():
            here = self.top if thread == get_ident() else self.elsewhere
            open_calls: list[int] = []  # when they began
            for number in numbers.copy():
                if number < 0:
                    here = here.calling(-1 - number)
                    open_calls.append(number)
                elif open_calls[-1] < 0:
                    open_calls[-1] = number
                else:
                    here.ns += number - open_calls.pop()
                    here.calls += 1
                    here = here.caller

    def walk(self) -> Iterator[Call]:
        """Yield every call path, callers before callees in the order of first calls; those elsewhere come last."""
        for top in (self.top, self.elsewhere):
            waiting = list(reversed(top.callees.values()))
            while waiting:
                call = waiting.pop()
                yield call
                waiting.extend(reversed(call.callees.values()))

    def is_elsewhere(self, call: Call) -> bool:
        """Tell whether the call came from another thread than the one that runs the model."""
        while call.caller is not None:
            call = call.caller
        return call is self.elsewhere

    def _named(self, caller: Call, index: int) -> tuple[str, str]:
        names = self._names[index]
        if caller is self.top:
            return names[0], names[0]
        if caller is not self.elsewhere:
            prefix = f"{caller.name}." if caller.name else ""
            inside = [each for each in names if each and each.startswith(prefix)]
            if inside:
                name = min(inside, key=lambda each: each.count("."))  # that nearest to the caller
                path = ".".join(part for part in (caller.path, name.removeprefix(prefix)) if part)
                if path not in self._paths:
                    return name, path
        return names[0], f"{caller.path}>{names[0] or ROOT}"
