"""The data loaders of a run."""

from __future__ import annotations

from typing import Any

import torch

from equipoise.data import Folder, FolderLoader, Images, Loader, ResizedCrop, Splits
from equipoise.errors import UserError
from equipoise.seeds import derive
from equipoise.training.recipe import Recipe
from equipoise.world import World

AnyLoader = Loader | FolderLoader


def training_loader(recipe: Recipe, part: Images | Folder, device: torch.device, world: World) -> AnyLoader:
    """Return a loader of this process's images of each training batch, shuffled and augmented in every epoch."""
    data = recipe.data
    common: dict[str, Any] = {
        "batch": data.batch,
        "seed": derive(recipe.seed, "data"),
        "drop_last": data.drop_last,
        "device": device,
        "fixed_batches": recipe.correction.fixed_batches,
        "rank": world.rank,
        "ranks": world.size,
    }
    if isinstance(part, Folder):
        if recipe.as_published.needs_raw_images:
            raise UserError("as_published needs images in memory, and image folders are read from disk; remove it")
        return FolderLoader(part, augment=ResizedCrop(), size=data.size, workers=data.workers, **common)
    return Loader(part, augment=data.augment, **common)


def scoring_loaders(recipe: Recipe, splits: Splits, device: torch.device, world: World) -> dict[str, AnyLoader]:
    """Return a loader for each split, in order and without augmentation.

    Process r of n has the images r, r + n, r + 2n, ..., so that the first k images of the split are the first k/n of
    each process.
    """
    data = recipe.data
    common: dict[str, Any] = {"batch": data.test_batch, "shuffle": False, "device": device}
    parts = {"train": splits.train, "validation": splits.validation, "test": splits.test}
    loaders: dict[str, AnyLoader] = {}
    for name, part in parts.items():
        if part is None:
            continue
        own = part if world.alone else part.subset(torch.arange(world.rank, len(part), world.size))
        if isinstance(own, Folder):
            loaders[name] = FolderLoader(own, size=data.size, workers=data.workers, **common)
        else:
            loaders[name] = Loader(own, **common)
    return loaders
