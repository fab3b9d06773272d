"""Layer by layer: what each module of a model costs, where it is called, and how far that can be trusted.

In: a model and its inputs, for `ObservabilityEngine`; with the limits of the machine also what limits each layer. Out:
a `Report` with a `ModelProfile`, and its files: metrics, summary, dashboard. `probes` note the calls of every module,
`passes` and `timing` are the runs, `measurement` makes a `LayerProfile` of what they saw, `judgement` says what limits
it, `ranking` which layers matter. `Generation` is a model that generates text. Records and files load no torch.
"""

from boundby import hand_on

__getattr__, __dir__, __all__ = hand_on(__name__, __file__)
