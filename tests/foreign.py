"""What others may have written, made by the hundred, with an oracle of its own: the generator knows what is valid.

Each function here makes `count` cases, reads them as the program does, and returns how many there were of each fate. It
fails where one is taken that the generator knows to be broken, refused that it knows to be whole, answered by anything
but a refusal, executed, or waited for.
"""

import copy
import csv
import io
import json
import math
import os
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import yaml
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from boundby import files
from boundby.machine.ceilings import Ceilings
from boundby.training.reader import read_stage_times
from tests import baseline_document as results
from tests import layer_profiles, predicted_quality, trace_document
from tests.diagnosed_rows import CPU_CEILINGS, diagnosed
from tests.monitor_runs import write_run
from tests.report_reading import answered, run_in, traced
from utils.command.errors import InputError
from utils.comparison import facts
from utils.data.sources import open_file
from utils.render import plain_text
from utils.report import assembly, card, sources
from utils.settings.schema import Config
from utils.settings.yaml_file import load
from utils.steps import steps
from utils.training.monitor.runs import Index

LONGEST_S = 10.0  # that one case may take on a busy machine; most take a hundredth of a second
REFUSALS = (InputError, OSError, ValueError)
SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(-(10**20), 10**20), st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=8), st.sampled_from(["<script>", "\u202e", "=1+1", "\0", "../../x", "NaN", "9" * 400]),
)  # fmt: skip
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=6), inner, max_size=3)),
    max_leaves=5,
)


def settled(count: int) -> settings:
    """Return how hypothesis makes so many cases: the same ones every time."""
    return settings(
        max_examples=count, derandomize=True, database=None, deadline=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip


# --- documents


def places(value: Any, at: tuple = ()) -> list[tuple]:
    """Return where something stands in a document; of a list the first and the last."""
    result: list[tuple] = []
    items = value.items() if isinstance(value, dict) else ()
    if isinstance(value, list) and value:
        items = [(number, value[number]) for number in sorted({0, len(value) - 1})]
    for key, item in items:
        result += [(*at, key), *places(item, (*at, key))]
    return result


DAMAGES = ("spaced", "ordered", "unknown", "torn", "root", "needed", "NaN", "deep", "set", "del")


@st.composite
def damaged(draw: st.DrawFn, whole: dict, needed: tuple[str, ...]) -> tuple[str, bytes]:
    """Return the fate that a document deserves, `same`, `broken` or `any`, and its bytes."""
    value = copy.deepcopy(whole)
    kind = draw(
        st.sampled_from(["spaced", "ordered", "unknown", "torn", "root", "needed", "NaN", "deep", "set", "del"])
    )
    if kind == "spaced":
        return "same", json.dumps(value, indent=draw(st.integers(0, 3))).encode()
    if kind == "ordered":
        return "same", json.dumps(dict(reversed(value.items()))).encode()
    if kind == "unknown":
        return "same", json.dumps({**value, "unknown to us": draw(VALUES)}).encode()
    if kind == "root":
        return "broken", json.dumps(draw(VALUES.filter(lambda result: not isinstance(result, dict)))).encode()
    if kind == "needed":
        del value[draw(st.sampled_from(needed))]
        return "broken", json.dumps(value).encode()
    content = json.dumps(value).encode()
    if kind == "torn":
        return "broken", content[: draw(st.integers(0, len(content) - 1))]
    index = draw(st.sampled_from(places(value)))
    inside = value
    for key in index[:-1]:
        inside = inside[key]
    if kind == "del":
        del inside[index[-1]]
    else:
        inside[index[-1]] = {"set": draw(VALUES), "NaN": math.nan, "deep": "DEEP"}[kind]
    content = json.dumps(value).encode()
    if kind == "deep":
        content = content.replace(b'"DEEP"', b'{"a":' * 5000 + b"1" + b"}" * 5000)
    return ("broken" if kind == "NaN" else "any"), content


class Document:
    """A document as the program leaves it, and how it is read; `needed` are keys without which it says nothing."""

    def __init__(self, path: Path, read: Callable[[], Any], needed: tuple[str, ...] = (), tells: bool = True) -> None:
        self.path, self.read, self.needed, self.tells = path, read, needed, tells
        self.whole = path.read_bytes()


def left_by_the_steps(folder: Path) -> list[Document]:
    """Return the documents that the report reads; `tells` is False for one whose lack is merely said in it."""
    run = run_in(folder, ["model.dtype=float32"])
    rows = answered(diagnosed(results.cpu_rows(batch_sizes=(1, 8))))
    results.store(run.layout, results.document(rows), **traced())
    trace_document.store(run.layout, trace_document.cpu())
    profile = run.layout.layer_summary
    profile.parent.mkdir()
    from boundby.layers.report import read_profile, write_summary

    write_summary(profile, layer_profiles.gpt2())
    predicted_quality.store(run.layout.evaluated, mistakes=predicted_quality.mistakes(2))

    def report() -> None:
        content = sources.read(run)
        plain_text.render(assembly.report(content).document)
        card.card(content)

    ceilings, receipt = folder / "ceilings.json", folder / "receipt.json"
    files.write_json(ceilings, CPU_CEILINGS.as_dict())
    steps.finish("02", run.layout, steps.Parts(), status="ok")
    receipt.write_bytes(run.layout.receipt("02").read_bytes())
    results.store(run.layout, results.document(rows), **traced())
    with (folder / "raw_samples.csv").open("w") as file:
        file.write(
            "session,round,batch_size,index,quantity,seconds,samples,tokens_real,tokens_padded,dtype,disturbed\n"
        )
        file.write("s,0,1,0,isolated,0.1,1,10,12,float32,0\n")
    layout = run.layout
    needed = ("schema_version", "model", "batch_sizes", "full_dataset_metrics", "targets", "doubts")
    return [
        Document(layout.metrics, report, needed),
        Document(layout.metrics, lambda: facts.read(folder, layout), ("schema_version", "model", "batch_sizes")),
        *(
            Document(path, report, ("schema_version",), tells=False)
            for path in (layout.trace_analysis, layout.evaluated.quality, layout.trace_manifest, layout.receipt("02"))
        ),
        Document(profile, lambda: read_profile(profile), ("schema_version", "profile")),
        Document(ceilings, lambda: files.read_as(ceilings, Ceilings), ("device", "compute", "memory", "dispatch_s")),
        Document(receipt, lambda: files.read_as(receipt, steps.Receipt), ("step", "status", "parts", "outputs")),
    ]


def left_by_training(folder: Path) -> list[Document]:
    """Return the documents of a training run beside a sound one, which has to be shown whatever the other holds."""
    write_run(folder / "sound", 3)
    run = write_run(folder / "damaged", 3)
    (run / "stage_log.jsonl").unlink()

    def read() -> None:
        assert {entry.path for entry in Index(folder).runs() if entry.status} >= {"sound"}
        read_stage_times(run)

    return [Document(run / "stage_times.json", read, ("status", "rank", "summary", "names"))]


def documents(count: int, folder: Path) -> Counter[str]:
    """Damage documents of every kind that is read."""
    known = [*left_by_the_steps(folder / "steps"), *left_by_training(folder / "training")]
    fates: Counter[str] = Counter()

    @settled(count)
    @given(st.data())
    def one(data: st.DataObject) -> None:
        document = data.draw(st.sampled_from(known))
        fate, content = data.draw(damaged(msgspec.json.decode(document.whole), document.needed or ("schema_version",)))
        document.path.write_bytes(content)
        taken = _taken(document.read)
        document.path.write_bytes(document.whole)
        assert taken or fate != "same", (document.path.name, content[:300])
        assert not taken or fate != "broken" or not document.tells, (document.path.name, content[:300])
        fates[f"{fate}: {'taken' if taken else 'refused'}"] += 1

    one()
    return fates


def _taken(read: Callable[[], object]) -> bool:
    """Tell whether a reader took what it was given; it refuses in no other way than by an error that names it."""
    began = time.monotonic()
    try:
        read()
    except REFUSALS as error:
        assert str(error).strip()
        return False
    finally:
        assert time.monotonic() - began < LONGEST_S
    return True


# --- settings

GOOD: dict[str, list[Any]] = {
    "model.name": ["org/name", "name"],
    "model.dtype": ["auto", "float32", "bfloat16", "float16"],
    "model.device": ["auto", "cpu", "cuda", "cuda:3"],
    "profiling.batch_sizes": [[1], [1, 2, 64], [2**20], None],
    "profiling.max_length": [2, 512],
    "profiling.ci_half_width": [None, 0.01, 0.99],
    "profiling.max_seconds_per_batch_size": [0.5, 15],
    "evaluation.enabled": [True, False],
    "evaluation.precision": ["same", "fastest", "guarded"],
    "evaluation.min_agreement": [0, 1, 0.995],
    "evaluation.workers": [None, 1],
    "evaluation.compile": ["auto", "on", True, False],
    "trace.active_steps": [1, 10],
    "trace.warmup_steps": [0, 5],
    "variants.which": [None, ["int8"]],
    "targets.accuracy": [None, 0, 1, 0.5],
    "pod.price_per_hour": [None, 0.01],
    "output.results_dir": ["results", "/dev/shm/x", "a b/\u00e9"],
    "output.metrics_file": ["a.json"],
}
BAD: dict[str, list[Any]] = {
    "model.name": ["", 3, None, ["a"], "a\0b"],
    "model.dtype": ["int8", None, 32],
    "model.device": ["tpu", "cuda:", "cuda:-1", "", 0],
    "profiling.batch_sizes": [[], [0], [-1], ["x"], [1, 1], 8, [1.5], [10**400], [[1]]],
    "profiling.max_length": [1, 0, -5, "x", None, 10**400],
    "profiling.ci_half_width": [0, 1, -0.1, math.inf, math.nan, "x"],
    "profiling.max_seconds_per_batch_size": [0, -1, math.inf, math.nan, None, "x"],
    "evaluation.enabled": ["maybe", 2, None, []],
    "evaluation.precision": ["best", None, 16],
    "evaluation.min_agreement": [1.01, -0.1, math.nan, None],
    "evaluation.workers": [0, -1, 1.5, "many", 10**400],
    "evaluation.compile": ["always", 3, None],
    "trace.active_steps": [0, -1, None, 2.5],
    "trace.warmup_steps": [-1, None, "x"],
    "variants.which": [[], ["int4"], "int8", 3],
    "targets.accuracy": [1.5, -0.1, math.inf, "x"],
    "pod.price_per_hour": [0, -1, math.inf],
    "output.results_dir": ["", None, "/proc/x", "/sys", "/dev/x", "a\0b", 3],
    "output.metrics_file": ["../a.json", "", "a/b", "run.json", ".x", "a" * 101, None],
    "model.nmae": ["x"],
    "modle": [{}],
    "dataset.quickstart": [True],  # beside a file, which is a source already
}
POISON = st.sampled_from([
    b"x: !!python/object/apply:os.system ['touch CANARY']\n", b"x: !!python/name:os.system\n", b"x: &a [*a, *a]\n",
    b"x: &a 1\ny: *a\n", b"[" * 4000, b"x: {" * 2000, b"\xff\xfe\x00", b"\0", b"- a\n- b\n", b"x: 2026-99-99\n",
    b"model: {name: a}\nmodel: {name: b}\n", b"\t- x: [\n", b"x: !!binary '*'\n", b"%YAML 9.9\n---\n",
    b"? [1, 2]\n: 3\n",
])  # fmt: skip


def configs(count: int, folder: Path) -> Counter[str]:
    """Write settings that are good, wrong in a value, or no settings at all."""
    path, canary, fates = folder / "config.yaml", folder / "CANARY", Counter()
    base = {"model": {"name": "org/name"}, "dataset": {"file": "texts.csv"}}

    @settled(count)
    @given(st.data())
    def one(data: st.DataObject) -> None:
        values, overrides, is_good = copy.deepcopy(base), [], True
        for key in data.draw(st.lists(st.sampled_from(sorted({*GOOD, *BAD})), max_size=3, unique=True)):
            is_bad = key not in GOOD or (data.draw(st.integers(0, 3)) == 0)
            value = data.draw(st.sampled_from((BAD if is_bad else GOOD)[key]))
            is_good &= not is_bad
            if data.draw(st.booleans()):
                overrides.append(
                    f"{key}={yaml.safe_dump(value, default_flow_style=True, width=10**6).split('...')[0].strip()}"
                )
            else:
                section, _, name = key.partition(".")
                values.setdefault(section, {}).update({name: value} if name else {})
        flow = data.draw(st.sampled_from([True, False, None]))
        content = yaml.safe_dump(values, default_flow_style=flow, allow_unicode=data.draw(st.booleans())).encode()
        poison = data.draw(st.integers(0, 4)) == 0
        if poison:
            where = data.draw(st.integers(0, len(content)))
            content = content[:where] + data.draw(POISON).replace(b"CANARY", os.fsencode(canary)) + content[where:]
        path.write_bytes(content)
        taken = _taken(lambda: load(Config, path, overrides))
        assert not canary.exists()
        if not poison:
            assert taken == is_good, (content, overrides)
        fates[f"{'poisoned' if poison else 'good' if is_good else 'wrong'}: {'taken' if taken else 'refused'}"] += 1

    one()
    return fates


# --- corpora

TEXTS = st.text(
    st.characters(codec="utf-8", exclude_characters="\0\r\n\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029"), min_size=1
)
EMPTY = b"nothing at all"
BROKEN_ENDS = {
    ".csv": [b'"open,1\n', b"a,b,c\n", b"a\n", b"\xff,1\n", b'"a"b,1\n', EMPTY],
    ".tsv": [b'"open\t1\n', b"a\tb\tc\n", b"\xc3\x28\t1\n", EMPTY],
    ".jsonl": [
        b'{"text": "x", \n', b"[]\n", b'"text"\n', b'{"text": "\xff", "labels": 1}\n', b"\0\n",
        b"[" * 9999 + b"\n", EMPTY,
    ],
}  # fmt: skip


def corpora(count: int, folder: Path) -> Counter[str]:
    """Write datasets that must come back text for text, or be refused."""
    fates: Counter[str] = Counter()

    @settled(count)
    @given(st.data())
    def one(data: st.DataObject) -> None:
        texts = data.draw(st.lists(TEXTS.filter(str.strip), min_size=1, max_size=20))
        suffix = data.draw(st.sampled_from(sorted(BROKEN_ENDS)))
        end = data.draw(st.sampled_from([b"", b"", *BROKEN_ENDS[suffix]]))
        content = b"" if end is EMPTY else _corpus(texts, suffix) + end
        path = folder / f"texts{suffix}"
        path.write_bytes(content)
        read: list[str] = []
        taken = _taken(lambda: read.extend(row.text for row in open_file(path, "text", "labels").rows))
        assert taken == (not end), (end, content[-200:])
        assert not taken or read == texts, (texts, read)
        fates[f"{'broken' if end else 'whole'}: {'taken' if taken else 'refused'}"] += 1

    one()
    return fates


def _corpus(texts: list[str], suffix: str) -> bytes:
    if suffix == ".jsonl":
        return "".join(json.dumps({"text": text, "labels": 1}) + "\n" for text in texts).encode()
    written = io.StringIO()
    writer = csv.writer(
        written, delimiter="\t" if suffix == ".tsv" else ",", quoting=csv.QUOTE_ALL, lineterminator="\n"
    )
    writer.writerows([["text", "labels"], *([text, 1] for text in texts)])
    return written.getvalue().encode()
