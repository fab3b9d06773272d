"""Profile a loop of reinforcement learning from feedback: rollout, reward, reference, update.

A small policy learns to write tokens below ten; the reference keeps it near where it began (REINFORCE with a penalty).

python examples/learn_from_feedback.py [FOLDER]        # make monitor shows FOLDER, if it lies in runs/
"""

import argparse
import copy
import sys
import tempfile
from pathlib import Path

import torch
from torch.nn.functional import log_softmax

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # find boundby in this checkout; needless once installed

from boundby.training import BACKWARD, FORWARD, OPTIMIZER, REFERENCE, REWARD, ROLLOUT, UPDATE, ProfilerManager

VOCABULARY, LENGTH, ANSWERS, STEPS, PENALTY = 50, 16, 64, 40, 0.02


class Policy(torch.nn.Module):
    """Logits of the next token after each one."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.memory = torch.nn.Embedding(VOCABULARY, 64), torch.nn.GRU(64, 64, batch_first=True)
        self.head = torch.nn.Linear(64, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the logits of each place."""
        return self.head(self.memory(self.embedding(tokens))[0])


@torch.no_grad()
def answers_of(policy: Policy) -> torch.Tensor:
    """Return answers that the policy draws, token by token."""
    tokens = torch.zeros(ANSWERS, 1, dtype=torch.long)
    for _ in range(LENGTH):
        drawn = torch.multinomial(policy(tokens)[:, -1].softmax(dim=-1), 1)
        tokens = torch.cat([tokens, drawn], dim=1)
    return tokens


def chances(policy: Policy, tokens: torch.Tensor) -> torch.Tensor:
    """Return the logarithm of the chance of each answer."""
    logits = log_softmax(policy(tokens[:, :-1]), dim=-1)
    return logits.gather(2, tokens[:, 1:, None]).sum(dim=(1, 2))


def learn(folder: Path) -> None:
    """Train, with the stages marked; say what limits it."""
    torch.manual_seed(0)
    policy = Policy()
    reference, optimizer = copy.deepcopy(policy), torch.optim.AdamW(policy.parameters(), lr=3e-3)
    with ProfilerManager(folder, device=torch.device("cpu"), say=print) as profiler:
        for _ in range(STEPS):
            with profiler.stage(ROLLOUT):
                tokens = answers_of(policy)
            with profiler.stage(REWARD):
                reward = (tokens[:, 1:] < 10).float().mean(dim=1)
            with profiler.stage(REFERENCE), torch.no_grad():
                before = chances(reference, tokens)
            with profiler.stage(UPDATE):
                with profiler.stage(FORWARD):
                    now = chances(policy, tokens)
                    worth = reward - PENALTY * (now.detach() - before)
                    loss = -(now * (worth - worth.mean())).mean()
                with profiler.stage(BACKWARD):
                    loss.backward()
                with profiler.stage(OPTIMIZER):
                    norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
                    optimizer.step()
                    optimizer.zero_grad()
            profiler.metrics({"reward": reward.mean(), "grad_norm": norm, "samples": ANSWERS})
            profiler.step()
    print(f"{profiler.told()}\n\nthe files: {folder}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="FOLDER", nargs="?")
    learn(parser.parse_args().folder or Path(tempfile.mkdtemp()))
