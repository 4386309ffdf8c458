"""Folded norms: the same function in float64, and only if the graph allows it."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from deploy_helpers import images, random_network
from equipoise.deploy.fold import fold, foldable, restructure
from equipoise.errors import UserError


@pytest.mark.parametrize(
    ("name", "folded", "left"),
    [("small", 3, 0), ("mlp", 0, 0), ("vgg16", 13, 0), ("vgg_c", 13, 2), ("resnet18", 20, 0), ("wrn_28_4", 13, 12)],
)
def test_folding_keeps_the_function(name: str, folded: int, left: int) -> None:
    network, judge = random_network(name)
    x = images(network).double()
    model = copy.deepcopy(judge)
    assert len(fold(model)) == folded
    norms = [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    assert len(norms) == left
    with torch.no_grad():
        torch.testing.assert_close(model(x), judge(x), rtol=1e-9, atol=1e-9)


class Shared(nn.Module):
    """A layer with two readers, a layer that is called twice, and a norm after a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.read_twice, self.called_twice, self.alone = (nn.Conv2d(3, 3, 1) for _ in range(3))
        self.norms = nn.ModuleList(nn.BatchNorm2d(3) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        y = self.read_twice(x)
        x = self.norms[0](y) + y
        x = self.norms[1](self.called_twice(self.called_twice(x)))
        return self.norms[3](self.norms[2](self.alone(x)))


def test_shared_layers_keep_their_norms() -> None:
    torch.manual_seed(0)
    model = Shared().double()
    for _ in range(3):
        model(torch.randn(8, 3, 4, 4).double() + 1)
    model.eval()
    judge, x = copy.deepcopy(model), torch.randn(2, 3, 4, 4).double()
    assert fold(model) == {"norms.2": "alone"}
    with torch.no_grad():
        torch.testing.assert_close(model(x), judge(x), rtol=1e-9, atol=1e-9)


def test_a_model_that_cannot_be_traced_keeps_its_norms() -> None:
    class Untraceable(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.norm = nn.Linear(2, 2), nn.BatchNorm1d(2)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(self.layer(x)) if float(x.sum()) > 0 else x

    assert foldable(Untraceable()) == {}


def test_norms_without_statistics_are_refused() -> None:
    with pytest.raises(UserError, match="running statistics"):
        fold(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2, track_running_stats=False)).eval())


@pytest.mark.parametrize(
    ("folded", "told"),
    [
        ({"1": "9"}, 'no convolution or linear layer "9"'),
        ({"1": "1"}, 'no convolution or linear layer "1"'),
        ({"0": "0"}, 'no BatchNorm that can be folded into "0"'),
        ({"": "0"}, 'no BatchNorm that can be folded into "0"'),
        ({"1": "2"}, 'no BatchNorm that can be folded into "2"'),
    ],
)
def test_wrong_names_are_refused(folded: dict[str, str], told: str) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 5))
    with pytest.raises(UserError, match=told):
        restructure(model, folded)
