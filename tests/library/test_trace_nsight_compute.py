"""Which launch of which kernel Nsight Compute is pointed at, and the command for it."""

import re
import shlex
from pathlib import Path

import pytest

from boundby.trace import analyze, read_trace
from boundby.trace.kernels import KernelLaunch, function_name, ncu_command
from tests.traces import GPU_TRACES, analysis_of, call, event, step, work

GEMM = "void cutlass::Kernel<cutlass_80_gemm>(cutlass_80_gemm::Params)"
OTHER_GEMM = "void cutlass::Kernel<cutlass_90_gemm>(cutlass_90_gemm::Params)"


def launched(number: int, ts: float, dur: float, name: str) -> tuple[dict, dict]:
    """Return a call and its work, which begins much later: the host runs ahead."""
    return call(ts, 1, number), work(ts + 1000, dur, number, name=name)


def launch_in(folder: Path, *pairs: tuple[dict, dict], steps: int = 2) -> KernelLaunch | None:
    marks = [step(10 + number, 100 * number, 100) for number in range(steps)]
    return analysis_of(folder, *marks, *(item for pair in pairs for item in pair)).slowest_launch


def test_the_longest_launch_of_the_kernel_with_most_time_is_counted_among_its_namesakes_of_the_step(tmp_path):
    result = launch_in(
        tmp_path,
        launched(1, 10, 30, GEMM),
        launched(2, 110, 5, OTHER_GEMM),
        launched(3, 120, 5, "void at::native::add<float>(int)"),
        launched(4, 130, 20, GEMM),
        launched(5, 140, 40, GEMM),
        launched(6, 150, 60, "void at::native::mul<float>(int)"),
    )
    assert result == KernelLaunch(GEMM, "Kernel", 11, 2)


def test_launches_count_in_the_order_of_their_calls(tmp_path):
    late, early = launched(1, 10, 5, "gemm"), launched(2, 20, 50, "gemm")
    late[1]["ts"], early[1]["ts"] = 900, 500  # on another stream
    assert launch_in(tmp_path, late, early).skip == 1


def test_without_marks_of_steps_the_launches_of_the_whole_trace_count(tmp_path):
    pairs = [launched(1, 10, 5, "gemm"), launched(2, 110, 50, "gemm")]
    assert launch_in(tmp_path, *pairs, steps=0) == KernelLaunch("gemm", "gemm", None, 1)


def test_communication_and_copies_are_left_out(tmp_path):
    nccl, copy = "ncclDevKernel_AllReduce(ncclDevComm*)", "Memcpy HtoD (Pageable -> Device)"
    copied = (call(30, 1, 3), work(1030, 500, 3, name=copy, category="gpu_memcpy"))
    result = launch_in(tmp_path, launched(1, 10, 5, "gemm"), launched(2, 20, 900, nccl), copied)
    assert result.kernel == "gemm"
    assert launch_in(tmp_path, launched(2, 20, 900, nccl), copied) is None
    assert analysis_of(tmp_path, event("aten::mm", 0, 5)).slowest_launch is None, "of a host"


@pytest.mark.parametrize(
    ("kernel", "function"),
    [
        ("void at::native::(anonymous namespace)::softmax<4, float>(float*, int)", "softmax"),
        ("void at::native::<unnamed>::cat<float>(int)", "cat"),
        (GEMM, "Kernel"),
        ("ampere_sgemm_128x64_tn", "ampere_sgemm_128x64_tn"),
        ("triton_poi_fused_add_12", "triton_poi_fused_add_12"),
        ("f(int)", "f"),
        ("(int)", ""),
        ("", ""),
    ],
)
def test_functions_are_named_without_namespaces_templates_and_parameters(kernel, function):
    assert function_name(kernel) == function


def test_the_command_names_step_function_and_launch():
    command = ncu_command(KernelLaunch(GEMM, "Kernel", 11, 2))
    assert shlex.split(command) == [
        *("ncu", "--nvtx", "--nvtx-include", "step_11/", "--kernel-name", "regex:^Kernel$"),
        *("--launch-skip", "2", "--launch-count", "1", "--set", "full", "--target-processes", "all"),
        *("-o", "kernel", "python", "train.py"),
    ]
    assert "--nvtx" not in ncu_command(KernelLaunch(GEMM, "Kernel", None, 2))


def test_a_function_name_is_taken_literally_and_stays_one_word():
    name = "a$b; rm -rf .*[x]'"
    pattern = next(item for item in shlex.split(ncu_command(KernelLaunch(name, name, 1, 0))) if "regex" in item)
    assert re.fullmatch(pattern.removeprefix("regex:"), name)
    assert not re.fullmatch(pattern.removeprefix("regex:"), name.replace(".", "x"))


@pytest.mark.skipif(not GPU_TRACES.is_dir(), reason="the recorded traces of GPUs are not here")
def test_a_recorded_trace_names_a_launch_inside_its_steps():
    analysis = analyze(read_trace(GPU_TRACES / "v100-resnet-ns.pt.trace.json.gz"))
    launch = analysis.slowest_launch
    slowest = max((item for item in analysis.kernels if item.kind == "compute"), key=lambda kernel: kernel.total_ns)
    assert launch.kernel == slowest.name
    assert launch.step in analysis.step_numbers and launch.function == "vectorized_elementwise_kernel"
