"""Predict the whole dataset: plan, shards, and the numbers over all of them."""
