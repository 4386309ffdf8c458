"""Classify image files with an exported network."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from equipoise.data.image_files import centre_box, crop, decode
from equipoise.data.loader import unit
from equipoise.deploy.blueprint import Blueprint
from equipoise.errors import UserError, one_line

BATCH = 64


def predict(
    network: nn.Module, blueprint: Blueprint, paths: Sequence[Path], top: int = 1
) -> list[list[tuple[str, float]]]:
    """Return the most probable classes of each image, with their probabilities.

    Args:
        network: The network, as `equipoise.load` returns it.
        blueprint: Its description.
        paths: The image files.
        top: Number of classes per image.
    """
    found = []
    for begin in range(0, len(paths), BATCH):
        images = torch.stack([read_image(path, blueprint) for path in paths[begin : begin + BATCH]])
        with torch.inference_mode():
            values, labels = network(images).softmax(1).sort(1, descending=True)
        for row in zip(values[:, :top].tolist(), labels[:, :top].tolist(), strict=True):
            found.append([(class_name(blueprint, label), value) for value, label in zip(*row, strict=True)])
    return found


def read_image(path: Path, blueprint: Blueprint) -> Tensor:
    """Read an image file as the network saw its images in evaluations: float32 [C, H, W] in [0, 1].

    Raises:
        UserError: If the file cannot be read, or the network does not take square images.
    """
    shape = blueprint.input_shape
    if len(shape) != 3 or shape[1] != shape[2] or shape[0] not in (1, 3):
        raise UserError(f"the network takes inputs of {list(shape)}, not square images in colour or grey")
    image = decode(path)
    if shape[0] == 1:
        image = image.convert("L").convert("RGB")
    square = crop(image, centre_box(*image.size, zoom=blueprint.zoom), shape[1])
    return unit(square[: shape[0]])


def class_name(blueprint: Blueprint, label: int) -> str:
    """Return the name of a class, or its number if the file has no names."""
    names = blueprint.classes
    return one_line(names[label]) if label < len(names) else str(label)
