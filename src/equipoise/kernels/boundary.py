"""The boundary to C: the only module that passes addresses of tensors to the kernels; `planes` has those of arrays.

The kernels trust what they are given. A tensor is therefore checked before its address is taken: type, device, layout,
number of elements, and that every element which a kernel reads or writes lies inside the memory of the tensor. Indices
of active weights are checked once, when a `Pattern` is made of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

import torch
from torch import Tensor

from equipoise.errors import UserError
from equipoise.kernels.library import LANES, Map

WORD = 4  # bytes, the unit of all steps in the kernels
_VERSION = attrgetter("_version")


def lanes(dtype: torch.dtype) -> int:
    """Return how many images of an activation lie side by side: 16 in float32, 32 in bfloat16.

    Raises:
        UserError: If the kernels have no activations of this type.
    """
    if dtype not in (torch.float32, torch.bfloat16):
        raise UserError(f"blocked activations are float32 or bfloat16, not {dtype}")
    return LANES * WORD // dtype.itemsize


def is_half(tensor: Tensor, *others: Tensor | None) -> bool:
    """Return whether the activations of one call of a kernel are stored in bfloat16.

    Raises:
        UserError: If they are of different types.
    """
    for other in others:
        if other is not None and other.dtype is not tensor.dtype:
            raise UserError(f"activations of {tensor.dtype} and {other.dtype} cannot be used together")
    return tensor.dtype is torch.bfloat16


def _word_steps(tensor: Tensor) -> list[int]:
    """Steps of a blocked activation in words of 4 bytes: from one block, channel, row and column to the next."""
    per_word = WORD // tensor.itemsize
    steps = tensor.stride()[:4]
    if any(step % per_word for step in (*steps, tensor.storage_offset())):
        raise UserError(f"the positions of a blocked activation must begin at whole words, not {tensor.stride()}")
    return [step // per_word for step in steps]


def check_type(tensor: Tensor, name: str, dtype: torch.dtype = torch.float32) -> None:
    """Refuse a tensor of another type, device or layout than the kernels read.

    Raises:
        UserError: If `tensor` is not a strided tensor of `dtype` on the CPU.
    """
    if tensor.dtype is not dtype or not tensor.is_cpu or tensor.layout is not torch.strided or tensor.is_neg():
        kind = f" ({tensor.layout})" if tensor.layout is not torch.strided else " (negated)" * tensor.is_neg()
        raise UserError(
            f"{name}: packed layers compute with {str(dtype).removeprefix('torch.')} on cpu, "
            f"not {tensor.dtype} on {tensor.device}{kind}; convert with .float() and .cpu(), or use masked storage"
        )


def address(tensor: Tensor | None, count: int, name: str, dtype: torch.dtype = torch.float32) -> int | None:
    """Return the address of a contiguous tensor; `None`, a null pointer, for `None`.

    Args:
        tensor: The tensor.
        count: Number of elements that the kernel expects.
        name: What an error calls the tensor.
        dtype: Type that the kernel expects.

    Raises:
        UserError: If the kernel would read or write anything else.
    """
    if tensor is None:
        return None
    check_type(tensor, name, dtype)
    if tensor.numel() != count:
        raise UserError(f"{name} has {tensor.numel()} elements; the kernel needs {count}")
    if not tensor.is_contiguous():
        raise UserError(f"{name} must be contiguous; it has the strides {tensor.stride()}")
    if count:
        _check_inside(tensor, 0, count - 1, name)
    return tensor.data_ptr()


def as_vector(tensor: Tensor | None, count: int, name: str) -> Tensor | None:
    """Return a vector of parameters in contiguous form; it may be expanded or strided.

    Raises:
        UserError: If it is not float32 on the CPU or has another number of elements.
    """
    if tensor is None:
        return None
    tensor = tensor.resolve_neg()
    check_type(tensor, name, torch.float32)
    if tensor.shape != (count,):
        raise UserError(f"{name} has the shape {list(tensor.shape)}; the layer needs [{count}]")
    return tensor.contiguous()


class Checked:
    """The description of a blocked activation that has been checked, for all tensors on the same memory.

    Args:
        tensor: The activation.
    """

    def __init__(self, tensor: Tensor) -> None:
        self.map = describe(tensor)
        self._geometry = tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()

    def describes(self, tensor: Tensor) -> bool:
        """Return whether a tensor still lies where this description was made."""
        return self._geometry == (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())


def describe(tensor: Tensor, column_step: int = LANES) -> Map:
    """Describe a blocked activation (blocks, channels, height, width, lanes).

    Args:
        tensor: The activation.
        column_step: Words from one column to the next.
    """
    checked = getattr(tensor, "checked", None)  # by the arena
    if isinstance(checked, Checked) and column_step == LANES and checked.describes(tensor):
        return checked.map
    side_by_side = lanes(tensor.dtype)
    check_type(tensor, "activation", tensor.dtype)
    if tensor.dim() != 5 or tensor.shape[4] != side_by_side:
        raise UserError(
            f"a blocked activation has 5 dimensions, the last of {side_by_side}, not {list(tensor.shape)}"
        )
    steps = _word_steps(tensor)
    if tensor.stride(4) != 1 or (tensor.shape[3] > 1 and steps[3] != column_step):
        raise UserError(f"the lanes and columns of a blocked activation must be contiguous, not {tensor.stride()}")
    if tensor.numel():
        last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
        _check_inside(tensor, 0, last, "activation")
    return Map(tensor.data_ptr(), *tensor.shape[:4], *steps)


def plane_steps(tensor: Tensor) -> tuple[int, int]:
    """Return the words from one channel and from one row of a blocked activation to the next."""
    described = describe(tensor)
    return described.sc, described.sh


def describe_images(tensor: Tensor, shape: tuple[int, ...]) -> Map:
    """Describe plain float32 images (images, channels, height, width), of any strides, for a blocked tensor."""
    check_type(tensor, "images", torch.float32)
    if tensor.dim() != 4 or tensor.shape[1:] != shape[1:4] or tensor.shape[0] > shape[0] * shape[4]:
        raise UserError(f"images of shape {list(tensor.shape)} do not fit a blocked activation of {list(shape)}")
    if tensor.numel():
        last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
        _check_inside(tensor, 0, last, "images")
    return Map(tensor.data_ptr(), *tensor.shape, *tensor.stride())


def describe_source(x: Tensor, out: torch.Size, stride: tuple[int, int], reach: tuple[int, int]) -> Map:
    """Describe the input of a convolution, with steps from one output position to the next.

    Args:
        x: The input.
        out: Shape of the output, blocked.
        stride: Rows and columns of `x` from one output position to the next.
        reach: Smallest and largest offset of a tap from the position of an output, in words.

    Raises:
        UserError: If a tap would read outside the memory of `x`.
    """
    described = Map.from_buffer_copy(describe(x))
    if x.shape[0] != out[0]:
        raise UserError(f"an input of {x.shape[0]} blocks does not fit an output of {out[0]}")
    described.sh *= stride[0]
    described.sw *= stride[1]
    if x.shape[1] and out.numel():  # an empty plane may have a border that is read
        last = (out[0] - 1) * described.sn + (out[2] - 1) * described.sh + (out[3] - 1) * described.sw
        per_word = WORD // x.itemsize
        _check_inside(x, reach[0] * per_word, (last + reach[1] + LANES) * per_word - 1, "activation")
    return described


def _check_inside(tensor: Tensor, first: int, last: int, name: str) -> None:
    """Refuse a range of elements, counted from the first one of a tensor, that leaves the tensor's memory."""
    start = tensor.storage_offset()
    if start + first < 0 or (start + last + 1) * tensor.itemsize > tensor.untyped_storage().nbytes():
        raise UserError(f"a kernel would leave the memory of {name}, which has the shape {list(tensor.shape)}")


def versions(tensors: Sequence[Tensor]) -> list[int]:
    """Return a list that changes if a tensor gets other memory or is written to."""
    return [*map(Tensor.data_ptr, tensors), *map(_VERSION, tensors)]  # no loop in Python: frozen models call it
