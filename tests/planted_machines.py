"""Six machines whose limit is known by construction, each through steps 01 and 02; prints what was said, as JSON.

python -m tests.planted_machines FOLDER          with the environment of `tests.gpu_double.environment`
"""

import contextlib
import importlib
import io
import json
import random
import sys
from collections.abc import Callable
from pathlib import Path

from tests.gpu_double import H100, Card, plugged_in
from tests.tiny_models import LABELS, WORDS, save_bert

ROOT = Path(__file__).resolve().parents[1]
HOST = H100.slower(1, host=250).with_(kernel_s=2e-5)  # few calls fill a second: the clock moves, nothing waits
EVEN: Callable[[int], int] = lambda row: 24  # noqa: E731
SKEWED: Callable[[int], int] = lambda row: 60 if row % 8 == 0 else 4  # noqa: E731
# What is planted, the card, and the words in each text.
MACHINES: dict[str, tuple[Card, Callable[[int], int]]] = {
    "host": (HOST, EVEN),
    "compute": (HOST.with_(float32_flops_per_s=2e7, tf32_flops_per_s=2e7), EVEN),
    "memory": (HOST.with_(bytes_per_s=1e7, float32_flops_per_s=1e12), EVEN),
    "padding": (HOST.with_(float32_flops_per_s=2e7, tf32_flops_per_s=2e7), SKEWED),
    "transfer": (HOST.with_(pcie_bytes_per_s=3e4), EVEN),
    "throttled": (HOST.with_(throttles_after_s=8.0), EVEN),
}


def run(folder: Path, name: str, card: Card, words: Callable[[int], int]) -> dict[str, object]:
    """Return what step 02 said on this machine: code, bound, causes by their share, doubts of rows and verdict."""
    texts = folder / f"{name}.csv"
    chance = random.Random(0)
    rows = [f"{' '.join(chance.choices(WORDS, k=words(row)))},{LABELS[row % 3]}" for row in range(64)]
    texts.write_text("\n".join(["text,labels", *rows]) + "\n")
    results = folder / name
    arguments = [
        "--config", str(ROOT / "configs" / "config.yaml"), f"model.name={folder / 'model'}", "model.dtype=float32",
        "dataset.hf_name=null", f"dataset.file={texts}", f"dataset.local_path={folder / f'{name}-data' / 'val.csv'}",
        f"output.results_dir={results}", "profiling.batch_sizes=[1,16]", "profiling.max_seconds_per_batch_size=1",
    ]  # fmt: skip
    said = io.StringIO()
    with plugged_in(card), contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        codes = [importlib.import_module(f"scripts.{step}").main(arguments)
                 for step in ("01_download_data", "02_baseline_inference")]  # fmt: skip
    metrics = json.loads((results / "baseline_metrics.json").read_text())
    verdict = metrics["batch_sizes"][-1]["verdict"]
    return {"name": name, "codes": codes, "rows": metrics["batch_sizes"], "verdict": verdict, "said": said.getvalue()}


def main(folder: Path, names: list[str]) -> None:
    """Run the machines named, or all."""
    save_bert(folder / "model")
    for name, (card, words) in MACHINES.items():
        if not names or name in names:
            print(json.dumps(run(folder, name, card, words)), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
