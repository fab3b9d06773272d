"""The vocabulary of the synthetic reviews, and how a template becomes a sentence; standard library only.

The words live in `intents.toml` (what reviewers write about) and `phrases.toml` (everything else); the notation of
both is explained at the head of the first.
"""

import random
import re
import tomllib
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
