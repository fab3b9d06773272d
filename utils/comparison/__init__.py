"""Compare two runs, or the dtypes of one: `results` reads, `rows` judges, `document` joins, `text` says."""
