"""Seeded, review-like texts with 23 labels, made here: same rows and seed, same texts, on every machine.

They are synthetic and say so wherever they are reported. They are made hard in the ways real reviews are hard, so
that a classifier's accuracy on them is honest: two subjects in one text, passing remarks about other subjects,
cryptic one-liners, typos, wrong labels, a long tail of labels and of lengths. Standard library only.

The words live in `intents.toml` (what reviewers write about) and `phrases.toml` (everything else); the notation of
both is explained at the head of the first. First the vocabulary and how a template becomes a sentence, then what people
do to a text when they type it, then the reviews.
"""

import math
import random
import re
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_FOLDER = Path(__file__).parent
_CHOICE = re.compile(r"\[([^\[\]]*)\]")
_SLOT = re.compile(r"\{(\w+)\}")
_SPACES = re.compile(r" +(?=[ ,.!?;:]|$)")


@dataclass(frozen=True, kw_only=True)
class Intent:
    """What a review can be about; the fields are those of `intents.toml`."""

    label: str
    weight: int
    about: frozenset[str]
    bad: tuple[str, ...]
    good: tuple[str, ...]
    brief: tuple[str, ...]
    aside: tuple[str, ...]

    def suits(self, group: str) -> bool:
        """Return whether products of this group can have this intent."""
        return not self.about or group in self.about


def _read(name: str) -> dict[str, Any]:
    return tomllib.loads((_FOLDER / name).read_text(encoding="utf-8"))


def _intent(label: str, table: dict[str, Any]) -> Intent:
    lists = {name: tuple(table.get(name, ())) for name in ("bad", "good", "brief", "aside")}
    return Intent(label=label, weight=table["weight"], about=frozenset(table["about"]), **lists)


INTENTS = tuple(_intent(label, table) for label, table in sorted(_read("intents.toml").items()))
PHRASES = _read("phrases.toml")
PRODUCTS = tuple((name, group) for group, names in PHRASES["products"].items() for name in names)


def forms_of(product: str, other: str) -> dict[str, str]:
    """Return the grammatical forms that templates use for `product`; `other` is a product sent by mistake.

    A name that ends in s is a plural.
    """
    plural = product.endswith("s")
    return {
        "it": "they" if plural else "it",
        "It": "They" if plural else "It",
        "this": "these" if plural else "this",
        "them": "them" if plural else "it",
        "is": "are" if plural else "is",
        "was": "were" if plural else "was",
        "does": "do" if plural else "does",
        "s": "" if plural else "s",
        "es": "" if plural else "es",
        "product": product,
        "a_product": _with_article(product),
        "other": other,
        "a_other": _with_article(other),
    }


def facts_of_one_review(rng: random.Random) -> dict[str, str]:
    """Return what must not change within a review: the brand, the price, where the writer lives and so on."""
    slots = PHRASES["slots"]
    brand, rival = rng.sample(slots["brand"], 2)
    name, name2 = rng.sample(slots["name"], 2)
    facts = {slot: rng.choice(slots[slot]) for slot in ("price", "age", "city", "room")}
    facts |= {"shade": rng.choice(slots["color"]), "brand": brand, "rival": rival, "name": name, "name2": name2}
    return {slot: _with_digits(text, rng) for slot, text in facts.items()}


def _with_article(product: str) -> str:
    if product.endswith("s"):
        return f"some {product}"
    return f"an {product}" if product[0] in "aeiou" else f"a {product}"


def expand(template: str, forms: dict[str, str], rng: random.Random) -> str:
    """Return one sentence of the template: choices made, slots filled, digits drawn, first letter a capital."""
    while "[" in template:
        template = _CHOICE.sub(lambda match: rng.choice(match[1].split("|")), template)
    text = _SLOT.sub(lambda match: _fill(match[1], forms, rng), template)
    text = _SPACES.sub("", _with_digits(text, rng)).strip()
    return text[:1].upper() + text[1:]


def _fill(slot: str, forms: dict[str, str], rng: random.Random) -> str:
    return forms[slot] if slot in forms else rng.choice(PHRASES["slots"][slot])


def _with_digits(text: str, rng: random.Random) -> str:
    return re.sub("#", lambda _: str(rng.randint(2, 9)), text)


STYLES = {"careful": 50, "casual": 20, "hasty": 25, "loud": 5}
TYPO_RATE = 0.06  # of the words of a hasty text
EMOJI_RATE = 0.07
LINE_BREAKS = {" ": 86, "\n": 6, "\n\n": 5, "<br />": 3}


def typed(sentences: list[str], mood: str, rng: random.Random) -> str:
    """Return the sentences as one text, the way a hurried person would have typed it."""
    style = rng.choices(list(STYLES), list(STYLES.values()))[0]
    sentences = _STYLISTS[style](sentences, rng)
    text = _joined(sentences, rng)
    if rng.random() < EMOJI_RATE:
        text += " " + rng.choice(PHRASES["emoji"][mood]) * rng.choice((1, 1, 1, 2, 3))
    return text


def _joined(sentences: list[str], rng: random.Random) -> str:
    if len(sentences) > 3 and rng.random() < 0.04:
        return "\n".join(f"{rng.choice('-+')} {sentence}" for sentence in sentences)
    separator = rng.choices(list(LINE_BREAKS), list(LINE_BREAKS.values()))[0]
    text = sentences[0]
    for sentence in sentences[1:]:
        text += (separator if rng.random() < 0.4 else " ") + sentence
    return text


def _casual(sentences: list[str], rng: random.Random) -> list[str]:
    ending = rng.choice((".", "", "", "..", "!"))
    plain = (sentence.lower().replace("'", "") for sentence in sentences)
    return [re.sub(r"\.$", ending, sentence) for sentence in plain]


def _hasty(sentences: list[str], rng: random.Random) -> list[str]:
    return [" ".join(_mistyped(word, rng) for word in sentence.split(" ")) for sentence in sentences]


def _loud(sentences: list[str], rng: random.Random) -> list[str]:
    all_of_it = rng.random() < 0.4
    shouted = (sentence.upper() if all_of_it or rng.random() < 0.3 else sentence for sentence in sentences)
    return [re.sub(r"\.$", "!" * rng.randint(1, 4), sentence) for sentence in shouted]


def _mistyped(word: str, rng: random.Random) -> str:
    if len(word) < 4 or not word.isalpha() or rng.random() > TYPO_RATE:
        return word
    at = rng.randrange(1, len(word) - 1)
    swapped = word[:at] + word[at + 1] + word[at] + word[at + 2 :]
    dropped = word[:at] + word[at + 1 :]
    doubled = word[:at] + word[at] + word[at:]
    return rng.choice((swapped, swapped, dropped, dropped, doubled))


_STYLISTS = {"careful": lambda sentences, _: sentences, "casual": _casual, "hasty": _hasty, "loud": _loud}


LABELS: tuple[str, ...] = tuple(intent.label for intent in INTENTS)

MEDIAN_WORDS, SPREAD, LONGEST_WORDS = 32, 0.97, 215  # of a log-normal; about 1.3 tokens per word
BRIEF_BELOW_WORDS = 7
WRONG_LABEL_RATE = 0.035
RIVAL_RATE = 0.06  # a second subject with equal rights: the label is one of the two
ASIDE_RATE = 0.35  # passing remarks about another subject
CRYPTIC_RATE = 0.15  # of the brief reviews
GOOD_RATE = 0.4  # of the intents that can be praise or blame
LINKED_RATE = 0.15  # sentences that start with "To be fair," and the like
WORDS_PER_INTENT_SENTENCE, WORDS_PER_ANECDOTE = 60, 70

_WEIGHTS = [intent.weight for intent in INTENTS]
_FILLER_OF = {
    group: PHRASES["filler"]["any"] + PHRASES["filler"][theme]
    for theme, groups in {
        "gadget": ("audio", "screen"),
        "tool": ("tool",),
        "house": ("kitchen", "seat", "furniture", "bedding", "textile"),
        "outside": ("worn", "bag"),
    }.items()
    for group in groups
}
_PROPER = {word.split()[0] for slot in ("name", "brand", "city") for word in PHRASES["slots"][slot]}


@dataclass(frozen=True)
class LabelledText:
    """A review and the index in LABELS of what it is said to be about."""

    text: str
    label: int


@dataclass(frozen=True)
class _Plan:
    """What one review will say: `others` are the subjects that it may bring up besides its own."""

    intent: Intent
    others: list[Intent]
    mood: str
    group: str
    forms: dict[str, str]
    words: float


def generate(rows: int, seed: int) -> list[LabelledText]:
    """Return `rows` reviews, in random order; the same for the same arguments."""
    rng = random.Random(seed)
    return [_review(rng) for _ in range(rows)]


def _review(rng: random.Random) -> LabelledText:
    plan = _planned(rng)
    sentences = _brief(plan, rng) if plan.words < BRIEF_BELOW_WORDS else _sentences(plan, rng)
    label = LABELS.index(plan.intent.label)
    if rng.random() < WRONG_LABEL_RATE:
        label = rng.randrange(len(LABELS))
    return LabelledText(typed(sentences, plan.mood, rng), label)


def _planned(rng: random.Random) -> _Plan:
    intent = rng.choices(INTENTS, _WEIGHTS)[0]
    (product, group), (other, _) = rng.sample([entry for entry in PRODUCTS if intent.suits(entry[1])], 2)
    others = [rival for rival in INTENTS if rival is not intent and rival.suits(group)]
    mood = "good" if intent.good and (not intent.bad or rng.random() < GOOD_RATE) else "bad"
    words = min(LONGEST_WORDS, rng.lognormvariate(math.log(MEDIAN_WORDS), SPREAD))
    forms = facts_of_one_review(rng) | forms_of(product, other)
    return _Plan(intent, others, mood, group, forms, words)


def _brief(plan: _Plan, rng: random.Random) -> list[str]:
    templates = PHRASES["cryptic"]["any"] if rng.random() < CRYPTIC_RATE else plan.intent.brief
    return [expand(rng.choice(templates), plan.forms, rng)]


def _sentences(plan: _Plan, rng: random.Random) -> list[str]:
    hedges = PHRASES["hedges"][plan.mood] + PHRASES["hedges"]["any"]
    body = [_linked(expand(template, plan.forms, rng), hedges, rng) for template in _substance(plan, rng)]
    opener, closer = (_framing(part, plan, rng) for part in ("openers", "closers"))
    spent = _count_words([*opener, *body, *closer])
    for template in _padding(plan, rng):
        if spent >= plan.words:
            break
        position = rng.randint(0, len(body))
        sentence = expand(template, plan.forms, rng)
        body.insert(position, _linked(sentence, PHRASES["bridges"]["any"], rng) if position else sentence)
        spent += _count_words([sentence])
    return opener + body + closer


def _padding(plan: _Plan, rng: random.Random) -> list[str]:
    """Return more templates without intent than the review can take, in the order in which it takes them."""
    filler = _some(_FILLER_OF[plan.group], 1000, rng)
    return _some(PHRASES["anecdotes"]["any"], int(plan.words / WORDS_PER_ANECDOTE), rng) + filler


def _substance(plan: _Plan, rng: random.Random) -> list[str]:
    """Return the templates that carry meaning, in random order: of the subject, a rival and passing remarks."""
    count = 1 + round(rng.random() * plan.words / WORDS_PER_INTENT_SENTENCE)
    templates = _some(_said_in(plan.intent, plan.mood), count, rng)
    if rng.random() < RIVAL_RATE:
        templates += _some(_said_in(rng.choice(plan.others), plan.mood), count, rng)
    if plan.words > 2 * BRIEF_BELOW_WORDS and rng.random() < ASIDE_RATE:
        templates += _some(rng.choice(plan.others).aside, 1, rng)
    rng.shuffle(templates)
    return templates


def _said_in(intent: Intent, mood: str) -> tuple[str, ...]:
    return (intent.good if mood == "good" else intent.bad) or intent.bad or intent.good


def _framing(part: str, plan: _Plan, rng: random.Random) -> list[str]:
    likely = min(0.7, plan.words / 60)
    if rng.random() > likely:
        return []
    return [expand(rng.choice(PHRASES[part][rng.choice((plan.mood, "any"))]), plan.forms, rng)]


def _some(templates: Sequence[str], count: int, rng: random.Random) -> list[str]:
    return rng.sample(templates, min(count, len(templates)))


def _linked(sentence: str, links: Sequence[str], rng: random.Random) -> str:
    if rng.random() > LINKED_RATE:
        return sentence
    first = sentence.split()[0]
    if first != "I" and not first.startswith("I'") and not first.isupper() and first not in _PROPER:
        sentence = sentence[:1].lower() + sentence[1:]
    return f"{rng.choice(links)} {sentence}"


def _count_words(sentences: Iterable[str]) -> int:
    return sum(sentence.count(" ") + 1 for sentence in sentences)
