"""The streams of a GPU as `boundby.training.marks.Marks`: pooled CUDA events."""

import torch

Mark = tuple[torch.cuda.Event, int]  # and the stream in which it stands


class CudaMarks:
    """Events on the stream in use. Neither making nor reading them waits for the device.

    In a step that is captured as a CUDA graph there are no marks: an event would become part of the graph, and asking
    for one would end the capture.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: list[torch.cuda.Event] = []

    def mark(self) -> Mark | None:
        """Queue an event on the stream in use; None while that is captured."""
        if torch.cuda.is_current_stream_capturing():
            return None
        event = self._pool.pop() if self._pool else torch.cuda.Event(enable_timing=True)
        stream = torch.cuda.current_stream(self._device)
        event.record(stream)
        return event, stream.cuda_stream

    def has_passed(self, mark: Mark) -> bool:
        """Tell whether the stream has passed the event."""
        return not torch.cuda.is_current_stream_capturing() and mark[0].query()

    def seconds_between(self, start: Mark, end: Mark) -> float | None:
        """Return the seconds between two events; None where they stand in different streams."""
        return start[0].elapsed_time(end[0]) / 1e3 if start[1] == end[1] else None

    def reuse(self, mark: Mark) -> None:
        """Put the event back into the pool."""
        self._pool.append(mark[0])
