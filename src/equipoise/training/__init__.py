"""The loop that runs topology, objective and correction together, and what surrounds it."""

from equipoise.training.build_recipe import make_recipe
from equipoise.training.recipe import Recipe
from equipoise.training.recipe_files import apply_overrides, read_recipe
from equipoise.training.run_folder import RunFolder
from equipoise.training.trainer import Trainer, resume

__all__ = ["Recipe", "RunFolder", "Trainer", "apply_overrides", "make_recipe", "read_recipe", "resume"]
