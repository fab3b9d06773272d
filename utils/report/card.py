"""The card of a run: its facts gathered from what the steps left, for `boundby.bound.card` to put into lines."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import PurePath

from boundby import files
from boundby.bound import Compared, Facts, Next, Rate, Verdict
from boundby.bound import card as cards
from boundby.formatting import number
from boundby.machine import environment
from boundby.work import Interval
from utils.baseline import Row
from utils.command import Run
from utils.report import advice, doubts, sources, variants
from utils.report.sources import ReportData
from utils.steps import estimate


def card(data: ReportData) -> list[str]:
    """Return the card in lines."""
    return cards.lines(facts(data))


def draw(data: ReportData) -> str:
    """Write the card, and return it as one text."""
    text = "\n".join(card(data))
    files.write_text(data.layout.card, f"{text}\n")
    return text


def show_card(run: Run, texts: int, is_under_way: bool) -> None:
    """Write and show the card as far as it is known; while step 02 is under way also how long the rest takes.

    `texts` are those of the whole dataset.
    """
    from utils.evaluation import planning  # loads torch, which a report that is made again does without

    data = replace(sources.read(run), is_under_way=is_under_way)
    run.say(f"\n{draw(data)}\n")
    if is_under_way and data.chosen:
        here_s = planning.sample(run.config, texts)[0] / data.chosen["throughput_samples_per_sec_mean"]
        if line := estimate.standing("02", run.config, run.layout, run.args.resume, here_s):
            run.note(f"{line}, if the whole set goes no faster than batch size {data.chosen['batch_size']}")


def facts(data: ReportData) -> Facts:
    """Return what the card says of the optimal batch size in the model's own dtype."""
    row = data.chosen
    verdict = row.get("verdict") if row else None
    reference = verdict.reference if verdict else None
    return Facts(
        model=_model(data),
        machine=machine(data),
        dtype=_dtype(data),
        shape=_shape(row, verdict),
        seconds=reference.seconds.value if reference else _seconds(row),
        verdict=verdict,
        why_not=_why_not(data),
        compared=tuple(_compared(data)),
        compared_texts=variants.texts_of_sample(data),
        next=_next(data),
        rates=tuple(_rates(data)),
        scores=_scores(data),
        doubts=doubts.in_brief(data),
    )


def _scores(data: ReportData) -> dict[str, str]:
    if data.is_scored:
        return {data.task.SCORE: data.task.headline(data.full)}
    return {data.task.SCORE: cards.NOT_YET} if _is_to_come(data) and data.document["dataset"]["has_labels"] else {}


def _is_to_come(data: ReportData) -> bool:
    """Tell whether the pass over the whole set is still to come: the card was drawn before it."""
    return data.is_under_way and data.full is None and data.config.evaluation.enabled


def _model(data: ReportData) -> str:
    """Return the name of the model, of a folder its last part."""
    model = data.document["model"]
    name = model.get("name") or "unknown model"
    return PurePath(name).name if model.get("origin") == "folder" else name


def _dtype(data: ReportData) -> str | None:
    own = (data.dtypes or [data.document["model"].get("dtype")])[0]
    return f"{own} (auto)" if own and data.is_auto else own


def machine(data: ReportData) -> str:
    """Return the device, or the CPU without the marks of its maker, and its cores."""
    known = data.machine.hardware if data.machine else None
    device = data.document["device"].get("name")
    if device or known is None:
        return device or "an unknown machine"
    return environment.cpu_in_words(known)


def _shape(row: Row | None, verdict: Verdict | None) -> str | None:
    if verdict and verdict.reference:
        return str(verdict.reference)
    if row is None:
        return None
    tokens = row.get("reference_tokens")
    return f"{row['batch_size']} × {tokens} tokens" if tokens else str(row["batch_size"])


def _seconds(row: Row | None) -> float | None:
    known = row and (row.get("reference_ms") or row.get("latency_per_batch_ms_median"))
    return known / 1e3 if known else None


def _why_not(data: ReportData) -> str | None:
    """Return what stands in the place of an answer: that nothing fits, or why there is no verdict."""
    if data.chosen is None:
        too_large = next((row["batch_size"] for row in data.rows if row["status"] == "oom"), None)
        if too_large is None:
            return f"not known: {data.choice['reason']}"
        held = data.document["device"].get("memory_bytes")
        return f"memory: batch size {too_large} does not fit{f' into {number(held / 1e9)} GB' if held else ''}"
    why = data.chosen.get("reasons", {}).get("bound") or data.document.get("ceilings_reason")
    return f"not known: {why}" if why else None


def _next(data: ReportData) -> Next | None:
    """Return the first advice, of those that are equally pressing the first that has a command."""
    steps = advice.advice(data)
    if not steps:
        return None
    pressing = [step for step in steps if step.kind == steps[0].kind]
    first = next((step for step in pressing if step.command and (step.factor or step.kind != advice.SPEED)), steps[0])
    return Next(f"{first.title[0].lower()}{first.title[1:]}", first.command, first.factor, first.is_measured)


def _compared(data: ReportData) -> Iterator[Compared]:
    """Yield what was tried over all texts, the recommended variant first."""
    chosen = variants.recommended(data)
    rows = [row for row, _ in variants.tried(data)]
    for row in sorted(rows, key=lambda row: row is not chosen):
        same = row["exactness"]["agreement"]
        yield Compared(row["words"], Interval(**row["gain"]), same, is_allowed=row["against"] is None)


def _rates(data: ReportData) -> list[Rate]:
    rates, row, full = [], data.chosen, data.full
    if row:
        half_width = row["throughput_half_width_pct"]
        where = f"at batch size {row['batch_size']}, unsorted texts{_too_large(data)}"
        rates.append(Rate(row["throughput_samples_per_sec_mean"], where, half_width))
    if full:
        where = f"in the pass over the whole set ({way(data)})"
        rates.append(Rate(full["throughput_samples_per_sec"], where))
    elif _is_to_come(data):
        rates.append(Rate(None, "in the pass over the whole set"))
    return rates


def _too_large(data: ReportData) -> str:
    """Return which batch sizes did not fit into memory, in words."""
    sizes = [row["batch_size"] for row in data.of(data.dtypes[0]) if row["status"] == "oom"]
    return f" ({min(sizes)} and more do not fit into memory)" if sizes else ""


def way(data: ReportData) -> str:
    """Return what made the pass over the whole set faster or slower than the sweep."""
    full = data.full or {}
    words = [f"{full['padding_pct']:.0f} % padding"]
    words += [full["precision"].replace("_", " ")] if data.dtypes[:1] != [full["precision"]] else []
    return ", ".join([*words, *(["last layer trimmed"] if full.get("trim") else [])])
