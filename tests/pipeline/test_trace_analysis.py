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
from msgspec.structs import replace

from boundby.trace import OPERATOR_COLUMNS, op_stats, operator_rows, read_trace
from boundby.trace.operator_table import by_name, table_lines, table_rows
from tests import trace_document
from tests.traces import GPU_TRACES, REAL_NAMES, REPOSITORY, call, event, python_frame, step, work
from tests.traces import document as content
from utils.command.console import printable
from utils.tracing import trace_document as document
from utils.tracing import trace_text as text
from utils.tracing import trace_words as words
from utils.tracing.traces import Pair, examine

GOLDEN = REPOSITORY / "tests" / "golden"
WIDEST = 120
Command = Callable[..., tuple[int, str, str]]
ELEMENTWISE = (
    "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, "
    "at::detail::Array<char*, 3> >(int, at::native::CUDAFunctor_add<float>, at::detail::Array<char*, 3>)"
)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Command:
    def start(*arguments: Any) -> tuple[int, str, str]:
        code = importlib.import_module("scripts.analyze_trace").main([str(argument) for argument in arguments])
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


@pytest.mark.parametrize("name", ["gpu", "cpu", "ranks", "diff"])
def test_the_whole_text_is_as_it_was_read_and_agreed_on(
    run: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    trace_document.write(Path("gpu.json"), "gpu")
    trace_document.write(Path("cpu.json"), "cpu")
    for rank, allreduce_us in enumerate((300, 100)):
        info = {"rank": rank, "world_size": 3}
        training(Path(f"ranks/rank{rank}.json"), allreduce_us=allreduce_us, distributedInfo=info)
    arguments = {"ranks": ["ranks"], "diff": ["gpu.json", "--diff", "cpu.json"]}.get(name, [f"{name}.json"])
    code, shown, notes = run(*arguments)
    assert (code, notes) == (0, "")
    assert shown == (GOLDEN / f"trace_{name}.txt").read_text(encoding="utf-8")
    assert widest(shown) <= WIDEST


def test_the_time_of_the_window_adds_up_and_the_longest_of_many_steps_are_shown(tmp_path: Path) -> None:
    examination = examine([training(tmp_path / "trace.json")])
    [trace] = document.of(examination)["traces"]
    [device] = trace["devices"]
    assert device["window_ms"] == 3.0
    assert device["exposed_ms"] == {"compute": 0.6, "communication": 0.3, "memcpy": 0.0, "memset": 0.0}
    assert device["busy_ms"] + device["idle_ms"] == pytest.approx(3.0)
    assert sum(device["idle_by_cause_ms"].values()) == pytest.approx(device["idle_ms"])
    [line] = [line for line in text.lines(examination) if line.startswith("- communication")]
    assert line.split()[2:4] == ["0.3000", "10.0"]
    events = [step(number, 100 * number, 100) for number in range(19)] + [step(19, 1900, 500)]
    shown = "\n".join(text.lines(examine([store(tmp_path / "t.json", *events)])))
    assert "The 8 longest of 20 steps:" in shown and "  19  0.5000" in shown


def test_where_kernels_take_the_time_the_next_step_is_nsight_compute_for_the_slowest(
    run: Command, tmp_path: Path
) -> None:
    events = [step(7, 0, 1000), call(5, 5, 1), work(20, 970, 1, name="void ns::gemm<float>(int)")]
    _, shown, _ = run(store(tmp_path / "trace.json", *events))
    message = " ".join(shown.replace("\\\n", " ").split())
    assert "--nvtx-include step_7/ --kernel-name 'regex:^gemm$' --launch-skip 0 --launch-count 1" in message
    waiting = training(tmp_path / "waiting.json")
    assert "ncu" not in run(waiting)[1], "a faster kernel would not help"
    assert json.loads(run(waiting, "--json")[1])["traces"][0]["nsight_compute"].startswith("ncu --nvtx")
    host = store(tmp_path / "host.json", step(0, 0, 100), event("aten::mm", 0, 99))
    assert json.loads(run(host, "--json")[1])["traces"][0]["nsight_compute"] is None


def test_text_works_when_nothing_is_known(tmp_path: Path) -> None:
    examination = examine([store(tmp_path / "trace.json", event("op", 0, 10), work(0, 0, 2))])
    [trace] = examination.traces
    stat = replace(trace.operators[0], cpu_self_share=None, device_share=None, device_total_ns=None)
    shown = "\n".join(text.lines(replace(examination, traces=(replace(trace, operators=(stat,)),))))
    shown += "\n".join(text.lines(examine([store(tmp_path / "empty.json")])))
    assert shown.startswith("INCONCLUSIVE: ")
    assert "unknown (no kernel is linked to its launch)" in shown
    assert "nan" not in shown and "None" not in shown


def test_names_from_a_trace_cannot_steer_the_terminal(run: Command, tmp_path: Path) -> None:
    path = training(tmp_path / "trace.json", kernel="gemm\x1b[2J\u202e\u2028" + "x" * 500)
    _, shown, _ = run(path)
    assert printable(shown) == shown and widest(shown) <= WIDEST


# Tables


@pytest.mark.parametrize(
    ("name", "longest", "shown"),
    [
        (ELEMENTWISE, 80, "vectorized_elementwise_kernel<4, CUDAFunctor_add<float>, Array<char*, 3>>"),
        (ELEMENTWISE, 40, "vectorized_elementwise_kernel<4, CUDA..."),
        ("a" * 30 + "b" * 30, 20, "aaaaaaaaaa...bbbbbbb"),
        ("void cutlass::Kernel<cutlass_80_gemm>(cutlass_80_gemm::Params)", 80, "cutlass_80_gemm"),
        ("ncclKernel_AllReduce(ncclDevComm*, unsigned long)", 80, "ncclKernel_AllReduce"),
        (
            "void at::native::(anonymous namespace)::cat<float, float, float, true, true>(int)",
            80,
            "cat<float, true, true>",
        ),
        ("Memcpy DtoD (Device -> Device)", 80, "Memcpy DtoD (Device -> Device)"),
        ("triton_poi_fused_add_12", 80, "triton_poi_fused_add_12"),
        ("", 80, ""),
        ("()", 80, "()"),
    ],
)
def test_kernel_names_are_cut_down_to_what_tells_them_apart(name: str, longest: int, shown: str) -> None:
    assert words.kernel(name, longest) == shown


def test_the_table_adds_up_shapes_and_says_how_many_rows_are_left(tmp_path: Path) -> None:
    events = [
        event("aten::mm", 0, 10, Input_Dims=[[4, 8], [8, 2]]),
        event("aten::mm", 20, 30, Input_Dims=[[4, 4], [4, 4]]),
        event("aten::addmm", 60, 5),
    ]
    trace = read_trace(store(tmp_path / "trace.json", *events))
    stats = by_name(op_stats(trace))
    assert [(stat.name, stat.calls, stat.flops, stat.input_shapes) for stat in stats] == [
        ("aten::mm", 2, 2 * 4 * 8 * 2 + 2 * 4 * 4 * 4, None),
        ("aten::addmm", 1, None, None),
    ]
    assert [(stat.cpu_total_ns, stat.cpu_self_ns, stat.device_self_ns) for stat in stats] == [
        (stat.cpu_total_ns, stat.cpu_self_ns, None) for stat in op_stats(trace, ())
    ]
    assert sum(stat.cpu_self_share for stat in stats) == pytest.approx(1)
    events = [event(f"aten::op{number}", 10 * number, number + 1) for number in range(5)]
    lines = table_lines(table_rows(op_stats(read_trace(store(tmp_path / "trace.json", *events)))), top=2)
    assert [line.split()[0] for line in lines[-3:]] == ["aten::op4", "aten::op3", "and"]
    assert lines[-1] == "  and 3 more"


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
        rows = shown.split(f"grouped by {grouping}\n")[1].splitlines()[4:]
        assert [row for row in rows if row.startswith("    ")] == details, grouping
        assert sum(row.startswith("aten::mm") for row in rows) == (2 if grouping == "shapes" else 1)


# The document


def test_json_is_one_strict_document(run: Command, tmp_path: Path) -> None:
    path = training(tmp_path / "trace é.json", kernel="gemm é\u2028")
    code, shown, _ = run(path, "--json", "--steps", "3", "--group-by", "shapes")
    assert code == 0 and shown.isascii()
    values = json.loads(shown, parse_constant=pytest.fail)
    assert (values["schema_version"], values["kind"], values["slowest"]) == (2, "trace_analysis", 0)
    [trace] = values["traces"]
    assert trace["path"] == str(path)
    assert trace["steps"]["expected"] == 3 and trace["steps"]["median_ms"] == 1.0
    assert {kernel["name"] for kernel in trace["kernels"]} == {"gemm é\u2028", "ncclDevKernel_AllReduce"}
    assert sum(trace["devices"][0]["timeline"]["busy_ms"]["compute"]) == pytest.approx(0.6)
    assert set(OPERATOR_COLUMNS) < set(trace["operators"][0])
    extra = {"stack": None, "module": None}
    assert trace["operators"] == [row | extra for row in operator_rows(op_stats(read_trace(path)))]


# Several traces


def test_the_slowest_rank_is_shown_unless_another_is_asked_for(run: Command, tmp_path: Path) -> None:
    """Rank 1 waits least in the collective: the others wait for it."""
    for rank, allreduce in enumerate((300, 100, 200)):
        info = {"distributedInfo": {"rank": rank, "world_size": 4}}
        training(tmp_path / f"host_{rank}.pt.trace.json", allreduce_us=allreduce, **info)
    assert examine([tmp_path]).slowest == 1
    assert "In detail: host_1.pt.trace.json" in run(tmp_path)[1]
    assert "In detail: host_2.pt.trace.json" in run(tmp_path, "--rank", 2)[1]
    code, _, notes = run(tmp_path, "--rank", 7)
    assert code == 2 and "0, 1 and 2" in notes


def test_a_rank_in_the_file_name_stands_in_for_one_in_the_trace(tmp_path: Path) -> None:
    for name in ("rank12_trace.json", "trace_1.json", "host_4711.json"):
        training(tmp_path / name)
    assert [(Path(trace.analysis.path).name, trace.rank) for trace in examine([tmp_path]).traces] == [
        ("trace_1.json", 1),
        ("rank12_trace.json", 12),
        ("host_4711.json", None),  # a process, not a rank
    ]


def test_a_folder_gives_its_traces_and_nothing_else(tmp_path: Path) -> None:
    training(tmp_path / "trace.json")
    (tmp_path / "b.json.gz").write_bytes(gzip.compress((tmp_path / "trace.json").read_bytes()))
    (tmp_path / "manifest.json").write_text('{"trace_path": "trace.json"}')
    (tmp_path / "rows.json").write_text('[{"name": "aten::mm", "calls": 3}]')
    (tmp_path / "notes.txt").write_text("no trace")
    examination = examine([tmp_path, tmp_path / "trace.json"])
    assert [Path(trace.analysis.path).name for trace in examination.traces] == ["b.json.gz", "trace.json"]
    assert not any(file.is_fault for file in examination.left_out)


def test_one_unreadable_file_does_not_lose_the_others(run: Command, tmp_path: Path) -> None:
    good = training(tmp_path / "good.json")
    broken = tmp_path / "rank1.json.gz"
    broken.write_bytes(gzip.compress(good.read_bytes())[:12])
    for arguments in ((tmp_path,), (good, tmp_path / "absent.json")):
        code, shown, _ = run(*arguments)
        assert code == 1
        assert shown.startswith("Left out, since it could not be read:\n- ") and "device 0 went" in shown
    left_out = json.loads(run(tmp_path, "--json")[1])["left_out"]
    assert [(file["path"], file["is_fault"]) for file in left_out] == [(str(broken), True)]


# Exit codes


def test_a_sound_trace_ends_with_0_and_a_fatal_finding_with_1(run: Command, tmp_path: Path) -> None:
    path = training(tmp_path / "trace.json")
    assert run(path, "--steps", 3)[0] == 0
    code, shown, _ = run(path, "--steps", 5)
    assert code == 1 and shown.startswith("INCONCLUSIVE: ") and "3 of 5 steps" in shown


def test_the_trace_itself_is_left_as_it_is(run: Command, tmp_path: Path) -> None:
    path = training(tmp_path / "trace.json")
    before = path.read_bytes(), path.stat().st_mtime_ns
    for options in ((), ("--json",), ("--diff", path), ("--group-by", "stack", "--flame-graph", tmp_path / "a.html")):
        run(path, *options)
    assert (path.read_bytes(), path.stat().st_mtime_ns) == before
    assert [file.name for file in tmp_path.glob("*.json")] == ["trace.json"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["absent.json"], "absent.json is missing"),
        (["empty"], "no *.json, plain or packed, in"),
        (["other.json"], "holds no list of traceEvents"),
        (["trace.json", "--top", "0"], "--top is 0"),
        (["trace.json", "--steps", "-1"], "--steps is -1"),
        (["trace.json", "--diff", "absent.json"], "absent.json is missing"),
        (["trace.json", "--diff", "several"], "say which with --rank N"),
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
    assert code == 0 and shown.startswith("EQUAL: ")
    assert "No operator differs." in shown and "No kernel differs." in shown


def test_a_diff_names_what_takes_longer_and_what_is_new(run: Command, tmp_path: Path) -> None:
    a = training(tmp_path / "a.json", steps=3, kernel="old_gemm")
    b = training(tmp_path / "b.json", steps=6, kernel="new_gemm", allreduce_us=250)
    code, shown, _ = run(a, "--diff", b)
    assert code == 0
    rows = {line.split()[0]: line.split()[1:] for line in shown.split("Kernels, per step")[1].splitlines() if line}
    assert rows["ncclDevKernel_AllReduce"][2:5] == ["0.1000", "0.2500", "+0.1500"]
    assert rows["old_gemm"] == ["1", "-", "0.2000", "-", "-0.2000", "200", "-"]
    assert rows["new_gemm"] == ["-", "1", "-", "0.2000", "+0.2000", "-", "200"]
    assert "1 in A only; 1 in B only." in shown
    values = json.loads(run(a, "--diff", b, "--json")[1], parse_constant=pytest.fail)
    assert (values["kind"], values["is_per_step"], values["group_by"]) == ("trace_diff", True, "name")
    assert values["step_a"]["median_ms"] == values["step_b"]["median_ms"]
    by_shapes = json.loads(run(a, "--diff", b, "--json", "--group-by", "shapes")[1])
    assert by_shapes["group_by"] == "shapes"
    [first] = [kernel for kernel in values["kernels"] if kernel["name"] == "ncclDevKernel_AllReduce"]
    assert first["b"]["device_self_ms"] - first["a"]["device_self_ms"] == pytest.approx(0.15)


def test_a_diff_warns_before_its_first_number_and_says_what_the_change_is_of(run: Command, tmp_path: Path) -> None:
    a = training(tmp_path / "a.json", deviceProperties=[{"name": "H100"}])
    b = training(tmp_path / "b.json", allreduce_us=250, deviceProperties=[{"name": "A100"}])
    _, shown, _ = run(a, "--diff", b)
    assert shown.startswith("Not like with like:\n- A ran on H100, B on A100.")
    made_of = " ".join(shown.partition("One trace is one sample")[0].split())
    assert "- 0.1500 ms more communication, mostly aten::mm (+0.1500 ms)" in made_of
    values = json.loads(run(a, "--diff", b, "--json")[1], parse_constant=pytest.fail)
    assert [item["kind"] for item in values["unlike"]] == ["device"]
    [part] = [part for part in values["parts"] if part["name"] == "communication"]
    assert part["change_ms"] == pytest.approx(0.15) and part["mostly"]["name"] == "aten::mm"


def test_the_processes_of_one_file_stand_side_by_side(run: Command, tmp_path: Path) -> None:
    events = [event("aten::mm", 10 * index, 5 + pid) | {"pid": pid} for pid in (1, 2) for index in range(9)]
    path = store(tmp_path / "merged.json", *events)
    code, shown, _ = run(path)
    assert (code, "2 traces" in shown, "process 2" in shown) == (0, True, True)
    values = json.loads(run(path, "--json")[1])
    assert [trace["process"] for trace in values["traces"]] == ["1", "2"]
    code, _, notes = run(path, "--diff", path)
    assert (code, "give the file of one process" in notes) == (2, True)


def test_traces_without_steps_are_compared_in_total(run: Command, tmp_path: Path) -> None:
    a, b = (store(tmp_path / f"{length}.json", event("aten::mm", 0, length)) for length in (50, 80))
    _, shown, _ = run(a, "--diff", b)
    assert shown.startswith("NO STEPS to compare: window of A 0.05000 ms, of B 0.08000 ms")
    assert "in total" in shown and "Kernels" not in shown


def test_an_inconclusive_side_is_told(run: Command, tmp_path: Path) -> None:
    a, b = training(tmp_path / "a.json"), training(tmp_path / "b.json", steps=2)
    code, shown, _ = run(a, "--diff", b, "--steps", 3)
    assert code == 1 and "B inconclusive" in " ".join(shown.split())


# The flame graph


def test_stacks_become_a_flame_graph(run: Command, tmp_path: Path) -> None:
    path = store(tmp_path / "trace.json", python_frame("train.py(1): main", 0, 100, 1, None), event("aten::mm", 1, 2))
    _, _, notes = run(path, "--flame-graph", tmp_path / "flames.html")
    assert notes == f"wrote {tmp_path / 'flames.html'}\n"
    assert "train.py" in (tmp_path / "flames.html").read_text()
    code, _, notes = run(training(tmp_path / "other.json"), "--flame-graph", tmp_path / "none.html")
    assert code == 1 and "holds no Python stacks" in notes
    assert not (tmp_path / "none.html").exists()


# Real traces


def test_real_traces_are_told_within_the_width_of_a_page() -> None:
    if not GPU_TRACES.exists():
        pytest.skip(f"needs the traces in {GPU_TRACES}")
    traces = []
    for name, grouping in zip(REAL_NAMES, ("module", "shapes", "stack"), strict=True):
        examination = examine([GPU_TRACES / name], group_by=grouping)
        json.dumps(document.of(examination), allow_nan=False)
        assert widest("\n".join(text.lines(examination, top=100))) <= WIDEST
        traces += examination.traces
    assert widest("\n".join(text.pair_lines(Pair(traces[0], traces[2]), top=100))) <= WIDEST
    assert [trace.is_inconclusive for trace in (traces[0], traces[2])] == [False, False]
    assert [finding.kind for finding in traces[1].analysis.findings] == ["backlog"]


def test_the_script_loads_neither_torch_nor_pandas(tmp_path: Path) -> None:
    path = str(training(tmp_path / "trace.json"))
    heavy = "bool({'torch', 'pandas'} & set(sys.modules))"
    code = f"import sys; from scripts.analyze_trace import main; main([{path!r}]); sys.exit({heavy})"
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
