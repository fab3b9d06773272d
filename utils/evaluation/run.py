"""Evaluate the dataset: plan it, predict what is missing, prove it complete; for step 02 and `scripts/evaluate.py`."""

import functools
import os
import re
import shutil
from pathlib import Path
from typing import Any

import msgspec
from msgspec import structs

from boundby import files
from boundby.inference import ENGINES
from boundby.machine import Ceilings, ceilings, host_threads, is_gpu, pick_device, release_memory, runtime
from utils.command import EvaluationFolder, InputError, Run, held, set_aside
from utils.data import DataReceipt
from utils.evaluation import engines, planning
from utils.evaluation import plan as plans
from utils.evaluation.finalize import finalize
from utils.evaluation.ray_engine import Demand, on_ray
from utils.evaluation.result import FullDataset
from utils.evaluation.shards import CLAIMED_S, Executor, Receipt, ShardPredictor
from utils.evaluation.storage import Storage, mirrored
from utils.evaluation.tuning import Known
from utils.models import LoadedModel, tasks

PLANNING_S = 1800.0  # that another planner is waited for at most
SHARDS = re.compile(r"(\d{1,6})/(\d{1,6})")


def evaluate(run: Run, loaded: LoadedModel, receipt: DataReceipt, known: Known | None = None) -> FullDataset:
    """Return the metrics over all rows, or over the seeded sample that the settings ask for.

    `known` is what was measured before; None: the limits of the machine. A plan for the same work is kept, with its
    shards.
    """
    folder = _shared_folder(run)
    wanted = planning.identity(run.config, receipt, loaded.source)
    reason = _why_anew(folder, wanted)
    if reason and (aside := _set_aside(run)):
        run.note(f"evaluation starts anew ({reason}); the earlier one is in {aside}")
    made = plan(run, loaded, wanted, known)
    run.note(described(made))
    predict(run, made, loaded=loaded)
    return conclude(run, made)


def make_room(run: Run) -> None:
    """Move the evaluation of an earlier attempt aside in the store too, unless step 02 resumes."""
    if run.config.evaluation.enabled and not run.args.resume and (aside := _set_aside(run)):
        run.note(f"the earlier evaluation is in {aside}")


def kept_plan(run: Run, wanted: plans.Identity, anew: bool) -> plans.Plan | None:
    """Return the plan for `wanted` that is there; None where there is none, or `anew` has moved it aside.

    Raises InputError when it is damaged or for something else.
    """
    if anew:
        if aside := _set_aside(run):
            run.note(f"the earlier evaluation is in {aside}")
        return None
    folder, store = _shared_folder(run), _store(run)
    if not folder.plan.exists():
        return None
    made = plans.load(folder)
    plans.require_same(made, wanted, folder)
    return made if not store or store.plan() else None  # `plan` brings it there, where a kill has come between


def plan(run: Run, loaded: LoadedModel, wanted: plans.Identity, known: Known | None = None) -> plans.Plan:
    """Return the plan for `wanted`, made and written unless it is there; two that plan at once get one plan."""
    folder = _folder(run)
    with held(folder.claims / "plan.lock", PLANNING_S, run.note, "end it if it hangs, or choose another results_dir"):
        store = _store(run)
        if folder.plan.exists():
            made = plans.load(folder)
            plans.require_same(made, wanted, folder)
            if not store or store.plan():
                return made
        else:
            shelf = engines.Shelf(run.layout.converted, _closed(store), run.args.trust_remote_code)
            known = known or Known(functools.cache(lambda: _limits(run, loaded)))
            made = planning.make(wanted, run.layout.dataset, loaded, _workers(run), shelf, known)
            engines.tidy(shelf, Path(made.places.converted) if made.places.converted else None)
            made = structs.replace(made, attempt=store.attempt() if store else None)
            plans.save(made, folder)
        if store and made.choices.converted:
            raise InputError(
                f"{folder.plan}: computes with a converted model, which a store does not bring to others; "
                f"`{plans.PLAN_COMMAND} --anew` plans without one"
            )
        if store and (theirs := store.push_plan(folder)):
            run.note(f"another runner has just planned in {store.url}; its plan is used")
            return theirs
    return made


def _limits(run: Run, loaded: LoadedModel) -> Ceilings:
    dtypes = tuple(dict.fromkeys([*ceilings.usual_dtypes(loaded.device), loaded.dtype]))
    return ceilings.cached(run.layout.ceilings, loaded.device, dtypes)[0]


def planned(run: Run, wanted: plans.Identity, *, computes: bool) -> plans.Plan:
    """Return the plan that is there. Raises InputError when there is none, or one for something else.

    Processor and versions must be the planned ones only where it `computes` here.
    """
    folder = _shared_folder(run)
    made = plans.load(folder)
    if not computes or run.config.evaluation.engine == "ray":
        wanted = structs.replace(wanted, **{name: getattr(made.identity, name) for name in plans.OF_THE_MACHINE})
    plans.require_same(made, wanted, folder)
    return made


def predict(run: Run, made: plans.Plan, shards: str | None = None, loaded: LoadedModel | None = None) -> None:
    """Predict what is missing of the plan, or of the share `shards` ("0/4"), with `loaded` unless Ray does it."""
    chosen = _share(len(made.shards), shards)
    with host_threads(made.choices.threads_per_worker):
        executor = _executor(run, made, loaded)
        total = sum(made.shards[shard].rows for shard in chosen)
        with run.progress(total, "evaluation") as progress:
            done = _Pace(tasks.of(made.identity.task))
            left = chosen
            for wait_for_others in (False, True):  # what another runner has claimed comes last
                claimed = []
                for receipt in executor(left, wait_for_others):
                    if receipt.status == "claimed":
                        claimed.append(receipt.shard)
                    else:
                        progress.advance(receipt.rows, done.add(receipt))
                left = sorted(claimed)
                if not left:
                    break
                if not wait_for_others:
                    waits = f"at most {CLAIMED_S / 60:.0f} min for each, then it is predicted here too"
                    run.note(f"{len(left)} of the parts are claimed by another runner; waiting, {waits}")


def conclude(run: Run, made: plans.Plan) -> FullDataset:
    """Return the metrics over all rows, once every row is proven to be predicted once; remove locks and torn files."""
    folder = _folder(run)
    if store := _store(run):
        store.pull(folder, range(len(made.shards)))
    metrics = finalize(made, folder, run.layout.dataset, sorted(run.config.dataset.sample_sizes or []))
    shutil.rmtree(folder.claims, ignore_errors=True)
    files.remove_orphans(folder.path)
    return metrics


class _Pace:
    """How right and how fast the shards of this attempt were."""

    def __init__(self, task: Any) -> None:
        self._task = task
        self._rows = self._predicted = 0
        self._correct: int | None = None  # what is right shows nowhere without labels
        self._seconds = 0.0

    def add(self, receipt: Receipt) -> str:
        self._rows += receipt.rows
        if receipt.correct is not None:
            self._correct = (self._correct or 0) + receipt.correct
        self._predicted += receipt.rows if receipt.status == "predicted" else 0
        self._seconds += receipt.seconds
        rate = f", {self._predicted / self._seconds:.1f} samples/s per worker" if self._seconds else ", kept"
        return f"{self._task.pace(self._correct, self._rows)}{rate}"


def _executor(run: Run, made: plans.Plan, loaded: LoadedModel | None) -> Executor:
    settings, folder, store = run.config.evaluation, _folder(run), _store(run)
    trusted = run.args.trust_remote_code
    if settings.engine == "ray":
        if loaded is not None and is_gpu(loaded.device):  # a worker on that GPU has a model of its own
            loaded.model.to("cpu")
            release_memory(loaded.device)
        demand = Demand(settings.workers, settings.gpus_per_worker, settings.storage, trusted)
        return on_ray(folder.plan, demand, run.note)
    if loaded is not None:
        predictor = ShardPredictor(made, folder, loaded)
    else:
        predictor = ShardPredictor.open(folder.plan, run.config.model.device, trust_remote_code=trusted)
    return mirrored(predictor.predict_shards, folder, store) if store else predictor.predict_shards


def _why_anew(folder: EvaluationFolder, wanted: plans.Identity) -> str | None:
    """Return why what lies in `folder` cannot be continued; None where it can, or where nothing lies there."""
    if not folder.plan.exists():
        return "it has parts and no plan" if any(folder.path.glob("part-*")) else None
    try:
        return "; ".join(plans.differences(plans.load(folder).identity, wanted)) or None
    except InputError as error:
        return str(error)


def _share(shards: int, share: str | None) -> list[int]:
    """Return the ids of the shards that "i/n" stands for: every n-th from i on; all for None."""
    if share is None:
        return list(range(shards))
    stated = SHARDS.fullmatch(share)
    if not stated or int(stated[1]) >= int(stated[2]):
        raise InputError(f"--shards is {share!r}; it is i/n with 0 <= i < n, such as 0/4 for the first of 4 runners")
    return list(range(int(stated[1]), shards, int(stated[2])))


def _workers(run: Run) -> int:
    """Return how many workers share this machine, or one like it."""
    settings = run.config.evaluation
    if settings.engine == "local":
        return 1
    if settings.workers and "RAY_ADDRESS" not in os.environ:
        return settings.workers
    device = pick_device(run.config.model.device)
    return runtime(device).device_count() if is_gpu(device) else 1


def described(made: plans.Plan) -> str:
    """Return the plan as a line for the terminal."""
    choices, why = made.choices, made.reasons.token_budget.reason
    shards, threads = len(made.shards), choices.threads_per_worker
    engine = made.reasons.engine
    known = ENGINES.get(choices.precision)
    precision = known.words if known else choices.precision.replace("_", " ")
    return (
        f"{made.identity.rows:,} texts in {shards} part{'s'[: shards != 1]}, in {precision}, "
        f"on {threads} thread{'s'[: threads != 1]}; batches of at most {choices.token_budget:,} tokens ({why})"
        f"{f'; {engine.reason}' if engine else ''}"
    )


def _closed(store: Storage | None) -> str | None:
    return f"no engine was tried: {store.url} would not bring its model to other machines" if store else None


def summary(run: Run, made: plans.Plan) -> dict[str, Any]:
    """Return the plan as --json prints it: where it lies, how much there is to predict, and how much is left."""
    folder = _folder(run)
    done = sum(folder.part(shard).exists() for shard in range(len(made.shards)))
    return {
        "folder": str(folder.path),
        "plan": made.fingerprint,
        "texts": made.identity.rows,
        "parts": len(made.shards),
        "parts_done": done,
        **msgspec.to_builtins(made.choices),
    }


def _folder(run: Run) -> EvaluationFolder:
    return EvaluationFolder(run.layout.evaluation)


def _shared_folder(run: Run) -> EvaluationFolder:
    """Return the folder, with the plan of the store where it has none or a replaced one.

    Raises InputError when the two are plans for different things.
    """
    folder, store = _folder(run), _store(run)
    if store and folder.plan.exists() and (theirs := store.plan()) and _is_replaced(folder, theirs, store.url):
        aside = set_aside([folder.path], run.layout)
        run.note(f"{store.url} was planned anew; what lay here is in {aside}")
    if store and not folder.plan.exists():
        store.pull_plan(folder)
    return folder


def _is_replaced(folder: EvaluationFolder, theirs: plans.Plan, url: str) -> bool:
    try:
        mine = plans.load(folder)
    except InputError:  # which the caller tells, or cures
        return False
    if differing := plans.differences(theirs.identity, mine.identity):
        raise InputError(
            f"{folder.plan} and the plan in {url} are for different things: here {'; '.join(differing)}. Nothing was "
            "changed. Choose another output.results_dir or another evaluation.storage"
        )
    return mine.fingerprint != theirs.fingerprint


def _set_aside(run: Run) -> str | None:
    """Move what lies in the folder and in the store to previous/; return the places, None when nothing lay there."""
    store, folder = _store(run), _folder(run)
    if folder.path.exists() and not folder.is_ours:
        raise InputError(
            f"{folder.path}: is not an evaluation of ours; nothing was moved. Choose another output.results_dir"
        )
    paths = [set_aside([_folder(run).path], run.layout), store and store.set_aside()]
    return " and ".join(str(path) for path in paths if path) or None


def _store(run: Run) -> Storage | None:
    url = run.config.evaluation.storage
    return Storage(url) if url else None
