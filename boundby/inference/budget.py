"""How many tokens to compute at once on this machine: a short search on texts like those to come."""

from collections.abc import Sequence
from dataclasses import dataclass

from boundby.inference.predictor import Predictor

BUDGETS = {"cpu": (512, 1024, 2048, 4096, 8192), "cuda": (8192, 16384, 32768, 65536)}
ROUNDS = 2
AS_GOOD = 1.02  # of the least seconds: the smaller budget needs less memory


@dataclass(frozen=True)
class BudgetChoice:
    """The token budget, and the least seconds that the texts took with each budget that was tried."""

    token_budget: int
    seconds: dict[int, float]


def search_token_budget(
    predictor: Predictor, texts: Sequence[str], budgets: Sequence[int] | None = None
) -> BudgetChoice:
    """Return the smallest budget that is within 2 % of the fastest on these texts, a few hundred of them at least.

    The budgets take turns in two rounds, after one that does not count. One that the memory does not hold without
    halving is left out. Raises ValueError where there are no texts.
    """
    if not texts:
        raise ValueError("there are no texts to search a token budget with")
    tokens = predictor.tokenize(texts)
    tried = budgets or BUDGETS.get(predictor.device.type, BUDGETS["cpu"])
    seconds: dict[int, float] = {}
    for number in range(ROUNDS + 1):
        for budget in tried if number % 2 else tuple(reversed(tried)):
            found = predictor.with_token_budget(budget).predict_tokens(tokens)
            if found.halvings:
                seconds[budget] = float("inf")
            elif number:
                seconds[budget] = min(found.seconds.compute_s, seconds.get(budget, float("inf")))
    kept = {budget: spent for budget, spent in sorted(seconds.items()) if spent != float("inf")}
    if not kept:
        return BudgetChoice(min(tried), {})
    least = min(kept.values())
    return BudgetChoice(next(budget for budget, spent in kept.items() if spent <= AS_GOOD * least), kept)
