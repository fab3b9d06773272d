"""Cards as data: how fast, how large, how they are named, and what goes wrong with them. Needs no torch."""

import dataclasses
import json
import os
from dataclasses import dataclass
from typing import Any, Literal

VARIABLE = "BOUNDBY_TEST_CARD"  # holds a card for child processes, as `Card.to_json` writes it
GIB = 2**30
Failure = Literal["assert", "illegal", "lost"]


@dataclass(frozen=True)
class Card:
    """One GPU in SI units. Its speeds may be those of a data sheet, or smaller in proportion to a smaller model.

    A launch keeps the host for `launch_s`; a kernel takes `kernel_s` plus the longer of its arithmetic and its traffic.
    `pcie_bytes_per_s` is of pinned memory; pageable memory comes at half of it, and the host waits.
    From `throttles_after_s` on the device runs at `throttled_share` of its clock, for `throttle_reasons` (NVML's mask).
    At launch number `fails_at` the card fails for good, `failure` says how.
    """

    name: str = "NVIDIA H100 80GB HBM3"
    capability: tuple[int, int] = (9, 0)
    multiprocessors: int = 132
    memory_bytes: int = 80 * GIB
    l2_bytes: int = 50 * 2**20
    float32_flops_per_s: float = 50e12
    tf32_flops_per_s: float = 380e12
    half_flops_per_s: float = 760e12
    bytes_per_s: float = 2.8e12
    launch_s: float = 5e-6
    kernel_s: float = 2e-6
    pcie_bytes_per_s: float = 50e9
    queue_depth: int = 1024
    sm_clock_mhz: int = 1980
    power_limit_w: float = 700.0
    idle_w: float = 70.0
    driver: str = "580.95.05"
    cuda: str = "13.0"
    throttles_after_s: float | None = None
    throttled_share: float = 0.5
    throttle_reasons: int = 0x40
    fails_at: int | None = None
    failure: Failure = "assert"
    other_processes: int = 0
    nvml: Literal["yes", "no_rights", "nonsense", "absent"] = "yes"
    has_flash: bool = True

    @property
    def has_bfloat16(self) -> bool:
        """Return whether it multiplies in bfloat16."""
        return self.capability >= (8, 0)

    def with_(self, **changes: Any) -> "Card":
        """Return this card with other fields."""
        return dataclasses.replace(self, **changes)

    def slower(self, times: float, host: float = 1.0) -> "Card":
        """Return this card with its arithmetic and its memory slower, for a model that is as much smaller.

        With `host`, all of it and the host are slower by that, too: fewer calls then fill the same seconds.
        """
        speeds = ("float32_flops_per_s", "tf32_flops_per_s", "half_flops_per_s", "bytes_per_s")
        fewer = {name: getattr(self, name) / (times * host) for name in speeds}
        longer = {name: getattr(self, name) * host for name in ("launch_s", "kernel_s")}
        return self.with_(**fewer, **longer, pcie_bytes_per_s=self.pcie_bytes_per_s / host)

    def to_json(self) -> str:
        """Return the card as a child process reads it."""
        return json.dumps(dataclasses.asdict(self))


H100 = Card()
H200 = Card(name="NVIDIA H200", memory_bytes=141 * GIB, bytes_per_s=4.2e12)
A100 = Card(
    name="NVIDIA A100-SXM4-80GB", capability=(8, 0), multiprocessors=108, l2_bytes=40 * 2**20,
    float32_flops_per_s=18e12, tf32_flops_per_s=120e12, half_flops_per_s=240e12, bytes_per_s=1.7e12,
    pcie_bytes_per_s=24e9, sm_clock_mhz=1410, power_limit_w=400.0, idle_w=60.0,
)  # fmt: skip
T4 = Card(
    name="Tesla T4", capability=(7, 5), multiprocessors=40, memory_bytes=15 * GIB, l2_bytes=4 * 2**20,
    float32_flops_per_s=7e12, tf32_flops_per_s=7e12, half_flops_per_s=45e12, bytes_per_s=0.25e12,
    launch_s=7e-6, kernel_s=3e-6, pcie_bytes_per_s=6e9, sm_clock_mhz=1590, power_limit_w=70.0, idle_w=10.0,
    has_flash=False,
)  # fmt: skip


def from_environment() -> Card | None:
    """Return the card that a parent process has named; None where it named none."""
    text = os.environ.get(VARIABLE)
    if not text:
        return None
    fields = json.loads(text)
    return Card(**{**fields, "capability": tuple(fields["capability"])})
