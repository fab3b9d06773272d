"""What people do to a text when they type it: typos, shouting, lost capitals, emoji, broken lines."""

import random
import re

from utils.quickstart.grammar import PHRASES

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
