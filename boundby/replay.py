"""Run one forward again as its operators: each distinct one alone and hot, and all of them in the model's order."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch

from boundby.split import Replay
from boundby.timer import DeviceQueue, Timer, Work
from boundby.verdict import Fix

BUDGET_S = 10.0


@dataclass(frozen=True)
class Setting:
    """A fix to replay the operators under: another dtype, or a setting of the process.

    `dtype` takes the place of the dtype of weights and activations; `entered` makes the context that is entered for the
    time of a replay.
    """

    fix: Fix
    dtype: torch.dtype | None = None
    entered: Callable[[], AbstractContextManager[None]] | None = None


@dataclass(frozen=True)
class Lengths:
    """What is padding in the batch: the tokens of each text, to how many they are padded, and the same batch shorter.

    `cut_to(tokens)` returns the same forward with every text cut, or padded, to so many tokens.
    """

    real: Sequence[int]
    padded_to: int
    cut_to: Callable[[int], Work]


def replay(
    work: Work,
    *,
    timer: Timer,
    queue: DeviceQueue | None = None,
    weights_bytes: float | None = None,
    lengths: Lengths | None = None,
    settings: Sequence[Setting] = (),
    budget_s: float = BUDGET_S,
) -> Replay:
    """Return what one forward, `work`, takes whole, in order and operator by operator, measured within `budget_s`.

    `queue` is that of the GPU it runs on, None on a CPU. `weights_bytes` are those of the model's parameters; without
    them those of all tensors that were there before the call. Raises ValueError where no operator is seen.
    """
    raise NotImplementedError
