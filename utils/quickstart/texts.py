"""Seeded, review-like texts with 23 labels, made here: same rows and seed, same texts, on every machine.

They are synthetic and say so wherever they are reported. They are made hard in the ways real reviews are hard, so
that a classifier's accuracy on them is honest: two subjects in one text, passing remarks about other subjects,
cryptic one-liners, typos, wrong labels, a long tail of labels and of lengths. Standard library only.
"""

import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from utils.quickstart.grammar import INTENTS, PHRASES, PRODUCTS, Intent, expand, facts_of_one_review, forms_of
from utils.quickstart.noise import typed

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
    opener, closer = (_framing(place, plan, rng) for place in ("openers", "closers"))
    spent = _count_words([*opener, *body, *closer])
    for template in _padding(plan, rng):
        if spent >= plan.words:
            break
        place = rng.randint(0, len(body))
        sentence = expand(template, plan.forms, rng)
        body.insert(place, _linked(sentence, PHRASES["bridges"]["any"], rng) if place else sentence)
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


def _framing(place: str, plan: _Plan, rng: random.Random) -> list[str]:
    likely = min(0.7, plan.words / 60)
    if rng.random() > likely:
        return []
    return [expand(rng.choice(PHRASES[place][rng.choice((plan.mood, "any"))]), plan.forms, rng)]


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
