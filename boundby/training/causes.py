"""What the time in a stage counts for."""

from collections.abc import Mapping

from boundby.training import stages
from boundby.training.steps import IN_NO_STAGE, StepTable
from boundby.verdict import Bound

# Work of the host beside the training leaves the machine idle: of the words for bounds `under_utilised` says so.
# The waits of collectives are stages only in loops that name them.
BOUND_OF_STAGE: dict[str, Bound] = {
    stages.DATA: "input",
    stages.H2D: "transfer",
    stages.FORWARD: "compute",
    stages.BACKWARD: "compute",
    stages.CLIP: "optimizer",
    stages.OPTIMIZER: "optimizer",
    stages.SCHEDULER: "optimizer",
    stages.ZERO_GRAD: "optimizer",
    stages.CALLBACKS: "under_utilised",
    stages.LOGGING: "under_utilised",
    stages.CHECKPOINT: "under_utilised",
    "communication": "communication",
    "all_reduce": "communication",
    "barrier": "communication",
}
UNEXPLAINED: Bound = "inconclusive"


def causes_of(table: StepTable) -> dict[str, Bound]:
    """Return what the time of each column counts for; `inconclusive` where nothing tells.

    A stage with a name of the loop's own counts for what the stages around it count for, if they agree.
    """
    return {name: _cause(name, table.around, frozenset()) for name in table.names}


def _cause(name: str, around: Mapping[str, frozenset[str]], seen: frozenset[str]) -> Bound:
    if name in BOUND_OF_STAGE:
        return BOUND_OF_STAGE[name]
    if name == IN_NO_STAGE or name in seen:
        return UNEXPLAINED
    found = {_cause(each, around, seen | {name}) for each in around.get(name, ())}
    return found.pop() if len(found) == 1 else UNEXPLAINED
