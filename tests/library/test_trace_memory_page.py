"""The page of a trace's memory: what it says, and that nothing in a trace can make it load or run anything."""

import re
from html.parser import HTMLParser

import pytest
from msgspec.structs import replace

from boundby.trace.memory import HEIGHT, WIDTH, MemoryOwner, MemoryTimeline, MemoryUse, memory_page

HOST = MemoryUse(
    device=None,
    allocations=2,
    allocated_bytes=3_000_000,
    frees=1,
    freed_bytes=1_000_000,
    change_bytes=2_000_000,
    kept_per_step_bytes=None,
    peak_bytes=3_000_000,
    peak_ns=5_000_000,
    peak_reserved_bytes=None,
    earlier_bytes=None,
    owners=(MemoryOwner("aten::mm", "Linear_0", 2_000_000, 1), MemoryOwner(None, None, 500, 1)),
    others_bytes=999_500,
    timeline=MemoryTimeline((1_000_000, 5_000_000, 9_000_000), (1_000_000, 3_000_000, 2_000_000), None),
)
GPU = replace(
    HOST,
    device=1,
    earlier_bytes=64,
    peak_reserved_bytes=4_000_000,
    timeline=replace(HOST.timeline, reserved_bytes=(4_000_000,) * 3),
)


class Tags(HTMLParser):
    """Collects tags and texts, and checks that every tag that is opened is closed."""

    VOID = ("meta",)

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(page)
        assert self._open == []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        assert not {name for name, _ in attributes} & {"src", "href", "onload", "onerror", "onclick"}
        if tag not in self.VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_page_says_the_peak_and_whose_it_is():
    text = " ".join(Tags(memory_page([HOST], "Memory of rank 0")).text.split())
    assert "Host: at most 3.000 MB, 4.000 ms after the start" in text
    assert "2 allocations of 3.000 MB, 1 frees of 1.000 MB" in text
    assert "2.000 MB1aten::mmLinear_0" in text and "500 bytes1outside of operators-" in text
    assert "999.5 kBothers of the trace" in text
    assert "What was allocated before the trace began is not known here" in text and "from before" not in text


def test_a_device_counts_all_and_shows_what_its_allocator_has_reserved():
    page = memory_page([GPU, HOST], "two")
    text = Tags(page).text
    assert "Device 1:" in text and "64 bytesfrom before the trace" in text.replace("\n", "")
    stages = (("forward", 7_000), ("backward", 500), ("optimizer", 400), (None, 300), ("mine", 200))
    told = " ".join(Tags(memory_page([replace(GPU, by_stage=stages)], "stages")).text.split())
    for kind in (
        "7.000 kBforward: activations",
        "500 bytesbackward: gradients",
        "400 bytesoptimizer: state of the optimizer",
        "300 bytesin no stage",
        "200 bytesmine",
        "64 bytesfrom before the trace: parameters",
    ):
        assert kind in told
    assert page.count("<svg") == 2 and page.count('class="reserved"') == 1


def test_the_curve_keeps_each_size_until_the_next_change():
    [path] = re.findall(r'class="allocated" d="([^"]+)"', memory_page([HOST], "curve"))
    top = 1.05 * 3
    heights = [round(HEIGHT * (1 - size / top), 1) for size in (1, 3, 2)]
    assert path == (f"M0.0,{heights[0]}H{WIDTH / 2}V{heights[1]}H{float(WIDTH)}V{heights[2]}H{WIDTH}V{HEIGHT}H0Z")
    single = replace(HOST, peak_ns=7, timeline=MemoryTimeline((7,), (3_000_000,), None))
    [path] = re.findall(r'class="allocated" d="([^"]+)"', memory_page([single], "level"))
    assert path.startswith("M0.0,") and "nan" not in path, "a single change is a level"


def test_names_from_a_trace_stay_text_and_one_without_memory_has_no_page():
    with pytest.raises(ValueError, match="no allocation"):
        memory_page([], "empty")
    hostile = '<script>alert(1)</script><img src=x onerror="x">\x1b{title}'
    page = memory_page([replace(HOST, owners=(MemoryOwner(hostile, hostile, 1, 1),))], hostile)
    found = Tags(page)
    assert not {"script", "img", "link", "iframe"} & set(found.tags)
    assert found.text.count("alert(1)") == 4 and "\x1b" not in page
    assert "default-src 'none'" in page
