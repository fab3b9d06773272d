"""The errors a person can cause or cure, each with the exit code it ends a program with.

PipelineError              1  a step failed
├── InputError             2  bad configuration, usage or input data
└── EnvironmentLacksError  3  a driver, disk space or the network is missing
"""


class PipelineError(Exception):
    """A failure whose message says what, where, the value and the way out; no traceback is needed."""

    exit_code = 1


class InputError(PipelineError):
    """The configuration, the command line or the data is at fault."""

    exit_code = 2


class EnvironmentLacksError(PipelineError):
    """The machine lacks something: a driver, disk space, the network."""

    exit_code = 3
