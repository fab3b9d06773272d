from . import planning as planning
from . import report as report
from . import running as running
