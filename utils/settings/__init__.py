"""The settings: one frozen pydantic record per section of the YAML.

In: a YAML file and `key.sub=value`. Out: a `Config`, or one message with every mistake by line and column.
"""

from boundby import hand_on

__getattr__, __dir__, __all__ = hand_on(__name__, __file__)
