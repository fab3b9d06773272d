"""Is the first advice right on training loops that no test of the library knows, and is what it promises a bound?

Each loop has one fault that takes much of its time, and can be run without it. It is recorded as its user would, from
outside or by a callback. The first advice has to be against the fault, and the speed without the fault, by the loop's
own clock and without recording, at most what is promised: a tenth more is left to a shared machine. Where the fault is
in the work itself, the advice has to be on the work, and its share bounds the gain. Exit 1 where either fails.

    python benchmarks/unseen_loops.py [--only LOOP ...] [--repeats 3]
"""

import argparse
import json
import logging
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # find the packages of this checkout

from benchmarks import _attempts
from utils.training import run_folder

STEPS, COLD, NOISE, LIMIT_S = 100, 10, 1.1, 1800.0
PROFILE = Path(__file__).resolve().parents[1] / "scripts" / "profile_training.py"
BY_CALLBACK = ("collator", "evaluation", "gan")
LOOPS = {  # what is wrong with each, and the fixes that are right; none where it is the work itself
    "workers": ("workers that start anew in each short epoch", ("load_ahead",)),
    "lbfgs": ("L-BFGS with a closure; rows augmented in the main process", ("load_ahead",)),
    "checkpoint": ("a checkpoint in each step", ("leave_out", "save_beside")),
    "backbone": ("gradients computed for a backbone that is not trained", ()),
    "rollout": ("PPO-like; an environment in Python", ("leave_out",)),
    "collator": ("Trainer; a slow collator", ("load_ahead",)),
    "evaluation": ("Trainer, gradients accumulated; evaluation every five steps", ("evaluate_less",)),
    "gan": ("Lightning by hand; weights written as text in each step", ("shorten_python", "do_less_between")),
}
ticks: list[float] = []


def tick(*_: Any, **__: Any) -> None:
    """Note that a step has ended."""
    ticks.append(time.perf_counter())


def net(hidden: int = 256, out: int = 10, depth: int = 1) -> nn.Sequential:
    """Return a small network on 64 numbers."""
    inner = [layer for _ in range(depth) for layer in (nn.Linear(hidden, hidden), nn.ReLU())]
    return nn.Sequential(nn.Linear(64, hidden), nn.ReLU(), *inner, nn.Linear(hidden, out))


def spin(seconds: float) -> None:
    """Compute in Python for as long."""
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        sum(range(100))


class Rows(Dataset[Any]):  # noqa: D101
    def __init__(self, count: int, augmentation_s: float = 0.0) -> None:
        self.rows, self.augmentation_s = (torch.randn(count, 64), torch.randint(10, (count,))), augmentation_s

    def __len__(self) -> int:
        return len(self.rows[0])

    def __getitem__(self, row: int) -> Any:
        spin(self.augmentation_s)
        return self.rows[0][row], self.rows[1][row]


def train(batches: Any, model: nn.Module, optimizer: Any = None, after: Any = None) -> None:
    """Train over the batches, with something done after the update."""
    optimizer = optimizer or torch.optim.AdamW(model.parameters())
    for inputs, labels in batches:

        def loss(inputs: Any = inputs, labels: Any = labels) -> Any:
            optimizer.zero_grad()
            loss = cross_entropy(model(inputs), labels)
            loss.backward()
            return loss

        if isinstance(optimizer, torch.optim.LBFGS):
            optimizer.step(loss)
        else:
            loss()
            optimizer.step()
            if after:
                after(model)
        tick()


def run(name: str, is_faulty: bool, into: str | None) -> None:
    """Run a loop with its fault or without."""
    plain, slow = DataLoader(Rows(32 * STEPS), 32), float(is_faulty)
    match name:
        case "workers":
            loader, model = DataLoader(Rows(320), 32, num_workers=1, persistent_workers=not is_faulty), net()
            for _ in range(STEPS // 10):
                train(loader, model)
        case "lbfgs":
            model = net()
            train(DataLoader(Rows(32 * STEPS, 5e-4 * slow), 32), model, torch.optim.LBFGS(model.parameters(), 1, 2))
        case "checkpoint":
            with tempfile.TemporaryDirectory() as folder:

                def saves(model: nn.Module) -> None:
                    copies = [parameter + 0 for parameter in [*model.parameters()] * 5]
                    torch.save(copies, f"{folder}/last.pt")

                train(plain, model := net(800), torch.optim.SGD(model.parameters()), saves if is_faulty else None)
        case "backbone":
            head = nn.Linear(256, 10)
            model = nn.Sequential(net(1024, 256, depth=3).requires_grad_(is_faulty), head)
            train(DataLoader(Rows(64 * STEPS), 64), model, torch.optim.AdamW(head.parameters()))
        case "rollout":
            policy = net(128, 4)
            optimizer = torch.optim.Adam(policy.parameters())
            for _ in range(STEPS // 4):
                states = [torch.randn(8, 64)]
                for _ in range(16):
                    with torch.no_grad():
                        action = policy(states[-1]).softmax(-1).multinomial(1)
                    spin(2e-3 * slow)
                    states.append(states[-1] + 0.1 * action)
                train([(torch.cat(states), torch.randint(4, (17 * 8,)))] * 4, policy, optimizer)
        case "collator":
            fit_trainer(into, 16 * STEPS, 0.02 * slow)
        case "evaluation":
            often = {"eval_strategy": "steps", "eval_steps": 5, "per_device_eval_batch_size": 64} if is_faulty else {}
            fit_trainer(into, 64 * STEPS, 0.0, gradient_accumulation_steps=4, **often)
        case _:
            fit_gan(into, is_faulty)


def fit_trainer(into: str | None, rows: int, collate_s: float, **settings: Any) -> None:
    """Train by the Trainer of transformers."""
    from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

    from boundby.training import ProfCallback

    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = net()

        def forward(self, inputs: Any, labels: Any) -> Any:
            logits = self.layers(inputs)
            return {"loss": cross_entropy(logits, labels), "logits": logits}

    def collate(rows: Any) -> Any:
        spin(collate_s)
        return dict(zip(("inputs", "labels"), map(torch.stack, zip(*rows, strict=True)), strict=True))

    clock = type("Clock", (TrainerCallback,), {"on_step_begin": tick, "on_train_end": tick})()
    callbacks = [clock, *([ProfCallback(into, 20, 2, 3, reports=False)] if into else [])]
    settings |= {"report_to": [], "disable_tqdm": True, "save_strategy": "no", "remove_unused_columns": False}
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(folder, num_train_epochs=1, per_device_train_batch_size=16, **settings)
        trainer = Trainer(Wrapped(), arguments, collate, Rows(rows), Rows(4000), callbacks=callbacks)
        trainer.remove_callback(PrinterCallback)
        trainer.train()


def fit_gan(into: str | None, writes: bool) -> None:
    """Fit two networks against each other by manual optimization."""
    from lightning.pytorch import Callback, LightningModule, Trainer

    from boundby.training import ProfilerCallback

    class Gan(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.maker, self.judge = net(out=64), net(out=1)

        def training_step(self, batch: Any, batch_idx: int) -> None:
            made = self.maker(torch.randn_like(batch[0]))
            for optimizer, of in zip(self.optimizers(), (made.detach(), made), strict=True):
                optimizer.zero_grad()
                self.manual_backward((self.judge(of) - self.judge(batch[0])).square().mean())
                optimizer.step()
            if writes:
                json.dumps([parameter.detach().flatten().tolist() for parameter in self.judge.parameters()])

        def configure_optimizers(self) -> Any:
            return [torch.optim.Adam(item.parameters()) for item in (self.judge, self.maker)]

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    clock = type("Clock", (Callback,), {"on_train_batch_end": tick})()
    own = [ProfilerCallback(True, into, 20, run_folder=into, repeat_cycles=1, reports=False)] if into else []
    off = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = Trainer(accelerator="cpu", max_epochs=1, callbacks=[clock, *own], **off)  # type: ignore[arg-type]
    trainer.fit(Gan(), DataLoader(Rows(32 * STEPS), 32))


def is_right(name: str, repeats: int) -> bool:
    """Print a row on a loop, and what was said of it; return whether the first advice is right and its bound holds."""
    (fault, fixes), program = LOOPS[name], [sys.executable, str(Path(__file__).resolve()), "--run", name]
    with tempfile.TemporaryDirectory() as parent:
        into = f"{parent}/run"
        outside = [sys.executable, str(PROFILE), "--output", into, "--", *program, "--faulty"]
        _attempts.last_line([*program, "--faulty", "--into", into] if name in BY_CALLBACK else outside, LIMIT_S)
        verdict = run_folder.judge(Path(into), run_folder.ranks_of(Path(into)))
    hows: list[list[str]] = [["--faulty"], []]
    pairs = [[float(_attempts.last_line([*program, *how], LIMIT_S)) for how in hows] for _ in range(repeats)]
    slow, quick = (min(column) for column in zip(*pairs, strict=True))
    first = verdict.parts["Next"][0]
    gain = next((gain for gain in verdict.gains if first.startswith(str(gain.fix))), None)
    work = sum(cause.share for cause in verdict.causes if cause.bound == "compute")
    at_most = gain.at_most if gain else 1 / max(1 - work, 1e-3)
    result = (gain.fix.kind in fixes if gain else not fixes) and slow / quick <= NOISE * at_most
    cells = [fault, verdict.bound, first.split(":")[0] if gain else first, f"{at_most:.2f}", f"{slow / quick:.2f}"]
    print("|", " | ".join([*cells, "yes" if result else "NO"]), "|")
    print(f"{name}:\n{verdict}", file=sys.stderr, flush=True)
    return result


def main() -> int:
    """Run one loop, or judge what is said of each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=LOOPS, default=list(LOOPS))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--run", help=argparse.SUPPRESS)
    parser.add_argument("--into", help=argparse.SUPPRESS)
    parser.add_argument("--faulty", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.run:
        run(args.run, args.faulty, args.into)
        print((ticks[-1] - ticks[COLD]) / (len(ticks) - COLD - 1))
        return 0
    print("| loop and fault | bound | first advice | at most | measured | right |\n|" + " --- |" * 6)
    answers = [is_right(name, args.repeats) for name in args.only]
    print(f"\n{sum(answers)} of {len(answers)} right")
    return 0 if all(answers) else 1


if __name__ == "__main__":
    raise SystemExit(main())
