"""The tabs of the page, one file each: `show(shown)` draws what is known of the chosen run."""
