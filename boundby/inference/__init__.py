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

from boundby import hand_on

__getattr__, __dir__, __all__ = hand_on(__name__, __file__)
