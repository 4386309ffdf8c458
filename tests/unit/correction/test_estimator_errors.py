"""Wrong use and losses that are not finite: an error of one line, and no half-finished state."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from correction_oracle import cross_entropy, make_batches, perceptron
from equipoise.correction import MVR, SAGA, SGD, SVRG, Agent, AlphaSVRG, full_pass
from equipoise.errors import NonFiniteLoss, UserError
from equipoise.topology import RigL


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["recompute", "replay", "batch_fraction", "pays"])
def test_a_loss_that_is_not_finite_names_its_batch(name: str, bad: float, monkeypatch: pytest.MonkeyPatch) -> None:
    model = perceptron()
    estimator = {
        "recompute": Agent(),
        "replay": Agent(mode="replay"),
        "batch_fraction": Agent(batch_fraction=0.5),
        "pays": Agent(when="pays", probe=6),
    }[name]
    correction = estimator.attach(model)
    batches = make_batches(6)
    correction.refresh(batches, cross_entropy)
    with torch.no_grad():
        model.last.weight.mul_(1.1)
    number = 5
    if name == "batch_fraction":
        monkeypatch.setattr(full_pass, "choose_batches", lambda *_: {1, 3, 4})
        number = 4  # of the loader's batches, not of the three
    batches[number] = (torch.full_like(batches[number][0], bad), batches[number][1])
    with pytest.raises(NonFiniteLoss, match=f"nan at batch {number + 1} of"):
        correction.refresh(batches, cross_entropy)
    assert not correction.enabled


@pytest.mark.parametrize("estimator", [MVR(), SAGA()], ids=["MVR", "SAGA"])
def test_a_gradient_that_overflowed_is_not_remembered(estimator: MVR | SAGA) -> None:
    """A GradScaler can cause an overflow; it then skips the step."""
    model, batches = perceptron(), make_batches(3)
    correction = estimator.attach(model)
    finite = []
    for epoch in range(4):
        correction.refresh(batches, cross_entropy)
        for i, batch in enumerate(batches):
            overflows = (epoch, i) in ((0, 0), (2, 1))
            correction.backward(cross_entropy, *batch, scale=1e308 * 1e10 if overflows else 2.0, index=i)
            finite.append(all(bool(p.grad.isfinite().all()) for p in model.parameters() if p.grad is not None))
            model.zero_grad()
    assert [i for i, sound in enumerate(finite) if not sound] == [0, 7]


def test_mvr_takes_no_micro_batches() -> None:
    """A micro-batch would replace the estimate within the step."""
    model, batches = perceptron(), make_batches(2)
    correction = MVR().attach(model)
    correction.refresh(batches, cross_entropy)
    with pytest.raises(UserError, match=r"scale=0.5: MVR needs the whole batch of a step at once"):
        correction.backward(cross_entropy, *batches[0], scale=0.5)
    assert all(p.grad is None for p in model.parameters())


def test_wrong_use_is_an_error() -> None:
    model, batches = perceptron(), make_batches(4)
    replay = SVRG(mode="replay").attach(model)
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
        SVRG(batch_fraction=0.5).attach(model).refresh((b for b in batches), cross_entropy)
    with pytest.raises(UserError, match="total_steps"):
        AlphaSVRG().attach(model)
    with pytest.raises(UserError, match="no batches"):
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
