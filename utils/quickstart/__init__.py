"""The offline default: synthetic review-like texts, and a small classifier trained on them on this machine."""
