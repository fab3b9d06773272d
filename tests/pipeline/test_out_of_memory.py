"""A run whose larger batches do not fit into memory, from the sweep to the card, the report and the page."""

import importlib
import json

import pytest
import torch
import transformers

from tests import evaluation_workplace as workplace

MOST_TOKENS = 100  # of a batch


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return workplace.prepare(tmp_path_factory.mktemp("memory"), workplace.texts(40))


@pytest.mark.parametrize(("sizes", "statuses"), [
    ([1, 16, 32], ["noisy", "oom", "skipped_oom"]), ([16, 32], ["oom", "skipped_oom"]),
])  # fmt: skip
def test_batch_sizes_that_do_not_fit_are_results_and_said_in_words(settings, sizes, statuses, tmp_path, monkeypatch):
    stock = transformers.BertForSequenceClassification.forward

    def forward(self, input_ids=None, **given):
        if input_ids is not None and input_ids.numel() > MOST_TOKENS:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return stock(self, input_ids=input_ids, **given)

    monkeypatch.setattr(transformers.BertForSequenceClassification, "forward", forward)
    monkeypatch.setattr("utils.baseline.find_limits", lambda *_: None)  # which measures the limits of this machine
    command = [*settings, *workplace.QUICK, f"profiling.batch_sizes={sizes}", f"output.results_dir={tmp_path}"]
    for step in ("02_baseline_inference", "04_visualize_results"):
        assert importlib.import_module(f"scripts.{step}").main(command) == 0
    rows = json.loads((tmp_path / "baseline_metrics.json").read_text())["batch_sizes"]
    assert [row["status"] for row in rows][-2:] == statuses[-2:]
    card, report, page = (
        " ".join((tmp_path / name).read_text().split())
        for name in ("card.txt", "baseline_summary_report.txt", "report.html")
    )
    assert "does not fit" in card or "(16 and more do not fit into memory)" in card
    assert "out of memory" in report and "out of memory" in page
    assert ("Make the model fit" in report) == (sizes[0] == 16)
    assert "OutOfMemoryError" not in card and "oom" not in card


def test_the_watts_of_an_idle_machine_are_read_before_anything_is_measured(settings, tmp_path, monkeypatch):
    order: list[str] = []

    def noted(name, wrapped):
        return lambda *given, **named: order.append(name) or wrapped(*given, **named)

    for place in ("instruments.energy", "take_turns", "find_limits"):
        monkeypatch.setattr(f"utils.baseline.{place}", noted(place, lambda *_, **__: None))
    command = [*settings, *workplace.QUICK, f"output.results_dir={tmp_path}"]
    importlib.import_module("scripts.02_baseline_inference").main(command)
    assert order == ["instruments.energy", "take_turns"]
