"""Step 05: `ways` to run texts, timed in `rounds`; `recommendation` has the rule, `comparison` puts all together."""
