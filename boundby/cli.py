"""The command `boundby`: each of its words runs one file of the pipeline, the same that a checkout runs by its path.

The wheel holds the pipeline inside of the package, laid out as a checkout is, so that a file finds its neighbours in
both. Nothing is loaded here but what starts the file.
"""

import difflib
import re
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

import boundby

USAGE = 2
PACKAGE = Path(__file__).resolve().parent
IS_INSTALLED = (PACKAGE / "pipeline").is_dir()
PIPELINE = PACKAGE / "pipeline" if IS_INSTALLED else PACKAGE.parent  # the folder of the files below
# Word -> the file that it runs, and what it is for.
COMMANDS = {
    "run": ("run_pipeline.py", "measure a text classifier: sweep, accuracy, trace, layers, report"),
    "check": ("scripts/00_check_setup.py", "say what this machine has and what it lacks"),
    "view": ("scripts/view.py", "show the card of a run again"),
    "report": ("scripts/04_visualize_results.py", "step 04 of a run alone: pictures and report"),
    "compare": ("scripts/compare_runs.py", "tell which of several runs is faster, with intervals"),
    "summary": ("scripts/summary.py", "sum a run up for a language model, in 4 KB"),
    "export": ("scripts/export.py", "take a run to MLflow, Weights & Biases or TensorBoard"),
    "evaluate": ("scripts/evaluate.py", "label a whole dataset, on many machines if need be"),
    "download": ("scripts/01_download_data.py", "step 01 of a run alone: fetch the model and the texts"),
    "baseline": ("scripts/02_baseline_inference.py", "step 02 of a run alone: sweep and accuracy"),
    "profile": ("scripts/03_detailed_profiling.py", "step 03 of a run alone: trace and layers"),
    "variants": ("scripts/05_compare_variants.py", "step 05 of a run alone: try the fixes, say which one to ship"),
    "trace": ("scripts/analyze_trace.py", "say what a trace of torch.profiler shows"),
    "layers": ("scripts/profile_layers.py", "measure the layers of a model"),
    "plan": ("scripts/plan_partition.py", "plan how to split a model over devices"),
    "run-plan": ("scripts/run_plan.py", "run such a plan beside its prediction"),
    "train": ("scripts/profile_training.py", "record the steps of a training: boundby train -- python train.py"),
    "check-profile": ("scripts/check_profile.py", "check that a recorded profile is whole and true"),
    "validate": ("scripts/validate_dataset.py", "check a dataset before it is measured"),
    "monitor": ("scripts/monitor.py", "watch training runs in a browser"),
}
SHOWN = """usage: boundby COMMAND [arguments]

What is your model bound by, and what would fixing that gain?

{}

boundby COMMAND --help tells of one; boundby --version; boundby --completion bash|zsh|fish"""
IN_PYTHON = "it is a call in Python: boundby.explain(model, batch); "
OF_A_CHECKOUT = re.compile(r"(?<![\w./-])(?:python (?=\w)|(?=scripts/))((?:scripts/)?\w+\.py)\b")


def as_typed(text: str) -> str:
    """Return `text` with the commands of a checkout, or their files, as they are typed where we run."""
    words = {file: word for word, (file, _) in COMMANDS.items()}
    if not IS_INSTALLED:
        return text
    return OF_A_CHECKOUT.sub(lambda match: f"boundby {words[match[1]]}" if match[1] in words else match[0], text)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the file that the first argument names with the others; return 2 for a word that is no command.

    The file ends the process itself, with its own exit code.
    """
    word, *rest = (sys.argv[1:] if arguments is None else list(arguments)) or ["--help"]
    if word in ("--help", "-h"):
        width = max(map(len, COMMANDS))
        print(SHOWN.format("\n".join(f"  {name:{width}}  {purpose}" for name, (_, purpose) in COMMANDS.items())))
        return 0
    if word in ("--version", "-V"):
        print(f"boundby {boundby.__version__}")
        return 0
    if word == "--completion":
        from boundby import completion  # noqa: PLC0415 - no other word needs it

        if len(rest) == 1 and rest[0] in completion.SCRIPTS:
            print(completion.script(rest[0], {name: purpose for name, (_, purpose) in COMMANDS.items()}))
            return 0
        print(f"boundby --completion takes one of {', '.join(completion.SCRIPTS)}", file=sys.stderr)
        return USAGE
    if word not in COMMANDS:
        near = difflib.get_close_matches(word, COMMANDS, 1)
        meant = IN_PYTHON if word == "explain" else f"did you mean {near[0]}? " if near else ""
        print(f"boundby: there is no command {word!r}; {meant}known: {', '.join(COMMANDS)}", file=sys.stderr)
        return USAGE
    file = PIPELINE / COMMANDS[word][0]
    sys.argv = [f"boundby {word}", *rest]
    sys.path.insert(0, str(PIPELINE))
    runpy.run_path(str(file), run_name="__main__")
    return 0


if __name__ == "__main__":
    sys.exit(main())
