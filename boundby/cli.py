"""The words of the command `boundby`: the file of the pipeline that each runs, and how it is typed here.

The wheel holds the pipeline inside of the package, laid out as a checkout is, so that a file finds its neighbours in
both.
"""

import shlex
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent
IS_INSTALLED = (PACKAGE / "pipeline").is_dir()
PIPELINE = PACKAGE / "pipeline" if IS_INSTALLED else PACKAGE.parent  # the folder of the files below
# Word -> the file that it runs, and what it is for.
COMMANDS = {
    "run": ("run_pipeline.py", "measure a text classifier: sweep, accuracy, trace, layers, report"),
    "check": ("scripts/00_check_setup.py", "show what this machine has and what is missing"),
    "view": ("scripts/view.py", "show the card of a run again"),
    "report": ("scripts/04_visualize_results.py", "step 04 of a run alone: pictures and report"),
    "compare": ("scripts/compare_runs.py", "compare runs: which one is faster, with intervals"),
    "summary": ("scripts/summary.py", "summarize a run for a language model, in 4 KB"),
    "export": ("scripts/export.py", "export a run to MLflow, Weights & Biases or TensorBoard"),
    "evaluate": ("scripts/evaluate.py", "predict a whole dataset, on several machines if needed"),
    "download": ("scripts/01_download_data.py", "step 01 of a run alone: fetch the model and the texts"),
    "baseline": ("scripts/02_baseline_inference.py", "step 02 of a run alone: sweep and accuracy"),
    "profile": ("scripts/03_detailed_profiling.py", "step 03 of a run alone: trace and layers"),
    "variants": ("scripts/05_compare_variants.py", "step 05 of a run alone: try the fixes and recommend one"),
    "trace": ("scripts/analyze_trace.py", "analyze a trace of torch.profiler"),
    "layers": ("scripts/profile_layers.py", "measure the layers of a model"),
    "plan": ("scripts/plan_partition.py", "plan how to split a model over devices"),
    "run-plan": ("scripts/run_plan.py", "run such a plan beside its prediction"),
    "train": ("scripts/profile_training.py", "record the steps of a training: boundby train -- python train.py"),
    "check-profile": ("scripts/check_profile.py", "check that a recorded profile is complete and consistent"),
    "validate": ("scripts/validate_dataset.py", "check a dataset before it is measured"),
    "monitor": ("scripts/monitor.py", "watch training runs in a browser"),
}


def typed(word: str, *arguments: str) -> str:
    """Return the line that runs a command here: `boundby WORD …` where it is installed, its file in a checkout."""
    start = ["boundby", word] if IS_INSTALLED else ["python", COMMANDS[word][0]]
    return shlex.join([*start, *arguments])
