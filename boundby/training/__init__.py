"""The stages of a training loop: timed as it runs, written as it runs, and read again at any time.

Nothing here loads torch but an enabled `ProfilerManager`, when it starts, and `boundby.training.cuda`.
"""

from boundby.training.judgement import TrainingVerdict, judge_training
from boundby.training.manager import ManagerOptions, ProfilerManager
from boundby.training.reader import ranks_in, read_stage_times
from boundby.training.records import StageTimes
from boundby.training.timer import StageTimer, TimerOptions

__all__ = [
    "ManagerOptions",
    "ProfilerManager",
    "StageTimer",
    "StageTimes",
    "TimerOptions",
    "TrainingVerdict",
    "judge_training",
    "ranks_in",
    "read_stage_times",
]
