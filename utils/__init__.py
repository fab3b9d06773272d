"""The pipeline of this repository: configuration, folders, datasets, models, rows, plots and report."""
