"""The command line that all scripts share.

In: arguments. Out: a `Run` with settings, folders and a voice, one message for every failure, and an exit code;
locks, secrets kept out of what is written, the names of all files, and hashes of their content.
"""

from boundby import hand_on

__getattr__, __dir__, __all__ = hand_on(__name__, __file__)
