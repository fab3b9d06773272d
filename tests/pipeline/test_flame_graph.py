"""The flame graph: boxes as wide as their time, readable names, and nothing in the page but what we put there."""

import base64
import hashlib
import re

import pytest

from tests.web_page import WebPage
from utils.command.console import printable
from utils.render import flame_graph

STACKS = [
    "train.py(9):_<module>;nn.Module:_Net_0;net.py(3):_forward;<built-in_function_linear> 600",
    "train.py(9):_<module>;nn.Module:_Net_0;net.py(3):_forward 250",
    "train.py(9):_<module>;nn.Module:_Net_0 50",
    "train.py(9):_<module> 100",
]
HOSTILE = (
    "</title></style></script><script>alert(1)</script><img/src=x/onerror=alert(2)>"
    "\"'`{{7*7}}<!--\u2028\u2029\u202e\x1b"
)


def page_of(lines: list[str], title: str = "a model", detail: str = "one step") -> WebPage:
    return WebPage(flame_graph.page(lines, title, detail))


def boxes_of(page: WebPage) -> list[tuple[int, str, int]]:
    """Return level, name in the box and time of every box, each before those it calls."""
    data = page.data
    names = [f"{-at} small" if at < 0 else data["frames"][at][1] for at in data["frame"]]
    return list(zip(data["level"], names, data["total"], strict=True))


def test_box_holds_the_time_of_the_frame_and_of_all_it_calls():
    expected = [
        (0, "all stacks", 1000),
        (1, "train.py(9): <module>", 1000),
        (2, "Net_0", 900),
        (3, "net.py(3): forward", 850),
        (4, "linear", 600),
    ]
    assert boxes_of(page_of(STACKS)) == boxes_of(page_of(STACKS[::-1])) == expected
    assert boxes_of(page_of(["a;c 1", "b;c 2", "a;c 4"]))[1:] == [(1, "a", 5), (2, "c", 5), (1, "b", 2), (2, "c", 2)]
    lines = [f"nn.Module:_Layer_{number} 5" for number in (10, 2, 1)]
    assert [name for _, name, _ in boxes_of(page_of(lines))[1:]] == ["Layer_1", "Layer_2", "Layer_10"]


def test_frames_below_the_least_share_stand_together():
    lines = ["a;wide 9995", "a;narrow;deep 4", "a;narrower 1"]
    page = page_of(lines)
    assert boxes_of(page)[1:] == [(1, "a", 10_000), (2, "wide", 9995), (2, "2 small", 5)]
    assert "less than 0.05 % of the total stand together in grey boxes (2 in all" in page.text.replace("\xa0", " ")
    assert "narrow" not in page.scripts[0]
    page = page_of(["wide 9995", "narrow 5"])
    assert boxes_of(page)[1:] == [(1, "narrow", 5), (1, "wide", 9995)]
    assert "grey boxes" not in page.text


@pytest.mark.parametrize("room", [400, 10_000])
def test_widest_frames_are_drawn_where_there_is_no_room_for_all(monkeypatch, room):
    monkeypatch.setattr(flame_graph, "MAX_DATA_CHARACTERS", room)
    lines = [f"main;function_{weight}_{'é' * 40};deep_{weight} {weight}" for weight in range(10, 1010, 10)]
    page = page_of(lines)
    assert len(page.scripts[0]) < room + 1000  # the last box may be too much, but only the last
    boxes = boxes_of(page)
    wide = [total for level, name, total in boxes if level == 2 and "small" not in name]
    assert sorted(wide) == list(range(1010 - 10 * len(wide), 1010, 10)) and len(wide) < 100
    for level in (0, 1, 2):
        assert sum(total for at, _, total in boxes if at == level) == sum(range(10, 1010, 10))
    assert re.search(r"0\.05\s% of the total, and some with up to about [12](\.[0-9])?\s% for which", page.text)


def test_grey_boxes_stand_behind_all_that_their_caller_calls():
    page = page_of(
        ["a;b;x 5000", "a;b;narrow_1 1", "a;b;narrow_2 1", "a;c 5000", "a;narrow_3 2", "z 900", "narrow_4 3"]
    )
    assert boxes_of(page)[1:] == [
        (1, "a", 10_004),
        (2, "b", 5002),
        (3, "x", 5000),
        (3, "2 small", 2),
        (2, "c", 5000),
        (2, "1 small", 2),
        (1, "z", 900),
        (1, "1 small", 3),
    ]


def test_wide_stacks_of_256_levels_give_a_page_below_two_megabytes():
    lines = [
        ";".join(f"package/file_{at >> (15 - level // 16)}.py({level}):_function" for level in range(256)) + " 1000"
        for at in range(400)
    ]
    text = flame_graph.page(lines, "deep", "100,000 frames of 0.25 % and more")
    assert 1_000_000 < len(text.encode()) < 2_000_000
    data = WebPage(text).data
    assert data["total"][1] == 400_000 and max(data["level"]) > 100


@pytest.mark.parametrize(
    ("frame", "short", "kind"),
    [
        ("nn.Module:_BertLayer_0", "BertLayer_0", "module"),
        ("site/modeling_bert.py(123):_forward", "modeling_bert.py(123): forward", "model"),
        ("site/modeling_bert.py(130):__helper", "modeling_bert.py(130): _helper", "model"),
        ("torch/nn/modules/module.py(1782):__call_impl", "module.py(1782): _call_impl", "torch"),
        ("/opt/lib/site-packages/torch/_VF.py(27):___getattr__", "_VF.py(27): __getattr__", "torch"),
        ("C:\\lib\\site-packages\\torch\\nn\\linear.py(1):_forward", "linear.py(1): forward", "torch"),
        ("mytorch/data.py(1):_load", "data.py(1): load", "other"),
        ("collections/__init__.py(1111):_update", "collections/__init__.py(1111): update", "other"),
        ("<string>(2):___init__", "<string>(2): __init__", "other"),
        ("<built-in_method_addmm_of_type_object>", "addmm", "builtin"),
        ("<built-in_method__get_tracing_state_of_pybind11.x_object>", "_get_tracing_state", "builtin"),
        ("<built-in_function_len>", "len", "builtin"),
        ("<method_'add'_of_'Tensor'_objects>", "<method_'add'_of_'Tensor'_objects>", "builtin"),
        ("main", "main", "other"),
    ],
)
def test_box_shows_a_short_name_and_the_kind_of_the_frame(frame, short, kind):
    lines = [f"{frame} 5", "site/modeling_bert.py(123):_forward 5"]
    assert [frame, short, kind] in page_of(lines).data["frames"]


def test_every_kind_has_its_colour_in_light_and_in_dark_and_its_words():
    text = flame_graph.page(STACKS, "a model", "one step")
    for kind, words in flame_graph.KINDS.items():
        assert len(re.findall(rf"--{kind}: #[0-9a-f]{{6}};", text)) == 2, kind
        assert words in WebPage(text).text


@pytest.mark.parametrize(
    "line",
    ["a;b", "a;b 1.5", "a;b -3", "a;b 0", " 12", "a;;b 7", ";a 7", "a; 7", "a;b 1e9", "12", "a 1234567890123456789"],
)
def test_malformed_line_is_named(line):
    with pytest.raises(ValueError, match=r"^line 3 of the stacks is '") as caught:
        flame_graph.page(["a 1\n", "\n", f"{line}\n"], "a model", "one step")
    assert line.strip() in str(caught.value)


def test_page_needs_neither_stacks_nor_script():
    page = page_of([])
    assert "No stacks were recorded." in page.text
    assert page.scripts == []
    page = page_of([*STACKS, "other;<built-in_function_linear> 400"])
    assert "<built-in_function_linear> 1.000 µs 71.4 net.py(3):_forward 250 ns 17.9" in page.text
    page = page_of(["a file.py(3): run me;<built-in function len> 7\r\n", "\n"])
    assert [short for _, short, _ in page.data["frames"]] == ["all stacks", "a file.py(3): run me", "len"]
    page = page_of([f"begin{'x' * 300_000}end 5"])
    [_, (name, _, _)] = page.data["frames"]
    assert (len(name), name[:6], name[-4:]) == (flame_graph.LONGEST_FRAME, "beginx", "xend")
    assert flame_graph.page(["a\ud800;b 5"], "\ud800", "\ud800").encode("utf-8")


def test_hostile_names_stay_text():
    lines = [f"a;{HOSTILE} 600", f"nn.Module:_{HOSTILE};b 300", f"{HOSTILE}.py(3):_{HOSTILE} 100", "\x1b;\u2028 50"]
    text = flame_graph.page(lines, HOSTILE, HOSTILE)
    page, plain = WebPage(text), page_of(["a;b 600", "nn.Module:_x;b 300", "x.py(3):_f 100", "y;z 50"])
    assert [tag for tag, _ in page.tags if tag not in ("tr", "td")] == [
        tag for tag, _ in plain.tags if tag not in ("tr", "td")
    ]
    assert page.scripts[1] == plain.scripts[1] and page.comments == []
    assert not set("<>&'\u2028\u2029") & set(page.scripts[0]) and page.scripts[0].isascii()
    assert printable(HOSTILE) in [name for name, _, _ in page.data["frames"]]
    assert page.text.count(printable(HOSTILE)) >= 5  # title, heading, detail, two rows of the table
    assert all(character.isprintable() or character == "\n" for character in text)


def test_script_writes_text_and_never_markup():
    script = page_of(STACKS).scripts[1]
    assert "textContent" in script
    assert not re.search(
        r"innerHTML|outerHTML|insertAdjacent|document\.write|\beval\b|Function\(|fetch|https?:", script
    )
    page = page_of(STACKS)
    ids = {attributes["id"] for _, attributes in page.tags if "id" in attributes}
    named = set(re.findall(r'\$\("([a-z]+)"\)', page.scripts[1]))
    assert len(named) > 5 and named <= ids
    [policy] = [attributes["content"] for tag, attributes in page.tags if tag == "meta" and "http-equiv" in attributes]
    digest = base64.b64encode(hashlib.sha256(page.scripts[1].encode()).digest()).decode()
    assert policy == f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    assert [attributes for tag, attributes in page.tags if tag == "script"] == [
        {"type": "application/json", "id": "stacks"},
        {},
    ]
    assert not any(
        name in ("src", "href") or name.startswith("on") for _, attributes in page.tags for name in attributes
    )
