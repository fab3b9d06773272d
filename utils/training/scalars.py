"""Stage times as scalars for TensorBoard, for those who ask for them."""

from pathlib import Path

from boundby.training import StageTimes
from boundby.training.records import UNUSUAL

FOLDER = "tensorboard"


def write(times: StageTimes, folder: Path) -> None:
    """Write the seconds of each occurrence by its step, without those that a profiler has slowed down."""
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(folder)) as writer:
        for row in times.occurrences[(times.occurrences["flags"] & UNUSUAL) == 0]:
            name = times.names[row["stage"]]
            writer.add_scalar(f"{name.kind}_s/{name.name}", row["host_ns"] / 1e9, int(row["step"]))
