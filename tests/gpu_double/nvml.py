"""A `pynvml` for the card: the calls that the program makes, with the errors that the real library has."""

import types
from typing import Any

from .machine import Machine

UUID = "GPU-00000000-0000-0000-0000-00000000cafe"
NOT_SUPPORTED, NO_PERMISSION, LOST, DRIVER = 3, 4, 15, 9
TEXTS = {
    NOT_SUPPORTED: "Not Supported",
    NO_PERMISSION: "Insufficient Permissions",
    LOST: "GPU is lost",
    DRIVER: "Driver Not Loaded",
}


class NVMLError(Exception):
    """An error by its number."""

    def __init__(self, value: int) -> None:
        super().__init__(TEXTS.get(value, f"Unknown Error {value}"))
        self.value = value


def module(machine: Machine) -> types.ModuleType:
    """Return the module to stand in `sys.modules["pynvml"]`."""
    card = machine.card
    made = types.ModuleType("pynvml")

    def answer(value: Any, nonsense: Any = None, *, needs_rights: bool = False) -> Any:
        def get(*_: Any) -> Any:
            if machine.broken is not None and card.failure == "lost":
                raise NVMLError(LOST)
            if card.nvml == "absent":
                raise NVMLError(DRIVER)
            if card.nvml == "no_rights" and needs_rights:
                raise NVMLError(NO_PERMISSION)
            if card.nvml == "nonsense" and nonsense is not None:
                return nonsense
            return value() if callable(value) else value

        return get

    def absent(*_: Any) -> Any:
        raise NVMLError(NOT_SUPPORTED)

    record = types.SimpleNamespace
    throttled = lambda: card.throttle_reasons if machine.clock_share < 1 else 0  # noqa: E731
    ours = [record(pid=__import__("os").getpid(), usedGpuMemory=machine.reserved)]
    others = [record(pid=1_000_000 + number, usedGpuMemory=2**30) for number in range(card.other_processes)]
    answers = {
        "nvmlInit": answer(None),
        "nvmlShutdown": lambda: None,
        "nvmlDeviceGetCount": answer(1),
        "nvmlSystemGetDriverVersion": answer(card.driver),
        "nvmlSystemGetCudaDriverVersion": answer(int(float(card.cuda) * 1000)),
        "nvmlDeviceGetHandleByIndex": answer("card"),
        "nvmlDeviceGetHandleByUUID": answer("card"),
        "nvmlDeviceGetName": answer(card.name),
        "nvmlDeviceGetUUID": answer(UUID, needs_rights=True),
        "nvmlDeviceGetMemoryInfo": answer(
            lambda: record(total=card.memory_bytes, used=machine.reserved + 500 * 2**20, free=machine.capacity),
            record(total=2**64 - 1, used=2**64 - 1, free=0),
        ),
        "nvmlDeviceGetUtilizationRates": answer(
            lambda: record(gpu=round(machine.utilization_pct()), memory=0), record(gpu=2**32 - 1, memory=2**32 - 1)
        ),
        "nvmlDeviceGetPowerUsage": answer(lambda: round(machine.watts() * 1e3), 2**32 - 1),
        "nvmlDeviceGetEnforcedPowerLimit": answer(lambda: round(card.power_limit_w * 1e3), 0, needs_rights=True),
        "nvmlDeviceGetPowerManagementLimit": answer(lambda: round(card.power_limit_w * 1e3), 0, needs_rights=True),
        "nvmlDeviceGetTotalEnergyConsumption": answer(
            lambda: round(machine.energy_j() * 1e3), 2**64 - 1, needs_rights=True
        ),
        "nvmlDeviceGetClockInfo": answer(lambda *_: round(card.sm_clock_mhz * machine.clock_share), 2**32 - 1),
        "nvmlDeviceGetMaxClockInfo": answer(card.sm_clock_mhz, 0),
        "nvmlDeviceGetApplicationsClock": absent,
        "nvmlDeviceGetTemperature": answer(lambda: 45 if machine.clock_share == 1 else 88, 65535),
        "nvmlDeviceGetCurrentClocksEventReasons": answer(throttled, 2**63),
        "nvmlDeviceGetCurrentClocksThrottleReasons": answer(throttled, 2**63),
        "nvmlDeviceGetComputeRunningProcesses": answer(ours + others, needs_rights=True),
        "nvmlDeviceGetEccMode": answer((1, 1), needs_rights=True),
        "nvmlDeviceGetMigMode": absent,
        "nvmlDeviceGetDeviceHandleFromMigDeviceHandle": absent,
    }
    for name, function in answers.items():
        setattr(made, name, function)
    made.NVMLError = NVMLError  # type: ignore[attr-defined]
    for number, name in ((1, "NVMLError_Uninitialized"), (NOT_SUPPORTED, "NVMLError_NotSupported"),
                         (NO_PERMISSION, "NVMLError_NoPermission"), (LOST, "NVMLError_GpuIsLost")):  # fmt: skip
        setattr(made, name, NVMLError)
        setattr(made, f"NVML_ERROR_{name.removeprefix('NVMLError_').upper()}", number)
    made.NVML_CLOCK_SM = made.NVML_CLOCK_GRAPHICS = 1  # type: ignore[attr-defined]
    made.NVML_TEMPERATURE_GPU = 0  # type: ignore[attr-defined]
    return made
