"""When a part of a model runs in the blocked layout."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from equipoise.kernels import library
from equipoise.sparse import pack
from equipoise.storage import pack as packing
from equipoise.storage.choice import Choice, Costs, choose
from equipoise.storage.trace import read

PAYS = Choice.pays  # before the fixture of all tests replaces it

pytestmark = pytest.mark.skipif(not library.available(), reason=library.reason())


@pytest.fixture(autouse=True)
def fixed_costs(sparse_small_layers: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Choice, "pays", PAYS)


def few_channels(channels: int = 8) -> nn.Module:
    """A network whose layers have few channels, as GhostNet's."""
    conv = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(channels), nn.ReLU(), nn.Conv2d(channels, channels, 1))


def masks(model: nn.Module, density: float) -> dict[str, torch.Tensor]:
    weights = {name: weight for name, weight in model.named_parameters() if weight.dim() > 1}
    return {name: torch.rand(weight.shape) < density for name, weight in weights.items()}


@pytest.mark.parametrize(
    ("images", "size", "blocked"),
    [
        (1, 8, False),  # a block holds 16 images
        (16, 4, False),  # calls take longer than they save
        (16, 32, True),
        (2, 64, False),
        (64, 32, True),
    ],
)
def test_small_layers_run_in_blocks_in_large_batches_and_maps(
    images: int, size: int, blocked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model = few_channels().eval()
    chosen = masks(model, 0.3)
    with torch.no_grad():
        for name, mask in chosen.items():
            model.get_parameter(name).mul_(mask)
    packed, calls = pack(model, chosen), []
    run = packing.BlockedForward.run
    monkeypatch.setattr(
        packing.BlockedForward, "run", lambda forward, *given: calls.append(1) or run(forward, *given)
    )
    x = torch.rand(images, 8, size, size)
    with torch.no_grad():
        torch.testing.assert_close(packed(x), model(x), rtol=1e-4, atol=1e-5)
    assert bool(calls) is blocked


def test_the_time_of_calls_is_compared_with_what_all_positions_save() -> None:
    choice = Choice(frozenset(), 0.5, Costs(plain=30.0, blocked=10.0, calls=2000.0))
    assert choice.pays(images=16, positions=7, padding=1.0)  # 16 * 7 * (30 - 10) = 2240
    assert not choice.pays(images=16, positions=6, padding=1.0)  # 1920
    assert not choice.pays(images=16, positions=7, padding=1.3)  # 16 * 7 * (30 - 13) = 1904
    assert not choice.pays(images=10**6, positions=1, padding=2.1)  # in large batches as long as layer by layer


def test_a_layer_without_zeros_runs_dense() -> None:
    model = pack(few_channels(), masks(few_channels(), 2.0))
    assert [layer.dense_alone() for layer in (model[0], model[3])] == [True, True]
    sparse = pack(few_channels(), masks(few_channels(), 0.1))
    assert [layer.dense_alone() for layer in (sparse[0], sparse[3])] == [False, False]


class Once(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.conv(x))


class Twice(Once):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.conv(x))
        return torch.relu(self.conv(x))


def test_a_layer_that_is_called_twice_counts_twice() -> None:
    costs = []
    for kind in (Once, Twice):
        model = pack(kind(), {"conv.weight": torch.ones(8, 8, 3, 3).tril() > 0})
        reading = read(model)
        assert reading is not None
        costs.append(choose(reading.graph, model).costs)
    assert costs[1].plain == 2 * costs[0].plain
    assert costs[1].blocked == 2 * costs[0].blocked
