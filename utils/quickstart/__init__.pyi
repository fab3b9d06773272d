from . import cache as cache
from .recipe import Recipe as Recipe
from .recipe import Schedule as Schedule
from .recipe import Shape as Shape
