"""Demo training loops on data of their own, to be profiled: plain PyTorch, the Trainer of transformers, Lightning."""
