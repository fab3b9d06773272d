"""The trace that is left is the one that torch wrote, byte for byte: viewers open what they would open without us.

python -m pytest tests/library/test_capture_export.py
"""

import gzip
from pathlib import Path

import pytest
import torch

from boundby.capture import CaptureManifest, CaptureOptions, Recorder, Schedule, capture

CPU = torch.device("cpu")


def step(_: int) -> None:
    torch.ones(4, 4) @ torch.ones(4, 4)


def driven(path: Path) -> CaptureManifest:
    return capture(step, device=CPU, steps=2, warmup=1, trace_path=path, options=CaptureOptions())


def followed(path: Path) -> CaptureManifest:
    recorder = Recorder(Schedule(0, 1, 2), path, device=CPU, options=CaptureOptions(stacks=True))
    recorder.start(3)
    for number in range(3):
        step(number)
        recorder.step()
    return recorder.stop()


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
@pytest.mark.parametrize("record", [driven, followed])
def test_the_trace_is_what_torch_wrote_to_the_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record: object, name: str
) -> None:
    written = []
    export = torch.profiler.profile.export_chrome_trace

    def noted(profile: torch.profiler.profile, path: str) -> None:
        export(profile, path)
        written.append(Path(path).read_bytes())

    monkeypatch.setattr(torch.profiler.profile, "export_chrome_trace", noted)
    manifest = record(tmp_path / name)
    content = manifest.trace_path.read_bytes()
    assert (gzip.decompress(content) if name.endswith(".gz") else content) == written[-1]
    assert b'"traceEvents"' in written[-1] and b"ProfilerStep#" in written[-1]
