"""Draw a plan into a file."""

from pathlib import Path

from boundby import files
from boundby.partition import PartitionPlan
from utils.errors import InputError
from utils.partition.planning import Profiles
from utils.partition.text import headline, subject
from utils.plots import partition
from utils.plots.style import Subject, shortened

FORMAT = ".png"


def write(path: Path, plan: PartitionPlan, profiles: Profiles) -> None:
    """Replace `path` by the picture of the plan."""
    about = Subject(shortened(headline(plan), 120), shortened(subject(profiles), 120), is_synthetic=False)
    figure = partition.figure(plan, about)
    with files.replacing(path) as temporary:
        figure.savefig(temporary)


def check_name(path: Path | None) -> None:
    """Raise InputError for a file that would be no PNG, before anything is planned."""
    if path is not None and path.suffix.lower() != FORMAT:
        raise InputError(f"--picture {path}: give a name that ends with {FORMAT}")
