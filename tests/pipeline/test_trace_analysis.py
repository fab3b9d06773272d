"""`scripts/analyze_trace.py` as a person and a program meet it: text, one JSON document, differences, exit codes.

python -m pytest tests/pipeline/test_trace_analysis.py
"""

import gzip
import importlib
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from boundby.trace import op_stats, operator_rows, read_trace
from boundby.trace.operator_table import COLUMNS, by_name, table_lines, table_rows
from tests import trace_document
from tests.traces import (
    GPU_TRACES,
    REAL_NAMES,
    REPOSITORY,
    call,
    event,
    python_frame,
    step,
    work,
)
from tests.traces import document as content
from utils.console import printable
from utils.trace_analysis import diff_document, diff_text, document, text
from utils.trace_analysis.kernel_names import short
from utils.trace_analysis.traces import examine

WIDEST = 120
Command = Callable[..., tuple[int, str, str]]
ELEMENTWISE = (
    "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, "
    "at::detail::Array<char*, 3> >(int, at::native::CUDAFunctor_add<float>, at::detail::Array<char*, 3>)"
)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Command:
    """Return what runs the script and gives its exit code, stdout and stderr."""

    def start(*arguments: Any) -> tuple[int, str, str]:
        code = importlib.import_module("scripts.analyze_trace").main([str(each) for each in arguments])
        return code, *capsys.readouterr()

    return start


def store(path: Path, *events: dict, **header: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content(*events, **header)))
    return path


def training(
    path: Path, *, allreduce_us: float = 100, kernel: str = ELEMENTWISE, steps: int = 3, **header: Any
) -> Path:
    """Store a trace of steps of 1000 us, in each of which a device computes for 200 us and communicates."""
    events = []
    for number in range(steps):
        at = 1000 * number
        events += [
            step(number, at, 1000),
            event("aten::mm", at + 10, 90, Input_Dims=[[4, 8], [8, 2]]),
            call(at + 20, 10, 10 * number + 1),
            work(at + 100, 200, 10 * number + 1, name=kernel),
            call(at + 40, 10, 10 * number + 2),
            work(at + 400, allreduce_us, 10 * number + 2, name="ncclDevKernel_AllReduce", stream=20),
        ]
    return store(path, *events, **header)


def widest(shown: str) -> int:
    return max(map(len, shown.splitlines()))


# Text


def test_the_verdict_stands_first_and_the_tables_follow(run: Command, tmp_path: Path) -> None:
    code, shown, notes = run(training(tmp_path / "trace.json"))
    assert (code, notes) == (0, "")
    assert shown.startswith("LAUNCH: the device waits for the host")
    said = " ".join(shown.split())
    assert "3 steps (0 to 2): median 1.000 ms, the middle half 1.000 to 1.000 ms" in said
    assert "- at most " in said.split("What removing each cause could gain")[1]
    order = ["Where the time of device 0 went:", "Longest gaps:", "Steps:", "Launching calls:", "Top operators"]
    places = [shown.index(each) for each in [*order, "Top kernels"]]
    assert places == sorted(places)
    assert widest(shown) <= WIDEST


def test_the_time_of_the_window_adds_up(tmp_path: Path) -> None:
    [trace] = document.of(examine([training(tmp_path / "trace.json")]))["traces"]
    [device] = trace["devices"]
    assert device["window_ms"] == 3.0
    assert device["exposed_ms"] == {"compute": 0.6, "communication": 0.3, "memcpy": 0.0, "memset": 0.0}
    assert device["busy_ms"] + device["idle_ms"] == pytest.approx(3.0)
    assert sum(device["idle_by_cause_ms"].values()) == pytest.approx(device["idle_ms"])
    shown = "\n".join(text.lines(document.of(examine([training(tmp_path / "trace.json")]))))
    [line] = [each for each in shown.splitlines() if each.startswith("- communication")]
    assert line.split()[2:4] == ["0.3000", "10.0"]


def test_where_kernels_take_the_time_the_next_step_is_nsight_compute_for_the_slowest(
    run: Command, tmp_path: Path
) -> None:
    events = [step(7, 0, 1000), call(5, 5, 1), work(20, 970, 1, name="void ns::gemm<float>(int)")]
    _, shown, _ = run(store(tmp_path / "trace.json", *events))
    said = " ".join(shown.replace("\\\n", " ").split())
    assert "--nvtx-include step_7/ --kernel-name 'regex:^gemm$' --launch-skip 0 --launch-count 1" in said
    assert shown.index("Launching calls:") < shown.index("ncu --nvtx") < shown.index("Top kernels")
    waiting = training(tmp_path / "waiting.json")
    assert "ncu" not in run(waiting)[1], "a faster kernel would not help"
    assert json.loads(run(waiting, "--json")[1])["traces"][0]["nsight_compute"].startswith("ncu --nvtx")
    host = store(tmp_path / "host.json", step(0, 0, 100), event("aten::mm", 0, 99))
    assert json.loads(run(host, "--json")[1])["traces"][0]["nsight_compute"] is None


def test_a_gpu_loop_that_waits_for_its_input_says_so() -> None:
    shown = "\n".join(text.lines(trace_document.document(trace_document.gpu())))
    assert shown.startswith("INPUT: the device waits for the input pipeline")
    assert "input: waiting for the next batch of the DataLoader" in shown
    assert "Whose memory it was at the peak" in shown
    assert widest(shown) <= WIDEST


def test_a_trace_of_a_cpu_is_told_in_terms_of_the_host() -> None:
    shown = "\n".join(text.lines(trace_document.document(trace_document.cpu())))
    assert "the host is busy with" in shown and "Where the time of the host went" in shown
    assert "device 0" not in shown and "Launching calls" not in shown and "Longest gaps" not in shown


def test_of_many_steps_the_longest_are_shown(tmp_path: Path) -> None:
    events = [step(number, 100 * number, 100) for number in range(19)] + [step(19, 1900, 500)]
    shown = "\n".join(text.lines(document.of(examine([store(tmp_path / "t.json", *events)]))))
    assert "The 8 longest of 20 steps:" in shown
    assert "  19  0.5000" in shown


def test_text_works_when_nothing_is_known(tmp_path: Path) -> None:
    found = document.of(examine([store(tmp_path / "trace.json")]))
    [trace] = found["traces"]
    trace["launches"] = {**dict.fromkeys(trace["launches"]), "work": 1, "calls": 0, "shorter_than_call": 0}
    trace["launches"] |= {"calls_without_work": 0, "work_without_call": 0}
    trace["operators"] = [dict.fromkeys(table_rows([])) | {"name": "op", "input_shapes": None, "calls": 0}]
    trace["operators"][0] |= dict.fromkeys(("stack", "module", *COLUMNS))
    for name in ("device_total_ms", "cpu_total_ms"):
        trace["operators"][0][name] = None
    trace["kernels"] = [
        {"name": "k", "total_ms": 0.0, "share_pct": None, "calls": 1, "median_us": 0.0, "operator": None}
    ]
    shown = "\n".join(text.lines(found))
    assert shown.startswith("INCONCLUSIVE: nothing can be concluded from this trace")
    assert "unknown (no work is joined to its call)" in shown
    assert "nan" not in shown and "None" not in shown


def test_names_from_a_trace_cannot_steer_the_terminal(run: Command, tmp_path: Path) -> None:
    path = training(tmp_path / "trace.json", kernel="gemm\x1b[2J\u202e\u2028" + "x" * 500)
    _, shown, _ = run(path)
    assert printable(shown) == shown and widest(shown) <= WIDEST


# Tables


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        (ELEMENTWISE, "vectorized_elementwise_kernel<4, CUDAFunctor_add<float>, Array<char*, 3>>"),
        ("void cutlass::Kernel<cutlass_80_gemm>(cutlass_80_gemm::Params)", "cutlass_80_gemm"),
        ("ncclKernel_AllReduce(ncclDevComm*, unsigned long)", "ncclKernel_AllReduce"),
        ("void at::native::(anonymous namespace)::cat<float, float, float, true, true>(int)", "cat<float, true, true>"),
        ("Memcpy DtoD (Device -> Device)", "Memcpy DtoD (Device -> Device)"),
        ("triton_poi_fused_add_12", "triton_poi_fused_add_12"),
        ("", ""),
        ("()", "()"),
    ],
)
def test_kernel_names_are_cut_down_to_what_tells_them_apart(name: str, shown: str) -> None:
    assert short(name, 80) == shown


def test_long_kernel_names_fit() -> None:
    assert short(ELEMENTWISE, 40) == "vectorized_elementwise_kernel<4, CUDA..."
    assert short("a" * 30 + "b" * 30, 20) == "aaaaaaaaaa...bbbbbbb"


def test_the_table_adds_up_the_shapes_of_an_operator(tmp_path: Path) -> None:
    events = [
        event("aten::mm", 0, 10, Input_Dims=[[4, 8], [8, 2]]),
        event("aten::mm", 20, 30, Input_Dims=[[4, 4], [4, 4]]),
        event("aten::addmm", 60, 5),
    ]
    trace = read_trace(store(tmp_path / "trace.json", *events))
    found = by_name(op_stats(trace))
    assert [(each.name, each.calls, each.flops, each.input_shapes) for each in found] == [
        ("aten::mm", 2, 2 * 4 * 8 * 2 + 2 * 4 * 4 * 4, None),
        ("aten::addmm", 1, None, None),
    ]
    sums = [(each.cpu_total_ns, each.cpu_self_ns, each.cpu_self_share, each.device_self_ns) for each in found]
    assert sums == [
        (each.cpu_total_ns, each.cpu_self_ns, pytest.approx(each.cpu_self_share), None) for each in op_stats(trace, ())
    ]


def test_the_table_says_what_its_rows_are_grouped_by(run: Command, tmp_path: Path) -> None:
    path = store(
        tmp_path / "trace.json",
        python_frame("train.py(1): main", 0, 100, 1, None),
        python_frame("nn.Module: Net_0", 5, 90, 2, 1),
        event("aten::mm", 10, 20, Input_Dims=[[4, 8], [8, 2]]),
        event("aten::mm", 40, 30, Input_Dims=[[4, 4], [4, 4]]),
    )
    expected = {
        "name": [],
        "shapes": ["    [[4, 4], [4, 4]]", "    [[4, 8], [8, 2]]"],
        "module": ["    Net_0"],
        "stack": ["    nn.Module: Net_0", "    train.py(1): main"],
    }
    for grouping, details in expected.items():
        _, shown, _ = run(path, "--group-by", grouping)
        assert f"grouped by {grouping}\n" in shown
        rows = shown.split(f"grouped by {grouping}\n")[1].splitlines()[4:]
        assert [each for each in rows if each.startswith("    ")] == details, grouping
        assert sum(each.startswith("aten::mm") for each in rows) == (2 if grouping == "shapes" else 1)


def test_top_limits_the_rows_and_says_how_many_are_left(tmp_path: Path) -> None:
    events = [event(f"aten::op{number}", 10 * number, number + 1) for number in range(5)]
    rows = table_rows(op_stats(read_trace(store(tmp_path / "trace.json", *events))))
    lines = table_lines(rows, top=2)
    assert [line.split()[0] for line in lines[-3:]] == ["aten::op4", "aten::op3", "and"]
    assert lines[-1] == "  and 3 more"


# The document


def test_json_is_one_strict_document(run: Command, tmp_path: Path) -> None:
    path = training(tmp_path / "trace é.json", kernel="gemm é\u2028")
    code, shown, _ = run(path, "--json", "--steps", "3")
    assert code in (0, 1) and shown.isascii()
    found = json.loads(shown, parse_constant=pytest.fail)
    assert (found["schema_version"], found["kind"], found["slowest"]) == (1, "trace_analysis", 0)
    [trace] = found["traces"]
    assert trace["path"] == str(path)
    assert trace["steps"]["expected"] == 3 and trace["steps"]["median_ms"] == 1.0
    assert {each["name"] for each in trace["kernels"]} == {"gemm é\u2028", "ncclDevKernel_AllReduce"}
    assert sum(trace["devices"][0]["timeline"]["busy_ms"]["compute"]) == pytest.approx(0.6)


def test_operators_of_the_document_are_the_rows_of_op_stats(tmp_path: Path) -> None:
    path = training(tmp_path / "trace.json")
    [trace] = document.of(examine([path], group_by="shapes"))["traces"]
    extra = {"stack": None, "module": None}
    assert trace["operators"] == [row | extra for row in operator_rows(op_stats(read_trace(path)))]


# Several traces


def test_ranks_are_compared_and_the_slowest_is_shown(run: Command, tmp_path: Path) -> None:
    """Rank 1 waits least in the collective: the others wait for it."""
    for rank, allreduce in enumerate((300, 100, 200)):
        info = {"distributedInfo": {"rank": rank, "world_size": 4}}
        training(tmp_path / f"host_{rank}.pt.trace.json", allreduce_us=allreduce, **info)
    _, shown, _ = run(tmp_path)
    assert shown.startswith("3 traces:")
    assert "1 of 4 ranks are not among these traces" in shown
    assert "(slowest)" in next(line for line in shown.splitlines() if line.strip().startswith("1  host_1"))
    assert "In detail: host_1.pt.trace.json" in shown
    assert "In detail: host_2.pt.trace.json" in run(tmp_path, "--rank", 2)[1]
    code, _, notes = run(tmp_path, "--rank", 7)
    assert code == 2 and "no trace is of rank 7; the ranks that are known are: 0, 1 and 2" in notes


def test_a_rank_in_the_file_name_stands_in_for_one_in_the_trace(tmp_path: Path) -> None:
    for name in ("rank12_trace.json", "trace_1.json", "host_4711.json"):
        training(tmp_path / name)
    found = examine([tmp_path])
    assert [(Path(each.analysis.path).name, each.rank) for each in found.traces] == [
        ("trace_1.json", 1),
        ("rank12_trace.json", 12),
        ("host_4711.json", None),  # a process, not a rank
    ]


def test_a_folder_gives_its_traces_and_nothing_else(run: Command, tmp_path: Path) -> None:
    training(tmp_path / "trace.json")
    (tmp_path / "b.json.gz").write_bytes(gzip.compress((tmp_path / "trace.json").read_bytes()))
    (tmp_path / "manifest.json").write_text('{"trace_path": "trace.json"}')
    (tmp_path / "rows.json").write_text('[{"name": "aten::mm", "calls": 3}]')
    (tmp_path / "notes.txt").write_text("no trace")
    found = examine([tmp_path, tmp_path / "trace.json"])
    assert [Path(each.analysis.path).name for each in found.traces] == ["b.json.gz", "trace.json"]
    assert not any(each.is_fault for each in found.left_out)
    assert "could not be read" not in run(tmp_path)[1]


def test_one_unreadable_file_does_not_lose_the_others(run: Command, tmp_path: Path) -> None:
    good = training(tmp_path / "good.json")
    broken = tmp_path / "rank1.json.gz"
    broken.write_bytes(gzip.compress(good.read_bytes())[:12])
    for arguments in ((tmp_path,), (good, tmp_path / "absent.json")):
        code, shown, _ = run(*arguments)
        assert code == 1
        assert shown.startswith("Left out, since it could not be read:\n- ")
        assert "Where the time of device 0 went" in shown
    left_out = json.loads(run(tmp_path, "--json")[1])["left_out"]
    assert [(each["path"], each["is_fault"]) for each in left_out] == [(str(broken), True)]


# Exit codes


def test_a_sound_trace_ends_with_0_and_a_fatal_finding_with_1(run: Command, tmp_path: Path) -> None:
    path = training(tmp_path / "trace.json")
    assert run(path, "--steps", 3)[0] == 0
    code, shown, _ = run(path, "--steps", 5)
    assert code == 1
    assert shown.startswith("INCONCLUSIVE: nothing can be concluded from this trace: steps: 3 of 5 steps are in the")


def test_the_trace_itself_is_left_as_it_is(run: Command, tmp_path: Path) -> None:
    path = training(tmp_path / "trace.json")
    before = path.read_bytes(), path.stat().st_mtime_ns
    for options in ((), ("--json",), ("--diff", path), ("--group-by", "stack", "--flame-graph", tmp_path / "a.html")):
        run(path, *options)
    assert (path.read_bytes(), path.stat().st_mtime_ns) == before
    assert [each.name for each in tmp_path.iterdir() if each.suffix == ".json"] == ["trace.json"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["absent.json"], "absent.json is missing"),
        (["empty"], "no *.json and *.json.gz in"),
        (["other.json"], "holds no list of traceEvents"),
        (["trace.json", "--top", "0"], "--top is 0; give a whole number of 1 or more"),
        (["trace.json", "--steps", "-1"], "--steps is -1"),
        (["trace.json", "--diff", "absent.json"], "absent.json is missing"),
        (["trace.json", "--diff", "several"], "there are 2 traces to choose from; say which with --rank N"),
    ],
)
def test_what_cannot_be_done_ends_with_2(
    run: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "other.json").write_text("{}")
    for name in ("trace.json", "several/rank0.json", "several/rank1.json"):
        training(tmp_path / name)
    code, shown, notes = run(*arguments)
    assert (code, shown) == (2, "")
    assert message in notes and "Traceback" not in notes


# Differences


def test_a_trace_does_not_differ_from_itself(run: Command, tmp_path: Path) -> None:
    path = training(tmp_path / "trace.json")
    code, shown, _ = run(path, "--diff", path)
    assert code == 0
    assert shown.startswith("EQUAL: the median step of B is as long as that of A (+0.0 %); within the spread")
    assert "No operator differs." in shown and "No kernel differs." in shown


def test_a_diff_names_what_takes_longer_and_what_is_new(run: Command, tmp_path: Path) -> None:
    a = training(tmp_path / "a.json", steps=3, kernel="old_gemm")
    b = training(tmp_path / "b.json", steps=6, kernel="new_gemm", allreduce_us=250)
    code, shown, _ = run(a, "--diff", b)
    assert code == 0
    assert "One trace is one sample" in shown and "per step: what a trace holds" in shown
    rows = {line.split()[0]: line.split()[1:] for line in shown.split("Kernels, per step")[1].splitlines() if line}
    assert rows["ncclDevKernel_AllReduce"][2:5] == ["0.1000", "0.2500", "+0.1500"]
    assert rows["old_gemm"] == ["1", "-", "0.2000", "-", "-0.2000", "200", "-"]
    assert rows["new_gemm"] == ["-", "1", "-", "0.2000", "+0.2000", "-", "200"]
    assert "1 in A only; 1 in B only." in shown
    found = json.loads(run(a, "--diff", b, "--json")[1], parse_constant=pytest.fail)
    assert (found["kind"], found["is_per_step"], found["step"]["median_change_ms"]) == ("trace_diff", True, 0.0)
    [first] = [each for each in found["kernels"] if each["name"] == "ncclDevKernel_AllReduce"]
    assert first["total_ms_change"] == pytest.approx(0.15) and first["only_in"] is None


def test_traces_without_steps_are_compared_in_total(run: Command, tmp_path: Path) -> None:
    a, b = (store(tmp_path / f"{each}.json", event("aten::mm", 0, each)) for each in (50, 80))
    _, shown, _ = run(a, "--diff", b)
    assert shown.startswith("NO STEPS to compare: window of A 0.05000 ms, of B 0.08000 ms")
    assert "in total, since a trace has no steps" in shown
    assert "Kernels" not in shown


def test_an_inconclusive_side_is_told(run: Command, tmp_path: Path) -> None:
    a, b = training(tmp_path / "a.json"), training(tmp_path / "b.json", steps=2)
    code, shown, _ = run(a, "--diff", b, "--steps", 3)
    assert code == 1
    assert "(B inconclusive: see the analysis of each)" in " ".join(shown.split())


# The flame graph


def test_stacks_become_a_flame_graph(run: Command, tmp_path: Path) -> None:
    path = store(tmp_path / "trace.json", python_frame("train.py(1): main", 0, 100, 1, None), event("aten::mm", 1, 2))
    code, _, notes = run(path, "--flame-graph", tmp_path / "flames.html")
    assert notes == f"wrote {tmp_path / 'flames.html'}\n"
    assert "train.py" in (tmp_path / "flames.html").read_text()
    code, _, notes = run(training(tmp_path / "other.json"), "--flame-graph", tmp_path / "none.html")
    assert code == 1 and "holds no Python stacks" in notes
    assert not (tmp_path / "none.html").exists()


# Real traces


@pytest.fixture(scope="module")
def real() -> list[Path]:
    if not GPU_TRACES.exists():
        pytest.skip(f"needs the traces in {GPU_TRACES}")
    return [GPU_TRACES / name for name in REAL_NAMES]


def test_real_traces_are_told_within_the_width_of_a_page(real: list[Path]) -> None:
    for path in real:
        for grouping in ("name", "shapes", "module", "stack"):
            found = document.of(examine([path], group_by=grouping))
            json.loads(document.as_json(found), parse_constant=pytest.fail)
            assert widest("\n".join(text.lines(found, top=100))) <= WIDEST
    a, _, b = (examine([path]).only(None) for path in real)
    lines = diff_text.lines(diff_document.of(a, b), top=100)
    assert widest("\n".join(lines)) <= WIDEST


def test_the_trace_whose_launches_are_missing_is_called_out(run: Command, real: list[Path]) -> None:
    [odd] = [path for path in real if "rank0" in path.name]
    code, shown, _ = run(odd)
    assert code == 1
    assert shown.startswith("INCONCLUSIVE") and "have no launch in the trace" in " ".join(shown.split())


def test_the_script_never_loads_torch(tmp_path: Path) -> None:
    path = training(tmp_path / "trace.json")
    code = (
        f"import sys; from scripts.analyze_trace import main; main([{str(path)!r}]); main([{str(path)!r}, '--json']);"
        "sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
