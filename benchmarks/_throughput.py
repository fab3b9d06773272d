"""One attempt by the plain loop or by us, each in a fresh process; prints one line of JSON last."""

import argparse
import json
import random
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # find the packages of this checkout

BATCH_SIZE, TOKENS = 8, 32
WORDS = ("card", "money", "account", "payment", "bank", "number", "code", "time", "name", "order", "cash", "change")
WARM_UP_CALLS, WARM_UP_S = 10, 1.0
LOOPS_PER_S = 2  # 20 batches of 0.04 s at 10 s: a dozen rounds fill the budget
HALF_WIDTH = 0.01  # narrower than the pipeline's 3 %, so that ours spends its budget too


def texts(tokenizer: Any, count: int) -> list[str]:
    """Return made-up texts of exactly `TOKENS` tokens each. Raises ValueError where the tokenizer cannot give them."""
    words = [word for word in WORDS if len(tokenizer(word, add_special_tokens=False)["input_ids"]) == 1]
    length = TOKENS - tokenizer.num_special_tokens_to_add()
    rng = random.Random(0)
    made = [" ".join(rng.choices(words, k=length)) for _ in range(count)] if words else []
    lengths = {len(ids) for ids in tokenizer(made)["input_ids"]} if made else set()
    if lengths != {TOKENS}:
        raise ValueError(f"the made-up texts have {sorted(lengths)} tokens, not {TOKENS}")
    return made


def plain(model_path: str, seconds: float) -> dict[str, Any]:
    """Return the throughput as a plain loop gives it: batch size over the median time of a forward."""
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_path)
    model = AutoModelForSequenceClassification.from_pretrained(model_path, dtype=torch.float32).eval()
    batch = tokenizer(texts(tokenizer, BATCH_SIZE), return_tensors="pt")
    with torch.inference_mode():
        _loop(lambda: model(**batch), WARM_UP_S, WARM_UP_CALLS)
        times = _loop(lambda: model(**batch), seconds, 1)
    said = f"median of {len(times)} forwards in {sum(times):.1f} s"
    return {"samples_per_s": BATCH_SIZE / median(times), "said": said}


def ours(model_path: str, seconds: float) -> dict[str, Any]:
    """Return the throughput as our row gives it, measured with the instruments of the pipeline, and its doubts."""
    import torch

    from boundby.machine import Sampler
    from utils.baseline import Guard, InferenceProfiler, SweepSettings, instruments
    from utils.models import load_model_and_tokenizer

    model, tokenizer = load_model_and_tokenizer(model_path, "cpu", "float32")
    device = torch.device("cpu")
    guard = Guard(instruments.watch(device))
    runs = max(5, int(LOOPS_PER_S * seconds))
    visits: list[Any] = []
    with Sampler(instruments.source(device)) as sampler:
        profiler = InferenceProfiler(model, tokenizer, device, sampler=sampler, guard=guard)
        row = profiler.profile_multiple_batch_sizes(
            texts(tokenizer, BATCH_SIZE * runs),
            [BATCH_SIZE],
            runs,
            TOKENS,
            settings=SweepSettings(ci_half_width=HALF_WIDTH, max_seconds=seconds),
            on_visit=visits.append,
        )[0]
    value = row["throughput_samples_per_sec_mean"]
    if value is None:
        raise RuntimeError(f"{row['status']}: {row['reasons']['all']}")
    half_width = row["throughput_half_width_pct"]
    reach = "no interval" if half_width is None else f"+-{half_width:.1f} %"
    spent = sum(visit.spent_s for visit in visits)
    # All forwards are alike, so a plain median of the very same ones shows what the estimate itself adds.
    same = BATCH_SIZE / median(timing.seconds for visit in visits for timing in visit.of("isolated"))
    said = f"{reach} from {row['rounds']} rounds in {spent:.1f} s, {row['status']}"
    said += f"; {100 * (value / same - 1):+.1f} % from the plain median of the same forwards"
    return {"samples_per_s": value, "said": said, "doubts": list(row["doubts"])}


METHODS = {"plain": plain, "ours": ours}


def main() -> None:
    """Measure once and print the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("method", choices=METHODS)
    parser.add_argument("model")
    parser.add_argument("--seconds", type=float, required=True)
    args = parser.parse_args()
    result = METHODS[args.method](args.model, args.seconds)
    import torch
    import transformers

    result["threads"] = torch.get_num_threads()
    result["versions"] = {"torch": torch.__version__, "transformers": transformers.__version__}
    print(json.dumps(result))


def _loop(call: Any, seconds: float, least: int) -> list[float]:
    """Return the seconds of each call, made until `seconds` are spent in them and `least` are made."""
    times: list[float] = []
    spent = 0.0
    while spent < seconds or len(times) < least:
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
        spent += times[-1]
    return times


if __name__ == "__main__":
    main()
