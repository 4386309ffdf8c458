"""FLOPs against a count by hand for VGG-C and against torch's own counter, and the arithmetic of passes."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from equipoise.analysis.flops import LayerCost, Passes, count, total
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


def test_vgg_c_layer_by_layer_is_the_count_by_hand() -> None:
    costs = count(vgg_c(), torch.zeros(1, 3, 32, 32))
    assert [cost.dense_forward for cost in costs] == VGG_C_BY_HAND
    assert [cost.kind for cost in costs] == ["conv2d"] * 13 + ["linear"] * 3
    assert [cost.shape for cost in costs][-3:] == [(512, 2048), (512, 512), (10, 512)]
    assert total(costs).dense_forward == sum(VGG_C_BY_HAND) == 621_946_880
    assert all(cost.dense_training == 3 * cost.dense_forward for cost in costs)
    assert all(cost.sparse_forward == cost.dense_forward for cost in costs)


def test_density_scales_the_weights_it_names_and_no_other() -> None:
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
    """ERK densities: in proportion to the sum of a shape over its product, layers that would exceed 1 made dense."""
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
def test_what_erk_sparsity_saves_on_vgg_c(density: float, ratio: float) -> None:
    """The bounds that were worked out for the CPU kernels before this counter existed."""
    model, example = vgg_c(), torch.zeros(1, 3, 32, 32)
    shapes = {cost.name: cost.shape for cost in count(model, example)}
    cost = total(count(model, example, erk(shapes, density)))
    assert cost.dense_training / cost.sparse_training == pytest.approx(ratio, rel=0.01)


class Encoder(nn.Module):
    """Self-attention, cross-attention from other widths, and a block of torch's own."""

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
    cost = total(count(model, inputs, exact=True))
    counter = FlopCounterMode(display=False)
    with counter:
        model(*inputs)
    assert cost.dense_forward == counter.get_total_flops()
    with counter:
        model(*inputs).sum().backward()
    assert cost.dense_training == counter.get_total_flops()


def test_grouped_convolutions() -> None:
    """Forward only: torch's counter forgets the groups in the gradient of the weight."""
    model, x = convolutions(groups=2), torch.randn(3, 6, 11)
    costs = count(model, x, exact=True)
    counter = FlopCounterMode(display=False)
    with counter:
        model(x)
    assert total(costs).dense_forward == counter.get_total_flops()
    assert [cost.dense_training // cost.dense_forward for cost in costs] == [2, 3, 3, 3, 3, 3]


def test_three_forwards_count_the_first_input_gradient_too() -> None:
    model, example = vgg_c(), torch.zeros(1, 3, 32, 32)
    first, *rest = zip(count(model, example), count(model, example, exact=True), strict=True)
    assert first[0].dense_training - first[1].dense_training == first[0].dense_forward
    assert all(by_three == exact for by_three, exact in rest)


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


def test_counting_leaves_no_trace() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout(), nn.Flatten(), nn.Linear(4, 2))
    model[1].eval()
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    count(model, torch.randn(1, 3, 3, 3, generator=torch.Generator().manual_seed(0)))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)
    assert [module.training for module in model] == [True, False, True, True, True]
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(module._forward_hooks for module in model.modules())


def test_hooks_and_mode_come_back_after_a_failure() -> None:
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
    left, right = (Passes(*sorted(counts, reverse=True)) for counts in (one, two))
    both = left + right
    assert both == sum([left, right])
    assert both.forward == left.forward + right.forward
    assert both.dense_flops(COST) == left.dense_flops(COST) + right.dense_flops(COST)
    assert both.sparse_flops(COST) == left.sparse_flops(COST) + right.sparse_flops(COST)
    # a product for every pass, in each direction and for every weight gradient
    assert both.dense_flops(COST) == 100 * (both.forward + both.backward + both.sample_gradients)


def test_the_cost_of_an_epoch_of_agent_against_sgd() -> None:
    """Exact AGENT: the batch now and at the snapshot, the full pass, and the losses at the snapshot before it."""
    sgd = Passes.training(1)
    agent = sgd + Passes.training(1) + Passes.training(1) + Passes.evaluation(1)
    assert agent.sample_gradients == 3
    assert agent.sparse_flops(COST) / sgd.sparse_flops(COST) == pytest.approx(10 / 3)
    attack = Passes.attack(1, steps=10)
    assert attack.sample_gradients == 0
    assert (attack + agent).dense_flops(COST) / (attack + sgd).dense_flops(COST) == pytest.approx(30 / 23)


def test_rigl_pays_a_dense_gradient_at_every_update() -> None:
    """The appendix of Evci et al.: (3 f_S dT + 2 f_S + f_D) over dT + 1 steps."""
    interval, sparse, dense = 99, COST.sparse_forward, COST.dense_forward
    passes = Passes.training(interval) + Passes.training(1, dense=True)
    assert passes.sparse_flops(COST) == 3 * sparse * interval + 2 * sparse + dense
    assert passes.dense_flops(COST) == 3 * dense * (interval + 1)


def test_the_exact_count_sends_an_attack_to_the_input() -> None:
    """Against torch: training leaves out the first input gradient, an attack needs it and no weight gradient."""
    model, x = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3)), torch.randn(1, 4, requires_grad=True)
    sample = total(count(model, x.detach(), exact=True))
    counter = FlopCounterMode(display=False)
    with counter:
        torch.autograd.grad(model(x.clone()).sum(), x)  # the counter cannot follow a leaf
    assert Passes.attack(1, steps=1).dense_flops(sample) == counter.get_total_flops()
    with counter:
        model(x.detach()).sum().backward()
    assert Passes.training(1).dense_flops(sample) == counter.get_total_flops()


def test_impossible_passes_are_named() -> None:
    with pytest.raises(UserError, match="sample gradients <= backward"):
        Passes(forward=1, backward=1, sample_gradients=2)
    with pytest.raises(TypeError):
        Passes() + 1  # type: ignore[operator]
