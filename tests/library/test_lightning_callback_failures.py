"""Whatever fails around `ProfilerCallback`, the fit ends as it would without it, and what was recorded is readable."""

import errno
import importlib
import shutil
import signal

import pytest
import torch
from torch.autograd import profiler as autograd_profiler
from torch.utils.data import DataLoader

from boundby.capture import exclusion
from boundby.integrations import lightning as callback_module
from boundby.integrations.lightning import ProfilerCallback
from boundby.patches import Patches
from boundby.trace import read_trace
from boundby.training import read_stage_times
from tests import lightning_fits as fits
from tests.lightning_fits import BATCH, LIGHTNING, STEPS, Rows, losses_of, module_of, nobody, profiled

pytestmark = [pytest.mark.filterwarnings(each) for each in fits.WARNINGS]


@pytest.fixture(autouse=True)
def no_profiler_outlives_a_test():
    yield
    assert not autograd_profiler._is_profiler_enabled


@pytest.fixture(scope="module")
def bare():
    return losses_of()


def raising(*_, **__):
    raise OSError(errno.ENOSPC, "no space left on device")


def remarks_of(fit):
    return str([*fit.document("profiler_summary.json")["given_up"], *fit.document("manifest.json")["downgrades"]])


@pytest.mark.parametrize("method", ["__init__", "stop"])
def test_a_profiler_that_raises_leaves_the_fit_as_it_is(method, tmp_path, bare, monkeypatch):
    monkeypatch.setattr(torch.profiler.profile, method, raising)
    fit = profiled(tmp_path)
    monkeypatch.undo()  # what the failed profiler left is stopped with the real method
    if autograd_profiler._is_profiler_enabled:
        torch.autograd._disable_profiler()
        autograd_profiler._is_profiler_enabled = False
    assert fit.module.losses == bare
    assert "no space left" in remarks_of(fit)
    assert fit.times.status == "finished" and fit.times.last_step == STEPS - 1
    assert not (fit.callback.manager.folder / "chrome_trace.json").exists()


def test_what_the_tensorboard_folder_cannot_take_is_said_once(tmp_path, bare, monkeypatch):
    monkeypatch.setattr(callback_module, "give_name", raising)
    fit = profiled(tmp_path, given={"repeat_cycles": 2, "schedule_every_n_steps": 3})
    assert fit.module.losses == bare
    assert sum("no space left" in each for each in fit.said) == 1
    assert "hook of trace_ready" in remarks_of(fit)
    assert (fit.callback.manager.folder / "op_stats.csv").stat().st_size > 0


def test_without_reports_what_fails_is_said_and_nothing_else(tmp_path, monkeypatch):
    assert profiled(tmp_path / "sound", given={"reports": False}).said == []
    monkeypatch.setattr(torch.profiler.profile, "start", raising)
    [told] = profiled(tmp_path / "broken", given={"reports": False}).said
    assert told.startswith("trace: OSError: ") and "no space left" in told


def test_a_fit_without_a_step_leaves_a_readable_folder_without_the_trace_of_an_earlier_fit(tmp_path, monkeypatch):
    trace = tmp_path / "logs" / "Tiny" / "chrome_trace.json"
    monkeypatch.setattr(callback_module, "judge_training", raising)
    fit = profiled(tmp_path)
    assert trace.exists()
    assert "whole step" in fit.said[0] and "no space left" in fit.said[1], "a verdict that fails leaves the rest"
    with pytest.raises(RuntimeError, match="the model fails"):
        profiled(tmp_path, kinds={"fail_at": 0})
    assert not trace.exists() and read_stage_times(trace.parent).last_step is None


def test_a_folder_that_is_removed_meanwhile_ends_nothing(tmp_path, bare):
    fired = []

    class Removing(type(fits.watcher_of(LIGHTNING, nobody))):
        def on_train_batch_end(self, *_):
            if not fired:
                fired.append(shutil.rmtree(tmp_path / "logs"))

    callback = ProfilerCallback(True, tmp_path / "logs", 3, 0, 1, 1, say=nobody)
    assert losses_of(LIGHTNING, callback, Removing()) == bare
    assert read_stage_times(tmp_path / "logs" / "Tiny").status == "finished"


@pytest.mark.parametrize("package", fits.PACKAGES)
def test_the_exception_of_a_model_passes_and_the_times_until_then_are_written(package, tmp_path):
    callback = ProfilerCallback(True, tmp_path, 3, 0, 1, 1, say=nobody)
    module = module_of(package, fail_at=4)
    with pytest.raises(RuntimeError, match="the model fails"):
        fits.fit(package, module, DataLoader(Rows(STEPS * BATCH, nobody), batch_size=BATCH), callback)
    times = read_stage_times(tmp_path / "Tiny")
    assert (times.status, times.error) == ("failed", "RuntimeError: the model fails")
    assert times.rows_of("step", "step")["step"].tolist() == [0, 1, 2, 3]
    assert times.remarks == () and times.open == ()
    assert "training_step" not in vars(module.trainer.strategy)


def test_an_interrupt_ends_as_lightning_ends_it(tmp_path):
    handler = signal.getsignal(signal.SIGINT)
    callback = ProfilerCallback(True, tmp_path, 3, 0, 1, 1, say=nobody)
    try:
        with pytest.raises(SystemExit):
            losses_of(LIGHTNING, callback, kinds={"fail_at": 4, "error": KeyboardInterrupt()})
    finally:
        signal.signal(signal.SIGINT, handler)
    times = read_stage_times(tmp_path / "Tiny")
    assert (times.status, times.last_step) == ("failed", 3)
    assert (tmp_path / "Tiny" / "op_stats.csv").stat().st_size > 0


@pytest.mark.parametrize("name", ["_steps_to_come", "FitStages", "ProfilerManager"])
def test_a_start_that_fails_is_said_and_the_fit_goes_on(name, tmp_path, bare, monkeypatch):
    assert profiled(tmp_path, given={"say": raising}).module.losses == bare, "a listener that raises is none"
    monkeypatch.setattr(callback_module, name, raising)
    fit = profiled(tmp_path)
    assert fit.module.losses == bare
    assert [each for each in fit.said if "no space left" in each] == fit.said and len(fit.said) == 1


def test_a_part_that_this_lightning_has_not_goes_unmarked(tmp_path, bare, monkeypatch):
    put = Patches.put

    def lacking(patches, owner, name, wrapper):
        return put(patches, owner, "absent" if name == "batch_to_device" else name, wrapper)

    monkeypatch.setattr(Patches, "put", lacking)
    fit = profiled(tmp_path)
    assert fit.module.losses == bare
    assert [each.what for each in fit.times.remarks] == ["stage h2d"]
    assert "forward" in fit.order() and "h2d" not in fit.order()


def test_a_step_that_is_skipped_by_the_module_leaves_the_others(tmp_path):
    class Skipping(type(fits.watcher_of(LIGHTNING, nobody))):
        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            module.on_train_batch_start = lambda *_: -1 if batch_idx == 3 else None

    callback = ProfilerCallback(True, tmp_path, 3, 0, 1, 1, say=nobody)
    losses_of(LIGHTNING, callback, Skipping(), max_epochs=2)
    times = read_stage_times(tmp_path / "Tiny")
    assert times.rows_of("step", "step")["step"].tolist() == [0, 1, 2, 3, 4, 5]
    assert times.remarks == ()


def test_an_optimizer_that_asks_several_times_has_one_stage_in_a_step(tmp_path):
    pl = importlib.import_module(LIGHTNING)

    class Searching(type(module_of(LIGHTNING))):
        def configure_optimizers(self):
            return torch.optim.LBFGS(self.parameters(), max_iter=3)

    assert issubclass(Searching, pl.LightningModule)
    callback = ProfilerCallback(True, tmp_path, 3, 0, 1, 1, say=nobody)
    fits.fit(LIGHTNING, Searching(), DataLoader(Rows(4, nobody), batch_size=2), callback)
    times = read_stage_times(tmp_path / "Searching")
    assert len(times.rows_of("optimizer")) == len(times.rows_of("step", "step")) == 2
    assert len(times.rows_of("forward")) > 2
    assert times.remarks == ()


def test_the_manager_writes_where_it_is_told_to(tmp_path):
    profiled(tmp_path, given={"run_folder": tmp_path / "run"})
    names = {path.name for path in (tmp_path / "run").iterdir()}
    assert names >= {"stage_times.json", "profiler_summary.json", "manifest.json", "op_stats.csv", "trace.json"}
    assert len(list((tmp_path / "logs" / "Tiny").iterdir())) == len(list(tmp_path.glob("logs/Tiny/*trace.json"))) == 2


@pytest.mark.filterwarnings("ignore:.*torch.profiler", "ignore:Profiler clears events")
def test_a_torch_profiler_of_the_trainer_records_what_it_would_alone(tmp_path, bare):
    profiler = importlib.import_module(f"{LIGHTNING}.profilers").PyTorchProfiler(dirpath=tmp_path / "theirs")
    fit = profiled(tmp_path, profiler=profiler)
    assert fit.module.losses == bare
    [theirs] = (tmp_path / "theirs").glob("*.pt.trace.json")
    assert {f"ProfilerStep#{number}" for number in (2, 3, 4)} <= set(read_trace(theirs).names)
    assert not list((tmp_path / "logs").rglob("*trace*.json"))
    assert exclusion.BEGUN in remarks_of(fit)
    assert fit.times.status == "finished" and fit.times.last_step == STEPS - 1
