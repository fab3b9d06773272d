"""What a recording holds, and what it gives up when it would be too large."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from boundby.capture.manifest import Remark


@dataclass(frozen=True)
class Content:
    """The recorded steps of one cycle and the details of their events."""

    steps: int
    shapes: bool
    memory: bool
    stacks: bool = False

    def settings(self, activities: Sequence[Any]) -> dict[str, Any]:
        """Return the content as arguments of torch's profiler, with what it records of them."""
        return {
            "activities": activities,
            "record_shapes": self.shapes,
            "profile_memory": self.memory,
            "with_stack": self.stacks,
        }

    def within(self, step_bytes: float, limit: int) -> tuple["Content", Remark | None]:
        """Return as many steps as fit when each makes `step_bytes` of JSON, and a remark where they are fewer."""
        fewer = max(1, min(self.steps, int(limit / step_bytes)))
        if fewer == self.steps:
            return self, None
        estimate = f"would make about {_excess(step_bytes * self.steps, limit)}"
        return replace(self, steps=fewer), Remark("steps", f"{self.steps} step(s) {estimate}; {fewer} instead")

    def less(self, json_bytes: int, limit: int) -> tuple["Content | None", Remark]:
        """Return what to try after these steps made `json_bytes`, None where nothing is left to give up."""
        excess = self.excess(json_bytes, limit)
        if self.steps > 1:
            fewer = max(1, self.steps * limit // json_bytes)
            return replace(self, steps=fewer), Remark("steps", f"{excess}; {fewer} instead")
        if self.stacks:
            return replace(self, stacks=False), Remark("stacks", f"{excess}; left out")
        if self.shapes or self.memory:
            return replace(self, shapes=False, memory=False), Remark("shapes and memory", f"{excess}; left out")
        return None, Remark("trace", f"{excess}; not written")

    def excess(self, json_bytes: int, limit: int) -> str:
        """Return what the recording of these steps came to, in words."""
        return f"{self.steps} step(s) made {_excess(json_bytes, limit)}"


def _excess(json_bytes: float, limit: int) -> str:
    return f"{json_bytes / 1e6:.1f} MB of JSON, above the limit of {limit / 1e6:.1f} MB"
