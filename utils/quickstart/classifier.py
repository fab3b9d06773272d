"""A small Qwen2 classifier and its byte-level BPE tokenizer, made from texts and saved as any Hugging Face model is."""

import contextlib
import random
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from torch.nn import functional
from transformers import Qwen2Config, Qwen2ForSequenceClassification, Qwen2Tokenizer
from transformers.utils import logging

from boundby.machine import host_threads
from utils.quickstart.recipe import Recipe, Schedule, Shape
from utils.quickstart.texts import LabelledText

WORKERS = 2
EVALUATION_TOKENS_PER_BATCH = 4096
REPORTS = 10  # progress messages of one training


@dataclass(frozen=True)
class Examples:
    """Tokenised texts and their labels."""

    token_ids: list[list[int]]
    labels: Sequence[int]


def fit(
    model: Qwen2ForSequenceClassification,
    examples: Examples,
    schedule: Schedule,
    *,
    seed: int,
    progress: Callable[[str], None],
) -> None:
    """Train `model` in place; the same arguments give the same weights on one kind of processor."""
    rng = random.Random(seed)
    batches = [
        batch
        for _ in range(schedule.epochs)
        for batch in _shuffled_batches(examples.token_ids, schedule.tokens_per_batch, rng)
    ]
    optimizer = _optimizer(model, schedule)
    rate = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, schedule.peak_learning_rate, total_steps=len(batches), pct_start=schedule.warmup_share
    )
    model.train()
    with _workers() as workers:
        for step, batch in enumerate(batches, start=1):
            loss = _set_gradients(model, examples, batch, workers)
            torch.nn.utils.clip_grad_norm_(model.parameters(), schedule.largest_gradient_norm)
            optimizer.step()
            rate.step()
            if step * REPORTS // len(batches) > (step - 1) * REPORTS // len(batches):
                progress(f"trained {step / len(batches):.0%}: step {step} of {len(batches)}, loss {loss:.2f}")
    model.eval()


def share_right(model: Qwen2ForSequenceClassification, examples: Examples) -> float:
    """Return the share of examples that `model` labels as they are labelled."""

    def count_right(batch: list[int]) -> int:
        tokens, lengths, labels = _tensors(examples, batch)
        with torch.inference_mode():
            last = _logits(model, tokens)[torch.arange(len(batch)), lengths - 1]
        return int((last.argmax(dim=1) == labels).sum())

    with _workers() as workers:
        right = sum(workers.map(count_right, length_sorted_batches(examples.token_ids, EVALUATION_TOKENS_PER_BATCH)))
    return right / len(examples.labels)


def _optimizer(model: Qwen2ForSequenceClassification, schedule: Schedule) -> torch.optim.Optimizer:
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.ndim <= 1]
    groups = [
        {"params": matrices, "weight_decay": schedule.weight_decay},
        {"params": vectors, "weight_decay": 0.0},  # norms and biases
    ]
    return torch.optim.AdamW(groups, lr=schedule.peak_learning_rate, betas=(0.9, 0.98), fused=True)


def _set_gradients(
    model: Qwen2ForSequenceClassification, examples: Examples, batch: list[int], workers: Executor
) -> float:
    """Set the gradients of the batch's mean loss, one share of the batch per worker; return the loss."""
    parameters = list(model.parameters())
    shares = [share for start in range(WORKERS) if (share := batch[start::WORKERS])]

    def differentiated(share: list[int]) -> tuple[float, tuple[torch.Tensor, ...]]:
        loss = _loss(model, examples, share) * (len(share) / len(batch))
        return loss.item(), torch.autograd.grad(loss, parameters)

    losses, gradients = zip(*workers.map(differentiated, shares), strict=True)
    for parameter, *parts in zip(parameters, *gradients, strict=True):
        parameter.grad = torch.stack(parts).sum(dim=0)
    return float(sum(losses))


def _loss(model: Qwen2ForSequenceClassification, examples: Examples, batch: list[int]) -> torch.Tensor:
    tokens, lengths, labels = _tensors(examples, batch)
    logits = _logits(model, tokens)
    share_read = torch.arange(1, tokens.shape[1] + 1)[None, :] / lengths[:, None]
    weights = torch.where(share_read <= 1, share_read.square(), 0.0)  # 0 on padding, 1 at the last token
    losses = functional.cross_entropy(
        logits.transpose(1, 2), labels[:, None].expand(-1, tokens.shape[1]), reduction="none"
    )
    return (losses * weights).sum() / weights.sum()


def _logits(model: Qwen2ForSequenceClassification, tokens: torch.Tensor) -> torch.Tensor:
    """Return the label logits at every token; causal attention never sees right padding, so no mask is needed."""
    return cast(torch.Tensor, model.score(model.model(input_ids=tokens, use_cache=False).last_hidden_state))


def _tensors(examples: Examples, batch: list[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    texts = [torch.tensor(examples.token_ids[index]) for index in batch]
    tokens = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True)
    lengths = torch.tensor([len(text) for text in texts])
    return tokens, lengths, torch.tensor([examples.labels[index] for index in batch])


def _shuffled_batches(token_ids: list[list[int]], tokens_per_batch: int, rng: random.Random) -> list[list[int]]:
    order = list(range(len(token_ids)))
    rng.shuffle(order)  # texts of one length meet other neighbours in each epoch
    shuffled = [token_ids[index] for index in order]
    batches = [[order[index] for index in batch] for batch in length_sorted_batches(shuffled, tokens_per_batch)]
    rng.shuffle(batches)
    return batches


def length_sorted_batches(token_ids: list[list[int]], tokens_per_batch: int) -> list[list[int]]:
    """Return batches of indices of texts, shortest first; no batch is above the budget unless one text alone is."""
    batches: list[list[int]] = []
    for index in sorted(range(len(token_ids)), key=lambda index: len(token_ids[index])):
        if not batches or len(token_ids[index]) * (len(batches[-1]) + 1) > tokens_per_batch:
            batches.append([])
        batches[-1].append(index)
    return batches


@contextlib.contextmanager
def _workers() -> Iterator[Executor]:
    """Yield a pool of threads in which every operator runs on the thread that calls it."""
    with host_threads(1), ThreadPoolExecutor(WORKERS, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        yield pool


def build(
    folder: Path,
    train: Sequence[LabelledText],
    label_names: Sequence[str],
    *,
    recipe: Recipe,
    progress: Callable[[str], None],
) -> None:
    """Write a classifier trained on `train`, and its tokenizer, into `folder`; labels are indices in `label_names`.

    Trains in float32 on the CPU; leaves the random state and the number of threads of the process as they were.
    """
    tokenizer = _tokenizer([example.text for example in train], recipe.shape)
    model = _model(tokenizer, label_names, recipe.shape, recipe.seed)
    fit(model, _tokenised(tokenizer, train), recipe.schedule, seed=recipe.seed, progress=progress)
    _save(folder, model, tokenizer)


def accuracy(folder: Path, examples: Sequence[LabelledText]) -> float:
    """Return the share of `examples` to which the classifier saved in `folder` gives their label."""
    tokenizer = Qwen2Tokenizer.from_pretrained(folder)
    with _no_progress_bars():
        model = Qwen2ForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    return share_right(model, _tokenised(tokenizer, examples))


def _tokenizer(texts: Sequence[str], shape: Shape) -> Qwen2Tokenizer:
    empty = Qwen2Tokenizer(model_max_length=shape.positions, padding_side="right")
    return cast(Qwen2Tokenizer, empty.train_new_from_iterator(texts, shape.vocabulary, show_progress=False))


def _model(
    tokenizer: Qwen2Tokenizer, label_names: Sequence[str], shape: Shape, seed: int
) -> Qwen2ForSequenceClassification:
    names = dict(enumerate(label_names))
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.key_value_heads,
        max_position_embeddings=shape.positions,
        initializer_range=shape.initial_std,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        id2label=names,
        label2id={name: index for index, name in names.items()},
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen2ForSequenceClassification(config)


def _tokenised(tokenizer: Qwen2Tokenizer, examples: Sequence[LabelledText]) -> Examples:
    token_ids = tokenizer([example.text for example in examples], truncation=True)["input_ids"]
    return Examples(token_ids, [example.label for example in examples])


def _save(folder: Path, model: Qwen2ForSequenceClassification, tokenizer: Qwen2Tokenizer) -> None:
    with _no_progress_bars():
        model.save_pretrained(folder)  # safetensors
    tokenizer.save_pretrained(folder)


@contextlib.contextmanager
def _no_progress_bars() -> Iterator[None]:
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
