"""The evaluation gives the same bytes whatever happens on the way, and refuses what it cannot vouch for."""

import errno
import json
import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import pytest
from filelock import FileLock
from msgspec import structs

from boundby import files
from boundby.inference import Predictor
from tests import evaluation_workplace as workplace
from tests.baseline_document import full_metrics
from utils.baseline.ceiling_share import share_of_ceiling
from utils.command.artifacts import EvaluationFolder
from utils.command.errors import InputError, PipelineError
from utils.evaluation import parts, planning, rows, shards
from utils.evaluation import plan as plans
from utils.models import loading as models

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A dataset and a model, the command line that evaluates it, and the bytes an undisturbed evaluation leaves."""
    folder = tmp_path_factory.mktemp("evaluation")
    settings = workplace.prepare(folder, workplace.texts())
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(planning.SHARD_ROWS, "cpu", workplace.SHARD_ROWS)
        assert workplace.evaluate(settings, *workplace.WHOLE) == [0, 0, 0]
    (folder / "results").rename(folder / "undisturbed")
    return folder, settings, workplace.results(folder / "undisturbed" / "evaluation")


@pytest.fixture
def evaluation(made, tmp_path, monkeypatch):
    """A folder for results of its own, and the command line of an evaluation there."""
    monkeypatch.setitem(planning.SHARD_ROWS, "cpu", workplace.SHARD_ROWS)
    return EvaluationFolder(tmp_path / "evaluation"), [*made[1], f"output.results_dir={tmp_path}"]


def test_every_row_is_predicted_once_and_scored(made):
    folder = made[0] / "undisturbed" / "evaluation"
    lines = [line.split(",") for line in (folder / "predictions.csv").read_text().splitlines()[1:]]
    assert [int(line[0]) for line in lines] == list(range(workplace.ROWS))
    metrics = json.loads((folder / "metrics.json").read_text())["metrics"]
    assert set(metrics) | set(share_of_ceiling(metrics, [], None, "cpu")) == set(
        full_metrics()
    )  # of the report's tests
    assert metrics["accuracy"] == pytest.approx(sum(line[1] == line[2] for line in lines) / len(lines))


def test_run_and_finalize_come_after_a_plan_that_is_made_once_and_not_edited(evaluation, capsys):
    folder, settings = evaluation
    assert workplace.evaluate(settings, "run", "plan", "finalize") == [2, 0, 1]
    said = capsys.readouterr().err
    assert "nothing is planned; run `python scripts/evaluate.py plan` first" in said
    assert "3 of 3 shards have not been predicted, first 0; `python scripts/evaluate.py run`" in said
    assert not folder.predictions.exists() and not folder.metrics.exists()
    before = folder.plan.stat().st_ino
    assert workplace.evaluate(settings, "plan") == [0]
    assert folder.plan.stat().st_ino == before and "kept" in capsys.readouterr().out
    files.write_text(folder.plan, folder.plan.read_text().replace('"token_budget": 128', '"token_budget": 256'))
    assert workplace.evaluate(settings, "run") == [2]
    assert "its fingerprint differs" in capsys.readouterr().err


def test_planning_checks_agreement_on_the_shortest_and_longest_texts_of_the_whole_set(made, tmp_path, monkeypatch):
    texts = [(f"some text number {row}", workplace.LABELS[row % len(workplace.LABELS)]) for row in range(200)]
    extremes = [("a", workplace.LABELS[0]), ("the longest text of them all " * 4, workplace.LABELS[1])]
    settings = workplace.prepare(tmp_path, [*texts, *extremes], made[0] / "model")

    def disagree(loaded, compared, max_length):
        assert {text for text, _ in extremes} < set(compared) and len(compared) == models.AGREEMENT_ROWS
        raise InputError("they do not agree")

    monkeypatch.setattr(models, "agreement", disagree)
    assert workplace.evaluate(settings, "plan") == [InputError.exit_code]


def test_another_plan_is_refused_with_what_differs_and_the_way_out(evaluation, capsys):
    folder, settings = evaluation
    assert workplace.evaluate(settings, "plan", "run --shards 0/3") == [0, 0]
    left = workplace.results(folder.path)
    other = [*settings, "evaluation.limit=10"]
    assert workplace.evaluate(other, *workplace.WHOLE) == [2, 2, 2]
    said = capsys.readouterr().err
    assert "rows is 10, planned was 40; sample_seed is 0, planned was None" in said
    assert "plan --anew" in said and "output.results_dir" in said
    assert workplace.results(folder.path) == left
    assert workplace.evaluate(other, "plan --anew", "run", "finalize") == [0, 0, 0]
    assert [path.parent.name for path in folder.path.parent.rglob("previous/*/evaluation/part-00000.parquet")]


def test_other_weights_are_another_plan(made, evaluation, tmp_path, capsys):
    from tests.tiny_models import save_bert

    folder, settings = evaluation
    plan = _planned(folder, settings)
    wanted = structs.replace(plan.identity, model_sha256="0" * 64, versions={"torch": "1"})
    differences = plans.differences(plan.identity, wanted)
    assert differences[0] == f"model_sha256 is {'0' * 37}..., planned was {plan.identity.model_sha256[:37]}..."
    assert "versions.torch is 1, planned was" in "".join(differences)
    other = [*settings, f"model.name={save_bert(tmp_path / 'model', labels=('a', 'b', 'c'))}"]
    assert workplace.evaluate(other, "run") == [2]


def _planned(folder: EvaluationFolder, settings: list[str]) -> plans.Plan:
    assert workplace.evaluate(settings, "plan") == [0]
    return plans.load(folder)


@pytest.mark.parametrize("damaged", ["part", "cost"])
def test_every_flipped_bit_and_every_truncation_of_a_part_and_its_record_is_found(made, damaged, tmp_path):
    folder = EvaluationFolder(shutil.copytree(made[0] / "undisturbed" / "evaluation", tmp_path / "evaluation"))
    plan, path = plans.load(folder), getattr(folder, damaged)(0)
    whole, record = path.read_bytes(), parts.load_record(folder, plan, plan.shards[0])

    def taken(content: bytes) -> parts.Record | None:
        path.write_bytes(content)
        part = parts.load(folder, plan, plan.shards[0])
        return part and part.record

    assert taken(whole) == record
    without_effect = [None, record] if damaged == "cost" else [None]  # a space in JSON may be another one
    for offset in range(len(whole)):
        broken = bytearray(whole)
        broken[offset] ^= 1 << offset % 8
        assert taken(bytes(broken)) in without_effect, offset
    assert not any(taken(whole[:length]) for length in range(0, len(whole) - 1, 7))
    assert taken(whole + b"\0") is None


def test_damaged_parts_and_lost_costs_are_done_again_and_nothing_else(made, evaluation):
    folder, settings = evaluation
    assert workplace.evaluate(settings, "plan", "run") == [0, 0]
    whole = folder.part(0).read_bytes()
    damages = (
        lambda: files.write_bytes(folder.part(0), whole[: len(whole) // 2]),
        lambda: files.write_bytes(folder.part(0), whole[:900] + bytes([whole[900] ^ 4]) + whole[901:]),
        lambda: files.write_bytes(folder.part(0), folder.part(1).read_bytes()),
        lambda: folder.part(0).unlink(),
        lambda: folder.cost(0).unlink(),
        lambda: files.write_text(folder.cost(0), folder.cost(0).read_text().replace('"seconds"', '"Seconds"')),
    )
    for damage in damages:
        damage()
        kept = [folder.part(shard).stat().st_ino for shard in (1, 2)]
        if folder.part(0).exists() and folder.part(0).read_bytes() != whole:
            assert workplace.evaluate(settings, "finalize") == [1]
        assert workplace.evaluate(settings, "run") == [0]
        assert folder.part(0).read_bytes() == whole
        assert [folder.part(shard).stat().st_ino for shard in (1, 2)] == kept
    assert workplace.evaluate(settings, "finalize") == [0]
    assert workplace.results(folder.path) == made[2]


def test_shares_of_two_runners_make_the_whole(made, evaluation, capsys):
    folder, settings = evaluation
    assert workplace.evaluate(settings, "plan", "run --shards 1/2") == [0, 0]
    assert set(workplace.results(folder.path)) == {"part-00001.parquet"}
    assert workplace.evaluate(settings, "run --shards 0/2", "finalize") == [0, 0]
    assert workplace.results(folder.path) == made[2]
    assert workplace.evaluate(settings, "run --shards 2/2", "run --shards x") == [2, 2]
    assert "--shards is '2/2'; it is i/n with 0 <= i < n" in capsys.readouterr().err


@pytest.mark.parametrize("action", ["run --anew", "finalize --anew", "finalize --shards 0/2", "plan --shards 0/2"])
def test_a_flag_of_another_action_is_refused(evaluation, capsys, action):
    folder, settings = evaluation
    assert workplace.evaluate(settings, action) == [2]
    name, flag, *_ = action.split()
    owner = {"--anew": "plan", "--shards": "run"}[flag]
    assert f"{flag} belongs to `{owner}` and means nothing to `{name}`" in capsys.readouterr().err
    assert not folder.path.exists()


def _predictor(folder: EvaluationFolder, settings: list[str]) -> shards.ShardPredictor:
    _planned(folder, settings)
    return shards.ShardPredictor.open(folder.plan)


def test_the_plan_is_hashed_once_however_many_shards_it_has(made, evaluation, monkeypatch):
    hashed = []
    shards_of = plans.Plan.fingerprint.func
    monkeypatch.setattr(plans.Plan.fingerprint, "func", lambda plan: hashed.append(plan) or shards_of(plan))
    folder, settings = evaluation
    assert workplace.evaluate(settings, *workplace.WHOLE) == [0, 0, 0]
    assert workplace.results(folder.path) == made[2]
    assert len(hashed) == len(set(map(id, hashed))) <= len(workplace.WHOLE) + 1


def test_a_worker_needs_the_plan_file_alone_and_leaves_a_shard_to_the_runner_that_has_claimed_it(made, evaluation):
    folder, settings = evaluation
    predictor = _predictor(folder, settings)
    receipt = predictor.predict_shard(2)
    assert (receipt.shard, receipt.status, receipt.rows) == (2, "predicted", 8)
    assert workplace.results(folder.path) == {"part-00002.parquet": made[2]["part-00002.parquet"]}
    folder.claims.mkdir(exist_ok=True)
    with FileLock(folder.claims / "00001.lock"):
        assert predictor.predict_shard(1).status == "claimed"
        assert not folder.part(1).exists()
    assert predictor.predict_shard(1, wait=True).status == "predicted"
    assert predictor.predict_shard(1).status == "kept"


def test_reading_a_shard_ahead_changes_nothing(made, evaluation, monkeypatch):
    """As on a GPU, where the next shard is claimed and tokenized before the one in work is committed."""
    folder, settings = evaluation
    predictor = _predictor(folder, settings)
    predictor.predict_shard(1)

    def ahead(self, shards):
        coming = None
        for texts in [*shards, None]:
            if coming is not None:
                yield self.predict_tokens(coming)
            coming = self.tokenize(texts) if texts is not None else None

    monkeypatch.setattr(Predictor, "predict_each", ahead)
    receipts = [(receipt.shard, receipt.status) for receipt in predictor.predict_shards([0, 1, 2])]
    assert receipts == [(0, "predicted"), (1, "kept"), (2, "predicted")]
    assert workplace.evaluate(settings, "finalize") == [0]
    assert workplace.results(folder.path) == made[2]


def test_without_locks_two_runners_write_the_same_bytes(made, evaluation, monkeypatch):
    folder, settings = evaluation
    predictor = _predictor(folder, settings)

    def refuse(self: FileLock) -> None:
        raise OSError(errno.ENOLCK, "no locks here")

    monkeypatch.setattr(FileLock, "acquire", refuse)
    assert predictor.predict_shard(0).status == "predicted"
    part = parts.load(folder, predictor.plan, predictor.plan.shards[0])
    folder.part(0).unlink()  # as a runner would that has not seen the first
    assert predictor.predict_shard(0).sha256 == part.record.part_sha256
    assert folder.part(0).read_bytes() == made[2]["part-00000.parquet"]


def test_a_full_disk_is_one_message_and_costs_no_finished_shard(made, evaluation, monkeypatch, capsys):
    folder, settings = evaluation
    _planned(folder, settings)
    write = files.write_bytes

    def full(path: Path, content: bytes) -> None:
        if path == folder.part(1):
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        write(path, content)

    with monkeypatch.context() as patch:
        patch.setattr(files, "write_bytes", full)
        assert workplace.evaluate(settings, "run") == [3]
    assert "no space left" in capsys.readouterr().err
    assert list(workplace.results(folder.path)) == ["part-00000.parquet"]
    assert workplace.evaluate(settings, "run", "finalize") == [0, 0]
    assert workplace.results(folder.path) == made[2]


def test_sigterm_abandons_the_shard_and_keeps_the_finished_ones(made, evaluation, monkeypatch):
    folder, settings = evaluation
    _planned(folder, settings)
    predict, shard = Predictor.predict_tokens, []

    def interrupted(self, tokens, **times):
        shard.append(None)
        if len(shard) == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return predict(self, tokens, **times)

    with monkeypatch.context() as patch:
        patch.setattr(Predictor, "predict_tokens", interrupted)
        assert workplace.evaluate(settings, "run") == [143]
    assert list(workplace.results(folder.path)) == ["part-00000.parquet"]
    assert list(folder.path.rglob(".tmp-*")) == []
    assert workplace.evaluate(settings, "run", "finalize") == [0, 0]
    assert workplace.results(folder.path) == made[2]


def _out_of_memory(monkeypatch: pytest.MonkeyPatch, times: int) -> None:
    predict, left = Predictor.predict_tokens, [times]

    def starved(self, tokens, **seconds):
        prediction = predict(self, tokens, **seconds)
        left[0] -= 1
        return replace(prediction, halvings=1, logits=prediction.logits + 1e-6) if left[0] >= 0 else prediction

    monkeypatch.setattr(Predictor, "predict_tokens", starved)


def test_memory_that_runs_out_for_a_moment_changes_no_byte_and_where_it_stays_out_the_way_out_is_told(
    made, evaluation, monkeypatch
):
    folder, settings = evaluation
    predictor = _predictor(folder, settings)
    _out_of_memory(monkeypatch, 2)
    predictor.predict_shard(0)
    assert folder.part(0).read_bytes() == made[2]["part-00000.parquet"]
    assert parts.load_record(folder, predictor.plan, predictor.plan.shards[0]).out_of_memory == 2
    _out_of_memory(monkeypatch, 1000)
    with pytest.raises(PipelineError, match=r"--anew evaluation.token_budget=64"):
        predictor.predict_shard(1)
    assert set(workplace.results(folder.path)) == {"part-00000.parquet"}


def test_a_dataset_that_changed_under_the_plan_is_refused(made, evaluation):
    folder, settings = evaluation
    plan = _planned(folder, settings)
    dataset = Path(plan.places.dataset)
    changed = folder.path / "changed.csv"
    files.write_text(changed, dataset.read_text().replace("\n20,", "\n21,"))
    assert len(rows.read(changed, plan.shards[0], None).texts) == 16
    with pytest.raises(PipelineError, match="rows 16 to 31 are not those that were planned"):
        rows.read(changed, plan.shards[1], None)


def test_several_workers_without_ray_are_refused_with_both_ways_out(evaluation, capsys):
    folder, settings = evaluation
    assert workplace.evaluate([*settings, "evaluation.workers=2"], "plan") == [2]
    said = capsys.readouterr().err
    assert "evaluation.engine=ray" in said and "model.device=cuda:0" in said
    assert not folder.path.exists()
