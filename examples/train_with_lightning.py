"""Profile a fit of Lightning: stages, verdict, and traces of a few steps.

python examples/train_with_lightning.py [FOLDER]        # for the files, else a new temporary one
"""

import argparse
import sys
import tempfile
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader, TensorDataset

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # find boundby in this checkout; needless once installed

from boundby.training import ProfilerCallback


class Classifier(LightningModule):
    """Two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 4))

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        """Return the loss of a batch."""
        inputs, labels = batch
        return torch.nn.functional.cross_entropy(self.layers(inputs), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return torch.optim.AdamW(self.parameters())


def main() -> None:
    """Fit a small network to random data; what was found is printed at the end."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", metavar="FOLDER", nargs="?")
    rows = TensorDataset(torch.randn(2560, 64), torch.randint(4, (2560,)))
    folder = parser.parse_args().folder or tempfile.mkdtemp()
    callback = ProfilerCallback(enabled=True, output_dir=folder, repeat_cycles=1, say=print)
    trainer = Trainer(
        max_epochs=1, callbacks=[callback], logger=False, enable_checkpointing=False, enable_progress_bar=False
    )
    trainer.fit(Classifier(), DataLoader(rows, batch_size=32))
    print(*sorted(str(path) for path in Path(folder).rglob("*") if path.is_file()), sep="\n")


if __name__ == "__main__":
    main()
