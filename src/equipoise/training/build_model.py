"""The model of a recipe, checked against its data."""

from __future__ import annotations

import warnings
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
from equipoise.training.recipe import MODEL_OPTIONS_OF_DATA, Recipe, model_defaults


def make_model(recipe: Recipe, splits: Splits) -> nn.Module:
    """The model for the classes, channels and image size of the data, normalising with the data's statistics.

    It has the pretrained weights of the recipe, if there are any.
    """
    size = splits.train.images.shape[-1] if isinstance(splits.train, Images) else None
    try:
        model = MODELS[recipe.model](
            **options_of_data(recipe.model, len(splits.classes), len(splits.mean), size) | dict(recipe.model_options)
        )
    except (UserError, RuntimeError, TypeError, MemoryError) as error:
        raise UserError(f"model: {' '.join(str(error).split())[:200]}") from None
    if not isinstance(model, nn.Module):
        raise UserError(f'model: "{recipe.model}" returned {type(model).__name__}, not a torch.nn.Module')
    if recipe.data.normalize:
        if isinstance(normalize := getattr(model, "normalize", None), Normalize):
            normalize.set(splits.mean, splits.std)
        else:
            warnings.warn(
                f'the model "{recipe.model}" has no layer `normalize` (equipoise.models.Normalize), so it is given '
                "pixels in [0, 1]; data.normalize=false says that this is intended",
                stacklevel=2,
            )
    if recipe.weights is not None:
        load_weights(model, Path(recipe.weights))
    return model


def options_of_data(model: str, classes: int, channels: int, size: int | None) -> dict[str, int]:
    """Return the options of a model that follow from the data, as far as the model has them."""
    values = zip(MODEL_OPTIONS_OF_DATA, (classes, classes, channels, channels, size), strict=True)
    known = parameters_of(MODELS[model])
    return {name: value for name, value in values if name in known and value is not None}


@torch.no_grad()
def check_fit(model: nn.Module, recipe: Recipe, loader: AnyLoader, classes: int, device: torch.device) -> None:
    """Run the model on one image, so that a model that cannot take it is refused before the run begins."""
    model.eval()
    try:
        logits = model(torch.zeros(1, *loader.image_shape, device=device))
    except RuntimeError as error:
        size = "x".join(map(str, loader.image_shape))
        side = (model_defaults(recipe.model) | dict(recipe.model_options)).get("size")
        if isinstance(loader, FolderLoader) and side not in (None, loader.size):
            message = f"model: {recipe.model} takes images of 3x{side}x{side}, not of {size}; set data.size={side}"
            raise UserError(message) from None
        raise UserError(f"model: it does not take images of {size}: {' '.join(str(error).split())[:200]}") from None
    model.train()
    if logits.shape[1] < classes:
        raise UserError(f"model: classes={logits.shape[1]}, and the data has {classes}")
    order = loader.order
    single = order.batch == 1 or (order.count % order.batch == 1 and not order.drop_last)
    if single and any(isinstance(module, _BatchNorm) for module in model.modules()):
        raise UserError("data: a batch has one image, which BatchNorm cannot normalise; set data.drop_last=true")
