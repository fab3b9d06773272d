"""How the events of a trace belong together, worked out once: nesting, launches, window, kinds of work, activity."""

from functools import cached_property

import numpy as np

from boundby.trace.activity import Activity, host_activity
from boundby.trace.intervals import HostTree, host_tree
from boundby.trace.linking import Links, kinds_of_work, links
from boundby.trace.table import ABSENT, Trace
from boundby.trace.windows import Window, window


class Structure:
    """What is known of a trace as a whole; each part is worked out when it is first asked for."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace

    @cached_property
    def tree(self) -> HostTree:
        """The nesting of the host's events."""
        return host_tree(self.trace)

    @cached_property
    def links(self) -> Links:
        """The work of the devices and its launches."""
        return links(self.trace)

    @cached_property
    def window(self) -> Window:
        """The steps that the trace is judged by."""
        return window(self.trace, self.links)

    @cached_property
    def kinds(self) -> np.ndarray:
        """The kind of each event's work on a device, as `kinds_of_work` gives it."""
        return kinds_of_work(self.trace)

    @cached_property
    def activity(self) -> Activity:
        """What every thread of the host did."""
        return host_activity(self.trace, self.tree, self.links)

    @cached_property
    def launching_operator(self) -> np.ndarray:
        """Of each piece of work of the device, the row of the innermost operator that launched it, or `ABSENT`.

        Where the trace lacks the launching call, the operator of the same external id is taken; in older traces that
        id only repeats the correlation and says nothing.
        """
        trace, work = self.trace, self.links
        operator = self.tree.nearest(work.launch, trace.is_operator)
        lacking = np.flatnonzero(work.launch == ABSENT)
        external_id = trace.external_id[work.rows[lacking]]
        lacking = lacking[(external_id != ABSENT) & (external_id != trace.correlation[work.rows[lacking]])]
        if len(lacking):
            operators = np.flatnonzero(trace.is_operator & (trace.external_id != ABSENT))
            of_id = dict(zip(trace.external_id[operators].tolist(), operators.tolist(), strict=True))
            operator[lacking] = [of_id.get(number, ABSENT) for number in trace.external_id[work.rows[lacking]].tolist()]
        return operator
