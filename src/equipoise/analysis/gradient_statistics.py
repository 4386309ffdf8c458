"""Variance of gradients over batches, and their correlation with gradients at other weights.

The same batches are run at the current weights (g_new) and at old ones (g_old): the weights of an earlier epoch, or
the current weights with Gaussian noise N(0, 0.015²), as the paper perturbs a trained checkpoint (the figure of its
introduction and its table of correlation by sparsity). All numbers are over active weights, biases and norms
included. Variances and covariances are over batches with ddof = 1 and summed over weights: the trace of the
covariance matrix.

The paper adds its noise "to all the weights". In a sparse network these are either the active weights, which are the
only ones that training changes, or all elements of the dense tensors (`everywhere`), which removes the sparsity: at
95 % sparsity, nineteen of twenty perturbed weights do not exist in the network. The results depend on this choice.

    variance of the corrected gradient at c:   Var(g_new) - 2c·Cov(g_new, g_old) + c²·Var(g_old)
    its minimum:                               c* = Cov(g_new, g_old) / Var(g_old)
    the paper's estimate of it from losses:    ĉ  = Cov(l(B|θ), l(B|θ̃)) / Var(l(B|θ̃)), clamped to [0, 1]

The paper does not define its correlation. It stores "the gradient of each weight on all training data", so
`correlation` is Pearson's over weights between the two mean gradients. Two others are reported with it:
`correlation_of_batches`, Cov / √(Var·Var) of the traces, is the correlation of the noise that a correction reduces;
`correlation_of_pairs` is Pearson's over weights between the two gradients of one batch, averaged over batches.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from equipoise.correction.active_vector import ActiveVector, SparseLayers
from equipoise.correction.batches import Batches, LossFunction, as_tuple, check_losses
from equipoise.correction.coefficient import Loss
from equipoise.correction.gradients import Gradients
from equipoise.correction.snapshot import RandomState, Snapshot, without_trace
from equipoise.errors import UserError
from equipoise.seeds import generator
from equipoise.topology import Topology
from equipoise.topology.selection import unwrap

NOISE = 0.015  # the paper's standard deviation
GAMMA = 0.1  # the paper's γ


class Traces(NamedTuple):
    """Var(g_new), Var(g_old) and Cov(g_new, g_old) over batches, summed over active weights."""

    new: float
    old: float
    covariance: float

    @property
    def c_star(self) -> float:
        """The c with the smallest variance; 0 if the old gradient does not vary."""
        return 0.0 if self.old == 0 else self.covariance / self.old

    def at(self, c: float) -> float:
        """Variance of g_new - c·(g_old - g̃)."""
        return self.new - 2 * c * self.covariance + c * c * self.old

    def left(self, c: float) -> float:
        """Variance at c as a fraction of Var(g_new); 1 if that is zero."""
        return 1.0 if self.new == 0 else self.at(c) / self.new


@dataclass(frozen=True)
class Measurement:
    """Statistics of one pass over the batches. A ratio is `None` if these batches do not define it.

    Attributes:
        batches: Number of batches measured.
        of: Number of batches in the dataset, from which these were sampled.
        weights: Number of active weights.
        by_layer: Traces by parameter name.
        norm: Mean over batches of ‖g_new‖.
        norm_of_mean: Norm of the mean over batches of g_new.
        correlation: Pearson's correlation over weights between the mean gradients.
        correlation_of_pairs: Pearson's correlation over weights between the gradients of a batch, averaged.
        c_hat: ĉ.
    """

    batches: int
    of: int
    weights: int
    by_layer: Mapping[str, Traces]
    norm: float
    norm_of_mean: float
    correlation: float | None
    correlation_of_pairs: float | None
    c_hat: float | None

    @property
    def traces(self) -> Traces:
        """Traces summed over all parameters."""
        return Traces(*(math.fsum(column) for column in zip(*self.by_layer.values(), strict=True)))

    @property
    def variance_relative(self) -> float | None:
        """Var(g) / ‖E g‖², or `None` if the batches are too few to separate the mean gradient from the noise.

        The mean of B of N batches has E‖mean‖² = ‖E g‖² + Var(g)·(1/B - 1/N); the last term is subtracted.
        """
        squared_norm = self.norm_of_mean**2 - self.traces.new * (1 / self.batches - 1 / self.of)
        return self.traces.new / squared_norm if squared_norm > 0 else None

    @property
    def correlation_of_batches(self) -> float | None:
        """Cov / √(Var·Var) of the traces."""
        scale = math.sqrt(self.traces.new) * math.sqrt(self.traces.old)
        return self.traces.covariance / scale if scale > 0 else None

    def variance_left(self, gamma: float = GAMMA) -> dict[str, float | None]:
        """Variance as a fraction of Var(g_new) at c = 0 (SGD), ĉ, γĉ (AGENT), c* and 1 (SVRG)."""
        scaled = None if self.c_hat is None else gamma * self.c_hat
        chosen = {"0": 0.0, "c_hat": self.c_hat, "gamma_c_hat": scaled, "c_star": self.traces.c_star, "1": 1.0}
        return {name: None if c is None else self.traces.left(c) for name, c in chosen.items()}

    @property
    def variance_left_by_layer(self) -> float:
        """Variance as a fraction of Var(g_new) if every parameter has its own c*."""
        left = math.fsum(layer.at(layer.c_star) for layer in self.by_layer.values())
        return 1.0 if self.traces.new == 0 else left / self.traces.new

    def report(self, gamma: float = GAMMA) -> dict[str, Any]:
        """All numbers as a dictionary, under the names of `equipoise measure`.

        The paper's "mean of the gradient variance" around an optimum is `variance_old / weights` with noise.
        """
        traces = self.traces
        return {
            "batches": self.batches,
            "of": self.of,
            "weights": self.weights,
            "variance": traces.new,
            "variance_old": traces.old,
            "variance_relative": self.variance_relative,
            "norm": self.norm,
            "norm_of_mean": self.norm_of_mean,
            "correlation": self.correlation,
            "correlation_of_batches": self.correlation_of_batches,
            "correlation_of_pairs": self.correlation_of_pairs,
            "c_star": traces.c_star,
            "c_star_by_layer": {name: layer.c_star for name, layer in self.by_layer.items()},
            "c_hat": self.c_hat,
            "gamma": gamma,
            "variance_left": self.variance_left(gamma),
            "variance_left_by_layer": self.variance_left_by_layer,
        }


def measure_gradients(
    model: nn.Module,
    loss_fn: LossFunction,
    batches: Batches,
    old: Mapping[str, Tensor] | None = None,
    *,
    noise: float = NOISE,
    everywhere: bool = False,
    topology: Topology | None = None,
    seed: int = 0,
    of: int | None = None,
) -> Measurement:
    """Run every batch at the current and at the old weights, and compute statistics of the gradients.

        model.train()
        found = measure_gradients(model, lambda model, x, y: cross_entropy(model(x), y), batches)
        found.correlation, found.traces.c_star, found.report()

    The model runs in its current mode, both passes of a batch with the same dropout masks. Its buffers and gradients
    and all random number streams are left unchanged. Memory is needed for the old weights and for a few numbers per
    active weight, independently of the number of batches.

    A weight that was grown after the old weights were saved has the old gradient at the value zero; in packed
    storage, which does not compute it, zero.

    Args:
        model: The model.
        loss_fn: Mean loss of a batch, called as `loss_fn(model, *batch)`.
        batches: Tuples of arguments for `loss_fn`, at least two.
        old: Weights by name, such as an earlier `state_dict()`; by default the current weights with noise.
        noise: Standard deviation of the noise.
        everywhere: Add the noise to inactive weights too.
        topology: By default the topology attached to the model, if any.
        seed: Seed of the noise.
        of: Number of batches in the dataset if `batches` is a sample. `correlation` is then partly that of the
            noise in the mean gradients.
    """
    vector = active_vector_of(model, topology)
    snapshot = perturbed(model, vector, noise, seed, everywhere) if old is None else snapshot_of(model, old)
    return measure_against(model, loss_fn, batches, [snapshot], vector, of)[0]


def measure_against(
    model: nn.Module,
    loss_fn: LossFunction,
    batches: Batches,
    snapshots: Sequence[Snapshot],
    vector: ActiveVector,
    of: int | None = None,
) -> list[Measurement]:
    """Like `measure_gradients`, with several snapshots of old weights and one pass at the current ones."""
    sums = [_Sums(vector) for _ in snapshots]
    passes = Gradients()
    with without_trace(model, vector.device):
        for batch in batches:
            arguments, random = as_tuple(batch), RandomState(vector.device)
            loss, gradient = passes.differentiate(loss_fn, model, arguments, vector)
            for snapshot, found in zip(snapshots, sums, strict=True):
                random.restore()
                with snapshot.at():
                    loss_old, old = passes.differentiate(loss_fn, model, arguments, vector)
                    found.see(gradient, old, loss, loss_old)
    names = list(_named_parameters(model, vector.topology))
    return [found.measurement(names, of) for found in sums]


def active_vector_of(model: nn.Module, topology: Topology | None = None) -> ActiveVector:
    """The active weights of all trainable parameters; the topology is by default the one attached to the model."""
    topology = Topology.only(model, topology)
    parameters = _named_parameters(model, topology)
    if not parameters:
        raise UserError("the model has no trainable parameter whose gradient could be measured")
    return ActiveVector(list(parameters.values()), topology)


def _named_parameters(model: nn.Module, topology: SparseLayers | None) -> dict[str, nn.Parameter]:
    """Trainable parameters; a sparse weight has the same name in both storages."""
    sparse = {id(layer.parameter): layer.name for layer in topology.layers} if topology else {}
    return {sparse.get(id(p), name): p for name, p in unwrap(model).named_parameters() if p.requires_grad}


@torch.no_grad()
def perturbed(
    model: nn.Module, vector: ActiveVector, noise: float = NOISE, seed: int = 0, everywhere: bool = False
) -> Snapshot:
    """The current weights with noise N(0, noise²) on active weights, or everywhere; the same on every device."""
    if not (noise >= 0 and math.isfinite(noise)):
        raise UserError(f"noise={noise} must be a standard deviation of at least 0; the paper uses {NOISE}")
    if everywhere and is_packed(vector):
        raise UserError("packed storage has no inactive weights to add noise to; use a model in masked storage")
    if everywhere:
        vector = ActiveVector(vector.parameters, vector.topology, every_index=True)
    snapshot = Snapshot(model)
    snapshot.take()
    drawn = torch.randn(vector.size, generator=generator(seed, "perturbation")).mul_(noise)
    moves = vector.unpack(drawn.to(vector.parameters[0].device))
    names = {id(p): name for name, p in unwrap(model).named_parameters()}
    for parameter, change in zip(vector.parameters, moves, strict=True):
        snapshot.tensors[names[id(parameter)]] += change.to(parameter.dtype)
    return snapshot


def is_packed(vector: ActiveVector) -> bool:
    return vector.topology is not None and any(layer.index is not None for layer in vector.topology.layers)


def snapshot_of(model: nn.Module, tensors: Mapping[str, Tensor]) -> Snapshot:
    """A snapshot of weights given by name; buffers that are not given are those of the model."""
    inner = unwrap(model)
    for name, _ in inner.named_parameters():
        if name not in tensors:
            raise UserError(f'the old weights have no "{name}"; they must be of the same model')
    snapshot = Snapshot(model)
    own = chain(inner.named_parameters(), inner.named_buffers())
    snapshot.load({name: tensors.get(name, tensor).detach() for name, tensor in own})
    return snapshot


class _Sums:
    """Means and products of deviations over the batches so far (Welford's algorithm), in float64 on the device."""

    def __init__(self, vector: ActiveVector) -> None:
        self._sizes = vector.sizes
        device = vector.parameters[0].device
        self._means = torch.zeros(2, vector.size, dtype=torch.float64, device=device)  # of g_new, of g_old
        self._products = torch.zeros(len(self._sizes), 3, dtype=torch.float64, device=device)
        self._rows: list[Tensor] = []  # for each batch: both losses, ‖g_new‖, Pearson's correlation over weights

    def see(self, new: Tensor, old: Tensor, loss: Tensor, loss_old: Tensor) -> None:
        pair = torch.stack([new, old]).double()
        self._rows.append(torch.stack([loss.double(), loss_old.double(), pair[0].norm(), _pearson(pair)]))
        seen = len(self._rows)
        deviation = pair.sub_(self._means)
        self._means.add_(deviation, alpha=1 / seen)
        found = torch.stack([_products(part) for part in deviation.split(self._sizes, dim=1)])
        self._products.add_(found, alpha=(seen - 1) / seen)

    def measurement(self, names: list[str], of: int | None) -> Measurement:
        seen = len(self._rows)
        if seen < 2:
            raise UserError(f"a variance over batches needs at least 2 batches, not {seen}")
        losses, losses_old, norms, pearsons = torch.stack(self._rows).unbind(1)
        check_losses(losses, "the measurement")
        estimator = Loss(smoothing=1.0).make()
        estimator.observe_losses(losses, losses_old)
        traces = self._products / (seen - 1)
        return Measurement(
            batches=seen,
            of=max(seen, of or 0),
            weights=sum(self._sizes),
            by_layer={name: Traces(*row) for name, row in zip(names, traces.tolist(), strict=True)},
            norm=float(norms.mean()),
            norm_of_mean=float(self._means[0].norm()),
            correlation=_known(_pearson(self._means)),
            correlation_of_pairs=_known(pearsons.nanmean()),
            c_hat=estimator.estimate,
        )


def _products(pair: Tensor) -> Tensor:
    """a·a, b·b and a·b of two rows a and b, without synchronisation."""
    a, b = pair
    return torch.stack([a.dot(a), b.dot(b), a.dot(b)])


def _pearson(pair: Tensor) -> Tensor:
    """Pearson's correlation of two rows over their columns; NaN if one of them is constant."""
    a, b = pair.mean(1)
    new, old, both = _products(pair) - pair.shape[1] * torch.stack([a * a, b * b, a * b])
    return both / (new.clamp(min=0).sqrt() * old.clamp(min=0).sqrt())


def _known(value: Tensor) -> float | None:
    number = float(value)
    return number if math.isfinite(number) else None
