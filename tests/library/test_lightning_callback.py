"""A fit under `ProfilerCallback`: the same result whatever fails, the stages where they belong, and every file."""

import copy
import csv
import errno
import importlib
import importlib.util
import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import DataLoader

from boundby.capture import session
from boundby.capture.patches import Patches
from boundby.trace import read_trace
from boundby.training import ProfilerManager, read_stage_times
from boundby.training import lightning as callback_module
from boundby.training.lightning import ProfilerCallback, folder_name
from tests import lightning_fits as fits
from tests.lightning_fits import (
    BATCH,
    LIGHTNING,
    PACKAGES,
    STEPS,
    Endless,
    Fit,
    Rows,
    losses_of,
    module_of,
    nobody,
    profiled,
)

pytestmark = [pytest.mark.filterwarnings(warning) for warning in fits.WARNINGS]

STEP = ["data", "h2d", "callbacks", "forward", "zero_grad", "backward", "optimizer", "callbacks", "step"]
AFTER_EPOCH = ["epoch", "callbacks", "step"]  # the last step of an epoch holds what callbacks do at its end


@pytest.fixture(scope="module", params=PACKAGES)
def rich(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("rich")
    callbacks = importlib.import_module(request.param).callbacks
    checkpoint = callbacks.ModelCheckpoint(folder / "checkpoints", every_n_train_steps=4)
    witness, said = fits.Witness(), []
    callback = ProfilerCallback(True, folder / "logs", 3, 0, 1, 1, 2, say=said.append)
    witness.callback = callback
    module = module_of(request.param, witness, scheduler=True)
    others = [fits.watcher_of(request.param, witness) for _ in range(2)]
    rows = DataLoader(Rows(STEPS * BATCH, witness), batch_size=BATCH, shuffle=True)
    settings = {"max_epochs": 2, "gradient_clip_val": 1.0, "enable_checkpointing": True}
    val = DataLoader(Rows(BATCH, witness), batch_size=BATCH)
    trainer = fits.fit(request.param, module, rows, others[0], callback, others[1], checkpoint, val=val, **settings)
    return Fit(folder, trainer, module, callback, witness, said)


def test_the_signature_is_that_of_the_specification_and_what_cannot_be_is_refused_by_its_name():
    callback = ProfilerCallback()
    assert (callback.enabled, callback.output_dir) == (False, Path("outputs/profiler_logs"))
    schedule = callback.schedule
    assert (schedule.wait, schedule.warmup, schedule.active, schedule.repeat, schedule.every) == (1, 1, 3, 2, 50)
    assert callback.max_trace_bytes == 256_000_000
    for name in ("active_steps", "repeat_cycles", "max_trace_mb"):
        with pytest.raises(ValueError, match=f"^{name} is 0; give "):
            ProfilerCallback(**{name: 0})


def test_the_limit_of_a_trace_reaches_the_recording(tmp_path):
    fit = profiled(tmp_path, given={"max_trace_mb": 0.001}, max_steps=3)
    cycle = fit.callback.manager.manifest.cycles[-1]
    assert cycle.json_bytes > 1000 and cycle.trace_path.is_file()
    assert "above the limit of 0.0 MB; kept all the same" in fit.callback.manager.manifest.downgrades[-1].reason


class Mine(ProfilerCallback):
    def on_train_end(self, *_):
        self.ended = True


@pytest.mark.parametrize("package", PACKAGES)
def test_it_is_a_callback_of_every_package_in_use_and_a_class_of_the_user_keeps_its_name_and_methods(package):
    base = importlib.import_module(package).Callback
    for kind in (ProfilerCallback, Mine):
        callback = kind()
        assert isinstance(callback, base) and isinstance(callback, kind)
        assert type(copy.deepcopy(callback)) is type(callback)
    callback.on_train_end(None, None)
    assert (callback.ended, type(callback).__name__, ProfilerCallback().state_key) == (True, "Mine", "ProfilerCallback")


def test_what_is_installed_decides_where_nothing_is_imported_yet_and_without_any_the_import_says_what(monkeypatch):
    spec = importlib.util.find_spec("boundby.training.lightning")
    for package_name in PACKAGES:
        monkeypatch.delitem(sys.modules, package_name, raising=False)
    for package in PACKAGES:
        installed = lambda name, package=package: name if name == package.split(".")[0] else None  # noqa: E731
        monkeypatch.setattr(importlib.util, "find_spec", installed)
        assert callback_module.packages_in_use() == (package,)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ImportError, match="pip install 'lightning>=2.6.6'"):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


def test_every_part_runs_in_its_stage(rich):
    around = {part: rich.witness.around(part) for part, _ in rich.witness.seen}
    epoch = ("epoch",)
    assert around["transfer"] - {(*epoch, "callbacks", "evaluation")} == {(*epoch, "h2d")}
    assert around["forward"] == {(*epoch, "forward")}
    assert around["backward"] == {(*epoch, "backward")}
    assert around["optimize"] == {(*epoch, "optimizer")}
    assert around["callback before"] == around["callback behind"] == {(*epoch, "callbacks")}
    assert around["validate"] == {(*epoch, "callbacks", "evaluation")}
    assert around["schedule"] - {()} == {(*epoch, "callbacks", "scheduler")}
    assert around["read"] == {(*epoch, "data"), (*epoch, "callbacks", "evaluation")}


FIRST = ["data", "h2d", "callbacks", "forward", "zero_grad", "backward", "callbacks"]
SECOND = ["data", "h2d", "callbacks", "forward", "backward", "optimizer", "callbacks", "step"]


@pytest.mark.parametrize(
    ("settings", "epoch", "epochs"),
    [
        ({"max_epochs": 2}, STEP * STEPS, 2),
        ({"precision": "bf16-mixed", "max_steps": 4}, STEP * 4, 1),
        ({"accumulate_grad_batches": 2}, (FIRST + SECOND) * (STEPS // 2), 1),
    ],
    ids=["two epochs", "half precision", "steps of two batches"],
)
def test_the_stages_of_a_step_follow_one_another_and_the_losses_are_the_same(tmp_path, settings, epoch, epochs):
    fit = profiled(tmp_path, **settings)
    assert fit.order() == ["callbacks", *["data", *epoch[:-2], *AFTER_EPOCH] * epochs]
    assert fit.times.rows_of("step", "step")["step"].tolist() == list(range(epoch.count("step") * epochs))
    assert fit.module.losses == losses_of(**settings)


def test_an_iterable_is_fetched_ahead_and_its_waits_are_data(tmp_path):
    data = lambda tell: DataLoader(Endless(Rows(STEPS * BATCH, tell)), batch_size=BATCH)  # noqa: E731
    fit = profiled(tmp_path, data=data, max_epochs=2)
    assert fit.witness.around("read") == {("epoch", "data")}  # but for those before the training began
    assert len(fit.times.rows_of("step", "step")) == 2 * STEPS
    assert fit.times.remarks == ()


def test_manual_optimization_nests_its_stages_in_the_forward(tmp_path):
    fit = profiled(tmp_path, kinds={"manual": True})
    assert fit.witness.around("backward") == {("epoch", "forward", "backward")}
    assert fit.witness.around("optimize") == {("epoch", "forward", "optimizer")}
    assert fit.times.rows_of("step", "step")["step"].tolist() == list(range(STEPS))
    assert fit.module.losses == losses_of(kinds={"manual": True})
    assert fit.times.remarks == ()


def test_every_file_says_something_stages_and_verdict_are_said_and_nothing_is_left_on_the_trainer(rich):
    folder = rich.folder / "logs" / "Tiny"
    assert rich.callback.manager.folder == folder
    for name in ("stage_times.json", "profiler_summary.json", "manifest.json", "op_stats.csv", "trace.json"):
        assert (folder / name).stat().st_size > 100, name
    with (folder / "op_stats.csv").open(newline="") as file:
        assert "aten::addmm" in {row["name"] for row in csv.DictReader(file)}
    manifest = rich.document("manifest.json")
    assert (manifest["steps_recorded"], manifest["steps_expected"]) == (2, 2)
    assert manifest["downgrades"] == manifest["warnings"] == []
    summary = rich.document("profiler_summary.json")
    assert (summary["status"], summary["last_step"], summary["given_up"]) == ("finished", 2 * STEPS - 1, [])
    assert {"data", "forward", "clip", "scheduler", "checkpoint"} <= {stage["name"] for stage in summary["stages"]}
    table, _, verdict = rich.said[0].partition("What:")
    assert re.search(r"^data +\d+\.\d +\d+\.\d{3}", table, re.MULTILINE) and "whole step" in table
    assert f"What:{verdict}".splitlines() == summary["verdict"]["text"] and len(rich.said) == 1
    written = json.dumps([manifest, summary, rich.said])
    assert (
        "already saved" not in written and "stack.empty" not in written
    )  # and no warning: pytest makes errors of them
    trainer = rich.trainer
    epochs = trainer.fit_loop.epoch_loop
    owners = (trainer, trainer.strategy, epochs, epochs.val_loop, epochs.automatic_optimization)
    owners += (trainer.strategy.precision_plugin, *trainer.optimizers)
    wrapped = {name for owner in owners for name, value in vars(owner).items() if hasattr(value, "__wrapped__")}
    assert wrapped == {"step"}  # of the optimizer, by torch's scheduler
    assert not any(optimizer._optimizer_step_post_hooks for optimizer in trainer.optimizers)


def test_tensorboard_finds_a_trace_of_each_cycle_named_as_torch_s_own_handler_names_it(rich, tmp_path):
    folder, theirs = rich.folder / "logs" / "Tiny", []
    exporter = SimpleNamespace(export_chrome_trace=lambda path, **_: theirs.append(Path(path).name))
    torch.profiler.tensorboard_trace_handler(str(tmp_path), worker_name="rank0")(exporter)
    traces = sorted(folder.glob("*.pt.trace.json"))
    name = re.compile(r"\d{15,}")
    assert [name.sub("TIME", trace.name) for trace in traces] == [name.sub("TIME", theirs[0])] * 2
    cycles = [folder / f"trace_cycle{number}.json" for number in (1, 2)]
    assert [path.read_bytes() for path in traces] == [path.read_bytes() for path in cycles]
    assert (folder / "chrome_trace.json").read_bytes() == cycles[1].read_bytes()
    for number, path in zip((1, 4), traces, strict=True):
        trace = json.loads(path.read_text())
        names = {event.get("name") for event in trace["traceEvents"]}
        assert trace["schemaVersion"] and f"ProfilerStep#{number}" in names and "aten::addmm" in names


def test_a_validation_between_recorded_steps_is_marked_in_the_trace(tmp_path):
    val = DataLoader(Rows(BATCH, nobody), batch_size=BATCH)
    fit = profiled(tmp_path, given={"active_steps": 3}, val=val, val_check_interval=3)
    trace = read_trace(fit.callback.manager.folder / "trace.json")
    marks = [trace.names[index] for index in trace.name.tolist()]
    assert [marks.count(f"ProfilerStep#{number}") for number in (1, 2, 3)] == [1, 1, 1]
    assert marks.count("excluded: evaluation") == 1, "that after the step 2; that at the end was not recorded"


def test_without_being_enabled_it_does_nothing(tmp_path):
    seen = []
    callback = ProfilerCallback(output_dir=tmp_path / "logs")

    class Looking(type(fits.watcher_of(LIGHTNING, nobody))):
        def on_train_batch_end(self, trainer, *_):
            seen.append("training_step" in vars(trainer.strategy))

    assert losses_of(LIGHTNING, callback, Looking(), max_epochs=2) == losses_of(max_epochs=2)
    assert seen == [False] * (2 * STEPS)
    assert callback.manager is None and list(tmp_path.iterdir()) == []


def test_a_trainer_of_the_package_that_was_imported_later_takes_it_too_and_hears_it_in_its_log(tmp_path, monkeypatch):
    monkeypatch.setattr(callback_module, "packages_in_use", lambda: (LIGHTNING,))
    fit = profiled(tmp_path, PACKAGES[1], given={"say": None}, max_steps=3)
    assert not isinstance(fit.callback, importlib.import_module(PACKAGES[1]).Callback)
    assert fit.callback.say is importlib.import_module(f"{PACKAGES[1]}.utilities.rank_zero").rank_zero_info
    assert fit.order() == ["callbacks", "data", *(STEP * 3)[:-2], *AFTER_EPOCH]


def test_a_resumed_fit_counts_on(tmp_path):
    first = profiled(tmp_path / "first")
    first.trainer.save_checkpoint(tmp_path / "last.ckpt")
    second = profiled(tmp_path / "second", ckpt=tmp_path / "last.ckpt", max_epochs=2)
    assert second.times.rows_of("step", "step")["step"].tolist() == list(range(STEPS, 2 * STEPS))
    assert second.times.first_step == STEPS


def test_a_callback_can_serve_two_fits(tmp_path):
    callback = ProfilerCallback(True, tmp_path, 3, 0, 1, 1, 1, say=nobody)
    losses = [losses_of(LIGHTNING, callback, max_steps=steps) for steps in (3, 5)]
    assert [len(loss) for loss in losses] == [3, 5]
    assert read_stage_times(tmp_path / "Tiny").last_step == 4
    assert len(list((tmp_path / "Tiny").glob("*.pt.trace.json"))) == 2


@pytest.mark.parametrize(
    ("module", "name"),
    [
        (type("BaselineCNN", (), {})(), "BaselineCNN"),
        (type("A", (), {"model_name": "resnet"})(), "resnet"),
        (type("A", (), {"model_name": "../../etc/x y"})(), "_.._etc_x_y"),
        (type("A", (), {"model_name": ".."})(), "A"),
        (type("A", (), {"model_name": "x" * 300})(), "x" * 100),
        (type("Modèle", (), {"model_name": 3})(), "Mod_le"),
    ],
)
def test_the_folder_is_named_after_the_model(module, name):
    assert folder_name(module) == name


@pytest.fixture(scope="module")
def bare():
    return losses_of()


def raising(*_, **__):
    raise OSError(errno.ENOSPC, "no space left on device")


def remarks_of(fit):
    return str([*fit.document("profiler_summary.json")["given_up"], *fit.document("manifest.json")["downgrades"]])


def test_what_the_tensorboard_folder_cannot_take_is_said_once(tmp_path, bare, monkeypatch):
    monkeypatch.setattr(callback_module, "publish_cycle", raising)
    fit = profiled(tmp_path, given={"repeat_cycles": 2, "schedule_every_n_steps": 3})
    assert fit.module.losses == bare
    assert sum("no space left" in line for line in fit.said) == 1
    assert "hook of trace_ready" in remarks_of(fit)
    assert (fit.callback.manager.folder / "op_stats.csv").stat().st_size > 0


def test_without_reports_what_fails_is_said_and_nothing_else(tmp_path, monkeypatch):
    assert profiled(tmp_path / "sound", given={"reports": False}).said == []
    monkeypatch.setattr(torch.profiler.profile, "start", raising)
    [remark] = profiled(tmp_path / "broken", given={"reports": False}).said
    assert remark.startswith("trace: OSError: ") and "no space left" in remark


def test_a_fit_without_a_step_leaves_a_readable_folder_without_the_trace_of_an_earlier_fit(tmp_path, monkeypatch):
    trace = tmp_path / "logs" / "Tiny" / "chrome_trace.json"
    monkeypatch.setattr(ProfilerManager, "told", raising)
    fit = profiled(tmp_path)
    assert trace.exists()
    assert "no space left" in fit.said[0], "a report that fails leaves the rest"
    with pytest.raises(RuntimeError, match="the model fails"):
        profiled(tmp_path, kinds={"fail_at": 0})
    assert not trace.exists() and read_stage_times(trace.parent).last_step is None


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


@pytest.mark.parametrize("name", ["_steps_to_come", "FitStages", "ProfilerManager"])
def test_a_start_that_fails_is_said_and_the_fit_goes_on(name, tmp_path, bare, monkeypatch):
    assert profiled(tmp_path, given={"say": raising}).module.losses == bare, "a listener that raises is none"
    monkeypatch.setattr(callback_module, name, raising)
    fit = profiled(tmp_path)
    assert fit.module.losses == bare
    assert [line for line in fit.said if "no space left" in line] == fit.said and len(fit.said) == 1


def test_a_part_that_this_lightning_has_not_goes_unmarked(tmp_path, bare, monkeypatch):
    put = Patches.put

    def lacking(patches, owner, name, wrapper):
        return put(patches, owner, "absent" if name == "batch_to_device" else name, wrapper)

    monkeypatch.setattr(Patches, "put", lacking)
    fit = profiled(tmp_path)
    assert fit.module.losses == bare
    assert [remark.what for remark in fit.times.remarks] == ["stage h2d"]
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
    assert session.BEGUN in remarks_of(fit)
    assert fit.times.status == "finished" and fit.times.last_step == STEPS - 1
