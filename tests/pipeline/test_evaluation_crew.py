"""Workers that come late, die or fail cost no shard and double none; the store holds whole files or none."""

import sys
import threading
from collections import Counter, deque
from dataclasses import replace
from pathlib import Path

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from boundby import files
from tests import evaluation_workplace as workplace
from utils.artifacts import EvaluationFolder
from utils.errors import EnvironmentLacksError, InputError, PipelineError
from utils.evaluation import crew as crews
from utils.evaluation import plan as plans
from utils.evaluation import planning, ray_engine, storage, worker
from utils.evaluation.shards import Receipt, ShardPredictor

WHOLE = ("plan", "run", "finalize")
LATE, ALWAYS = 10**6, 50


class FakeCluster:
    """Answers in the order of asking.

    Worker n has its model after `starts[n]` looks; a shard meets the errors of `troubles[shard]`, one at a time.
    """

    def __init__(self, starts=(), troubles=None, opening=()) -> None:
        self.starts, self.troubles = list(starts), {shard: deque(each) for shard, each in (troubles or {}).items()}
        self.opening = deque(opening)
        self.hired: list[int] = []
        self.alive: set[int] = set()
        self.asked: dict[int, tuple[int, int | None]] = {}
        self.most = Counter()
        self.looks = 0

    def hire(self) -> int:
        number = len(self.hired)
        self.hired.append(number)
        self.alive.add(number)
        return number

    def open(self, worker: int) -> int:
        return self._ask(worker, None)

    def predict(self, worker: int, shard: int, wait_for_others: bool) -> int:
        held = 1 + sum((asked, own is None) == (worker, False) for asked, own in self.asked.values())
        self.most[worker] = max(self.most[worker], held)
        return self._ask(worker, shard)

    def _ask(self, worker: int, shard: int | None) -> int:
        assert worker in self.alive
        number = len(self.hired) * 1000 + self.looks * 10 + len(self.asked)
        while number in self.asked:
            number += 1
        self.asked[number] = worker, shard
        return number

    def finished(self, answers):
        assert answers, "nothing was asked: this would wait for ever"
        self.looks += 1
        for answer in answers:
            worker, shard = self.asked[answer]
            if shard is not None or self.looks >= (self.starts[worker] if worker < len(self.starts) else 0):
                return [answer]
        raise AssertionError("this would wait for ever")

    def result(self, answer):
        _, shard = self.asked.pop(answer)
        errors = self.opening if shard is None else self.troubles.get(shard)
        if errors:
            raise errors.popleft()
        return None if shard is None else Receipt(shard, "predicted", 1)

    def dismiss(self, worker: int) -> None:
        self.alive.discard(worker)


def work(cluster: FakeCluster, shards: int, size: int = 2, ahead: int = 1) -> tuple[list[int], list[str]]:
    """Return the shards in the order of their receipts, and what was said."""
    said: list[str] = []
    receipts = crews.Crew(cluster, size, ahead, said.append).receipts(range(shards), False)
    found = [receipt.shard for receipt in receipts]
    assert cluster.alive == set()
    return found, said


@pytest.mark.parametrize("ahead", [1, 2])
@pytest.mark.parametrize("shards", [0, 1, 3, 20])
def test_every_shard_is_done_once_by_no_more_workers_than_there_is_work_for(shards, ahead):
    cluster = FakeCluster()
    found, said = work(cluster, shards, size=3, ahead=ahead)
    assert sorted(found) == list(range(shards)) and said == []
    assert len(cluster.hired) <= min(3, shards)
    assert max(cluster.most.values(), default=0) <= ahead


def test_a_worker_that_has_not_started_holds_up_nothing():
    cluster = FakeCluster(starts=[0, LATE, LATE])
    found, _ = work(cluster, 9, size=3)
    assert sorted(found) == list(range(9))
    assert set(cluster.most) == {0}


def test_a_worker_that_starts_late_takes_its_share():
    cluster = FakeCluster(starts=[0, 4])
    work(cluster, 20, ahead=2)
    assert set(cluster.most) == {0, 1}


@pytest.mark.parametrize("ahead", [1, 2])
def test_lost_workers_are_replaced_and_their_shards_done_once(ahead):
    lost = crews.WorkerLost("killed")
    cluster = FakeCluster(troubles={2: [lost] * 5, 7: [lost], 9: [lost] * 2}, opening=[lost])
    found, said = work(cluster, 10, ahead=ahead)
    assert sorted(found) == list(range(10))
    assert len(said) == 9 and len(cluster.hired) > 2
    assert "a worker was lost in shard 7 (killed); another takes its place, attempt 2 of 10" in said


def test_a_shard_that_always_loses_its_worker_ends_with_a_message():
    cluster = FakeCluster(troubles={1: [crews.WorkerLost("out of memory")] * ALWAYS})
    with pytest.raises(PipelineError, match="lost in shard 1, 10 times, at last: out of memory. The finished shards"):
        work(cluster, 4)
    assert cluster.alive == set()


def test_a_program_that_fails_is_tried_on_new_workers_three_times():
    cluster = FakeCluster(troubles={1: [RuntimeError("device-side assert")] * 2})
    found, said = work(cluster, 4, size=1)
    assert sorted(found) == [0, 1, 2, 3] and len(said) == 2 and len(cluster.hired) == 3
    cluster = FakeCluster(troubles={1: [RuntimeError("device-side assert")] * 3})
    with pytest.raises(PipelineError, match="failed in shard 1, 3 times, at last: RuntimeError: device-side assert"):
        work(cluster, 4)


def test_models_that_never_load_end_with_a_message_and_one_that_loads_forgives_the_others():
    lost = crews.WorkerLost("gone")
    with pytest.raises(PipelineError, match="lost while loading the model, 10 times"):
        work(FakeCluster(opening=[lost] * ALWAYS), 2)
    found, _ = work(FakeCluster(opening=[lost] * 9, troubles={0: [lost]}), 2, size=1)
    assert sorted(found) == [0, 1]


def test_what_the_user_has_to_cure_is_not_tried_again():
    cluster = FakeCluster(troubles={0: [InputError("the dataset changed")]})
    with pytest.raises(InputError, match="the dataset changed"):
        work(cluster, 4)
    assert len(cluster.hired) == 2 and cluster.alive == set()


# --- the worker


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A dataset and a model, the command line that evaluates it, and the bytes an undisturbed evaluation leaves."""
    folder = tmp_path_factory.mktemp("crew")
    settings = workplace.prepare(folder, workplace.texts())
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(planning.SHARD_ROWS, "cpu", 8)
        assert workplace.evaluate(settings, *WHOLE) == [0, 0, 0]
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


def opened(folder: EvaluationFolder, store: str | None = None) -> worker.Worker:
    found = worker.Worker(folder.plan, store)
    found.open()
    return found


def together(calls) -> list:
    """Return what the calls give, made at once from a thread each; an exception where they raise one."""
    found: list = [None] * len(calls)

    def make(place: int) -> None:
        try:
            found[place] = calls[place]()
        except (Exception, SystemExit) as error:
            found[place] = error

    threads = [threading.Thread(target=make, args=(place,)) for place in range(len(calls))]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    return found


def test_a_worker_that_is_asked_for_the_next_shard_early_leaves_the_same_bytes(planned, monkeypatch):
    folder, expected = planned
    monkeypatch.setitem(worker.AHEAD, "cpu", 2)
    found = opened(folder)
    for shards in ((0, 1), (2,), (0, 3), (4, 1)):
        receipts = together([lambda shard=shard: found.predict(shard, False) for shard in shards])
        assert [receipt.shard for receipt in receipts] == list(shards)
    assert parts_of(folder) == expected


@pytest.mark.parametrize("kind", [RuntimeError, SystemExit])
def test_what_goes_wrong_is_told_to_all_who_wait(planned, monkeypatch, kind):
    folder, _ = planned
    monkeypatch.setitem(worker.AHEAD, "cpu", 2)
    found = opened(folder)

    def fail(self, begun, prediction, meter):
        raise kind("no more")

    with monkeypatch.context() as broken:
        broken.setattr(ShardPredictor, "_commit", fail)
        answers = together([lambda: found.predict(0, False), lambda: found.predict(1, False)])
        assert [str(answer) for answer in answers] == ["no more", "no more"]
        with pytest.raises(kind, match="no more"):
            found.predict(0, False)  # asked after the failure: who asks late is not left to wait
    assert found.predict(0, False).status == "predicted"


def test_a_machine_unlike_the_planned_one_is_refused(planned):
    folder, _ = planned
    made = plans.load(folder)
    plans.save(
        replace(made, identity=replace(made.identity, versions={**made.identity.versions, "torch": "1"})), folder
    )
    with pytest.raises(InputError, match=r"not such a machine as was planned for: versions.torch is .*, planned was 1"):
        opened(folder)
    plans.save(replace(made, identity=replace(made.identity, device_name="another")), folder)
    with pytest.raises(InputError, match="device_name is .*, planned was another"):
        opened(folder)


def test_a_plan_that_a_worker_cannot_see_is_one_message_with_the_way_out(tmp_path):
    with pytest.raises(InputError, match=r"plan.json: cannot be seen on .*evaluation\.storage"):
        opened(EvaluationFolder(tmp_path / "elsewhere"))


# --- the store


@pytest.fixture
def puts(monkeypatch):
    """The names of the objects that were put into stores in memory, in their order."""
    found: list[str] = []
    put = MemoryFileSystem.put_file

    def counted(self, path, where, **options):
        found.append(Path(where).name)
        put(self, path, where, **options)

    monkeypatch.setattr(MemoryFileSystem, "put_file", counted)
    yield found
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
    places = [tmp_path / name for name in ("one", "two")]
    for place in places:
        place.mkdir()
    monkeypatch.chdir(places[0])
    found = worker.Worker(Path("/nowhere/plan.json"), "memory://run")
    found.open()
    used = found._predictor.plan.places
    assert all(Path(path).is_relative_to(places[0]) for path in (used.dataset, used.model))
    assert [found.predict(shard, False).status for shard in (0, 1, 0)] == ["predicted", "predicted", "kept"]
    assert parts_of(folder) == {}
    assert store.pull(folder, range(5)) == {0, 1}
    assert parts_of(folder) == {name: expected[name] for name in ("part-00000.parquet", "part-00001.parquet")}
    dataset = next(path for path in MemoryFileSystem.store if path.endswith(".csv"))
    MemoryFileSystem().pipe_file(dataset, MemoryFileSystem().cat_file(dataset).replace(b"good", b"bad", 1))
    with pytest.raises(InputError, match="are not those of the plan"):
        store.fetch_inputs(places[1])


def test_another_plan_than_that_in_the_store_is_refused_and_made_only_anew(made, planned, tmp_path, puts, capsys):
    settings = at(made[1], tmp_path / "one", "memory://run")
    assert workplace.evaluate(settings, "plan") == [0]
    other = [*at(made[1], tmp_path / "two", "memory://run"), "evaluation.limit=10"]
    assert workplace.evaluate(other, "plan", "run") == [2, 2]
    assert "rows is 10, planned was 40" in capsys.readouterr().err
    assert workplace.evaluate(other, "plan --anew", *WHOLE) == [0, 0, 0, 0]


def test_a_store_that_cannot_be_is_one_message(made, tmp_path, capsys):
    assert workplace.evaluate(at(made[1], tmp_path, "s3://bucket/run"), "run") == [3]
    assert "Install s3fs" in capsys.readouterr().err
    assert workplace.evaluate(at(made[1], tmp_path, "nope://bucket"), "run") == [2]
    assert workplace.evaluate(at(made[1], tmp_path, "memory://a*"), "run") == [2]


# --- what Ray is asked for


def test_a_gpu_can_be_shared_by_workers_and_a_cpu_worker_takes_its_threads(planned):
    made = plans.load(planned[0])
    on_cpu = ray_engine._Needs.of(made, ray_engine.Demand())
    assert (on_cpu.cpus, on_cpu.gpus) == (made.choices.threads_per_worker, 0)
    assert on_cpu.that_fit({"CPU": 3 * on_cpu.cpus + 0.5}) == 3 and on_cpu.that_fit({}) == 1
    on_gpu = replace(made, identity=replace(made.identity, device="cuda"))
    whole = ray_engine._Needs.of(on_gpu, ray_engine.Demand())
    assert (whole.cpus, whole.gpus, whole.that_fit({"CPU": 4, "GPU": 3})) == (1, 1, 3)
    third = ray_engine._Needs.of(on_gpu, ray_engine.Demand(gpus_per_worker=1 / 3))
    assert third.that_fit({"GPU": 3}) == 9


def test_without_ray_the_message_says_how_to_install_it(made, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "ray", None)
    settings = [*made[1], f"output.results_dir={tmp_path}", "evaluation.engine=ray"]
    assert workplace.evaluate(settings, "plan", "run") == [0, 3]
    assert "bash setup_environment.sh --ray" in capsys.readouterr().err


def test_a_cluster_that_does_not_answer_is_one_message_and_gets_no_settings_of_a_machine(planned, monkeypatch):
    given: dict = {}

    class Absent:
        @staticmethod
        def init(**settings):
            given.update(settings)
            raise ConnectionError("nobody there")

        @staticmethod
        def shutdown():
            given["shut"] = True

    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    monkeypatch.setattr(ray_engine, "_imported", lambda: Absent)
    with pytest.raises(EnvironmentLacksError, match=r"RAY_ADDRESS is 10.0.0.1:6379\): nobody there"):
        next(ray_engine.on_ray(ray_engine.Demand(), print)(planned[0].plan, [0], False))
    assert set(given) == {"address", "runtime_env", "logging_level", "log_to_driver", "shut"}
    assert {"/tests", "/scripts", "/docs"} <= set(given["runtime_env"]["excludes"])
    assert not {"/utils", "/boundby"} & set(given["runtime_env"]["excludes"])
