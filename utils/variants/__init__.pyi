from . import comparison as comparison
from .reasons import sentence as sentence
