"""The loop that runs topology, objective and correction together, and what surrounds it."""

from equipoise.train.folder import RunFolder
from equipoise.train.loop import Trainer, resume
from equipoise.train.recipe import Recipe, apply_overrides, make_recipe, read_recipe

__all__ = ["Recipe", "RunFolder", "Trainer", "apply_overrides", "make_recipe", "read_recipe", "resume"]
