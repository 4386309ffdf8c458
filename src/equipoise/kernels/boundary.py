"""The boundary to C: the only module that passes addresses of tensors to the kernels; `planes` has those of arrays.

The kernels trust what they are given. A tensor is therefore checked before its address is taken: type, device, layout,
number of elements, and that every element which a kernel reads or writes lies inside the memory of the tensor. Indices
of active weights are checked once, when a `Pattern` is made of them.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from equipoise.errors import UserError
from equipoise.kernels.library import LANES, Map


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


def describe(tensor: Tensor, column_step: int = LANES) -> Map:
    """Describe a blocked activation (blocks, channels, height, width, lanes).

    Args:
        tensor: The activation.
        column_step: Floats from one column to the next.
    """
    check_type(tensor, "activation", torch.float32)
    if tensor.dim() != 5 or tensor.shape[4] != LANES:
        raise UserError(f"a blocked activation has 5 dimensions, the last of {LANES}, not {list(tensor.shape)}")
    *steps, one = tensor.stride()
    if one != 1 or (tensor.shape[3] > 1 and steps[3] != column_step):
        raise UserError(f"the lanes and columns of a blocked activation must be contiguous, not {tensor.stride()}")
    if tensor.numel():
        last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
        _check_inside(tensor, 0, last, "activation")
    return Map(tensor.data_ptr(), *tensor.shape[:4], *steps)


def describe_images(tensor: Tensor, shape: tuple[int, ...]) -> Map:
    """Describe plain images (images, channels, height, width) with any strides, for a blocked tensor of `shape`."""
    check_type(tensor, "images", torch.float32)
    if tensor.dim() != 4 or tensor.shape[1:] != shape[1:4] or tensor.shape[0] > shape[0] * LANES:
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
        reach: Smallest and largest offset of a tap from the position of an output.

    Raises:
        UserError: If a tap would read outside the memory of `x`.
    """
    described = describe(x)
    if x.shape[0] != out[0]:
        raise UserError(f"an input of {x.shape[0]} blocks does not fit an output of {out[0]}")
    described.sh *= stride[0]
    described.sw *= stride[1]
    if x.shape[1] and out.numel():  # an empty plane may have a border that is read
        last = (out[0] - 1) * described.sn + (out[2] - 1) * described.sh + (out[3] - 1) * described.sw
        _check_inside(x, reach[0], last + reach[1] + LANES - 1, "activation")
    return described


def _check_inside(tensor: Tensor, first: int, last: int, name: str) -> None:
    """Refuse a range of elements, counted from the first one of a tensor, that leaves the tensor's memory."""
    start = tensor.storage_offset()
    if start + first < 0 or (start + last + 1) * tensor.itemsize > tensor.untyped_storage().nbytes():
        raise UserError(f"a kernel would leave the memory of {name}, which has the shape {list(tensor.shape)}")


def versions(tensors: Iterable[Tensor]) -> list[tuple[int, int]]:
    """Return a list that changes if a tensor gets other memory or is written to."""
    return [(tensor.data_ptr(), tensor._version) for tensor in tensors]
