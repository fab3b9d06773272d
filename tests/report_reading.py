"""Results of `baseline_document` stored and read as step 04 does, and the parts of the report that tests look at."""

import argparse
import io
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec import structs

from tests import baseline_document as results
from utils.command.artifacts import Layout
from utils.command.cli import DEFAULT_CONFIG, Run
from utils.command.console import Console
from utils.render import blocks, plain_text
from utils.report import advice, assembly, sources
from utils.report import figures as pictures

REMARKS = [{"what": "device events", "reason": "the profiler of this torch records none for cpu"}]
POD = {
    "model": {"name": "codefactory4791/intent-classification-qwen"},
    "dataset": {"hf_name": "codefactory4791/amazon_test"},
    "targets": {},
}


class Reader:
    """Stores results in a folder and reads them: `read(document, settings=…, overrides=…, **what_else_is_stored)`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(
        self,
        document: Mapping[str, Any],
        settings: Mapping[str, Any] | None = None,
        overrides: Sequence[str] = (),
        **stored: Any,
    ) -> sources.ReportData:
        """Return what step 04 reads of `document`."""
        run = run_in(self.folder, overrides, **(settings or {}))
        results.store(run.layout, document, **stored)
        return sources.read(run)


def run_in(folder: Path, overrides: Sequence[str] = (), **settings: Any) -> Run:
    """Return a run of step 04 with its results in `folder`."""
    config = results.config(folder, **settings)
    args = argparse.Namespace(config=DEFAULT_CONFIG, overrides=list(overrides), trust_remote_code=False)
    return Run(config, Layout.of(config), args, Console(io.StringIO(), io.StringIO()))


def traced(device: bool = False) -> dict[str, Any]:
    """Return what step 03 leaves."""
    return {"op_rows": results.operators(device), "trace": results.manifest(unavailable=[] if device else REMARKS)}


def pod(read: Reader, document: Mapping[str, Any] | None = None, **others: Any) -> sources.ReportData:
    settings = {**POD, **others.pop("settings", {})}
    return read(document or results.gpu_document(), settings, machine=results.GPU_MACHINE, **others)


def text(data: sources.ReportData) -> str:
    return plain_text.render(assembly.report(data).document)


def opened(found: Sequence[blocks.Block]) -> list[blocks.Block]:
    shown: list[blocks.Block] = []
    for block in found:
        shown += [blocks.Heading(block.title), *block.blocks] if isinstance(block, blocks.Details) else [block]
    return shown


def section(data: sources.ReportData, title: str) -> str:
    """Return one section of the report, also a folded one, as one line, so that line breaks do not matter."""
    document = assembly.report(data).document
    whole = plain_text.render(structs.replace(document, blocks=opened(document.blocks)))
    _, _, rest = whole.partition(f"\n\n{title}\n{'-' * len(title)}\n")
    return flat(re.split(r"\n\n.+\n-{3,}\n", rest)[0])  # up to the next heading


def flat(lines: str) -> str:
    """Return `lines` as one."""
    return " ".join(lines.split())


def head(data: sources.ReportData) -> str:
    return flat(text(data).partition("What to do next")[0])


def drawings(data: sources.ReportData) -> dict[str, str | None]:
    """Return why each picture is not drawn by the name of its file, None where it is."""
    return {drawing.path.name: drawing.reason for drawing in assembly.report(data).drawings}


def draw(data: sources.ReportData, *names: str) -> None:
    """Draw the pictures of these names, or take away those that cannot be drawn; all without a name."""
    pictures.draw([drawing for drawing in assembly.report(data).drawings if not names or drawing.path.name in names])


def advised(data: sources.ReportData) -> list[str]:
    return [step.title for step in advice.advice(data)]


def commands(data: sources.ReportData) -> dict[str, str | None]:
    return {step.title: step.command for step in advice.advice(data)}


def _span(value: float, width: float = 0.04) -> dict[str, float]:
    return {"value": value, "low": value * (1 - width), "high": value * (1 + width)}


def _trial(name: str, kind: str, value: float, outcome: str, predicted: float | None = None, **more: Any) -> dict:
    return {
        "trial": name, "fix": name, "kind": kind, "settings": {}, "measured": _span(value),
        "predicted": _span(predicted, 0.06) if predicted else None, "at_most": None, "outcome": outcome,
        "same_labels": None, "source": "pairs", "pairs": 12, "is_fix": True, **more,
    }  # fmt: skip


def variants(recommended: str | None = "bfloat16") -> dict[str, Any]:
    """Return what step 05 leaves of four variants, of which the fastest changes too much."""
    exactness = {
        "rows": 2000, "same_labels": 1994, "agreement": 0.997, "agreement_low": 0.993, "agreement_high": 0.999,
        "accuracy_difference": -0.001, "accuracy_difference_low": -0.003, "accuracy_difference_high": 0.001,
        "max_abs_logit_difference": 0.01, "mean_abs_logit_difference": 0.001,
    }  # fmt: skip
    settings = {"bfloat16": ["model.dtype=bfloat16"]}
    bf16 = {"kind": "dtype", "settings": {"dtype": "bfloat16"}}
    known = [
        ("unsorted", "padded, unsorted", 1.0, None, None),
        ("packed", "packed", 2.2, {"kind": "remove_padding", "settings": {}}, None),
        ("bfloat16", "bfloat16, packed", 3.3, bf16, None),
        ("int8", "int8, packed", 4.4, None, "99.00 % of 2,000 labels stay; 99.50 % are asked for"),
    ]
    rows = [
        {"name": name, "words": words, "status": "measured", "fix": fix, "how": "", "gain": _span(gain),
         "base": None if name == "unsorted" else "packed", "gain_over_base": None, "predicted": None,
         "at_most": None, "tried": None, "texts_per_s": _span(400 * gain), "latency_ms": _span(2.5),
         "weight_bytes": 25_000_000, "disk_bytes": 25_000_000, "extra_bytes": None, "one_off_s": 0.2,
         "won_back_after_texts": 300, "exactness": {**exactness, "precision": name}, "changed": 6, "against": against,
         "million_s": 2500 / gain, "million_cost": None,
         "operators": {"matmul": {"before_s": 4e-3, "after_s": 4e-3 / gain}} if fix else {}}
        for name, words, gain, fix, against in known
    ]  # fmt: skip
    return {
        "schema_version": 2, "written": "2026-08-22T11:00:00+00:00", "model_fingerprint": results.FINGERPRINT,
        "dtype": "float32", "device": "cpu", "threads": 2, "batch_size": 2, "texts": 2000, "dataset_rows": 2000,
        "rounds": 8, "seconds": 60.0, "min_agreement": 0.995, "max_accuracy_drop": 0.01, "variants": rows, "doubts": [],
        "recommended": {"name": recommended, "settings": settings.get(recommended or "", []), "environment": {},
                        "reason": None},
    }  # fmt: skip


def answered(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return diagnosed rows whose time has owners, and of which fixes were tried: one gains, one loses."""
    return [_answered(dict(row)) if row.get("verdict") else dict(row) for row in rows]


def _answered(row: dict[str, Any]) -> dict[str, Any]:
    seconds, padding = row["latency_per_batch_ms_median"] / 1e3, row["padding_pct"] / 100
    shares = {"compute": 0.5, "memory": 0.05, "kernels": 0.15, "around": 0.2, "host": 0.12, "unexplained": -0.02}
    owners = [
        {"kind": kind, "seconds": share * seconds, "padding_share": None if kind == "unexplained" else padding}
        for kind, share in shares.items()
    ]
    tokens = round(row["tokens_per_sec_padded"] / row["throughput_samples_per_sec_mean"])
    shape = f"{row['batch_size']} × {tokens} tokens"
    reference = {"samples": row["batch_size"], "tokens": tokens, "seconds": _span(seconds, 0.01), "shape": shape}
    removed = {"kind": "remove_padding", "settings": {}}
    causes = [{"kind": "padding", "share": padding, "flops_share": padding, "confirmed_by": removed}]
    own = 0.5 * (1 - padding)
    causes.append({"kind": "compute", "share": own, "flops_share": None, "confirmed_by": None})
    same = {"same": 994, "of": 1000, "share": {"value": 0.994, "low": 0.987, "high": 0.997}}
    trials = [
        _trial("no padding", "remove_padding", 1.26, "gains", 1.22),
        _trial("bfloat16", "dtype", 1.8, "gains", 1.7, settings={"dtype": "bfloat16"}, same_labels=same),
        _trial("precision medium", "matmul_precision", 0.6, "loses", settings={"precision": "medium"}),
    ]
    compiled = {"fix": "fuse operators (torch.compile)", "kind": "fuse_operators", "settings": {}}
    gain = {**compiled, "at_most": 1.3, "basis": "12 % of the time is the host's", "predicted": _span(1.1)}
    added = {"breakdown": owners, "reference": reference, "limited_by": causes, "trials": trials, "gains": [gain]}
    settled = {"settled": True, "would_settle": None, "unsettled": None, "untried": []}
    return {**row, "verdict": {**row["verdict"], **added, **settled}}
