from . import estimate as estimate
from . import setup_check as setup_check
from . import steps as steps
from .steps import Parts as Parts
