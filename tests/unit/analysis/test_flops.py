"""FLOPs against a count by hand for VGG-C and against torch's counter, and the arithmetic of passes."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from equipoise.analysis.flops import LayerCost, SamplePasses, count, total
from equipoise.errors import UserError
from equipoise.models.vgg import vgg_c

# (inputs, outputs, kernel, side of the output map). The 1x1 convolutions keep a padding of 1, so their maps grow
# from 8 to 10, from 5 to 7 and from 3 to 5; the max-pools halve 32, 16, 10, 7 and 5 to 16, 8, 5, 3 and 2.
VGG_C_CONVOLUTIONS = (
    (3, 64, 3, 32),
    (64, 64, 3, 32),
    (64, 128, 3, 16),
    (128, 128, 3, 16),
    (128, 256, 3, 8),
    (256, 256, 3, 8),
    (256, 256, 1, 10),
    (256, 512, 3, 5),
    (512, 512, 3, 5),
    (512, 512, 1, 7),
    (512, 512, 3, 3),
    (512, 512, 3, 3),
    (512, 512, 1, 5),
)
VGG_C_LINEARS = ((2048, 512), (512, 512), (512, 10))
VGG_C_BY_HAND = [
    *(2 * kernel**2 * inputs * outputs * side**2 for inputs, outputs, kernel, side in VGG_C_CONVOLUTIONS),
    *(2 * inputs * outputs for inputs, outputs in VGG_C_LINEARS),
]


def test_vgg_c_equals_the_count_by_hand_in_every_layer() -> None:
    costs = count(vgg_c(), torch.zeros(1, 3, 32, 32))
    assert [cost.dense_forward for cost in costs] == VGG_C_BY_HAND
    assert [cost.kind for cost in costs] == ["conv2d"] * 13 + ["linear"] * 3
    assert [cost.shape for cost in costs][-3:] == [(512, 2048), (512, 512), (10, 512)]
    assert total(costs).dense_forward == sum(VGG_C_BY_HAND) == 621_946_880
    assert all(cost.dense_training == 3 * cost.dense_forward for cost in costs)
    assert all(cost.sparse_forward == cost.dense_forward for cost in costs)


def test_density_scales_the_named_weights_alone() -> None:
    model = vgg_c()
    dense = count(model, torch.zeros(1, 3, 32, 32))
    densities = {dense[0].name: 0.5, dense[-1].name: 0.0}
    sparse = count(model, torch.zeros(1, 3, 32, 32), densities)
    for before, after in zip(dense, sparse, strict=True):
        density = densities.get(after.name, 1.0)
        assert after.dense_forward == before.dense_forward
        assert after.sparse_forward == round(density * before.dense_forward)
        assert after.sparse_training == 3 * after.sparse_forward


def erk(shapes: dict[str, tuple[int, ...]], density: float) -> dict[str, float]:
    """ERK densities, proportional to the sum of a shape over its product; layers that would exceed 1 are dense."""
    dense: set[str] = set()
    while True:
        sizes = {name: torch.Size(shape).numel() for name, shape in shapes.items()}
        left = density * sum(sizes.values()) - sum(sizes[name] for name in dense)
        scale = left / sum(sum(shape) for name, shape in shapes.items() if name not in dense)
        found = {name: scale * sum(shape) / sizes[name] for name, shape in shapes.items()}
        full = {name for name, value in found.items() if value > 1} - dense
        if not full:
            return {name: 1.0 if name in dense else value for name, value in found.items()}
        dense |= full


@pytest.mark.parametrize(("density", "ratio"), [(0.1, 6.1), (0.05, 11.8), (0.01, 57)])
def test_savings_of_erk_sparsity_on_vgg_c(density: float, ratio: float) -> None:
    """The ratios that were computed for the CPU kernels independently of this counter."""
    model, example = vgg_c(), torch.zeros(1, 3, 32, 32)
    shapes = {cost.name: cost.shape for cost in count(model, example)}
    cost = total(count(model, example, erk(shapes, density)))
    assert cost.dense_training / cost.sparse_training == pytest.approx(ratio, rel=0.01)


class Encoder(nn.Module):
    """Self-attention, cross-attention from other widths, and a transformer layer of torch."""

    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        self.inner = nn.Linear(7, 12)
        self.self_attention = nn.MultiheadAttention(12, 3, batch_first=batch_first)
        self.cross_attention = nn.MultiheadAttention(12, 2, kdim=5, vdim=6, batch_first=batch_first)
        self.block = nn.TransformerEncoderLayer(12, 4, dim_feedforward=20, batch_first=batch_first)

    def forward(self, x: Tensor, key: Tensor, value: Tensor) -> Tensor:
        x = self.inner(x)
        x = x + self.self_attention(x, x, x)[0]
        return self.block(self.cross_attention(query=x, key=key, value=value)[0])


def convolutions(groups: int = 1) -> nn.Module:
    return nn.Sequential(
        nn.Conv1d(6, 8, 3, stride=2, padding=1, groups=groups),
        nn.ConvTranspose1d(8, 4, 4, stride=2),
        nn.Unflatten(1, (2, 2)),
        nn.Conv2d(2, 6, (2, 3), dilation=(1, 2)),
        nn.ConvTranspose2d(6, 4, 3, stride=2, groups=groups, output_padding=1),
        nn.Unflatten(1, (2, 2)),
        nn.Conv3d(2, 3, 2),
        nn.ConvTranspose3d(3, 2, 2),
    )


def tied() -> nn.Module:
    layer = nn.Linear(5, 5)
    twin = nn.Linear(5, 5)
    twin.weight = layer.weight
    return nn.Sequential(layer, nn.ReLU(), layer, twin)


def frozen() -> nn.Module:
    model = nn.Sequential(nn.Linear(5, 6), nn.Linear(6, 7), nn.Linear(7, 8), nn.Linear(8, 2))
    for frozen_layer in (0, 2):
        model[frozen_layer].requires_grad_(False)
    return model


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[tuple[int, ...], ...]]] = {
    "vgg_c": (vgg_c, ((2, 3, 32, 32),)),
    "convolutions": (convolutions, ((3, 6, 11),)),
    "grouped convolutions": (lambda: convolutions(groups=2), ((3, 6, 11),)),
    "tied": (tied, ((4, 3, 5),)),
    "frozen": (frozen, ((3, 5),)),
    "encoder": (lambda: Encoder(batch_first=False), ((9, 2, 7), (4, 2, 5), (4, 2, 6))),
    "batch first": (lambda: Encoder(batch_first=True), ((2, 9, 7), (2, 4, 5), (2, 4, 6))),
    "without a batch": (lambda: Encoder(batch_first=True), ((9, 7), (4, 5), (4, 6))),
    "one layer": (lambda: nn.Linear(3, 4), ((2, 3),)),
}


@pytest.mark.parametrize("name", MODELS)
def test_dense_counts_are_those_of_torch(name: str) -> None:
    make, shapes = MODELS[name]
    model, inputs = make(), tuple(torch.randn(shape) for shape in shapes)
    cost = total(count(model, inputs))
    counter = FlopCounterMode(display=False)
    with counter:
        model(*inputs)
    assert cost.dense_forward == counter.get_total_flops()


@pytest.mark.parametrize("name", [name for name in MODELS if name not in ("frozen", "grouped convolutions")])
def test_training_is_three_forward_passes(name: str) -> None:
    """torch computes the same if the input needs a gradient; its counter forgets groups in weight gradients."""
    make, shapes = MODELS[name]
    model, inputs = make(), tuple(torch.randn(shape, requires_grad=True) for shape in shapes)
    counter = FlopCounterMode(display=False)
    with counter:
        # clones: the counter cannot follow a leaf
        model(*(x.clone() for x in inputs)).sum().backward()
    assert total(count(model, inputs)).dense_training == counter.get_total_flops()


def test_tied_weights_share_their_density_and_a_weight_used_twice_costs_twice() -> None:
    costs = count(tied(), torch.zeros(1, 5), {"0.weight": 0.2})
    assert [(cost.name, cost.dense_forward, cost.sparse_forward) for cost in costs] == [
        ("0.weight", 100, 20),
        ("3.weight", 50, 10),
    ]


def test_attention_by_layer_and_density() -> None:
    model = nn.MultiheadAttention(8, 2)
    costs = {cost.name: cost for cost in count(model, (torch.zeros(5, 3, 8),) * 3, {"in_proj_weight": 0.25})}
    assert {name: (cost.dense_forward, cost.sparse_forward) for name, cost in costs.items()} == {
        "in_proj_weight": (2 * 3 * 8 * 8 * 15, 2 * 3 * 8 * 8 * 15 // 4),
        "scores": (2 * 2 * 15 * 5 * 8,) * 2,
        "out_proj.weight": (2 * 8 * 8 * 15,) * 2,
    }


def test_counting_leaves_the_model_unchanged() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout(), nn.Flatten(), nn.Linear(4, 2))
    model[1].eval()
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    count(model, torch.randn(1, 3, 3, 3, generator=torch.Generator().manual_seed(0)))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)
    assert [module.training for module in model] == [True, False, True, True, True]
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(module._forward_hooks for module in model.modules())


def test_hooks_and_modes_are_restored_after_a_failure() -> None:
    model = nn.Sequential(nn.Linear(3, 4))
    with pytest.raises(RuntimeError):
        count(model, torch.zeros(1, 5))
    assert model.training
    assert not model[0]._forward_hooks


def test_a_model_without_products_costs_nothing() -> None:
    assert count(nn.ReLU(), torch.zeros(1)) == []
    assert total([]).dense_training == 0


@pytest.mark.parametrize(
    ("densities", "message"), [({"wieght": 0.5}, "no parameter is called"), ({"weight": 1.2}, r"in \[0, 1\]")]
)
def test_wrong_densities_are_named(densities: dict[str, float], message: str) -> None:
    with pytest.raises(UserError, match=message):
        count(nn.Linear(2, 2), torch.zeros(1, 2), densities)


COST = LayerCost("total", "total", (), dense_forward=100, sparse_forward=10, dense_training=300, sparse_training=30)


@given(st.lists(st.integers(0, 50), min_size=4, max_size=4), st.lists(st.integers(0, 50), min_size=4, max_size=4))
def test_passes_add_and_so_do_their_flops(one: list[int], two: list[int]) -> None:
    left, right = (SamplePasses(*sorted(counts, reverse=True)) for counts in (one, two))
    both = left + right
    assert both.forward == left.forward + right.forward
    assert both.dense_flops(COST) == left.dense_flops(COST) + right.dense_flops(COST)
    assert both.sparse_flops(COST) == left.sparse_flops(COST) + right.sparse_flops(COST)
    # one product for every forward pass, backward pass and weight gradient
    assert both.dense_flops(COST) == 100 * (both.forward + both.backward + both.sample_gradients)


def test_the_cost_of_an_epoch_of_agent_against_sgd() -> None:
    """AGENT by recomputing: the batch at both weights, the full pass, and a forward pass at the snapshot."""
    sgd, agent = SamplePasses(1, 1, 1), SamplePasses(4, 3, 3)
    assert agent.sparse_flops(COST) / sgd.sparse_flops(COST) == pytest.approx(10 / 3)
    attack = SamplePasses.attack(1, steps=10)
    assert attack.sample_gradients == 0
    assert (attack + agent).dense_flops(COST) / (attack + sgd).dense_flops(COST) == pytest.approx(30 / 23)


def test_rigl_pays_a_dense_gradient_at_every_update() -> None:
    """The appendix of Evci et al.: (3 f_S dT + 2 f_S + f_D) over dT + 1 steps."""
    interval, sparse, dense = 99, COST.sparse_forward, COST.dense_forward
    passes = SamplePasses(interval + 1, interval + 1, interval + 1, dense_gradients=1)
    assert passes.sparse_flops(COST) == 3 * sparse * interval + 2 * sparse + dense
    assert passes.dense_flops(COST) == 3 * dense * (interval + 1)


def test_an_attack_computes_no_weight_gradient() -> None:
    model, x = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3)), torch.randn(1, 4, requires_grad=True)
    counter = FlopCounterMode(display=False)
    with counter:
        torch.autograd.grad(model(x.clone()).sum(), x)  # the counter cannot follow a leaf
    assert SamplePasses.attack(1, steps=1).dense_flops(total(count(model, x.detach()))) == counter.get_total_flops()


def test_impossible_passes_are_named() -> None:
    with pytest.raises(UserError, match="sample_gradients <= backward"):
        SamplePasses(forward=1, backward=1, sample_gradients=2)
    with pytest.raises(TypeError):
        SamplePasses() + 1  # type: ignore[operator]
