"""Numbers of a step, as a program has them at hand."""

from typing import Any


def plain_number(value: Any) -> float:
    """Return a number, a NumPy scalar or a tensor with one element on the CPU as a float.

    Raises TypeError for a tensor on another device, which could only be read by waiting for it.
    """
    if isinstance(value, int | float):
        return float(value)
    device = getattr(value, "device", None)
    kind = getattr(device, "type", device)  # NumPy's scalars say "cpu" without more
    if kind not in (None, "cpu"):
        raise TypeError(f"it is a tensor on {device}, and reading it would wait for the device; give a float of it")
    return float(value.detach() if hasattr(value, "detach") else value)
