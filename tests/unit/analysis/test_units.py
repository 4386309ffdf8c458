"""Units that take no part, against networks in which they are known."""

from __future__ import annotations

import torch
from torch import nn

from equipoise.analysis.units import Units, count_units
from equipoise.topology import Static, Topology


def attached(model: nn.Module, masks: dict[str, torch.Tensor]) -> Topology:
    """Attach a topology and set its masks."""
    algorithm = Static(sparsity=0.5, distribution="uniform")
    topology = algorithm.attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with torch.no_grad():
        for layer in topology.layers:
            layer.activity.copy_(-masks[layer.name].to(torch.int8))  # type: ignore[attr-defined]
            layer.parameter.copy_(torch.randn(layer.parameter.shape).abs())
    topology.apply()
    return topology


def test_units_of_a_perceptron() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(inplace=True), nn.Linear(5, 3))
    first, last = torch.ones(5, 6, dtype=torch.bool), torch.ones(3, 5, dtype=torch.bool)
    first[1] = False  # no inputs, and a positive bias: its output is constant, but the loss depends on it
    first[:, 4] = False
    last[:, 2] = False  # nobody reads it
    topology = attached(model, {"0.weight": first, "2.weight": last})
    with torch.no_grad():
        model[0].bias.fill_(0.1)
        model[0].bias[3] = -1e6  # its ReLU never fires
    batches = [(torch.rand(7, 6), torch.tensor([0, 1, 2, 0, 1, 2, 0])) for _ in range(2)]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    found = count_units(model, topology, batches)
    assert found == {
        "0.weight": Units(total=5, without_inputs=1, silent=2, unread=1),
        "2.weight": Units(total=3, without_inputs=0, silent=0, unread=1),
    }
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert model.training


def test_units_of_grouped_convolutions_and_all_batches() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(4, 6, 3, groups=2), nn.ReLU(), nn.Flatten(), nn.Linear(6, 3))
    first = torch.ones(6, 2, 3, 3, dtype=torch.bool)
    first[3:, 0] = False  # the third input, which is the first of the second group
    topology = attached(model, {"0.weight": first, "3.weight": torch.ones(3, 6, dtype=torch.bool)})
    with torch.no_grad():
        model[0].bias.fill_(-1.0)
    quiet, loud = torch.zeros(2, 4, 3, 3), torch.ones(2, 4, 3, 3)
    loud[:, 2:] = 0  # the second group hears nothing
    labels = torch.tensor([0, 1])
    assert count_units(model, topology, [(quiet, labels)])["0.weight"] == Units(6, 0, 6, 1)
    assert count_units(model, topology, [(quiet, labels), (loud, labels)])["0.weight"] == Units(6, 0, 3, 1)
