"""What a network costs: FLOPs by layer, dense and sparse, for inference and training, and passes over samples.

Conventions. A multiply-add is 2 FLOPs. Matrix products are counted (linear, convolution, transposed convolution,
attention); biases, norms, activations and pooling are not, nor are products a model writes without a module.
A sparse weight costs its density. The backward pass is two products of the forward's size, one for the gradient
of the input and one for that of the weight, so training costs three forwards: the convention of RigL (Evci et al.,
"Rigging the lottery", ICML 2020, appendix). `exact=True` leaves out the products autograd does not compute: the
input gradient of layers that nothing trainable comes before, and the weight gradient of frozen weights.
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
from equipoise.storage.packed_modules import PackedLayer


@dataclass(frozen=True)
class LayerCost:
    """FLOPs of one weight for the example input; `name` is the parameter's, or the module's where it has none."""

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
    *,
    exact: bool = False,
) -> list[LayerCost]:
    """FLOPs of every layer for `example_input` (a batch of one gives the cost of a sample), in order of use.

    `densities` gives the density of parameters by name, 1 where it has none; packed layers know theirs.
    `example_input` is what the model is called with, a tuple for several arguments. The model is run once in eval
    mode and left as it was.
    """
    names = dict(model.named_parameters(remove_duplicate=False))
    density = _by_parameter(names, densities or {})
    products: list[_Product] = []
    with _eval_mode(model), _hooked(model, products.append), torch.enable_grad():
        model(*(example_input if isinstance(example_input, tuple) else (example_input,)))
    return _merged(product.cost(density, exact) for product in products)


def total(costs: Iterable[LayerCost]) -> LayerCost:
    """The sum over the layers; its shape is the number of weights."""
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
class Passes:
    """Passes over samples: a batch of 128 run forward is 128.

    `sample_gradients` are the backward passes that gave the gradient of the weights; the others, as in an attack,
    gave only that of the input. `dense_gradients` are the sample gradients taken on all weights and not only on the
    active ones, as RigL's growth needs.
    """

    forward: int = 0
    backward: int = 0
    sample_gradients: int = 0
    dense_gradients: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.dense_gradients <= self.sample_gradients <= self.backward <= self.forward:
            raise UserError(f"{self} cannot be; dense gradients <= sample gradients <= backward <= forward")

    @classmethod
    def evaluation(cls, samples: int) -> Passes:
        """Forward only."""
        return cls(samples)

    @classmethod
    def training(cls, samples: int, dense: bool = False) -> Passes:
        """Forward and backward to the weights: the active ones, or all if `dense`."""
        return cls(samples, samples, samples, samples if dense else 0)

    @classmethod
    def attack(cls, samples: int, steps: int) -> Passes:
        """Forward and backward to the input, `steps` times."""
        return cls(samples * steps, samples * steps)

    def __add__(self, other: Passes) -> Passes:
        if not isinstance(other, Passes):
            return NotImplemented
        return Passes(
            self.forward + other.forward,
            self.backward + other.backward,
            self.sample_gradients + other.sample_gradients,
            self.dense_gradients + other.dense_gradients,
        )

    def __radd__(self, other: int) -> Passes:
        """Lets `sum` start from its 0."""
        return self if other == 0 else NotImplemented

    def dense_flops(self, sample: LayerCost) -> int:
        """FLOPs on a dense network; `sample` is the `total` of a batch of one."""
        return self._flops(sample.dense_forward, sample.dense_training)

    def sparse_flops(self, sample: LayerCost) -> int:
        """FLOPs when a sparse weight costs its density, in all but the dense gradients."""
        regrowth = self.dense_gradients * (sample.dense_forward - sample.sparse_forward)
        return self._flops(sample.sparse_forward, sample.sparse_training) + regrowth

    def _flops(self, forward: int, training: int) -> int:
        """An attack's backward pass is one product a layer and goes on to the input."""
        to_input = self.backward - self.sample_gradients
        return (self.forward - self.sample_gradients + to_input) * forward + self.sample_gradients * training


@dataclass(frozen=True)
class _Product:
    """One matrix product of a forward pass and which gradients autograd would want of it.

    A product of two activations has no weight: `input_gradient` then stands for both of its operands.
    """

    name: str
    kind: str
    weight: Tensor | None
    forward: int
    input_gradient: bool
    packed: PackedLayer | None = None

    def cost(self, density: Mapping[int, float], exact: bool) -> LayerCost:
        other_gradient = self.input_gradient if self.weight is None else self.weight.requires_grad
        products = 1 + self.input_gradient + other_gradient if exact else 3
        own = 1.0 if self.packed is None else self.packed.density
        sparse = round(self.forward * density.get(id(self.weight), own))
        shape = () if self.weight is None else tuple(self.weight.shape)
        shape = shape if self.packed is None else self.packed.weight_shape
        return LayerCost(
            self.name, self.kind, shape, self.forward, sparse, products * self.forward, products * sparse
        )


def _weighted(name: str, kind: str, weight: Tensor, given: Tensor, uses: int) -> _Product:
    """The product in which every element of `weight` is used `uses` times on `given`."""
    return _Product(name, kind, weight, 2 * weight.numel() * uses, given.requires_grad)


Arguments: TypeAlias = Mapping[str, Any]
Rule: TypeAlias = Callable[[str, Any, Arguments, Any], Iterator[_Product]]


def _linear(path: str, layer: nn.Linear, arguments: Arguments, output: Tensor) -> Iterator[_Product]:
    uses = output.numel() // layer.out_features
    yield _weighted(f"{path}weight", "linear", layer.weight, arguments["input"], uses)


def _convolution(path: str, layer: nn.Conv2d, arguments: Arguments, output: Tensor) -> Iterator[_Product]:
    kind, uses = type(layer).__name__.lower(), output.numel() // layer.out_channels
    yield _weighted(f"{path}weight", kind, layer.weight, arguments["input"], uses)


def _transposed(path: str, layer: nn.ConvTranspose2d, arguments: Arguments, _: Tensor) -> Iterator[_Product]:
    given, kind = arguments["input"], type(layer).__name__.lower()
    yield _weighted(f"{path}weight", kind, layer.weight, given, given.numel() // layer.in_channels)


def _attention(path: str, layer: nn.MultiheadAttention, arguments: Arguments, _: Any) -> Iterator[_Product]:
    """The projections of queries, keys and values, both products of the attention itself, and the way out."""
    given = [arguments[role] for role in ("query", "key", "value")]
    tokens = [tensor.numel() // tensor.shape[-1] for tensor in given]
    packed = layer.in_proj_weight
    weights = [packed] * 3 if packed is not None else [layer.q_proj_weight, layer.k_proj_weight, layer.v_proj_weight]
    leaves = ["in_proj_weight"] * 3 if packed is not None else [f"{letter}_proj_weight" for letter in "qkv"]
    flows = any(tensor.requires_grad for tensor in (*given, *weights))
    for weight, leaf, tensor, uses in zip(weights, leaves, given, tokens, strict=True):
        flops = 2 * layer.embed_dim * tensor.shape[-1] * uses  # a packed weight is used a third at a time
        yield _Product(f"{path}{leaf}", "attention", weight, flops, tensor.requires_grad)
    keys = arguments["key"].shape[1 if layer.batch_first and arguments["key"].dim() == 3 else 0]
    yield _Product(f"{path}scores", "attention", None, 4 * tokens[0] * keys * layer.embed_dim, flows)
    out = layer.out_proj.weight
    yield _Product(f"{path}out_proj.weight", "attention", out, 2 * out.numel() * tokens[0], flows)


def _packed(path: str, layer: PackedLayer, arguments: Arguments, output: Tensor | Blocked) -> Iterator[_Product]:
    """Counted as the layer that was packed, under the name of its weight; a packed weight knows its own density."""
    given, shape = arguments["x"], output.plain_shape if isinstance(output, Blocked) else output.shape
    flops = 2 * layer.shape.weight_numel * (math.prod(shape) // layer.shape.out_channels)
    flows = (given.data if isinstance(given, Blocked) else given).requires_grad
    kind = type(layer).__name__.removeprefix("Packed").lower()
    yield _Product(f"{path}weight", kind, layer.values, flops, flows, layer)


RULES: tuple[tuple[tuple[type[nn.Module], ...], Rule], ...] = (
    ((nn.Linear,), _linear),
    ((nn.Conv1d, nn.Conv2d, nn.Conv3d), _convolution),
    ((nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d), _transposed),
    ((nn.MultiheadAttention,), _attention),
    ((PackedLayer,), _packed),
)
"""How the products of a module are read off one call of it."""


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
        for kinds, rule in RULES
        if isinstance(module, kinds)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _eval_mode(model: nn.Module) -> Iterator[None]:
    """Eval mode, so that no running statistics or dropout mask is touched; then each module's own mode again."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def _by_parameter(parameters: Mapping[str, Tensor], densities: Mapping[str, float]) -> dict[int, float]:
    """Densities by the identity of the parameter, so that tied weights share theirs."""
    for name, density in densities.items():
        if name not in parameters:
            raise UserError(f'no parameter is called "{name}"; the names are those of model.named_parameters()')
        if not 0 <= density <= 1:
            raise UserError(f"the density of {name} is {density}; it must lie in [0, 1]")
    return {id(parameters[name]): density for name, density in densities.items()}


def _merged(costs: Iterable[LayerCost]) -> list[LayerCost]:
    """One entry a name: a weight used several times costs as often."""
    groups: dict[str, list[LayerCost]] = {}
    for cost in costs:
        groups.setdefault(cost.name, []).append(cost)
    return [
        replace(total(group), name=name, kind=group[0].kind, shape=group[0].shape) for name, group in groups.items()
    ]
