"""The checks of step 00: the machine, what the settings ask of it, and on request the model itself."""

import json
import subprocess
import sys
from pathlib import Path

from utils.command import ROOT, EnvironmentLacksError, InputError, Run
from utils.settings import QUICKSTART, Config


def check_machine(run: Run) -> None:
    """Show what `setup/verify.py` finds. Raises EnvironmentLacksError when it finds something lacking."""
    command = [sys.executable, str(ROOT / "setup" / "verify.py"), *(["--json"] if run.args.json else [])]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    run.give(lambda: json.loads(answer.stdout), answer.stdout.rstrip)
    if answer.returncode != 0:
        problems = answer.stderr.strip() or "see the lines above"
        raise EnvironmentLacksError(f"the environment is not ready: {problems}")


def check_settings(config: Config) -> None:
    """Raise EnvironmentLacksError for a device that is not there, InputError for a local file or folder that is not."""
    from boundby.machine import pick_device

    try:
        pick_device(config.model.device)
    except ValueError as error:
        raise EnvironmentLacksError(f"model.device: {error}; set model.device=auto to use what is there") from None
    if config.dataset.file and not Path(config.dataset.file).is_file():
        raise InputError(f"dataset.file: {config.dataset.file} does not exist (looked in {Path.cwd()})")
    name = config.model.name
    looks_local = name.startswith(("/", "./", "../", "~"))
    if name != QUICKSTART and looks_local and not Path(name).is_dir():
        raise InputError(f"model.name: the folder {name} does not exist (looked in {Path.cwd()})")


def check_model(run: Run) -> None:
    """Load the model, show its summary, and compare batched with one-by-one labels."""
    from boundby.machine import pick_device
    from utils import data
    from utils.models import loading as models

    config = run.config
    source = models.locate(config.model, run.layout.dataset.parent)
    data.check_receipt(config, run.layout, source)
    device = pick_device(config.model.device)
    texts = models.agreement_texts(data.load_texts(run.layout).texts)
    limits, trusted = (config.profiling.max_length, config.evaluation.min_agreement), run.args.trust_remote_code
    loaded, agreement = models.load_agreeing(
        source, device, config.model.dtype, texts, limits, trust_remote_code=trusted
    )
    run.say("\n".join(models.summarize(loaded).lines()))
    run.say(f"batched and one-by-one labels agree on {agreement.share:.1%} of {agreement.rows} texts")
    if loaded.choice and loaded.choice.doubt:
        run.note(f"doubt: {loaded.choice.doubt}")
