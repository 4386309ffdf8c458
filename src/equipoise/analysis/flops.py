"""FLOPs of a network by layer, dense and sparse, for inference and training; and passes over samples.

A multiply-add is 2 FLOPs. Matrix products in modules are counted (linear, convolution, transposed convolution,
attention). Biases, norms, activations, pooling and products outside of modules are not. A sparse weight costs its
density. The backward pass is two products of the forward's size, one for the gradient of the input and one for that
of the weight, so training costs three forward passes, as in RigL (Evci et al., "Rigging the lottery", ICML 2020,
appendix).
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from equipoise.errors import UserError
from equipoise.kernels.blocked import Blocked
from equipoise.modules import preserved_modes, transformers_conv1d
from equipoise.storage.packed_modules import PackedLayer


@dataclass(frozen=True)
class LayerCost:
    """FLOPs of one weight for the example input.

    `name` is the name of the parameter. Products of two activations are named after their module and have an empty
    shape.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    dense_forward: int
    sparse_forward: int
    dense_training: int
    sparse_training: int


def count(
    model: nn.Module,
    example_input: Tensor | tuple[Any, ...],
    densities: Mapping[str, float] | None = None,
) -> list[LayerCost]:
    """FLOPs of every layer, in order of use. The model is run once in eval mode and left unchanged.

    Args:
        model: The network, in masked or packed storage.
        example_input: Argument of the model, or a tuple of arguments; a batch of one gives the cost of a sample.
        densities: Density of parameters by name; 1 by default. Packed layers have their own.
    """
    names = dict(model.named_parameters(remove_duplicate=False))
    density = _by_parameter(names, densities or {})
    products: list[_Product] = []
    # With gradients enabled, because the fused inference path of torch's transformer layers bypasses hooks.
    with preserved_modes(model), _hooked(model, products.append), torch.enable_grad():
        model.eval()(*(example_input if isinstance(example_input, tuple) else (example_input,)))
    return _merged(product.cost(density) for product in products)


def total(costs: Iterable[LayerCost]) -> LayerCost:
    """Sum over the layers; its shape is the number of weights."""
    costs = list(costs)

    def summed(field: str) -> int:
        return sum(getattr(cost, field) for cost in costs)

    return LayerCost(
        name="total",
        kind="total",
        shape=(sum(math.prod(cost.shape) for cost in costs if cost.shape),),
        dense_forward=summed("dense_forward"),
        sparse_forward=summed("sparse_forward"),
        dense_training=summed("dense_training"),
        sparse_training=summed("sparse_training"),
    )


@dataclass(frozen=True)
class SamplePasses:
    """Number of passes over samples: a forward pass over a batch of 128 counts as 128.

    Args:
        forward: Forward passes.
        backward: Backward passes.
        sample_gradients: Backward passes that computed the gradient of the weights; the others, as in an attack,
            computed only that of the input.
        dense_gradients: Sample gradients computed for all weights rather than the active ones, as RigL's growth
            requires.
    """

    forward: int = 0
    backward: int = 0
    sample_gradients: int = 0
    dense_gradients: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.dense_gradients <= self.sample_gradients <= self.backward <= self.forward:
            raise UserError(f"{self}: dense_gradients <= sample_gradients <= backward <= forward must hold")

    @classmethod
    def attack(cls, samples: int, steps: int) -> SamplePasses:
        """`steps` forward passes and as many backward passes to the input."""
        return cls(samples * steps, samples * steps)

    def __add__(self, other: SamplePasses) -> SamplePasses:
        if not isinstance(other, SamplePasses):
            return NotImplemented
        return SamplePasses(
            self.forward + other.forward,
            self.backward + other.backward,
            self.sample_gradients + other.sample_gradients,
            self.dense_gradients + other.dense_gradients,
        )

    def dense_flops(self, sample: LayerCost) -> int:
        """FLOPs of a dense network; `sample` is the `total` for a batch of one."""
        return self._flops(sample.dense_forward, sample.dense_training)

    def sparse_flops(self, sample: LayerCost) -> int:
        """FLOPs if a sparse weight costs its density, except in dense gradients."""
        regrowth = self.dense_gradients * (sample.dense_forward - sample.sparse_forward)
        return self._flops(sample.sparse_forward, sample.sparse_training) + regrowth

    def _flops(self, forward: int, training: int) -> int:
        """A backward pass to the input is one product per layer."""
        to_input = self.backward - self.sample_gradients
        return (self.forward - self.sample_gradients + to_input) * forward + self.sample_gradients * training


@dataclass(frozen=True)
class _Product:
    """One matrix product of a forward pass; `weight` is None for a product of two activations."""

    name: str
    kind: str
    weight: Tensor | None
    flops: int
    packed: PackedLayer | None = None

    def cost(self, density: Mapping[int, float]) -> LayerCost:
        own = 1.0 if self.packed is None else self.packed.density
        sparse = round(self.flops * density.get(id(self.weight), own))
        shape = () if self.weight is None else tuple(self.weight.shape)
        shape = shape if self.packed is None else self.packed.weight_shape
        return LayerCost(self.name, self.kind, shape, self.flops, sparse, 3 * self.flops, 3 * sparse)


Arguments: TypeAlias = Mapping[str, Any]
Rule: TypeAlias = Callable[[str, Any, Arguments, Any], Iterator[_Product]]


def _layer(path: str, layer: Any, arguments: Arguments, output: Tensor) -> Iterator[_Product]:
    """A linear layer or a convolution, whose weight is used for every position of the output."""
    conv1d = isinstance(layer, transformers_conv1d())  # a linear layer whose weight has shape (inputs, outputs)
    uses = output.numel() // layer.weight.shape[1 if conv1d else 0]
    kind = "linear" if conv1d or isinstance(layer, nn.Linear) else type(layer).__name__.lower()
    yield _Product(f"{path}weight", kind, layer.weight, 2 * layer.weight.numel() * uses)


def _transposed(path: str, layer: nn.ConvTranspose2d, arguments: Arguments, _: Tensor) -> Iterator[_Product]:
    uses = arguments["input"].numel() // layer.in_channels
    yield _Product(f"{path}weight", type(layer).__name__.lower(), layer.weight, 2 * layer.weight.numel() * uses)


def _attention(path: str, layer: nn.MultiheadAttention, arguments: Arguments, _: Any) -> Iterator[_Product]:
    """Projections of queries, keys and values, both products of the attention itself, and the output projection."""
    given = [arguments[role] for role in ("query", "key", "value")]
    tokens = [tensor.numel() // tensor.shape[-1] for tensor in given]
    joint = layer.in_proj_weight is not None
    leaves = ["in_proj_weight"] * 3 if joint else [f"{letter}_proj_weight" for letter in "qkv"]
    for leaf, tensor, uses in zip(leaves, given, tokens, strict=True):
        flops = 2 * layer.embed_dim * tensor.shape[-1] * uses  # a third of a joint weight for each of the three
        yield _projection(
            f"{path}{leaf}", getattr(layer, leaf.removesuffix("_weight"), None), getattr(layer, leaf), flops
        )
    keys = arguments["key"].shape[1 if layer.batch_first and arguments["key"].dim() == 3 else 0]
    yield _Product(f"{path}scores", "attention", None, 4 * tokens[0] * keys * layer.embed_dim)
    out = layer.out_proj.weight
    yield _projection(f"{path}out_proj.weight", layer.out_proj, out, 2 * out.numel() * tokens[0])


def _projection(name: str, layer: object, weight: Tensor, flops: int) -> _Product:
    packed = layer if isinstance(layer, PackedLayer) else None
    return _Product(name, "attention", weight if packed is None else packed.values, flops, packed)


def _packed(path: str, layer: PackedLayer, arguments: Arguments, output: Tensor | Blocked) -> Iterator[_Product]:
    """Counted like the layer before packing, under the name of its weight."""
    shape = output.plain_shape if isinstance(output, Blocked) else output.shape
    flops = 2 * layer.shape.weight_numel * (math.prod(shape) // layer.shape.out_channels)
    kind = type(layer).__name__.removeprefix("Packed").lower()
    yield _Product(f"{path}weight", kind, layer.values, flops, layer)


RULES: tuple[tuple[tuple[type[nn.Module], ...], Rule], ...] = (
    ((nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d), _layer),
    ((nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d), _transposed),
    ((nn.MultiheadAttention,), _attention),
    ((PackedLayer,), _packed),
)
"""The rules that derive the products of a module from one call of it."""


@contextmanager
def _hooked(model: nn.Module, record: Callable[[_Product], None]) -> Iterator[None]:
    """Record the products of every call of a module that has a rule."""

    def listen(path: str, module: nn.Module, rule: Rule) -> RemovableHandle:
        signature = inspect.signature(module.forward)

        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            for product in rule(path, module, signature.bind(*args, **kwargs).arguments, output):
                record(product)

        return module.register_forward_hook(hook, with_kwargs=True)

    handles = [
        listen(f"{name}." if name else "", module, rule)
        for name, module in model.named_modules()
        for kinds, rule in (*RULES, (transformers_conv1d(), _layer))
        if isinstance(module, kinds)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _by_parameter(parameters: Mapping[str, Tensor], densities: Mapping[str, float]) -> dict[int, float]:
    """Densities by the id of the parameter, so that tied weights share one."""
    for name, density in densities.items():
        if name not in parameters:
            raise UserError(f'no parameter is called "{name}"; the names are those of model.named_parameters()')
        if not 0 <= density <= 1:
            raise UserError(f"the density of {name} is {density}; it must be in [0, 1]")
    return {id(parameters[name]): density for name, density in densities.items()}


def _merged(costs: Iterable[LayerCost]) -> list[LayerCost]:
    """Sum the costs of each name: a weight may be used several times."""
    groups: dict[str, list[LayerCost]] = {}
    for cost in costs:
        groups.setdefault(cost.name, []).append(cost)
    return [
        replace(total(group), name=name, kind=group[0].kind, shape=group[0].shape) for name, group in groups.items()
    ]
