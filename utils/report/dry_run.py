"""Say what each step would do and why, what would be downloaded, and how long it may take. Changes nothing.

python -m utils.report.dry_run 00 01 02 -- [--config FILE] [--resume] [key.sub=value ...]
"""

import argparse
import json
import math
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from boundby.formatting import Missing, known
from boundby.formatting import number as digits
from utils.baseline import Document, OtherVersion, forecast_in_words, read_document
from utils.command import METRICS_VERSION, Layout, Run, command
from utils.quickstart import cache
from utils.settings import QUICKSTART, Config
from utils.steps import estimate, steps

HUB_TIMEOUT_S = 1.0
ROUNDS_PER_S = 1.5  # of 0.4 s, with what a visit does beside its timed batches
# `boundby.timing.compare.spread_for_same` at 3 % and so many rounds, over the root of the seconds: scipy takes 0.2 s.
SPREAD_BY_ROOT_S = 0.0065
FINDS = 1.5  # times that spread, with which `boundby.timing.compare.rounds_to_find` finds 5 % in each of six rows
USUAL_SPREAD = 0.029  # rounds on two shared cores that nothing else used varied by 1.4 to 3 %


def main(argv: Sequence[str]) -> int:
    """Print the plan of the steps named before `--`; the rest is the command line of a step."""
    split = list(argv).index("--")
    return command(__doc__, lambda run: _show(argv[:split], run), argv[split + 1 :], _step_flags)


def _step_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--trust-remote-code", action="store_true")
    parser.add_argument("--then")


def _show(numbers: Sequence[str], run: Run) -> None:
    config, layout = run.config, run.layout
    minutes, unknown, listed = 0.0, [], []
    # The Hub answers while the steps are decided.
    download = ThreadPoolExecutor(1).submit(_download, config) if "01" in numbers else None
    for number in numbers:
        step = steps.STEPS[number]
        decision = _decision(number, run)
        run.say(f"{number} {step.title}: {'run' if decision.run else 'skip'} ({decision.reason})")
        if step.check and config.trace.enabled:
            run.say(f"   then scripts/{step.check} checks what it left")
        seconds, uncounted = estimate.seconds(number, config, layout) if decision.run else (0.0, None)
        unknown += [uncounted] if uncounted else []
        minutes += seconds / 60
        listed.append({"step": number, "title": step.title, "runs": decision.run, "reason": decision.reason})
    fetched = download.result() if download else None
    document = _document(layout) if "02" in numbers else None
    forecast = (document or {}).get("memory")
    comparable = _to_compare(document, config) if "02" in numbers else None
    price, energy = config.pod.price_per_hour, estimate.energy_wh(minutes, config)
    if fetched:
        run.say(f"download: {fetched}")
    run.say(f"results: {layout.results}")
    run.say(_estimate(minutes, unknown, price))
    if not isinstance(energy, Missing):
        run.say(f"energy of the GPU: at most {digits(energy, 3)} Wh in that time, by its power limit")
    if forecast:
        run.say(f"memory, by the last sweep here: {forecast_in_words(forecast)}")
    if comparable:
        run.say(comparable)
    if run.args.then:
        run.say(f"then, after the last step or a failure: {run.args.then}")
    run.give(
        lambda: {
            "steps": listed,
            "download": fetched,
            "results": str(layout.results),
            "estimated_minutes": round(minutes, 1),
            "estimated_cost": None if price is None else minutes / 60 * price,
            "not_counted": unknown,
            "estimated_energy_wh_at_most": known(energy),
            "energy_reason": energy.reason if isinstance(energy, Missing) else None,
            "then": run.args.then,
            "memory": forecast,
            "to_compare": comparable,
        }
    )


def _decision(number: str, run: Run) -> steps.Decision:
    if run.args.resume:
        return steps.decide(number, run.config, run.layout)
    earlier = any(path.exists() for path in steps.outputs(number, run.layout))
    if not earlier:
        return steps.Decision(True, "it has no results yet")
    if steps.STEPS[number].measures:
        return steps.Decision(True, "without --resume it measures again; the earlier outputs go to previous/")
    return steps.Decision(True, "without --resume every step runs")


def _estimate(minutes: float, unknown: list[str], price_per_hour: float | None) -> str:
    least = "at least " if unknown else ""
    text = f"estimated minutes: {least}{minutes:.1f}"
    if price_per_hour is not None:
        text += f"; {least}{minutes / 60 * price_per_hour:.2f} at {price_per_hour:g} per hour"
    if unknown:
        text += f"; not counted, since it has not run here with these settings: {', '.join(unknown)}"
    return text


def _document(layout: Layout) -> Document | None:
    """Return what step 02 left here, None where there is nothing to read."""
    try:
        return read_document(layout.metrics, METRICS_VERSION)
    except (OSError, ValueError, OtherVersion):
        return None


def _to_compare(document: Document | None, config: Config) -> str | None:
    """Return what a sweep must spend so that two can be compared: by the one that lies here, if it spent less.

    Where none lies here, by what its budget allows rounds to vary.
    """
    if document is None:
        allowed = SPREAD_BY_ROOT_S * math.sqrt(config.profiling.max_seconds_per_batch_size)
        text = (
            "two such runs are found equal within 3 % at nine of ten batch sizes if rounds of half a second vary by at "
            f"most {100 * allowed:.1f} %, and a slowdown of 5 % is found if by at most {100 * FINDS * allowed:.1f} %"
        )
        enough_s = math.ceil((USUAL_SPREAD / SPREAD_BY_ROOT_S) ** 2)
        more = f"; {100 * USUAL_SPREAD:g} % takes profiling.max_seconds_per_batch_size={enough_s}"
        return text if config.profiling.max_seconds_per_batch_size >= enough_s else text + more
    from utils.comparison import budget_for_same, gate_text, minimum_effect  # scipy, for a first dry run too slow

    budget = budget_for_same(document)
    same = budget.text(minimum_effect(document)) if budget and not budget.is_met else None
    return "\n".join(filter(None, [same, f"a gate: {gate}" if (gate := gate_text(document)) else None])) or None


def _download(config: Config) -> str:
    wanted = []
    if config.model.name != QUICKSTART and not Path(config.model.name).is_dir():
        wanted.append(("models", config.model.name, config.model.revision))
    if config.dataset.hf_name:
        wanted.append(("datasets", config.dataset.hf_name, config.dataset.revision))
    if not wanted:
        made = config.model.name == QUICKSTART and not cache.is_ready(Path(config.dataset.local_path).parent)
        return "0 bytes" + ("; the quickstart model is built here, about a minute" if made else "")
    with ThreadPoolExecutor(len(wanted)) as pool:
        return "; ".join(pool.map(lambda repository: _of_repository(*repository), wanted))


def _of_repository(kind: str, name: str, revision: str | None) -> str:
    if _is_cached(kind, name):
        return f"{name}: 0 bytes if the cache is complete"
    if os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on"):
        return f"{name}: not in the cache, and HF_HUB_OFFLINE is set"
    import http.client
    import urllib.request  # 30 ms that an offline dry run does not need

    endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    suffix = f"/revision/{revision}" if revision else ""
    try:
        with urllib.request.urlopen(
            f"{endpoint}/api/{kind}/{name}{suffix}?blobs=true", timeout=HUB_TIMEOUT_S
        ) as answer:
            listed = json.load(answer).get("siblings", [])
    except (OSError, ValueError, http.client.HTTPException) as error:
        why = getattr(error, "reason", None) or type(error).__name__  # its text may hold the address in pieces
        return f"{name}: size unknown, the Hub did not answer ({why})"
    total = sum(file.get("size") or 0 for file in listed if _is_fetched(kind, file.get("rfilename", "")))
    return f"{name}: {total:,} bytes"


def _is_fetched(kind: str, file: str) -> bool:
    return kind == "datasets" or file.endswith((".safetensors", ".json", ".txt", ".model"))


def _is_cached(kind: str, name: str) -> bool:
    home = Path(os.environ.get("HF_HOME", Path.home() / ".cache" / "huggingface"))
    hub = Path(os.environ.get("HF_HUB_CACHE", home / "hub"))
    return (hub / f"{kind}--{name.replace('/', '--')}" / "snapshots").is_dir()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
