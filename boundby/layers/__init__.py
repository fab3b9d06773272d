"""Layer by layer: what each module of a model costs, where it is called, and how far that can be trusted."""
