"""Load a packed file as a module that runs on the sparse kernels if they are faster, else on dense layers."""

from __future__ import annotations

import copy
import os
from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn

from equipoise.checks import as_path, require_precision
from equipoise.deploy.custom import read_custom
from equipoise.deploy.frozen import freeze, is_frozen
from equipoise.deploy.packed_file import read_packed
from equipoise.deploy.two_to_four import convert
from equipoise.errors import UserError
from equipoise.kernels.library import available
from equipoise.storage.pack import pack_masks
from equipoise.storage.packed_modules import packed


def load(
    path: str | os.PathLike[str],
    dense: bool = False,
    into: nn.Module | None = None,
    allow_code: bool = False,
    precision: str = "float32",
) -> nn.Module:
    """Load a network for inference, in eval mode on the CPU, or on the GPU if it was exported with `--format 2:4`.

    Sparse layers run on the kernels, dense layers at the ends of the network on torch. If dense layers are faster, or
    the kernels are not available, all layers are torch's. A network of `--format 2:4` takes and returns bf16 on the
    GPU. The file contains no code.

    Args:
        path: A file that `equipoise export` or `equipoise.save` wrote.
        dense: Whether to use torch's layers only, on the CPU.
        into: For a file of `equipoise.save`, the custom model as it was before packing. It is copied.
        allow_code: Whether to import a custom model that the file names, such as `package.nets:Net`.
        precision: Activations between sparse layers on the kernels, in batches of more than 16 images: `float32` or
            `bf16`. Input and output are float32.

    Raises:
        UserError: If the file is missing, damaged, or does not fit the model, or there is no such precision.
    """
    require_precision(precision)
    path = as_path(path)
    if into is not None:
        model = read_custom(path, into)
        # in another layout a custom forward may fail (`view`), or change a flattened copy in place
        return model if dense else with_kernels(model, torch.preserve_format, precision)
    found = read_packed(path, allow_code)
    if dense:
        network = found.model
    elif found.semi_structured:
        network = convert(found.model, found.semi_structured)
    else:
        network = with_kernels(found.model, precision=precision)
    network.register_forward_pre_hook(refuse_integers)
    return network


def refuse_integers(network: nn.Module, inputs: tuple[Any, ...]) -> None:
    """Raise for images of integers, which the network would take for pixels that are 255 times too bright."""
    for x in inputs:
        if isinstance(x, Tensor) and not x.is_floating_point():
            kind = str(x.dtype).removeprefix("torch.")
            raise UserError(f"the network takes pixels in [0, 1] as float32, not {kind}; give it images / 255")


def with_kernels(
    model: nn.Module, layout: torch.memory_format = torch.channels_last, precision: str = "float32"
) -> nn.Module:
    """Return a copy of a dense model on the sparse kernels if they are faster, else in a memory layout.

    The kernels are faster if sparse layers follow one another. Dense layers between them mean leaving the blocked
    layout and coming back, which costs more than it saves: VGG-C at 60 % took 4 times as long for one image as the
    dense model.

    Args:
        model: The dense model, with zeros.
        layout: Layout of the dense copy; the default is the fastest for torch.
        precision: As in `load`.
    """
    masks = sparse_masks(model) if available() else {}
    frozen = freeze(pack_masks(model, masks, precision)) if masks else None
    if frozen is not None and is_frozen(frozen):
        return frozen
    return copy.deepcopy(model).to(memory_format=layout)  # type: ignore[call-overload]


def sparse_masks(model: nn.Module) -> dict[str, Tensor]:
    """Return masks of the nonzeros of those layers that can run on the sparse kernels, and faster than on torch."""
    uses = Counter(id(weight) for _, weight in model.named_parameters(remove_duplicate=False))
    masks = {}
    for name, layer in model.named_modules():
        weight = getattr(layer, "weight", None)
        if name and isinstance(weight, Tensor) and weight.dim() > 1 and _fits(layer, uses):
            mask = weight != 0
            sparse = packed(layer, mask)
            if sparse is not None and not sparse.dense_in_blocks:
                masks[f"{name}.weight"] = mask
    return masks


def _fits(layer: nn.Module, uses: Counter[int]) -> bool:
    """Whether all parameters of a layer are float32 and not tied to others."""
    parameters = layer.parameters(recurse=False)
    return all(parameter.dtype is torch.float32 and uses[id(parameter)] == 1 for parameter in parameters)
