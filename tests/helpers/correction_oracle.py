"""An independent oracle: a tiny model with its gradient, and every correction, written in numpy in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from equipoise.correction import Correction
from equipoise.topology import Topology

Array = NDArray[np.float64]
Batch = tuple[Tensor, Tensor]

INPUTS, HIDDEN, CLASSES = 6, 5, 3
SHAPES = {
    "first.weight": (HIDDEN, INPUTS),
    "first.bias": (HIDDEN,),
    "last.weight": (CLASSES, HIDDEN),
    "last.bias": (CLASSES,),
}
SIZES = [int(np.prod(shape)) for shape in SHAPES.values()]
LAYERS = [slice(a, b) for a, b in zip(np.cumsum([0, *SIZES[:-1]]), np.cumsum(SIZES), strict=True)]


class Perceptron(nn.Module):
    """6 inputs, 5 tanh units, 3 classes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(INPUTS, HIDDEN)
        self.last = nn.Linear(HIDDEN, CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(inputs)))


def perceptron(seed: int = 0) -> Perceptron:
    torch.manual_seed(seed)
    return Perceptron().double()


def cross_entropy(model: nn.Module, inputs: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(model(inputs), labels)


def make_batches(count: int = 5, size: int = 4, seed: int = 0, dtype: torch.dtype = torch.float64) -> list[Batch]:
    """Fixed batches; the last one is smaller, as it is in most datasets."""
    generator = torch.Generator().manual_seed(seed)
    sizes = [size] * (count - 1) + [max(size - 1, 2)]
    return [
        (
            torch.randn(n, INPUTS, generator=generator, dtype=torch.float64).to(dtype),
            torch.randint(CLASSES, (n,), generator=generator),
        )
        for n in sizes
    ]


# The model and its gradient in numpy


def vector_of(model: nn.Module) -> Array:
    """All weights as one vector, in the model's order."""
    return np.concatenate([p.detach().numpy().ravel() for p in model.parameters()])


def gradient_of(model: nn.Module) -> Array:
    """All of `.grad` as one vector."""
    return np.concatenate(
        [(torch.zeros_like(p) if p.grad is None else p.grad).numpy().ravel() for p in model.parameters()]
    )


def active_of(model: nn.Module, topology: Topology | None) -> NDArray[np.bool_]:
    """True for active weights; biases always are."""
    masks = {} if topology is None else topology.masks
    return np.concatenate(
        [
            masks[name].numpy().ravel() if name in masks else np.ones(p.numel(), dtype=bool)
            for name, p in model.named_parameters()
        ]
    )


def loss_and_gradient(theta: Array, batch: Batch) -> tuple[float, Array]:
    """Mean softmax cross-entropy of the perceptron and its derivative."""
    w1, b1, w2, b2 = (theta[s].reshape(shape) for s, shape in zip(LAYERS, SHAPES.values(), strict=True))
    x, y = batch[0].double().numpy(), batch[1].numpy()
    hidden = np.tanh(x @ w1.T + b1)
    logits = hidden @ w2.T + b2
    logits = logits - logits.max(1, keepdims=True)
    log_sum = np.log(np.exp(logits).sum(1))
    n = len(y)
    loss = float((log_sum - logits[np.arange(n), y]).mean())
    at_logits = np.exp(logits - log_sum[:, None])
    at_logits[np.arange(n), y] -= 1
    at_logits /= n
    at_hidden = (at_logits @ w2) * (1 - hidden**2)
    parts = [at_hidden.T @ x, at_hidden.sum(0), at_logits.T @ hidden, at_logits.sum(0)]
    return loss, np.concatenate([part.ravel() for part in parts])


def gradient(theta: Array, batch: Batch) -> Array:
    return loss_and_gradient(theta, batch)[1]


# The corrections in numpy, from the formulas, with dense vectors and masks


@dataclass
class LossRule:
    """c_hat = Cov(l(B|now), l(B|before)) / Var(l(B|before)), ddof 1, in [0, 1]; c = (1 - alpha) c + alpha c_hat."""

    alpha: float = 0.3
    clamp: bool = True
    c: float = 0.0

    def compare(self, now: Sequence[float], before: Sequence[float]) -> None:
        found = np.cov(now, before, ddof=1)
        c_hat = found[0, 1] / found[1, 1]
        self.c = (1 - self.alpha) * self.c + self.alpha * (np.clip(c_hat, 0, 1) if self.clamp else c_hat)

    def weights(self) -> Array:
        return np.full(sum(SIZES), self.c)


@dataclass
class GradientRule:
    """c = averaged (g_new - g)(g_old - g) / averaged (g_old - g)^2, one for all or one per parameter."""

    beta: float = 0.95
    per_layer: bool = False
    seen: int = 0
    moments: list[Array] | None = None

    def see(self, new: Array, old: Array, reference: Array, where: NDArray[np.bool_], noise: float = 0.0) -> None:
        product = np.where(where, (new - reference) * (old - reference), 0)
        square = np.where(where, (old - reference) ** 2, 0)
        layers = LAYERS if self.per_layer else [slice(None)]
        variance = np.array([square[s].sum() for s in layers])
        pair = [np.array([product[s].sum() for s in layers]) - noise * variance, variance]
        self.seen += 1
        newest = max(1 - self.beta, 1 / self.seen)
        self.moments = (
            pair
            if self.moments is None
            else [(1 - newest) * m + newest * p for m, p in zip(self.moments, pair, strict=True)]
        )

    def restart(self) -> None:
        self.seen = min(self.seen, 1)

    def weights(self) -> Array:
        if self.moments is None:
            return np.zeros(sum(SIZES))
        c = np.clip(self.moments[0] / self.moments[1], 0, 1)
        return np.repeat(c, SIZES) if self.per_layer else np.full(sum(SIZES), c[0])


@dataclass
class Oracle:
    """A correction. `rule` is a number, a function of the step, or a rule for the coefficient."""

    mode: str
    rule: Any
    gamma: float = 1.0
    fraction: Sequence[Sequence[int]] | None = None  # the batches of g̃ at each refresh; None: all
    every_index: bool = False
    snapshot: Any = None  # θ̃, a vector
    was_active: Any = None  # at the snapshot
    known: Any = None  # where the table of SAGA has values
    reference: Any = None  # g̃, or its estimate
    steps: int = 0
    refreshes: int = 0
    earlier: list[Array] = field(default_factory=list)
    table: dict[int, Array] = field(default_factory=dict)
    pairs: list[tuple[float, float]] = field(default_factory=list)

    def refresh(self, theta: Array, active: NDArray[np.bool_], batches: list[Batch]) -> None:
        before = self.snapshot
        if isinstance(self.rule, GradientRule):
            self.rule.restart()
        if isinstance(self.rule, LossRule):
            if self.mode in ("recompute", "replay") and before is not None:
                chosen = [batches[i] for i in self._chosen(len(batches))]
                losses = [[loss_and_gradient(at, b)[0] for b in chosen] for at in (theta, before)]
                self.rule.compare(*losses)
            elif len(self.pairs) > 1:
                self.rule.compare(*zip(*self.pairs, strict=True))
            self.pairs = []
        if self.mode in ("recompute", "replay"):
            used = [batches[i] for i in self._chosen(len(batches))]
            self.reference = np.mean([gradient(theta, b) for b in used], axis=0)
        if self.mode == "table":
            known = active if self.was_active is None else active & self.was_active
            self.table = {i: np.where(known, row, 0) for i, row in self.table.items()}
            complete = len(self.table) == len(batches)
            self.reference = np.mean(list(self.table.values()), axis=0) if complete else None
            self.known = known
        if self.mode != "previous" or before is None:
            self.snapshot = theta.copy()
            self.earlier = []
            self.was_active = active.copy()
        self.refreshes += 1

    def _chosen(self, count: int) -> Sequence[int]:
        return range(count) if self.fraction is None else self.fraction[self.refreshes]

    def step(self, theta: Array, active: NDArray[np.bool_], batch: Batch, index: int) -> Array:
        """The corrected gradient: g_new - w·(g_old - reference)."""
        loss, dense = loss_and_gradient(theta, batch)
        new = np.where(active, dense, 0)
        old, reference, where, noise = self._old(active, batch, index)
        corrected = new
        if old is not None:
            corrected = new - np.where(where, self.weights() * (old - reference), 0)
            if isinstance(self.rule, GradientRule):
                self.rule.see(new, old, reference, where, noise)
        self._after(theta, active, loss, new, corrected, batch, index, old is not None)
        self.steps += 1
        return corrected

    def weights(self) -> Array:
        """γ·c of every weight at the next step."""
        if callable(self.rule):
            return np.full(sum(SIZES), self.gamma * self.rule(self.steps))
        return self.gamma * (self.rule.weights() if hasattr(self.rule, "weights") else np.full(sum(SIZES), self.rule))

    def _old(self, active: NDArray[np.bool_], batch: Batch, index: int) -> tuple[Any, Any, Any, float]:
        nothing = None, None, None, 0.0
        if self.mode == "none" or self.snapshot is None:
            return nothing
        where = active if self.every_index else active & self.was_active
        if self.mode == "table":
            if self.reference is None:
                return nothing
            return self.table[index], self.reference, active & self.known, 0.0
        old = gradient(self.snapshot, batch)
        if self.mode == "running":
            if not self.earlier:
                return nothing
            return old, np.mean(self.earlier, axis=0), where, 1 / (1 + len(self.earlier))
        if self.reference is None:
            return nothing
        return old, self.reference, where, 0.0

    def _after(
        self,
        theta: Array,
        active: NDArray[np.bool_],
        loss: float,
        new: Array,
        corrected: Array,
        batch: Batch,
        index: int,
        was_corrected: bool,
    ) -> None:
        if self.mode in ("running", "previous") and was_corrected:
            self.pairs.append((loss, loss_and_gradient(self.snapshot, batch)[0]))
        if self.mode == "running":
            self.earlier.append(gradient(self.snapshot, batch))
        if self.mode == "previous":
            self.snapshot, self.reference, self.was_active = theta.copy(), corrected, active.copy()
        if self.mode == "table":
            row = np.where(self.was_active, new, 0)
            if self.reference is not None:
                self.reference = self.reference + (row - self.table[index]) / len(self.table)
            self.table[index] = row


# Training with both


def orders(count: int, epochs: int, seed: int = 1) -> Iterator[list[int]]:
    """A new order of the batches in every epoch."""
    random = np.random.default_rng(seed)
    for _ in range(epochs):
        yield random.permutation(count).tolist()


def assert_follows(
    oracle: Oracle,
    correction: Correction,
    optimizer: torch.optim.Optimizer,
    batches: list[Batch],
    epochs: int = 4,
    tolerance: float = 1e-10,
    check: Callable[[Array], None] | None = None,
) -> int:
    """Compare `.grad` of every step with the oracle; return the number of corrected steps."""
    model, topology = correction.model, correction.topology
    corrected = 0
    for order in orders(len(batches), epochs):
        coming = [batches[i] for i in order]
        theta, active = vector_of(model), active_of(model, topology)
        correction.refresh(coming, cross_entropy)
        oracle.refresh(theta, active, coming)
        for i in order:
            theta, active = vector_of(model), active_of(model, topology)
            expected = oracle.step(theta, active, batches[i], i)
            correction.backward(cross_entropy, *batches[i], index=i)
            found = gradient_of(model)
            error = np.abs(found - expected).max() / np.abs(expected).max()
            assert error < tolerance, f"step {oracle.steps}: {error}"
            corrected += bool(np.abs(expected - np.where(active, gradient(theta, batches[i]), 0)).max() > 1e-6)
            if check is not None:
                check(found)
            optimizer.step()
            optimizer.zero_grad()
    return corrected
