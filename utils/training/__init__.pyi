from . import comparison as comparison
from . import fixes as fixes
from . import program as program
from . import progress as progress
from . import run as run
from . import run_folder as run_folder
from .monitor import server as server
