"""All parameters of an optimizer group as views of one vector."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

ALIGNMENT = 64  # elements: compiled kernels load aligned vectors at the start of every tensor


class FlatParameters:
    """Parameters laid out in one vector for each optimizer group.

    The parameters stay the tensors of the model; their data become views of a vector that the optimizer steps. One
    kernel then updates, masks or averages all of them. Each vector ends with `ALIGNMENT` elements that belong to no
    parameter: a target for writes that must have no effect.

    Args:
        groups: The trainable parameters of each optimizer group.
    """

    def __init__(self, groups: Sequence[Sequence[nn.Parameter]]) -> None:
        self.vectors: list[nn.Parameter] = []
        self._slots: dict[int, _Slot] = {}
        for number, group in enumerate(groups):
            end = 0
            for parameter in group:
                self._slots[id(parameter)] = _Slot(number, end, _is_channels_last(parameter))
                end += -(-parameter.numel() // ALIGNMENT) * ALIGNMENT
            self.vectors.append(self._lay_out(group, end + ALIGNMENT))

    @torch.no_grad()
    def _lay_out(self, group: Sequence[nn.Parameter], size: int) -> nn.Parameter:
        vector = nn.Parameter(group[0].new_zeros(size))
        for parameter in group:
            parameter.data = self.view(parameter, vector.data).copy_(parameter.data)
        return vector

    def vector_of(self, parameter: Tensor) -> nn.Parameter:
        """The vector that a parameter is a view of."""
        return self.vectors[self._slots[id(parameter)].group]

    def view(self, parameter: Tensor, vector: Tensor) -> Tensor:
        """The part of a tensor shaped like the parameter's vector that belongs to the parameter."""
        slot = self._slots[id(parameter)]
        part = vector[slot.start : slot.start + parameter.numel()]
        if not slot.channels_last:
            return part.view(parameter.shape)
        outputs, inputs, height, width = parameter.shape
        return part.view(outputs, height, width, inputs).permute(0, 3, 1, 2)

    def start(self, parameter: Tensor) -> int:
        """Position of a parameter's first element in its vector."""
        return self._slots[id(parameter)].start


class _Slot(NamedTuple):
    group: int
    start: int
    channels_last: bool


def _is_channels_last(tensor: Tensor) -> bool:
    """Whether the model keeps a weight in channels_last; 1x1 kernels are both, and cuDNN wants the strides."""
    fits = tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last)
    return fits and (tensor.is_cuda or not tensor.is_contiguous())
