"""The fingerprint knows the hardware; nothing here knows a secret."""

import json
import os
import platform
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from boundby.machine import environment
from boundby.machine.environment import (
    hardware,
    host_id,
    machine,
    machine_fingerprint,
    memory_limit_bytes,
    numerics,
    settings,
    versions,
)


@pytest.fixture(autouse=True)
def _fresh():
    machine.cache_clear()
    yield
    machine.cache_clear()


def fingerprint() -> str:
    machine.cache_clear()
    return machine_fingerprint()


class NvmlError(Exception):
    pass


def nvml(names: list[str | bytes], driver: str | bytes = "595.10", gpu_bytes: int = 80 * 10**9, uuids: int = 0):
    return SimpleNamespace(
        NVMLError=NvmlError,
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetCount=lambda: len(names),
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetName=lambda index: names[index],
        nvmlDeviceGetMemoryInfo=lambda index: SimpleNamespace(total=gpu_bytes),
        nvmlDeviceGetUUID=lambda index: f"GPU-{uuids + index}",
        nvmlSystemGetDriverVersion=lambda: driver,
    )


def no_driver() -> SimpleNamespace:
    def init() -> None:
        raise NvmlError("Shared Library Not Found")

    return SimpleNamespace(NVMLError=NvmlError, nvmlInit=init)


@pytest.fixture(autouse=True)
def _no_gpus(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", no_driver())


def test_a_card_whose_uuid_the_driver_does_not_tell_is_a_card(monkeypatch):
    def refuses(_: int) -> str:
        raise NvmlError("Not Supported")

    library = nvml(["H200"])
    library.nvmlDeviceGetUUID = refuses
    monkeypatch.setitem(sys.modules, "pynvml", library)
    assert machine()["gpus"] == [{"name": "H200", "memory_bytes": 80 * 10**9, "uuid": None}]


def test_no_secret_and_no_name_of_person_or_host_is_kept(monkeypatch):
    names = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "USER", "HOSTNAME")
    for name in names:
        monkeypatch.setenv(name, f"hf_secret-of-{name}")
    monkeypatch.setattr(platform, "node", lambda: "hf_secret-host")
    kept = json.dumps([machine(), settings(), versions()])
    assert "hf_secret" not in kept
    assert not any(name in kept for name in names)


def test_settings_are_the_allowed_variables_that_are_set_and_versions_those_installed(monkeypatch):
    for name in settings():
        monkeypatch.delenv(name)
    assert settings() == {}
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    monkeypatch.setenv("LD_LIBRARY_PATH", "/x")
    assert settings() == {"OMP_NUM_THREADS": "4"}
    expected = {"python": platform.python_version(), "pytest": pytest.__version__, "a-package-that-nobody-wrote": None}
    assert versions(["pytest", "a-package-that-nobody-wrote"]) == expected
    assert versions()["torch"] is not None


def test_what_changes_digits_is_recorded_and_what_says_where_to_write_is_not(monkeypatch):
    before, digits = settings(), numerics()
    changed = {"NVIDIA_TF32_OVERRIDE": "0", "ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "AVX2"}
    changed |= {"OMP_THREAD_LIMIT": "1", "OPENBLAS_CORETYPE": "Haswell", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "1"}
    faster = {"CUDA_LAUNCH_BLOCKING": "1", "RAYON_NUM_THREADS": "1", "MKL_NUM_THREADS": "3", "LD_PRELOAD": ""}
    others = {
        "ONEDNN_VERBOSE": "1",
        "CUDNN_LOGDEST_DBG_DIR": "/x",
        "MKL": "1",
        "KMP_DUPLICATE_LIB_OK": "True",
        "KMP_INIT_AT_FORK": "FALSE",
    }
    for name, value in {**changed, **faster, **others}.items():
        monkeypatch.setenv(name, value)
    assert settings() == {**before, **changed, **faster}
    assert numerics() == {**digits, **changed}


@pytest.mark.parametrize("names", [["NVIDIA H100"] * 2, [b"NVIDIA H100"] * 2], ids=["str", "bytes"])
def test_gpus_are_described_by_name_memory_uuid_and_driver(names, monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", nvml(names, driver=b"595.10"))
    facts = machine()
    card = {"name": "NVIDIA H100", "memory_bytes": 80 * 10**9}
    assert facts["gpus"] == [{**card, "uuid": "GPU-0"}, {**card, "uuid": "GPU-1"}]
    assert hardware()["gpus"] == [card, card]  # so that equal machines stay equal
    assert facts["driver"] == "595.10"


def test_a_gpu_that_is_not_there_or_cannot_be_asked_is_no_gpu_with_a_reason(monkeypatch):
    facts = machine()
    assert (facts["gpus"], facts["driver"]) == ([], None)
    assert facts["gpus_reason"] == "NVML: Shared Library Not Found"
    machine.cache_clear()
    closed: list[bool] = []
    broken = nvml(["NVIDIA H100"])
    broken.nvmlDeviceGetName = lambda index: (_ for _ in ()).throw(NvmlError("GPU is lost"))
    broken.nvmlShutdown = lambda: closed.append(True)
    monkeypatch.setitem(sys.modules, "pynvml", broken)
    assert machine()["gpus_reason"] == "NVML: GPU is lost"
    assert closed == [True]


def test_the_gpus_of_amd_are_described_by_amdsmi_where_nvml_finds_none(monkeypatch):
    class Amdsmi:
        AmdSmiMemoryType = SimpleNamespace(VRAM="vram")
        amdsmi_init = staticmethod(lambda: None)
        amdsmi_get_processor_handles = staticmethod(lambda: ["first", "second"])
        amdsmi_get_gpu_asic_info = staticmethod(lambda handle: {"market_name": "AMD Instinct MI300X"})
        amdsmi_get_gpu_memory_total = staticmethod(lambda handle, kind: 192 * 10**9)
        amdsmi_get_gpu_device_uuid = staticmethod(lambda handle: f"{handle}-uuid")
        amdsmi_get_gpu_driver_info = staticmethod(lambda handle: {"driver_version": "6.14.14"})

    monkeypatch.setitem(sys.modules, "amdsmi", Amdsmi)
    facts = machine()
    card = {"name": "AMD Instinct MI300X", "memory_bytes": 192 * 10**9}
    assert facts["gpus"] == [{**card, "uuid": "first-uuid"}, {**card, "uuid": "second-uuid"}]
    assert (facts["driver"], "gpus_reason" in facts) == ("6.14.14", False)


def test_the_fingerprint_is_short_and_does_not_depend_on_the_host_or_on_why_there_is_no_gpu(monkeypatch):
    first = fingerprint()
    assert first == fingerprint()
    assert len(first) == 16 and int(first, 16) >= 0
    monkeypatch.setattr(platform, "node", lambda: "another-pod")
    monkeypatch.setenv("HOSTNAME", "another-pod")
    monkeypatch.setitem(sys.modules, "pynvml", None)  # not installed
    assert fingerprint() == first


CHANGES: tuple[tuple[Any, str, Any], ...] = (
    (os, "cpu_count", lambda: 96),
    (os, "sched_getaffinity", lambda pid: set(range(95))),
    (environment, "_cpu_name", lambda: "Zuse Z3"),
    (platform, "machine", lambda: "riscv64"),
    (environment, "_cpu_quota", lambda path: 1.5),
    (environment, "memory_limit_bytes", lambda: 12345),
)


def test_other_hardware_has_another_fingerprint(monkeypatch):
    fingerprints = [fingerprint()]
    for target, name, value in CHANGES:
        with monkeypatch.context() as patch:
            patch.setattr(target, name, value, raising=False)
            fingerprints.append(fingerprint())
    for library in (
        nvml(["NVIDIA H100"]),
        nvml(["NVIDIA H200"]),
        nvml(["NVIDIA H100"] * 2),
        nvml(["NVIDIA H100"], driver="580.65"),
        nvml(["NVIDIA H100"], gpu_bytes=96 * 10**9),
    ):
        monkeypatch.setitem(sys.modules, "pynvml", library)
        fingerprints.append(fingerprint())
    assert len(set(fingerprints)) == len(fingerprints)


MEMORY_V2, MEMORY_V1 = "memory.max", "memory/memory.limit_in_bytes"
QUOTA_V2, QUOTA_V1, PERIOD_V1 = "cpu.max", "cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us"


def cgroup(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    return folder


@pytest.mark.parametrize(
    ("files", "limit"),
    [
        ({MEMORY_V2: "1048576\n"}, 2**20),
        ({MEMORY_V2: "max\n"}, None),
        ({MEMORY_V2: f"{2**62}\n"}, None),
        ({MEMORY_V1: "1048576\n"}, 2**20),
        ({MEMORY_V1: "9223372036854771712\n"}, None),  # what version 1 shows where there is no limit
        ({MEMORY_V2: "1048576\n", MEMORY_V1: "2097152\n"}, 2**20),
        ({MEMORY_V2: "max\n", MEMORY_V1: "2097152\n"}, None),
        ({MEMORY_V2: "\n"}, None),
    ],
    ids=str,
)
def test_the_memory_limit_is_the_smaller_of_machine_and_cgroup(tmp_path, files, limit):
    total = memory_limit_bytes(tmp_path)
    assert total > 2**28
    assert memory_limit_bytes(cgroup(tmp_path, files)) == (limit or total)


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({QUOTA_V2: "150000 100000\n"}, 1.5),
        ({QUOTA_V2: "max 100000\n"}, None),
        ({QUOTA_V2: "\n"}, None),
        ({}, None),
        ({QUOTA_V1: "50000\n", PERIOD_V1: "100000\n"}, 0.5),
        ({QUOTA_V1: "-1\n", PERIOD_V1: "100000\n"}, None),  # no quota
        ({QUOTA_V1: "50000\n"}, None),
        ({PERIOD_V1: "100000\n"}, None),
        ({QUOTA_V2: "150000 100000\n", QUOTA_V1: "50000\n", PERIOD_V1: "100000\n"}, 1.5),
    ],
    ids=str,
)
def test_the_quota_is_in_cores(tmp_path, files, cores):
    assert environment._cpu_quota(cgroup(tmp_path, files)) == cores


def test_processes_of_one_machine_have_its_name_and_another_machine_has_another(monkeypatch):
    command = [sys.executable, "-c", "from boundby.machine.environment import host_id; print(host_id())"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == host_id()
    assert re.fullmatch("[0-9a-f]{16}", host_id())
    monkeypatch.setattr(platform, "node", lambda: "another")
    assert host_id.__wrapped__() != host_id()


@pytest.mark.parametrize(
    ("facts", "instructions"),
    [
        ("processor\t: 0\nmodel name\t: A\nflags\t\t: fpu avx2 sse2 fma avx\n\nprocessor\t: 1\nflags\t\t: fpu\n",
         ("avx", "avx2", "fma")),
        ("processor\t: 0\nFeatures\t: fp asimd aes asimddp sve\n", ("asimd", "asimddp", "sve")),
        ("processor\t: 0\n", ()),
        (None, ()),
    ],
    ids=["x86", "ARM", "silent", "none"],
)  # fmt: skip
def test_the_instructions_of_a_cpu_are_those_that_kernels_are_chosen_by(facts, instructions, tmp_path, monkeypatch):
    monkeypatch.setattr(environment, "CPU_FACTS", tmp_path / "cpuinfo")
    if facts is not None:
        (tmp_path / "cpuinfo").write_text(facts)
    assert environment.instructions() == instructions


def settings_of_card(**changes: Any) -> SimpleNamespace:
    """Return a driver with one card that answers all that is asked of it."""
    answers: dict[str, Any] = {
        "nvmlDeviceGetEnforcedPowerLimit": 700_000, "nvmlDeviceGetMaxClockInfo": 1980,
        "nvmlDeviceGetApplicationsClock": 1830, "nvmlDeviceGetEccMode": (1, 1), "nvmlDeviceGetMigMode": (0, 0),
        **changes,
    }  # fmt: skip
    made = nvml(["NVIDIA H100"])
    made.NVML_CLOCK_SM = 1

    def answer(value: Any) -> Any:
        def get(*_: Any) -> Any:
            if isinstance(value, Exception):
                raise value
            return value

        return get

    for name, value in answers.items():
        setattr(made, name, answer(value))
    return made


SET = {"power_limit_w": 700.0, "max_clock_mhz": 1980, "set_clock_mhz": 1830, "ecc": True}


@pytest.mark.parametrize(
    ("changes", "name", "value"),
    [
        ({"nvmlDeviceGetEnforcedPowerLimit": 350_000}, "power_limit_w", 350.0),
        ({"nvmlDeviceGetMaxClockInfo": 1755}, "max_clock_mhz", 1755),
        ({"nvmlDeviceGetApplicationsClock": 1200}, "set_clock_mhz", 1200),
        ({"nvmlDeviceGetEccMode": (0, 1)}, "ecc", False),
    ],
)
def test_how_a_card_is_set_is_part_of_the_machine(changes, name, value, monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", settings_of_card())
    usual = fingerprint()
    [card] = machine()["gpus"]
    assert {key: card[key] for key in SET} == SET
    monkeypatch.setitem(sys.modules, "pynvml", settings_of_card(**changes))
    assert fingerprint() != usual
    assert {key: machine()["gpus"][0][key] for key in SET} == {**SET, name: value}


def test_the_parts_of_a_divided_card_are_part_of_the_machine(monkeypatch):
    def part(handle: int, index: int) -> str:
        if index == 2:
            raise NvmlError("Not Found")
        return f"H100 MIG {index + 1}g"

    divided = settings_of_card(nvmlDeviceGetMigMode=(1, 1), nvmlDeviceGetMaxMigDeviceCount=3)
    divided.nvmlDeviceGetMigDeviceHandleByIndex = part
    divided.nvmlDeviceGetName = lambda handle: handle if isinstance(handle, str) else "NVIDIA H100"
    monkeypatch.setitem(sys.modules, "pynvml", divided)
    assert machine()["gpus"][0]["mig"] == ["H100 MIG 1g", "H100 MIG 2g"]


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (NvmlError("Not Supported"), "NVML: Not Supported"),
        (NvmlError("Insufficient Permissions"), "NVML: Insufficient Permissions"),
        (SimpleNamespace(total=2**64 - 1), "NVML: answered 1.84467e+19, which no GPU has"),
        (SimpleNamespace(total=-1), "NVML: answered -1, which no GPU has"),
    ],
    ids=["unified memory", "no rights", "too much", "negative"],
)
def test_a_card_whose_memory_the_driver_does_not_tell_is_a_card_with_the_reason(answer, reason, monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", settings_of_card(nvmlDeviceGetMemoryInfo=answer))
    [card] = machine()["gpus"]
    assert (card["name"], card["memory_bytes"]) == ("NVIDIA H100", None)
    assert machine()["gpus_reason"] == f"memory_bytes: {reason}"


def test_a_driver_without_rights_or_with_nonsense_describes_the_card_by_what_is_left(monkeypatch):
    for setting in ("nvmlDeviceGetEnforcedPowerLimit", "nvmlDeviceGetMaxClockInfo", "nvmlDeviceGetApplicationsClock"):
        for answer in (NvmlError("Insufficient Permissions"), 0, 2**32 - 1, "[N/A]"):
            machine.cache_clear()
            monkeypatch.setitem(sys.modules, "pynvml", settings_of_card(**{setting: answer}))
            [card] = machine()["gpus"]
            assert len(set(SET) & set(card)) == 3 and len(machine()["gpus_reason"].split("; ")) == 1
