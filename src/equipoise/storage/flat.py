"""All parameters of a model as views of one vector."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

ALIGNMENT = 64  # elements: compiled kernels load aligned vectors at the start of every tensor


class FlatParameters:
    """Parameters and their gradients in one vector each, with one stretch for each optimizer group.

    The parameters stay the tensors of the model; their data become views of the vector. The optimizer steps the
    stretches, so that one kernel updates, masks or averages all weights of a group. Each stretch ends with `ALIGNMENT`
    elements that belong to no parameter: a target for writes that must have no effect.

    Args:
        groups: The trainable parameters of each optimizer group.

    Attributes:
        stretches: The tensors that the optimizer steps; their `.grad` are parts of `gradient`.
        gradient: The gradient of all parameters.
    """

    def __init__(self, groups: Sequence[Sequence[nn.Parameter]]) -> None:
        self._slots: dict[int, _Slot] = {}
        begins, end = [], 0
        for number, group in enumerate(groups):
            begins.append(end)
            for parameter in group:
                self._slots[id(parameter)] = _Slot(number, end - begins[-1], _is_channels_last(parameter))
                end += -(-parameter.numel() // ALIGNMENT) * ALIGNMENT
            end += ALIGNMENT
        vector = groups[0][0].detach().new_zeros(end)
        self.gradient = torch.zeros_like(vector)
        self._begins = begins
        parts = [slice(begin, stop) for begin, stop in zip(begins, [*begins[1:], end], strict=True)]
        self.stretches = [nn.Parameter(vector[part]) for part in parts]
        for stretch, part in zip(self.stretches, parts, strict=True):
            stretch.grad = self.gradient[part]
        for parameter in (p for group in groups for p in group):
            parameter.data = self.view(parameter, self.stretch_of(parameter).data).copy_(parameter.data)

    def stretch_of(self, parameter: Tensor) -> nn.Parameter:
        """The stretch that a parameter is a view of."""
        return self.stretches[self._slots[id(parameter)].group]

    def view(self, parameter: Tensor, tensor: Tensor) -> Tensor:
        """View of the elements of a parameter in a tensor shaped like its stretch."""
        slot = self._slots[id(parameter)]
        return _shaped(tensor[slot.start : slot.start + parameter.numel()], parameter.shape, slot.channels_last)

    def start(self, parameter: Tensor) -> int:
        """Index of the first element of a parameter in its stretch."""
        return self._slots[id(parameter)].start

    def gradient_of(self, parameter: Tensor) -> Tensor:
        """The gradient of a parameter, in its shape."""
        grad = self.stretch_of(parameter).grad
        assert grad is not None
        return self.view(parameter, grad)

    def positions(self, parameter: Tensor) -> Tensor:
        """Indices of the elements of a parameter in the vector of all parameters, in the order of its flat indices."""
        slot = self._slots[id(parameter)]
        first = self._begins[slot.group] + slot.start
        numbers = torch.arange(first, first + parameter.numel(), device=parameter.device, dtype=torch.int32)
        return _shaped(numbers, parameter.shape, slot.channels_last).reshape(-1)


class _Slot(NamedTuple):
    group: int
    start: int
    channels_last: bool


def _shaped(part: Tensor, shape: torch.Size, channels_last: bool) -> Tensor:
    """View a part of a vector in the shape and memory format of a parameter."""
    if not channels_last:
        return part.view(shape)
    outputs, inputs, height, width = shape
    return part.view(outputs, height, width, inputs).permute(0, 3, 1, 2)


def _is_channels_last(tensor: Tensor) -> bool:
    """Whether to lay out a weight in channels_last.

    A 1x1 kernel is contiguous in both formats, and cuDNN chooses by the strides.
    """
    fits = tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last)
    return fits and (tensor.is_cuda or not tensor.is_contiguous())
