from . import estimate as estimate
from . import setup_check as setup_check
from . import steps as steps
from .running import step as step
from .steps import Parts as Parts
