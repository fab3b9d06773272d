"""Plan a split for a person: `planning` reads and plans, `document` gives plain values, `text` says it."""
