"""The evaluation on a real Ray of this machine: the same bytes, also when a worker is killed, and nothing left running.

One run shows it all, because starting Ray takes several seconds; `tests/truth` has many kills and the clock.
"""

import os
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from tests import evaluation_workplace as workplace
from tests import ray_workers
from utils.evaluation import planning, ray_engine

pytest.importorskip("ray", reason="Ray is not installed: bash setup_environment.sh --ray")
pytestmark = pytest.mark.timeout(600)  # half a minute on a machine with nothing else to do
PATIENCE_S = 60.0  # for processes that were told to end


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """What was seen of an evaluation on Ray, one worker of which was killed in its first shard, and of one without."""
    folder = tmp_path_factory.mktemp("ray")
    settings = workplace.prepare(folder, workplace.texts())
    on_ray = [*settings, "evaluation.engine=ray", "evaluation.workers=2"]
    seen: dict = {"workers": [], "processes": [], "handlers": []}

    def describe(worker) -> dict:  # nested: Ray then sends it, and imports nothing from the tests
        import torch

        project = [Path(sys.modules[name].__file__) for name in ("utils", "boundby")]
        return {"pid": os.getpid(), "folder": Path.cwd(), "project": project, "threads": torch.get_num_threads()}

    def watched(ray, workers, *arguments):
        return ray_engine_distribute(ray, [Watched(ray, worker) for worker in workers], *arguments)

    class Watched:
        def __init__(self, ray, worker):
            self.start, self.predict = worker.start, SimpleNamespace(remote=self.ask)
            self.ray, self.worker = ray, worker

        def ask(self, shards, wait_for_others):
            seen["workers"].append(self.ray.get(self.worker.__ray_call__.remote(describe)))
            seen["processes"] = ray_workers.started()
            seen["handlers"].append(signal.getsignal(signal.SIGTERM))
            victim = seen["workers"][0]["pid"] if len(seen["workers"]) == 1 else None
            if victim is not None:
                os.kill(victim, signal.SIGSTOP)  # so that it cannot answer before it dies
            answer = self.worker.predict.remote(shards, wait_for_others)
            if victim is not None:
                os.kill(victim, signal.SIGKILL)
            return answer

    ray_engine_distribute = ray_engine.distribute
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(planning.SHARD_ROWS, "cpu", 8)
        patch.setattr(ray_engine, "distribute", watched)
        assert workplace.evaluate(on_ray, "plan") == [0]
        assert workplace.evaluate(settings, "run", "finalize") == [0, 0]
        ours = [*on_ray, f"output.results_dir={folder / 'ray'}"]
        seen["codes"] = workplace.evaluate(ours, "plan", "run", "finalize")
        seen["left"] = psutil.wait_procs(ray_workers.started(), timeout=PATIENCE_S)[1]
    seen["without"] = workplace.results(folder / "results" / "evaluation")
    seen["with"] = workplace.results(folder / "ray" / "evaluation")
    return seen


def test_a_worker_that_is_killed_costs_nothing_and_changes_no_byte(seen):
    assert seen["codes"] == [0, 0, 0]
    pids = [worker["pid"] for worker in seen["workers"]]
    assert pids[0] not in pids[1:] and len(pids) == 5  # Ray itself asks again for the shard of the killed worker
    assert sum(name.startswith("part-") for name in seen["with"]) == 5 and seen["with"] == seen["without"]


def test_workers_have_the_project_from_ray_and_the_threads_of_the_plan(seen):
    for worker in seen["workers"]:
        assert "_ray_pkg_" in worker["folder"].name
        assert all(path.is_relative_to(worker["folder"]) for path in worker["project"])
        assert worker["threads"] == max(1, torch.get_num_threads() // 2)


def test_ray_leaves_no_process_no_file_and_no_handler_of_signals(seen):
    assert len(seen["processes"]) > 3  # else the next line would prove nothing
    assert seen["left"] == []
    folders = {worker["folder"] for worker in seen["workers"]}
    assert [folder for folder in folders if "boundby-ray-" not in str(folder) or folder.exists()] == []
    assert {handler.__module__ for handler in seen["handlers"]} == {"utils.command.cli"}  # which makes it exit code 143
