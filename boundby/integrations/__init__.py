"""Training frameworks: their loops timed and recorded through callbacks of their own."""
