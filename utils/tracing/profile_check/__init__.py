"""Check every artefact of a profile: that it is there, is the one that was written, and can be read."""
