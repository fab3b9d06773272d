"""Decide how many tokens a batch has: by a search on this machine where the evaluation is long enough to pay for it."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from boundby.device import is_host
from boundby.inference import Predictor, search_token_budget
from boundby.inference.planning import BUDGET_ROUNDS as SEARCH_ROUNDS
from boundby.inference.planning import token_budgets

PROBE_ROWS = 16
SAMPLE_ROWS = 2048
BATCHES = 2  # full ones of the largest budget that the texts of a search must make
SHARE, MOST_S = 0.02, 30.0  # of the evaluation, and at most, that the search may take
LEAST_BUDGET = 256


@dataclass(frozen=True)
class Budget:
    """Tokens per batch, why so many, and the seconds that the same texts took by budget (None: not measured)."""

    token_budget: int
    reason: str
    seconds: dict[str, float] | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return the choice as the plan holds it."""
        return asdict(self)


def seconds_per_token(predictor: Predictor, texts: Sequence[str]) -> float:
    """Return about how long a token takes, from a few of the texts; the first pass is cold and does not count."""
    predictor.predict(texts[:PROBE_ROWS])
    found = predictor.predict(texts[:PROBE_ROWS])
    return found.seconds.compute_s / int(found.lengths.sum())


def choose(predictor: Predictor, texts: Sequence[str], evaluated_rows: int, token_s: float) -> Budget:
    """Return the fastest budget for texts such as these, or the usual one where a search would not pay."""
    lengths = predictor.tokenize(texts).lengths
    budgets = token_budgets(predictor.device)
    cumulative = np.cumsum(lengths)
    if cumulative[-1] < BATCHES * max(budgets):
        return _usual(predictor, texts, cumulative, "not measured: all texts together are too few")
    enough = int(np.searchsorted(cumulative, BATCHES * max(budgets))) + 1
    whole_s = token_s * float(lengths.mean()) * evaluated_rows
    search_s = token_s * int(cumulative[enough - 1]) * len(budgets) * (SEARCH_ROUNDS + 1)
    if search_s > min(SHARE * whole_s, MOST_S):
        reason = f"not measured: a search would take {search_s:.1f} s of about {whole_s:.1f} s"
        return _usual(predictor, texts, cumulative, reason)
    found = search_token_budget(predictor, texts[:enough])
    reason = f"the smallest that is as good as the fastest on {enough} texts"
    return Budget(found.token_budget, reason, {str(budget): seconds for budget, seconds in found.seconds.items()})


def _usual(predictor: Predictor, texts: Sequence[str], cumulative: np.ndarray, reason: str) -> Budget:
    """Return the usual budget, or the largest half, quarter, … of it whose batches fit into the memory of a GPU."""
    budget = predictor.token_budget
    while not is_host(predictor.device) and budget > LEAST_BUDGET:
        full = texts[: int(np.searchsorted(cumulative, budget)) + 1]
        if not predictor.with_token_budget(budget).predict(full).halvings:
            break
        budget //= 2
    return Budget(budget, reason if budget == predictor.token_budget else f"{2 * budget} tokens ran out of memory")
