"""What each fix would do to the time of a forward, from its replays and shapes, with a bound that limits alone set."""

from collections.abc import Callable, Sequence

from boundby.roofline import Limits
from boundby.split import Replay, Split
from boundby.verdict import Fix, Gain


def predictions(
    replay: Replay,
    split: Split,
    limits_under: Callable[[Fix], Limits | None],
    *,
    lengths: Sequence[int] | None = None,
    input_s: float | None = None,
    batch_sizes: Sequence[int] = (),
) -> tuple[Gain, ...]:
    """Return the gain that is predicted of each fix that applies, with its 90 % interval, and the most it can bring.

    `limits_under` returns the machine's limits under a fix (its dtype, its precision of products; those in use for any
    other), None where they were not measured: then there is no bound, and no gain. `lengths` are the tokens of each
    text of the batch, `input_s` the seconds to make its input, `batch_sizes` those to predict. Both ends of a gain are
    factors of the throughput.
    """
    raise NotImplementedError
