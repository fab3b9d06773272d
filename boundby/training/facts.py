"""What is known of the steps that a verdict is about: one table of them, and all that follows from it."""

from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property

from boundby.training.causes import causes_of
from boundby.training.records import StageTimes
from boundby.training.steps import BatchEffect, Share, StepTable, batch_effect, share_of
from boundby.training.verdict import Straggler
from boundby.verdict import Bound, Verdict


@dataclass(frozen=True)
class Facts:
    """The steps of one process, or the mean of several, the run they are of, and the verdict on its trace.

    `failed` are the processes of the run that ended by an error.
    """

    times: StageTimes
    table: StepTable
    trace: Verdict | None
    straggler: Straggler | None
    failed: tuple[StageTimes, ...]

    @cached_property
    def names_of(self) -> dict[Bound, set[str]]:
        """The stages that count for each bound."""
        found: dict[Bound, set[str]] = {}
        for name, cause in causes_of(self.table).items():
            found.setdefault(cause, set()).add(name)
        return found if self.table.num_steps else {}

    @cached_property
    def stages(self) -> tuple[Share, ...]:
        """The shares of the stages, the largest first."""
        found = [self._share(name, cause, {name}) for cause, names in self.names_of.items() for name in sorted(names)]
        return tuple(sorted(found, key=lambda each: -each.share))

    @cached_property
    def causes(self) -> tuple[Share, ...]:
        """The shares of what the stages count for, the largest first."""
        found = [self._share(cause, cause, names) for cause, names in self.names_of.items()]
        return tuple(sorted(found, key=lambda each: -each.share))

    @cached_property
    def effect(self) -> BatchEffect | None:
        """How the work of a step depends on its batch, where that is known."""
        work = self.table.spent_in(self.names_of.get("compute", set()))
        return batch_effect(self.times, self.table.numbers, work) if self.table.has_steps else None

    def _share(self, name: str, cause: Bound, names: Collection[str]) -> Share:
        return share_of(name, cause, self.table.spent_in(names), self.table.whole_s)

    @cached_property
    def issuing(self) -> float | None:
        """The part of the time in which the host issues work to a device; None where there is no device."""
        host = self.table.host_s
        if not self.table.on_device or not host.sum():
            return None
        names = self.names_of.get("compute", set()) | self.names_of.get("optimizer", set())
        return float(host[:, [name in names for name in self.table.names]].sum() / host.sum())
