"""Training runs: a plain loop to profile, programs recorded from outside, and what their folders hold."""
