"""Wall-clock truth of a split: models that are made for one part, and what `make truth` prints of every attempt."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch.nn import functional

from boundby.bound.analysis import Call, Machine, bottleneck
from boundby.bound.bench import Bench
from boundby.bound.replay import Lengths, replay
from boundby.bound.split import Replay, Split, split
from boundby.bound.verdict import PartKind
from boundby.machine.ceilings import Ceilings, measure
from boundby.timing.timer import Timer, Work

pytestmark = [pytest.mark.truth, pytest.mark.timeout(1800)]

CPU = torch.device("cpu")
ATTEMPTS = 4  # of each of the five models that name a part: 20 in all
POINTS = 0.10
BUDGET_S = 4.0


def best_s(work: Work, repeats: int = 15) -> float:
    """Return the seconds of a call that nothing disturbed, timed apart from the split."""
    timer = Timer()
    work()
    return min(timer.isolated(work) for _ in range(repeats))


@dataclass(frozen=True)
class Case:
    """A forward with its part, and the share of that part in it, found without a replay."""

    part: PartKind
    work: Work
    share: Callable[[Ceilings], float]


def large_products() -> Case:
    left, right = torch.randn(1024, 1024), torch.randn(1024, 1024)

    def work() -> torch.Tensor:
        return (left @ right) @ right

    def share(ceilings: Ceilings) -> float:
        product = ceilings.configured("float32")
        assert product is not None
        return 4 * 1024**3 / product.flops_per_s / best_s(work)

    return Case("compute", work, share)


def element_wise() -> Case:
    """Additions far beyond the caches, into memory that is there: what main memory gives is all that counts."""
    given, out = torch.randn(2**25), torch.empty(2**25)

    def work() -> None:
        torch.add(given, given, out=out)
        torch.mul(out, 0.5, out=out)

    def share(ceilings: Ceilings) -> float:
        memory = next(level for level in ceilings.memory if level.level == "memory")
        return 4 * given.nbytes / memory.bytes_per_s / best_s(work)

    return Case("memory", work, share)


def tiny_operators() -> Case:
    one = torch.ones(4)

    def work() -> torch.Tensor:
        total = one
        for _ in range(1000):
            total = total + one
        return total

    return Case("host", work, lambda _: 1.0)


def slow_kernel() -> Case:
    """A depthwise dilated convolution in float64, for which this CPU has no fast kernel."""
    given, weight = torch.randn(1, 64, 48, 48, dtype=torch.float32), torch.randn(64, 1, 7, 7)
    strided = given.permute(0, 1, 3, 2)

    def work() -> torch.Tensor:
        return functional.conv2d(strided, weight, dilation=3, padding=9, groups=64).cumsum(-1)

    def share(ceilings: Ceilings) -> float:
        product = ceilings.configured("float32")
        assert product is not None
        return 1 - 2 * 64 * 48 * 48 * 49 / product.flops_per_s / best_s(work)

    return Case("kernels", work, share)


def python_between() -> Case:
    left, right = torch.randn(256, 256), torch.randn(256, 256)

    def spin(seconds: float) -> None:
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            pass

    def work() -> torch.Tensor:
        product = left
        for _ in range(10):
            product = product @ right
            spin(500e-6)
        return product

    return Case("host", work, lambda _: 5e-3 / best_s(work))


def replayed(work: Work, lengths: Lengths | None = None) -> Replay:
    for _ in range(5):
        measured = replay(work, Bench(replay_s=BUDGET_S), lengths=lengths)
        if not measured.doubts:
            break
        print(f"\nonce more: {measured.doubts}", end="")
    return measured


@pytest.fixture(scope="module")
def ceilings() -> Ceilings:
    ceilings_here = measure(CPU, dtypes=("float32",))
    for _ in range(3):
        if not ceilings_here.doubts:
            break
        ceilings_here = ceilings_here.joined(measure(CPU, dtypes=("float32",)))
    return ceilings_here


def said(parts: Split) -> str:
    return " · ".join(f"{part.kind} {part.seconds / parts.seconds:.0%}" for part in parts.breakdown)


@pytest.mark.parametrize("make", [large_products, element_wise, tiny_operators, slow_kernel, python_between])
def test_the_part_that_a_model_was_made_for_comes_first_with_its_share(make: Callable[[], Case], ceilings) -> None:
    limits = ceilings.limits("float32")
    failed = []
    for attempt in range(ATTEMPTS):
        with torch.inference_mode():
            case = make()
            before = case.share(ceilings)
            parts = split(replayed(case.work), limits)
            share = max(before, case.share(ceilings))  # what disturbs a forward makes its part's share smaller
        off = parts.share(case.part) - share
        print(f"\n{make.__name__} {attempt + 1}: {case.part} {share:.0%} true ({off:+.0%}): {said(parts)}", end="")
        if parts.largest.kind != case.part or abs(off) > POINTS:
            failed.append(attempt + 1)
    assert not failed


def test_padding_is_the_share_of_the_time_that_it_takes(ceilings) -> None:
    """Of 60 % padding in products and additions alone the time without it is known: that of the texts alone."""
    layers = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(6))).eval()
    lengths, longest = [128] + [38] * 7, 128

    def forward(texts: int, tokens: int) -> Work:
        given = torch.randn(texts, tokens, 512)
        return lambda: layers(given)

    for attempt in range(ATTEMPTS):
        with torch.inference_mode():
            padded = forward(8, longest)
            known = Lengths(lengths, longest, lambda tokens: forward(8, tokens))
            parts = split(replayed(padded, known), ceilings.limits("float32"))
            share = 1 - best_s(forward(1, sum(lengths))) / best_s(padded)
        assert parts.padding_share is not None
        print(f"\npadding {attempt + 1}: {share:.0%} true, {parts.padding_share:.0%} of {said(parts)}", end="")
        assert abs(parts.padding_share - share) <= POINTS
        assert parts.padding_share > max(
            (1 - (o.padding_share or 0)) * o.seconds / parts.seconds for o in parts.breakdown
        )


class SpelledTokenizer:
    """WordPiece in plain Python, the longest piece first, over a vocabulary in a list: as slow as it sounds."""

    def __init__(self) -> None:
        letters = "abcdefghijklmnopqrstuvwxyz"
        self.pieces = [*letters, *(first + second for first in letters for second in letters)]

    def __call__(self, texts: list[str]) -> torch.Tensor:
        return torch.tensor([[number for word in text.split() for number in self.numbers(word)] for text in texts])

    def numbers(self, word: str) -> list[int]:
        numbers, start = list[int](), 0
        while start < len(word):
            end = next(end for end in range(len(word), start, -1) if word[start:end] in self.pieces)
            numbers.append(self.pieces.index(word[start:end]))
            start = end
        return numbers


def test_a_slow_tokenizer_comes_first_with_its_share(ceilings) -> None:
    tokenizer, texts = SpelledTokenizer(), [" ".join(["benchmark", "measurement", "zygotes"] * 8)] * 8
    layers = torch.nn.Embedding(1000, 256), torch.nn.Linear(256, 256), torch.nn.Linear(256, 4)
    model, ids = torch.nn.Sequential(*layers).eval(), tokenizer(texts)

    def make_input() -> torch.Tensor:
        return tokenizer(texts)

    def work() -> torch.Tensor:
        return model(ids)

    failed = []
    for attempt in range(ATTEMPTS):
        with torch.inference_mode():
            input_s, forward_s = best_s(make_input), best_s(work)
            bench = Bench(replay_s=BUDGET_S, trials_s=0.5)
            verdict = bottleneck(Call(work, make_input), Machine(ceilings, "float32"), bench)
        first, share = verdict.limited_by[0], input_s / (input_s + forward_s)
        print(f"\ntokenizer {attempt + 1}: {share:.0%} true, {first.kind} {first.share:.0%}", end="")
        if (verdict.bound, first.kind) != ("input", "input") or abs(first.share - share) > POINTS:
            failed.append(attempt + 1)
    assert not failed
