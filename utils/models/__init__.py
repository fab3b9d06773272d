"""The classifier, loaded.

`loading` loads what `utils.model_source` finds, `summary` says how large it is, and `consistency` whether batches give
the labels that single texts give.
"""

from utils.model_source import ModelSource, fetch, locate
from utils.models.consistency import AGREEMENT_ROWS, Agreement, agreement, agreement_texts
from utils.models.loading import (
    LoadedModel,
    effective_max_length,
    load,
    load_model_and_tokenizer,
    token_counter,
    use_matmul_precision,
)
from utils.models.summary import ModelSummary, summarize

__all__ = [
    "AGREEMENT_ROWS",
    "Agreement",
    "LoadedModel",
    "ModelSource",
    "ModelSummary",
    "agreement",
    "agreement_texts",
    "effective_max_length",
    "fetch",
    "load",
    "load_model_and_tokenizer",
    "locate",
    "summarize",
    "token_counter",
    "use_matmul_precision",
]
