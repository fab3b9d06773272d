"""The door to the layer profile: which model on which input, from a preset, a folder or the Hub."""
