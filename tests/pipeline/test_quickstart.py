"""The offline default: the texts, the classifier trained on them, and the cache that makes both only once."""

import csv
import random
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from boundby import files
from tests.classifiers import TINY
from utils.quickstart import cache, texts
from utils.quickstart.recipe import Recipe, Schedule
from utils.quickstart.texts import INTENTS, PHRASES, PRODUCTS, expand, facts_of_one_review, forms_of

REPOSITORY = Path(__file__).parents[2]
SMALL = Recipe(rows_train=60, rows_validation=40, seed=3, shape=TINY, schedule=Schedule(tokens_per_batch=2048))


def silent(message: str) -> None:
    pass


@pytest.fixture(scope="module")
def reviews() -> list[texts.LabelledText]:
    return texts.generate(3000, seed=1)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> cache.QuickstartFiles:
    return cache.prepare(tmp_path_factory.mktemp("quickstart"), progress=silent, recipe=SMALL)


# --- texts


def test_texts_depend_on_the_seed_and_their_number_alone_and_not_on_the_hash_seed_of_the_process():
    made = texts.generate(200, seed=5)
    assert texts.generate(200, seed=5) == made != texts.generate(200, seed=6)
    assert texts.generate(50, seed=5) == made[:50]
    command = [sys.executable, "-c", "from utils.quickstart import texts; print(texts.generate(50, 5))"]
    environments = [{"PYTHONHASHSEED": seed} for seed in ("1", "2")]
    printed = [
        subprocess.run(command, cwd=REPOSITORY, env=item, capture_output=True, text=True) for item in environments
    ]
    assert [item.stdout for item in printed] == [f"{made[:50]}\n"] * 2


def test_labels_and_lengths_have_long_tails_few_short_reviews_repeat_and_texts_hold_awkward_characters(
    reviews,
):
    assert len(texts.LABELS) == 23 and list(texts.LABELS) == sorted(set(texts.LABELS))
    counts = Counter(review.label for review in reviews)
    assert set(counts) == set(range(23)) and max(counts.values()) > 5 * min(counts.values())
    words = sorted(len(review.text.split()) for review in reviews)
    median, p95 = words[len(words) // 2], words[len(words) * 95 // 100]
    assert 25 <= median <= 45 and p95 > 3 * median and words[0] == 1 and words[-1] < 320
    copies = Counter(review.text for review in reviews)
    assert 0.01 * len(reviews) < sum(count - 1 for count in copies.values()) < 0.06 * len(reviews)
    assert all(count == 1 for text, count in copies.items() if len(text.split()) > 20)
    seen = {sentence for review in reviews[:2000] for sentence in review.text.split(". ")}
    fresh = [sentence for review in texts.generate(500, seed=2) for sentence in review.text.split(". ")]
    assert sum(sentence in seen for sentence in fresh) < 0.5 * len(fresh), "held-out sentences are mostly new"
    together = " ".join(copies)
    assert [item for item in (",", '"', "'", "\n", "é", "👍", "<br />", "$", "€") if item not in together] == []


def test_every_template_expands_to_a_clean_sentence_for_every_kind_of_product():
    for intent in INTENTS:
        assert intent.about <= set(PHRASES["products"]) and intent.brief and intent.aside is not None
        assert intent.bad or intent.good
    rng = random.Random(0)
    for product, group in PRODUCTS:
        forms = facts_of_one_review(rng) | forms_of(product, "blender")
        suited = [intent for intent in INTENTS if intent.suits(group)]
        templates = [t for i in suited for t in (*i.bad, *i.good, *i.brief, *i.aside)] + list(_all_phrases())
        for template in templates:
            sentence = expand(template, forms, rng)
            assert sentence and not set("[]{}|#") & set(sentence), (template, sentence)
            assert "  " not in sentence and " ." not in sentence and " ," not in sentence, (template, sentence)


def _all_phrases() -> Iterator[str]:
    for section in ("openers", "closers", "hedges", "bridges", "filler", "anecdotes", "cryptic"):
        for lists in PHRASES[section].values():
            yield from lists


# --- the classifier


def test_the_folder_loads_offline_with_the_auto_classes_and_its_tokenizer_gives_every_text_back(made, reviews):
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(made.model_dir)
    model = AutoModelForSequenceClassification.from_pretrained(made.model_dir)
    assert model.config.model_type == "qwen2"
    assert [model.config.id2label[index] for index in range(23)] == list(texts.LABELS)
    assert model.config.pad_token_id == tokenizer.pad_token_id is not None
    assert tokenizer.padding_side == "right"
    assert len(tokenizer) == model.config.vocab_size
    for review in reviews[:200]:
        ids = tokenizer(review.text, truncation=False, verbose=False)["input_ids"]
        assert tokenizer.decode(ids) == review.text and tokenizer.pad_token_id not in ids


def test_training_is_silent_repeatable_and_leaves_the_process_as_it_was(made, tmp_path, capfd):
    """Damage and what a killed build has left are replaced by the same files."""
    import torch

    remains, damaged = tmp_path / f"{cache.BUILDING_PREFIX}killed", cache.model_dir(tmp_path, SMALL)
    files.write_text(remains / "model.safetensors", "half")
    damaged.mkdir()
    torch.manual_seed(11)
    state, threads = torch.random.get_rng_state(), torch.get_num_threads()
    messages: list[str] = []
    again = cache.prepare(tmp_path, progress=messages.append, recipe=SMALL)
    assert torch.equal(torch.random.get_rng_state(), state) and torch.get_num_threads() == threads
    for name in ("model.safetensors", "tokenizer.json", cache.VALIDATION):
        assert files.sha256(again.model_dir / name) == files.sha256(made.model_dir / name)
    assert cache.is_ready(tmp_path, SMALL) and not remains.exists()
    assert "damaged or incomplete" in messages[0] and capfd.readouterr() == ("", "")


def test_training_learns_a_rule_that_single_words_decide_in_batches_within_a_budget(tmp_path):
    from utils.quickstart import classifier

    lengths = [3, 70, 10, 10, 1, 40, 9, 100]
    batches = classifier.length_sorted_batches([[1] * length for length in lengths], 64)
    assert sorted(index for batch in batches for index in batch) == list(range(len(lengths)))
    assert all(len(batch) == 1 or max(lengths[row] for row in batch) * len(batch) <= 64 for batch in batches)
    words = ["battery", "parcel", "refund"]
    examples = [texts.LabelledText(f"text {n} about the {words[n % 3]} and number {n * 7}", n % 3) for n in range(240)]
    untrained = Recipe(seed=0, shape=TINY, schedule=Schedule(peak_learning_rate=0.0))
    classifier.build(tmp_path, examples, words, recipe=untrained, progress=str)
    assert classifier.accuracy(tmp_path, examples) < 0.7
    messages: list[str] = []
    recipe = Recipe(seed=0, shape=TINY, schedule=Schedule(epochs=12, tokens_per_batch=512))
    classifier.build(tmp_path, examples, words, recipe=recipe, progress=messages.append)
    assert classifier.accuracy(tmp_path, examples) > 0.95
    assert len(messages) == 10 and messages[-1].startswith("trained 100%")


# --- the cache


def test_the_record_says_that_it_is_synthetic_and_lists_every_file_and_a_second_call_reuses_them_without_a_word(made):
    record = files.read_json(made.model_dir / cache.RECORD)
    assert record["synthetic"] is True and "ynthetic" in record["note"]
    assert record["content_hash"] == made.content_hash == cache.content_hash(SMALL)
    assert 0 <= record["validation_accuracy"] < 1 and record["train_seconds"] > 0
    assert set(record["files"]) == {path.name for path in made.model_dir.iterdir()} - {cache.RECORD}
    with made.validation_csv.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    held_out = texts.generate(SMALL.rows_train + SMALL.rows_validation, SMALL.seed)[SMALL.rows_train :]
    assert rows == [{"text": review.text, "label_name": texts.LABELS[review.label]} for review in held_out]
    messages: list[str] = []
    again = cache.prepare(made.model_dir.parent, progress=messages.append, recipe=SMALL)
    assert (again, messages) == (made, [])


@pytest.mark.parametrize("damage", ["model.safetensors", "tokenizer.json", cache.VALIDATION, cache.RECORD])
def test_a_damaged_or_lost_file_is_noticed(made, tmp_path, damage):
    copy = tmp_path / made.model_dir.name
    shutil.copytree(made.model_dir, copy)
    assert cache.is_ready(tmp_path, SMALL)
    content = bytearray((copy / damage).read_bytes())
    content[len(content) // 2] ^= 1
    (copy / damage).write_bytes(content)
    assert not cache.is_ready(tmp_path, SMALL)
    (copy / damage).unlink()
    assert not cache.is_ready(tmp_path, SMALL)


def test_a_build_that_fails_leaves_nothing_behind(tmp_path, monkeypatch):
    def full_disk(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files, "write_json", full_disk)
    with pytest.raises(OSError, match="No space left on device"):
        cache.prepare(tmp_path, progress=silent, recipe=SMALL)
    assert not cache.is_ready(tmp_path, SMALL)
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == []


def test_the_hash_follows_the_recipe_and_the_versions(monkeypatch):
    before = cache.content_hash(SMALL)
    assert cache.content_hash(replace(SMALL, seed=4)) != before
    assert cache.content_hash(replace(SMALL, shape=replace(TINY, layers=3))) != before
    monkeypatch.setattr(cache.metadata, "version", lambda package: "99.1.2")
    assert cache.content_hash(SMALL) != before


def test_asking_for_texts_or_for_the_state_of_the_cache_loads_no_torch(tmp_path):
    program = (
        "import sys; from pathlib import Path; from utils.quickstart import cache, texts; texts.generate(5, 1);"
        "cache.is_ready(Path(sys.argv[1])); print([m for m in ('torch', 'transformers', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
