"""Plan a split for a person: `planning` reads and keeps plans, `running` runs them, `report` tells them."""
