"""Two results folders compared as a person does it: what is shown, refused and returned."""

import errno
import importlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from boundby import files
from boundby.machine.disturbance import Disturbance
from tests import baseline_document
from tests.injection import Fault, injected
from tests.monitor_runs import USUAL, times_of, write_run
from utils.baseline import rounds as visits
from utils.baseline.rounds import Timing, Visit
from utils.command.artifacts import METRICS_VERSION, EvaluationFolder
from utils.comparison import facts
from utils.comparison.facts import between_dtypes, rounds_of, visits_of
from utils.evaluation import plan
from utils.evaluation.parts import Record, commit
from utils.models.tasks.sequence_classification.score import COLUMNS as PREDICTION_COLUMNS
from utils.training import comparison

SPREAD = (1.0, 1.004, 0.996, 1.002, 0.998)  # of five quiet rounds
LOUD = (1.0, 1.12, 0.9, 1.05, 0.96)
MODEL = {"name": "intents", "revision": None, "fingerprint": "0123abcd", "dtype": "float32"}
GPU = {"type": "cuda", "name": "NVIDIA A100-SXM4-40GB"}
PARTS = {"config": {"model": {"dtype": "float32"}}, "code": "c0de", "versions": {"torch": "2.13.0"}, "environment": {}}


def visit(dtype: str, size: int, number: int, per_sample: float, gpu: bool = False) -> Visit:
    timings = [Timing("cold", 0, 9.0, size, 10, 12), Timing("tokenize", 0, 9.0, 2 * size, 20, 24)]
    for _ in range(3):
        for index in range(2):
            seconds = per_sample * size * (2.0 if gpu else 1.0)
            timings.append(Timing("isolated", index, seconds, size, 10, 12))
    if gpu:
        timings.append(Timing("pipelined", 0, per_sample * 6 * size, 6 * size, 60, 72))
    return Visit(dtype, size, number, "ok", "session", tuple(timings))


def sweep(speeds: Mapping[Any, float], spread: Sequence[float] = SPREAD, gpu: bool = False) -> list[Visit]:
    """Return the visits of a sweep; `speeds` has seconds per sample by batch size, or by dtype and batch size."""
    points = {key if isinstance(key, tuple) else ("float32", key): value for key, value in speeds.items()}
    return [
        visit(dtype, size, number, seconds * factor, gpu)
        for number, factor in enumerate(spread)
        for (dtype, size), seconds in points.items()
    ]


def row(dtype: str, size: int, status: str = "ok", doubts: Sequence[str] = ()) -> dict[str, Any]:
    return {"dtype": dtype, "batch_size": size, "status": status, "doubts": list(doubts)}


def document(made: Sequence[Visit], **changes: Any) -> dict[str, Any]:
    rows = [row(*point) for point in dict.fromkeys((visit.dtype, visit.batch_size) for visit in made)]
    known = {"batch_sizes": rows, "model": MODEL, "full_dataset_metrics": None}
    return baseline_document.document([], **{**known, **changes})


def evaluation(folder: Path, right: Sequence[bool], seconds: Sequence[float], first_row: int = 0) -> dict[str, Any]:
    """Write shards and predictions as step 02 does; return `full_dataset_metrics`."""
    size, count = len(right) // len(seconds), len(right)
    left = EvaluationFolder(folder / "evaluation")
    identity = plan.Identity(
        "sequence_classification", count, count, "ab" * 32, None, "", "", "", ("praise",), "float32", "highest", 64,
        "same", 0.995, None, "auto", "cpu", "", {}, {},
    )  # fmt: skip
    choices = plan.Choices(2048, "sorted", "padded", False, False, False, 64, "float32", "float32", "float32", 0.0, 1)
    reasons = plan.Reasons("", None, [], plan.Budget(2048, ""), plan.Compilation(False, ""), [])
    shards = [plan.Shard(number, number * size, (number + 1) * size, 0, 0, 0, "") for number in range(len(seconds))]
    planned = plan.Plan(identity, choices, tuple(shards), plan.Places("", "", ""), reasons, attempt=folder.name)
    left.plan.parent.mkdir(parents=True)
    plan.save(planned, left)
    for shard, taken_s in zip(shards, seconds, strict=True):
        what = {"texts_sha256": "", "tokens": 0, "truncated": 0, "computed_texts": size, "useful_tokens": 0}
        what |= {"computed_tokens": 0, "guarded_texts": 0, "out_of_memory": 0, "memory_reasons": (), "phases_s": {}}
        where = {"host": "a", "device": "cpu", "device_id": "", "device_peak_bytes": None, "process_peak_bytes": None}
        record = Record(planned.fingerprint, shard.id, "", started_s=0.0, seconds=taken_s, **what, **where)
        commit(b"", record, left)
    predictions = [
        {"row_id": first_row + index, "label_name": "praise", "correct": int(correct)}
        for index, correct in enumerate(right)
    ]
    files.write_csv(folder / "evaluation" / "predictions.csv", predictions, PREDICTION_COLUMNS)
    return {"throughput_samples_per_sec": len(right) / sum(seconds), "dtype": "float32"}


def store(
    folder: Path, made: Sequence[Visit], content: Mapping[str, Any] | None = None, parts: Mapping[str, Any] = PARTS
) -> Path:
    files.write_json(folder / "baseline_metrics.json", content or document(made))
    files.write_csv(folder / "raw_samples.csv", visits.raw_rows(made), visits.RAW_COLUMNS)
    files.write_json(folder / ".receipts" / "02.json", {"schema_version": 1, "status": "ok", "parts": parts})
    return folder


Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def compare(capsys: pytest.CaptureFixture[str]) -> Command:
    def start(*arguments: Any) -> tuple[int, str, str]:
        code = importlib.import_module("scripts.compare_runs").main([str(argument) for argument in arguments])
        return code, *capsys.readouterr()

    return start


AS_A = {1: 0.004, 8: 0.002, 32: 0.001}  # seconds per sample by batch size
SLOWER = {**AS_A, 8: 0.0022}


@pytest.fixture
def a(tmp_path: Path) -> Path:
    return store(tmp_path / "a", sweep(AS_A))


@pytest.fixture
def with_b(compare: Command, a: Path, tmp_path: Path) -> Command:
    """Compare A with a run of these visits, whose document differs by what is given."""

    def start(made: Sequence[Visit], *options: str, parts: Mapping[str, Any] = PARTS, **changes: Any) -> Any:
        return compare(a, store(tmp_path / "b", made, document(made, **changes), parts), *options)

    return start


def cells_of(shown: str, batch_size: int) -> list[str]:
    """Return the cells of a batch size in the table of a comparison."""
    return next(line for line in shown.splitlines() if line.startswith(f"float32 {batch_size:6}")).split()


WITHOUT_32 = [row("float32", 1), row("float32", 8), row("float32", 32, "oom")]
DOUBTS = ["disturbed: in 2 of 5 rounds another process used the CPU"]
DOUBTED = [row("float32", 1, "ok", DOUBTS), row("float32", 8, "noisy", DOUBTS)]
OTHER_MODEL = {**MODEL, "revision": "5f0c6f7a4d2b", "fingerprint": "4567"}
OTHER_PARTS = {**PARTS, "code": "beef", "versions": {"torch": "2.11.0"}}
MACHINE, OTHER_MACHINE = "machine (hardware, driver, quota)", {"machine_fingerprint": "d0" * 8}
# What is said of run B against A: seconds per sample of B, options, how its document differs, exit code, words.
CASES: dict[str, tuple[Mapping[Any, float], list[str], dict[str, Any], int, list[str]]] = {
    "equal": (AS_A, [], {}, 0, ["SAME: 3 same of 3 rows", "the cause: - nothing that was recorded"]),
    "slower": (
        SLOWER, [], {}, 1, ["REGRESSION: B is slower at float32 batch size 8 (+10.0 % time); 2 same of 3 rows",
                            "float32 8 500.0 454.5 +10.0 %"],
    ),
    "faster": ({**AS_A, 8: 0.0018}, [], {}, 0, ["IMPROVED: B is faster at float32 batch size 8 (-10.0 % time); 2 sa"]),
    "another machine": (AS_A, [], OTHER_MACHINE, 2, [f"differ in their {MACHINE}", "--force"]),
    "another machine, forced": (AS_A, ["--force"], OTHER_MACHINE, 0, [f"Doubts: - the {MACHINE} is not the same"]),
    "other work": (
        {8: 0.002}, [], {"work_fingerprint": "0", "machine_fingerprint": None}, 2,
        [f"{MACHINE} and their work (rows, labels, max_length, method)"],
    ),
    "other causes": (
        AS_A, [], {"model": OTHER_MODEL, "parts": OTHER_PARTS}, 0,
        ["the cause: - model.revision: none -> 5f0c6f7a4d2b - model.fingerprint: 0123abcd -> 4567 - the program's "
         "source - versions.torch: 2.13.0 -> 2.11.0"],
    ),
    "single dtypes": (
        {("bfloat16", 1): 0.004, ("bfloat16", 8): 0.001}, [], {}, 0,
        ["IMPROVED: B is faster at float32 -> bfloat16 batch size 8 (-50.0 % time)", "batch size 32: A ok, B absent"],
    ),
    "no longer fits": (
        {1: 0.004, 8: 0.002}, [], {"batch_sizes": WITHOUT_32}, 1,
        ["REGRESSION: B fails at float32 batch size 32; 2 same of 2 rows", "- float32 batch size 32: A ok, B oom"],
    ),
    "failed later": ({1: 0.004, 8: 0.002, 32: 0.009}, [], {"batch_sizes": WITHOUT_32}, 1, ["2 same of 2 rows"]),
    "doubts": (
        {1: 0.004, 8: 0.002}, [], {"batch_sizes": DOUBTED, "complete": False}, 0,
        ["- B: step 02 had not finished when this was written",
         f"- float32 batch size 1 and float32 batch size 8: B: {DOUBTS[0]}"],
    ),
    "nothing in common": (
        {2: 0.002}, [], {}, 2, ["no dtype and batch size in common", "A has float32 1, float32 8, float32 32"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_what_is_said_of_a_run_against_another(with_b: Command, case: str) -> None:
    speeds, options, changes, code, words = CASES[case]
    ended, shown, notes = with_b(sweep(speeds), *options, **changes)
    assert (ended, bool(shown), bool(notes)) == (code, code < 2, code == 2)
    said = " ".join((shown + notes).split())
    assert [word for word in words if word not in said] == []


def test_further_runs_are_held_against_the_first_in_one_table(compare: Command, a: Path, tmp_path: Path) -> None:
    b = store(tmp_path / "b", sweep({1: 0.004, 8: 0.0018, 32: 0.001}))
    c = store(tmp_path / "c", sweep({1: 0.004, 8: 0.0022}))
    code, shown, _ = compare(a, b, c)
    assert code == 1, "C is slower"
    said = " ".join(shown.split())
    assert "B against A: IMPROVED: B is faster at float32 batch size 8 (-10.0 % time); 2 same of 3 rows" in said
    assert "C against A: REGRESSION: C is slower at float32 batch size 8 (+10.0 % time); 1 same of 2 rows" in said
    cells = cells_of(shown, 8)
    assert cells[:4] == ["float32", "8", "500.0", "-10.0"] and "faster" in cells and cells[-1] == "slower"
    assert cells_of(shown, 32)[-3:] == ["same", "-", "-"]
    assert "C: Measured in one run only:\n- float32 batch size 32: A ok, C absent" in shown
    assert compare(a, b, b, "--strict")[0] == 0
    several = json.loads(compare(a, b, c, "--json")[1])["comparisons"]
    assert [(comparison["b"]["name"], comparison["verdict"]) for comparison in several] == [
        ("B", "improved"),
        ("C", "regression"),
    ]
    assert compare(a)[0] == 2


def test_rows_are_worked_out_from_the_timings_as_the_sweep_does(tmp_path: Path) -> None:
    made = sweep({("float32", 1): 0.004, ("bfloat16", 8): 0.002}, gpu=True)
    folder = store(tmp_path / "a", made)
    files.write_csv(folder / "raw_samples.csv", visits.raw_rows(made), visits.RAW_COLUMNS)
    rows = [{name: str(value) for name, value in row.items()} for row in visits.raw_rows(made)]
    assert sorted(visits_of(rows, document(made)), key=str) == sorted(made, key=str)
    result = rounds_of(made)["bfloat16", 8].seconds
    assert result == pytest.approx({number: 0.002 * factor for number, factor in enumerate(SPREAD)}, rel=1e-12)


def test_the_minimum_effect_is_3_percent_on_a_cpu_and_2_on_a_gpu(compare: Command, tmp_path: Path) -> None:
    first, second = sweep({8: 0.002}), sweep({8: 0.00205})
    a, b = store(tmp_path / "a", first), store(tmp_path / "b", second)
    assert compare(a, b)[0] == 0
    code, shown, _ = compare(a, b, "--minimum-effect", "2")
    assert (code, shown.split(":")[0]) == (1, "REGRESSION")
    store(a, first, document(first, device=GPU))
    store(b, second, document(second, device=GPU))
    assert compare(a, b)[0] == 1
    assert compare(a, b, "--minimum-effect", "5")[0] == 0


@pytest.mark.parametrize("percent", ["0", "-1", "nan", "inf"])
def test_a_minimum_effect_without_sense_ends_with_2(compare: Command, a: Path, percent: str) -> None:
    code, shown, notes = compare(a, a, f"--minimum-effect={percent}")
    assert (code, shown) == (2, "")
    assert "give a percentage above 0" in notes


def test_an_ambiguous_row_says_how_many_rounds_would_settle_it(compare: Command, tmp_path: Path) -> None:
    a, b = (store(tmp_path / name, sweep({8: seconds}, LOUD)) for name, seconds in (("a", 0.002), ("b", 0.0022)))
    code, shown, _ = compare(a, b)
    assert (code, compare(a, b, "--strict")[0]) == (0, 1)
    assert shown.startswith("AMBIGUOUS: 1 ambiguous of 1 rows\n")
    assert re.search(r"Not settled:\n- float32 batch size 8: about \d+ more rounds in each run would settle it", shown)


def test_one_round_is_said_to_give_no_interval(with_b: Command) -> None:
    assert "float32 batch size 8: one round gives no interval" in with_b(sweep(SLOWER, spread=[1.0]))[1]


def test_a_dtype_of_one_run_alone_is_listed(compare: Command, tmp_path: Path) -> None:
    a = store(tmp_path / "a", sweep({("float32", 8): 0.002, ("bfloat16", 8): 0.001}))
    b = store(tmp_path / "b", sweep({("float32", 8): 0.002, ("float16", 8): 0.001}))
    listed = "- bfloat16 batch size 8: A ok, B absent\n- float16 batch size 8: A absent, B ok"
    assert f"Measured in one run only:\n{listed}" in compare(a, b)[1]


RIGHT = [True] * 900 + [False] * 100


def passed(
    folder: Path, right: Sequence[bool] = RIGHT, seconds: Sequence[float] = (1.0,) * 5, first_row: int = 0
) -> Path:
    """Store a run of one batch size that has predicted the dataset."""
    made = sweep({8: 0.002})
    full = evaluation(folder, right, seconds, first_row)
    return store(folder, made, document(made, full_dataset_metrics=full))


def test_accuracy_is_compared_row_by_row(compare: Command, tmp_path: Path) -> None:
    worse = [False] * 30 + [True] * 870 + [True] * 10 + [False] * 90
    a, b = passed(tmp_path / "a"), passed(tmp_path / "b", worse)
    code, shown, _ = compare(a, b)
    assert code == 1
    assert shown.startswith("REGRESSION: B is less accurate; 2 same of 2 rows\n")
    assert "A 0.9000, B 0.8800 on the same 1,000 rows" in shown
    shown = " ".join(shown.split())
    assert "difference -2.00 percentage points [-3.24 to -0.75]: loss; 30 rows right in A alone, 10 in B alone" in shown
    assert compare(b, a)[1].startswith("IMPROVED: B is more accurate; 2 same of 2 rows\n")


def test_rows_of_one_run_alone_are_left_out_of_the_accuracy(compare: Command, tmp_path: Path) -> None:
    a, b = passed(tmp_path / "a"), passed(tmp_path / "b", first_row=100)
    shown = " ".join(compare(a, b)[1].split())
    assert "on the same 900 rows" in shown
    assert "200 row(s) of one run have no row of equal id and label in the other and are left out" in shown


def test_rows_with_another_label_are_left_out_of_the_accuracy(compare: Command, tmp_path: Path) -> None:
    a, b = (passed(tmp_path / name) for name in "ab")
    path = b / "evaluation" / "predictions.csv"
    files.write_text(path, path.read_text().replace("praise", "complaint", 7))
    shown = " ".join(compare(a, b)[1].split())
    assert "on the same 993 rows" in shown and "14 row(s) of one run have no row of equal id and label" in shown


def test_damaged_predictions_end_with_2(compare: Command, a: Path) -> None:
    files.write_text(a / "evaluation" / "predictions.csv", "row_id\n1\n")
    code, _, notes = compare(a, a)
    assert code == 2 and "predictions.csv cannot be read" in notes


@pytest.mark.parametrize("name", ["raw_samples.csv", "predictions.csv"])
def test_a_file_that_the_disk_no_longer_gives_is_named(compare: Command, a: Path, name: str) -> None:
    files.write_text(a / "evaluation" / "predictions.csv", "row_id,label_name,correct\n")
    with injected(a) as done:
        compare(a, a)
    reads = [path for operation, path in done if operation == "read"]
    position = next(position for position, path in enumerate(reads, 1) if path.endswith(name))
    with injected(a, Fault("read", position, errno.EIO)):
        code, _, notes = compare(a, a)
    assert code == 3 and f"{name}: the disk at" in notes and "failed or is gone (Input/output error)" in notes


def test_the_pass_over_the_dataset_is_paired_by_shard(compare: Command, tmp_path: Path) -> None:
    """Shards differ tenfold in length; each is 8 % slower, which only a paired comparison can see."""
    seconds = [1.0, 2.0, 4.0, 7.0, 10.0]
    slower = [1.08 * shard * factor for shard, factor in zip(seconds, SPREAD, strict=True)]
    a, b = passed(tmp_path / "a", seconds=seconds), passed(tmp_path / "b", seconds=slower)
    code, shown, _ = compare(a, b)
    assert code == 1
    assert shown.startswith("REGRESSION: B is slower at the whole dataset (+8.0 % time); 1 same of 2 rows\n")


def test_a_pass_with_other_shards_has_no_interval(compare: Command, tmp_path: Path) -> None:
    a, b = passed(tmp_path / "a"), passed(tmp_path / "b", seconds=[0.6] * 10)
    code, shown, _ = compare(a, b, "--strict")
    assert code == 0
    assert "the whole dataset: no interval without 5 or more shards that are the same in both runs" in shown
    assert "+20.0 %" in shown and "not judged" in shown


def test_a_shard_of_another_plan_is_not_taken(tmp_path: Path) -> None:
    a, b = (passed(tmp_path / name) for name in "ab")
    assert facts.read(a, layout(a)).shards
    (b / "evaluation" / "cost-00002.json").replace(a / "evaluation" / "cost-00002.json")
    assert facts.read(a, layout(a)).shards is None


def layout(folder: Path) -> Any:
    from utils.command.artifacts import Layout

    return Layout(folder, folder / "baseline_metrics.json", folder / "detailed_metrics.csv", folder / "val_df.csv")


def test_json_is_one_strict_document(with_b: Command) -> None:
    name = {**MODEL, "name": "intents é\u2028\u202e"}
    code, shown, _ = with_b(sweep(SLOWER), "--json", model=name)
    assert code == 1 and shown.isascii()
    result = json.loads(shown, parse_constant=pytest.fail)
    assert result["verdict"] == "regression"
    assert result["b"]["model"] == name["name"]
    assert result["minimum_effect_pct"] == 3.0
    assert [row["verdict"] for row in result["rows"]] == ["same", "slower", "same"]
    slower = result["rows"][1]
    assert slower["time_ratio_ci_low"] < slower["time_ratio"] < slower["time_ratio_ci_high"]
    assert (slower["rounds_a"], slower["rounds_b"], slower["batch_size"]) == (5, 5, 8)
    assert result["changes"][0] == {"name": "model.name", "a": "intents", "b": name["name"]}


def test_a_metrics_file_may_stand_for_its_folder(compare: Command, a: Path) -> None:
    (a / "baseline_metrics.json").rename(a / "first.json")
    assert compare(a / "first.json", a / "first.json")[0] == 0
    code, _, notes = compare(a / "first.json", a / "nowhere")
    assert code == 2 and "nowhere is missing" in notes
    assert compare(a, a, "output.metrics_file=first.json")[0] == 0


OTHER_VERSION = f"is not a metrics file of schema version {METRICS_VERSION}"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("baseline_metrics.json", None, "is missing; give a results folder"),
        ("baseline_metrics.json", "{", "cannot be read"),
        ("baseline_metrics.json", "[]", OTHER_VERSION),
        ("baseline_metrics.json", '{"schema_version": 99}', OTHER_VERSION),
        ("baseline_metrics.json", f'{{"schema_version": {METRICS_VERSION}}}', "`machine_fingerprint`"),
        ("raw_samples.csv", None, "is missing; a comparison needs every timing"),
        ("raw_samples.csv", "dtype,batch_size\nfloat32,8\n", "cannot be read: KeyError('round')"),
    ],
)
def test_unusable_input_ends_with_2_and_names_the_file(
    compare: Command, a: Path, name: str, content: str | None, message: str
) -> None:
    (a / name).unlink() if content is None else files.write_text(a / name, content)
    code, shown, notes = compare(a, a)
    assert (code, shown) == (2, "")
    assert message in notes and name in notes


def test_dtypes_of_one_run_are_compared_with_the_first() -> None:
    made = sweep({("float32", 1): 0.004, ("float32", 8): 0.002, ("bfloat16", 1): 0.004, ("bfloat16", 8): 0.001})
    made += [replace(visit, dtype="float16") for visit in sweep({8: 0.002})]
    result = between_dtypes(document(made, device=GPU), rounds_of(made))
    assert [(row.dtype_a, row.dtype_b, row.batch_size, row.verdict) for row in result] == [
        ("float32", "bfloat16", 1, "same"),
        ("float32", "bfloat16", 8, "faster"),
        ("float32", "float16", 8, "same"),
    ]
    assert result[1].time_ratio == pytest.approx(0.5, rel=1e-12)


def test_dtypes_are_compared_round_by_round_so_that_a_change_of_load_hits_both() -> None:
    made = sweep({("float32", 8): 0.002, ("bfloat16", 8): 0.0018}, spread=(1.0, 1.5, 1.2, 2.0, 1.1))
    [row] = between_dtypes(document(made), rounds_of(made))
    assert row.verdict == "faster"
    assert row.time_ratio == pytest.approx(0.9, rel=1e-12)


BUSY = (Disturbance("foreign_load", "other processes used 1.0 of 2 cores"),)


@pytest.mark.parametrize(("quiet", "verdict"), [(0, "ambiguous"), (2, "ambiguous"), (3, "slower"), (5, "slower")])
def test_no_verdict_rests_on_disturbed_rounds(with_b: Command, quiet: int, verdict: str) -> None:
    slower = sweep({1: 0.004, 8: 0.004, 32: 0.001})
    disturbed = [replace(visit, disturbances=() if visit.round < quiet else BUSY) for visit in slower]
    _, shown, _ = with_b(disturbed)
    assert cells_of(shown, 8)[-1] == verdict
    refused = f"something else used the machine in too many rounds: {5 - quiet} of 5 in B" in " ".join(shown.split())
    assert refused == (quiet < 3)


def test_two_runs_that_timed_other_batches_say_so(with_b: Command) -> None:
    said = "the two runs timed other batches"
    assert said not in with_b(sweep(AS_A))[1]
    moved = [
        replace(visit, timings=tuple(replace(one, index=one.index + 1) for one in visit.timings))
        for visit in sweep(AS_A)
    ]
    assert said in " ".join(with_b(moved)[1].split())


def test_one_dtype_has_nothing_to_be_compared_with() -> None:
    made = sweep({8: 0.002})
    assert between_dtypes(document(made), rounds_of(made)) == []
    assert between_dtypes(document([]), {}) == []


@pytest.mark.parametrize(("half_width", "enough", "is_met"), [(0.5, 2, True), (3.0, 0, False), (50.0, 0, False)])
def test_a_run_says_what_a_second_one_would_need_to_be_found_the_same(half_width, enough, is_met) -> None:
    known = {
        "throughput_half_width_pct": half_width,
        "rounds": 5,
        "timed_batches": 50,
        "latency_per_batch_ms_mean": 40.0,
    }
    rows = [{**row("float32", size), **known} for size in (1, 8)] + [row("float32", 64, "oom")]
    result = facts.budget_for_same(document([], batch_sizes=rows))
    assert result and (result.rows, result.enough, result.is_met) == (2, enough, is_met)
    if half_width == 50.0:
        assert "rounds vary too much" in result.text(0.03)
    elif not is_met:
        assert (
            result.max_seconds == 11.0
        )  # 18 rounds: ten batches take 0.4 s, that of typical cost 0.1 s, untimed and timed
        assert "profiling.max_seconds_per_batch_size=" in result.text(0.03)
    assert facts.budget_for_same(document([], batch_sizes=rows[2:])) is None


def pace(step: int) -> float:
    return 1 + (step * 7 % 5) / 50


def trained(factor: float = 1.0, **stages: float):
    return times_of(
        {name: value * pace(step) * factor for name, value in (USUAL | stages).items()} for step in range(60)
    )


def stage_rows(a, b) -> dict[str, comparison.StageRow]:
    return {row.name: row for row in comparison.contrast(a, b).rows}


def test_the_stage_that_grew_is_slower_and_the_mirror_image_faster():
    result = stage_rows(trained(), trained(forward=6.0))
    assert result["forward"].comparison.verdict == "slower" and result["forward"].comparison.ratio == pytest.approx(2.0)
    assert result[comparison.STEP_ROW].comparison.ratio == pytest.approx(1.3)
    assert {result[name].comparison.verdict for name in ("data", "backward", "optimizer")} == {"same"}
    assert result["forward"].a.share == pytest.approx(0.3) and result["forward"].b.share == pytest.approx(6 / 13)
    assert result["forward"].b.low is not None
    slower, faster = trained(1.25), trained()
    pairs = [(faster, slower), (slower, faster)]
    one, other = (stage_rows(*pair)[comparison.STEP_ROW].comparison for pair in pairs)
    assert (one.verdict, other.verdict) == ("slower", "faster") and one.ratio * other.ratio == pytest.approx(1.0)


def test_what_cannot_be_compared_has_a_reason():
    result = stage_rows(trained(), trained(reward=2.0))
    assert (result["reward"].comparison, result["reward"].reason) == (None, "only B has it")
    assert result["reward"].a is None and result["reward"].b.step_s == pytest.approx(2.08e-3)
    result = stage_rows(trained(sync=0.0), trained(sync=0.0))
    assert (result["sync"].comparison, result["sync"].reason) == (None, "in some windows it took no time")
    with pytest.raises(ValueError, match="B has 5 undisturbed steps"):
        comparison.contrast(trained(), times_of([USUAL] * 5))


def test_settings_that_differ_are_listed_by_their_path():
    a = {"training": {"batch_size": 8, "lr": 0.1}, "model": "cnn", "same": [1]}
    b = {"training": {"batch_size": 16, "lr": 0.1}, "extra": {}, "same": [1]}
    assert comparison.differences(a, b) == [
        ("extra", "not there", "{}"),
        ("model", "cnn", "not there"),
        ("training.batch_size", "8", "16"),
    ]


@pytest.mark.parametrize(("stages", "verdict", "code"), [({"data": 9.0}, "slower", 1), ({}, "same", 0)])
def test_training_runs_are_compared_on_the_command_line(stages, verdict, code, tmp_path, capsys):
    a, b = write_run(tmp_path / "a"), write_run(tmp_path / "b", stages=USUAL | stages)
    main = importlib.import_module("scripts.compare_runs").main
    assert main([str(a), str(b), "--json"]) == code
    [result] = json.loads(capsys.readouterr().out)["comparisons"]
    assert result["verdict"] == verdict
    assert main([str(a), str(b)]) == code
    shown = capsys.readouterr().out
    assert "whole step" in shown and verdict in shown and "model: a → b" in shown
    assert main([str(a), str(tmp_path)]) == 2, "runs of two kinds"


def test_a_saved_baseline_stands_for_the_run_it_was_made_of(compare: Command, a: Path, tmp_path: Path) -> None:
    made, file = sweep(AS_A), tmp_path / "baselines.json"
    for folder in (a, slow := tmp_path / "b"):
        full = evaluation(folder, RIGHT, [1.0] * 5)
        rows = made if folder == a else sweep(SLOWER)
        store(folder, rows, document(rows, full_dataset_metrics=full))
    assert compare(a, "--save-baseline", file)[0] == compare(slow, "--save-baseline", file, "--name", "slow")[0] == 0
    assert file.stat().st_size < 20_000
    for name, folder in (("default", a), ("slow", slow)):
        for judged in (a, slow):
            code, shown, notes = compare(judged, "--baseline", file, "--name", name, "--json")
            assert not notes, notes
            kept = json.loads(shown)
            direct = json.loads(compare(folder, judged, "--json")[1])
            assert kept["verdict"] == direct["verdict"] and kept["accuracy"] == direct["accuracy"]
            assert kept["changes"] == direct["changes"]
            for one, other in zip(kept["rows"], direct["rows"], strict=True):
                assert one["verdict"] == other["verdict"]
                assert one["time_ratio"] == pytest.approx(other["time_ratio"], rel=1e-6)


@pytest.mark.parametrize(
    ("content", "arguments", "message"),
    [
        (None, [], "--save-baseline"),
        ("[]", [], "is no file of baselines"),
        ('{"schema_version": 9, "kind": "boundby_baselines", "baselines": {}}', [], "of version 2"),
        ('{"schema_version": 2, "kind": "boundby_baselines", "baselines": {}}', [], "has no baseline 'default'"),
    ],
)
def test_an_unusable_baseline_ends_with_2_and_the_way_out(compare, a, tmp_path, content, arguments, message) -> None:
    file = tmp_path / "baselines.json"
    if content:
        files.write_text(file, content)
    code, shown, notes = compare(a, "--baseline", file, *arguments)
    assert (code, shown) == (2, "") and message in notes


def test_markdown_is_a_table_that_makes_no_markup_of_names(with_b: Command) -> None:
    code, shown, _ = with_b(sweep(SLOWER), "--markdown", model={**MODEL, "name": "<b>@someone|x"})
    lines = shown.splitlines()
    assert code == 1 and lines[0].startswith("### ") and lines[2].startswith("REGRESSION: B is slower")
    [header] = [at for at, line in enumerate(lines) if line.startswith("| dtype")]
    assert lines[header + 1].startswith("| :-- | --: |") and lines[header + 3].endswith("| slower |")
    assert r"\<b\>@<!-- -->someone" in shown and "@someone" not in shown and r"\|x" in shown


def test_a_gate_says_beforehand_what_it_takes_to_find_a_slowdown() -> None:
    known = {"rounds": 20, "timed_batches": 200, "latency_per_batch_ms_mean": 40.0}
    rows = [{**row("float32", size), **known, "throughput_half_width_pct": 1.0} for size in (1, 8)]
    assert "5 % with the budget of this run; a slowdown of 10 %" in facts.gate_text(document([], batch_sizes=rows))
    assert "5 % at most half the time" in facts.gate_text(document([], batch_sizes=rows), 0.05)
    loud = [{**row, "throughput_half_width_pct": 4.0} for row in rows]
    assert "max_seconds_per_batch_size=" in facts.gate_text(document([], batch_sizes=loud))
    assert facts.gate_text(document([], batch_sizes=[])) is None
