"""From texts to predictions at the machine's limit: tokens, batches, strategies, precision.

`Predictor` turns texts into float32 logits by the fastest strategy that a self-check against the model's own forward
allows. `choose_precision` measures what it may compute in, `search_token_budget` how much it should compute at once;
`exactness` says what that does to the labels.

    options = PredictorOptions(max_length=512)
    choice = choose_precision(model, tokenizer, Sample(texts), PrecisionRule("fastest"), options)
    predictor = Predictor(model, tokenizer, choice.options, choice.check_texts)
    predictor = predictor.with_token_budget(search_token_budget(predictor, texts).token_budget)
    prediction = predictor.predict(texts)  # .logits [rows, labels] float32, in the order of the texts
"""

from boundby.inference.batches import (
    TOKENIZER_CHUNK,
    Batch,
    Tokens,
    batches_in_order,
    collate,
    forward,
    token_budget_batches,
    tokenize,
)
from boundby.inference.packing import UnsupportedAttention
from boundby.inference.planning import (
    SAMPLE_ROWS,
    BudgetChoice,
    PrecisionChoice,
    PrecisionRule,
    Sample,
    choose_precision,
    search_token_budget,
)
from boundby.inference.precision import PRECISIONS, Precision, matmul_effect, weight_bytes
from boundby.inference.predictor import Prediction, Predictor, PredictorOptions, TimeSplit
from boundby.inference.reference import ExactnessReport, compare_logits, margins, one_by_one, require_classifier
from boundby.inference.rotary import rotary_of
from boundby.inference.selfcheck import Refusal, SelfCheck
from boundby.machine.compile_cache import compile_obstacle

__all__ = [
    "PRECISIONS",
    "SAMPLE_ROWS",
    "TOKENIZER_CHUNK",
    "Batch",
    "BudgetChoice",
    "ExactnessReport",
    "Precision",
    "PrecisionChoice",
    "PrecisionRule",
    "Prediction",
    "Predictor",
    "PredictorOptions",
    "Refusal",
    "Sample",
    "SelfCheck",
    "TimeSplit",
    "Tokens",
    "UnsupportedAttention",
    "batches_in_order",
    "choose_precision",
    "collate",
    "compare_logits",
    "compile_obstacle",
    "forward",
    "margins",
    "matmul_effect",
    "one_by_one",
    "require_classifier",
    "rotary_of",
    "search_token_budget",
    "token_budget_batches",
    "tokenize",
    "weight_bytes",
]
