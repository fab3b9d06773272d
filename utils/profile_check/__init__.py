"""Check every artefact of a profile: that it is there, whole, the one its receipt tells of, and true to its trace."""
