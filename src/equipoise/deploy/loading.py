"""A packed file as a module that runs: sparse kernels where they win, dense layers elsewhere."""

from __future__ import annotations

import copy
import os
from collections import Counter
from pathlib import Path

import torch
from torch import Tensor, nn

from equipoise.deploy.custom import read_own
from equipoise.deploy.frozen import Frozen, freeze
from equipoise.deploy.packed_file import read_packed
from equipoise.kernels.library import available
from equipoise.storage.pack import pack_masks
from equipoise.storage.packed_modules import packed


def load(path: str | os.PathLike[str], dense: bool = False, into: nn.Module | None = None) -> nn.Module:
    """The network of a file that `equipoise export` wrote, in eval mode, on the CPU, for inference.

    into: a model of one's own, as it was before packing, whose weights `equipoise.save` wrote; it is copied.

    It runs with the sparse kernels, and with torch's own layers at its ends where those are dense. Where dense is
    faster, where the kernels are not available, or with `dense=True`, all layers are torch's. Nothing in the file is
    executed, and a file that is damaged in any way is refused with a `UserError`.
    """
    model = read_packed(Path(path)).model if into is None else read_own(Path(path), into)
    # in another layout a forward of one's own may fail (`view`), or change a copy in place and not what it flattened
    layout = torch.channels_last if into is None else torch.preserve_format
    return model if dense else with_kernels(model, layout)


def with_kernels(model: nn.Module, layout: torch.memory_format = torch.channels_last) -> nn.Module:
    """The dense model on the sparse kernels where they win, else in a layout: the default is the fastest for torch.

    They win where the sparse layers follow one another: dense ones in between mean leaving the blocked layout and
    coming back, which costs more than it saves (VGG-C at 60 % took 4 times as long for one image as when dense).
    """
    masks = sparse_masks(model) if available() else {}
    frozen = freeze(pack_masks(model, masks)) if masks else None
    if isinstance(frozen, Frozen):
        return frozen.eval()
    return copy.deepcopy(model).to(memory_format=layout)  # type: ignore[call-overload]


def sparse_masks(model: nn.Module) -> dict[str, Tensor]:
    """The nonzeros of those layers that the sparse kernels run, and faster than torch: not of tied weights, say."""
    uses = Counter(id(weight) for _, weight in model.named_parameters(remove_duplicate=False))
    masks = {}
    for name, layer in model.named_modules():
        weight = getattr(layer, "weight", None)
        if name and isinstance(weight, Tensor) and weight.dim() > 1 and _fits(layer, uses):
            mask = weight != 0
            sparse = packed(layer, mask)
            if sparse is not None and not sparse.dense:
                masks[f"{name}.weight"] = mask
    return masks


def _fits(layer: nn.Module, uses: Counter[int]) -> bool:
    """Whether all parameters of a layer are float32 and its own."""
    own = list(layer.parameters(recurse=False))
    return all(parameter.dtype is torch.float32 and uses[id(parameter)] == 1 for parameter in own)
