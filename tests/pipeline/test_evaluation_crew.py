"""Workers that come late, die or fail cost no shard and double none; the store holds whole files or none."""

import json
import sys
from collections import deque
from concurrent import futures
from pathlib import Path
from types import SimpleNamespace

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from msgspec import structs
from safetensors.torch import load_file

from boundby import files
from tests import evaluation_workplace as workplace
from tests.tiny_models import save_bert
from utils.command.artifacts import EvaluationFolder
from utils.command.errors import EnvironmentLacksError, InputError, PipelineError
from utils.evaluation import plan as plans
from utils.evaluation import planning, ray_engine, storage
from utils.evaluation.shards import Receipt, ShardPredictor


class FakeRay:
    """Workers that answer at once; shard n meets the errors of `troubles[n]`, one at a time."""

    class exceptions:
        class RayError(Exception):
            pass

        class RayTaskError(RayError):
            def __init__(self, cause):
                self.cause = cause

    def __init__(self, troubles=None, late=()):
        self.troubles = {shard: deque(errors) for shard, errors in (troubles or {}).items()}
        self.late = set(late)  # workers that never have their model
        self.asked: list[tuple[int, list[int]]] = []
        self.killed: list[int] = []

    def kill(self, worker, no_restart):
        assert not no_restart
        self.killed.append(worker.number)


class FakeWorker:
    def __init__(self, ray: FakeRay, number: int) -> None:
        self.ray, self.number = ray, number
        self.start, self.predict = SimpleNamespace(remote=self._start), SimpleNamespace(remote=self._predict)

    def _start(self):
        return self._answer(None if self.number in self.ray.late else [])

    def _predict(self, shards, wait_for_others):
        self.ray.asked.append((self.number, list(shards)))
        error = next((self.ray.troubles[shard].popleft() for shard in shards if self.ray.troubles.get(shard)), None)
        return self._answer(error or [Receipt(shard, "predicted") for shard in shards])

    def _answer(self, result):
        answer = futures.Future()
        if isinstance(result, Exception):
            answer.set_exception(result)
        elif result is not None:
            answer.set_result(result)
        return SimpleNamespace(future=lambda: answer)


def work(ray: FakeRay, shards: int, size: int = 2, at_once: int = 1) -> tuple[list[int], list[str]]:
    said: list[str] = []
    workers = [FakeWorker(ray, number) for number in range(size)]
    receipts = ray_engine.distribute(ray, workers, range(shards), at_once, False, said.append)
    return sorted(receipt.shard for receipt in receipts), said


def failed(error: Exception) -> Exception:
    return FakeRay.exceptions.RayTaskError(error)


@pytest.mark.parametrize("at_once", [1, 4])
@pytest.mark.parametrize("shards", [0, 1, 3, 20])
def test_every_shard_is_done_once_and_no_worker_has_more_than_its_share(shards, at_once):
    ray = FakeRay()
    assert work(ray, shards, size=3, at_once=at_once) == (list(range(shards)), [])
    assert max((len(asked) for _, asked in ray.asked), default=0) <= min(at_once, max(1, -(-shards // 3)))
    ray = FakeRay(late=(1, 2))  # workers that have not started hold up nothing
    assert work(ray, shards, size=3, at_once=at_once)[0] == list(range(shards))
    assert {worker for worker, _ in ray.asked} <= {0}


def test_a_shard_is_tried_three_times_where_the_program_fails_ten_where_workers_are_lost_and_once_where_the_user_errs():
    error = failed(RuntimeError("device-side assert"))
    ray = FakeRay({1: [error] * 2})
    done, said = work(ray, 4, size=1)
    assert done == [0, 1, 2, 3] and len(said) == len(ray.killed) == 2
    with pytest.raises(PipelineError, match="failed in shard 1, 3 times, at last: RuntimeError: device-side assert"):
        work(FakeRay({1: [error] * 3}), 4)
    with pytest.raises(PipelineError, match="lost in shard 1, 10 times, at last: out of memory. The finished shards"):
        work(FakeRay({1: [FakeRay.exceptions.RayError("out of memory\nand more")]}), 4)
    ray = FakeRay({0: [failed(InputError("the dataset changed"))]})
    with pytest.raises(InputError, match="the dataset changed"):
        work(ray, 4)
    assert ray.killed == []


# --- the worker


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A dataset and a model, the command line that evaluates it, and the bytes an undisturbed evaluation leaves."""
    folder = tmp_path_factory.mktemp("crew")
    settings = workplace.prepare(folder, workplace.texts())
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(planning.SHARD_ROWS, "cpu", 8)
        assert workplace.evaluate(settings, *workplace.WHOLE) == [0, 0, 0]
    return EvaluationFolder(folder / "results" / "evaluation"), settings


@pytest.fixture
def planned(made, tmp_path, monkeypatch):
    """A folder that holds the plan alone, and the bytes that belong there."""
    monkeypatch.setitem(planning.SHARD_ROWS, "cpu", 8)
    folder = EvaluationFolder(tmp_path / "evaluation")
    files.write_bytes(folder.plan, made[0].plan.read_bytes())
    return folder, parts_of(made[0])


def parts_of(folder: EvaluationFolder) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.path.glob("part-*")}


def opened(folder: EvaluationFolder, store: str | None = None) -> ray_engine.Worker:
    worker = ray_engine.Worker(folder.plan, ray_engine.Demand(store_url=store))
    worker.open()
    return worker


def test_a_worker_that_is_asked_for_several_shards_leaves_the_same_bytes(planned):
    folder, expected = planned
    worker = opened(folder)
    for shards in ((0, 1), (2,), (0, 3, 4)):
        assert sorted(receipt.shard for receipt in worker.predict(shards, False)) == list(shards)
    assert parts_of(folder) == expected


def test_a_machine_unlike_the_planned_one_is_refused(planned):
    folder, _ = planned
    made = plans.load(folder)
    plans.save(
        structs.replace(
            made, identity=structs.replace(made.identity, versions={**made.identity.versions, "torch": "1"})
        ),
        folder,
    )
    with pytest.raises(InputError, match=r"not such a machine as was planned for: versions.torch is .*, planned was 1"):
        opened(folder)
    plans.save(structs.replace(made, identity=structs.replace(made.identity, device_name="another")), folder)
    with pytest.raises(InputError, match="device_name is .*, planned was another"):
        opened(folder)


def test_a_plan_that_a_worker_cannot_see_is_one_message_with_the_way_out(tmp_path):
    with pytest.raises(InputError, match=r"plan.json: cannot be seen on .*evaluation\.storage"):
        opened(EvaluationFolder(tmp_path / "elsewhere"))


# --- the store


@pytest.fixture
def puts(monkeypatch):
    """The names of the objects that were put into stores in memory, in their order."""
    names: list[str] = []
    put = MemoryFileSystem.put_file

    def counted(self, path, where, **options):
        names.append(Path(where).name)
        put(self, path, where, **options)

    monkeypatch.setattr(MemoryFileSystem, "put_file", counted)
    yield names
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]


def at(settings, folder: Path, store: str) -> list[str]:
    return [*settings, f"output.results_dir={folder}", f"evaluation.storage={store}"]


@pytest.mark.parametrize("kind", ["memory", "file"])
def test_runners_without_a_shared_folder_make_one_evaluation_through_a_store(made, planned, tmp_path, puts, kind):
    store = "memory://run" if kind == "memory" else f"file://{tmp_path}/store"
    first, second, third = (at(made[1], tmp_path / name, store) for name in ("first", "second", "third"))
    assert workplace.evaluate(first, "plan", "run --shards 0/2") == [0, 0]
    assert workplace.evaluate(second, "run --shards 1/2") == [0]
    before = list(puts)
    assert workplace.evaluate(third, "finalize") == [0]
    assert workplace.results(tmp_path / "third" / "evaluation") == workplace.results(made[0].path)
    assert workplace.evaluate(second, "run", "finalize") == [0, 0]
    assert puts == before  # the second one had nothing to do
    if kind == "memory":
        assert sorted(name for name in puts if name.startswith("part-")) == sorted(parts_of(made[0]))  # each once
        costs = [name.replace("part", "cost").replace("parquet", "json") for name in parts_of(made[0])]
        assert all(puts.index(cost) < puts.index(part) for cost, part in zip(costs, parts_of(made[0]), strict=True))
    else:
        left = {path.name for path in (tmp_path / "store").iterdir() if path.is_file()}
        assert left == {path.name for path in made[0].path.glob("[cp]*-*")} | {"plan.json"}


def test_a_damaged_part_in_the_store_is_done_again_and_replaced(made, planned, tmp_path, puts):
    settings = at(made[1], tmp_path / "one", "memory://run")
    assert workplace.evaluate(settings, "plan", "run") == [0, 0]
    whole = MemoryFileSystem().cat_file("/run/part-00001.parquet")
    MemoryFileSystem().pipe_file("/run/part-00001.parquet", whole[:-9])
    puts.clear()
    assert workplace.evaluate(at(made[1], tmp_path / "two", "memory://run"), "run", "finalize") == [0, 0]
    assert puts == ["cost-00001.json", "part-00001.parquet"]
    assert MemoryFileSystem().cat_file("/run/part-00001.parquet") == whole


def test_a_worker_needs_the_store_alone_and_proves_its_inputs(made, planned, tmp_path, monkeypatch, puts):
    folder, expected = planned
    store = storage.Storage("memory://run")
    store.push_plan(folder)
    positions = [tmp_path / name for name in ("one", "two")]
    for directory in positions:
        directory.mkdir()
    monkeypatch.chdir(positions[0])
    names = ray_engine.Worker(Path("/nowhere/plan.json"), ray_engine.Demand(store_url="memory://run"))
    used = names.open().plan.places
    assert all(Path(path).is_relative_to(positions[0]) for path in (used.dataset, used.model))
    assert [names.predict([shard], False)[0].status for shard in (0, 1, 0)] == ["predicted", "predicted", "kept"]
    assert parts_of(folder) == {}
    assert store.pull(folder, range(5)) == {0, 1}
    assert parts_of(folder) == {name: expected[name] for name in ("part-00000.parquet", "part-00001.parquet")}
    dataset = next(path for path in MemoryFileSystem.store if path.endswith(".csv"))
    MemoryFileSystem().pipe_file(dataset, MemoryFileSystem().cat_file(dataset).replace(b"good", b"bad", 1))
    with pytest.raises(InputError, match="are not those of the plan"):
        store.fetch_inputs(positions[1])


@pytest.mark.parametrize("kind", ["memory", "file"])
def test_weights_in_a_subfolder_reach_a_worker_through_the_store_under_their_path(tmp_path, puts, kind):
    model = save_bert(tmp_path / "model")
    weights = model / "sub" / "part.safetensors"
    weights.parent.mkdir()
    (model / "model.safetensors").rename(weights)
    index = {"metadata": {}, "weight_map": dict.fromkeys(load_file(weights), "sub/part.safetensors")}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    settings = workplace.prepare(tmp_path, workplace.texts(3), model)
    store = storage.Storage("memory://run" if kind == "memory" else f"file://{tmp_path}/store")
    assert workplace.evaluate(at(settings, tmp_path / "run", store.url), "plan") == [0]
    plan = store.fetch_inputs(tmp_path / "worker")
    fetched = Path(plans.load(EvaluationFolder(plan.parent)).places.model)
    assert (fetched / "sub" / "part.safetensors").read_bytes() == weights.read_bytes()
    ShardPredictor.open(plan)


def test_a_store_whose_names_lead_out_of_the_models_folder_is_refused(planned, tmp_path, puts):
    store = storage.Storage("memory://run")
    store.push_plan(planned[0])
    config = next(path for path in MemoryFileSystem.store if path.endswith("/config.json"))
    stray = config.replace("config.json", "../../../stray")
    MemoryFileSystem.store[stray] = MemoryFileSystem.store[config]
    with pytest.raises(InputError, match="holds a file whose name leads out of it"):
        store.fetch_inputs(tmp_path / "worker" / "deep")
    assert not list(tmp_path.rglob("stray"))


def test_another_plan_than_that_in_the_store_is_refused_and_made_only_anew(made, planned, tmp_path, puts, capsys):
    settings = at(made[1], tmp_path / "one", "memory://run")
    assert workplace.evaluate(settings, "plan") == [0]
    other = [*at(made[1], tmp_path / "two", "memory://run"), "evaluation.limit=10"]
    assert workplace.evaluate(other, "plan", "run") == [2, 2]
    assert "rows is 10, planned was 40" in capsys.readouterr().err
    assert workplace.evaluate(other, "plan --anew", *workplace.WHOLE) == [0, 0, 0, 0]


@pytest.mark.parametrize("kind", ["memory", "file"])
@pytest.mark.parametrize("flag", ["", " --anew"])
def test_an_input_that_an_upload_has_left_torn_is_repaired_by_the_next_plan(made, planned, tmp_path, puts, kind, flag):
    store = "memory://run" if kind == "memory" else f"file://{tmp_path}/store"
    settings = at(made[1], tmp_path / "one", store)
    assert workplace.evaluate(settings, "plan") == [0]
    system, root = fsspec.core.url_to_fs(store)
    whole = {path: system.cat_file(path) for path in system.find(f"{root}/inputs")}
    for path, content in whole.items():
        system.pipe_file(path, content[:-9] if path.endswith("csv") else content[:-1] + b"\0")
    if not flag:  # as a kill before the plan leaves it
        system.rm(f"{root}/plan.json")
    assert workplace.evaluate(settings, f"plan{flag}") == [0]
    assert {path: system.cat_file(path) for path in system.find(f"{root}/inputs")} == whole
    assert storage.Storage(store).fetch_inputs(tmp_path).exists()


@pytest.mark.parametrize("kind", ["memory", "file"])
def test_two_that_plan_in_one_store_at_once_work_on_one_plan(made, planned, tmp_path, puts, kind, monkeypatch, capsys):
    store = "memory://run" if kind == "memory" else f"file://{tmp_path}/store"
    first, second = (at(made[1], tmp_path / name, store) for name in ("first", "second"))
    push, make = storage.Storage.push_plan, planning.make
    monkeypatch.setattr(planning, "make", lambda *given: structs.replace(make(*given), attempt=None))

    def late(self, folder):
        monkeypatch.setattr(storage.Storage, "push_plan", push)
        monkeypatch.setattr(planning, "make", lambda *given: _other(make(*given)))
        assert workplace.evaluate(first, "plan", "run --shards 0/2") == [0, 0]
        return push(self, folder)

    monkeypatch.setattr(storage.Storage, "push_plan", late)
    assert workplace.evaluate(second, "plan", "run", "finalize") == [0, 0, 0]
    assert "another runner has just planned" in capsys.readouterr().err
    assert plans.load(EvaluationFolder(tmp_path / "first" / "evaluation")).choices.token_budget == 96
    assert plans.load(EvaluationFolder(tmp_path / "second" / "evaluation")).choices.token_budget == 96


def _other(made: plans.Plan) -> plans.Plan:
    return structs.replace(made, choices=structs.replace(made.choices, token_budget=96))


def test_a_store_that_cannot_be_is_one_message(made, tmp_path, capsys):
    assert workplace.evaluate(at(made[1], tmp_path, "s3://bucket/run"), "run") == [3]
    assert "Install s3fs" in capsys.readouterr().err
    assert workplace.evaluate(at(made[1], tmp_path, "nope://bucket"), "run") == [2]
    assert workplace.evaluate(at(made[1], tmp_path, "memory://a*"), "run") == [2]


# --- what Ray is asked for


def test_a_gpu_can_be_shared_by_workers_and_a_cpu_worker_takes_its_threads(planned):
    made = plans.load(planned[0])
    on_cpu = ray_engine.Needs.of(made, ray_engine.Demand())
    assert (on_cpu.cpus, on_cpu.gpus) == (made.choices.threads_per_worker, 0)
    assert on_cpu.that_fit({"CPU": 3 * on_cpu.cpus + 0.5}) == 3 and on_cpu.that_fit({}) == 1
    on_gpu = structs.replace(made, identity=structs.replace(made.identity, device="cuda"))
    whole = ray_engine.Needs.of(on_gpu, ray_engine.Demand())
    assert (whole.cpus, whole.gpus, whole.that_fit({"CPU": 4, "GPU": 3})) == (1, 1, 3)
    third = ray_engine.Needs.of(on_gpu, ray_engine.Demand(gpus_per_worker=1 / 3))
    assert third.that_fit({"GPU": 3}) == 9


def test_without_ray_the_message_says_how_to_install_it(made, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "ray", None)
    settings = [*made[1], f"output.results_dir={tmp_path}", "evaluation.engine=ray"]
    assert workplace.evaluate(settings, "plan", "run") == [0, 3]
    assert "bash setup_environment.sh --ray" in capsys.readouterr().err


@pytest.mark.parametrize("error", [ConnectionError, Exception])  # the other where its own processes are slow to start
def test_a_cluster_that_does_not_answer_is_one_message_and_gets_no_settings_of_a_machine(planned, monkeypatch, error):
    given: dict = {}

    class Absent:
        @staticmethod
        def init(**settings):
            given.update(settings)
            raise error("nobody there")

        @staticmethod
        def shutdown():
            given["shut"] = True

    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    monkeypatch.setattr(ray_engine, "_imported", lambda: Absent)
    with pytest.raises(EnvironmentLacksError, match=r"RAY_ADDRESS is 10.0.0.1:6379\): nobody there"):
        next(ray_engine.on_ray(planned[0].plan, ray_engine.Demand(), print)([0], False))
    assert set(given) == {"address", "runtime_env", "logging_level", "log_to_driver", "shut"}
    assert {"/tests", "/scripts", "/docs"} <= set(given["runtime_env"]["excludes"])
    assert not {"/utils", "/boundby"} & set(given["runtime_env"]["excludes"])
