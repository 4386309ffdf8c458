"""Wrong use and losses that are not finite: one clear line, and nothing half done."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from correction_oracle import cross_entropy, make_batches, perceptron
from equipoise.correction import MVR, SAGA, SGD, SVRG, Agent, AlphaSVRG, NonFiniteLoss
from equipoise.errors import UserError
from equipoise.topology import RigL


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["recompute", "replay", "fraction", "pays"])
def test_a_loss_that_is_not_finite_names_its_batch(name: str, bad: float, monkeypatch: pytest.MonkeyPatch) -> None:
    model = perceptron()
    estimator = {
        "recompute": Agent(),
        "replay": Agent(way="replay"),
        "fraction": Agent(fraction=0.5),
        "pays": Agent(when="pays", probe=6),
    }[name]
    correction = estimator.attach(model)
    batches = make_batches(6)
    correction.refresh(batches, cross_entropy)
    with torch.no_grad():
        model.last.weight.mul_(1.1)
    number = 5
    if name == "fraction":
        monkeypatch.setattr(correction, "_chosen", lambda total: {1, 3, 4})
        number = 4  # of the loader's batches, not of the three
    batches[number] = (torch.full_like(batches[number][0], bad), batches[number][1])
    with pytest.raises(NonFiniteLoss, match=f"nan at batch {number + 1} of"):
        correction.refresh(batches, cross_entropy)
    assert not correction.enabled


def test_wrong_use_is_told() -> None:
    model, batches = perceptron(), make_batches(4)
    replay = SVRG(way="replay").attach(model)
    replay.refresh(batches[:2], cross_entropy)
    for batch in batches[:2]:
        replay.backward(cross_entropy, *batch)
    with pytest.raises(UserError, match="refresh"):
        replay.backward(cross_entropy, *batches[2])
    saga = SAGA().attach(model)
    with pytest.raises(UserError, match="length"):
        saga.refresh(iter(b for b in batches), cross_entropy)
    saga.refresh(batches, cross_entropy)
    for index in (None, -1, 4):
        with pytest.raises(UserError, match="index"):
            saga.backward(cross_entropy, *batches[0], index=index)
    with pytest.raises(UserError, match="length"):
        SVRG(fraction=0.5).attach(model).refresh((b for b in batches), cross_entropy)
    with pytest.raises(UserError, match="total_steps"):
        AlphaSVRG().attach(model)
    with pytest.raises(UserError, match="no batch"):
        SVRG().attach(model).refresh([], cross_entropy)
    with pytest.raises(UserError, match="trainable"):
        SVRG().attach(perceptron().requires_grad_(False))
    svrg = SVRG().attach(model.eval())
    svrg.refresh(batches, cross_entropy)
    model.train()
    with pytest.raises(UserError, match=r"model\.train"):
        svrg.backward(cross_entropy, *batches[0])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    topology = RigL(sparsity=0.5, growth="corrected").attach(model, optimizer, 10)
    for estimator in (MVR(), SAGA()):
        with pytest.raises(UserError, match="growth"):
            estimator.attach(model, topology)


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_sparse_gradients_are_refused_by_name(kind: type[nn.Embedding]) -> None:
    model = nn.Sequential(kind(20, 8, sparse=True), nn.Flatten(), nn.Linear(24, 3))
    with pytest.raises(UserError, match=r'^"0" has sparse gradients.*sparse=False$'):
        Agent().attach(model)
    SGD().attach(model)  # corrects nothing
    model[0].requires_grad_(False)
    Agent().attach(model)
