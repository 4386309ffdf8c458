"""BSR-Net: signs that stay, and a network refilled to its budget after every step."""

from __future__ import annotations

import math
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor, nn

from equipoise.errors import UserError
from equipoise.topology import BSRNet, Topology
from equipoise.topology.rewiring import NEWBORN
from equipoise.topology.rewiring_kernels import distribute, normal
from equipoise.training.optimizers import SGDW
from topology_helpers import assert_sparse, perceptron, train

LR = 0.2


class Table(nn.Module):
    """Two weights of 60 and 240, with BSR-Net's initial densities for them."""

    def __init__(self, first: float = 0.5) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(6, 10, bias=False).double(), nn.Linear(10, 24, bias=False).double()
        self.first_density = first

    def bsr_densities(self, density: float) -> dict[str, float]:
        return {"first.weight": self.first_density, "last.weight": density / 2}


def attach(model: nn.Module, momentum: float = 0.0, **options: float) -> tuple[torch.optim.Optimizer, Topology]:
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=momentum)
    return optimizer, BSRNet(sparsity=0.8, **options).attach(model, optimizer)  # type: ignore[arg-type]


def random_step(model: Table, optimizer: torch.optim.Optimizer, seed: int) -> dict[str, Tensor]:
    """One step with given gradients; what they were."""
    generator = torch.Generator().manual_seed(seed)
    gradients = {}
    for name, parameter in model.named_parameters():
        gradients[name] = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        parameter.grad = gradients[name].clone()
    optimizer.step()
    return gradients


def test_it_starts_from_its_densities_and_the_first_step_fills_the_budget() -> None:
    model = Table()
    optimizer, topology = attach(model)
    assert [layer.active for layer in topology.layers] == [30, 24]
    random_step(model, optimizer, 0)
    assert topology.active == round(0.2 * 300)
    assert_sparse(topology)


def test_densities_beyond_the_budget_are_brought_down_to_it() -> None:
    model = Table(first=1.0)
    _, topology = attach(model)
    assert topology.active == round(0.2 * 300)


def test_what_crosses_its_sign_is_switched_off_and_replaced() -> None:
    model = Table()
    signs = {name: torch.where(p.detach() < 0, -1.0, 1.0).double() for name, p in model.named_parameters()}
    optimizer, topology = attach(model, noise=0.0)
    random_step(model, optimizer, 99)  # fills the budget
    crossed_in_all = 0
    for seed in range(12):
        before = topology.masks
        weights = {name: p.detach().clone() for name, p in model.named_parameters()}
        gradients = random_step(model, optimizer, seed)
        crossings = newborns = 0
        for name, parameter in model.named_parameters():
            moved = weights[name] - LR * gradients[name] * before[name]
            kept = before[name] & (moved * signs[name] > 0)
            born = topology.masks[name] & ~kept
            assert (topology.masks[name] | ~kept).all()
            torch.testing.assert_close(parameter.detach()[kept], moved[kept])
            assert torch.equal(parameter.detach()[born], NEWBORN * signs[name][born])
            crossings += int((before[name] & ~kept).sum())
            newborns += int(born.sum())
        assert newborns == crossings
        assert topology.active == 60
        assert_sparse(topology)
        crossed_in_all += crossings
    assert crossed_in_all > 20


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 99),
    sparsity=st.floats(0.3, 0.97),
    momentum=st.sampled_from([0.0, 0.9]),
    decay=st.sampled_from([0.0, 5e-4, 0.2]),
    noise=st.sampled_from([0.0, 1e-6, 0.1]),
)
def test_after_every_step_of_its_pipeline_the_count_is_exact_and_no_sign_has_changed(
    seed: int, sparsity: float, momentum: float, decay: float, noise: float
) -> None:
    """SGD with momentum and decoupled decay that fall with the learning rate, as BSR-Net is trained."""
    model = perceptron(seed=seed)
    signs = {name: torch.where(p.detach() < 0, -1, 1) for name, p in model.named_parameters()}
    optimizer = SGDW(model.parameters(), lr=LR, momentum=momentum, weight_decay=decay)
    topology = BSRNet(sparsity=sparsity, distribution="erk", noise=noise, seed=seed).attach(model, optimizer)
    budget = sum(layer.final for layer in topology.layers)
    assert abs(budget - (1 - sparsity) * topology.size) <= len(topology.layers)
    for step in range(8):
        optimizer.param_groups[0]["lr"] = LR * 0.7**step
        train(model, optimizer, range(step, step + 1))
        sparse = {layer.name: layer.parameter.detach() for layer in topology.layers}
        assert sum(int(weight.count_nonzero()) for weight in sparse.values()) == budget
        assert all((weight * signs[name] >= 0).all() for name, weight in sparse.items())
        assert_sparse(topology)


def test_in_training_too_newborns_pick_a_layer_in_proportion_to_its_size() -> None:
    model = Table()
    optimizer, _ = attach(model, noise=0.0)
    random_step(model, optimizer, 0)
    born = np.zeros(2)
    for seed in range(1, 150):
        random_step(model, optimizer, seed)
        born += [int((p.detach().abs() == NEWBORN).sum()) for p in model.parameters()]
    expected = born.sum() * np.array([60, 240]) / 300
    assert born.sum() > 500
    assert ((born - expected) ** 2 / expected).sum() < 10.83  # chi-square with one degree of freedom, 0.1 %


@pytest.mark.gpu
def test_the_host_waits_as_often_for_many_layers_as_for_few() -> None:
    def waits(layers: int) -> int:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(layers))).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
        topology = BSRNet(sparsity=0.9, distribution="uniform").attach(model, optimizer)
        found = []
        for _ in range(3):  # the first fills caches
            for parameter in model.parameters():
                parameter.grad = 10 * torch.randn_like(parameter)  # so large that some weights cross their sign
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("warn")
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                optimizer.step()
            torch.cuda.set_sync_debug_mode("default")
            found.append(sum("synchroniz" in str(warning.message) for warning in caught))
            optimizer.zero_grad()
        assert topology.updates == 3
        return found[-1]

    assert waits(12) == waits(2)
    assert waits(2) <= 2


def test_momentum_is_not_reset() -> None:
    model = Table()
    optimizer, topology = attach(model, momentum=0.9, noise=0.0)
    expected = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for seed in range(4):
        gradients = random_step(model, optimizer, seed)
        for name, parameter in model.named_parameters():
            expected[name] = 0.9 * expected[name] + gradients[name]
            torch.testing.assert_close(optimizer.state[parameter]["momentum_buffer"], expected[name])
    assert topology.updates > 0


def test_noise_is_that_of_the_paper_on_active_weights_only() -> None:
    differences = []
    for seed in range(30):
        weights = []
        for noise in (0.0, 1e-3):
            model = Table()
            optimizer, topology = attach(model, noise=noise, seed=seed)
            model.first.weight.grad = torch.zeros_like(model.first.weight)
            mask = topology.masks["first.weight"]
            optimizer.step()
            assert_sparse(topology)
            weights.append(model.first.weight.detach()[mask])
        differences.append(weights[1] - weights[0])
    noise_drawn = torch.cat(differences).numpy() / LR
    assert abs(noise_drawn.mean()) < 4e-3 / math.sqrt(len(noise_drawn))
    assert noise_drawn.std() == pytest.approx(1e-3, rel=0.15)


def shared_out(missing: int, sizes: list[int], active: list[int], seed: int = 0) -> Tensor:
    drawn = torch.randint(2**62, (64,), generator=torch.Generator().manual_seed(seed))
    room = torch.tensor(sizes) - torch.tensor(active)
    return distribute(torch.tensor(missing), room, drawn, torch.tensor(sizes).cumsum(0))


def test_missing_connections_pick_a_layer_in_proportion_to_its_size() -> None:
    found = [shared_out(5, [100, 300, 600], [10, 290, 0], seed) for seed in range(2000)]
    assert all(int(counts.sum()) == 5 for counts in found)
    counts = torch.stack(found).sum(0).numpy()
    expected = np.array([0.1, 0.3, 0.6]) * 10_000  # by size, not by room
    assert ((counts - expected) ** 2 / expected).sum() < 20


def test_a_full_layer_passes_its_share_on() -> None:
    assert shared_out(50, [100, 50], [98, 2]).tolist() == [2, 48]
    assert shared_out(7, [100, 50], [100, 2]).tolist() == [0, 7]
    assert shared_out(0, [100, 50], [100, 2]).tolist() == [0, 0]


def test_indices_are_filled_uniformly() -> None:
    born = torch.zeros(10, 6)
    for seed in range(400):
        model = Table()
        optimizer, topology = attach(model, seed=seed)
        before = topology.masks["first.weight"]
        random_step(model, optimizer, 1)
        born += topology.masks["first.weight"] & ~before
    drawn = born.flatten().numpy()
    # Under any one seed half the indices are inactive, each index as often as any other.
    assert ((drawn - drawn.mean()) ** 2 / drawn.mean()).sum() < 59 + 5 * math.sqrt(2 * 59)


def test_frozen_weights_and_a_dense_network_are_left_alone() -> None:
    model = Table()
    optimizer, topology = attach(model)
    random_step(model, optimizer, 0)
    model.first.weight.requires_grad_(False)
    model.first.weight.grad = None
    frozen = model.first.weight.clone()
    for seed in range(3):
        model.last.weight.grad = torch.randn(24, 10, generator=torch.Generator().manual_seed(seed)).double()
        optimizer.step()
    assert torch.equal(model.first.weight, frozen)
    assert topology.active == 60

    dense = perceptron()
    optimizer = torch.optim.SGD(dense.parameters(), lr=LR)
    assert BSRNet(sparsity=0, distribution="erk").attach(dense, optimizer).layers == []
    train(dense, optimizer, range(2))


def test_wrong_options_are_refused() -> None:
    with pytest.raises(UserError, match="noise=-1"):
        BSRNet(noise=-1)
    model = perceptron()
    with pytest.raises(UserError, match="known only for vgg16"):
        BSRNet().attach(model, torch.optim.SGD(model.parameters(), lr=LR))


def test_noise_is_standard_normal() -> None:
    every = torch.arange(-(2**15), 2**15, dtype=torch.int16)
    quantiles = stats.norm.ppf((np.arange(2**15) + 0.5) / 2**15)
    np.testing.assert_allclose(normal(every).double().numpy(), np.tile(quantiles, 2), rtol=1e-4, atol=1e-6)


def test_noise_of_a_step_is_independent_of_weight_and_step() -> None:
    """Weights without gradient move by lr·noise·N(0, 1) a step: mean, variance, tails and correlations."""
    model = nn.Linear(301, 333, bias=False)  # no multiple of the four numbers that are drawn together
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    topology = BSRNet(sparsity=0.1, distribution="uniform", noise=1e-3).attach(model, optimizer, total_steps=2)
    chosen = topology.masks["weight"] & (model.weight.detach().abs() > 0.01)  # far from zero: they stay active
    moves = []
    for _ in range(2):
        before = model.weight.detach().clone()
        model.weight.grad = torch.zeros_like(model.weight)
        optimizer.step()
        moves.append((model.weight.detach() - before)[chosen].double().numpy() / 5e-4)
    first, second = moves
    assert stats.kstest(first, "norm").pvalue > 1e-3
    lags = [np.corrcoef(first[: len(first) - lag], first[lag:])[0, 1] for lag in (1, 2, 3, 4)]
    assert np.abs([np.corrcoef(first, second)[0, 1], *lags]).max() < 4.5 / math.sqrt(len(first))
