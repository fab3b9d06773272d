"""A run in at most 4 KB for a language model: what was found, where each figure stands, and what cannot be answered."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from boundby import files
from boundby.bound import Verdict
from boundby.formatting import clean
from utils.baseline import OtherVersion, read_document
from utils.command import METRICS_VERSION, InputError, Layout, removed

MOST_BYTES = 4096
SCHEMA_VERSION, KIND = 1, "boundby_summary"
LONGEST = 160  # characters of one text
DIGITS = 4
ALWAYS = {
    "another machine, model or other texts": "only what is named here was measured, and it does not carry over",
    "other batch sizes than those in rows": "they were not measured",
}
OF_A_ROW = {  # question -> the figure that would answer it
    "energy": "energy_per_sample_j",
    "memory of the device": "memory_peak_mb",
    "utilisation of the device": "gpu_utilization_pct",
    "latency of the slowest percent": "latency_per_batch_ms_p99",
}
UNSUPPORTED = "too few timings support it"


def of(layout: Layout) -> dict[str, Any]:
    """Return the summary of the run, no larger than `MOST_BYTES` in either form.

    An id such as `M/batch_sizes/1` is a place in a file: the letter is one of `files`, the rest a JSON pointer. Raises
    InputError where step 02 has left nothing that can be read.
    """
    document = removed(metrics(layout))
    card = layout.card.read_text(encoding="utf-8").splitlines() if layout.card.is_file() else []
    for most in (12, 8, 6, 4, 3, 2, 1, 0):
        summary = _summary(layout, document, card, most)
        if max(len(as_json(summary).encode()), len(as_markdown(summary).encode())) < MOST_BYTES:
            return summary
    raise InputError(f"{layout.metrics}: its names are too long for a summary of {MOST_BYTES} bytes")


def metrics(layout: Layout) -> Mapping[str, Any]:
    """Return the document of step 02. Raises InputError, with the way out, where there is none."""
    try:
        return read_document(layout.metrics, METRICS_VERSION)
    except FileNotFoundError:
        raise InputError(f"{layout.metrics} is missing; give a results folder in which step 02 has run") from None
    except (OSError, ValueError, OtherVersion) as error:
        raise InputError(f"{layout.metrics} cannot be read: {error}; measure again (step 02)") from None


def chosen(document: Mapping[str, Any]) -> tuple[int, Mapping[str, Any]] | None:
    """Return the row of the batch size to use in the model's own dtype, with its place; None where there is none."""
    rows = document["batch_sizes"]
    dtype, size = (rows[0]["dtype"] if rows else None), document["optimal"]["batch_size"]
    return next(((at, row) for at, row in enumerate(rows) if (row["dtype"], row["batch_size"]) == (dtype, size)), None)


def as_json(summary: Mapping[str, Any]) -> str:
    """Return it as one strict JSON document on one line."""
    return json.dumps(summary, allow_nan=False, ensure_ascii=False, separators=(",", ":"))


def as_markdown(summary: Mapping[str, Any]) -> str:
    """Return it as Markdown: a heading for each part, an id in brackets behind each figure."""
    named = {key: value for key, value in summary.items() if key not in ("schema_version", "kind")}
    return "\n".join(["# Boundby: summary of a run", *(line for part in named.items() for line in _part(*part))])


def _part(title: str, value: Any) -> Iterator[str]:
    if title == "card":
        yield from ("", "## card", "```", *value, "```")
    elif isinstance(value, dict):
        yield from ("", f"## {title}", *(f"- {key}: {_said(item)}" for key, item in value.items()))
    elif isinstance(value, list):
        yield from ("", f"## {title}", *(f"- {_said(item)}" for item in value))
    else:
        yield f"{title}: {_said(value)}"


def _said(value: Any) -> str:
    if isinstance(value, dict):
        mark = f" [{value['id']}]" if "id" in value else ""
        return ", ".join(f"{key} {_said(item)}" for key, item in value.items() if key != "id") + mark
    if isinstance(value, list):
        return "; ".join(map(_said, value)) or "none"
    return "unknown" if value is None else str(value)


def _summary(layout: Layout, document: Mapping[str, Any], card: Sequence[str], most: int) -> dict[str, Any]:
    best = chosen(document)
    at, row = best or (None, {})
    verdict, full = row.get("verdict"), document["full_dataset_metrics"]
    rows = document["batch_sizes"]
    # The chosen row and its neighbours say most.
    nearest = sorted(range(len(rows)), key=lambda index: abs(index - (at or 0)))[:most]
    answers = list(_unanswered(layout, document, row, verdict))
    answer = {
        "bound": verdict.bound if verdict else row.get("bound"),
        "settled": verdict.settled if verdict else None,
        "would_settle": _short(verdict.unsettled.text) if verdict and verdict.unsettled else None,
        "confidence": verdict.confidence if verdict else None,
        "limited_by": [
            {"kind": cause.kind, "share": _rounded(cause.share)} for cause in (verdict.limited_by if verdict else ())
        ],
        "id": f"M/batch_sizes/{at}/verdict",
    }
    return {
        "schema_version": SCHEMA_VERSION,
        "kind": KIND,
        "folder": _short(str(layout.results)),
        "files": {
            letter: str(path.relative_to(layout.results)) for letter, path in _files(layout).items() if path.is_file()
        },
        "measured": {
            "model": _short(document["model"].get("name")),
            "device": _short(document["device"].get("name") or document["device"].get("type")),
            "written": document.get("written"),
            "complete": document.get("complete"),
        },
        "answer": answer if best else {"bound": None, "why": _short(document["optimal"]["reason"]), "id": "M/optimal"},
        "tried_on_the_batch": list(_tried(verdict, at))[:most],
        "not_tried": [
            {
                "fix": _short(gain.fix),
                "predicted": _rounded(gain.predicted.value if gain.predicted else None),
                "at_most": _rounded(gain.at_most),
                "id": f"M/batch_sizes/{at}/verdict/gains/{index}",
            }
            for index, gain in enumerate(verdict.gains[: min(most, 3)] if verdict else ())
        ],
        "rows": [_row(rows[index], index) for index in sorted(nearest)],
        "rows_left_out": len(rows) - len(nearest),
        "whole_set": full
        and {
            "texts": full["samples"],
            "samples_per_sec": _rounded(full["throughput_samples_per_sec"]),
            "accuracy": _rounded(full.get("accuracy")),
            "id": "M/full_dataset_metrics",
        },
        "doubts": [_short(doubt) for doubt in [*document["doubts"], *row.get("doubts", ())]][: min(most, 4)],
        "cannot_be_answered": dict(answers if most else answers[: len(ALWAYS)]),
        "card": [line[:LONGEST] for line in card] if most > 1 else [],
    }


def _files(layout: Layout) -> dict[str, Path]:
    return {"M": layout.metrics, "V": layout.variants, "T": layout.trace_analysis, "L": layout.layer_summary}


def _tried(verdict: Verdict | None, at: int | None) -> Iterator[dict[str, Any]]:
    trials = enumerate(verdict.trials if verdict else ())
    for index, trial in sorted(trials, key=lambda trial: -trial[1].measured.value):
        yield {
            "what": _short(trial.name),
            "speed": _rounded(trial.measured.value),
            "interval": [_rounded(trial.measured.low), _rounded(trial.measured.high)],
            "id": f"M/batch_sizes/{at}/verdict/trials/{index}",
        }


def _row(row: Mapping[str, Any], index: int) -> dict[str, Any]:
    return {
        "dtype": row["dtype"],
        "batch_size": row["batch_size"],
        "status": row["status"],
        "samples_per_sec": _rounded(row.get("throughput_samples_per_sec_mean")),
        "half_width_pct": _rounded(row.get("throughput_half_width_pct")),
        "id": f"M/batch_sizes/{index}",
    }


def _unanswered(
    layout: Layout, document: Mapping[str, Any], row: Mapping[str, Any], verdict: Verdict | None
) -> Iterator[tuple[str, str]]:
    """Yield what this run does not answer, and why."""
    yield from ALWAYS.items()
    if not verdict:
        why = row.get("reasons", {}).get("bound") or document.get("ceilings_reason") or "no verdict was reached"
        yield "what limits the speed", _short(why)
    for question, figure in OF_A_ROW.items():
        if row and row.get(figure) is None:
            yield question, _short(row.get("reasons", {}).get(figure, UNSUPPORTED))
    if not document["full_dataset_metrics"]:
        yield "accuracy", _short(document.get("full_dataset_reason") or "the whole set was not run")
    missing = {"which variant to use": layout.variants, "time by operator": layout.trace_analysis}
    for question, path in {**missing, "time by layer": layout.layer_summary}.items():
        if not path.is_file():
            yield question, f"{path.name} is not there: its step has not run or was switched off"


def _short(text: object) -> str:
    return None if text is None else clean(text, LONGEST)  # type: ignore[return-value]


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.{DIGITS}g}")


def at(layout: Layout, identifier: str) -> Any:
    """Return what an id of a summary points to. Raises LookupError or ValueError where it points nowhere."""
    letter, *keys = identifier.split("/")
    value = files.read_json(_files(layout)[letter])
    for key in keys:
        value = value[int(key)] if isinstance(value, list) else value[key]
    return value
