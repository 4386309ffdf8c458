"""Run 2:4 weights on a GPU with torch's semi-structured tensors. Layers that are faster dense stay dense."""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.sparse import to_sparse_semi_structured

from equipoise.deploy.blueprint import Network
from equipoise.deploy.fold import fold
from equipoise.deploy.packed_file import write_packed
from equipoise.errors import UserError

Pair = tuple[int, int]
IMAGES = 128  # that the layers of an exported network are timed with
OUTPUTS, INPUTS = 32, 64  # torch's kernels take weight matrices whose sides are multiples of these
WARM, REPEATS, CALLS = 2, 9, 10


@dataclass(frozen=True)
class Timing:
    """Milliseconds of a layer with a 2:4 weight.

    Attributes:
        name: Name of the layer.
        dense: With the dense weight.
        sparse: With the semi-structured weight.
    """

    name: str
    dense: float
    sparse: float


class SemiLinear(nn.Module):
    """A Linear whose weight is a semi-structured tensor.

    Args:
        layer: The dense layer.
        compress: Makes a semi-structured tensor of a 2:4 matrix.
    """

    def __init__(self, layer: nn.Linear, compress: Callable[[Tensor], Tensor] = to_sparse_semi_structured) -> None:
        super().__init__()
        self.weight = nn.Parameter(compress(as_matrix(layer.weight.detach())), requires_grad=False)
        self.bias = layer.bias

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class SemiConv2d(nn.Module):
    """A Conv2d whose weight is a semi-structured tensor.

    The weight is multiplied with patches of the input. With a 1x1 kernel the channels_last input is the matrix of
    patches. A larger kernel copies the input once for each of its positions.

    Args:
        layer: The dense layer.
        compress: Makes a semi-structured tensor of a 2:4 matrix.
    """

    def __init__(self, layer: nn.Conv2d, compress: Callable[[Tensor], Tensor] = to_sparse_semi_structured) -> None:
        super().__init__()
        window = (layer.kernel_size, layer.stride, layer.padding, layer.dilation)
        self.window = cast("tuple[Pair, Pair, Pair, Pair]", window)
        self.weight = nn.Parameter(compress(as_matrix(layer.weight.detach())), requires_grad=False)
        self.bias = layer.bias

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(patches(x, *self.window), self.weight, self.bias).permute(0, 3, 1, 2)


def as_matrix(weight: Tensor) -> Tensor:
    """Return a weight as a matrix of outputs x (rows, columns, inputs), in which 2:4 along inputs is 2:4 along rows."""
    return weight.movedim(1, -1).flatten(1).contiguous()


def patches(x: Tensor, kernel: Pair, stride: Pair, padding: Pair, dilation: Pair) -> Tensor:
    """Return what a convolution reads, as (images, height, width, rows x columns x channels)."""
    x = F.pad(x.permute(0, 2, 3, 1), (0, 0, padding[1], padding[1], padding[0], padding[0])).contiguous()
    images, *size, channels = x.shape
    high, wide = ((s - d * (k - 1) - 1) // t + 1 for s, k, t, d in zip(size, kernel, stride, dilation, strict=True))
    sn, sh, sw, sc = x.stride()
    steps = (sn, sh * stride[0], sw * stride[1], sh * dilation[0], sw * dilation[1], sc)
    return x.as_strided((images, high, wide, *kernel, channels), steps).reshape(images, high, wide, -1)


def is_two_to_four(weight: Tensor) -> bool:
    """Return whether at most 2 of every 4 inputs of an output are nonzero, at each position of the kernel."""
    if weight.dim() < 2 or weight.shape[1] % 4 or not weight.numel():
        return False
    return int((weight != 0).movedim(1, -1).unflatten(-1, (-1, 4)).sum(-1).max()) <= 2


def convert(model: nn.Module, names: Iterable[str], dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    """Return a copy of a model on the GPU, in eval mode, with semi-structured weights in the named layers.

    Args:
        model: A dense model with 2:4 weights.
        names: Names of the Linear and Conv2d layers to convert.
        dtype: Type of weights and activations.

    Raises:
        UserError: If there is no GPU, or a layer cannot be converted.
    """
    check_gpu()
    model = _on_gpu(model, dtype)
    candidates = convertible(model)
    for name in names:
        if name not in candidates:
            raise UserError(f'"{name}" is no Linear or Conv2d with a 2:4 weight that torch can compress')
        _replace(model, name, _semi_structured(candidates[name]))
    return model


def time_layers(model: nn.Module, example: Tensor, dtype: torch.dtype = torch.bfloat16) -> list[Timing]:
    """Time every layer with a 2:4 weight, dense and semi-structured, on the inputs that it gets from `example`.

    Args:
        model: A dense model with 2:4 weights.
        example: A batch.
        dtype: Type of weights and activations.

    Raises:
        UserError: If there is no GPU, or no layer has a 2:4 weight.
    """
    check_gpu()
    model = _on_gpu(model, dtype)
    layers = convertible(model)
    if not layers:
        raise UserError("no Linear or Conv2d has a 2:4 weight; train with topology.pattern=2:4 topology.sparsity=0.5")
    inputs: dict[str, Tensor] = {}
    hooks = [
        layer.register_forward_pre_hook(lambda _, args, name=name: inputs.__setitem__(name, args[0]))
        for name, layer in layers.items()
    ]
    timings = []
    with torch.inference_mode():
        model(example.to("cuda", dtype))
        for hook in hooks:
            hook.remove()
        for name, x in inputs.items():
            layer, sparse = layers[name], _semi_structured(layers[name])
            timings.append(Timing(name, milliseconds(layer, x), milliseconds(sparse, x)))
    return timings


def semi_structured(model: nn.Module, example: Tensor, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    """Return a copy of a model on the GPU with semi-structured weights in those layers that are faster with them.

    Args:
        model: A dense model with 2:4 weights, such as one trained with `pattern="2:4"`.
        example: A batch of the size that the model will get: the choice depends on it.
        dtype: Type of weights and activations.

    Raises:
        UserError: If there is no GPU, or no layer has a 2:4 weight.
    """
    faster = [timing.name for timing in time_layers(model, example, dtype) if timing.sparse < timing.dense]
    return convert(model, faster, dtype)


def write_semi_structured(network: Network, path: Path, values: str = "bf16") -> None:
    """Write a packed file that `equipoise.load` runs with semi-structured tensors, in the layers that gain by them.

    Args:
        network: The network.
        path: The file.
        values: Type of the weights, `bf16`.

    Raises:
        UserError: If there is no GPU to time the layers on, or no layer has a 2:4 weight.
    """
    check_gpu()
    model = network.build()
    fold(model)
    timings = time_layers(model, torch.rand(IMAGES, *network.blueprint.input_shape))
    write_packed(network, path, values, [timing.name for timing in timings if timing.sparse < timing.dense])


def check_gpu() -> None:
    """Raise a `UserError` unless there is a GPU with kernels for 2:4 weights."""
    if not torch.cuda.is_available():
        raise UserError("2:4 needs an NVIDIA GPU of compute capability 8.0 or later; --format packed runs on a CPU")
    if torch.cuda.get_device_capability() < (8, 0):
        name = torch.cuda.get_device_name()
        raise UserError(f"2:4 needs a GPU of compute capability 8.0 or later, which {name} is not")


def convertible(model: nn.Module) -> dict[str, nn.Linear | nn.Conv2d]:
    """Return the layers with a 2:4 weight of a shape that torch can compress, by name."""
    return {
        name: layer
        for name, layer in model.named_modules()
        if name and isinstance(layer, nn.Linear | nn.Conv2d) and _has_kernel(layer) and is_two_to_four(layer.weight)
    }


def _has_kernel(layer: nn.Linear | nn.Conv2d) -> bool:
    if isinstance(layer, nn.Conv2d) and (
        layer.groups != 1 or layer.padding_mode != "zeros" or isinstance(layer.padding, str)
    ):
        return False
    outputs, inputs = layer.weight.shape[0], layer.weight[0].numel()
    return type(layer) in (nn.Linear, nn.Conv2d) and outputs % OUTPUTS == 0 and inputs % INPUTS == 0


def _semi_structured(layer: nn.Linear | nn.Conv2d) -> nn.Module:
    return SemiLinear(layer) if isinstance(layer, nn.Linear) else SemiConv2d(layer)


def _on_gpu(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    model = copy.deepcopy(model).eval().requires_grad_(False)
    return model.to("cuda", dtype).to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def _replace(model: nn.Module, name: str, layer: nn.Module) -> None:
    path, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(path), leaf, layer)


def milliseconds(run: Callable[[Tensor], object], x: Tensor) -> float:
    """Return the median milliseconds of a run on the GPU, of several queued at a time: launching them counts less."""
    times = []
    for _ in range(WARM + REPEATS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(CALLS):
            run(x)
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / CALLS)
    return statistics.median(times[WARM:])
