"""The pictures, one file per figure: rows in, a matplotlib Figure out, nothing written; `style` is what they share."""
