"""Profile a training of the Trainer of transformers: stages, verdict, and a trace of a few steps.

python examples/train_with_transformers.py [FOLDER]        # for the files, else a new temporary one
"""

import argparse
import sys
import tempfile
from pathlib import Path

import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # find boundby in this checkout; needless once installed

from boundby.training import ProfCallback


def main() -> None:
    """Train a small model with random weights on random tokens; what was found is printed at the end."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", metavar="FOLDER", nargs="?")
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128}
    model = BertForSequenceClassification(BertConfig(vocab_size=500, num_labels=3, **sizes))
    rows = [{"input_ids": torch.randint(500, (32,)), "labels": torch.tensor(row % 3)} for row in range(320)]
    folder = parser.parse_args().folder or tempfile.mkdtemp()
    callback = ProfCallback(output_dir=f"{folder}/profile", wait_steps=10, warmup_steps=2, active_steps=3, say=print)
    arguments = TrainingArguments(
        output_dir=folder, per_device_train_batch_size=8, num_train_epochs=1, report_to=[], disable_tqdm=True
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=rows)
    with callback.attach(trainer):  # or callbacks=[callback], which hears of no exception
        trainer.train()
    print(*sorted(str(path) for path in Path(folder).rglob("*") if path.is_file()), sep="\n")


if __name__ == "__main__":
    main()
