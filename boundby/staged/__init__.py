"""Run a plan on the devices present (`running`), simulate it (`simulation`), hold it to account (`comparison`).

`cutting` takes a model apart without changing it, `pipeline` has its stages at work in processes, `trials` measures the
link between them and runs several cuts in turns, `contention` how much stages on one machine slow one another down;
`settling` plans with that. `records`, `simulation`, `comparison`, `cuts` and `settling` load no torch.
"""
