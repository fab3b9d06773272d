"""Rings of fixed size: the last occurrences of stages and the last values of metrics, as rows of packed numbers."""

import struct

import numpy as np

ABSENT = -1  # in a column of times or ids: not known, or there is none
CAPACITY = 65_536  # rows: 13,000 steps of five stages in 4 MiB
LAST_THREAD = 2**15 - 1  # threads beyond share this number

OCCURRENCE = np.dtype(
    [
        ("index", "<i8"),  # of the row in its run
        ("step", "<i8"),
        ("start_ns", "<i8"),  # of the host, since the start of the run
        ("host_ns", "<i8"),  # without what was excluded
        ("self_ns", "<i8"),  # of it, in no stage inside
        ("device_ns", "<i8"),  # between the marks of begin and end
        ("gap_ns", "<i8"),  # of the device, since the end of the stage before
        ("stage", "<i2"),
        ("parent", "<i2"),  # the stage around it
        ("thread", "<i2"),
        ("flags", "<i2"),
    ]
)
METRIC = np.dtype([("index", "<i8"), ("step", "<i8"), ("metric", "<i8"), ("value", "<f8")])

DISTURBED = 1  # a profiler was at work in this step, or in one of this span
RAISED = 2  # an exception left the stage
CUT = 4  # its end never came: the stage around it ended first
UNUSUAL = DISTURBED | RAISED | CUT  # kept out of the summaries


class Ring:
    """The last `capacity` rows of one type; the first field of a row is its running index."""

    def __init__(self, dtype: np.dtype, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"the capacity of a ring is {capacity}; at least 1 row is needed")
        self.dtype = dtype
        self.capacity = capacity
        self.count = 0  # of all rows ever added
        formats = {"<i8": "q", "<i2": "h", "<f8": "d"}
        packing = struct.Struct("<" + "".join(formats[dtype[name].str] for name in dtype.names or ()))
        self.row_bytes = packing.size
        self.buffer = bytearray(packing.size * capacity)
        self.pack = packing.pack_into  # open to the book: a call between costs as much as the row
        self._rows = np.frombuffer(self.buffer, dtype=dtype)

    def append(self, *fields: float) -> None:
        """Add a row, without its index."""
        index = self.count
        self.pack(self.buffer, index % self.capacity * self.row_bytes, index, *fields)
        self.count = index + 1

    def since(self, index: int) -> np.ndarray:
        """Return a copy of the rows from this index on, the oldest first; those overwritten are missing."""
        first = max(index, self.count - self.capacity, 0)
        return self._rows[np.arange(first, self.count) % self.capacity]
