"""The model of a recipe, checked against its data."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from equipoise.config import parameters_of
from equipoise.data import FolderLoader, Images, Splits
from equipoise.errors import UserError
from equipoise.models import MODELS, Normalize
from equipoise.training.loaders import AnyLoader
from equipoise.training.pretrained import load_weights
from equipoise.training.recipe import Recipe


def make_model(recipe: Recipe, splits: Splits) -> nn.Module:
    """The model for the classes, channels and image size of the data, normalising with the data's statistics.

    It has the pretrained weights of the recipe, if there are any.
    """
    factory = MODELS[recipe.model]
    known = parameters_of(factory)
    options = {"classes": len(splits.classes), "channels": len(splits.mean), **recipe.model_options}
    if "size" in known and isinstance(splits.train, Images):
        options.setdefault("size", splits.train.images.shape[-1])
    try:
        model = factory(**options)
    except (UserError, RuntimeError, TypeError, MemoryError) as error:
        raise UserError(f"model: {' '.join(str(error).split())[:200]}") from None
    normalize = getattr(model, "normalize", None)
    if isinstance(normalize, Normalize) and recipe.data.normalize:
        normalize.set(splits.mean, splits.std)
    if recipe.weights is not None:
        load_weights(model, Path(recipe.weights))
    return model


@torch.no_grad()
def check_fit(model: nn.Module, loader: AnyLoader, classes: int, device: torch.device) -> None:
    """Run the model on one image, so that a model that cannot take it is refused before the run begins."""
    shape = (3, loader.size, loader.size) if isinstance(loader, FolderLoader) else loader.batch(0, 0)[0].shape[1:]
    model.eval()
    try:
        logits = model(torch.zeros(1, *shape, device=device))
    except RuntimeError as error:
        size = "x".join(map(str, shape))
        raise UserError(f"model: it does not take images of {size}: {' '.join(str(error).split())[:200]}") from None
    model.train()
    if logits.shape[1] < classes:
        raise UserError(f"model: classes={logits.shape[1]}, and the data has {classes}")
    order = loader.order
    single = order.batch == 1 or (order.count % order.batch == 1 and not order.drop_last)
    if single and any(isinstance(module, _BatchNorm) for module in model.modules()):
        raise UserError("data: a batch has one image, which BatchNorm cannot normalise; set data.drop_last=true")
